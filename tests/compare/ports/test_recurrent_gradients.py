"""Gradients that a port of a recurrent layer does not hand on from step to step."""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import nn

import roundoff

WORDS, UNITS = 9, 6
TEXT = torch.randint(0, WORDS, (7, 3), generator=torch.Generator().manual_seed(1))


class Reference(nn.Module):
    """Its layer is one call, of a kernel that knows no fp64."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, UNITS)
        self.layer = nn.LSTM(UNITS, UNITS)
        self.last = nn.Linear(UNITS, WORDS)
        self.last.weight = self.words.weight

    def forward(self, text):
        return self.last(self.layer(self.words(text))[0])


class Unrolled(nn.Module):
    def __init__(self, reference, fault):
        super().__init__()
        state = reference.state_dict()
        self.table = nn.Parameter(state["words.weight"].clone())
        self.into = nn.Parameter(state["layer.weight_ih_l0"].t().clone())
        self.again = nn.Parameter(state["layer.weight_hh_l0"].t().clone())
        both = state["layer.bias_ih_l0"] + state["layer.bias_hh_l0"]
        self.shift = nn.Parameter(both.clone())
        self.offset = nn.Parameter(state["last.bias"].clone())
        self.fault = fault

    def forward(self, text):
        h = torch.zeros(text.shape[1], UNITS)
        c = torch.zeros(text.shape[1], UNITS)
        said: list[torch.Tensor] = []
        for words in text:
            gates = self.table[words] @ self.into + h @ self.again + self.shift
            i, f, g, o = gates.chunk(4, 1)
            if self.fault == "cell":
                c = c.detach()
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            said.append(h)
        table: torch.Tensor = self.table
        if self.fault == "table":
            table = table.detach()
        return torch.stack(said) @ table.t() + self.offset


def trained(folder, net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    with roundoff.capture(folder, net, keep="tensors") as run:
        scores = net(TEXT[:-1]).flatten(0, 1)
        nn.functional.cross_entropy(scores, TEXT[1:].flatten()).backward()
        optimizer.step()
        run.step()
    return folder


@pytest.fixture
def compared(tmp_path):
    """``compared(fault)``: the comparison of the layer with one that is written out."""

    def compare(fault):
        torch.manual_seed(0)
        reference = Reference()
        port = Unrolled(reference, fault)
        return roundoff.compare(
            reference=trained(tmp_path / "ours", reference),
            candidate=trained(tmp_path / "theirs", port),
        )

    return compare


def test_a_layer_that_is_written_out_is_right(compared):
    assert compared("").agrees


@pytest.mark.parametrize(
    ("fault", "line"),
    [("cell", "c = c.detach()"), ("table", "table = table.detach()")],
)
def test_a_cut_is_named_where_the_reference_is_one_kernel(compared, fault, line):
    [first] = compared(fault).culprits(1)
    number = int(first.line.rpartition(":")[2])
    assert linecache.getline(__file__, number).strip() == line
    assert first.looks_like == "gradient cut"
