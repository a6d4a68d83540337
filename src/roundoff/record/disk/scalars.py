"""Numbers of a run beside its tensors: lines of text, appended, each with a checksum.

A line is ``[step, name, value]`` in JSON (``value`` as text, which is exact and has NaN
and infinities), a tab and the xxh3_64 of that in hex. A last line without its end is
what a killed process was writing, and is left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import polars as pl
import torch
import xxhash

from roundoff.foreign import regular
from roundoff.record.disk.checked_reading import damaged
from roundoff.record.disk.schema import SCALARS


def append(path: Path, step: int, name: str, value: float | torch.Tensor) -> None:
    """Add one number. Raises ``OSError``."""
    append_all(path, [(step, name, float(value))])


def append_all(path: Path, rows: Iterable[tuple[int, str, float]]) -> None:
    """Add numbers, each with its step and name. Raises ``OSError``."""
    lines = []
    for step, name, value in rows:
        text = json.dumps([int(step), str(name), repr(float(value))])
        lines.append(f"{text}\t{_check(text.encode())}\n")
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write("".join(lines))


def repair(path: Path) -> None:
    """Cut off the line that a killed process was writing."""
    if path.exists():
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            path.write_bytes(whole)


def read(path: Path) -> pl.DataFrame:
    """Return columns as SCALARS. Raises ``RunError`` naming a damaged file."""
    rows = []
    for number, line in enumerate(regular(path).read_bytes().split(b"\n")[:-1], 1):
        text, _, check = line.rpartition(b"\t")
        if check != _check(text).encode():
            raise damaged(path, f"line {number} has other bytes than were written")
        step, name, value = json.loads(text)
        rows.append((step, name, float(value)))
    return pl.DataFrame(rows, schema=SCALARS, orient="row")


def _check(text: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(text)
