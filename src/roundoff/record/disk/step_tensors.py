"""All tensors of one step, for callers that go through the whole of it: files are opened once, rows looked up once."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from roundoff.errors import RunError
from roundoff.record.disk.tensors import TensorFile

if TYPE_CHECKING:
    from roundoff.record.disk.reader import Run

Key = tuple[Any, ...]


class StepTensors:
    """The kept tensors of one rank and step of a run, by record.

    ``rows`` are that step's rows by record. Tensors are mapped from their files, and checked against their checksums when
    they are first read; one whose bytes are damaged counts as not kept, and ``damage`` has why, by blob. Not for use from
    several threads at once.
    """

    def __init__(
        self, run: Run, rank: int, step: int, rows: Mapping[int, Mapping[str, Any]]
    ) -> None:
        self._run, self._rank, self._step, self._rows = run, rank, step, rows
        self._kept: dict[str, torch.Tensor] = {}
        self._opened: dict[Path, TensorFile] = {}
        self.damage: dict[str, str] = {}
        self._whole = run.about.get("keep") != "sample"

    def whole(self) -> StepTensors:
        """The same, without records of which not the tensor itself is kept, but values inside it: of a sparse, nested or
        distributed one. An operator cannot run again on these."""
        found = copy.copy(self)
        found._rows = {
            record: row
            for record, row in self._rows.items()
            if row["stride"] is not None
        }
        return found

    def __contains__(self, record: int) -> bool:
        row = self._rows.get(record)
        if row is None or row["blob"] is None or row["blob"] in self.damage:
            return False
        try:
            self.blob(record)
        except RunError as error:
            self.damage[row["blob"]] = str(error).replace("\n", ";")
            return False
        return True

    def key(self, record: int) -> Key | None:
        """Equal for two records with the same elements in the same places, so that nothing is measured twice."""
        row = self._rows[record]
        if row["blob"] is None:
            return None
        return (
            row["blob"],
            tuple(row["shape"] or ()),
            tuple(row["stride"] or ()),
            row["offset"],
        )

    def dense(self, record: int) -> Key | None:
        """Of a tensor that has every kept element once, in whatever order: shape, strides and offset; None of another."""
        row = self._rows[record]
        shape, stride = row["shape"], row["stride"]
        if (
            not self._whole
            or row["blob"] is None
            or not shape
            or stride is None
            or row["offset"]
        ):
            return None
        expected = 1
        for step, size in sorted(zip(stride, shape, strict=True)):
            if size != 1 and step != expected:
                return None
            expected *= size
        return (
            (tuple(shape), tuple(stride))
            if expected == self.blob(record).numel()
            else None
        )

    def blob(self, record: int) -> torch.Tensor:
        """The kept elements that the tensor is made of, in the order of memory."""
        key = self._rows[record]["blob"]
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = self._run.blob(
                self._rank, self._step, key, self._opened
            )
        return kept

    def __getitem__(self, record: int) -> torch.Tensor:
        """Raises ``KeyError`` where none is kept, or it is damaged."""
        if record not in self:
            raise KeyError(record)
        row = self._rows[record]
        kept = self.blob(record)
        if row["stride"] is None or not self._whole:
            return kept
        return self._run.strided(kept, self._rank, self._step, row)
