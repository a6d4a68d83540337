"""``python -m roundoff`` and the ``roundoff`` command."""

from roundoff.cli.app import main

if __name__ == "__main__":
    raise SystemExit(main())
