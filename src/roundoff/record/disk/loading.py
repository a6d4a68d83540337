"""``load``: a folder or a URL becomes a Run, whichever tool has written it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from roundoff.errors import RunError
from roundoff.files import is_url, local_path
from roundoff.record.disk.checked_reading import find_steps
from roundoff.record.disk.description import read_description
from roundoff.record.disk.reader import Run
from roundoff.record.disk.schema import ABOUT
from roundoff.record.dumps.msprobe import find_dumps, read_msprobe


def load(path: str | os.PathLike[str]) -> Run:
    """Load the run in the folder ``path``.

    It may still be written, or its process may have been killed; or it is a dump of
    msprobe, see :mod:`roundoff.record.dumps.msprobe`. A URL that fsspec knows is a
    folder too, ``s3://bucket/run``: what is small is copied here now, a file of tensors
    when one of them is asked for. ``file://`` is read where it is.

    Raises ``RunError`` when it is not a run, is of a later version of roundoff, or
    recorded nothing, and naming the URL when it cannot be read.
    """
    if not is_url(path):
        return _open(local_path(path), Run, None)
    from roundoff.record.disk.remote import Mirror, MirroredDump, MirroredRun

    mirror = Mirror(os.fspath(path))
    with mirror.naming_url():
        return _open(
            mirror.folder, partial(MirroredRun, mirror), partial(MirroredDump, mirror)
        )


def _open(
    path: Path, make_run: Callable[..., Run], make_dump: Callable[..., Run] | None
) -> Run:
    if not (path / ABOUT).is_file() and find_dumps(path):
        return read_msprobe(path, make_dump)
    run = make_run(path, read_description(path), find_steps(path))
    if not run.ranks:
        raise RunError(
            "the run is empty: it ended, or was killed, before its first step was "
            "finished",
            where=str(path),
            do="let the recorded program finish at least one step",
        )
    return run


def as_run(run: Run | str | os.PathLike[str]) -> Run:
    """Return the run itself, or the one that ``load`` finds at a path or URL."""
    return run if isinstance(run, Run) else load(run)
