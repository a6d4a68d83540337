"""Run recorded operators again from their stored inputs, in another format or on another device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import polars as pl
import torch
from torch import Tensor

from roundoff.errors import RunError
from roundoff.formats import parse_format
from roundoff.ops import Reason, overload_of, restore, run_again
from roundoff.record import NOT_COMPARED, OwnError, own_error, site_name
from roundoff.site import select

if TYPE_CHECKING:
    from roundoff.record import Run

Row = Mapping[str, Any]

#: The columns of ``replay``'s result.
COLUMNS: dict[str, Any] = {
    "rank": pl.Int32,
    "step": pl.Int64,
    "record": pl.Int64,
    "phase": pl.String,
    "site": pl.String,
    "overload": pl.String,
    "place": pl.Int64,
    "own_l2": pl.Float64,
    "own_max": pl.Float64,
    "sqnr_db": pl.Float64,
    "reason": pl.String,
}


def replay(
    run: Run,
    *,
    site: str | None = None,
    phase: str | None = None,
    device: str = "cpu",
    dtype: str = "fp64",
    rank: int = 0,
    step: int | None = None,
) -> pl.DataFrame:
    """Each recorded call once more on the inputs it had, against the result it gave then; a row for each output.

    ``own_l2`` and ``own_max`` are of |recorded - again|, ``sqnr_db`` is 20 log10(l2 of again / own_l2): infinite where
    the two are the same, and minus infinity where one is finite and the other not. They are null where ``reason``
    says why. Rows are in the order of the calls.

    Args:
        run: a run recorded with its tensors.
        site: a pattern of site names, ``encoder.*/softmax``; all of them when None.
        phase: ``forward``, ``backward`` or ``optimizer``; all of them when None.
        device: where to run.
        dtype: the format to run in: ``fp64``, ``fp32``, ``bf16``, ...; ``same`` for each tensor's own, such as to
            compare two devices.
        rank: of a run of several processes.
        step: all of them when None.

    Raises:
        RunError: nothing is recorded there, no tensors are kept, or the device or format cannot be run here.
        PatternError: the pattern matches no site.
        FormatError: ``dtype`` is not the name of a format.
    """
    number = None if dtype == "same" else _dtype(dtype)
    target = _device(device)
    rows = _chosen(run, site, phase, rank, step)
    found = [
        {**{name: row[name] for name in COLUMNS if name in row}, **result}
        for one_step in rows.partition_by("step", maintain_order=True)
        for row, result in _replay_step(run, one_step, number, target)
    ]
    return pl.DataFrame(found, schema=COLUMNS)


def _replay_step(
    run: Run, rows: pl.DataFrame, dtype: torch.dtype | None, device: torch.device
) -> Iterator[tuple[Row, Row]]:
    rank, step = rows["rank"][0], rows["step"][0]
    stored = run.ops.filter((pl.col("rank") == rank) & (pl.col("step") == step))
    known = {
        row["record"]: row
        for row in stored.select(*_NEEDED, site_name()).collect().iter_rows(named=True)
    }

    def tensor_of(record: int) -> Tensor:
        row = known.get(record)
        if row is None or row["blob"] is None:
            name = f"record {record}" if row is None else row["name"] or row["site"]
            why = f" ({row['reason']})" if row is not None and row["reason"] else ""
            raise _NotStored(f"{name} is not stored{why}")
        if row["stride"] is None:
            raise _NotStored(
                f"{row['name'] or row['site']} is stored as the values inside it alone"
            )
        return run.tensor(record=record, rank=rank, step=step)

    for call in rows.partition_by("call", maintain_order=True):
        outputs = call.to_dicts()
        try:
            again = _call_again(outputs[0], tensor_of, dtype, device)
        except _NotStored as missing:
            again = Reason(f"its input {missing}")
        for row in outputs:
            yield row, _result(row, again, tensor_of)


def _call_again(
    row: Row,
    tensor_of: Callable[[int], Tensor],
    dtype: torch.dtype | None,
    device: torch.device,
) -> list[Any] | Reason:
    if row["overload"] is None:
        return Reason("not an operator with a schema")
    if row["arguments"] is None:
        return Reason("its arguments could not be written")
    try:
        func = overload_of(row["overload"])
    except RunError as error:
        return Reason(f"{error.what}: {error.do}")
    args, kwargs = restore(row["arguments"], tensor_of)
    return run_again(func, args, kwargs, dtype=dtype, device=device)


def _result(
    row: Row, again: list[Any] | Reason, tensor_of: Callable[[int], Tensor]
) -> Row:
    if isinstance(again, Reason):
        return _reason(again.text)
    try:
        actual = tensor_of(row["record"])
    except _NotStored as missing:
        return _reason(f"its result {missing}")
    place = row["place"]
    [error] = own_error([actual], [again[place] if place < len(again) else None])
    if error is None:
        return _reason(NOT_COMPARED)
    return {
        "own_l2": error.l2,
        "own_max": error.max,
        "sqnr_db": sqnr_db(error),
        "reason": None,
    }


def sqnr_db(error: OwnError) -> float:
    """The reference's l2 against that of the error in decibels; infinite where there is no error.

    >>> sqnr_db(OwnError(0.01, 0.01, 1.0)), sqnr_db(OwnError(0.0, 0.0, 0.0)), sqnr_db(OwnError(1.0, 1.0, 0.0))
    (40.0, inf, -inf)
    """
    if error.l2 == 0:
        return math.inf
    if error.reference == 0 or math.isinf(error.l2):
        return -math.inf
    return 20 * (math.log10(error.reference) - math.log10(error.l2))


def _reason(text: str) -> Row:
    return {"own_l2": None, "own_max": None, "sqnr_db": None, "reason": text}


class _NotStored(Exception):  # noqa: N818 - becomes the reason of a row
    """A tensor that a call needs is not in the run."""


_NEEDED = ("record", "blob", "stride", "name", "reason")


def _chosen(
    run: Run, site: str | None, phase: str | None, rank: int, step: int | None
) -> pl.DataFrame:
    """The calls to run again, with their ``site``."""
    where = {"rank": (rank, run.ranks), "step": (step, run.steps)}
    for name, (asked, there) in where.items():
        if asked is not None and asked not in there:
            raise RunError(
                f"the run has no {name} {asked}",
                where=str(run.path),
                got=str(asked),
                expected=", ".join(map(str, there)) or f"a run with a {name}",
            )
    rows = run.ops.filter(pl.col("rank") == rank)
    if step is not None:
        rows = rows.filter(pl.col("step") == step)
    every = rows.collect()
    if (
        every["blob"].null_count() == every.height
        or run.about.get("keep", "tensors") != "tensors"
    ):
        raise RunError(
            "the run has no tensors to run an operator on",
            where=str(run.path),
            expected="a run recorded with keep tensors",
            got=f"keep {run.about.get('keep', 'stats')}",
            do="capture with --keep tensors",
        )
    calls = every.filter(pl.col("call") >= 0)
    if phase is not None:
        phases = calls["phase"].unique(maintain_order=True).to_list()
        calls = calls.filter(pl.col("phase") == phase)
        if not calls.height:
            raise RunError(
                f"the run has no phase {phase!r}",
                where=str(run.path),
                expected=", ".join(phases),
            )
    calls = calls.with_columns(site_name())
    if site is not None:
        names = select(site, calls["site"].drop_nulls().unique(maintain_order=True))
        calls = calls.filter(pl.col("site").is_in(names))
    return calls


def _dtype(name: str) -> torch.dtype:
    found = parse_format(name).torch_dtype
    if found is None or not found.is_floating_point:
        raise RunError(
            "torch does not compute in this format",
            where="--dtype",
            got=name,
            expected="fp64, fp32, bf16, fp16 or same",
        )
    return found


def _device(name: str) -> torch.device:
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
