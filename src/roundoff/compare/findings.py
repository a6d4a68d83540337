"""What is known of one value of two runs that part, and its share in the error at the end of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roundoff.compare.replayed import Replayed

Row = Mapping[str, Any]

OWN, INHERITED = "own", "inherited"


@dataclass(frozen=True)
class Distance:
    """How far a candidate's value is from the reference's: relative, infinite where NaN or Inf disagree, None unknown."""

    error: float | None
    equal: bool = False
    masked: bool = (
        False  # additive masks of different size, whose distance means nothing
    )


@dataclass(frozen=True)
class Bound:
    """The relative error that rounding explains: ``tolerance``, and ``condition`` times as much where terms cancel; ``gain``
    is how much the operator amplifies the relative errors of its inputs."""

    tolerance: float
    condition: float = 1.0
    gain: float = 1.0


@dataclass
class Finding:
    """What is known of one candidate row.

    ``inputs`` is the largest error of what its call read, ``own`` what of the error was made here, ``origin`` the candidate
    record at fault; ``region`` the records without counterpart that it was made of; ``missing`` a call that only the
    reference has, ``read`` the two records that differ where both should read the same; ``carried`` over from an earlier
    step; ``unknown`` where an input could not be compared; ``sources`` the inputs that differ, each with its error.
    """

    record: int
    error: float | None
    inputs: float = 0.0
    tolerance: float = 0.0
    gain: float = 1.0
    own: float | None = None
    cause: str | None = None
    origin: int | None = None
    replayed: Replayed | None = None
    arguments: tuple[str, ...] = ()
    region: list[int] = field(default_factory=list)
    missing: int | None = None
    read: tuple[int, int] | None = None
    carried: bool = False
    unknown: bool = False
    sources: list[tuple[int, float]] = field(default_factory=list)


def contributions(
    findings: Mapping[int, Finding], read: Mapping[int, Sequence[int]]
) -> dict[int, float]:
    """The share of each row's own error in the error of what the step ends with (rows that nothing reads).

    ``read`` are the candidate records that each record's call reads. From the last row back, the weight of a row stays
    with it in the proportion of its own squared error, and goes to its inputs in the proportion of theirs: errors that
    are independent add by their squares. The shares add up to 1, or are all 0 where nothing at the end differs.
    """
    used = {i for inputs in read.values() for i in inputs}
    ends = [r for r, f in findings.items() if r not in used and f.error]
    weight = dict.fromkeys(findings, 0.0)
    for record in ends:
        weight[record] = 1.0 / len(ends)
    share = dict.fromkeys(findings, 0.0)
    for record in sorted(findings, reverse=True):
        mine = weight[record]
        if not mine:
            continue
        finding = findings[record]
        own = _square(finding.own)
        sources = [
            (source, _square(error))
            for source, error in finding.sources
            if source in weight
        ]
        total = sum(size for _, size in sources)
        kept = (
            1.0
            if finding.cause == OWN or not total
            else own / (own + total)
            if own
            else 0.0
        )
        share[record] += mine * kept * (finding.own != 0)
        for source, size in sources:
            weight[source] += mine * (1.0 - kept) * size / total if total else 0.0
    return share


def _square(error: float | None) -> float:
    return min(error or 0.0, 1e3) ** 2
