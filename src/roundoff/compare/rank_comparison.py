"""One rank of both runs, all steps: the work of one machine of many."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import polars as pl
import torch

from roundoff.compare.agreeing_steps import agreeing_steps
from roundoff.compare.judging.explain import EarlierSteps, RecordedStep, Sides
from roundoff.compare.judging.gradient_scale import without_loss_scales
from roundoff.compare.judging.read_later import ReadLater
from roundoff.compare.judging.step_causes import DATA, OPERATORS, UPDATE, Cause
from roundoff.compare.judging.table import DAMAGED, STALE, ComparedRow, frame_of
from roundoff.compare.loop.changing_numbers import with_schedules
from roundoff.compare.loop.fed_data import data_causes, told_inputs
from roundoff.compare.loop.found_causes import (
    ComparedStep,
    causes_of_step,
    in_order,
    is_shown,
    relabelled,
)
from roundoff.compare.loop.hand_updates import does_all_updates
from roundoff.compare.loop.hand_writes import KnownNames
from roundoff.compare.loop.left_out_writes import (
    further_write_causes,
    left_write_causes,
    untouched_causes,
)
from roundoff.compare.loop.loop_order import BACKWARD_PASSES, loop_causes
from roundoff.compare.pairing.alignment import REFERENCE_ONLY, renaming
from roundoff.compare.portions.blame import UNEXPLAINED
from roundoff.compare.portions.comparison import (
    PortionsMemory,
    calls_as_often,
    compare_portions,
    in_other_portions,
    is_another_batch,
    share_of_work,
)
from roundoff.compare.ports.left_averages import left_average_causes
from roundoff.compare.ports.port_comparison import StepByValues, by_different_hands
from roundoff.compare.ports.rewritten_calls import (
    agreeing_by_values,
    compared_as_another_layer,
    compared_by_values,
    has_other_parameters,
    is_mispaired,
    laid_out_otherwise,
)
from roundoff.compare.records.data_portions import DataPortions
from roundoff.compare.records.recorded_rows import Rows, rows_of
from roundoff.compare.rounding.findings import INHERITED, OWN
from roundoff.compare.rounding.reproducibility import UnstableRow
from roundoff.compare.step_comparison import NoiseFloors, compare_step
from roundoff.compare.values.restored_step import (
    is_whole,
    restored_tensors,
    tensors_of_all,
)
from roundoff.errors import RunError
from roundoff.ops import calls_of_others, operators_that
from roundoff.record import (
    LoopEvent,
    Run,
    StepTensors,
    TensorContent,
    as_run,
)
from roundoff.unforeseen import OurPart

#: By rank and step: how far honest runs lie apart, by record.
Floors = Mapping[tuple[int, int], Mapping[int, float]]


_DRAWS = operators_that("draw")


@dataclass(frozen=True)
class Settings:
    """How two runs are compared; plain data, so that it can go to another machine.

    Attributes:
        modules: module of the reference -> its name in the candidate.
        tensors: use kept tensors.
        floor: of the reference.
        candidate_floor: of the candidate.
        unstable: what repeats of either run show to change from run to run.
        threads: torch's; others would add in another order.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    tensors: bool = True
    floor: Floors = field(default_factory=dict)
    candidate_floor: Floors = field(default_factory=dict)
    unstable: Sequence[UnstableRow] = ()
    threads: int = field(default_factory=torch.get_num_threads)


@dataclass(frozen=True)
class RankResult:
    """What is found in the steps of one rank.

    Attributes:
        table: a row for each value of either run.
        damage: what could not be read, a line each.
        causes: what stands behind the operators that differ.
    """

    table: pl.DataFrame
    damage: Sequence[str]
    causes: Sequence[Cause]


def compare_rank(
    reference: str | Run,
    candidate: str | Run,
    rank: int,
    steps: Sequence[int],
    settings: Settings,
) -> RankResult:
    """Return what is found in these steps of one rank.

    Without tensors, steps that agree by their statistics are compared as columns; the
    others are aligned and explained row by row.
    """
    if torch.get_num_threads() != settings.threads:
        torch.set_num_threads(settings.threads)
    ours = as_run(reference)
    theirs = as_run(candidate)
    comparison = _RankComparison(ours, theirs, rank, settings)
    comparison.compare_loops(steps)
    goes_by_tensors = uses_tensors(settings, ours, theirs)
    is_by_row = goes_by_tensors or bool(settings.modules)
    agreeing = {} if is_by_row else agreeing_steps(ours, theirs, rank, steps)
    with nullcontext() if _are_own((ours, theirs), rank, steps) else calls_of_others():
        frames = [comparison.compare(step, agreeing.get(step)) for step in steps]
    table = pl.concat(frames, how="diagonal") if frames else pl.DataFrame()
    return RankResult(table, comparison.damage, comparison.supported_causes())


def _are_own(runs: Sequence[Run], rank: int, steps: Sequence[int]) -> bool:
    """Return True where this user has recorded all of it: its calls may run in this process."""
    return all(run.is_own(rank, step) for run in runs for step in steps)


@dataclass(frozen=True, slots=True)
class _InPortions:
    """A step that does the work in other portions.

    Attributes:
        rows: of the step.
        by_values: its rows by values, where these agree.
        is_all_done: False where the work follows the number of backward passes.
        is_explained: False where names may tell more.
    """

    rows: list[ComparedRow]
    by_values: list[ComparedRow] | None
    is_all_done: bool
    is_explained: bool


def _begins_with_a_value(rows: Sequence[ComparedRow]) -> bool:
    """Return True where the first fault is a value of the reference's shape."""
    first = next((row for row in rows if row.cause == OWN), None)
    return first is not None and first.shape == first.reference_shape


def uses_tensors(settings: Settings, *runs: Run) -> bool:
    """Return True where kept tensors are compared: all runs have them."""
    return settings.tensors and all(run.about.keep in ("tensors", None) for run in runs)


def recorded_step(run: Run, rank: int, step: int, *, tensors: bool) -> RecordedStep:
    """Return a step of a run.

    Tensors that were not kept are computed from the leaves of the step, if possible.
    """
    rows = rows_of(run, rank, step)
    if not tensors:
        return RecordedStep(rows, restored_tensors(run, rank, step, rows))
    return RecordedStep(rows, StepTensors(run, rank, step))


class _RankComparison:
    """The steps of one rank, compared one after the other."""

    def __init__(
        self, reference: Run, candidate: Run, rank: int, settings: Settings
    ) -> None:
        self._reference = reference
        self._candidate = candidate
        self._rank = rank
        self._settings = settings
        self._tensors = uses_tensors(settings, reference, candidate)
        self._memory = EarlierSteps()
        self._first_step: int | None = None
        self._differs = False
        self._is_one_program = True
        self._names = KnownNames(), KnownNames()
        #: The candidate updates what the reference's optimizers do, in every step.
        self._does_all_updates = True
        #: Parameters with the reference's elements in other places, rightly so.
        self._laid_out: set[str | None] = set()
        #: A step does all of the work in other portions.
        self._is_other_schedule = False
        self._portions = PortionsMemory()
        self.damage: list[str] = []
        self._by_values = OurPart("the comparison by values", self._values_failed)
        self.causes: list[Cause] = []
        #: The step after each, and before it.
        self._following: dict[int, int] = {}
        self._preceding: dict[int, int] = {}

    def compare_loops(self, steps: Sequence[int]) -> None:
        """Find what the training loops do differently in all steps."""
        self._following = dict(itertools.pairwise(steps))
        self._preceding = {after: step for step, after in self._following.items()}
        ours = [(step, event) for step in steps for event in self._events(step)[0]]
        theirs = [(step, event) for step in steps for event in self._events(step)[1]]
        self.causes += loop_causes(ours, theirs, self._rank)

    def supported_causes(self) -> list[Cause]:
        """Return the causes that the values bear out.

        A loop in another form may do the same: what it does otherwise counts where
        values differ, and where both sides are by one hand. How many backward passes
        there are is another schedule as long as they do all of the work.
        """
        return [cause for cause in self.causes if self._is_borne_out(cause)]

    def _is_borne_out(self, cause: Cause) -> bool:
        if cause.label == "missing update" and cause.name.startswith("optimizer "):
            return not self._does_all_updates
        if cause.label != "other loop":
            return True
        if not self._differs or not self._is_one_program:
            return False
        return cause.name != BACKWARD_PASSES or not self._is_other_schedule

    def _events(self, step: int) -> tuple[list[LoopEvent], list[LoopEvent]]:
        """Return what the loops did in a step; damage is told with its rows."""
        try:
            ours = self._reference.loop(self._rank, step)
            return ours, self._candidate.loop(self._rank, step)
        except RunError:
            return [], []

    def compare(self, step: int, agreeing: pl.DataFrame | None) -> pl.DataFrame:
        """Return the table of a step; ``agreeing`` is it where both sides seem to agree."""
        if agreeing is not None and not self._memory.parted:
            largest = agreeing.select(pl.col("error").max()).item()
            self._memory.worst = max(self._memory.worst, largest or 0.0)
            return agreeing
        try:
            return frame_of(self._row_by_row(step))
        except RunError as error:
            self.damage.append(str(error).replace("\n", ";"))
            damaged = ComparedRow(
                rank=self._rank, step=step, status=DAMAGED, reason=error.what
            )
            return frame_of([damaged])

    def _row_by_row(self, step: int) -> list[ComparedRow]:
        if self._first_step is None:
            self._first_step = step
        runs = (self._reference, self._candidate)
        recorded = [
            recorded_step(run, self._rank, step, tensors=self._tensors) for run in runs
        ]
        sides = without_loss_scales(Sides(*tensors_of_all(recorded)))
        values = StepByValues(sides)
        by_hands = by_different_hands(
            sides.reference.rows, sides.candidate.rows, self._settings.modules
        )
        self._does_all_updates &= does_all_updates(
            sides.reference.rows,
            sides.candidate.rows,
            renaming(self._settings.modules),
        )
        # what a step leaves is looked for by its name there
        rename = renaming(self._settings.modules)
        is_other = by_hands or has_other_parameters(sides, rename)
        data = told = None
        if not is_other and in_other_portions(sides.reference, sides.candidate):
            data = DataPortions(sides.reference.rows, sides.candidate.rows)
        if data is not None and self._shows_portions(sides, data):
            told = self._in_portions(values, step, data)
            if told.is_explained:
                return self._believed_of_portions(told, step)
        before = self._memory.copy()
        read_later = functools.cache(lambda: ReadLater.of(self._rows_of_next(step)))
        rows = self._by_name(sides, step, data, read_later)
        if told is not None and not _begins_with_a_value(rows):
            self._memory = before
            return self._believed_of_portions(told, step)
        self._note_damage(sides)
        is_same_before = not before.parted
        if is_same_before and not by_hands:
            by_values = self._by_values(
                self._as_another_layer, values, rows, step, before
            )
            if by_values is not None:
                return self._believed(by_values, step, before)
        preceding = self._preceding.get(step) if is_same_before else None
        rows = [*with_schedules(rows, sides, lambda: self._rows_of(preceding))]
        differed = self._differs
        self._differs |= any(row.cause is not None for row in rows)
        by_name = rows
        rows = self._with_causes(sides, rows, step, is_same_before=is_same_before)
        if by_hands or not is_same_before:
            return rows
        may_be_another_form = self._may_be_another_form(step)
        to_explain = by_name if may_be_another_form else rows
        by_values = self._by_values(agreeing_by_values, values, to_explain)
        if by_values is not None and read_later().differs(
            sides.reference.rows, sides.candidate.rows, by_name
        ):
            return rows
        if by_values is None and not self._is_explained(step):
            by_values = self._by_values(compared_by_values, values, rows)
        if by_values is None:
            return rows
        self._differs = differed
        return self._believed(by_values, step, before)

    def _values_failed(self, _error: BaseException) -> None:
        """Note what went wrong where calls were run again: by name the rows still stand."""
        self.damage.append(
            f"the comparison by values of rank {self._rank} "
            f"({self._by_values.stopped}; an error of roundoff's, please report it)"
        )

    def _by_name(
        self,
        sides: Sides,
        step: int,
        data: DataPortions | None,
        read_later: Callable[[], ReadLater],
    ) -> list[ComparedRow]:
        """Return the rows of a step by the names and the order of its calls."""
        at = (self._rank, step)
        floors = NoiseFloors(
            self._settings.floor.get(at, {}),
            self._settings.candidate_floor.get(at, {}),
        )
        is_portioned = data is not None and data.first_are_same()
        return compare_step(
            sides,
            self._memory,
            modules=self._settings.modules,
            floors=floors,
            portions=data if is_portioned else None,
            read_later=read_later,
        )

    def _note_damage(self, sides: Sides) -> None:
        for side in (sides.reference, sides.candidate):
            if side.tensors is not None:
                self.damage += dict.fromkeys(side.tensors.damage.values())

    def _left_writes(
        self,
        sides: Sides,
        rows: Sequence[ComparedRow],
        step: int,
        known: Collection[str],
    ) -> list[Cause]:
        """Return what the reference alone writes for the next step.

        ``known``: the names in the candidate's steps before.
        """
        if all(row.status != REFERENCE_ONLY for row in rows):
            return []
        later = self._rows_of_next(step)
        causes = []
        if later is not None:
            causes = left_write_causes(sides, rows, later, rank=self._rank, step=step)
        if causes or any(row.cause is not None for row in rows):
            return causes
        rename = renaming(self._settings.modules)
        at = {"rank": self._rank, "step": step}
        further = further_write_causes(sides, rows, rename, **at)
        idle = self._idle_from(step, known)
        return further or untouched_causes(sides, idle, rename, **at)

    def _idle_from(self, step: int, known: Collection[str]) -> set[str]:
        """Return what the candidate holds, and no step from one on reads or writes.

        ``known``: the names in the steps before.
        """
        contents, last_steps = self._held
        held = {content.name for content in contents}
        return {
            name
            for name in held.difference(last_steps).union(known)
            if last_steps.get(name, -1) < step
        }

    def _rows_of_next(self, step: int) -> tuple[Rows, Rows] | None:
        """Return the rows of both in the step after one; None where it is not compared."""
        return self._rows_of(self._following.get(step))

    def _rows_of(self, step: int | None) -> tuple[Rows, Rows] | None:
        if step is None:
            return None
        try:
            ours = rows_of(self._reference, self._rank, step)
            return ours, rows_of(self._candidate, self._rank, step)
        except RunError:
            return None

    def _in_portions(
        self, values: StepByValues, step: int, data: DataPortions
    ) -> _InPortions:
        """Return the rows of a step that does the work in other portions.

        A layer that is written in another way has results of other shapes too: what
        differs in portions may agree by values. A value of its own explains nothing in as
        many calls on other shapes: the program may have computed their sizes, of what it
        draws or chooses.
        """
        sides = values.recorded
        parts = {self._rank: sides.candidate}
        rename = renaming(self._settings.modules)
        rows = compare_portions(sides.reference, parts, rename, self._portions)
        is_all_done = self._is_all_work_done(sides, step)
        if not is_all_done:
            # what each backward pass goes with is written as often as there are passes
            rows = [
                replace(row, cause=INHERITED) if row.looks_like == STALE else row
                for row in rows
            ]
        is_right = all(row.cause is None for row in rows)
        by_values = None
        if not is_right:
            by_values = self._by_values(agreeing_by_values, values, rows)
        first = next((row for row in rows if row.cause == OWN), None)
        is_draw = first is not None and first.operator in _DRAWS
        is_unexplained = (
            by_values is None
            and any(row.looks_like == UNEXPLAINED for row in rows)
            and not data.first_are_same()
            and (is_draw or calls_as_often(sides.reference, sides.candidate))
        )
        return _InPortions(rows, by_values, is_all_done, not is_unexplained)

    def _believed_of_portions(self, told: _InPortions, step: int) -> list[ComparedRow]:
        self._is_other_schedule |= told.is_all_done
        self._memory.noise |= self._portions.noise
        if told.by_values is not None:
            return self._believed(told.by_values, step, self._memory)
        self._differs |= any(row.cause is not None for row in told.rows)
        return told.rows

    def _as_another_layer(
        self,
        values: StepByValues,
        rows: Sequence[ComparedRow],
        step: int,
        before: EarlierSteps,
    ) -> list[ComparedRow] | None:
        """Return the rows by values, where a layer is by another hand and they tell more."""
        if not values.has_tensors:
            return None
        sides = values.recorded
        laid_out = laid_out_otherwise(sides, rows, self._laid_out)
        rename = renaming(self._settings.modules)
        is_another = is_mispaired(rows) or has_other_parameters(sides, rename)
        if not laid_out and not is_another:
            return None
        if data_causes(sides, rows, rank=self._rank, step=step):
            return None  # other data have other shapes too
        by_values = compared_as_another_layer(values, rows, laid_out, before)
        if by_values is not None:
            self._laid_out |= {row.name for row in laid_out}
        return by_values

    def _believed(
        self, by_values: list[ComparedRow], step: int, before: EarlierSteps
    ) -> list[ComparedRow]:
        """Return rows that stand for those by name, for the causes of their step, and for
        what a comparison by name would remember beside ``before``."""
        parted = any(row.cause is not None for row in by_values)
        agreeing = [row.error or 0.0 for row in by_values if row.cause is None]
        self._memory = before
        self._memory.worst = max([self._memory.worst, *agreeing])
        self._memory.parted |= parted
        self._differs |= parted
        self.causes = [cause for cause in self.causes if cause.step != step]
        return by_values

    def _is_explained(self, step: int) -> bool:
        """Return True where a step was fed or given something else, or lacks work.

        A gradient that is cut may follow from what the forward pass does otherwise, and
        an operator that one program lacks from how the other writes it.
        """
        causes = [cause for cause in self.causes if cause.step == step]
        return any(
            cause.kind != OPERATORS and cause.label != "gradient cut"
            for cause in causes
        )

    def _may_be_another_form(self, step: int) -> bool:
        """Return True where nothing but calls of the loop in another form is behind a step,
        which are told once, or inputs that differ, as those do that one program pads by
        hand."""
        causes = [cause for cause in self.causes if cause.step <= step]
        return bool(causes) and all(
            cause.label == "other loop" or cause.kind == DATA for cause in causes
        )

    def _shows_portions(self, sides: Sides, data: DataPortions) -> bool:
        """Return True where tensors say if a step does the same work in other portions.

        Computed ones do where all of the step could be, and the data are the same. As
        many calls of each module on other data are another batch.
        """
        are_same = data.first_are_same()
        if self._tensors and not are_same:
            return not is_another_batch(
                sides.reference, sides.candidate, data.first_others()
            )
        return self._tensors or (are_same and is_whole(sides.candidate))

    def _is_all_work_done(self, sides: Sides, step: int) -> bool:
        """Return False where the work follows the number of backward passes.

        Then parts are left out or done again. Padding adds work too, but less than the
        passes that it comes with.
        """
        ours, theirs = (
            sum(event.what == "backward" for event in events)
            for events in self._events(step)
        )
        if not ours or not theirs or ours == theirs:
            return True
        work = share_of_work(sides.reference, sides.candidate)
        return abs(work - 1) <= abs(work - theirs / ours)

    def _with_causes(
        self,
        sides: Sides,
        rows: Sequence[ComparedRow],
        step: int,
        *,
        is_same_before: bool,
    ) -> list[ComparedRow]:
        """Find what stands behind the rows; leave operators that only show it unnamed.

        A program of another hand has its own parameters and its own data path.
        """
        modules = self._settings.modules
        if by_different_hands(sides.reference.rows, sides.candidate.rows, modules):
            self._is_one_program = False
            if not self._differs:
                self.causes += left_average_causes(
                    sides, *self._held, rank=self._rank, step=step
                )
            return [*rows]
        ours, theirs = self._names
        known = ours.before(theirs), theirs.before(ours)
        compared = ComparedStep(
            sides=sides,
            rows=rows,
            rank=self._rank,
            step=step,
            is_first=step == self._first_step,
            is_same_before=is_same_before,
            modules=self._settings.modules,
            events=self._events(step),
            unstable=self._settings.unstable,
            known=known,
        )
        ours.note(sides.reference.rows, renaming(modules))
        theirs.note(sides.candidate.rows, lambda name: name)
        causes = [*self.causes, *causes_of_step(compared)]
        if is_same_before and all(cause.kind != UPDATE for cause in causes):
            causes += self._left_writes(sides, rows, step, known[1])
        self.causes = in_order(causes)
        tensors = sides.candidate.tensors is not None
        told = told_inputs(sides.candidate, rows)
        return [
            relabelled(row)
            if row.record in told or is_shown(row, causes, tensors=tensors)
            else row
            for row in rows
        ]

    @functools.cached_property
    def _held(self) -> tuple[Sequence[TensorContent], Mapping[str, int]]:
        """What the candidate held before its first step, and the last step with each name."""
        try:
            set_up = self._candidate.set_up(self._rank)
            named = self._candidate.part(self._rank).drop_nulls("name")
            last = named.group_by("name").agg(pl.col("step").max())
            names = self._candidate.collected(last)
        except RunError:
            return (), {}
        last_steps = dict(names.select("name", "step").iter_rows())
        return (() if set_up is None else set_up.parameters), last_steps
