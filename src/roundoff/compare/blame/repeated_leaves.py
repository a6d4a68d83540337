"""A parameter that holds one thing twice, where the reference has two.

A loader that takes one direction's weights for both, or the first layer's for all, leaves
what no other rule knows by its content: several of the reference's parameters may be fused
in one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.near_leaves import leaves_of, of_leaves_alone, parameters_of
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides, upstream


def blamed_repeat(sides: Sides, part: Part) -> Blamed | None:
    """Return a parameter that holds what another one does, where the reference has no two alike.

    Of several of the reference's that are fused in one no other rule knows which it holds.
    A table that the reference makes anew stands in place of none of its parameters.
    """
    ours = parameters_of(sides.reference)
    if len(_in_groups(sides.reference, ours)) < len(ours):
        return None
    trained = sides.reference.trained
    lost = [leaf for leaf in ours if leaf.key not in sides.agreeing]
    may_learn = {leaf.row.name in trained for leaf in lost}
    read = [
        leaf
        for leaf in _read_or_chosen(sides.candidate, part.region)
        if (leaf.row.name in sides.candidate.trained) in may_learn
    ]
    for leaf in read:
        count = _times_in_itself(sides.candidate.tensor(leaf.key))
        if count > 1 and leaf.key not in sides.twins:
            words = (
                f"{leaf.row.name} holds the same {count} times, one after the other; no two "
                "parameters of the reference do"
            )
            return Blamed(leaf, None, words)
    for group in _in_groups(sides.candidate, parameters_of(sides.candidate)):
        wrong = [leaf for leaf in group if leaf in read]
        if len(group) < 2 or not wrong or group[0].key in sides.twins:
            continue
        leaf = wrong[-1]
        other = next(each for each in group if each.key != leaf.key)
        words = (
            f"{leaf.row.name} holds the same as {other.row.name}; no two parameters of the "
            "reference do"
        )
        return Blamed(leaf, None, words)
    return None


def _read_or_chosen(flow: Flow, region: Collection[int]) -> list[Value]:
    """Return the parameters that a region reads, and those of which it reads a part."""
    inputs = {key for each in region for key in flow.values[each].inputs}
    calls = [flow.values[key] for key in inputs if key in flow.values]
    chosen = [v.key for v in calls if v.is_call and of_leaves_alone(flow, v)]
    made_of = upstream(flow, chosen, lambda _value: True)
    return leaves_of(flow, sorted({*region, *made_of}))


def _times_in_itself(held: Tensor | None) -> int:
    """Return how many equal parts a parameter has along its first axis, if all are equal.

    Parts of one value say nothing.

    >>> _times_in_itself(torch.tensor([[1.0, 2.0], [1.0, 2.0]])), _times_in_itself(torch.eye(2))
    (2, 1)
    """
    if held is None or held.dim() < 2 or not held.numel():
        return 1
    is_same = bool((held == held[:1]).all()) and bool(
        (held[0] != held.flatten()[0]).any()
    )
    return len(held) if is_same else 1


def _in_groups(flow: Flow, leaves: Sequence[Value]) -> list[list[Value]]:
    """Return parameters with those that hold the same beside each other.

    Averages of parameters begin as these: what learns is none of what does not.
    """
    groups: dict[object, list[tuple[Tensor, list[Value]]]] = {}
    for leaf in leaves:
        held = flow.tensor(leaf.key)
        if held is None or not held.numel():
            continue
        first = held.reshape(-1)[0].item()
        learns = leaf.row.name in flow.trained
        of_size = groups.setdefault((held.shape, held.dtype, first, learns), [])
        alike = (group for other, group in of_size if torch.equal(other, held))
        group = next(alike, None)
        if group is not None:
            group.append(leaf)
        else:
            of_size.append((held, [leaf]))
    return [group for of_size in groups.values() for _, group in of_size]
