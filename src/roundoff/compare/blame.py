"""From the rows that made an error themselves to the operators to name, the likeliest first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def culprits(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry for each operator that made an error itself, wherever and however often; ``rows`` are those rows.

    First come those of the first step that has any, those whose inputs agreed exactly before others, then by their
    contribution to the error at the end of the step. The backward kernel of an operator that is named for its forward
    pass is the same fault.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows, key=lambda r: (r["step"], r["record"])):
        key = row["blamed_phase"], row["blamed"], row["blamed_reference"]
        known = found.get(key) or _forward_of(row, found.values())
        if known is None:
            found[key] = _entry(row)
            continue
        known["calls"] += 1
        known["ranks"] |= {row["rank"]}
        known["steps"] |= {row["step"]}
        if row["step"] == known["step"] and row["rank"] == known["rank"]:
            known["contribution"] += row["contribution"] or 0.0
            if (
                row["record"] == known["record"]
                or (row["own"] or 0.0) <= known["own"]
                or row["call"] != known["call"]
            ):
                continue
            known |= {k: row[k] for k in ("looks_like", "evidence", "own")}
            known["try"] = row["advice"]
    for entry in found.values():
        entry |= {"ranks": sorted(entry["ranks"]), "steps": sorted(entry["steps"])}
    return sorted(found.values(), key=_weight)


def _weight(entry: Row) -> tuple[Any, ...]:
    # of integers and booleans no share can be told: they choose what runs
    chosen = (entry["dtype"] or "").startswith(("int", "uint", "bool"))
    return (
        entry["step"],
        entry["inputs_error"] > 0,
        not chosen,
        -entry["contribution"],
        entry["record"],
    )


def _entry(row: Row) -> dict[str, Any]:
    module, _, operator = (row["blamed"] or "").rpartition("/")
    return {
        "site": row["blamed"],
        "reference_site": row["blamed_reference"],
        "module": module,
        "operator": operator.partition("#")[0],
        "phase": row["blamed_phase"],
        "line": row["blamed_line"],
        "reference_line": row["blamed_reference_line"],
        "rank": row["rank"],
        "step": row["step"],
        "record": row["record"],
        "call": row["call"],
        "dtype": row["dtype"],
        "name": row["name"],
        "error": row["error"],
        "own": math.inf if row["own"] is None else row["own"],
        "inputs_error": row["inputs_error"],
        "tolerance": row["tolerance"],
        "contribution": row["contribution"] or 0.0,
        "looks_like": row["looks_like"],
        "evidence": row["evidence"],
        "try": row["advice"],
        "semantic": row.get("semantic"),
        "kernel_excess": row.get("kernel_excess"),
        "calls": 1,
        "ranks": {row["rank"]},
        "steps": {row["step"]},
    }


def _forward_of(row: Row, entries: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The entry of the forward operator that this backward row belongs to."""
    if row["blamed_phase"] != "backward":
        return None
    module, _, operator = (row["blamed"] or "").rpartition("/")
    for entry in entries:
        if entry["phase"] != "forward" or (entry["rank"], entry["module"]) != (
            row["rank"],
            module,
        ):
            continue
        if operator.startswith(entry["operator"]) or (
            entry["line"] is not None and entry["line"] == row["blamed_line"]
        ):
            return entry
    return None
