"""Strict JSON: RFC 8259 has no NaN and no Infinity."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from roundoff.files import atomic_path

NOTE = "not_finite"


def strict(data: dict[str, Any]) -> dict[str, Any]:
    """A copy of plain data in which each number that is not finite is None.

    Where there are such numbers, the key ``not_finite`` maps the place of each to what it was: ``inf``, ``-inf``
    or ``nan``. Order of keys is kept; tuples become lists. Finite data comes back equal.

    >>> strict({"rounds": [{"measured_db": float("inf")}], "met": True})
    {'rounds': [{'measured_db': None}], 'met': True, 'not_finite': {'rounds[0].measured_db': 'inf'}}
    """
    found: dict[str, str] = {}

    def walk(value: Any, place: str) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            found[place] = str(float(value))
            return None
        if isinstance(value, dict):
            return {
                str(k): walk(v, f"{place}.{k}" if place else str(k))
                for k, v in value.items()
            }
        if isinstance(value, list | tuple):
            return [walk(v, f"{place}[{i}]") for i, v in enumerate(value)]
        return value

    copy: dict[str, Any] = walk(data, "")
    return {**copy, NOTE: found} if found else copy


def write_json(summary: dict[str, Any], path: str | Path) -> None:
    """Write a summary as strict JSON in ASCII, keys in the summary's own order, whole or not at all.

    Numbers that are not finite become null and are listed under ``not_finite`` (see ``strict``). Raises
    ``OutputError`` when the file cannot be written, and ``TypeError`` for values that are not plain data.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_json({"version": "0.1.0", "samples": 8}, Path(folder) / "summary.json")
    ...     json.loads((Path(folder) / "summary.json").read_text())
    {'version': '0.1.0', 'samples': 8}
    """
    text = json.dumps(strict(summary), indent=1, allow_nan=False)
    with atomic_path(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
