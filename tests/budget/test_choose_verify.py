"""From budget to proof on small trained-size networks; the measured runs are the expected values."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import roundoff as ro
from roundoff.budget.targets import drop_to_db, metric_at
from roundoff.errors import InfeasibleError, PatternError, PlanError
from roundoff.plan.rounded_model import noise, run_batches

ALL = ("bf16", "fp16", "fp8_e4m3fn", "int8")


class Net(nn.Module):
    """Shared weights, a residual, an operator behind argmax."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.first = nn.Linear(16, 32)
        self.second = nn.Linear(32, 16)
        self.norm = nn.LayerNorm(16)

    def forward(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(tokens)
        x = x + self.second(nn.functional.gelu(self.first(x)))
        logits = self.norm(x) @ self.embed.weight.T
        return {"logits": logits, "length": (logits.argmax(-1).float() * 0.5).sum(1)}


def agreement(outputs: list, reference: list) -> float:
    same = [
        (o["logits"].argmax(-1) == r["logits"].argmax(-1)).double()
        for o, r in zip(outputs, reference, strict=True)
    ]
    return torch.cat(same).mean().item()


@pytest.fixture(scope="module")
def workload() -> ro.Workload:
    torch.manual_seed(0)
    batches = [torch.randint(0, 32, (32, 6)) for _ in range(2)]
    return ro.Workload(Net(), batches, metric=agreement)


@pytest.fixture(scope="module")
def budget(workload: ro.Workload) -> ro.Budget:
    return ro.budget(workload, ALL, of="logits")


@pytest.fixture(scope="module")
def scored(workload: ro.Workload) -> ro.Budget:
    def metric(outputs: list, reference: list) -> float:
        return agreement(
            [{"logits": o} for o in outputs], [{"logits": r} for r in reference]
        )

    logits = ro.Workload(
        workload.model,
        workload.batches,
        forward=lambda m, b: m(b)["logits"],
        metric=metric,
    )
    return ro.budget(logits, ALL)


def measured_db(workload: ro.Workload, formats: dict[str, str]) -> float:
    reference = run_batches(workload, target="logits").targets
    return -10 * math.log10(
        noise(run_batches(workload, formats, target="logits").targets, reference)
    )


def test_operands_already_in_the_format_are_counted_once(
    workload: ro.Workload, budget: ro.Budget
) -> None:
    formats = {s.site: "bf16" for s in budget.sites if not s.no_path}
    counted = budget.predict(formats)
    # 256 projections: 0.4 dB standard error; counting casts twice would be off by up to 3 dB
    assert counted.db == pytest.approx(measured_db(workload, formats), abs=1.6)


def test_no_path_is_reported(budget: ro.Budget) -> None:
    lost = {s.site: s.no_path for s in budget.sites if s.no_path}
    assert set(lost) == {"/mul", "/sum"}


def test_cheapest_of_all(budget: ro.Budget) -> None:
    """Against every assignment of the four matrix decisions, everything else pinned: same cost."""
    from roundoff.budget import Goal, Problem

    pins = {
        s.site: "fp32"
        for s in budget.sites
        if s.kind not in ("linear", "matmul", "embedding")
    }
    pins |= {"norm.weight": "fp32"}
    task = Problem(budget, Goal(cost="bitops", pin=pins, formats=["bf16", "int8"]))
    free = [d for d in task.decisions if d.pinned is None]
    assert len(free) == 3  # the embedding and the output share their weight
    best = math.inf
    for combination in itertools.product(*(d.choices for d in free)):
        chosen = {
            s: c.format
            for d, c in zip(free, combination, strict=True)
            for s in task.groups[d.name]
            if c.format != "fp32"
        }
        if budget.predict(chosen).db >= 42:
            best = min(best, task.cost_of(chosen))
    found = task.cheapest(42.0)
    assert budget.predict(found).db >= 42
    # the solver adds powers; correlations may keep it from a plan that just meets the target
    assert task.cost_of(found) <= best * 1.05


def test_constraints(budget: ro.Budget) -> None:
    plan = budget.plan(
        30, pin={"*/layer_norm": "fp32"}, allow={"first.weight": ["bf16", "fp16"]}
    )
    assert plan.format_of("norm/layer_norm") == "fp32"
    assert plan.format_of("first/linear") in ("bf16", "fp16", "fp32")
    assert plan.format_of("embed/embedding") == plan.format_of("/matmul")
    assert plan.format_of("/mul") == "fp32"
    with pytest.raises(PatternError, match="matches no site"):
        budget.plan(30, pin={"*/conv2d": "fp32"})
    with pytest.raises(PlanError, match="cannot run in int8"):
        budget.plan(30, pin={"*/layer_norm": "int8"})
    with pytest.raises(PlanError, match="did not measure int4"):
        budget.plan(30, formats=["int4"])
    with pytest.raises(PlanError, match="one of target, metric_drop and max_cost"):
        budget.plan()


def test_infeasible_names_the_pins(budget: ro.Budget) -> None:
    with pytest.raises(InfeasibleError, match="first/linear") as caught:
        budget.plan(80, pin={"first/linear": "int8"})
    assert caught.value.pinned == ["first/linear"]
    assert 20 < caught.value.best_db < 80


def test_at_a_given_cost(budget: ro.Budget) -> None:
    free = budget.plan(60, cost="bitops")
    bought = budget.plan(max_cost=free.about["cost"], cost="bitops")
    assert bought.about["cost"] <= free.about["cost"] * (1 + 1e-9)
    assert bought.about["additive_db"] >= free.about["additive_db"] - 1e-6


@pytest.mark.parametrize("target", [20, 35, 50])
@pytest.mark.parametrize("cost", ["bytes", "bitops"])
def test_verified(
    workload: ro.Workload, budget: ro.Budget, target: float, cost: str
) -> None:
    plan = budget.plan(target, cost=cost)
    proof = ro.verify(workload, plan, budget=budget, native=False)
    assert proof.met
    assert proof.last.measured_db == pytest.approx(
        measured_db(workload, proof.plan.formats([s.site for s in budget.sites]))
    )
    assert proof.last.measured_db >= target
    assert proof.last.predicted_db == pytest.approx(proof.last.measured_db, abs=1.0)
    assert len(proof.rounds) <= 3


def test_mended_where_the_prediction_is_wrong(
    workload: ro.Workload, budget: ro.Budget
) -> None:
    """A budget whose errors are ten times too small predicts 20 dB too much; verify finds a plan that holds."""
    import polars as pl

    flattered = ro.Budget(
        budget.terms.with_columns(pl.col("projections").list.eval(pl.element() * 0.1)),
        budget.sites,
        budget.about,
    )
    plan = flattered.plan(55, cost="bitops")
    assert measured_db(workload, plan.formats([s.site for s in budget.sites])) < 50
    proof = ro.verify(workload, plan, budget=flattered, native=False)
    assert 2 <= len(proof.rounds) <= 3
    assert "linearised again" in proof.rounds[0].action
    assert proof.met
    assert proof.last.predicted_db == pytest.approx(proof.last.measured_db, abs=1.0)


def test_without_a_budget_it_measures(workload: ro.Workload, budget: ro.Budget) -> None:
    plan = budget.plan(40)
    proof = ro.verify(workload, plan, target=200.0)
    assert not proof.met
    assert len(proof.rounds) == 1
    assert proof.native_db is None or proof.native_db > 30


def test_save_and_load(budget: ro.Budget, tmp_path: Path) -> None:
    budget.save(tmp_path / "b.parquet")
    loaded = ro.Budget.load(tmp_path / "b.parquet")
    assert loaded.terms.equals(budget.terms)
    assert (loaded.sites, loaded.about) == (
        budget.sites,
        budget.about,
    )
    assert loaded.plan(30).rules == budget.plan(30).rules
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(PlanError, match="not a readable budget"):
        ro.Budget.load(tmp_path / "bad.parquet")


def test_metric_curve(scored: ro.Budget) -> None:
    curve = scored.about.metric
    assert curve.reference == 1.0
    assert metric_at(curve, 200.0)[0] == 1.0
    assert metric_at(curve, 2.0)[0] < 0.9 < metric_at(curve, 60.0)[0]
    small, large = drop_to_db(curve, 0.005)[0], drop_to_db(curve, 0.1)[0]
    assert large < small
    plan = scored.plan(metric_drop="2%")
    assert plan.about["target_db"] == drop_to_db(curve, 0.02)[0]
    with pytest.raises(PlanError, match="no metric"):
        drop_to_db(None, 0.1)
