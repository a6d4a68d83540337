"""Which numbers would a bias, a scale or a table have to hold for a wrong value to be right?

A loader that folds a normalization computes the bias and the scale itself, so that they
hold nothing of the reference's, right or wrong. Where what a value lacks is one number for
each channel, or one factor, the parameter is fitted to it, and what follows runs again.
So is what a value that agrees is multiplied with, or added to, where that is made of
constants: angles of positions, a mask, a table. A number by which all is divided may have
to be one for each place: how many elements a window has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.near_leaves import leaves_of
from roundoff.compare.repairs.goals import TINY
from roundoff.compare.repairs.rejoins import Rejoin
from roundoff.compare.repairs.trials import BUDGET, Trials
from roundoff.compare.values.fault_lines import FaultLines
from roundoff.compare.values.value_flow import Flow, Value, constants_of
from roundoff.compare.values.value_regions import Sides
from roundoff.ops import operators_that

_PAIRED = operators_that("pair elements")
_MOVED = operators_that("move values")

#: Parameters of a region that are tried.
MOST_LEAVES = 12


def fitted_leaf(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    """Return a parameter of one axis that makes a value right once it is fitted.

    Args:
        sides: both programs.
        trials: of what the value is made of.
        rejoin: the value, and what it should be.
    """
    present = sides.candidate.tensor(rejoin.value.key)
    if present is None or present.shape != rejoin.held.shape:
        return None
    trials.left = BUDGET
    for leaf in leaves_of(sides.candidate, sorted(rejoin.region))[:MOST_LEAVES]:
        tensor = sides.candidate.tensor(leaf.key)
        if tensor is None or tensor.dim() != 1 or leaf.key in sides.twins:
            continue
        for fitted, words in _fits(tensor, present, rejoin.held):
            if trials.outcome({}, {leaf.key: fitted})[0]:
                text = f"{leaf.row.name} is off by {words} for each of its elements"
                return Blamed(leaf, rejoin.twin, text, fitted)
    return None


def fitted_table(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    """Return a table of constants that makes a value right once it is fitted.

    The value is a sum or product, or a difference or ratio, of the table and of what
    agrees; see ``fitted_leaf`` for the arguments.
    """
    flow = sides.candidate
    value = rejoin.value
    if value.inner or value.operator not in _PAIRED or len(value.row.inputs) != 2:
        return None
    operands = [flow.values.get(key) for key in value.row.inputs]
    constant = constants_of(flow)
    trials.left = BUDGET
    for table, other in (operands, operands[::-1]):
        if table is None or other is None or table.key not in constant:
            continue
        if table.key in sides.twins or other.key not in sides.twins:
            continue
        held = flow.tensor(table.key)
        present = flow.tensor(other.key)
        if held is None or present is None or held.shape == present.shape:
            # each element has an equation of its own, which any operator solves
            continue
        for fitted in _solved(value.operator, held, present, rejoin.held):
            if trials.outcome({}, {table.key: fitted})[0]:
                source = _origin(flow, table)
                name = source.row.name or f"what {source.operator} gives"
                words = f"{name} holds other values than the reference's table"
                return Blamed(source, rejoin.twin, words, is_operator=source.is_call)
    return None


def fitted_factor(sides: Sides, rejoin: Rejoin) -> Blamed | None:
    """Return a product with constants, or a ratio, that needs others at each place.

    Of the value alone: what it is made of need not be known to be right. Not where one
    number does for all places, or each element needs its own.
    """
    flow = sides.candidate
    value = rejoin.value
    read = [flow.values[key] for key in value.row.inputs if key in flow.values]
    constant = constants_of(flow)
    numbers = [each for each in read if each.is_number and each.key not in constant]
    if value.inner or value.operator not in ("mul", "div") or len(numbers) != 1:
        return None
    source = flow.tensor(numbers[0].key)
    if source is None or source.shape != rejoin.held.shape or source.is_complex():
        return None
    before, wanted = source.to(torch.float64), rejoin.held.to(torch.float64)
    axes = range(before.dim())
    for count in range(1, before.dim()):
        for kept in combinations(axes, count):
            factor = _factor_along(before, wanted, kept)
            smallest, largest = float(factor.min()), float(factor.max())
            if smallest == largest or 2 * factor.numel() > before.numel():
                continue
            off = float((factor * before - wanted).norm())
            if off <= sides.limit * float(wanted.norm()):
                words = (
                    f"with a factor for each index of {_axes_in_words(kept)} it gives "
                    f"what the reference has: from {smallest:.4g} to "
                    f"{largest:.4g}"
                )
                line = FaultLines(sides, rejoin.region).of_operator(value)
                return Blamed(value, rejoin.twin, words, is_operator=True, line=line)
    return None


def _factor_along(before: Tensor, wanted: Tensor, kept: Sequence[int]) -> Tensor:
    """Return the factor for each index of some axes by the least squares of the others."""
    shape = [size if axis in kept else 1 for axis, size in enumerate(before.shape)]
    square = before.square().sum_to_size(shape).clamp(min=TINY)
    return (before * wanted).sum_to_size(shape) / square


def _axes_in_words(axes: Sequence[int]) -> str:
    return f"axis {axes[0]}" if len(axes) == 1 else f"axes {list(axes)}"


def _origin(flow: Flow, table: Value) -> Value:
    """Return the leaf that a table is moved from, or the last call that computes it."""
    value = flow.behind(table.key)
    while value.operator in _MOVED and len(value.inputs) == 1:
        value = flow.behind(value.inputs[0])
    return value


def _solved(
    operator: str, table: Tensor, other: Tensor, wanted: Tensor
) -> Iterator[Tensor]:
    """Yield what a table has to hold by the least squares of all that it is paired with.

    Each may be repeated for the other.

    >>> rows, columns = torch.ones(3, 1), torch.tensor([[1.0, 2.0]])
    >>> [fitted] = _solved("mul", rows, columns, 5 * rows * columns)
    >>> fitted.flatten().tolist()
    [5.0, 5.0, 5.0]
    """
    other = other.expand_as(wanted)
    if operator in ("mul", "div"):
        paired = other if operator == "mul" else other.reciprocal()
        size = _summed(paired.abs().square(), table.shape)
        yield (_summed(wanted * paired.conj(), table.shape) / size).to(table.dtype)
    if operator in ("add", "sub"):
        count = wanted.numel() / table.numel()
        for difference in (wanted - other, other - wanted):
            yield (_summed(difference, table.shape) / count).to(table.dtype)


def _summed(tensor: Tensor, shape: torch.Size) -> Tensor:
    """Return the sums over the axes along which a tensor of another shape is repeated."""
    wide = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    return wide.sum_to_size(shape)


def _fits(
    tensor: Tensor, present: Tensor, wanted: Tensor
) -> Iterator[tuple[Tensor, str]]:
    """Yield what a parameter may have to hold, with what it is off by."""
    for axis, size in enumerate(present.shape):
        if size != len(tensor) or size == present.numel():
            continue
        now = present.movedim(axis, 0).reshape(size, -1).to(torch.float64)
        then = wanted.movedim(axis, 0).reshape(size, -1).to(torch.float64)
        yield tensor + (then - now).mean(1).to(tensor.dtype), "a number"
        square = now.square().sum(1).clamp(min=TINY)
        yield tensor * ((now * then).sum(1) / square).to(tensor.dtype), "a factor"
