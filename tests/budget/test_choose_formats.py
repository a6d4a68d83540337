"""From a budget to a plan, against every assignment tried one by one, on budgets whose numbers are made by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest

from roundoff.budget.choose_formats import Problem
from roundoff.budget.facts import MetricCurve, MetricLevel
from roundoff.budget.goal import Goal
from roundoff.budget.targets import LEVELS, drop_to_db
from roundoff.errors import FormatError, InfeasibleError, PatternError, PlanError

FORMATS = ["bf16", "fp16", "int8"]


def chain(made, seed, *, tied=False):
    """a -> b -> c, and b -> d: every term has a column of its own, so powers add exactly. d cannot run in int8."""
    generator = np.random.default_rng(seed)
    sources = {"m/a": [], "m/b": ["m/a"], "m/c": ["m/b"], "m/d": ["m/b", "m/c"]}
    parts = ["activation", "weight", "output"]
    column = itertools.count()
    new = made(FORMATS, probes=2, batch_samples=[len(sources) * 3])
    for site, made_by in sources.items():
        params = {
            "m/a": ["w.a"],
            "m/b": ["w.b"],
            "m/c": ["w.a" if tied else "w.c"],
            "m/d": [],
        }[site]
        refused = (
            {"int8": "no int8 arithmetic for elementwise operators"}
            if site == "m/d"
            else {}
        )
        kind = "elementwise" if site == "m/d" else "linear"
        elements = float(generator.integers(1, 50)) * 1e5
        new.site(
            site,
            kind,
            params=params,
            refused=refused,
            elements=elements,
            macs=elements * 10,
        )
        for part in parts:
            place = next(column)
            for fmt in FORMATS:
                if fmt in refused or (fmt == "int8" and part == "output"):
                    continue
                values = np.zeros((2, 12))
                values[:, place] = 10.0 ** generator.uniform(-3.0, -1.5) * (
                    3.0 if fmt == "int8" else 1.0
                )
                new.term(
                    site,
                    fmt,
                    part,
                    values,
                    operand=int(part == "weight"),
                    sources=made_by
                    if part == "activation"
                    else params
                    if part == "weight"
                    else [],
                )
    return new.budget()


def assignments(budget, *, tied=False):
    """Every choice of formats that the rules allow, with its cost and the power predicted for it."""
    task = Problem(budget)
    sites = [s.site for s in budget.sites]
    options = [
        ["fp32", *(f for f in FORMATS if f not in s.refused)] for s in budget.sites
    ]
    for formats in itertools.product(*options):
        chosen = dict(zip(sites, formats, strict=True))
        if tied and chosen["m/a"] != chosen["m/c"]:
            continue
        chosen = {s: f for s, f in chosen.items() if f != "fp32"}
        yield task.cost_of(chosen), budget.predict(chosen), chosen


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_the_cheapest_plan_is_the_cheapest_of_all(made, seed, tied):
    budget = chain(made, seed, tied=tied)
    every = list(assignments(budget, tied=tied))
    assert len(every) == (4 * 4 * 3 if tied else 4 * 4 * 4 * 3)
    for target in (15.0, 25.0, 32.0, 40.0):
        best = min(cost for cost, prediction, _ in every if prediction.db >= target)
        plan = budget.plan(target)
        chosen = plan.formats([s.site for s in budget.sites])
        assert budget.predict(chosen).db >= target
        assert plan.about["cost"] == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_most_exact_plan_for_a_cost_is_the_most_exact_of_all(made, seed):
    budget = chain(made, seed)
    every = list(assignments(budget))
    low, high = min(c for c, _, _ in every), max(c for c, _, _ in every)
    for share in (0.0, 0.2, 0.5, 0.8):
        money = low + share * (high - low)
        best = min(
            prediction.noise
            for cost, prediction, _ in every
            if cost <= money * (1 + 1e-12)
        )
        plan = budget.plan(max_cost=money * (1 + 1e-12))
        assert plan.about["cost"] <= money * (1 + 1e-9)
        chosen = plan.formats([s.site for s in budget.sites])
        assert budget.predict(chosen).noise == pytest.approx(best, rel=1e-6)
        assert plan.about["target_db"] is None


def test_what_the_plan_says_of_itself(made):
    budget = chain(made, 0)
    plan = budget.plan("25 dB")
    chosen = plan.formats([s.site for s in budget.sites])
    about = plan.about
    assert (about["workload"], about["target_db"], about["note"]) == ("made", 25.0, "")
    assert about["predicted_db"] == budget.predict(chosen).db
    assert (about["cost_model"], about["unit"]) == ("bytes", "MB")
    # elements read, weights and elements written at 4 bytes each, in 1e6 bytes
    sizes = [s.sizes for s in budget.sites]
    fp32 = sum(
        4
        * (z["activation_elements"] + z["weight_elements"] + z["output_elements"])
        / 1e6
        for z in sizes
    )
    assert about["cost_fp32"] == pytest.approx(fp32, rel=1e-12)
    assert about["cost_lowest"] == pytest.approx(
        min(c for c, _, _ in assignments(budget)), rel=1e-12
    )
    assert about["cost_lowest"] <= about["cost"] <= about["cost_fp32"]


def test_everything_in_fp32_when_nothing_less_will_do(made):
    budget = chain(made, 0)
    plan = budget.plan(300)
    assert plan.rules == ()
    assert plan.about["predicted_db"] is None  # infinite: nothing is rounded
    assert plan.about["cost"] == plan.about["cost_fp32"]


def test_pins_and_what_is_allowed(made):
    budget = chain(made, 1)
    sites = [s.site for s in budget.sites]
    assert budget.plan(10, pin={"m/b": "fp32"}).format_of("m/b") == "fp32"
    assert budget.plan(0, pin={"m/*": "fp16"}).formats(sites) == dict.fromkeys(
        sites, "fp16"
    )
    allowed = budget.plan(0, allow={"w.b": ["bf16"], "m/*": ["fp32", "fp16"]}).formats(
        sites
    )
    assert (
        allowed["m/b"] == "bf16"
    )  # by the name of its parameter; the first pattern that matches counts
    assert set(allowed.values()) <= {"bf16", "fp16"}
    pinned = budget.plan(0, pin={"m/b": "float32"}, allow={"m/b": ["bf16"]})
    assert pinned.format_of("m/b") == "fp32"  # pins go first
    assert budget.plan(0, formats=["bfloat16"]).formats(sites) == dict.fromkeys(
        sites, "bf16"
    )
    assert budget.plan(0, formats=[]).rules == ()


def test_sites_that_share_a_parameter_are_one_decision(made):
    budget = chain(made, 2, tied=True)
    for target in (5, 20, 30, 40):
        plan = budget.plan(target)
        assert plan.format_of("m/a") == plan.format_of("m/c")
    plan = budget.plan(0, pin={"m/c": "fp32"})
    assert plan.format_of("m/a") == "fp32"
    assert [d.name for d in Problem(budget).decisions] == ["m/a", "m/b", "m/d"]
    assert Problem(budget).groups["m/a"] == ["m/a", "m/c"]


def test_sites_tied_through_another_one(made):
    new = made(["bf16"])
    new.site("x/a", params=["p"]).site("x/b", params=["q"]).site(
        "x/c", params=["p", "q"]
    ).site("x/d")
    for site in ("x/a", "x/b", "x/c", "x/d"):
        new.term(site, "bf16", "output", [[0.1, 0.0], [0.1, 0.0]])
    groups = Problem(new.budget()).groups
    assert groups == {"x/a": ["x/a", "x/b", "x/c"], "x/d": ["x/d"]}


def test_sites_without_a_path_stay(made):
    new = (
        made(["bf16"])
        .site("x/a")
        .site("x/lost", no_path="computed under torch.no_grad", params=["p"])
    )
    budget = new.term("x/a", "bf16", "output", [[0.01, 0], [0.01, 0]]).budget()
    assert budget.plan(0).formats(["x/a", "x/lost"]) == {"x/a": "bf16"}
    with pytest.raises(PlanError) as error:
        budget.plan(0, pin={"p": "bf16"})
    assert "x/lost cannot run in bf16" in str(error.value)
    assert "computed under torch.no_grad" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({}, PlanError, ["one aim is needed", "got: none"]),
        ({"target": 3, "max_cost": 1}, PlanError, ["target and max_cost"]),
        ({"target": "much"}, PlanError, ["not a target", "'much'"]),
        (
            {"target": 3, "pin": {"n/*": "bf16"}},
            PatternError,
            ["'n/*' matches no site", "7 site names"],
        ),
        (
            {"target": 3, "allow": {"w.z": ["bf16"]}},
            PatternError,
            ["'w.z' matches no site", "w.a"],
        ),
        ({"target": 3, "pin": {"m/a": "bf61"}}, FormatError, ["did you mean bf16"]),
        (
            {"target": 3, "pin": {"m/d": "int8"}},
            PlanError,
            ["m/d cannot run in int8", "no int8 arithmetic for elementwise"],
        ),
        (
            {"target": 3, "formats": ["bf16", "int4"]},
            PlanError,
            ["did not measure int4", "bf16, fp16, int8"],
        ),
        (
            {"target": 3, "cost": "euro"},
            PlanError,
            ["unknown cost model", "bytes, bitops, seconds"],
        ),
        ({"target": 3, "cost": "seconds"}, PlanError, ["needs a table of seconds"]),
        ({"metric_drop": "1%"}, PlanError, ["the budget has no metric"]),
        (
            {"max_cost": 1e-9},
            InfeasibleError,
            ["no choice of formats", "a cost of at most"],
        ),
    ],
)
def test_what_is_refused(made, arguments, error, words):
    with pytest.raises(error) as caught:
        chain(made, 0).plan(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_an_unreachable_target_names_the_pins_in_the_way(made):
    budget = chain(made, 0)
    with pytest.raises(InfeasibleError) as error:
        budget.plan(60, pin={"m/a": "int8", "m/d": "fp32"})
    assert error.value.pinned == ["m/a"]
    noise = budget.predict({"m/a": "int8"}).noise  # the best there is with this pin
    assert error.value.best_db == pytest.approx(-10 * math.log10(noise), abs=0.01)
    assert "unpin m/a" in str(error.value)


def test_a_drop_of_the_metric_becomes_a_target(made):
    levels = [MetricLevel(float(db), min(1.0, 0.5 + db / 80), 0.0) for db in LEVELS]
    curve = MetricCurve("accuracy", 1.0, tuple(levels))
    budget = chain(made, 0)
    scored = replace(budget, about=replace(budget.about, metric=curve))
    plan = scored.plan(metric_drop="12.5%")
    goal, note = drop_to_db(curve, 0.125)
    assert goal == pytest.approx(30.0)
    assert plan.about["target_db"] == goal
    assert plan.about["note"] == note
    assert plan.about["predicted_db"] >= goal


def test_formats_that_overflow_are_never_chosen(made):
    new = made(["fp16"]).site("x/a", elements=1.0).site("x/b")
    new.term("x/a", "fp16", "output", [[np.inf, 0], [0, 0]], overflow=1)
    new.term("x/b", "fp16", "output", [[0.1, 0], [0.1, 0]])
    budget = new.budget()
    assert budget.plan(-300).formats(["x/a", "x/b"]) == {"x/b": "fp16"}
    assert budget.plan(max_cost=1e9).formats(["x/a", "x/b"]) == {}
    assert Problem(budget).lowest()[0] == {"x/b": "fp16"}


def test_errors_that_add_up_are_planned_for(made):
    """Two sites with one and the same error: together 4 times the power of one, not 2. Between 3 dB (as powers) and 6 dB
    (as amplitudes) below one alone, only one may be rounded."""
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (2000, 1)) * 0.1
    new = made(["bf16"], probes=2000, batch_samples=[1])
    new.site("x/a").site("x/b", elements=2e6)
    budget = (
        new.term("x/a", "bf16", "output", signs)
        .term("x/b", "bf16", "output", signs)
        .budget()
    )
    single = -10 * math.log10(0.01)
    assert budget.predict({"x/a": "bf16", "x/b": "bf16"}).db == pytest.approx(
        single - 6.02, abs=0.02
    )
    assert budget.plan(single - 4.5).formats(["x/a", "x/b"]) == {
        "x/b": "bf16"
    }  # the larger one
    assert len(budget.plan(single - 6.1).formats(["x/a", "x/b"])) == 2


def test_storage_counts_each_parameter_once(made):
    """A table of 100 rows that is also the head, of which a batch looks up few, and a layer that is called twice."""
    new = made(["int8"])
    new.site("m/embedding", "embedding", params=["table"], elements=5.0).site(
        "m/linear", params=["w", "b"], elements=7.0
    )
    new.site("m/linear#1", params=["w", "b"], elements=7.0).site(
        "m/head", params=["table"], elements=9.0
    )
    for site in ("m/embedding", "m/linear", "m/linear#1", "m/head"):
        new.term(site, "int8", "weight", [[1e-3, 0], [1e-3, 0]], sources=["table"])
    budget = new.budget(parameters={"table": 800, "w": 64, "b": 8})
    task = Problem(budget, Goal(cost="storage"))
    every = dict.fromkeys(("m/embedding", "m/linear", "m/linear#1", "m/head"), "int8")
    assert task.cost_of({}) == pytest.approx((800 + 72) * 4 / 1e6, rel=1e-12)
    assert task.cost_of(every) == pytest.approx((800 + 72) / 1e6, rel=1e-12)
    assert task.cost_of({"m/linear": "int8", "m/linear#1": "int8"}) == pytest.approx(
        (800 * 4 + 72) / 1e6, rel=1e-12
    )
    assert task.plan(every, asked=None).about["unit"] == "MB of parameters"
    with pytest.raises(
        PlanError, match="does not say how large parameters are"
    ) as error:
        Problem(new.budget(), Goal(cost="storage"))
    assert error.value.do == "measure it again"
