"""Which operand of a call stands in another order than in the reference's call?

Where both programs call one operator on operands of the same shapes, each operand means
the same on both sides, place by place. Where one of two has its elements in another
order, whatever brought it there is at fault: the loader of a parameter, or a layout. That
an image and all kernels could be turned instead gives the same network, and is no fault
of the image.
"""

from __future__ import annotations

import torch

from roundoff.compare.blamed_leaves import Blamed, leaves_of, of_leaves_alone
from roundoff.compare.parameter_content import relation
from roundoff.compare.value_flow import Flow, Value
from roundoff.compare.value_regions import Part, Sides, first_of


def blamed_operand(sides: Sides, part: Part) -> Blamed | None:
    """Return the parameter that stands in another order in the first calls that part.

    None where no such call has its counterpart's operator and shapes, or all else that it
    reads is not the same place by place.
    """
    for value in first_of(sides.candidate, set(part.region)):
        for twin in first_of(sides.reference, set(part.expected)):
            if value.inner or twin.inner or value.operator != twin.operator:
                continue
            pair = _only_unlike(sides, twin, value)
            if pair is not None:
                return _blamed(sides, *pair)
    return None


def _only_unlike(sides: Sides, twin: Value, value: Value) -> tuple[Value, Value] | None:
    """Return the operand that differs, and the reference's, where just one does."""
    ours, theirs = sides.reference, sides.candidate
    if len(twin.row.inputs) != len(value.row.inputs) or len(value.row.inputs) < 2:
        return None
    unlike = []
    for key, other in zip(twin.row.inputs, value.row.inputs, strict=True):
        one, two = _tensor(ours, key), _tensor(theirs, other)
        if one is None or two is None or one.shape != two.shape:
            return None
        if not _equal(sides, one, two):
            unlike.append((ours.values[key], theirs.values[other]))
    if len(unlike) != 1 or not _in_another_order(sides, *unlike[0]):
        return None
    return unlike[0]


def _tensor(flow: Flow, key: int) -> torch.Tensor | None:
    return flow.tensor(key) if key in flow.values else None


def _equal(sides: Sides, one: torch.Tensor, two: torch.Tensor) -> bool:
    if not one.is_floating_point() or not two.is_floating_point():
        return torch.equal(one, two)
    apart = torch.linalg.vector_norm((one - two).double())
    return bool(apart <= sides.limit * torch.linalg.vector_norm(one.double()))


def _in_another_order(sides: Sides, wanted: Value, read: Value) -> bool:
    if wanted.says_nothing or not of_leaves_alone(sides.candidate, read):
        return False
    return wanted.key in sides.all_twins(read)


def _blamed(sides: Sides, wanted: Value, read: Value) -> Blamed | None:
    leaf = _only_leaf(sides.candidate, read)
    source = _only_leaf(sides.reference, wanted)
    if leaf is None or source is None:
        return None
    held = sides.candidate.tensor(leaf.key)
    content = sides.reference.tensor(source.key)
    if held is None or content is None:
        return None
    how = relation(content, held)
    words = "in another order" if how is None else how.words
    name = f"{leaf.row.name} is the reference's {source.row.name} {words}"
    return Blamed(leaf, source, f"{name}, which its layer does not undo")


def _only_leaf(flow: Flow, value: Value) -> Value | None:
    if value.row.name and not value.is_call:
        return value
    leaves = leaves_of(flow, [value.key])
    return leaves[0] if len(leaves) == 1 else None
