"""Each named output against its target: what is predicted and measured of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from roundoff.budget.noise_power import sqnr_db
from roundoff.budget.sqnr_target import SqnrTarget

if TYPE_CHECKING:
    from roundoff.plan import OutputNoise

_ZERO = "zero everywhere, so no ratio to it exists"
_LOST = "NaN or Inf"


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRow:
    """One named output of a model.

    Attributes:
        output: name; a glob for several tensors, which count alike.
        sqnr_db: measured; None where there is no ratio or nothing is measured, infinite
            for an output without any error, -inf for NaN or Inf.
        predicted_db: by the budget; None where it predicts nothing.
        target_db: asked for; None where nothing is.
        met: True where ``sqnr_db`` reaches ``target_db``; None without a target.
        worst: of several tensors the one with most noise; else empty.
        worst_db: its SQNR.
        note: why it has no number.
    """

    output: str
    sqnr_db: float | None = None
    predicted_db: float | None = None
    target_db: float | None = None
    met: bool | None = None
    worst: str = ""
    worst_db: float | None = None
    note: str = ""

    @property
    def margin_db(self) -> float:
        """How far it is above its target, or above 0 dB without one."""
        reached = self.predicted_db if self.sqnr_db is None else self.sqnr_db
        return math.inf if reached is None else reached - (self.target_db or 0.0)


def output_rows(
    noises: Iterable[OutputNoise],
    target: SqnrTarget | None = None,
    predicted: Mapping[str, float] | None = None,
) -> tuple[OutputRow, ...]:
    """Judge measured outputs.

    Args:
        noises: measured.
        target: None asks nothing.
        predicted: SQNR in dB by output.
    """
    predicted = predicted or {}
    return tuple(_row(noise, target, predicted.get(noise.output)) for noise in noises)


def _row(
    noise: OutputNoise, target: SqnrTarget | None, predicted: float | None
) -> OutputRow:
    least = None if target is None else target.of_output(noise.output)
    if noise.noise is None or noise.worst_noise is None:
        return OutputRow(
            output=noise.output, predicted_db=predicted, target_db=least, note=_ZERO
        )
    reached = sqnr_db(noise.noise)
    is_several = noise.worst != noise.output
    return OutputRow(
        output=noise.output,
        sqnr_db=reached,
        predicted_db=predicted,
        target_db=least,
        met=None if least is None else reached >= least,
        worst=noise.worst if is_several else "",
        worst_db=sqnr_db(noise.worst_noise) if is_several else None,
        note="" if math.isfinite(noise.noise) else _LOST,
    )


def rows_aside(reasons: Mapping[str, str]) -> tuple[OutputRow, ...]:
    """Return a row for each output that is no target, with the reason."""
    return tuple(OutputRow(output=name, note=why) for name, why in reasons.items())


def deciding(rows: Iterable[OutputRow]) -> OutputRow:
    """Return the output closest to its target, or furthest below it.

    Outputs of which nothing is asked come last; without any target it is the one with
    most noise. Where nothing is measured it is an output that lost everything.
    """
    measured = [row for row in rows if row.sqnr_db is not None]
    lost = OutputRow(output="", sqnr_db=-math.inf, note=_ZERO)
    return min(
        measured,
        key=lambda row: (row.target_db is None, row.margin_db),
        default=lost,
    )


def reached_db(rows: Iterable[OutputRow]) -> float:
    """Return the SQNR of the deciding output in dB."""
    reached = deciding(rows).sqnr_db
    return -math.inf if reached is None else reached


def all_met(rows: Iterable[OutputRow]) -> bool:
    """Return True if every output that is asked for something reaches it.

    False where no output that is asked for something could be measured.
    """
    asked = [row for row in rows if row.target_db is not None]
    verdicts = [row.met for row in asked if row.met is not None]
    return all(verdicts) and bool(verdicts or not asked)
