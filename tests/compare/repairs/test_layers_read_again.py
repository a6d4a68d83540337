"""A layer of a port that is read twice, where the reference goes on to the next."""

from __future__ import annotations

import linecache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundoff


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.first(x))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.last(x)


class Dense(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.kernel = nn.Parameter(linear.weight.detach().t().clone())
        self.bias = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        return torch.einsum("ni,io->no", x, self.kernel) + self.bias


class Port(nn.Module):
    def __init__(self, order):
        super().__init__()
        net = model()
        self.dense = nn.ModuleList(Dense(each) for each in (net.first, *net.layers))
        self.out = Dense(net.last)
        self.order = order

    def forward(self, x):
        x = self.dense[0](x).clamp(min=0)
        for number in self.order:
            x = self.dense[number](x).clamp(min=0)
        return self.out(x)


X = torch.randn(7, 6, generator=torch.Generator().manual_seed(1))
TARGETS = torch.randint(4, (7,), generator=torch.Generator().manual_seed(2))


def model():
    torch.manual_seed(3)
    return Net()


def recorded(path, net, loss):
    with roundoff.capture(path, net, keep="tensors") as run:
        loss(net(X)).backward()
        run.step()
    return path


def of_indexes(logits):
    return F.cross_entropy(logits, TARGETS)


def of_one_hot(logits):
    return -(torch.log_softmax(logits, 1) * torch.eye(4)[TARGETS]).sum(1).mean()


@pytest.fixture
def compared(tmp_path):
    """``compared(order)``: a port that runs its layers in an order."""

    def compare(order):
        return roundoff.compare(
            reference=recorded(tmp_path / "reference", model(), of_indexes),
            candidate=recorded(tmp_path / "port", Port(order), of_one_hot),
        )

    return compare


def test_the_port_is_right(compared):
    assert compared((1, 2, 3)).agrees


@pytest.mark.parametrize(
    ("order", "read", "meant"),
    [
        ((1, 3, 3), "layers.2.weight", "layers.1.weight"),
        ((1, 1, 3), "layers.0.weight", "layers.1.weight"),
        ((3, 3, 3), "layers.2.weight", "layers.0.weight"),
    ],
)
def test_the_line_that_reads_another_layer_is_named(compared, order, read, meant):
    [first, *_] = compared(order).culprits(1)
    number = int(first.line.rpartition(":")[2])
    assert "x = self.dense[number](x)" in linecache.getline(__file__, number)
    assert f"where the reference reads {meant}, which nothing here" in first.evidence
    assert first.evidence.endswith(f"is the reference's {read}")


def test_a_layer_that_is_left_out_is_not_read_again(compared):
    [first, *_] = compared((1, 3)).culprits(1)
    assert "where the reference reads" not in first.evidence
