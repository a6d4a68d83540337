"""Between operator lists and plans: entries of a list become rules, a plan becomes a format for each operator."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from roundoff.errors import PlanError
from roundoff.formats import parse_format
from roundoff.ops import forward_of, known, operators_that, translate, unknown
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
#: What runs on matrix units: Ascend's cube operators, the linear layers of Transformer Engine.
MATRIX = tuple(sorted(operators_that("run on matrix units")))


class Entry(NamedTuple):
    """One operator on one list: its name there, what the list asks for, and the list's own name."""

    name: str
    format: str
    listed: str


@dataclass
class Read:
    """What a reader found; becomes a plan, with all that is not in its rules under ``about``."""

    tool: str
    where: str
    partial: bool
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    origin: dict[str, str] = field(default_factory=dict)

    def rules(self, entries: Iterable[Entry], source: str) -> tuple[Rule, ...]:
        """One rule a format. Unknown names and an operator on two lists are errors; of two names that are one operator
        here, fp32 wins, with a note. Gradients are left out with the reason: they run as their forward call did."""
        entries = list(entries)
        self._check_contradictions(entries)
        self._check_unknown(entries, source)
        chosen: dict[str, Entry] = {}
        for entry in entries:
            if entry.name not in known(source):
                continue
            for operator in translate(entry.name, source, "torch"):
                other = chosen.get(operator)
                if other is None or other.format == entry.format:
                    chosen.setdefault(operator, entry)
                    continue
                keep = next((e for e in (other, entry) if e.format == "fp32"), other)
                self.notes.append(
                    f"{_said(other)} and {_said(entry)} are both {operator} here: taken as {keep.format}"
                )
                chosen[operator] = keep
            self._note_wider(entry, entries, source)
        return self.named(
            (operator, entry.format, _said(entry)) for operator, entry in chosen.items()
        )

    def named(self, asked: Iterable[tuple[str, str, str]]) -> tuple[Rule, ...]:
        """Rules for (torch operator, format, where it was asked for)."""
        groups: dict[str, list[str]] = {}
        for operator, name, said in asked:
            groups.setdefault(name, []).append(f"op:{operator}")
            self.origin[f"op:{operator}"] = said
        return tuple(Rule(name, tuple(patterns)) for name, patterns in groups.items())

    def plan(
        self,
        rules: tuple[Rule, ...] = (),
        default: str = "fp32",
        autocast: str = "",
        **about: Any,
    ) -> Plan:
        """The plan, with notes, what was left out and where each pattern comes from under ``about``."""
        said = {
            "from": self.tool,
            "file": self.where,
            "notes": self.notes,
            "left_out": self.left_out,
            "origin": self.origin,
            **about,
        }
        return Plan(rules, default, {k: v for k, v in said.items() if v}, autocast)

    def _note_wider(self, entry: Entry, entries: list[Entry], source: str) -> None:
        """Say so where an operator here is more than the one of the list: BiasAdd is add, which is every addition."""
        listed = {_stem(e.name) for e in entries if e.format == entry.format}
        for operator in translate(entry.name, source, "torch"):
            others = [
                n
                for n in translate(operator, "torch", source)
                if _stem(n) not in listed
            ]
            text = (
                f"{operator} here is more than {entry.name}: also {', '.join(others)}"
            )
            if others and text not in self.notes:
                self.notes.append(text)

    def _check_contradictions(self, entries: list[Entry]) -> None:
        seen: dict[str, Entry] = {}
        for entry in entries:
            other = seen.setdefault(entry.name, entry)
            if other.format != entry.format:
                raise PlanError(
                    f"{entry.name} is on two lists that contradict each other",
                    where=self.where,
                    got=f"{_said(other)}, and {_said(entry)}",
                    do="take it off one of them",
                )

    def _check_unknown(self, entries: list[Entry], source: str) -> None:
        lost = []
        for entry in entries:
            if entry.name in known(source):
                continue
            forward = forward_of(entry.name, source)
            if forward:
                self.left_out.append(
                    f"{_said(entry)}: a gradient runs in the format of its forward call, {forward[0]}"
                )
            elif self.partial:
                self.left_out.append(f"{_said(entry)}: not in the table of names")
            else:
                lost.append(entry)
        if lost:
            lost = list({e.name: e for e in lost}.values())
            raise unknown(
                [e.name for e in lost], source, [_place(e) for e in lost], self.where
            )


@dataclass
class Written:
    """What a writer made of a plan: the text of the file, how to use it, and what it could not say."""

    text: str
    use: str
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Operators:
    """A plan as formats of operators: the rules over ``op:`` patterns, up to one that names everything."""

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
        return cls(
            formats, "" if plan.autocast else parse_format(plan.default).name, left_out
        )

    def to(
        self, target: str, wanted: Iterable[str], notes: list[str]
    ) -> Iterator[tuple[str, str, str]]:
        """(name there, format, operator here) for the operators whose format is among ``wanted``.

        Left out with the reason: an operator without a name there, and two operators that are one there and whose
        formats differ. What a name there covers beside is a note.
        """
        asked: dict[str, tuple[str, str]] = {}
        wanted = set(wanted)
        for operator, name in self.formats.items():
            if name not in wanted:
                self.left_out.append(
                    f"op:{operator} → {name}: the lists have no such format"
                )
                continue
            there = (
                translate(operator, "torch", target)
                if operator in known("torch")
                else ()
            )
            if not there:
                self.left_out.append(f"op:{operator} → {name}: no name in {target}")
            for other in there:
                first = asked.setdefault(other, (operator, name))
                if first[1] != name:
                    self.left_out.append(
                        f"op:{operator} → {name}: it is {other} there, as op:{first[0]} → {first[1]}"
                    )
        for there_name, (operator, name) in asked.items():
            beside = [
                o
                for o in translate(there_name, target, "torch")
                if o not in self.formats
            ]
            if beside:
                notes.append(
                    f"{there_name} is also {', '.join(beside)}: they become {name} too"
                )
            yield there_name, name, operator


def patterns(plan: Plan) -> Iterator[tuple[int, str, str]]:
    """(rule number from 1, pattern, format) in the order in which they decide."""
    for number, rule in enumerate(plan.rules, 1):
        for pattern in rule.sites:
            yield (
                number,
                pattern,
                rule.format
                if rule.format == FOLLOW
                else parse_format(rule.format).name,
            )


def refuse(left_out: list[str], tool: str, partial: bool) -> None:
    """Raise ``PlanError`` listing what a tool's file cannot say, unless ``partial``."""
    if left_out and not partial:
        raise PlanError(
            f"{len(left_out)} part{'s' * (len(left_out) > 1)} of the plan cannot be said to {tool}:\n    "
            + "\n    ".join(left_out),
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


def _place(entry: Entry) -> str:
    return ", ".join(part for part in (place(entry.name), entry.listed) if part)


def _said(entry: Entry) -> str:
    return f"{entry.name} ({_place(entry)})"
