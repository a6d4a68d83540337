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
from roundoff.budget.trial_signs import DrawnSigns

#: Share of the largest eigenvalue below which a direction holds nothing.
_RANK = 1e-10

#: Elements of sign vectors that are multiplied at once.
_ELEMENTS = 2**20

Array = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class OutputView:
    """One output, as its rows of the projections see it.

    Attributes:
        weights: of its tensors, by name (see ``OutputRows``).
        signal: power of the output over all batches.
    """

    weights: Mapping[str, float]
    signal: float

    def noise(
        self,
        targets: Sequence[Mapping[str, Tensor]],
        exact: Sequence[Mapping[str, Tensor]],
    ) -> float:
        """Return what some batches differ by, relative to those batches."""
        error = power = 0.0
        for rounded, plain in zip(targets, exact, strict=True):
            for name, weight in self.weights.items():
                if name in plain:
                    difference = rounded[name].double() - plain[name].double()
                    error += weight**2 * float(difference.square().sum())
                    power += weight**2 * float(plain[name].double().square().sum())
        return error / power if math.isfinite(error) and power else math.inf


@dataclass(frozen=True, slots=True)
class Change:
    """What one part more does to the target.

    Attributes:
        differences: of each target tensor, ``(samples, elements)``; zero where the new
            value is not finite.
        lost: samples of it that were finite before and are not now, ``(samples,)``.
        overflow: elements that were finite before and are not now.
    """

    differences: dict[str, Tensor]
    lost: dict[str, Tensor]
    overflow: int

    @classmethod
    def between(
        cls,
        before: Mapping[str, Tensor],
        after: Mapping[str, Tensor],
        signs: DrawnSigns,
    ) -> Change:
        """Compare the target tensors of two forward passes."""
        differences = {}
        lost = {}
        overflow = 0
        for name in signs.names:
            old = before[name]
            new = after[name]
            difference = signs.divided(name, new.double() - old.double())
            is_new = signs.divided(name, ~new.isfinite() & old.isfinite())
            differences[name] = difference.masked_fill(~difference.isfinite(), 0.0)
            lost[name] = is_new.any(1).cpu()
            overflow += int(is_new.sum())
        return cls(differences, lost, overflow)

    def project(self, view: OutputView, signs: Mapping[str, Tensor]) -> Array:
        """Return the projections on sign vectors, shape ``(K, S)``."""
        names = [name for name in view.weights if name in self.differences]
        parts = [
            view.weights[name] * _inner(signs[name], self.differences[name])
            for name in names
        ]
        return np.sum(parts, axis=0) if parts else np.zeros((1, 1))

    def product(self, other: Change, view: OutputView) -> float:
        """Return the inner product with another change, at one output."""
        return sum(
            weight**2 * float((self.differences[name] * other.differences[name]).sum())
            for name, weight in view.weights.items()
            if name in self.differences
        )

    def lost_samples(self, view: OutputView) -> Array:
        """Return the samples in which an output is lost, shape ``(samples,)``."""
        masks = [self.lost[name].numpy() for name in view.weights if name in self.lost]
        lost: Array = np.any(masks, axis=0)
        return lost


def _inner(signs: Tensor, difference: Tensor) -> Array:
    """Return inner products ``(K, S)`` of signs ``(K, S, n)`` with a difference."""
    count = len(signs)
    total = torch.zeros(count, len(difference), dtype=torch.float64)
    together = max(1, _ELEMENTS // max(1, difference.numel()))
    column = difference.unsqueeze(2)
    for start in range(0, count, together):
        rows = signs[start : start + together].double().transpose(0, 1)
        total[start : start + together] = torch.bmm(rows, column)[:, :, 0].T.cpu()
    return total.numpy()


@dataclass
class TrialRows:
    """What the trials of one site in one format give.

    Attributes:
        batches: for each batch the projections of each part, those of each output in a
            block of rows, in units of its amplitude: ``(outputs * probes, samples)``;
            parts that change nothing are zero.
        overflow: elements of the target that became infinite or NaN, by part.
        forwards: forward passes that it took.
        in_one: all parts of the site were measured as one.
    """

    batches: list[dict[TermKey, Array]] = field(default_factory=list)
    overflow: Counter[TermKey] = field(default_factory=Counter)
    forwards: int = 0
    in_one: bool = False

    def add(
        self,
        changes: Mapping[TermKey, Change],
        unchanged: Sequence[TermKey],
        views: Sequence[OutputView],
        signs: DrawnSigns,
        vectors: Mapping[str, Tensor],
    ) -> None:
        """Add what each part of a call does to one batch, in their order."""
        shape = (len(views) * signs.count, signs.samples)
        rows = {key: np.zeros(shape) for key in unchanged}
        parts = list(changes.values())
        blocks = [_block(parts, view, signs, vectors) for view in views]
        for number, (key, change) in enumerate(changes.items()):
            rows[key] = np.concatenate([block[number] for block in blocks])
            if change.overflow:
                self.overflow[key] += change.overflow
        self.batches.append(rows)


def _block(
    changes: Sequence[Change],
    view: OutputView,
    signs: DrawnSigns,
    vectors: Mapping[str, Tensor],
) -> Array:
    """Return the rows of each part at one output, ``(parts, probes, samples)``."""
    values = np.zeros((len(changes), signs.count, signs.samples))
    products = np.zeros((len(changes), len(changes)))
    for number, change in enumerate(changes):
        values[number] = change.project(view, vectors)
        products[number] = [change.product(other, view) for other in changes]
    block = with_mean_products(values, products)
    if changes:
        block = _with_sample_powers(block, _sample_powers(changes, view))
    block = block / math.sqrt(view.signal)
    for rows, change in zip(block, changes, strict=True):
        rows[:, change.lost_samples(view)] = math.inf
    return block


def _sample_powers(changes: Sequence[Change], view: OutputView) -> Array:
    """Return what all changes together do to each sample, as powers ``(samples,)``."""
    powers = np.zeros(1)
    for name, weight in view.weights.items():
        parts = [c.differences[name] for c in changes if name in c.differences]
        if parts:
            together = torch.stack(parts).sum(0)
            powers = powers + weight**2 * together.square().sum(1).cpu().numpy()
    return powers


#: Most that the projections of one sample are scaled by.
_MOST_SCALED = 4.0


def _with_sample_powers(block: Array, powers: Array) -> Array:
    """Return rows ``(parts, probes, samples)`` scaled to have the powers of the samples.

    So what samples differ by is known exactly too, and not only their sum.
    """
    estimates = np.square(block.sum(0)).mean(0)
    is_known = (estimates > 0) & (powers > 0)
    ratios = np.divide(powers, estimates, out=np.ones_like(estimates), where=is_known)
    scaled: Array = block * np.sqrt(ratios).clip(1 / _MOST_SCALED, _MOST_SCALED)
    return scaled


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
