"""Is it a parameter, or the layout of a value, that makes two programs part?

Where tensors were kept this is tried: the candidate's calls run again with the values
that the reference's parameter would give; where the result then agrees, the parameter is
at fault. Without tensors, contents alone speak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.known_leaves import blamed_by_content
from roundoff.compare.blame.leaf_contents import LAYOUTS, Layouts, other_values
from roundoff.compare.blame.leaf_words import (
    held_in_words,
    shifted_in_words,
    wanted_in_words,
)
from roundoff.compare.blame.near_leaves import (
    between,
    next_values,
    read_by,
    values_with,
)
from roundoff.compare.blame.turns_of_values import Turns, is_in_reference
from roundoff.compare.values.traced_calls import TracedProgram
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Part, Sides

#: Values that are tried in parameters, at most.
TRIALS = 200


def blamed_leaf(sides: Sides, part: Part) -> Blamed | None:
    """Return the parameter that makes the two part; None where it is none."""
    if part.candidate is None or part.reference is None:
        return None
    theirs = read_by(sides.candidate, part.candidate, sides.twins)
    ours = read_by(sides.reference, part.reference, sides.agreeing)
    proven = _proven(sides, part, ours, theirs)
    if proven is not None:
        return proven
    return blamed_by_content(sides, ours, theirs)


def _proven(
    sides: Sides, part: Part, ours: Sequence[Value], theirs: Sequence[Value]
) -> Blamed | None:
    """Try the reference's parameters in the candidate's places."""
    value = part.candidate
    if value is None or part.reference is None or sides.candidate.step.tensors is None:
        return None
    named = next_values(sides, value.row.record if value.inner else value.key)
    named = [key for key in named if key not in sides.twins]
    program = TracedProgram(sides.candidate)
    needed = {leaf.key: between(sides.candidate, leaf.key, named) for leaf in theirs}
    turns = Turns(sides, part.reference)

    def agrees(leaf: Value, other: Tensor) -> bool:
        values = values_with(program, needed[leaf.key], leaf.key, other)
        return any(
            is_in_reference(sides, tensor) or turns.have(tensor)
            for record, tensor in values
            if record in named
        )

    return tried_leaves(sides, ours, theirs, agrees, TRIALS)


def tried_leaves(
    sides: Sides,
    ours: Sequence[Value],
    theirs: Sequence[Value],
    agrees: Callable[[Value, Tensor], bool],
    most: int,
    kinds: Sequence[Layouts] | None = None,
) -> Blamed | None:
    """Return the first leaf that makes the two agree once it holds other values.

    None too where ``most`` trials were in vain. ``kinds``: the layouts that are tried.
    """
    for layouts in LAYOUTS if kinds is None else kinds:
        trials = 0
        for leaf in _foreign_first(sides, theirs):
            held = sides.candidate.tensor(leaf.key)
            if held is None:
                return None
            for wanted, content, other in other_values(sides, ours, held, layouts):
                if trials == most:
                    break
                trials += 1
                if agrees(leaf, other):
                    words = shifted_in_words(leaf, wanted, held, other)
                    if words is None:
                        words = held_in_words(sides, leaf, wanted, content, held)
                        words += wanted_in_words(content, held, other)
                    return Blamed(leaf, wanted, words, other)
    return None


def _foreign_first(sides: Sides, leaves: Sequence[Value]) -> list[Value]:
    """Return leaves that hold none of the reference's values before the others."""
    return sorted(leaves, key=lambda leaf: leaf.key in sides.twins)
