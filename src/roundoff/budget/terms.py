"""The terms of the budget: every error projected on the probe gradients of its site."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class TermKey:
    """One part of one site's error in one format: the smallest entry of the budget."""

    site: str
    format: str
    part: str
    operand: int
    sources: tuple[str, ...]


#: Block, start, probes, samples.
_Slice = tuple[int, int, int, int]


@dataclass
class Terms:
    """What a batch's backward passes find: for each term, ``v . J e`` for each probe and sample."""

    _overflow: dict[TermKey, dict[int, int]] = field(default_factory=dict)
    _passes: dict[TermKey, dict[int, list[_Slice]]] = field(default_factory=dict)
    _blocks: list[np.ndarray] = field(default_factory=list)
    _used: int = 0

    def add(self, key: TermKey, place: int, values: Tensor, overflow: int) -> None:
        """Keep the projections ``(K, S)`` of one more pass on the operator's output number ``place``."""
        self._passes.setdefault(key, {}).setdefault(place, []).append(
            self._keep(values)
        )
        # the same errors in every pass: those that some probe of this pass looks at
        if overflow:
            seen = self._overflow.setdefault(key, {})
            seen[place] = max(overflow, seen.get(place, 0))

    def overflow(self, key: TermKey) -> int:
        """How many elements of this term's error are infinite or NaN and seen by the output."""
        return sum(self._overflow.get(key, {}).values())

    def projections(self) -> dict[TermKey, np.ndarray]:
        """float64 of shape ``(K, S)``, or ``(K, 1)`` where the samples could not be told apart; the outputs of one
        operator are added up."""
        return {
            key: _joined(
                [[self._array(p) for p in passes] for passes in places.values()]
            )
            for key, places in self._passes.items()
        }

    def _keep(self, values: Tensor) -> _Slice:
        """A copy inside a large block: small objects that stay behind between large ones that go would keep the
        allocator from using the memory again (three times the peak on a ResNet-18)."""
        size = values.numel()
        if not self._blocks or self._used + size > len(self._blocks[-1]):
            self._blocks.append(np.empty(max(size, 2**19)))
            self._used = 0
        place = (len(self._blocks) - 1, self._used, *values.shape)
        self._used += size
        torch.from_numpy(self._array(place)).copy_(values)
        return place

    def _array(self, place: _Slice) -> np.ndarray:
        block, start, probes, samples = place
        return self._blocks[block][start : start + probes * samples].reshape(
            probes, samples
        )


def _joined(places: list[list[np.ndarray]]) -> np.ndarray:
    parts = [
        passes[0] if len(passes) == 1 else np.concatenate(passes) for passes in places
    ]
    if any(part.shape[1] == 1 for part in parts):
        parts = [part.sum(1, keepdims=True) for part in parts]
    return np.sum(parts, axis=0) if len(parts) > 1 else parts[0]


def by_sample(gradients: Tensor, axis: tuple[int, int] | None, samples: int) -> Tensor:
    """Probe gradients ``(K, *shape)`` as ``(S, n, K)``; S = 1 without an axis that counts samples."""
    gradients = _wide(gradients)
    count = gradients.shape[0]
    if axis is None:
        return gradients.reshape(count, 1, -1).permute(1, 2, 0)
    return (
        gradients.movedim(axis[0] + 1, 1).reshape(count, samples, -1).permute(1, 2, 0)
    )


def arrange(error: Tensor, axis: tuple[int, int] | None, samples: int) -> Tensor:
    """An error as ``(S, 1, n)`` in the order of the probe gradients."""
    error = _wide(error)
    if axis is None:
        return error.reshape(1, 1, -1)
    return error.movedim(axis[0], 0).reshape(samples, 1, -1)


def project(probes: Tensor, error: Tensor) -> tuple[Tensor, int]:
    """Inner products ``(K, S)`` of an error with the probe gradients, and how many errors are not finite.

    An infinite error (the format overflowed) that no probe looks at, a masked position say, costs nothing; one
    that a probe looks at costs everything: its projection is infinite.
    """
    values = torch.bmm(error, probes)[:, 0, :].T
    if bool(values.isfinite().all()):
        return values, 0
    bad = ~error.isfinite()
    if not bool(bad.any()):
        return values, 0
    seen = (probes.ne(0) & bad.transpose(1, 2)).any(dim=1)  # (S, K)
    values = torch.bmm(error.masked_fill(bad, 0.0), probes)[:, 0, :].T
    count = int((bad.transpose(1, 2) & probes.ne(0).any(dim=2, keepdim=True)).sum())
    return values.masked_fill(seen.T, float("inf")), count


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
