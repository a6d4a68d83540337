"""Elements of a parameter that get a gradient in one program alone: rows that learn.

The row of the padding stands still in one program and learns in the other; zeros that fill
up a kernel are trained with it. Both forward passes agree, and so do all other elements of
the gradients. What reads the parameter is at fault.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.judging.step_causes import listed
from roundoff.compare.ports.counterparts import (
    Counterparts,
    counterparts,
    named_leaves,
)
from roundoff.compare.ports.port_results import (
    gradient_limit,
    gradients_left,
    least_gradient,
)
from roundoff.compare.records.value_sketch import in_reals
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides

LABEL = "other gradient"
#: Rows that are named.
MOST_ROWS = 3
_FORWARD = "forward"


@dataclass(frozen=True, slots=True)
class _Trained:
    """Elements of parameters of one program, flat, by their values and then by the size of
    their gradients; ``places``: where each stands."""

    values: Tensor
    gradients: Tensor
    places: Tensor


def blamed_elements(sides: Sides) -> Blamed | None:
    """Return the call that reads a parameter of which other elements get a gradient.

    None unless all gradients agree but for such elements.
    """
    found: list[tuple[Counterparts, Tensor, bool]] = []
    pairs = [(each, *_of_both(sides, each)) for each in counterparts(sides)]
    known = [
        (each, one, other)
        for each, one, other in pairs
        if one is not None and other is not None
    ]
    largest = max((float(one.gradients.norm()) for _, one, _ in known), default=0.0)
    limit = gradient_limit(sides)
    for each, ours, theirs in known:
        is_extra = (ours.gradients == 0) & (theirs.gradients != 0)
        is_lacking = (ours.gradients != 0) & (theirs.gradients == 0)
        is_alone = is_extra | is_lacking
        size = max(float(ours.gradients.norm()), least_gradient(sides) * largest)
        apart = ours.gradients - theirs.gradients
        if float(apart[~is_alone].norm()) > limit * size:
            return None
        if float(apart[is_alone].norm()) > limit * size:
            learns = bool(is_extra.any())
            places = theirs.places[is_extra if learns else is_lacking]
            found.append((each, places, learns))
    for each, places, learns in found:
        blamed = _blamed(sides, each, places, learns)
        if blamed is not None:
            return blamed
    return None


def _of_both(
    sides: Sides, each: Counterparts
) -> tuple[_Trained | None, _Trained | None]:
    ours = _trained(sides.reference, each.ours, each.numel)
    theirs = _trained(sides.candidate, each.theirs, each.numel)
    if ours is None or theirs is None or len(ours.values) != len(theirs.values):
        return None, None
    return ours, theirs


def _trained(flow: Flow, names: Sequence[str], numel: int | None) -> _Trained | None:
    """Return the elements of parameters; None where one, or its gradient, is not known.

    Zeros without a gradient fill them up to ``numel``.
    """
    leaves = named_leaves(flow)
    left = gradients_left(flow.step.rows)
    values, gradients = [], []
    for name in names:
        row = left.get(f"{name}.grad")
        held = flow.tensor(leaves[name].key)
        gradient = None if row is None else flow.tensor(row.record)
        if held is None or gradient is None or held.shape != gradient.shape:
            return None
        values.append(in_reals(held.detach()).reshape(-1))
        gradients.append(in_reals(gradient.detach()).reshape(-1))
    lacking = 0 if numel is None else numel - sum(part.numel() for part in values)
    values.append(values[0].new_zeros(max(lacking, 0)))
    gradients.append(gradients[0].new_zeros(max(lacking, 0)))
    held, gradient = torch.cat(values).double(), torch.cat(gradients).double()
    by_gradient = gradient.sort(stable=True).indices
    order = by_gradient[held[by_gradient].sort(stable=True).indices]
    return _Trained(held[order], gradient[order], order)


def _blamed(
    sides: Sides, each: Counterparts, places: Tensor, learns: bool
) -> Blamed | None:
    """Return what first computes with the parameter that holds the first of ``places``."""
    flow = sides.candidate
    leaves = named_leaves(flow)
    begin = 0
    for name in each.theirs:
        leaf = leaves[name]
        count = leaf.row.numel or 0
        inside = places[(places >= begin) & (places < begin + count)] - begin
        begin += count
        reader = next(_readers(flow, leaf), None)
        if not len(inside) or reader is None:
            continue
        which = _in_words(leaf, inside)
        words = f"{which} learn here, and stand still in the reference"
        if not learns:
            words = f"{which} stand still here, and learn in the reference"
        words = f"{words} ({listed(each.ours)})"
        return Blamed(reader, None, words, is_operator=True, label=LABEL)
    return None


def _readers(flow: Flow, leaf: Value) -> Iterator[Value]:
    """Yield what computes with a parameter, behind moves of it, in the order of execution."""
    waiting = [leaf.key]
    reading = []
    while waiting:
        for key in flow.readers.get(waiting.pop(), ()):
            value = flow.values[key]
            if value.row.phase != _FORWARD:
                continue
            if value.computes:
                reading.append(value)
            else:
                waiting.append(key)
    yield from sorted(reading, key=lambda value: value.order)


def _in_words(leaf: Value, places: Tensor) -> str:
    """Return rows of a parameter in words; so many elements where they are no few rows."""
    shape = tuple(leaf.row.shape or ())
    width = (leaf.row.numel or 1) // (shape[0] if shape else 1)
    rows = sorted({int(place) // width for place in places.tolist()})
    if len(shape) < 2 or len(rows) > MOST_ROWS:
        return f"{len(places):,} elements of {leaf.row.name}"
    return f"rows {listed([str(row) for row in rows])} of {leaf.row.name}"
