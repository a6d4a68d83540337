"""What a trial did to the target, as rows of a budget: projections on sign vectors.

The projections are moved as little as possible to have the exact powers and products,
so that a trial has no sampling error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roundoff.budget.terms import TermKey

#: Share of the largest eigenvalue below which a direction holds nothing.
_RANK = 1e-10

#: Elements of sign vectors that are multiplied at once.
_ELEMENTS = 2**20

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Change:
    """What one part more does to the target.

    Attributes:
        differences: of each target tensor, ``(samples, elements)``; zero where the new
            value is not finite.
        lost: samples that were finite before and are not now, shape ``(samples,)``.
        overflow: elements that were finite before and are not now.
    """

    differences: list[Tensor]
    lost: Tensor
    overflow: int

    @classmethod
    def between(
        cls, before: Sequence[Tensor], after: Sequence[Tensor], samples: int
    ) -> Change:
        """Compare the target tensors of two forward passes."""
        differences = []
        lost = torch.zeros(samples, dtype=torch.bool)
        overflow = 0
        for old, new in zip(before, after, strict=True):
            difference = (new.double() - old.double()).reshape(samples, -1)
            is_bad = ~new.isfinite().reshape(samples, -1)
            is_new = is_bad & old.isfinite().reshape(samples, -1)
            differences.append(difference.masked_fill(~difference.isfinite(), 0.0))
            lost |= is_new.any(1).cpu()
            overflow += int(is_new.sum())
        return cls(differences, lost, overflow)

    def project(self, signs: Sequence[Tensor]) -> Array:
        """Return the projections on sign vectors ``(K, *shape)``, shape ``(K, S)``."""
        count = len(signs[0])
        total = torch.zeros(count, len(self.lost), dtype=torch.float64)
        for vectors, difference in zip(signs, self.differences, strict=True):
            together = max(1, _ELEMENTS // max(1, difference.numel()))
            for start in range(0, count, together):
                rows = vectors[start : start + together].double()
                rows = rows.reshape(-1, *difference.shape)
                total[start : start + together] += (rows * difference).sum(2).cpu()
        return total.numpy()

    def product(self, other: Change) -> float:
        """Return the inner product with another change."""
        pairs = zip(self.differences, other.differences, strict=True)
        return sum(float((a * b).sum()) for a, b in pairs)


@dataclass
class TrialRows:
    """What the trials of one site in one format give.

    Attributes:
        batches: for each batch the projections of each part, ``(probes, samples)``;
            parts that change nothing are zero.
        overflow: elements of the target that became infinite or NaN, by part.
        forwards: forward passes that it took.
    """

    batches: list[dict[TermKey, Array]] = field(default_factory=list)
    overflow: Counter[TermKey] = field(default_factory=Counter)
    forwards: int = 0

    def add(
        self,
        changes: Mapping[TermKey, Change],
        unchanged: Sequence[TermKey],
        signs: Sequence[Tensor],
        samples: int,
    ) -> None:
        """Add what each part of a call does to one batch, in their order."""
        shape = (len(signs[0]), samples)
        rows = {key: np.zeros(shape) for key in unchanged}
        values = np.zeros((len(changes), *shape))
        products = np.zeros((len(changes), len(changes)))
        for number, change in enumerate(changes.values()):
            values[number] = change.project(signs)
            products[number] = [change.product(other) for other in changes.values()]
        exact = with_mean_products(values, products)
        for (key, change), row in zip(changes.items(), exact, strict=True):
            row[:, change.lost.numpy()] = math.inf
            rows[key] = row
            if change.overflow:
                self.overflow[key] += change.overflow
        self.batches.append(rows)


def with_mean_products(values: Array, products: Array) -> Array:
    """Return projections, moved as little as possible to have given mean products.

    Args:
        values: projections of some parts, ``(parts, probes, samples)``.
        products: of each two parts, ``(parts, parts)``: what the mean over the probes
            of their products, summed over the samples, shall be.

    The map is the optimal transport between two Gaussians (M. Gelbrich, Math. Nachr.
    147, 1990, theorem 2.1): ``S^-1/2 (S^1/2 G S^1/2)^1/2 S^-1/2``, for S what the mean
    products are and G what they shall be. Where there are fewer projections than
    parts, their sum gets its power.
    """
    parts, probes, _ = values.shape
    norms = np.sqrt(products.diagonal())
    used = norms > 0
    if not used.any():
        return np.zeros_like(values)
    flat = np.zeros_like(values.reshape(parts, -1))
    scaled = values.reshape(parts, -1)[used] / norms[used, None]
    wanted = products[np.ix_(used, used)] / np.outer(norms[used], norms[used])
    empty = np.square(scaled).sum(1) == 0
    scaled[empty] = math.sqrt(probes / scaled.shape[1])
    root, inverse = _roots(scaled @ scaled.T / probes)
    middle, _ = _roots(root @ wanted @ root)
    flat[used] = norms[used, None] * (inverse @ middle @ inverse @ scaled)
    power = float(np.square(flat.sum(0)).sum() / probes)
    if power > 0:
        flat *= math.sqrt(max(0.0, float(products.sum())) / power)
    return flat.reshape(values.shape)


def _roots(matrix: Array) -> tuple[Array, Array]:
    """Return the square root of a positive matrix, and the inverse of that root."""
    eigenvalues, vectors = np.linalg.eigh(matrix)
    kept = eigenvalues > _RANK * eigenvalues.max()
    roots = np.sqrt(eigenvalues[kept])
    vectors = vectors[:, kept]
    return (vectors * roots) @ vectors.T, (vectors / roots) @ vectors.T
