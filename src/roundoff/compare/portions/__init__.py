"""One computation in other portions: several processes, a cache, chunks, micro-batches.

A value of the candidate is then a piece of the reference's. ``location`` finds where a
piece stands in a whole; ``pieces`` does so for all values of a step; ``blame`` names
what is wrong where a piece stands nowhere, and ``comparison`` makes rows of it.
"""
