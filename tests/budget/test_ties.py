"""Formats by operator type: one format for all calls, the best of every such choice."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from roundoff.budget.choose_formats import Problem
from roundoff.budget.goal import Goal
from roundoff.errors import PlanError

FORMATS = ("bf16", "fp16")
SITES = (
    "in/linear",
    "0/softmax",
    "0/matmul",
    "1/softmax",
    "1/matmul#1",
    "out/linear",
)
OPERATORS = ("linear", "softmax", "matmul")


def layers(made, seed, *, no_path=(), refused=()):
    """Three operators, two calls of each; every error has a column of its own, so powers
    add exactly."""
    generator = np.random.default_rng(seed)
    new = made(FORMATS, probes=2, batch_samples=[len(SITES)])
    for column, site in enumerate(SITES):
        new.site(
            site,
            elements=float(generator.integers(1, 50)) * 1e5,
            no_path="its output does not reach the target" if site in no_path else None,
            refused={"fp16": "no kernel"} if site in refused else {},
        )
        if site in no_path:
            continue
        for fmt in FORMATS:
            if fmt == "fp16" and site in refused:
                continue
            values = np.zeros((2, len(SITES)))
            values[:, column] = 10.0 ** generator.uniform(-3.0, -1.5)
            new.term(site, fmt, "output", values)
    return new.budget()


def by_operator(plan):
    return {
        pattern.removeprefix("op:"): rule.format
        for rule in plan.rules
        for pattern in rule.sites
    }


@pytest.mark.parametrize("seed", range(4))
def test_the_cheapest_of_all_choices_by_operator(made, seed):
    budget = layers(made, seed)
    task = Problem(budget)
    every = []
    for formats in itertools.product(("fp32", *FORMATS), repeat=len(OPERATORS)):
        of = dict(zip(OPERATORS, formats, strict=True))
        chosen = {s.site: of[s.operator] for s in budget.sites}
        chosen = {site: name for site, name in chosen.items() if name != "fp32"}
        every.append((task.cost_of(chosen), budget.predict(chosen).db))
    for target in (20.0, 30.0, 38.0):
        least = min(cost for cost, db in every if db >= target)
        plan = budget.plan(target, tie="operator")
        assert set(by_operator(plan)) == set(OPERATORS)
        chosen = plan.formats([s.site for s in budget.sites])
        assert budget.predict(chosen).db >= target
        # costs are sums of a few float64: equal within their rounding
        assert plan.about["cost"] == pytest.approx(least, rel=1e-9)
        assert plan.about["tie"] == "operator"


def test_a_pin_on_one_call_is_one_on_its_operator(made):
    plan = layers(made, 0).plan(10, tie="operator", pin={"0/softmax": "fp32"})
    assert by_operator(plan)["softmax"] == "fp32"
    assert plan.format_of("7/softmax#3") == "fp32"
    assert plan.about["shared"]["1/softmax"].startswith(
        "is tied by its operator to 0/softmax, whose formats are fixed"
    )


def test_what_no_path_leads_from_ties_nothing(made):
    budget = layers(made, 1, no_path=["0/softmax"])
    plan = budget.plan(10, tie="operator")
    assert by_operator(plan)["softmax"] != "fp32"
    assert plan.about["unmeasured"] == {
        "0/softmax": "its output does not reach the target"
    }
    alone = layers(made, 1, no_path=["0/softmax", "1/softmax"])
    assert by_operator(alone.plan(10, tie="operator"))["softmax"] == "fp32"


def test_a_format_that_one_call_refuses_is_refused_for_all(made):
    budget = layers(made, 2, refused=["1/matmul#1"])
    plan = budget.plan(10, tie="operator", formats=["fp16"])
    assert by_operator(plan)["matmul"] == "fp32"


def test_types_of_another_tool_tie_more(made):
    # linear and matmul are both MatMul to Ascend
    budget = layers(made, 3)
    goal = Goal(target=10, tie="ascend", pin={"in/linear": "fp32"})
    plan = by_operator(budget.plan(10, tie="ascend", pin=goal.pin))
    assert plan["matmul"] == "fp32"
    assert (
        by_operator(budget.plan(10, tie="operator", pin=goal.pin))["matmul"] != "fp32"
    )


def test_an_unknown_tie(made):
    with pytest.raises(PlanError, match=r"no such tie(.|\n)*did you mean operator"):
        Goal(target=10, tie="operators")
