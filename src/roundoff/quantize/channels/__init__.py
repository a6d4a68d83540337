"""Which channels of a network depend on each other, and methods that rescale them."""
