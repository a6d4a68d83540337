"""Every metric of a reference and a candidate tensor, from one pass over both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from roundoff.compare.tensors.exact import Grid, Totals, add_exact, grid_of
from roundoff.compare.tensors.metric_rows import FLOATS, add_rows
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


@dataclass(frozen=True, slots=True)
class Metrics:
    """The metrics of two tensors; r is an element of the reference, c of the candidate.

    Numbers are over the ``compared`` elements, those that are finite in both; special
    values are counted by sign and place. A metric that is not defined is None, never
    NaN or a stand-in, and ``reason`` says why unless the dtype does. Infinity stands
    for ``sqnr_db`` without an error, and for overflow of fp64.
    """

    #: Of the angle between both as vectors (complex: its real part); None where one is
    #: zero. 1 - cosine is good to 2**-16 of ``rel_l2`` squared.
    cosine: float | None = None
    #: |r - c| / |r|, l2 norms. 0 where both are zero, None where only the reference is.
    rel_l2: float | None = None
    #: Signal-to-noise ratio, -20 log10(rel_l2) in dB; inf without an error.
    sqnr_db: float | None = None
    #: The largest |r - c|.
    max_abs: float | None = None
    #: The mean |r - c|.
    mean_abs: float | None = None
    #: The largest |r - c| / |r| over elements with r other than 0.
    max_rel: float | None = None
    #: The mean of the same.
    mean_rel: float | None = None
    #: How many elements have r = 0 and another c.
    rel_undefined: int | None = None
    #: The largest number of representable numbers of the coarser format from r to c:
    #: +0 and -0 are none apart. Whole where the dtypes are equal; else a value between
    #: two of them counts as far as it lies (fp32 against bf16: from 0.5 on, the nearest
    #: bf16 is another). Coarser has fewer bits of fraction, then a larger smallest
    #: normal number; exponents have no upper end. Above 2**24 rounded to fp32. None for
    #: integers, booleans and complex numbers.
    ulp_max: float | None = None
    #: The mean of the same.
    ulp_mean: float | None = None
    #: Share of distances above 1 ulp.
    ulp_share: float | None = None
    #: Share of all elements with the same bits (NaN of one payload too); of the same
    #: value where dtypes differ.
    equal: float | None = None
    l2_reference: float | None = None
    l2_candidate: float | None = None
    l2_error: float | None = None
    numel: int | None = None
    compared: int | None = None
    #: NaN at the same place.
    nan_both: int | None = None
    #: NaN only in the reference: the candidate has a number or infinity there.
    nan_reference: int | None = None
    #: NaN only in the candidate.
    nan_candidate: int | None = None
    #: The same infinity at the same place.
    inf_both: int | None = None
    #: Infinity without that of the other; +Inf against -Inf counts in both.
    inf_reference: int | None = None
    inf_candidate: int | None = None
    #: The first element where special values disagree, else that with the largest
    #: |r - c| (of equal ones the first, except without any error).
    worst_index: list[int] | None = None
    #: Complex values by their modulus, integers beyond 2**53 rounded; None stands for
    #: NaN, whose places the counts tell.
    worst_reference: float | None = None
    worst_candidate: float | None = None
    reason: str | None = None


def measure(reference: Tensor, candidate: Tensor) -> Metrics:
    """Every metric of two tensors of one shape; neither is changed, nor broadcast.

    fp32, 16-bit and 8-bit formats are subtracted in fp32, rows of 1,024 or 4,096
    elements summed in it and the rows in fp64; rows with special values or whose
    squares leave fp32's range, and all other dtypes, in fp64. Integers and booleans
    subtract exactly. Complex numbers count by the modulus of the difference. Never
    raises for a pair of tensors.

    Args:
        reference: any dtype, device and strides.
        candidate: any dtype, device and strides.

    Returns:
        The metrics; a ``reason`` and no metrics for an empty tensor, for other shapes,
        and for tensors whose elements cannot be read (meta, sparse, quantized, nested).

    >>> import torch
    >>> m = measure(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
    >>> m.rel_l2, m.max_abs, m.worst_index, m.equal
    (0.1, 0.5, [1], 0.5)
    >>> m = measure(torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf]))
    >>> m.inf_both, m.inf_reference, m.inf_candidate, m.worst_index
    (0, 1, 1, [1])
    >>> measure(torch.ones(2), torch.ones(2, 1)).reason
    'shape (2,) against (2, 1)'
    """
    r, c, reason = comparable_pair(reference, candidate)
    if r is None or c is None:
        return Metrics(reason=reason)
    if not r.numel():
        return Metrics(reason="empty", numel=0, compared=0)
    x = r.reshape(-1)
    y = c.reshape(-1)
    totals = Totals()
    grid = grid_of(x.dtype, y.dtype)
    if grid is None or not add_rows(totals, x, y, grid):
        add_exact(totals, x, y, 0, grid)
    return _metrics(totals, x, y, r.shape, grid)


def comparable_pair(
    reference: Tensor, candidate: Tensor
) -> tuple[Tensor | None, Tensor | None, str | None]:
    """Both tensors as strided ones in main memory, or None twice and the reason."""
    if reference.shape != candidate.shape:
        shapes = f"{tuple(reference.shape)} against {tuple(candidate.shape)}"
        return None, None, f"shape {shapes}"
    r, reason = readable(reference)
    if r is None:
        return None, None, f"reference: {reason}"
    c, reason = readable(candidate)
    if c is None:
        return None, None, f"candidate: {reason}"
    if r.shape != c.shape:  # shards of one tensor
        shapes = f"{tuple(r.shape)} against {tuple(c.shape)}"
        return None, None, f"shape {shapes} in this process"
    return r, c, None


def readable(tensor: Tensor) -> tuple[Tensor | None, str | None]:
    """Return the elements as a strided tensor in main memory, or the reason for none."""
    layout = _unreadable_layout(tensor)
    if layout is not None:
        return None, f"a {layout} tensor is not compared"
    values, reason = plain(tensor)
    if values is None:
        return None, reason
    values = values.detach().resolve_conj().resolve_neg()
    if values.device.type != "cpu":
        values = values.cpu()
    if not _has_numbers(values):
        dtype = str(values.dtype).removeprefix("torch.")
        return None, f"{dtype} has no numbers that torch can read"
    return values, None


def _unreadable_layout(tensor: Tensor) -> str | None:
    if tensor.is_quantized:
        return "quantized"
    if tensor.is_nested:
        return "nested"
    return None if tensor.layout is torch.strided else "sparse"


def _has_numbers(values: Tensor) -> bool:
    """Return True where torch can turn the elements into numbers."""
    dtype = values.dtype
    unusual_float = dtype.itemsize == 1 and dtype not in FLOATS
    if dtype.is_floating_point and unusual_float or dtype.itemsize > 16:
        try:
            values.flatten()[:1].to(torch.float32)
        except (RuntimeError, NotImplementedError, IndexError):
            return False
        return True
    return dtype.is_floating_point or dtype.is_complex or dtype in _WHOLE


def _metrics(
    totals: Totals, x: Tensor, y: Tensor, shape: Sequence[int], grid: Grid | None
) -> Metrics:
    """Return the metrics of flat tensors from their totals."""
    counts = _counts(totals, x, y, shape)
    compared = totals.compared
    if not compared:
        return Metrics(**counts, reason="no element is finite in both")
    r = math.hypot(*totals.r)
    c = math.hypot(*totals.c)
    d = math.hypot(*totals.d)
    rel_l2 = _rel_l2(r, d)
    return Metrics(
        **counts,
        cosine=_cosine(r, c, d, totals.e) if r and c else None,
        rel_l2=rel_l2,
        sqnr_db=_sqnr_db(d, rel_l2) if r or not d else None,
        max_abs=totals.max_abs,
        mean_abs=totals.abs / compared,
        max_rel=totals.max_rel if totals.solid else None,
        mean_rel=totals.rel / totals.solid if totals.solid else None,
        rel_undefined=totals.lone,
        ulp_max=totals.max_ulp if grid else None,
        ulp_mean=totals.ulp / compared if grid else None,
        ulp_share=totals.over / compared if grid else None,
        l2_reference=r,
        l2_candidate=c,
        l2_error=d,
        reason=_why_no_cosine(r, c),
    )


def _counts(
    totals: Totals, x: Tensor, y: Tensor, shape: Sequence[int]
) -> dict[str, Any]:
    """Return the metrics that do not need an element that is finite in both."""
    place = totals.place if totals.broken is None else totals.broken
    specials = totals.specials
    return {
        "equal": totals.same / len(x),
        "numel": len(x),
        "compared": totals.compared,
        "nan_both": specials.nan_both,
        "nan_reference": specials.nan_reference,
        "nan_candidate": specials.nan_candidate,
        "inf_both": specials.inf_both,
        "inf_reference": specials.inf_reference,
        "inf_candidate": specials.inf_candidate,
        "worst_index": None if place is None else _index(place, shape),
        "worst_reference": None if place is None else number(x[place]),
        "worst_candidate": None if place is None else number(y[place]),
    }


def _index(place: int, shape: Sequence[int]) -> list[int]:
    if not len(shape):
        return []
    return [int(i) for i in np.unravel_index(place, tuple(shape))]


def _rel_l2(r: float, d: float) -> float | None:
    """Return |r - c| / |r| of norms; 0 where both are zero, None where only r is."""
    if r:
        return _defined(d / r)
    return None if d else 0.0


def _cosine(r: float, c: float, d: float, e: float) -> float | None:
    """Return the cosine from the norms of r, c and r - c, and e = |r|² - |c|².

    |d|² = (|r| - |c|)² + 2 |r| |c| (1 - cosine): no digits cancel where both are close.
    """
    precise = math.isfinite(e) and r + c < math.inf
    gap = e / (r + c) if precise else r - c
    off = (d / r) * (d / c) - (gap / r) * (gap / c)
    return _defined(min(1.0, max(-1.0, 1 - off / 2)))


def _why_no_cosine(r: float, c: float) -> str | None:
    if r and c:
        return None
    if r == c:
        return "both are zero"
    return "the candidate is zero" if r else "the reference is zero"


def _sqnr_db(d: float, rel_l2: float | None) -> float | None:
    if not d:
        return math.inf
    if not rel_l2 or rel_l2 == math.inf:
        return None
    return -20 * math.log10(rel_l2)


def _defined(value: float) -> float | None:
    return None if math.isnan(value) else value


def number(element: Tensor) -> float | None:
    """Return one element as a number; None for NaN."""
    modulus = element.abs() if element.is_complex() else element
    return _defined(float(modulus))
