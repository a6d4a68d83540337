"""Which values of a step are data: no parameter went into them, and no module made them."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from roundoff.compare.loop.loaded_values import GRADIENT, values_before
from roundoff.compare.loop.unnamed_updates import unnamed_state
from roundoff.compare.records.recorded_rows import RecordedRow, Rows, made_from


def data_records(rows: Rows) -> set[int]:
    """Return the records that no parameter went into, and no module made.

    Of the forward pass: inputs from outside, and what is computed from them, or drawn,
    outside of all modules. A value that becomes a parameter or buffer is none, nor is
    one that an optimizer writes or that follows one, nor what is made of earlier data once
    the model is running.
    """
    running = _Running(rows, is_fed=False)
    data = _data(rows, running)
    if running.since is None:
        data = _data(rows, _Running(rows, is_fed=True))
    return data


def _data(rows: Rows, running: _Running) -> set[int]:
    state = unnamed_state(rows)
    loaded = _loaded(rows, [*values_before(rows).values(), *state])
    named = _named(rows)
    held = {row.content for row in (*named, *state)}
    first_name = min((row.record for row in named), default=0)
    data: set[int] = set()
    for record, row in rows.items():
        running.pass_by(row, data)
        if record in loaded or row.name or row.phase != "forward":
            continue
        is_held = row.content in held and row.min != row.max
        if is_held and record > first_name:
            continue  # a deep copy of a parameter
        of_data = all(i in data for i in row.inputs)
        if of_data and running.may_be_data(row):
            data.add(record)
    return data


def _loaded(rows: Rows, kept: Sequence[RecordedRow]) -> set[int]:
    """Return these values that a program keeps, and what only they were made of.

    Samples that are counted to begin a parameter with, and read by the model later, are data.
    """
    ends = {row.record for row in kept}
    behind = made_from(rows, ends)
    read_elsewhere = {
        record
        for row in rows.values()
        if row.is_call and row.record not in behind
        for record in row.inputs
        if record in behind and record not in ends
    }
    samples: set[int] = set()
    for record in sorted(made_from(rows, read_elsewhere)):
        row = rows[record]
        is_of_samples = bool(row.inputs) and samples.issuperset(row.inputs)
        is_from_outside = not row.is_call and not row.name
        if is_from_outside or (row.is_call and is_of_samples):
            samples.add(record)
    return behind - samples


class _Running:
    """Where the model runs: from the first of its calls on that reads a parameter.

    A call that no data went into before belongs to what the model is made with, as the
    norm of a weight does, unless ``is_fed``.

    Attributes:
        since: the record of the first call; None before it.
    """

    def __init__(self, rows: Rows, *, is_fed: bool) -> None:
        self.since: int | None = None
        self._named: set[int] = set()
        self._reads_names = first_read_of_a_name(rows) is not None
        self._is_fed = is_fed

    def pass_by(self, row: RecordedRow, data: AbstractSet[int]) -> None:
        """Look at a row; ``data`` are the records before it that are data."""
        if self.since is None and row.is_call and row.module:
            self._is_fed |= not data.isdisjoint(row.inputs)
            if self._is_fed and not self._named.isdisjoint(row.inputs):
                self.since = row.record
        if row.name:
            self._named.add(row.record)

    def may_be_data(self, row: RecordedRow) -> bool:
        """Return True for a row that is data if all that it reads is."""
        if not row.is_call:
            return row.operator in ("input", "alias")
        if not self._reads_names or row.module:
            return False
        since = self.since
        return since is None or all(i > since for i in row.inputs)


def _named(rows: Rows) -> list[RecordedRow]:
    """Return each value of a parameter or buffer."""
    named = (row for row in rows.values() if row.name)
    return [row for row in named if not str(row.name).endswith(GRADIENT)]


def first_read_of_a_name(rows: Rows) -> int | None:
    """Return the first record that a parameter or buffer went into; None without any."""
    named: set[int] = set()
    for row in rows.values():
        if row.is_call and row.module and named.intersection(row.inputs):
            return row.record
        if row.name:
            named.add(row.record)
    return None
