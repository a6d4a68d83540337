"""One step of two programs by different hands, compared by the values they compute.

Their operators, modules and layouts differ, so that calls have no counterparts one by one.
What counts are results: the loss or the output, the gradients of parameters that hold the
same values, what the optimizer makes of these, and what is written to buffers. Where one
differs, ``value_regions`` says where the two part; what either computes in other operators
between values that agree is equivalent, and no finding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.compare.judging.explain import EarlierSteps, Paired
from roundoff.compare.judging.explain import Sides as RecordedSides
from roundoff.compare.judging.table import ComparedRow
from roundoff.compare.loop.step_results import have_same_losses, losses_of
from roundoff.compare.pairing.alignment import renaming
from roundoff.compare.ports.counterparts import counterparts, named_leaves
from roundoff.compare.ports.difference import Difference
from roundoff.compare.ports.port_differences import differences_of, exact_sides
from roundoff.compare.ports.port_results import (
    gradient_pairs,
    gradients,
    gradients_left,
    last_results,
    outputs,
)
from roundoff.compare.ports.port_rows import PortRows
from roundoff.compare.ports.written_buffers import buffers
from roundoff.compare.records.recorded_rows import Rows, last_named
from roundoff.compare.records.value_sketch import sketch_of_tensor
from roundoff.compare.values.padded_rows import padding_masks
from roundoff.compare.values.value_flow import Flow, Value, flow_of
from roundoff.compare.values.value_regions import Sides, limit_of
from roundoff.ops import operators_that

#: Two programs of which less than this share of the calls have a counterpart of the same
#: module and operator are by different hands.
ALIKE = 0.5
_FORWARD = "forward"
_MOVES = (
    operators_that("cut out")
    | operators_that("join")
    | operators_that("hand on in order")
)


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
    sides = StepByValues(steps).after(memory).sides
    differences = [] if memory.parted else differences_of(sides)
    rows = PortRows(sides, differences).rows()
    memory.parted |= any(row.cause is not None for row in rows)
    return rows


def explained_by_values(
    step: StepByValues, suspect: int | None, *, is_left_out: bool = False
) -> list[ComparedRow] | None:
    """Return the rows of ``compare_port`` where something differs; else None.

    ``suspect``: the record of the candidate that names would blame, if any. Where the
    reference has no such value, only what was found to make all right goes before it; so
    with ``is_left_out``: the reference has it, and goes on with an operator that is missing.
    """
    compared = step.compared
    is_right = suspect is None or _is_in_phase(compared.sides, suspect)
    is_right = is_right and not is_left_out
    if not compared.differences or not (compared.is_sure or is_right):
        return None
    return compared.rows()


def _written(flow: Flow) -> set[str]:
    """Return the names of the parameters and buffers that a step begins with, and writes."""
    written = {name for name, row in last_named(flow.step.rows).items() if row.is_call}
    return written & named_leaves(flow).keys()


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
        """Return True where nothing differs, these values included, as recorded or in fp64.

        ``results`` of the candidate, and ``ours`` of the reference.
        """
        if self.differences or None in last_results(self.sides):
            return False
        theirs_apart = {record for record in results if not self._agrees(record)}
        ours_apart = {record for record in ours if record not in self.sides.agreeing}
        if not theirs_apart and not ours_apart:
            return True
        exact = exact_sides(self.sides)
        if exact is None:
            return False
        return (
            theirs_apart <= exact.twins.keys() and ours_apart <= exact.agreeing.keys()
        )

    def _agrees(self, record: int) -> bool:
        """Return True for a value of the candidate that the reference computes too."""
        return (
            self._is_computed_there(record)
            or self._is_put_together(record)
            or self._is_of_right_ones(record)
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

    def _is_of_right_ones(self, record: int) -> bool:
        """Return True for elements of values that agree: joining them computes nothing."""
        values = self.sides.candidate.values
        value = values[record]
        numbers = [key for key in value.inputs if values[key].is_number]
        if value.operator not in _MOVES or not numbers:
            return False
        return all(
            key in self.sides.twins or self._is_of_right_ones(key) for key in numbers
        )

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
    def compares_all_results(self) -> bool:
        """True where each gradient of the candidate has a counterpart, and there are some.

        A server that gets its gradients from copies of the model has none of its own:
        then each parameter that a step changes has one.
        """
        gradients = gradients_left(self.sides.candidate.step.rows)
        if not gradients and not gradients_left(self.sides.reference.step.rows):
            return self._compares_all_written
        pairs = gradient_pairs(self.sides, gradients_left).values()
        return 0 < len(gradients) == sum(len(pair.theirs) for pair in pairs)

    @property
    def _compares_all_written(self) -> bool:
        """True in training; what a program without a loss writes is no result of one."""
        if not losses_of(self.sides.candidate.step.rows):
            return False
        pairs = counterparts(self.sides)
        ours = _written(self.sides.reference)
        theirs = _written(self.sides.candidate)
        return (
            bool(theirs)
            and ours <= {name for each in pairs for name in each.ours}
            and theirs <= {name for each in pairs for name in each.theirs}
        )

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
        return PortRows(self.sides, self.differences).rows()


class StepByValues:
    """One step of two programs by its values, matched and compared once, when that is asked for.

    Args:
        recorded: the step.
        paired: parameters that were counterparts in the steps before.
    """

    def __init__(self, recorded: RecordedSides, paired: Paired = ()) -> None:
        self.recorded = recorded
        self._paired = paired

    def after(self, memory: EarlierSteps) -> StepByValues:
        """Return the step with the counterparts of the steps before; it leaves its own."""
        is_first = tuple(memory.counterparts) == self._paired
        step = self if is_first else StepByValues(self.recorded, memory.counterparts)
        memory.counterparts = tuple(
            (each.ours, each.theirs, each.numel) for each in counterparts(step.sides)
        )
        return step

    @functools.cached_property
    def sides(self) -> Sides:
        """The values of both, matched."""
        reference = flow_of(self.recorded.reference)
        candidate = flow_of(self.recorded.candidate)
        limit = limit_of(reference, candidate)
        sides = Sides(
            reference,
            candidate,
            limit,
            padding=padding_masks(reference, candidate, limit),
            paired=self._paired,
        )
        sides.match()
        return sides

    @functools.cached_property
    def compared(self) -> ValuesCompared:
        """What differs."""
        return ValuesCompared(self.sides, differences_of(self.sides))

    @property
    def has_tensors(self) -> bool:
        """True where both programs' tensors were kept, or computed again."""
        both = (self.recorded.reference, self.recorded.candidate)
        return all(side.tensors is not None for side in both)

    def agreeing(self) -> ValuesCompared | None:
        """Return what differs where no recorded result does; else None.

        Losses, outputs, gradients and buffers are looked at first: nothing is asked of a
        step in which they differ.
        """
        both = self.recorded
        if not have_same_losses(both.reference.rows, both.candidate.rows):
            return None
        if any(results(self.sides)[0] for results in (outputs, buffers, gradients)):
            return None
        return self.compared
