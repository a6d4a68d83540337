"""Two parameters that hold the same values, where the reference has two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.known_leaves import MOST_PARTS, is_right_elsewhere
from roundoff.compare.blame.near_leaves import leaves_of, parameters_of
from roundoff.compare.records.value_sketch import (
    Sketch,
    SketchIndex,
    sketch_of_tensor,
)
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Part, Sides, upstream

#: A parameter of the reference by key, or a part of one: key, axis, count and number.
_Piece = tuple[int, ...]


def blamed_duplicate(sides: Sides, part: Part) -> Blamed | None:
    """Return a parameter that holds what another one does too, in place of a lost one.

    The reference has both; the candidate has one of them twice. Named is a holder that
    nothing reads rightly, or that leads to a value which stands where another should; of
    several the later one where the reference has the lost one after the other.
    """
    lost = {
        leaf.key: leaf
        for leaf in leaves_of(sides.reference, sorted(part.expected))
        if leaf.key not in sides.agreeing and not leaf.says_nothing
    }
    if not lost:
        return None
    ours = parameters_of(sides.reference)
    holders = _holders(sides, ours, list(lost.values()))
    missing: list[_Piece] = [(key,) for key in lost]
    missing += [piece for piece in _pieces_beside(holders) if piece not in holders]
    misplaced = _leads_to_misplaced(sides, part)
    read = {leaf.key for leaf in leaves_of(sides.candidate, sorted(part.region))}
    read |= misplaced
    for piece, leaves in holders.items():
        if len(leaves) <= _times_in_reference(sides, ours, leaves[0]):
            continue
        if read.isdisjoint(leaf.key for leaf in leaves):
            continue
        other = next((m for m in missing if _same_place(sides, piece, m)), None)
        if other is not None:
            wrong = [e for e in leaves if not is_right_elsewhere(sides, e)]
            if len(wrong) in (0, len(leaves)):
                wrong = [each for each in leaves if each.key in misplaced] or leaves
            leaf = wrong[-1] if other > piece else wrong[0]
            return _held_twice(sides, leaf, piece, other)
    return None


def _leads_to_misplaced(sides: Sides, part: Part) -> set[int]:
    """Return what agreeing values are made of that are read where the reference reads others.

    Whole layers that were loaded from another one give that one's values.
    """
    values = sides.reference.values
    anywhere = [values[key] for key in part.expected]
    misplaced = _unlike_read(sides, part, anywhere) or _unlike_read(
        sides, part, part.wanted
    )
    return upstream(sides.candidate, misplaced, lambda _value: True)


def _unlike_read(sides: Sides, part: Part, readers: Iterable[Value]) -> list[int]:
    """Return the agreeing values of which the first wrong ones are made, and no reader is."""
    read = {key for reader in readers for key in reader.inputs}
    flow = sides.candidate
    return [
        key
        for head in part.heads
        for key in head.inputs
        if key in sides.twins and flow.values[key].is_call
        if read.isdisjoint(sides.all_twins(flow.values[key]))
    ]


def _held_twice(sides: Sides, leaf: Value, piece: _Piece, other: _Piece) -> Blamed:
    held = sides.reference.values[piece[0]].row.name
    wanted = sides.reference.values[other[0]]
    words = f"{leaf.row.name} holds {_piece_in_words(held, piece)}, as another "
    words += f"does, not {_piece_in_words(wanted.row.name, other)}"
    return Blamed(leaf, wanted, words)


def _times_in_reference(sides: Sides, ours: Sequence[Value], leaf: Value) -> int:
    """Return how many of the reference's parameters hold the values of a leaf; at least 1."""
    twins = set(sides.all_twins(leaf))
    return max(1, sum(each.key in twins for each in ours))


def _holders(
    sides: Sides, ours: Sequence[Value], lost: Sequence[Value]
) -> dict[_Piece, list[Value]]:
    """Return which leaves of the candidate hold a parameter, or a part of a lost one."""
    names = {leaf.key for leaf in ours}
    parts = SketchIndex(
        (number, sketch) for number, (_, sketch) in enumerate(_parts_of(sides, lost))
    )
    pieces = [piece for piece, _ in _parts_of(sides, lost)]
    holders: dict[_Piece, list[Value]] = {}
    for leaf in parameters_of(sides.candidate):
        for key in sides.all_twins(leaf):
            if key in names:
                holders.setdefault((key,), []).append(leaf)
        if leaf.sketch is not None and leaf.key not in sides.twins:
            for _, number in parts.near(leaf.sketch, sides.limit):
                holders.setdefault(pieces[number], []).append(leaf)
    return holders


def _parts_of(sides: Sides, leaves: Sequence[Value]) -> Iterator[tuple[_Piece, Sketch]]:
    """Yield the equal parts of parameters along each axis, where tensors were kept."""
    for leaf in leaves:
        tensor = sides.reference.tensor(leaf.key)
        if tensor is None:
            continue
        for axis in range(tensor.dim()):
            for count in range(2, MOST_PARTS + 1):
                if tensor.shape[axis] % count or tensor.shape[axis] == count:
                    continue
                for number, part in enumerate(tensor.chunk(count, axis)):
                    sketch = sketch_of_tensor(part)
                    if sketch is not None and not sketch.constant:
                        yield (leaf.key, axis, count, number), sketch


def _pieces_beside(holders: Mapping[_Piece, object]) -> Iterator[_Piece]:
    """Yield the other parts of the parameters of which a part is held."""
    for piece in list(holders):
        if len(piece) > 1:
            key, axis, count, _ = piece
            yield from ((key, axis, count, number) for number in range(count))


def _same_place(sides: Sides, one: _Piece, other: _Piece) -> bool:
    """Return True for parts of one parameter, and for parameters of one shape."""
    if len(one) != len(other):
        return False
    if len(one) > 1:
        return one[:-1] == other[:-1]
    values = sides.reference.values
    return values[one[0]].row.shape == values[other[0]].row.shape


def _piece_in_words(name: str | None, piece: _Piece) -> str:
    if len(piece) == 1:
        return f"the reference's {name}"
    return f"part {piece[-1] + 1} of {piece[2]} of the reference's {name}"
