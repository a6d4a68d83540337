"""What became of a script: its new text, each change with its reason, what was left."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from roundoff.foreign import script_lines


@dataclass(frozen=True, order=True)
class Remark:
    """A line of the script, and why it was changed, or left as it is.

    Attributes:
        line: of the script as it was, counted from 1; 0 for the script as a whole.
        reason: one sentence.
    """

    line: int
    reason: str


@dataclass(frozen=True)
class Migration:
    """A script and what it becomes.

    Attributes:
        path: of the script, or what it was called.
        before, after: its text; the same where nothing was changed.
        changes: what was changed, in the order of lines.
        left: what could not be changed safely and is as it was, in the order of lines.
        notes: what to know beside: other behaviour, what to check by hand.
    """

    path: str
    before: str
    after: str
    changes: tuple[Remark, ...] = ()
    left: tuple[Remark, ...] = ()
    notes: tuple[Remark, ...] = ()

    @property
    def is_changed(self) -> bool:
        """True where the new text differs."""
        return self.before != self.after

    def diff(self) -> Iterator[str]:
        """Yield the lines of a unified diff, without line ends."""
        yield from difflib.unified_diff(
            _without_ends(self.before),
            _without_ends(self.after),
            self.path,
            self.path,
            lineterm="",
        )


def _without_ends(text: str) -> list[str]:
    return [line.rstrip("\r\n") for line in script_lines(text)]


class NotUnderstoodError(Exception):
    """A part of a script whose shape is not understood; it stays as it is.

    Args:
        line: where it stands.
        reason: what is in the way.
    """

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line
        self.reason = reason

    @property
    def remark(self) -> Remark:
        return Remark(self.line, self.reason)
