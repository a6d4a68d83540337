"""Right values that are read in each other's place, or where another one is meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import torch

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.near_leaves import leaves_of, of_leaves_alone
from roundoff.compare.repairs.read_by_region import values_read
from roundoff.compare.repairs.rejoins import Rejoin
from roundoff.compare.repairs.trials import BUDGET, Trials
from roundoff.compare.values.fault_lines import FaultLines, computing_readers
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides, upstream
from roundoff.ops import operators_that

#: Calls between a part of a value and what reads it.
MOST_STEPS = 3
#: They give parts of one value.
_CUTS = operators_that("cut out")


def exchanged(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    """Return what puts two right values in each other's place.

    They are followed back as long as the same operators make both: to the call that cuts
    both out of one value, or to parameters, which the loader may have exchanged.
    """
    trials.left = BUDGET
    flow = sides.candidate
    for value, other in combinations(values_read(flow, rejoin), 2):
        first = flow.tensor(value.key)
        second = flow.tensor(other.key)
        if first is None or second is None or first.shape != second.shape:
            continue
        if torch.equal(first, second):
            continue
        if trials.outcome({}, {value.key: second, other.key: first})[0]:
            return _origin(flow, value, other, rejoin)
    return None


def misread(sides: Sides, rejoin: Rejoin, region: frozenset[int]) -> Blamed | None:
    """Return the call that reads one right value where another of them is meant.

    ``region``: of the programs' difference. None where the value that should be another
    is computed in it, or the candidate has no such other.
    """
    flow = sides.candidate
    value = rejoin.value
    # its own elements in other places are no other value
    if value.key in region or rejoin.twin.key in sides.all_twins(value):
        return None
    meant = [
        other
        for other in flow.in_order()
        if other.is_call
        and not other.inner
        and rejoin.twin.key in sides.all_twins(other)
    ]
    readers = [each for each in computing_readers(flow, value) if each.key in region]
    if not meant or not readers:
        return None
    first = min(readers, key=lambda each: each.order)
    return blamed_reader(
        sides, replace(rejoin, region=region), first, (value, meant[0])
    )


def blamed_reader(
    sides: Sides, rejoin: Rejoin, reader: Value, pair: tuple[Value, Value]
) -> Blamed:
    """Return what to name where one of a pair is read, and the other is meant.

    The line that hands it to a function which is right elsewhere; the parameter, where both
    are its elements and the function takes other parameters rightly.
    """
    value, other = pair
    leaves = _leaves_behind(sides.candidate, value, other)
    if leaves is not None:
        return _for_each_other(*leaves, reader, rejoin)
    words = f"it should read what {other.operator} of {other.row.site} gives"
    cut = _cut_apart(sides.candidate, value, other)
    if cut is not None:
        words = f"its parts stand in another order than they are read: {reader.row.site}, {words}"
        lines = FaultLines(sides, rejoin.region)
        line = lines.of_operator(cut)
        return Blamed(cut, rejoin.twin, words, is_operator=True, line=line)
    line = FaultLines(sides, rejoin.region).of_operator(reader)
    leaf = _common_leaf(sides.candidate, value, other)
    is_function_right = line != reader.row.line
    if leaf is None or not is_function_right:
        return Blamed(reader, rejoin.twin, words, is_operator=True, line=line)
    words = f"{leaf.row.name} stands in another order than {reader.row.site} takes it: {words}"
    return Blamed(leaf, rejoin.twin, words, line=reader.row.line)


def _cut_apart(flow: Flow, value: Value, other: Value) -> Value | None:
    """Return what cuts two values, or what they are made of alone, out of one: the gates of
    a cell."""
    parts = [_part_behind(flow, each) for each in (value, other)]
    if parts[0] is None or parts[1] is None or parts[0].key == parts[1].key:
        return None
    return parts[0] if parts[0].row.call == parts[1].row.call else None


def _part_behind(flow: Flow, value: Value) -> Value | None:
    """Return the part of another value that one is made of with numbers alone."""
    for _ in range(MOST_STEPS):
        if value.row.base_operator in _CUTS:
            return value
        sources = [flow.values[key] for key in value.inputs if key in flow.values]
        if not value.is_call or len(sources) != 1:
            return None
        [value] = sources
    return None


def _common_leaf(flow: Flow, value: Value, other: Value) -> Value | None:
    """Return the parameter of which both hold nothing but the elements."""
    if not all(of_leaves_alone(flow, each) for each in (value, other)):
        return None
    leaves = {
        leaf.key: leaf
        for each in (value, other)
        for leaf in (leaves_of(flow, [each.key]) if each.is_call else [each])
    }
    return next(iter(leaves.values())) if len(leaves) == 1 else None


def _origin(flow: Flow, first: Value, second: Value, rejoin: Rejoin) -> Blamed:
    there = f"{first.operator} and {second.operator}"
    words = f"the results of {there} stand in each other's place"
    exchanged = [first, second]
    if _is_made_of(flow, second, first):
        # what is made of the other stands in its place
        exchanged.reverse()
    value, other = exchanged
    reader = _reader_of(flow, exchanged, rejoin)
    leaves = _leaves_behind(flow, value, other)
    if leaves is not None:
        return _for_each_other(*leaves, reader, rejoin)
    is_followed = False
    while value.row.call != other.row.call:
        pair = _unlike_inputs(flow, value, other)
        if pair is None:
            named = value if is_followed else reader
            return Blamed(named, rejoin.twin, words, is_operator=True)
        value, other = pair
        is_followed = True
    return Blamed(value, rejoin.twin, words, is_operator=True)


def _reader_of(flow: Flow, values: Sequence[Value], rejoin: Rejoin) -> Value:
    """Return the first call of the wrong region that reads the first of these that one reads."""
    for value in values:
        readers = [flow.values[key] for key in flow.readers.get(value.key, ())]
        inside = [v for v in readers if v.key in rejoin.region and not v.inner]
        if inside:
            return min(inside, key=lambda each: each.order)
    return values[0]


def _is_made_of(flow: Flow, value: Value, source: Value) -> bool:
    return source.key in upstream(flow, [value.key], lambda _value: True)


def _leaves_behind(
    flow: Flow, value: Value, other: Value
) -> tuple[Value, Value] | None:
    """Return the parameters of two values that the same operators make of others.

    None where one of the values is made of the other: its parameter is right there.
    """
    if _is_made_of(flow, value, other) or _is_made_of(flow, other, value):
        return None
    while value.row.call != other.row.call:
        leaf = _largest(flow, value)
        other_leaf = _largest(flow, other)
        if leaf is not None and other_leaf is not None and leaf.key != other_leaf.key:
            return leaf, other_leaf
        pair = _unlike_inputs(flow, value, other)
        if pair is None:
            return None
        value, other = pair
    return None


def _for_each_other(
    leaf: Value, other_leaf: Value, reader: Value, rejoin: Rejoin
) -> Blamed:
    """Return two parameters that the loader, or what reads them, takes for each other."""
    names = f"{leaf.row.name} and {other_leaf.row.name}"
    words = f"{names} stand in for each other, or what reads their results does"
    return Blamed(leaf, rejoin.twin, words, line=reader.row.line)


def _largest(flow: Flow, value: Value) -> Value | None:
    """Return the largest parameter that a value reads: the weight, not the bias."""
    leaves = leaves_of(flow, [value.key])
    return max(leaves, key=lambda leaf: leaf.row.numel or 0, default=None)


def _unlike_inputs(flow: Flow, one: Value, other: Value) -> tuple[Value, Value] | None:
    """Return the inputs in which two values of one operator differ, if just one does."""
    if one.operator != other.operator or len(one.row.inputs) != len(other.row.inputs):
        return None
    pairs = zip(one.row.inputs, other.row.inputs, strict=True)
    unlike = [(a, b) for a, b in pairs if a != b]
    if any(key not in flow.values for pair in unlike for key in pair):
        return None
    values = [(flow.values[a], flow.values[b]) for a, b in unlike]
    computed = [pair for pair in values if all(_is_computed(flow, v) for v in pair)]
    return computed[0] if len(computed) == 1 else None


def _is_computed(flow: Flow, value: Value) -> bool:
    return value.is_call and not of_leaves_alone(flow, value)
