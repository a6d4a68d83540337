"""What the repeats recorded beside two runs say of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import polars as pl

from roundoff.compare.noise_floor import SPECIALS, ZERO, noise_floor
from roundoff.compare.rank_comparison import Floors
from roundoff.compare.reproducibility import UnstableRow
from roundoff.files import is_url
from roundoff.record import Run, load, siblings

LABEL = "not reproducible"
ADVICE = (
    "seed it, or torch.use_deterministic_algorithms(True), in both programs, and "
    "compare again"
)
#: Entries of ``run.json`` that are equal for two runs of one program.
_PROGRAM = ("command", "environment", "noise", "model")


@dataclass(frozen=True, slots=True)
class Siblings:
    """The runs that were recorded together with a run."""

    noise: Sequence[Run] = ()
    repeat: Sequence[Run] = ()

    def __len__(self) -> int:
        return len(self.noise) + len(self.repeat)


def recorded_beside(run: Run) -> Siblings:
    """Return the runs with noise and the repeats beside a run; none for one at a URL."""
    if is_url(run.location):
        return Siblings()
    paths = siblings(run.path)
    return Siblings(
        noise=[load(path) for path in paths["noise"]],
        repeat=[load(path) for path in paths["repeat"]],
    )


def floor_of(run: Run, beside: Siblings) -> Floors:
    """By (rank, step) and record, how far honest runs of the program lie apart.

    Relative; without what does not differ. Infinite where one is zero and another not,
    or NaN and Inf move.
    """
    others = [*beside.noise, *beside.repeat]
    if not others:
        return {}
    # zero in one run only, NaN in other places: no distance says how far that goes
    without_distance = pl.col("reason").is_in([ZERO, SPECIALS])
    floor = pl.when(without_distance).then(float("inf")).otherwise("floor")
    table = noise_floor(run, others).with_columns(floor.alias("floor"))
    rows = table.filter(pl.col("floor") > 0).select("rank", "step", "record", "floor")
    floors: dict[tuple[int, int], dict[int, float]] = {}
    for rank, step, record, value in rows.iter_rows():
        floors.setdefault((rank, step), {})[record] = value
    return floors


def same_program(reference: Run, candidate: Run) -> bool:
    """Return True for two runs of one command in one environment, without noise."""
    ours = {key: getattr(reference.about, key) for key in _PROGRAM}
    theirs = {key: getattr(candidate.about, key) for key in _PROGRAM}
    return ours == theirs and bool(ours["command"]) and ours["noise"] is None


def blamed_for_changing(
    table: pl.DataFrame, rows: Sequence[UnstableRow]
) -> pl.DataFrame:
    """Return the table in which unstable operators are not called wrong, but not reproducible."""
    if not rows or "blamed" not in table.columns:
        return table
    notes = {(row.site, row.phase): row.note for row in rows}
    keys = pl.DataFrame(
        [(site, phase, note) for (site, phase), note in notes.items()],
        schema={"blamed": pl.Utf8, "blamed_phase": pl.Utf8, "note": pl.Utf8},
        orient="row",
    )
    noted = table.join(
        keys, on=["blamed", "blamed_phase"], how="left", maintain_order="left"
    )
    changes = pl.col("note").is_not_null()
    return noted.with_columns(
        looks_like=pl.when(changes).then(pl.lit(LABEL)).otherwise("looks_like"),
        evidence=pl.when(changes).then("note").otherwise("evidence"),
        advice=pl.when(changes).then(pl.lit(ADVICE)).otherwise("advice"),
    ).drop("note")


def repeat_notes(
    rows: Sequence[UnstableRow], more_runs: Mapping[str, int], *, unchanged: bool
) -> list[str]:
    """Return what the reader should know before anything is blamed, a sentence each.

    Args:
        rows: what does not repeat itself.
        more_runs: how many runs were recorded beside each side.
        unchanged: the two runs are of one program, and differ.
    """
    notes = []
    for side in ("reference", "candidate"):
        changing = [row for row in rows if row.side == side]
        if changing:
            notes.append(
                f"The {side} does not repeat itself: {_first_change(changing)}"
            )
    for side, count in more_runs.items():
        if count:
            notes.append(
                f"Tolerances are at least three times what {count} more runs of the "
                f"{side} differ by"
            )
    if unchanged:
        notes.append(
            "Both runs are of one command in one environment: what differs did not "
            "repeat itself, unless the program was changed in between"
        )
    return notes


def _first_change(rows: Sequence[UnstableRow]) -> str:
    first = rows[0]
    line = f" ({first.line})" if first.line else ""
    more = f" and {len(rows) - 1:,} more values" if len(rows) > 1 else ""
    return f"{first.site}{line}{more} changes from run to run: {first.note}"
