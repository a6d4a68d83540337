"""What a loader does wrong to one parameter it does to those of other layers.

Their names and shapes may differ from layer to layer. What is alike is how they hold what
the reference does: with its axes in one order where another is meant, or not at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from roundoff.compare.records.parameter_content import axis_orders
from roundoff.compare.records.parameter_names import name_in_module
from roundoff.compare.repairs.call_edits import label_of
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides

Order = tuple[int, ...]


def leaves_alike(
    sides: Sides, leaf: Value, wanted: Value, other: Tensor
) -> Iterator[Mapping[int, Tensor]]:
    """Yield what several parameters may have to hold, this one among them.

    Args:
        sides: both programs.
        leaf: the candidate's parameter.
        wanted: the reference's, whose values it should hold.
        other: these, as they should stand.
    """
    held = sides.candidate.tensor(leaf.key)
    content = sides.reference.tensor(wanted.key)
    if held is None or content is None or content.numel() != held.numel():
        return
    if is_one_number(held):
        leaves = _not_loaded(sides, wanted, held)
    else:
        leaves = _in_order(sides, held, content, other)
    if len(leaves) > 1 and leaf.key in leaves:
        yield leaves


def _parameters(flow: Flow) -> list[Value]:
    return [v for v in flow.values.values() if v.row.name and not v.is_call]


# -- the axes in another order -------------------------------------------------------


def _in_order(
    sides: Sides, held: Tensor, content: Tensor, other: Tensor
) -> dict[int, Tensor]:
    """Return all that hold the reference's as ``held`` does, in the order of ``other``."""
    leaves: dict[int, Tensor] = {}
    before = _orders(content, held)
    after = _orders(content, other)
    if not before or not after:
        return leaves
    for value in _parameters(sides.candidate):
        tensor = sides.candidate.tensor(value.key)
        if tensor is None or tensor.dim() != held.dim():
            continue
        for key in sides.all_twins(value):
            twin = sides.reference.tensor(key)
            if twin is None or twin.dim() != content.dim():
                continue
            moved = _moved(twin, tensor, before, after)
            if moved is not None:
                leaves[value.key] = moved
                break
    return leaves


def _orders(content: Tensor, held: Tensor) -> list[Order]:
    """Return the orders of axes in which one tensor becomes another."""
    return [o for o in axis_orders(content) if _is_in(content, held, o)]


def _is_in(content: Tensor, held: Tensor, order: Order) -> bool:
    return torch.equal(content.permute(order).reshape(-1), held.reshape(-1))


def _moved(
    twin: Tensor, tensor: Tensor, before: Sequence[Order], after: Sequence[Order]
) -> Tensor | None:
    """Return what a parameter holds, in another order; None where it is in none of these."""
    if twin.numel() != tensor.numel():
        return None
    if not any(_is_in(twin, tensor, order) for order in before):
        return None
    return twin.permute(after[0]).reshape(tensor.shape).to(tensor.dtype)


# -- not loaded ----------------------------------------------------------------------


def is_one_number(tensor: Tensor) -> bool:
    """Return True for several elements that are all the same."""
    return tensor.numel() > 1 and bool((tensor == tensor.reshape(-1)[0]).all())


def _not_loaded(sides: Sides, wanted: Value, held: Tensor) -> dict[int, Tensor]:
    """Return all that hold one number, each with a parameter that the candidate lacks.

    Of one size they are taken in the order in which both programs read them.
    """
    name = _last(wanted)
    empty: dict[int, list[Value]] = defaultdict(list)
    for value in _parameters(sides.candidate):
        tensor = sides.candidate.tensor(value.key)
        if tensor is None or tensor.dim() != held.dim() or not is_one_number(tensor):
            continue
        if tensor.reshape(-1)[0] == held.reshape(-1)[0]:
            empty[tensor.numel()].append(value)
    lost: dict[int, list[Value]] = defaultdict(list)
    for value in _parameters(sides.reference):
        if value.key not in sides.agreeing and _last(value) == name:
            lost[value.row.numel or 0].append(value)
    leaves: dict[int, Tensor] = {}
    for numel, values in empty.items():
        pairs = zip(_as_read(values), _as_read(lost[numel]), strict=False)
        for value, twin in pairs:
            content = sides.reference.tensor(twin.key)
            tensor = sides.candidate.tensor(value.key)
            if content is not None and tensor is not None:
                leaves[value.key] = content.reshape(tensor.shape).to(tensor.dtype)
    return leaves


def _as_read(values: Sequence[Value]) -> list[Value]:
    return sorted(values, key=lambda value: value.order)


def _last(value: Value) -> str:
    return name_in_module(label_of(value.row))
