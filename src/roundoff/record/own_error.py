"""How far a call's actual result is from the same call in fp64, on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from roundoff.ops import Reason, outside_of_modes, run_again
from roundoff.record.statistics import in_memory_order
from roundoff.record.statistics_kernel import COMPILED, ROW, compiled

#: What stands in a row: l2 and max of the own error, or the reason why there is none.
Own = tuple[float | None, float | None, str | None]
Compare = Callable[[Sequence[Tensor], Sequence[int], dict[int, Own]], None]


NOT_COMPARED = "has no counterpart in the other format"


class OwnError(NamedTuple):
    """``l2`` and ``max`` of |actual - reference|, and the l2 norm of the reference's finite elements.

    Where both are NaN, or the same infinity, the difference is zero; where only one is finite, or they differ
    otherwise, it is infinite. Complex values by their modulus; integers and booleans as numbers.
    """

    l2: float
    max: float
    reference: float


def shadow(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compare:
    """Run a call in fp64 before it runs itself; the function it gives takes what the call has then made.

    That one is given the tensors in the order of ``made``, their records (negative ones are left out), and the
    dictionary that it writes own errors to. An entry that is there already stays: a view of the same elements has the
    record of the tensor it is a view of.
    """
    again = run_again(func, args, kwargs)

    def compare(
        tensors: Sequence[Tensor], records: Sequence[int], own: dict[int, Own]
    ) -> None:
        if isinstance(again, Reason):
            found: list[Own] = [(None, None, again.text)] * len(records)
        else:
            found = [
                (None, None, NOT_COMPARED) if e is None else (e.l2, e.max, None)
                for e in own_error(tensors, again)
            ]
        for record, entry in zip(records, found, strict=False):
            if record >= 0:
                own.setdefault(record, entry)

    return compare


def own_error(actual: Any, again: Any) -> list[OwnError | None]:
    """The own error of each tensor of ``actual`` (tensors, lists of them), in fp64.

    ``again`` has the same tensors in the same order, as from ``run_again``; None in ``actual`` is left out. A result
    is None where the shapes differ or there is nothing to compare with, and all are when ``again`` has more tensors.

    >>> import torch
    >>> inf, nan = torch.inf, torch.nan
    >>> own_error(torch.tensor([1.5, inf, nan]), torch.tensor([1.0, inf, nan]))
    [OwnError(l2=0.5, max=0.5, reference=1.0)]
    >>> own_error(torch.tensor([3.0, inf]), torch.tensor([3.0, 1e39], dtype=torch.float64))
    [OwnError(l2=inf, max=inf, reference=1e+39)]
    """
    one, other = [t for t in _flat(actual) if t is not None], _flat(again)
    if any(t is not None for t in other[len(one) :]):
        return [None] * len(one)
    other += [None] * (len(one) - len(other))
    with outside_of_modes():
        return [_one(a, b) for a, b in zip(one, other, strict=False)]


def _one(actual: Tensor | None, reference: Tensor | None) -> OwnError | None:
    if actual is None or reference is None or actual.shape != reference.shape:
        return None
    if not actual.numel():
        return OwnError(0.0, 0.0, 0.0)
    if actual.device != reference.device:
        actual, reference = actual.cpu(), reference.cpu()
    if (found := _at_once(actual, reference)) is not None:
        return found
    try:
        x, y = _wide(actual), _wide(reference)
    except (
        RuntimeError,
        NotImplementedError,
    ):  # packed formats, and layouts without a dense form
        return None
    difference = (x - y).abs_() if not x.is_complex() else (x - y).abs()
    size = y.abs()
    largest, most = torch.stack([difference.max(), size.max()]).tolist()
    if not math.isfinite(largest + most):
        same = (x == y) | (x.isnan() & y.isnan())
        difference = difference.masked_fill_(same, 0.0).nan_to_num_(
            nan=torch.inf, posinf=torch.inf
        )
        size = size.masked_fill_(~y.isfinite(), 0.0)
        largest, most = torch.stack([difference.max(), size.max()]).tolist()
    return OwnError(_norm(difference, largest), largest, _norm(size, most))


def _at_once(actual: Tensor, reference: Tensor) -> OwnError | None:
    """In one pass over both; None where they are small, lie apart, or hold what that cannot add up."""
    if (
        actual.dtype not in COMPILED
        or reference.dtype is not torch.float64
        or actual.device.type != "cpu"
    ):
        return None
    if (
        actual.numel() < 16 * ROW
        or actual.layout is not torch.strided
        or actual.stride() != reference.stride()
    ):
        return None
    run = compiled("errors", actual.dtype)
    x, y = in_memory_order(actual), in_memory_order(reference)
    if run is None or x is None or y is None or actual.is_neg():
        return None
    whole = len(x) - len(x) % ROW
    parts = [run([x[:whole].view(-1, ROW), y[:whole].view(-1, ROW)])[0].tolist()]
    if whole < len(x):
        left, true = x[whole:].double(), y[whole:]
        off = left - true
        parts.append(
            torch.stack(
                [off.abs().amax(), off @ off, true.abs().amax(), true @ true]
            ).tolist()
        )
    largest, most = max(p[0] for p in parts), max(p[2] for p in parts)
    if not all(
        value == 0 or 1e-140 < value < 1e140 for value in (largest, most)
    ):  # also NaN
        return None
    return OwnError(
        math.sqrt(sum(p[1] for p in parts)),
        largest,
        math.sqrt(sum(p[3] for p in parts)),
    )


def _norm(values: Tensor, largest: float) -> float:
    """The l2 norm; scaled where squares would overflow or vanish in fp64."""
    if largest in (0.0, math.inf):
        return largest
    if 1e-140 < largest < 1e140:
        return float(torch.linalg.vector_norm(values))
    return float(torch.linalg.vector_norm(values / largest)) * largest


def _wide(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    if dense.is_conj() or dense.is_neg():
        dense = (
            dense.clone()
        )  # below autograd, arithmetic does not look at these bits; copying does
    if dense._is_zerotensor():
        dense = torch.zeros(dense.shape, dtype=dense.dtype, device=dense.device)
    wide: Tensor = dense.to(torch.complex128 if dense.is_complex() else torch.float64)
    return wide


def _flat(value: Any) -> list[Tensor | None]:
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in (_flat(v) if v is not None else [None])]
    return [value] if isinstance(value, Tensor) else []
