"""Seconds per multiply-accumulate or per element, by operator, format and size, as a file.

A table is data, so that the speed of a device that isn't at hand can be given. Times
are of kernels alone: casts and quantization between neighbours in different formats
aren't in them.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roundoff.errors import PlanError
from roundoff.files import atomic_path
from roundoff.foreign import parse_json, parse_toml, read_text
from roundoff.formats import parse_format

__all__ = ["KINDS", "SecondsRow", "SecondsTable", "read_seconds"]

# Kind of work -> the kind that is measured in its place, and what its seconds are
# divided by.
KINDS: Mapping[str, tuple[str, str]] = {
    "linear": ("linear", "mac"),
    "matmul": ("matmul", "mac"),
    "conv": ("conv", "mac"),
    "attention": ("matmul", "mac"),
    "rnn": ("linear", "mac"),
    "embedding": ("elementwise", "element"),
    "elementwise": ("elementwise", "element"),
    "normalization": ("elementwise", "element"),
    "reduction": ("elementwise", "element"),
    "softmax": ("elementwise", "element"),
}
# Smallest amount (multiply-accumulates, elements) of a medium and of a large call.
BOUNDS: Mapping[str, tuple[float, float]] = {"mac": (4e6, 1e8), "element": (3e4, 1e6)}
SIZES = ("small", "medium", "large")


@dataclass(frozen=True)
class SecondsRow:
    """Seconds per multiply-accumulate (matrix kinds) or per element (others) of one case."""

    kind: str
    format: str
    size: str
    seconds: float
    note: str = ""


class SecondsTable:
    """Rows by kind, format and size ("small", "medium", "large", or "any" where the
    size makes no difference).

    Raises:
        PlanError: unknown kind or size, seconds that are not finite and positive, or
            two rows for one case.
        FormatError: unknown format.

    Example:
        >>> table = SecondsTable([SecondsRow("linear", "bf16", "any", 1e-10)])
        >>> table.seconds("rnn", "bf16", 1e6)  # without a row of its own, costed as linear
        0.0001
    """

    def __init__(
        self, rows: Iterable[SecondsRow], *, where: str = "table of seconds"
    ) -> None:
        self.rows = tuple(rows)
        self._seconds: dict[tuple[str, str, str], float] = {}
        for number, row in enumerate(self.rows, start=1):
            place = f"{where}, row {number}"
            _check(row, place)
            key = row.kind, parse_format(row.format).name, row.size
            if key in self._seconds:
                raise PlanError(
                    "a second row for the same case", where=place, got=", ".join(key)
                )
            self._seconds[key] = row.seconds

    def seconds(self, kind: str, fmt: str, amount: float) -> float:
        """Seconds of one call with ``amount`` multiply-accumulates (matrix kinds) or
        elements (the others).

        The row of the kind itself counts before that of the measured kind standing for
        it, its own size before "any".

        Raises:
            PlanError: the table has no row for it.
        """
        stand_in, unit = KINDS[kind]
        medium, large = BOUNDS[unit]
        size = "large"
        if amount < large:
            size = "small" if amount < medium else "medium"
        for key in itertools.product((kind, stand_in), (fmt,), (size, "any")):
            if key in self._seconds:
                return self._seconds[key] * amount
        have = sorted({f"{k} {s}" for k, f, s in self._seconds if f == fmt})
        kinds = " or ".join(map(repr, dict.fromkeys((kind, stand_in))))
        raise PlanError(
            "the table of seconds has no row for a call",
            where=f"{kind} in {fmt}",
            expected=f"kind {kinds}, size {size!r} or 'any'",
            got=f"for {fmt}: {', '.join(have) or 'no row'}",
            do="add the row, or measure the table anew",
        )

    def write(self, path: str | Path) -> None:
        """Write as TOML, in place of what was there. OutputError if the file can't be written."""
        lines = [
            "# Seconds per multiply-accumulate (linear, matmul, conv) or per element (elementwise)."
        ]
        for row in self.rows:
            lines += ["", "[[seconds]]"]
            # A JSON string is a TOML basic string (TOML 1.0, "String") once non-ASCII
            # is escaped, which json does.
            for field in ("kind", "format", "size", "note"):
                lines.append(f"{field} = {json.dumps(getattr(row, field))}")
            lines.append(f"seconds = {row.seconds!r}")
        with atomic_path(path) as temporary:
            temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _check(row: SecondsRow, where: str) -> None:
    if row.kind not in KINDS:
        raise PlanError(
            "unknown kind", where=where, expected=", ".join(KINDS), got=repr(row.kind)
        )
    sizes = (*SIZES, "any")
    if row.size not in sizes:
        raise PlanError(
            "unknown size", where=where, expected=", ".join(sizes), got=repr(row.size)
        )
    if not (math.isfinite(row.seconds) and row.seconds > 0.0):
        raise PlanError(
            "bad seconds",
            where=where,
            expected="a finite number above 0",
            got=str(row.seconds),
        )


def read_seconds(path: str | Path) -> SecondsTable:
    """Read a table from a TOML or JSON file (an array ``seconds`` of tables) or a CSV
    file with a header.

    Fields of a row: kind, format, size, seconds, and note if wanted.

    Raises:
        PlanError: the file can't be read or parsed, has another ending, no rows, or a
            row that is no row.
        FormatError: unknown format.
    """
    path = Path(path)
    readers: dict[str, Callable[[str], Any]] = {
        ".toml": lambda text: parse_toml(text).get("seconds"),
        ".json": lambda text: parse_json(text).get("seconds"),
        ".csv": lambda text: list(csv.DictReader(text.splitlines(), restkey="more")),
    }
    if path.suffix not in readers:
        raise PlanError(
            "unknown ending of a table of seconds",
            where=str(path),
            expected=", ".join(readers),
        )
    try:
        records = readers[path.suffix](read_text(path))
    except (OSError, ValueError, AttributeError) as error:
        # ValueError: not UTF-8, TOML or JSON; AttributeError: a list
        raise PlanError(
            "cannot read the table of seconds", where=str(path), got=str(error)
        ) from error
    if not isinstance(records, list) or not records:
        raise PlanError(
            "no rows in the table of seconds",
            where=str(path),
            expected="an array named seconds",
        )
    return SecondsTable(
        (_row(r, f"{path}, row {n}") for n, r in enumerate(records, start=1)),
        where=str(path),
    )


def _row(record: object, where: str) -> SecondsRow:
    fields = {"kind", "format", "size", "seconds"}
    if not isinstance(record, dict) or not fields <= set(record) <= fields | {"note"}:
        got = ", ".join(map(str, record)) if isinstance(record, dict) else repr(record)
        raise PlanError(
            "bad row",
            where=where,
            expected="kind, format, size, seconds and at most note",
            got=got,
        )
    try:
        seconds = float(record["seconds"])
    except (TypeError, ValueError) as error:
        raise PlanError(
            "bad seconds", where=where, expected="a number", got=repr(record["seconds"])
        ) from error
    kind, fmt, size, note = (
        str(record.get(field) or "") for field in ("kind", "format", "size", "note")
    )
    return SecondsRow(kind, fmt, size, seconds, note)
