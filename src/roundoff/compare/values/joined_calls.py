"""Values that one program makes in several calls of a module, and the other one in one.

Two images, two views or two sentences go through a network one after the other here, and
there together: behind each other in a batch, filled up to one length, or packed. Unlike the
turns of a loop they may be of several lengths.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from roundoff.compare.records.value_sketch import Sketch, SketchIndex
from roundoff.compare.values.loop_turns import (
    may_be_a_turn,
    sketch_together,
    stack_of_turn,
)
from roundoff.compare.values.padded_rows import Kept
from roundoff.compare.values.value_flow import Flow, Value

#: A call is taken together with one of so many after it, of its operator and module.
REACH = 6


@dataclass(frozen=True, slots=True)
class _Part:
    """What one call adds to a value of the other program: ``rows`` of it, or all."""

    key: int
    sketch: Sketch
    rows: Tensor | None = None


def joined_calls(
    flow: Flow,
    kept: Iterable[Kept],
    agreeing: Container[int],
    index: SketchIndex,
    limit: float,
) -> dict[int, int]:
    """Return values that agree together with that of another call.

    Each with the key of the other side that holds both.

    Args:
        flow: the values of a program.
        kept: what masks keep of them.
        agreeing: the keys of those that agree by themselves.
        index: the values of the other program, and what masks keep of those.
        limit: the relative distance up to which values agree.
    """
    kept_of: dict[int, list[_Part]] = {}
    for each in kept:
        kept_of.setdefault(each.key, []).append(_Part(each.key, each.sketch, each.rows))
    groups: dict[object, list[Value]] = {}
    for value in flow.in_order():
        if value.key not in agreeing and may_be_a_turn(value):
            groups.setdefault(_place_of(value), []).append(value)
    joined: dict[int, int] = {}
    for members in groups.values():
        for place, value in enumerate(members):
            for other in members[place + 1 : place + 1 + REACH]:
                if _may_be_turns(value, other):
                    continue
                pair = (value, other)
                twin = _holder(flow, pair, kept_of, index, limit)
                if twin is not None:
                    joined.update((each.key, twin) for each in pair)
    return joined


def _place_of(value: Value) -> object:
    """Return what is equal for calls that may be the same for two inputs."""
    row = value.row
    return row.module or row.line, value.operator, row.place


def _may_be_turns(value: Value, other: Value) -> bool:
    """Return True for what may be turns of a loop: those are taken together all at once."""
    is_same_size = value.row.numel == other.row.numel
    return is_same_size and (
        not value.row.module or stack_of_turn(value) == stack_of_turn(other)
    )


def _holder(
    flow: Flow,
    pair: tuple[Value, Value],
    kept_of: Mapping[int, Sequence[_Part]],
    index: SketchIndex,
    limit: float,
) -> int | None:
    """Return the key of the value that holds two, as they are or what is kept of both."""
    whole = [_Part(v.key, v.sketch) for v in pair if v.sketch is not None]
    first, second = (kept_of.get(value.key, ()) for value in pair)
    for parts in (whole, *([a, b] for a in first for b in second)):
        sketch = _joined(flow, parts, index, limit)
        near = index.near(sketch, limit) if sketch is not None else []
        if near:
            return near[0][1]
    return None


def _joined(
    flow: Flow, parts: Sequence[_Part], index: SketchIndex, limit: float
) -> Sketch | None:
    """Return the sketch of both as one; None where the other side has none such."""
    sketches = [part.sketch for part in parts]
    tensors = (p.rows if p.rows is not None else flow.tensor(p.key) for p in parts)
    return sketch_together(sketches, tensors, index, limit)
