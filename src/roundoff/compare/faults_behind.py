"""What is wrong in what a value is made of, where it is known what the value should be?

After a transplant (see ``transplants``) one value of the candidate is known element by
element, and the fault lies between the values that agree and this one. Edits and
parameters are tried that make it so. Where none does, the reference computes there what
no small edit of the candidate gives, and the operator is named that it has no equal of.
"""

from __future__ import annotations

from itertools import combinations, permutations

import torch

from roundoff.compare.blamed_leaves import Blamed, leaves_of
from roundoff.compare.call_arguments import argument_differences
from roundoff.compare.exchanged_leaves import exchanged_leaves
from roundoff.compare.fitted_leaves import fitted_leaf
from roundoff.compare.recorded_rows import shape_read_first
from roundoff.compare.repair_trials import (
    BUDGET,
    ODD,
    PATIENCE,
    PLAIN,
    Region,
    Trials,
    best_repair,
    families_of,
    leaf_on_trial,
)
from roundoff.compare.traced_calls import TracedProgram
from roundoff.compare.transplants import Rejoin, before, orders_of, trials_of_value
from roundoff.compare.value_flow import Flow, Value
from roundoff.compare.value_regions import Sides, first_of
from roundoff.ops import operators_that

#: Values that the wrong region reads, of which some may be exchanged or not complete.
MOST_READ = 16

#: Values behind one, among which one must agree where it is right: twice the longest
#: way to write out an operator, as half of them only move values.
FAR = 2 * PATIENCE

_JOIN = operators_that("join")
_MOVE = operators_that("move values")
_PAIRS = operators_that("pair elements")


def repaired_behind(sides: Sides, rejoin: Rejoin) -> Blamed | None:
    """Return what makes a value right that is wrong; None where no repair is found."""
    trials = trials_of_value(sides, rejoin)
    return _repaired(sides, trials, rejoin) or left_out(
        sides, trials, rejoin, several=True
    )


def unlike_behind(sides: Sides, rejoin: Rejoin, likely: Blamed | None) -> Blamed | None:
    """Return what to name behind a value for which no repair is found.

    ``likely``: what the contents of parameters say. It is believed of a parameter with
    another one's values, as one of two that a loader exchanged is, which no repair of one
    shows; and of one that the wrong region reads and that holds nothing of the
    reference's. None where more lies between
    than one operator takes that is written out: then the value does not say where.
    """
    trials = trials_of_value(sides, rejoin)
    known = _other_constants(sides, rejoin) or fitted_leaf(sides, trials, rejoin)
    known = known or _believed(sides, rejoin, likely)
    if known is not None:
        return known
    flow = sides.candidate
    between = [flow.values[key] for key in rejoin.region]
    steps = {(v.row.line, v.operator) for v in between if v.computes and not v.inner}
    if len(steps) > PATIENCE:
        return None
    return _Unlike(sides, rejoin).blamed()


def _other_constants(sides: Sides, rejoin: Rejoin) -> Blamed | None:
    """Return a call that reads what the reference's reads, with other constants.

    It is no other way to the same where it is the first of what is wrong: a repair whose
    result has another shape cannot run.
    """
    for value in first_of(sides.candidate, set(rejoin.region)):
        for twin in first_of(sides.reference, set(rejoin.expected)):
            if value.inner or twin.inner or value.operator != twin.operator:
                continue
            if not _read_the_same(sides, twin, value):
                continue
            apart = _constants_of(sides, twin, value)
            if apart:
                words = f"{'; '.join(apart)}, on what the reference's reads too"
                return Blamed(value, twin, words, is_operator=True)
    return None


def _read_the_same(sides: Sides, twin: Value, value: Value) -> bool:
    """Return True where all that a call reads is what the reference's call reads."""
    if not value.inputs or len(value.inputs) != len(twin.inputs):
        return False
    return all(
        key in sides.candidate.values
        and other in sides.all_twins(sides.candidate.values[key])
        for key, other in zip(value.inputs, twin.inputs, strict=True)
    )


def _constants_of(sides: Sides, twin: Value, value: Value) -> tuple[str, ...]:
    """Return the constants that differ between two calls; none on other shapes."""
    rows, other_rows = sides.reference.step.rows, sides.candidate.step.rows
    ours = sides.reference.first.get(twin.row.call)
    theirs = sides.candidate.first.get(value.row.call)
    if ours is None or theirs is None:
        return ()
    shape = shape_read_first(rows, ours)
    other_shape = shape_read_first(other_rows, theirs)
    if shape is None or other_shape is None or len(shape) != len(other_shape):
        return ()
    return argument_differences(ours, theirs, (shape, other_shape))


def _believed(sides: Sides, rejoin: Rejoin, likely: Blamed | None) -> Blamed | None:
    if likely is None or likely.value.is_call:
        return None
    if likely.other is not None:
        return likely
    read = leaves_of(sides.candidate, sorted(rejoin.region))
    is_read = any(leaf.key == likely.value.key for leaf in read)
    return likely if is_read and likely.value.key not in sides.twins else None


def _repaired(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    region = Region(
        rejoin.region | {rejoin.value.key}, rejoin.expected | {rejoin.twin.key}
    )
    odd = leaf_on_trial(sides, trials, region, of=ODD)
    if odd is not None:
        return odd
    found = best_repair(
        sides, trials, region, lambda: _between(sides, trials, rejoin, region)
    )
    if isinstance(found, Blamed):
        return found
    if found is not None and found.ends:
        [first, *_] = found.call.rows
        value = sides.candidate.values[first.record]
        words = f"{found.words} it gives what the reference has"
        return Blamed(value, rejoin.twin, words, is_operator=True)
    return leaf_on_trial(sides, trials, region)


def _between(
    sides: Sides, trials: Trials, rejoin: Rejoin, region: Region
) -> Blamed | None:
    """Return a parameter, two values that are exchanged, or what is left out."""
    return (
        leaf_on_trial(sides, trials, region, of=PLAIN)
        or exchanged_leaves(sides, trials, region)
        or _exchanged(sides, trials, rejoin)
        or _mistaken(sides, trials, rejoin)
        or left_out(sides, trials, rejoin)
    )


def _exchanged(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    """Return what puts two right values in each other's place.

    They are followed back as long as the same operators make both: to the call that cuts
    both out of one value, or to parameters, which the loader may have exchanged.
    """
    trials.left = BUDGET
    flow = sides.candidate
    made = [value for value in before(flow, rejoin.region) if not value.inner]
    made = [value for value in made if value.is_call and value.is_number]
    for one, other in combinations(made[:MOST_READ], 2):
        first, second = flow.tensor(one.key), flow.tensor(other.key)
        if first is None or second is None or first.shape != second.shape:
            continue
        if torch.equal(first, second):
            continue
        if trials.outcome({}, {one.key: second, other.key: first})[0]:
            return _origin(flow, one, other, rejoin)
    return None


def _mistaken(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    """Return the first call that reads one value where another is meant, each time.

    In all that the wrong region computes, and nowhere else.
    """
    trials.left = BUDGET
    flow = sides.candidate
    made = [value for value in before(flow, rejoin.region) if not value.inner]
    made = [value for value in made if value.is_call and value.is_number]
    handed_on = [v.key for v in before(flow, rejoin.region) if v.operator in _MOVE]
    for one, other in permutations(made[:MOST_READ], 2):
        first, second = flow.tensor(one.key), flow.tensor(other.key)
        if first is None or second is None or first.shape != second.shape:
            continue
        only = {*rejoin.region, *handed_on} - {one.key}
        near = Trials(trials.program, trials.goal, trials.left, only)
        if torch.equal(first, second) or not near.outcome({}, {one.key: second})[0]:
            continue
        readers = [flow.values[key] for key in flow.readers.get(one.key, ())]
        readers = [v for v in readers if v.key in rejoin.region and not v.inner]
        if readers:
            words = f"it should read what {other.operator} of {other.row.site} gives"
            first_reader = min(readers, key=lambda value: value.order)
            return Blamed(first_reader, rejoin.twin, words, is_operator=True)
    return None


def _origin(flow: Flow, one: Value, other: Value, rejoin: Rejoin) -> Blamed:
    there = f"{one.operator} and {other.operator}"
    words = f"the results of {there} stand in each other's place"
    readers = [flow.values[key] for key in flow.readers.get(one.key, ())]
    readers = [v for v in readers if v.key in rejoin.region and not v.inner]
    reader = min(readers, key=lambda value: value.order, default=one)
    is_followed = False
    while one.row.call != other.row.call:
        leaves = leaves_of(flow, [one.key])
        others = leaves_of(flow, [other.key])
        if leaves and others and leaves[0].key != others[0].key:
            names = f"{leaves[0].row.name} and {others[0].row.name}"
            return Blamed(leaves[0], rejoin.twin, f"{names} stand in for each other")
        pair = _unlike_inputs(flow, one, other)
        if pair is None:
            one = one if is_followed else reader
            break
        one, other = pair
        is_followed = True
    return Blamed(one, rejoin.twin, words, is_operator=True)


def _unlike_inputs(flow: Flow, one: Value, other: Value) -> tuple[Value, Value] | None:
    """Return the inputs in which two values of one operator differ, if just one does."""
    if one.operator != other.operator or len(one.row.inputs) != len(other.row.inputs):
        return None
    pairs = zip(one.row.inputs, other.row.inputs, strict=True)
    unlike = [(a, b) for a, b in pairs if a != b]
    if not unlike or any(key not in flow.values for key in unlike[0]):
        return None
    first, second = (flow.values[key] for key in unlike[0])
    return (first, second) if first.is_call and second.is_call else None


def left_out(
    sides: Sides, trials: Trials, rejoin: Rejoin, *, several: bool = False
) -> Blamed | None:
    """Return a right value of which the reference makes another one before it is read.

    One call of the reference is left out: with its result in the value's place all is
    right. With ``several`` it may be several calls, one after the other.
    """
    trials.left = BUDGET
    flow = sides.candidate
    reference = sides.reference
    wanted = [reference.values[key] for key in sorted(rejoin.expected)]
    wanted = [twin for twin in wanted if twin.computes and twin.is_number]
    read = [v for v in before(flow, rejoin.region) if v.is_call and v.is_number]
    for value in read[:MOST_READ]:
        held = flow.tensor(value.key)
        if held is None or value.inner:
            continue
        twins = set(sides.all_twins(value))
        for twin in wanted:
            content = reference.tensor(twin.key)
            if content is None or content.numel() != held.numel():
                continue
            if twins.isdisjoint(_read_by(reference, twin, several)):
                continue
            for order in orders_of(content, held):
                given = content.permute(order).reshape(held.shape).to(held.dtype)
                if trials.outcome({}, {value.key: given.contiguous()})[0]:
                    named = _Unlike(sides, rejoin).outside_of_right_lines(value)
                    words = f"left out is {_there(twin)}"
                    return Blamed(named, twin, words, is_operator=True)
    return None


def _read_by(flow: Flow, value: Value, several: bool) -> set[int]:
    """Return what a call reads, behind moves; with ``several`` all that it is made of."""
    read: set[int] = set()
    waiting = list(value.inputs)
    while waiting:
        key = waiting.pop()
        if key in read or key not in flow.values:
            continue
        read.add(key)
        source = flow.values[key]
        if several or not source.computes or source.operator in _MOVE:
            waiting += source.inputs
    return read


def _there(twin: Value) -> str:
    line = f" ({twin.row.line})" if twin.row.line else ""
    return f"{twin.operator} of {twin.row.site}{line}"


class _Unlike:
    """The operator to name where no repair is found."""

    def __init__(self, sides: Sides, rejoin: Rejoin) -> None:
        self._sides = sides
        self._rejoin = rejoin
        self._families = families_of(TracedProgram(sides.candidate))

    def blamed(self) -> Blamed:
        """Name the first operator behind the values that agree.

        Where an operator before it adds nothing, which the reference does not have, it
        is that one.
        """
        flow = self._sides.candidate
        rejoin = self._rejoin
        heads = first_of(flow, set(rejoin.region))
        region = [flow.values[key] for key in rejoin.region]
        heads += [value for value in region if value.operator in _JOIN]
        heads.sort(key=lambda value: value.order)
        idle = next((v for v in before(flow, rejoin.region) if self._is_idle(v)), None)
        if idle is not None:
            words = f"it changes nothing; the reference has {_there(rejoin.twin)}"
            return Blamed(idle, rejoin.twin, words, is_operator=True)
        first = heads[0] if heads else rejoin.value
        if first.inner:
            first = flow.values[first.row.record]
        words = f"with {_there(rejoin.twin)} all that follows is right"
        return Blamed(first, rejoin.twin, words, is_operator=True)

    def _is_idle(self, value: Value) -> bool:
        """Return True for a sum or product that is what it was made of, in each turn."""
        if value.operator not in _PAIRS or value.inner or not value.is_call:
            return False
        if value.says_nothing:
            return False
        calls = self._families.get(value.row.call, ())
        rows = [row for call in calls for row in call.rows]
        return bool(rows) and all(self._changes_nothing(row.record) for row in rows)

    def _changes_nothing(self, key: int) -> bool:
        flow = self._sides.candidate
        tensor = flow.tensor(key)
        sources = [flow.tensor(k) for k in flow.values[key].inputs]
        if flow.parameters_read(key):
            return False
        return tensor is not None and any(
            source is not None
            and source.shape == tensor.shape
            and torch.equal(source, tensor)
            for source in sources
        )

    def outside_of_right_lines(self, value: Value) -> Value:
        """Return the first value made of one whose line gives no right values elsewhere.

        What a function gives right in another call, it is not at fault for; its caller
        may be.
        """
        flow = self._sides.candidate
        last = self._rejoin.value
        waiting = [value]
        seen = {value.key}
        while waiting:
            each = waiting.pop(0)
            if not each.inner and not self._is_right_elsewhere(each):
                return each
            keys = [k for k in flow.readers.get(each.key, ()) if k not in seen]
            keys = [k for k in keys if k in self._rejoin.region or each is last]
            seen.update(keys)
            waiting += sorted((flow.values[k] for k in keys), key=lambda v: v.order)
        return value

    def _is_right_elsewhere(self, value: Value) -> bool:
        """Return True where another call of the same line leads to a value that agrees."""
        return any(
            self._rejoins(row.record)
            for call in self._families.get(value.row.call, ())
            if call.first.call != value.row.call
            for row in call.rows
        )

    def _rejoins(self, key: int) -> bool:
        flow = self._sides.candidate
        waiting = [key]
        seen = {key}
        while waiting and len(seen) < FAR:
            for reader in flow.readers.get(waiting.pop(0), ()):
                value = flow.values[reader]
                if value.row.phase != "forward" or reader in seen:
                    continue
                agrees = reader in self._sides.twins and not value.says_nothing
                if agrees and value.computes and value.operator not in _MOVE:
                    return True
                seen.add(reader)
                waiting.append(reader)
        return False
