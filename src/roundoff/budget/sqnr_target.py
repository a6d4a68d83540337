"""SqnrTarget: the least SQNR of each output, in decibels."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roundoff.errors import PlanError, did_you_mean, nearest
from roundoff.workload import is_output

if TYPE_CHECKING:
    from roundoff.plan import PlanFigures

_NUMBER_OF_DB = re.compile(
    r"\s*([+-]?\d+(?:\.\d*)?(?:e[+-]?\d+)?)\s*(?:dB)?\s*", re.IGNORECASE
)

#: What a target may be written as: ``40``, ``"40dB"``, ``"cls=40dB,price=30dB"``, or a
#: mapping of names to decibels.
TargetText = float | str | Mapping[str, float | str]


def parse_db(value: float | str) -> float:
    """Read a number of decibels: ``40``, ``"40"``, ``"40dB"``.

    Raises ``PlanError`` for anything else.

    >>> parse_db("38.5 dB")
    38.5
    """
    match = _NUMBER_OF_DB.fullmatch(str(value))
    decibels = math.inf if match is None else float(match[1])
    if not math.isfinite(decibels):
        raise PlanError(
            "not a target",
            where="target",
            expected="a number of decibels such as 40dB, or one for each output: cls=40dB,price=30dB",
            got=repr(value),
        )
    return decibels


@dataclass(frozen=True, slots=True)
class SqnrTarget:
    """The least SQNR in dB of each output.

    Attributes:
        db: of the outputs that no pattern names; None where nothing is asked of them.
        of: name or pattern of outputs, and the SQNR of each of them. A name goes before
            a glob, a longer glob before a shorter one.
    """

    db: float | None
    of: tuple[tuple[str, float], ...] = ()

    @classmethod
    def of_plan(cls, figures: PlanFigures) -> SqnrTarget:
        """Return the target that a plan says it was made for."""
        return cls(figures.target_db, tuple(figures.targets_db.items()))

    def of_output(self, output: str) -> float | None:
        """Return the least SQNR of an output; None where nothing is asked of it.

        >>> target = parse_target("40dB,price=30dB,past.*=20dB")
        >>> target.of_output("cls"), target.of_output("price"), target.of_output("past.3")
        (40.0, 30.0, 20.0)
        """
        named = [(p, db) for p, db in self.of if is_output(p, output)]
        if not named:
            return self.db
        return max(named, key=lambda pair: (pair[0] == output, len(pair[0])))[1]

    def of_each(self, outputs: Iterable[str]) -> dict[str, float | None]:
        """Return the least SQNR of each output by name."""
        return {name: self.of_output(name) for name in outputs}

    @property
    def patterns(self) -> tuple[str, ...]:
        """The names and patterns of outputs."""
        return tuple(pattern for pattern, _ in self.of)

    def check(self, outputs: Sequence[str]) -> None:
        """Raise ``PlanError`` where a name is that of no output."""
        for pattern in self.patterns:
            if not any(is_output(pattern, name) for name in outputs):
                raise PlanError(
                    f"no output is named {pattern!r}",
                    where="target",
                    expected="one of " + ", ".join(outputs),
                    got=repr(pattern),
                    do=did_you_mean(nearest(pattern, outputs)),
                )

    def moved(self, db: float) -> SqnrTarget:
        """Return the target with so many dB more for each output."""
        whole = None if self.db is None else self.db + db
        return replace(
            self, db=whole, of=tuple((p, value + db) for p, value in self.of)
        )

    def __str__(self) -> str:
        """The target as it can be parsed: ``40dB``, ``cls=40dB,price=30dB``."""
        whole = [] if self.db is None else [f"{self.db:g}dB"]
        return ",".join([*whole, *(f"{p}={db:g}dB" for p, db in self.of)])


def parse_target(value: TargetText | SqnrTarget) -> SqnrTarget:
    """Read a target: one number of dB for all outputs, or one for each by name.

    ``"40dB,price=30dB"`` is 40 for all but one. Without such a number nothing is asked
    of outputs that are not named. Raises ``PlanError`` for anything else.

    >>> parse_target("cls=40dB, price=30dB").of
    (('cls', 40.0), ('price', 30.0))
    >>> str(parse_target({"cls": 40, "price": "30 dB"})), str(parse_target(38.5))
    ('cls=40dB,price=30dB', '38.5dB')
    """
    if isinstance(value, SqnrTarget):
        return value
    if isinstance(value, Mapping):
        return SqnrTarget(None, tuple((n, parse_db(db)) for n, db in value.items()))
    whole: float | None = None
    of: list[tuple[str, float]] = []
    for part in str(value).split(","):
        name, equals, db = part.rpartition("=")
        if equals and name.strip():
            of.append((name.strip(), parse_db(db)))
        elif whole is None:
            whole = parse_db(part)
        else:
            parse_db(str(value))  # two numbers for all outputs: raises
    return SqnrTarget(whole, tuple(of))
