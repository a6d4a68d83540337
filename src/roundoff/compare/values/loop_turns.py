"""Values that one program makes turn by turn, where the other one makes them at once.

A loop over time, over heads or over experts, where the other program has one more axis:
what a line makes in all turns together is what the other program has in one value.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from roundoff.compare.records.value_sketch import (
    Sketch,
    SketchIndex,
    sketch_of_tensor,
    together,
)
from roundoff.compare.values.value_flow import Flow, Value

#: Turns of a loop that are taken together, at most.
MOST_TURNS = 32
#: Turns around these, or calls of one operator on one line in each turn, at most.
MOST_ON_LINE = 8
#: Turns of fewer elements together may be a value of the other program by chance.
FEWEST = 16


def joined_turns(
    flow: Flow, agreeing: Container[int], index: SketchIndex, limit: float
) -> dict[int, int]:
    """Return values that agree together with those of other turns.

    Each with the key of the other side that holds them all.

    Args:
        flow: the values of a program.
        agreeing: the keys of those that agree by themselves.
        index: the values of the other program.
        limit: the relative distance up to which values agree.
    """
    joined: dict[int, int] = {}
    for place_of in (_line_of_turn, stack_of_turn, line_of_any_size):
        groups: dict[object, list[Value]] = {}
        for value in flow.in_order():
            is_known = value.key in agreeing or value.key in joined
            if not is_known and may_be_a_turn(value):
                groups.setdefault(place_of(value), []).append(value)
        if place_of is line_of_any_size:
            # turns of one size were looked at before
            groups = {p: m for p, m in groups.items() if not _are_as_large(m)}
        for members in groups.values():
            for turns in _stretches_of(members):
                whole = _together(flow, turns, index, limit)
                near = index.near(whole, limit) if whole else []
                if near:
                    joined.update((value.key, near[0][1]) for value in turns)
    return joined


def _are_as_large(values: Sequence[Value]) -> bool:
    return len({value.row.numel for value in values}) == 1


def may_be_a_turn(value: Value) -> bool:
    """Return True for a call of the forward pass whose line is known."""
    if not value.computes or not value.is_number or value.inner:
        return False
    if value.row.phase != "forward" or value.row.line is None:
        return False
    return value.sketch is not None and value.sketch.numel > 1


def _line_of_turn(value: Value) -> object:
    """Return what is equal for calls that may be turns of one loop."""
    return value.row.line, value.operator, value.row.numel, value.row.place


def stack_of_turn(value: Value) -> object:
    """Return what is equal for them where a function is called in several places."""
    return _line_of_turn(value), value.row.callers


def line_of_any_size(value: Value) -> object:
    """Return what is equal for turns over examples of different lengths."""
    return value.row.line, value.operator, value.row.place, len(value.row.shape or ())


def _stretches_of(members: Sequence[Value]) -> Iterator[Sequence[Value]]:
    """Yield the values in equal stretches of two, of three, and so on.

    And of each stretch every second one, every third one and so on, where a line calls the
    operator twice, three times and so on in each turn, or where one loop runs in another.
    """
    for count in range(2, min(len(members), MOST_TURNS * MOST_ON_LINE) + 1):
        if len(members) % count:
            continue
        steps = [
            step
            for step in range(1, count // 2 + 1)
            if count % step == 0 and count // step <= MOST_TURNS
        ]
        for start in range(0, len(members), count):
            stretch = members[start : start + count]
            for step in steps:
                yield from (stretch[place::step] for place in range(step))


def _together(
    flow: Flow, turns: Sequence[Value], index: SketchIndex, limit: float
) -> Sketch | None:
    """Return the sketch of several values as one; None where the other side has none such."""
    sketches = [value.sketch for value in turns if value.sketch is not None]
    return sketch_together(sketches, (flow.tensor(v.key) for v in turns), index, limit)


def sketch_together(
    sketches: Sequence[Sketch],
    tensors: Iterable[Tensor | None],
    index: SketchIndex,
    limit: float,
) -> Sketch | None:
    """Return one sketch of what several are of; None where ``index`` has none of its size.

    ``tensors``: what each is of, None where it was not kept; read only if it is needed.
    """
    numel = sum(sketch.numel for sketch in sketches)
    size = math.hypot(*(sketch.size for sketch in sketches))
    if numel < FEWEST or not index.has_size(numel, size, limit):
        return None
    whole = together(sketches)
    if whole is not None or not sketches[0].exact:
        return whole
    kept = [tensor.reshape(-1) for tensor in tensors if tensor is not None]
    return sketch_of_tensor(torch.cat(kept)) if len(kept) == len(sketches) else None
