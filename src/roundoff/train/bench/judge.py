"""Is a difference between two ways to train larger than what another seed makes?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

CONFIDENCE = 0.95
#: Two single runs that differ by chance alone are further apart than this many standard
#: deviations in 5 % of all cases: 1.96 * sqrt(2), the repeatability limit of ISO 5725-6.
REPEATABILITY = 2.8
DIFFERENT = "different"
NONE_SEEN = "no difference seen"
UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class DifferenceVerdict:
    """A difference and its verdict.

    Numbers are in the unit of the values; None where there is none.

    Attributes:
        verdict: ``different``, ``no difference seen`` or ``undecided``.
        reason: why, in words.
        difference: mean over the seeds of candidate minus reference.
        low, high: its 95 % interval.
        noise: standard deviation of the reference over the seeds.
        could_see: the smallest difference that these seeds could tell from none: half of
            the interval.
    """

    verdict: str
    reason: str
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    noise: float | None = None
    could_see: float | None = None


def judge(reference: Sequence[float], candidate: Sequence[float]) -> DifferenceVerdict:
    """Judge ``candidate`` against ``reference``: one number for each seed, in the same order.

    The runs of one seed share weights, data and random numbers, so the test is paired.
    With ``d`` the differences of ``n`` seeds,
    ``mean(d) ± t(0.975, n-1) · std(d) / sqrt(n)`` holds the true mean difference in 95
    % of all cases (Student's interval; it takes the differences for normal). An exact
    test that flips signs needs no such assumption, but its p cannot fall below
    ``2 / 2^n``, which is 5 % only from six seeds on. With ``s`` the standard deviation
    of the reference over its seeds, the noise:

    - ``different``: the interval leaves out zero, and the mean difference is larger than
      ``s``;
    - ``no difference seen``: not so, and the interval ends within ``2.8 s`` of zero, by
      which two single runs may differ through their seeds alone;
    - ``undecided``: the interval reaches further, so that a large difference may hide; or
      there are fewer than two seeds, or the seed changes nothing in the reference.

    NaN or Inf in the candidate alone is ``different``; in the reference, ``undecided``.
    Equal values are ``no difference seen``, also of one seed.

    >>> judged = judge([1.0, 1.1, 0.9, 1.05], [2.0, 2.1, 1.9, 2.04])
    >>> judged.verdict, round(judged.difference, 4), round(judged.could_see, 4)
    ('different', 0.9975, 0.008)
    >>> judge([1.0], [1.01]).reason
    'one seed tells nothing of the noise between seeds'
    """
    if len(reference) != len(candidate) or not reference:
        return DifferenceVerdict(UNDECIDED, "there are no pairs to compare")
    if not all(map(math.isfinite, reference)):
        return DifferenceVerdict(
            UNDECIDED, "the first configuration itself has no finite result"
        )
    if not all(map(math.isfinite, candidate)):
        return DifferenceVerdict(
            DIFFERENT, "it has no finite result where the first configuration has one"
        )
    differences = [c - r for r, c in zip(reference, candidate, strict=True)]
    noise = statistics.stdev(reference) if len(reference) > 1 else None
    if not any(differences):
        return DifferenceVerdict(
            NONE_SEEN, "equal for every seed", 0.0, 0.0, 0.0, noise, 0.0
        )
    if noise is None:
        reason = "one seed tells nothing of the noise between seeds"
        return DifferenceVerdict(UNDECIDED, reason, statistics.fmean(differences))
    return _judge_finite(differences, noise)


def _judge_finite(differences: Sequence[float], noise: float) -> DifferenceVerdict:
    """Judge finite differences of two seeds or more, not all of them zero."""
    count = len(differences)
    mean = statistics.fmean(differences)
    spread = statistics.stdev(differences)
    half = _student_quantile(count - 1) * spread / math.sqrt(count)
    verdict, reason = _verdict(abs(mean), half, noise)
    return DifferenceVerdict(
        verdict, reason, mean, mean - half, mean + half, noise, half
    )


def _verdict(size: float, half: float, noise: float) -> tuple[str, str]:
    """Verdict and reason for a mean difference of ``size`` with an interval of ± ``half``."""
    if noise == 0:
        return (
            UNDECIDED,
            "the seed changes nothing here, so there is no noise to compare with",
        )
    if size > half and size > noise:
        return DIFFERENT, f"{size / noise:.2g} times the spread between seeds"
    if size + half <= REPEATABILITY * noise:
        prefix = "real, but " if size > half else ""
        return NONE_SEEN, f"{prefix}{size / noise:.2g} of the spread between seeds"
    bound = f"{(size + half) / noise:.2g} times the spread between seeds"
    return UNDECIDED, f"too few seeds: a difference of up to {bound} may hide"


@cache
def _student_quantile(freedom: int) -> float:
    from scipy import stats

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
