"""``tune`` finds a plan that beats built-in autocast, within its runs, and says so; the command line does the same."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from torch import nn

import roundoff as ro
from roundoff.cli.app import main
from roundoff.errors import FormatError, NonFiniteError, PlanError, WorkloadError
from roundoff.train.tune.simulated_step import SimulatedAutocast, gradients_of
from roundoff.train.tune.trial import Trials, sqnr

SOURCE = """
import torch

def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.LayerNorm(32),
                               torch.nn.Linear(32, 4), torch.nn.Softmax(-1))

def draw(shape, seed):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))

def batches():
    return [(draw((32, 8), i), draw((32, 4), 50 + i)) for i in range(2)]

def forward(model, batch):
    return model(batch[0])

def loss(output, batch):
    return torch.nn.functional.mse_loss(output, batch[1])

def optimizer(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)
"""


@pytest.fixture
def work(tmp_path):
    (tmp_path / "net.py").write_text(SOURCE)
    return ro.Workload.load(tmp_path / "net.py")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    (folder / "net.py").write_text(SOURCE)
    work = ro.Workload.load(folder / "net.py")
    before = {k: v.clone() for k, v in work.model.state_dict().items()}
    random = torch.get_rng_state()
    found = ro.tune(work, ["bf16"], device="cuda", steps=6, probes=16)
    assert torch.equal(random, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in work.model.state_dict().items())
    assert not any(p.grad is not None for p in work.model.parameters())
    return found, work


def test_at_most_five_runs_and_the_plan_is_better(tuned):
    found, work = tuned
    by = {run.name: run for run in found.runs}
    assert [run.name for run in found.runs] == [
        "fp32",
        "autocast",
        "equal",
        "more",
        "cheapest",
    ]
    assert found.met
    assert by["equal"].measured_db > by["autocast"].measured_db
    assert by["equal"].cost <= by["autocast"].cost
    assert by["more"].cost <= 1.2 * by["autocast"].cost
    assert by["cheapest"].cost <= by["autocast"].cost
    for run in found.runs[1:]:
        # 32 projections of each site: 1.1 dB; doubled
        assert run.predicted_db == pytest.approx(run.measured_db, abs=2.2)
        assert [step for step, _ in run.along] == [3, 5]
        assert all(
            20 < value < 70 for _, value in run.along
        )  # later the gradients are smaller, and their errors are not
        assert run.losses[0] == pytest.approx(
            by["fp32"].losses[0], rel=2**-8
        )  # a few roundings of 2**-9
    assert by["fp32"].losses[-1] < by["fp32"].losses[0]
    assert found.operators == 6
    # what is said of a run is what a run gives
    again = sqnr(gradients_of(work, dict(by["equal"].formats)), gradients_of(work))
    assert by["equal"].measured_db == pytest.approx(again, abs=1e-6)
    assert "loss" not in " ".join(s for run in found.runs[2:] for s in run.formats)


def test_the_baseline_is_the_lists_of_the_device(work):
    chosen = {}
    for device in ("cpu", "cuda"):
        handler = SimulatedAutocast(ro.FORMATS["bf16"], device)
        gradients_of(work, handler, batches=1)
        chosen[device] = {s for s in handler.chosen if s in handler.sites}
    # torch's documentation: on CUDA layer_norm and softmax autocast to float32; a CPU leaves them alone
    assert chosen["cpu"] == {
        "0/linear",
        "1/gelu",
        "2/layer_norm",
        "3/linear",
        "4/softmax",
    }
    assert chosen["cuda"] == {"0/linear", "1/gelu", "3/linear"}


def test_the_pareto_curve_only_goes_up(tuned):
    points = tuned[0].pareto
    assert len(points) > 2
    assert points[-1].predicted_db is None  # fp32
    for a, b in itertools.pairwise(points):
        assert a.cost < b.cost
        assert b.predicted_db is None or a.predicted_db < b.predicted_db


def test_the_plan_can_be_written_and_read(tuned, tmp_path):
    found, _ = tuned
    found.plan.save(tmp_path / "plan.toml")
    read = ro.Plan.load(tmp_path / "plan.toml")
    run = next(r for r in found.runs if r.name == "equal")
    assert read.formats(s.site for s in found.budget.sites) == run.formats
    assert read.about["autocast_lists"] == "cuda"
    assert read.about["measured_db"] == pytest.approx(run.measured_db)
    text = json.dumps(found.to_dict()["ranking"])
    assert "gradient_db" in text


def test_a_plan_obeys_its_pins(work):
    found = ro.tune(
        work,
        ["bf16"],
        device="cuda",
        steps=1,
        probes=4,
        runs=3,
        batches=1,
        pin={"4/softmax": "bf16"},
    )
    assert len(found.runs) == 3
    assert found.runs[-1].formats["4/softmax"] == "bf16"


def test_matrix_products_in_fp32_are_said(tuned):
    """By bytes a product in fp32 may be paid for by something else; that is slower where products take the time."""
    found, work = tuned
    product = next(s.site for s in found.budget.sites if s.kind == "linear")
    options = {
        "device": "cuda",
        "steps": 1,
        "runs": 3,
        "budget": found.budget,
        "aim": "more",
        "extra": 1.0,
    }
    said = f"1 matrix product in fp32 that autocast runs in bf16 ({product} ...)"
    others = {
        s.site: "bf16"
        for s in found.budget.sites
        if s.kind == "linear" and s.site != product
    }
    options["pin"] = {product: "fp32", **others}
    by = {
        cost: ro.tune(work, ["bf16"], cost=cost, **options)
        for cost in ("bytes", "bitops")
    }
    assert any(said in note and "--cost bitops" in note for note in by["bytes"].notes)
    assert not any("matrix product" in note for note in by["bitops"].notes)


def test_fewer_operators_in_fp32_at_lower_error(work):
    found = ro.tune(
        work,
        ["bf16"],
        device="cuda",
        steps=1,
        probes=8,
        runs=3,
        batches=1,
        cost="operators",
    )
    base, plan = found.runs[1:]
    assert plan.fp32_operators <= base.fp32_operators
    assert plan.cost == plan.fp32_operators
    assert plan.measured_db > base.measured_db
    assert found.met


def test_the_loss_scale_of_fp16_falls_until_nothing_overflows(work):
    scaled = work.loss
    work.loss = lambda output, batch: 100 * scaled(output, batch)
    found = ro.tune(work, ["fp16"], device="cpu", steps=1, probes=4, runs=3, batches=1)
    assert found.loss_scale in (65536.0 / 4**k for k in range(1, 9))
    assert any(
        "16 to 32 times slower" in note and "bf16" in note for note in found.notes
    )
    assert all(math.isfinite(run.measured_db) for run in found.runs[1:])


def test_a_plan_that_may_use_fp16_stands_beside_autocast_in_fp16(work):
    arguments = {"device": "cuda", "steps": 1, "probes": 4, "runs": 3, "batches": 1}
    found = ro.tune(work, ["bf16", "fp16"], **arguments)
    # values near 1 in this net: fp16 has 3 bits more, 18 dB
    assert found.half == "fp16"
    alone = ro.tune(work, ["fp16"], **arguments)
    assert found.runs[1].measured_db == pytest.approx(alone.runs[1].measured_db)
    assert any("bf16 and fp16 too: fp16" in note for note in found.notes)


def test_a_budget_may_be_used_again(tuned):
    found, work = tuned
    again = ro.tune(
        work,
        ["bf16"],
        device="cuda",
        steps=1,
        runs=3,
        budget=found.budget,
        aim="more",
        extra=0.1,
    )
    assert again.budget is found.budget
    assert again.runs[-1].name == "more"
    assert again.runs[-1].cost <= 1.1 * again.runs[1].cost * (1 + 1e-6)
    tied = ro.tune(
        work,
        ["bf16"],
        device="cuda",
        steps=1,
        runs=3,
        budget=found.budget,
        tie="ascend",
    )
    patterns = {pattern for rule in tied.plan.rules for pattern in rule.sites}
    operators = {f"op:{site.operator}" for site in found.budget.sites}
    assert patterns == operators
    assert tied.plan.about["tie"] == "ascend"
    with pytest.raises(PlanError, match="no such tie"):
        ro.tune(work, ["bf16"], tie="type")
    with pytest.raises(PlanError, match="not one of these gradients"):
        ro.tune(work, ["bf16", "fp16"], steps=1, budget=found.budget)
    with pytest.raises(PlanError, match="not one of these gradients"):
        ro.tune(work, ["bf16"], steps=1, budget=ro.budget(work, ["bf16"], probes=2))


def test_with_real_casts_it_is_the_same(tuned):
    for run in tuned[0].runs[1:]:
        # kernels keep more inside than the simulation says, and sum in another order
        assert run.native_db == pytest.approx(run.measured_db, abs=3)


def test_formats_that_autocast_has_not(work):
    found = ro.tune(work, ["int8"], device="cpu", steps=1, probes=4, runs=3, batches=1)
    assert set(found.runs[-1].formats.values()) <= {"int8"}
    assert any("Built-in autocast has no int8" in note for note in found.notes)
    assert any("int8 leave gradients in fp32" in note for note in found.notes)


def test_without_an_optimizer_sgd_steps(work):
    work.optimizer = None
    found = ro.tune(work, ["bf16"], steps=1, probes=2, runs=3, batches=1)
    assert "The workload has no optimizer: plain SGD took the steps." in found.notes


def test_steps_are_those_of_a_plain_loop(work):
    """Losses of the fp32 run against a training loop written out."""
    trials = Trials(work, steps=5, batches=1, seed=0)
    model = work.model.train()
    optimizer, expected = work.optimizer(model), []
    for step in range(5):
        batch = work.batches[step % 2]
        loss = work.loss(model(batch[0]), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert trials.reference.losses == expected


def test_weights_come_back_after_an_error(work):
    before = {k: v.clone() for k, v in work.model.state_dict().items()}

    class Stops(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            raise ZeroDivisionError

    work.optimizer = lambda model: Stops(model.parameters(), lr=1.0)
    with pytest.raises(ZeroDivisionError):
        ro.tune(work, ["bf16"], steps=2, probes=2, batches=1)
    assert all(torch.equal(v, before[k]) for k, v in work.model.state_dict().items())
    assert not any(p.grad is not None for p in work.model.parameters())


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"formats": ["bf61"]}, FormatError, "bf61"),
        ({"formats": ["fp32"]}, PlanError, "no format below fp32 to tune"),
        ({"aim": "best"}, PlanError, "unknown aim"),
        ({"runs": 2}, PlanError, "too little to verify with"),
        ({"steps": 0}, PlanError, "too little to verify with"),
        ({"extra": math.nan}, PlanError, "too little to verify with"),
        ({"device": "tpu"}, PlanError, "no autocast on such a device"),
        ({"pin": {"9/linear": "bf16"}}, ro.RoundoffError, "9/linear"),
    ],
)
def test_bad_arguments(work, arguments, error, text):
    with pytest.raises(error, match=text):
        ro.tune(work, **{"formats": ["bf16"], "probes": 2, "batches": 1, **arguments})


def test_bad_workloads(work):
    work.optimizer = lambda model: "adam"
    with pytest.raises(WorkloadError, match="optimizer made no optimizer"):
        ro.tune(work, ["bf16"], probes=2, batches=1)
    work.loss = None
    with pytest.raises(WorkloadError, match="the workload has no loss"):
        ro.tune(work, ["bf16"])
    work.loss = lambda output, batch: output.sum() * math.inf
    with pytest.raises(
        NonFiniteError, match="the loss before any rounding is not finite"
    ):
        ro.tune(work, ["bf16"], probes=2, batches=1)
    work.model.requires_grad_(False)
    with pytest.raises(WorkloadError, match="no trainable parameters"):
        ro.tune(work, ["bf16"])


def test_where_autocast_is_the_best_there_is_the_exit_code_says_so(
    tmp_path, monkeypatch, capsys
):
    """One linear layer: autocast runs all there is in bf16, and no plan of equal cost differs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    source = (
        SOURCE[: SOURCE.index("    return torch.nn.Seq")]
        + "    return torch.nn.Linear(8, 4)\n"
    )
    (tmp_path / "one.py").write_text(source + SOURCE[SOURCE.index("\ndef draw") :])
    assert main("tune one.py --steps 2 --probes 4 --batches 1".split()) == 1
    out = capsys.readouterr().out
    assert "The plan is not better than built-in autocast" in out
    assert ro.Plan.load("plan.toml").rules


def test_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    (tmp_path / "net.py").write_text(SOURCE)
    arguments = (
        "tune net.py --formats bf16 --device cuda --steps 2 --probes 8 --batches 1 --loss"
        " -o out.toml"
    )
    assert main(arguments.split()) == 0
    shown = capsys.readouterr().out
    for word in (
        "autocast (bf16, cuda lists)",
        "Pareto",
        "grad.",
        "0/linear",
        "gradients and loss",
        "Written to out.toml",
    ):
        assert word in shown
    fewer = arguments.replace("--steps 2 --probes 8", "--steps 1 --probes 4")
    assert main([*fewer.split(), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["met"]
    assert data["output"] == "out.toml"
    assert len(data["runs"]) == 5
    assert main("tune net.py --formats bf61".split()) == 2
    assert "bf61" in capsys.readouterr().err


def test_a_plan_that_misses_is_mended_within_the_runs(work, monkeypatch):
    """With the first plan spoilt, a second one is made from a budget around it."""
    from roundoff.train.tune.search import Search

    plan, calls = Search.plan, []

    def spoilt(self, aim, extra, shift=0.0):
        calls.append(aim)
        return (
            dict.fromkeys(self.problem.info, "bf16")
            if aim == "equal" and calls.count("equal") == 1
            else plan(self, aim, extra, shift)
        )

    monkeypatch.setattr(Search, "plan", spoilt)
    found = ro.tune(work, ["bf16"], device="cuda", steps=1, probes=8, batches=1)
    assert [run.name for run in found.runs] == [
        "fp32",
        "autocast",
        "equal",
        "mended",
        "more",
    ]
    assert found.met
    assert found.plan.about["measured_db"] == pytest.approx(found.runs[3].measured_db)


def test_a_tied_weight_has_one_format():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(16, 8)

        def forward(self, x):
            return torch.tanh(self.table(x)) @ self.table.weight.T

    data = [
        torch.randint(0, 16, (32,), generator=torch.Generator().manual_seed(i))
        for i in range(2)
    ]
    work = ro.Workload(Tied(), data, loss=nn.functional.cross_entropy)
    found = ro.tune(work, ["bf16"], device="cuda", steps=1, probes=4, runs=3)
    formats = found.runs[-1].formats
    assert ("table/embedding" in formats) == ("/matmul" in formats)
