"""Targets: what the user asks for, in decibels of SQNR, and how a drop of the metric becomes decibels."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from roundoff.errors import PlanError
from roundoff.plan import replaced

if TYPE_CHECKING:
    from roundoff.budget.table import Budget
    from roundoff.workload import Workload

LEVELS = tuple(range(2, 74, 4))
REPEATS = 4


def parse_target(value: float | str) -> float:
    """A target in dB: ``40``, ``"40"``, ``"40dB"``. Raises ``PlanError`` for anything else.

    >>> parse_target("38.5 dB")
    38.5
    """
    found = re.fullmatch(
        r"\s*([+-]?\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*(?:dB)?\s*",
        str(value),
        flags=re.IGNORECASE,
    )
    if found is None:
        raise PlanError(
            "not a target",
            where="target",
            expected="a number of decibels such as 40dB",
            got=repr(value),
        )
    return float(found[1])


def parse_drop(value: float | str) -> float:
    """A drop of the metric in its own unit: ``0.005``, or ``"0.5%"`` (of 1: half a point of accuracy).

    >>> parse_drop("0.5%"), parse_drop(0.01)
    (0.005, 0.01)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?(?:[eE]-?\d+)?)\s*(%?)\s*", str(value))
    if found is None:
        raise PlanError(
            "not a drop of the metric",
            where="metric_drop",
            expected="0.5% or 0.005",
            got=repr(value),
        )
    return float(found[1]) / (100 if found[2] else 1)


def metric_curve(
    workload: Workload, reference: list[Any], budget: Budget, seed: int = 0
) -> dict[str, Any]:
    """The metric on the reference outputs with Gaussian noise added, at each SQNR level; the model is not run.

    The noise of a level has that level's total power, shared among the samples as the budget's own noise is
    (averaged over sites and formats), and is white within a sample. Each level is drawn ``REPEATS`` times.
    Returns ``{"name", "reference", "levels": [{"db", "mean", "std"}]}``.
    """
    generator = torch.Generator().manual_seed(seed)
    profile = _profile(budget)
    starts = np.cumsum([0, *budget.about["batch_samples"]])
    value = _value(workload, reference, reference)
    levels = []
    for db in LEVELS:
        power = 10 ** (-db / 10) * float(budget.about["signal"])
        drawn = []
        for _ in range(REPEATS):
            noisy = [
                _add_noise(
                    output, power * profile[starts[i] : starts[i + 1]], generator
                )
                for i, output in enumerate(reference)
            ]
            drawn.append(_value(workload, noisy, reference))
        levels.append(
            {
                "db": float(db),
                "mean": float(np.mean(drawn)),
                "std": float(np.std(drawn, ddof=1)),
            }
        )
    name = getattr(workload.metric, "__name__", "metric")
    return {"name": name, "reference": value, "levels": levels}


def _profile(budget: Budget) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Share of the noise that falls on each sample; the share of the signal where sites are not told apart."""
    profile = np.zeros(int(budget.about["samples"]))
    for fmt in budget.about["formats"]:
        found = np.zeros_like(profile)
        for site in budget.sites:
            for term in budget.rows(site["site"], fmt):
                squares = (term.values**2).mean(axis=0)
                if not term.pooled and np.isfinite(squares).all():
                    found += squares
        if found.sum() > 0:
            profile += found / found.sum()
    if profile.sum() == 0:
        profile += np.asarray(budget.about["sample_signal"])
    return np.asarray(profile / profile.sum(), dtype=np.float64)


def _value(workload: Workload, outputs: list[Any], reference: list[Any]) -> float:
    value = workload.evaluate(outputs, reference)
    return math.nan if value is None else value


def _add_noise(
    output: Any, power: np.ndarray[Any, Any], generator: torch.Generator
) -> Any:
    from roundoff.workload import named_tensors

    elements = sum(t.numel() for t in named_tensors(output).values())
    per_sample = torch.as_tensor(
        power * len(power) / elements, dtype=torch.float32
    ).sqrt()

    def noisy(t: Tensor) -> Tensor:
        draw = torch.randn(t.shape, generator=generator)
        if t.ndim and t.shape[0] == len(power):
            draw *= per_sample.view(-1, *(1 for _ in range(t.ndim - 1)))
        else:
            draw *= float(per_sample.square().mean().sqrt())
        return t + draw.to(t.device, t.dtype)

    return replaced(output, noisy)


def metric_at(curve: Mapping[str, Any], db: float) -> tuple[float, float]:
    """Predicted metric and its standard deviation at an SQNR, interpolated between levels; the reference above
    the highest level and the lowest level's value below the lowest."""
    levels = curve["levels"]
    x = [level["db"] for level in levels]
    if db > x[-1]:
        return float(curve["reference"]), float(levels[-1]["std"])
    return (
        float(np.interp(db, x, [level["mean"] for level in levels])),
        float(np.interp(db, x, [level["std"] for level in levels])),
    )


def drop_to_db(curve: Mapping[str, Any] | None, drop: float) -> tuple[float, str]:
    """The lowest SQNR from which on the metric loses no more than ``drop``, and a sentence on how sure that is.

    A level counts as good when the mean of its draws, less one standard error, is within the drop. Raises
    ``PlanError`` when the budget has no metric, or no level is good.
    """
    if curve is None:
        raise PlanError(
            "a metric drop was asked for, and the budget has no metric",
            where="metric_drop",
            expected="a workload with metric(outputs, ...)",
            do="give a target in dB instead",
        )
    floor = float(curve["reference"]) - drop
    safe = [
        level["mean"] - level["std"] / math.sqrt(REPEATS) for level in curve["levels"]
    ]
    good = len(safe)
    while good > 0 and safe[good - 1] >= floor:
        good -= 1
    if good == len(safe):
        raise PlanError(
            f"even noise at {LEVELS[-1]} dB moves the metric by more than {drop:g}",
            where="metric_drop",
            expected="a drop above the metric's own sensitivity",
            got=f"{curve['name']} {curve['reference']:.6g}, {safe[-1]:.6g} at {LEVELS[-1]} dB",
        )
    if good == 0:
        return float(
            LEVELS[0]
        ), f"{curve['name']} holds at every noise level tried, down to {LEVELS[0]} dB"
    low, high = curve["levels"][good - 1]["db"], curve["levels"][good]["db"]
    share = (
        (floor - safe[good - 1]) / (safe[good] - safe[good - 1])
        if safe[good] > safe[good - 1]
        else 1.0
    )
    db = low + (high - low) * min(max(share, 0.0), 1.0)
    return (
        db,
        f"{curve['name']} drops by {drop:g} between {low:g} and {high:g} dB of output noise",
    )
