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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundoff.compare.call_pairs import TRANSPARENT, Call, calls_of, match_calls

Row = Mapping[str, Any]

MATCHED, BY_USE, REFERENCE_ONLY, CANDIDATE_ONLY = (
    "matched",
    "by use",
    "only in reference",
    "only in candidate",
)


@dataclass(frozen=True)
class Pair:
    """A row of each run that should hold the same value; one of them None where a row has no counterpart."""

    reference: int | None
    candidate: int | None
    status: str
    reason: str | None = None


def align(
    reference: Sequence[Row],
    candidate: Sequence[Row],
    modules: Mapping[str, str] | None = None,
) -> list[Pair]:
    """The pairs of one step's rows, in the order of the candidate's records, the reference's own ones after them.

    ``modules`` says how modules of the reference are called in the candidate (the longest prefix counts).
    """
    rename = renaming(modules or {})
    ours, theirs = calls_of(reference, rename), calls_of(candidate, lambda name: name)
    matched = match_calls(ours, theirs)
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
    names = {
        rename(row["name"]): row for row in reference if row["call"] < 0 and row["name"]
    }
    for row in candidate:
        if row["call"] < 0 and row["name"] in names and row["record"] not in pairs:
            add(names[row["name"]], row, MATCHED)
    _last_values(reference, candidate, rename, pairs, add)
    _by_use(
        matched,
        {r["record"]: r for r in reference},
        {r["record"]: r for r in candidate},
        pairs,
        add,
    )
    for row in candidate:
        if row["record"] not in pairs:
            pairs[row["record"]] = Pair(
                None, row["record"], CANDIDATE_ONLY, _lonely(row, "reference")
            )
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
    return (
        ".".join(part for part in name.split(".") if part != "_orig_mod")
        if "_orig_mod" in name
        else name
    )


def _by_use(
    matched: Sequence[tuple[Call, Call, str | None]],
    ours: Mapping[int, Row],
    theirs: Mapping[int, Row],
    pairs: Mapping[int, Pair],
    add: Callable[..., None],
) -> None:
    """Rows that two aligned calls read at the same place, and from there on what those are made of."""
    for one, other, _ in sorted(matched, key=lambda m: -m[1].record):
        for a, b in slots(one.rows, other.rows):
            while (
                a in ours
                and b in theirs
                and b not in pairs
                and ours[a]["shape"] == theirs[b]["shape"]
            ):
                row, twin = ours[a], theirs[b]
                leaves = row["call"] < 0 and twin["call"] < 0
                add(
                    row,
                    twin,
                    *(MATCHED, None) if leaves else (BY_USE, "read at the same place"),
                )
                # what a cast or a view is made of has the same use as it
                if (
                    twin["operator"] not in TRANSPARENT
                    or len(twin["inputs"] or ()) != 1
                ):
                    break
                b = twin["inputs"][0]
                handed = theirs.get(b)
                if handed is None:
                    break
                if (
                    row["operator"] == twin["operator"]
                    or handed["shape"] != row["shape"]
                ):
                    if (
                        row["operator"] not in TRANSPARENT
                        or len(row["inputs"] or ()) != 1
                    ):
                        break
                    a = row["inputs"][0]


def _last_values(
    ours: Sequence[Row],
    theirs: Sequence[Row],
    rename: Callable[[str], str],
    pairs: Mapping[int, Pair],
    add: Callable[..., None],
) -> None:
    """What the step leaves in parameters, buffers and gradients, also where other calls wrote it."""
    last = {rename(row["name"]): row for row in ours if row["name"]}
    for row in {row["name"]: row for row in theirs if row["name"]}.values():
        twin = last.get(row["name"])
        if (
            twin is not None
            and row["record"] not in pairs
            and twin["shape"] == row["shape"]
        ):
            add(twin, row, BY_USE, "the last value of this tensor")


def slots(ours: Sequence[Row], theirs: Sequence[Row]) -> list[tuple[int, int]]:
    """The pairs of records that two aligned calls read at the same place."""
    found: dict[tuple[int, int], None] = {}
    by_place = {row["place"]: row for row in ours}
    for row in theirs:
        twin = by_place.get(row["place"])
        if twin is not None and len(twin["inputs"] or ()) == len(row["inputs"] or ()):
            found.update(
                dict.fromkeys(
                    zip(twin["inputs"] or (), row["inputs"] or (), strict=False)
                )
            )
    return list(found)


def _lonely(row: Row, other: str) -> str:
    if row["operator"] in TRANSPARENT:
        return f"hands values on; the {other} has none here"
    if row["operator"] == "compiled":
        return "the boundary of a compiled region"
    if row["call"] < 0:
        return f"nothing in the {other} is read at the same place"
    if row["recomputed"]:
        return f"computed again in the backward pass; the {other} does not"
    return f"the {other} has no such call"
