"""Numbers as text, the same in the terminal and in HTML.

Only here are numbers rounded for reading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from roundoff.report.diagnosis import RankingRow

#: shown where a value does not apply
NONE = "–"
#: A measured row with a standard error below this, in dB, is shown as exact.
EXACT = 0.05


def db(value: float | None) -> str:
    """Decibels with one decimal; ``–`` for None, ``∞`` where there is no error at all.

    >>> db(41.26), db(-0.04), db(None), db(float("inf"))
    ('41.3', '0.0', '–', '∞')
    """
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    return f"{round(value, 1) + 0.0:.1f}"  # + 0.0 turns -0.0 into 0.0


def stderr(value: float | None) -> str:
    """A standard error in dB, with a second decimal where one would show it as zero.

    >>> stderr(0.31), stderr(0.04), stderr(None)
    ('0.3', '0.04', '')
    """
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:.1f}" if value >= 0.095 else f"{value:.2f}"


def uncertainty(stderr_db: float | None, measured: str) -> str:
    """The standard error of a row; ``run`` where the model ran with the site rounded.

    Beside it what batches that were not measured may differ by.

    >>> uncertainty(0.31, "adjoint"), uncertainty(0.0, "trial"), uncertainty(0.31, "trial")
    ('0.3', 'run', 'run 0.3')
    """
    if measured != "trial":
        return stderr(stderr_db)
    is_exact = stderr_db is None or stderr_db < EXACT
    return "run" if is_exact else f"run {stderr(stderr_db)}"


def percent(fraction: float | None) -> str:
    """A fraction as percent, at most five characters up to 100%.

    A share is never rounded down to nothing.

    >>> percent(0.1234), percent(1.0), percent(0.0), percent(0.0002), percent(0.9999)
    ('12.3%', '100%', '0%', '<0.1%', '>99.9%')
    """
    if fraction is None or not math.isfinite(fraction):
        return NONE
    if fraction in (0, 1):
        return f"{fraction:.0%}"
    if 0 < fraction < 0.0005:
        return "<0.1%"
    if 0.9995 <= fraction < 1:
        return ">99.9%"
    return f"{fraction:.1%}"


#: Units of costs, each a thousand of the one before; the factor is that of the first.
_SCALES: Mapping[str, tuple[float, Sequence[str]]] = {
    "MB": (1e6, ("B", "kB", "MB", "GB", "TB")),
    "Gbitops": (1e9, ("bitops", "kbitops", "Mbitops", "Gbitops", "Tbitops", "Pbitops")),
    "ms": (1e6, ("ns", "µs", "ms", "s")),
}


def amount(value: float | None, unit: str = "") -> str:
    """A cost, to four digits or the whole number, in a unit that suits its size.

    >>> amount(12.3456, "MB"), amount(1234567.8, "Gbitops"), amount(0.000123)
    ('12.35 MB', '1.235 Pbitops', '0.000123')
    >>> amount(0.00228, "MB"), amount(0, "ms"), amount(3, "MB of parameters")
    ('2.28 kB', '0 ms', '3 MB of parameters')
    """
    if value is None or not math.isfinite(value):
        return NONE
    first, of, rest = unit.partition(" of ")
    if first in _SCALES and value:
        value, first = _scaled(value, *_SCALES[first])
    unit = f"{first}{of}{rest}"
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{text} {unit}".rstrip()


def _scaled(value: float, factor: float, units: Sequence[str]) -> tuple[float, str]:
    """Return the value in the largest of the units that leaves at least 1 of it."""
    value *= factor
    place = 0
    while abs(value) >= 1000 and place + 1 < len(units):
        value /= 1000
        place += 1
    return value, units[place]


def metric(value: float | None) -> str:
    """A metric, to five digits.

    >>> metric(0.912341), metric(None)
    ('0.91234', '–')
    """
    return NONE if value is None or math.isnan(value) else f"{value:.5g}"


def count(number: int, noun: str) -> str:
    """A number of things.

    >>> count(1, "site"), count(1200, "site")
    ('1 site', '1,200 sites')
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def listing(parts: Sequence[str]) -> str:
    """Words in one sentence.

    >>> listing(["a"]), listing(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    if len(parts) < 2:
        return "".join(parts)
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


def finite(value: float | None) -> TypeGuard[float]:
    """Return True for a number that can be drawn or computed with."""
    return value is not None and math.isfinite(value)


def sqnr(row: RankingRow) -> str:
    """SQNR of a ranked site in dB.

    ``exact`` where rounding changes nothing, ``lost`` where the result isn't finite.
    """
    if row.sqnr_db is None:
        return "lost" if row.is_lost else "exact"
    return db(row.sqnr_db)


def ratio(value: float | None, whole: float | None) -> float | None:
    """Return ``value / whole``, None where there is nothing to compare with."""
    return value / whole if value is not None and whole else None
