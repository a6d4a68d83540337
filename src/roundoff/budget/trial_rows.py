"""What a trial did to the target, as rows of a budget: projections on sign vectors.

The projections are moved as little as possible to have the exact powers and products,
so that a trial has no sampling error.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
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
        differences: of each target tensor, of its shape; zero where the new value is
            not finite.
        lost: elements of it that were finite before and are not now; without a tensor
            that lost none.
    """

    differences: dict[str, Tensor]
    lost: dict[str, Tensor]

    @classmethod
    def between(
        cls, before: Mapping[str, Tensor], after: Mapping[str, Tensor]
    ) -> Change:
        """Compare the target tensors of two forward passes."""
        differences = {}
        lost = {}
        for name, old in before.items():
            new = after[name]
            difference = _wide(new) - _wide(old)
            is_finite = difference.isfinite()
            if not bool(is_finite.all()):
                difference = difference.masked_fill(~is_finite, 0.0)
                is_lost = ~new.isfinite() & old.isfinite()
                if bool(is_lost.any()):
                    lost[name] = is_lost
            differences[name] = difference
        return cls(differences, lost)

    @property
    def overflow(self) -> int:
        """How many elements were finite before and are not now."""
        return sum(int(is_lost.sum()) for is_lost in self.lost.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the differences."""
        return sum(difference.nbytes for difference in self.differences.values())

    def lost_samples(self, view: OutputView, signs: DrawnSigns) -> Array:
        """Return the samples in which an output is lost, shape ``(samples,)``."""
        lost: Array = np.zeros(signs.samples, dtype=bool)
        for name in view.weights:
            if name in self.lost:
                by_sample = signs.divided(name, self.lost[name])
                lost = lost | by_sample.any(1).cpu().numpy()
        return lost


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


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


@dataclass(frozen=True, slots=True)
class TriedRow:
    """The trials of one site in one format on one batch.

    Attributes:
        rows: where their projections go.
        changes: what each part does, in their order.
        unchanged: parts that change nothing.
    """

    rows: TrialRows
    changes: Mapping[TermKey, Change]
    unchanged: Sequence[TermKey]


def add_projections(
    tried: Sequence[TriedRow],
    views: Sequence[OutputView],
    signs: DrawnSigns,
    vectors: Mapping[str, Tensor],
) -> None:
    """Add the projections of one batch, rows of like many parts together."""
    by_parts: dict[int, list[TriedRow]] = defaultdict(list)
    for row in tried:
        by_parts[len(row.changes)].append(row)
    shape = (len(views) * signs.count, signs.samples)
    for parts, alike in by_parts.items():
        changes = [list(row.changes.values()) for row in alike]
        blocks = [_blocks(changes, v, signs, vectors) for v in views] if parts else []
        for number, row in enumerate(alike):
            projections = {key: np.zeros(shape) for key in row.unchanged}
            for part, (key, change) in enumerate(row.changes.items()):
                of_outputs = [block[number, part] for block in blocks]
                projections[key] = np.concatenate(of_outputs)
                if change.lost:
                    row.rows.overflow[key] += change.overflow
            row.rows.batches.append(projections)


def _blocks(
    changes: Sequence[Sequence[Change]],
    view: OutputView,
    signs: DrawnSigns,
    vectors: Mapping[str, Tensor],
) -> Array:
    """Return the projections at one output, ``(rows, parts, probes, samples)``.

    ``changes`` has as many parts in each row.
    """
    rows = len(changes)
    parts = len(changes[0])
    values = np.zeros((rows, parts, signs.count, signs.samples))
    products = np.zeros((rows, parts, parts))
    powers = np.zeros((rows, signs.samples))
    for name, weight in view.weights.items():
        if name not in changes[0][0].differences:
            continue
        stacked = torch.stack([c.differences[name] for row in changes for c in row])
        errors = signs.divided(name, stacked, axes=1).double()
        projected = _inner(vectors[name], errors)
        values += weight * projected.reshape(values.shape)
        by_row = errors.reshape(rows, parts, signs.samples, -1)
        flat = by_row.flatten(2)
        products += weight**2 * torch.bmm(flat, flat.mT).cpu().numpy()
        whole = by_row.sum(1).square().sum(-1)
        powers += weight**2 * whole.cpu().numpy()
    blocks = with_mean_products(values, products)
    blocks = _with_sample_powers(blocks, powers) / math.sqrt(view.signal)
    for number, row in enumerate(changes):
        for part, change in enumerate(row):
            if change.lost:
                blocks[number, part][:, change.lost_samples(view, signs)] = math.inf
    return blocks


def _inner(signs: Tensor, errors: Tensor) -> Array:
    """Return inner products of signs ``(K, S, n)`` with errors ``(C, S, n)``: ``(C, K, S)``."""
    by_sample = errors.transpose(0, 1)
    together = max(1, _ELEMENTS // max(1, signs[0].numel()))
    chunks = [
        torch.bmm(by_sample, chunk.double().permute(1, 2, 0))
        for chunk in torch.split(signs, together)
    ]
    return torch.cat(chunks, 2).permute(1, 2, 0).cpu().numpy()


#: Most that the projections of one sample are scaled by.
_MOST_SCALED = 4.0


def _with_sample_powers(blocks: Array, powers: Array) -> Array:
    """Return rows ``(..., parts, probes, samples)`` scaled to have the powers of samples.

    Those are of all parts together, ``(..., samples)``. So what samples differ by is
    known exactly too, and not only their sum.
    """
    estimates = np.square(blocks.sum(-3)).mean(-2)
    ratios = _ratios(powers, estimates).clip(1 / _MOST_SCALED**2, _MOST_SCALED**2)
    of_sum = _ratios(powers.sum(-1), (ratios * estimates).sum(-1))
    factors = np.sqrt(ratios * of_sum[..., None])
    scaled: Array = blocks * factors[..., None, None, :]
    return scaled


def _ratios(wanted: Array, estimated: Array) -> Array:
    """Return wanted / estimated; 1 where one of them is zero."""
    is_known = (wanted > 0) & (estimated > 0)
    ratios: Array = np.divide(
        wanted, estimated, out=np.ones_like(estimated), where=is_known
    )
    return ratios


def with_mean_products(values: Array, products: Array) -> Array:
    """Return projections, moved as little as possible to have given mean products.

    Args:
        values: projections of some parts, ``(..., parts, probes, samples)``.
        products: of each two parts, ``(..., parts, parts)``: what the mean over the
            probes of their products, summed over the samples, shall be.

    The map is the optimal transport between two Gaussians (M. Gelbrich, Math. Nachr.
    147, 1990, theorem 2.1): ``S^-1/2 (S^1/2 G S^1/2)^1/2 S^-1/2``, for S what the mean
    products are and G what they shall be. Where there are fewer projections than
    parts, their sum gets its power.
    """
    probes = values.shape[-2]
    columns = probes * values.shape[-1]
    flat = values.reshape(*values.shape[:-2], columns)
    norms = np.sqrt(np.diagonal(products, axis1=-2, axis2=-1))
    units = np.where(norms > 0, norms, 1.0)[..., None]
    scaled = np.where(norms[..., None] > 0, flat / units, 0.0)
    wanted = products / (units * np.swapaxes(units, -1, -2))
    is_empty = (np.square(scaled).sum(-1) == 0) & (norms > 0)
    scaled[is_empty] = math.sqrt(probes / columns)
    root, inverse = _roots(scaled @ np.swapaxes(scaled, -1, -2) / probes)
    middle, _ = _roots(root @ wanted @ root)
    moved = norms[..., None] * (inverse @ middle @ inverse @ scaled)
    power = np.square(moved.sum(-2)).sum(-1) / probes
    total = np.maximum(products.sum((-2, -1)), 0.0)
    moved = moved * np.sqrt(_ratios(total, power))[..., None, None]
    result: Array = moved.reshape(values.shape)
    return result


def _roots(matrices: Array) -> tuple[Array, Array]:
    """Return the square roots of positive matrices, and the inverses of those roots."""
    eigenvalues, vectors = np.linalg.eigh(matrices)
    largest = eigenvalues.max(-1, keepdims=True, initial=0.0)
    is_kept = eigenvalues > _RANK * largest
    roots = np.sqrt(np.where(is_kept, eigenvalues, 0.0))
    inverses = np.divide(1.0, roots, out=np.zeros_like(roots), where=is_kept)
    transposed = np.swapaxes(vectors, -1, -2)
    root = (vectors * roots[..., None, :]) @ transposed
    return root, (vectors * inverses[..., None, :]) @ transposed
