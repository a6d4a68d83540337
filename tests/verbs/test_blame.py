"""Where the noise of a plan comes from: runs of the plan without some of its sites."""

from __future__ import annotations

import pytest

from roundoff.verbs.blame import LEAST_SHARE, PASSES, blamed


def plan_of(count):
    return {f"s{number}": "bf16" for number in range(count)}


def test_one_site_is_found_among_many():
    runs = []

    def noise_of(formats):
        runs.append(formats)
        return 1.0 if "s13" in formats else 0.01

    [blame] = blamed(plan_of(20), 1.0, noise_of)
    assert blame.sites == ("s13",)
    assert blame.noise == pytest.approx(0.99)
    # four groups of five, then halves: 3 + 2, 2 + 1 at most, 1 + 1
    assert len(runs) <= 10


def test_sites_whose_errors_add_up_have_their_shares():
    powers = {"s0": 0.5, "s1": 0.3, "s2": 0.15, "s3": 0.05}
    blames = blamed(plan_of(4), 1.0, lambda formats: sum(powers[s] for s in formats))
    shares = {blame.sites: blame.noise for blame in blames}
    expected = {(s,): power for s, power in powers.items() if power > LEAST_SHARE}
    assert shares == {sites: pytest.approx(power) for sites, power in expected.items()}


def test_the_number_of_runs_is_limited():
    runs = []

    def noise_of(formats):
        runs.append(formats)
        return len(formats) / 400

    blames = blamed(plan_of(400), 1.0, noise_of)
    assert len(runs) <= PASSES
    assert all(blame.noise > LEAST_SHARE for blame in blames)


def test_a_decision_that_all_take_together_is_everybodys():
    """Without any one of them the noise is gone; and nobody is to blame where it stays."""
    formats = plan_of(3)
    blames = blamed(formats, 1.0, lambda rest: 1.0 if rest == formats else 0.0)
    assert [(blame.sites, blame.noise) for blame in blames] == [
        (("s0",), 1.0),
        (("s1",), 1.0),
        (("s2",), 1.0),
    ]
    assert blamed(formats, 1.0, lambda rest: 1.0) == []
    assert blamed({}, 1.0, lambda rest: 1.0) == []
    # a run that loses everything says nothing
    assert blamed(formats, 1.0, lambda rest: float("inf")) == []
