"""What a loader does wrong to the parameters of one layer it does to those of the others.

In all layers of a kind, whose names differ in their numbers; in all modules that have
parameters of the same names, as the two directions of an encoder do; and in all that one
line reads, as the cells of a class do, whatever size they have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from roundoff.compare.records.parameter_names import (
    module_of,
    numbers_in,
    shared_module,
    without_numbers,
)
from roundoff.compare.records.value_sketch import rising
from roundoff.compare.repairs.leaf_changes import LeafChange
from roundoff.compare.values.value_flow import Flow, Value


def in_all_layers(flow: Flow, change: LeafChange) -> dict[int, Tensor]:
    """Return what parameters hold if those of the other layers are changed alike.

    The change itself where its parameters are not of one layer, or nothing says what it
    does to others.
    """
    names = [flow.values[key].row.name or "" for key in change.tensors]
    if len({numbers_in(name) for name in names}) != 1:
        return {**change.tensors}
    layers: dict[tuple[str, ...], dict[str, Value]] = {}
    for value in _parameters(flow):
        name = value.row.name or ""
        layers.setdefault(numbers_in(name), {})[without_numbers(name)] = value
    kinds = [without_numbers(name) for name in names]
    groups = [[layer.get(kind) for kind in kinds] for layer in layers.values()]
    return _changed_alike(flow, change, groups)


def in_all_modules(flow: Flow, change: LeafChange) -> dict[int, Tensor]:
    """Return what parameters hold if those of the same names in all modules are changed alike.

    Of one parameter its name and that of its module count; of several what their names do
    not have in common.
    """
    names = [flow.values[key].row.name or "" for key in change.tensors]
    shared = shared_module(names)
    if len(names) == 1:
        shared = module_of(shared[:-1])
    kinds = [name[len(shared) :] for name in names]
    by_name = {value.row.name or "": value for value in _parameters(flow)}
    modules = [
        name.removesuffix(kinds[0]) for name in by_name if name.endswith(kinds[0])
    ]
    groups = [[by_name.get(f"{module}{kind}") for kind in kinds] for module in modules]
    return _changed_alike(flow, change, groups)


def in_all_read_alike(flow: Flow, change: LeafChange) -> dict[int, Tensor]:
    """Return what parameters hold if all that the same line reads as one are changed alike.

    The change itself where it is of several.
    """
    if len(change.tensors) != 1:
        return {**change.tensors}
    [key] = change.tensors
    alike = read_alike(flow, flow.values[key])
    return _changed_alike(flow, change, [[leaf] for leaf in alike])


def in_shared_module(flow: Flow, change: LeafChange) -> dict[int, Tensor]:
    """Return what parameters hold if all of the module that has those of a change are
    changed alike.

    The change itself where it is of one, or nothing says what it does to others.
    """
    names = [flow.values[key].row.name or "" for key in change.tensors]
    shared = shared_module(names)
    if len(names) == 1 or change.made is None or not shared:
        return {**change.tensors}
    members = [v for v in _parameters(flow) if (v.row.name or "").startswith(shared)]
    return _changed_alike(flow, change, [[leaf] for leaf in members])


def read_alike(flow: Flow, leaf: Value) -> list[Value]:
    """Return the parameters that the same line reads first, as the same operand; with it."""
    place = _read_at(flow, leaf)
    if place is None:
        return [leaf]
    return [each for each in _parameters(flow) if _read_at(flow, each) == place]


def _read_at(flow: Flow, leaf: Value) -> tuple[object, ...] | None:
    """Return the line that reads a parameter first, its operator and which operand it is."""
    readers = [flow.values[key] for key in flow.readers.get(leaf.key, ())]
    readers = [each for each in readers if not each.inner and leaf.key in each.inputs]
    if not readers:
        return None
    first = min(readers, key=lambda each: each.order)
    return first.row.line, first.operator, first.inputs.index(leaf.key)


def _parameters(flow: Flow) -> list[Value]:
    return [value for value in flow.in_order() if value.row.name and not value.is_call]


def _changed_alike(
    flow: Flow, change: LeafChange, groups: Sequence[Sequence[Value | None]]
) -> dict[int, Tensor]:
    held = [flow.tensor(key) for key in change.tensors]
    present = [tensor for tensor in held if tensor is not None]
    again = _same_change(present, list(change.tensors.values()), change)
    changed = {**change.tensors}
    for group in groups:
        members = [value for value in group if value is not None]
        contents = [flow.tensor(value.key) for value in members]
        tensors = [tensor for tensor in contents if tensor is not None]
        is_another = changed.keys().isdisjoint(value.key for value in members)
        if len(tensors) != len(group) or not is_another:
            continue
        moved = again(tensors)
        if [each.shape for each in moved] == [each.shape for each in tensors]:
            changed |= {v.key: each for v, each in zip(members, moved, strict=True)}
    return changed


def _same_change(
    before: Sequence[Tensor], after: Sequence[Tensor], change: LeafChange
) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Return a function that changes other parameters as these were.

    It returns none where the change is not known for theirs. Elements that are equal tell
    nothing of where they should stand.
    """
    made = change.made
    if made is not None:
        return lambda tensors: [made(tensor) for tensor in tensors]
    whole = [_place_of(tensor, before) for tensor in after]
    if None not in whole:
        return lambda tensors: [tensors[place] for place in whole if place is not None]
    one = torch.cat([tensor.reshape(-1) for tensor in before])
    other = torch.cat([tensor.reshape(-1) for tensor in after])
    is_moved = one.shape == other.shape
    if not is_moved or not torch.equal(one[rising(one)], other[rising(other)]):
        return lambda _tensors: []
    places = torch.empty_like(rising(one))
    places[rising(other)] = rising(one)
    shapes = [tensor.shape for tensor in after]
    sizes = [tensor.numel() for tensor in after]

    def moved(tensors: Sequence[Tensor]) -> list[Tensor]:
        if [tensor.shape for tensor in tensors] != shapes:
            return []
        elements = torch.cat([tensor.reshape(-1) for tensor in tensors])[places]
        parts = torch.split(elements, sizes)
        return [
            part.reshape(shape).contiguous()
            for part, shape in zip(parts, shapes, strict=True)
        ]

    return moved


def _place_of(tensor: Tensor, tensors: Sequence[Tensor]) -> int | None:
    """Return which of several tensors one is."""
    same = (place for place, each in enumerate(tensors) if torch.equal(each, tensor))
    return next(same, None)
