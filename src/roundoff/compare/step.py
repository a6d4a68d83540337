"""One step of one rank of both runs: aligned, measured and explained, as rows of the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roundoff.compare.alignment import REFERENCE_ONLY, Pair, align
from roundoff.compare.call_pairs import TRANSPARENT
from roundoff.compare.distance import Distances, of_statistics
from roundoff.compare.divergence import Divergence
from roundoff.compare.explain import Memory, Sides, explained, unwritten
from roundoff.compare.findings import OWN, Bound, Finding, contributions
from roundoff.compare.replayed import Replayed, differences, replayed
from roundoff.compare.rerun import Expected, Runs
from roundoff.compare.rounding_bound import (
    amplification,
    condition,
    format_of,
    smallest,
    terms,
    tolerance,
    unit,
    working,
)
from roundoff.ops import base, operators_that, values_read

Row = Mapping[str, Any]

#: Why new memory is not measured.
UNWRITTEN = "memory that nothing was written to yet"
#: Their two operands may be exchanged.
COMMUTATIVE = frozenset(("add", "mul"))


def compare_step(
    sides: Sides,
    memory: Memory,
    *,
    modules: Mapping[str, str],
    floors: tuple[Mapping[int, float], Mapping[int, float]] = ({}, {}),
) -> list[dict[str, Any]]:
    """The rows of the table for one step, those of the candidate first, in its order of execution.

    ``floors`` are the noise floors by record, of the reference and of the candidate; ``memory`` is changed.
    """
    ours, theirs = sides.ours, sides.theirs
    pairs = align(list(ours.values()), list(theirs.values()), modules)
    distance = Distances(ours, theirs, sides.mine, sides.other)
    divergence = _divergence(sides, pairs, distance, memory, floors)
    findings = divergence.run()
    share = contributions(findings, {r: _read(theirs[r]) for r in findings})
    rows = []
    for pair in pairs:
        finding = findings.get(pair.candidate) if pair.candidate is not None else None
        row = _row(sides, pair, finding, distance)
        if finding is not None:
            row["contribution"] = share.get(finding.record, 0.0)
            if finding.cause == OWN:
                row |= explained(sides, divergence, finding) | unwritten(
                    memory, theirs[finding.record]
                )
            elif finding.origin is not None:
                row["origin"] = theirs[finding.origin]["site"]
        rows.append(row)
    _remember(memory, theirs, findings)
    lonely = {pair.reference for pair in pairs if pair.status == REFERENCE_ONLY}
    last = {row["name"]: row for row in ours.values() if row["name"]}
    memory.unwritten |= {
        name: row
        for name, row in last.items()
        if row["record"] in lonely and row["call"] >= 0
    }
    return rows


def _divergence(
    sides: Sides,
    pairs: Sequence[Pair],
    distance: Distances,
    memory: Memory,
    floors: tuple[Mapping[int, float], Mapping[int, float]],
) -> Divergence:
    ours, theirs = sides.ours, sides.theirs
    adopted = working(theirs.values()) - working(ours.values())
    counterpart = {
        p.candidate: p.reference
        for p in pairs
        if p.candidate is not None and p.reference is not None
    }
    exact = frozenset(
        p.candidate for p in pairs if p.candidate is not None and p.status == "matched"
    )
    first, first_twin = _first_rows(theirs), _first_rows(ours)

    def fits(one: int, other: int) -> bool:
        return (
            one in ours
            and other in theirs
            and bool(ours[one]["shape"] == theirs[other]["shape"])
        )

    runs = Runs()
    mine, other = (
        None if side is None else side.whole() for side in (sides.mine, sides.other)
    )
    holders = {counterpart[record]: record for record in sorted(exact, reverse=True)}
    expected = (
        None if other is None else Expected(ours, first_twin, holders, other, fits)
    )
    least = 2 * max(
        (unit(d) for d in working(theirs.values()) | working(ours.values())),
        default=0.0,
    )

    def bound(twin: Row, row: Row) -> Bound:
        inputs = [theirs[i] for i in row["inputs"] or () if i in theirs]
        floor = max(
            floors[0].get(twin["record"], 0.0), floors[1].get(row["record"], 0.0)
        )
        explained = tolerance(twin, row, adopted, inputs)
        maker = _maker(ours, twin)
        given = [ours[i] for i in maker["inputs"] or () if i in ours]
        inner = condition(maker, given)
        return Bound(
            max(explained, 3 * floor), inner, max(inner, amplification(maker, given))
        )

    def again(twin: Row, row: Row, aligned: bool, same_inputs: bool) -> Replayed:
        dtype = format_of(twin, row, adopted)
        read = {theirs[i]["dtype"] for i in row["inputs"] or () if i in theirs}
        assert other is not None  # noqa: S101 (replay is only given where tensors are)
        return replayed(
            row,
            first=first[row["call"]],
            first_twin=first_twin.get(twin["call"], twin),
            tensors=other,
            unit=max([unit(dtype), *(unit(d) for d in read & adopted)]),
            least=smallest(dtype),
            aligned=aligned and twin["call"] >= 0,
            reference=mine[twin["record"]]
            if same_inputs
            and mine is not None
            and twin["record"] in mine
            and twin["shape"] == row["shape"]
            else None,
            fits=fits,
            runs=runs,
            terms=terms(
                row,
                [theirs[i]["shape"] or () for i in row["inputs"] or () if i in theirs],
            )
            if base(row["operator"]) in operators_that("sum")
            else 1.0,
            region=None
            if expected is None or row["operator"] in operators_that("cast")
            else expected.region(twin["record"], row["record"]),
        )

    def changed(twin: Row, row: Row) -> tuple[str, ...]:
        one, other = first_twin.get(twin["call"]), first.get(row["call"])
        return () if one is None or other is None else differences(one, other)

    def carried(row: Row) -> tuple[float, bool]:
        return memory.names.get(row["name"] or "", (memory.worst, memory.parted))

    return Divergence(
        ours,
        theirs,
        counterpart,
        exact,
        distance,
        bound,
        lambda a, b: _slots(a, b, counterpart),
        changed,
        again if other is not None else None,
        least,
        carried,
        lambda a, b: of_statistics(
            {**theirs[a], "shape": theirs[b]["shape"]}, theirs[b]
        ),
    )


def _maker(rows: Mapping[int, Row], row: Row) -> Row:
    """The row of the operator that made these values, which views and casts only hand on."""
    while (
        row["operator"] in TRANSPARENT
        and len(row["inputs"] or ()) == 1
        and row["inputs"][0] in rows
    ):
        row = rows[row["inputs"][0]]
    return row


def _slots(
    twin: Row, row: Row, counterpart: Mapping[int, int]
) -> list[tuple[int, int]]:
    """What two aligned rows read in the same places: not the memory that they overwrite. The operands of a sum or product
    may be exchanged."""
    ours = values_read(twin["operator"], twin["overload"], twin["inputs"])
    theirs = values_read(row["operator"], row["overload"], row["inputs"])
    if len(ours) != len(theirs):
        return []
    if len(ours) == 2 and base(row["operator"]) in COMMUTATIVE:
        straight = [counterpart.get(c) == r for r, c in zip(ours, theirs, strict=True)]
        crossed = [
            counterpart.get(c) == r for r, c in zip(reversed(ours), theirs, strict=True)
        ]
        if sum(crossed) > sum(straight):
            ours = ours[::-1]
    return list(zip(ours, theirs, strict=True))


def _first_rows(rows: Mapping[int, Row]) -> dict[int, Row]:
    """The first row of each call: it holds the arguments."""
    found: dict[int, Row] = {}
    for row in rows.values():
        if row["call"] >= 0:
            found.setdefault(row["call"], row)
    return found


def _read(row: Row) -> list[int]:
    if row["call"] < 0:
        return list(row["inputs"] or ())
    return values_read(row["operator"], row["overload"], row["inputs"])


def _remember(
    memory: Memory, theirs: Mapping[int, Row], findings: Mapping[int, Finding]
) -> None:
    for record, finding in findings.items():
        name, error, parted = (
            theirs[record]["name"],
            finding.error or 0.0,
            finding.cause is not None,
        )
        memory.parted |= parted
        memory.worst = max(memory.worst, error)
        if name:
            memory.names[name] = error, parted


def _row(
    sides: Sides, pair: Pair, finding: Finding | None, distance: Distances
) -> dict[str, Any]:
    """Labels of both sides, metrics, and what was found."""
    theirs = sides.theirs[pair.candidate] if pair.candidate is not None else None
    ours = sides.ours[pair.reference] if pair.reference is not None else None
    some: Row = theirs or ours or {}
    row: dict[str, Any] = {
        key: some[key]
        for key in ("rank", "step", "phase", "place", "role", "name", "numel")
    }
    for prefix, side in (("", theirs), ("reference_", ours)):
        for key in ("site", "operator", "line", "dtype", "shape", "record"):
            row[prefix + key] = None if side is None else side[key]
    row |= {
        "status": pair.status,
        "reason": pair.reason,
        "view": some["view_of"] is not None,
        "call": some["call"],
    }
    if pair.status == REFERENCE_ONLY or ours is None or theirs is None:
        return row
    if {base(theirs["operator"]), base(ours["operator"])} <= operators_that(
        "leave memory unwritten"
    ):
        return row | {"reason": UNWRITTEN}  # whatever stood there
    found, metrics = distance.full(ours["record"], theirs["record"])
    row |= {"error": found.error, "equal": found.equal}
    if metrics is not None:
        known = metrics._asdict()
        why = known.pop("reason")
        row["reason"] = row["reason"] or why
        row |= {
            "share_equal": known.pop("equal"),
            **{k: v for k, v in known.items() if k != "numel"},
        }
    elif found.error is None:
        row["reason"] = (
            row["reason"]
            or theirs["reason"]
            or ours["reason"]
            or _unknown(ours, theirs)
        )
    if finding is not None:
        row |= {
            "tolerance": finding.tolerance,
            "inputs_error": finding.inputs,
            "own": finding.own,
            "cause": finding.cause,
        }
    return row


def _unknown(ours: Row, theirs: Row) -> str:
    if ours["shape"] != theirs["shape"]:
        return (
            f"shapes differ: {ours['shape']} in the reference, {theirs['shape']} here"
        )
    return "no statistics on both sides"
