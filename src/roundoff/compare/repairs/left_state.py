"""Does a program read another state than the reference: what an earlier step has left?

A recurrent layer that goes on from the last batch reads memory that no call of the step
makes, and no parameter is. Where it holds what the reference has not, it is given what the
reference reads there, or zeros, as a layer that begins anew has them.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from itertools import permutations, product

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.judging.step_causes import listed, with_line
from roundoff.compare.repairs.replaceable_values import FEWEST
from roundoff.compare.repairs.trials import BUDGET, Trials
from roundoff.compare.values.fault_lines import FaultLines
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides, upstream
from roundoff.ops import operators_that

_CUTS = operators_that("cut out")
#: States that are given at once, in each order: of two layers with two each.
MOST_STATES = 4


def left_state(sides: Sides, part: Part, trials: Trials) -> Blamed | None:
    """Return what is read from before the step, if all is right with other values in it."""
    theirs = _states(sides.candidate, part.region, sides.twins)
    ours = _states(sides.reference, part.expected, sides.agreeing)
    trials.left = BUDGET
    for tensors, words in _given(sides, theirs, ours):
        if trials.left < 0:
            return None
        if trials.outcome({}, tensors, is_patient=True)[0]:
            first = next(value for value in theirs if value.key in tensors)
            reader = _first_reader(sides.candidate, first)
            line = FaultLines(sides, part.region).of_operator(reader)
            return Blamed(first, None, words, line=line)
    begun = _begun_otherwise(sides, part, trials)
    return begun or _begun_with_zeros(sides, part, trials)


def _begun_otherwise(sides: Sides, part: Part, trials: Trials) -> Blamed | None:
    """Return the value that stands where the reference begins with zeros.

    What a layer before has left is right by itself, and no state to begin with.
    """
    flow = sides.candidate
    read = _read_by(sides.reference, part.expected)
    begun = {value.row.numel: value for value in reversed(read) if _is_zero(value)}
    values = [
        value
        for value in _read_by(flow, part.region)
        if value.is_call
        and value.is_number
        and value.row.numel in begun
        and _is_right(sides, value)
        and not value.says_nothing
    ]
    for value in values:
        held = flow.tensor(value.key)
        if held is None or trials.left < 0:
            return None
        zeros = {value.key: torch.zeros_like(held)}
        if trials.outcome({}, zeros, is_patient=True)[0]:
            readers = [flow.values[key] for key in flow.readers.get(value.key, ())]
            is_made_for_it = all(
                reader.key in part.region or reader.row.phase != part.phase
                for reader in readers
            )
            source = with_line(value.row.site, value.row.line)
            words = (
                f"begins with {source} where the reference begins with zeros; "
                "with these all is right"
            )
            begins = value if is_made_for_it else _first_reader(flow, value)
            twin = begun[value.row.numel]
            return Blamed(begins, twin, words, label="other input")
    return None


def _begun_with_zeros(sides: Sides, part: Part, trials: Trials) -> Blamed | None:
    """Return the zeros that stand where the reference begins with what it has computed."""
    zeros = _zeros_before(sides.candidate, part.region)
    wanted = [
        twin
        for twin in _read_by(sides.reference, part.expected)
        if twin.is_call and twin.computes and twin.is_number and not twin.says_nothing
    ]
    trials.left = BUDGET
    for value, twin in product(zeros, wanted):
        content = sides.reference.tensor(twin.key)
        shape = list(value.row.shape or ())
        if content is None or list(content.shape) != shape or trials.left < 0:
            continue
        if trials.outcome({}, {value.key: content.clone()}, is_patient=True)[0]:
            source = with_line(f"{twin.operator} of {twin.row.site}", twin.row.line)
            words = f"begins with zeros where the reference begins with {source}"
            return Blamed(value, twin, words, label="other input", line=value.row.line)
    return None


def _zeros_before(flow: Flow, region: Collection[int]) -> list[Value]:
    """Return the tensors of zeros that a region begins with, as they were made.

    What is a product with them is zero too.
    """

    def is_followed(value: Value) -> bool:
        return value.key in region or _is_zero(value)

    made_of = [flow.values[key] for key in upstream(flow, sorted(region), is_followed)]
    return [
        value
        for value in sorted(made_of, key=lambda each: each.order)
        if _is_zero(value)
        and value.is_number
        and value.is_call
        and not value.inputs
        and (value.row.numel or 0) >= FEWEST
    ]


def _read_by(flow: Flow, region: Collection[int]) -> list[Value]:
    """Return what a region is made of, in order, its own values among it."""
    read = {key for each in region for key in flow.values[each].inputs}
    values = [flow.values[key] for key in (*read, *region) if key in flow.values]
    return sorted(dict.fromkeys(values), key=lambda value: value.order)


def _is_right(sides: Sides, value: Value) -> bool:
    """Return True for a value that agrees, and for a part of one."""
    if value.key in sides.twins or value.operator not in _CUTS:
        return value.key in sides.twins
    return all(key in sides.twins for key in value.inputs)


def _is_zero(value: Value) -> bool:
    sketch = value.sketch
    return sketch is not None and sketch.constant and not sketch.size


def _states(
    flow: Flow, region: Collection[int], agreeing: Container[int]
) -> list[Value]:
    """Return what a region reads that no call makes and nothing trains, and that the other
    program has not."""
    read = {key for each in region for key in flow.values[each].inputs}
    values = [flow.values[key] for key in read if key in flow.values]
    states = [
        value
        for value in values
        if value.row.is_leaf
        and value.is_number
        and (value.row.numel or 0) >= FEWEST
        and value.row.name not in flow.trained
        and value.key not in agreeing
        and not value.says_nothing
    ]
    return sorted(states, key=lambda value: _first_reader(flow, value).order)


def _first_reader(flow: Flow, value: Value) -> Value:
    readers = [flow.values[key] for key in flow.readers.get(value.key, ())]
    return min(readers, key=lambda reader: reader.order, default=value)


def _given(
    sides: Sides, theirs: Sequence[Value], ours: Sequence[Value]
) -> Iterator[tuple[Mapping[int, Tensor], str]]:
    """Yield what the candidate's states may have to hold, all at once and then each."""
    held = {value.key: sides.candidate.tensor(value.key) for value in theirs}
    if not theirs or any(tensor is None for tensor in held.values()):
        return
    names = listed([value.row.name or value.row.site for value in theirs])
    zeros = {k: torch.zeros_like(t) for k, t in held.items() if t is not None}
    hold = "holds" if len(theirs) == 1 else "hold"
    yield zeros, f"{names} {hold} values from before the step; with zeros all is right"
    pairs: list[list[tuple[Value, Value]]] = []
    if len(ours) == len(theirs) <= MOST_STATES:
        pairs = [[*zip(theirs, order, strict=True)] for order in permutations(ours)]
    pairs += [[pair] for pair in product(theirs, ours)]
    for each in pairs:
        tensors = {}
        for value, twin in each:
            content = sides.reference.tensor(twin.key)
            if content is not None and content.numel() == value.row.numel:
                shape = list(value.row.shape or ())
                tensors[value.key] = content.reshape(shape).clone()
        if len(tensors) == len(each):
            names = listed([value.row.name or value.row.site for value, _ in each])
            there = listed([twin.row.name or twin.row.site for _, twin in each])
            begins = "begins" if len(each) == 1 else "begin"
            words = f"{names} {begins} with other values than {there}; with these all is right"
            yield tensors, words
