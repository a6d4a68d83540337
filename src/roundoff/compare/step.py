"""One step of one rank of both runs: aligned, measured and explained, as rows of the table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roundoff.attribute.divergence import Divergence
from roundoff.attribute.findings import OWN, Bound, Finding, contributions
from roundoff.attribute.looks import ADVICE, looks_like
from roundoff.attribute.replayed import Replayed, differences, replayed
from roundoff.attribute.rerun import Expected, Runs
from roundoff.attribute.roles import EMPTY, base, values_read
from roundoff.capture.refusal import CASTS
from roundoff.compare.align import REFERENCE_ONLY, Pair, align
from roundoff.compare.calls import TRANSPARENT
from roundoff.compare.distance import Distances, of_statistics
from roundoff.compare.tolerance import (
    SUMS,
    amplification,
    condition,
    format_of,
    smallest,
    terms,
    tolerance,
    unit,
    working,
)
from roundoff.store.step_tensors import StepTensors

Row = Mapping[str, Any]

#: Why new memory is not measured.
UNWRITTEN = "memory that nothing was written to yet"


@dataclass
class Memory:
    """What the earlier steps of a rank leave to later ones: how far tensors had parted, and whether by a fault."""

    names: dict[str, tuple[float, bool]] = field(default_factory=dict)
    unwritten: dict[str, Row] = field(default_factory=dict)  # the reference's last write that the candidate lacks
    worst: float = 0.0
    parted: bool = False


@dataclass(frozen=True)
class Sides:
    """The rows of one step of both runs, and their tensors where they were kept."""

    ours: Mapping[int, Row]
    theirs: Mapping[int, Row]
    mine: StepTensors | None
    other: StepTensors | None


def compare_step(
    sides: Sides, memory: Memory, *, modules: Mapping[str, str],
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
    named: set[int] = set()
    for pair in pairs:
        finding = findings.get(pair.candidate) if pair.candidate is not None else None
        row = _row(sides, pair, finding, distance)
        if finding is not None:
            row["contribution"] = share.get(finding.record, 0.0)
            if finding.cause == OWN:
                row |= _explained(sides, divergence, finding, named) | _unwritten(memory, theirs[finding.record])
            elif finding.origin is not None:
                row["origin"] = theirs[finding.origin]["site"]
        rows.append(row)
    _remember(memory, theirs, findings)
    lonely = {pair.reference for pair in pairs if pair.status == REFERENCE_ONLY}
    last = {row["name"]: row for row in ours.values() if row["name"]}
    memory.unwritten |= {name: row for name, row in last.items() if row["record"] in lonely and row["call"] >= 0}
    return rows


def _divergence(
    sides: Sides, pairs: Sequence[Pair], distance: Distances, memory: Memory,
    floors: tuple[Mapping[int, float], Mapping[int, float]],
) -> Divergence:
    ours, theirs = sides.ours, sides.theirs
    adopted = working(theirs.values()) - working(ours.values())
    counterpart = {p.candidate: p.reference for p in pairs if p.candidate is not None and p.reference is not None}
    exact = frozenset(p.candidate for p in pairs if p.candidate is not None and p.status == "matched")
    first, first_twin = _first_rows(theirs), _first_rows(ours)

    def fits(one: int, other: int) -> bool:
        return one in ours and other in theirs and bool(ours[one]["shape"] == theirs[other]["shape"])

    runs = Runs()
    mine, other = (None if side is None else side.whole() for side in (sides.mine, sides.other))
    holders = {counterpart[record]: record for record in sorted(exact, reverse=True)}
    expected = None if other is None else Expected(ours, first_twin, holders, other, fits)
    least = 2 * max((unit(d) for d in working(theirs.values()) | working(ours.values())), default=0.0)

    def bound(twin: Row, row: Row) -> Bound:
        inputs = [theirs[i] for i in row["inputs"] or () if i in theirs]
        floor = max(floors[0].get(twin["record"], 0.0), floors[1].get(row["record"], 0.0))
        explained = tolerance(twin, row, adopted, inputs)
        maker = _maker(ours, twin)
        given = [ours[i] for i in maker["inputs"] or () if i in ours]
        inner = condition(maker, given)
        return Bound(max(explained, 3 * floor), inner, max(inner, amplification(maker, given)))

    def again(twin: Row, row: Row, aligned: bool, same_inputs: bool) -> Replayed:
        dtype = format_of(twin, row, adopted)
        read = {theirs[i]["dtype"] for i in row["inputs"] or () if i in theirs}
        assert other is not None  # noqa: S101 (replay is only given where tensors are)
        return replayed(
            row, first=first[row["call"]], first_twin=first_twin.get(twin["call"], twin), tensors=other,
            unit=max([unit(dtype), *(unit(d) for d in read & adopted)]), least=smallest(dtype),
            aligned=aligned and twin["call"] >= 0,
            reference=mine[twin["record"]] if same_inputs and mine is not None and twin["record"] in mine
            and twin["shape"] == row["shape"] else None,
            fits=fits, runs=runs,
            terms=terms(row, [theirs[i]["shape"] or () for i in row["inputs"] or () if i in theirs])
            if base(row["operator"]) in SUMS else 1.0,
            region=None if expected is None or row["operator"] in CASTS else expected.region(twin["record"], row["record"]),
        )  # fmt: skip

    def changed(twin: Row, row: Row) -> tuple[str, ...]:
        one, other = first_twin.get(twin["call"]), first.get(row["call"])
        return () if one is None or other is None else differences(one, other)

    def carried(row: Row) -> tuple[float, bool]:
        return memory.names.get(row["name"] or "", (memory.worst, memory.parted))

    return Divergence(
        ours, theirs, counterpart, exact, distance, bound, lambda a, b: _slots(a, b, counterpart), changed,
        again if other is not None else None, least, carried,
        lambda a, b: of_statistics({**theirs[a], "shape": theirs[b]["shape"]}, theirs[b]),
    )  # fmt: skip


def _maker(rows: Mapping[int, Row], row: Row) -> Row:
    """The row of the operator that made these values, which views and casts only hand on."""
    while row["operator"] in TRANSPARENT and len(row["inputs"] or ()) == 1 and row["inputs"][0] in rows:
        row = rows[row["inputs"][0]]
    return row


def _slots(twin: Row, row: Row, counterpart: Mapping[int, int]) -> list[tuple[int, int]]:
    """What two aligned rows read in the same places: not the memory that they overwrite. The operands of a sum or product
    may be exchanged."""
    ours, theirs = values_read(twin, 1), values_read(row, 1)
    if len(ours) != len(theirs):
        return []
    if len(ours) == 2 and base(row["operator"]) in COMMUTATIVE:
        straight = [counterpart.get(c) == r for r, c in zip(ours, theirs, strict=True)]
        crossed = [counterpart.get(c) == r for r, c in zip(reversed(ours), theirs, strict=True)]
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
    return values_read(row, 1) if row["call"] >= 0 else list(row["inputs"] or ())


def _remember(memory: Memory, theirs: Mapping[int, Row], findings: Mapping[int, Finding]) -> None:
    for record, finding in findings.items():
        name, error, parted = theirs[record]["name"], finding.error or 0.0, finding.cause is not None
        memory.parted |= parted
        memory.worst = max(memory.worst, error)
        if name:
            memory.names[name] = error, parted


COMMUTATIVE = frozenset(("add", "mul"))
_LABELS = ("rank", "step", "phase", "module", "operator", "place", "role", "name", "line", "dtype", "shape", "numel", "site")


def _row(sides: Sides, pair: Pair, finding: Finding | None, distance: Distances) -> dict[str, Any]:
    """Labels of both sides, metrics, and what was found."""
    theirs = sides.theirs[pair.candidate] if pair.candidate is not None else None
    ours = sides.ours[pair.reference] if pair.reference is not None else None
    some: Row = theirs or ours or {}
    row: dict[str, Any] = {key: some[key] for key in ("rank", "step", "phase", "place", "role", "name", "numel")}
    for prefix, side in (("", theirs), ("reference_", ours)):
        for key in ("site", "operator", "line", "dtype", "shape", "record"):
            row[prefix + key] = None if side is None else side[key]
    row |= {"status": pair.status, "reason": pair.reason, "view": some["view_of"] is not None, "call": some["call"]}
    if pair.status == REFERENCE_ONLY or ours is None or theirs is None:
        return row
    if base(theirs["operator"]) in EMPTY and base(ours["operator"]) in EMPTY:
        return row | {"reason": UNWRITTEN}  # whatever stood there
    found, metrics = distance.full(ours["record"], theirs["record"])
    row |= {"error": found.error, "equal": found.equal}
    if metrics is not None:
        known = metrics._asdict()
        why = known.pop("reason")
        row["reason"] = row["reason"] or why
        row |= {"share_equal": known.pop("equal"), **{k: v for k, v in known.items() if k != "numel"}}
    elif found.error is None:
        row["reason"] = row["reason"] or theirs["reason"] or ours["reason"] or _unknown(ours, theirs)
    if finding is not None:
        row |= {
            "tolerance": finding.tolerance, "inputs_error": finding.inputs, "own": finding.own, "cause": finding.cause,
        }  # fmt: skip
    return row


def _unknown(ours: Row, theirs: Row) -> str:
    if ours["shape"] != theirs["shape"]:
        return f"shapes differ: {ours['shape']} in the reference, {theirs['shape']} here"
    return "no statistics on both sides"


def _explained(sides: Sides, divergence: Divergence, finding: Finding, named: set[int]) -> dict[str, Any]:
    """What a row that made an error itself looks like, and the operator to name: of several that have no counterpart, the
    one where NaN or Inf came up, or the last that computes."""
    theirs, ours = sides.theirs, sides.ours
    row, twin = theirs[finding.record], ours[divergence.counterpart[finding.record]]
    blamed = _blamed(theirs, finding, row)
    missing = None if finding.missing is None else ours[finding.missing]
    if missing is not None and missing["phase"] == "backward":  # named for the forward operator that it belongs to
        matched = set(divergence.counterpart.values())
        forward = [
            r for r in ours.values()
            if r["phase"] == "forward" and r["record"] not in matched and r["call"] >= 0
            and (r["module"], r["line"]) == (missing["module"], missing["line"]) and r["operator"] == missing["operator"]
        ]  # fmt: skip
        missing = forward[0] if forward else missing
    cut = _cut(divergence, row) if missing is not None or twin["operator"] != row["operator"] else None
    again = finding.replayed
    expected = None if again is None else again.expected
    actual = sides.other[finding.record] if sides.other is not None and finding.record in sides.other else None
    if expected is None and sides.mine is not None and finding.inputs == 0 and twin["record"] in sides.mine:
        expected = sides.mine[twin["record"]]
    if actual is not None and expected is not None and actual.shape != expected.shape:
        expected = None
    if cut is not None:
        there = cut in theirs.values()
        blamed, missing = (cut, None) if there else (blamed, cut)
    if row["operator"] == twin["operator"] and row["call"] >= 0 and not finding.arguments:
        finding.arguments = divergence.changed(twin, row)
    looks = looks_like(finding, row, twin, expected=expected, actual=actual, missing=missing, ours=ours, theirs=theirs,
                       cut=cut, counterpart=divergence.counterpart)  # fmt: skip
    named.add(blamed["record"])
    return {
        "blamed": blamed["site"], "blamed_line": blamed["line"], "blamed_phase": (missing or blamed)["phase"],
        "blamed_reference": (missing or twin)["site"], "blamed_reference_line": (missing or twin)["line"],
        "looks_like": looks.label, "evidence": looks.evidence, "advice": looks.advice,
        "semantic": None if again is None else _finite(again.semantic),
        "kernel_excess": None if again is None else _finite(again.excess),
    }  # fmt: skip


def _cut(divergence: Divergence, row: Row) -> Row | None:
    """A detach that only one side has: the values agree, and in the backward pass a branch is missing or is too much."""
    if row["phase"] != "backward":
        return None
    matched = set(divergence.counterpart.values())
    here = [r for r in divergence.theirs.values() if r["record"] not in divergence.exact]
    there = [r for r in divergence.ours.values() if r["record"] not in matched]
    for rows in (here, there):
        found = [r for r in rows if r["operator"] == "detach" and r["phase"] == "forward" and r["call"] >= 0]
        if found:
            return found[0]
    return None


def _unwritten(memory: Memory, row: Row) -> dict[str, Any]:
    """Where a tensor differs because the step before did not write it: the operator that the candidate lacks."""
    missing = memory.unwritten.get(row["name"] or "") if row["call"] < 0 else None
    if missing is None:
        return {}
    line = f" ({missing['line']})" if missing["line"] else ""
    return {
        "blamed_reference": missing["site"], "blamed_reference_line": missing["line"], "blamed_phase": missing["phase"],
        "looks_like": "missing operator", "advice": ADVICE["missing operator"],
        "evidence": f"{missing['site']}{line} of the step before is in the reference only, and wrote this",
    }  # fmt: skip


def _finite(value: float | None) -> float | None:
    return None if value is None else value if math.isfinite(value) else math.inf


def _blamed(theirs: Mapping[int, Row], finding: Finding, row: Row) -> Row:
    region = [theirs[r] for r in finding.region]
    broken = [r for r in region if (r["nan"] or 0) + (r["posinf"] or 0) + (r["neginf"] or 0)]
    if broken and math.isinf(finding.error or 0.0):
        return broken[0]
    if row["call"] < 0 or row["operator"] in TRANSPARENT:
        computing = [r for r in region if r["call"] >= 0 and r["operator"] not in TRANSPARENT]
        return computing[-1] if computing else row
    return row
