"""Which operand of a call stands in another order than in the reference's call?

Where both programs call one operator on operands of the same shapes, each operand means
the same on both sides, place by place. Where one of two has its elements in another
order, whatever brought it there is at fault: the loader of a parameter, or a layout. That
an image and all kernels could be turned instead gives the same network, and is no fault
of the image.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.known_leaves import parameters_of_the_same
from roundoff.compare.blame.near_leaves import leaves_of, of_leaves_alone
from roundoff.compare.blame.same_layouts import same_layout
from roundoff.compare.judging.step_causes import with_line
from roundoff.compare.records.parameter_content import relation
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides, first_of
from roundoff.ops import operators_that

_MOVE = operators_that("move values")
_CUT = operators_that("cut out")
_RESHAPE = operators_that("reshape")
_PERMUTE = operators_that("permute axes")


def blamed_operand(sides: Sides, part: Part) -> Blamed | None:
    """Return the parameter that stands in another order in the first calls that part.

    None where no such call has its counterpart's operator and shapes, or all else that it
    reads is not the same place by place. It is not sure where the layer may undo that order,
    and another parameter of it may not have it.
    """
    for wanted, read in _unlike_operands(sides, part):
        if of_leaves_alone(sides.candidate, read):
            return _blamed_leaf(sides, wanted, read)
    return None


def blamed_move(sides: Sides, part: Part) -> Blamed | None:
    """Return the move that puts what is computed in another order into such a call.

    It is the one from which on no order of the axes gives what the reference reads, or
    the one before it in code of the candidate's own, where both programs run that.
    """
    for wanted, read in _unlike_operands(sides, part):
        if not of_leaves_alone(sides.candidate, read):
            return _blamed_move(sides, wanted, read)
    return None


def _unlike_operands(sides: Sides, part: Part) -> Iterator[tuple[Value, Value]]:
    for value in _first_calls(sides.candidate, part.region):
        for twin in _first_calls(sides.reference, part.expected):
            if value.operator == twin.operator:
                pair = _only_unlike(sides, twin, value)
                if pair is not None:
                    yield pair


def _first_calls(flow: Flow, region: Collection[int]) -> list[Value]:
    """Return the first calls of a region; for a step inside one the whole call."""
    firsts = first_of(flow, set(region))
    calls = {value.row.record: flow.values[value.row.record] for value in firsts}
    return list(calls.values())


def _only_unlike(sides: Sides, twin: Value, value: Value) -> tuple[Value, Value] | None:
    """Return the operand that stands in another order, and the reference's.

    None where another one differs too. Or the first of several parameters each of which
    holds what another of the reference's does, as weights and biases of exchanged layers.
    """
    ours = sides.reference
    theirs = sides.candidate
    if min(len(twin.row.inputs), len(value.row.inputs)) < 2:
        return None
    unlike = []
    # a bias may be added before or after
    for key, other in zip(twin.row.inputs, value.row.inputs, strict=False):
        wanted = _tensor(ours, key)
        held = _tensor(theirs, other)
        if wanted is None or held is None or wanted.shape != held.shape:
            return None
        if not _equal(sides, wanted, held):
            unlike.append((ours.values[key], theirs.values[other]))
    if len(unlike) == 1 and _in_another_order(sides, *unlike[0]):
        return unlike[0]
    count = min(len(twin.row.inputs), len(value.row.inputs))
    is_exchanged = 0 < len(unlike) < count and all(
        _other_parameter(sides, read) is not None for _, read in unlike
    )
    return unlike[0] if is_exchanged else None


def _tensor(flow: Flow, key: int) -> torch.Tensor | None:
    return flow.tensor(key) if key in flow.values else None


def _equal(sides: Sides, one: torch.Tensor, two: torch.Tensor) -> bool:
    if not one.is_floating_point() or not two.is_floating_point():
        return torch.equal(one, two)
    apart = torch.linalg.vector_norm((one - two).double())
    return bool(apart <= sides.limit * torch.linalg.vector_norm(one.double()))


def _in_another_order(sides: Sides, wanted: Value, read: Value) -> bool:
    return not wanted.says_nothing and wanted.key in sides.all_twins(read)


def _other_parameter(sides: Sides, read: Value) -> Value | None:
    """Return the reference's parameter that a candidate's holds; None for no parameter."""
    leaf = _only_leaf(sides.candidate, read)
    if leaf is None or leaf.says_nothing:
        return None
    return next(iter(parameters_of_the_same(sides, leaf)), None)


def _blamed_leaf(sides: Sides, wanted: Value, read: Value) -> Blamed | None:
    leaf = _only_leaf(sides.candidate, read)
    source = _only_leaf(sides.reference, wanted)
    if leaf is None or source is None:
        return None
    held = sides.candidate.tensor(leaf.key)
    content = sides.reference.tensor(source.key)
    if held is None or content is None:
        return None
    other = _other_parameter(sides, read)
    if other is not None and other.key == source.key:
        return _blamed_cut(sides.candidate, wanted, read, leaf)
    if other is not None and not _in_another_order(sides, wanted, read):
        words = f"{leaf.row.name} holds the reference's {other.row.name}, not"
        return Blamed(leaf, source, f"{words} {source.row.name}")
    how = relation(content, held)
    words = "in another order" if how is None else how.words
    name = f"{leaf.row.name} is the reference's {source.row.name} {words}"
    words = f"{name}, which its layer does not undo"
    return Blamed(leaf, source, words, is_sure=False)


def _blamed_cut(flow: Flow, wanted: Value, read: Value, leaf: Value) -> Blamed | None:
    """Return what takes another part of a parameter that holds what the reference's does."""
    cut = read
    while cut.is_call and cut.operator not in _CUT and len(cut.inputs) == 1:
        cut = flow.values[cut.inputs[0]]
    if cut.operator not in _CUT:
        return None
    there = with_line(wanted.row.site, wanted.row.line)
    words = f"it takes another part of {leaf.row.name} than {there} is"
    return Blamed(cut, wanted, words, is_operator=True)


def _blamed_move(sides: Sides, wanted: Value, read: Value) -> Blamed | None:
    flow = sides.candidate
    content = sides.reference.tensor(wanted.key)
    moves = [value for value in moves_to(flow, read) if value.row.line]
    wrong = next(
        (
            place
            for place, value in enumerate(moves)
            if not _is_layout_of(content, flow.tensor(value.key))
        ),
        None,
    )
    if wrong is None or not _was_in_order(flow, content, moves[0]):
        return None
    shared = {row.line for row in sides.reference.step.rows.values()}
    for move in reversed(moves[: wrong + 1]):
        if move.row.line not in shared:
            there = f"{wanted.row.site} ({wanted.row.line})"
            words = "puts the elements into another order than in"
            return Blamed(move, wanted, f"{move.operator} {words} {there}")
    return None


def _was_in_order(flow: Flow, content: torch.Tensor | None, first: Value) -> bool:
    """Return True where what a move reads is what is wanted up to the order of axes."""
    source = flow.values.get(first.inputs[0]) if first.inputs else None
    return source is not None and _is_layout_of(content, flow.tensor(source.key))


def moves_to(flow: Flow, read: Value) -> list[Value]:
    """Return the calls that move what is computed to where it is read, in order."""
    moves = []
    value = read
    while value.is_call and (not value.computes or value.operator in _MOVE):
        if value.operator in _RESHAPE | _PERMUTE:
            moves.append(value)
        if len(value.inputs) != 1:
            break
        value = flow.values[value.inputs[0]]
    return moves[::-1]


def _is_layout_of(content: torch.Tensor | None, held: torch.Tensor | None) -> bool:
    return content is None or held is None or same_layout(content, held)


def _only_leaf(flow: Flow, value: Value) -> Value | None:
    if value.row.name and not value.is_call:
        return value
    leaves = leaves_of(flow, [value.key])
    return leaves[0] if len(leaves) == 1 else None
