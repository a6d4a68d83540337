"""What is said of a row that made an error itself: the operator to name, what it looks like, and what to try."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from roundoff.compare.call_pairs import TRANSPARENT
from roundoff.compare.divergence import Divergence
from roundoff.compare.findings import Finding
from roundoff.compare.symptoms import ADVICE, looks_like
from roundoff.record import StepTensors

Row = Mapping[str, Any]


@dataclass
class Memory:
    """What the earlier steps of a rank leave to later ones: how far tensors had parted, and whether by a fault."""

    names: dict[str, tuple[float, bool]] = field(default_factory=dict)
    unwritten: dict[str, Row] = field(
        default_factory=dict
    )  # the reference's last write that the candidate lacks
    worst: float = 0.0
    parted: bool = False


@dataclass(frozen=True)
class Sides:
    """The rows of one step of both runs, and their tensors where they were kept."""

    ours: Mapping[int, Row]
    theirs: Mapping[int, Row]
    mine: StepTensors | None
    other: StepTensors | None


def explained(sides: Sides, divergence: Divergence, finding: Finding) -> dict[str, Any]:
    """What a row that made an error itself looks like, and the operator to name: of several that have no counterpart, the
    one where NaN or Inf came up, or the last that computes."""
    theirs, ours = sides.theirs, sides.ours
    row, twin = theirs[finding.record], ours[divergence.counterpart[finding.record]]
    blamed = _blamed(theirs, finding, row)
    missing = None if finding.missing is None else ours[finding.missing]
    if (
        missing is not None and missing["phase"] == "backward"
    ):  # named for the forward operator that it belongs to
        matched = set(divergence.counterpart.values())
        forward = [
            r
            for r in ours.values()
            if r["phase"] == "forward"
            and r["record"] not in matched
            and r["call"] >= 0
            and (r["module"], r["line"]) == (missing["module"], missing["line"])
            and r["operator"] == missing["operator"]
        ]
        missing = forward[0] if forward else missing
    cut = (
        _cut(divergence, row)
        if missing is not None or twin["operator"] != row["operator"]
        else None
    )
    again = finding.replayed
    expected = None if again is None else again.expected
    actual = (
        sides.other[finding.record]
        if sides.other is not None and finding.record in sides.other
        else None
    )
    if (
        expected is None
        and sides.mine is not None
        and finding.inputs == 0
        and twin["record"] in sides.mine
    ):
        expected = sides.mine[twin["record"]]
    if actual is not None and expected is not None and actual.shape != expected.shape:
        expected = None
    if cut is not None:
        there = cut in theirs.values()
        blamed, missing = (cut, None) if there else (blamed, cut)
    if (
        row["operator"] == twin["operator"]
        and row["call"] >= 0
        and not finding.arguments
    ):
        finding.arguments = divergence.changed(twin, row)
    looks = looks_like(
        finding,
        row,
        twin,
        expected=expected,
        actual=actual,
        missing=missing,
        ours=ours,
        theirs=theirs,
        cut=cut,
        counterpart=divergence.counterpart,
    )
    return {
        "blamed": blamed["site"],
        "blamed_line": blamed["line"],
        "blamed_phase": (missing or blamed)["phase"],
        "blamed_reference": (missing or twin)["site"],
        "blamed_reference_line": (missing or twin)["line"],
        "looks_like": looks.label,
        "evidence": looks.evidence,
        "advice": looks.advice,
        "semantic": None if again is None else _finite(again.semantic),
        "kernel_excess": None if again is None else _finite(again.excess),
    }


def _cut(divergence: Divergence, row: Row) -> Row | None:
    """A detach that only one side has: the values agree, and in the backward pass a branch is missing or is too much."""
    if row["phase"] != "backward":
        return None
    matched = set(divergence.counterpart.values())
    here = [
        r for r in divergence.theirs.values() if r["record"] not in divergence.exact
    ]
    there = [r for r in divergence.ours.values() if r["record"] not in matched]
    for rows in (here, there):
        found = [
            r
            for r in rows
            if r["operator"] == "detach" and r["phase"] == "forward" and r["call"] >= 0
        ]
        if found:
            return found[0]
    return None


def unwritten(memory: Memory, row: Row) -> dict[str, Any]:
    """Where a tensor differs because the step before did not write it: the operator that the candidate lacks."""
    missing = memory.unwritten.get(row["name"] or "") if row["call"] < 0 else None
    if missing is None:
        return {}
    line = f" ({missing['line']})" if missing["line"] else ""
    return {
        "blamed_reference": missing["site"],
        "blamed_reference_line": missing["line"],
        "blamed_phase": missing["phase"],
        "looks_like": "missing operator",
        "advice": ADVICE["missing operator"],
        "evidence": f"{missing['site']}{line} of the step before is in the reference only, and wrote this",
    }


def _finite(value: float | None) -> float | None:
    return None if value is None else value if math.isfinite(value) else math.inf


def _blamed(theirs: Mapping[int, Row], finding: Finding, row: Row) -> Row:
    region = [theirs[r] for r in finding.region]
    broken = [
        r for r in region if (r["nan"] or 0) + (r["posinf"] or 0) + (r["neginf"] or 0)
    ]
    if broken and math.isinf(finding.error or 0.0):
        return broken[0]
    if row["call"] < 0 or row["operator"] in TRANSPARENT:
        computing = [
            r for r in region if r["call"] >= 0 and r["operator"] not in TRANSPARENT
        ]
        return computing[-1] if computing else row
    return row
