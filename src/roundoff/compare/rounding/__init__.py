"""How far two values are apart, and how far rounding alone, or an honest repeat, lets them be."""
