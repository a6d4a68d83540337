"""Values that a call might read instead of one that it reads, and masks that it might read with
it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.repairs.edits.edited_calls import label_of
from roundoff.compare.repairs.trials import period_of
from roundoff.compare.values.traced_calls import TracedCall, TracedProgram
from roundoff.compare.values.value_flow import Flow

#: Values nearest to what a call reads, or to the call, that it might read instead.
SIMILAR = 10
#: Of what one helper makes for several lines, so many more.
OF_HELPERS = 4
#: Masks that are tried on what a call adds up.
MOST_MASKS = 8


class SimilarValues:
    """Values that a call might read in place of another: of the same shape and format.

    A choice is made for one call and holds for its family: the value that the same place
    of the same line made last before each of them, or a parameter of the same name in
    another layer.
    """

    def __init__(self, program: TracedProgram) -> None:
        self._rows = program.flow.step.rows
        self.labels: dict[int, object] = {}
        self._by_label: dict[object, list[RecordedRow]] = defaultdict(list)
        by_line: dict[object, list[TracedCall]] = defaultdict(list)
        for call in program.calls.values():
            by_line[call.first.line].append(call)
        for line, calls in by_line.items():
            period = period_of([call.first.operator for call in calls])
            for number, call in enumerate(calls):
                for row in call.rows:
                    self._label(row, (line, number % period, row.place))
        for row in self._rows.values():
            if not row.is_call and row.name:
                self._label(row, label_of(row))
        self._alike: dict[object, list[RecordedRow]] = defaultdict(list)
        for row in self._rows.values():
            if row.record in self.labels:
                self._alike[_form(row)].append(row)

    def _label(self, row: RecordedRow, label: object) -> None:
        self.labels[row.record] = label
        self._by_label[label].append(row)

    def to(
        self, call: TracedCall, record: int
    ) -> Iterator[Callable[[TracedCall], int | None]]:
        """Yield choices of another value for what a call reads, the nearest first."""
        read = self._rows.get(record)
        if read is None or record not in self.labels:
            return
        rows = [row for row in self._alike[_form(read)] if _fits(row, read, call)]
        ends = (record, call.first.record)
        rows.sort(key=lambda row: min(abs(row.record - end) for end in ends))
        labels = dict.fromkeys(self.labels[row.record] for row in rows)
        for label in list(labels)[:SIMILAR]:
            yield self.chooser(label)
        yield from islice(map(self._calls_alike, self._of_helpers(rows)), OF_HELPERS)

    def _of_helpers(self, rows: Sequence[RecordedRow]) -> Iterator[RecordedRow]:
        """Yield one row of each caller of a line that several lines call: a helper makes all
        these values, and the last is mostly another one."""
        seen: set[object] = set()
        for row in rows:
            alike = self._by_label[self.labels[row.record]]
            caller = (self.labels[row.record], row.callers)
            if caller not in seen and any(o.callers != row.callers for o in alike):
                seen.add(caller)
                yield row

    def _calls_alike(self, row: RecordedRow) -> Callable[[TracedCall], int | None]:
        alike = self._by_label[self.labels[row.record]]
        return _last_before([other for other in alike if other.callers == row.callers])

    def chooser(self, label: object) -> Callable[[TracedCall], int | None]:
        rows = self._by_label[label]
        return _last_before(rows) if rows[0].is_call else _nearest_to(rows)


def _last_before(rows: Sequence[RecordedRow]) -> Callable[[TracedCall], int | None]:
    def choose(call: TracedCall) -> int | None:
        before = [row.record for row in rows if row.record < call.first.record]
        return before[-1] if before else None

    return choose


def _nearest_to(rows: Sequence[RecordedRow]) -> Callable[[TracedCall], int | None]:
    def choose(call: TracedCall) -> int | None:
        return min(rows, key=lambda row: abs(row.record - call.first.record)).record

    return choose


class Masks:
    """Truth values, or zeros and ones, that a call may multiply what it reads with."""

    def __init__(
        self,
        similar: SimilarValues,
        flow: Flow,
        mask_format: Callable[[int], str | None],
    ) -> None:
        self._similar = similar
        self._flow = flow
        self._format = mask_format
        self._made: list[RecordedRow] | None = None

    def of(
        self, call: TracedCall, record: int
    ) -> Iterator[Callable[[TracedCall], int | None]]:
        """Yield choices of a mask for what a call reads, the nearest first, each once."""
        read = self._flow.step.rows.get(record)
        shape = () if read is None else tuple(read.shape or ())
        seen: set[bytes] = set()
        for row in reversed(self._all_made()):
            if row.record >= call.first.record or not _spreads_over(row, shape):
                continue
            tensor = self._flow.tensor(row.record)
            content = b"" if tensor is None else tensor.bool().numpy().tobytes()
            if content not in seen and len(seen) < MOST_MASKS:
                seen.add(content)
                yield self._similar.chooser(self._similar.labels[row.record])

    def _all_made(self) -> list[RecordedRow]:
        if self._made is None:
            labelled = self._similar.labels
            rows = [r for r in self._flow.step.rows.values() if r.record in labelled]
            self._made = [row for row in rows if self._format(row.record) is not None]
        return self._made


def _spreads_over(mask: RecordedRow, shape: tuple[int, ...]) -> bool:
    """Return True for a mask of a shape, or of one that is spread over it."""
    sizes = tuple(mask.shape or ())
    if not sizes or len(sizes) != len(shape):
        return False
    return all(a in (1, b) for a, b in zip(sizes, shape, strict=True))


def _form(row: RecordedRow) -> object:
    return tuple(row.shape or ()), row.dtype


def _fits(row: RecordedRow, read: RecordedRow, call: TracedCall) -> bool:
    """Return True for another value than the one read, which is there before the call."""
    return row is not read and (not row.is_call or row.record < call.first.record)
