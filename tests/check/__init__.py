"""Pairs of scripts that differ in one setting, and what is said of them."""
