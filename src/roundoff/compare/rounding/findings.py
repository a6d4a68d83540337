"""What is known of one value that differs, and its share in the error of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from roundoff.compare.records.replay import CallReplay

OWN = "own"
INHERITED = "inherited"

#: Relative errors above this weigh the same: they are all wrong.
_LARGEST_WEIGHED = 1e3


@dataclass(frozen=True, slots=True)
class Distance:
    """How far a candidate's value is from the reference's.

    ``error`` is relative, infinite where NaN or Inf disagree, None where unknown.
    ``masked`` marks additive masks of different size, whose distance means nothing.
    """

    error: float | None
    equal: bool = False
    masked: bool = False


@dataclass(frozen=True, slots=True)
class Bound:
    """The relative error that rounding explains in one operator.

    ``tolerance`` holds for equal inputs, ``condition`` times as much where terms
    cancel; ``gain`` is how much the operator amplifies errors of its inputs.
    """

    tolerance: float
    condition: float = 1.0
    gain: float = 1.0


@dataclass(slots=True)
class Finding:
    """What is known of one candidate row; filled while the step is gone through."""

    #: The candidate's record.
    record: int
    #: Relative distance from its counterpart; None where unknown.
    error: float | None
    #: The largest error among the values that its call read.
    inputs: float = 0.0
    #: The relative error that rounding explains.
    tolerance: float = 0.0
    #: How much the operator amplifies errors of its inputs.
    gain: float = 1.0
    #: The part of the error that was made by this call.
    own_error: float | None = None
    #: ``OWN``, ``INHERITED``, or None where rounding explains the error.
    cause: str | None = None
    #: The candidate record at fault.
    origin: int | None = None
    replayed: CallReplay | None = None
    #: The candidate's record that is wrong for the inputs its call had: this one, or
    #: one of ``region``.
    faulty: int | None = None
    #: The arguments that differ between the two calls, a text each.
    arguments: tuple[str, ...] = ()
    #: The records without counterpart that it was made of.
    region: list[int] = field(default_factory=list)
    #: The reference record of a call that only the reference has.
    missing: int | None = None
    #: Reference and candidate record that should be one value, and are not.
    read: tuple[int, int] | None = None
    #: True where the error comes from an earlier step.
    carried: bool = False
    #: True where other calls compute the same function, as far as can be told.
    one_function: bool = False
    #: True where statistics cannot say if the error was made here or came in.
    undecided: bool = False
    #: True where an input could not be compared.
    unknown: bool = False
    #: The inputs that differ, each with its error.
    sources: list[tuple[int, float]] = field(default_factory=list)


def contributions(
    findings: Mapping[int, Finding], read: Mapping[int, Sequence[int]]
) -> dict[int, float]:
    """Share of each row's own error in the error that the step ends with.

    The step ends with the rows that nothing reads. From the last row back, the
    weight of a row stays with it in the proportion of its own squared error, and
    goes to its inputs in the proportion of theirs: independent errors add by their
    squares. The shares add up to 1, or are all 0 where nothing at the end differs.

    Args:
        findings: by candidate record.
        read: the records that each record's call reads.
    """
    weight = _weight_at_the_end(findings, read)
    share = dict.fromkeys(findings, 0.0)
    for record in sorted(findings, reverse=True):
        passing = weight[record]
        if not passing:
            continue
        finding = findings[record]
        sources = _squared_sources(finding, weight)
        total = sum(square for _, square in sources)
        kept = _part_kept(finding, total)
        if finding.own_error != 0:
            share[record] += passing * kept
        for source, square in sources:
            if total:
                weight[source] += passing * (1.0 - kept) * square / total
    return share


def _weight_at_the_end(
    findings: Mapping[int, Finding], read: Mapping[int, Sequence[int]]
) -> dict[int, float]:
    """Spread the weight 1 evenly over the differing rows that nothing reads."""
    inputs = {record for records in read.values() for record in records}
    ends = [r for r, finding in findings.items() if r not in inputs and finding.error]
    weight = dict.fromkeys(findings, 0.0)
    for record in ends:
        weight[record] = 1.0 / len(ends)
    return weight


def _squared_sources(
    finding: Finding, weight: Mapping[int, float]
) -> list[tuple[int, float]]:
    return [(s, _square(error)) for s, error in finding.sources if s in weight]


def _part_kept(finding: Finding, sources: float) -> float:
    """Return the part of a row's weight that its own error explains, from 0 to 1."""
    if finding.cause == OWN or not sources:
        return 1.0
    made_here = _square(finding.own_error)
    return made_here / (made_here + sources) if made_here else 0.0


def _square(error: float | None) -> float:
    return min(error or 0.0, _LARGEST_WEIGHED) ** 2
