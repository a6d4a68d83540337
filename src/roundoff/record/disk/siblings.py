"""Runs beside a run that repeat it: ``runs/a.noise1`` with noise in its last bits,
``runs/a.repeat1`` unchanged."""

from __future__ import annotations

import os
import re
from pathlib import Path

from roundoff.record.disk.description import read_description
from roundoff.record.disk.schema import ABOUT

KINDS = ("noise", "repeat")


def sibling(path: str | os.PathLike[str], kind: str, number: int) -> Path:
    """Return the folder of one repeat.

    >>> sibling("runs/a", "noise", 2).as_posix()
    'runs/a.noise2'
    """
    path = _with_name(path)
    return path.with_name(f"{path.name}.{kind}{number}")


def siblings(path: str | os.PathLike[str]) -> dict[str, list[Path]]:
    """Return the folders of the runs that repeat the one in ``path``, rising by number.

    The keys are ``noise`` and ``repeat``. A repeat says in ``run.json`` which run it is
    of (``of``): one of another run, recorded here before, is left out, and so is a
    folder that is no run. Raises ``RunError`` for a ``run.json`` that cannot be read.
    """
    folders: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    path = _with_name(path)
    identity = read_description(path).id if (path / ABOUT).is_file() else None
    if identity is None:
        return folders
    name = re.compile(rf"{re.escape(path.name)}\.({'|'.join(KINDS)})([0-9]+)")
    numbered = []
    for folder in path.parent.iterdir():
        match = name.fullmatch(folder.name)
        if match:
            numbered.append((int(match[2]), match[1], folder))
    for _, kind, folder in sorted(numbered):
        if (folder / ABOUT).is_file() and read_description(folder).of == identity:
            folders[kind].append(folder)
    return folders


def _with_name(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path if path.name not in ("", "..") else path.resolve()
