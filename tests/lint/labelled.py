"""Scripts with planted mistakes, and how well findings agree with their labels.

A script of ``corpus/`` or ``apart/`` has its labels as trailing comments,
``# expect: RO101 RO602``, on the line that breaks the rule; they are taken off before the
script is linted. What has no label is right.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from roundoff.lint import Finding

CORPUS = Path(__file__).with_name("corpus")
APART = Path(__file__).with_name("apart")
#: A finding may stand so many lines from its label: a statement of several lines has
#: more than one place to be shown at.
NEAR = 2
_LABEL = re.compile(r"\s*# expect: (?P<codes>[A-Z]+\d*(?:[ ,]+[A-Z]+\d+)*)\s*$")


@dataclass(frozen=True, order=True)
class Label:
    """A rule that a line breaks."""

    line: int
    code: str


@dataclass(frozen=True)
class LabelledScript:
    """A script as it is linted, and what is wrong with it."""

    name: str
    text: str
    labels: tuple[Label, ...]


@dataclass(frozen=True)
class Scores:
    """How findings and labels agree, by rule."""

    right: Counter[str]
    wrong: Counter[str]
    missed: Counter[str]
    #: "script:line code", of what is wrong and what is missed
    wrong_places: tuple[str, ...]
    missed_places: tuple[str, ...]

    def precision(self) -> float:
        """Return the share of findings that have a label; 1 without findings."""
        findings = self.right.total() + self.wrong.total()
        return self.right.total() / findings if findings else 1.0

    def recall(self) -> float:
        """Return the share of labels that have a finding; 1 without labels."""
        labels = self.right.total() + self.missed.total()
        return self.right.total() / labels if labels else 1.0


def scripts(folder: Path) -> list[LabelledScript]:
    """Return the scripts of a folder, without their labels."""
    return [_read(path) for path in sorted(folder.glob("*.py"))]


def _read(path: Path) -> LabelledScript:
    labels = []
    lines = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = _LABEL.search(line)
        if match is not None:
            codes = re.split(r"[ ,]+", match["codes"])
            labels += [Label(number, code) for code in codes]
            line = line[: match.start()]
        lines.append(line)
    return LabelledScript(path.name, "\n".join([*lines, ""]), tuple(labels))


def score(results: Iterable[tuple[LabelledScript, Iterable[Finding]]]) -> Scores:
    """Pair each finding with the nearest label of its rule that has none yet."""
    right: Counter[str] = Counter()
    wrong: Counter[str] = Counter()
    missed: Counter[str] = Counter()
    wrong_places = []
    missed_places = []
    for script, findings in results:
        waiting = list(script.labels)
        for finding in findings:
            label = _nearest(finding, waiting)
            if label is None:
                wrong[finding.code] += 1
                wrong_places.append(f"{script.name}:{finding.line} {finding.code}")
            else:
                right[finding.code] += 1
                waiting.remove(label)
        missed.update(label.code for label in waiting)
        missed_places += [f"{script.name}:{each.line} {each.code}" for each in waiting]
    return Scores(right, wrong, missed, tuple(wrong_places), tuple(missed_places))


def _nearest(finding: Finding, waiting: Iterable[Label]) -> Label | None:
    near = [
        label
        for label in waiting
        if label.code == finding.code and abs(label.line - finding.line) <= NEAR
    ]
    return min(near, key=lambda label: abs(label.line - finding.line), default=None)
