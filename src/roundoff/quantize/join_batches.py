"""Calibration batches joined to one where that changes nothing: fewer and larger calls of the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from roundoff.errors import RoundoffError
from roundoff.workload import Workload, named_tensors


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
            p.ndim == 0 or len(p) != samples(leaves)
            for p, (leaves, _) in zip(parts, flat, strict=True)
        )
        if shared or not isinstance(parts[0], Tensor | np.ndarray):
            if not all(p is parts[0] or np.array_equal(p, parts[0]) for p in parts):
                return None
            joined.append(parts[0])
        elif any(p.shape[1:] != parts[0].shape[1:] for p in parts):
            return None
        else:
            joined.append(
                torch.cat(list(parts))
                if isinstance(parts[0], Tensor)
                else np.concatenate(parts)
            )
    return tree_unflatten(joined, layout)


def samples(batch: Any) -> int:
    """How many samples a batch has: the length of its first tensor that has axes; 0 without one.

    >>> samples({"mask": None, "ids": torch.zeros(4, 7)})
    4
    """
    return next(
        (
            len(v)
            for v in tree_flatten(batch)[0]
            if isinstance(v, Tensor | np.ndarray) and v.ndim
        ),
        0,
    )


def in_stacks(
    workload: Workload, batches: Sequence[Any], most: float = math.inf
) -> list[list[int]]:
    """Which batches can go through the model together, by number: those of one shape, where it computes the same for them.

    That is tried on two of a shape, of different lengths where there are such. A model that mixes the samples of a batch, or
    does something else for a short one, gets each batch by itself. Batches are joined up to ``most`` samples.

    >>> shapes = [torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 5)]
    >>> in_stacks(Workload(torch.nn.ReLU(), shapes), shapes)
    [[0, 1], [2]]
    """
    groups: list[list[int]] = []
    for number, batch in enumerate(batches):
        room = (
            g
            for g in groups
            if sum(samples(batches[i]) for i in g) + samples(batch) <= most
        )
        known = next(
            (g for g in room if stack([batches[g[0]], batch]) is not None), None
        )
        if known is None:
            groups.append([number])
        else:
            known.append(number)
    lengths = [samples(batch) for batch in batches]
    group = max(
        groups, key=lambda g: (len({lengths[i] for i in g}) > 1, len(g) > 1), default=[]
    )
    other = next((i for i in group if lengths[i] != lengths[group[0]]), None)
    pair = group[:2] if other is None else [group[0], other]
    if len(pair) < 2:
        return groups
    if _independent(workload, *(batches[i] for i in pair)):
        return groups
    return [[number] for number in range(len(batches))]


def _independent(workload: Workload, first: Any, second: Any) -> bool:
    """Whether the outputs of two batches are those of both together, up to half of the digits: kernels differ by size."""
    try:
        together = named_tensors(workload.run(stack([first, second])))
    except RoundoffError:  # the model takes batches of this length alone
        return False
    apart = [named_tensors(workload.run(batch)) for batch in (first, second)]
    counts = samples(first), samples(second)
    compared = 0
    for key, joined in together.items():
        parts = [a[key] for a in apart if key in a]
        if len(parts) < 2 or any(
            not p.ndim or len(p) != n for p, n in zip(parts, counts, strict=True)
        ):
            continue
        exact = torch.cat(parts)
        if joined.shape != exact.shape:
            return False
        compared += 1
        error, signal = (joined - exact).double().norm(), exact.double().norm()
        if not float(error) <= torch.finfo(exact.dtype).eps ** 0.5 * float(signal):
            return False
    return compared > 0
