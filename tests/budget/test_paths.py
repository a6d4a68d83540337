"""What gradients do and do not reach, and numbers that are not finite."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

import roundoff
from roundoff import Workload
from roundoff.errors import GradientPathError
from roundoff.plan.rounded_model import noise, run_batches

#: The adjoint alone.
budget = functools.partial(roundoff.budget, trials=0)


class Function(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.function(self, x)


def measured(function, x=None, formats=("bf16",), **kwargs):
    torch.manual_seed(0)
    x = torch.randn(6, 4) if x is None else x
    return budget(Workload(Function(function), [x]), formats, **kwargs)


def paths(found):
    return {s.site: s.no_path for s in found.sites}


def test_branches_that_no_gradient_passes_are_named_with_the_reason():
    def f(self, x):
        scores = self.linear(x)
        index = scores.argmax(-1)  # integers: no gradient
        frozen = scores.cos().detach()
        with torch.no_grad():
            scale = x.exp().mean()
        unused = x.tan()  # noqa: F841
        return x.sin()[torch.arange(6), index] * scale + frozen.sum()

    found = paths(measured(f))
    nowhere = "its output does not reach the target"
    ungraded = "computed under torch.no_grad"
    assert found == {
        "linear/linear": nowhere,
        "/cos": nowhere,
        "/tan": nowhere,
        "/exp": ungraded,
        "/mean": ungraded,
        "/sin": None,
        "/mul": None,
        "/add": None,
        "/sum": None,
    }


def test_sites_without_a_path_have_no_row_and_stay_in_fp32():
    found = measured(lambda self, x: x.sin() + self.linear(x).detach())
    assert set(found.table["site"]) == {"/sin", "/add"}
    assert "linear/linear" not in found.plan(target=0).formats(
        [s.site for s in found.sites]
    )


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: self.linear(x).detach(),
        lambda self, x: torch.no_grad()(self.linear)(x),
        lambda self, x: torch.from_numpy(self.linear(x).detach().numpy()),
        lambda self, x: self.linear(x).argmax(-1).float(),
    ],
)
def test_an_output_without_a_gradient_is_refused(function):
    with pytest.raises(GradientPathError) as error:
        measured(function)
    assert "no gradient reaches the output" in str(error.value)
    assert "return the scores" in str(error.value)


def test_overflow_costs_everything_and_is_counted():
    x = torch.tensor([[1.0, 2.0], [0.1, 0.7]])
    found = measured(lambda self, x: (x * 40000.0).sin(), x, formats=("fp16", "bf16"))
    rows = {(r["site"], r["format"]): r for r in found.table.to_dicts()}
    lost = rows["/mul", "fp16"]
    # 80000 is beyond fp16's 65504; 40000, 4000 and 28000 are not
    assert lost["noise"] == math.inf
    assert lost["sqnr_db"] is None
    assert lost["note"] == "overflow: 1 elements"
    assert lost["share"] == 1.0
    assert rows["/mul", "bf16"]["noise"] < 1.0 or rows["/mul", "bf16"]["note"] == ""
    assert found.table["site"][0] in ("/mul", "/sin")  # the worst stands first
    assert found.predict({"/mul": "fp16"}).noise == math.inf
    assert found.predict({"/mul": "fp16"}).db == -math.inf
    plan = found.plan(target=-30)
    assert plan.format_of("/mul") != "fp16"


def test_masked_positions_may_overflow():
    """The usual mask: -3.4e38 is beyond fp16, and its softmax is zero either way."""

    def f(self, x):
        scores = self.linear(x) @ x.T
        mask = torch.full((6, 6), torch.finfo(torch.float32).min).triu(1)
        return (scores + mask).softmax(-1) @ x

    found = measured(f, formats=("fp16", "bf16"))
    for row in found.table.to_dicts():
        assert row["noise"] < 1e-4, row
        assert row["note"] == ""
    torch.manual_seed(0)
    workload = Workload(Function(f), [torch.randn(6, 4)])
    reference = run_batches(workload).targets
    alone = noise(run_batches(workload, {"/add": "fp16"}).targets, reference)
    (row,) = [
        r
        for r in found.table.to_dicts()
        if (r["site"], r["format"]) == ("/add", "fp16")
    ]
    # 6 samples, K = 16, mixed: within 3 dB at 4 sigma of sqrt(2 / 16)
    assert alone / 4 < row["noise"] < alone * 4


def test_what_a_mask_writes_into_scores_may_overflow_on_its_own():
    """A row that is masked wholly: -3.4e38 is -inf in fp16, and its softmax is NaN, in
    whatever format the scores arrive."""

    def attention(self, x):
        masked = torch.zeros(6, 6, dtype=torch.bool)
        masked[2:] = True
        scores = (self.linear(x) @ x.T) * 0.5
        scores = scores.masked_fill(masked, torch.finfo(torch.float32).min)
        return scores.softmax(-1) @ x

    budget = measured(attention, formats=("fp16",))
    plan = budget.plan(30)
    assert plan.format_of("/softmax") == "fp32"
    assert plan.format_of("/mul") == "fp16"
    assert budget.predict({"/mul": "fp16", "/softmax": "fp16"}).db == -math.inf
    torch.manual_seed(0)
    workload = Workload(Function(attention), [torch.randn(6, 4)])
    reference = run_batches(workload).targets
    rounded = run_batches(workload, {"/mul": "fp16", "/softmax": "fp16"}).targets
    assert not math.isfinite(noise(rounded, reference))


def test_a_site_without_an_error_is_exact():
    x = torch.randint(-8, 8, (6, 4)).float()  # whole numbers: bf16 holds them
    found = measured(lambda self, x: (x.relu() + x).sin(), x)
    rows = {r["site"]: r for r in found.table.to_dicts()}
    assert rows["/relu"]["noise"] == rows["/add"]["noise"] == 0.0
    assert rows["/relu"]["sqnr_db"] is None
    assert rows["/relu"]["note"] == "exact"
    assert rows["/sin"]["noise"] > 0
    assert found.predict({"/relu": "bf16", "/add": "bf16"}).db == math.inf


INPLACE = {
    "relu": lambda y: torch.relu_(y.exp() - 1.0),
    "over a saved result": lambda y: (
        y.exp().mul_(2.0).sin()
    ),  # exp's gradient needs exp's result
    "over a saved operand": lambda y: (lambda a: (a.sin(), a.add_(1.0))[0] + a)(
        y * 1.0
    ),
    "through a view": lambda y: (lambda a: (a[:, :2].mul_(3.0), a.cos())[1])(y.sin()),
    "slice assignment": lambda y: (
        lambda a: (a.__setitem__((slice(None), 0), y[:, 1].cos()), a.exp())[1]
    )(y.sin()),
    "sigmoid then scaled": lambda y: torch.sigmoid(y).mul_(y).add_(y),
    "into a buffer": lambda y: (lambda a: (a.copy_(y.sin()), a.cos())[1])(
        torch.zeros(32, 4)
    ),
}


@pytest.mark.parametrize("name", INPLACE)
def test_in_place_operators(name):
    """Predicted against rounding each site alone, measured; the graph of some is broken for plain autograd."""

    def f(self, x):
        return self.linear(INPLACE[name](self.linear(x)))

    unreached = set()
    torch.manual_seed(0)
    workload = Workload(Function(f), [torch.randn(32, 4)])
    found = budget(workload, ["bf16"], probes=1000)
    reference = run_batches(workload).targets
    rows = found.table.to_dicts()
    assert len(rows) == len(found.sites) - len(unreached) >= 3
    assert {s.site for s in found.sites if s.no_path} == unreached
    for row in rows:
        single = noise(run_batches(workload, {row["site"]: "bf16"}).targets, reference)
        # at least 1000 independent products, if one sample has all the noise: 4 sigma of sqrt(2 / 1000); and the second
        # order, for relative errors of 2**-8 and what exp makes of values up to 3
        assert row["noise"] == pytest.approx(
            single, rel=4 * (2 / 1000) ** 0.5 + 0.03, abs=1e-16
        ), row["site"]


def test_retries_do_not_count_work_twice():
    """Where plain autograd fails, the batch is measured again; sizes are those of one pass."""

    def f(self, x):
        return self.linear(self.linear(x).exp().mul_(2.0))

    found = measured(f)
    (first, *_) = [s for s in found.sites if s.site == "linear/linear"]
    assert first.sizes == {
        "activation_elements": 24,
        "weight_elements": 20,
        "output_elements": 24,
        "macs": 96,
    }
    assert first.batches == 1


class Chunks(nn.Module):
    """An LSTM cell over chunks: its hidden state is made of its other output."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        state = None
        for chunk in x.split(4, dim=1):
            state = self.cell(chunk, state)
        return self.head(state[0])


def test_an_output_made_of_another_is_not_counted_twice():
    """To first order: fp16. 3200 projections: 4.34 * sqrt(2 / 3200) = 0.1 dB, with long
    tails a few times that; counted twice it would be 6 dB.
    """
    torch.manual_seed(0)
    workload = Workload(Chunks(), [torch.randn(200, 12)])
    measured = budget(workload, ["fp16"], probes=16)
    exact = run_batches(workload).targets
    for number in ("", "#1", "#2"):
        formats = {f"cell/lstm_cell{number}": "fp16"}
        alone = noise(run_batches(workload, formats).targets, exact)
        predicted = measured.predict(formats).noise
        assert abs(10 * math.log10(predicted / alone)) < 1.0
