"""What is at fault in a forward pass whose tensors were kept: what is tried, in which order.

What makes all results agree goes before what only helps, and what is likely before what
needs many trials.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product

from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.blamed_layouts import blamed_layout
from roundoff.compare.blame.blamed_leaves import blamed_leaf
from roundoff.compare.blame.blamed_places import blamed_places
from roundoff.compare.blame.blamed_steps import blamed_step
from roundoff.compare.blame.blamed_tables import blamed_table
from roundoff.compare.blame.contained_values import blamed_after_contained
from roundoff.compare.blame.repeated_leaves import blamed_repeat
from roundoff.compare.blame.unlike_operands import blamed_move
from roundoff.compare.ports.port_results import last_results, wide
from roundoff.compare.ports.scaled_losses import scaled_loss, scaled_term
from roundoff.compare.records.value_sketch import Sketch
from roundoff.compare.repairs.alike_leaves import leaves_alike
from roundoff.compare.repairs.exchanged_functions import exchanged_functions
from roundoff.compare.repairs.exchanged_leaves import exchanged_leaves
from roundoff.compare.repairs.exchanged_numbers import exchanged_numbers
from roundoff.compare.repairs.faults_behind import repaired_behind
from roundoff.compare.repairs.followed_columns import unfollowed
from roundoff.compare.repairs.goals import CLEARLY, SEVERAL
from roundoff.compare.repairs.layers_read_again import read_again
from roundoff.compare.repairs.leaf_changes import LeafChange
from roundoff.compare.repairs.leaf_trials import ODD, leaf_on_trial
from roundoff.compare.repairs.left_out_values import left_out, unmade
from roundoff.compare.repairs.left_state import left_state
from roundoff.compare.repairs.misordered_values import common_order
from roundoff.compare.repairs.misread_values import exchanged, misread
from roundoff.compare.repairs.moved_terms import moved_term
from roundoff.compare.repairs.named_behind import (
    is_read_behind,
    is_rightly_filled,
    unlike_behind,
)
from roundoff.compare.repairs.named_repairs import TURNS, blamed_for, stands_in_order
from roundoff.compare.repairs.ordered_constants import ordered_constant
from roundoff.compare.repairs.other_layers import in_all_layers
from roundoff.compare.repairs.rejoins import Rejoin
from roundoff.compare.repairs.repair_trials import Repair, best_repair
from roundoff.compare.repairs.transplants import (
    in_layout_of,
    regains_in_order,
    rejoin_of,
    trials_of_value,
)
from roundoff.compare.repairs.trials import BUDGET, Region, Trials, trials_of
from roundoff.compare.repairs.turned_places import turned_with_padding
from roundoff.compare.repairs.unlike_values import unlike
from roundoff.compare.repairs.wrong_indexes import wrong_index
from roundoff.compare.values.value_flow import Flow, Value, constants_of
from roundoff.compare.values.value_regions import Part, Sides, upstream

#: Layouts of a value that are tried in another one's place.
MOST_LAYOUTS = 2


def blamed_on_tensors(
    sides: Sides, part: Part, results: tuple[Sequence[int], Sequence[int]]
) -> Blamed | None:
    """Return what is at fault by runs of the candidate's calls again."""
    _, last = last_results(sides)
    needed = [*results[1], *([last.key] if last is not None else [])]
    trials = trials_of(sides, _ends(sides, *results), needed, part.expected)
    certain = unfollowed(sides, part, trials)
    certain = certain or turned_with_padding(sides, part, trials)
    certain = certain or wrong_index(sides, part, trials)
    certain = certain or read_again(sides, part, trials)
    certain = certain or exchanged_functions(sides, part, trials)
    if certain is not None:
        return certain
    trials.left = BUDGET
    blamed = blamed_leaf(sides, part) or blamed_layout(sides, part)
    if blamed is not None and _is_right_with(sides, part, trials, blamed):
        return _turned_otherwise(sides, part, trials, blamed.value) or blamed
    ordered = ordered_constant(sides, trials, Region(part.region, part.expected))
    if ordered is not None:
        return ordered
    if blamed is not None and is_rightly_filled(sides, blamed):
        blamed = None
    state = left_state(sides, part, trials) if blamed is None else None
    if state is not None:
        return state
    end: Rejoin | None = None
    # a transplant says where recorded values part, not where any values would
    if not sides.made_up:
        end = rejoin_of(sides, part, trials)
        repaired = None
        if end is not None:
            repaired = misread(sides, end, part.region)
            repaired = repaired or unmade(sides, end, part.region)
        if repaired is None and end is not None and not end.agrees:
            repaired = _scaled(sides, part, trials)
        if repaired is None and end is not None:
            repaired = _repaired(sides, part, trials, end)
        if repaired is not None:
            return repaired
        trials.left = BUDGET
    is_in_turns = end is None and not sides.made_up
    if not sides.made_up:
        end = end or _end_of(sides, part, results)
    return (
        _tried(sides, part, trials, blamed, end, is_in_turns=is_in_turns)
        or wrong_index(sides, part, trials, is_patient=True)
        or blamed_step(sides, part)
        or blamed_after_contained(sides, part)
    )


def _scaled(sides: Sides, part: Part, trials: Trials) -> Blamed | None:
    """Return where a term of the loss gets a factor; an edit that takes it away, if one does."""
    scaled = scaled_term(sides, part)
    if scaled is None:
        return None
    trials.left = BUDGET
    region = Region(part.region, part.expected)
    repair = best_repair(sides, trials, region, lambda: None)
    if isinstance(repair, Repair) and repair.ends:
        return blamed_for(sides, repair, part.region, part.reference)
    return scaled


def _is_right_with(sides: Sides, part: Part, trials: Trials, blamed: Blamed) -> bool:
    """Return True where all results agree with what a parameter should hold, or with the
    elements of a value in another order.

    With others that have the same mistake, if not alone. Where a loop runs in another no
    single value need be the reference's before the end.
    """
    if blamed.value.is_call and blamed.other is None and not sides.made_up:
        return _is_out_of_order(sides, part, trials, blamed.value)
    if blamed.other is None:
        return False
    alone = LeafChange({blamed.value.key: blamed.other}, blamed.evidence)
    changes: list[Mapping[int, Tensor]] = [alone.tensors]
    everywhere = in_all_layers(sides.candidate, alone)
    if len(everywhere) > 1:
        changes.append(everywhere)
    twin = blamed.reference
    if twin is not None and not twin.is_call:
        changes += leaves_alike(sides, blamed.value, twin, blamed.other)
    for leaves in changes:
        trials.left = BUDGET
        if trials.outcome({}, leaves, is_patient=True)[0]:
            return True
    return False


def _is_out_of_order(sides: Sides, part: Part, trials: Trials, moved: Value) -> bool:
    """Return True where a call turns what stands in the reference's order, and with that
    order all results agree.

    Or much more: the same line may put others out of it later on.
    """
    source = sides.candidate.behind(moved.key)
    if moved.operator not in TURNS or stands_in_order(sides, moved):
        return False
    if source.key == moved.key or not stands_in_order(sides, source):
        return False
    return regains_in_order(sides, part, trials, moved)


def _turned_otherwise(
    sides: Sides, part: Part, trials: Trials, moved: Value
) -> Blamed | None:
    """Return which of the calls that turn a value does it wrong, by an edit of it."""
    source = sides.candidate.behind(moved.key)
    if not moved.is_call or source.key == moved.key:
        return None
    turned = upstream(
        sides.candidate, [moved.key], lambda value: value.order > source.order
    )
    region = Region(turned, part.expected)
    repair = best_repair(sides, trials, region, lambda: None)
    if not isinstance(repair, Repair) or not repair.ends:
        return None
    return blamed_for(sides, repair, part.region, part.reference)


def _repaired(sides: Sides, part: Part, trials: Trials, end: Rejoin) -> Blamed | None:
    """Return what makes a value right and with it all results; else the value alone."""
    near = trials_of_value(sides, end, trials)
    repaired = repaired_behind(sides, near, end)
    if repaired is not None or not near.unconfirmed:
        return repaired
    trials.left = BUDGET
    region = Region(part.region, part.expected)
    repair = best_repair(
        sides, trials, region, lambda: exchanged_leaves(sides, trials, region)
    )
    if isinstance(repair, Blamed):
        return repair
    if repair is not None and repair.ends:
        return blamed_for(sides, repair, part.region, part.reference)
    return repaired_behind(sides, near.alone(), end)


def _behind(
    sides: Sides,
    part: Part,
    end: Rejoin,
    likely: Blamed | None,
    matters: Callable[[Value, Value], bool],
) -> Blamed | None:
    """Return what is named behind a value that should be what the reference has."""
    if end.region != part.region:
        blamed = unlike_behind(sides, end, likely)
        if blamed is None or blamed.is_sure:
            return blamed
        region = end.region | {end.value.key}
        behind = replace(part, region=region, expected=end.expected | {end.twin.key})
        places = blamed_places(sides, behind, matters)
        if places is not None:
            return places
        constants = constants_of(sides.candidate, sides.twins)
        lost_tables = constants.intersection(blamed.value.inputs) - sides.twins.keys()
        if blamed.value.key not in constants and not lost_tables:
            return blamed
        # how a table is made says nothing where its last value is known
        return blamed_table(sides, behind) or blamed
    trials = trials_of_value(sides, end)
    return left_out(sides, trials, end) or left_out(sides, trials, end, several=True)


def _end_of(
    sides: Sides, part: Part, results: tuple[Sequence[int], Sequence[int]]
) -> Rejoin | None:
    """Return the result as the value that should be what the reference has."""
    for key, other in product(*results):
        twin = sides.reference.values[key]
        value = sides.candidate.values[other]
        held = sides.reference.tensor(key)
        present = sides.candidate.tensor(other)
        if held is None or present is None or held.numel() != present.numel():
            continue
        if held.is_complex() != present.is_complex():
            continue
        held = held.reshape(present.shape).to(present.dtype)
        return Rejoin(value, twin, held, part.region, part.expected)
    return None


def _tried(
    sides: Sides,
    part: Part,
    trials: Trials,
    likely: Blamed | None,
    end: Rejoin | None,
    *,
    is_in_turns: bool,
) -> Blamed | None:
    """Return what makes all results agree, else what is likely, else what helps most.

    ``is_in_turns``: no whole value of the reference makes the candidate right; parts of
    one may, in the turns of a loop.
    """
    region = Region(part.region, part.expected)
    odd = leaf_on_trial(sides, trials, region, of=ODD)
    if odd is not None:
        return odd
    repair = best_repair(sides, trials, region, lambda: _between(sides, trials, part))
    if isinstance(repair, Blamed):
        return repair
    if repair is not None and repair.ends:
        late = _found_late(sides, part, trials) if repair.may_be_chance else None
        return late or blamed_for(sides, repair, part.region, part.reference)
    turns = _end_in_turns(sides, part, trials, None if is_in_turns else end)
    if turns is not None:
        repaired = _repaired(sides, part, trials, turns)
        if repaired is not None:
            return repaired
        if turns.agrees:
            end = turns
    matters = partial(_matters, sides, trials)
    named = None if end is None else _missing(sides, part, end, likely, matters)
    named = named or scaled_loss(sides)
    if named is None:
        named = blamed_places(sides, part, matters)
    named = named or blamed_table(sides, part)
    named = named or _likely(sides, part, likely, end)
    if named is not None:
        return named
    late = _found_late(sides, part, trials)
    if late is not None:
        return late
    if repair is not None and _is_made_of_wrong(sides.candidate, repair, part):
        # it makes a right value of a wrong one: by chance
        repair = None
    several = max(SEVERAL, repair.gained if repair else 0)
    blamed = leaf_on_trial(sides, trials, region, several=several)
    if blamed is None and repair is not None:
        return blamed_for(sides, repair, part.region, part.reference)
    return blamed


def _matters(sides: Sides, trials: Trials, value: Value, twin: Value) -> bool:
    """Return True where results change with the reference's value in a value's place."""
    held = sides.candidate.tensor(value.key)
    content = sides.reference.tensor(twin.key)
    if held is None or content is None:
        return True
    layouts = islice(in_layout_of(sides, held, content), MOST_LAYOUTS)
    return any(trials.changes_results({value.key: tensor}) for tensor in layouts)


def _missing(
    sides: Sides,
    part: Part,
    end: Rejoin,
    likely: Blamed | None,
    matters: Callable[[Value, Value], bool],
) -> Blamed | None:
    """Return what is missing before a value that should be what the reference has."""
    missing = blamed_move(sides, part) or blamed_repeat(sides, part)
    return missing or _behind(sides, part, end, likely, matters)


def _found_late(sides: Sides, part: Part, trials: Trials) -> Blamed | None:
    """Return the edit that makes all results agree, if many more trials find one."""
    region = Region(part.region, part.expected)
    late = best_repair(sides, trials.patient(), region, lambda: None)
    if isinstance(late, Repair) and late.ends:
        return blamed_for(sides, late, part.region, part.reference)
    return None


def _end_in_turns(
    sides: Sides, part: Part, trials: Trials, end: Rejoin | None
) -> Rejoin | None:
    """Return a value that is right once it is given what the reference makes in turns, or
    the other way round.

    With ``end``, after which all is right, only one that stands before it.
    """
    if sides.made_up or (end is not None and not end.agrees):
        return None
    if end is None:
        return rejoin_of(sides, part, trials, in_parts=True)
    before = replace(part, region=end.region, expected=end.expected)
    turns = rejoin_of(sides, before, trials, in_parts=True)
    return turns if turns is not None and turns.agrees else None


def _likely(
    sides: Sides, part: Part, likely: Blamed | None, end: Rejoin | None
) -> Blamed | None:
    """Return what contents say of a parameter, else a value after which all is right."""
    if end is None or not end.agrees or end.region == part.region:
        return likely
    is_parameter = likely is not None and not likely.value.is_call
    if likely is not None and is_parameter and is_read_behind(sides, end, likely.value):
        return likely
    return unlike(sides, end)


def _between(sides: Sides, trials: Trials, part: Part) -> Blamed | None:
    """Return a parameter, or several, with other values of which all results agree.

    Or what has to be handed on in another order, or in another's place.
    """
    region = Region(part.region, part.expected)
    return (
        leaf_on_trial(sides, trials, region)
        or exchanged_leaves(sides, trials, region)
        or common_order(sides, trials, region.parted)
        or _exchanged(sides, trials, part)
        or exchanged_numbers(sides, trials, region)
        or moved_term(sides, trials, part)
    )


def _exchanged(sides: Sides, trials: Trials, part: Part) -> Blamed | None:
    """Return what puts two values that agree in each other's place."""
    value, twin = part.candidate, part.reference
    held = None if value is None else sides.candidate.tensor(value.key)
    if value is None or twin is None or held is None:
        return None
    return exchanged(
        sides, trials, Rejoin(value, twin, held, part.region, part.expected)
    )


def _is_made_of_wrong(flow: Flow, repair: Repair, part: Part) -> bool:
    """Return True for a repair of a call that reads what other calls made wrong before."""
    call = {row.record for row in repair.call.rows}
    first = {head.row.record for head in part.heads} - call
    before = upstream(flow, sorted(call), lambda value: value.key in part.region)
    return len(first & before) == len(first) and bool(first)


def _ends(
    sides: Sides, results: Sequence[int], other_results: Sequence[int]
) -> dict[int, list[tuple[Sketch, float]]]:
    """Return what the results of the candidate's forward pass should be.

    Each with how far it may be off: what rounding explains, and clearly less than now.
    """
    pairs = [
        (sides.reference.values[key], sides.candidate.values[other])
        for key in results
        for other in other_results
    ]
    ours, theirs = last_results(sides)
    if ours is not None and theirs is not None:
        pairs.append((ours, theirs))
        end = wide(sides.reference, ours)
        other_end = wide(sides.candidate, theirs)
        # what a loss is made of may be another value of its formula: all logarithms of a
        # softmax, or those of the targets
        is_same = end.row.numel == other_end.row.numel
        is_lost = end.key not in sides.agreeing and other_end.key not in sides.twins
        if is_same and is_lost:
            pairs.append((end, other_end))
    ends: dict[int, list[tuple[Sketch, float]]] = {}
    for end, other_end in pairs:
        wanted = _wanted_end(sides, end, other_end)
        if wanted is not None:
            ends.setdefault(other_end.key, []).append(wanted)
    return ends


def _wanted_end(
    sides: Sides, end: Value, other_end: Value
) -> tuple[Sketch, float] | None:
    """Return what a result should be, and how near; None where it is."""
    if end.sketch is None or other_end.sketch is None:
        return None
    apart = end.sketch.distance(other_end.sketch)
    if apart <= sides.limit / CLEARLY:
        return None
    return end.sketch, min(sides.usual, apart / CLEARLY)
