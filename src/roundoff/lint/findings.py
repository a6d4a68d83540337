"""What linting returns: findings, files that were not read, and the fixed texts."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Severity(enum.StrEnum):
    """How much a broken rule matters."""

    #: The training computes something else than it should, or may fail.
    WARNING = "warning"
    #: The training is right, and could be faster.
    ADVICE = "advice"


@dataclass(frozen=True)
class Finding:
    """A place in a file where a rule is broken.

    ``line`` and ``end_line`` count from 1, ``column`` and ``end_column`` too, in
    characters; the end is the first character behind. ``cell`` is the number of a
    notebook's cell, from 1, and the lines are those of the cell; None in a script.
    """

    path: str
    line: int
    column: int
    end_line: int
    end_column: int
    code: str
    name: str
    message: str
    fixable: bool = False
    severity: Severity = Severity.WARNING
    cell: int | None = None


@dataclass(frozen=True)
class Unread:
    """A file or a part of one that was not linted, and why."""

    path: str
    reason: str


@dataclass(frozen=True)
class FixedFile:
    """A file whose text was mended: before, after, and how many findings went."""

    path: str
    before: str
    after: str
    fixes: int


@dataclass(frozen=True)
class LintResult:
    """What is wrong with some files.

    Args:
        findings: by file and line.
        unread: files that were not linted, with a reason each.
        files: how many were.
        fixed: texts that were mended; they are on disk only where ``fix`` was asked for.
    """

    findings: tuple[Finding, ...]
    unread: tuple[Unread, ...]
    files: int
    fixed: tuple[FixedFile, ...] = ()

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that are more than advice."""
        return tuple(
            each for each in self.findings if each.severity is Severity.WARNING
        )
