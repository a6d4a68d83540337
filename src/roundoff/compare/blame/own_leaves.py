"""A table of one layer that is wrong, where the same lines are right in other layers.

What a layer makes anew, as waves of a length or slopes of a head, is no parameter of the
reference: no content says that it is wrong. The line that reads it does the right thing
elsewhere, and is given the right value here: what the layer holds itself is at fault.
"""

from __future__ import annotations

from dataclasses import replace

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.near_leaves import leaves_of, of_leaves_alone
from roundoff.compare.records.call_stacks import stack_of
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Part, Sides


def as_own_leaf(sides: Sides, part: Part, blamed: Blamed | None) -> Blamed | None:
    """Return what a blamed call reads of its own layer, where its caller would be named.

    Anything else that is blamed is returned as it is.
    """
    if blamed is None or not blamed.is_operator or blamed.is_sure:
        return blamed
    stack = stack_of(blamed.value.row)
    if blamed.line is None or not stack or blamed.line == stack[-1]:
        return blamed
    flow = sides.candidate
    inputs = [flow.values[key] for key in blamed.value.inputs if key in flow.values]
    own = [value for value in inputs if _is_own(sides, value)]
    given = [value for value in inputs if value not in own]
    if not own or not all(_is_given_rightly(sides, part, value) for value in given):
        return blamed
    leaf = leaves_of(flow, [own[0].key])[0] if own[0].is_call else own[0]
    words = (
        f"{leaf.row.name} holds nothing that the reference has; {stack[-1]} is right where "
        "it reads those of other layers, and is given the right value here"
    )
    return replace(
        blamed, value=leaf, evidence=words, is_operator=False, line=None, label=None
    )


def _is_own(sides: Sides, value: Value) -> bool:
    """Return True for a parameter or buffer that the reference has nowhere."""
    if value.key in sides.twins or value.says_nothing:
        return False
    is_named = not value.is_call and bool(value.row.name)
    return is_named or (value.is_call and of_leaves_alone(sides.candidate, value))


def _is_given_rightly(sides: Sides, part: Part, value: Value) -> bool:
    """Return True for what the reference reads at the place of the wrong region too."""
    read = {key for wanted in part.wanted for key in wanted.inputs}
    return not read.isdisjoint(sides.all_twins(value))
