"""Run recorded operators again from their stored inputs, in another format or on
another device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
import torch
from torch import Tensor

from roundoff.errors import RunError
from roundoff.formats import parse_format
from roundoff.ops import Reason, base, calls_of_others, operators_that, run_recorded
from roundoff.record.disk.reader import Run
from roundoff.record.disk.schema import TensorRecord, site_name
from roundoff.record.disk.typed_rows import column, rows_of_table, table_of_rows
from roundoff.record.own_error import NOT_COMPARED, OwnError, own_error
from roundoff.site import select


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedOutput:
    """One recorded output against the same call run again.

    ``own_l2`` and ``own_max`` are of |recorded - again|; ``sqnr_db`` is 20 log10(l2 of
    again / own_l2): infinite where the two are the same, minus infinity where one is
    finite and the other not. They are None where ``reason`` says why.

    ``terms_db`` is the same against what was added up, 20 log10(l2 of the sums of the
    terms' magnitudes / own_l2), where terms cancelled so far that ``sqnr_db`` says
    nothing of the operator: a gradient that is zero in exact arithmetic. Of a backward
    kernel, against as many elements of the gradient that it read. Else None.
    """

    rank: int = column(pl.Int32)
    step: int = column(pl.Int64)
    record: int = column(pl.Int64)
    phase: str = column(pl.String)
    site: str = column(pl.String)
    overload: str | None = column(pl.String)
    place: int = column(pl.Int64)
    own_l2: float | None = column(pl.Float64)
    own_max: float | None = column(pl.Float64)
    sqnr_db: float | None = column(pl.Float64)
    reason: str | None = column(pl.String)
    terms_db: float | None = column(pl.Float64, default=None)

    @property
    def quality_db(self) -> float | None:
        """How far the error is below what the operator worked on, in dB."""
        return self.sqnr_db if self.terms_db is None else self.terms_db


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Recorded outputs run again on a device, in a format, in the order of calls."""

    device: str
    dtype: str
    rows: tuple[ReplayedOutput, ...]

    @property
    def table(self) -> pl.DataFrame:
        """The rows as a table; the columns are the fields of ``ReplayedOutput``."""
        return table_of_rows(ReplayedOutput, self.rows)


def replay_run(
    run: Run,
    *,
    site: str | None = None,
    phase: str | None = None,
    device: str = "cpu",
    dtype: str = "fp64",
    rank: int = 0,
    step: int | None = None,
) -> Replay:
    """Run each recorded call once more on its inputs; a row for each output.

    The calls of a recording that this user has not made, or that has been changed, run
    in another process with limits of memory and time; there and here only operators
    that compute tensors from tensors, others are rows with a reason.

    Args:
        run: a run recorded with its tensors.
        site: a pattern of site names, ``encoder.*/softmax``; all of them when None.
        phase: ``forward``, ``backward`` or ``optimizer``; all of them when None.
        device: where to run.
        dtype: the format to run in: ``fp64``, ``fp32``, ``bf16``, ...; ``same`` for
            each tensor's own, such as to compare two devices.
        rank: of a run of several processes.
        step: all of them when None.

    Raises:
        RunError: nothing is recorded there, no tensors are kept, or the device or
            format cannot be run here.
        PatternError: the pattern matches no site.
        FormatError: ``dtype`` is not the name of a format.
    """
    torch_dtype = None if dtype == "same" else _torch_dtype(dtype)
    torch_device = _torch_device(device)
    calls = _selected(run, site, phase, rank, step)
    rows: list[ReplayedOutput] = []
    steps = calls["step"].unique().to_list()
    is_all_own = all(run.is_own(rank, number) for number in steps)
    with nullcontext() if is_all_own else calls_of_others():
        for step_calls in calls.partition_by("step", maintain_order=True):
            rows += _replay_step(run, step_calls, torch_dtype, torch_device)
    return Replay(device=device, dtype=dtype, rows=tuple(rows))


def sqnr_db(error: OwnError) -> float:
    """Return the reference's l2 against that of the error, in decibels.

    Infinite where there is no error.

    >>> sqnr_db(OwnError(0.01, 0.01, 1.0))
    40.0
    >>> sqnr_db(OwnError(0.0, 0.0, 0.0)), sqnr_db(OwnError(1.0, 1.0, 0.0))
    (inf, -inf)
    """
    if error.l2 == 0:
        return math.inf
    if error.reference == 0 or math.isinf(error.l2):
        return -math.inf
    return 20 * (math.log10(error.reference) - math.log10(error.l2))


_SUMS = operators_that("add up terms")
#: Terms that are this much larger than their sum have cancelled.
_CANCELLED_DB = 40.0


class _NotStored(Exception):  # noqa: N818 - becomes the reason of a row
    """A tensor that a call needs is not in the run."""


_NEEDED = ("record", "module", "operator", "index", "blob", "stride", "name", "reason")


def _replay_step(
    run: Run, calls: pl.DataFrame, dtype: torch.dtype | None, device: torch.device
) -> Iterator[ReplayedOutput]:
    rank = calls["rank"][0]
    step = calls["step"][0]
    is_step = (pl.col("rank") == rank) & (pl.col("step") == step)
    rows = rows_of_table(
        TensorRecord, run.ops.filter(is_step).select(_NEEDED).collect()
    )
    by_record = {row.record: row for row in rows}

    def tensor_of(record: int) -> Tensor:
        row = by_record.get(record)
        if row is None:
            raise _NotStored(f"record {record} is not stored")
        label = row.name or row.site
        if row.blob is None:
            why = f" ({row.reason})" if row.reason else ""
            raise _NotStored(f"{label} is not stored{why}")
        if row.stride is None:
            raise _NotStored(f"{label} is stored as the values inside it alone")
        return run.tensor(record=record, rank=rank, step=step)

    for call in calls.partition_by("call", maintain_order=True):
        outputs = rows_of_table(TensorRecord, call)
        try:
            again = _call_again(outputs[0], tensor_of, dtype, device)
        except _NotStored as missing:
            again = Reason(f"its input {missing}")
        replayed = [_replayed(row, again, tensor_of) for row in outputs]
        if any(map(_may_have_cancelled, outputs, replayed)):
            terms = _call_again(outputs[0], tensor_of, dtype, device, magnitudes=True)
            replayed = [_against_terms(row, terms) for row in replayed]
        for row, result in zip(outputs, replayed, strict=True):
            yield _against_gradient(row, result, tensor_of)


def _call_again(
    row: TensorRecord,
    tensor_of: Callable[[int], Tensor],
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    magnitudes: bool = False,
) -> list[Any] | Reason:
    """Run a call again, on its inputs or on their magnitudes."""
    if row.overload is None:
        return Reason("not an operator with a schema")
    if row.arguments is None:
        return Reason("its arguments could not be written")

    def value(record: int) -> Tensor:
        tensor = tensor_of(record)
        return _magnitude(tensor) if magnitudes else tensor

    return run_recorded(row.overload, row.arguments, value, dtype=dtype, device=device)


def _magnitude(tensor: Tensor) -> Tensor:
    """Return |tensor|; indices, masks and formats without arithmetic as they are."""
    has_arithmetic = tensor.dtype.itemsize > 1
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return tensor.abs() if is_number and has_arithmetic else tensor


def _may_have_cancelled(row: TensorRecord, replayed: ReplayedOutput) -> bool:
    """Return True for a sum that is further off than one of equal signs would be."""
    return base(row.operator) in _SUMS and _is_far_off(row, replayed)


def _is_far_off(row: TensorRecord, replayed: ReplayedOutput) -> bool:
    """Return True for an error far above the rounding of the result."""
    if replayed.sqnr_db is None:
        return False
    dtype = getattr(torch, row.dtype or "", None)
    if dtype is None or not dtype.is_floating_point:
        return False
    return replayed.sqnr_db < -20 * math.log10(torch.finfo(dtype).eps) - _CANCELLED_DB


def _against_terms(row: ReplayedOutput, terms: list[Any] | Reason) -> ReplayedOutput:
    """Return the row with its error against the sums of the terms' magnitudes."""
    if isinstance(terms, Reason) or row.place >= len(terms) or not row.own_l2:
        return row
    size = terms[row.place]
    if not isinstance(size, Tensor) or not math.isfinite(row.own_l2):
        return row
    norm = float(size.double().norm())
    if not norm or not math.isfinite(norm):
        return row
    terms_db = 20 * (math.log10(norm) - math.log10(row.own_l2))
    if terms_db < (row.sqnr_db or 0.0) + _CANCELLED_DB:
        return row
    return replace(row, terms_db=terms_db)


def _against_gradient(
    row: TensorRecord, replayed: ReplayedOutput, tensor_of: Callable[[int], Tensor]
) -> ReplayedOutput:
    """Return the row of a backward kernel with its error against the gradient it read.

    It is linear in that, its first input, of which as many elements as it made are
    taken. Where the exact result is about zero, the error against it says nothing.
    """
    is_sum = base(row.operator) in _SUMS
    if row.phase != "backward" or is_sum or not _is_far_off(row, replayed):
        return replayed
    read = list(row.inputs or ())
    try:
        result = tensor_of(row.record)
        gradient = tensor_of(read[0]) if read else None
    except _NotStored:
        return replayed
    if gradient is None or not gradient.is_floating_point() or not gradient.numel():
        return replayed
    spread = gradient.double().square().mean().sqrt()
    places: list[Any] = [None] * row.place
    return _against_terms(replayed, [*places, spread.expand(result.numel())])


def _replayed(
    row: TensorRecord, again: list[Any] | Reason, tensor_of: Callable[[int], Tensor]
) -> ReplayedOutput:
    error = _error(row, again, tensor_of)
    measured = None if isinstance(error, str) else error
    return ReplayedOutput(
        rank=row.rank,
        step=row.step,
        record=row.record,
        phase=row.phase,
        site=row.site,
        overload=row.overload,
        place=row.place,
        own_l2=None if measured is None else measured.l2,
        own_max=None if measured is None else measured.max,
        sqnr_db=None if measured is None else sqnr_db(measured),
        reason=error if isinstance(error, str) else None,
    )


def _error(
    row: TensorRecord, again: list[Any] | Reason, tensor_of: Callable[[int], Tensor]
) -> OwnError | str:
    """Return the error of a recorded output, or the reason why there is none."""
    if isinstance(again, Reason):
        return again.text
    try:
        recorded = tensor_of(row.record)
    except _NotStored as missing:
        return f"its result {missing}"
    reference = again[row.place] if row.place < len(again) else None
    [error] = own_error([recorded], [reference])
    return NOT_COMPARED if error is None else error


def _selected(
    run: Run, site: str | None, phase: str | None, rank: int, step: int | None
) -> pl.DataFrame:
    """Return the calls to run again, with their ``site``."""
    _check_number(run, "rank", rank, run.ranks)
    _check_number(run, "step", step, run.steps)
    rows = run.ops.filter(pl.col("rank") == rank)
    if step is not None:
        rows = rows.filter(pl.col("step") == step)
    step_rows = rows.collect()
    _check_kept(run, step_rows)
    calls = step_rows.filter(pl.col("call") >= 0).with_columns(site_name())
    if phase is not None:
        calls = _of_phase(run, calls, phase)
    if site is not None:
        names = select(site, calls["site"].drop_nulls().unique(maintain_order=True))
        calls = calls.filter(pl.col("site").is_in(names))
    return calls


def _check_number(
    run: Run, noun: str, number: int | None, present: Sequence[int]
) -> None:
    if number is not None and number not in present:
        raise RunError(
            f"the run has no {noun} {number}",
            where=str(run.path),
            got=str(number),
            expected=", ".join(map(str, present)) or f"a run with a {noun}",
        )


def _check_kept(run: Run, rows: pl.DataFrame) -> None:
    keep = run.about.keep
    has_none = rows["blob"].null_count() == rows.height
    if has_none or keep not in ("tensors", None):
        raise RunError(
            "the run has no tensors to run an operator on",
            where=str(run.path),
            expected="a run recorded with keep tensors",
            got=f"keep {keep or 'stats'}",
            do="capture with --keep tensors",
        )


def _of_phase(run: Run, calls: pl.DataFrame, phase: str) -> pl.DataFrame:
    chosen = calls.filter(pl.col("phase") == phase)
    if chosen.is_empty():
        phases = calls["phase"].unique(maintain_order=True).to_list()
        raise RunError(
            f"the run has no phase {phase!r}",
            where=str(run.path),
            expected=", ".join(phases),
        )
    return chosen


def _torch_dtype(name: str) -> torch.dtype:
    dtype = parse_format(name).torch_dtype
    if dtype is None or not dtype.is_floating_point:
        raise RunError(
            "torch does not compute in this format",
            where="--dtype",
            got=name,
            expected="fp64, fp32, bf16, fp16 or same",
        )
    return dtype


def _torch_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise RunError(
            "this device cannot be used here",
            where="--device",
            expected="cpu, or a device of this machine",
            got=f"{name}: {str(error).splitlines()[0]}",
        ) from error
    return device
