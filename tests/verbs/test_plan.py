"""roundoff.plan: a room and a verb; from a budget or its file, the plan of Budget.plan."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import roundoff
from roundoff.errors import PlanError


@pytest.fixture(scope="module")
def measured():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 3))
    workload = roundoff.Workload(model, [torch.randn(16, 6) for _ in range(2)])
    return roundoff.budget(workload, ["bf16", "int8"])


def test_a_budget_gives_the_plan_of_its_method(measured):
    chosen = roundoff.plan(measured, "30dB", cost="bitops", pin={"2/linear": "fp32"})
    same = measured.plan("30dB", cost="bitops", pin={"2/linear": "fp32"})
    assert chosen.rules == same.rules
    assert chosen.about == same.about
    assert chosen.format_of("2/linear") == "fp32"


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_the_path_of_a_budget_will_do(measured, tmp_path, kind):
    path = tmp_path / "budget.parquet"
    measured.save(path)
    assert roundoff.plan(kind(path), 30).rules == measured.plan(30).rules


def test_every_aim_and_the_offered_formats(measured):
    cheap = roundoff.plan(measured, max_cost=1e9, formats=["bf16"])
    assert {rule.format for rule in cheap.rules} <= {"bf16"}
    with pytest.raises(PlanError, match="one of target, metric_drop and max_cost"):
        roundoff.plan(measured, 30, max_cost=1.0)
    with pytest.raises(PlanError, match="not a readable budget"):
        roundoff.plan("nowhere.parquet", 30)


def test_the_room_keeps_its_names_and_has_the_signature_of_the_verb(measured):
    from roundoff.plan import Plan

    assert isinstance(roundoff.plan(measured, 20), Plan)
    names = list(inspect.signature(roundoff.plan).parameters)
    assert names[:2] == ["budget", "target"]
    assert names[1:] == list(inspect.signature(measured.plan).parameters)
