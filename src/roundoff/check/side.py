"""One of the two runs, as the checks ask for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import polars as pl

from roundoff.check.outside_tensors import PROGRAM, outside_tensors
from roundoff.record import Batch, Fact, Run, SetUp, same_groups, values_held

#: Settings of an optimizer that are not its first group's.
_OF_WHOLE_OPTIMIZER = ("class", "groups", "parameters in no optimizer")
#: Stands between a number of each step and what it is of.
_OF = " of "


@dataclass(frozen=True)
class Side:
    """A rank of a run, and what the run is called in sentences.

    Attributes:
        run: the recording.
        name: what it is called.
        rank: of its processes.
        groups: what groups of parameters are called here, by their recorded names.
    """

    run: Run
    name: str
    rank: int
    groups: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def set_up(self) -> SetUp | None:
        """How the rank was set up; None where that is not recorded."""
        return self.run.set_up(self.rank)

    @cached_property
    def facts(self) -> Mapping[tuple[str, str, str], Fact]:
        """Its settings by group, of what, and name."""
        facts = () if self.set_up is None else self.set_up.facts
        return {(f.group, self._of(f), f.name): f for f in facts}

    def _of(self, fact: Fact) -> str:
        """Return what a setting is of: the first group is called as its optimizer."""
        if fact.name in _OF_WHOLE_OPTIMIZER:
            return fact.of
        return self.groups.get(fact.of, fact.of)

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
            rate, mark, group = name.partition(_OF)
            called = f"{rate}{mark}{self.groups.get(group, group)}"
            series.setdefault(called, {})[step] = value
        return series

    def grouped_as(self, reference: Side) -> Side:
        """Return this with its groups of parameters called as the reference's."""
        names: dict[str, str] = {}
        for optimizer, held in _held(self).items():
            ours = _held(reference).get(optimizer, [])
            for place, number in enumerate(same_groups(ours, held)):
                names[_group(optimizer, place)] = _group(optimizer, number)
        changed = {old: new for old, new in names.items() if old != new}
        return replace(self, groups=changed) if changed else self

    @property
    def why_not_recorded(self) -> str:
        """Why there is no set-up."""
        about = self.run.about
        if about.tool is not None:
            return f"not recorded in a dump of {about.tool}"
        return f"not recorded by the version of roundoff that made {self.name}"


def _held(side: Side) -> dict[str, list[int]]:
    """Return how many values each group of parameters holds, by the optimizer."""
    held: dict[str, list[int]] = {}
    for (kind, of, name), fact in side.facts.items():
        if (kind, name) == ("optimizer", "holds"):
            optimizer = of.partition(", group ")[0]
            held.setdefault(optimizer, []).append(values_held(fact.value))
    return held


def _group(optimizer: str, place: int) -> str:
    return f"{optimizer}, group {place}" if place else optimizer


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
