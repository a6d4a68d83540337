"""Which term of a formula has a wrong factor, where the formula's value is known?

A derivative by hand loses a factor of two, or three, in one of its terms. The value that
is wrong is followed back through sums, products and quotients: of each operand it is known
what it should be, if the others are right. Where a sum is right with one of its two terms
so many times as large, this term is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.compare.values.traced_calls import TracedCall, TracedProgram
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.ops import operators_that

#: How much may be left of what a value is off: what it should be is a difference of values
#: that are rounded.
FITS = 1e-3
#: Fewer elements are a sum of any two others.
FEWEST = 8
#: Calls that a value is followed back.
MOST_CALLS = 24
#: Quotients by less than this share of the largest divisor say nothing.
SMALL = 1e-3
_SUMS = operators_that("add or subtract") & operators_that("pair elements")
_PAIRED = _SUMS | {"mul", "div"}
_NEGATIVE = "neg"
#: They hand on some elements: where a condition is true, or what a ReLU was given is positive.
_MASKS = frozenset({"where", "threshold_backward"})
#: They give the same elements, one after the other.
_SAME = operators_that("reshape") | {"alias", "detach", "clone"}


@dataclass(frozen=True, slots=True, eq=False)
class ScaledTerm:
    """A value that should be ``factor`` times as large."""

    value: Value
    factor: float


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """What a value should be, where that is known."""

    value: Value
    wanted: Tensor
    places: Tensor


def scaled_term(
    program: TracedProgram,
    value: Value,
    wanted: Tensor,
    is_followed: Callable[[Value], bool],
    is_named: Callable[[Value], bool],
) -> ScaledTerm | None:
    """Return the term with a wrong factor that a value is made of; None where none is.

    Args:
        program: that the value is recorded in.
        value: which is wrong.
        wanted: what it should be, of its shape.
        is_followed: says which values may be wrong.
        is_named: says which of them may be the term.
    """
    if not wanted.is_floating_point() or wanted.numel() < FEWEST:
        return None
    flow = program.flow
    calls = {row.record: call for call in _calls(program) for row in call.rows}
    waiting = [
        _Known(value, wanted.double(), torch.ones_like(wanted, dtype=torch.bool))
    ]
    for _ in range(MOST_CALLS):
        if not waiting:
            return None
        known = waiting.pop(0)
        call = calls.get(known.value.key)
        if call is None or not is_followed(known.value):
            continue
        operands = _operands(flow, call)
        if operands is None:
            continue
        found = _scaled(flow, known) or _wrong_term(known, operands)
        if found is not None and is_named(found.value):
            return found
        waiting += _behind(known, operands)
    return None


def _calls(program: TracedProgram) -> Iterator[TracedCall]:
    return (entry for entry in program.order if isinstance(entry, TracedCall))


@dataclass(frozen=True, slots=True, eq=False)
class _Operands:
    """What a call computes with, in fp64: tensors of values, and numbers.

    ``signs``: of the terms of a sum.
    """

    operator: str
    values: tuple[Value | None, ...]
    tensors: tuple[Tensor, ...]
    signs: tuple[float, ...]


def _operands(flow: Flow, call: TracedCall) -> _Operands | None:
    """Return the operands of a sum, a product, a quotient or a move; None for others."""
    operator = call.first.base_operator.rstrip("_")
    if operator not in _PAIRED | _SAME | _MASKS and operator != _NEGATIVE:
        return None
    positional, named = call.parsed
    if operator == "where" and len(positional) > 2:
        # what is chosen first, and the condition
        positional = [positional[1], positional[0]]
    values: list[Value | None] = []
    tensors: list[Tensor] = []
    for argument in positional[: 2 if operator in _PAIRED | _MASKS else 1]:
        if isinstance(argument, dict) and "record" in argument:
            source = flow.values.get(argument["record"])
            tensor = None if source is None else flow.tensor(source.key)
            is_mask = operator in _MASKS and bool(tensors)
            if tensor is None or not (tensor.is_floating_point() or is_mask):
                return None
            values.append(source)
            tensors.append(tensor.double())
        elif type(argument) in (int, float):
            values.append(None)
            tensors.append(torch.tensor(float(argument), dtype=torch.float64))
        else:
            return None
    alpha = named.get("alpha", positional[2] if len(positional) > 2 else 1)
    if type(alpha) not in (int, float) or not tensors:
        return None
    signs = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}
    return _Operands(
        operator, tuple(values), tuple(tensors), signs.get(operator, (1.0, 1.0))
    )


def _scaled(flow: Flow, known: _Known) -> ScaledTerm | None:
    """Return a value that is right with another factor."""
    present = flow.tensor(known.value.key)
    if present is None or present.shape != known.wanted.shape:
        return None
    values = present.double()[known.places]
    wanted = known.wanted[known.places]
    if wanted.numel() < FEWEST or not values.any():
        return None
    factor = float(values @ wanted) / float(values @ values)
    rest = float((factor * values - wanted).norm())
    is_scaled = rest <= FITS * float((values - wanted).norm())
    return ScaledTerm(known.value, factor) if is_scaled else None


def _wrong_term(known: _Known, operands: _Operands) -> ScaledTerm | None:
    """Return the term of a sum of two that has a wrong factor, if all is right with another."""
    if operands.operator not in _SUMS or len(operands.tensors) != 2:
        return None
    shape = known.wanted.shape
    columns = [
        (sign * tensor).expand(shape)[known.places]
        for sign, tensor in zip(operands.signs, operands.tensors, strict=True)
    ]
    wanted = known.wanted[known.places]
    if wanted.numel() < FEWEST:
        return None
    terms = torch.stack(columns, dim=1)
    if not bool(torch.isfinite(terms).all() and torch.isfinite(wanted).all()):
        return None
    factors = torch.linalg.lstsq(terms, wanted[:, None]).solution[:, 0]
    rest = float((terms @ factors - wanted).norm())
    if not rest <= FITS * float((terms.sum(dim=1) - wanted).norm()):
        return None
    wrong = [i for i, factor in enumerate(factors.tolist()) if abs(factor - 1) > FITS]
    if len(wrong) != 1 or operands.values[wrong[0]] is None:
        return None
    value = operands.values[wrong[0]]
    return None if value is None else ScaledTerm(value, float(factors[wrong[0]]))


def _behind(known: _Known, operands: _Operands) -> Iterator[_Known]:
    """Yield what each operand should be, if the other one is right."""
    shape = known.wanted.shape
    for place, value in enumerate(operands.values):
        if value is None:
            continue
        tensor = operands.tensors[place]
        wanted, places = known.wanted, known.places
        if operands.operator in _SAME:
            if tensor.numel() != wanted.numel():
                continue
            wanted, places = wanted.reshape(tensor.shape), places.reshape(tensor.shape)
        elif operands.operator == _NEGATIVE:
            wanted = -wanted
        elif operands.operator in _MASKS:
            if place or tensor.shape != shape:
                continue
            places = places & (operands.tensors[1].expand(shape) > 0)
        elif len(operands.tensors) == 2:
            if tensor.shape != shape:
                continue
            other = operands.tensors[1 - place].expand(shape)
            if operands.operator in _SUMS:
                sign, other_sign = operands.signs[place], operands.signs[1 - place]
                wanted = (wanted - other_sign * other) / sign
            elif operands.operator == "mul":
                places = places & (other.abs() > SMALL * other.abs().max())
                wanted = wanted / other
            elif place == 0:
                wanted = wanted * other
            else:
                places = places & (wanted.abs() > SMALL * wanted[places].abs().max())
                wanted = other / wanted
        if int(places.sum()) >= FEWEST and bool(torch.isfinite(wanted[places]).all()):
            yield _Known(value, wanted, places)
