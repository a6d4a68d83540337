"""Clipping and scaling of gradients that a script writes itself: after the backward pass."""

from __future__ import annotations

import polars as pl
import pytest
import torch
from torch import nn

import roundoff as ro

#: what stands between backward and the optimizer, the operators that it makes
BY_HAND = {
    "by the norm": (
        lambda parameters: _scale_by_the_norm(parameters),
        {"linalg_vector_norm", "stack", "reciprocal", "mul", "mul_"},
    ),
    "by value": (
        lambda parameters: [p.grad.data.clamp_(-0.1, 0.1) for p in parameters],
        {"clamp_"},
    ),
    "replaced": (
        lambda parameters: _divide(parameters),
        {"div"},
    ),
}


def _scale_by_the_norm(parameters):
    norm = torch.stack([p.grad.norm() for p in parameters]).norm()
    for parameter in parameters:
        parameter.grad.mul_(0.1 / norm)


def _divide(parameters):
    for parameter in parameters:
        parameter.grad = parameter.grad / 4


def recorded(folder, work, loss=lambda net, x: net(x).square().mean()):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with ro.capture(folder, net) as run:
        loss(net, torch.randn(5, 4)).backward()
        work(list(net.parameters()))
        optimizer.step()
        run.step()
    return ro.load(folder).ops.collect().filter(pl.col("call") >= 0)


@pytest.mark.parametrize("name", BY_HAND)
def test_work_on_gradients_comes_after_the_backward_pass(tmp_path, name):
    work, operators = BY_HAND[name]
    rows = recorded(tmp_path / "run", work)
    alone = recorded(tmp_path / "alone", lambda _: None)
    first = rows.filter(pl.col("phase") == "forward")["operator"].to_list()
    assert first == alone.filter(pl.col("phase") == "forward")["operator"].to_list()
    assert operators <= {*rows.filter(pl.col("phase") == "optimizer")["operator"]}


def test_a_penalty_on_gradients_is_part_of_the_loss(tmp_path):
    def penalised(net, x):
        net(x).sum().backward()
        value = net(x).sum()
        gradients = torch.autograd.grad(value, [*net.parameters()], create_graph=True)
        return value + sum(g.square().sum() for g in gradients)

    rows = recorded(tmp_path / "run", lambda _: None, penalised)
    updates = rows.filter(pl.col("phase") == "optimizer")["operator"].to_list()
    assert "pow" not in updates
    assert "sum" not in updates
