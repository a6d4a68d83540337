"""The rules, a theme a file; ``table.py`` lists them."""
