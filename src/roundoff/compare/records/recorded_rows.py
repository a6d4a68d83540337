"""The rows of one recorded step, as a comparison reads them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import polars as pl

from roundoff.ops import base, operators_that, values_read
from roundoff.record import PARTLY_WRITTEN, Run, site_name

#: Views, casts and copies: of what they read they change no value.
_CHANGE_NOTHING = operators_that("change no value")
#: What the name of an operator on lists begins with.
_ON_LISTS = "_foreach_"

#: The shape, format, hash and statistics of a value.
Content = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """One recorded value: the columns of ``TensorRecord`` that a comparison reads.

    And its ``site``. None stands for what the recording does not say. A ``call`` below 0
    marks a value that was there before anything ran: a parameter, a buffer, an input.
    """

    record: int
    call: int
    operator: str
    rank: int = 0
    step: int = 0
    phase: str = "forward"
    module: str = ""
    index: int = 0
    place: int | None = 0
    role: str | None = None
    overload: str | None = None
    name: str | None = None
    line: str | None = None
    callers: str | None = None
    inputs: Sequence[int] = ()
    arguments: str | None = None
    view_of: int | None = None
    inplace: bool | None = None
    recomputed: bool | None = None
    dtype: str | None = None
    shape: Sequence[int] | None = None
    stride: Sequence[int] | None = None
    offset: int | None = None
    memory: int | None = None
    memory_layout: Sequence[int] | None = None
    numel: int | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    l2: float | None = None
    std: float | None = None
    nan: int | None = None
    posinf: int | None = None
    neginf: int | None = None
    zero: int | None = None
    subnormal: int | None = None
    hash: str | None = None
    blob: str | None = None
    reason: str | None = None
    site: str = ""

    @property
    def content(self) -> Content:
        """What tells a value from others, whatever holds it."""
        shape = tuple(self.shape or ())
        return shape, self.dtype, self.hash, self.min, self.max, self.l2

    @property
    def content_in_steps(self) -> Content:
        """What tells a value from others in other steps too: where a call has made it, and
        where it was there before, which alone has a hash."""
        return tuple(self.shape or ()), self.dtype, self.min, self.max, self.l2

    @property
    def is_call(self) -> bool:
        """True for the result of a call, False for a value from before the step."""
        return self.call >= 0

    @property
    def is_leaf(self) -> bool:
        """True for a value from before the step that nothing recorded led to."""
        return self.call < 0 and not self.inputs

    @property
    def base_operator(self) -> str:
        """The operator without what says that it works in place, or on lists."""
        return base(self.operator)

    @property
    def is_on_lists(self) -> bool:
        """True for an element of what a call on lists of tensors returns."""
        return self.operator.startswith(_ON_LISTS)

    @property
    def element_operator(self) -> str:
        """The operator that computes each element of a call on lists; else the operator."""
        return self.operator.removeprefix(_ON_LISTS)

    @property
    def nonfinite(self) -> int:
        """How many elements are NaN or Inf; 0 where nobody counted."""
        return (self.nan or 0) + (self.posinf or 0) + (self.neginf or 0)

    def values_read(self) -> list[int]:
        """Return the records whose values the row depends on: not memory that it overwrites."""
        if not self.is_call:
            return list(self.inputs)
        return values_read(self.operator, self.overload, self.inputs)


Rows = Mapping[int, RecordedRow]


def was_there_before(rows: Rows, row: RecordedRow) -> bool:
    """Return True for a value from before the step, and for another view of its memory.

    What a batch is cut into shares memory that nothing in the step has written. A call's
    own view of it is made in the step.
    """
    if row.is_call:
        return False
    while row.inputs:
        source = rows.get(row.inputs[0])
        if source is None:
            break
        is_written = source.inplace or source.base_operator not in _CHANGE_NOTHING
        if source.is_call and is_written:
            return False
        row = source
    return True


_COLUMNS = tuple(field.name for field in fields(RecordedRow))


def rows_of(run: Run, rank: int, step: int) -> dict[int, RecordedRow]:
    """Return the rows of one step by record, in the order of execution."""
    no_inputs = pl.lit([], pl.List(pl.Int64))
    query = (
        run.part(rank, step)
        .with_columns(site_name(), pl.col("inputs").fill_null(no_inputs))
        .sort("record")
        .select(_COLUMNS)
    )
    table = run.collected(query)
    rows = {values[0]: RecordedRow(*values) for values in table.iter_rows()}
    for record in _shown_to_be_overwritten(rows):
        rows[record] = replace(rows[record], reason=PARTLY_WRITTEN)
    for record, source in _sources_in_place(rows).items():
        rows[record] = replace(rows[record], inputs=[source])
    return rows


def _sources_in_place(rows: Rows) -> dict[int, int]:
    """Return for aliases of other elements than were written last in their memory the value
    that these elements have had since.

    Of gates that share memory each is written where it stands.
    """
    sources: dict[int, int] = {}
    last: dict[object, int] = {}
    for row in rows.values():
        held = row.memory, row.content_in_steps
        if row.operator == "alias" and len(row.inputs) == 1 and held in last:
            written = rows.get(row.inputs[0])
            if written is not None and written.content_in_steps != row.content_in_steps:
                sources[row.record] = last[held]
        if row.memory is not None and row.l2 is not None:
            last[held] = row.record
    return sources


def _shown_to_be_overwritten(rows: Rows) -> list[int]:
    """Return the tensors over bare memory that are made to write it, and read by nobody.

    So a storage is copied: what stood in the new one before is nobody's value.
    """
    unread = {row.record for row in rows.values() if row.base_operator == "set"}
    if not unread:
        return []
    written: set[int] = set()
    for row in rows.values():
        read = row.values_read()
        unread.difference_update(read)
        written |= {record for record in row.inputs if record not in read}
    return sorted(unread & written)


def first_rows(rows: Rows) -> dict[int, RecordedRow]:
    """Return the first row of each call: it holds the arguments."""
    first: dict[int, RecordedRow] = {}
    for row in rows.values():
        if row.is_call:
            first.setdefault(row.call, row)
    return first


def elements_of_pass(rows: Rows) -> int:
    """Return how many elements the values of a forward pass take: views have no memory."""
    held = (r for r in rows.values() if r.phase == "forward" and r.view_of is None)
    return sum(row.numel or 0 for row in held)


def shape_read_first(rows: Rows, row: RecordedRow) -> Sequence[int] | None:
    """Return the shape of the first tensor that a call reads; None where nobody knows."""
    read = [rows[record] for record in row.inputs if record in rows]
    return read[0].shape if read else None


def made_from(rows: Rows, records: Iterable[int]) -> set[int]:
    """Return these records and all that they were made from, of those that are there."""
    waiting = [*records]
    made: set[int] = set()
    while waiting:
        record = waiting.pop()
        if record not in made and record in rows:
            made.add(record)
            waiting += rows[record].inputs
    return made


def maker(
    rows: Rows, row: RecordedRow, behind: Collection[str] = _CHANGE_NOTHING
) -> RecordedRow:
    """Return the row of the operator that made these values, behind views and casts.

    ``behind``: or behind these operators.
    """
    while row.operator in behind and len(row.inputs) == 1:
        source = rows.get(row.inputs[0])
        if source is None:
            break
        row = source
    return row


def written_through_views(rows: Rows) -> set[str]:
    """Return the names under which another value stands later, though no call that is
    recorded under the name wrote it: rows or columns of it were assigned."""
    contents: dict[str, Content] = {}
    written = set()
    for row in rows.values():
        if row.name is None:
            continue
        content = row.content
        is_moved = contents.get(row.name, content) != content
        if is_moved and not row.is_call:
            written.add(row.name)
        contents[row.name] = content
    return written


def last_named(rows: Rows) -> dict[str, RecordedRow]:
    """Return the last row of each parameter, buffer and gradient by its name.

    What is written through another view of all of one (``detach``, ``state_dict``) has its
    name here. Nothing for one of which a part is written last: what is there then was not
    seen.
    """
    last: dict[str, RecordedRow] = {}
    for row in rows.values():
        if row.name:
            last[row.name] = row
        elif row.inplace and row.inputs:
            written = _written(rows, row)
            while written is not None and written.view_of is not None:
                written = rows.get(written.view_of)
            if written is not None and written.base_operator == "view_as_real":
                written = rows.get(written.inputs[0])
            if written is None or not written.name:
                continue
            if _is_same_view(row, written) or _is_real_view(row, written):
                last[written.name] = replace(row, name=written.name)
            else:
                last.pop(written.name, None)
    return last


def _written(rows: Rows, write: RecordedRow) -> RecordedRow | None:
    """Return what a call writes in place: the input in the memory of the result, or the first."""
    read = [rows[record] for record in write.inputs if record in rows]
    inside = (row for row in read if row.memory == write.memory is not None)
    return next(inside, read[0] if read else None)


def _is_real_view(one: RecordedRow, other: RecordedRow) -> bool:
    """Return True for the real and imaginary parts of all elements of a complex value."""
    if one.memory is None or one.memory != other.memory or other.memory_layout is None:
        return False
    layout = [*(2 * place for place in other.memory_layout), 1]
    return one.memory_layout == layout and one.shape == [*(other.shape or ()), 2]


def _is_same_view(one: RecordedRow, other: RecordedRow) -> bool:
    """Return True for the same elements of one memory in the same shape."""
    return one.memory is not None and (
        (one.memory, one.memory_layout, one.shape, one.dtype)
        == (other.memory, other.memory_layout, other.shape, other.dtype)
    )
