"""Which call of one run is which call of the other: the best-scoring pairs of two sequences of calls."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from roundoff.compare.distance import of_statistics
from roundoff.ops import operators_that

Row = Mapping[str, Any]

#: Hand the values on, maybe in another format: an extra one of them is no difference in the program.
TRANSPARENT = operators_that("change no value")
#: Two results whose statistics are this near speak for the same call; the nearer, the more.
ALIKE, SAME = 0.03, 1e-3
#: Above this many pairs of calls, a module's sequences are matched by their longest common blocks instead.
LARGEST = 250_000


@dataclass
class Call:
    """The rows that one operator call made."""

    rows: list[Row]
    names: frozenset[str] = frozenset()
    phase: str = field(init=False)
    module: str = field(init=False)
    operator: str = field(init=False)
    shapes: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        first = self.rows[0]
        self.phase = (
            "recomputed" if first["recomputed"] else first["phase"]
        )  # which stand among the backward calls
        self.module = first["module"]
        self.operator = (
            first["operator"].rstrip("_") or first["operator"]
        )  # add_ writes what add makes
        self.shapes = tuple(tuple(row["shape"] or ()) for row in self.rows)

    @property
    def read(self) -> int:
        """How many tensors the call reads."""
        return sum(len(row["inputs"] or ()) for row in self.rows)

    @property
    def record(self) -> int:
        """The first row's: calls are in the order of these."""
        return int(self.rows[0]["record"])


Matched = tuple[Call, Call, str | None]


def calls_of(rows: Sequence[Row], rename: Callable[[str], str]) -> list[Call]:
    grouped: dict[int, list[Row]] = defaultdict(list)
    named = {
        row["record"]: row["name"] for row in rows if row["call"] < 0 and row["name"]
    }
    source: dict[int, str] = {}
    for row in rows:
        inputs = list(row["inputs"] or [])
        if row["record"] in named:
            source[row["record"]] = rename(named[row["record"]])
        elif (
            row["operator"] in TRANSPARENT and len(inputs) == 1 and inputs[0] in source
        ):
            source[row["record"]] = source[inputs[0]]  # a view or a cast of a parameter
        if row["call"] >= 0 and row["role"] in (None, "output"):
            grouped[row["call"]].append(row)
    found = []
    for group in grouped.values():
        names = {source[i] for row in group for i in row["inputs"] or () if i in source}
        call = Call(
            group,
            frozenset(names | {rename(row["name"]) for row in group if row["name"]}),
        )
        call.module = rename(call.module)
        found.append(call)
    return sorted(found, key=lambda call: call.record)


def match_calls(ours: list[Call], theirs: list[Call]) -> list[Matched]:
    found: list[Matched] = []
    left, right = _grouped(ours), _grouped(theirs)
    spare_left: list[Call] = []
    spare_right: list[Call] = [
        c for key in right.keys() - left.keys() for c in right[key]
    ]
    for key, calls in left.items():
        others = right.get(key)
        if others is None:
            spare_left += calls
            continue
        taken = _sequence(calls, others)
        found += [(calls[i], others[j], None) for i, j in taken]
        some, same = {i for i, _ in taken}, {j for _, j in taken}
        spare_left += [c for i, c in enumerate(calls) if i not in some]
        spare_right += [c for j, c in enumerate(others) if j not in same]
    for match in (_renamed, _moved, _reordered):
        if spare_left and spare_right:
            spare_left.sort(key=lambda c: c.record)
            spare_right.sort(key=lambda c: c.record)
            more = match(spare_left, spare_right)
            found += more
            taken_left, taken_right = (
                {id(a) for a, _, _ in more},
                {id(b) for _, b, _ in more},
            )
            spare_left = [c for c in spare_left if id(c) not in taken_left]
            spare_right = [c for c in spare_right if id(c) not in taken_right]
    return found + _again(left, spare_right)


def _again(
    forward: Mapping[tuple[str, str], list[Call]], spare: Sequence[Call]
) -> list[Matched]:
    """Calls that a checkpoint of the candidate makes once more, with those of the reference's forward pass."""
    found: list[Matched] = []
    for (_, module), calls in _grouped(
        c for c in spare if c.phase == "recomputed"
    ).items():
        ours = forward.get(("forward", module), [])
        found += [
            (ours[i], calls[j], "computed again in the backward pass")
            for i, j in _sequence(ours, calls)
        ]
    return found


def _grouped(calls: Iterable[Call]) -> dict[tuple[str, str], list[Call]]:
    found: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in calls:
        found[call.phase, call.module].append(call)
    return found


def _sequence(ours: Sequence[Call], theirs: Sequence[Call]) -> list[tuple[int, int]]:
    """The pairs of two sequences of one module that keep their order and score best."""
    same = len(ours) == len(theirs)
    if same and all(
        a.operator == b.operator and a.names == b.names
        for a, b in zip(ours, theirs, strict=True)
    ):
        return [(i, i) for i in range(len(ours))]
    start = 0
    while start < min(len(ours), len(theirs)) and _twins(ours[start], theirs[start]):
        start += 1
    end = 0
    while end < min(len(ours), len(theirs)) - start and _twins(
        ours[-1 - end], theirs[-1 - end]
    ):
        end += 1
    a, b = ours[start : len(ours) - end], theirs[start : len(theirs) - end]
    middle = (
        _by_value(a, b, _best(a, b)) if len(a) * len(b) <= LARGEST else _blocks(a, b)
    )
    pairs = [(i, i) for i in range(start)] + [(start + i, start + j) for i, j in middle]
    return pairs + [(len(ours) - end + i, len(theirs) - end + i) for i in range(end)]


def _twins(one: Call, other: Call) -> bool:
    same = (
        one.operator == other.operator
        and one.shapes == other.shapes
        and one.names == other.names
    )
    return same and _apart(one, other) < SAME


def _best(ours: Sequence[Call], theirs: Sequence[Call]) -> list[tuple[int, int]]:
    """Needleman-Wunsch without a cost for gaps."""
    width = len(theirs) + 1
    table = [[0.0] * width for _ in range(len(ours) + 1)]
    for i in range(len(ours) - 1, -1, -1):
        row, below, mine = table[i], table[i + 1], ours[i]
        for j in range(len(theirs) - 1, -1, -1):
            best = below[j] if below[j] > row[j + 1] else row[j + 1]
            score = _score(mine, theirs[j])
            if score and below[j + 1] + score > best:
                best = below[j + 1] + score
            row[j] = best
    pairs = []
    i = j = 0
    while i < len(ours) and j < len(theirs):
        score = _score(ours[i], theirs[j])
        if score and table[i][j] == table[i + 1][j + 1] + score:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif table[i][j] == table[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _by_value(
    ours: Sequence[Call], theirs: Sequence[Call], pairs: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The pairs, where calls of one operator stand in another order and only their values tell which is which."""
    unlike = [(i, j) for i, j in pairs if not _alike(ours[i], theirs[j])]
    if not unlike:
        return list(pairs)
    kept = dict(set(pairs) - set(unlike))
    left = [i for i in range(len(ours)) if i not in kept]
    right = [j for j in range(len(theirs)) if j not in set(kept.values())]
    for i in left:
        mine = ours[i]
        fits = [
            j
            for j in right
            if mine.shapes == theirs[j].shapes and _score(mine, theirs[j])
        ]
        same = [j for j in fits if _alike(mine, theirs[j])]
        if len(same) == 1:
            kept[i] = same[0]
            right.remove(same[0])
    kept |= {i: j for i, j in unlike if i not in kept and j in right}
    return sorted(kept.items())


def _score(one: Call, other: Call) -> float:
    """How well two calls go together; 0 where they must not."""
    if one.operator != other.operator:
        return 0.0
    if one.operator in TRANSPARENT and (
        one.shapes != other.shapes or one.names != other.names or not _alike(one, other)
    ):
        return 0.0  # which one of many views it is shows in what reads it
    if one.shapes != other.shapes and (
        one.names != other.names or one.read != other.read
    ):
        return 0.0
    score = 4.0 + 2.0 * (one.shapes == other.shapes)
    if one.names or other.names:
        score += 4.0 if one.names == other.names else -3.0
    apart = _apart(one, other)
    return score + 3.0 * (apart < ALIKE) + 2.0 * (apart < SAME)


def _alike(one: Call, other: Call) -> bool:
    """Whether the first rows hold about the same values, as far as statistics tell."""
    return _apart(one, other) < ALIKE


def _apart(one: Call, other: Call) -> float:
    error = of_statistics(one.rows[0], other.rows[0]).error
    return math.inf if error is None else error


def _blocks(ours: Sequence[Call], theirs: Sequence[Call]) -> list[tuple[int, int]]:
    matcher = SequenceMatcher(
        None,
        [(c.operator, c.shapes) for c in ours],
        [(c.operator, c.shapes) for c in theirs],
        False,
    )
    return [
        (m.a + i, m.b + i) for m in matcher.get_matching_blocks() for i in range(m.size)
    ]


def _renamed(ours: list[Call], theirs: list[Call]) -> list[Matched]:
    """Modules that only one side has, in order, where operators and shapes of their calls agree."""
    left, right = _grouped(ours), _grouped(theirs)
    mine = [key for key in left if key not in right]
    other = [key for key in right if key not in left]

    def shape(calls: Sequence[Call]) -> tuple[Any, ...]:
        return tuple(
            (c.operator, c.shapes) for c in calls if c.operator not in TRANSPARENT
        )

    matcher = SequenceMatcher(
        None,
        [(k[0], shape(left[k])) for k in mine],
        [(k[0], shape(right[k])) for k in other],
        False,
    )
    found: list[Matched] = []
    for block in matcher.get_matching_blocks():
        for i in range(block.size):
            a, b = left[mine[block.a + i]], right[other[block.b + i]]
            if not shape(a):
                continue
            reason = f"module {mine[block.a + i][1] or '(root)'} is called {other[block.b + i][1] or '(root)'}"
            found += [(a[i], b[j], reason) for i, j in _sequence(a, b)]
    return found


def _moved(ours: list[Call], theirs: list[Call]) -> list[Matched]:
    found: list[Matched] = []
    for phase in dict.fromkeys(c.phase for c in ours):
        a = [c for c in ours if c.phase == phase and c.operator not in TRANSPARENT]
        b = [c for c in theirs if c.phase == phase and c.operator not in TRANSPARENT]
        pairs = _best(a, b) if len(a) * len(b) <= LARGEST else _blocks(a, b)
        found += [
            (
                a[i],
                b[j],
                None
                if a[i].module == b[j].module
                else f"in module {b[j].module or '(root)'}",
            )
            for i, j in pairs
            if a[i].shapes == b[j].shapes
        ]
    return found


def _reordered(ours: list[Call], theirs: list[Call]) -> list[Matched]:
    there: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
    for call in theirs:
        if call.operator not in TRANSPARENT or call.names:
            there[
                call.phase, call.module, call.operator, call.shapes, call.names
            ].append(call)
    found: list[Matched] = []
    for call in ours:
        others = there.get(
            (call.phase, call.module, call.operator, call.shapes, call.names)
        )
        if others:
            found.append(
                (call, others.pop(0), "at another place in the order of calls")
            )
    return found
