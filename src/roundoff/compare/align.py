"""Which row of the candidate is which row of the reference: by name first, by structure where names differ.

Calls are aligned, and with them their rows, place by place. In this order, each step taking what the ones before left:

1. the same module, operator and count, where all calls of the module agree;
2. within a module, the sequences of calls (Needleman and Wunsch 1970: the best-scoring order-keeping pairs; operators
   must agree, equal shapes, parameters and values speak for a pair);
3. modules that are renamed: those left on both sides, in order, whose calls agree;
4. whatever module they are in, by the sequence of operators and shapes (a function moved into a module, or out of it);
5. reordered calls: the same operator and shapes, in another order;
6. by use: rows that take the same place among the inputs of an aligned call (inserted casts, leaves, fused operators).

What is left stays, with a reason. Every row of both runs is in the result exactly once, except that a reference row can
be the counterpart of several candidate rows by use (the cast of a tensor, and the tensor).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from roundoff.compare.distance import of_statistics

Row = Mapping[str, Any]

MATCHED, BY_USE, REFERENCE_ONLY, CANDIDATE_ONLY = "matched", "by use", "only in reference", "only in candidate"
#: Hand the values on, maybe in another format: an extra one of them is no difference in the program.
TRANSPARENT = frozenset(
    """_to_copy to clone contiguous detach alias lift_fresh lift copy _reshape_copy view reshape _unsafe_view expand t
    transpose permute squeeze unsqueeze""".split()
)
#: Two results whose statistics are this near speak for the same call.
ALIKE = 0.03
#: Above this many pairs of calls, a module's sequences are matched by their longest common blocks instead.
_LARGEST = 250_000


@dataclass(frozen=True)
class Pair:
    """A row of each run that should hold the same value; one of them None where a row has no counterpart."""

    reference: int | None
    candidate: int | None
    status: str
    reason: str | None = None


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
        self.phase, self.module = first["phase"], first["module"]
        self.operator = first["operator"].rstrip("_") or first["operator"]  # add_ writes what add makes
        self.shapes = tuple(tuple(row["shape"] or ()) for row in self.rows)

    @property
    def read(self) -> int:
        """How many tensors the call reads."""
        return sum(len(row["inputs"] or ()) for row in self.rows)

    @property
    def record(self) -> int:
        """The first row's: calls are in the order of these."""
        return int(self.rows[0]["record"])


def align(reference: Sequence[Row], candidate: Sequence[Row], modules: Mapping[str, str] | None = None) -> list[Pair]:
    """The pairs of one step's rows, in the order of the candidate's records, the reference's own ones after them.

    ``modules`` says how modules of the reference are called in the candidate (the longest prefix counts).
    """
    rename = renaming(modules or {})
    ours, theirs = _calls(reference, rename), _calls(candidate, lambda name: name)
    matched = _match(ours, theirs)
    pairs: dict[int, Pair] = {}
    of_reference: dict[int, int] = {}

    def add(one: Row, other: Row, status: str, reason: str | None = None) -> None:
        pairs[other["record"]] = Pair(one["record"], other["record"], status, reason)
        of_reference.setdefault(one["record"], other["record"])

    for one, other, reason in matched:
        by_place = {row["place"]: row for row in one.rows}
        for row in other.rows:
            if (twin := by_place.get(row["place"])) is not None:
                add(twin, row, MATCHED, reason)
    names = {rename(row["name"]): row for row in reference if row["call"] < 0 and row["name"]}
    for row in candidate:
        if row["call"] < 0 and row["name"] in names and row["record"] not in pairs:
            add(names[row["name"]], row, MATCHED)
    _last_values(reference, candidate, rename, pairs, add)
    _by_use(matched, {r["record"]: r for r in reference}, {r["record"]: r for r in candidate}, pairs, of_reference, add)
    for row in candidate:
        if row["record"] not in pairs:
            pairs[row["record"]] = Pair(None, row["record"], CANDIDATE_ONLY, _lonely(row, "reference"))
    found = [pairs[row["record"]] for row in candidate]
    found += [
        Pair(row["record"], None, REFERENCE_ONLY, _lonely(row, "candidate"))
        for row in reference
        if row["record"] not in of_reference
    ]
    return found


def renaming(modules: Mapping[str, str]) -> Callable[[str], str]:
    """A function that gives module and parameter names of the reference the candidate's prefix.

    >>> renaming({"encoder.layers": "blocks"})("encoder.layers.0.norm")
    'blocks.0.norm'
    """
    ordered = sorted(modules.items(), key=lambda item: -len(item[0]))

    def rename(name: str) -> str:
        name = _plain(name)
        for old, new in ordered:
            if name == old or not old or name.startswith(old + "."):
                rest = name if not old else name[len(old) + 1 :]
                return ".".join(part for part in (new, rest) if part)
        return name

    return rename


def _plain(name: str) -> str:
    """Without what torch.compile puts into the path."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod") if "_orig_mod" in name else name


def _calls(rows: Sequence[Row], rename: Callable[[str], str]) -> list[Call]:
    grouped: dict[int, list[Row]] = defaultdict(list)
    named = {row["record"]: row["name"] for row in rows if row["call"] < 0 and row["name"]}
    source: dict[int, str] = {}
    for row in rows:
        inputs = list(row["inputs"] or [])
        if row["record"] in named:
            source[row["record"]] = rename(named[row["record"]])
        elif row["operator"] in TRANSPARENT and len(inputs) == 1 and inputs[0] in source:
            source[row["record"]] = source[inputs[0]]  # a view or a cast of a parameter
        if row["call"] >= 0 and row["role"] in (None, "output"):
            grouped[row["call"]].append(row)
    found = []
    for group in grouped.values():
        names = {source[i] for row in group for i in row["inputs"] or () if i in source}
        call = Call(group, frozenset(names | {rename(row["name"]) for row in group if row["name"]}))
        call.module = rename(call.module)
        found.append(call)
    return sorted(found, key=lambda call: call.record)


def _match(ours: list[Call], theirs: list[Call]) -> list[tuple[Call, Call, str | None]]:
    found: list[tuple[Call, Call, str | None]] = []
    left, right = _grouped(ours), _grouped(theirs)
    spare_left: list[Call] = []
    spare_right: list[Call] = [c for key in right.keys() - left.keys() for c in right[key]]
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
            taken_left, taken_right = {id(a) for a, _, _ in more}, {id(b) for _, b, _ in more}
            spare_left = [c for c in spare_left if id(c) not in taken_left]
            spare_right = [c for c in spare_right if id(c) not in taken_right]
    return found


def _grouped(calls: Iterable[Call]) -> dict[tuple[str, str], list[Call]]:
    found: dict[tuple[str, str], list[Call]] = defaultdict(list)
    for call in calls:
        found[call.phase, call.module].append(call)
    return found


def _sequence(ours: Sequence[Call], theirs: Sequence[Call]) -> list[tuple[int, int]]:
    """The pairs of two sequences of one module that keep their order and score best."""
    if len(ours) == len(theirs) and all(a.operator == b.operator and a.names == b.names for a, b in zip(ours, theirs, strict=True)):
        return [(i, i) for i in range(len(ours))]
    start = 0
    while start < min(len(ours), len(theirs)) and _twins(ours[start], theirs[start]):
        start += 1
    end = 0
    while end < min(len(ours), len(theirs)) - start and _twins(ours[-1 - end], theirs[-1 - end]):
        end += 1
    a, b = ours[start : len(ours) - end], theirs[start : len(theirs) - end]
    middle = _by_value(a, b, _best(a, b)) if len(a) * len(b) <= _LARGEST else _blocks(a, b)
    pairs = [(i, i) for i in range(start)] + [(start + i, start + j) for i, j in middle]
    return pairs + [(len(ours) - end + i, len(theirs) - end + i) for i in range(end)]


def _twins(one: Call, other: Call) -> bool:
    return one.operator == other.operator and one.shapes == other.shapes and one.names == other.names and _alike(one, other)


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


def _by_value(ours: Sequence[Call], theirs: Sequence[Call], pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pairs, where calls of one operator stand in another order and only their values tell which is which."""
    unlike = [(i, j) for i, j in pairs if not _alike(ours[i], theirs[j])]
    if not unlike:
        return list(pairs)
    kept = dict(set(pairs) - set(unlike))
    left = [i for i in range(len(ours)) if i not in kept]
    right = [j for j in range(len(theirs)) if j not in set(kept.values())]
    for i in left:
        same = [j for j in right if _score(ours[i], theirs[j]) and ours[i].shapes == theirs[j].shapes and _alike(ours[i], theirs[j])]
        if len(same) == 1:
            kept[i] = same[0]
            right.remove(same[0])
    kept |= {i: j for i, j in unlike if i not in kept and j in right}
    return sorted(kept.items())


def _score(one: Call, other: Call) -> float:
    """How well two calls go together; 0 where they must not."""
    if one.operator != other.operator:
        return 0.0
    if one.operator in TRANSPARENT and (one.shapes != other.shapes or one.names != other.names or not _alike(one, other)):
        return 0.0  # which one of many views it is shows in what reads it
    if one.shapes != other.shapes and (one.names != other.names or one.read != other.read):
        return 0.0
    score = 4.0 + 2.0 * (one.shapes == other.shapes)
    if one.names or other.names:
        score += 4.0 if one.names == other.names else -3.0
    return score + 3.0 * _alike(one, other)


def _alike(one: Call, other: Call) -> bool:
    """Whether the first rows hold about the same values, as far as statistics tell."""
    error = of_statistics(one.rows[0], other.rows[0]).error
    return error is not None and error < ALIKE


def _blocks(ours: Sequence[Call], theirs: Sequence[Call]) -> list[tuple[int, int]]:
    matcher = SequenceMatcher(None, [(c.operator, c.shapes) for c in ours], [(c.operator, c.shapes) for c in theirs], False)
    return [(m.a + i, m.b + i) for m in matcher.get_matching_blocks() for i in range(m.size)]


def _renamed(ours: list[Call], theirs: list[Call]) -> list[tuple[Call, Call, str | None]]:
    """Modules that only one side has, in order, where operators and shapes of their calls agree."""
    left, right = _grouped(ours), _grouped(theirs)
    mine = [key for key in left if key not in right]
    other = [key for key in right if key not in left]

    def shape(calls: Sequence[Call]) -> tuple[Any, ...]:
        return tuple((c.operator, c.shapes) for c in calls if c.operator not in TRANSPARENT)

    matcher = SequenceMatcher(
        None, [(k[0], shape(left[k])) for k in mine], [(k[0], shape(right[k])) for k in other], False
    )
    found: list[tuple[Call, Call, str | None]] = []
    for block in matcher.get_matching_blocks():
        for i in range(block.size):
            a, b = left[mine[block.a + i]], right[other[block.b + i]]
            if not shape(a):
                continue
            reason = f"module {mine[block.a + i][1] or '(root)'} is called {other[block.b + i][1] or '(root)'}"
            found += [(a[i], b[j], reason) for i, j in _sequence(a, b)]
    return found


def _moved(ours: list[Call], theirs: list[Call]) -> list[tuple[Call, Call, str | None]]:
    found: list[tuple[Call, Call, str | None]] = []
    for phase in dict.fromkeys(c.phase for c in ours):
        a = [c for c in ours if c.phase == phase and c.operator not in TRANSPARENT]
        b = [c for c in theirs if c.phase == phase and c.operator not in TRANSPARENT]
        pairs = _best(a, b) if len(a) * len(b) <= _LARGEST else _blocks(a, b)
        found += [
            (a[i], b[j], None if a[i].module == b[j].module else f"in module {b[j].module or '(root)'}")
            for i, j in pairs
            if a[i].shapes == b[j].shapes
        ]
    return found


def _reordered(ours: list[Call], theirs: list[Call]) -> list[tuple[Call, Call, str | None]]:
    there: dict[tuple[Any, ...], list[Call]] = defaultdict(list)
    for call in theirs:
        if call.operator not in TRANSPARENT or call.names:
            there[call.phase, call.module, call.operator, call.shapes, call.names].append(call)
    found: list[tuple[Call, Call, str | None]] = []
    for call in ours:
        others = there.get((call.phase, call.module, call.operator, call.shapes, call.names))
        if others:
            found.append((call, others.pop(0), "at another place in the order of calls"))
    return found


def _by_use(
    matched: Sequence[tuple[Call, Call, str | None]], ours: Mapping[int, Row], theirs: Mapping[int, Row],
    pairs: Mapping[int, Pair], of_reference: Mapping[int, int], add: Callable[..., None],
) -> None:  # fmt: skip
    """Rows that two aligned calls read at the same place, and from there on what those are made of."""
    for one, other, _ in sorted(matched, key=lambda m: -m[1].record):
        for a, b in slots(one.rows, other.rows):
            while a in ours and b in theirs and b not in pairs and ours[a]["shape"] == theirs[b]["shape"]:
                row, twin = ours[a], theirs[b]
                leaves = row["call"] < 0 and twin["call"] < 0
                add(row, twin, *(MATCHED, None) if leaves else (BY_USE, "read at the same place"))
                # what a cast or a view is made of has the same use as it
                if twin["operator"] not in TRANSPARENT or len(twin["inputs"] or ()) != 1:
                    break
                b = twin["inputs"][0]
                handed = theirs.get(b)
                if handed is None:
                    break
                if row["operator"] == twin["operator"] or handed["shape"] != row["shape"]:
                    if row["operator"] not in TRANSPARENT or len(row["inputs"] or ()) != 1:
                        break
                    a = row["inputs"][0]


def _last_values(
    ours: Sequence[Row], theirs: Sequence[Row], rename: Callable[[str], str], pairs: Mapping[int, Pair],
    add: Callable[..., None],
) -> None:  # fmt: skip
    """What the step leaves in parameters, buffers and gradients, also where other calls wrote it."""
    last = {rename(row["name"]): row for row in ours if row["name"]}
    for row in {row["name"]: row for row in theirs if row["name"]}.values():
        twin = last.get(row["name"])
        if twin is not None and row["record"] not in pairs and twin["shape"] == row["shape"]:
            add(twin, row, BY_USE, "the last value of this tensor")


def slots(ours: Sequence[Row], theirs: Sequence[Row]) -> list[tuple[int, int]]:
    """The pairs of records that two aligned calls read at the same place."""
    found: dict[tuple[int, int], None] = {}
    by_place = {row["place"]: row for row in ours}
    for row in theirs:
        twin = by_place.get(row["place"])
        if twin is not None and len(twin["inputs"] or ()) == len(row["inputs"] or ()):
            found.update(dict.fromkeys(zip(twin["inputs"] or (), row["inputs"] or (), strict=False)))
    return list(found)


def _lonely(row: Row, other: str) -> str:
    if row["operator"] in TRANSPARENT:
        return f"hands values on; the {other} has none here"
    if row["operator"] == "compiled":
        return "the boundary of a compiled region"
    if row["call"] < 0:
        return f"nothing in the {other} is read at the same place"
    return f"the {other} has no such call"
