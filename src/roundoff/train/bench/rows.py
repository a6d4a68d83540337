"""The results of a bench as plain data: ratios, differences, verdicts."""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from roundoff.train.bench.judge import DIFFERENT, UNDECIDED, Judged, judge
from roundoff.train.bench.result import WARM, Result, tail
from roundoff.train.bench.trainee import Stepped
from roundoff.workload import Workload


def summary(
    workload: Workload,
    results: list[Result],
    seeds: list[int],
    steps: int,
    anew: bool,
    device: torch.device,
) -> dict[str, Any]:
    """Everything about a bench: ``anew`` says whether each seed began with weights of its own."""
    first = results[0]
    rows = [_row(result, first) for result in results]
    if anew:
        weights = "drawn anew by model() under each seed"
    else:
        weights = "the same for every seed, which changes the order of the batches and what is drawn in training"
    spoilt = [i for i, batch in enumerate(workload.batches) if not _finite(batch)]
    notes = (
        [f"batch {', '.join(map(str, spoilt[:5]))} of the workload holds NaN or Inf"]
        if spoilt
        else []
    )
    return {
        "workload": workload.name,
        "reference": first.config.name,
        "steps": steps,
        "seeds": seeds,
        "weights": weights,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "batches": len(workload.batches),
        "held_out": len(workload.held_out),
        "metric": workload.metric_name,
        "warm": WARM,
        "tail": tail(steps),
        "memory_is": _memory_is(device),
        "notes": notes,
        "rows": rows,
        "curves": {result.config.name: result.losses() for result in results},
    }


def _memory_is(device: torch.device) -> str:
    if device.type == "cuda":
        return "the peak of torch.cuda.max_memory_allocated in a step, without the other configurations"
    return (
        "counted: parameters, buffers, gradients, optimizer state, and what autograd keeps for the backward pass. What "
        "operators need while they run is not in it"
    )


def _row(result: Result, first: Result) -> dict[str, Any]:
    row: dict[str, Any] = {
        "config": result.config.name,
        "format": result.config.format,
        "failed": result.failed,
        "notes": list(dict.fromkeys(result.notes)),
        "findings": result.findings,
        "seen": result.seen,
        "memory": result.memory or None,
        "scale": result.scale,
        "scaled": result.config.scale is not None,
        "skips": sum(one.skipped for seed in result.stepped for one in seed),
        "nonfinite": _nonfinite(result),
        "speed": None,
        "cpu": None,
        "seconds": None,
        "loss": None,
        "metric": None,
        "worse": False,
        "verdict": None,
    }
    if result.failed:
        return row
    row["seconds"] = statistics.median(
        one.wall for seed in result.stepped for one in seed[WARM:]
    )
    compared = result is not first and not first.failed
    if compared or result is first:
        pairs = _pairs(first, result)
        row["speed"] = _ratios(
            [ours.wall / (theirs.wall or math.nan) for ours, theirs in pairs]
        )
        row["cpu"] = _ratios(
            [ours.cpu / (theirs.cpu or math.nan) for ours, theirs in pairs]
        )
    row["loss"] = _judged(result.final(), first.final() if compared else None)
    if result.metrics:
        row["metric"] = _judged(result.metrics, first.metrics if compared else None)
    verdicts = [row[key]["verdict"] for key in ("loss", "metric") if row[key]]
    row["verdict"] = next(
        (v for v in (DIFFERENT, UNDECIDED) if v in verdicts),
        verdicts[0] if compared else None,
    )
    row["worse"] = _is_worse(row["loss"], 1) or _is_worse(row["metric"], -1)
    return row


def _pairs(first: Result, result: Result) -> list[tuple[Stepped, Stepped]]:
    """Steps of one round, those that are timed."""
    seeds = zip(first.stepped, result.stepped, strict=True)
    return [
        pair
        for ours, theirs in seeds
        for pair in zip(ours[WARM:], theirs[WARM:], strict=True)
    ]


def _ratios(ratios: list[float]) -> dict[str, float | int]:
    known = [ratio for ratio in ratios if math.isfinite(ratio)] or [math.nan]
    low, middle, high = (
        statistics.quantiles(known, n=4) if len(known) > 1 else known * 3
    )
    return {"median": middle, "low": low, "high": high, "rounds": len(known)}


def _judged(values: list[float], reference: list[float] | None) -> dict[str, Any]:
    finite = all(map(math.isfinite, values))
    judged = (
        asdict(judge(reference, values))
        if reference
        else dict.fromkeys(Judged.__dataclass_fields__)
    )
    spread = statistics.stdev(values) if finite and len(values) > 1 else None
    return {
        "mean": statistics.fmean(values),
        "spread": spread,
        "seeds": values,
        **judged,
    }


def _is_worse(judged: dict[str, Any] | None, sign: int) -> bool:
    if judged is None or judged["verdict"] != DIFFERENT:
        return False
    return judged["difference"] is None or judged["difference"] * sign > 0


def _nonfinite(result: Result) -> str | None:
    for number, losses in enumerate(result.losses()):
        bad = [step for step, loss in enumerate(losses) if not math.isfinite(loss)]
        if bad:
            more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
            return f"loss {losses[bad[0]]} at step {bad[0]}{more} (run {number})"
    return None


def _finite(batch: Any) -> bool:
    found = (
        leaf
        for leaf in tree_leaves(batch)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )
    return all(bool(torch.isfinite(leaf).all()) for leaf in found)
