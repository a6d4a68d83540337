def command() -> int:
    """x."""
    return 0
