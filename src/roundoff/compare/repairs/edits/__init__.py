"""Edits of one call of a program that may make it agree with another, by what they change."""
