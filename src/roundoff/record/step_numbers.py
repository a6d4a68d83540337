"""Which steps to record: ``"0-1"``, ``"3:5,100"``, numbers, or all."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from roundoff.errors import RunError

_RANGE = re.compile(r"(\d+)(?:[:-](\d+))?")


@dataclass(frozen=True)
class Steps:
    """Ranges of step numbers, ends included; none means every step."""

    ranges: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def parse(text: str | Sequence[int] | None) -> Steps:
        """``"3:5,100"`` or ``"3-5,100"``, a list of numbers, or None for every step. Raises ``RunError``."""
        if text is None:
            return Steps()
        if not isinstance(text, str):
            return Steps(tuple((n, n) for n in text))
        ranges = []
        for part in text.split(","):
            found = _RANGE.fullmatch(part.strip())
            first, last = (
                (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
            )
            if first > last:
                raise RunError(
                    "not a list of steps",
                    where=f"steps {text!r}",
                    got=part,
                    expected="numbers and ranges: 0-1 or 3:5,100",
                )
            ranges.append((first, last))
        return Steps(tuple(ranges))

    def __contains__(self, number: object) -> bool:
        return not self.ranges or any(
            isinstance(number, int) and a <= number <= b for a, b in self.ranges
        )

    @property
    def last(self) -> float:
        """The last step that belongs to it; infinite when all do."""
        return max((b for _, b in self.ranges), default=math.inf)

    def __str__(self) -> str:
        return (
            ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in self.ranges) or "all"
        )
