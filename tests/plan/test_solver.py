"""roundoff.plan.solver: against enumeration of all plans, and bounds that hold in float64."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from roundoff.errors import InfeasibleError, PlanError
from roundoff.plan.solver import Choice, Decision, Edge, solve

FORMATS = ("fp32", "bf16", "int8")


def every_plan(decisions, edges, *, pins=True):
    """All plans without overflow as (formats, noise, cost): the definition, written out a second
    time."""
    options = [
        [c for c in d.choices if not pins or d.pinned in (None, c.format)]
        for d in decisions
    ]
    for picked in itertools.product(*options):
        formats = {d.name: c.format for d, c in zip(decisions, picked, strict=True)}
        terms = [c.noise for c in picked]
        for edge in edges:
            absorbed = bool(edge.producers) and all(
                formats[p] in edge.absorbed_by for p in edge.producers
            )
            if formats[edge.consumer] == edge.format and not absorbed:
                terms.append(edge.noise)
        if all(math.isfinite(term) for term in terms):
            yield formats, math.fsum(terms), math.fsum(c.cost for c in picked)


def of_noise(formats, decisions, edges):
    return next(noise for f, noise, _ in every_plan(decisions, edges) if f == formats)


noises = st.one_of(
    st.sampled_from([0.0, 0.1, 0.2, 0.3, 1e-15, math.inf, math.nan]),
    st.floats(-15.0, 0.0).map(lambda exponent: 10.0**exponent),
)
costs = st.one_of(st.integers(0, 9).map(float), st.floats(0.0, 1e6))


@st.composite
def problems(draw):
    names = [f"s{i}" for i in range(draw(st.integers(1, 4)))]
    decisions = []
    for name in names:
        formats = draw(
            st.lists(st.sampled_from(FORMATS), min_size=1, max_size=3, unique=True)
        )
        choices = tuple(Choice(f, draw(noises), draw(costs)) for f in formats)
        decisions.append(
            Decision(
                name, choices, draw(st.sampled_from([None, None, None, formats[0]]))
            )
        )
    site, fmt = st.sampled_from(names), st.sampled_from(FORMATS)
    edges = draw(
        st.lists(
            st.builds(
                Edge,
                consumer=site,
                producers=st.lists(site, max_size=2).map(tuple),
                format=fmt,
                noise=noises,
                absorbed_by=st.frozensets(fmt),
            ),
            max_size=4,
        )
    )
    return decisions, edges


@given(problems(), st.data())
@settings(max_examples=150, deadline=None)
def test_least_cost_equals_enumeration(problem, data):
    decisions, edges = problem
    plans = list(every_plan(decisions, edges))
    # Targets that some plan meets exactly are the hard ones: one ulp decides.
    target = data.draw(st.sampled_from([0.5, 1e-9, *(noise for _, noise, _ in plans)]))
    reachable = [plan for plan in plans if plan[1] <= target]
    if not reachable:
        with pytest.raises(InfeasibleError):
            solve(decisions, edges, max_noise=target)
        return
    solution = solve(decisions, edges, max_noise=target, relative_gap=0.0)
    least = min(cost for _, _, cost in reachable)
    assert solution.noise == of_noise(solution.formats, decisions, edges) <= target
    # HiGHS stops within 1e-6 of a scaled objective of 1e3 (mip_abs_gap): 1e-9, tenfold after the
    # rescaling threshold.
    assert solution.cost == pytest.approx(least, rel=2e-8)
    ties = [noise for _, noise, cost in reachable if cost <= solution.cost * (1 + 1e-9)]
    assert solution.noise <= min(ties) * (1 + 2e-8)


@given(problems(), st.data())
@settings(max_examples=100, deadline=None)
def test_least_noise_equals_enumeration(problem, data):
    decisions, edges = problem
    plans = list(every_plan(decisions, edges))
    budget = data.draw(st.sampled_from([1.0, *(cost for _, _, cost in plans)]))
    reachable = [plan for plan in plans if plan[2] <= budget]
    if not reachable:
        with pytest.raises(InfeasibleError) as caught:
            solve(decisions, edges, max_cost=budget)
        assert math.isnan(caught.value.best_db)
        return
    solution = solve(decisions, edges, max_cost=budget, relative_gap=0.0)
    assert solution.cost <= budget
    assert solution.noise == of_noise(solution.formats, decisions, edges)
    assert solution.noise == pytest.approx(
        min(noise for _, noise, _ in reachable), rel=2e-8, abs=0.0
    )


@given(problems(), st.sampled_from([1e-12, 1e-6, 1e-2]))
@settings(max_examples=60, deadline=None)
def test_blame_equals_enumeration(problem, target):
    decisions, edges = problem
    if any(noise <= target for _, noise, _ in every_plan(decisions, edges)):
        return
    with pytest.raises(InfeasibleError) as caught:
        solve(decisions, edges, max_noise=target)
    pinned = [d.name for d in decisions if d.pinned]
    helping: list[tuple[str, ...]] = []
    for size in range(1, len(pinned) + 1):
        for names in itertools.combinations(pinned, size):
            freed = [
                Decision(d.name, d.choices, None if d.name in names else d.pinned)
                for d in decisions
            ]
            if any(noise <= target for _, noise, _ in every_plan(freed, edges)):
                helping.append(names)
        if helping:
            break
    if not helping:
        assert caught.value.pinned == []
    elif len(helping[0]) == 1:
        assert sorted(caught.value.pinned) == sorted(name for (name,) in helping)
    else:
        assert tuple(sorted(caught.value.pinned)) in helping


def choice(fmt, noise, cost):
    return Choice(fmt, noise, cost)


def test_absorbed_rounding_is_free_and_makes_pairs():
    # Alone, bf16 in the consumer costs 0.02 > target; with a bf16 producer nothing is left to
    # round.
    decisions = [
        Decision(n, (choice("fp32", 0.0, 4.0), choice("bf16", 0.005, 2.0)))
        for n in ("a", "b")
    ]
    edge = Edge("b", ("a",), "bf16", 0.02, frozenset({"bf16"}))
    both = solve(decisions, [edge], max_noise=0.011)
    assert both.formats == {"a": "bf16", "b": "bf16"}
    assert both.noise == 0.01
    assert both.cost == 4.0
    pinned = [Decision("a", decisions[0].choices, pinned="fp32"), decisions[1]]
    assert solve(pinned, [edge], max_noise=0.011).formats == {"a": "fp32", "b": "fp32"}
    assert solve(pinned, [edge], max_noise=0.025).noise == 0.025


def test_edge_waits_for_every_producer_and_is_paid_once():
    decisions = [
        Decision(n, (choice("fp32", 0.0, 4.0), choice("bf16", 0.0, 2.0)))
        for n in ("a", "b")
    ]
    sink = Decision("sum", (choice("bf16", 0.0, 1.0),))
    edge = Edge("sum", ("a", "b"), "bf16", 0.25, frozenset({"bf16"}))
    assert solve([*decisions, sink], [edge], max_noise=1.0).noise == 0.0
    for pins in (("fp32", None), ("fp32", "fp32")):
        held = [
            Decision(d.name, d.choices, pin)
            for d, pin in zip(decisions, pins, strict=True)
        ]
        assert solve([*held, sink], [edge], max_noise=1.0).noise == 0.25


def test_edge_from_a_model_input_is_always_paid():
    decisions = [Decision("a", (choice("fp32", 0.0, 4.0), choice("int8", 0.1, 1.0)))]
    edge = Edge("a", (), "int8", 0.2, frozenset(FORMATS))
    assert solve(decisions, [edge], max_noise=0.25).formats == {"a": "fp32"}
    assert solve(decisions, [edge], max_noise=0.31).noise == math.fsum([0.1, 0.2])


@pytest.mark.parametrize("overflow", [math.inf, math.nan])
def test_overflow_forbids(overflow):
    decisions = [
        Decision(n, (choice("fp32", 0.0, 4.0), choice("fp16", 0.0, 2.0)))
        for n in ("a", "b")
    ]
    edge = Edge("b", ("a",), "fp16", overflow, frozenset({"fp16"}))
    held = [Decision("a", decisions[0].choices, pinned="fp32"), decisions[1]]
    assert solve(held, [edge], max_noise=math.inf).formats["b"] == "fp32"
    assert solve(decisions, [edge], max_noise=math.inf).cost == 4.0
    broken = [Decision("a", (choice("fp32", 0.0, 4.0), choice("fp16", overflow, 2.0)))]
    assert solve(broken, max_noise=math.inf).formats == {"a": "fp32"}
    assert solve(broken, max_cost=math.inf).formats == {"a": "fp32"}


def test_empty_zero_and_all_pinned():
    assert solve([], max_noise=0.0).formats == {}
    assert solve([], max_cost=0.0).optimal
    exact = Decision("a", (choice("fp32", 0.0, 4.0), choice("bf16", 0.0, 0.0)))
    free = solve([exact], max_noise=0.0)
    assert (free.formats, free.noise, free.cost, free.gap) == (
        {"a": "bf16"},
        0.0,
        0.0,
        0.0,
    )
    held = solve([Decision("a", exact.choices, pinned="fp32")], max_noise=0.0)
    assert (held.formats, held.cost, held.optimal) == ({"a": "fp32"}, 4.0, True)


def test_ties_on_cost_go_to_less_noise():
    same = Decision(
        "a",
        (choice("int8", 1e-3, 1.0), choice("fp8", 1e-5, 1.0), choice("fp32", 0.0, 4.0)),
    )
    assert solve([same], max_noise=1.0).formats == {"a": "fp8"}
    assert solve([same], max_cost=1.0).formats == {"a": "fp8"}


@pytest.mark.parametrize("exponent", range(-15, 1, 3))
def test_bound_holds_at_every_magnitude(exponent):
    # Thirty of 60 decisions fit exactly; 31 would be 3 % too much, which an absolute tolerance of
    # 1e-6 lets pass for all exponents below -5.
    unit = 10.0**exponent / 64.0
    wide, narrow = choice("fp32", 0.0, 4.0), choice("int8", unit, 1.0)
    target = math.fsum([unit] * 30)
    solution = solve(
        [Decision(f"s{i}", (wide, narrow)) for i in range(60)], max_noise=target
    )
    assert solution.noise == target
    assert solution.cost == 30 * 4.0 + 30 * 1.0
    assert solution.optimal


def test_bound_holds_where_the_solver_cannot_tell_plans_apart():
    # Half of the decisions are noisier by 1e-12, a thousandth of the solver's tolerance: of
    # 60-choose-30 plans of equal cost, one meets the target. It need not be found, but then the gap
    # of one decision (3 of 150) must be told.
    wide = choice("fp32", 0.0, 4.0)
    decisions = [
        Decision(f"s{i}", (wide, choice("int8", 1e-6 * (1 + i % 2 * 1e-12), 1.0)))
        for i in range(60)
    ]
    target = math.fsum([1e-6] * 30)
    solution = solve(decisions, max_noise=target)
    assert solution.noise <= target
    assert solution.cost in (150.0, 153.0)
    assert solution.optimal == (solution.cost == 150.0)
    assert solution.gap == pytest.approx(0.0 if solution.optimal else 3 / 153, abs=1e-6)


def test_fifteen_decades_in_one_row():
    # One decision at each power of ten, each with an exact and a noisy format. The target 0.2 +
    # 1.5e-15 excludes 1e0, and leaves room for all others: sum of 1e-15 .. 1e-1 = 0.111...
    powers = [10.0**-k for k in range(16)]
    decisions = [
        Decision(f"s{k}", (choice("fp32", 0.0, 2.0), choice("int8", p, 1.0)))
        for k, p in enumerate(powers)
    ]
    solution = solve(decisions, max_noise=0.2)
    assert solution.formats == {
        f"s{k}": "fp32" if k == 0 else "int8" for k in range(16)
    }
    tight = solve(
        decisions, max_noise=math.fsum(powers[1:-1])
    )  # less by 1e-15 than all of them: one must stay wide
    assert tight.cost == 18.0
    assert tight.noise <= math.fsum(powers[1:-1])


def test_infeasible_message_names_the_pin():
    decisions = [
        Decision(
            "embed",
            (choice("fp32", 0.0, 4.0), choice("int8", 1e-3, 1.0)),
            pinned="int8",
        ),
        Decision(
            "head", (choice("fp32", 0.0, 4.0), choice("int8", 1e-5, 1.0)), pinned="int8"
        ),
        Decision("body", (choice("fp32", 0.0, 4.0), choice("int8", 1e-5, 1.0))),
    ]
    with pytest.raises(InfeasibleError) as caught:
        solve(decisions, max_noise=1e-4)
    assert caught.value.pinned == ["embed"]
    assert caught.value.best_db == pytest.approx(-10 * math.log10(1.01e-3), rel=1e-12)
    assert str(caught.value) == (
        "no choice of formats meets the target\n"
        "  expected: at least 40.00 dB\n"
        "  got: 29.96 dB at best\n"
        "  do: unpin embed, or ask for at most 29.95 dB"
    )
    asked = float(re.search(r"at most ([\d.]+) dB$", str(caught.value))[1])
    assert solve(decisions, max_noise=10 ** (-asked / 10)).formats["body"] == "fp32"


def test_infeasible_message_names_pins_that_help_only_together():
    decisions = [
        Decision(
            name, (choice("fp32", 0.0, 4.0), choice("int8", 1e-3, 1.0)), pinned="int8"
        )
        for name in ("a", "b")
    ]
    with pytest.raises(
        InfeasibleError, match="do: unpin all of a, b, or ask for at most 26.98 dB"
    ) as caught:
        solve(decisions, max_noise=1e-4)
    assert sorted(caught.value.pinned) == ["a", "b"]


def test_infeasible_without_help_from_pins():
    narrow = Decision("a", (choice("int8", 1e-3, 1.0),), pinned="int8")
    with pytest.raises(
        InfeasibleError,
        match=r"got: 30\.00 dB at best\n  do: offer wider formats, or ask",
    ) as caught:
        solve([narrow], max_noise=1e-4)
    assert caught.value.pinned == []
    with pytest.raises(InfeasibleError, match="expected: no noise at all"):
        solve([narrow], max_noise=0.0)
    overflow = Decision("a", (choice("fp16", math.inf, 1.0),))
    with pytest.raises(
        InfeasibleError,
        match="got: an overflow in every plan\n  do: offer wider formats$",
    ) as caught:
        solve([overflow], max_noise=1.0)
    assert caught.value.best_db == -math.inf


def test_infeasible_cost_names_the_pin_and_the_cheapest():
    a = Decision(
        "a", (choice("fp32", 0.0, 4.0), choice("int8", 1e-3, 1.0)), pinned="fp32"
    )
    with pytest.raises(
        InfeasibleError, match="got: 4 at least\n  do: unpin a, or allow a cost of 4$"
    ) as caught:
        solve([a], max_cost=2.0)
    assert caught.value.pinned == ["a"]


A = Decision("a", (Choice("fp32", 0.0, 1.0),))


@pytest.mark.parametrize(
    ("decisions", "edges", "bounds", "message"),
    [
        ([A], [], {}, "a target needs one bound"),
        ([A], [], {"max_noise": 1.0, "max_cost": 1.0}, "a target needs one bound"),
        ([A], [], {"max_noise": math.nan}, "max_noise: not a bound"),
        ([A], [], {"max_cost": -1.0}, "max_cost: not a bound"),
        ([A, A], [], {"max_noise": 1.0}, "a: two decisions have one name"),
        ([Decision("a", ())], [], {"max_noise": 1.0}, "a: bad choices"),
        ([Decision("a", A.choices * 2)], [], {"max_noise": 1.0}, "got: fp32, fp32"),
        (
            [Decision("a", A.choices, "int8")],
            [],
            {"max_noise": 1.0},
            "a: pinned to a format that is not offered",
        ),
        (
            [Decision("a", (Choice("fp32", 0.0, math.inf),))],
            [],
            {"max_noise": 1.0},
            "a in fp32: bad cost",
        ),
        (
            [Decision("a", (Choice("fp32", -1.0, 1.0),))],
            [],
            {"max_noise": 1.0},
            "a in fp32: negative noise",
        ),
        (
            [A],
            [Edge("b", (), "fp32", 0.0, frozenset())],
            {"max_noise": 1.0},
            "b: an edge names no decision",
        ),
        (
            [A],
            [Edge("a", ("c",), "fp32", 0.0, frozenset())],
            {"max_noise": 1.0},
            "got: c",
        ),
        (
            [A],
            [Edge("a", (), "fp32", -1.0, frozenset())],
            {"max_noise": 1.0},
            "edge to a: negative noise",
        ),
    ],
)
def test_bad_input_is_refused(decisions, edges, bounds, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        solve(decisions, edges, **bounds)


def large(seed, count=400):
    """Noise over nine decades and sizes over four, as in a network with embeddings and biases."""
    rng = np.random.default_rng(seed)
    formats, bits = (
        ("fp32", "bf16", "fp16", "int8", "fp8", "int4"),
        np.array([32, 16, 16, 8, 8, 4]),
    )
    noise = (
        10 ** rng.uniform(-8, -3, (count, 1))
        * 2.0 ** -(bits - 4.0)
        * 10 ** rng.uniform(-1, 1, (count, 6))
    )
    cost = 10 ** rng.uniform(3, 6.5, (count, 1)) * bits / 8
    decisions = [
        Decision(
            f"s{i}",
            tuple(
                Choice(f, float(n), float(c))
                for f, n, c in zip(formats, noise[i], cost[i], strict=True)
            ),
        )
        for i in range(count)
    ]
    return decisions, noise, cost, rng


def test_large_knapsack_lies_within_one_decision_of_its_relaxation():
    # Sinha and Zoltners (1979), prop. 3: the relaxed multiple-choice knapsack has at most one
    # fractional class, so the exact optimum is at least the relaxation's and at most that plus the
    # largest cost of one class.
    decisions, noise, cost, _ = large(seed=1)
    target = 1e-3
    solution = solve(decisions, max_noise=target)
    relaxed = linprog(
        cost.ravel(),
        A_ub=noise.reshape(1, -1) / target,
        b_ub=[1.0],
        A_eq=np.kron(np.eye(len(decisions)), np.ones((1, 6))),
        b_eq=np.ones(len(decisions)),
    ).fun
    assert solution.noise <= target
    assert relaxed * (1 - 1e-6) <= solution.cost <= relaxed + cost.max()
    assert solution.optimal


def test_large_with_edges_is_solved_or_reports_its_gap():
    decisions, noise, _, rng = large(seed=2)
    formats = [c.format for c in decisions[0].choices]
    edges = []
    for _ in range(600):
        consumer, fmt = int(rng.integers(1, 400)), int(rng.integers(1, 6))
        producer = f"s{rng.integers(0, consumer)}"
        amount = float(noise[consumer, fmt])
        edges.append(
            Edge(
                f"s{consumer}",
                (producer,),
                formats[fmt],
                amount,
                frozenset({formats[fmt]}),
            )
        )
    solution = solve(decisions, edges, max_noise=1e-3)
    assert solution.noise <= 1e-3
    assert set(solution.formats) == {d.name for d in decisions}
    assert solution.optimal == (solution.gap <= 1e-6)


def test_time_limit_is_told():
    decisions, *_ = large(seed=2)
    with pytest.raises(
        PlanError, match="no plan found in time\n.*\n  got: none in 0 s\n  do: raise"
    ):
        solve(decisions, max_noise=1e-3, time_limit=0.0)


def test_gap_is_told_when_the_time_ends_between_searches(monkeypatch):
    # The clock jumps past the deadline after the search for the least noisy plan.
    decisions, *_ = large(seed=3, count=40)
    times = iter([0.0, 0.0])
    monkeypatch.setattr("roundoff.plan.milp.time.monotonic", lambda: next(times, 1e9))
    solution = solve(decisions, max_noise=1e-3, time_limit=10.0)
    assert not solution.optimal
    assert solution.gap == 1.0  # nothing proven: the bound is 0
    assert solution.noise <= 1e-3


def test_solver_prints_nothing(capfd):
    # HiGHS prints a debugging line past every "silent" option on about half of such instances.
    for seed in range(3):
        decisions, *_ = large(seed, count=80)
        solve(decisions, max_noise=1e-4)
    assert capfd.readouterr().out == ""


@st.composite
def problems_of_two_outputs(draw):
    """The problems above, with a noise at each of two outputs."""
    decisions, edges = draw(problems())

    def pair(noise):
        return noise, draw(noises)

    doubled = [
        replace(d, choices=tuple(replace(c, noise=pair(c.noise)) for c in d.choices))
        for d in decisions
    ]
    return doubled, [replace(edge, noise=pair(edge.noise)) for edge in edges]


def at_output(decisions, edges, number):
    """The problem as one output sees it."""
    return [
        replace(d, choices=tuple(replace(c, noise=c.noise[number]) for c in d.choices))
        for d in decisions
    ], [replace(edge, noise=edge.noise[number]) for edge in edges]


def every_plan_of_two(decisions, edges):
    """All plans without overflow at either output: formats, both noises, cost."""
    first = every_plan(*at_output(decisions, edges, 0))
    second = {
        tuple(sorted(formats.items())): noise
        for formats, noise, _ in every_plan(*at_output(decisions, edges, 1))
    }
    for formats, noise, cost in first:
        other = second.get(tuple(sorted(formats.items())))
        if other is not None:
            yield formats, (noise, other), cost


@given(problems_of_two_outputs(), st.data())
@settings(max_examples=80, deadline=None)
def test_least_cost_under_two_bounds_equals_enumeration(problem, data):
    decisions, edges = problem
    plans = list(every_plan_of_two(decisions, edges))
    exact = [noise for _, noise, _ in plans]
    bounds = data.draw(st.sampled_from([(0.5, 1e-9), (1e-3, math.inf), *exact]))
    reachable = [
        plan
        for plan in plans
        if all(noise <= bound for noise, bound in zip(plan[1], bounds, strict=True))
    ]
    if not reachable:
        with pytest.raises(InfeasibleError):
            solve(decisions, edges, max_noise=bounds)
        return
    solution = solve(decisions, edges, max_noise=bounds, relative_gap=0.0)
    found = next(noise for f, noise, _ in plans if f == solution.formats)
    assert solution.noises == found
    assert solution.noise == max(found)
    assert all(n <= bound for n, bound in zip(found, bounds, strict=True))
    # as with one bound
    assert solution.cost == pytest.approx(
        min(cost for _, _, cost in reachable), rel=2e-8
    )


def test_bounds_of_another_number_of_outputs():
    decision = Decision("a", (Choice("fp32", (0.0, 0.0), 1.0),))
    with pytest.raises(PlanError, match="one bound for each output"):
        solve([decision], max_noise=[1.0, 1.0, 1.0])
    other = Decision("b", (Choice("fp32", 0.0, 1.0),))
    with pytest.raises(PlanError, match="different numbers of outputs"):
        solve([decision, other], max_noise=1.0)
