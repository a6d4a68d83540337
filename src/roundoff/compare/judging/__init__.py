"""Which of two paired values are wrong, where the error was made, and what it looks like."""
