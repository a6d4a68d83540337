"""Two tensors side by side: every metric of them, and the structure of their difference."""
