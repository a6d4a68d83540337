"""Two programs by their values alone: which values agree, and the regions where they do not."""
