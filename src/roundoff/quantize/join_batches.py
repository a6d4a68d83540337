"""Join calibration batches where that changes nothing: fewer, larger calls of the model."""

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
    """Join batches along the first axis of their tensors; None where they do not fit.

    Tensors that have another first axis than the batch's first tensor, or none (a mask, a
    temperature), are shared: they have to be the same in all batches.
    """
    flat = [tree_flatten(batch) for batch in batches]
    _, layout = flat[0]
    if any(spec != layout for _, spec in flat):
        return None
    leaves = [leaves_of_batch for leaves_of_batch, _ in flat]
    lengths = [samples(leaves_of_batch) for leaves_of_batch in leaves]
    joined = []
    for parts in zip(*leaves, strict=True):
        shared = _is_shared(parts, lengths)
        if not (_all_equal(parts) if shared else _fit_together(parts)):
            return None
        joined.append(parts[0] if shared else _concatenate(parts))
    return tree_unflatten(joined, layout)


def _all_equal(parts: Sequence[Any]) -> bool:
    return all(_equal(part, parts[0]) for part in parts)


def _equal(part: Any, other: Any) -> bool:
    """Compare tensors where they are: numpy reads those of the CPU alone."""
    if part is other:
        return True
    if isinstance(part, Tensor) and isinstance(other, Tensor):
        return part.device == other.device and torch.equal(part, other)
    return bool(np.array_equal(part, other))


def _fit_together(parts: Sequence[Any]) -> bool:
    """Return True for tensors that differ in their first axis alone."""
    return all(p.shape[1:] == parts[0].shape[1:] for p in parts)


def _concatenate(parts: Sequence[Any]) -> Any:
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return np.concatenate(parts)


def _is_shared(parts: Sequence[Any], lengths: Sequence[int]) -> bool:
    """Return True for what does not lie along the samples of its batch."""
    if isinstance(parts[0], Tensor):
        pairs = zip(parts, lengths, strict=True)
        return any(p.ndim == 0 or len(p) != length for p, length in pairs)
    return not isinstance(parts[0], np.ndarray)


def samples(batch: Any) -> int:
    """Return how many samples a batch has.

    That is the length of its first tensor that has axes; 0 without one.

    >>> samples({"mask": None, "ids": torch.zeros(4, 7)})
    4
    """
    for leaf in tree_flatten(batch)[0]:
        if isinstance(leaf, Tensor | np.ndarray) and leaf.ndim:
            return len(leaf)
    return 0


def in_stacks(
    workload: Workload, batches: Sequence[Any], most: float = math.inf
) -> list[list[int]]:
    """Return which batches can go through the model together, by number.

    Those are of one shape, where the model computes the same for them. That is tried on
    two of a shape, of different lengths where there are such. A model that mixes the
    samples of a batch, or does something else for a short one, gets each batch by itself.
    Batches are joined up to ``most`` samples.

    >>> shapes = [torch.ones(2, 3), torch.ones(4, 3), torch.ones(2, 5)]
    >>> in_stacks(Workload(torch.nn.ReLU(), shapes), shapes)
    [[0, 1], [2]]
    """
    groups = _groups_of_one_shape(batches, most)
    pair = _pair_to_try(groups, batches)
    if pair is None or _independent(workload, *pair):
        return groups
    return [[number] for number in range(len(batches))]


def _groups_of_one_shape(batches: Sequence[Any], most: float) -> list[list[int]]:
    """Put batches that fit together into groups of up to ``most`` samples."""
    groups: list[list[int]] = []
    for number, batch in enumerate(batches):
        for group in groups:
            held = sum(samples(batches[i]) for i in group)
            fits = held + samples(batch) <= most
            if fits and stack([batches[group[0]], batch]) is not None:
                group.append(number)
                break
        else:
            groups.append([number])
    return groups


def _pair_to_try(
    groups: Sequence[Sequence[int]], batches: Sequence[Any]
) -> tuple[Any, Any] | None:
    """Return two batches of one group, of different lengths where there are such."""
    lengths = [samples(batch) for batch in batches]
    pairs = []
    for group in groups:
        first = group[0]
        different = [i for i in group if lengths[i] != lengths[first]]
        if different:
            return batches[first], batches[different[0]]
        pairs += [(batches[first], batches[i]) for i in group[1:2]]
    return pairs[0] if pairs else None


def _independent(workload: Workload, first: Any, second: Any) -> bool:
    """Return True where two batches have the outputs of both together.

    Up to half of the digits: kernels differ by size.
    """
    try:
        together = named_tensors(workload.run(stack([first, second])))
    except RoundoffError:  # the model takes batches of this length alone
        return False
    apart = [named_tensors(workload.run(batch)) for batch in (first, second)]
    lengths = [samples(first), samples(second)]
    compared = 0
    for key, joined in together.items():
        parts = [outputs[key] for outputs in apart if key in outputs]
        if len(parts) < 2 or _is_shared(parts, lengths):
            continue
        if not _same(joined, torch.cat(parts)):
            return False
        compared += 1
    return compared > 0


def _same(joined: Tensor, exact: Tensor) -> bool:
    """Compare up to half of the digits."""
    if joined.shape != exact.shape:
        return False
    error = (joined - exact).double().norm()
    signal = exact.double().norm()
    tolerance: float = torch.finfo(exact.dtype).eps ** 0.5
    return float(error) <= tolerance * float(signal)
