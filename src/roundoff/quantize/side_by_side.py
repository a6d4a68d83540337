"""Calibration samples twice in one batch: the first half for full precision, the second for the quantized network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from roundoff.errors import QuantizationError


class MixedSamplesError(QuantizationError):
    """What a model computes for a sample depends on the others in the batch."""


def stack(batches: Sequence[Any]) -> Any | None:
    """All batches as one, joined along the first axis of their tensors; None where they do not fit together.

    Tensors that have another first axis than the batch's first tensor, or none (a mask, a temperature), are shared: they
    have to be the same in all batches.
    """
    flat = [tree_flatten(batch) for batch in batches]
    _, layout = flat[0]
    if any(spec != layout for _, spec in flat):
        return None
    joined = []
    for parts in zip(*(leaves for leaves, _ in flat), strict=True):
        shared = isinstance(parts[0], Tensor) and any(
            p.ndim == 0 or len(p) != samples(leaves) for p, (leaves, _) in zip(parts, flat, strict=True)
        )
        if shared or not isinstance(parts[0], Tensor | np.ndarray):
            if not all(p is parts[0] or np.array_equal(p, parts[0]) for p in parts):
                return None
            joined.append(parts[0])
        elif any(p.shape[1:] != parts[0].shape[1:] for p in parts):
            return None
        else:
            joined.append(torch.cat(list(parts)) if isinstance(parts[0], Tensor) else np.concatenate(parts))
    return tree_unflatten(joined, layout)


def samples(batch: Any) -> int:
    """How many samples a batch has: the length of its first tensor that has axes; 0 without one.

    >>> samples({"mask": None, "ids": torch.zeros(4, 7)})
    4
    """
    return next((len(v) for v in tree_flatten(batch)[0] if isinstance(v, Tensor | np.ndarray) and v.ndim), 0)


@dataclass(frozen=True)
class Layout:
    """Where the samples lie in a value: on an axis that is ``outer`` runs of all samples (times what is merged with them).

    ``view(batch * tokens, ...)`` has outer = 1, ``view(tokens * batch, ...)`` has outer = tokens.
    """

    axis: int
    outer: int

    def halves(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """The first and the second half of the samples."""
        if self.outer == 1:
            first, second = value.chunk(2, self.axis)
            return first, second
        shape = (*value.shape[: self.axis], self.outer, 2, -1, *value.shape[self.axis + 1 :])
        first, second = value.reshape(shape).unbind(self.axis + 1)
        return first.flatten(self.axis, self.axis + 1), second.flatten(self.axis, self.axis + 1)

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        """The inverse of ``halves``.

        >>> halves = Layout(0, 2).halves(torch.arange(8))
        >>> halves, Layout(0, 2).join(*halves)
        ((tensor([0, 1, 4, 5]), tensor([2, 3, 6, 7])), tensor([0, 1, 2, 3, 4, 5, 6, 7]))
        """
        if self.outer == 1:
            return torch.cat([first, second], self.axis)
        shape = (*first.shape[: self.axis], self.outer, -1, *first.shape[self.axis + 1 :])
        parts = [half.reshape(shape) for half in (first, second)]
        return torch.cat(parts, self.axis + 1).flatten(self.axis, self.axis + 1)


def find_layout(value: Tensor, total: int) -> Layout | None:
    """Where ``total`` samples, whose halves are nearly the same, lie in a value; None where it has none, as a constant.

    Where shapes leave a choice, the layout with the least difference of the halves, of the first ones with the same.

    >>> find_layout(torch.zeros(6, 4), 4), find_layout(torch.zeros(6, 3), 4)
    (Layout(axis=1, outer=1), None)
    """
    found = [
        Layout(axis, outer)
        for axis, length in enumerate(value.shape)
        for outer in range(1, length // total + 1)
        if length % (total * outer) == 0
    ]
    if len(found) < 2 or not value.is_floating_point():
        return found[0] if found else None
    apart = [float((a - b).float().norm()) for a, b in (layout.halves(value) for layout in found)]
    best = min(range(len(found)), key=lambda i: apart[i])
    return found[best]


def check_same(plain: Mapping[str, Tensor], found: Mapping[str, Tensor], sizes: Sequence[int], name: str) -> None:
    """The first half of the samples went through in full precision: on the first batch it must be what the model computes.

    In its norm, up to half of the digits of its dtype, since other kernels run for other sizes of a batch. Outputs without
    an axis of samples in front are not compared. Raises ``QuantizationError`` where they differ, or none can be compared.

    >>> check_same({"output": torch.ones(1)}, {"output": torch.ones(4)}, [1, 1], "toy")
    """
    count, total = sizes[0], 2 * sum(sizes)
    compared, wrong = 0, []
    for key, exact in plain.items():
        other = found.get(key)
        if other is None or not len(exact.shape) or len(exact) != count or len(other) != total:
            continue
        compared += 1
        error, signal = (other[:count] - exact).double().norm(), exact.double().norm()
        if not float(error) <= torch.finfo(exact.dtype).eps ** 0.5 * float(signal):
            wrong.append(f"{key}: off by {float(error / signal):.1e} of its norm")
    if wrong or not compared:
        raise MixedSamplesError(
            "the samples of a batch are not independent of each other", where=name,
            expected="outputs that have the samples on their first axis, each the same whatever else is in the batch",
            got="; ".join(wrong) or f"outputs of shapes {', '.join(str(tuple(t.shape)) for t in found.values()) or 'none'}",
            do="let the model take its batch statistics from buffers, and put the samples first",
        )  # fmt: skip
