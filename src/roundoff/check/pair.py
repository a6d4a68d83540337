"""The two sides of a check, and differences between them in words."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from roundoff.check.findings import Difference
from roundoff.check.rules import Rule
from roundoff.check.side import Side

#: Numbers that differ by this share differ by rounding: a rate kept in fp32 is 2**-24
#: off, and one that a schedule made of it in 16 steps 2**-20.
SAME_NUMBER = 1e-6
#: Characters of a value that a sentence shows.
LONGEST = 160


@dataclass(frozen=True)
class Pair:
    """One rank of both runs."""

    reference: Side
    candidate: Side

    @property
    def sides(self) -> tuple[Side, Side]:
        """The reference and the candidate."""
        return self.reference, self.candidate

    def difference(
        self,
        rule: Rule,
        values: Sequence[str],
        *,
        name: str = "",
        subject: str = "",
        text: str = "",
        **fields: Any,
    ) -> Difference:
        """Return a difference judged by ``rule``; ``fields`` replace what it says.

        Args:
            rule: how it is judged.
            values: of the reference and of the candidate.
            name: of the setting, where the rule has none.
            subject: of the sentence; the name where there is none.
            text: the sentence, in place of "the ... is ... in b, ... in a".
            fields: of ``Difference``.
        """
        called = rule.name or name
        shown = [shorten(value) for value in values]
        sentence = text or self.sentence(subject or f"the {called}", shown)
        difference = Difference(
            group=rule.group,
            name=called,
            severity=rule.severity,
            text=sentence,
            reference=values[0],
            candidate=values[1],
            why=rule.why,
            fix=rule.fix,
            may_follow=rule.follows,
            ranks=(self.reference.rank,),
        )
        return replace(difference, **fields)

    def sentence(self, subject: str, values: Sequence[str]) -> str:
        """Return "the ... is y in b, x in a"."""
        verb = "are" if _is_plural(subject) else "is"
        ours, theirs = self.sides
        return (
            f"{subject} {verb} {values[1]} in {theirs.name}, {values[0]} in {ours.name}"
        )


def _is_plural(subject: str) -> bool:
    """Return True where the noun that a subject begins with is in the plural.

    >>> _is_plural("the number of threads"), _is_plural("the samples that a gives")
    (False, True)
    >>> _is_plural("the eps"), _is_plural("the class")
    (False, False)
    """
    head = re.split(" of | that | in ", subject)[0]
    return head.endswith("s") and not head.endswith(("ss", " eps"))


def shorten(text: str) -> str:
    """Return a text that fits in a sentence."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def number(value: float | None) -> str:
    """Return a setting as it is written; ``none`` for None.

    >>> number(0.01), number(8.0), number(None), number(1e-8)
    ('0.01', '8', 'none', '1e-08')
    """
    return "none" if value is None else f"{value:.7g}"


def same_number(ours: float | None, theirs: float | None) -> bool:
    """Return True for settings that differ by rounding alone."""
    if ours is None or theirs is None:
        return ours is theirs
    if math.isnan(ours) or math.isnan(theirs):
        return math.isnan(ours) and math.isnan(theirs)
    return math.isclose(ours, theirs, rel_tol=SAME_NUMBER, abs_tol=0.0)
