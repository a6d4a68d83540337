"""Targets in decibels of SQNR, and how a drop of the metric becomes decibels."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from roundoff.budget.facts import MetricCurve, MetricLevel
from roundoff.errors import PlanError
from roundoff.plan import replaced
from roundoff.workload import Workload, named_tensors

if TYPE_CHECKING:
    from roundoff.budget.table import Budget

Array = np.ndarray[Any, np.dtype[np.float64]]

#: SQNRs, in dB, at which the metric is measured with noise.
LEVELS = tuple(range(2, 74, 4))
#: Draws of noise at each level.
REPEATS = 4


def metric_curve(
    workload: Workload, reference: Sequence[Any], budget: Budget, seed: int = 0
) -> MetricCurve:
    """Evaluate the metric on the reference outputs with Gaussian noise at each level.

    The model is not run. The noise of a level has, relative to each tensor of the
    output, that level's power, shared among the samples as the budget's own noise is
    (averaged over sites and formats), and is white within a sample. It is drawn
    ``REPEATS`` times, each time once for all levels.
    """
    generator = torch.Generator().manual_seed(seed)
    about = budget.about
    starts = np.cumsum(about.batch_samples)[:-1]
    profiles = np.split(_noise_profile(budget), starts)
    signals = _signals(reference)
    # batches that were not measured are taken as one sample of the measured ones' mean
    share = len(profiles) / len(reference)
    unmeasured = len(reference) - len(profiles)
    profiles = [profile * share for profile in profiles]
    profiles.extend([np.array([1 / len(reference)])] * unmeasured)
    noisy_batches = [
        _NoisyOutput(output, profile, signals)
        for output, profile in zip(reference, profiles, strict=True)
    ]

    name = getattr(workload.metric, "__name__", "metric")
    exact = _metric(workload, reference, reference)
    draws = [_draw(workload, noisy_batches, generator, exact) for _ in range(REPEATS)]
    levels = tuple(
        MetricLevel(float(db), float(np.mean(values)), float(np.std(values, ddof=1)))
        for db, values in zip(LEVELS, zip(*draws, strict=True), strict=True)
    )
    return MetricCurve(name, exact, levels)


def _draw(
    workload: Workload,
    batches: Sequence[_NoisyOutput],
    generator: torch.Generator,
    exact: float,
) -> list[float]:
    """Return the metric at each level, with one draw of the noise for all of them."""
    noises = [batch.draw(generator) for batch in batches]
    reference = [batch.output for batch in batches]

    @cache
    def value_at(place: int) -> float:
        amplitude = 10 ** (-LEVELS[place] / 20)
        noisy = [
            batch.with_noise(noise, amplitude)
            for batch, noise in zip(batches, noises, strict=True)
        ]
        return _metric(workload, noisy, reference)

    return values_by_level(value_at, exact)


def values_by_level(value_at: Callable[[int], float], exact: float) -> list[float]:
    """Return the metric at each level, without a look at those that change nothing.

    Of scores along a line, a largest one that is so at both ends is so between: a
    metric of decisions that a draw of noise leaves alone is left alone by less of it.
    Two levels in turn must, since decisions may change and their number not.
    """
    places = range(len(LEVELS))

    def is_unchanged(place: int) -> bool:
        above = min(place + 1, places[-1])
        return value_at(place) == exact and value_at(above) == exact

    first_unchanged = bisect_left(places, True, key=is_unchanged)
    changed = [value_at(place) for place in places[:first_unchanged]]
    return changed + [exact] * (len(places) - first_unchanged)


def _noise_profile(budget: Budget) -> Array:
    """Return the share of the noise that falls on each sample.

    The share of the signal where sites are not told apart.
    """
    about = budget.about
    profile = np.zeros(about.samples)
    for fmt in about.formats:
        noise = _sample_noise(budget, fmt)
        if noise.sum() > 0:
            profile += noise / noise.sum()
    if profile.sum() == 0:
        profile += np.asarray(about.sample_signal)
    return np.asarray(profile / profile.sum(), dtype=np.float64)


def _sample_noise(budget: Budget, fmt: str) -> Array:
    """Return the noise power of each sample with every site in a format."""
    noise = np.zeros(budget.about.samples)
    for site in budget.sites:
        for term in budget.rows(site.site, fmt):
            squares = (term.values**2).mean(axis=0)
            if not term.pooled and np.isfinite(squares).all():
                noise += squares
    return noise


def _metric(
    workload: Workload, outputs: Sequence[Any], reference: Sequence[Any]
) -> float:
    value = workload.evaluate(list(outputs), list(reference))
    return math.nan if value is None else value


def _signals(outputs: Sequence[Any]) -> dict[str, float]:
    """Return the power of each tensor over all batches."""
    signals: dict[str, float] = {}
    for output in outputs:
        for name, tensor in named_tensors(output).items():
            power = float(tensor.double().square().sum())
            signals[name] = signals.get(name, 0.0) + power
    return signals


class _NoisyOutput:
    """The output of a batch, to which noise of any power is added.

    Args:
        output: of the batch.
        profile: share of the noise that falls on each sample.
        signals: power of each tensor over all batches.
    """

    def __init__(
        self, output: Any, profile: Array, signals: Mapping[str, float]
    ) -> None:
        self.output = output
        self._deviations = {
            id(tensor): (tensor.shape, _deviation(tensor, profile * signals[name]))
            for name, tensor in named_tensors(output).items()
        }

    def draw(self, generator: torch.Generator) -> dict[int, Tensor]:
        """Draw noise of the power of each tensor, by the tensor's identity."""
        return {
            key: torch.randn(shape, generator=generator).mul_(deviation)
            for key, (shape, deviation) in self._deviations.items()
        }

    def with_noise(self, noise: Mapping[int, Tensor], amplitude: float) -> Any:
        """Return the output with so much of a draw of noise."""

        def noisy(tensor: Tensor) -> Tensor:
            drawn = noise.get(id(tensor))
            if drawn is None:  # without elements
                return tensor
            return tensor + (drawn * amplitude).to(tensor.device, tensor.dtype)

        return replaced(self.output, noisy)


def _deviation(tensor: Tensor, powers: Array) -> Tensor:
    """Return the standard deviation of noise that has so much power in each sample.

    It broadcasts against the tensor.
    """
    samples = len(powers)
    variance = torch.as_tensor(powers * samples / tensor.numel())
    if not tensor.ndim or not tensor.shape[0] or tensor.shape[0] % samples:
        return variance.mean().sqrt().float()
    by_row = variance.sqrt().float().repeat_interleave(tensor.shape[0] // samples)
    return by_row.view(-1, *[1] * (tensor.ndim - 1))


def metric_at(curve: MetricCurve, db: float) -> tuple[float, float]:
    """Return the predicted metric and its standard deviation at an SQNR.

    Interpolated between levels; the reference above the highest level, the lowest
    level's value below the lowest.
    """
    levels = curve.levels
    if db > levels[-1].db:
        return float(curve.reference), float(levels[-1].std)
    places = [level.db for level in levels]
    mean = np.interp(db, places, [level.mean for level in levels])
    std = np.interp(db, places, [level.std for level in levels])
    return float(mean), float(std)


def drop_to_db(curve: MetricCurve | None, drop: float) -> tuple[float, str]:
    """Return the lowest SQNR from which on the metric loses no more than ``drop``.

    With it comes a sentence on how sure that is. A level is good when the mean of its
    draws, less one standard error, is within the drop. Raises ``PlanError`` when the
    budget has no metric, or no level is good.
    """
    if curve is None:
        raise PlanError(
            "a metric drop was asked for, and the budget has no metric",
            where="metric_drop",
            expected="a workload with metric(outputs, ...)",
            do="give a target in dB instead",
        )
    least = float(curve.reference) - drop
    safe = [level.mean - level.std / math.sqrt(REPEATS) for level in curve.levels]
    bad = [place for place, value in enumerate(safe) if not value >= least]
    first_good = bad[-1] + 1 if bad else 0
    if first_good == len(safe):
        raise PlanError(
            f"even noise at {LEVELS[-1]} dB moves the metric by more than {drop:g}",
            where="metric_drop",
            expected="a drop above the metric's own sensitivity",
            got=f"{curve.name} {curve.reference:.6g}, {safe[-1]:.6g} at {LEVELS[-1]} dB",
        )
    if not bad:
        lowest = LEVELS[0]
        note = f"{curve.name} holds at every noise level tried, down to {lowest} dB"
        return float(lowest), note
    below = curve.levels[first_good - 1].db
    above = curve.levels[first_good].db
    rise = safe[first_good] - safe[first_good - 1]
    share = (least - safe[first_good - 1]) / rise if rise > 0 else 1.0
    db = below + (above - below) * min(max(share, 0.0), 1.0)
    drops = f"{curve.name} drops by {drop:g} between {below:g} and {above:g} dB"
    return db, f"{drops} of output noise"
