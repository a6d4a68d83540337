"""What larger batches gain: two batches run as one, against one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from roundoff.advise.advice import PAYS, TRIAL_ERRORS, AdviceRow, Trials, first_line
from roundoff.advise.facts import Facts
from roundoff.advise.setup import Observation, Runner, Setup, observe
from roundoff.advise.trial import Precision, measure_speed, sqnr_of

#: Kernels shorter than this, in the mean, mostly start: seconds.
SHORT_KERNEL = 20e-6


def try_larger_batches(facts: Facts, trials: Trials) -> list[AdviceRow]:
    """Return the row of twice the batch where kernels are short; none elsewhere."""
    calls = sum(row.calls for row in facts.profile.rows)
    if not calls or facts.profile.seconds / calls > SHORT_KERNEL:
        return []
    mean = facts.profile.seconds / calls
    row = AdviceRow(
        name="larger_batches",
        seen=f"{calls:,.0f} kernels a step take {mean * 1e6:.0f} µs each in the mean",
        place="",
        do="twice the samples in a batch",
        why="short kernels mostly start, and Python calls them one by one",
        source="PyTorch performance tuning guide",
        verdict="not tried",
    )
    setup = trials.setup
    joined = _joined(setup.workload.batches)
    if joined is None:
        return [replace(row, reason="two batches cannot be put together")]
    larger = _with_batches(setup, [joined])
    try:
        return [_measured(row, larger, facts, trials)]
    except TRIAL_ERRORS as error:
        return [replace(row, reason=f"it failed: {first_line(error)}")]


def _measured(row: AdviceRow, larger: Setup, facts: Facts, trials: Trials) -> AdviceRow:
    single = Runner(trials.setup.copied())
    double = Runner(larger.copied())

    def two_steps() -> None:
        single.step()
        single.step()

    speed = measure_speed(
        two_steps, double.step, seconds=trials.seconds, device=facts.device
    )
    pays = speed.median >= PAYS and speed.low > 1
    precision = None
    reason = "it trains otherwise: the rate of learning has to follow"
    if not trials.setup.train:
        precision = _precision(trials.observed, observe(larger.copied(), 1))
        reason = "the loader decides"
    verdict = "by hand" if pays else "does not pay"
    return replace(
        row, speed=speed, precision=precision, verdict=verdict, reason=reason
    )


def _precision(single: Observation, double: Observation) -> Precision:
    """Compare the outputs of two batches with those of both as one."""
    if len(single.outputs) < 2:
        doubled = [single.outputs[0], single.outputs[0]]
    else:
        doubled = single.outputs[:2]
    first, second = doubled
    together = {
        name: torch.cat([first[name], second[name]])
        for name in first
        if first[name].dim() and name in second
    }
    return Precision(output_db=sqnr_of([together], double.outputs), loss_db=None)


def _with_batches(setup: Setup, batches: list[Any]) -> Setup:
    workload = setup.workload.with_model(setup.model)
    workload.batches = batches
    return replace(setup, workload=workload)


def _joined(batches: list[Any]) -> Any | None:
    """Return the first two batches as one; None where they do not fit. A single batch
    is taken twice."""
    first = batches[0]
    second = batches[1] if len(batches) > 1 else first
    leaves, structure = tree_flatten(first)
    others, other_structure = tree_flatten(second)
    if structure != other_structure:
        return None
    joined = []
    for leaf, other in zip(leaves, others, strict=True):
        is_batch = isinstance(leaf, Tensor) and leaf.dim() > 0
        if is_batch and leaf.shape[1:] != other.shape[1:]:
            return None
        joined.append(torch.cat([leaf, other]) if is_batch else leaf)
    return tree_unflatten(joined, structure)
