"""Values that a run has saved in a step, and read again from outside in it."""

from __future__ import annotations

from roundoff.compare.records.recorded_rows import Content, RecordedRow, Rows
from roundoff.ops import operators_that

#: Hand values on as they are.
_MOVES = operators_that("change no value")
#: Give a tensor the memory of a file.
_FROM_STORAGE = frozenset(("set",))
#: What single numbers often are.
_USUAL = (None, 0.0, 1.0, -1.0)


class SavedValues:
    """What stands in a step of a run before it is read from outside, by what it holds."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._first: dict[Content, int] = {}
        for row in rows.values():
            self._first.setdefault(row.content, row.record)

    def saved(self, row: RecordedRow) -> int | None:
        """Return the first record with the values of one that comes from outside, or is a
        copy of such a one.

        None for all others, and for constants, which may stand anywhere.
        """
        source = row
        while source.is_call and source.base_operator in _MOVES:
            read = source.values_read()
            if len(read) != 1 or read[0] not in self._rows:
                break
            source = self._rows[read[0]]
        is_from_outside = source.is_leaf or source.base_operator in _FROM_STORAGE
        is_telling = row.min != row.max or row.min not in _USUAL
        first = self._first.get(source.content, source.record)
        return (
            first if is_from_outside and is_telling and first < source.record else None
        )
