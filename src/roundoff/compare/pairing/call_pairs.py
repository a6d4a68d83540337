"""Which call of one run is which call of the other: best-scoring pairs of sequences."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.rounding.distance import of_statistics
from roundoff.compare.rounding.rounding_bound import unit
from roundoff.ops import operators_that

#: Hand the values on, maybe in another format: an extra one of them is no difference
#: in the program.
TRANSPARENT = operators_that("change no value")
#: Two results whose statistics are this near speak for the same call: bf16 beside fp32
#: is 2**-8 off, eight such roundings 2**-5.
ALIKE = 0.03
#: Statistics this near speak for it even more: two roundings of fp16, 2**-10.
SAME = 1e-3
#: Above this many pairs of calls, a module's sequences are parted at values that both
#: have once, and where there are none matched by their longest common blocks.
LARGEST = 250_000
#: Why a call of a checkpoint stands beside one of the forward pass.
RECOMPUTED = "computed again in the backward pass"
_UNWRITTEN = operators_that("leave memory unwritten")

Shapes = tuple[tuple[int, ...], ...]
#: Phase and module.
Group = tuple[str, str]
#: Places in two sequences of calls.
Places = list[tuple[int, int]]


@dataclass(eq=False, slots=True)
class RecordedCall:
    """The rows that one operator call made.

    Attributes:
        rows: its results, in their order.
        names: the parameters and buffers that it reads or writes.
        writes: those that it writes.
        phase: of the rows; ``recomputed`` for what a checkpoint computes again, which
            stands among the backward calls.
        module: under the name that the candidate uses.
        operator: without the mark of its in-place form: ``add_`` writes what ``add``
            makes.
        shapes: of the rows.
        shown: the row whose statistics speak for the call: its first, or what a call
            without a tensor among its results reads (``item`` of a number).
        read: the values that it reads.
    """

    rows: list[RecordedRow]
    names: frozenset[str]
    writes: frozenset[str]
    phase: str
    module: str
    operator: str
    shapes: Shapes
    shown: RecordedRow
    read: tuple[RecordedRow, ...]

    @property
    def returns_tensors(self) -> bool:
        """False for a call that hands a number to the program."""
        return self.rows[0].shape is not None

    @property
    def inputs_read(self) -> int:
        """How many tensors the call reads."""
        return sum(len(row.inputs) for row in self.rows)

    @property
    def is_complex(self) -> bool:
        """True where the first result is of complex numbers."""
        return (self.rows[0].dtype or "").startswith("complex")

    @property
    def record(self) -> int:
        """The first row's: calls are in the order of these."""
        return self.rows[0].record


@dataclass(frozen=True, slots=True)
class CallPair:
    """A call of each run that do the same; ``reason`` where that is not plain."""

    reference: RecordedCall
    candidate: RecordedCall
    reason: str | None = None


def calls_of(
    rows: Sequence[RecordedRow], rename: Callable[[str], str]
) -> list[RecordedCall]:
    """Gather the rows of one step into calls, in the order of execution.

    ``rename`` gives names of modules and parameters their name in the candidate.
    """
    parameters = _parameters_shown(rows, rename)
    grouped: dict[int, list[RecordedRow]] = defaultdict(list)
    for row in rows:
        if row.is_call and row.role in (None, "output"):
            grouped[row.call].append(row)
    by_record = {row.record: row for row in rows}
    calls = [_call(group, parameters, rename, by_record) for group in grouped.values()]
    return sorted(calls, key=lambda call: call.record)


def _parameters_shown(
    rows: Sequence[RecordedRow], rename: Callable[[str], str]
) -> dict[int, str]:
    """Return records that hold a parameter, or a view or a cast of one: its name."""
    names: dict[int, str] = {}
    for row in rows:
        if row.name and not row.is_call:
            names[row.record] = rename(row.name)
        elif row.operator in TRANSPARENT and len(row.inputs) == 1:
            shown = names.get(row.inputs[0])
            if shown is not None:
                names[row.record] = shown
    return names


def _call(
    rows: list[RecordedRow],
    parameters: Mapping[int, str],
    rename: Callable[[str], str],
    by_record: Mapping[int, RecordedRow],
) -> RecordedCall:
    first = rows[0]
    writes = {rename(row.name) for row in rows if row.name}
    names = set(writes)
    for row in rows:
        names.update(parameters[i] for i in row.inputs if i in parameters)
    return RecordedCall(
        rows=rows,
        names=frozenset(names),
        writes=frozenset(writes),
        phase="recomputed" if first.recomputed else first.phase,
        module=rename(first.module),
        operator=first.operator.rstrip("_") or first.operator,
        shapes=tuple(tuple(row.shape or ()) for row in rows),
        shown=_shown(first, by_record),
        read=tuple(by_record[i] for i in first.values_read() if i in by_record),
    )


def _shown(row: RecordedRow, by_record: Mapping[int, RecordedRow]) -> RecordedRow:
    if row.shape is None and row.inputs:
        return by_record.get(row.inputs[0], row)
    return row


def match_calls(
    reference: list[RecordedCall], candidate: list[RecordedCall]
) -> list[CallPair]:
    """Pair the calls of two runs: by module, then whatever is left by structure."""
    _leave_out_lone_writes(reference, candidate)
    left = _grouped(reference)
    right = _grouped(candidate)
    pairs: list[CallPair] = []
    for group, calls in left.items():
        others = right.get(group, [])
        pairs += [CallPair(calls[i], others[j]) for i, j in _sequence(calls, others)]
    spare = _Spare(reference, candidate)
    spare.take(pairs)
    for match in (_renamed, _moved, _reordered):
        if spare.reference and spare.candidate:
            matched = match(spare.reference, spare.candidate)
            spare.take(matched)
            pairs += matched
    return pairs + _recomputed(left, spare.candidate)


def _leave_out_lone_writes(
    reference: Sequence[RecordedCall], candidate: Sequence[RecordedCall]
) -> None:
    """Leave those names to ``writes`` that both runs write.

    Others may be the same value under another name, or several in one.
    """
    ours = {name for call in reference for name in call.writes}
    theirs = {name for call in candidate for name in call.writes}
    for call in (*reference, *candidate):
        call.writes &= ours & theirs


class _Spare:
    """The calls of both runs that have no counterpart yet, in order of execution."""

    def __init__(
        self, reference: Sequence[RecordedCall], candidate: Sequence[RecordedCall]
    ) -> None:
        self.reference = list(reference)
        self.candidate = list(candidate)

    def take(self, pairs: Sequence[CallPair]) -> None:
        """Leave out the calls of these pairs."""
        taken = {id(pair.reference) for pair in pairs}
        taken |= {id(pair.candidate) for pair in pairs}
        self.reference = [call for call in self.reference if id(call) not in taken]
        self.candidate = [call for call in self.candidate if id(call) not in taken]


def _recomputed(
    forward: Mapping[Group, list[RecordedCall]], spare: Sequence[RecordedCall]
) -> list[CallPair]:
    """Pair what a checkpoint of the candidate computes again with the forward pass."""
    pairs: list[CallPair] = []
    again = [call for call in spare if call.phase == "recomputed"]
    for (_, module), calls in _grouped(again).items():
        once = forward.get(("forward", module), [])
        for i, j in _sequence(once, calls):
            pairs.append(CallPair(once[i], calls[j], RECOMPUTED))
    return pairs


def _grouped(calls: Iterable[RecordedCall]) -> dict[Group, list[RecordedCall]]:
    groups: dict[Group, list[RecordedCall]] = defaultdict(list)
    for call in calls:
        groups[call.phase, call.module].append(call)
    return groups


def _sequence(
    reference: Sequence[RecordedCall], candidate: Sequence[RecordedCall]
) -> Places:
    """Return the best-scoring places of two sequences of one module that keep their order."""
    if _same_program(reference, candidate):
        return [(i, i) for i in range(len(reference))]
    shortest = min(len(reference), len(candidate))
    start = 0
    while start < shortest and _twins(reference[start], candidate[start]):
        start += 1
    end = 0
    while end < shortest - start and _twins(reference[-1 - end], candidate[-1 - end]):
        end += 1
    middle = _middle(
        reference[start : len(reference) - end],
        candidate[start : len(candidate) - end],
    )
    pairs = [(i, i) for i in range(start)]
    pairs += [(start + i, start + j) for i, j in middle]
    left = len(reference) - end
    right = len(candidate) - end
    return pairs + [(left + i, right + i) for i in range(end)]


def _same_program(
    reference: Sequence[RecordedCall], candidate: Sequence[RecordedCall]
) -> bool:
    """Return True where all calls agree in operator and parameters, one by one."""
    ours = [(call.operator, call.names) for call in reference]
    return ours == [(call.operator, call.names) for call in candidate]


def _middle(
    reference: Sequence[RecordedCall], candidate: Sequence[RecordedCall]
) -> Places:
    in_order = _in_order(reference, candidate)
    if len(reference) * len(candidate) > LARGEST:
        return in_order
    return _by_value(reference, candidate, in_order)


def _in_order(
    reference: Sequence[RecordedCall], candidate: Sequence[RecordedCall]
) -> Places:
    """Return places of two sequences that keep their order: the best, or good ones of long ones.

    Long ones are parted at values that both have, and each has once.
    """
    if len(reference) * len(candidate) <= LARGEST:
        return _needleman_wunsch(reference, candidate)
    anchors = _anchors(reference, candidate)
    if not anchors:
        return _common_blocks(reference, candidate)
    places: Places = []
    i = j = 0
    for next_i, next_j in [*anchors, (len(reference), len(candidate))]:
        between = _in_order(reference[i:next_i], candidate[j:next_j])
        places += [(i + k, j + m) for k, m in between]
        places += [(next_i, next_j)] if next_i < len(reference) else []
        i, j = next_i + 1, next_j + 1
    return places


def _anchors(
    reference: Sequence[RecordedCall], candidate: Sequence[RecordedCall]
) -> Places:
    """Return the most places of values that each sequence has once, and in one order.

    As in a patience diff: the longest rising sequence (Fredman 1975).
    """
    theirs = _sole_values(candidate)
    ends: list[int] = []  # the last place of a rising sequence of each length
    links: list[tuple[int, int, int]] = []  # its places, and the link before
    tops: list[int] = []
    for value, i in _sole_values(reference).items():
        if value not in theirs:
            continue
        j = theirs[value]
        length = bisect_left(ends, j)
        before = tops[length - 1] if length else -1
        ends[length : length + 1] = [j]
        tops[length : length + 1] = [len(links)]
        links.append((i, j, before))
    places: Places = []
    link = tops[-1] if tops else -1
    while link >= 0:
        i, j, link = links[link]
        places.append((i, j))
    return places[::-1]


def _sole_values(calls: Sequence[RecordedCall]) -> dict[Any, int]:
    """Return the places of results that no other call has, by operator and statistics.

    Constants say nothing.
    """
    places: dict[Any, list[int]] = defaultdict(list)
    for place, call in enumerate(calls):
        shown = call.shown
        is_known = shown.min != shown.max and shown.l2 is not None
        if is_known and not _is_unwritten(shown):
            statistics = (shown.min, shown.max, shown.l2)
            key = (call.operator, call.shapes, call.names, call.writes, *statistics)
            places[key].append(place)
    return {key: found[0] for key, found in places.items() if len(found) == 1}


def _twins(one: RecordedCall, other: RecordedCall) -> bool:
    """Return True for the same operator, shapes, parameters and values."""
    return (
        one.operator == other.operator
        and one.shapes == other.shapes
        and one.names == other.names
        and _distance(one, other) < SAME
    )


def _needleman_wunsch(
    reference: Sequence[RecordedCall], candidate: Sequence[RecordedCall]
) -> Places:
    """Return the order-keeping pairs with the best total score; a gap costs nothing."""
    table = _best_scores(reference, candidate)
    pairs = []
    i = 0
    j = 0
    while i < len(reference) and j < len(candidate):
        score = _score(reference[i], candidate[j])
        if score and table[i][j] == table[i + 1][j + 1] + score:
            pairs.append((i, j))
            i += 1
            j += 1
        elif table[i][j] == table[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _best_scores(
    reference: Sequence[RecordedCall], candidate: Sequence[RecordedCall]
) -> list[list[float]]:
    """Return ``[i][j]``: the best score of the calls from ``i`` and from ``j`` on."""
    width = len(candidate) + 1
    table = [[0.0] * width for _ in range(len(reference) + 1)]
    for i in range(len(reference) - 1, -1, -1):
        row = table[i]
        below = table[i + 1]
        call = reference[i]
        for j in range(len(candidate) - 1, -1, -1):
            best = below[j] if below[j] > row[j + 1] else row[j + 1]
            score = _score(call, candidate[j])
            if score and below[j + 1] + score > best:
                best = below[j + 1] + score
            row[j] = best
    return table


def _by_value(
    reference: Sequence[RecordedCall],
    candidate: Sequence[RecordedCall],
    in_order: Places,
) -> Places:
    """Mend pairs of calls that stand in another order, which only values tell."""
    unlike = [(i, j) for i, j in in_order if not _alike(reference[i], candidate[j])]
    if not unlike:
        return in_order
    pairs = dict(set(in_order) - set(unlike))
    free = sorted(set(range(len(candidate))) - set(pairs.values()))
    for i in sorted(set(range(len(reference))) - pairs.keys()):
        same = [j for j in free if _interchangeable(reference[i], candidate[j])]
        if len(same) == 1:
            pairs[i] = same[0]
            free.remove(same[0])
    for i, j in unlike:
        if i not in pairs and j in free:
            pairs[i] = j
    return sorted(pairs.items())


def _interchangeable(one: RecordedCall, other: RecordedCall) -> bool:
    """Return True for calls with the same result, by statistics.

    In a loop each turn's values are about as large as those of the next; places and masks
    have the same statistics by chance, unless they are made of the same.
    """
    if one.shapes != other.shapes or not _score(one, other):
        return False
    if not _are_one_value(one.shown, other.shown):
        return False
    if unit(one.shown.dtype):
        return True
    are_as_many = len(one.read) == len(other.read)
    return are_as_many and all(map(_are_one_value, one.read, other.read))


def _are_one_value(one: RecordedRow, other: RecordedRow) -> bool:
    """Return True where statistics tell two values apart by rounding alone."""
    return _apart(one, other) < (SAME if one.dtype == other.dtype else ALIKE)


def _score(reference: RecordedCall, candidate: RecordedCall) -> float:
    """Return how well two calls go together; 0 where they must not."""
    if not _may_pair(reference, candidate):
        return 0.0
    score = 6.0 if reference.shapes == candidate.shapes else 4.0
    if reference.names or candidate.names:
        score += 4.0 if reference.names == candidate.names else -3.0
    distance = _distance(reference, candidate)
    if distance < ALIKE:
        score += 3.0
    if distance < SAME:
        score += 2.0
    return score


def _may_pair(reference: RecordedCall, candidate: RecordedCall) -> bool:
    """Return True for one operator on equal shapes, or on the same parameters."""
    if reference.operator != candidate.operator or _must_not_pair(reference, candidate):
        return False
    same_shapes = reference.shapes == candidate.shapes
    same_names = reference.names == candidate.names
    if reference.operator in TRANSPARENT:
        # which one of many views it is shows in what reads it
        return same_shapes and same_names and _alike(reference, candidate)
    if same_shapes or reference.phase == "optimizer":
        # an update has the shape of its parameter: another one is of another
        return same_shapes
    return same_names and reference.inputs_read == candidate.inputs_read


def _must_not_pair(reference: RecordedCall, candidate: RecordedCall) -> bool:
    """Return True for calls of one operator that write, or show, other things."""
    if reference.is_complex != candidate.is_complex:
        return True
    written = reference.writes | candidate.writes
    if written and not reference.writes & candidate.writes:
        return True
    return _are_strangers(reference, candidate)


def _are_strangers(one: RecordedCall, other: RecordedCall) -> bool:
    """Return True for single numbers that have nothing to do with each other.

    They are alike by chance, made of numbers that are not; or nothing is alike, and one
    is written over another value.
    """
    are_numbers = one.rows[0].numel == other.rows[0].numel == 1
    if not are_numbers or not one.read or len(one.read) != len(other.read):
        return False
    read = zip(one.read, other.read, strict=True)
    unlike = [_apart(ours, theirs) > ALIKE for ours, theirs in read]
    if _distance(one, other) < ALIKE:
        return any(unlike)
    return all(unlike) and one.rows[0].overload != other.rows[0].overload


def _alike(one: RecordedCall, other: RecordedCall) -> bool:
    """Return True where two calls show about the same values, by statistics."""
    return _distance(one, other) < ALIKE


def read_another_number(pair: CallPair) -> bool:
    """Return True for calls that hand a number to the program, and not the same one."""
    if pair.reference.returns_tensors or pair.candidate.returns_tensors:
        return False
    return not _alike(pair.reference, pair.candidate)


def _distance(one: RecordedCall, other: RecordedCall) -> float:
    return _apart(one.shown, other.shown)


def _apart(one: RecordedRow, other: RecordedRow) -> float:
    if _is_unwritten(one) and _is_unwritten(other):
        return 0.0  # whatever stood there
    error = of_statistics(one, other).error
    return math.inf if error is None else error


def _is_unwritten(row: RecordedRow) -> bool:
    """Return True for new memory, and for the bytes of a storage, which may be new."""
    are_bytes = row.base_operator == "set" and row.dtype == "uint8"
    return are_bytes or row.base_operator in _UNWRITTEN


def _common_blocks(
    reference: Sequence[RecordedCall], candidate: Sequence[RecordedCall]
) -> Places:
    """Return the places of the longest common runs of operators and shapes."""
    ours = [(call.operator, call.shapes, call.writes) for call in reference]
    theirs = [(call.operator, call.shapes, call.writes) for call in candidate]
    return _equal_places(SequenceMatcher(None, ours, theirs, autojunk=False))


def _equal_places(matcher: SequenceMatcher[Any]) -> Places:
    places: Places = []
    for block in matcher.get_matching_blocks():
        places += [(block.a + i, block.b + i) for i in range(block.size)]
    return places


def _renamed(
    reference: list[RecordedCall], candidate: list[RecordedCall]
) -> list[CallPair]:
    """Pair modules that only one side has, in order, where their calls agree."""
    left = _grouped(reference)
    right = _grouped(candidate)
    ours = [group for group in left if group not in right]
    theirs = [group for group in right if group not in left]
    matcher = SequenceMatcher(
        None,
        [(phase, _computed(left[phase, module])) for phase, module in ours],
        [(phase, _computed(right[phase, module])) for phase, module in theirs],
        autojunk=False,
    )
    pairs: list[CallPair] = []
    for i, j in _equal_places(matcher):
        calls = left[ours[i]]
        others = right[theirs[j]]
        if not _computed(calls):
            continue
        old_name = ours[i][1] or "(root)"
        new_name = theirs[j][1] or "(root)"
        reason = f"module {old_name} is called {new_name}"
        for k, m in _sequence(calls, others):
            pairs.append(CallPair(calls[k], others[m], reason))
    return pairs


def _computed(calls: Sequence[RecordedCall]) -> tuple[tuple[str, Shapes], ...]:
    """Return operators and shapes of the calls that do more than hand values on."""
    return tuple(
        (call.operator, call.shapes)
        for call in calls
        if call.operator not in TRANSPARENT
    )


def _moved(
    reference: list[RecordedCall], candidate: list[RecordedCall]
) -> list[CallPair]:
    """Pair calls in order, whatever module they are in."""
    pairs: list[CallPair] = []
    for phase in dict.fromkeys(call.phase for call in reference):
        ours = _computing(reference, phase)
        theirs = _computing(candidate, phase)
        for i, j in _in_order(ours, theirs):
            our_call = ours[i]
            their_call = theirs[j]
            if our_call.shapes != their_call.shapes:
                continue
            reason = None
            if our_call.module != their_call.module:
                reason = f"in module {their_call.module or '(root)'}"
            pairs.append(CallPair(our_call, their_call, reason))
    return pairs


def _computing(calls: Sequence[RecordedCall], phase: str) -> list[RecordedCall]:
    return [c for c in calls if c.phase == phase and c.operator not in TRANSPARENT]


def _reordered(
    reference: list[RecordedCall], candidate: list[RecordedCall]
) -> list[CallPair]:
    """Pair calls of one module that do the same, at another place in the order."""
    waiting: dict[object, list[RecordedCall]] = defaultdict(list)
    for call in candidate:
        if call.operator not in TRANSPARENT or call.names:
            waiting[_kind(call)].append(call)
    pairs: list[CallPair] = []
    for call in reference:
        others = waiting[_kind(call)]
        fitting = (c for c in others if not _are_strangers(call, c))
        match = next(fitting, None)
        if match is not None:
            others.remove(match)
            reason = "at another place in the order of calls"
            pairs.append(CallPair(call, match, reason))
    return pairs


def _kind(call: RecordedCall) -> tuple[object, ...]:
    return (
        call.phase,
        call.module,
        call.operator,
        call.shapes,
        call.names,
        call.is_complex,
    )
