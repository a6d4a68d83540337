"""One value of two runs side by side: makers, statistics, metrics, elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from roundoff.compare import (
    Pair,
    RecordedRow,
    RecordedStep,
    Sides,
    ValueDifference,
    ValueSides,
    align,
    label_of,
    rows_of,
    side_of,
    with_measures,
)
from roundoff.errors import RunError, examples
from roundoff.record import Run, StepTensors, as_run
from roundoff.verbs.compare import common

#: Other values of the same name that are listed.
_OTHERS = 20
#: Phases and places that an error lists.
_PLACES = 8


def diff(
    site: str,
    *,
    reference: str | Path | Run,
    candidate: str | Path | Run,
    phase: str | None = None,
    rank: int | None = None,
    step: int | None = None,
    place: int | None = None,
    rows: int = 10,
    modules: Mapping[str, str] | None = None,
) -> ValueDifference:
    """Compare one value of two recorded runs.

    Where both kept tensors, ``metrics`` and ``elements`` are there; else ``note`` says
    why not.

    Args:
        site: as in the tables of either run, ``encoder.0/matmul#1``, or the name of a
            parameter or buffer; its counterpart is found as ``compare`` finds it.
        reference: the run to trust: its folder, its URL, or what ``load`` gave.
        candidate: the run to judge.
        phase: ``forward``, ``backward``, ``optimizer``, ``collective``; the first that
            has the site when None.
        rank: the first that both runs have when None.
        step: the first that both runs have when None.
        place: which output of the site; its first when None.
        rows: how many elements of each list.
        modules: as of ``compare``.

    Raises ``RunError`` when neither run has the site; the message has the nearest
    names.
    """
    ours = as_run(reference)
    theirs = as_run(candidate)
    rank = common("rank", ours.ranks, theirs.ranks, rank)[0]
    step = common("step", ours.steps, theirs.steps, step)[0]
    search = _PairSearch(
        sides=Sides(_recorded(ours, rank, step), _recorded(theirs, rank, step)),
        site=site,
        where=f"{theirs.location}: rank {rank}, step {step}",
        modules=modules,
    )
    pair = search.pair(phase, place)
    twin, row = search.rows(pair)
    named = ValueDifference(
        reference=ours.location,
        candidate=theirs.location,
        asked=site,
        rank=rank,
        step=step,
        status=pair.status,
        reason=pair.reason,
        sides=ValueSides(side_of(twin), side_of(row)),
        others=[label_of(search.row(p)) for p in search.matching if p != pair][
            :_OTHERS
        ],
    )
    if twin is None or row is None:
        return named
    return with_measures(
        named,
        search.sides,
        search.pairs,
        (twin, row),
        limit=rows,
        without_tensors=without_tensors(ours, theirs),
    )


def without_tensors(reference: Run, candidate: Run) -> str | None:
    """Why tensors cannot be compared; None where both runs kept them."""
    lacking = [
        side
        for side, run in (("reference", reference), ("candidate", candidate))
        if run.about.keep not in ("tensors", None)
    ]
    if not lacking:
        return None
    who = "neither run kept" if len(lacking) == 2 else f"the {lacking[0]} did not keep"
    return f"{who} tensors, so there are statistics alone: record with --keep tensors"


def _recorded(run: Run, rank: int, step: int) -> RecordedStep:
    return RecordedStep(rows_of(run, rank, step), StepTensors(run, rank, step))


class _PairSearch:
    """The pairs of one step of which a side has the name that was asked for."""

    def __init__(
        self,
        sides: Sides,
        site: str,
        where: str,
        modules: Mapping[str, str] | None,
    ) -> None:
        self.sides = sides
        self.site = site
        self.where = where
        self.pairs = align(sides.reference.rows, sides.candidate.rows, modules)
        #: Those of the candidate's names where both runs use the name.
        self.matching = [p for p in self.pairs if self._has_name(self.rows(p)[1])]
        if not self.matching:
            self.matching = [p for p in self.pairs if self._has_name(self.rows(p)[0])]

    def rows(self, pair: Pair) -> tuple[RecordedRow | None, RecordedRow | None]:
        """Both rows of a pair, reference first."""
        twin = row = None
        if pair.reference is not None:
            twin = self.sides.reference.rows[pair.reference]
        if pair.candidate is not None:
            row = self.sides.candidate.rows[pair.candidate]
        return twin, row

    def row(self, pair: Pair) -> RecordedRow:
        """The candidate's row of a pair, or the reference's where it has none."""
        twin, row = self.rows(pair)
        existing = row or twin
        if existing is None:
            raise ValueError("a pair without a side")
        return existing

    def _has_name(self, row: RecordedRow | None) -> bool:
        return row is not None and self.site in (row.site, row.name)

    def pair(self, phase: str | None, place: int | None) -> Pair:
        """The first pair of a phase and place; calls before what was there already.

        Raises ``RunError`` without any.
        """

        def fits(row: RecordedRow) -> bool:
            return phase in (None, row.phase) and place in (None, row.place or 0)

        chosen = [p for p in self.matching if fits(self.row(p))]
        if chosen:
            return min(chosen, key=self._calls_first)
        if self.matching:
            raise self._no_such_value(phase, place)
        raise self._no_such_site()

    def _calls_first(self, pair: Pair) -> tuple[bool, int]:
        row = self.row(pair)
        return not row.is_call, row.place or 0

    def _no_such_value(self, phase: str | None, place: int | None) -> RunError:
        rows = [self.row(pair) for pair in self.matching]
        places = [f"{row.phase}, place {row.place or 0}" for row in rows]
        asked_place = "any" if place is None else place
        return RunError(
            f"{self.site!r} has no such value",
            where=self.where,
            expected="; ".join([*dict.fromkeys(places)][:_PLACES]),
            got=f"phase {phase or 'any'}, place {asked_place}",
        )

    def _no_such_site(self) -> RunError:
        names = [
            *_names(self.sides.candidate.rows.values()),
            *_names(self.sides.reference.rows.values()),
        ]
        return RunError(
            "neither run has this site",
            where=self.where,
            expected="such as " + examples(self.site, dict.fromkeys(names)),
            got=repr(self.site),
            do="roundoff show RUN lists them",
        )


def _names(rows: Iterable[RecordedRow]) -> list[str]:
    names = []
    for row in rows:
        names += [name for name in (row.site, row.name) if name]
    return names
