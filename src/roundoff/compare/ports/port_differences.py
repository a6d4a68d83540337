"""What differs between two programs by different hands: their results, one kind after the other.

Those of the forward pass, buffers, gradients, what the optimizer reads of these and makes of
them. Of the first kind that differs it is said where the programs part, and what is to blame.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.blamed_leaves import blamed_leaf
from roundoff.compare.blame.blamed_steps import blamed_step
from roundoff.compare.blame.blamed_tables import blamed_numbers, blamed_table
from roundoff.compare.blame.duplicated_leaves import blamed_duplicate
from roundoff.compare.blame.known_leaves import blamed_values
from roundoff.compare.blame.misused_leaves import as_misused
from roundoff.compare.blame.narrow_formats import blamed_format
from roundoff.compare.blame.other_readings import with_other_reading
from roundoff.compare.blame.other_reductions import reduced_otherwise
from roundoff.compare.blame.own_leaves import as_own_leaf
from roundoff.compare.blame.repeated_leaves import blamed_repeat
from roundoff.compare.blame.shared_parameters import blamed_shared
from roundoff.compare.blame.unlike_operands import blamed_operand
from roundoff.compare.blame.wrong_cuts import blamed_cut_out
from roundoff.compare.judging.step_causes import listed, with_line
from roundoff.compare.ports.blamed_on_tensors import blamed_on_tensors
from roundoff.compare.ports.common_factors import behind_common_factors
from roundoff.compare.ports.counterparts import counterparts, named_leaves
from roundoff.compare.ports.difference import Difference
from roundoff.compare.ports.early_ends import blamed_end
from roundoff.compare.ports.fp64_values import UNFAITHFUL, backward_in_fp64, in_fp64
from roundoff.compare.ports.gradient_cuts import LABEL as GRADIENT_CUT
from roundoff.compare.ports.gradient_cuts import blamed_cut
from roundoff.compare.ports.hand_backward import blamed_by_hand
from roundoff.compare.ports.made_up_values import on_made_up_values
from roundoff.compare.ports.port_results import (
    WIDE,
    Results,
    gradients,
    gradients_but,
    have_same_sum,
    last_results,
    outputs,
    undone_gradients,
)
from roundoff.compare.ports.port_updates import averages, lone_update, updates
from roundoff.compare.ports.prepared_gradients import prepared_gradients
from roundoff.compare.ports.scaled_gradients import (
    FEWEST,
    blamed_scale,
    factor_of_gradients,
    prepared_otherwise,
    says_something,
)
from roundoff.compare.ports.trained_elements import blamed_elements
from roundoff.compare.ports.written_buffers import buffers
from roundoff.compare.records.recorded_rows import last_named
from roundoff.compare.values.value_flow import Flow
from roundoff.compare.values.value_regions import Part, Sides, parted, upstream
from roundoff.ops import operators_that
from roundoff.unforeseen import OurPart

#: How much closer outputs are looked at where gradients differ.
CLOSER = (4, 16, 64)
#: Results up to this many limits apart hardly differ.
HARDLY = UNFAITHFUL
#: Of what each program has stored by its own roundings, values are so many limits apart.
STORED = 4.0
#: More values than this share that agree in a recording, and not when run again on
#: made-up values: these say nothing.
MOST_UNCONFIRMED = 0.1
#: Hand on the values that they read, or some of them.
_MOVED = operators_that("move values")
IN_PROGRAM = "on the same values the two programs differ from here on"
_FORWARD = "forward"
_OPTIMIZER = "optimizer"


def differences_of(sides: Sides) -> list[Difference]:
    """Return what differs: of the forward pass, else of what comes after it.

    In fp64 a formula shows itself that does less than rounding, and rounding that is
    wanted is gone.

    Where gradients differ although the outputs seem to agree, the outputs are looked at
    more closely: a loss is one number, and hides much.
    """
    recorded = _first_difference(sides, (outputs,))
    if recorded and not _may_be_rounding(sides):
        return recorded
    exact = exact_sides(sides)
    if exact is None:
        forward = recorded or _closer_difference(sides)
    else:
        forward = _first_difference(exact, (outputs,))
        if forward and not recorded and _is_right_in_fp64(sides, exact):
            forward = []
    if forward or recorded:
        return forward
    in_buffers = _first_difference(sides, (buffers,))
    if in_buffers:
        return [_as_written(sides, each) for each in in_buffers]
    backward = _backward_difference(sides, exact)
    if exact is not None and any(each.blamed is None for each in backward):
        # of an epsilon a gradient may just show what the outputs just do not
        is_weak = any(map(_hardly_differs, backward))
        closer = _seen_closer(exact) if is_weak else []
        backward = closer or _inside(sides, exact) or _unless_stored(sides, backward)
    changed = backward or _lone_update(sides)
    ends = (prepared_gradients, updates, averages)
    return changed or _first_difference(sides, ends)


def _is_right_in_fp64(sides: Sides, exact: Sides) -> bool:
    """Return True for ends that differ in fp64, and are right all the same."""
    return have_same_sum(sides, exact) or _is_of_stored_values(exact)


def _is_of_stored_values(exact: Sides) -> bool:
    """Return True where the losses agree in fp64, and what they are made of hardly differs.

    Tables that each program rounds for itself may do so.
    """
    ours, theirs = last_results(exact)
    if ours is None or theirs is None:
        return False
    if ours.key not in exact.agreeing or theirs.key not in exact.twins:
        return False
    usual = exact.limit
    exact.limit = STORED * usual
    exact.match()
    agrees = not outputs(exact)[0]
    exact.limit = usual
    exact.match()
    return agrees


def _as_written(sides: Sides, difference: Difference) -> Difference:
    """Return a difference with what writes a buffer in the place of the buffer.

    What it began with agrees, or the forward pass would differ; and so does what it is
    written with where that agrees.
    """
    blamed = difference.blamed
    if blamed is None:
        return difference
    flow = sides.candidate
    ours, theirs, _ = buffers(sides)
    name = blamed.value.row.name
    if blamed.value.is_call:
        is_right = blamed.value.key in sides.twins and bool(theirs)
        name = flow.values[theirs[0]].row.name if is_right else None
    written = None if name is None else last_named(flow.step.rows).get(name)
    if written is None or not written.is_call or not ours:
        return difference
    twin = sides.reference.values[ours[0]]
    words = f"it writes something else to {name} than the reference to {twin.row.name}"
    value = flow.values[written.record]
    return replace(difference, blamed=Blamed(value, twin, words, is_operator=True))


def _lone_update(sides: Sides) -> list[Difference]:
    """Return the parameters that one optimizer changes and the other leaves, if any."""
    found = lone_update(sides)
    if found is None:
        return []
    value = sides.candidate.values[found.theirs.record]
    twin = sides.reference.values[found.ours.record]
    which = listed(found.names)
    are = "is" if len(found.names) == 1 else "are"
    if found.is_lost:
        label = "missing update"
        it = "it" if len(found.names) == 1 else "them"
        write = with_line(twin.operator, twin.row.line)
        words = f"{which} {are} not changed here; the reference changes {it} by {write}"
    else:
        label = "extra update"
        write = with_line(value.operator, value.row.line)
        words = f"{which} {are} changed here by {write}, and not in the reference"
    blamed = Blamed(value, twin, words, label=label)
    part = Part(twin, value, _OPTIMIZER, math.inf, (), ())
    return [Difference(part, blamed, sides.limit)]


def _unless_stored(sides: Sides, backward: list[Difference]) -> list[Difference]:
    """Return what differs in gradients, if it is more than the roundings that are stored.

    What each program has rounded before stands in both passes in fp64: a layer that divides
    by what is small shows it in gradients that hardly differ, and as recorded agree.
    """
    hardly = all(map(_hardly_differs, backward))
    return [] if hardly and not gradients(sides)[0] else backward


def _hardly_differs(difference: Difference) -> bool:
    return difference.part.distance <= HARDLY * difference.limit


def _backward_difference(sides: Sides, exact: Sides | None) -> list[Difference]:
    """Return what differs in the gradients: in fp64, if the backward passes run so.

    A backward pass may amplify roundings more than any forward pass, and more than a
    limit allows.
    """
    wide_sides = None
    if exact is not None and not exact.made_up:
        wide_sides = backward_in_fp64(sides, exact)
    if wide_sides is None:
        ours, theirs, phase = gradients(sides)
        blamed = None
    else:
        wide_sides.match()
        ours, theirs, phase = gradients_but(wide_sides, undone_gradients(sides))
        blamed = blamed_cut(wide_sides) if ours else None
    if not ours:
        return []
    looked_at = wide_sides or sides
    scaled = blamed_scale(looked_at, ours, theirs) if blamed is None else None
    if scaled is not None:
        factor = factor_of_gradients(looked_at, ours)
        blamed = prepared_otherwise(sides, factor) if factor else None
        # the call of a backward pass by hand that scales may be no value of the reference
        blamed = blamed or blamed_by_hand(looked_at, theirs) or scaled
    if blamed is None and not theirs:
        blamed = _without_gradient(looked_at, ours[0])
    blamed = blamed or blamed_elements(looked_at) or blamed_by_hand(looked_at, theirs)
    if blamed is None:
        differences = _first_difference(
            looked_at, (lambda _sides: (ours, theirs, phase),)
        )
        if differences or wide_sides is None:
            return differences
    value = looked_at.candidate.values[theirs[0]] if theirs else None
    part = Part(looked_at.reference.values[ours[0]], value, phase, math.inf, (), ())
    return [Difference(part, blamed, looked_at.limit)]


def _without_gradient(sides: Sides, gradient: int) -> Blamed | None:
    """Return the candidate's parameter that gets no gradient, where the reference's does."""
    twin = sides.reference.values[gradient]
    name = (twin.row.name or "").removesuffix(".grad")
    leaves = named_leaves(sides.candidate)
    for each in counterparts(sides):
        if name in each.ours:
            words = f"{each.theirs[0]} gets no gradient; the reference's {name} does"
            return Blamed(leaves[each.theirs[0]], twin, words, label=GRADIENT_CUT)
    return None


def _may_be_rounding(sides: Sides) -> bool:
    """Return True where results that differ may do so by rounding.

    They do in a format narrower than fp32, and where they are hardly more than the limit
    apart: what parts first is then a matter of chance.
    """
    ours, theirs = last_results(sides)
    if ours is None or theirs is None or theirs.row.nonfinite:
        return False
    if sides.is_narrow:
        return True
    if ours.sketch is None or theirs.sketch is None:
        return False
    return ours.sketch.distance(theirs.sketch) <= HARDLY * sides.limit


def exact_sides(sides: Sides) -> Sides | None:
    """Return both forward passes in fp64, on recorded or on made-up values.

    None where they cannot run so, and where made-up values do not agree as the recorded
    ones do.
    """
    on_values = sides
    if sides.candidate.step.tensors is None:
        made_up = on_made_up_values(sides)
        if made_up is None:
            return None
        made_up.match()
        if not _confirms(sides, made_up, None) or outputs(made_up)[0]:
            return None
        on_values = made_up
    exact = in_fp64(on_values)
    if exact is not None:
        exact.match()
    return exact


def _closer_difference(sides: Sides) -> list[Difference]:
    """Return what differs in the outputs looked at more closely, if gradients differ."""
    ours, theirs, _ = gradients(sides)
    return _seen_closer(sides) if ours and theirs else []


def _inside(sides: Sides, exact: Sides) -> list[Difference]:
    """Return what differs in fp64 inside a forward pass whose outputs agree, if anything does.

    A loss adds up much, and hides what an epsilon does to a layer. The last value of the
    recorded pass that agrees there, and in fp64 does not.
    """
    for key in sorted(sides.twins, reverse=True):
        twin, _ = sides.twins[key]
        value = exact.candidate.values.get(key)
        other = exact.reference.values.get(twin)
        if value is None or other is None or key in exact.twins or value.inner:
            continue
        is_wide = value.is_number and (value.row.numel or 0) >= WIDE
        if not is_wide or not value.computes or twin in exact.agreeing:
            continue
        return _first_difference(exact, (partial(_results, twin, key),))
    return []


def _results(twin: int, key: int, _sides: Sides) -> Results:
    """Return one value of each program as the result that differs."""
    return [twin], [key], _FORWARD


def _seen_closer(sides: Sides) -> list[Difference]:
    """Return what differs in the outputs by less than the limit, if anything does.

    In the first step: what it rounds stands in the parameters of later ones.
    """
    if sides.paired:
        return []
    usual = sides.limit
    for closer in CLOSER:
        sides.limit = usual / closer
        sides.match()
        differences = _first_difference(sides, (outputs,))
        if differences:
            return differences
    sides.limit = usual
    sides.match()
    return []


def _first_difference(
    sides: Sides, kinds: Sequence[Callable[[Sides], Results]]
) -> list[Difference]:
    for results in kinds:
        ours, theirs, phase = results(sides)
        if not ours or not theirs:
            continue
        part = parted(sides, ours, theirs, phase)
        if part is None or part.candidate is None:
            continue
        blamed = None
        if phase == _FORWARD:
            search = OurPart("the search for what is at fault")
            blamed = search(_at_fault, sides, part, (ours, theirs))
        if blamed is None and math.isinf(part.distance):
            part = behind_common_factors(sides, part)
        return [Difference(part, blamed, sides.limit)]
    return []


def _at_fault(
    sides: Sides, part: Part, results: tuple[Sequence[int], Sequence[int]]
) -> Blamed | None:
    blamed = _blamed(sides, part, results) or _beside_gradients(sides, part)
    blamed = as_own_leaf(sides, part, as_misused(sides, blamed))
    blamed = blamed or blamed_numbers(sides, part)
    return with_other_reading(sides, blamed)


def _blamed(
    sides: Sides, part: Part, results: tuple[Sequence[int], Sequence[int]]
) -> Blamed | None:
    """Return the parameter, the layout or the operator at fault; None for no other.

    What is tried and makes the results agree goes before what is only likely.
    """
    certain = blamed_end(sides)
    certain = certain or blamed_duplicate(sides, part) or blamed_shared(sides, part)
    certain = certain or blamed_format(sides, part)
    if certain is not None:
        return certain
    if sides.candidate.step.tensors is None:
        return (
            _blamed_on_made_up_values(sides, part)
            or blamed_table(sides, part)
            or blamed_repeat(sides, part)
            or blamed_leaf(sides, part)
            or blamed_step(sides, part)
        )
    operand = blamed_operand(sides, part)
    if operand is not None and operand.is_sure:
        return operand
    likely = operand or blamed_cut_out(sides, part)
    if likely is not None:
        tried = blamed_on_tensors(sides, part, results)
        is_parameter = tried is not None and not tried.value.is_call
        return tried if is_parameter else replace(likely, is_sure=True)
    return reduced_otherwise(sides, part) or blamed_on_tensors(sides, part, results)


def _beside_gradients(sides: Sides, part: Part) -> Blamed | None:
    """Return the first value of a loss that leads to no gradient which agrees, if others do.

    Of several terms one may be wrong: what the gradients of the others are made of is
    right, though the reference computes it in another way. Those of matrices count: one on
    the way to them may be of a few examples alone, and that of a bias behind a loss with
    one slope on either side is the same for wrong values.
    """
    flow = sides.candidate
    right = [
        v.key
        for v in flow.in_order()
        if v.key in sides.twins and v.row.name and says_something(v)
        if len(v.row.shape or ()) > 1
    ]
    proven = upstream(flow, right, lambda _value: True)
    if part.candidate is None or part.candidate.key not in proven:
        return None
    unproven = [flow.values[key] for key in part.region - proven]
    unproven = [value for value in unproven if value.computes and not value.inner]
    unproven = [value for value in unproven if (value.row.numel or 0) >= FEWEST]
    if not unproven:
        return None
    words = (
        "what differs begins here: gradients that agree are made of all that stands "
        "before it"
    )
    first = min(unproven, key=lambda value: value.order)
    return Blamed(first, part.reference, words, is_operator=True, is_sure=False)


def _blamed_on_made_up_values(sides: Sides, part: Part) -> Blamed | None:
    """Return what makes the programs differ on made-up values.

    Where they do not, it is a parameter: of those that the first wrong value is made of.
    None where the made-up values do not agree where the recorded ones do.
    """
    made_up = on_made_up_values(sides)
    if made_up is None or part.candidate is None:
        return None
    made_up.match()
    if not _confirms(sides, made_up, part):
        return None
    if _program_agrees(made_up, part):
        return blamed_values(sides, part)
    differences = _first_difference(made_up, (outputs, buffers))
    differences = differences or _difference_in_fp64(made_up)
    if not differences:
        return blamed_values(sides, part)
    [difference] = differences
    if difference.blamed is not None:
        return difference.blamed
    value = difference.part.candidate
    if value is None:
        return None
    return Blamed(value, difference.part.reference, IN_PROGRAM, is_operator=True)


def _program_agrees(made_up: Sides, part: Part) -> bool:
    """Return True where made-up values agree in all that was recorded to differ first.

    What parts later on is made of parameters whose layouts nothing recorded decides.
    """
    ours = made_up.reference
    return bool(part.wanted) and all(
        _is_right(ours, value.key, made_up.agreeing) for value in part.wanted
    )


def _is_right(flow: Flow, key: int, agreeing: Mapping[int, object]) -> bool:
    """Return True where a value agrees, or what is picked of it does."""
    if key in agreeing:
        return True
    readers = [flow.values[k] for k in flow.readers.get(key, ())]
    readers = [value for value in readers if value.row.phase == _FORWARD]
    return bool(readers) and all(
        value.operator in _MOVED and _is_right(flow, value.key, agreeing)
        for value in readers
    )


def _difference_in_fp64(sides: Sides) -> list[Difference]:
    """Return what differs in the outputs without rounding; none where that is not known.

    What a weak fault does to a deep network may be less than the roundings up to there.
    """
    exact = in_fp64(sides)
    if exact is None:
        return []
    exact.match()
    return _first_difference(exact, (outputs,))


def _confirms(sides: Sides, made_up: Sides, part: Part | None) -> bool:
    """Return True where made-up values agree up to the place where two programs part.

    Without one, all of them.
    """
    end: tuple[float, int] = (math.inf, 0)
    if part is not None:
        end = min((head.order for head in part.heads), default=(0, 0))
    before = [
        value
        for value in sides.candidate.values.values()
        if value.key in sides.twins
        and value.key not in sides.several
        and value.order < end
        and value.computes
        and value.is_number
        and not value.says_nothing
        and value.row.phase == _FORWARD
    ]
    wrong = [value for value in before if value.key not in made_up.twins]
    return len(wrong) <= MOST_UNCONFIRMED * len(before)
