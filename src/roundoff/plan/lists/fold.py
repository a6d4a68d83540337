"""Fold operator lists into the rules of a plan, and a plan into a format for each operator."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from roundoff.errors import PlanError
from roundoff.formats import parse_format
from roundoff.ops import (
    forward_of,
    operator_names,
    operators_that,
    translate,
    unknown_operators,
)
from roundoff.plan.lists.source import place
from roundoff.plan.rules import FOLLOW, Plan, Rule

#: Formats by what other tools call them.
FORMATS = {
    "float16": "fp16",
    "fp16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float32": "fp32",
    "fp32": "fp32",
    "float": "fp32",
}
#: What runs on matrix units: Ascend's cube operators, the linear layers of Transformer
#: Engine.
MATRIX = tuple(sorted(operators_that("run on matrix units")))


class ListedOperator(NamedTuple):
    """One operator on one list: its name there, what the list asks for, and the list's own name."""

    name: str
    format: str
    listed: str

    @property
    def place(self) -> str:
        """Line and list, as far as known."""
        return ", ".join(part for part in (place(self.name), self.listed) if part)

    def __str__(self) -> str:
        return f"{self.name} ({self.place})"


@dataclass
class Read:
    """What a reader found; becomes a plan, with all that is not in its rules under ``about``."""

    tool: str
    where: str
    partial: bool
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)

    def rules(self, entries: Iterable[ListedOperator], source: str) -> tuple[Rule, ...]:
        """One rule a format.

        Unknown names and an operator on two lists are errors; of two names that are one
        operator here, fp32 wins, with a note. Gradients are left out with the reason:
        they run as their forward call did.
        """
        entries = list(entries)
        self.check(entries, source)
        chosen: dict[str, ListedOperator] = {}
        for entry in entries:
            if entry.name in operator_names(source):
                for operator in translate(entry.name, source, "torch"):
                    self._choose(operator, entry, chosen)
                self._note_wider(entry, entries, source)
        return self.named(
            (operator, entry.format, str(entry)) for operator, entry in chosen.items()
        )

    def _choose(
        self, operator: str, entry: ListedOperator, chosen: dict[str, ListedOperator]
    ) -> None:
        """Take an entry for an operator; where another one asks for another format, fp32 wins."""
        other = chosen.setdefault(operator, entry)
        if other.format == entry.format:
            return
        chosen[operator] = entry if entry.format == "fp32" else other
        self.notes.append(
            f"{other} and {entry} are both {operator} here: taken as {chosen[operator].format}"
        )

    def check(self, entries: list[ListedOperator], source: str) -> None:
        """Raise ``PlanError`` for an operator on two lists, and for unknown names."""
        self._check_contradictions(entries)
        self._check_unknown(entries, source)

    def named(self, asked: Iterable[tuple[str, str, str]]) -> tuple[Rule, ...]:
        """Rules for (torch operator, format, where it was asked for)."""
        groups: dict[str, list[str]] = {}
        for operator, name, origin in asked:
            groups.setdefault(name, []).append(f"op:{operator}")
            self.origin[f"op:{operator}"] = origin
        return tuple(Rule(name, tuple(patterns)) for name, patterns in groups.items())

    def plan(
        self,
        rules: tuple[Rule, ...] = (),
        default: str = "fp32",
        autocast: str = "",
        **about: Any,
    ) -> Plan:
        """The plan, with notes, what was left out and where each pattern comes from
        under ``about``.
        """
        everything = {
            "from": self.tool,
            "file": self.where,
            "notes": self.notes,
            "left_out": self.left_out,
            "origin": self.origin,
            **about,
        }
        return Plan(
            rules, default, {k: v for k, v in everything.items() if v}, autocast
        )

    def _note_wider(
        self, entry: ListedOperator, entries: list[ListedOperator], source: str
    ) -> None:
        """Say so where an operator here is more than the one of the list: BiasAdd is
        add, which is every addition.
        """
        listed = {_stem(e.name) for e in entries if e.format == entry.format}
        for operator in translate(entry.name, source, "torch"):
            there = translate(operator, "torch", source)
            others = ", ".join(name for name in there if _stem(name) not in listed)
            text = f"{operator} here is more than {entry.name}: also {others}"
            if others and text not in self.notes:
                self.notes.append(text)

    def _check_contradictions(self, entries: list[ListedOperator]) -> None:
        seen: dict[str, ListedOperator] = {}
        for entry in entries:
            other = seen.setdefault(entry.name, entry)
            if other.format != entry.format:
                raise PlanError(
                    f"{entry.name} is on two lists that contradict each other",
                    where=self.where,
                    got=f"{other}, and {entry}",
                    do="take it off one of them",
                )

    def _check_unknown(self, entries: list[ListedOperator], source: str) -> None:
        lost = []
        for entry in entries:
            if entry.name in operator_names(source):
                continue
            forward = forward_of(entry.name, source)
            if forward:
                self.left_out.append(
                    f"{entry}: a gradient runs in the format of its forward call, {forward[0]}"
                )
            elif self.partial:
                self.left_out.append(f"{entry}: not in the table of names")
            else:
                lost.append(entry)
        if lost:
            lost = list({e.name: e for e in lost}.values())
            raise unknown_operators(
                [e.name for e in lost], source, [e.place for e in lost], self.where
            )


@dataclass
class Written:
    """What a writer made of a plan: the text of the file, how to use it, and what it
    could not say.
    """

    text: str
    use: str
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Operators:
    """A plan as formats of operators: the rules over ``op:`` patterns, up to one that
    names everything.
    """

    formats: dict[str, str]
    rest: str  # the format of all others; "" where autocast's lists decide
    left_out: list[str]

    @classmethod
    def of(cls, plan: Plan) -> Operators:
        """Rules over modules, classes and single calls are left out, with their numbers."""
        formats: dict[str, str] = {}
        left_out: list[str] = []
        for number, pattern, name in patterns(plan):
            if pattern in ("*", "*/*"):
                return cls(formats, name, left_out)
            if pattern.startswith("op:"):
                formats.setdefault(pattern[3:], name)
            else:
                left_out.append(
                    f"rule {number}, {pattern} → {name}: not an operator type (op:NAME)"
                )
        others = "" if plan.autocast else parse_format(plan.default).name
        return cls(formats, others, left_out)

    def to(
        self, target: str, wanted: Iterable[str], notes: list[str]
    ) -> Iterator[tuple[str, str, str]]:
        """(name there, format, operator here) for the operators whose format is among ``wanted``.

        Left out with the reason: an operator without a name there, and two operators
        that are one there and whose formats differ. What a name there covers beside is
        a note.
        """
        asked: dict[str, tuple[str, str]] = {}
        wanted = set(wanted)
        for operator, name in self.formats.items():
            if name not in wanted:
                self.left_out.append(
                    f"op:{operator} → {name}: the lists have no such format"
                )
            else:
                self._ask(operator, name, target, asked)
        for there_name, (operator, name) in asked.items():
            operators = translate(there_name, target, "torch")
            beside = [other for other in operators if other not in self.formats]
            if beside:
                notes.append(
                    f"{there_name} is also {', '.join(beside)}: they become {name} too"
                )
            yield there_name, name, operator

    def _ask(
        self, operator: str, name: str, target: str, asked: dict[str, tuple[str, str]]
    ) -> None:
        """Enter an operator's format under its names there; a conflict is left out."""
        there: Sequence[str] = ()
        if operator in operator_names("torch"):
            there = translate(operator, "torch", target)
        if not there:
            self.left_out.append(f"op:{operator} → {name}: no name in {target}")
        for there_name in there:
            first, its_format = asked.setdefault(there_name, (operator, name))
            if its_format != name:
                self.left_out.append(
                    f"op:{operator} → {name}: it is {there_name} there, as op:{first} → {its_format}"
                )


def over_lists(plan: Plan, tool: str) -> tuple[Plan, list[str]]:
    """Return the plan as changes of a tool's own lists, and what that assumes.

    A plan that was chosen by operator type names every operator that its model calls
    (``about["tie"]``), so nothing is left for the lists to decide: its default may give
    way to them. Any other plan, and one without half precision, is returned as it is.
    """
    if "tie" not in plan.about or plan.autocast or plan.default != "fp32":
        return plan, []
    halves = Counter(
        name
        for _, pattern, name in patterns(plan)
        if pattern.startswith("op:") and name in ("bf16", "fp16")
    )
    if not halves:
        # all others in fp32 says it without a list
        kept = tuple(rule for rule in plan.rules if rule.format != "fp32")
        return replace(plan, rules=kept), []
    note = (
        f"the plan names every operator that its model calls; others follow {tool}'s "
        "own lists"
    )
    low, _ = halves.most_common(1)[0]
    return replace(plan, autocast=low), [note]


def patterns(plan: Plan) -> Iterator[tuple[int, str, str]]:
    """(rule number from 1, pattern, format) in the order in which they decide."""
    for number, rule in enumerate(plan.rules, 1):
        for pattern in rule.sites:
            follows = rule.format == FOLLOW
            name = FOLLOW if follows else parse_format(rule.format).name
            yield number, pattern, name


def list_and_line(entry: ListedOperator) -> str:
    """Return an operator's list and its place in the file, for messages."""
    return ", ".join(part for part in (entry.listed, place(entry.name)) if part)


def refuse(left_out: list[str], tool: str, partial: bool) -> None:
    """Raise ``PlanError`` listing what a tool's file cannot say, unless ``partial``."""
    if left_out and not partial:
        parts = "1 part" if len(left_out) == 1 else f"{len(left_out)} parts"
        listing = "\n    ".join(left_out)
        raise PlanError(
            f"{parts} of the plan cannot be said to {tool}:\n    {listing}",
            where="plan",
            do="change the plan, or write the rest with partial=True (--partial)",
        )


def low_format(name: Any, where: str) -> str:
    """bf16 or fp16 by any tool's spelling (``torch.float16`` too). Raises ``PlanError``."""
    text = str(name).rpartition(".")[2]
    if FORMATS.get(text) not in ("bf16", "fp16"):
        raise PlanError(
            "no half-precision format",
            where=where,
            expected="bfloat16 or float16",
            got=repr(name),
        )
    return FORMATS[text]


def _stem(name: str) -> str:
    """The name without its version."""
    return re.sub(r"(_?[vV]\d+|(?<=[a-z])D)$", "", name)
