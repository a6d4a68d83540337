"""The recorded arguments of two calls: which constants differ, whose tensors to take."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import torch

from roundoff.compare.recorded_rows import RecordedRow
from roundoff.errors import RunError
from roundoff.ops import overload_of

_RECORDS = re.compile(r'\{"record":(\d+)\}')
#: Arguments that do not change the numbers of a call.
_PLACES = frozenset(("dtype", "device", "layout", "memory_format", "slice"))
#: Formats whose ends additive masks are filled with.
_MASKED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LARGEST = [torch.finfo(dtype).max for dtype in _MASKED]
_LOWEST = [-value for value in _LARGEST]
#: Longer texts of a value are cut.
_LONGEST = 60

Fits = Callable[[int, int], bool]


class _NoConstant:
    """Stands for a tensor, a format, a device: anything that is no constant."""


def argument_differences(
    reference: RecordedRow, candidate: RecordedRow
) -> tuple[str, ...]:
    """Return the constants that differ between two calls: ``eps: 1e-05, here 0.001``.

    Tensors and formats are no constants. The rows are the first of each call.
    """
    if reference.arguments is None or candidate.arguments is None:
        return ()
    if reference.arguments == candidate.arguments:
        return ()
    try:
        ours = _constants(reference)
        theirs = _constants(candidate)
    except (ValueError, RunError):
        return ()
    return tuple(
        f"{name}: {_text(ours.get(name))}, here {_text(theirs.get(name))}"
        for name in dict.fromkeys([*ours, *theirs])
        if not _same_constant(ours.get(name), theirs.get(name))
    )


def _constants(row: RecordedRow) -> dict[str, Any]:
    """Return the constants of a call by name, defaults of the schema included."""
    positional, by_name = json.loads(row.arguments or "")
    schema = overload_of(row.overload or "")._schema.arguments
    names = [argument.name for argument in schema]
    values = {a.name: a.default_value for a in schema if a.has_default_value()}
    values |= dict(zip(names, positional, strict=False)) | by_name
    plain = {name: _constant(value) for name, value in values.items()}
    return {name: value for name, value in plain.items() if value is not _NoConstant}


def _constant(value: Any) -> Any:
    if isinstance(value, dict):
        [kind] = value
        no_constant = kind == "record" or kind in _PLACES
        return _NoConstant if no_constant else value[kind]
    if isinstance(
        value, torch.dtype | torch.device | torch.layout | torch.memory_format
    ):
        return _NoConstant
    if isinstance(value, list | tuple):
        constants = [_constant(entry) for entry in value]
        return _NoConstant if _NoConstant in constants else constants
    return value


def _same_constant(one: Any, other: Any) -> bool:
    """Return True for equal constants, and for the ends of two formats, which fill masks."""
    if one == other:
        return True
    return any(one in ends and other in ends for ends in (_LOWEST, _LARGEST))


def _text(value: Any) -> str:
    text = str(value)
    return text if len(text) < _LONGEST else text[: _LONGEST - 3] + "..."


def with_tensors_of(arguments: str, other: str, fits: Fits) -> str | None:
    """Return the arguments of one call with the tensors of another, in their order.

    None where the calls take different numbers of tensors, or where a record of
    ``other`` does not fit in the place of one of ``arguments``.
    """
    ours = _RECORDS.findall(arguments)
    theirs = _RECORDS.findall(other)
    if len(ours) != len(theirs):
        return None
    if not all(fits(int(a), int(b)) for a, b in zip(ours, theirs, strict=True)):
        return None
    records = iter(theirs)
    return _RECORDS.sub(lambda _: f'{{"record":{next(records)}}}', arguments)
