"""One value of two runs side by side: what made it, its statistics, every metric, and the elements that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from roundoff.compare import (
    EQUAL_INPUTS,
    Distances,
    Pair,
    align,
    differences,
    elements,
    measure,
    rows_of,
    tolerance,
    working,
)
from roundoff.errors import RunError, examples
from roundoff.ops import values_read
from roundoff.record import Run, StepTensors, load
from roundoff.verbs.compare import common, without_tensors

Row = Mapping[str, Any]

STATISTICS = (
    "min",
    "max",
    "mean",
    "l2",
    "std",
    "nan",
    "posinf",
    "neginf",
    "zero",
    "subnormal",
)
_SIDE = (
    "site",
    "name",
    "line",
    "phase",
    "place",
    "operator",
    "overload",
    "dtype",
    "shape",
    "numel",
    "record",
    "call",
    "reason",
)


def diff(
    reference: str | Path | Run,
    candidate: str | Path | Run,
    site: str,
    *,
    phase: str | None = None,
    rank: int | None = None,
    step: int | None = None,
    place: int | None = None,
    limit: int = 10,
    modules: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """One value of both runs, as plain data.

    Args:
        reference: the run to trust: its folder, its URL, or what ``load`` gave.
        candidate: the run to judge.
        site: as in the tables of either run, ``encoder.0/matmul#1``, or the name of a parameter or buffer; its counterpart
            is found as ``compare`` finds it.
        phase: ``forward``, ``backward``, ``optimizer``, ``collective``; the first that has the site when None.
        rank: the first that both runs have when None.
        step: the first that both runs have when None.
        place: which output of the site; its first when None.
        limit: how many elements of each list.
        modules: as of ``compare``.

    The keys: ``sides`` (``reference`` and ``candidate``: label, line, format and shape; None where it has no counterpart),
    ``status`` and ``reason``, ``arguments`` (that differ), ``inputs`` (relative error of each), ``statistics`` (both, and
    their difference), ``error`` and ``tolerance`` (relative), ``others`` (more values of that name). Where both kept
    tensors, ``metrics`` (as of ``Metrics``) and ``elements``; else these are None and ``note`` says why.

    Raises ``RunError`` when neither run has the site; the message has the nearest names.
    """
    ours, theirs = (
        run if isinstance(run, Run) else load(str(run))
        for run in (reference, candidate)
    )
    rank, step = (
        common("rank", ours.ranks, theirs.ranks, rank)[0],
        common("step", ours.steps, theirs.steps, step)[0],
    )
    one, other = rows_of(ours, rank, step), rows_of(theirs, rank, step)
    pairs = align(list(one.values()), list(other.values()), modules)
    found = _matching(pairs, one, other, site)
    chosen = [p for p in found if _fits(p, one, other, phase, place)]
    if not chosen:
        raise _no_such(
            found,
            one,
            other,
            site,
            phase,
            place,
            f"{theirs.location}: rank {rank}, step {step}",
        )
    pair = min(
        chosen,
        key=lambda p: (
            _some(p, one, other)["call"] < 0,
            _some(p, one, other)["place"] or 0,
        ),
    )
    twin = None if pair.reference is None else one[pair.reference]
    row = None if pair.candidate is None else other[pair.candidate]
    about: dict[str, Any] = {
        "reference": ours.location,
        "candidate": theirs.location,
        "asked": site,
        "rank": rank,
        "step": step,
        "status": pair.status,
        "reason": pair.reason,
        "sides": {"reference": _side(twin), "candidate": _side(row)},
        "others": [_label(_some(p, one, other)) for p in found if p != pair][:20],
        "arguments": [],
        "inputs": [],
        "statistics": [],
        "error": None,
        "tolerance": None,
        "metrics": None,
        "elements": None,
        "note": None,
    }
    if twin is None or row is None:
        return about
    kept = without_tensors(ours, theirs)
    mine, their = (
        StepTensors(ours, rank, step),
        StepTensors(theirs, rank, step),
    )
    distance = Distances(one, other, *((None, None) if kept else (mine, their)))
    adopted = working(other.values()) - working(one.values())
    counterpart = {p.candidate: p.reference for p in pairs if p.candidate is not None}
    about |= {
        "arguments": list(differences(_first(one, twin), _first(other, row))),
        "inputs": _inputs(twin, row, one, other, counterpart, distance),
        "statistics": [_beside(name, twin[name], row[name]) for name in STATISTICS],
        "error": distance(twin["record"], row["record"]).error,
        "tolerance": tolerance(
            twin, row, adopted, [other[i] for i in row["inputs"] or () if i in other]
        ),
    }
    if about["inputs"] and not any(i["error"] != 0 for i in about["inputs"]):
        about["tolerance"] *= EQUAL_INPUTS
    lacking = [
        side
        for side, tensors, r in (("reference", mine, twin), ("candidate", their, row))
        if r["record"] not in tensors
    ]
    if kept or lacking:
        about["note"] = (
            kept
            or f"the {' and the '.join(lacking)} kept no tensor of it: {twin['reason'] or row['reason'] or 'unknown why'}"
        )
        return about
    a, b = mine[twin["record"]], their[row["record"]]
    return about | {
        "metrics": measure(a, b)._asdict(),
        "elements": elements(a, b, limit),
    }


def _matching(
    pairs: Sequence[Pair], one: Mapping[int, Row], other: Mapping[int, Row], site: str
) -> list[Pair]:
    """The pairs of which a side is called so; those of the candidate's names where both runs use the name."""

    def called(rows: Mapping[int, Row], record: int | None) -> bool:
        return record is not None and site in (
            rows[record]["site"],
            rows[record]["name"],
        )

    here = [p for p in pairs if called(other, p.candidate)]
    return here or [p for p in pairs if called(one, p.reference)]


def _some(pair: Pair, one: Mapping[int, Row], other: Mapping[int, Row]) -> Row:
    if pair.candidate is not None:
        return other[pair.candidate]
    assert pair.reference is not None  # noqa: S101 - a pair has a side
    return one[pair.reference]


def _fits(
    pair: Pair,
    one: Mapping[int, Row],
    other: Mapping[int, Row],
    phase: str | None,
    place: int | None,
) -> bool:
    row = _some(pair, one, other)
    return phase in (None, row["phase"]) and place in (None, row["place"] or 0)


def _label(row: Row) -> dict[str, Any]:
    return {key: row[key] for key in ("site", "name", "phase", "place", "call")}


def _side(row: Row | None) -> dict[str, Any] | None:
    return None if row is None else {key: row[key] for key in _SIDE}


def _first(rows: Mapping[int, Row], row: Row) -> Row:
    """The first row of the call: it holds the arguments."""
    return (
        row
        if row["call"] < 0
        else next(r for r in rows.values() if r["call"] == row["call"])
    )


def _inputs(
    twin: Row,
    row: Row,
    one: Mapping[int, Row],
    other: Mapping[int, Row],
    counterpart: Mapping[int, int | None],
    distance: Distances,
) -> list[dict[str, Any]]:
    """What the call read, and how far each is from what the reference's read there; ``same`` for its counterpart."""
    if row["call"] < 0 or twin["call"] < 0:
        return []
    return [
        {
            "site": other[b]["site"],
            "name": other[b]["name"],
            "call": other[b]["call"],
            "reference_site": one[a]["site"],
            "error": distance(a, b).error,
            "same": counterpart.get(b) == a,
        }
        for a, b in zip(
            values_read(twin["operator"], twin["overload"], twin["inputs"]),
            values_read(row["operator"], row["overload"], row["inputs"]),
            strict=False,
        )
        if a in one and b in other
    ]


def _beside(name: str, one: float | None, other: float | None) -> dict[str, Any]:
    gap = None if one is None or other is None else other - one
    return {"name": name, "reference": one, "candidate": other, "difference": gap}


def _no_such(
    found: Sequence[Pair],
    one: Mapping[int, Row],
    other: Mapping[int, Row],
    site: str,
    phase: str | None,
    place: int | None,
    where: str,
) -> RunError:
    if found:
        rows = [_some(p, one, other) for p in found]
        there = dict.fromkeys(f"{r['phase']}, place {r['place'] or 0}" for r in rows)
        return RunError(
            f"{site!r} has no such value",
            where=where,
            expected="; ".join([*there][:8]),
            got=f"phase {phase or 'any'}, place {'any' if place is None else place}",
        )
    names = [
        n
        for rows in (other, one)
        for r in rows.values()
        for n in (r["site"], r["name"])
        if n
    ]
    return RunError(
        "neither run has this site",
        where=where,
        expected="such as " + examples(site, dict.fromkeys(names)),
        got=repr(site),
        do="roundoff show RUN lists them",
    )
