"""How far a candidate tensor is from a reference: every metric of a pair, from one pass over both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from roundoff.compare.exact import Grid, Totals, add_exact, grid_of
from roundoff.compare.metric_rows import FLOATS, add_rows
from roundoff.ops import plain

_WHOLE = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)


class Metrics(NamedTuple):
    """The metrics of two tensors; r is an element of the reference, c of the candidate.

    Numbers are over the ``compared`` elements, those that are finite in both; special values are counted by sign and
    place. What is not defined is None, never NaN or a stand-in, and ``reason`` says why wherever that is not the dtype's.
    Infinity stands for ``sqnr_db`` without an error, and for what overflows fp64.
    """

    #: Of the angle between both as vectors (complex: its real part); None where one is zero. 1 - cosine is good to 2**-16 of
    #: ``rel_l2`` squared.
    cosine: float | None = None
    #: |r - c| / |r|, l2 norms. 0 where both are zero, None where only the reference is.
    rel_l2: float | None = None
    #: Signal-to-noise ratio, -20 log10(rel_l2) in dB; inf without an error.
    sqnr_db: float | None = None
    #: |r - c|: the largest, and the mean.
    max_abs: float | None = None
    mean_abs: float | None = None
    #: |r - c| / |r| over elements with r other than 0; ``rel_undefined`` counts those with r = 0 and another c.
    max_rel: float | None = None
    mean_rel: float | None = None
    rel_undefined: int | None = None
    #: Representable numbers of the coarser format from r to c: +0 and -0 are none apart. Whole where the dtypes are equal;
    #: else a value between two of them lies where it is in proportion (fp32 against bf16: from 0.5 on, the nearest bf16 is
    #: another). Coarser has fewer bits of fraction, then a larger smallest normal number; exponents have no upper end.
    #: Above 2**24 rounded to fp32. None for integers, booleans and complex numbers.
    ulp_max: float | None = None
    ulp_mean: float | None = None
    #: Share of distances above 1 ulp.
    ulp_share: float | None = None
    #: Share of all elements with the same bits (NaN of one payload too); of the same value where dtypes differ.
    equal: float | None = None
    l2_reference: float | None = None
    l2_candidate: float | None = None
    l2_error: float | None = None
    numel: int | None = None
    compared: int | None = None
    #: NaN at the same place; only in the reference (the candidate has a number or infinity there); only in the candidate.
    nan_both: int | None = None
    nan_reference: int | None = None
    nan_candidate: int | None = None
    #: The same infinity at the same place; in one without that of the other (+Inf against -Inf counts in both).
    inf_both: int | None = None
    inf_reference: int | None = None
    inf_candidate: int | None = None
    #: The first element where special values disagree, else that with the largest |r - c| (of equal ones the first, except
    #: without any error). Complex values by their modulus, integers beyond 2**53 rounded; None stands for NaN, whose
    #: places the counts tell.
    worst_index: list[int] | None = None
    worst_reference: float | None = None
    worst_candidate: float | None = None
    reason: str | None = None


def measure(reference: Tensor, candidate: Tensor) -> Metrics:
    """Every metric of two tensors of one shape, any dtypes, devices and strides; neither is changed, nor broadcast.

    fp32, 16-bit and 8-bit formats are subtracted in fp32, rows of 1,024 or 4,096 elements summed in it and the rows in
    fp64; rows with special values or whose squares leave fp32's range, and all other dtypes, in fp64. Integers and booleans
    subtract exactly. Complex numbers by the modulus of the difference. An empty tensor, other shapes, and tensors whose
    elements cannot be read (meta, sparse, quantized, nested) have a ``reason`` and no metrics. Never raises for a pair of
    tensors.

    >>> import torch
    >>> m = measure(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    >>> m.rel_l2, m.max_abs, m.worst_index, m.equal
    (0.1, 0.5, [1], 0.5)
    >>> measure(torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf]))[20:]
    (0, 1, 1, [1], inf, -inf, None)
    >>> measure(torch.ones(2), torch.ones(2, 1)).reason
    'shape (2,) against (2, 1)'
    """
    if reference.shape != candidate.shape:
        return Metrics(
            reason=f"shape {tuple(reference.shape)} against {tuple(candidate.shape)}"
        )
    r, why = readable(reference)
    c, why_not = readable(candidate)
    if r is None or c is None:
        return Metrics(
            reason=f"reference: {why}" if r is None else f"candidate: {why_not}"
        )
    if r.shape != c.shape:  # shards of one tensor
        return Metrics(
            reason=f"shape {tuple(r.shape)} against {tuple(c.shape)} in this process"
        )
    if not r.numel():
        return Metrics(reason="empty", numel=0, compared=0)
    shape, x, y = r.shape, r.reshape(-1), c.reshape(-1)
    totals = Totals()
    grid = grid_of(x.dtype, y.dtype)
    if grid is None or not add_rows(totals, x, y, grid):
        add_exact(totals, x, y, 0, grid)
    return _metrics(totals, x, y, shape, grid)


def readable(tensor: Tensor) -> tuple[Tensor | None, str | None]:
    """The elements as a strided tensor in main memory, or the reason why there is none."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        kind = (
            "quantized"
            if tensor.is_quantized
            else "nested"
            if tensor.is_nested
            else "sparse"
        )
        return None, f"a {kind} tensor is not compared"
    values, reason = plain(tensor)
    if values is None:
        return None, reason
    values = values.detach().resolve_conj().resolve_neg()
    if values.device.type != "cpu":
        values = values.cpu()
    dtype = values.dtype
    if (
        dtype.itemsize == 1
        and dtype.is_floating_point
        and dtype not in FLOATS
        or dtype.itemsize > 16
    ):
        try:
            values.flatten()[:1].to(torch.float32)
        except (RuntimeError, NotImplementedError, IndexError):
            return (
                None,
                f"{str(dtype).removeprefix('torch.')} has no numbers that torch can read",
            )
    elif not (dtype.is_floating_point or dtype.is_complex or dtype in _WHOLE):
        return (
            None,
            f"{str(dtype).removeprefix('torch.')} has no numbers that torch can read",
        )
    return values, None


def _metrics(
    totals: Totals, x: Tensor, y: Tensor, shape: Sequence[int], grid: Grid | None
) -> Metrics:
    t, n, compared = totals, len(x), totals.compared
    nan_both, nan_r, nan_c, inf_both, inf_r, inf_c = t.specials
    place = t.place if t.broken is None else t.broken
    index = worst_r = worst_c = None
    if place is not None:
        index = (
            [int(i) for i in np.unravel_index(place, tuple(shape))]
            if len(shape)
            else []
        )
        worst_r, worst_c = number(x[place]), number(y[place])
    if not compared:
        return Metrics(
            equal=t.same / n,
            numel=n,
            compared=0,
            nan_both=nan_both,
            nan_reference=nan_r,
            nan_candidate=nan_c,
            inf_both=inf_both,
            inf_reference=inf_r,
            inf_candidate=inf_c,
            worst_index=index,
            worst_reference=worst_r,
            worst_candidate=worst_c,
            reason="no element is finite in both",
        )
    r, c, d = (math.hypot(*norms) for norms in (t.r, t.c, t.d))
    cosine = rel_l2 = sqnr = reason = None
    if r and c:
        # |d|² = (|r| - |c|)² + 2 |r| |c| (1 - cosine), where no digits cancel when both are close
        gap = t.e / (r + c) if math.isfinite(t.e) and r + c < math.inf else r - c
        off = (d / r) * (d / c) - (gap / r) * (gap / c)
        cosine = _known(min(1.0, max(-1.0, 1 - off / 2)))
    else:
        reason = (
            "both are zero"
            if r == c
            else "the candidate is zero"
            if r
            else "the reference is zero"
        )
    if r or not d:
        rel_l2 = _known(d / r) if r else 0.0
        sqnr = (
            math.inf
            if not d
            else -20 * math.log10(rel_l2)
            if rel_l2 and rel_l2 < math.inf
            else None
        )
    ulp_max, ulp_mean, ulp_share = (
        (t.max_ulp, t.ulp / compared, t.over / compared) if grid else (None, None, None)
    )
    return Metrics(
        cosine,
        rel_l2,
        sqnr,
        t.max_abs,
        t.abs / compared,
        t.max_rel if t.solid else None,
        t.rel / t.solid if t.solid else None,
        t.lone,
        ulp_max,
        ulp_mean,
        ulp_share,
        t.same / n,
        r,
        c,
        d,
        n,
        compared,
        nan_both,
        nan_r,
        nan_c,
        inf_both,
        inf_r,
        inf_c,
        index,
        worst_r,
        worst_c,
        reason,
    )


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def number(element: Tensor) -> float | None:
    """One element as a number; None for NaN."""
    return _known(float(element.abs() if element.is_complex() else element))
