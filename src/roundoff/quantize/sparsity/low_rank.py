"""A linear layer or convolution as two thinner ones, by the singular value
decomposition of its weight as a matrix.

The best approximation of rank r in the Frobenius norm keeps the r largest singular
values (Eckart and Young, 1936).

scheme    matrix                             the two layers linear    out × in
``in → r`` (no bias), ``r → out`` spatial   (in · kh) × (out · kw)             kh × 1,
``in → r``, then 1 × kw, ``r → out`` (Jaderberg et al.,
                                             arXiv:1405.3866, scheme 2)
channel   in × (out · kh · kw)               1 × 1, ``in → r``, then kh × kw,
``r → out`` (Tucker-1)
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from roundoff.errors import QuantizationError
from roundoff.preserve import preserve
from roundoff.quantize.channels.changed_copy import take_over_
from roundoff.quantize.sparsity.model_cost import model_cost
from roundoff.quantize.sparsity.rank import evbmf_rank
from roundoff.workload import Workload

Scheme = Literal["spatial", "channel"]


@dataclass(frozen=True)
class Decomposed:
    """One layer: what became of it.

    Attributes:
        layer: its path.
        scheme: linear, spatial or channel.
        rank: that was asked for; of ``full``.
        full: the largest rank that the matrix can have.
        energy: share of the squared Frobenius norm that is kept.
        macs: multiply-accumulates after over before, of this layer.
        reason: why it was left as it is, ``""`` when it was replaced.
    """

    layer: str
    scheme: str
    rank: int
    full: int
    energy: float
    macs: float
    reason: str = ""


def decompose_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    rank: float | Literal["evbmf"] | Mapping[str, int] = "evbmf",
    scheme: Scheme = "spatial",
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> list[Decomposed]:
    """Replace every linear layer and convolution whose two factors take fewer
    multiply-accumulates, in place.

    Args:
        model: any module.
        batches: the first one gives the sizes.
        rank: ``evbmf`` (see :mod:`roundoff.quantize.sparsity.rank`), a share of the
            squared norm to keep (0 < share <= 1), or ranks by layer path (then other
            layers stay).
        scheme: of convolutions of two dimensions; of others, and of 1×1, always
            ``channel`` or none.
        forward: ``forward(model, batch)``; by default as :class:`~roundoff.Workload`
            calls a model.

    Returns:
        One row for each linear layer and convolution that ran.

    Raises:
        QuantizationError: a rank outside its range, a path without such a layer; the
            model is then as before.

    Example:
        >>> net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
        >>> first, last = decompose_(net, [torch.zeros(1, 64)], rank={"0": 8})
        >>> first.macs, last.reason, [tuple(p.shape) for p in net[0].parameters()]
        (0.25, 'no rank was given for it', [(8, 64), (64, 8), (64,)])
    """
    _check_arguments(rank, scheme)
    workload = Workload(model, batches, forward=forward)
    work = copy.deepcopy(model)
    inputs = _inputs(work, workload)
    lost = (
        [path for path in rank if path not in inputs]
        if isinstance(rank, Mapping)
        else []
    )
    if lost:
        raise QuantizationError(
            "no linear layer or convolution that ran",
            where=lost[0],
            expected=", ".join(list(inputs)[:8]),
        )
    rows = []
    for path, example in inputs.items():
        layer: Any = work.get_submodule(path)
        row, new = _decompose(path, layer, example, rank, scheme)
        rows.append(row)
        if new is not None:
            parent, _, name = path.rpartition(".")
            if not path:
                raise QuantizationError(
                    "the model is a single layer: nothing can hold its two factors",
                    where=type(model).__name__,
                    do="put it into an nn.Sequential",
                )
            setattr(work.get_submodule(parent), name, new.train(layer.training))
    take_over_(model, work)
    return rows


def _check_arguments(rank: float | str | Mapping[str, int], scheme: str) -> None:
    if isinstance(rank, (int, float)) and not 0.0 < rank <= 1.0:
        raise QuantizationError(
            "not a share of the norm",
            expected="0 < rank <= 1, evbmf, or ranks by layer",
            got=repr(rank),
        )
    if scheme not in ("spatial", "channel"):
        raise QuantizationError(
            "unknown scheme", expected="spatial or channel", got=repr(scheme)
        )


def _inputs(model: nn.Module, workload: Workload) -> dict[str, Tensor]:
    """The first input of each layer that ran, by path."""
    seen: dict[str, Tensor] = {}
    handles = []

    def keep(path: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        if args:
            seen.setdefault(path, args[0].detach())

    copied = Workload(model, workload.batches[:1], forward=workload.forward)
    with preserve(model), torch.no_grad():
        model.eval()
        for path, module in model.named_modules():
            if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                handles.append(
                    module.register_forward_pre_hook(functools.partial(keep, path))
                )
        copied.run(copied.batches[0])
    for handle in handles:
        handle.remove()
    return {path: seen[path] for path, _ in model.named_modules() if path in seen}


def _decompose(
    path: str,
    layer: Any,
    example: Tensor,
    rank: float | str | Mapping[str, int],
    scheme: Scheme,
) -> tuple[Decomposed, nn.Module | None]:
    kind: str = scheme
    if isinstance(layer, nn.Linear):
        kind = "linear"
    elif not isinstance(layer, nn.Conv2d):
        kind = "channel"
    reason = _reason(path, layer, kind, rank)
    if reason:
        return Decomposed(path, kind, 0, 0, math.nan, 1.0, reason), None
    matrix = as_matrix(layer.weight.detach(), kind)
    left, singular, right = torch.linalg.svd(matrix, full_matrices=False)
    r = _rank(path, singular, matrix, rank)
    squares = singular.square()
    norm = float(squares.sum())
    energy = float(squares[:r].sum() / squares.sum()) if norm > 0.0 else 1.0
    full = len(singular)
    if r < 1:
        reason = "every singular value is taken for noise"
        return Decomposed(path, kind, 0, full, energy, 1.0, reason), None
    root = singular[:r].sqrt()
    factors = _layers(layer, left[:, :r] * root, root[:, None] * right[:r], kind)
    before = model_cost(layer, (example,)).macs
    after = model_cost(factors, (example,)).macs
    row = Decomposed(path, kind, r, full, energy, after / before if before else 1.0)
    if after >= before:
        reason = f"rank {r} takes no fewer multiply-accumulates"
        return replace(row, reason=reason), None
    return row, factors


def _reason(
    path: str, layer: Any, kind: str, rank: float | str | Mapping[str, int]
) -> str:
    """Why a layer stays whole; empty if it does not."""
    if isinstance(rank, Mapping) and path not in rank:
        return "no rank was given for it"
    if kind != "linear":
        padded = layer.padding_mode != "zeros" or isinstance(layer.padding, str)
        if layer.groups > 1 or padded:
            return "it has groups, or padding other than a number of zeros"
        side = min if kind == "spatial" else max
        if side(layer.kernel_size) == 1:
            return f"a kernel of {tuple(layer.kernel_size)} has no {kind} parts"
    if not bool(torch.isfinite(layer.weight).all()):
        return "its weight holds NaN or Inf"
    return ""


def as_matrix(weight: Tensor, scheme: str) -> Tensor:
    """The matrix of a scheme, float64: rows are read by the first layer, columns made
    by the second.
    """
    w = weight.double()
    if scheme == "linear":
        return w.T
    if scheme == "channel":
        return w.transpose(0, 1).flatten(1)
    return w.permute(1, 2, 0, 3).reshape(w.shape[1] * w.shape[2], -1)  # [in·kh, out·kw]


def _rank(
    path: str, singular: Tensor, matrix: Tensor, rank: float | str | Mapping[str, int]
) -> int:
    if isinstance(rank, Mapping):
        if not 1 <= rank[path] <= len(singular):
            raise QuantizationError(
                "not a rank of this layer",
                where=path,
                expected=f"1 to {len(singular)}",
                got=repr(rank[path]),
            )
        return rank[path]
    values = singular.cpu().numpy()
    if rank == "evbmf":
        return evbmf_rank(values, *matrix.shape)
    if isinstance(rank, str):
        raise QuantizationError(
            "unknown way to choose the rank",
            expected="evbmf, a share, or ranks by layer",
            got=rank,
        )
    shares = np.cumsum(values**2)
    # the last share is 1 up to rounding, so a share of 1 is the whole rank
    asked = rank * shares[-1] * (1 - 1e-15)
    return min(int(np.searchsorted(shares, asked)) + 1, len(values))


@torch.no_grad()
def _layers(layer: Any, left: Tensor, right: Tensor, scheme: str) -> nn.Sequential:
    r = left.shape[1]
    has_bias = layer.bias is not None
    place = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    first: Any
    second: Any
    if scheme == "linear":
        first = nn.Linear(layer.in_features, r, bias=False, **place)
        second = nn.Linear(r, layer.out_features, bias=has_bias, **place)
        first.weight.copy_(left.T)
        second.weight.copy_(right.T)
    else:
        inputs = layer.in_channels
        outputs = layer.out_channels
        kernel = layer.kernel_size
        if scheme == "spatial":
            ways = [
                (v[0], v[1])
                for v in (kernel, layer.stride, layer.padding, layer.dilation)
            ]
            (k, s, p, d) = ways
            first = nn.Conv2d(
                inputs,
                r,
                (k[0], 1),
                (s[0], 1),
                (p[0], 0),
                (d[0], 1),
                bias=False,
                **place,
            )
            second = nn.Conv2d(
                r,
                outputs,
                (1, k[1]),
                (1, s[1]),
                (0, p[1]),
                (1, d[1]),
                bias=has_bias,
                **place,
            )
            first.weight.copy_(
                left.view(inputs, k[0], r).permute(2, 0, 1).unsqueeze(-1)
            )
            second.weight.copy_(
                right.view(r, outputs, k[1]).transpose(0, 1).unsqueeze(2)
            )
        else:
            kind = type(layer)
            first = kind(inputs, r, 1, bias=False, **place)
            second = kind(
                r,
                outputs,
                kernel,
                layer.stride,
                layer.padding,
                layer.dilation,
                bias=has_bias,
                **place,
            )
            first.weight.copy_(left.T.reshape(first.weight.shape))
            second.weight.copy_(right.view(r, outputs, *kernel).transpose(0, 1))
    if has_bias:
        second.bias.copy_(layer.bias)
    return nn.Sequential(first, second)
