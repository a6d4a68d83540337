"""One of the two runs, as the checks ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import polars as pl

from roundoff.check.outside_tensors import PROGRAM, outside_tensors
from roundoff.record import Batch, Fact, Run, SetUp


@dataclass(frozen=True)
class Side:
    """A rank of a run, and what the run is called in sentences."""

    run: Run
    name: str
    rank: int

    @cached_property
    def set_up(self) -> SetUp | None:
        """How the rank was set up; None where that is not recorded."""
        return self.run.set_up(self.rank)

    @cached_property
    def facts(self) -> Mapping[tuple[str, str, str], Fact]:
        """Its settings by group, of what, and name."""
        facts = () if self.set_up is None else self.set_up.facts
        return {(fact.group, fact.of, fact.name): fact for fact in facts}

    def value(self, group: str, of: str, name: str) -> str | None:
        """Return one setting; None where it is not there."""
        fact = self.facts.get((group, of, name))
        return None if fact is None else fact.value

    @cached_property
    def batches(self) -> Mapping[str, Sequence[Batch]]:
        """The first batches of each source, in their order."""
        batches: dict[str, list[Batch]] = {}
        for batch in () if self.set_up is None else self.set_up.batches:
            batches.setdefault(batch.source, []).append(batch)
        if not {*batches} - {"loss"} and self.set_up is not None:
            outside = self._outside(batches.get("loss", ()))
            if any(batch.tensors for batch in outside):
                batches[PROGRAM] = outside
        return batches

    def _outside(self, labelled: Sequence[Batch]) -> list[Batch]:
        """Return tensors from outside the program's operators, without its labels."""
        labels = {
            (content.dtype, content.shape)
            for batch in labelled
            for content in batch.tensors
        }
        batches = []
        for batch in outside_tensors(self.run, self.rank):
            tensors = [c for c in batch.tensors if (c.dtype, c.shape) not in labels]
            batches.append(replace(batch, tensors=tuple(tensors)))
        return batches

    @cached_property
    def numbers(self) -> Mapping[str, Mapping[int, float]]:
        """Name -> step -> number, of every step of the program."""
        rows = self.run.step_numbers.filter(pl.col("rank") == self.rank)
        series: dict[str, dict[int, float]] = {}
        for step, name, value in rows.select("step", "name", "value").collect().rows():
            series.setdefault(name, {})[step] = value
        return series

    @property
    def why_not_recorded(self) -> str:
        """Why there is no set-up."""
        about = self.run.about
        if about.tool is not None:
            return f"not recorded in a dump of {about.tool}"
        return f"not recorded by the version of roundoff that made {self.name}"


def short_names(reference: str, candidate: str) -> tuple[str, str]:
    """Return the shortest ends of two paths that differ.

    >>> short_names("runs/a", "runs/b")
    ('a', 'b')
    >>> short_names("x/1/run", "x/2/run")
    ('1/run', '2/run')
    >>> short_names("run", "run")
    ('the reference', 'the candidate')
    """
    ours = [part for part in reference.rstrip("/").split("/") if part]
    theirs = [part for part in candidate.rstrip("/").split("/") if part]
    for length in range(1, max(len(ours), len(theirs)) + 1):
        first = "/".join(ours[-length:])
        second = "/".join(theirs[-length:])
        if first != second:
            return first, second
    return "the reference", "the candidate"
