"""Is what one layer gives cut into other parts than those that the reference's layers give?

Several layers that read one value may be one here, whose result is cut. The result holds
what theirs do; a part that mixes them, or one of theirs that no part is of, is cut wrongly.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.judging.step_causes import listed, with_line
from roundoff.compare.records.value_sketch import in_reals, sketch_of_tensor
from roundoff.compare.rounding.rounding_bound import unit
from roundoff.compare.tensors.nearest import to_nearest
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides
from roundoff.ops import operators_that

#: So many layers are one at most: queries, keys and values.
MOST_LAYERS = 3
#: The values of as many layers are looked at together.
REACH = 6
#: Elements are the same up to this many roundings of the largest: two kernels add up some
#: hundred products in other orders, whose roundings are independent (16 is the root of 256).
ROUNDINGS = 16.0
#: A part of a layer has nearly all of its elements among that layer's. Of other elements a
#: few are by chance: each of n lies in 2 * ``ROUNDINGS`` * u of a range of a few sizes, which
#: for 100,000 elements in fp32 is a tenth of it.
OWN_SHARE = 0.9
_MOVES = operators_that("move values")
_CUTS = operators_that("cut out")
_ORDERS = operators_that("hand on in order") | operators_that("permute axes")
_FORWARD = "forward"


def blamed_cut_out(sides: Sides, part: Part) -> Blamed | None:
    """Return the cut that takes a part which none of the reference's layers gives."""
    cuts: dict[int, list[Value]] = {}
    for whole, cut in _last_cuts(sides.candidate):
        if whole.key not in sides.twins:
            cuts.setdefault(whole.key, []).append(cut)
    parted = {
        key: of_whole
        for key, of_whole in cuts.items()
        if any(cut.key in part.region for cut in of_whole)
    }
    if not parted:
        return None
    groups = list(_beside_each_other(sides.reference))
    for key, of_whole in parted.items():
        layers = _layers_of(sides, sides.candidate.values[key], groups)
        wrong = _wrong_cut(sides, of_whole, layers, part.region) if layers else None
        if wrong is not None:
            names = (f"{layer.operator} of {layer.row.site}" for layer in layers)
            lines = (layer.row.line for layer in layers)
            made = listed([*map(with_line, names, lines)])
            words = f"it takes another part of what holds {made} than one of these"
            return Blamed(wrong, layers[-1], words, is_operator=True)
    return None


def _last_cuts(flow: Flow) -> Iterator[tuple[Value, Value]]:
    """Yield what is computed, and each part of it that is not cut again."""
    for cut in flow.in_order():
        is_forward = cut.row.phase == _FORWARD and not cut.inner
        if cut.operator not in _CUTS or not is_forward or _is_cut_again(flow, cut):
            continue
        whole = cut
        while whole.operator in _MOVES and whole.is_call and whole.inputs:
            source = flow.values.get(whole.inputs[0])
            if source is None:
                break
            whole = source
        is_part = (cut.row.numel or 0) < (whole.row.numel or 0)
        if is_part and whole.computes and whole.is_call:
            yield whole, cut


def _is_cut_again(flow: Flow, cut: Value) -> bool:
    """Return True where a part, or what it is moved to, is cut in the forward pass."""
    waiting = [cut.key]
    seen = {cut.key}
    while waiting:
        for key in flow.readers.get(waiting.pop(), ()):
            reader = flow.values[key]
            if reader.operator in _CUTS and reader.row.phase == _FORWARD:
                return True
            if reader.operator in _ORDERS and key not in seen:
                seen.add(key)
                waiting.append(key)
    return False


def _beside_each_other(flow: Flow) -> Iterator[list[Value]]:
    """Yield values that the same operators make of one value, the first ones.

    Of the last one before them that several calls read.
    """
    ways: dict[int, tuple[int, tuple[str, ...]]] = {}
    groups: dict[object, list[Value]] = {}
    for value in flow.in_order():
        if value.row.phase != _FORWARD or not value.is_call or value.inner:
            continue
        read = _first_computed(flow, value)
        if read is None:
            continue
        start, way = (read, ()) if _branches(flow, read) else ways.get(read, (read, ()))
        ways[value.key] = (start, (*way, value.operator))
        is_result = value.computes and value.is_number and not value.row.place
        if is_result and value.sketch is not None:
            groups.setdefault(ways[value.key], []).append(value)
    for members in groups.values():
        if len(members) > 1:
            yield members[:REACH]


def _branches(flow: Flow, key: int) -> bool:
    """Return True for a value that several calls of the forward pass read."""
    readers = (flow.values[reader].row for reader in flow.readers.get(key, ()))
    return len({row.call for row in readers if row.phase == _FORWARD}) > 1


def _first_computed(flow: Flow, value: Value) -> int | None:
    """Return the first that a call reads, but for parameters."""
    keys = (key for key in value.row.inputs if key in flow.values)
    return next((key for key in keys if not flow.values[key].row.name), None)


def _layers_of(
    sides: Sides, whole: Value, groups: Sequence[Sequence[Value]]
) -> tuple[Value, ...]:
    """Return the values of the reference that a value holds together; none if unknown."""
    if whole.sketch is None:
        return ()
    for members in groups:
        for count in range(2, MOST_LAYERS + 1):
            for layers in combinations(members, count):
                if sum(layer.row.numel or 0 for layer in layers) != whole.row.numel:
                    continue
                held = [sides.reference.tensor(layer.key) for layer in layers]
                known = [tensor.reshape(-1) for tensor in held if tensor is not None]
                sketch = sketch_of_tensor(torch.cat(known)) if known else None
                if sketch and sketch.distance(whole.sketch) <= sides.limit:
                    return layers
    return ()


def _wrong_cut(
    sides: Sides,
    cuts: Sequence[Value],
    layers: Sequence[Value],
    region: Container[int],
) -> Value | None:
    """Return the first cut that mixes layers, or one beside which a layer is left.

    ``region``: what leads to what differs; one of these is wrong.
    """
    held = [sides.reference.tensor(layer.key) for layer in layers]
    known = [tensor for tensor in held if tensor is not None]
    left = set(range(len(known)))
    unlike: list[Value] = []
    for cut in cuts:
        taken = sides.candidate.tensor(cut.key)
        if taken is None:
            return None
        holders = {n for n, layer in enumerate(known) if _is_part_of(taken, layer)}
        if not holders and cut.key in region:
            return cut
        left -= holders
        if cut.key in region and cut.key not in sides.twins:
            unlike.append(cut)
    return unlike[0] if left and unlike else None


def _is_part_of(part: Tensor, whole: Tensor) -> bool:
    """Return True where nearly all elements of one tensor are among those of another.

    >>> _is_part_of(torch.tensor([0.3, 0.1]), torch.tensor([0.1, 0.2, 0.3]))
    True
    >>> _is_part_of(torch.tensor([0.3, 0.7]), torch.tensor([0.1, 0.2, 0.3]))
    False
    """
    looked_for = in_reals(part.detach()).reshape(-1).double()
    there = in_reals(whole.detach()).reshape(-1).double().sort().values
    dtype = str(whole.dtype).removeprefix("torch.")
    near = ROUNDINGS * unit(dtype) * there.abs().max()
    is_there = to_nearest(there, looked_for) <= near
    return bool(is_there.double().mean() >= OWN_SHARE)
