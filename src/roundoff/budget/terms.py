"""The terms of the budget: every error projected on the probe gradients of its site."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

#: Elements of a block that projections are stored in.
BLOCK = 2**19


class TermKey(NamedTuple):
    """One part of one site's error in one format: the smallest entry of the budget."""

    site: str
    format: str
    part: str
    operand: int
    sources: tuple[str, ...]


class _Slice(NamedTuple):
    """Where the projections of one pass lie."""

    block: int
    start: int
    probes: int
    samples: int


@dataclass
class Terms:
    """What the backward passes of a batch find: ``v . J e`` per probe and sample."""

    _overflow: dict[TermKey, dict[int, int]] = field(default_factory=dict)
    _passes: dict[TermKey, dict[int, list[_Slice]]] = field(default_factory=dict)
    _blocks: list[np.ndarray] = field(default_factory=list)
    _used: int = 0

    def add(self, key: TermKey, place: int, values: Tensor, overflow: int) -> None:
        """Keep the projections of one more pass.

        Args:
            key: the term.
            place: number of the operator's output.
            values: projections, shape ``(K, S)``.
            overflow: elements of the error that are not finite and looked at.
        """
        self.add_all([key], place, values.unsqueeze(0), [overflow])

    def add_all(
        self,
        keys: Sequence[TermKey],
        place: int,
        values: Tensor,
        overflow: Sequence[int],
    ) -> None:
        """Keep the projections of several terms, shape ``(terms, K, S)``."""
        size = values[0].numel()
        start = self._keep(values)
        for key, lost in zip(keys, overflow, strict=True):
            passes = self._passes.setdefault(key, {}).setdefault(place, [])
            passes.append(_Slice(len(self._blocks) - 1, start, *values.shape[1:]))
            start += size
            if lost:
                # every pass has the same errors: those that some probe of it looks at
                counts = self._overflow.setdefault(key, {})
                counts[place] = max(lost, counts.get(place, 0))

    def overflow(self, key: TermKey) -> int:
        """Return how many elements of an error are not finite and reach the output."""
        return sum(self._overflow.get(key, {}).values())

    def projections(self) -> dict[TermKey, np.ndarray]:
        """Return the projections of each term, float64 of shape ``(K, S)``.

        The shape is ``(K, 1)`` where the samples could not be told apart. The outputs
        of one operator are added up.
        """
        return {key: self._total(places) for key, places in self._passes.items()}

    def _total(self, places: dict[int, list[_Slice]]) -> np.ndarray:
        """Join the passes of each output, and add up the outputs."""
        outputs = [
            self._array(passes[0])
            if len(passes) == 1
            else np.concatenate([self._array(place) for place in passes])
            for passes in places.values()
        ]
        if any(output.shape[1] == 1 for output in outputs):
            outputs = [output.sum(1, keepdims=True) for output in outputs]
        return np.sum(outputs, axis=0) if len(outputs) > 1 else outputs[0]

    def _keep(self, values: Tensor) -> int:
        """Copy values into a large block, and return where they start in it.

        Small objects that stay behind between large ones that go would keep the
        allocator from using the memory again (three times the peak on a ResNet-18).
        """
        size = values.numel()
        if not self._blocks or self._used + size > len(self._blocks[-1]):
            self._blocks.append(np.empty(max(size, BLOCK)))
            self._used = 0
        start = self._used
        self._used += size
        block = self._blocks[-1][start : start + size]
        torch.from_numpy(block).view(values.shape).copy_(values)
        return start

    def _array(self, place: _Slice) -> np.ndarray:
        stop = place.start + place.probes * place.samples
        values = self._blocks[place.block][place.start : stop]
        return values.reshape(place.probes, place.samples)


#: Elements of an error that is projected alone: to join it with others costs more.
LARGE = 2**14


@dataclass
class Projector:
    """Projects the errors of one output of a call, of all formats and parts together.

    Attributes:
        gradients: of the probes, ``(K, *shape)``.
        axis: the axis that counts the samples; None where they are not told apart.
        samples: of the batch.
        terms: where the projections go.
        place: number of the output.
    """

    gradients: Tensor
    axis: tuple[int, int] | None
    samples: int
    terms: Terms
    place: int
    _keys: list[TermKey] = field(default_factory=list)
    _errors: list[Tensor] = field(default_factory=list)
    _values: list[Tensor] = field(default_factory=list)
    _overflow: list[int] = field(default_factory=list)

    @cached_property
    def probes(self) -> Tensor:
        """The gradients as ``(S, n, K)``."""
        return by_sample(self.gradients, self.axis, self.samples)

    def add(self, key: TermKey, error: Tensor | None) -> None:
        """Take an error; None is no error at all."""
        self._keys.append(key)
        if error is None:
            samples = self.probes.shape[0]
            self._project()
            zeros = torch.zeros(
                samples, 1, len(self.gradients), dtype=self.probes.dtype
            )
            self._values.append(zeros)
            self._overflow.append(0)
            return
        self._errors.append(arrange(error, self.axis, self.samples))
        if error.numel() >= LARGE:
            self._project()

    def finish(self) -> None:
        """Project what is left, and hand all on to ``terms``."""
        self._project()
        if not self._values:
            return
        joined = (
            self._values[0] if len(self._values) == 1 else torch.cat(self._values, 1)
        )
        self.terms.add_all(
            self._keys, self.place, joined.permute(1, 2, 0), self._overflow
        )

    def _project(self) -> None:
        """Project the errors that wait."""
        errors = self._errors
        self._errors = []
        if not errors:
            return
        joined = errors[0] if len(errors) == 1 else torch.cat(errors, dim=1)
        # the copy that is kept: its numbers are looked at where they cost no second one
        values = torch.bmm(joined, self.probes).cpu()
        if not math.isfinite(float(values.sum())):
            projected = [project(self.probes, error) for error in errors]
            values = torch.stack([lost.T for lost, _ in projected], dim=1)
            self._overflow.extend(count for _, count in projected)
        else:
            self._overflow.extend([0] * len(errors))
        self._values.append(values)


def by_sample(gradients: Tensor, axis: tuple[int, int] | None, samples: int) -> Tensor:
    """Return probe gradients ``(K, *shape)`` as ``(S, n, K)``.

    S = 1 without an axis that counts samples.
    """
    gradients = _wide(gradients)
    count = gradients.shape[0]
    if axis is None:
        return gradients.reshape(count, 1, -1).permute(1, 2, 0)
    samples_first = gradients.movedim(axis[0] + 1, 1)
    return samples_first.reshape(count, samples, -1).permute(1, 2, 0)


def arrange(error: Tensor, axis: tuple[int, int] | None, samples: int) -> Tensor:
    """Return an error as ``(S, 1, n)`` in the order of the probe gradients."""
    error = _wide(error)
    if axis is None:
        return error.reshape(1, 1, -1)
    if axis[0]:
        error = error.movedim(axis[0], 0)
    return error.reshape(samples, 1, -1)


def project(probes: Tensor, error: Tensor) -> tuple[Tensor, int]:
    """Return inner products ``(K, S)`` of an error with the probe gradients, on the CPU.

    With them comes how many errors are not finite. An infinite error (the format
    overflowed) that no probe looks at, a masked position say, costs nothing; one that a
    probe looks at costs everything: its projection is infinite.
    """
    values = torch.bmm(error, probes).cpu()[:, 0, :].T
    if math.isfinite(float(values.sum())):
        return values, 0
    bad = ~error.isfinite()
    if not bool(bad.any()):
        return values, 0
    bad_elements = bad.transpose(1, 2)  # (S, n, 1)
    looked_at = probes.ne(0)  # (S, n, K)
    lost = (looked_at & bad_elements).any(dim=1)  # (S, K)
    count = int((bad_elements & looked_at.any(dim=2, keepdim=True)).sum())
    values = torch.bmm(error.masked_fill(bad, 0.0), probes).cpu()[:, 0, :].T
    return values.masked_fill(lost.T.cpu(), float("inf")), count


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
