"""The recorded arguments of two calls: which constants differ, whose tensors to take."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch

from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.errors import RunError
from roundoff.foreign import parse_json
from roundoff.ops import operators_that, overload_of

Shape = Sequence[int]

_RECORDS = re.compile(r'\{"record":(\d+)\}')
#: Kinds of values that do not change the numbers of a call.
_PLACES = frozenset(("dtype", "device", "layout", "memory_format", "slice"))
#: Arguments that choose how a call runs, or which of its results are made.
_HOW = frozenset(
    """
    non_blocking pin_memory half_to_float copy benchmark deterministic cudnn_enabled
    allow_tf32 implicit compute_log_sumexp compute_debug_mask output_mask foreach fused
    """.split()
)
#: Axes, which may be counted from the end.
_AXES = frozenset(("dim", "dims", "axis", "dim0", "dim1", "start_dim", "end_dim"))
#: What None stands for, by the shape of the tensor that is read first: attention's scale
#: (``torch.nn.functional.scaled_dot_product_attention``), the correction of a variance.
_LEFT_OUT: dict[str, Callable[[Shape], float]] = {
    "scale": lambda shape: shape[-1] ** -0.5 if shape[-1] else 1.0,
    "correction": lambda _: 1,
}
#: One number by two expressions: each is rounded a few times in fp64.
_ROUNDED = 4 * torch.finfo(torch.float64).eps
#: Formats whose ends additive masks are filled with.
_MASKED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_LARGEST = [torch.finfo(dtype).max for dtype in _MASKED]
_LOWEST = [-value for value in _LARGEST]
#: Longer texts of a value are cut.
_LONGEST = 60

#: What ``other`` is to operators.
_OPERANDS = (
    ("factor", operators_that("scale elements")),
    ("divisor", operators_that("divide")),
    ("summand", operators_that("add or subtract")),
)

Fits = Callable[[int, int], bool]


class _NoConstant:
    """Stands for a tensor, a format, a device: anything that is no constant."""


class _Tensor(_NoConstant):
    """Stands for a tensor, which the other call may lack."""


def argument_differences(
    reference: RecordedRow,
    candidate: RecordedRow,
    read: tuple[Shape | None, Shape | None] = (None, None),
) -> tuple[str, ...]:
    """Return what differs between two calls: ``eps: 1e-05, here 0.001``.

    That is the constants, and tensors that only one call has. Which tensors they are and
    their formats are no constants. What arithmetic calls its other operand is named by what
    it is to it: a factor, a divisor. The rows are the first of each call.

    Args:
        reference: the reference's.
        candidate: the candidate's.
        read: the shape of the tensor that each reads first: from its end axes may be
            counted, and it says what a constant that was left out is.
    """
    if reference.arguments is None or candidate.arguments is None:
        return ()
    if reference.arguments == candidate.arguments:
        return ()
    try:
        ours = _constants(reference, read[0])
        theirs = _constants(candidate, read[1])
    except (ValueError, RunError):
        return ()
    names = list(dict.fromkeys([*ours, *theirs]))
    if _may_stand_in(ours, theirs):
        names = [name for name in names if name in ours and name in theirs]
    operator = candidate.base_operator
    operand = next((name for name, of in _OPERANDS if operator in of), "other")
    return tuple(
        f"{operand if name == 'other' else name}: "
        f"{_text(ours.get(name))}, here {_text(theirs.get(name))}"
        for name in names
        if _differ(ours.get(name), theirs.get(name))
        if (name in ours and name in theirs) or not _are_tensors(ours, theirs, name)
    )


def results_made(row: RecordedRow) -> list[int] | None:
    """Return which of its results a backward kernel was asked for; None for other calls.

    A recording numbers those that there are: the gradient of a weight is the first where
    none of the input was asked for. The row is the first of the call.
    """
    if row.arguments is None:
        return None
    try:
        positional, by_name = _recorded(row.arguments)
        schema = overload_of(row.overload or "")._schema.arguments
    except (ValueError, RunError):
        return None
    names = [argument.name for argument in schema]
    given = dict(zip(names, positional, strict=False)) | by_name
    mask = given.get("output_mask")
    if not isinstance(mask, list) or not all(isinstance(made, bool) for made in mask):
        return None
    return [place for place, made in enumerate(mask) if made]


def number_for_tensor(one: RecordedRow, other: RecordedRow) -> tuple[float, int] | None:
    """Return the number that one call is given, and the tensor of another in its place.

    None where both have tensors in the same places. The rows are the first of each call.
    """
    if one.arguments is None or other.arguments is None:
        return None
    try:
        numbers, _ = _recorded(one.arguments)
        tensors, _ = _recorded(other.arguments)
    except ValueError:
        return None
    for number, tensor in zip(numbers, tensors, strict=False):
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        if is_number and isinstance(tensor, dict) and "record" in tensor:
            return float(number), int(tensor["record"])
    return None


def numbers_given(row: RecordedRow) -> list[float]:
    """Return the numbers among the arguments of a call, without their names."""
    try:
        positional, _ = _recorded(row.arguments or "")
    except ValueError:
        return []
    return [
        float(value)
        for value in positional
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]


def factor_given(row: RecordedRow) -> float | None:
    """Return the number that a call multiplies its one tensor by; None for other calls.

    -1 for a negative, and the inverse of a divisor; None for a number that is zero or not
    finite.
    """
    if row.base_operator == "neg":
        return -1.0
    numbers = numbers_given(row)
    if len(row.inputs) != 1 or len(numbers) != 1:
        return None
    if not numbers[0] or not math.isfinite(numbers[0]):
        return None
    if row.base_operator == "mul":
        return numbers[0]
    return 1 / numbers[0] if row.base_operator == "div" else None


def _are_tensors(ours: dict[str, Any], theirs: dict[str, Any], name: str) -> bool:
    """Return True for a tensor that another overload calls by another name, as lists do."""
    return _Tensor in (ours.get(name), theirs.get(name))


def _may_stand_in(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Return True where one call is given a number for what the other has as a tensor.

    Their overloads call it by other names; what they make of it says whether it is the same.
    """
    alone = [ours[n] for n in ours.keys() - theirs.keys()]
    others = [theirs[n] for n in theirs.keys() - ours.keys()]
    if len(alone) != 1 or len(others) != 1:
        return False
    [one], [other] = alone, others
    number, tensor = (other, one) if one is _Tensor else (one, other)
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return tensor is _Tensor and is_number


def _constants(row: RecordedRow, read: Shape | None) -> dict[str, Any]:
    """Return the constants of a call by name, defaults of the schema included."""
    positional, by_name = _recorded(row.arguments or "")
    schema = overload_of(row.overload or "")._schema.arguments
    names = [argument.name for argument in schema]
    values = {a.name: a.default_value for a in schema if a.has_default_value()}
    values |= dict(zip(names, positional, strict=False)) | by_name
    constants = {n: _constant(v) for n, v in values.items() if n not in _HOW}
    if not read:
        return constants
    return {name: _in_full(name, v, read) for name, v in constants.items()}


def _in_full(name: str, value: Any, read: Shape) -> Any:
    """Return an axis counted from the first, and what stands for a number left out."""
    if name in _AXES:
        return _from_the_front(value, len(read))
    if value is None and name in _LEFT_OUT:
        return _LEFT_OUT[name](read)
    return value


def _recorded(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments in a recording's text; raise ``ValueError`` for anything else."""
    match parse_json(text):
        case [list(positional), dict(by_name)]:
            return positional, by_name
        case other:
            raise ValueError(f"no arguments of a call: {type(other).__name__}")


def _from_the_front(value: Any, axes: int) -> Any:
    """Return an axis, or a list of them, counted from the first."""
    if isinstance(value, list):
        return [_from_the_front(each, axes) for each in value]
    is_axis = isinstance(value, int) and not isinstance(value, bool)
    return value + axes if is_axis and value < 0 else value


def _constant(value: Any) -> Any:
    if isinstance(value, dict):
        [kind] = value
        if kind == "record":
            return _Tensor
        return _NoConstant if kind in _PLACES else value[kind]
    if isinstance(
        value, torch.dtype | torch.device | torch.layout | torch.memory_format
    ):
        return _NoConstant
    if isinstance(value, list | tuple):
        constants = [_constant(entry) for entry in value]
        has_others = _NoConstant in constants or _Tensor in constants
        return _NoConstant if has_others else constants
    return value


def _differ(one: Any, other: Any) -> bool:
    """Return True for constants that differ, and for a tensor that only one call has."""
    if one is _Tensor or other is _Tensor:
        return one is None or other is None
    if one is _NoConstant or other is _NoConstant:
        return False
    return not _same_constant(one, other)


def _same_constant(one: Any, other: Any) -> bool:
    """Return True for equal constants, and for the ends of two formats, which fill masks."""
    if one == other:
        return True
    are_numbers = isinstance(one, float) and isinstance(other, float)
    if are_numbers and math.isclose(one, other, rel_tol=_ROUNDED):
        return True
    return any(one in ends and other in ends for ends in (_LOWEST, _LARGEST))


def _text(value: Any) -> str:
    text = "a tensor" if value is _Tensor else str(value)
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
