"""Verdicts: Student's interval against scipy and exact fractions, false alarms and power by simulation."""

import math
import random
import statistics

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy import stats

from roundoff.train.bench.judge import judge

HUNDREDTHS = st.integers(-5000, 5000).map(lambda n: n / 100)
numbers = st.lists(
    st.floats(-100, 100).map(lambda v: round(v, 3)), min_size=2, max_size=8
)


@pytest.mark.filterwarnings(
    "ignore:Precision loss"
)  # of scipy, where all differences are nearly one
@given(st.lists(st.tuples(HUNDREDTHS, HUNDREDTHS), min_size=2, max_size=9))
# how long an example takes to draw says how busy the machine is
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_the_interval_is_students(pairs):
    reference, candidate = zip(*pairs, strict=True)
    found = judge(reference, candidate)
    differences = [c - r for r, c in pairs]
    if len(set(differences)) == 1 or found.low is None:
        return
    oracle = stats.ttest_rel(candidate, reference).confidence_interval(0.95)
    assert found.low == pytest.approx(oracle.low, rel=1e-9, abs=1e-9)
    assert found.high == pytest.approx(oracle.high, rel=1e-9, abs=1e-9)
    assert found.could_see == pytest.approx(
        (oracle.high - oracle.low) / 2, rel=1e-9, abs=1e-9
    )
    assert found.noise == pytest.approx(
        statistics.stdev(reference), rel=1e-9, abs=1e-12
    )


@given(numbers, st.floats(0.001, 100))
def test_a_change_of_unit_changes_no_verdict(values, unit):
    reference, candidate = values, [v + 0.25 * i for i, v in enumerate(values)]
    scaled = judge([v * unit for v in reference], [v * unit for v in candidate])
    assert scaled.verdict == judge(reference, candidate).verdict


@given(numbers)
def test_equal_is_no_difference(values):
    found = judge(values, values)
    assert (found.verdict, found.difference, found.could_see) == (
        "no difference seen",
        0.0,
        0.0,
    )


def rate(shift, seeds, paired, trials=2000):
    """Share of each verdict where a candidate is ``shift`` standard deviations of the seeds off."""
    draw = random.Random(seeds)
    found = []
    for _ in range(trials):
        reference = [draw.gauss(2, 0.1) for _ in range(seeds)]
        noise = [
            0.01 * draw.gauss(0, 1) if paired else draw.gauss(2, 0.1) - r
            for r in reference
        ]
        found.append(
            judge(
                reference,
                [r + shift * 0.1 + n for r, n in zip(reference, noise, strict=True)],
            ).verdict
        )
    return {
        verdict: found.count(verdict) / trials
        for verdict in ("different", "no difference seen", "undecided")
    }


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("seeds", [2, 3, 5, 10])
def test_false_alarms(seeds, paired):
    # at most the 5 % of the interval, plus 4 standard deviations of a share of 2000: 4 * sqrt(0.05 * 0.95 / 2000) = 0.0195
    assert rate(0, seeds, paired)["different"] <= 0.05 + 0.0195


def test_power():
    # Paired, 3 seeds: the difference is 3 in units of the seeds' noise, which the estimate of that noise exceeds with
    # P(chi2_2 / 2 > 9) = e^-9; the interval's half is 4.3 * 0.1 * s / sqrt(3) of about 0.25.
    assert rate(3, 3, paired=True)["different"] >= 0.99
    # As noisy as another seed: 3 seeds cannot exclude what may be three times the noise, 10 can (half is 1.01 * noise).
    assert rate(0, 3, paired=False)["undecided"] >= 0.5
    assert rate(0, 10, paired=False)["no difference seen"] >= 0.85
    assert rate(4, 10, paired=False)["different"] >= 0.99


def test_a_real_difference_below_the_noise_is_none():
    found = judge([1.0, 2.0, 3.0], [1.01, 2.01, 3.0101])
    assert found.verdict == "no difference seen"
    assert found.reason.startswith("real, but 0.01 of the spread")
    assert found.low > 0


@pytest.mark.parametrize(
    ("reference", "candidate", "verdict", "reason"),
    [
        (
            [1.0, 2.0],
            [1.5, math.nan],
            "different",
            "it has no finite result where the first configuration has one",
        ),
        (
            [1.0, math.inf],
            [1.0, 2.0],
            "undecided",
            "the first configuration itself has no finite result",
        ),
        ([], [], "undecided", "there are no pairs to compare"),
        ([1.0, 2.0], [1.0], "undecided", "there are no pairs to compare"),
        (
            [1.0],
            [2.0],
            "undecided",
            "one seed tells nothing of the noise between seeds",
        ),
        ([1.0], [1.0], "no difference seen", "equal for every seed"),
        (
            [1.0, 1.0],
            [2.0, 2.1],
            "undecided",
            "the seed changes nothing here, so there is no noise to compare with",
        ),
        (
            [1.0, 1.1],
            [1.4, 1.0],
            "undecided",
            "too few seeds: a difference of up to 47 times the spread between seeds may hide",
        ),
    ],
)
def test_what_cannot_be_judged(reference, candidate, verdict, reason):
    found = judge(reference, candidate)
    assert (found.verdict, found.reason) == (verdict, reason)


def test_the_sentence_of_too_few_seeds():
    # by hand: d = 0.4, -0.1: mean 0.15, std 0.3536, half = 12.706 * 0.3536 / sqrt(2) = 3.177; noise 0.0707
    differences = [0.4, -0.1]
    half = stats.t.ppf(0.975, 1) * statistics.stdev(differences) / math.sqrt(2)
    assert (0.15 + half) / statistics.stdev([1.0, 1.1]) == pytest.approx(47, abs=0.5)
