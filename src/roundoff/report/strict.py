"""Strict JSON of records: RFC 8259 has no NaN and no Infinity.

The one encoder of the product: ``summary.json``, ``--json`` and every other JSON text
for a reader come through ``plain`` and ``strict``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from roundoff.files import atomic_path

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = TypeVar("Record")

#: Key under which the places of numbers that are not finite are listed.
NOTE = "not_finite"


def plain(value: Any) -> Any:
    """Return a value as dicts, lists, texts, numbers, booleans and None.

    A dataclass becomes a dict of its fields in their order. In a field's metadata
    ``"json"`` names its key, ``"inline"`` puts the fields of its record into this
    dict, and ``"omit"`` leaves it out: ``"always"``, or while it is ``"empty"``.
    Enumeration members become their values, paths their
    text, tuples lists, keys texts. Anything else comes back as it is, so that
    ``json.dumps`` refuses what is not data.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Round:
    ...     number: int
    ...     files: tuple[Path, ...]
    >>> plain({"rounds": [Round(1, (Path("plan.toml"),))]})
    {'rounds': [{'number': 1, 'files': ['plan.toml']}]}
    """
    if is_dataclass(value) and not isinstance(value, type):
        return _plain_fields(value)
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, PathLike):
        return fspath(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def _plain_fields(record: DataclassInstance) -> dict[str, Any]:
    data: dict[str, Any] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        omit = field.metadata.get("omit")
        if omit == "always" or (omit == "empty" and not value):
            continue
        if field.metadata.get("inline"):
            data.update(plain(value))
        else:
            data[field.metadata.get("json", field.name)] = plain(value)
    return data


def from_plain(kind: type[Record], data: Any) -> Record:
    """Return the record that ``plain`` made ``data`` of: its inverse.

    ``kind`` is a dataclass whose fields are plain values, other records, tuples of
    records or mappings. Keys that are no field are left out.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Round:
    ...     number: int
    ...     files: tuple[str, ...] = ()
    >>> from_plain(Round, {"number": 1, "files": ["plan.toml"], "not_finite": {}})
    Round(number=1, files=('plan.toml',))
    """
    hints = get_type_hints(kind)
    values = {}
    for item in fields(kind):  # type: ignore[arg-type]
        key = item.metadata.get("json", item.name)
        if item.metadata.get("inline"):
            values[item.name] = from_plain(hints[item.name], data)
        elif key in data:
            values[item.name] = _value_of(hints[item.name], data[key])
    return kind(**values)


def _value_of(hint: Any, value: Any) -> Any:
    """Return the value of a field with this type."""
    if is_dataclass(hint) and isinstance(hint, type):
        return from_plain(hint, value)
    if get_origin(hint) is tuple:
        return tuple(_value_of(get_args(hint)[0], item) for item in value)
    return value


def strict(data: Any) -> Any:
    """Return plain data in which each number that is not finite is None.

    Where there are such numbers, the key ``not_finite`` maps the place of each to what
    it was: ``inf``, ``-inf`` or ``nan``; it is added where ``data`` becomes a dict.
    Order of keys is kept. Finite data comes back equal, records as dicts (see
    ``plain``).

    >>> strict({"rounds": [{"measured_db": float("inf")}], "met": True})
    {'rounds': [{'measured_db': None}], 'met': True, 'not_finite': {'rounds[0].measured_db': 'inf'}}
    """
    not_finite: dict[str, str] = {}
    copy = _finite(plain(data), "", not_finite)
    if not_finite and isinstance(copy, dict):
        return {**copy, NOTE: not_finite}
    return copy


def _finite(value: Any, place: str, not_finite: dict[str, str]) -> Any:
    """Return a copy of plain data; what is not finite goes into ``not_finite``."""
    if isinstance(value, float) and not math.isfinite(value):
        not_finite[place] = str(float(value))
        return None
    if isinstance(value, dict):
        return {
            key: _finite(item, f"{place}.{key}" if place else key, not_finite)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [
            _finite(item, f"{place}[{index}]", not_finite)
            for index, item in enumerate(value)
        ]
    return value


def json_text(data: Any, *, indent: int | None = 1) -> str:
    """Return a record or plain data as strict JSON in ASCII, without a last newline.

    ``indent=None`` puts everything on one line. Raises ``TypeError`` for values that
    are not data.

    >>> json_text({"measured_db": float("nan")}, indent=None)
    '{"measured_db": null, "not_finite": {"measured_db": "nan"}}'
    """
    return json.dumps(strict(data), indent=indent, allow_nan=False)


def write_json(summary: Any, path: str | Path) -> None:
    """Write a record or plain data as strict JSON, whole or not at all.

    Keys stay in their order; numbers that are not finite become null and are listed
    under ``not_finite`` (see ``strict``). Raises ``OutputError`` when the file cannot
    be written, and ``TypeError`` for values that are not data.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_json({"version": "0.1.0", "samples": 8}, Path(folder) / "summary.json")
    ...     json.loads((Path(folder) / "summary.json").read_text())
    {'version': '0.1.0', 'samples': 8}
    """
    text = json_text(summary)
    with atomic_path(path) as temporary:
        temporary.write_text(text + "\n", encoding="utf-8")
