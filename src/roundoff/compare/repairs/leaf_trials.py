"""Parameters that may hold other values, each tried with what the reference has."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.blamed_leaves import tried_leaves
from roundoff.compare.blame.known_leaves import is_in_order, is_right_elsewhere
from roundoff.compare.blame.leaf_contents import LAYOUTS, PLAIN_LAYOUTS
from roundoff.compare.blame.near_leaves import leaves_of, of_leaves_alone
from roundoff.compare.records.parameter_content import (
    FLIPPED,
    REORDERED,
    SHUFFLED,
    TURNED,
    relation,
)
from roundoff.compare.records.parameter_names import name_in_module
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.records.value_sketch import rising
from roundoff.compare.repairs.edits.edited_calls import label_of
from roundoff.compare.repairs.goals import SEVERAL
from roundoff.compare.repairs.suspects import suspects
from roundoff.compare.repairs.trials import BUDGET, Region, Trials
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides
from roundoff.ops import operators_that

#: Parameters of each side, and what they might hold, that are tried.
MOST_LEAVES = 12
MOST_CONTENTS = 300
#: Which parameters are tried, and how: see ``leaf_on_trial``.
ANY = "any"
ODD = "odd"
PLAIN = "plain"
_MOVE = operators_that("move values")


def leaf_on_trial(
    sides: Sides,
    trials: Trials,
    region: Region,
    *,
    several: int | None = None,
    of: str = ANY,
) -> Blamed | None:
    """Return the parameter with which all results agree once it holds other values.

    With ``several``: with which so many values agree, where other parameters are wrong
    too. ``of`` is ``ODD`` for those alone that hold the elements of one of the
    reference's in places that no order of axes explains, ``PLAIN`` for none but such
    orders.
    """
    trials.left = BUDGET
    ours = leaves_of(sides.reference, region.expected)
    ours += _ready_made(sides.reference, region.expected)
    calls = suspects(sides, trials, region.parted)
    read = [row.record for call in calls for row in call.rows]
    misplaced = leaves_of(sides.candidate, _misplaced(sides, region.parted))
    theirs = leaves_of(sides.candidate, read)

    def agrees(leaf: Value, other: Tensor) -> bool:
        if trials.left < 0:
            return False
        ends, gained = trials.outcome({}, {leaf.key: other})
        if ends or (several is not None and len(gained) >= several):
            return True
        if not trials.is_unconfirmed and len(gained) < SEVERAL:
            return False
        # what a loader does wrong to one layer it does to the others
        alike = alike_leaves_of(sides.candidate, leaf, other)
        return len(alike) > 1 and trials.outcome({}, alike)[0]

    # what is right where another call reads it is not what the loader filled wrongly
    theirs = [leaf for leaf in theirs if not is_right_elsewhere(sides, leaf)]
    theirs = [*dict.fromkeys((*misplaced, *theirs))]
    if of == ODD:
        theirs = [leaf for leaf in theirs if _is_odd(sides, leaf)]
    theirs = theirs[:MOST_LEAVES]
    ours = [*dict.fromkeys((*_twins_of(sides, theirs), *ours))][:MOST_LEAVES]
    kinds = PLAIN_LAYOUTS if of == PLAIN else LAYOUTS
    return tried_leaves(sides, ours, theirs, agrees, MOST_CONTENTS, kinds)


def _misplaced(sides: Sides, region: Collection[int]) -> list[int]:
    """Return what a region reads, if any of it has the right elements in other places.

    Then the others may have to stand so too.
    """
    flow = sides.candidate
    waiting = [i for key in region for i in flow.values[key].inputs if i not in region]
    seen = set()
    read = []
    while waiting:
        value = flow.values.get(waiting.pop())
        if value is None or value.key in seen or not value.is_call:
            continue
        seen.add(value.key)
        if not value.computes or value.operator in _MOVE:
            waiting += value.inputs
        elif value.key in sides.twins:
            read.append(value)
    if all(is_in_order(sides, value) for value in read):
        return []
    return sorted(value.key for value in read)


def _twins_of(sides: Sides, leaves: Sequence[Value]) -> list[Value]:
    """Return the reference's parameters that hold what these do, in some order."""
    values = sides.reference.values
    twins = [values[key] for leaf in leaves for key in sides.all_twins(leaf)]
    return [twin for twin in twins if twin.row.name and not twin.is_call]


def alike_leaves_of(flow: Flow, leaf: Value, other: Tensor) -> dict[int, Tensor]:
    """Return what parameters of the same name in other layers hold in the order of one's.

    Args:
        flow: of the candidate.
        leaf: the parameter.
        other: its elements in another order; of anything else nothing is made.
    """
    held = flow.tensor(leaf.key)
    if held is None:
        return {}
    places = rising(held)
    moved = rising(other)
    if not torch.equal(held.flatten()[places], other.flatten()[moved]):
        return {}
    order = torch.empty_like(places)
    order[moved] = places
    alike = {}
    for value in parameters_alike(flow, leaf):
        tensor = flow.tensor(value.key)
        if tensor is not None:
            alike[value.key] = tensor.flatten()[order].reshape(held.shape)
    return alike


def parameters_alike(flow: Flow, leaf: Value) -> list[Value]:
    """Return the parameters of one's name and shape in all layers, with itself."""
    return [
        value
        for value in flow.values.values()
        if value.row.name
        and not value.is_call
        and value.row.shape == leaf.row.shape
        and _have_one_name(value.row, leaf.row)
    ]


def _have_one_name(one: RecordedRow, other: RecordedRow) -> bool:
    """Return True for the same parameter of two layers, or of two models of one class."""
    last = name_in_module(one.name or "")
    return label_of(one) == label_of(other) or (
        bool(last) and last == name_in_module(other.name or "")
    )


def _ready_made(flow: Flow, region: Collection[int]) -> list[Value]:
    """Return what a region makes of parameters alone: a loader may store it ready."""
    values = [flow.values[key] for key in region]
    ready = [
        value for value in values if value.computes and of_leaves_alone(flow, value)
    ]
    return sorted(ready, key=lambda value: -value.order[0])


def _is_odd(sides: Sides, leaf: Value) -> bool:
    """Return True for the elements of a parameter of the reference in unlikely places."""
    held = sides.candidate.tensor(leaf.key)
    if held is None or held.dim() < 2:
        return False
    kinds = set()
    for key in sides.all_twins(leaf):
        tensor = sides.reference.tensor(key)
        if tensor is not None:
            how = relation(tensor, held)
            kinds.add(SHUFFLED if how is None else how.kind)
    return bool(kinds) and kinds <= {FLIPPED, REORDERED, SHUFFLED, TURNED}
