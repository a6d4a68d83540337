"""load: a folder becomes a Run, whichever tool has written it."""

from __future__ import annotations

import os
from pathlib import Path

from roundoff.errors import RunError
from roundoff.store.checked import find_steps, read_about
from roundoff.store.msprobe import find_dumps, read_msprobe
from roundoff.store.reader import Run
from roundoff.store.schema import ABOUT


def load(path: str | os.PathLike[str]) -> Run:
    """The run in the folder ``path``, also one that is still being written or whose process was killed; or in a dump of
    msprobe, see :mod:`roundoff.store.msprobe`.

    Raises ``RunError`` when it is not a run, is of a later version of roundoff, or recorded nothing.
    """
    path = Path(path)
    if not (path / ABOUT).is_file() and find_dumps(path):
        return read_msprobe(path)
    run = Run(path, read_about(path), find_steps(path))
    if not run.ranks:
        raise RunError(
            "the run is empty: it ended, or was killed, before its first step was finished",
            where=str(path),
            do="let the recorded program finish at least one step",
        )
    return run
