"""Does a parameter stand in the order of what it is multiplied with?

A port may hold its features in an order of its own: sines before cosines, pairs before
vectors. Nothing is wrong with that as long as the rows of each weight, and the elements of
each bias and scale, follow. The reference's value and the candidate's say which column of
one is which of the other; what the parameter has to hold follows from that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.near_leaves import of_leaves_alone
from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.repairs.trials import BUDGET, Trials
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides, upstream
from roundoff.ops import operators_that

_PRODUCTS = operators_that("multiply two matrices")
_PAIRS = operators_that("pair elements")
_ONE_BY_ONE = operators_that("work element by element") | _PAIRS
_MULTIPLY = "multiply"
#: Layers one after the other, whose columns are known once those before are right.
MOST_ROUNDS = 24
#: More columns are not compared with each other.
MOST_COLUMNS = 4096


@dataclass(frozen=True, slots=True)
class _Use:
    """A parameter, and what it is multiplied with or added to along the last axis.

    Attributes:
        value: the call.
        operator: what joins the two.
        leaf: the parameter.
        columns: what it is used with, a row for each column.
        held: what is read of the parameter, with one row for each column.
        axis: of the parameter, along which these rows lie.
    """

    value: Value
    operator: str
    leaf: Value
    columns: Tensor
    held: Tensor
    axis: int = 0


def unfollowed(sides: Sides, part: Part, trials: Trials) -> Blamed | None:
    """Return a parameter whose rows are not in the order of the columns that it is used with.

    Those of the first calls that part are looked at, as long as what they read agrees, then
    those behind, with what was wrong before in order. It is tried with all of them at once.
    """
    ours = [use for key in part.expected for use in _uses(sides.reference, {}, key)]
    unlike: dict[int, _Unlike] = {}
    wanted: dict[int, Tensor] = {}
    trials.left = BUDGET
    for _ in range(MOST_ROUNDS):
        more = _not_in_order(sides, part, ours, _changed(trials, wanted))
        more = {key: each for key, each in more.items() if key not in wanted}
        if not more:
            break
        unlike |= more
        wanted |= {key: each.wanted for key, each in more.items()}
    if not wanted or _nothing_follows(sides.candidate, list(unlike.values())):
        return None
    if not trials.outcome({}, wanted, to_the_end=True)[0]:
        return None
    first = min(unlike.values(), key=lambda each: each.use.value.order)
    leaf = first.use.leaf
    twin = first.twin.leaf
    words = (
        f"{leaf.row.name} is not in the order of what it is used with in "
        f"{first.use.value.row.site}, as the reference's {twin.row.name} is"
    )
    return Blamed(leaf, twin, words, wanted[leaf.key])


@dataclass(frozen=True, slots=True, eq=False)
class _Unlike:
    """A use of a parameter whose rows are not in the order of the columns.

    Attributes:
        use: the candidate's.
        twin: the reference's, of the same columns.
        wanted: what the parameter has to hold.
    """

    use: _Use
    twin: _Use
    wanted: Tensor


def _changed(trials: Trials, leaves: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return what parameters that hold something else make of all that follows."""
    try:
        again = trials.program.again({}, leaves, trials.only) if leaves else ()
        return {**leaves, **{row.record: tensor for row, tensor in again}}
    except CannotRun:
        return {}


def _not_in_order(
    sides: Sides, part: Part, ours: list[_Use], changed: Mapping[int, Tensor]
) -> dict[int, _Unlike]:
    """Return the parameters of a region that are not in the order of the columns.

    ``changed``: what some of its values would be.
    """
    unlike: dict[int, _Unlike] = {}
    for key in sorted(part.region):
        if changed and changed.keys().isdisjoint(sides.candidate.values[key].inputs):
            continue
        for use in _uses(sides.candidate, changed, key):
            in_order = next(_in_order_of(sides, use, ours), None)
            if in_order is not None:
                unlike.setdefault(use.leaf.key, in_order)
    return unlike


def _nothing_follows(flow: Flow, unlike: Sequence[_Unlike]) -> bool:
    """Return True where neither what works on the columns one by one nor the weight that
    they end in stands in their order: then it is theirs that is wrong.
    """
    one_by_one = {
        each.use.value.key for each in unlike if each.use.operator != _MULTIPLY
    }
    weights = [each.use.value for each in unlike if each.use.operator == _MULTIPLY]
    for weight in weights:
        behind = upstream(
            flow, weight.inputs, lambda value: value.operator in _ONE_BY_ONE
        )
        if not one_by_one.isdisjoint(behind):
            return True
    return False


def _in_order_of(sides: Sides, use: _Use, ours: list[_Use]) -> Iterator[_Unlike]:
    """Yield the reference's uses of the same columns, of which the parameter has the rows.

    In another order. Nothing once one of them says that it is right.
    """
    uses = []
    for twin in ours:
        is_same_kind = (twin.held.dim(), twin.held.shape[1:]) == (
            use.held.dim(),
            use.held.shape[1:],
        )
        if not is_same_kind or use.columns.shape[1] != twin.columns.shape[1]:
            continue
        if use.operator != twin.operator:
            continue
        order = _order_of(twin.columns, use.columns, sides.limit)
        if order is None:
            # rows may stand otherwise: time before samples
            columns = (twin.columns.sort(1).values, use.columns.sort(1).values)
            order = _order_of(*columns, sides.limit)
        if order is None:
            continue
        rows = twin.held[order].to(use.held.dtype)
        if _is_near(rows, use.held, sides.limit):
            return
        present = _order_of(twin.held, use.held, sides.limit)
        held = sides.candidate.tensor(use.leaf.key)
        places = None if present is None else _places_of(order, present)
        if places is not None and held is not None:
            wanted = held.index_select(use.axis, places)
            uses.append(_Unlike(use, twin, wanted))
    yield from uses


def _uses(flow: Flow, changed: Mapping[int, Tensor], key: int) -> Iterator[_Use]:
    """Yield how a call uses parameters: a weight as the second factor, a vector.

    ``changed``: what some of the values would be.
    """
    value = flow.values[key]
    read = [
        (flow.values.get(k), changed.get(k, _tensor(flow, k))) for k in value.row.inputs
    ]
    if value.inner or not value.is_call:
        return
    if value.operator in _PRODUCTS and len(read) >= 2:
        (_, left), (right, weight) = read[-2:]
        if left is None or weight is None or weight.dim() != 2:
            return
        columns = left.reshape(-1, left.shape[-1])
        use = _use_of_weight(flow, value, columns, right, weight)
        if use is not None:
            yield use
        if len(read) == 3:
            yield from _uses_of_vector(flow, value, "add", read[0], columns @ weight)
    elif value.operator in _PAIRS and len(read) == 2:
        for vector, (_, other) in (read, read[::-1]):
            if other is not None:
                yield from _uses_of_vector(flow, value, value.operator, vector, other)


def _use_of_weight(
    flow: Flow, value: Value, columns: Tensor, right: Value | None, weight: Tensor
) -> _Use | None:
    leaf = _leaf_behind(flow, right)
    tensor = flow.tensor(leaf.key) if leaf is not None else None
    if leaf is None or tensor is None or tensor.dim() != 2:
        return None
    is_turned = tensor.shape != weight.shape or not torch.equal(tensor, weight)
    if is_turned and not torch.equal(tensor.t(), weight):
        return None
    return _Use(value, _MULTIPLY, leaf, columns.t(), weight, int(is_turned))


def _uses_of_vector(
    flow: Flow,
    value: Value,
    operator: str,
    vector: tuple[Value | None, Tensor | None],
    other: Tensor,
) -> Iterator[_Use]:
    read, held = vector
    if read is None or held is None or other.dim() < 2:
        return
    leaf = _leaf_of(flow, read)
    axis = None if leaf is None else _long_axis(leaf.row.shape or ())
    place = _long_axis(held.shape)
    if leaf is None or axis is None or place is None or place < -other.dim():
        return
    if leaf.row.numel == held.numel() == other.shape[place]:
        columns = other.movedim(place, 0).flatten(1)
        yield _Use(value, operator, leaf, columns, held.flatten(), axis)


def _long_axis(shape: Sequence[int]) -> int | None:
    """Return the one axis of more than one element, from the last one on.

    >>> _long_axis((1, 8, 1, 1)), _long_axis((8, 2))
    (-3, None)
    """
    axes = [axis for axis in range(-len(shape), 0) if shape[axis] > 1]
    return axes[0] if len(axes) == 1 else None


def _leaf_of(flow: Flow, read: Value) -> Value | None:
    """Return the one parameter that a value is made of, such as the exponential of one."""
    leaf = _leaf_behind(flow, read)
    if leaf is not None or not of_leaves_alone(flow, read):
        return leaf
    made_of = (
        flow.values[key] for key in upstream(flow, [read.key], lambda _value: True)
    )
    leaves = [value for value in made_of if value.row.name and not value.is_call]
    return leaves[0] if len(leaves) == 1 else None


def _tensor(flow: Flow, key: int) -> Tensor | None:
    return flow.tensor(key) if key in flow.values else None


def _leaf_behind(flow: Flow, value: Value | None) -> Value | None:
    if value is None:
        return None
    source = flow.behind(value.key)
    return source if source.row.name and not source.is_call else None


def _order_of(ours: Tensor, theirs: Tensor, limit: float) -> Tensor | None:
    """Return which column of ``ours`` each of ``theirs`` is; None where some is none.

    Columns are rows here. Of equal ones, as those of units that are off, the first that
    is left is taken.
    """
    if max(len(ours), len(theirs)) > MOST_COLUMNS or not ours.is_floating_point():
        return None
    if ours.dim() != theirs.dim() or ours.shape[1:] != theirs.shape[1:]:
        return None
    wanted = theirs.to(torch.float64).reshape(len(theirs), -1)
    present = ours.to(torch.float64).reshape(len(ours), -1)
    near = torch.cdist(wanted, present) <= limit * wanted.norm(dim=1, keepdim=True)
    if not bool(near.any(1).all()):
        return None
    taken: dict[int, None] = {}
    for row in near:
        free = [
            place for place in row.nonzero().flatten().tolist() if place not in taken
        ]
        if not free:
            return None
        taken[free[0]] = None
    return torch.tensor(list(taken))


def _places_of(order: Tensor, present: Tensor) -> Tensor | None:
    """Return where each of some rows is present; None where one is not.

    A part of a layer may hold other rows than those that its columns belong to.

    >>> _places_of(torch.tensor([5, 3]), torch.tensor([3, 5])).tolist()
    [1, 0]
    >>> _places_of(torch.tensor([5, 4]), torch.tensor([3, 5]))
    """
    places = {row: place for place, row in enumerate(present.tolist())}
    found = [places[row] for row in order.tolist() if row in places]
    return torch.tensor(found) if len(found) == len(order) else None


def _is_near(one: Tensor, other: Tensor, limit: float) -> bool:
    apart = (one.to(torch.float64) - other.to(torch.float64)).norm()
    return bool(apart <= limit * one.to(torch.float64).norm())
