"""A parameter that holds something else, in words."""

from __future__ import annotations

import torch
from torch import Tensor

from roundoff.compare.blame.leaf_contents import MOST_LACKING
from roundoff.compare.records.parameter_content import (
    EQUAL,
    FLIPPED,
    RESHAPED,
    TRANSPOSED,
    TURNED,
    relation,
)
from roundoff.compare.rounding.rounding_bound import unit
from roundoff.compare.tensors.structure import fewer_digits
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Sides

#: How a parameter holds all of another's values.
_LAYOUTS = (EQUAL, RESHAPED, TRANSPOSED, TURNED, FLIPPED)


def words_of(sides: Sides, leaf: Value, wanted: Value) -> str:
    ours = sides.reference.tensor(wanted.key)
    theirs = sides.candidate.tensor(leaf.key)
    if ours is None or theirs is None:
        return f"{leaf.row.name} holds none of the reference's parameters"
    return _in_words(leaf, wanted, ours, theirs)


def _name_of(wanted: Value) -> str:
    return wanted.row.name or f"{wanted.operator} of {wanted.row.site}"


def held_in_words(
    sides: Sides, leaf: Value, wanted: Value, content: Tensor, held: Tensor
) -> str:
    """Return what a parameter holds in place of what is wanted."""
    values = sides.reference.values
    twins = [values[key] for key in sides.all_twins(leaf)]
    names = [t.row.name for t in twins if t.row.name and not t.is_call]
    if relation(content, held) is None and names and wanted.row.name not in names:
        wanted_name = _name_of(wanted)
        return f"{leaf.row.name} holds the reference's {names[0]}, not {wanted_name}"
    return _in_words(leaf, wanted, content, held)


def shifted_in_words(
    leaf: Value, wanted: Value, held: Tensor, other: Tensor
) -> str | None:
    """Return by how many rows a parameter holds what it should; None where it does not."""
    for axis, size in enumerate(held.shape):
        for lacking in range(1, min(MOST_LACKING, (size - 1) // 2) + 1):
            length = size - lacking
            ends = held.narrow(axis, lacking, length), other.narrow(axis, 0, length)
            starts = held.narrow(axis, 0, length), other.narrow(axis, lacking, length)
            is_later = torch.equal(*ends)
            if is_later or torch.equal(*starts):
                which = "later" if is_later else "earlier"
                places = "place" if lacking == 1 else "places"
                return (
                    f"{leaf.row.name} holds the reference's {_name_of(wanted)} {lacking} "
                    f"{places} {which} along axis {axis} than it should"
                )
    return None


def wanted_in_words(content: Tensor, held: Tensor, other: Tensor) -> str:
    """Return how a parameter should hold the values that it holds in another layout."""
    before = relation(content, held)
    after = relation(content, other)
    if before is None or after is None or before.words == after.words:
        return ""
    if before.kind not in _LAYOUTS or after.kind not in _LAYOUTS:
        return ""
    return f"; here it should be {after.words}"


def _in_words(leaf: Value, wanted: Value, ours: Tensor, theirs: Tensor) -> str:
    how = relation(ours, theirs)
    name = _name_of(wanted)
    if how is not None:
        return f"{leaf.row.name} is the reference's {name} {how.words}"
    narrow = fewer_digits(ours, theirs, unit(leaf.row.dtype))
    if narrow is not None:
        rounded = ours.to(getattr(torch, narrow)).to(ours.dtype)
        if relation(rounded, theirs) is not None:
            return f"{leaf.row.name} is the reference's {name} rounded to {narrow}"
    return f"{leaf.row.name} holds other values than the reference's {name}"
