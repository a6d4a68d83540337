"""What the repeats recorded beside two runs say of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

import polars as pl

from roundoff.compare.judging.step_causes import listed
from roundoff.compare.rank_comparison import Floors
from roundoff.compare.rounding.noise_floor import SPECIALS, ZERO, noise_floor
from roundoff.compare.rounding.reproducibility import UnstableRow
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
    """Return True for two runs of one command in one environment, without noise.

    Not where the script, or what it imports from its folder, was edited in between.
    """
    if edited_sources(reference, candidate):
        return False
    ours = {key: getattr(reference.about, key) for key in _PROGRAM}
    theirs = {key: getattr(candidate.about, key) for key in _PROGRAM}
    return ours == theirs and bool(ours["command"]) and ours["noise"] is None


def edited_sources(reference: Run, candidate: Run) -> list[str]:
    """Return the source files that two runs of one script do not have alike, by path.

    Empty for other scripts, and where a run does not say.
    """
    ours = reference.about.sources or {}
    theirs = candidate.about.sources or {}
    if not ours or not theirs or not _is_one_script(reference, candidate):
        return []
    return [
        name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)
    ]


def program_notes(reference: Run, candidate: Run) -> list[str]:
    """Return what differs in how two runs of one script were started, a sentence each."""
    notes = []
    if _is_one_script(reference, candidate):
        ours = reference.about.command or []
        theirs = candidate.about.command or []
        notes += _other_words(ours[1:], theirs[1:])
    edited = edited_sources(reference, candidate)
    if edited:
        differ = "differs" if len(edited) == 1 else "differ"
        files = listed(edited)
        notes.append(f"The script was edited between the runs: {files} {differ}")
    return notes


def _is_one_script(reference: Run, candidate: Run) -> bool:
    """Return True for commands that begin with a script, or module, of one name."""
    names = []
    for run in (reference, candidate):
        words = run.about.command or []
        first = words[:2] if words[:1] == ["-m"] else words[:1]
        names.append([PurePath(word).name for word in first])
    return bool(names[0]) and names[0] == names[1]


def _other_words(ours: Sequence[str], theirs: Sequence[str]) -> list[str]:
    """Return a sentence on the arguments that differ; none where all are equal."""
    mine = _arguments(ours)
    others = _arguments(theirs)
    texts = [
        f"{others.get(name, 'nothing')} where the reference has "
        f"{mine.get(name, 'nothing')}"
        for name in dict.fromkeys([*mine, *others])
        if mine.get(name) != others.get(name)
    ]
    return [f"The command lines differ: {listed(texts)}"] if texts else []


def _arguments(words: Sequence[str]) -> dict[str | int, str]:
    """Return each option with its values by its name, and other words by their place.

    >>> _arguments(["data", "--lr", "0.1", "--seed=3", "-v"])
    {0: 'data', '--lr': '--lr 0.1', '--seed': '--seed=3', '-v': '-v'}
    """
    arguments: dict[str | int, str] = {}
    option: str | None = None
    for place, word in enumerate(words):
        if word.startswith("-") and not word[1:2].isdigit():
            option = word.partition("=")[0]
            arguments[option] = word
        elif option is not None:
            arguments[option] += f" {word}"
        else:
            arguments[place] = word
    return arguments


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
