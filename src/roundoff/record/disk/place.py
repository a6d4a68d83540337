"""Is there anything at the place of a run? Asked before what reads one is imported."""

from __future__ import annotations

import os
from pathlib import Path

from roundoff.errors import RunError
from roundoff.files import is_url, local_path


def check_place(place: str | os.PathLike[str]) -> None:
    """Raise ``RunError`` where a path is that of no folder; a URL is not looked at."""
    if not is_url(place) and not local_path(place).is_dir():
        raise no_run_at(local_path(place))


def no_run_at(path: Path) -> RunError:
    """Return the error for a place without a run."""
    return RunError(
        "no run here" if path.is_dir() else "no such folder",
        where=str(path),
        expected="a folder with run.json in it",
        do="give the folder that was named when the run was recorded",
    )
