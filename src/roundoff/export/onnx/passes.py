"""What a model's code reads from tensors on each batch, and what of it can be constant."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from roundoff.errors import QuantizationError, RoundoffError
from roundoff.export.onnx.readings import (
    Reading,
    Recording,
    as_text,
    common,
    follows,
)
from roundoff.export.onnx.traced import Traced
from roundoff.workload import Workload


class Passes:
    """What the model's code reads from tensors, on every batch; run when first asked."""

    def __init__(self, workload: Workload, traced: Traced) -> None:
        self.workload = workload
        self.traced = traced

    def _read(self, tensors: Sequence[Tensor]) -> list[Reading]:
        recording = Recording()
        self.traced.reading = recording
        try:
            self.traced(*tensors)
        finally:
            self.traced.reading = None
        return recording.readings

    @functools.cached_property
    def first(self) -> list[Reading]:
        """The readings of the batch that is traced on."""
        return self._read(list(self.traced.inputs.values()))

    @functools.cached_property
    def others(self) -> list[tuple[Any, list[Reading]]]:
        """The other batches, and their readings."""
        if not self.first:
            return []
        return [
            (batch, self._read(tensors))
            for batch, tensors in runnable_batches(self.workload, self.traced)
        ]

    @functools.cached_property
    def shared(self) -> list[Reading | None]:
        """The readings that are the same on every batch, in their places."""
        return common([self.first, *(readings for _, readings in self.others)])

    def depend_on_sizes(self, tensors: Sequence[Tensor]) -> bool:
        """Return True if shared readings are others with each sample twice."""
        try:
            twice = self._read([torch.cat([t, t]) for t in tensors])
        except (RoundoffError, RuntimeError, ValueError):
            return True
        again = common([self.first, twice])
        return any(
            reading is not None and other is None
            for reading, other in zip(self.shared, again, strict=True)
        )

    def on_other_paths(self, kept: Sequence[Reading | None]) -> list[Any]:
        """Return the batches that read something else where readings are kept."""
        return [batch for batch, readings in self.others if not follows(readings, kept)]

    def remarks(self, kept: Sequence[Reading | None]) -> list[str]:
        """Return what to say of the lines whose readings the file has as constants."""
        values: dict[str, list[str]] = {}
        varying: set[str] = set()
        for reading, everywhere in zip(kept, self.shared, strict=True):
            if reading is None or not reading.line:
                continue
            texts = values.setdefault(reading.line, [])
            texts.append(as_text(reading.value))
            if everywhere is None:
                varying.add(reading.line)
        return [
            _constant(line, texts, line in varying) for line, texts in values.items()
        ]


def _constant(line: str, texts: Sequence[str], varies: bool) -> str:
    distinct = list(dict.fromkeys(texts))
    shown = ", ".join(distinct[:4]) + (", ..." if len(distinct) > 4 else "")
    if varies:
        return (
            f"{line} reads a number from values, {shown} on the first batch and others on other batches: "
            "the file has that of the first, and is right only for inputs with the same"
        )
    return f"{line} reads a number from values, {shown} on every batch: a constant in the file"


def runnable_batches(
    workload: Workload, traced: Traced
) -> Iterator[tuple[Any, list[Tensor]]]:
    """Yield the batches that differ in tensors alone, and their tensors."""
    for batch in [*workload.batches, *workload.held_out]:
        with contextlib.suppress(QuantizationError):
            yield batch, traced.tensors(batch)
