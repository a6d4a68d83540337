"""Calls on lists of tensors beside calls on one tensor each: taken element by element.

An optimizer updates parameter by parameter in one form, and in its form on lists all
parameters operator by operator. Split into elements, and these gathered by parameter,
the second is the sequence of the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from roundoff.compare.pairing.call_pairs import RecordedCall
from roundoff.compare.records.recorded_rows import RecordedRow, Rows

_GRADIENT = ".grad"


def element_by_element(
    calls: Sequence[RecordedCall], other: Sequence[RecordedCall], rows: Rows
) -> list[RecordedCall]:
    """Return the calls of one run, those on lists split where the other run has none.

    And where it computes with the same operators: a form with others in it, as for
    captured graphs, is another formula. ``rows`` are those of the step by record.
    """
    on_lists = {_operator(call) for call in calls if _is_on_list(call)}
    usual = {_operator(call) for call in other if call.phase == "optimizer"}
    if not on_lists or not on_lists <= usual or any(map(_is_on_list, other)):
        return list(calls)
    parameters = _parameters(calls, rows)
    in_parts = [part for call in calls for part in _parts(call)]
    order = {
        name: place for place, name in enumerate(dict.fromkeys(parameters.values()))
    }

    def place(call: RecordedCall) -> tuple[bool, int]:
        name = _parameter_of(call.rows[0], parameters)
        return call.phase == "optimizer", order.get(name, -1)

    return sorted(in_parts, key=place)


def _is_on_list(call: RecordedCall) -> bool:
    return call.rows[0].is_on_lists and call.phase == "optimizer"


def _operator(call: RecordedCall) -> str:
    """Return the operator of each element, without the mark of its in-place form."""
    element = call.rows[0].element_operator
    return element.rstrip("_") or element


def _parts(call: RecordedCall) -> Sequence[RecordedCall]:
    """Return a call for each element of a call on lists; any other as it is."""
    if not _is_on_list(call):
        return [call]
    operator = _operator(call)
    return [
        replace(
            call,
            rows=[replace(row, place=0)],
            names=call.names & {row.name},
            writes=call.writes & {row.name},
            operator=operator,
            shapes=(shape,),
            shown=row,
            read=(),
        )
        for row, shape in zip(call.rows, call.shapes, strict=True)
    ]


def _parameters(calls: Iterable[RecordedCall], rows: Rows) -> dict[int, str]:
    """Return the parameter that each record made by calls on lists belongs to.

    A call that neither writes parameters nor reads gradients works on those of the next
    one that does: lists stand in one order.
    """
    on_lists = [call for call in calls if _is_on_list(call)]
    parameters: dict[int, str] = {}
    names: Mapping[int | None, str] = {}
    for call in reversed(on_lists):
        shown = {row.place: _named(row, rows) for row in call.rows}
        if all(shown.values()):
            names = shown
        for row in call.rows:
            parameters[row.record] = names.get(row.place, "")
    return dict(sorted(parameters.items()))


def _named(row: RecordedRow, rows: Rows) -> str:
    """Return the parameter that a row writes, or whose gradient it reads; or ""."""
    read = [rows[record].name or "" for record in row.inputs if record in rows]
    gradients = [name for name in read if name.endswith(_GRADIENT)]
    return (row.name or next(iter(gradients), "")).removesuffix(_GRADIENT)


def _parameter_of(row: RecordedRow, parameters: Mapping[int, str]) -> str:
    for record in (row.record, *row.inputs):
        if record in parameters:
            return parameters[record]
    return ""
