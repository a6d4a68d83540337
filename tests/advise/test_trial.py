"""Speed in pairs and precision in dB, against numbers known beforehand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import roundoff
from roundoff.advise import (
    AdviceRow,
    Change,
    Precision,
    Setup,
    Speed,
    Trials,
    combine,
    observe,
)
from roundoff.advise.trial import compare_precision, measure_speed, sqnr_of
from roundoff.errors import WorkloadError
from roundoff.preserve import random_states
from roundoff.workload import Workload

CPU = torch.device("cpu")


def test_sqnr_is_that_of_the_formula():
    reference = [{"output": torch.tensor([3.0, 4.0])}]
    other = [{"output": torch.tensor([3.0, 4.5])}]
    assert sqnr_of(reference, other) == pytest.approx(20 * math.log10(5 / 0.5))
    assert sqnr_of(reference, reference) == math.inf
    assert sqnr_of([], []) is None


def test_speed_counts_the_turns_of_both():
    calls = []
    speed = measure_speed(
        lambda: calls.append("a"), lambda: calls.append("b"), seconds=0.0, device=CPU
    )
    assert 3 <= speed.rounds <= 5  # fewer where the second was far slower
    assert speed.low <= speed.median <= speed.high
    assert speed.clock == "CPU time"
    # two turns of each before the rounds
    repeats = (calls.count("a") - 2) / speed.rounds
    assert calls.count("b") == 2 + repeats * speed.rounds


def test_bf16_costs_what_eight_bits_cost():
    """One product: relative error of each operand at most 2^-9, so above 45 dB; not equal."""
    layer = nn.Linear(64, 64)
    setup = Setup(Workload(layer, [torch.randn(16, 64)]), train=False)
    observed = observe(setup.copied(), 1)
    precision = compare_precision(observed, setup, [Change("bf16_autocast")])
    assert 40 < precision.output_db < 70
    assert precision.loss_db is None


def test_training_has_a_precision_of_gradients_and_loss():
    setup = Setup(
        Workload(
            nn.Linear(8, 8),
            [torch.randn(4, 8)],
            loss=lambda output, _: output.square().mean(),
        ),
        train=True,
    )
    observed = observe(setup.copied(), 1)
    same = compare_precision(observed, setup, [])
    assert (same.output_db, same.loss_db) == (math.inf, math.inf)
    low = compare_precision(observed, setup, [Change("bf16_autocast")])
    assert 30 < low.least_db < 80


def row(name, speed, db=math.inf, verdict="pays"):
    return AdviceRow(
        name=name,
        seen="",
        place="",
        do="",
        why="",
        source="",
        verdict=verdict,
        speed=Speed(median=speed, low=speed, high=speed, rounds=5, clock="CPU time"),
        precision=Precision(output_db=db, loss_db=None),
        change=Change(name),
    )


class FakeTrials(Trials):
    def try_changes(self, changes):
        return self.observed[tuple(change.name for change in changes)]


def fake_trials(results):
    setup = Setup(Workload(nn.Linear(2, 2), [torch.ones(1, 2)]), train=False)
    return FakeTrials(setup, results, CPU, 0.0, 40.0)


def test_one_winner_is_the_combination():
    only = row("channels_last", 1.5)
    trials = fake_trials({("channels_last",): (only.precision, only.speed)})
    rows, combination = combine([only], trials, progress=lambda *_: None)
    assert combination.changes == (Change("channels_last"),)
    assert combination.speed.median == 1.5
    assert rows[0].on_top.median == 1.5


def test_no_winner_is_no_combination():
    losing = row("channels_last", 0.5, verdict="does not pay")
    rows, combination = combine([losing], fake_trials({}), progress=lambda *_: None)
    assert combination.changes == ()
    assert rows[0].verdict == "does not pay"


@pytest.mark.parametrize(
    ("speed", "db", "verdict"),
    [
        (1.5, 60.0, "pays"),
        (1.5, 30.0, "costs precision"),
        (1.5, None, "costs precision"),
        (1.01, 60.0, "does not pay"),
        (0.5, math.inf, "does not pay"),
    ],
)
def test_verdicts(speed, db, verdict):
    tried = row("channels_last", speed, db)
    assert fake_trials({}).verdict(tried.precision, tried.speed) == verdict


def data():
    return [torch.randn(4, 8) for _ in range(2)]


def test_nothing_of_the_users_is_changed():
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    workload = Workload(model, data(), loss=lambda output, _: output.sum())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random_before = random_states()
    roundoff.advise(workload, train=True, seconds=0.0)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(p.grad is None for p in model.parameters())
    assert model.training
    pairs = zip(random_before, random_states(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert "forward" not in vars(model)


def test_training_without_a_loss_is_refused():
    with pytest.raises(WorkloadError, match="loss missing"):
        roundoff.advise(Workload(nn.Linear(8, 8), data()), train=True, seconds=0.0)


def test_a_model_that_cannot_be_copied_is_refused():
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.kept = self.weight * 2  # no leaf

        def forward(self, x):
            return x * self.kept

    with pytest.raises(WorkloadError, match="cannot be copied"):
        roundoff.advise(Workload(Holder(), data()), seconds=0.0)


def test_a_change_that_fails_is_a_row_with_the_reason():
    class Fussy(nn.Module):
        def forward(self, x):
            if torch.is_inference_mode_enabled():
                raise ValueError("not in inference mode")
            return x.relu()

    answer = roundoff.advise(Workload(Fussy(), data()), seconds=0.0)
    (failed,) = [r for r in answer.rows if r.name == "inference_mode"]
    assert failed.verdict == "not tried"
    assert "it failed" in failed.reason
    assert answer.summary.counts.flops == 4 * 8


def test_nan_and_empty_outputs_are_answered():
    class Odd(nn.Module):
        def forward(self, x):
            return {"nan": x * float("nan"), "empty": x[:0], "ids": x.argmax(1)}

    answer = roundoff.advise(Workload(Odd(), data()), seconds=0.0)
    assert answer.tuning.changes == ()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.ReLU(), "empty parameter list"),
        (nn.Sequential(nn.Linear(8, 8), nn.Threshold(0, 0)), "does not require grad"),
    ],
)
def test_a_step_that_cannot_be_run_is_the_users_error(model, message):
    def loss(output, batch):
        return output.detach().sum()

    workload = Workload(model, data(), loss=loss)
    with pytest.raises(WorkloadError, match=message):
        roundoff.advise(workload, train=True, seconds=0.0)


def test_a_scripted_model_is_answered():
    with pytest.warns(DeprecationWarning, match="script"):
        scripted = torch.jit.script(nn.Linear(8, 8))
    answer = roundoff.advise(Workload(scripted, data()), seconds=0.0)
    assert answer.summary.counts.macs == 4 * 8 * 8
