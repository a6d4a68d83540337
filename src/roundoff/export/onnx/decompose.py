"""Operators that torch's exporter has no ONNX for, by others that it has.

They are taken apart in the program that torch.export makes, each as its own definition
says. Sizes that a window depends on are those that were traced.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten: Any = torch.ops.aten


def decomposed(program: Any) -> Any:
    """Return a ``torch.export.ExportedProgram`` without operators that ONNX lacks."""
    used = {node.target for node in program.graph.nodes if node.op == "call_function"}
    table = {op: body for op, body in _bodies().items() if op in used}
    return program.run_decompositions(table) if table else program


def _bodies() -> dict[Any, Callable[..., Any]]:
    return {
        _aten._cdist_forward.default: _distances,
        _aten.cdist.default: _distances,
        _aten._adaptive_avg_pool3d.default: _adaptive_means,
        _aten.adaptive_avg_pool3d.default: _adaptive_means,
        _aten.adaptive_max_pool2d.default: _adaptive_maxima,
        _aten.adaptive_max_pool3d.default: _adaptive_maxima,
        _aten.cummax.default: _running_maxima,
        _aten.cummin.default: _running_minima,
        _aten.median.dim: _median_along,
        _aten.median.default: _median,
        _aten.kthvalue.default: _kth_value,
        _aten.bucketize.Tensor: _buckets,
    }


def _distances(x: Tensor, y: Tensor, p: float = 2.0, *_: Any) -> Tensor:
    """Return the p-norm of the difference of each row of ``x`` and each of ``y``."""
    apart = (x.unsqueeze(-2) - y.unsqueeze(-3)).abs()
    if p == 0:
        return (apart != 0).to(x.dtype).sum(-1)
    if p == math.inf:
        return apart.amax(-1)
    if p == 1:
        return apart.sum(-1)
    if p == 2:
        return apart.square().sum(-1).sqrt()
    return apart.pow(p).sum(-1).pow(1 / p)


def _windows(size: int, count: int) -> list[tuple[int, int]]:
    """Return start and length of the windows that divide an axis."""
    starts = [index * size // count for index in range(count)]
    ends = [-(-(index + 1) * size // count) for index in range(count)]
    return [(start, end - start) for start, end in zip(starts, ends, strict=True)]


def _adaptive_means(x: Tensor, lengths: list[int]) -> Tensor:
    """Return means over windows that divide the last axes into these lengths."""
    for axis, count in zip(range(-len(lengths), 0), lengths, strict=True):
        windows = [x.narrow(axis, *window) for window in _windows(x.shape[axis], count)]
        x = torch.cat([window.mean(axis, keepdim=True) for window in windows], axis)
    return x


def _adaptive_maxima(x: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return maxima over windows that divide the last axes, and their flat places."""
    axes = range(-len(lengths), 0)
    sizes = [int(x.shape[axis]) for axis in axes]
    count = math.prod(sizes)
    places = torch.arange(count, device=x.device).reshape(sizes)
    windows = [_windows(size, n) for size, n in zip(sizes, lengths, strict=True)]
    maxima: list[Tensor] = []
    where: list[Tensor] = []
    for cell in itertools.product(*windows):
        part = x
        numbers = places
        for axis, window in zip(axes, cell, strict=True):
            part = part.narrow(axis, *window)
            numbers = numbers.narrow(axis, *window)
        largest, place = part.flatten(axes[0]).max(-1)
        maxima.append(largest)
        where.append(numbers.flatten()[place])
    shape = [*x.shape[: axes[0]], *lengths]
    return torch.stack(maxima, -1).reshape(shape), torch.stack(where, -1).reshape(shape)


def _running_maxima(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the maximum of all elements up to each, and its place."""
    values = x.movedim(dim, -1)
    size = values.shape[-1]
    later = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
    up_to = values.unsqueeze(-2).masked_fill(later, -math.inf)
    largest, places = up_to.max(-1)
    return largest.movedim(-1, dim), places.movedim(-1, dim)


def _running_minima(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    largest, places = _running_maxima(-x, dim)
    return -largest, places


def _kth_value(
    x: Tensor, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Return the kth smallest element along an axis, and its place."""
    values, places = x.topk(k, dim, largest=False)
    value = values.narrow(dim, k - 1, 1)
    place = places.narrow(dim, k - 1, 1)
    return (value, place) if keepdim else (value.squeeze(dim), place.squeeze(dim))


def _median_along(x: Tensor, dim: int, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    return _kth_value(x, (x.shape[dim] + 1) // 2, dim, keepdim)


def _median(x: Tensor) -> Tensor:
    return _median_along(x.flatten(), 0)[0]


def _buckets(
    x: Tensor, bounds: Tensor, *, out_int32: bool = False, right: bool = False
) -> Tensor:
    """Return between which bounds, in rising order, each element lies."""
    each = x.unsqueeze(-1)
    below = bounds <= each if right else bounds < each
    return below.sum(-1, dtype=torch.int32 if out_int32 else torch.int64)
