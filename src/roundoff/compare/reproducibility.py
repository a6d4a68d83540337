"""What does not repeat itself: results that differ between two runs of one program although their inputs do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl
import torch

from roundoff.compare.noise_floor import comparable, distances, pair, rows_of, theirs
from roundoff.errors import RunError
from roundoff.ops import base, operators_that
from roundoff.record import Run, StoredTensor, content_hash

RANDOM = "draws random numbers without a seed"
GPU = "known to be nondeterministic on GPUs"
OUTSIDE = "was there before the recording: data, weights or a seed that change from run to run"
REDUCTION = "the order in which a collective adds may change"
UNKNOWN = "not known to be nondeterministic: a race, memory that was not written, or state that is no tensor"

_STATISTICS = (
    "dtype",
    "shape",
    "numel",
    "min",
    "max",
    "mean",
    "l2",
    "std",
    "nan",
    "posinf",
    "neginf",
    "zero",
    "subnormal",
    "exponent",
    "exponents",
)
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


def unstable(reference: Run, repeats: Sequence[Run]) -> pl.DataFrame:
    """The rows that differ in one of ``repeats`` although all their inputs (column ``inputs``) are equal there, in the
    order of execution: ``rank, step, record, phase, site, module, operator, index, place, line, dtype, shape`` and

    - ``difference``, the largest relative distance, with ``measure`` and ``reason`` as in ``noise_floor``;
    - ``runs``, in how many of ``repeats`` it differs;
    - ``note``, what may be the cause.

    Equal is bitwise, by hash or tensor where they were kept (of a sample the sample). Otherwise statistics must be the
    same: then a change that leaves them is not seen, and what reads it is named in its place. Uninitialised memory
    counts as equal. A row that a repeat lacks differs. What was there before a step (weights, batches) has no inputs, and
    counts in the first step that differs alone: later ones inherit it. Empty where all is reproducible.
    Raises ``RunError`` without ``repeats``, and for a damaged file.
    """
    if not repeats:
        raise RunError(
            "no other run of the same program",
            where="unstable",
            expected="runs of the unchanged program",
            do="roundoff capture -o runs/a --repeats 2 -- train.py",
        )
    rows = rows_of(reference)
    pairs = [pair(rows, repeat) for repeat in repeats]
    times = [0] * len(rows)
    for repeat, found in zip(repeats, pairs, strict=True):
        for place in _unequal(reference, repeat, found):
            times[place] += 1
    chosen = pl.Series(times, dtype=pl.Int64) > 0
    bad = rows.filter(chosen)
    distance = distances(reference, repeats, bad, [p.filter(chosen) for p in pairs])
    return pl.concat(
        [
            bad.select(_SHOWN),
            distance.select(pl.col("floor").alias("difference"), "measure", "reason"),
            pl.DataFrame(
                {
                    "runs": pl.Series([t for t in times if t], dtype=pl.Int64),
                    "note": pl.Series(
                        [_note(row) for row in bad.iter_rows(named=True)], dtype=pl.Utf8
                    ),
                }
            ),
        ],
        how="horizontal",
    )


def _unequal(reference: Run, repeat: Run, pairs: pl.DataFrame) -> list[int]:
    """Places of the rows that differ while their inputs do not."""
    exact = comparable(reference, repeat) is not None
    alike = pairs.select(
        pl.all_horizontal(
            pl.col(n).eq_missing(pl.col(f"{n}_other")) for n in _STATISTICS
        )
    ).to_series()
    found: list[int] = []
    equal: dict[int, bool] = {}  # by record
    twin: dict[int, int] = {}  # record of the repeat -> of the reference
    where: tuple[int, int] | None = None
    for place, (same, row) in enumerate(
        zip(alike, pairs.iter_rows(named=True), strict=True)
    ):
        if where != (row["rank"], row["step"]):
            where, equal, twin = (row["rank"], row["step"]), {}, {}
        record, other = row["record"], row["record_other"]
        if other is not None:
            twin[other] = record
        if row["garbage"]:
            equal[record] = True
            continue
        if other is not None and same:
            equal[record] = _bits(reference, repeat, row, exact) and equal.get(
                row["view_of"], True
            )
        else:
            equal[record] = False
        inputs = row["inputs"] or []
        read = (
            inputs
            if other is None
            else [twin.get(i) for i in row["inputs_other"] or []]
        )
        if (
            not equal[record]
            and read == inputs
            and all(equal.get(i, True) for i in inputs)
        ):
            found.append(place)
    # What was there before a later step has its difference from the first one that differed.
    steps, calls = pairs["step"], pairs["call"]
    first = min((steps[place] for place in found), default=0)
    return [place for place in found if calls[place] != -1 or steps[place] <= first]


def _bits(reference: Run, repeat: Run, row: dict[str, Any], exact: bool) -> bool:
    """Whether two rows with the same statistics have the same bits, as far as they were kept. A view has those of the
    memory it shows."""
    if row["hash"] is not None and row["hash_other"] is not None:
        return bool(row["hash"] == row["hash_other"])
    if (
        not exact
        or row["view_of"] is not None
        or row["blob"] is None
        or row["blob_other"] is None
    ):
        return True
    return content_hash(reference.kept(StoredTensor.of_row(row))) == content_hash(
        repeat.kept(StoredTensor.of_row(theirs(row)))
    )


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
    """What torch says of an operator, ``aten.bernoulli_.float``; nothing of one that it does not know here."""
    found: Any = torch.ops
    for part in (overload or "").split("."):
        found = getattr(found, part, None) if part else None
    return getattr(found, "tags", ())
