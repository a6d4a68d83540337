"""A budget of a small network: every row measured by trial, which costs less there.

The whole effect of every row is then known, to any order, and has no sampling error;
what is left is what the samples of other batches differ by.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from roundoff.budget.adjoint import describe
from roundoff.budget.decisions import CallPlaces, FollowingMode
from roundoff.budget.noise_power import TRIAL
from roundoff.budget.outputs import MOST_ROWS
from roundoff.budget.program import Calls
from roundoff.budget.run import Asked, BudgetRun, MeasuredBatch
from roundoff.budget.table import Budget
from roundoff.budget.trial_rows import OutputView, TrialRows
from roundoff.budget.trial_signs import DrawnSigns
from roundoff.budget.trials import (
    Pair,
    Programs,
    RecordedBatch,
    Recording,
    call_at,
    measure_batch_by_trial,
)
from roundoff.ops import Call, CallMode, float_tensors
from roundoff.plan import check_finite

#: Sign vectors a sample, over all outputs: for what rows do together.
PROBES = 16
#: Batches that are measured at least, and samples, so that they can be compared.
FEWEST_BATCHES = 2
FEWEST_SAMPLES = 8
#: Why a row has no number.
REFUSES = "the model does not run with it rounded"


class DescribedPlaces(CallPlaces):
    """Notes the place of each site's call, and what a budget keeps of the site."""

    def __init__(self, run: BudgetRun) -> None:
        super().__init__()
        self.run = run

    def call(self, call: Call) -> Any:
        """Run the call."""
        result = super().call(call)
        outputs = float_tensors(result)
        if outputs:
            describe(call, outputs, self.run.sites, self.run.formats)
        return result


class TrialRun(BudgetRun):
    """What trials measure over the batches.

    ``seen`` are calls of a batch that can be run again as a program.
    """

    measured = TRIAL

    def __init__(self, asked: Asked, seen: Calls = ()) -> None:
        super().__init__(asked)
        self.seen = seen
        self.places = DescribedPlaces(self)
        self.first: RecordedBatch | None = None
        self.first_calls: Calls = ()
        self.programs: Programs | None = None
        self.tried: set[Pair] = set()

    @property
    def is_enough(self) -> bool:
        """True once there are batches, and samples, enough to compare them."""
        samples = sum(batch.samples for batch in self.batches)
        return len(self.batches) >= FEWEST_BATCHES and samples >= FEWEST_SAMPLES

    def batch(self, mode: CallMode, index: int) -> None:
        """Measure one batch."""
        if not isinstance(mode, FollowingMode):
            raise TypeError("trials need a FollowingMode")
        recorded = self._like_first(index) or self._recorded(mode, index)
        values = list(recorded.targets.values())
        division = next(iter(self.divisions(index, values)))
        outputs = len(self.rows.names)
        is_number = sum(value.numel() for value in values) == 1
        self.probes = 1 if is_number else max(2, min(PROBES, MOST_ROWS // outputs))
        state = self.generator.get_state()
        signs = DrawnSigns(index, state, self.probes, self.names, self.names, division)
        self.generator.manual_seed(self.asked.seed + index + 1)
        results = self._tried(index, recorded, signs)
        self.add_signal(values, division)
        self.signs.append(signs)
        projections = {
            key: rows
            for result in results.values()
            for batch in result.batches
            for key, rows in batch.items()
        }
        overflow = {
            key: count
            for result in results.values()
            for key, count in result.overflow.items()
        }
        self.batches.append(
            MeasuredBatch(
                division.samples, projections, lambda key: overflow.get(key, 0)
            )
        )
        self.judge()

    def _recorded(self, mode: FollowingMode, index: int) -> RecordedBatch:
        """Run a batch as it is, and note its sites and targets."""
        mode.handler = self.places
        mode.begin()
        with torch.enable_grad(), mode:
            targets = self.forward(index)
        places = self.places.finished(targets)
        self.named_passes += 1
        self.keep_output(index)
        check_finite(self.workload, index, self.targets)
        self.names = tuple(self.targets)
        self.programs = None
        for name, target in self.targets.items():
            if mode.follows(target):
                self.rows.reached.add(self.rows.output_of[name])
        for site, place in places.items():
            if place.reaches:
                self.sites[site].no_path = None
        recorded = RecordedBatch(
            places, {n: t.detach() for n, t in self.targets.items()}
        )
        self.first = self.first or recorded
        return recorded

    def _like_first(self, index: int) -> RecordedBatch | None:
        """Return a batch by its program; None unless that calls what the first one did.

        Its sites then have the places of the first one's, without a pass that names
        them.
        """
        if self.first is None or not self.first_calls:
            return None
        recording = Recording(self.target, {0: self.first}, is_pure=True)
        programs = Programs(self.workload, recording, self.first_calls)
        program = programs.of(index)
        if program is None or program.calls != self.first_calls:
            return None
        for place in self.first.places.values():
            step = program.step(place.number)
            if step is not None:
                call = call_at(place, step.args, step.kwargs)
                outputs = float_tensors(step.results)
                describe(call, outputs, self.sites, self.formats)
        self.take_output(index, programs.output)
        self.keep_output(index)
        check_finite(self.workload, index, self.targets)
        self.names = tuple(self.targets)
        self.programs = programs
        return RecordedBatch(
            self.first.places, {n: t.detach() for n, t in self.targets.items()}
        )

    def _tried(
        self, index: int, recorded: RecordedBatch, signs: DrawnSigns
    ) -> Mapping[Pair, TrialRows]:
        """Return the rows of every site and format that reaches the targets."""
        pairs = [
            (site, fmt)
            for site, place in recorded.places.items()
            for fmt in self.formats
            if place.reaches and fmt.name not in self.sites[site].refused
        ]
        recording = Recording(self.target, {index: recorded}, is_pure=True)
        views = self._views()
        programs = self.programs or Programs(self.workload, recording, self.seen)
        results = measure_batch_by_trial(
            self.workload, recording, pairs, views, signs, programs
        )
        self.seen = programs.seen
        program = programs.of(index)
        if recorded is self.first and program is not None:
            self.first_calls = program.calls
        for site, fmt in pairs:
            if (site, fmt) not in results:
                self.sites[site].refused[fmt.name] = REFUSES
        self.tried |= results.keys()
        return results

    def _views(self) -> Sequence[OutputView]:
        """Return the outputs, in units of their tensors."""
        return [
            OutputView(
                {
                    tensor: self.rows.weight[tensor]
                    for tensor, output in self.rows.output_of.items()
                    if output == number
                },
                1.0,
            )
            for number in range(len(self.rows.names))
        ]

    def budget(self, mode: CallMode) -> Budget:
        """Return everything measured, relative to the power of each output."""
        measured = super().budget(mode)
        return replace(measured, about=replace(measured.about, trials=len(self.tried)))
