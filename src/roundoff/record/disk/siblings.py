"""Runs beside a run that repeat it: ``runs/a.noise1`` with noise in its last bits, ``runs/a.repeat1`` unchanged."""

from __future__ import annotations

import os
import re
from pathlib import Path

from roundoff.record.disk.checked import read_about
from roundoff.record.disk.schema import ABOUT

KINDS = ("noise", "repeat")


def sibling(path: str | os.PathLike[str], kind: str, number: int) -> Path:
    """The folder of one of them.

    >>> sibling("runs/a", "noise", 2).as_posix()
    'runs/a.noise2'
    """
    path = _named(path)
    return path.with_name(f"{path.name}.{kind}{number}")


def siblings(path: str | os.PathLike[str]) -> dict[str, list[Path]]:
    """The folders of the runs that repeat the one in ``path``, in the order of their numbers: ``{"noise": [...],
    "repeat": [...]}``.

    A repeat of another run, one that was recorded here before, is left out: a repeat says in ``run.json`` of which run it
    is one (``of``). A folder that is no run is left out too. Raises ``RunError`` for a ``run.json`` that cannot be read.
    """
    found: dict[str, list[Path]] = {kind: [] for kind in KINDS}
    path = _named(path)
    if not (path / ABOUT).is_file() or (main := read_about(path).get("id")) is None:
        return found
    name = re.compile(rf"{re.escape(path.name)}\.({'|'.join(KINDS)})([0-9]+)")
    beside = [
        (int(m[2]), m[1], p)
        for p in path.parent.iterdir()
        if (m := name.fullmatch(p.name))
    ]
    for _, kind, folder in sorted(beside):
        if (folder / ABOUT).is_file() and read_about(folder).get("of") == main:
            found[kind].append(folder)
    return found


def _named(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path if path.name not in ("", "..") else path.resolve()
