"""Which row of the candidate is which row of the reference: by name, then by structure.

Calls are aligned, and with them their rows, place by place. In this order, each step
taking what the ones before left:

1. the same module, operator and count, where all calls of the module agree;
2. within a module, the sequences of calls (Needleman and Wunsch 1970: the best-scoring
   order-keeping pairs; operators must agree; equal shapes, parameters and values speak
   for a pair);
3. renamed modules: those left on both sides, in order, whose calls agree;
4. whatever module they are in, by the sequence of operators and shapes (a function
   moved into a module, or out of it);
5. reordered calls: the same operator and shapes, in another order;
6. by use: rows that take the same place among the inputs of an aligned call (inserted
   casts, leaves, fused operators).

Whatever is left stays, with a reason. Every row of both runs is in the result exactly
once, except that a reference row can be the counterpart of several candidate rows by
use (the cast of a tensor, and the tensor).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from roundoff.compare.pairing.call_pairs import (
    TRANSPARENT,
    CallPair,
    calls_of,
    match_calls,
    read_another_number,
)
from roundoff.compare.pairing.list_calls import element_by_element
from roundoff.compare.records.call_arguments import results_made
from roundoff.compare.records.recorded_rows import RecordedRow, Rows, last_named

MATCHED = "matched"
BY_USE = "by use"
REFERENCE_ONLY = "only in reference"
CANDIDATE_ONLY = "only in candidate"
#: Of two programs by different hands: other operators, and what leaves them agrees.
EQUIVALENT = "equivalent"


@dataclass(frozen=True, slots=True)
class Pair:
    """The records of two rows that should hold the same value.

    One of them is None where a row has no counterpart. ``status`` is ``MATCHED``,
    ``BY_USE``, ``REFERENCE_ONLY`` or ``CANDIDATE_ONLY``; ``reason`` says why.
    """

    reference: int | None
    candidate: int | None
    status: str
    reason: str | None = None


def align(
    reference: Rows, candidate: Rows, modules: Mapping[str, str] | None = None
) -> list[Pair]:
    """Pair the rows of one step of two runs.

    Args:
        reference: rows by record.
        candidate: rows by record.
        modules: how modules of the reference are called in the candidate; the longest
            prefix counts.

    Returns:
        The pairs in the order of the candidate's records, then what only the
        reference has, in its order.
    """
    alignment = _Alignment(reference, candidate, renaming(modules or {}))
    alignment.pair_calls()
    alignment.pair_named_leaves()
    alignment.pair_last_values()
    alignment.pair_by_use()
    return alignment.pairs()


def renaming(modules: Mapping[str, str]) -> Callable[[str], str]:
    """Return the function that gives names of the reference the candidate's prefix.

    >>> renaming({"encoder.layers": "blocks"})("encoder.layers.0.norm")
    'blocks.0.norm'
    """
    longest_first = sorted(modules.items(), key=lambda item: -len(item[0]))

    def rename(name: str) -> str:
        name = uncompiled(name)
        for old, new in longest_first:
            if name == old or not old or name.startswith(old + "."):
                tail = name[len(old) :].removeprefix(".")
                return ".".join(part for part in (new, tail) if part)
        return name

    return rename


def uncompiled(name: str) -> str:
    """Return a module path without what torch.compile puts into it."""
    if "_orig_mod" not in name:
        return name
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


class _Alignment:
    """The pairs of one step; each method adds those that the ones before left."""

    def __init__(
        self, reference: Rows, candidate: Rows, rename: Callable[[str], str]
    ) -> None:
        self._reference = reference
        self._candidate = candidate
        self._rename = rename
        self._calls: list[CallPair] = []
        self._by_candidate: dict[int, Pair] = {}
        self._paired_reference: set[int] = set()

    def _add(
        self,
        twin: RecordedRow,
        row: RecordedRow,
        status: str,
        reason: str | None = None,
    ) -> None:
        pair = Pair(twin.record, row.record, status, reason)
        self._by_candidate[row.record] = pair
        self._paired_reference.add(twin.record)

    def pair_calls(self) -> None:
        """Pair the results of matching calls, place by place."""
        ours = calls_of(list(self._reference.values()), self._rename)
        theirs = calls_of(list(self._candidate.values()), lambda name: name)
        by_element = element_by_element(ours, theirs, self._reference)
        theirs = element_by_element(theirs, ours, self._candidate)
        self._calls = match_calls(by_element, theirs)
        for calls in self._calls:
            for twin, row in self._results_of(calls):
                self._add(twin, row, MATCHED, calls.reason)

    def _results_of(self, calls: CallPair) -> Iterator[tuple[RecordedRow, RecordedRow]]:
        """Yield the results of two calls: of lists of tensors those of the same name."""
        ours = {self._rename(r.name): r for r in calls.reference.rows if r.name}
        theirs = {row.name: row for row in calls.candidate.rows if row.name}
        by_place = _by_place(calls.reference.rows)
        places = _by_place(calls.candidate.rows)
        for place, row in places.items():
            twin = ours.get(row.name) if row.name else None
            if twin is None:
                twin = by_place.get(place)
                is_another = (
                    twin is not None and self._rename(twin.name or "") in theirs
                )
                if twin is None or is_another:
                    continue
            yield twin, row

    def pair_named_leaves(self) -> None:
        """Pair parameters, buffers and inputs that have the same name.

        What is written part by part, and read between, is a leaf after each write: these
        pair in turns where both runs have as many. Otherwise the first two do, and the
        last two; those between pair by what reads them.
        """
        ours = _leaves_by_name(self._reference, self._rename)
        theirs = _leaves_by_name(self._candidate, lambda name: name)
        for name, rows in theirs.items():
            for twin, row in _in_turns(ours.get(name, []), rows):
                if row.record not in self._by_candidate:
                    self._add(twin, row, MATCHED)

    def pair_last_values(self) -> None:
        """Pair what the step leaves in parameters, buffers and gradients.

        Other calls may have written it.
        """
        ours = last_named(self._reference)
        last = {self._rename(name): row for name, row in ours.items()}
        for name, row in last_named(self._candidate).items():
            twin = last.get(name)
            if twin is None or row.record in self._by_candidate:
                continue
            if twin.shape == row.shape:
                self._add(twin, row, BY_USE, "the last value of this tensor")

    def pair_by_use(self) -> None:
        """Pair rows that two aligned calls read at the same place, the last first."""
        for calls in sorted(self._calls, key=lambda pair: -pair.candidate.record):
            if read_another_number(calls):
                continue  # what they read has another counterpart, or none
            read = records_read(calls.reference.rows, calls.candidate.rows)
            for reference, candidate in read:
                self._pair_upstream(reference, candidate)

    def _pair_upstream(self, reference: int, candidate: int) -> None:
        """Pair two rows, and as long as they only hand on values their sources."""
        for ours, theirs in self._upstream(reference, candidate):
            twin = self._reference[ours]
            row = self._candidate[theirs]
            if twin.is_call or row.is_call:
                self._add(twin, row, BY_USE, "read at the same place")
            else:
                self._add(twin, row, MATCHED)

    def _upstream(self, reference: int, candidate: int) -> Iterator[tuple[int, int]]:
        """Yield the records to pair, from a use back; a cast or a view has one of its own."""
        while self._can_pair(reference, candidate):
            yield reference, candidate
            twin = self._reference[reference]
            row = self._candidate[candidate]
            source = self._candidate.get(_handed_on(row))
            if source is None:
                return
            if twin.operator == row.operator or source.shape != twin.shape:
                reference = _handed_on(twin)
            candidate = source.record

    def _can_pair(self, reference: int, candidate: int) -> bool:
        twin = self._reference.get(reference)
        row = self._candidate.get(candidate)
        if twin is None or row is None or candidate in self._by_candidate:
            return False
        return twin.shape == row.shape

    def pairs(self) -> list[Pair]:
        """Return all pairs, with a reason for every row that has no counterpart."""
        pairs = [
            self._by_candidate.get(record)
            or Pair(None, record, CANDIDATE_ONLY, _why_unpaired(row, "reference"))
            for record, row in self._candidate.items()
        ]
        for record, row in self._reference.items():
            if record not in self._paired_reference:
                why = _why_unpaired(row, "candidate")
                pairs.append(Pair(record, None, REFERENCE_ONLY, why))
        return pairs


def _leaves_by_name(
    rows: Rows, rename: Callable[[str], str]
) -> dict[str, list[RecordedRow]]:
    leaves: dict[str, list[RecordedRow]] = {}
    for row in rows.values():
        if row.name and not row.is_call:
            leaves.setdefault(rename(row.name), []).append(row)
    return leaves


def _in_turns(
    ours: list[RecordedRow], theirs: list[RecordedRow]
) -> list[tuple[RecordedRow, RecordedRow]]:
    if len(ours) == len(theirs):
        return list(zip(ours, theirs, strict=True))
    if not ours:
        return []
    ends = [(ours[0], theirs[0])]
    if len(ours) > 1 and len(theirs) > 1:
        ends.append((ours[-1], theirs[-1]))
    return ends


#: Stands for "no record": records count from 0.
_NO_RECORD = -1


def _handed_on(row: RecordedRow) -> int:
    """Return the record whose values a cast or a view hands on; ``_NO_RECORD`` for others."""
    if row.operator not in TRANSPARENT or len(row.inputs) != 1:
        return _NO_RECORD
    return row.inputs[0]


def _by_place(rows: Sequence[RecordedRow]) -> dict[int | None, RecordedRow]:
    """Return the results of a call by their place among all that it may give."""
    made = results_made(rows[0]) if rows else None
    if made is None or len(made) != len(rows):
        return {row.place: row for row in rows}
    return dict(zip(made, rows, strict=True))


def records_read(
    reference: Sequence[RecordedRow], candidate: Sequence[RecordedRow]
) -> list[tuple[int, int]]:
    """Return the pairs of records that two aligned calls read at the same place."""
    read: dict[tuple[int, int], None] = {}
    by_place = _by_place(reference)
    for place, row in _by_place(candidate).items():
        twin = by_place.get(place)
        if twin is not None and len(twin.inputs) == len(row.inputs):
            read.update(dict.fromkeys(zip(twin.inputs, row.inputs, strict=True)))
    return list(read)


def _why_unpaired(row: RecordedRow, other: str) -> str:
    if row.operator in TRANSPARENT:
        return f"hands values on; the {other} has none here"
    if row.operator == "compiled":
        return "the boundary of a compiled region"
    if not row.is_call:
        return f"nothing in the {other} is read at the same place"
    if row.recomputed:
        return f"computed again in the backward pass; the {other} does not"
    return f"the {other} has no such call"
