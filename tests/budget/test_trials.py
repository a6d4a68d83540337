"""Trials against emulation by hand: one site rounded with torch's own casts, and the outputs compared."""

from __future__ import annotations

import math
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from roundoff import Workload, budget
from roundoff.budget import measure
from roundoff.budget.decisions import CallPlaces, FollowingMode
from roundoff.budget.noise_power import Term, power
from roundoff.budget.refine import divided_parts, with_trials
from roundoff.budget.table import Budget
from roundoff.budget.trial_rows import OutputView, with_mean_products
from roundoff.budget.trials import measure_by_trial, record
from roundoff.errors import GradientPathError
from roundoff.formats import parse_format
from roundoff.ops import watch
from roundoff.plan import noise, run_batches

ALL = 10_000


def bf16(x):
    return x.to(torch.bfloat16).float()


def fp8(x):
    """Per tensor, by ml_dtypes: the largest magnitude becomes 448."""
    scale = x.abs().max() / 448
    codes = (x / scale).numpy().astype(ml_dtypes.float8_e4m3fn)
    return torch.from_numpy(codes.astype(np.float32)) * scale


class Experts(nn.Module):
    """Each row goes to the expert with the larger score."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 2, bias=False)
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x):
        return self.choose(self.router(x), x)

    def choose(self, scores, x):
        takes_second = scores.argmax(-1)
        y = torch.empty_like(x)
        for number, expert in enumerate((self.first, self.second)):
            rows = takes_second == number
            y[rows] = expert(x[rows])
        return y


@pytest.fixture
def experts():
    torch.manual_seed(0)
    batches = [torch.randn(200, 6), torch.randn(150, 6)]
    return Workload(Experts(), batches)


def relative(pairs):
    """Sum of squared differences over that of the exact outputs, in float64."""
    error = sum(
        float((new.double() - old.double()).square().sum()) for old, new in pairs
    )
    return error / sum(float(old.double().square().sum()) for old, _ in pairs)


@torch.no_grad()
def rounded_router(workload, rounded_input, rounded_weight, rounded_output):
    model = workload.model
    pairs = []
    for x in workload.batches:
        scores = rounded_input(x) @ rounded_weight(model.router.weight).T
        pairs.append((model(x), model.choose(rounded_output(scores), x)))
    return relative(pairs)


def cost(measured, site, fmt):
    [row] = [c for c in measured.costs if (c.site, c.format) == (site, fmt)]
    return row


def test_a_router_without_a_gradient_costs_what_rounding_it_by_hand_costs(experts):
    """Exact but for the projections' float32: 1e-6 of each, so 1e-5 of a power."""
    measured = budget(experts, ["bf16", "fp8_e4m3fn"])
    by_hand = {
        "bf16": rounded_router(experts, bf16, bf16, bf16),
        "fp8_e4m3fn": rounded_router(
            experts,
            fp8,
            lambda w: torch.cat([fp8(row) for row in w.split(1)]),
            lambda scores: scores,
        ),
    }
    for fmt, noise_by_hand in by_hand.items():
        row = cost(measured, "router/linear", fmt)
        assert noise_by_hand > 0
        assert row.noise == pytest.approx(noise_by_hand, rel=1e-5)
        assert row.measured == "trial"
        assert 0 < row.stderr_db < 0.01
    [router] = [site for site in measured.sites if site.site == "router/linear"]
    assert router.no_path is None
    assert measured.about.trials >= 2


@pytest.mark.parametrize("hidden", ["with torch.no_grad():\n", "x.detach", "numpy"])
def test_values_that_a_gradient_does_not_follow_are_seen(hidden):
    """The site is reported with a path, and costs what it costs when run alone."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            if hidden == "numpy":
                return x.sin() + torch.from_numpy(np.tanh(y.detach().numpy()))
            if hidden == "x.detach":
                return x.sin() + y.detach()
            with torch.no_grad():
                z = y.exp()
            return x.sin() + z

    torch.manual_seed(0)
    workload = Workload(Model(), [torch.randn(20, 4)])
    measured = budget(workload, ["bf16"])
    exact = run_batches(workload).targets
    alone = noise(run_batches(workload, {"linear/linear": "bf16"}).targets, exact)
    assert cost(measured, "linear/linear", "bf16").noise == pytest.approx(
        alone, rel=1e-5
    )


def test_without_trials_the_router_has_no_path(experts):
    measured = budget(experts, ["bf16"], trials=0)
    assert {c.measured for c in measured.costs} == {"adjoint"}
    assert measured.about.trials is None
    [router] = [site for site in measured.sites if site.site == "router/linear"]
    assert router.no_path is not None


def test_the_number_of_trials_can_be_limited(experts):
    measured = budget(experts, ["bf16", "fp16"], trials=1)
    assert [c.site for c in measured.costs if c.measured == "trial"] == [
        "router/linear"
    ]
    assert measured.about.trials == 1


class Chain(nn.Module):
    """Smooth: the adjoint is right, so that trials and adjoint can be compared."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(5, 8)
        self.b = nn.Linear(8, 4)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        h += 1.0  # in place
        return self.b(h * h.sigmoid())


@pytest.fixture
def chain():
    torch.manual_seed(1)
    return Workload(Chain(), [torch.randn(9, 5), torch.randn(7, 5)])


def test_every_row_by_trial_is_what_the_single_sites_cost(chain):
    """Against runs of the whole model with one site rounded; float32 projections: 1e-5."""
    formats = ["bf16", "int8"]
    measured = budget(chain, formats, trials=ALL)
    tried = with_every_row_tried(chain, formats)
    exact = run_batches(chain).targets
    assert {c.measured for c in tried.costs} == {"trial"}
    assert len(tried.costs) == len(measured.costs)
    for row in tried.costs:
        alone = noise(run_batches(chain, {row.site: row.format}).targets, exact)
        assert row.noise == pytest.approx(alone, rel=1e-5)


def with_every_row_tried(workload, formats, probes=16) -> Budget:
    """The signs are those of the adjoint, as ``refine`` is given them."""
    drawn = []

    def keep(_, plain, first, signs, *rest):
        drawn.extend(signs)
        return plain

    with mock.patch.object(measure, "refine", keep):
        plain = budget(workload, formats, probes=probes)
    pairs = [(c.site, parse_format(c.format)) for c in plain.costs]
    view = OutputView({"output": 1.0}, plain.about.signal)
    results = measure_by_trial(workload, record(workload), pairs, [view], drawn)
    return with_trials(plain, results)


def test_rows_of_a_trial_stand_beside_those_of_the_adjoint(chain):
    """Same signs: where first order holds (fp16), each part's projections agree.

    The exact power differs from K = 16 probes of 16 samples by sqrt(2 / 256) = 9 %,
    and the second order by the relative error of the operands, 2^-11.
    """
    plain = budget(chain, ["fp16"], trials=0, probes=16)
    tried = with_every_row_tried(chain, ["fp16"])
    compared = 0
    for site in plain.sites:
        for old in plain.rows(site.site, "fp16"):
            if power([old])[0] == 0 or old.pooled:
                continue
            [new] = [
                term
                for term in tried.rows(site.site, "fp16")
                if (term.part, term.operand, term.sources)
                == (old.part, old.operand, old.sources)
            ]
            compared += 1
            a, b = old.values.ravel(), new.values.ravel()
            assert np.dot(a, b) / np.sqrt(np.dot(a, a) * np.dot(b, b)) > 0.9
    assert compared > 5


def test_predictions_of_parts_and_of_the_whole_are_exact(chain):
    """The mean products of a site's parts are those of the differences themselves."""
    tried = with_every_row_tried(chain, ["bf16"], probes=4)
    exact = run_batches(chain).targets
    formats = {"b/linear": "bf16"}
    alone = noise(run_batches(chain, formats).targets, exact)
    assert tried.predict(formats).noise == pytest.approx(alone, rel=1e-5)
    for batch in range(2):
        part = noise(run_batches(chain, formats).targets[batch:][:1], exact[batch:][:1])
        predicted = tried.predict(formats, batch=batch).noise
        assert predicted == pytest.approx(part, rel=1e-5)


def test_mean_products_are_met_with_few_moves():
    """Random rows against numpy: products as asked, rows that had them are unmoved."""
    generator = np.random.default_rng(0)
    values = generator.normal(size=(3, 8, 5))
    factor = generator.normal(size=(3, 3))
    wanted = factor @ factor.T
    moved = with_mean_products(values, wanted)
    assert np.einsum("aks,bks->ab", moved, moved) / 8 == pytest.approx(wanted)
    again = with_mean_products(moved, wanted)
    assert again == pytest.approx(moved)


def test_too_few_projections_keep_the_power_of_the_sum():
    values = np.ones((3, 1, 1))
    products = np.diag([1.0, 4.0, 9.0])
    moved = with_mean_products(values, products)
    assert np.square(moved.sum(0)).sum() == pytest.approx(14.0)


def test_parts_that_change_nothing_are_zero():
    assert not with_mean_products(np.zeros((2, 4, 3)), np.zeros((2, 2))).any()
    assert with_mean_products(np.zeros((0, 4, 3)), np.zeros((0, 0))).shape == (0, 4, 3)


def decided(model, *batch):
    handler = CallPlaces()
    with watch(model, handler, FollowingMode) as mode:
        mode.begin()
        with mode:
            output = model(*batch)
        return handler.finished([output])


def flow(function):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.Linear(4, 4)
            self.values = nn.Linear(4, 4)

        def forward(self, x):
            return function(self.scores(x), self.values(x))

    return decided(Model(), torch.randn(6, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda s, v: v.gather(1, s.topk(2).indices),
        lambda s, v: v[torch.arange(6), s.argmax(-1)],
        lambda s, v: v * nn.functional.one_hot(s.argmax(-1), 4),
        lambda s, v: torch.where(s > 0, v, 0.0),
        lambda s, v: v.masked_fill(s > 0, 0.0),
        lambda s, v: v[s[:, 0] > 0].sum() + v.sum(),
        lambda s, v: v + s.detach(),
        lambda s, v: v + s.round(),
        lambda s, v: v if s.sum() > 0 else -v,
        lambda s, v: v[: int((s > 0).sum().clamp(1, 3))],
        lambda s, v: v.index_select(0, torch.bucketize(s.sum(1), torch.zeros(1))),
        lambda s, v: v[s[:, 0].sort().indices],
        lambda s, v: v.clone().index_fill_(0, (s[:, 0] > 0).nonzero()[:, 0], 0.0),
    ],
)
def test_what_a_decision_is_taken_on(function):
    places = flow(function)
    assert places["scores/linear"].decides
    assert not places["values/linear"].decides
    assert places["scores/linear"].reaches
    assert places["values/linear"].reaches


@pytest.mark.parametrize(
    "function",
    [
        lambda s, v: s.max(-1).values[:, None] + v,
        lambda s, v: s.relu().clamp(max=1.0) * v,
        lambda s, v: s.topk(4).values + v,
        lambda s, v: torch.where(torch.ones(6, 4) > 0, s, v) + v,
        lambda s, v: s.view(s.shape[0], -1) + v * torch.zeros_like(s),
    ],
)
def test_what_has_a_derivative_is_no_decision(function):
    assert not flow(function)["scores/linear"].decides


def test_what_never_reaches_the_target():
    places = flow(lambda s, v: (s.argmax(-1), v)[1])
    assert not places["scores/linear"].reaches
    assert not places["scores/linear"].decides


def test_the_maker_of_the_scores_is_told_from_those_before():
    def function(s, v):
        scores = s.softmax(-1).view(6, 4)
        return v[scores.argmax(-1)]

    places = flow(function)
    assert places["/softmax"].is_direct
    assert places["scores/linear"].decides
    assert not places["scores/linear"].is_direct


class Counting(nn.Module):
    """Keeps a number of its own, draws random numbers, and skips what it does not need."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        y = self.linear(x) * self.calls
        return y.round() + torch.rand(4)


def test_a_model_that_changes_itself_is_put_back_before_each_trial():
    torch.manual_seed(0)
    workload = Workload(Counting(), [torch.randn(30, 4), torch.randn(30, 4)])
    state = torch.get_rng_state()
    measured = budget(workload, ["bf16"])
    assert workload.model.calls == 0
    assert torch.equal(torch.get_rng_state(), state)
    row = cost(measured, "linear/linear", "bf16")
    assert row.measured == "trial"
    model = workload.model
    pairs = []
    for number, x in enumerate(workload.batches, 1):
        exact = model.linear(x).detach()
        weight, bias = (bf16(p.detach()) for p in model.linear.parameters())
        rounded = bf16(torch.nn.functional.linear(bf16(x), weight, bias))
        offset = random_row(state, number)
        pairs.append(
            ((exact * number).round() + offset, (rounded * number).round() + offset)
        )
    assert row.noise == pytest.approx(relative(pairs), rel=1e-5)


def random_row(state, number):
    generator = torch.Generator()
    generator.set_state(state)
    return [torch.rand(4, generator=generator) for _ in range(number)][-1]


class Refusing(nn.Module):
    """Refuses rounded values, or returns another number of rows."""

    def __init__(self, refuses):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.refuses = refuses

    def forward(self, x):
        y = self.linear(x)
        if torch.equal(y, bf16(y)):
            if self.refuses:
                raise ValueError("not exact")
            return y[1:]
        return y


@pytest.mark.parametrize("refuses", [True, False])
def test_a_site_that_cannot_be_tried_keeps_its_row(refuses):
    workload = Workload(Refusing(refuses), [torch.randn(8, 4)])
    measured = budget(workload, ["bf16"], trials=ALL)
    row = cost(measured, "linear/linear", "bf16")
    assert row.measured == "adjoint"
    assert row.noise > 0


class Overflowing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x) * 1e5
        return y * (y > 0)


def test_an_overflow_costs_everything():
    torch.manual_seed(0)
    workload = Workload(Overflowing(), [torch.randn(8, 4) + 3])
    measured = budget(workload, ["fp16"], trials=ALL)
    row = cost(measured, "/mul", "fp16")
    assert row.measured == "trial"
    assert math.isinf(row.noise)
    assert row.note.startswith("overflow")


@pytest.mark.parametrize("target", ["loss", "values", "head/linear"])
def test_other_targets(target):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.Linear(4, 4)
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            best = x.gather(1, self.scores(x).topk(4).indices)
            return {"values": self.head(best), "best": best}

    torch.manual_seed(0)
    workload = Workload(
        Model(),
        [torch.randn(64, 4)],
        loss=lambda output, batch: output["values"].square().sum(),
    )
    measured = budget(workload, ["bf16"], of=target)
    row = cost(measured, "scores/linear", "bf16")
    exact = run_batches(workload, target=target).targets
    ran = run_batches(workload, {"scores/linear": "bf16"}, target=target)
    assert row.measured == "trial"
    assert row.noise == pytest.approx(noise(ran.targets, exact), rel=1e-5)


def test_a_budget_with_trials_is_kept_in_its_file(experts, tmp_path):
    measured = budget(experts, ["bf16"])
    measured.save(tmp_path / "budget.parquet")
    loaded = Budget.load(tmp_path / "budget.parquet")
    assert loaded.costs == measured.costs
    assert loaded.about.trials == measured.about.trials


def test_a_file_without_trials_is_of_the_adjoint(experts, tmp_path):
    measured = budget(experts, ["bf16"], trials=0)
    old = Budget(measured.terms.drop("measured"), measured.sites, measured.about)
    old.save(tmp_path / "old.parquet")
    loaded = Budget.load(tmp_path / "old.parquet")
    assert {c.measured for c in loaded.costs} == {"adjoint"}


def test_a_plan_lowers_a_site_that_only_a_trial_can_see(experts):
    measured = budget(experts, ["bf16", "fp16"])
    plan = measured.plan("10dB")
    names = [site.site for site in measured.sites]
    assert "router/linear" in plan.formats(dict.fromkeys(names, "linear"))


class _Sine(nn.Module):
    """Nothing decides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin()


class _Chosen(_Sine):
    """The largest element decides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * (y.argmax(-1, keepdim=True) + 1)


class _Branches(_Sine):
    """The sign of a sum decides what is called."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y.sin() if x.sum() * y.sum().square() > 0 else y.cos()


@pytest.mark.parametrize(
    ("model", "followed"), [(_Sine, []), (_Chosen, []), (_Branches, [3])]
)
def test_further_batches_are_followed_where_they_may_call_others(
    model, followed, monkeypatch
):
    """Batches of the same calls have their values go the same ways, decisions too."""
    asked = []

    def counting(workload, target=None, batches=None):
        asked.append(batches)
        return record(workload, target, batches)

    monkeypatch.setattr("roundoff.budget.refine.record", counting)
    monkeypatch.setattr("roundoff.budget.refine.suspects", lambda *_: [])
    torch.manual_seed(0)
    x = torch.rand(4, 3)
    budget(Workload(model(), [x, -x, x + 1]), probes=4)
    assert asked == followed


def test_a_trial_in_one_pass_is_divided_as_the_adjoint_divides(chain):
    """Smooth and fp16: each part keeps its direction and its power, and the sum is exact.

    Of K = 16 probes and 16 samples a power is known to sqrt(2 / 256) = 9 %, four times
    that is allowed.
    """
    plain = budget(chain, ["fp16"], trials=0, probes=16)
    tried = budget(chain, ["fp16"], trials=ALL, probes=16)
    exact = run_batches(chain).targets
    for row in tried.costs:
        if row.measured != "trial":
            continue
        alone = noise(run_batches(chain, {row.site: "fp16"}).targets, exact)
        assert row.noise == pytest.approx(alone, rel=1e-5)
        for old, new in zip(
            plain.rows(row.site, "fp16"), tried.rows(row.site, "fp16"), strict=True
        ):
            assert (old.part, old.operand, old.sources) == (
                new.part,
                new.operand,
                new.sources,
            )
            assert power([new])[0] == pytest.approx(power([old])[0], rel=0.36)


def test_parts_of_a_jump_keep_their_shares_of_its_power():
    """Where trial and adjoint have nothing to do with each other; 4 sigma of 4000 products."""
    generator = np.random.default_rng(1)
    parts = [
        Term("weight", 1, ("w",), False, 0, 0.01 * generator.normal(size=(40, 100))),
        Term("output", -1, (), False, 0, 0.02 * generator.normal(size=(40, 100))),
    ]
    whole = Term("output", -1, (), False, 0, generator.normal(size=(40, 100)), "trial")
    divided = divided_parts(whole, parts)
    total = power([whole])[0]
    assert np.sum([p.values for p in divided], axis=0) == pytest.approx(whole.values)
    shares = [power([part])[0] / total for part in divided]
    assert shares == pytest.approx([0.2, 0.8], abs=4 / math.sqrt(4000))
    pooled = [
        Term(p.part, p.operand, p.sources, True, 0, p.values[:, :2]) for p in parts
    ]
    again = divided_parts(whole, pooled)
    assert np.sum([p.values for p in again], axis=0) == pytest.approx(whole.values)
    assert not any(part.pooled for part in again)


def test_a_small_wrong_row_beside_large_ones_is_found():
    """Softplus of 500 x is a kink to errors of int8: its derivative says too little."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.large = nn.ModuleList(nn.Linear(8, 8) for _ in range(11))
            self.small = nn.Linear(8, 8)

        def forward(self, x):
            y = sum(layer(x) for layer in self.large)
            return y + 1e-3 * nn.functional.softplus(500 * self.small(x)).sqrt()

    torch.manual_seed(0)
    workload = Workload(Model(), [torch.randn(32, 8)])
    measured = budget(workload, ["int8"], probes=8)
    assert "adjoint" in {c.measured for c in measured.costs}
    exact = run_batches(workload).targets
    row = cost(measured, "small/linear", "int8")
    alone = noise(run_batches(workload, {"small/linear": "int8"}).targets, exact)
    assert row.measured == "trial"
    assert row.noise == pytest.approx(alone, rel=1e-5)


class Cut(nn.Module):
    """Many sites, and no gradient at all."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(20)))

    @torch.no_grad()
    def forward(self, x):
        return self.layers(x)


def test_a_model_without_any_gradient_is_measured_by_trials():
    torch.manual_seed(0)
    workload = Workload(Cut(), [torch.randn(30, 4)])
    measured = budget(workload, ["bf16", "fp16", "fp8_e4m3fn", "int8"])
    assert measured.about.trials == 80
    exact = run_batches(workload).targets
    row = cost(measured, "layers.3/linear", "int8")
    alone = noise(run_batches(workload, {row.site: "int8"}).targets, exact)
    assert row.noise == pytest.approx(alone, rel=1e-5)
    with pytest.raises(GradientPathError):
        budget(workload, ["bf16"], trials=0)
