"""Which steps to record: ``"0-1"``, ``"3:5,100"``, numbers, or all."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from roundoff.errors import RunError

_RANGE = re.compile(r"(\d+)(?:[:-](\d+))?")


@dataclass(frozen=True)
class StepNumbers:
    """Ranges of step numbers, ends included; none means every step."""

    ranges: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def parse(text: str | Sequence[int] | None) -> StepNumbers:
        """Read ``"3:5,100"`` or ``"3-5,100"``, a list of numbers, or None for every step.

        Raises ``RunError`` for any other text.
        """
        if text is None:
            return StepNumbers()
        if not isinstance(text, str):
            return StepNumbers(tuple((n, n) for n in text))
        ranges = []
        for part in text.split(","):
            first_and_last = _parse_range(part.strip())
            if first_and_last is None:
                raise RunError(
                    "not a list of steps",
                    where=f"steps {text!r}",
                    got=part,
                    expected="numbers and ranges: 0-1 or 3:5,100",
                )
            ranges.append(first_and_last)
        return StepNumbers(tuple(ranges))

    def __contains__(self, number: object) -> bool:
        if not self.ranges:
            return True
        return isinstance(number, int) and any(a <= number <= b for a, b in self.ranges)

    @property
    def last(self) -> float:
        """The last of the steps; infinite when all are meant."""
        return max((b for _, b in self.ranges), default=math.inf)

    def __str__(self) -> str:
        parts = [f"{a}" if a == b else f"{a}-{b}" for a, b in self.ranges]
        return ",".join(parts) or "all"


def _parse_range(text: str) -> tuple[int, int] | None:
    match = _RANGE.fullmatch(text)
    if match is None:
        return None
    first = int(match[1])
    last = int(match[2] or match[1])
    return (first, last) if first <= last else None
