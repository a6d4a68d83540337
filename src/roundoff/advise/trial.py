"""Try one setup against another: speed in turns, and what the change costs in precision."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from roundoff.advise.changes import CHANGES, Change
from roundoff.advise.setup import Observation, Observed, Runner, Setup, observe
from roundoff.budget import sqnr_db
from roundoff.plan import noise

#: Least seconds of one sample: large against the clock's resolution.
SAMPLE = 0.02
LEAST_ROUNDS = 5
MOST_ROUNDS = 15
MOST_REPEATS = 1000
#: Where so many rounds all give less than this ratio, no more are needed.
LOST_AFTER = 3
LOST = 0.7
#: Batches whose outputs are compared.
COMPARED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds of the unchanged over seconds of the changed, in pairs of turns.

    Attributes:
        median: above 1 where the change is faster.
        low: the lower quartile.
        high: the upper quartile.
        rounds: pairs.
        clock: ``CPU time``, or ``wall clock`` on a GPU and for numbers of threads.
        first_seconds: of the first call of the changed, by the wall clock: it compiles.
    """

    median: float
    low: float
    high: float
    rounds: int
    clock: str
    first_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """SQNR in dB of the changed against the unchanged; inf where equal, None where
    nothing could be compared.

    Attributes:
        output_db: of the outputs; with training of the gradients.
        loss_db: of the loss, with training.
    """

    output_db: float | None
    loss_db: float | None

    @property
    def least_db(self) -> float | None:
        """The lower of both."""
        values = [v for v in (self.output_db, self.loss_db) if v is not None]
        return min(values) if values else None


def measure_speed(
    reference: Callable[[], object],
    candidate: Callable[[], object],
    *,
    seconds: float,
    device: torch.device,
    wall: bool = False,
) -> Speed:
    """Call both in turns and compare pair by pair.

    Args:
        reference: the unchanged.
        candidate: the changed.
        seconds: for all turns, as far as five rounds allow.
        device: work is waited for on a GPU.
        wall: compare by the wall clock, not by processor time.
    """
    by_wall = wall or device.type != "cpu"
    clock = time.perf_counter if by_wall else time.process_time
    first = min(_sample(reference, 1, clock, device) for _ in range(2))
    start = time.perf_counter()
    second = _sample(candidate, 1, clock, device)
    first_seconds = time.perf_counter() - start
    second = min(second, _sample(candidate, 1, clock, device))
    sample = min(SAMPLE, seconds / LEAST_ROUNDS)
    repeats = round(sample / max(first, second, 1e-7))
    repeats = max(1, min(repeats, MOST_REPEATS))
    ratios: list[float] = []
    end = time.monotonic() + seconds
    while _goes_on(ratios, end):
        order = (reference, candidate)
        if len(ratios) % 2:
            order = (candidate, reference)
        samples = {call: _sample(call, repeats, clock, device) for call in order}
        ratios.append(samples[reference] / max(samples[candidate], 1e-9))
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive")
    return Speed(
        median=statistics.median(ratios),
        low=quartiles[0],
        high=quartiles[2],
        rounds=len(ratios),
        clock="wall clock" if by_wall else "CPU time",
        first_seconds=first_seconds,
    )


def _goes_on(ratios: Sequence[float], end: float) -> bool:
    """Return True while more pairs are wanted: few for what is far slower."""
    rounds = len(ratios)
    if rounds < LEAST_ROUNDS:
        is_lost = rounds >= LOST_AFTER and max(ratios) < LOST
        return not is_lost
    return rounds < MOST_ROUNDS and time.monotonic() < end


def _sample(
    call: Callable[[], object],
    repeats: int,
    clock: Callable[[], float],
    device: torch.device,
) -> float:
    """Return the seconds of one call, the mean of ``repeats``."""
    _wait(device)
    start = clock()
    for _ in range(repeats):
        call()
    _wait(device)
    return (clock() - start) / repeats


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare_setups(
    reference: Setup,
    changes: Sequence[Change],
    *,
    base: Sequence[Change] = (),
    seconds: float,
    device: torch.device,
) -> Speed:
    """Compare the speed of a setup with changes to that of the same with ``base``."""
    first = Runner(changed(reference, base))
    second = Runner(changed(reference, changes))
    gc.collect()
    wall = any(CHANGES[change.name].by_wall for change in changes)
    return measure_speed(
        first.step, second.step, seconds=seconds, device=device, wall=wall
    )


def changed(reference: Setup, changes: Sequence[Change]) -> Setup:
    """Return a copy of a setup with changes made."""
    setup = reference.copied()
    if not setup.train:
        setup.model.eval()
    for change in changes:
        setup = change.apply(setup)
    return setup


def compare_precision(
    observed: Observation, reference: Setup, changes: Sequence[Change]
) -> Precision:
    """Return what a setup with changes computes against what was observed without, in
    dB."""
    other = observe(changed(reference, changes), COMPARED)
    return Precision(
        output_db=sqnr_of(observed.outputs, other.outputs),
        loss_db=sqnr_of(observed.losses, other.losses),
    )


def sqnr_of(reference: list[Observed], other: list[Observed]) -> float | None:
    """Return the SQNR in dB over all batches; None where nothing can be compared."""
    if not reference or len(reference) != len(other):
        return None
    value = sqnr_db(noise(other, reference))
    return None if math.isnan(value) else value
