"""roundoff.diagnose: everything a report shows, as plain data with the keys that were agreed."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from roundoff import Workload, diagnose, report
from roundoff.budget import Goal
from roundoff.errors import PlanError
from roundoff.report import strict
from roundoff.verbs.diagnose import Sampling, diagnose_workload

ROW = {
    "rank",
    "site",
    "operator",
    "kind",
    "format",
    "sqnr_db",
    "stderr_db",
    "share",
    "activation_db",
    "weight_db",
    "output_db",
    "measured",
    "chosen",
    "note",
}
RESULT = {
    "outputs",
    "target_db",
    "predicted_db",
    "measured_db",
    "native_db",
    "native_note",
    "metric_name",
    "metric_reference",
    "metric_predicted",
    "metric_predicted_std",
    "metric_measured",
    "met",
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.norm, self.head = (
            nn.Embedding(20, 12),
            nn.Linear(12, 24),
            nn.LayerNorm(24),
            nn.Linear(24, 5),
        )
        self.drop = nn.Dropout(0.2)

    def forward(self, ids):
        x = self.norm(nn.functional.gelu(self.first(self.embed(ids).mean(1))))
        scores = self.head(self.drop(x))
        return {"scores": scores, "sure": scores.softmax(-1).argmax(-1).float() * 0.5}


def accuracy(outputs, reference):
    same = [
        o["scores"].argmax(-1) == r["scores"].argmax(-1)
        for o, r in zip(outputs, reference, strict=True)
    ]
    return float(torch.cat(same).double().mean())


@pytest.fixture(scope="module")
def workload():
    torch.manual_seed(0)
    return Workload(
        Net(),
        [torch.randint(0, 20, (40, 6)) for _ in range(2)],
        metric=accuracy,
        name="toy",
    )


@pytest.fixture(scope="module")
def found(workload):
    return diagnose(workload, ["bf16", "fp16", "int8"], target="40dB", of="scores")


def plain(value):
    """Dicts with text keys, lists, text, numbers, booleans and None, and nothing else."""
    if isinstance(value, dict):
        return all(type(k) is str and plain(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(plain, value))
    return value is None or type(value) in (str, int, float, bool)


def test_the_summary_is_plain_data(found):
    assert plain(report.plain(found.summary))
    text = json.dumps(strict(found.summary), allow_nan=False)
    assert json.loads(text)["workload"] == "toy"
    json.dumps(
        report.plain(found.summary), allow_nan=False
    )  # nothing here overflows, so nothing had to be replaced


def test_the_keys(found):
    summary = report.plain(found.summary)
    assert set(summary) == {
        "version",
        "workload",
        "formats",
        "probes",
        "samples",
        "environment",
        "target",
        "coverage",
        "ranking",
        "plan",
        "rounds",
        "result",
        "pareto",
        "scatter",
        "seconds",
    }
    assert (summary["formats"], summary["samples"]) == (["bf16", "fp16", "int8"], 80)
    assert all(set(row) == {"name", "value", "note"} for row in summary["environment"])
    assert summary["target"] == {"asked": "40dB", "sqnr_db": 40.0, "note": ""}
    assert {"calls", "sites", "params", "excluded", "no_path"} <= set(
        summary["coverage"]
    )
    assert all(
        {"reason", "operator", "count", "examples"} <= set(e)
        for e in summary["coverage"]["excluded"]
    )
    assert summary["ranking"]
    assert all(set(row) == ROW for row in summary["ranking"])
    assert set(summary["plan"]["cost"]) == {
        "model",
        "unit",
        "plan",
        "fp32",
        "lowest",
        "lowest_format",
    }
    assert all(
        set(row)
        == {
            "round",
            "predicted_db",
            "measured_db",
            "additive_db",
            "metric_predicted",
            "metric_measured",
            "action",
        }
        for row in summary["rounds"]
    )
    assert set(summary["result"]) == RESULT
    assert all(
        set(p) == {"target_db", "predicted_db", "cost", "relative_cost"}
        for p in summary["pareto"]
    )
    assert all(
        set(p) == {"site", "format", "predicted_db", "measured_db"}
        for p in summary["scatter"]
    )
    assert set(summary["seconds"]) == {"budget", "plan", "verify"}
    assert all(s > 0 for s in summary["seconds"].values())


def test_the_ranking(found):
    rows = report.plain(found.summary)["ranking"]
    assert [r["rank"] for r in rows] == list(range(1, len(rows) + 1))
    db = [math.inf if r["sqnr_db"] is None else r["sqnr_db"] for r in rows]
    assert db == sorted(db)
    for fmt in ("bf16", "fp16", "int8"):
        assert sum(r["share"] for r in rows if r["format"] == fmt) == pytest.approx(
            1.0, rel=1e-9
        )
    formats = found.plan.formats([s.site for s in found.budget.sites])
    assert all(r["chosen"] == formats.get(r["site"], "fp32") for r in rows)


def test_the_coverage(found):
    coverage = report.plain(found.summary)["coverage"]
    assert coverage["sites"] == len(found.budget.sites) == 8
    assert (
        coverage["params"] == 7
    )  # the embedding's weight, and weight and bias of three more
    # the part after argmax is not what is measured
    assert [line.split(":")[0] for line in coverage["no_path"]] == ["/softmax", "/mul"]
    excluded = {(e["operator"], e["reason"]) for e in coverage["excluded"]}
    assert ("dropout", "moves values, rounds nothing") in excluded
    assert ("argmax", "integer or boolean result") in excluded
    counts = [e["count"] for e in coverage["excluded"]]
    assert counts == sorted(counts, reverse=True)


def test_the_plan_and_its_proof(found):
    summary = report.plain(found.summary)
    assert sum(summary["plan"]["sites"].values()) == 8
    assert summary["plan"]["rules"] == len(found.plan.rules)
    result = summary["result"]
    assert result["met"] is True
    assert result["measured_db"] >= 40
    assert abs(result["predicted_db"] - result["measured_db"]) <= 1
    assert result["metric_name"] == "accuracy"
    assert result["metric_reference"] == 1.0
    cost = summary["plan"]["cost"]
    assert 0 < cost["lowest"] <= cost["plan"] <= cost["fp32"]


def test_the_trade(found):
    points = report.plain(found.summary)["pareto"]
    assert len(points) >= 5
    targets, costs = [p["target_db"] for p in points], [p["cost"] for p in points]
    assert targets == sorted(targets)
    assert all(p["predicted_db"] >= p["target_db"] - 1e-9 for p in points)
    assert costs == sorted(costs)  # more exact is never cheaper
    for p in points:
        assert p["relative_cost"] == pytest.approx(
            p["cost"] / report.plain(found.summary)["plan"]["cost"]["fp32"], rel=1e-12
        )


def test_single_sites_beside_their_prediction(found):
    points = report.plain(found.summary)["scatter"]
    assert len(points) == len({p["site"] for p in points}) >= 5
    # one batch of 40 samples, K of at least 4: 160 products, 4 sigma is 1.5 dB, and 0.5 dB for what lies beyond
    assert all(abs(p["predicted_db"] - p["measured_db"]) < 2.0 for p in points)


def test_a_target_that_leaves_nothing_rounded(workload):
    found = diagnose(workload, ["int8"], target=300, of="scores")
    summary = report.plain(found.summary)
    assert summary["result"]["measured_db"] == math.inf
    assert summary["plan"]["sites"] == {"fp32": 8}
    data = strict(summary)
    json.dumps(data, allow_nan=False)
    assert data["not_finite"]["result.measured_db"] == "inf"


def test_a_metric_drop(workload):
    scores = Workload(
        workload.model,
        workload.batches,
        forward=lambda m, b: m(b)["scores"],
        metric=lambda outputs, reference: accuracy(
            [{"scores": o} for o in outputs], [{"scores": r} for r in reference]
        ),
    )
    found = diagnose(scores, ["bf16", "int8"], metric_drop="5%")
    summary = report.plain(found.summary)
    assert summary["target"]["asked"] == "5%"
    assert (
        "drops by 0.05" in summary["target"]["note"]
        or "holds at every" in summary["target"]["note"]
    )
    assert summary["result"]["metric_measured"] >= 0.95
    assert summary["result"]["met"] is True


def test_the_default_is_40_db_and_all_of_the_output(workload):
    with pytest.raises(PlanError, match="one of target, metric_drop and max_cost"):
        diagnose(workload, ["bf16"], target=40, metric_drop=0.1)
    found = diagnose(Workload(nn.Tanh(), [torch.randn(16, 4)]))
    assert report.plain(found.summary)["target"]["asked"] == "40dB"
    assert report.plain(found.summary)["formats"] == [
        "bf16",
        "fp16",
        "fp8_e4m3fn",
        "int8",
    ]
    assert report.plain(found.summary)["result"]["metric_name"] is None
    # no matrix operator: the 8-bit formats have nothing to run
    assert {r["format"] for r in report.plain(found.summary)["ranking"]} == {
        "bf16",
        "fp16",
    }


def test_pins_hold_through_every_round(workload):
    found = diagnose(
        workload,
        ["bf16", "int8"],
        target=20,
        of="scores",
        cost="bitops",
        pin={"head/linear": "fp32"},
    )
    assert found.plan.format_of("head/linear") == "fp32"
    assert report.plain(found.summary)["plan"]["cost"]["unit"] == "Gbitops"


def test_the_model_is_left_as_it_was(workload):
    model = workload.model
    model.train()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    rng = torch.get_rng_state()
    diagnose(workload, ["bf16"], target=30, of="scores")
    assert all(m.training for m in model.modules())
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.first.weight.grad is None
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    model.zero_grad()
    model.eval()


def test_progress_names_each_stage(workload):
    seen = []
    diagnose(
        workload,
        ["bf16"],
        target=30,
        of="scores",
        progress=lambda name, *_: seen.append(name),
    )
    names = list(dict.fromkeys(seen))
    assert names[0] == "budget"
    assert {"reference", "verify 1", "one site at a time"} <= set(names)


def test_points_of_the_curve_are_told_as_they_come(workload):
    told = []
    done = []

    def progress(stage, *_):
        if stage.startswith("verify"):
            done.append(len(told))

    goal = Goal(target=30)
    options = Sampling(of="scores", checks=0)
    answer = diagnose_workload(
        workload, ["bf16", "int8"], goal, options, progress, told.append
    )
    assert tuple(told) == answer.summary.pareto
    assert told
    assert done[0] == len(told)
