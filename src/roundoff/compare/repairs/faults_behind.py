"""What is wrong in what a value is made of, where it is known what the value should be?

After a transplant (see ``transplants``) one value of the candidate is known element by
element, and the fault lies between the values that agree and this one. Edits and
parameters are tried that make it so. Where none does, the reference computes there what
no small edit of the candidate gives, and the operator is named that it has no equal of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import combinations, product, repeat

import torch

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.contained_values import after_contained
from roundoff.compare.blame.near_leaves import leaves_of, of_leaves_alone
from roundoff.compare.records.call_arguments import argument_differences
from roundoff.compare.records.parameter_content import EQUAL, REORDERED, relation
from roundoff.compare.records.recorded_rows import shape_read_first
from roundoff.compare.records.value_sketch import in_reals
from roundoff.compare.repairs.exchanged_leaves import exchanged_leaves
from roundoff.compare.repairs.fitted_leaves import (
    fitted_factor,
    fitted_leaf,
    fitted_table,
)
from roundoff.compare.repairs.fitted_masks import fitted_mask
from roundoff.compare.repairs.goals import FEWEST, apart
from roundoff.compare.repairs.leaf_trials import ODD, PLAIN, leaf_on_trial
from roundoff.compare.repairs.misordered_values import misordered
from roundoff.compare.repairs.named_repairs import blamed_for, there
from roundoff.compare.repairs.other_numbers import odd_number, other_number
from roundoff.compare.repairs.rejoins import Rejoin
from roundoff.compare.repairs.repair_trials import best_repair
from roundoff.compare.repairs.replaceable_values import before
from roundoff.compare.repairs.transplants import in_layout_of, trials_of_value
from roundoff.compare.repairs.trials import (
    BUDGET,
    PATIENCE,
    Region,
    Trials,
    families_of,
)
from roundoff.compare.rounding.rounding_bound import DIFFERENCES, PRODUCTS
from roundoff.compare.values.fault_lines import (
    FaultLines,
    changes_nothing,
    computing_readers,
    is_read_rightly,
)
from roundoff.compare.values.traced_calls import TracedProgram
from roundoff.compare.values.value_flow import Flow, Value, constants_of
from roundoff.compare.values.value_regions import (
    Sides,
    first_of,
    first_over_turns,
    upstream,
)
from roundoff.ops import operators_that

#: Values that the wrong region reads, of which some may be exchanged or not complete.
MOST_READ = 16

_JOIN = operators_that("join")
_MOVE = operators_that("move values")
_PAIRS = operators_that("pair elements")


def repaired_behind(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    """Return what makes a value right that is wrong; None where no repair is found."""
    return (
        _repaired(sides, trials, rejoin)
        or fitted_mask(sides, trials, rejoin)
        or left_out(sides, trials, rejoin, several=True)
    )


def unlike_behind(sides: Sides, rejoin: Rejoin, likely: Blamed | None) -> Blamed | None:
    """Return what to name behind a value for which no repair is found.

    ``likely``: what the contents of parameters say. It is believed of a parameter with
    another one's values, as one of two that a loader exchanged is, which no repair of one
    shows; and of one that the wrong region reads and that holds nothing of the
    reference's. None where more lies between
    than one operator takes that is written out: then the value does not say where, but a
    number may that the reference does not have.
    """
    trials = trials_of_value(sides, rejoin)
    blamed = (
        _other_constants(sides, rejoin)
        or fitted_leaf(sides, trials, rejoin)
        or fitted_table(sides, trials, rejoin)
        or fitted_factor(sides, rejoin)
    )
    blamed = blamed or _believed(sides, rejoin, likely)
    blamed = blamed or _part_of_another(sides, rejoin) or _scaled(sides, rejoin)
    if blamed is not None:
        return blamed
    flow = sides.candidate
    between = [flow.values[key] for key in rejoin.region]
    steps = {(v.row.line, v.operator) for v in between if v.computes and not v.inner}
    if len(steps) > PATIENCE:
        return odd_number(sides, rejoin)
    number = other_number(sides, rejoin)
    if number is not None:
        return number
    first = _Unlike(sides, rejoin).blamed()
    if first.value.key in constants_of(flow):
        return first
    contained = after_contained(sides, rejoin.region, rejoin.expected, rejoin.twin)
    return contained or first


def unlike(sides: Sides, rejoin: Rejoin) -> Blamed:
    """Return a value with which all is right, where nothing says what of it is made wrongly."""
    words = f"with {there(rejoin.twin)} all that follows is right"
    line = FaultLines(sides, rejoin.region).of_operator(rejoin.value)
    value = rejoin.value
    return Blamed(value, rejoin.twin, words, is_operator=True, line=line, is_sure=False)


def _is_clear(sides: Sides, rejoin: Rejoin) -> bool:
    """Return True for a fault that does so much that it would show elsewhere too.

    As far from what agrees as from values that have nothing in common.
    """
    present = sides.candidate.tensor(rejoin.value.key)
    return present is not None and apart(rejoin.held, present) > sides.limit**0.5


def _part_of_another(sides: Sides, rejoin: Rejoin) -> Blamed | None:
    """Return a parameter of which a part is read that another of the reference's holds.

    A loader that stacks layers may take two parameters for each other in all of them.
    Where the reference reads a parameter that is not there, it reads one of the same size
    that does not belong there.
    """
    reference, flow = sides.reference, sides.candidate
    ours = leaves_of(reference, sorted(rejoin.expected | {rejoin.twin.key}))
    theirs = [
        (flow.values[key], source)
        for reader in sorted(rejoin.region | {rejoin.value.key})
        for key in flow.values[reader].inputs
        if key in flow.values
        and (source := _leaf_behind(flow, flow.values[key])) is not None
    ]
    present = {key for piece, _ in theirs for key in sides.all_twins(piece)}
    lost = [leaf for leaf in ours if leaf.key not in present and not leaf.says_nothing]
    for piece, source in theirs:
        twins = [reference.values[key] for key in sides.all_twins(piece)]
        others = {
            leaf.key: leaf
            for leaf in map(_leaf_behind, repeat(reference), twins)
            if leaf
        }
        if piece.says_nothing or not others or any(leaf.key in others for leaf in ours):
            continue
        wanted = [leaf for leaf in lost if leaf.row.numel == piece.row.numel]
        if wanted:
            held = min(others.values(), key=lambda leaf: leaf.order)
            words = (
                f"{source.row.name} holds {held.row.name} there; the reference has "
                f"{wanted[0].row.name}"
            )
            return Blamed(source, wanted[0], words)
    return None


def _leaf_behind(flow: Flow, value: Value) -> Value | None:
    """Return the parameter that a value is, or is moved or cut out of; None for no such."""
    while value.is_call and _hands_on(value) and value.inputs:
        source = flow.values.get(value.inputs[0])
        if source is None:
            return None
        value = source
    return value if value.row.name and not value.is_call else None


def _scaled(sides: Sides, rejoin: Rejoin) -> Blamed | None:
    """Return a value that is so many times what the reference has, in every element."""
    present = sides.candidate.tensor(rejoin.value.key)
    if present is None or present.numel() < FEWEST or not rejoin.value.is_number:
        return None
    wanted = in_reals(rejoin.held).to(torch.float64).reshape(-1)
    values = in_reals(present).to(torch.float64).reshape(-1)
    square = float(wanted @ wanted)
    if values.shape != wanted.shape or not square > 0 or not values.any():
        return None
    factor = float(values @ wanted) / square
    rest = float((values - factor * wanted).norm())
    if not math.isfinite(rest) or rest > sides.limit * float(values.norm()):
        return None
    words = f"it is {factor:.6g} times what {there(rejoin.twin)} gives"
    line = FaultLines(sides, rejoin.region).of_operator(rejoin.value)
    return Blamed(rejoin.value, rejoin.twin, words, is_operator=True, line=line)


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
                lines = FaultLines(
                    sides, rejoin.region, is_clear=_is_clear(sides, rejoin)
                )
                line = lines.of_operator(value)
                return Blamed(value, twin, words, is_operator=True, line=line)
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
    rows = sides.reference.step.rows
    other_rows = sides.candidate.step.rows
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
    is_read = is_read_behind(sides, rejoin, likely.value)
    if likely.other is not None:
        return likely if is_read or not rejoin.agrees else None
    if not is_read or likely.value.key in sides.twins:
        return None
    return None if is_read_rightly(sides, likely.value) else likely


def is_read_behind(sides: Sides, rejoin: Rejoin, leaf: Value) -> bool:
    """Return True for a parameter that a value is made of: one that is read after a value
    with which all is right is right too."""
    region = sorted(rejoin.region | {rejoin.value.key})
    return any(read.key == leaf.key for read in leaves_of(sides.candidate, region))


def is_rightly_filled(sides: Sides, likely: Blamed) -> bool:
    """Return True for a parameter that no mistake of a loader has filled.

    It holds what the reference's does as it is, or with the slices of an axis in an order
    of its own, or is the whole of one where it should be a part of another: two that a
    loader exchanges have as many elements.
    """
    held = sides.candidate.tensor(likely.value.key)
    twin = likely.reference
    wanted = None if twin is None else sides.reference.tensor(twin.key)
    if held is None or wanted is None or likely.value.is_call:
        return False
    if likely.value.key in sides.twins and wanted.numel() != held.numel():
        return True
    how = relation(wanted, held)
    return how is not None and how.kind in (EQUAL, REORDERED)


def _repaired(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    region = Region(
        rejoin.region | {rejoin.value.key}, rejoin.expected | {rejoin.twin.key}
    )
    odd = leaf_on_trial(sides, trials, region, of=ODD)
    if odd is not None:
        return odd
    repair = best_repair(
        sides, trials, region, lambda: _between(sides, trials, rejoin, region)
    )
    if isinstance(repair, Blamed):
        return repair
    if repair is not None and repair.ends:
        return blamed_for(sides, repair, region.parted, rejoin.twin)
    return leaf_on_trial(sides, trials, region)


def _between(
    sides: Sides, trials: Trials, rejoin: Rejoin, region: Region
) -> Blamed | None:
    """Return a parameter, values that are exchanged or in another order, what is left out."""
    found = (
        leaf_on_trial(sides, trials, region, of=PLAIN)
        or exchanged_leaves(sides, trials, region)
        or exchanged(sides, trials, rejoin)
        or _mistaken(sides, trials, rejoin)
    )
    if found is not None:
        return found
    if rejoin.twin.key in sides.all_twins(rejoin.value):
        # the elements are right: what is left out would change them
        return misordered(sides, trials, rejoin) or left_out(sides, trials, rejoin)
    return left_out(sides, trials, rejoin) or misordered(sides, trials, rejoin)


def _read(flow: Flow, rejoin: Rejoin) -> list[Value]:
    """Return what the wrong region reads: what is computed before what that is moved to.

    A value that is read twice goes through moves of each reader. What the model is given
    counts, its parameters do not.
    """
    read = [value for value in before(flow, rejoin.region) if not value.inner]
    read = [value for value in read if value.is_call or not value.row.name]
    read = [value for value in read if value.is_number]
    read.sort(key=_hands_on)
    return read[:MOST_READ]


def _hands_on(value: Value) -> bool:
    is_move = value.operator in _MOVE and value.operator not in _JOIN
    return not value.computes or is_move


def exchanged(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    """Return what puts two right values in each other's place.

    They are followed back as long as the same operators make both: to the call that cuts
    both out of one value, or to parameters, which the loader may have exchanged.
    """
    trials.left = BUDGET
    flow = sides.candidate
    for value, other in combinations(_read(flow, rejoin), 2):
        first = flow.tensor(value.key)
        second = flow.tensor(other.key)
        if first is None or second is None or first.shape != second.shape:
            continue
        if torch.equal(first, second):
            continue
        if trials.outcome({}, {value.key: second, other.key: first})[0]:
            return _origin(flow, value, other, rejoin)
    return None


def _mistaken(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    """Return the first call that reads one value where another is meant, each time.

    In all that the wrong region computes, and nowhere else. What is meant is another
    value that the region reads, or one that the reference's reads.
    """
    trials.left = BUDGET
    flow = sides.candidate
    read = _read(flow, rejoin)
    meant = {each.key: each for each in (*read, *_read_by_reference(sides, rejoin))}
    near = trials
    for value, other in product(read, meant.values()):
        first = flow.tensor(value.key)
        second = flow.tensor(other.key)
        if first is None or second is None or first.shape != second.shape:
            continue
        near = _in_region_alone(flow, near, rejoin, value)
        if torch.equal(first, second) or not near.outcome({}, {value.key: second})[0]:
            continue
        readers = [v for v in computing_readers(flow, value) if v.key in rejoin.region]
        if readers:
            first_reader = _joining(sides, value, rejoin) or min(
                readers, key=lambda each: each.order
            )
            return _misread(sides, rejoin, first_reader, (value, other))
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
    return _misread(sides, replace(rejoin, region=region), first, (value, meant[0]))


def unmade(sides: Sides, rejoin: Rejoin, region: frozenset[int]) -> Blamed | None:
    """Return what reads a right value as it is, where the reference makes more of it first.

    ``region``: of the programs' difference. Both programs read the value elsewhere too, and
    as it is.
    """
    flow, reference = sides.candidate, sides.reference
    value = rejoin.value
    twins = set(sides.all_twins(value))
    is_right = value.key not in region and value.computes
    if not is_right or twins.isdisjoint(_read_by(reference, rejoin.twin)):
        return None
    readers = {each.row.line for each in computing_readers(flow, value)}
    reading = [reference.values[k] for t in twins for k in reference.readers.get(t, ())]
    is_read_elsewhere = any(
        each.computes and each.key != rejoin.twin.key and not _hands_on(each)
        for each in reading
    )
    if len(readers) < 2 or not is_read_elsewhere:
        return None
    lines = FaultLines(sides, region)
    named, line = lines.of_left_out(
        _moved_on(flow, value), rejoin.twin, is_right_elsewhere=True
    )
    words = f"left out is {there(rejoin.twin)}"
    return Blamed(named, rejoin.twin, words, is_operator=True, line=line)


def _joining(sides: Sides, value: Value, rejoin: Rejoin) -> Value | None:
    """Return what joins a value to others for a wrong region, where nothing else that reads
    them so is right."""
    flow = sides.candidate
    readers = (flow.values[key] for key in flow.readers.get(value.key, ()))
    for reader in readers:
        is_join = reader.operator in _JOIN and reader.row.phase == value.row.phase
        if is_join and reader.row.line is not None and not reader.inner:
            computing = {each.key for each in computing_readers(flow, reader)}
            is_read_there = not computing.isdisjoint(rejoin.region)
            if is_read_there and computing.isdisjoint(sides.twins):
                return reader
    return None


def _misread(
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
    line = FaultLines(sides, rejoin.region).of_operator(reader)
    leaf = _common_leaf(sides.candidate, value, other)
    is_function_right = line != reader.row.line
    if leaf is None or not is_function_right:
        return Blamed(reader, rejoin.twin, words, is_operator=True, line=line)
    words = f"{leaf.row.name} stands in another order than {reader.row.site} takes it: {words}"
    return Blamed(leaf, rejoin.twin, words, line=reader.row.line)


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


def _in_region_alone(
    flow: Flow, trials: Trials, rejoin: Rejoin, value: Value
) -> Trials:
    """Return trials in which another value is read in the wrong region, and nowhere else.

    They go on with what is left of the budget.
    """
    handed_on = [v.key for v in before(flow, rejoin.region) if v.operator in _MOVE]
    only = {*rejoin.region, *handed_on} - {value.key}
    return Trials(trials.program, trials.goal, left=trials.left, only=only)


def _read_by_reference(sides: Sides, rejoin: Rejoin) -> list[Value]:
    """Return the candidate's values that are what the reference reads there."""
    wanted = {value.key for value in before(sides.reference, rejoin.expected)}
    return [
        value
        for value in sides.candidate.in_order()
        if value.is_call
        and value.is_number
        and not value.inner
        and not value.says_nothing
        and wanted.intersection(sides.all_twins(value))
    ][:MOST_READ]


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


def left_out(
    sides: Sides, trials: Trials, rejoin: Rejoin, *, several: bool = False
) -> Blamed | None:
    """Return a right value of which the reference makes another one before it is read.

    One call of the reference is left out: with its result in the value's place all is
    right. With ``several`` it may be several calls, one after the other.
    """
    # in other turns of a loop it is left out too
    everywhere = trials.alone()
    near = trials
    flow = sides.candidate
    reference = sides.reference
    wanted = [reference.values[key] for key in sorted(rejoin.expected)]
    wanted = [twin for twin in wanted if twin.computes and twin.is_number]
    for value in _read(flow, rejoin):
        held = flow.tensor(value.key)
        if held is None:
            continue
        twins = set(sides.all_twins(value))
        made_of_it = _made_of(reference, twins, several)
        near = _in_region_alone(flow, near, rejoin, value)
        for twin in wanted:
            if twin.key not in made_of_it:
                continue
            content = reference.tensor(twin.key)
            if content is None:
                continue
            for moved in in_layout_of(sides, held, content):
                instead = {value.key: moved}
                is_wrong_everywhere = everywhere.outcome({}, instead)[0]
                if is_wrong_everywhere or near.outcome({}, instead)[0]:
                    region = rejoin.region | {rejoin.value.key}
                    lines = FaultLines(sides, region)
                    last = _moved_on(flow, value)
                    idle = _idle_leaf(sides, last, [twin.key])
                    if idle is not None:
                        return idle
                    named, line = lines.of_left_out(
                        last, twin, is_right_elsewhere=not is_wrong_everywhere
                    )
                    first = _first_left_out(reference, twin, twins)
                    words = f"left out is {there(twin)}"
                    if first.row.line != twin.row.line:
                        words = f"left out is all from {there(first)} to {there(twin)}"
                    return Blamed(named, first, words, is_operator=True, line=line)
    return None


def _idle_leaf(sides: Sides, value: Value, expected: Iterable[int]) -> Blamed | None:
    """Return the parameter of zeros that a call adds, or of ones that it multiplies by.

    A loader that leaves one out leaves what the module begins with. The reference has a
    parameter of as many elements that the candidate lacks, read by what is ``expected``.
    """
    flow = sides.candidate
    if value.operator not in DIFFERENCES | PRODUCTS:
        return None
    neutral = 0.0 if value.operator in DIFFERENCES else 1.0
    wanted = {
        leaf.row.numel: leaf
        for leaf in leaves_of(sides.reference, expected)
        if leaf.key not in sides.agreeing
    }
    for key in value.row.inputs:
        source = flow.values.get(key)
        if source is None or source.sketch is None or not source.sketch.constant:
            continue
        ours = wanted.get(source.row.numel)
        if (
            ours is None
            or not source.sketch.exact
            or source.sketch.values[0] != neutral
        ):
            continue
        leaf = _leaf_behind(flow, source)
        if leaf is not None:
            words = (
                f"{leaf.row.name} holds {neutral:g} there, which changes nothing; the "
                f"reference has {ours.row.name}"
            )
            return Blamed(leaf, ours, words)
    return None


def _first_left_out(flow: Flow, last: Value, twins: AbstractSet[int]) -> Value:
    """Return the first that computes with one of ``twins`` and leads to the last."""
    between = upstream(flow, [last.key], lambda value: value.key not in twins)
    reading = [
        flow.values[key]
        for key in between
        if not twins.isdisjoint(_read_by(flow, flow.values[key]))
    ]
    computing = [v for v in reading if not _hands_on(v) and v.row.line is not None]
    return min(computing, key=lambda value: value.order, default=last)


def _moved_on(flow: Flow, value: Value) -> Value:
    """Return what a value is moved to, as long as nothing else reads it."""
    while True:
        readers = [flow.values[key] for key in flow.readers.get(value.key, ())]
        readers = [v for v in readers if v.row.phase == value.row.phase]
        if len(readers) != 1 or not _hands_on(readers[0]) or readers[0].inner:
            return value
        value = readers[0]


def _read_by(flow: Flow, value: Value) -> set[int]:
    """Return what a call reads, behind moves and the steps inside the call."""
    read: set[int] = set()
    waiting = list(value.inputs)
    while waiting:
        key = waiting.pop()
        if key in read or key not in flow.values:
            continue
        read.add(key)
        if _is_passed(flow.values[key]):
            waiting += flow.values[key].inputs
    return read


def _made_of(flow: Flow, keys: AbstractSet[int], several: bool) -> set[int]:
    """Return what reads any of ``keys``, as ``_read_by`` has it.

    With ``several`` all that is made of them.
    """
    made: set[int] = set()
    waiting = list(keys)
    while waiting:
        read = waiting.pop()
        for key in (*flow.readers.get(read, ()), *flow.parts.get(read, ())):
            if key in made:
                continue
            made.add(key)
            if several or _is_passed(flow.values[key]):
                waiting.append(key)
    return made


def _is_passed(value: Value) -> bool:
    """Return True for what moves a value, and for a step inside a call."""
    return value.inner or not value.computes or value.operator in _MOVE


class _Unlike:
    """The operator to name where no repair is found."""

    def __init__(self, sides: Sides, rejoin: Rejoin) -> None:
        self._sides = sides
        self._rejoin = rejoin
        self._families = families_of(TracedProgram(sides.candidate))
        region = rejoin.region | {rejoin.value.key}
        is_clear = _is_clear(sides, rejoin)
        self._lines = FaultLines(sides, region, is_clear=is_clear)

    def blamed(self) -> Blamed:
        """Name the first operator behind the values that agree.

        Where an operator before it adds nothing, which the reference does not have, it
        is that one.
        """
        flow = self._sides.candidate
        rejoin = self._rejoin
        heads = first_of(flow, set(rejoin.region))
        region = [flow.values[key] for key in rejoin.region]
        joins = [value for value in region if value.operator in _JOIN]
        idle = next((v for v in before(flow, rejoin.region) if self._is_idle(v)), None)
        if idle is not None:
            expected = sorted(rejoin.expected | {rejoin.twin.key})
            leaf = _idle_leaf(self._sides, idle, expected)
            if leaf is not None:
                return leaf
            words = f"it changes nothing; the reference has {there(rejoin.twin)}"
            line = self._lines.of_operator(idle)
            return Blamed(
                idle, rejoin.twin, words, is_operator=True, line=line, is_sure=False
            )
        # where no number is computed, the first place or mask is wrong, or the first move
        calls = [value for value in region if value.is_call and not value.inner]
        places = [value for value in calls if value.inputs and not _hands_on(value)]
        candidates = heads + joins or places or calls or [rejoin.value]
        first = min(candidates, key=lambda v: v.order)
        first = first_over_turns(flow, first, heads, set(rejoin.region))
        if first.inner:
            first = flow.values[first.row.record]
        what = "all that follows" if rejoin.agrees else "more of what follows"
        words = f"with {there(rejoin.twin)} {what} is right"
        line = self._lines.of_operator(first)
        return Blamed(
            first, rejoin.twin, words, is_operator=True, line=line, is_sure=False
        )

    def _is_idle(self, value: Value) -> bool:
        """Return True for a sum or product that is what it was made of, in each turn."""
        flow = self._sides.candidate
        calls = self._families.get(value.row.call, ())
        rows = [row for call in calls for row in call.rows]
        turns = [flow.values[row.record] for row in rows]
        return bool(turns) and all(changes_nothing(flow, turn) for turn in turns)
