"""Pairs of programs that a comparison once stumbled over: what is no fault is not blamed, and nothing breaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundoff
from roundoff.compare.judging.divergence import is_partly_written
from roundoff.compare.records.recorded_rows import RecordedRow


@pytest.fixture(params=["tensors", "stats"])
def compared(recorded, request):
    """``compared(one, other)`` records two functions, or one on two models, and compares them."""

    def compare(one, other, models=(None, None), **options):
        runs = [
            recorded(work, model, keep=request.param)
            for work, model in zip((one, other), models, strict=True)
        ]
        return roundoff.compare(reference=runs[0], candidate=runs[1], **options)

    return compare


def failing(found):
    return (
        found.table.filter(verdict="fail")
        .select("site", "phase", "error", "cause")
        .rows()
    )


def test_what_the_ctc_loss_leaves_beyond_the_lengths(compared):
    # probabilities of 2 steps of 6 are computed for the shorter sample; the rest of the
    # workspace holds what the memory held before, which is filled on purpose here
    logs = torch.linspace(-3, 3, 6 * 2 * 4).view(6, 2, 4).log_softmax(-1)
    lengths = torch.tensor([6, 2]), torch.tensor([3, 1])

    def loss(filled):
        logits = logs.clone().requires_grad_()
        old = [np.full(n, filled, "f4") for n in range(60, 130)]
        del old
        F.ctc_loss(logits, torch.tensor([1, 2, 3, 2]), *lengths).backward()

    found = compared(lambda: loss(1.0), lambda: loss(-7.0))
    assert failing(found) == []
    assert found.agrees
    # whether or not the memory held the same by chance
    row = RecordedRow(record=1, call=1, operator="_ctc_loss", place=1)
    assert is_partly_written(row, row)
    assert not is_partly_written(replace(row, place=0), replace(row, place=0))


@pytest.mark.parametrize("operator", [torch.add, torch.mul])
def test_swapped_operands(compared, operator):
    x = torch.linspace(0.5, 2, 64)
    found = compared(
        lambda: operator(x.sin(), x.exp()).sum(),
        lambda: operator(x.exp(), x.sin()).sum(),
    )
    assert failing(found) == []
    # to swap those of a difference is a fault
    found = compared(
        lambda: torch.sub(x.sin(), x.exp()).sum(),
        lambda: torch.sub(x.exp(), x.sin()).sum(),
    )
    assert found.culprits(1)[0].operator == "sub"
    # and a fault of a sum whose operands are swapped is its own: what it reads is equal
    found = compared(
        lambda: torch.add(x.sin(), x.exp()).sum(),
        lambda: torch.add(x.exp(), x.sin(), alpha=1.01).sum(),
    )
    assert [(c.operator, c.inputs_error) for c in found.culprits(1)] == [("add", 0)]


def test_a_term_that_is_added_with_the_other_sign(compared):
    x = torch.linspace(0.5, 2, 64)

    def loss(combine):
        weight = x.clone().requires_grad_()
        combine(weight.exp(), weight.sin()).sum().backward()

    # exp - 0.1 sin is -0.1 sin + exp
    found = compared(
        lambda: loss(lambda a, b: a - 0.1 * b),
        lambda: loss(lambda a, b: (-0.1) * b + a),
    )
    assert failing(found) == []
    # exp + 0.1 sin is not, and the sign is named where it is lost
    found = compared(
        lambda: loss(lambda a, b: (-0.1) * b + a),
        lambda: loss(lambda a, b: 0.1 * b + a),
    )
    assert found.culprits(1)[0].evidence == "factor: -0.1, here 0.1"


@pytest.mark.parametrize("activation", [torch.relu, torch.tanh, torch.sigmoid])
def test_a_detach_after_an_activation_is_named_itself(compared, activation):
    # the activation keeps a detached result too, which hands on to the written one
    x = torch.linspace(-1, 2, 64)

    def loss(cut):
        weight = x.clone().requires_grad_()
        hidden = activation(weight * x)
        ((cut(hidden) * x).sin() + hidden.cos()).sum().backward()

    through, cut = lambda: loss(lambda h: h), lambda: loss(torch.Tensor.detach)
    for one, other in ((through, cut), (cut, through)):
        first = compared(one, other).culprits(1)[0]
        line = first.line if other is cut else first.reference_line
        assert first.looks_like == "gradient cut"
        assert line.endswith(f":{loss.__code__.co_firstlineno + 3}")


def test_gradients_accumulated_in_another_order(compared):
    """Three uses of one weight; autograd adds their gradients as they come."""

    def work(order):
        def run(model):
            x = torch.randn(16, 12, generator=torch.Generator().manual_seed(1))
            parts = {
                "a": lambda: model(x).sin(),
                "b": lambda: model(x * 3).cos(),
                "c": lambda: model(x.exp()).tanh(),
            }
            made = {name: parts[name]().square().sum() for name in order}
            (made["a"] + made["b"] + made["c"]).backward()

        return run

    def layer():
        torch.manual_seed(2)
        return nn.Linear(12, 8)

    for order in ("cba", "bca"):
        found = compared(work("abc"), work(order), (layer(), layer()))
        assert failing(found) == []
        grads = found.table.filter(
            pl.col("name").str.contains("weight"), pl.col("error").is_not_null()
        )
        assert grads.height > 1
        assert (grads["error"] < 1e-4).all()  # a few additions in fp32


def test_the_workspace_of_a_recurrent_layer(compared):
    """oneDNN's LSTM hands out bytes with gaps that nobody writes."""

    def work(model):
        x = torch.randn(7, 3, 6, generator=torch.Generator().manual_seed(1))
        model(x)[0].square().sum().backward()

    def layer(scale=1.0):
        torch.manual_seed(2)
        model = nn.LSTM(6, 10)
        with torch.no_grad():
            model.weight_hh_l0.mul_(scale)
        return model

    for _ in range(2):
        found = compared(work, work, (layer(), layer()))
        assert failing(found) == []
        assert found.culprits() == []
    found = compared(work, work, (layer(), layer(1.001)))
    assert (
        found.culprits(1)[0].site == "/parameter"
        or found.culprits(1)[0].name == "weight_hh_l0"
    )
    assert "uint8" not in {c.dtype for c in found.culprits()}


def test_memory_that_nothing_was_written_to(compared):
    def work(seed):
        def run():
            filler = torch.full((4096,), float(seed))
            del filler
            y = torch.empty(4096)
            y.copy_(torch.linspace(0, 1, 4096))
            return torch.empty_like(y), y.square().sum()

        return run

    found = compared(work(1), work(2))
    assert {row[0] for row in failing(found)} <= {
        "/full"
    }  # the filler, which is another number
    rows = found.table.filter(operator="empty")
    assert rows["error"].is_null().all()
    assert set(rows["reason"]) == {"memory that nothing was written to yet"}
    assert set(rows["verdict"]) == {"undecided"}
    assert {c.operator for c in found.culprits()} <= {"full"}


def test_batch_norm_that_was_left_in_eval_mode(compared):
    """Other shapes come out of it, the saved statistics are empty: nothing runs again on them."""

    def work(model):
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        F.relu(model(x)).square().mean().backward()

    def model():
        torch.manual_seed(2)
        made = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 2, 1))
        made[1].running_mean.add_(0.2)
        made[1].running_var.mul_(1.7)
        return made

    evaluated = model()
    evaluated[1].eval()
    for pair in ((model(), evaluated), (evaluated, model())):
        found = compared(work, work, pair)
        named = found.culprits(1)[0]
        assert (named.module, named.phase) == ("1", "forward")
        assert "batch_norm" in named.operator


def test_other_shapes_everywhere(compared):
    """A larger batch: its samples are compared, and statistics over more of them differ. Nothing breaks."""

    def work(count):
        def run(model):
            x = torch.linspace(-1, 1, 576).view(3, 3, 8, 8)[:count].cos()
            model(x).square().mean().backward()

        return run

    def model():
        torch.manual_seed(2)
        convolution = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()
        return nn.Sequential(
            *convolution, nn.Flatten(), nn.Linear(216, 4), nn.LayerNorm(4)
        )

    found = compared(work(2), work(3), (model(), model()))
    assert not found.agrees
    apart = found.table.filter(operator="native_batch_norm", verdict="fail")
    assert apart["error"].max() >= 1
    assert found.table.filter(name="0.weight")["error"][0] == 0  # the same weights


def test_nothing_but_empty_tensors(compared):
    found = compared(
        lambda: torch.zeros(0, 3).mul(2).sum(), lambda: torch.zeros(0, 3).mul(2).sum()
    )
    assert found.agrees
    assert found.table["error"].to_list() == [0.0] * found.table.height


@pytest.mark.parametrize("kind", ["sparse", "csr", "sparse gradient", "nested"])
@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support"
)
def test_tensors_that_hold_others(compared, kind):
    """Of these the values inside are kept: they are measured, no operator runs again on them, no step is lost."""
    x = torch.linspace(-1, 1, 24).reshape(4, 6)

    def work(factor):
        def run():
            if kind == "nested":
                return (
                    torch.nested.nested_tensor([x, x[:2] * factor])
                    .to_padded_tensor(0.0)
                    .sum()
                )
            if kind == "sparse gradient":
                table = (torch.ones(9, 4) * factor).requires_grad_()
                F.embedding(
                    torch.tensor([1, 5, 5]), table, sparse=True
                ).square().sum().backward()
                return table
            scaled = x * factor
            return torch.mm(
                scaled.to_sparse() if kind == "sparse" else scaled.to_sparse_csr(),
                x.t(),
            ).sum()

        return run

    found = compared(work(1.0), work(1.0))
    assert failing(found) == []
    assert "damaged" not in found.coverage.status
    assert found.table["error"].max() == 0
    found = compared(work(1.0), work(1.5))
    assert "damaged" not in found.coverage.status
    assert found.culprits(1)[0].operator == "mul"
    assert (
        found.table.filter(pl.col("operator").str.contains("sparse|nested|embedding"))[
            "error"
        ].max()
        > 0.1
    )
    assert {c.operator for c in found.culprits()} == {"mul"}


def test_a_later_step_inherits(recorded):
    """A fault of the first step moves the weights: what differs later without a new fault is told as inherited."""

    def model(eps):
        torch.manual_seed(2)
        made: Any = nn.Sequential(
            nn.Linear(6, 8), nn.LayerNorm(8, eps=eps), nn.Linear(8, 2)
        )
        made.optimizer = [torch.optim.SGD(made.parameters(), lr=0.1)]
        return made

    def work(model):
        model.optimizer[0].zero_grad()
        model(torch.ones(3, 6).cumsum(0)).square().mean().backward()
        model.optimizer[0].step()
        model[1].eps = 1e-5

    runs = [recorded(work, model(eps), steps=3) for eps in (1e-5, 0.5)]
    found = roundoff.compare(reference=runs[0], candidate=runs[1])
    assert found.culprits(1)[0].site == "1/native_layer_norm"
    assert found.culprits(1)[0].steps == [0]
    later = found.table.filter(
        step=2, phase="forward", operator="native_layer_norm", place=0
    ).row(0, named=True)
    assert later["error"] > later["tolerance"]
    assert later["cause"] in (None, "inherited")
