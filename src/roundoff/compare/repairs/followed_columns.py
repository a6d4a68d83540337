"""Does a parameter stand in the order of what it is multiplied with?

A port may hold its features in an order of its own: sines before cosines, pairs before
vectors. Nothing is wrong with that as long as the rows of each weight, and the elements of
each bias and scale, follow. The reference's value and the candidate's say which column of
one is which of the other; what the parameter has to hold follows from that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.repairs.leaf_trials import parameters_alike
from roundoff.compare.repairs.trials import BUDGET, Trials
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides
from roundoff.ops import operators_that

_PRODUCTS = operators_that("multiply two matrices")
_PAIRS = operators_that("pair elements")
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
        held: the parameter with one row for each column.
        is_turned: True where its rows are the columns of the parameter.
    """

    value: Value
    operator: str
    leaf: Value
    columns: Tensor
    held: Tensor
    is_turned: bool = False


def unfollowed(sides: Sides, part: Part, trials: Trials) -> Blamed | None:
    """Return a parameter whose rows are not in the order of the columns that it is used with.

    Those of the first calls that part are looked at, as long as what they read agrees. It
    is tried with all that are wrong alike at once.
    """
    theirs = [use for key in part.region for use in _uses(sides.candidate, key)]
    ours = [use for key in part.expected for use in _uses(sides.reference, key)]
    unlike: dict[int, _Unlike] = {}
    for use in theirs:
        in_order = next(_in_order_of(sides, use, ours), None)
        if in_order is not None:
            unlike.setdefault(use.leaf.key, in_order)
    if not unlike:
        return None
    wanted = {key: each.rows_of(each.twin.held) for key, each in unlike.items()}
    trials.left = BUDGET
    if not trials.outcome({}, wanted, to_the_end=True)[0]:
        # of the layers behind nothing is known yet
        alike = _in_other_layers(sides, list(unlike.values())) | wanted
        if len(alike) == len(wanted):
            return None
        if not trials.outcome({}, alike, to_the_end=True)[0]:
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
        order: which of the reference's columns each of the candidate's is.
    """

    use: _Use
    twin: _Use
    order: Tensor

    def rows_of(self, held: Tensor) -> Tensor:
        """Return what the parameter has to hold, of the reference's rows."""
        rows = held[self.order].to(self.use.held.dtype)
        return rows.t().contiguous() if self.use.is_turned else rows


def _in_other_layers(sides: Sides, unlike: list[_Unlike]) -> dict[int, Tensor]:
    """Return what the parameters of the same name have to hold in the same order.

    Of the reference's parameter whose rows each of them has.
    """
    wanted: dict[int, Tensor] = {}
    for each in unlike:
        twins = parameters_alike(sides.reference, each.twin.leaf)
        for leaf in parameters_alike(sides.candidate, each.use.leaf):
            held = _by_rows(sides.candidate, leaf, each.use)
            for twin in twins:
                content = _by_rows(sides.reference, twin, each.twin)
                if _order_of(content, held, sides.limit) is not None:
                    wanted.setdefault(leaf.key, each.rows_of(content))
    return wanted


def _by_rows(flow: Flow, leaf: Value, use: _Use) -> Tensor:
    """Return a parameter with a row for each column that it is used with, as in ``use``."""
    held = flow.tensor(leaf.key)
    if held is None:
        return torch.empty(0)
    return held.t() if use.is_turned else held


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
        if _order_of(twin.held, use.held, sides.limit) is not None:
            uses.append(_Unlike(use, twin, order))
    yield from uses


def _uses(flow: Flow, key: int) -> Iterator[_Use]:
    """Yield how a call uses parameters: a weight as the second factor, a vector."""
    value = flow.values[key]
    read = [(flow.values.get(k), _tensor(flow, k)) for k in value.row.inputs]
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
    return _Use(value, "multiply", leaf, columns.t(), weight, is_turned)


def _uses_of_vector(
    flow: Flow,
    value: Value,
    operator: str,
    vector: tuple[Value | None, Tensor | None],
    other: Tensor,
) -> Iterator[_Use]:
    read, held = vector
    leaf = _leaf_behind(flow, read)
    if leaf is None or held is None or held.dim() != 1 or other.dim() < 2:
        return
    if other.shape[-1] == len(held) > 1:
        columns = other.reshape(-1, other.shape[-1]).t()
        yield _Use(value, operator, leaf, columns, held)


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


def _is_near(one: Tensor, other: Tensor, limit: float) -> bool:
    apart = (one.to(torch.float64) - other.to(torch.float64)).norm()
    return bool(apart <= limit * one.to(torch.float64).norm())
