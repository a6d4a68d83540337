"""What a region between agreeing values is told to have wrong: a parameter, a table, an operand.

Everything here is seen in values that are recorded; ``repairs`` has what a trial must show.
"""
