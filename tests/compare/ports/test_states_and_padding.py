"""A reader of padded texts by another hand, each time with one wrong line or parameter.

Two recurrences, the second over what attention picks of the first: a state that begins with
zeros clears no parameter, and none begins with what a layer before has left; scores behind
the end of a text that are nought count, and an order that is turned round.
"""

from __future__ import annotations

import linecache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundoff as ro

WIDTH, UNITS, TIME = 6, 5, 4
LENGTHS = torch.tensor([4, 2, 3, 4, 3])
THERE = torch.arange(TIME) < LENGTHS[:, None]


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(2 * UNITS, UNITS)
        self.new = nn.Linear(2 * UNITS, UNITS)

    def forward(self, x, h):
        g = torch.sigmoid(self.gate(torch.cat([x, h], 1)))
        return g * h + (1 - g) * torch.tanh(self.new(torch.cat([x, g * h], 1)))


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, UNITS)
        self.query, self.key = nn.Linear(UNITS, UNITS), nn.Linear(UNITS, UNITS)
        self.cell = Cell()
        self.head = nn.Linear(UNITS, 4)
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))

    def forward(self, x):
        states = torch.tanh(self.first(x))
        scores = self.query(states) @ self.key(states).mT
        weights = scores.masked_fill(~THERE[:, None], -1e9).softmax(2)
        read = weights @ states
        h = x.new_zeros(len(x), UNITS)
        for t in range(TIME):
            h = torch.where(THERE[:, t, None], self.cell(read[:, t], h), h)
        logits = F.softplus(self.head(h))
        return F.gelu(logits[:, self.order] * torch.arange(1.0, 5)) + 0.3 * logits


class Port(nn.Module):
    def __init__(self, state, fault):
        super().__init__()
        self.fault = fault

        def kept(tensor):
            return nn.Parameter(tensor.clone().contiguous())

        self.enter, self.enter_bias = (
            kept(state["first.weight"].T),
            kept(state["first.bias"]),
        )
        for name in ("query", "key"):
            setattr(self, f"{name}_kernel", kept(state[f"{name}.weight"].T))
            setattr(self, f"{name}_bias", kept(state[f"{name}.bias"]))
        for name in ("gate", "new"):
            weight = state[f"cell.{name}.weight"]
            setattr(self, f"{name}_input", kept(weight[:, :UNITS].T))
            of_state = weight[:, UNITS:]
            is_square = fault == "square" and name == "new"
            setattr(self, f"{name}_state", kept(of_state if is_square else of_state.T))
            setattr(self, f"{name}_bias", kept(state[f"cell.{name}.bias"]))
        self.leave, self.leave_bias = (
            kept(state["head.weight"].T),
            kept(state["head.bias"]),
        )
        order = torch.tensor([2, 0, 3, 1])
        self.register_buffer("places", order.argsort() if fault == "order" else order)

    def forward(self, x):
        states = torch.tanh(x @ self.enter + self.enter_bias).transpose(0, 1)
        queries = states @ self.query_kernel + self.query_bias
        keys = states @ self.key_kernel + self.key_bias
        scores = torch.einsum("qbu,kbu->kbq", queries, keys)
        there = THERE.T[:, :, None].float()
        if self.fault == "padding":
            scores = scores * there
        else:
            scores = scores + (there - 1) * 1e9
        read = torch.einsum("kbq,kbu->qbu", scores.softmax(0), states)
        h = torch.zeros(len(x), UNITS)
        if self.fault == "begins":
            h = states[-1]
        for t in range(TIME):
            now = read[t]
            g = torch.sigmoid(
                now @ self.gate_input + h @ self.gate_state + self.gate_bias
            )
            n = torch.tanh(
                now @ self.new_input + (g * h) @ self.new_state + self.new_bias
            )
            h = torch.where(THERE[:, t, None], g * h + (1 - g) * n, h)
        logits = F.softplus(h @ self.leave + self.leave_bias)
        turned = logits.index_select(1, self.places) * torch.arange(1.0, 5)
        return F.gelu(turned) + 0.3 * logits


def recorded(folder, net):
    draw = torch.Generator().manual_seed(8)
    x = torch.randn(len(LENGTHS), TIME, WIDTH, generator=draw)
    with ro.capture(folder, net):
        net(x).square().mean().backward()
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("reference") / "run", Reference())


def compared(reference, folder, fault):
    port = Port(Reference().state_dict(), fault)
    return ro.compare(reference=reference, candidate=recorded(folder / "port", port))


def test_the_right_port_agrees(reference, tmp_path):
    assert compared(reference, tmp_path, None).agrees


@pytest.mark.parametrize(
    ("fault", "parameter", "words"),
    [
        ("square", "new_state", "it should be transposed"),
        ("order", "places", "says where each element goes"),
    ],
)
def test_the_parameter_is_named(fault, parameter, words, reference, tmp_path):
    first = compared(reference, tmp_path, fault).culprits()[0]
    assert first.name == parameter
    assert words in first.evidence


@pytest.mark.parametrize(
    ("fault", "line", "words"),
    [
        ("begins", "h = states[-1]", "where the reference begins with zeros"),
        ("padding", "scores = scores * there", "masked_fill"),
    ],
)
def test_the_line_is_named(fault, line, words, reference, tmp_path):
    first = compared(reference, tmp_path, fault).culprits()[0]
    file, number = first.line.rsplit(":", 1)
    assert linecache.getline(file, int(number)).strip() == line
    assert words in first.evidence
