"""Whether data are the reference's in other portions, or padded, by their statistics.

The sum, the sum of squares, the smallest and the largest value of a whole follow from
those of its parts; a padding adds a number of equal values to each of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, product

from roundoff.compare.records.recorded_rows import RecordedRow, Rows

#: Sums of the same values, added up in other portions, differ by this share at most.
PORTIONED = 1e-6
#: Most calls of one round of a loop that portions are looked for in.
_CALLS_OF_A_ROUND = 16
#: Values of each run that the data are looked for in.
_FIRST = 8
#: Most portions of one batch.
_PORTIONS = 256


@dataclass(frozen=True, slots=True)
class Moments:
    """What adds up over the portions of values.

    Attributes:
        numel: how many values.
        total: their sum.
        squares: the sum of their squares.
        low: the smallest; NaN where not all values are finite.
        high: the largest.
    """

    numel: int
    total: float
    squares: float
    low: float
    high: float

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.numel + other.numel,
            self.total + other.total,
            self.squares + other.squares,
            min(self.low, other.low),
            max(self.high, other.high),
        )


def moments_of(row: RecordedRow) -> Moments | None:
    """Return the moments of a row; None without statistics, values, or with NaN or Inf.

    >>> moments_of(RecordedRow(0, 0, "input")) is None
    True
    """
    if not row.numel or row.nonfinite:
        return None
    if row.min is None or row.max is None or row.mean is None or row.l2 is None:
        return None
    return Moments(row.numel, row.mean * row.numel, row.l2**2, row.min, row.max)


class DataPortions:
    """What two runs make of their data outside of modules, without parameters."""

    def __init__(self, reference: Rows, candidate: Rows) -> None:
        self._reference = _outside_of_modules(reference)
        self._candidate = _outside_of_modules(candidate)
        ours = _first_fed(reference, self._reference)
        theirs = _first_fed(candidate, self._candidate)
        come_in = _from_outside(self._reference, ours)
        other_come_in = _from_outside(self._candidate, theirs)
        self._are_from_outside = bool(come_in and other_come_in)
        if self._are_from_outside:
            ours, theirs = come_in, other_come_in
        self._first_of_reference = ours
        self._first_of_candidate = theirs

    def are_same(self, twin: RecordedRow, row: RecordedRow) -> bool:
        """Return True where both read the same values in other portions or paddings.

        Args:
            twin: what the reference reads.
            row: what the candidate reads in its place, of another shape.
        """
        if twin.dtype != row.dtype:
            return False
        ours = list(_pools(self._reference, twin))
        theirs = list(_pools(self._candidate, row))
        return any(
            is_whole(pool, other) or is_padded(pool, other) or is_padded(other, pool)
            for pool in ours
            for other in theirs
        )

    def are_comparable(self, twin: RecordedRow, row: RecordedRow) -> bool:
        """Return False where a value of other portions has another counterpart, or none.

        Other shapes say nothing. In a loop over portions the same call may make data of
        another kind: what stands at another place of the reference is no error.
        """
        if drop_ones(twin.shape) != drop_ones(row.shape):
            return False
        if row.record not in self._candidate or twin.record not in self._reference:
            return True
        moments = moments_of(row)
        if moments is None:
            return True
        others = [moments_of(each) for each in self._reference.values()]
        return not any(each and is_whole(each, moments) for each in others)

    def first_are_same(self) -> bool:
        """Return True where what the runs are fed first is the same in other portions.

        Of several values that are fed, one is enough: positions and masks are made for
        the portions.
        """
        return any(
            twin.shape != row.shape and self.are_same(twin, row)
            for twin in self._first_of_reference
            for row in self._first_of_candidate
        )

    def first_others(self) -> list[tuple[RecordedRow, RecordedRow]]:
        """Return what comes from outside and is fed first, reference and candidate, pair by pair.

        Empty where one of them is the same in portions, padding or order, and where
        nothing is known to come from outside.
        """
        if not self._are_from_outside:
            return []
        pairs = [*product(self._first_of_reference, self._first_of_candidate)]
        return [] if any(self.are_same(*pair) for pair in pairs) else pairs


def _first_fed(rows: Rows, data: Rows) -> list[RecordedRow]:
    """Return the first data that a module reads, or what parameters went into."""
    fed: dict[int, RecordedRow] = {}
    for row in rows.values():
        if row.is_call and row.record not in data and not row.name:
            fed |= {record: data[record] for record in row.inputs if record in data}
        if len(fed) >= _FIRST:
            break
    return [row for row in fed.values() if row.numel != 1]


def _from_outside(data: Rows, fed: Sequence[RecordedRow]) -> list[RecordedRow]:
    """Return those that inputs went into. Masks and positions are like those of any
    batch of these lengths."""
    come_in: set[int] = set()
    for record, row in data.items():
        if not row.is_call or come_in.intersection(row.inputs):
            come_in.add(record)
    return [row for row in fed if row.record in come_in and not _is_mask(row)]


def _is_mask(row: RecordedRow) -> bool:
    """Return True for truth values, and for numbers of which each is 0 or 1.

    Between them a number is larger than its square.
    """
    if row.dtype == "bool":
        return True
    moments = moments_of(row)
    if moments is None or moments.low < 0 or moments.high > 1:
        return False
    return math.isclose(moments.total, moments.squares, rel_tol=PORTIONED)


def drop_ones(shape: Sequence[int] | None) -> list[int]:
    """Return the shape without axes of one element.

    >>> drop_ones([1, 3, 1])
    [3]
    """
    return [size for size in shape or () if size != 1]


def _outside_of_modules(rows: Rows) -> dict[int, RecordedRow]:
    """Return the inputs, and what the forward pass makes of them outside of modules."""
    data: dict[int, RecordedRow] = {}
    for record, row in rows.items():
        if row.name or row.phase != "forward":
            continue
        is_input = not row.is_call and row.operator == "input"
        # another view of memory is of what was written there: a layer's own, or data
        is_of_data = not row.module and all(i in data for i in row.inputs)
        if is_input or (is_of_data and (row.is_call or row.operator == "alias")):
            data[record] = row
    return data


def is_whole(moments: Moments, other: Moments) -> bool:
    """Return True where both are the moments of the same values, in any order."""
    if (moments.numel, moments.low, moments.high) != (
        other.numel,
        other.low,
        other.high,
    ):
        return False
    return _near(moments.squares, other.squares, moments.squares) and _near(
        moments.total, other.total, _scale_of_sum(moments)
    )


def is_padded(values: Moments, padded: Moments) -> bool:
    """Return True where ``padded`` are these values and a number of equal ones.

    The sum says which value was added; the sum of squares, the smallest and the largest
    value must follow from it.

    >>> values = Moments(numel=2, total=5.0, squares=13.0, low=2.0, high=3.0)
    >>> is_padded(values, Moments(4, 5.0, 13.0, 0.0, 3.0))
    True
    >>> is_padded(values, Moments(4, 9.0, 29.0, 0.0, 5.0))
    False
    """
    added = padded.numel - values.numel
    if added <= 0 or values.low == values.high:
        return False
    constant = (padded.total - values.total) / added
    scale = max(abs(padded.low), abs(padded.high))
    for exact in (0.0, padded.low, padded.high):
        if _near(constant, exact, scale):
            constant = exact
    low = min(values.low, constant)
    high = max(values.high, constant)
    if not (_near(low, padded.low, scale) and _near(high, padded.high, scale)):
        return False
    squares = values.squares + added * constant**2
    return _near(squares, padded.squares, padded.squares)


def _scale_of_sum(moments: Moments) -> float:
    """Return the largest sum that values with these squares can have."""
    return math.sqrt(moments.numel * moments.squares)


def _near(value: float, other: float, scale: float) -> bool:
    return abs(value - other) <= PORTIONED * scale


def _pools(data: Rows, first: RecordedRow) -> Iterator[Moments]:
    """Yield the moments of a value, and of it and its like in the rounds of a loop.

    Each round makes as many values of a kind as the one before: every second of them,
    or every third, is the same value of the next round.
    """
    like = [
        row
        for row in data.values()
        if row.operator == first.operator
        and row.dtype == first.dtype
        and row.record >= first.record
    ]
    alone = moments_of(first)
    if alone is None:
        return
    yield alone
    for stride in range(1, min(_CALLS_OF_A_ROUND, len(like) - 1) + 1):
        yield from _pooled(like[::stride][:_PORTIONS])


def _pooled(rows: Sequence[RecordedRow]) -> Iterator[Moments]:
    """Yield the moments of the first two rows, the first three, and so on."""
    moments = []
    for row in rows:
        of_row = moments_of(row)
        if of_row is None:
            break
        moments.append(of_row)
    pooled = accumulate(moments, Moments.__add__)
    next(pooled, None)  # of one row alone
    yield from pooled
