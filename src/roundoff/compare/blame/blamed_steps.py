"""A step that adds nothing, or what belongs elsewhere."""

from __future__ import annotations

import math
from collections.abc import Sequence

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.leaf_contents import turned
from roundoff.compare.blame.near_leaves import (
    between,
    edge_of_agreement,
    next_values,
    values_with,
)
from roundoff.compare.blame.turns_of_values import is_in_reference
from roundoff.compare.judging.divergence import EXACT
from roundoff.compare.values.traced_calls import TracedProgram
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides, upstream


def blamed_step(sides: Sides, part: Part) -> Blamed | None:
    """Return a step that changes nothing where the reference adds something.

    Or the one that takes what the reference has elsewhere.
    """
    if part.candidate is None or part.reference is None:
        return None
    if not math.isinf(part.distance):
        return None
    expected = set(
        edge_of_agreement(sides.reference, [part.reference.key], sides.agreeing)
    )
    read = edge_of_agreement(sides.candidate, [part.candidate.key], sides.twins)
    for key in read:
        value = sides.candidate.behind(key)
        if not value.computes or expected.isdisjoint(sides.all_twins(value)):
            continue
        for source_key in value.row.inputs:
            source = sides.candidate.behind(source_key)
            if source.sketch is None or source.sketch.size or not source.is_number:
                continue
            if source.is_call:
                if _has_zeros(sides.reference, source):
                    continue
                return Blamed(value, part.reference, "what it adds is zero")
            return Blamed(source, part.reference, f"{source.row.name} holds zeros")
    return _foreign_step(sides, part.reference, read)


def _has_zeros(flow: Flow, like: Value) -> bool:
    """Return True where a side has zeros of as many elements: the state of a first turn."""
    return any(
        value.is_number
        and value.sketch is not None
        and not value.sketch.size
        and value.row.numel == like.row.numel
        for value in flow.values.values()
    )


def _foreign_step(sides: Sides, wanted: Value, read: Sequence[int]) -> Blamed | None:
    """Return what makes a value right that belongs elsewhere."""
    sources = upstream(sides.reference, [wanted.key], lambda _value: True)
    ours = edge_of_agreement(sides.reference, [wanted.key], sides.agreeing)
    beside = {
        key for value in (wanted,) for key in _readers_inputs(sides.reference, value)
    }
    for key in read:
        value = sides.candidate.values[key]
        if not value.is_call or value.says_nothing or not value.is_number:
            continue
        twins = sides.all_twins(value)
        if not twins or not sources.union(beside).isdisjoint(twins):
            continue
        if not _accounts(sides, value, ours):
            continue
        taken = value
        while not taken.computes and len(taken.inputs) == 1:
            taken = sides.candidate.values[taken.inputs[0]]
        twin = sides.reference.values[twins[0]]
        leaves = sides.candidate.parameters_read(taken.key)
        words = f"{twin.operator} of {twin.row.site} ({twin.row.line})"
        if leaves and taken.operator not in EXACT:
            holds = (
                f"with {leaves[0].row.name} it gives what the reference has at {words}"
            )
            return Blamed(leaves[0], twin, holds)
        return Blamed(taken, twin, f"it takes what the reference has at {words}")
    return None


def _accounts(sides: Sides, value: Value, wanted: Sequence[int]) -> bool:
    """Return True where what the reference reads instead makes a later value right.

    True too without tensors, where it cannot be tried.
    """
    held = sides.candidate.tensor(value.key)
    if held is None or value.inner:
        return True
    named = next_values(sides, value.key)[1:]
    program = TracedProgram(sides.candidate)
    needed = between(sides.candidate, value.key, named)
    for key in wanted:
        other = sides.reference.tensor(key)
        if other is None or other.numel() != held.numel():
            continue
        if other.is_complex() != held.is_complex():
            continue
        for layout in turned(other.to(held.dtype), held):
            changed = values_with(program, needed, value.key, layout)
            if any(
                record in named and is_in_reference(sides, tensor)
                for record, tensor in changed
            ):
                return True
    return False


def _readers_inputs(flow: Flow, value: Value) -> set[int]:
    """Return what is read together with a value."""
    keys = {
        k
        for reader in flow.readers.get(value.key, ())
        for k in flow.values[reader].inputs
    }
    return upstream(flow, sorted(keys), lambda _value: True)
