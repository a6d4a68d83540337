"""What rounding explains: a bound for the distance of two honest runs at one row, relative, from formats and operator.

A correctly rounded result is within the unit roundoff u of its format (Higham, Accuracy and Stability of Numerical
Algorithms, 2002, eq. 2.4); a sum of n products in any order within about sqrt(n) u in the root mean square (ibid. section
2.8: rounding errors are like independent ones), relative to the sum where it does not cancel. Kernels accumulate formats
below fp32 in fp32. ``MARGIN`` covers the cancellation that norms and matrix products show in practice; a row beyond it
whose tensors were kept is run again, which measures its cancellation (``attribute.replayed``).

The format is the wider of the two, unless the candidate as a whole works in a narrower one than the reference does: an
isolated narrow format is a finding, autocast is not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from roundoff.ops import base, facts, operators_that

Row = Mapping[str, Any]

MARGIN = 16.0
#: A format is one that a run works in where this share of its matrix products and convolutions has it.
SHARE = 0.2
#: What one run has calls for and the other only a result of, a compiled region, may be any number of operators deep: this
#: many times one rounding, and at most a tenth.
REGION = 1024.0


@lru_cache
def unit(dtype: str | None) -> float:
    """Unit roundoff of a torch format by name: half the distance of 1 to the next number; 0 for integers and booleans.

    >>> unit("bfloat16") == 2**-8, unit("float32") == 2**-24, unit("int64")
    (True, True, 0.0)
    """
    found = getattr(torch, dtype or "", None)
    if not isinstance(found, torch.dtype) or not (
        found.is_floating_point or found.is_complex
    ):
        return 0.0
    return _spacing(found) / 2


@lru_cache
def smallest(dtype: str | None) -> float:
    """The smallest positive number of a format, 0 for integers."""
    found = getattr(torch, dtype or "", None)
    if not isinstance(found, torch.dtype) or not (
        found.is_floating_point or found.is_complex
    ):
        return 0.0
    return float(torch.finfo(found).tiny) * _spacing(found)


def _spacing(dtype: torch.dtype) -> float:
    """Of 1 to the next number."""
    # torch 2.13 says 0.125 of e5m2fnuz, but its fraction has two bits
    return 0.25 if dtype is torch.float8_e5m2fnuz else float(torch.finfo(dtype).eps)


def working(rows: Iterable[Row]) -> frozenset[str]:
    """The floating-point formats that a run works in: those of at least a fifth of its matrix products and convolutions
    (of all its results, where it has none)."""
    kept = [
        row
        for row in rows
        if row["call"] >= 0 and unit(row["dtype"]) and row["view_of"] is None
    ]
    counted = Counter(row["dtype"] for row in kept if facts(row["operator"]).multiplies)
    counted = counted or Counter(row["dtype"] for row in kept)
    total = sum(counted.values())
    return frozenset(
        dtype for dtype, count in counted.items() if count >= SHARE * total
    )


def format_of(twin: Row, row: Row, adopted: frozenset[str]) -> str | None:
    """The format by which a row is judged: ``adopted`` are those that the candidate works in and the reference does not."""
    ours, theirs = twin["dtype"], row["dtype"]
    if unit(theirs) <= unit(ours):
        return str(ours) if ours else None
    return str(theirs) if theirs in adopted or not unit(ours) else str(ours)


def tolerance(
    twin: Row, row: Row, adopted: frozenset[str], inputs: Sequence[Row] = ()
) -> float:
    """The largest relative distance that rounding alone explains where both calls get the same inputs."""
    dtype = format_of(twin, row, adopted)
    u = unit(dtype)
    if not u:
        return 0.0
    leaf = any(
        a["call"] < 0 <= b["call"] and not a["inputs"]
        for a, b in ((row, twin), (twin, row))
    )
    if leaf or "compiled" in (row["operator"], twin["operator"]):
        return min(REGION * u, 0.1)
    accumulated = unit("float32") if u > unit("float32") else u
    return MARGIN * (
        u + accumulated * math.sqrt(terms(row, [i["shape"] or () for i in inputs]))
    )


def terms(row: Row, shapes: Sequence[Sequence[int]]) -> float:
    """How many products or elements are added for one element of a result, at most; 1 where none are."""
    operator = base(row["operator"])
    if facts(operator).multiplies:
        return max((_terms(shape) for shape in shapes), default=1.0)
    if operator in operators_that("sum"):
        size = max((math.prod(shape) for shape in shapes), default=1)
        return max(1.0, size / max(1, math.prod(row["shape"] or ())))
    return 1.0


def condition(row: Row, inputs: Sequence[Row]) -> float:
    """How many times larger the relative error of a result may be than that of the inputs, from their statistics; 1 or
    more, 1 where it is not known.

    Of sums and products of matrices: the size that the result would have if its terms were independent (the root of their
    number, times their size) over the size it has, so the gradient of a bias in front of a normalisation, which is zero
    but for rounding, is no fault. Of normalisations: the size of the input over its spread. Of exponentials: the largest
    magnitude of the input (their relative error is the absolute one of the input).
    """
    size = _rms(row)
    known = [
        (i, rms) for i in inputs if unit(i["dtype"]) and (rms := _rms(i)) is not None
    ]
    operator = base(row["operator"])
    if not known or size is None:
        return 1.0
    if operator in operators_that("grow with their argument"):
        return max(1.0, *(float(max(abs(i["min"]), abs(i["max"]))) for i, _ in known))
    if operator in operators_that("normalize") and row["place"] != 1:
        first, rms = known[0]
        return max(1.0, float(rms / first["std"])) if first["std"] else math.inf
    count = math.sqrt(terms(row, [i["shape"] or () for i, _ in known]))
    sizes = sorted((rms for _, rms in known), reverse=True)
    if facts(operator).multiplies:
        least = sizes[0] * count * (sizes[1] if len(sizes) > 1 else 1.0)
        if (
            row["place"] == 2
        ):  # of a convolution's backward pass: the sum of the gradient
            least = known[0][1] * count
    elif operator in operators_that("sum") | operators_that("add or subtract"):
        least = sizes[0] * (count if operator != "mean" else 1 / count)
    else:
        return 1.0
    return max(1.0, least / size) if size else math.inf


def amplification(row: Row, inputs: Sequence[Row]) -> float:
    """How many times larger than its inputs' the relative error of a result may be, whatever the errors are; 1 or more.

    From norms: a sum has at most the number of its terms times their size, a product of elements the largest of one factor
    times the size of the other; a quotient the size of the denominator (the last input) over its smallest magnitude.
    """
    size = _rms(row)
    known = [
        (i, rms) for i in inputs if unit(i["dtype"]) and (rms := _rms(i)) is not None
    ]
    operator = base(row["operator"])
    if not known or size is None:
        return 1.0
    largest = [max(abs(i["min"]), abs(i["max"])) for i, _ in known]
    if operator in operators_that("divide") or operator in ("log", "pow"):
        last, rms = known[-1]
        low = (
            min(abs(last["min"]), abs(last["max"]))
            if last["min"] * last["max"] > 0
            else 0.0
        )
        return max(1.0, rms / low) if low else math.inf
    if operator in operators_that("scale elements") and len(known) > 1:
        bound = max(largest[0] * known[1][1], largest[1] * known[0][1])
    elif (
        operator in ("mean", "nll_loss_forward")
        or row["place"] == 1
        and operator in operators_that("normalize")
    ):
        bound = known[0][1]
    elif operator in operators_that("sum"):
        bound = known[0][1] * terms(row, [i["shape"] or () for i, _ in known])
    else:
        return 4.0 if operator.endswith("backward") else 1.0  # differences of products
    return max(1.0, bound / size) if size else math.inf


def _rms(row: Row) -> float | None:
    return (
        None
        if row["l2"] is None or not row["numel"]
        else float(row["l2"] / math.sqrt(row["numel"]))
    )


def _terms(shape: Iterable[int]) -> float:
    """The number of products in one element of a matrix product or convolution, at most."""
    dims = list(shape)
    return (
        float(max(math.prod(dims[1:]), dims[0]))
        if len(dims) > 1
        else float(dims[0] if dims else 1)
    )
