"""Which term of a formula has a wrong factor, where the formula's value is known?

A derivative by hand loses a factor of two, or three, in one of its terms. The value that
is wrong is followed back through sums, products and quotients: of each operand it is known
what it should be, if the others are right. Where a sum is right with one of its two terms
so many times as large, this term is named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """What a value should be, in the places where that is known."""

    value: Value
    wanted: Tensor
    places: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class _Operands:
    """What a call computes with, in fp64: tensors of values, and numbers.

    ``signs``: of the terms of a sum.
    """

    operator: str
    values: tuple[Value | None, ...]
    tensors: tuple[Tensor, ...]
    signs: tuple[float, ...]


def lacking_factor(
    program: TracedProgram,
    value: Value,
    wanted: Tensor,
    may_be_named: Callable[[Value], bool],
) -> ScaledTerm | None:
    """Return the term with a wrong factor that a value is made of; None where none is.

    Args:
        program: the calls that the value is followed back through.
        value: which is wrong.
        wanted: what it should be, of its shape.
        may_be_named: says which values may be the term.
    """
    if not wanted.is_floating_point() or wanted.numel() < FEWEST:
        return None
    everywhere = torch.ones_like(wanted, dtype=torch.bool)
    waiting = [_Known(value, wanted.double(), everywhere)]
    for _ in range(MOST_CALLS):
        if not waiting:
            return None
        known = waiting.pop(0)
        call = program.calls.get(known.value.row.call)
        operands = None if call is None else _operands(program.flow, call)
        if operands is None:
            continue
        found = _scaled(program.flow, known) or _wrong_term(known, operands)
        if found is not None and may_be_named(found.value):
            return found
        waiting += _behind(known, operands)
    return None


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


# -- which term ------------------------------------------------------------------------


def _scaled(flow: Flow, known: _Known) -> ScaledTerm | None:
    """Return a value that is right with another factor."""
    present = flow.tensor(known.value.key)
    if present is None or present.shape != known.wanted.shape:
        return None
    factors = _factors([present.double()], known)
    return None if factors is None else ScaledTerm(known.value, factors[0])


def _wrong_term(known: _Known, operands: _Operands) -> ScaledTerm | None:
    """Return the term of a sum of two that has a wrong factor, if all is right with another."""
    if operands.operator not in _SUMS or len(operands.tensors) != 2:
        return None
    pairs = zip(operands.signs, operands.tensors, strict=True)
    factors = _factors([sign * tensor for sign, tensor in pairs], known)
    if factors is None:
        return None
    wrong = [i for i, factor in enumerate(factors) if abs(factor - 1) > FITS]
    value = operands.values[wrong[0]] if len(wrong) == 1 else None
    return None if value is None else ScaledTerm(value, factors[wrong[0]])


def _factors(terms: Sequence[Tensor], known: _Known) -> list[float] | None:
    """Return with which factors the sum of terms is what it should be; None with none.

    They have to take away nearly all that the sum is off.
    """
    wanted = known.wanted[known.places]
    columns = [term.expand(known.wanted.shape)[known.places] for term in terms]
    matrix = torch.stack(columns, dim=1)
    is_finite = bool(torch.isfinite(matrix).all() and torch.isfinite(wanted).all())
    if wanted.numel() < FEWEST or not is_finite:
        return None
    factors = torch.linalg.lstsq(matrix, wanted[:, None]).solution[:, 0]
    off = float((matrix.sum(dim=1) - wanted).norm())
    left = float((matrix @ factors - wanted).norm())
    return factors.tolist() if left <= FITS * off else None


# -- what is behind --------------------------------------------------------------------


def _behind(known: _Known, operands: _Operands) -> Iterator[_Known]:
    """Yield what each operand should be, if the other one is right."""
    for place, value in enumerate(operands.values):
        operand = operands.tensors[place]
        if value is None or operand.numel() != known.wanted.numel():
            continue
        wanted, places = _undone(known, operands, place)
        is_known = int(places.sum()) >= FEWEST
        if is_known and bool(torch.isfinite(wanted[places]).all()):
            shape = operand.shape
            yield _Known(value, wanted.reshape(shape), places.reshape(shape))


def _undone(known: _Known, operands: _Operands, place: int) -> tuple[Tensor, Tensor]:
    """Return what makes a call give what it should, in one operand's place, and where."""
    wanted, places = known.wanted, known.places
    operator = operands.operator
    if operator in _SAME:
        return wanted, places
    if operator == _NEGATIVE:
        return -wanted, places
    other = operands.tensors[1 - place].expand(wanted.shape)
    if operator in _MASKS:
        return wanted, places & (other > 0) if place == 0 else places & False
    if operator in _SUMS:
        signs = operands.signs
        return (wanted - signs[1 - place] * other) / signs[place], places
    if operator == "mul":
        return wanted / other, places & _is_large(other, places)
    if place == 0:
        return wanted * other, places
    return other / wanted, places & _is_large(wanted, places)


def _is_large(divisor: Tensor, places: Tensor) -> Tensor:
    """Return where a quotient says something."""
    size = divisor.abs()
    return size > SMALL * size[places].max()
