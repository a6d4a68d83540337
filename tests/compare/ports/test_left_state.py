"""A recurrent port that begins a batch with another state than the reference."""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import nn

import roundoff

UNITS, BATCH, TIME = 5, 8, 4


class Reference(nn.Module):
    """Goes on from where the last batch has ended, or begins each with zeros."""

    def __init__(self, *, goes_on):
        super().__init__()
        self.layer = nn.GRU(UNITS, UNITS)
        self.head = nn.Linear(UNITS, 1)
        self.state = None
        self.goes_on = goes_on

    def forward(self, x):
        states, last = self.layer(x, self.state)
        self.state = last.detach() if self.goes_on else None
        return self.head(states)


class Unrolled(nn.Module):
    def __init__(self, reference, *, left):
        super().__init__()
        state = reference.state_dict()
        self.w = nn.Parameter(state["layer.weight_ih_l0"].t().clone())
        self.u = nn.Parameter(state["layer.weight_hh_l0"].t().clone())
        self.bw = nn.Parameter(state["layer.bias_ih_l0"].clone())
        self.bu = nn.Parameter(state["layer.bias_hh_l0"].clone())
        self.out = nn.Parameter(state["head.weight"].t().clone())
        self.shift = nn.Parameter(state["head.bias"].clone())
        self.register_buffer("carry", torch.zeros(BATCH, UNITS))
        self.left = left

    def forward(self, x):
        h = self.carry + 0
        states = []
        for now in x:
            r, z, n = (now @ self.w + self.bw).chunk(3, 1)
            ur, uz, un = (h @ self.u + self.bu).chunk(3, 1)
            r, z = torch.sigmoid(r + ur), torch.sigmoid(z + uz)
            n = torch.tanh(n + r * un)
            h = n + z * (h - n)
            states.append(h)
        if self.left is not None:
            self.carry.copy_(states[self.left].detach())
        return torch.stack(states) @ self.out + self.shift


def trained(folder, net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(3)
    with roundoff.capture(folder, net, keep="tensors") as run:
        for _ in range(2):
            x = torch.randn(TIME, BATCH, UNITS, generator=generator)
            optimizer.zero_grad()
            (net(x) - x.mean(2, keepdim=True)).square().mean().backward()
            optimizer.step()
            run.step()
    return folder


def compared(tmp_path, *, goes_on, left):
    torch.manual_seed(0)
    reference = Reference(goes_on=goes_on)
    port = Unrolled(reference, left=left)
    return roundoff.compare(
        reference=trained(tmp_path / "ours", reference),
        candidate=trained(tmp_path / "theirs", port),
    )


@pytest.mark.parametrize(("goes_on", "left"), [(True, -1), (False, None)])
def test_the_same_state_is_right(tmp_path, goes_on, left):
    assert compared(tmp_path, goes_on=goes_on, left=left).agrees


@pytest.mark.parametrize(
    ("goes_on", "left", "words"),
    [
        (False, -1, "with zeros all is right"),
        (True, 0, "with these all is right"),
    ],
)
def test_another_state_is_named_where_it_is_read(tmp_path, goes_on, left, words):
    [first] = compared(tmp_path, goes_on=goes_on, left=left).culprits(1)
    assert first.name == "carry" or "carry" in first.evidence
    assert words in first.evidence
    number = int(first.line.rpartition(":")[2])
    assert "h = self.carry + 0" in linecache.getline(__file__, number)


class Summary(nn.Module):
    """A cell that begins with a summary of what it will read, or with zeros."""

    def __init__(self, *, begins_with_zeros):
        super().__init__()
        self.summary = nn.Linear(UNITS, UNITS)
        self.cell = nn.GRUCell(UNITS, UNITS)
        self.head = nn.Linear(UNITS, 1)
        self.begins_with_zeros = begins_with_zeros

    def forward(self, x):
        if self.begins_with_zeros:
            state = torch.zeros(BATCH, UNITS)
        else:
            state = torch.tanh(self.summary(x.mean(0)))
        states = []
        for now in x:
            state = self.cell(now, state)
            states.append(state)
        return self.head(torch.stack(states))


def test_zeros_where_the_reference_begins_with_what_it_has_computed(tmp_path):
    folders = []
    for begins_with_zeros in (False, True):
        torch.manual_seed(0)
        net = Summary(begins_with_zeros=begins_with_zeros)
        folders.append(trained(tmp_path / str(begins_with_zeros), net))
    found = roundoff.compare(reference=folders[0], candidate=folders[1])
    first = found.culprits()[0]
    assert "begins with zeros where the reference begins with tanh" in first.evidence
    line = linecache.getline(__file__, int(first.line.rpartition(":")[2]))
    assert line.strip() == "state = torch.zeros(BATCH, UNITS)"
