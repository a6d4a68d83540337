"""Which call of one run is which of the other: by names, and by the best-scoring pairs."""
