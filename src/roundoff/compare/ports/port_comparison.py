"""One step of two programs by different hands, compared by the values they compute.

Their operators, modules and layouts differ, so that calls have no counterparts one by one.
What counts are results: the loss or the output, the gradients of parameters that hold the
same values, what the optimizer makes of these, and what is written to buffers. Where one
differs, ``value_regions`` says where the two part; what either computes in other operators
between values that agree is equivalent, and no finding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from roundoff.compare.blame.blamed_leaves import (
    Blamed,
    blamed_duplicate,
    blamed_layout,
    blamed_leaf,
    blamed_step,
    blamed_values,
)
from roundoff.compare.blame.blamed_tables import blamed_table
from roundoff.compare.blame.contained_values import blamed_after_contained
from roundoff.compare.blame.misused_leaves import as_misused
from roundoff.compare.blame.narrow_formats import blamed_format
from roundoff.compare.blame.other_readings import with_other_reading
from roundoff.compare.blame.other_reductions import reduced_otherwise
from roundoff.compare.blame.repeated_leaves import blamed_repeat
from roundoff.compare.blame.shared_parameters import blamed_shared
from roundoff.compare.blame.unlike_operands import blamed_move, blamed_operand
from roundoff.compare.judging.explain import EarlierSteps, Paired
from roundoff.compare.judging.explain import Sides as RecordedSides
from roundoff.compare.judging.step_causes import CAUSE_ADVICE, listed, with_line
from roundoff.compare.judging.symptoms import ADVICE
from roundoff.compare.judging.table import ComparedRow
from roundoff.compare.loop.step_results import have_same_losses
from roundoff.compare.pairing.alignment import (
    EQUIVALENT,
    MATCHED,
    renaming,
)
from roundoff.compare.ports.common_factors import behind_common_factors
from roundoff.compare.ports.counterparts import counterparts, named_leaves
from roundoff.compare.ports.early_ends import blamed_end
from roundoff.compare.ports.fp64_values import UNFAITHFUL, backward_in_fp64, in_fp64
from roundoff.compare.ports.gradient_cuts import LABEL as GRADIENT_CUT
from roundoff.compare.ports.gradient_cuts import blamed_cut
from roundoff.compare.ports.hand_backward import blamed_by_hand
from roundoff.compare.ports.made_up_values import on_made_up_values
from roundoff.compare.ports.port_results import (
    WIDE,
    Results,
    gradient_pairs,
    gradients,
    gradients_but,
    gradients_left,
    last_results,
    outputs,
    undone_gradients,
    wide,
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
from roundoff.compare.ports.scaled_losses import scaled_loss, scaled_term
from roundoff.compare.ports.trained_elements import blamed_elements
from roundoff.compare.ports.written_buffers import buffers
from roundoff.compare.records.call_arguments import argument_differences
from roundoff.compare.records.recorded_rows import (
    RecordedRow,
    Rows,
    first_rows,
    last_named,
    shape_read_first,
)
from roundoff.compare.records.value_sketch import Sketch, sketch_of_tensor
from roundoff.compare.repairs.alike_leaves import leaves_alike
from roundoff.compare.repairs.exchanged_functions import exchanged_functions
from roundoff.compare.repairs.exchanged_leaves import exchanged_leaves
from roundoff.compare.repairs.exchanged_numbers import exchanged_numbers
from roundoff.compare.repairs.faults_behind import (
    exchanged,
    is_read_behind,
    is_rightly_filled,
    left_out,
    misread,
    repaired_behind,
    unlike,
    unlike_behind,
    unmade,
)
from roundoff.compare.repairs.followed_columns import unfollowed
from roundoff.compare.repairs.layers_read_again import read_again
from roundoff.compare.repairs.leaf_changes import LeafChange
from roundoff.compare.repairs.left_state import left_state
from roundoff.compare.repairs.misordered_values import common_order
from roundoff.compare.repairs.named_repairs import blamed_for
from roundoff.compare.repairs.ordered_constants import ordered_constant
from roundoff.compare.repairs.other_layers import in_all_layers
from roundoff.compare.repairs.repair_trials import (
    BUDGET,
    CLEARLY,
    ODD,
    SEVERAL,
    Region,
    Repair,
    Trials,
    best_repair,
    leaf_on_trial,
    trials_of,
)
from roundoff.compare.repairs.transplants import Rejoin, rejoin_of, trials_of_value
from roundoff.compare.repairs.wrong_indexes import wrong_index
from roundoff.compare.rounding.findings import INHERITED, OWN
from roundoff.compare.values.padded_rows import padding_masks
from roundoff.compare.values.value_flow import Flow, Value, constants_of, flow_of
from roundoff.compare.values.value_regions import (
    Part,
    Sides,
    limit_of,
    parted,
    upstream,
)
from roundoff.ops import operators_that

#: Two programs of which less than this share of the calls have a counterpart of the same
#: module and operator are by different hands.
ALIKE = 0.5
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
MOVED = operators_that("move values")
#: Work on two tensors, or on one and a number.
_PAIRED = operators_that("pair elements")
IN_PROGRAM = "on the same values the two programs differ from here on"

#: What to try, of all labels.
_ADVICE = CAUSE_ADVICE | ADVICE

_FORWARD = "forward"
_BACKWARD = "backward"
_OPTIMIZER = "optimizer"
_OTHER_OPERATORS = "computed in other operators; what leaves here agrees"
_NO_COUNTERPART = "no parameter of the reference holds what its parameter does"
_AFTER = "made of values that differ"


def by_different_hands(
    reference: Rows, candidate: Rows, modules: Mapping[str, str]
) -> bool:
    """Return True where the calls of two programs have no counterparts by name.

    Programs that compute in the same order with the same operators on the same shapes
    are of one hand, whatever their modules are called.
    """
    rename = renaming(modules)
    ours = _computing(reference, rename)
    theirs = _computing(candidate, str)
    if not ours or not theirs:
        return False
    if [call[1:] for call in ours] == [call[1:] for call in theirs]:
        return False
    places = {call[:2] for call in ours}
    other_places = {call[:2] for call in theirs}
    common = len(places & other_places)
    return common < ALIKE * max(len(places), len(other_places))


def _computing(
    rows: Rows, rename: Callable[[str], str]
) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return module, operator and shape of each forward call that computes."""
    calls = []
    for row in rows.values():
        value = Value(row.record, row, row.base_operator, (), None, (0, 0))
        if row.phase == _FORWARD and value.computes and not row.place:
            calls.append(
                (rename(row.module), row.base_operator, tuple(row.shape or ()))
            )
    return calls


def compare_port(steps: RecordedSides, memory: EarlierSteps) -> list[ComparedRow]:
    """Return the rows of the table for one step of two programs by different hands.

    Those of the candidate come first, in its order of execution; ``memory`` is changed.
    """
    sides = _values_remembered(steps, memory)
    differences = [] if memory.parted else _differences(sides)
    rows = _Rows(sides, differences).rows()
    memory.parted |= any(row.cause is not None for row in rows)
    return rows


def explained_by_values(
    steps: RecordedSides, suspect: int | None, *, is_left_out: bool = False
) -> list[ComparedRow] | None:
    """Return the rows of ``compare_port`` where something differs; else None.

    ``suspect``: the record of the candidate that names would blame, if any. Where the
    reference has no such value, only what was found to make all right goes before it; so
    with ``is_left_out``: the reference has it, and goes on with an operator that is missing.
    """
    compared = values_compared(steps)
    is_right = suspect is None or _is_in_phase(compared.sides, suspect)
    is_right = is_right and not is_left_out
    if not compared.differences or not (compared.is_sure or is_right):
        return None
    return compared.rows()


def _is_in_phase(sides: Sides, record: int) -> bool:
    """Return True where the reference has a value of the candidate, in the same phase.

    What a backward pass makes again of its result is no value of the forward pass.
    """
    value = sides.candidate.values.get(record)
    if value is None:
        return False
    twins = [sides.reference.values[key] for key in sides.all_twins(value)]
    return any(twin.row.phase == value.row.phase for twin in twins)


@dataclass(frozen=True, slots=True)
class ValuesCompared:
    """One step of two programs, compared by their values alone."""

    sides: Sides
    differences: list[Difference]

    @property
    def is_sure(self) -> bool:
        """True where it was found what makes all that differs right."""
        return all(d.blamed is not None and d.blamed.is_sure for d in self.differences)

    def agree(self, results: Iterable[int], ours: Iterable[int] = ()) -> bool:
        """Return True where nothing differs, these values included.

        ``results`` of the candidate, and ``ours`` of the reference.
        """
        if self.differences or None in last_results(self.sides):
            return False
        if not all(record in self.sides.agreeing for record in ours):
            return False
        return all(
            self._is_computed_there(record) or self._is_put_together(record)
            for record in results
        )

    def _is_computed_there(self, record: int) -> bool:
        """Return True where a call of the reference gives a value of the candidate.

        A copy that should have changed, and did not, is as its source was before.
        """
        if record not in self.sides.twins:
            return False
        nearest, _ = self.sides.twins[record]
        others = self.sides.all_twins(self.sides.candidate.values[record])
        return any(self.sides.reference.values[k].is_call for k in (nearest, *others))

    def _is_put_together(self, record: int) -> bool:
        """Return True for several results of the reference that are one of the candidate.

        They are put together as parameters are: the average of one that holds the
        queries, keys and values of the reference.
        """
        result = self.sides.candidate.tensor(record)
        if result is None:
            return False
        ours = named_leaves(self.sides.reference)
        theirs = named_leaves(self.sides.candidate)
        for each in counterparts(self.sides):
            if len(each.theirs) > 1 or len(each.ours) == 1:
                continue
            shapes = [tuple(ours[name].row.shape or ()) for name in each.ours]
            lengths = [shape[0] if shape else 0 for shape in shapes]
            is_like_it = [*result.shape] == [*(theirs[each.theirs[0]].row.shape or ())]
            if is_like_it and result.ndim and sum(lengths) == len(result):
                return all(map(self._is_result_there, torch.split(result, lengths)))
        return False

    def _is_result_there(self, tensor: Tensor) -> bool:
        """Return True where a call of the reference gives these elements, and none reads it."""
        sketch = sketch_of_tensor(tensor)
        flow = self.sides.reference
        return sketch is not None and any(
            value.is_call
            and not flow.readers.get(value.key)
            and value.sketch is not None
            and value.sketch.distance(sketch) <= self.sides.limit
            for value in flow.values.values()
            if value.row.numel == tensor.numel()
        )

    @property
    def compares_all_gradients(self) -> bool:
        """True where each gradient of the candidate has a counterpart, and there are some."""
        gradients = gradients_left(self.sides.candidate.step.rows)
        pairs = gradient_pairs(self.sides, gradients_left).values()
        return 0 < len(gradients) == sum(len(pair.theirs) for pair in pairs)

    def blames(self, leaves: Container[int]) -> bool:
        """Return True where one of these parameters, or a view of one, is at fault."""
        flow = self.sides.candidate
        blamed = [d.blamed.value for d in self.differences if d.blamed is not None]
        return any(
            value.key in leaves or flow.behind(value.key).key in leaves
            for value in blamed
        )

    def read_rightly(self, leaves: Iterable[int]) -> list[bool]:
        """Return whether each value agrees that is first computed of these parameters.

        But for what is made of other values that differ; of that nothing is known.
        """
        twins = self.sides.twins
        values = self.sides.candidate.values
        computed = {key for leaf in leaves for key in self._computed_of(leaf)}
        return [
            key in twins
            for key in computed
            if all(source in twins for source in values[key].inputs)
        ]

    def _computed_of(self, leaf: int) -> set[int]:
        """Return the values of the forward pass that are computed of one, behind moves of it."""
        flow = self.sides.candidate
        waiting = [leaf]
        computed: set[int] = set()
        while waiting:
            for key in flow.readers.get(waiting.pop(), ()):
                value = flow.values[key]
                if value.row.phase == _FORWARD and value.computes:
                    computed.add(key)
                elif value.row.phase == _FORWARD:
                    waiting.append(key)
        return computed

    def rows(self) -> list[ComparedRow]:
        """Return the rows of the table."""
        return _Rows(self.sides, self.differences).rows()


def values_compared(
    steps: RecordedSides, memory: EarlierSteps | None = None
) -> ValuesCompared:
    """Compare one step of two programs by their values alone.

    ``memory``: of the steps before, for parameters that are counterparts; it is changed.
    """
    sides = _values_of(steps) if memory is None else _values_remembered(steps, memory)
    return ValuesCompared(sides, _differences(sides))


def agreeing_results(steps: RecordedSides) -> ValuesCompared | None:
    """Return the comparison by values of one step where no recorded result differs; else None.

    Losses, outputs, gradients and buffers are looked at first: nothing is asked of a step
    in which they differ.
    """
    if not have_same_losses(steps.reference.rows, steps.candidate.rows):
        return None
    sides = _values_of(steps)
    if any(results(sides)[0] for results in (outputs, buffers, gradients)):
        return None
    return ValuesCompared(sides, _differences(sides))


def _values_remembered(steps: RecordedSides, memory: EarlierSteps) -> Sides:
    """Return the values of both; parameters that were counterparts are so still."""
    sides = _values_of(steps, memory.counterparts)
    memory.counterparts = tuple(
        (each.ours, each.theirs, each.numel) for each in counterparts(sides)
    )
    return sides


def _values_of(steps: RecordedSides, paired: Paired = ()) -> Sides:
    reference = flow_of(steps.reference)
    candidate = flow_of(steps.candidate)
    sides = Sides(
        reference,
        candidate,
        limit_of(reference, candidate),
        padding=padding_masks(reference, candidate),
        paired=paired,
    )
    sides.match()
    return sides


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the two programs part, and what is to blame."""

    part: Part
    blamed: Blamed | None
    limit: float

    @property
    def value(self) -> Value | None:
        """The candidate's value to name."""
        return self.blamed.value if self.blamed else self.part.candidate

    @property
    def line(self) -> str | None:
        """The line at fault."""
        if self.blamed is not None and self.blamed.line is not None:
            return self.blamed.line
        return None if self.value is None else self.value.row.line


def _differences(sides: Sides) -> list[Difference]:
    """Return what differs: of the forward pass, else of what comes after it.

    In fp64 a formula shows itself that does less than rounding, and rounding that is
    wanted is gone.

    Where gradients differ although the outputs seem to agree, the outputs are looked at
    more closely: a loss is one number, and hides much.
    """
    recorded = _first_difference(sides, (outputs,))
    if recorded and not _may_be_rounding(sides):
        return recorded
    exact = _exact_sides(sides)
    if exact is None:
        forward = recorded or _closer_difference(sides)
    else:
        forward = _first_difference(exact, (outputs,))
        if forward and not recorded and _is_of_stored_values(exact):
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
        return closer or _inside(sides, exact) or backward
    changed = backward or _lone_update(sides)
    ends = (prepared_gradients, updates, averages)
    return changed or _first_difference(sides, ends)


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


def _exact_sides(sides: Sides) -> Sides | None:
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
            blamed = _blamed(sides, part, (ours, theirs)) or _beside_gradients(
                sides, part
            )
            blamed = with_other_reading(sides, as_misused(sides, blamed))
        if blamed is None and math.isinf(part.distance):
            part = behind_common_factors(sides.reference, sides.candidate, part)
        return [Difference(part, blamed, sides.limit)]
    return []


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
    return (
        blamed_operand(sides, part)
        or reduced_otherwise(sides, part)
        or _blamed_on_tensors(sides, part, results)
    )


def _beside_gradients(sides: Sides, part: Part) -> Blamed | None:
    """Return the first value of a loss that leads to no gradient which agrees, if others do.

    Of several terms one may be wrong: what the gradients of the others are made of is
    right, though the reference computes it in another way. Those of parameters count: one
    on the way to them may be of a few examples alone.
    """
    flow = sides.candidate
    right = [
        v.key
        for v in flow.in_order()
        if v.key in sides.twins and v.row.name and says_something(v)
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


def _blamed_on_tensors(
    sides: Sides, part: Part, results: tuple[Sequence[int], Sequence[int]]
) -> Blamed | None:
    """Return what is at fault by runs of the candidate's calls again."""
    _, last = last_results(sides)
    needed = [*results[1], *([last.key] if last is not None else [])]
    trials = trials_of(sides, _ends(sides, *results), needed)
    certain = unfollowed(sides, part, trials) or wrong_index(sides, part, trials)
    certain = certain or read_again(sides, part, trials)
    certain = certain or exchanged_functions(sides, part, trials)
    if certain is not None:
        return certain
    trials.left = BUDGET
    blamed = blamed_leaf(sides, part) or blamed_layout(sides, part)
    if blamed is not None and _is_right_with(sides, trials, blamed):
        return blamed
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


def _is_right_with(sides: Sides, trials: Trials, blamed: Blamed) -> bool:
    """Return True where all results agree with what a parameter should hold.

    With others that have the same mistake, if not alone. Where a loop runs in another no
    single value need be the reference's before the end.
    """
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
    sides: Sides, part: Part, end: Rejoin, likely: Blamed | None
) -> Blamed | None:
    """Return what is named behind a value that should be what the reference has."""
    if end.region != part.region:
        blamed = unlike_behind(sides, end, likely)
        if blamed is None or blamed.is_sure:
            return blamed
        # how a table is made says nothing where its last value is known
        constants = constants_of(sides.candidate)
        region = end.region | {end.value.key}
        behind = replace(part, region=region, expected=end.expected | {end.twin.key})
        if blamed.value.key not in constants:
            return blamed
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
        return blamed_for(sides, repair, part.region, part.reference)
    turns = _end_in_turns(sides, part, trials, None if is_in_turns else end)
    if turns is not None:
        repaired = _repaired(sides, part, trials, turns)
        if repaired is not None:
            return repaired
        if turns.agrees:
            end = turns
    if end is not None:
        missing = blamed_move(sides, part) or blamed_repeat(sides, part)
        missing = missing or _behind(sides, part, end, likely)
        if missing is not None:
            return missing
    named = scaled_loss(sides) or blamed_table(sides, part)
    named = named or _likely(sides, part, likely, end)
    if named is not None:
        return named
    late = best_repair(sides, trials.patient(), region, lambda: None)
    if isinstance(late, Repair) and late.ends:
        return blamed_for(sides, late, part.region, part.reference)
    if repair is not None and _is_made_of_wrong(sides.candidate, repair, part):
        # it makes a right value of a wrong one: by chance
        repair = None
    several = max(SEVERAL, repair.gained if repair else 0)
    blamed = leaf_on_trial(sides, trials, region, several=several)
    if blamed is None and repair is not None:
        return blamed_for(sides, repair, part.region, part.reference)
    return blamed


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
        value.operator in MOVED and _is_right(flow, value.key, agreeing)
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


# -- the table -----------------------------------------------------------------------


class _Rows:
    """The rows of the table of one step."""

    def __init__(self, sides: Sides, differences: list[Difference]) -> None:
        self._sides = sides
        self._by_record = {
            d.value.row.record: d for d in differences if d.value is not None
        }
        self._spoilt = _downstream(sides.candidate, self._by_record)
        self._uncompared = _uncompared(sides)

    def rows(self) -> list[ComparedRow]:
        """Return the candidate's rows, then those that only the reference has."""
        candidate = self._sides.candidate
        rows = [self._row(row) for row in candidate.step.rows.values()]
        taken = {row.reference_record for row in rows}
        for record, row in self._sides.reference.step.rows.items():
            if record not in taken:
                rows.append(self._reference_row(row))
        return rows

    def _row(self, row: RecordedRow) -> ComparedRow:
        difference = self._by_record.get(row.record)
        if difference is not None and difference.value is not None:
            # of two parameters in one memory one was recorded
            named = replace(row, name=difference.value.row.name)
            return self._own(named, difference)
        twin = self._sides.twins.get(row.record)
        if twin is not None:
            return self._agreeing(row, *twin)
        if row.record in self._spoilt:
            origin = self._spoilt[row.record]
            site = self._sides.candidate.values[origin].row.site
            return ComparedRow(
                **_names(row),
                status=EQUIVALENT,
                reason=_AFTER,
                cause=INHERITED,
                origin=site,
            )
        is_compared = row.record not in self._uncompared
        reason = _OTHER_OPERATORS if is_compared else _NO_COUNTERPART
        return ComparedRow(**_names(row), status=EQUIVALENT, reason=reason)

    def _agreeing(self, row: RecordedRow, key: int, distance: float) -> ComparedRow:
        twin = self._sides.reference.values[key].row
        return ComparedRow(
            **_names(row),
            **_names_of_reference(twin),
            status=MATCHED,
            reason=None if twin.shape == row.shape else "in another layout",
            error=distance,
            equal=distance == 0.0,
            tolerance=self._sides.limit,
        )

    def _reference_row(self, row: RecordedRow) -> ComparedRow:
        agreeing = row.record in self._sides.agreeing or not self._by_record
        return ComparedRow(
            **_names(row) | {"site": None, "line": None, "record": None},
            **_names_of_reference(row),
            status=EQUIVALENT,
            reason=_OTHER_OPERATORS if agreeing else "the candidate has no such value",
        )

    def _own(self, row: RecordedRow, difference: Difference) -> ComparedRow:
        part = difference.part
        twin = _named_reference(difference)
        label, evidence = _description(self._sides, difference)
        error = part.distance if math.isfinite(part.distance) else 1.0
        return ComparedRow(
            **_names(row),
            **(_names_of_reference(twin) if twin else {}),
            status=MATCHED if twin else EQUIVALENT,
            error=error,
            equal=False,
            tolerance=difference.limit,
            inputs_error=0.0,
            own_error=error,
            cause=OWN,
            contribution=1.0,
            blamed=row.site,
            blamed_line=difference.line,
            blamed_phase=_OPTIMIZER if part.phase == _OPTIMIZER else row.phase,
            blamed_reference=twin.site if twin else None,
            blamed_reference_line=twin.line if twin else None,
            looks_like=label,
            evidence=evidence,
            advice=_ADVICE[label],
        )


def _uncompared(sides: Sides) -> set[int]:
    """Return the records of gradients and updates of parameters without a counterpart."""
    flow = sides.candidate
    leaves = named_leaves(flow)
    compared = {name for each in counterparts(sides) for name in each.theirs}
    return {
        row.record
        for name, row in last_named(flow.step.rows).items()
        if (parameter := name.removesuffix(".grad")) in leaves
        and parameter not in compared
        and (parameter != name or row.phase == _OPTIMIZER)
    }


def _named_reference(difference: Difference) -> RecordedRow | None:
    blamed = difference.blamed
    reference = difference.part.reference
    # what was cut may be no value of the reference: none of its own stands for it
    if blamed is not None and (blamed.reference or blamed.label == GRADIENT_CUT):
        reference = blamed.reference
    return reference.row if reference is not None else None


def _downstream(flow: Flow, starts: Iterable[int]) -> dict[int, int]:
    """Return the values that are made of these, each with the one it comes from."""
    origin: dict[int, int] = {}
    for start in starts:
        waiting = [start]
        while waiting:
            for reader in flow.readers.get(waiting.pop(), ()):
                if reader not in origin:
                    origin[reader] = start
                    waiting.append(reader)
    return origin


def _description(sides: Sides, difference: Difference) -> tuple[str, str]:
    """Return the label and the evidence of a difference."""
    if difference.blamed is not None:
        return _description_of_blamed(sides, difference.blamed)
    part = difference.part
    wanted = part.reference
    value = part.candidate
    if wanted is None or value is None:
        return "other operator", "the reference has nothing like it here"
    line = f" ({wanted.row.line})" if wanted.row.line else ""
    constants = _constants_apart(sides, wanted.row, value.row)
    if constants:
        words = f"{'; '.join(constants)}: the reference's is {wanted.row.site}{line}"
        return "wrong constant", words
    there = f"{wanted.operator} of {wanted.row.site}{line}"
    if math.isinf(part.distance):
        words = f"what it reads agrees; the reference goes on with {there}"
        return "other operator", words
    words = (
        f"what it is made of agrees; it is {part.distance:.2g} off, relative, from "
        f"{there}"
    )
    return "other operator", words


def _description_of_blamed(sides: Sides, blamed: Blamed) -> tuple[str, str]:
    if blamed.label is not None:
        return blamed.label, blamed.evidence
    if not blamed.is_operator:
        is_call = blamed.value.is_call
        return "wrong axis or layout" if is_call else "other values", blamed.evidence
    constants: tuple[str, ...] = ()
    if blamed.reference is not None:
        constants = _constants_apart(sides, blamed.reference.row, blamed.value.row)
    if constants:
        return "wrong constant", f"{'; '.join(constants)}: {blamed.evidence}"
    return "other operator", blamed.evidence


def _constants_apart(
    sides: Sides, reference: RecordedRow, candidate: RecordedRow
) -> tuple[str, ...]:
    """Return the constants that differ between two calls of one operator on one shape.

    In another layout axes and sizes are others too, and say nothing; nor does the other
    factor or term of a formula that is written in another way.
    """
    if reference.base_operator != candidate.base_operator:
        return ()
    if reference.base_operator in MOVED | _PAIRED:
        return ()
    rows = sides.reference.step.rows
    other_rows = sides.candidate.step.rows
    ours = first_rows(rows).get(reference.call)
    theirs = first_rows(other_rows).get(candidate.call)
    if ours is None or theirs is None:
        return ()
    shape = shape_read_first(rows, ours)
    other_shape = shape_read_first(other_rows, theirs)
    if shape != other_shape:
        return ()
    return argument_differences(ours, theirs, (shape, other_shape))


def _names(row: RecordedRow) -> dict[str, Any]:
    return {
        "rank": row.rank,
        "step": row.step,
        "phase": row.phase,
        "place": row.place,
        "role": row.role,
        "name": row.name,
        "numel": row.numel,
        "view": row.view_of is not None,
        "call": row.call,
        "site": row.site,
        "operator": row.operator,
        "line": row.line,
        "dtype": row.dtype,
        "shape": row.shape,
        "record": row.record,
    }


def _names_of_reference(row: RecordedRow) -> dict[str, Any]:
    return {
        "reference_site": row.site,
        "reference_operator": row.operator,
        "reference_line": row.line,
        "reference_dtype": row.dtype,
        "reference_shape": row.shape,
        "reference_record": row.record,
    }
