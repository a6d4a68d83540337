"""The answer of ``roundoff advise`` as records, and its winners as a file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundoff.advise.advice import AdviceRow, Combination
from roundoff.advise.changes import CHANGES, Change
from roundoff.advise.operator_count import Counts
from roundoff.advise.operator_time import Profile
from roundoff.advise.roofline import Roofline
from roundoff.advise.setup import Setup, set_flags
from roundoff.errors import WorkloadError
from roundoff.files import open_output, toml_value
from roundoff.foreign import fault_of, parse_toml, read_text
from roundoff.workload import Workload


@dataclass(frozen=True, slots=True)
class DtypeShare:
    """The part of the work that runs in one dtype.

    Attributes:
        dtype: of the operands.
        flops: its part of all operations, 0 to 1.
        bytes_moved: its part of all bytes.
    """

    dtype: str
    flops: float
    bytes_moved: float


@dataclass(frozen=True, slots=True)
class LoadingSummary:
    """What the batches cost.

    Attributes:
        wait_share: part of a step and its loading that is loading, 0 to 1.
        load_seconds: of a batch.
        files: opened for reading while loading.
        resize_share: part of the loading in functions that resize.
        decode_share: likewise in those that decode.
    """

    wait_share: float
    load_seconds: float
    files: int
    resize_share: float
    decode_share: float


@dataclass(frozen=True, kw_only=True)
class AdviceSummary:
    """What ``roundoff.advise`` measured.

    Attributes:
        workload: its name.
        train: steps of training, not forward passes alone.
        device: of the model.
        batches: how many there are.
        step_seconds: processor time of one step, or the wall clock's on a GPU.
        counts: FLOPs, MACs and bytes of one step.
        profile: its time, operator by operator.
        roofline: of this machine.
        dtypes: the part of each dtype.
        rows: every advice that applies, tried or with the reason why not.
        combination: the winners together.
        loading: what the batches cost; None where they are a list in memory.
        least_db: SQNR below which no change is a winner.
        absent: names of the rules whose condition does not hold here.
        notes: what else a reader must know.
    """

    workload: str
    train: bool
    device: str
    batches: int
    step_seconds: float
    counts: Counts
    profile: Profile
    roofline: Roofline
    dtypes: tuple[DtypeShare, ...]
    rows: tuple[AdviceRow, ...]
    combination: Combination
    loading: LoadingSummary | None
    least_db: float
    absent: tuple[str, ...]
    notes: tuple[str, ...]


def dtype_shares(counts: Counts) -> tuple[DtypeShare, ...]:
    """Return the part of each dtype in the work, the largest first."""
    dtypes = list(dict.fromkeys(row.dtype for row in counts.rows if row.dtype))
    flops = counts.flops or 1.0
    moved = counts.bytes_moved or 1.0
    shares = [
        DtypeShare(
            dtype,
            sum(row.flops for row in counts.rows if row.dtype == dtype) / flops,
            sum(row.bytes_moved for row in counts.rows if row.dtype == dtype) / moved,
        )
        for dtype in dtypes
    ]
    return tuple(sorted(shares, key=lambda share: -share.flops))


@dataclass(frozen=True, slots=True)
class Tuning:
    """Changes to be made to a model and its training, as a file holds them.

    Attributes:
        changes: in the order they are made.
    """

    changes: tuple[Change, ...]

    def apply(self, model: nn.Module) -> nn.Module:
        """Return a copy of a model with the changes that are made to models.

        Raises:
            WorkloadError: the model has no module at a path of the changes.
        """
        setup = Setup(Workload(model, [torch.zeros(1)]), train=False).copied()
        for change in self.changes:
            _check_modules(setup.model, change)
            change.edit(setup.model)
        return setup.model

    def apply_to_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the options of an optimizer, in place."""
        for change in self.changes:
            set_flags(optimizer, CHANGES[change.name].flags)

    def apply_to_process(self) -> None:
        """Set threads and subnormal numbers of this process, and anomaly mode."""
        for change in self.changes:
            if change.name == "threads" and change.value is not None:
                torch.set_num_threads(change.value)
            if change.name == "flush_subnormals":
                torch.set_flush_denormal(True)
            if change.name == "no_anomaly_mode":
                torch.autograd.set_detect_anomaly(False)

    def write(self, path: str | os.PathLike[str], rows: tuple[AdviceRow, ...]) -> None:
        """Write as TOML with what was measured, whole or not at all.

        Raises ``OutputError`` when it cannot be written.
        """
        with open_output(path) as temporary:
            text = "\n".join(self._lines(rows)) + "\n"
            temporary.write_text(text, encoding="utf-8")

    def _lines(self, rows: tuple[AdviceRow, ...]) -> list[str]:
        measured = {row.name: row for row in rows}
        lines = [
            "# What roundoff advise found to pay: roundoff.advise.read_tuning(...)"
        ]
        for change in self.changes:
            lines += ["", "[[change]]", f"name = {toml_value(change.name)}"]
            if change.modules:
                lines.append(f"modules = {toml_value(list(change.modules))}")
            if change.value is not None:
                lines.append(f"value = {change.value}")
            row = measured.get(change.name)
            if row is not None and row.speed is not None:
                lines.append(
                    f"# {row.speed.median:.3f} times the speed alone: {row.do}"
                )
        return lines


def _check_modules(model: nn.Module, change: Change) -> None:
    names = {name for name, _ in model.named_modules()}
    wanted = {part for text in change.modules for part in text.split(" > ")}
    missing = sorted(wanted - names)
    if missing:
        raise WorkloadError(
            f"the model has no module {missing[0]!r}",
            where=f"change {change.name}",
            expected="the model that the advice was measured on",
            got=f"{len(names)} modules of other names",
        )


@dataclass(frozen=True)
class _ChangeRecord:
    """A change as a file says it."""

    name: str
    modules: list[str]
    value: int | None


def read_tuning(path: str | os.PathLike[str]) -> Tuning:
    """Read the changes that ``roundoff advise --apply`` wrote.

    Raises:
        WorkloadError: no such file, not TOML, or an unknown change.
    """
    where = os.fspath(path)
    try:
        table = parse_toml(read_text(Path(path)))
    except (OSError, ValueError) as error:
        raise WorkloadError("cannot read it", where=where, got=str(error)) from error
    records = table.get("change")
    if not isinstance(records, list):
        raise WorkloadError(
            "no changes in it", where=where, expected="tables [[change]]"
        )
    return Tuning(tuple(_change(record, where) for record in records))


def _change(record: Any, where: str) -> Change:
    if not isinstance(record, dict):
        raise WorkloadError("a change is no table", where=where)
    parsed = _ChangeRecord(
        record.get("name", ""), record.get("modules", []), record.get("value")
    )
    fault = fault_of(parsed)
    if fault is not None:
        raise WorkloadError("a change is malformed", where=where, got=fault)
    if parsed.name not in CHANGES:
        raise WorkloadError(
            "unknown change",
            where=where,
            expected=", ".join(CHANGES),
            got=parsed.name,
        )
    return Change(parsed.name, tuple(parsed.modules), parsed.value)
