"""All tensors of one step, for callers that go through the whole of it: files are
opened once, rows looked up once."""

from __future__ import annotations

import copy
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

    Tensors are mapped from their files, and checked against their checksums when they
    are first read; one whose bytes are damaged counts as not kept, and ``damage`` has
    why, by blob. Not for use from several threads at once.
    """

    def __init__(self, run: Run, rank: int, step: int) -> None:
        self._run = run
        self._rank = rank
        self._step = step
        self._stored = run.stored(rank, step)
        self._elements: dict[str, torch.Tensor] = {}
        self._opened: dict[Path, TensorFile] = {}
        self.damage: dict[str, str] = {}
        self._whole = run.about.keep != "sample"

    def whole(self) -> StepTensors:
        """Return the same, without records of which only the values inside are kept: of a
        sparse, nested or distributed tensor. An operator cannot run again on these."""
        restricted = copy.copy(self)
        restricted._stored = {
            record: stored
            for record, stored in self._stored.items()
            if stored.stride is not None
        }
        return restricted

    def __contains__(self, record: int) -> bool:
        stored = self._stored.get(record)
        if stored is None or stored.blob is None or stored.blob in self.damage:
            return False
        try:
            self.blob(record)
        except RunError as error:
            self.damage[stored.blob] = str(error).replace("\n", ";")
            return False
        return True

    def key(self, record: int) -> Key | None:
        """Equal for two records with the same elements in the same places.

        So nothing is measured twice. None where no tensor is kept.
        """
        stored = self._stored[record]
        if stored.blob is None:
            return None
        shape = tuple(stored.shape or ())
        return stored.blob, shape, tuple(stored.stride or ()), stored.offset

    def dense(self, record: int) -> Key | None:
        """Shape and strides of a tensor that has every kept element once, in whatever
        order; None for another."""
        stored = self._stored[record]
        if not self._whole or stored.blob is None or stored.offset:
            return None
        if not stored.shape or stored.stride is None:
            return None
        expected = 1
        for stride, size in sorted(zip(stored.stride, stored.shape, strict=True)):
            if size != 1 and stride != expected:
                return None
            expected *= size
        if expected != self.blob(record).numel():
            return None
        return tuple(stored.shape), tuple(stored.stride)

    def blob(self, record: int) -> torch.Tensor:
        """Return the kept elements that the tensor is made of, in the order of memory.

        Raises ``KeyError`` where none are kept.
        """
        key = self._stored[record].blob
        if key is None:
            raise KeyError(record)
        elements = self._elements.get(key)
        if elements is None:
            elements = self._run.blob(self._rank, self._step, key, self._opened)
            self._elements[key] = elements
        return elements

    def __getitem__(self, record: int) -> torch.Tensor:
        """Raises ``KeyError`` where none is kept, or it is damaged."""
        if record not in self:
            raise KeyError(record)
        stored = self._stored[record]
        elements = self.blob(record)
        if stored.stride is None or not self._whole:
            return elements
        return stored.strided(elements, self._run.path)
