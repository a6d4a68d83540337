"""What rounding explains: a relative bound for the distance of two honest runs at a row.

A correctly rounded result is within the unit roundoff u of its format (Higham, Accuracy
and Stability of Numerical Algorithms, 2002, eq. 2.4); a sum of n products in any order
within about sqrt(n) u in the root mean square (ibid. section 2.8: rounding errors are
like independent ones), relative to the sum where it does not cancel. Kernels accumulate
formats below fp32 in fp32. ``MARGIN`` covers the cancellation that norms and matrix
products show in practice; a row beyond it whose tensors were kept is run again, which
measures its cancellation (``replay``).

The format is the wider of the two, unless the candidate as a whole works in a narrower
one than the reference does: an isolated narrow format is a finding, autocast is not.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.ops import facts, operators_that

MARGIN = 16.0
#: A run works in a format where this share of its matrix products and convolutions has
#: it.
SHARE = 0.2
#: A compiled region may be any number of operators deep: the roundings of 2**12 of them,
#: independent, add up to 2**6 times one, with ``MARGIN`` this many times. At most a
#: tenth: the factor 1 / 0.9 of a dropout must not pass.
REGION = 1024.0
REGION_LIMIT = 0.1
#: A backward kernel may amplify by so much: that of a norm takes two means from the
#: gradient, each no larger than it, and divides by the spread.
BACKWARD_GAIN = 4.0

#: Operators by what an error goes through.
SUMS = operators_that("sum")
DIFFERENCES = operators_that("add or subtract")
NORMALISATIONS = operators_that("normalize")
PRODUCTS = operators_that("scale elements")
DIVISIONS = operators_that("divide") | {"log", "pow"}
EXPONENTIALS = operators_that("grow with their argument")


@lru_cache
def unit(dtype: str | None) -> float:
    """Unit roundoff of a torch format by name; 0 for integers and booleans.

    It is half the distance of 1 to the next number.

    >>> unit("bfloat16") == 2**-8, unit("float32") == 2**-24, unit("int64")
    (True, True, 0.0)
    """
    return _spacing(dtype) / 2


@lru_cache
def smallest(dtype: str | None) -> float:
    """Return the smallest positive number of a format by name; 0 for integers and booleans."""
    spacing = _spacing(dtype)
    if not spacing:
        return 0.0
    return float(torch.finfo(getattr(torch, dtype or "")).tiny) * spacing


def _spacing(name: str | None) -> float:
    """Return the distance of 1 to the next number; 0 for what is no floating-point format."""
    dtype = getattr(torch, name or "", None)
    if not isinstance(dtype, torch.dtype):
        return 0.0
    if not (dtype.is_floating_point or dtype.is_complex):
        return 0.0
    if dtype is torch.float8_e5m2fnuz:
        return 0.25  # torch 2.13 says 0.125, but its fraction has two bits
    return float(torch.finfo(dtype).eps)


def working_formats(rows: Iterable[RecordedRow]) -> frozenset[str]:
    """Return the floating-point formats that a run works in.

    They are those of at least a fifth of its matrix products and convolutions; of all
    its results, where it has none of these.
    """
    results = [r for r in rows if r.is_call and unit(r.dtype) and r.view_of is None]
    contractions = [row for row in results if facts(row.operator).multiplies]
    counted = Counter(row.dtype for row in contractions or results if row.dtype)
    enough = SHARE * sum(counted.values())
    return frozenset(dtype for dtype, count in counted.items() if count >= enough)


def format_of(
    reference: RecordedRow, candidate: RecordedRow, adopted: frozenset[str]
) -> str | None:
    """Return the format by which a row is judged: the wider one, unless the other is adopted.

    ``adopted`` are the formats that the candidate works in and the reference does not.
    """
    ours = reference.dtype
    theirs = candidate.dtype
    if theirs is None or unit(theirs) <= unit(ours):
        return ours
    return theirs if theirs in adopted or not unit(ours) else ours


def tolerance(
    reference: RecordedRow,
    candidate: RecordedRow,
    adopted: frozenset[str],
    inputs: Sequence[RecordedRow] = (),
) -> float:
    """Return the largest relative distance that rounding explains, for equal inputs.

    ``inputs`` are what the candidate's call read.
    """
    u = unit(format_of(reference, candidate, adopted))
    if not u:
        return 0.0
    made_by_a_region = (
        _is_only_a_result(candidate, reference)
        or _is_only_a_result(reference, candidate)
        or "compiled" in (candidate.operator, reference.operator)
    )
    if made_by_a_region:
        return min(REGION * u, REGION_LIMIT)
    accumulated = min(u, unit("float32"))
    added = terms(candidate, inputs)
    return MARGIN * (u + accumulated * math.sqrt(added))


def _is_only_a_result(row: RecordedRow, other: RecordedRow) -> bool:
    """Return True where one run only has the result of calls that the other one has."""
    return row.is_leaf and other.is_call


def terms(row: RecordedRow, inputs: Sequence[RecordedRow]) -> float:
    """Return how many products or elements are added for one element of a result, at most.

    1 where none are.
    """
    operator = row.base_operator
    shapes = [i.shape or () for i in inputs]
    if facts(operator).multiplies:
        return max((_products(shape) for shape in shapes), default=1.0)
    if operator in SUMS:
        size = max((math.prod(shape) for shape in shapes), default=1)
        return max(1.0, size / max(1, math.prod(row.shape or ())))
    return 1.0


def _products(shape: Sequence[int]) -> float:
    """Return the number of products in one element of a matrix product, at most."""
    if not shape:
        return 1.0
    if len(shape) == 1:
        return float(shape[0])
    return float(max(math.prod(shape[1:]), shape[0]))


class _Operand:
    """A floating-point input whose statistics are known."""

    __slots__ = ("largest", "rms", "row", "smallest")

    def __init__(self, row: RecordedRow, rms: float) -> None:
        low = row.min or 0.0
        high = row.max or 0.0
        self.row = row
        self.rms = rms
        self.largest = float(max(abs(low), abs(high)))
        #: The smallest magnitude; 0 where both signs occur.
        self.smallest = min(abs(low), abs(high)) if low * high > 0 else 0.0


def _operands(inputs: Sequence[RecordedRow]) -> list[_Operand]:
    operands = []
    for row in inputs:
        rms = _rms(row)
        if rms is not None and unit(row.dtype):
            operands.append(_Operand(row, rms))
    return operands


def condition(row: RecordedRow, inputs: Sequence[RecordedRow]) -> float:
    """Return how many times larger than the inputs' a relative error of the result may be.

    From statistics; 1 or more, 1 where nothing is known.

    - Sums and products of matrices: the size that the result would have if its terms
      were independent (the root of their number, times their size) over the size it
      has. So the gradient of a bias in front of a normalisation, which is zero but for
      rounding, is no fault.
    - Normalisations: the size of the input over its spread.
    - Exponentials: the largest magnitude of the input, whose absolute error is their
      relative one.
    """
    size = _rms(row)
    operands = _operands(inputs)
    if not operands or size is None:
        return 1.0
    operator = row.base_operator
    if operator in EXPONENTIALS:
        return max(1.0, *(operand.largest for operand in operands))
    if operator in NORMALISATIONS and row.place != 1:
        spread = operands[0].row.std
        return max(1.0, operands[0].rms / spread) if spread else math.inf
    independent = _size_of_independent_terms(row, operands)
    if independent is None:
        return 1.0
    return max(1.0, independent / size) if size else math.inf


def _size_of_independent_terms(
    row: RecordedRow, operands: Sequence[_Operand]
) -> float | None:
    """Return the size of a sum whose terms are independent; None for other operators."""
    operator = row.base_operator
    root = math.sqrt(terms(row, [operand.row for operand in operands]))
    sizes = sorted((operand.rms for operand in operands), reverse=True)
    if facts(operator).multiplies:
        # of a convolution's backward pass: the sum of the gradient
        if row.place == 2:
            return operands[0].rms * root
        second = sizes[1] if len(sizes) > 1 else 1.0
        return sizes[0] * root * second
    if operator == "mean":
        return sizes[0] / root
    if operator in SUMS or operator in DIFFERENCES:
        return sizes[0] * root
    return None


def amplification(row: RecordedRow, inputs: Sequence[RecordedRow]) -> float:
    """Return how many times larger than the inputs' a relative error may be, at the worst.

    From norms, whatever the errors are; 1 or more. A sum has at most the number of its
    terms times their size, a product of elements the largest of one factor times the
    size of the other; a quotient the size of the denominator (the last input) over its
    smallest magnitude.
    """
    size = _rms(row)
    operands = _operands(inputs)
    if not operands or size is None:
        return 1.0
    operator = row.base_operator
    if operator in DIVISIONS:
        divisor = operands[-1]
        smallest = divisor.smallest
        return max(1.0, divisor.rms / smallest) if smallest else math.inf
    largest = _largest_size(row, operator, operands)
    if largest is None:
        return BACKWARD_GAIN if operator.endswith("backward") else 1.0
    return max(1.0, largest / size) if size else math.inf


def _largest_size(
    row: RecordedRow, operator: str, operands: Sequence[_Operand]
) -> float | None:
    """Return the largest size of a sum or product by norms; None for other operators."""
    first = operands[0]
    if operator in PRODUCTS and len(operands) > 1:
        second = operands[1]
        return max(first.largest * second.rms, second.largest * first.rms)
    statistic_of_norm = row.place == 1 and operator in NORMALISATIONS
    if operator in ("mean", "nll_loss_forward") or statistic_of_norm:
        return first.rms
    if operator in SUMS:
        return first.rms * terms(row, [operand.row for operand in operands])
    return None


def _rms(row: RecordedRow) -> float | None:
    """Return the root mean square of a value; None where nothing is known."""
    if row.l2 is None or not row.numel:
        return None
    return row.l2 / math.sqrt(row.numel)
