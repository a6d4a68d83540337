"""roundoff.verify: what is predicted beside what is measured, the plan mended where they part, and the real casts."""

from __future__ import annotations

import copy
import json
import math

import polars as pl
import pytest
import torch
from torch import nn

from roundoff import Plan, Workload, budget, verify
from roundoff.budget import Goal
from roundoff.errors import PlanError
from roundoff.plan.rounded_model import noise, run_batches
from roundoff.plan.rules import Rule
from roundoff.report import strict
from roundoff.verbs.verify import AGREEMENT_DB, LINEARISATIONS


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 6)
    ).eval()


@pytest.fixture(scope="module")
def workload():
    model = network()
    return Workload(model, [torch.randn(48, 8), torch.randn(16, 8)], metric=closeness)


def closeness(outputs, reference):
    """1 - relative error in norm, so 0.9 at 20 dB and 0.99 at 40 dB."""
    error = sum(
        float((o - r).square().sum()) for o, r in zip(outputs, reference, strict=True)
    )
    return 1 - math.sqrt(error / sum(float(r.square().sum()) for r in reference))


@pytest.fixture(scope="module")
def measured(workload):
    return budget(workload, ["bf16", "int8", "int4"], probes=16)


def db(workload, formats):
    return -10 * math.log10(
        noise(run_batches(workload, formats).targets, run_batches(workload).targets)
    )


def test_bf16_is_measured_as_torch_computes_it(workload):
    """Real casts: the whole network in torch.bfloat16."""
    plan = Plan((Rule("bf16", ("*",)),))
    found = verify(workload, plan)
    low = copy.deepcopy(workload.model).bfloat16()
    with torch.no_grad():
        pairs = [
            (low(x.bfloat16()).float(), workload.model(x)) for x in workload.batches
        ]
    real = sum(float((a - b).double().square().sum()) for a, b in pairs)
    exact = -10 * math.log10(
        real / sum(float(b.double().square().sum()) for _, b in pairs)
    )
    assert found.native_db == pytest.approx(
        exact, abs=1e-6
    )  # each call cast on its own: the same numbers
    assert (
        found.native_note == "10 calls with real casts, 0 simulated"
    )  # 5 in each of 2 batches
    # simulated: GELU and tanh are computed in fp32 and rounded in both, sums accumulate in another order
    assert found.last.measured_db == pytest.approx(exact, abs=0.3)


def test_what_cannot_run_natively_is_simulated_and_said(workload):
    mixed = verify(workload, Plan((Rule("int8", ("0/linear",)), Rule("bf16", ("*",)))))
    assert mixed.native_note == "8 calls with real casts, 2 simulated"
    scaled = verify(workload, Plan((Rule("int8", ("*/linear",)),)))
    assert scaled.native_db is None
    assert "no site of this plan has native arithmetic" in scaled.native_note
    assert (
        verify(workload, Plan((Rule("bf16", ("*",)),)), native=False).native_note
        == "not asked for"
    )


def test_without_a_budget_the_plan_is_measured(workload):
    plan = Plan(
        (Rule("bf16", ("*/linear",)),),
        about={"target_db": 30.0, "predicted_db": 49.0, "additive_db": 48.0},
    )
    found = verify(workload, plan)
    (only,) = found.rounds
    assert found.last == only
    assert (only.predicted_db, only.additive_db) == (49.0, 48.0)
    assert only.measured_db == pytest.approx(
        db(workload, dict.fromkeys(("0/linear", "2/linear", "4/linear"), "bf16"))
    )
    assert (found.plan, found.target_db, found.met) == (plan, 30.0, True)


def test_a_plan_without_any_numbers(workload):
    found = verify(workload, Plan((Rule("bf16", ("*",)),)))
    assert (found.target_db, found.met, found.last.predicted_db) == (None, True, None)
    assert found.last.action == "accepted"


def test_a_missed_target_is_not_met(workload):
    found = verify(workload, Plan((Rule("int4", ("*/linear",)),)), target=60.0)
    assert not found.met
    assert found.last.measured_db < 60
    assert found.last.action == "target missed"


def test_the_metric_is_asked_too(workload):
    plan = Plan((Rule("int8", ("*/linear",)),))
    kept, lost = (verify(workload, plan, metric_drop=drop) for drop in (0.5, 1e-6))
    assert (kept.met, lost.met) == (True, False)
    assert kept.metric_name == "closeness"
    assert kept.metric_reference == 1.0
    assert kept.last.metric_measured == pytest.approx(
        1 - 10 ** (-kept.last.measured_db / 20), rel=1e-5
    )


def test_a_plan_is_held_to_the_drop_that_it_was_made_for(workload, tmp_path):
    """Nobody repeats it: not on the command line, and not in code."""
    rules = (Rule("int8", ("*/linear",)),)
    met = []
    for drop in (0.5, 1e-6):
        Plan(rules, about={"metric_drop": drop}).save(tmp_path / "plan.toml")
        plan = Plan.load(tmp_path / "plan.toml")
        met.append(verify(workload, plan).met)
        # what is asked for instead goes first
        assert verify(workload, plan, target=1.0).met
        assert verify(workload, plan, metric_drop=0.5).met
    assert met == [True, False]


def test_a_plan_says_which_drop_it_was_made_for(workload):
    known = budget(workload, ["int8", "bf16"], probes=8)
    assert known.plan(metric_drop="5%").figures.metric_drop == pytest.approx(0.05)
    assert known.plan(target=20).figures.metric_drop is None


def test_a_drop_of_no_metric_is_refused(workload):
    plain = Workload(workload.model, workload.batches)
    plan = Plan((Rule("bf16", ("*/linear",)),), about={"metric_drop": 0.1})
    for asked in ({}, {"metric_drop": 0.1}, {"target": "10%"}):
        with pytest.raises(PlanError, match="the workload has none"):
            verify(plain, plan, **asked)
    assert verify(plain, plan, target=10).met


@pytest.mark.parametrize("target", [20, 35])
def test_a_plan_that_agrees_is_accepted_in_one_round(workload, measured, target):
    found = verify(workload, measured.plan(target), budget=measured)
    assert found.met
    assert found.last.measured_db >= target
    assert found.last.action == "accepted"
    assert abs(found.last.predicted_db - found.last.measured_db) <= AGREEMENT_DB
    assert found.last in found.rounds
    assert [r.round for r in found.rounds] == list(range(1, len(found.rounds) + 1))
    assert found.last.measured_db == pytest.approx(
        db(workload, found.plan.formats(s.site for s in measured.sites))
    )


@pytest.mark.parametrize("seed", range(3))
def test_coarse_formats_are_linearised_again(seed):
    """int4 with outliers: far beyond first order. The last round agrees with its measurement at least as well as the
    first did, and as often as there are rounds left, within 1 dB."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(8, 16),
        nn.GELU(),
        nn.Linear(16, 16),
        nn.LayerNorm(16),
        nn.Softplus(20.0),
        nn.Linear(16, 4),
    )
    with torch.no_grad():
        model[0].weight[:2] *= 8.0
    workload = Workload(model, [torch.randn(64, 8)])
    found = budget(workload, ["int4", "int8"])
    proof = verify(workload, found.plan(8), budget=found)
    off = [abs(r.predicted_db - r.measured_db) for r in proof.rounds]
    assert 1 <= len(off) <= 3
    assert off[-1] <= off[0]
    if len(off) < 3 and proof.met:
        assert off[-1] <= AGREEMENT_DB
    for entry in proof.rounds[:-1]:
        assert "solved again" in entry.action


def small_and_deep(seed: int) -> Workload:
    """Seven layers of which each rounding is a large part of the output's noise."""
    torch.manual_seed(seed)
    layers = [layer for _ in range(6) for layer in (nn.Linear(12, 12), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(12, 12)).eval()
    for parameter in model.parameters():
        parameter.data *= 1.7
    return Workload(model, [torch.randn(6, 12)])


@pytest.mark.parametrize(("seed", "target"), [(1, 26), (4, 22), (5, 26)])
def test_the_last_plan_leaves_room_for_what_earlier_ones_fell_short(seed, target):
    """A plan that just meets its target as predicted misses it as often as not."""
    workload = small_and_deep(seed)
    measured = budget(workload, ["int4", "int8"], probes=8)
    plan = measured.plan(float(target))
    first = verify(workload, plan, budget=measured, native=False, rounds=1)
    assert not first.met
    second = verify(workload, plan, budget=measured, native=False, rounds=2)
    assert second.met


@pytest.mark.parametrize(("seed", "targets"), [(0, (20, 30)), (2, (26, 30))])
def test_a_target_that_a_plan_reaches_is_met(seed, targets):
    """All in fp32 has no noise: every target can be reached, with few probes too."""
    workload = small_and_deep(seed)
    measured = budget(workload, ["int4", "int8"], probes=4)
    proofs = [
        verify(workload, measured.plan(float(db)), budget=measured, native=False)
        for db in targets
    ]
    assert all(proof.met for proof in proofs)
    assert any(len(proof.rounds) > LINEARISATIONS + 1 for proof in proofs)
    # no more than what the last rounds' room allows is given away
    assert all(proof.last.measured_db < proof.target_db + 10 for proof in proofs)


def test_the_plan_that_stands_is_the_best_tried(workload, measured):
    """A budget that makes light of every error by 30 dB, and a pin that rules the target out in truth."""
    light = pl.col("projections").list.eval(pl.element() * 0.03)
    flattered = type(measured)(
        measured.terms.with_columns(light), measured.sites, measured.about
    )
    pin = {"0/linear": "int8"}
    plan = flattered.plan(50, pin=pin)
    proof = verify(workload, plan, budget=flattered, goal=Goal(pin=pin))
    assert not proof.met
    assert proof.last.measured_db == max(float(r.measured_db) for r in proof.rounds)
    assert (
        "no plan reaches 50.0 dB" in proof.rounds[-1].action or len(proof.rounds) == 3
    )
    assert proof.plan.format_of("0/linear") == "int8"


def test_the_loss_as_the_target(workload):
    """Its operators are sites too, in the budget and when the plan is run."""
    lossy = Workload(
        workload.model,
        workload.batches,
        loss=lambda output, batch: output.square().mean(),
    )
    found = budget(lossy, ["bf16", "int8"], of="loss")
    proof = verify(lossy, found.plan(30), budget=found)
    assert proof.met
    assert {"/square", "/mean"} <= {s.site for s in found.sites}
    sites = [s.site for s in found.sites]
    assert proof.last.measured_db == pytest.approx(
        -10
        * math.log10(
            noise(
                run_batches(lossy, proof.plan.formats(sites), target="loss").targets,
                run_batches(lossy, target="loss").targets,
            )
        )
    )


def test_a_plan_of_another_model(workload):
    with pytest.raises(PlanError, match="match no site of this model"):
        verify(workload, Plan((Rule("bf16", ("encoder.*",)),)))


def test_everything_in_fp32(workload, measured):
    proof = verify(workload, measured.plan(300), budget=measured)
    assert proof.last.measured_db == proof.last.predicted_db == math.inf
    assert proof.met
    assert len(proof.rounds) == 1


def test_an_overflowing_plan_is_lost_and_stays_json():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.mul_(1e6)
    workload = Workload(model, [torch.randn(6, 4)])
    found = budget(workload, ["fp16"])
    proof = verify(workload, Plan((Rule("fp16", ("*",)),)), budget=found, target=30.0)
    assert not proof.met
    assert proof.last.measured_db == -math.inf
    assert (
        proof.last.action
        == "the rounded model overflows: no linearisation exists around it"
    )
    assert len(proof.rounds) == 1
    json.dumps(strict(proof.summary()), allow_nan=False)


class FirstRow(nn.Module):
    """Attention whose other rows are masked wholly, with the lowest fp32: in fp16 their
    softmax is NaN. The output is the first row."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 4)
        self.value = nn.Linear(4, 4)

    def forward(self, x):
        masked = torch.zeros(6, 6, dtype=torch.bool)
        masked[1:] = True
        scores = self.query(x) @ x.T
        scores = scores.masked_fill(masked, torch.finfo(torch.float32).min)
        return (scores.softmax(-1) @ self.value(x))[0]


def test_a_plan_with_nan_that_no_output_reads_is_mended():
    torch.manual_seed(0)
    workload = Workload(FirstRow(), [torch.randn(6, 4)])
    measured = budget(workload, ["fp16"])
    plan = Plan((Rule("fp16", ("*",)),))
    # fp16 alone reaches about 66 dB
    proof = verify(workload, plan, budget=measured, target=75.0)
    first = proof.rounds[0]
    assert math.isfinite(first.measured_db)
    assert "solved again" in first.action
    assert proof.met


def test_progress_is_told(workload, measured):
    seen = []
    verify(
        workload,
        measured.plan(30),
        budget=measured,
        progress=lambda *step: seen.append(step),
    )
    names = list(dict.fromkeys(name for name, _, _ in seen))
    assert names[:2] == ["reference", "verify 1"]
    assert names[-1] == "verify natively"
    assert all(0 <= done <= total == 2 for _, done, total in seen)


def test_the_model_is_left_as_it_was(workload, measured):
    model = workload.model.train()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    verify(workload, measured.plan(20), budget=measured)
    assert model.training
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model.eval()


class Chooser(nn.Module):
    """Each row takes the entry whose score is largest; two scores are close in each row."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 4)
        self.values = nn.Linear(8, 4)
        self.leave = nn.Linear(8, 6)
        with torch.no_grad():
            self.scores.weight[1] = self.scores.weight[0] + 0.003
            self.scores.bias[1] = self.scores.bias[0]

    def forward(self, x):
        chosen = nn.functional.one_hot(self.scores(x).argmax(-1), 4)
        return self.leave(torch.cat([self.values(x), 4.0 * chosen], -1))


@pytest.mark.parametrize("target", [20, 30, 40])
def test_where_decisions_change_prediction_and_measurement_end_alike(target):
    """Rounding flips the choice of rows: no derivative says so."""
    torch.manual_seed(0)
    workload = Workload(Chooser(), [torch.randn(64, 8), torch.randn(64, 8)])
    found = budget(workload, ["bf16", "int8"], trials=0)
    proof = verify(workload, found.plan(target), budget=found, native=False)
    assert proof.met
    last = proof.last
    assert last.predicted_db == pytest.approx(last.measured_db, abs=AGREEMENT_DB)
    assert last.measured_db == pytest.approx(
        db(workload, proof.plan.formats(site.site for site in found.sites))
    )


def test_a_prediction_that_stays_wrong_is_corrected_and_says_so(workload, measured):
    """Every error is made light of by 30 dB, and no further round is allowed."""
    light = pl.col("projections").list.eval(pl.element() * 0.03)
    flattered = type(measured)(
        measured.terms.with_columns(light), measured.sites, measured.about
    )
    plan = flattered.plan(40)
    proof = verify(workload, plan, budget=flattered, target=1.0, rounds=1)
    assert proof.met
    assert proof.last.predicted_db == proof.last.measured_db
    wrong = flattered.predict(plan.formats(s.site for s in measured.sites)).db
    assert f"predicted {wrong:.1f} dB, corrected by this run" in proof.last.action
    [row] = proof.outputs
    assert row.predicted_db == row.sqnr_db
