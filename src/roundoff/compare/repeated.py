"""What the repeats recorded beside two runs say: the noise floor, and the operators that are not reproducible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from roundoff.compare.noise_floor import SPECIALS, ZERO, noise_floor
from roundoff.compare.reproducibility import unstable
from roundoff.files import is_url
from roundoff.record import Run, load, siblings

Floor = dict[tuple[int, int], dict[int, float]]

LABEL = "not reproducible"
ADVICE = "seed it, or torch.use_deterministic_algorithms(True), in both programs, and compare again"


def floor_of(run: Run, noise: Sequence[Run], repeats: Sequence[Run]) -> Floor:
    """By (rank, step) and record, how far honest runs of the program lie apart, relative; without what does not differ.
    Infinite where one is zero and another not, or NaN and Inf move."""
    others = [*noise, *repeats]
    if not others:
        return {}
    # zero in one run and not in the other, NaN in other places: no distance says how far that goes
    amount = (
        pl.when(pl.col("reason").is_in([ZERO, SPECIALS]))
        .then(float("inf"))
        .otherwise("floor")
        .alias("floor")
    )
    table = noise_floor(run, others).with_columns(amount).filter(pl.col("floor") > 0)
    found: Floor = {}
    for rank, step, record, floor in table.select(
        "rank", "step", "record", "floor"
    ).iter_rows():
        found.setdefault((rank, step), {})[record] = floor
    return found


def beside(run: Run) -> dict[str, list[Run]]:
    """The runs with noise and the repeats that were recorded with a run; none for one at a URL."""
    if is_url(run.location):
        return {"noise": [], "repeat": []}
    return {
        kind: [load(path) for path in paths]
        for kind, paths in siblings(run.path).items()
    }


def not_reproducible(
    side: str, run: Run, repeats: Sequence[Run]
) -> list[dict[str, Any]]:
    """The operators whose results differ in the repeats although their inputs do not, in the order of execution."""
    if not repeats:
        return []
    return [{"side": side, **row} for row in unstable(run, repeats).to_dicts()]


def same_program(ours: Run, theirs: Run) -> bool:
    """Whether both runs say that they are of one command, in one environment, and neither was given noise."""
    one, other = (
        {
            key: getattr(run.about, key)
            for key in ("command", "environment", "noise", "model")
        }
        for run in (ours, theirs)
    )
    return one == other and bool(one["command"]) and one["noise"] is None


def mark(table: pl.DataFrame, found: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
    """The table in which those operators are not blamed for being wrong, but for not repeating themselves."""
    if not found or "blamed" not in table.columns:
        return table
    notes = {(row["site"], row["phase"]): row["note"] for row in found}
    keys = pl.DataFrame(
        [
            {"blamed": site, "blamed_phase": phase, "note": note}
            for (site, phase), note in notes.items()
        ],
        schema={"blamed": pl.Utf8, "blamed_phase": pl.Utf8, "note": pl.Utf8},
    )
    known = table.join(
        keys, on=["blamed", "blamed_phase"], how="left", maintain_order="left"
    )
    here = pl.col("note").is_not_null()
    return known.with_columns(
        looks_like=pl.when(here).then(pl.lit(LABEL)).otherwise("looks_like"),
        evidence=pl.when(here).then("note").otherwise("evidence"),
        advice=pl.when(here).then(pl.lit(ADVICE)).otherwise("advice"),
    ).drop("note")


def sentences(
    found: Sequence[Mapping[str, Any]], floors: Mapping[str, int], same: bool
) -> list[str]:
    """What to say of it before anything is blamed."""
    said = []
    for side in ("reference", "candidate"):
        rows = [row for row in found if row["side"] == side]
        if rows:
            first = rows[0]
            line = f" ({first['line']})" if first["line"] else ""
            more = f" and {len(rows) - 1:,} more values" if len(rows) > 1 else ""
            what = (
                f"{first['site']}{line}{more} changes from run to run: {first['note']}"
            )
            said.append(f"The {side} does not repeat itself: {what}")
    for side, count in floors.items():
        if count:
            said.append(
                f"Tolerances are at least three times what {count} more runs of the {side} differ by"
            )
    if same:
        said.append(
            "Both runs are of one command in one environment: what differs did not repeat itself, unless the program was "
            "changed in between"
        )
    return said
