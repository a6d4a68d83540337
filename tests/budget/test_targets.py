"""Targets: what may be asked for, and how a drop of the metric becomes decibels."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from roundoff import Workload, budget
from roundoff.budget.aim import parse_drop
from roundoff.budget.facts import MetricCurve, MetricLevel
from roundoff.budget.sqnr_target import parse_db
from roundoff.budget.targets import (
    LEVELS,
    REPEATS,
    drop_to_db,
    metric_at,
    metric_curve,
    values_by_level,
)
from roundoff.errors import PlanError


@pytest.mark.parametrize(
    ("value", "db"),
    [
        (40, 40.0),
        (40.5, 40.5),
        ("40", 40.0),
        ("40dB", 40.0),
        (" 38.5 DB ", 38.5),
        ("-3dB", -3.0),
        ("+3.", 3.0),
        (0, 0.0),
    ],
)
def test_targets(value, db):
    assert parse_db(value) == db


@pytest.mark.parametrize(
    "value",
    [
        "",
        "dB",
        "40%",
        "40 db dB",
        "forty",
        "1e2x",
        "nan",
        math.nan,
        math.inf,
        "4O",
        None,
        True,
    ],
)
def test_what_is_no_target(value):
    with pytest.raises(PlanError) as error:
        parse_db(value)
    assert "a number of decibels such as 40dB" in str(error.value)
    assert repr(value) in str(error.value)


@given(st.floats(-300, 300))
def test_every_number_is_a_target(value):
    """Also those that Python writes with an exponent."""
    assert parse_db(value) == value
    assert parse_db(f"{value!r} dB") == value


@pytest.mark.parametrize(
    ("value", "drop"),
    [
        ("0.5%", 0.005),
        ("0.5 %", 0.005),
        (0.01, 0.01),
        ("0.01", 0.01),
        (1e-5, 1e-5),
        ("2%", 0.02),
        (0, 0.0),
        (1, 1.0),
    ],
)
def test_drops(value, drop):
    assert parse_drop(value) == pytest.approx(drop, rel=1e-15)


@pytest.mark.parametrize(
    "value",
    ["-1%", "100.5%", "1e400", -0.1, "half", "", "%", "1dB", math.nan, math.inf, None],
)
def test_what_is_no_drop(value):
    with pytest.raises(PlanError) as error:
        parse_drop(value)
    assert "0.5% or 0.005" in str(error.value)


@pytest.mark.parametrize("first", [0, 1, 7, 16, 17, 18])
def test_levels_above_the_first_that_changes_nothing_are_not_looked_at(first):
    """A search among n levels looks at two for each bit of n, and at all that change."""
    asked = []

    def value_at(place):
        asked.append(place)
        return 1.0 if place >= first else place / len(LEVELS)

    expected = [value_at(place) for place in range(len(LEVELS))]
    asked.clear()
    assert values_by_level(value_at, 1.0) == expected
    most = 2 * math.ceil(math.log2(len(LEVELS) + 1))
    assert len(set(asked)) <= min(len(LEVELS), first + most)


def test_one_level_that_is_as_before_by_chance_ends_nothing():
    values = [0.5, 1.0, 0.75, 0.5, 1.0, 0.9] + [0.95] * (len(LEVELS) - 6)
    assert values_by_level(values.__getitem__, 1.0) == values


def test_a_metric_that_is_no_number_is_asked_for_at_every_level():
    values = values_by_level(lambda _: math.nan, math.nan)
    assert len(values) == len(LEVELS)
    assert all(map(math.isnan, values))


def curve(means, reference=1.0, std=0.0):
    levels = tuple(
        MetricLevel(float(db), mean, std)
        for db, mean in zip(LEVELS, means, strict=True)
    )
    return MetricCurve("accuracy", reference, levels)


def ramp(db):
    """0.5 at 2 dB, 1.0 from 42 dB on, straight between."""
    return min(1.0, 0.5 + (db - 2) / 80)


RAMP = curve([ramp(db) for db in LEVELS])


@pytest.mark.parametrize("drop", [0.05, 0.1, 0.3, 0.4999])
def test_the_level_where_the_drop_is_reached(drop):
    db, note = drop_to_db(RAMP, drop)
    assert db == pytest.approx(
        2 + 80 * (0.5 - drop), abs=1e-9
    )  # where the straight line is at 1 - drop
    assert "accuracy drops by" in note


def test_a_noisy_mean_counts_less_one_standard_error():
    """Draws with standard deviation 0.02 have a mean that is sure to 0.02 / sqrt(4): the target is 0.8 dB higher."""
    sure, _ = drop_to_db(RAMP, 0.1)
    unsure, _ = drop_to_db(curve([ramp(db) for db in LEVELS], std=0.02), 0.1)
    assert REPEATS == 4
    assert unsure - sure == pytest.approx(80 * 0.01, abs=1e-9)


def test_a_metric_that_no_noise_moves():
    assert drop_to_db(curve([1.0] * len(LEVELS)), 0.01) == (
        2.0,
        "accuracy holds at every noise level tried, down to 2 dB",
    )


def test_a_metric_that_the_least_noise_moves():
    with pytest.raises(PlanError) as error:
        drop_to_db(curve([0.5] * len(LEVELS)), 0.01)
    assert f"even noise at {LEVELS[-1]} dB moves the metric by more than 0.01" in str(
        error.value
    )
    assert "accuracy 1, 0.5 at 70 dB" in str(error.value)


def test_a_lucky_level_below_bad_ones_does_not_count():
    """Only levels from which on all higher ones hold."""
    means = [ramp(db) for db in LEVELS]
    means[2] = 1.0
    assert drop_to_db(curve(means), 0.1)[0] == pytest.approx(34.0)


def test_without_a_metric():
    with pytest.raises(PlanError) as error:
        drop_to_db(None, 0.1)
    assert "the budget has no metric" in str(error.value)
    assert "give a target in dB instead" in str(error.value)


def test_the_curve_between_and_beyond_its_levels():
    one = curve([ramp(db) for db in LEVELS], reference=0.99, std=0.02)
    assert metric_at(one, 4.0) == pytest.approx((ramp(4.0), 0.02))
    assert metric_at(one, 0.0) == (0.5, 0.02)
    assert metric_at(one, 200.0) == (0.99, 0.02)
    assert metric_at(one, math.inf) == (0.99, 0.02)
    assert metric_at(one, -math.inf)[0] == 0.5


def error_metric(outputs, reference):
    """Minus the relative noise power: at 10 dB, -0.1."""
    error = sum(
        float((o - r).square().sum()) for o, r in zip(outputs, reference, strict=True)
    )
    return -error / sum(float(r.square().sum()) for r in reference)


@pytest.fixture(scope="module")
def measured():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 40))
    workload = Workload(
        model, [torch.randn(30, 8), torch.randn(10, 8)], metric=error_metric
    )
    return workload, budget(workload, ["bf16", "int8"])


def test_the_noise_of_each_level_has_that_level_s_power(measured):
    """1600 Gaussian elements: the power of one draw has a relative standard deviation of at least sqrt(2 / 1600), more
    where the profile gives a few samples most: at most sqrt(2 / 200) for 5 effective samples of 40. Four draws: 5 %."""
    found = measured[1].about.metric
    assert found.name == "error_metric"
    assert found.reference == 0.0
    assert [level.db for level in found.levels] == [float(db) for db in LEVELS]
    for level in found.levels:
        assert level.mean == pytest.approx(-(10 ** (-level.db / 10)), rel=4 * 0.05)
        assert 0 < level.std < 0.4 * abs(level.mean)


def test_the_curve_does_not_run_the_model_and_keeps_its_seed(measured):
    workload, found = measured
    with torch.no_grad():
        outputs = [workload.model(batch) for batch in workload.batches]
    handle = workload.model.register_forward_hook(
        lambda *_: pytest.fail("the model was run")
    )
    state = torch.get_rng_state()
    first, again, other = (
        metric_curve(workload, outputs, found, seed=s) for s in (0, 0, 1)
    )
    handle.remove()
    assert first == again != other
    assert torch.equal(torch.get_rng_state(), state)


def test_better_outputs_score_better(measured):
    means = [level.mean for level in measured[1].about.metric.levels]
    assert means == sorted(
        means
    )  # 4 dB a level: a factor of 2.5, against a spread of 10 %


def test_noise_is_shared_among_samples_as_the_budget_found_it(made):
    """A budget whose errors all lie in the second of two samples."""
    new = made(["bf16"], probes=2, batch_samples=[2])
    new.site("/sin").term("/sin", "bf16", "output", [[0.0, 0.1], [0.0, 0.1]])
    seen = []

    def metric(outputs, reference):
        errors = (outputs[0] - reference[0]).square().sum(1)
        seen.append(errors.tolist())
        return float(errors.sum())  # every level changes it

    output = torch.ones(2, 500)
    metric_curve(
        Workload(nn.Identity(), [output], metric=metric),
        [output],
        new.budget(signal=1000.0),
    )
    assert all(first == 0.0 for first, _ in seen)
    # 10**-0.2 of a signal of 1000 in 500 elements: sigma of a draw 2 sqrt(2 / 500) = 6 %, of four 3 %
    errors = [second for _, second in seen[1:]]
    assert len(errors) == REPEATS * len(LEVELS)
    starts = range(0, len(errors), len(LEVELS))
    of_first_level = [max(errors[i : i + len(LEVELS)]) for i in starts]
    assert sum(of_first_level) / REPEATS == pytest.approx(631.0, rel=0.13)


def test_integers_and_structure_of_the_output_are_kept(made):
    new = made(["bf16"], probes=2, batch_samples=[2]).site("/sin")
    new.term("/sin", "bf16", "output", [[0.1, 0.1], [0.1, 0.1]])
    output = {
        "logits": torch.ones(2, 4),
        "ids": torch.arange(2),
        "deep": (torch.ones(3),),
    }

    def metric(outputs, reference):
        assert outputs[0].keys() == output.keys()
        assert torch.equal(outputs[0]["ids"], output["ids"])
        assert isinstance(outputs[0]["deep"], tuple)
        assert reference[0] is output
        return float(torch.equal(outputs[0]["logits"], output["logits"]))

    found = metric_curve(
        Workload(nn.Identity(), [torch.ones(2)], metric=metric), [output], new.budget()
    )
    assert found.reference == 1.0
    assert {level.mean for level in found.levels} == {0.0}
