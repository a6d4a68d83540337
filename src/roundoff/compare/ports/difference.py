"""What a comparison by values finds: one place, and what stands behind it."""

from __future__ import annotations

from dataclasses import dataclass

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Part


@dataclass(frozen=True, slots=True)
class Difference:
    """Where the two programs part, and what is to blame."""

    part: Part
    blamed: Blamed | None
    limit: float

    @property
    def value(self) -> Value | None:
        """The candidate's value to name."""
        return self.blamed.value if self.blamed else self.part.candidate

    @property
    def line(self) -> str | None:
        """The line at fault."""
        if self.blamed is not None and self.blamed.line is not None:
            return self.blamed.line
        return None if self.value is None else self.value.row.line
