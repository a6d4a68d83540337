"""How far a candidate's row is from a reference's: by tensors, else by statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from roundoff.compare.records.data_portions import DataPortions
from roundoff.compare.records.recorded_rows import RecordedRow, Rows
from roundoff.compare.records.value_sketch import MASK
from roundoff.compare.rounding.findings import Distance
from roundoff.compare.tensors.metrics import Metrics, measure
from roundoff.record import StepTensors

#: Statistics over the finite elements.
VALUES = ("min", "max", "mean", "l2", "std")
#: Counts of the elements that are not finite.
COUNTS = ("nan", "posinf", "neginf")

#: A number below this share of the lowest of its format is a mask's.
OF_LOWEST = 0.99

#: Beside -1e9 scores of some hundreds are less than this share of it: numbers of a mask that
#: differ by less are one, whatever it was added to.
ONE_NUMBER = 1e-6

EQUAL = Distance(0.0, equal=True)
UNKNOWN = Distance(None)
INFINITE = Distance(math.inf)
MASKED = Distance(0.0, masked=True)


class Distances:
    """The distances of one step; calling it gives the one of two records.

    Every pair of tensors is read and measured once, whatever views of it there are.
    Without tensors of both sides, statistics decide. ``scales``: of the reference's and
    the candidate's gradients, by record. ``portions``: of data that the candidate
    works on in others; None where it does not.
    """

    def __init__(
        self,
        reference: Rows,
        candidate: Rows,
        reference_tensors: StepTensors | None,
        candidate_tensors: StepTensors | None,
        scales: tuple[Mapping[int, float], Mapping[int, float]] | None = None,
        *,
        portions: DataPortions | None = None,
    ) -> None:
        self._portions = portions
        self._reference = reference
        self._candidate = candidate
        self._reference_tensors = reference_tensors
        self._candidate_tensors = candidate_tensors
        self._scales = scales or ({}, {})
        self._metrics: dict[Any, Metrics] = {}
        self._measured: dict[tuple[int, int], tuple[Distance, Metrics | None]] = {}

    def __call__(self, reference: int, candidate: int) -> Distance:
        return self.full(reference, candidate)[0]

    def full(self, reference: int, candidate: int) -> tuple[Distance, Metrics | None]:
        """Return the distance of two records, and all metrics where tensors were kept."""
        measured = self._measured.get((reference, candidate))
        if measured is None:
            measured = self._measure(reference, candidate)
            self._measured[reference, candidate] = measured
        return measured

    def _measure(
        self, reference: int, candidate: int
    ) -> tuple[Distance, Metrics | None]:
        twin = self._reference[reference]
        row = self._candidate[candidate]
        ours = self._reference_tensors
        theirs = self._candidate_tensors
        if self._portions and not self._portions.are_comparable(twin, row):
            return UNKNOWN, None
        if ours is None or theirs is None:
            return of_statistics(twin, row), None
        if reference not in ours or candidate not in theirs:
            return of_statistics(twin, row), None
        if reference in self._scales[0] or candidate in self._scales[1]:
            metrics = self._of_scaled(ours, theirs, reference, candidate)
        else:
            metrics = self._of_tensors(ours, theirs, reference, candidate)
        if _shapes_differ(twin, row):
            return INFINITE, metrics
        if differently_masked(twin, row):
            tensors = _alike(ours[reference], theirs[candidate])
            return of_unmasked(*tensors), metrics
        if metrics.equal != 1.0 and _may_be_filled(twin, row):
            tensors = _alike(ours[reference], theirs[candidate])
            beside = beside_fill(*tensors)
            if beside is not None:
                return beside, metrics
        return of_metrics(metrics), metrics

    def _of_scaled(
        self, ours: StepTensors, theirs: StepTensors, reference: int, candidate: int
    ) -> Metrics:
        """Return the metrics of gradients without the scales of their losses."""
        our_scale = self._scales[0].get(reference, 1.0)
        their_scale = self._scales[1].get(candidate, 1.0)
        reference_values = ours[reference].to(torch.float64) / our_scale
        candidate_values = theirs[candidate].to(torch.float64) / their_scale
        return measure(*_alike(reference_values, candidate_values))

    def _of_tensors(
        self, ours: StepTensors, theirs: StepTensors, reference: int, candidate: int
    ) -> Metrics:
        """Return the metrics; tensors that lie alike in memory share those of the memory."""
        layout = ours.dense(reference)
        if layout is None or layout != theirs.dense(candidate):
            key = (ours.key(reference), theirs.key(candidate))
            metrics = self._metrics.get(key)
            if metrics is None:
                metrics = measure(*_alike(ours[reference], theirs[candidate]))
                self._metrics[key] = metrics
            return metrics
        blobs = (self._reference[reference].blob, self._candidate[candidate].blob)
        metrics = self._metrics.get(blobs)
        if metrics is None:
            ours_flat = ours.blob(reference).view(-1)
            theirs_flat = theirs.blob(candidate).view(-1)
            metrics = measure(ours_flat, theirs_flat)
            self._metrics[blobs] = metrics
        if metrics.worst_index is None:
            return metrics
        worst = _index_of(metrics.worst_index[0], *layout)
        return replace(metrics, worst_index=worst)


def _alike(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return both in one shape, where only axes of one element differ."""
    if ours.shape == theirs.shape or ours.squeeze().shape != theirs.squeeze().shape:
        return ours, theirs
    return ours, theirs.reshape(ours.shape)


def _index_of(flat: int, shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """Return the index of an element from its place in memory."""
    strided = [(stride[axis], axis) for axis, size in enumerate(shape) if size > 1]
    index = [0] * len(shape)
    for step, axis in sorted(strided, reverse=True):
        index[axis], flat = divmod(flat, step)
    return index


def of_metrics(metrics: Metrics) -> Distance:
    """Return the relative l2 distance; infinite where NaN, Inf or zeros disagree."""
    if metrics.numel == 0:
        return EQUAL
    if (
        metrics.nan_reference
        or metrics.nan_candidate
        or metrics.inf_reference
        or metrics.inf_candidate
    ):
        return INFINITE
    if metrics.equal == 1.0:
        return EQUAL
    if metrics.rel_l2 is not None:
        return Distance(metrics.rel_l2)
    return UNKNOWN if metrics.max_abs is None else INFINITE


def of_unmasked(ours: torch.Tensor, theirs: torch.Tensor) -> Distance:
    """Return the distance of what additive masks of different size leave in both.

    What they mask has no distance. ``MASKED`` where they mask other elements, or all: a
    row of padding may be masked or not, and is not read.

    >>> masked = torch.tensor([1.0, -math.inf]), torch.tensor([2.0, -3.4e38])
    >>> of_unmasked(*masked).error
    1.0
    """
    kept = ~_is_masked(ours)
    if not kept.equal(~_is_masked(theirs)) or not kept.any():
        return MASKED
    return of_metrics(measure(ours[kept], theirs[kept]))


def _is_masked(tensor: torch.Tensor) -> torch.Tensor:
    return tensor <= OF_LOWEST * torch.finfo(tensor.dtype).min


def beside_fill(ours: torch.Tensor, theirs: torch.Tensor) -> Distance | None:
    """Return the distance of what a mask leaves that fills with a large finite number.

    Beside -1e9 no other number would count. None where neither is filled so, or not in the
    same places.

    >>> filled = torch.tensor([1.0, -1e9]), torch.tensor([2.0, -1e9])
    >>> beside_fill(*filled).error
    1.0
    """
    if ours.shape != theirs.shape or not ours.is_floating_point():
        return None
    filled, other = _is_filled(ours), _is_filled(theirs)
    if filled is None or other is None or filled.all() or not filled.equal(other):
        return None
    return of_metrics(measure(ours[~filled], theirs[~filled]))


def _is_filled(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return where a tensor holds one number below ``-MASK``; None where it holds several."""
    low = tensor <= -MASK
    numbers = tensor[low]
    if not numbers.numel():
        return None
    least = numbers.min()
    is_one_number = bool(numbers.max() - least <= ONE_NUMBER * least.abs())
    return low if is_one_number else None


def _may_be_filled(reference: RecordedRow, candidate: RecordedRow) -> bool:
    """Return True where both rows reach so low, by their statistics."""
    lowest = (reference.min, candidate.min)
    return all(least is not None and least <= -MASK for least in lowest)


def of_statistics(reference: RecordedRow, candidate: RecordedRow) -> Distance:
    """Return the largest relative difference of the statistics of two rows.

    l2 is relative to the reference's, mean and standard deviation to its root mean
    square, smallest and largest to its largest magnitude. Equal statistics are taken
    for equal tensors, unless hashes say otherwise. Infinite where counts of NaN or
    Inf, or the shapes, differ; unknown without statistics.

    >>> stats = dict(min=1.0, max=2.0, mean=1.5, l2=3.2, std=0.5, nan=0, posinf=0)
    >>> stats |= dict(shape=[4], numel=4, neginf=0, dtype="float32")
    >>> row = RecordedRow(record=0, call=0, operator="add", **stats)
    >>> other = RecordedRow(record=0, call=0, operator="add", **stats | {"max": 2.2})
    >>> of_statistics(row, row).equal, round(of_statistics(row, other).error, 3)
    (True, 0.1)
    """
    if reference.hash is not None and reference.hash == candidate.hash:
        return EQUAL
    if _shapes_differ(reference, candidate):
        return INFINITE
    if reference.nan is None or candidate.nan is None:
        return UNKNOWN
    if differently_masked(reference, candidate):
        return MASKED
    if _counts(reference) != _counts(candidate):
        return INFINITE
    if _values(reference) == _values(candidate):
        return Distance(0.0, equal=reference.hash is None or candidate.hash is None)
    return _of_finite_statistics(reference, candidate)


def _values(row: RecordedRow) -> tuple[float | None, ...]:
    return row.min, row.max, row.mean, row.l2, row.std


def _counts(row: RecordedRow) -> tuple[int | None, ...]:
    return row.nan, row.posinf, row.neginf


def _of_finite_statistics(reference: RecordedRow, candidate: RecordedRow) -> Distance:
    if reference.l2 is None and candidate.l2 is None:
        return UNKNOWN
    if not reference.l2 or candidate.l2 is None:
        return INFINITE
    return Distance(largest_difference(reference, candidate, max))


def _shapes_differ(reference: RecordedRow, candidate: RecordedRow) -> bool:
    """Return True for other shapes; axes of one element are no difference."""
    if reference.shape is None or candidate.shape is None:
        return False
    return [n for n in reference.shape if n != 1] != [
        n for n in candidate.shape if n != 1
    ]


def differently_masked(reference: RecordedRow, candidate: RecordedRow) -> bool:
    """Return True where both hold an additive mask, of different size.

    A mask reaches -Inf, or the lowest number of its format. What it leaves of the
    values shows in what reads them.
    """
    if reference.nan or candidate.nan or reference.posinf or candidate.posinf:
        return False
    lowest = _lowest_reached(reference)
    other_lowest = _lowest_reached(candidate)
    if lowest is None or other_lowest is None:
        return False
    return lowest != other_lowest


def _lowest_reached(row: RecordedRow) -> float | None:
    """Return -Inf, or the lowest number of the format; None where the row reaches neither."""
    dtype = getattr(torch, row.dtype or "", None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    if row.neginf:
        return -math.inf
    if row.min is None or row.min > OF_LOWEST * torch.finfo(dtype).min:
        return None
    return float(row.min)


@dataclass(frozen=True, slots=True)
class StatisticColumns:
    """The statistics of many rows: each field a numpy array or a polars expression."""

    numel: Any
    min: Any
    max: Any
    mean: Any
    l2: Any
    std: Any
    nan: Any
    posinf: Any
    neginf: Any


def largest_difference(
    reference: RecordedRow | StatisticColumns,
    candidate: RecordedRow | StatisticColumns,
    maximum: Callable[..., Any],
) -> Any:
    """Return the largest relative difference of statistics, as of ``of_statistics``.

    ``maximum`` is ``max`` for rows, for columns the maximum element by element.
    """
    # of any type: rows have numbers here, columns have arrays
    ours: Any = reference
    theirs: Any = candidate
    finite_count = ours.numel - ours.nan - ours.posinf - ours.neginf
    rms = ours.l2 / finite_count**0.5
    amax = maximum(abs(ours.min), abs(ours.max))
    return maximum(
        abs(ours.l2 - theirs.l2) / ours.l2,
        abs(ours.mean - theirs.mean) / rms,
        abs(ours.std - theirs.std) / rms,
        abs(ours.min - theirs.min) / amax,
        abs(ours.max - theirs.max) / amax,
    )
