"""How far a row of the candidate is from one of the reference: from tensors where both kept them, else statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from roundoff.compare.findings import Distance
from roundoff.compare.metrics import Metrics, measure
from roundoff.record import StepTensors

Row = Mapping[str, Any]

_COUNTS = ("nan", "posinf", "neginf")
VALUES = ("min", "max", "mean", "l2", "std")


class Distances:
    """The distances of one step; every pair of tensors is read and measured once, whatever views of it there are."""

    def __init__(
        self,
        ours: Mapping[int, Row],
        theirs: Mapping[int, Row],
        mine: StepTensors | None,
        other: StepTensors | None,
    ) -> None:
        self._ours, self._theirs = ours, theirs
        self._mine, self._other = mine, other
        self._metrics: dict[Any, Metrics] = {}
        self._found: dict[tuple[int, int], tuple[Distance, Metrics | None]] = {}

    def __call__(self, ours: int, theirs: int) -> Distance:
        return self.full(ours, theirs)[0]

    def full(self, ours: int, theirs: int) -> tuple[Distance, Metrics | None]:
        """The distance, and where tensors were kept all metrics."""
        found = self._found.get((ours, theirs))
        if found is None:
            found = self._found[ours, theirs] = self._measure(ours, theirs)
        return found

    def _measure(self, ours: int, theirs: int) -> tuple[Distance, Metrics | None]:
        one, other = self._ours[ours], self._theirs[theirs]
        if (
            self._mine is None
            or self._other is None
            or ours not in self._mine
            or theirs not in self._other
        ):
            return of_statistics(one, other), None
        metrics = self._of_tensors(self._mine, self._other, ours, theirs)
        if one["shape"] != other["shape"]:
            return Distance(math.inf), metrics
        return Distance(0.0, masked=True) if masked(one, other) else of_metrics(
            metrics
        ), metrics

    def _of_tensors(
        self, mine: StepTensors, other: StepTensors, ours: int, theirs: int
    ) -> Metrics:
        """The metrics; of tensors that lie in memory in the same way those of the memory, for all views of it at once."""
        dense = mine.dense(ours)
        alike = dense is not None and dense == other.dense(theirs)
        key = (
            (mine.key(ours), other.key(theirs))
            if not alike
            else (self._ours[ours]["blob"], self._theirs[theirs]["blob"])
        )
        metrics = self._metrics.get(key)
        if metrics is None:
            one, two = (
                (mine[ours], other[theirs])
                if not alike
                else (mine.blob(ours).view(-1), other.blob(theirs).view(-1))
            )
            metrics = self._metrics[key] = measure(one, two)
        if dense is None or not alike or metrics.worst_index is None:
            return metrics
        return metrics._replace(worst_index=_place(metrics.worst_index[0], *dense))


def _place(flat: int, shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The index of an element from its place in memory."""
    index = [0] * len(shape)
    for step, axis in sorted(
        ((s, a) for a, s in enumerate(stride) if shape[a] > 1), reverse=True
    ):
        index[axis], flat = divmod(flat, step)
    return index


def of_metrics(metrics: Metrics) -> Distance:
    """One number of the metrics: the relative l2 distance; infinite where NaN or Inf disagree, or only one is zero."""
    if metrics.numel == 0:
        return Distance(0.0, True)
    special = (
        metrics.nan_reference,
        metrics.nan_candidate,
        metrics.inf_reference,
        metrics.inf_candidate,
    )
    if any(special):
        return Distance(math.inf)
    if metrics.equal == 1.0:
        return Distance(0.0, True)
    if metrics.rel_l2 is None:
        return Distance(None if metrics.max_abs is None else math.inf)
    return Distance(metrics.rel_l2)


def of_statistics(one: Row, other: Row) -> Distance:
    """The largest difference of the statistics of two rows: l2 and standard deviation relative to the reference's l2 per
    element, mean relative to that too, smallest and largest relative to the largest magnitude.

    Equal statistics are taken for equal tensors. Infinite where NaN or Inf counts or shapes differ, unknown without
    statistics.

    >>> row = {"shape": [4], "numel": 4, "min": 1.0, "max": 2.0, "mean": 1.5, "l2": 3.2, "std": 0.5, "hash": None,
    ...        "dtype": "float32", "nan": 0, "posinf": 0, "neginf": 0}
    >>> of_statistics(row, row).equal, round(of_statistics(row, row | {"max": 2.2}).error, 3)
    (True, 0.1)
    """
    if one["hash"] is not None and one["hash"] == other["hash"]:
        return Distance(0.0, True)
    if (
        one["shape"] != other["shape"]
        and one["shape"] is not None
        and other["shape"] is not None
    ):
        return Distance(math.inf)
    if one["nan"] is None or other["nan"] is None:
        return Distance(None)
    if masked(one, other):
        return Distance(0.0, masked=True)
    if any(one[c] != other[c] for c in _COUNTS):
        return Distance(math.inf)
    if all(one[c] == other[c] for c in VALUES):
        known = one["hash"] is None or other["hash"] is None
        return Distance(0.0, known)
    if one["l2"] is None or other["l2"] is None:
        return Distance(None if one["l2"] is other["l2"] else math.inf)
    if not one["l2"]:
        return Distance(math.inf)
    return Distance(relative(one, other, max))


def masked(one: Row, other: Row) -> bool:
    """Whether both hold an additive mask, of different size: -Inf, or the lowest number of one format or the other. What it
    leaves of the values shows in what reads them."""
    if one["nan"] or other["nan"] or one["posinf"] or other["posinf"]:
        return False
    ends = [_lowest(row) for row in (one, other)]
    return None not in ends and ends[0] != ends[1]


def _lowest(row: Row) -> float | None:
    """The end of the format that the row reaches, -Inf or its lowest number; None where it reaches neither."""
    dtype = getattr(torch, row["dtype"] or "", None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    if row["neginf"]:
        return -math.inf
    return (
        float(row["min"])
        if row["min"] is not None and row["min"] <= 0.99 * torch.finfo(dtype).min
        else None
    )


def relative(
    one: Mapping[str, Any], other: Mapping[str, Any], largest: Callable[..., Any]
) -> Any:
    """The largest relative difference of the statistics; of numbers with ``max``, of arrays with what does it for them."""
    rms = one["l2"] / (one["numel"] - one["nan"] - one["posinf"] - one["neginf"]) ** 0.5
    amax = largest(abs(one["min"]), abs(one["max"]))
    return largest(
        abs(one["l2"] - other["l2"]) / one["l2"],
        abs(one["mean"] - other["mean"]) / rms,
        abs(one["std"] - other["std"]) / rms,
        abs(one["min"] - other["min"]) / amax,
        abs(one["max"] - other["max"]) / amax,
    )
