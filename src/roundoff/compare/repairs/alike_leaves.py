"""What a loader does wrong to one parameter it does to those of other layers.

Their names and shapes may differ from layer to layer. What is alike is how they hold what
the reference does: with its axes in one order where another is meant, or not at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.compare.records.parameter_content import axis_orders, backward_axes
from roundoff.compare.records.parameter_names import name_in_module
from roundoff.compare.repairs.edits.edited_calls import label_of
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a parameter holds another's values.

    Attributes:
        order: of the other's axes.
        backwards: the axes, of that order, along which they lie backwards.
    """

    order: tuple[int, ...]
    backwards: tuple[int, ...] = ()

    def of(self, content: Tensor) -> Tensor:
        """Return the values in this layout."""
        return content.permute(self.order).flip(self.backwards)


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


# -- in another layout -------------------------------------------------------


def _in_order(
    sides: Sides, held: Tensor, content: Tensor, other: Tensor
) -> dict[int, Tensor]:
    """Return all that hold the reference's as ``held`` does, in the order of ``other``."""
    leaves: dict[int, Tensor] = {}
    before = _layouts(content, held)
    after = _layouts(content, other)
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


def _layouts(content: Tensor, held: Tensor) -> list[_Layout]:
    """Return the layouts in which one tensor becomes another; forwards, if in any."""
    orders = [_Layout(order) for order in axis_orders(content)]
    forwards = [layout for layout in orders if _is_in(content, held, layout)]
    if forwards:
        return forwards
    backwards = (
        _Layout(layout.order, axes)
        for layout in orders
        for axes in backward_axes(layout.of(content))
    )
    return [layout for layout in backwards if _is_in(content, held, layout)]


def _is_in(content: Tensor, held: Tensor, layout: _Layout) -> bool:
    return torch.equal(layout.of(content).reshape(-1), held.reshape(-1))


def _moved(
    twin: Tensor,
    tensor: Tensor,
    before: Sequence[_Layout],
    after: Sequence[_Layout],
) -> Tensor | None:
    """Return what a parameter holds, in another layout; None where it is in none of these."""
    if twin.numel() != tensor.numel() or twin.is_complex() != tensor.is_complex():
        return None
    if not any(_is_in(twin, tensor, layout) for layout in before):
        return None
    return after[0].of(twin).reshape(tensor.shape).to(tensor.dtype)


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
            if content is None or tensor is None:
                continue
            if content.is_complex() == tensor.is_complex():
                leaves[value.key] = content.reshape(tensor.shape).to(tensor.dtype)
    return leaves


def _as_read(values: Sequence[Value]) -> list[Value]:
    return sorted(values, key=lambda value: value.order)


def _last(value: Value) -> str:
    return name_in_module(label_of(value.row))
