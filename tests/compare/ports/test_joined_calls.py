"""Two inputs that one program takes one after the other, and the other one together."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import roundoff

#: How many places count in each of two samples, of the first input and of the second.
COUNTS = (7, 5), (6, 4)


class Apart(nn.Module):
    """Scores of all pairs of rows of two inputs, each of which is encoded by itself."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(6, 8)
        self.query = nn.Linear(8, 8)
        self.leave = nn.Linear(8, 8)

    def encoded(self, x, mask):
        h = torch.tanh(self.enter(x))
        scores = self.query(h) @ h.mT
        shares = scores.masked_fill(~mask[:, None], -1e9).softmax(-1)
        return self.leave(h + shares @ h)

    def forward(self, first, second):
        one = self.encoded(*first)
        other = self.encoded(*second)
        pairs = first[1][:, :, None] & second[1][:, None]
        return (one @ other.mT).masked_fill(~pairs, 0.0).square().mean()


class Together(nn.Module):
    """The same by another hand: both inputs are stacked, filled up to one length."""

    def __init__(self, net, factor):
        super().__init__()
        self.factor = factor
        self.w = nn.ParameterList(
            layer.weight.detach().T.clone()
            for layer in (net.enter, net.query, net.leave)
        )
        self.b = nn.ParameterList(
            layer.bias.detach().clone() for layer in (net.enter, net.query, net.leave)
        )

    def forward(self, first, second):
        longest = first[0].shape[1]
        lacking = longest - second[0].shape[1]
        x = torch.stack([first[0], nn.functional.pad(second[0], (0, 0, 0, lacking))])
        mask = torch.stack([first[1], nn.functional.pad(second[1], (0, lacking))])
        h = 2 * torch.sigmoid(2 * (x @ self.w[0] + self.b[0])) - 1
        query = self.factor * torch.einsum("sbti,io->sbto", h, self.w[1]) + self.b[1]
        scores = torch.einsum("sbto,sbuo->sbtu", query, h)
        each = scores.exp() * mask[:, :, None]
        h = h + torch.einsum("sbtu,sbuo->sbto", each / each.sum(-1, keepdim=True), h)
        h = torch.einsum("sbti,io->sbto", h, self.w[2]) + self.b[2]
        there = mask[:, :, :, None] * 1.0
        pairs = torch.einsum("bto,buo->btu", h[0] * there[0], h[1] * there[1])
        return pairs[:, :, : second[0].shape[1]].square().mean()


def inputs():
    draw = torch.Generator().manual_seed(4)
    made = []
    for counts in zip(*COUNTS, strict=True):
        length = max(counts)
        mask = torch.arange(length) < torch.tensor(counts)[:, None]
        x = torch.randn(2, length, 6, generator=draw) * mask[..., None]
        made.append((x, mask))
    return made


@pytest.fixture
def compared(recorded):
    def compare(factor):
        def run(model):
            model(*inputs()).backward()

        torch.manual_seed(0)
        net = Apart()
        port = Together(net, factor)
        return roundoff.compare(
            reference=recorded(run, net), candidate=recorded(run, port)
        )

    return compare


def test_two_inputs_together_agree(compared):
    found = compared(1.0)
    assert found.agrees, found.answer


def test_the_line_that_is_wrong_for_both_is_named(compared):
    lines, start = inspect.getsourcelines(Together.forward)
    [place] = [n for n, line in enumerate(lines) if "query = self.factor" in line]
    [first, *_] = compared(1.5).culprits()
    assert first.line.endswith(f":{start + place}"), first.line
