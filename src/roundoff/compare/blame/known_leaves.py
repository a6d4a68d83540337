"""Parameters that are blamed by their contents alone: of these is known where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.leaf_words import words_of
from roundoff.compare.blame.near_leaves import leaves_near
from roundoff.compare.blame.same_layouts import same_layout
from roundoff.compare.records.parameter_content import (
    EQUAL,
    JOINED,
    PART,
    relation,
)
from roundoff.compare.records.value_sketch import (
    Sketch,
)
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Part, Sides
from roundoff.ops import operators_that

#: Parameters that may be put together in one.
MOST_PARTS = 4
#: A part of a parameter may agree though it stands in another place.
_MOVES = operators_that("move values")


def _same_size(leaves: Sequence[Value], leaf: Value) -> list[Value]:
    numel = leaf.row.numel
    return [value for value in leaves if value.row.numel == numel]


def blamed_values(sides: Sides, part: Part) -> Blamed | None:
    """Return the parameter to blame where the programs compute the same.

    The first that the first wrong value reads and nothing right does.
    """
    flow = sides.candidate
    named = [] if part.candidate is None else [part.candidate]
    near = [
        leaf
        for head in (*named, *part.heads)
        for leaf in leaves_near(flow, [head.key], sides.twins)
    ]
    region = sorted(part.region, key=lambda key: flow.values[key].order)
    further = [leaf for key in region for leaf in flow.parameters_read(key)]
    for leaf in (*near, *further):
        if not leaf.says_nothing and not is_right_elsewhere(sides, leaf):
            words = (
                f"the programs compute the same from here on; {leaf.row.name} holds "
                "other values, or the same in another order"
            )
            return Blamed(leaf, part.reference, words)
    return None


def blamed_by_content(
    sides: Sides, ours: Sequence[Value], theirs: Sequence[Value]
) -> Blamed | None:
    """Compare what the parameters on both sides hold."""
    lost = [v for v in ours if v.key not in sides.agreeing or v.says_nothing]
    foreign = [v for v in theirs if v.key not in sides.twins or v.says_nothing]
    lost = [v for v in lost if not _is_put_together(v, theirs)]
    foreign = [v for v in foreign if not _is_put_together(v, ours)]
    for leaf in foreign:
        wanted = _best_partner(sides, lost, leaf)
        if wanted is not None:
            return Blamed(leaf, wanted, words_of(sides, leaf, wanted))
    return _of_another(sides, ours, theirs)


def _is_put_together(whole: Value, parts: Sequence[Value]) -> bool:
    """Return True where several of ``parts`` together are a parameter, or added up."""
    if whole.sketch is None or whole.says_nothing:
        return False
    others = [v for v in parts if v.sketch is not None and v.key != whole.key]
    for count in range(1, MOST_PARTS + 1):
        for chosen in combinations(others, count):
            if sum(v.sketch.numel for v in chosen if v.sketch) != whole.sketch.numel:
                continue
            if _together(whole.sketch, [v.sketch for v in chosen if v.sketch]):
                return True
    return False


def _together(whole: Sketch, parts: Sequence[Sketch]) -> bool:
    norm = float(np.sqrt(sum(part.size**2 for part in parts)))
    return abs(norm - whole.size) <= 1e-5 * whole.size


def _best_partner(sides: Sides, lost: Sequence[Value], leaf: Value) -> Value | None:
    """Return the reference's parameter that a foreign one stands for."""
    for wanted in _same_size(lost, leaf):
        ours = sides.reference.tensor(wanted.key)
        theirs = sides.candidate.tensor(leaf.key)
        if ours is None or theirs is None:
            return wanted
        how = relation(ours, theirs)
        if how is None and _holds_known_values(sides, leaf, theirs):
            continue
        if how is None or how.kind not in (EQUAL, PART, JOINED):
            return wanted
    return None


def _holds_known_values(sides: Sides, leaf: Value, held: Tensor) -> bool:
    """Return True where all that a parameter holds is in parameters of the reference.

    Cut and laid out in a way of its own, as a right port may do.
    """
    if leaf.says_nothing or not held.is_floating_point():
        return False
    wanted = torch.unique(held.reshape(-1))
    for value in sides.reference.values.values():
        if value.is_call or not value.row.name or not value.is_number:
            continue
        content = sides.reference.tensor(value.key)
        if content is not None and content.dtype == wanted.dtype:
            wanted = wanted[~torch.isin(wanted, content.reshape(-1))]
        if not wanted.numel():
            return True
    return False


def _of_another(
    sides: Sides, ours: Sequence[Value], theirs: Sequence[Value]
) -> Blamed | None:
    """A parameter that holds what the reference has elsewhere."""
    wanted_keys = {value.key for value in ours}
    read_keys = {value.key for value in theirs}
    for leaf in theirs:
        if leaf.says_nothing or is_right_elsewhere(sides, leaf):
            continue
        if _gives_only_right(sides, leaf):
            continue
        named = parameters_of_the_same(sides, leaf)
        if not named or any(value.key in wanted_keys for value in named):
            continue
        for wanted in _same_size(ours, leaf):
            twin = sides.agreeing.get(wanted.key)
            if twin is None or twin[0] not in read_keys:
                holds = f"{leaf.row.name} holds the reference's {named[0].row.name}"
                return Blamed(leaf, wanted, f"{holds}, not {wanted.row.name}")
    return None


def parameters_of_the_same(sides: Sides, leaf: Value) -> list[Value]:
    """Return the reference's parameters that hold what a candidate's does."""
    twins = [sides.reference.values[key] for key in sides.all_twins(leaf)]
    return [value for value in twins if value.row.name and not value.is_call]


def _gives_only_right(sides: Sides, leaf: Value) -> bool:
    """Return True where all calls that read a leaf agree, turns of a loop together too."""
    flow = sides.candidate
    waiting = list(flow.readers.get(leaf.key, ()))
    readers = []
    while waiting:
        reader = flow.values[waiting.pop()]
        if reader.row.phase != leaf.row.phase or reader.inner:
            continue
        if not reader.computes or reader.operator in _MOVES:
            waiting += flow.readers.get(reader.key, ())
        else:
            readers.append(reader)
    return bool(readers) and all(reader.key in sides.twins for reader in readers)


def is_right_elsewhere(sides: Sides, leaf: Value, but: Value | None = None) -> bool:
    """Return True where another call reads the leaf, and agrees, not only as a part of more.

    What agrees in another order than that of axes may be wrong for all that reads it.
    ``but``: what the same operator of the same line makes as this value is no other call.
    """
    waiting = list(sides.candidate.readers.get(leaf.key, ()))
    while waiting:
        reader = sides.candidate.values[waiting.pop()]
        if reader.row.phase != leaf.row.phase:
            continue
        if but is not None and _are_of_one_place(reader, but):
            continue
        if not reader.computes or reader.operator in _MOVES:
            waiting += sides.candidate.readers.get(reader.key, ())
            continue
        is_whole = reader.key in sides.twins and reader.key not in sides.several
        is_told = is_whole and not reader.inner and not reader.says_nothing
        if is_told and is_in_order(sides, reader):
            return True
    return False


def _are_of_one_place(one: Value, other: Value) -> bool:
    """Return True for what one operator of one line makes, in turns of a loop too."""
    return (one.row.line, one.operator) == (other.row.line, other.operator)


def is_in_order(sides: Sides, value: Value) -> bool:
    """Return True where the elements of a value that agrees stand as the reference's do."""
    held = sides.candidate.tensor(value.key)
    if held is None:
        return True
    contents = [sides.reference.tensor(key) for key in sides.all_twins(value)]
    return any(content is None or same_layout(content, held) for content in contents)
