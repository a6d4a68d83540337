"""An LSTM written out over time: nothing inside of its steps is the reference's kernel's.

What is wrong there shows at the end alone, whatever function of the port has done it.
"""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import nn

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port

WORDS, UNKNOWN, UNITS = 12, 1, 6
TEXT = torch.randint(0, WORDS + 4, (4, 9), generator=torch.Generator().manual_seed(1))


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, UNITS)
        self.layer = nn.LSTM(UNITS, UNITS, batch_first=True)
        self.last = nn.Linear(UNITS, WORDS)

    def forward(self, text):
        text = text.masked_fill(text >= WORDS, UNKNOWN)
        return self.last(self.layer(self.words(text))[0])


def gates(packed):
    """i, f, g, o -> i, f, o, g along the first axis."""
    i, f, g, o = packed.chunk(4)
    return torch.cat([i, f, o, g])


def part(sums, number):
    return sums[:, number * UNITS : (number + 1) * UNITS]


class Unrolled(nn.Module):
    def __init__(self, reference, fault):
        super().__init__()
        state = reference.state_dict()
        self.fault = fault
        self.table = nn.Parameter(state["words.weight"].clone())
        self.into = nn.Parameter(gates(state["layer.weight_ih_l0"]).t().clone())
        self.again = nn.Parameter(gates(state["layer.weight_hh_l0"]).t().clone())
        both = [gates(state[f"layer.bias_{name}_l0"]) for name in ("ih", "hh")]
        if fault == "bias":
            both[1] = torch.zeros_like(both[1])
        self.shifts = nn.Parameter(torch.stack(both))
        self.kernel = nn.Parameter(state["last.weight"].t().clone())
        self.offset = nn.Parameter(state["last.bias"].clone())

    def sigmoid(self, x):
        if self.fault == "hard":
            return torch.clamp(0.2 * x + 0.5, 0.0, 1.0)
        return 1 / (1 + torch.exp(-x))

    def known(self, text):
        text = text.t()
        if self.fault == "words":
            return text.clamp(max=WORDS - 1)
        return torch.where(text < WORDS, text, UNKNOWN)

    def forward(self, text):
        h = torch.zeros(len(text), UNITS)
        c = torch.zeros(len(text), UNITS)
        said = []
        shift = self.shifts.sum(0)
        for words in self.known(text):
            sums = torch.mm(self.table[words], self.into) + torch.mm(h, self.again)
            sums = sums + shift
            last, first = (2, 3) if self.fault == "gates" else (3, 2)
            i = self.sigmoid(part(sums, 0))
            f = self.sigmoid(part(sums, 1))
            o = self.sigmoid(part(sums, first))
            g = torch.tanh(part(sums, last))
            c = f * c + i * g
            h = o * torch.tanh(c)
            said.append(h)
        return torch.matmul(torch.stack(said, 1), self.kernel) + self.offset


def named(step_of, fault):
    torch.manual_seed(0)
    reference = Reference()
    ours = step_of(reference, TEXT)
    theirs = step_of(Unrolled(reference, fault), TEXT)
    rows = compare_port(Sides(ours, theirs), EarlierSteps())
    return [row for row in rows if row.cause == "own"]


def test_the_layer_written_out_is_right(step_of):
    assert not named(step_of, "")


def test_one_of_two_biases_in_one_parameter_that_was_not_loaded(step_of):
    [row] = named(step_of, "bias")
    assert row.name == "shifts"
    assert "row 1 of shifts is zero; the reference has layer.bias_hh_l0" in row.evidence


def test_gates_that_are_cut_in_another_order_than_a_parameter_has_them(step_of):
    [row] = named(step_of, "gates")
    assert row.name in ("into", "again", "shifts")
    assert "shifts, into, again stand in another order" in row.evidence
    number = int(row.blamed_line.rpartition(":")[2])
    assert "part(sums, first)" in linecache.getline(__file__, number)


@pytest.mark.parametrize(
    ("fault", "text", "words"),
    [
        ("hard", "torch.clamp(0.2 * x + 0.5", "as sigmoid"),
        ("words", "text.clamp(max=WORDS - 1)", "all that follows is right"),
    ],
)
def test_the_line_is_named(step_of, fault, text, words):
    [row] = named(step_of, fault)
    number = int(row.blamed_line.rpartition(":")[2])
    assert text in linecache.getline(__file__, number)
    assert words in row.evidence
