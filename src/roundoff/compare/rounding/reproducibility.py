"""What does not repeat itself: results that differ although their inputs do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl
import torch

from roundoff.compare.rounding.noise_floor import (
    distances,
    kept_by_both,
    measurable_rows,
    other_tensor,
    own_tensor,
    paired,
)
from roundoff.errors import RunError
from roundoff.ops import base, operators_that, overload_of
from roundoff.record import STATISTICS, Run, content_hash

RANDOM = "draws random numbers without a seed"
GPU = "known to be nondeterministic on GPUs"
OUTSIDE = "was there before the recording: data, weights or a seed that change from run to run"
REDUCTION = "the order in which a collective adds may change"
UNKNOWN = (
    "not known to be nondeterministic: a race, memory that was not written, or state "
    "that is no tensor"
)

_COMPARED = ("dtype", "shape", "numel", *STATISTICS, "exponent", "exponents")
_SHOWN = (
    "rank",
    "step",
    "record",
    "phase",
    "site",
    "module",
    "operator",
    "index",
    "place",
    "line",
    "dtype",
    "shape",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnstableRow:
    """A value that differs between repeats of one run although its inputs do not."""

    #: ``reference`` or ``candidate``.
    side: str
    rank: int
    step: int
    record: int
    phase: str
    site: str
    module: str
    operator: str
    index: int
    place: int | None
    line: str | None
    dtype: str | None
    shape: Sequence[int] | None
    #: The largest relative distance, with ``measure`` and ``reason`` as of
    #: ``noise_floor``.
    difference: float | None
    measure: str | None
    reason: str | None
    #: In how many of the repeats it differs.
    runs: int
    #: What may be the cause.
    note: str


def not_reproducible(side: str, run: Run, repeats: Sequence[Run]) -> list[UnstableRow]:
    """Return the values that do not repeat themselves, in the order of execution."""
    if not repeats:
        return []
    table = unstable(run, repeats)
    return [UnstableRow(side=side, **row) for row in table.iter_rows(named=True)]


def unstable(reference: Run, repeats: Sequence[Run]) -> pl.DataFrame:
    """Return the rows that differ in one of ``repeats`` although all their inputs are equal.

    Equal is bitwise, by hash or tensor where they were kept (of a sample the sample).
    Otherwise statistics must be the same: then a change that leaves them is not found,
    and what reads it is named in its place. Uninitialised memory counts as equal. A row
    that a repeat lacks differs. A value from before a step (weights, batches) has no
    inputs, and counts in the first step that differs alone: later ones inherit it.

    Args:
        reference: a run.
        repeats: runs of the unchanged program.

    Returns:
        In the order of execution ``rank, step, record, phase, site, module, operator,
        index, place, line, dtype, shape``, and ``difference, measure, reason, runs,
        note`` as in ``UnstableRow``. Empty where all is reproducible.

    Raises ``RunError`` without ``repeats``, and for a damaged file.
    """
    if not repeats:
        raise RunError(
            "no other run of the same program",
            where="unstable",
            expected="runs of the unchanged program",
            do="roundoff capture -o runs/a --repeats 2 -- train.py",
        )
    rows = measurable_rows(reference)
    pairs = [paired(rows, repeat) for repeat in repeats]
    times = [0] * len(rows)
    for repeat, couples in zip(repeats, pairs, strict=True):
        for place in _differing_places(reference, repeat, couples):
            times[place] += 1
    differs = pl.Series(times, dtype=pl.Int64) > 0
    bad = rows.filter(differs)
    bad_pairs = [couples.filter(differs) for couples in pairs]
    distance = distances(reference, repeats, bad, bad_pairs).select(
        pl.col("floor").alias("difference"), "measure", "reason"
    )
    notes = [_note(row) for row in bad.iter_rows(named=True)]
    counts = {
        "runs": pl.Series([n for n in times if n], dtype=pl.Int64),
        "note": pl.Series(notes, dtype=pl.Utf8),
    }
    return pl.concat(
        [bad.select(_SHOWN), distance, pl.DataFrame(counts)], how="horizontal"
    )


def _differing_places(reference: Run, repeat: Run, pairs: pl.DataFrame) -> list[int]:
    """Return places of the rows that differ while their inputs do not."""
    same_statistics = pairs.select(
        pl.all_horizontal(
            pl.col(name).eq_missing(pl.col(f"{name}_other")) for name in _COMPARED
        )
    ).to_series()
    search = _FirstDifference(reference, repeat)
    differing: list[int] = []
    couples = pairs.iter_rows(named=True)
    for place, (same, row) in enumerate(zip(same_statistics, couples, strict=True)):
        if search.differs_first(row, same):
            differing.append(place)
    # a value from before a later step has its difference from the first that differed
    steps = pairs["step"]
    calls = pairs["call"]
    first = min((steps[place] for place in differing), default=0)
    return [p for p in differing if calls[p] != -1 or steps[p] <= first]


class _FirstDifference:
    """Goes through the paired rows of a run and its repeat, in order of execution."""

    def __init__(self, reference: Run, repeat: Run) -> None:
        self._reference = reference
        self._repeat = repeat
        self._tensors_kept = kept_by_both(reference, repeat) is not None
        self._at: tuple[int, int] | None = None
        #: By record of the reference, in this step.
        self._equal: dict[int, bool] = {}
        #: Record of the repeat -> of the reference, in this step.
        self._twin: dict[int, int] = {}

    def differs_first(self, row: dict[str, Any], same_statistics: bool) -> bool:
        """Return True for a row that differs although all it reads is equal."""
        at = (row["rank"], row["step"])
        if at != self._at:
            self._at = at
            self._equal = {}
            self._twin = {}
        record = row["record"]
        other = row["record_other"]
        if other is not None:
            self._twin[other] = record
        self._equal[record] = row["garbage"] or (
            other is not None and same_statistics and self._same_bits(row)
        )
        return not self._equal[record] and self._same_inputs(row)

    def _same_inputs(self, row: dict[str, Any]) -> bool:
        inputs = row["inputs"] or []
        if row["record_other"] is not None:
            theirs = [self._twin.get(i) for i in row["inputs_other"] or []]
            if theirs != inputs:
                return False
        return all(self._equal.get(i, True) for i in inputs)

    def _same_bits(self, row: dict[str, Any]) -> bool:
        """Return True for the same bits, as far as they were kept.

        A view has those of the memory it shows.
        """
        if not self._equal.get(row["view_of"], True):
            return False
        if row["hash"] is not None and row["hash_other"] is not None:
            return bool(row["hash"] == row["hash_other"])
        if not self._tensors_kept or row["view_of"] is not None:
            return True
        if row["blob"] is None or row["blob_other"] is None:
            return True
        ours = self._reference.kept(own_tensor(row))
        theirs = self._repeat.kept(other_tensor(row))
        return content_hash(ours) == content_hash(theirs)


def _note(row: dict[str, Any]) -> str:
    if row["call"] == -1:
        return OUTSIDE
    if torch.Tag.nondeterministic_seeded in _tags(row["overload"]):
        return RANDOM
    if row["phase"] == "collective":
        return REDUCTION
    if base(row["operator"]) in operators_that("vary on CUDA"):
        return GPU
    return UNKNOWN


def _tags(overload: str | None) -> Sequence[Any]:
    """Return torch's tags of an operator, ``aten.bernoulli_.float``; none of an unknown one."""
    try:
        return list(overload_of(overload or "").tags)
    except RunError:
        return ()
