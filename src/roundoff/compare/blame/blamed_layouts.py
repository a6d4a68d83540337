"""A value with the right numbers in the wrong places."""

from __future__ import annotations

from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.blamed_leaves import TRIALS, tried_leaves
from roundoff.compare.blame.blamed_tables import holds_two_numbers
from roundoff.compare.blame.near_leaves import (
    MOST_LEAVES,
    between,
    edge_of_agreement,
    read_by,
    values_with,
)
from roundoff.compare.blame.same_layouts import is_close, same_layout
from roundoff.compare.values.padded_rows import kept_rows
from roundoff.compare.values.traced_calls import TracedProgram
from roundoff.compare.values.value_flow import Flow, Value, constants_of
from roundoff.compare.values.value_regions import Part, Sides
from roundoff.ops import operators_that

#: A part of a parameter may agree though it stands in another place.
_MOVES = operators_that("move values")
_TURNS = operators_that("permute axes")
_JOINS = operators_that("join")


def blamed_layout(sides: Sides, part: Part) -> Blamed | None:
    """Return what puts the right values into the wrong places, or reads others.

    None where what the two parts read agrees up to the order and joining of axes, and
    without tensors.
    """
    if part.candidate is None or part.reference is None:
        return None
    expected = edge_of_agreement(sides.reference, [part.reference.key], sides.agreeing)
    read = edge_of_agreement(sides.candidate, [part.candidate.key], sides.twins)
    constant = constants_of(sides.candidate)
    for key in read:
        value = sides.candidate.values[key]
        if not value.is_call or value.says_nothing or not value.is_number:
            continue
        if key not in constant and holds_two_numbers(sides.candidate, value):
            continue  # a choice has the elements of any other that chooses as many
        twins = [k for k in sides.all_twins(value) if k in expected]
        if not twins:
            continue
        if not any(_same_places(sides, twin, key) for twin in twins):
            return _first_wrong_place(sides, twins[0], value)
    return None


def _same_places(sides: Sides, twin: int, key: int) -> bool:
    """Return True where a value agrees with one of the views of a reference's value."""
    theirs = sides.candidate.tensor(key)
    whole = sides.reference.tensor(twin)
    if theirs is None or whole is None or theirs.numel() != whole.numel():
        return True
    value: Value | None = sides.reference.values[twin]
    while value is not None:
        ours = sides.reference.tensor(value.key)
        if ours is None or same_layout(ours, theirs):
            return True
        if _same_but_for_padding(sides, ours, theirs):
            return True
        if value.computes or len(value.inputs) != 1:
            return False
        value = sides.reference.values.get(value.inputs[0])
    return False


def _same_but_for_padding(sides: Sides, ours: Tensor, theirs: Tensor) -> bool:
    """Return True where two values agree in the places of a batch that count."""
    return any(
        same_layout(kept, other)
        for mask in sides.padding
        for kept in kept_rows(ours, mask)
        for other in kept_rows(theirs, mask)
    )


def _is_in_place(sides: Sides, value: Value) -> bool:
    twins = sides.all_twins(value)[:MOST_LEAVES]
    return any(_same_places(sides, twin, value.key) for twin in twins)


def _first_wrong_place(sides: Sides, twin: int, value: Value) -> Blamed | None:
    """Follow a value back to the first that is in the wrong place."""
    wrong = value
    while True:
        sources = edge_of_agreement(sides.candidate, [wrong.key], sides.twins)
        moved = [
            source
            for source in (sides.candidate.values[key] for key in sources)
            if source.is_call
            and source.is_number
            and not source.says_nothing
            and not _is_in_place(sides, source)
        ]
        moved = moved or _misplaced_parts(sides, wrong)
        if not moved:
            break
        wrong = moved[0]
    if wrong is not value:
        twin = sides.twins[wrong.key][0]
    expected = sides.reference.tensor(twin)
    if expected is None:
        return None
    ours = read_by(sides.reference, sides.reference.values[twin], sides.agreeing)
    theirs = read_by(sides.candidate, wrong, sides.twins)

    program = TracedProgram(sides.candidate)
    flow = sides.candidate
    needed = {leaf.key: between(flow, leaf.key, [wrong.key]) for leaf in theirs}

    def agrees(leaf: Value, other: Tensor) -> bool:
        values = dict(values_with(program, needed[leaf.key], leaf.key, other))
        return wrong.key in values and same_layout(expected, values[wrong.key])

    proven = None
    if not wrong.inner:
        proven = tried_leaves(sides, ours, theirs, agrees, TRIALS)
    if proven is not None:
        return proven
    words = f"{wrong.operator} to {_shape(wrong)} puts the right values in other places"
    return Blamed(wrong, sides.reference.values[twin], words)


def _misplaced_parts(sides: Sides, joined: Value) -> list[Value]:
    """Return what turns parts that are joined as the reference does, each the other way.

    Alone a part may have its axes in any order; joined, it has to lie as the other does.
    """
    reference, candidate = sides.reference, sides.candidate
    if joined.operator not in _JOINS:
        return []
    for key in sides.all_twins(joined):
        twin = reference.values[key]
        if twin.operator not in _JOINS or len(twin.inputs) != len(joined.inputs):
            continue
        pairs = zip(joined.inputs, twin.inputs, strict=True)
        return [
            turn
            for part, other in pairs
            if other in sides.all_twins(candidate.values[part])
            and not _lie_alike(reference.tensor(other), candidate.tensor(part))
            and (turn := _last_turn(candidate, candidate.values[part])) is not None
        ]
    return []


def _lie_alike(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Return True for the same elements one after the other, and where nothing is known."""
    if ours is None or theirs is None:
        return True
    return is_close(ours, theirs)


def _last_turn(flow: Flow, value: Value) -> Value | None:
    """Return what has put the axes of a value in their order; None for nothing."""
    while value.is_call and value.operator in _MOVES:
        if value.operator in _TURNS:
            return value
        sources = [flow.values[key] for key in value.inputs if key in flow.values]
        if len(sources) != 1:
            return None
        [value] = sources
    return None


def _shape(value: Value) -> str:
    shape = value.tensor.shape if value.tensor is not None else value.row.shape
    return str(list(shape or ()))
