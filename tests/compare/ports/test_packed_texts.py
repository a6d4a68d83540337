"""A reader of texts of several lengths, packed in the reference and masked in the port.

What stands behind packed sequences runs again in trials as well: parameters that the port
packs otherwise, a sign, a gradient that is cut, and rows of padding that learn.
"""

from __future__ import annotations

import linecache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import roundoff as ro

WORDS, WIDTH, UNITS, CLASSES = 30, 8, 6, 5
LENGTHS = torch.tensor([7, 3, 6, 4, 7, 5])
IDS = (1 + torch.arange(42).view(6, 7) * 11 % 29) * (torch.arange(7) < LENGTHS[:, None])
TARGETS = torch.tensor([2, 0, 3, 4, 1, 0])


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.rnn = nn.GRU(WIDTH, UNITS, batch_first=True)
        self.word = nn.Parameter(torch.randn(UNITS))
        self.text = nn.Parameter(torch.randn(UNITS))
        self.gate = nn.Linear(UNITS, UNITS)
        self.head = nn.Linear(UNITS, CLASSES)

    def embed(self, ids):
        return self.table(ids)

    def forward(self, ids, targets):
        is_word = ids > 0
        packed = pack_padded_sequence(
            self.embed(ids), is_word.sum(1), batch_first=True, enforce_sorted=False
        )
        states, _ = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        scores = states @ self.word + (states[:, 0] @ self.text)[:, None]
        shares = torch.tanh(scores).masked_fill(~is_word, -1e9).softmax(1)
        seen = torch.bmm(shares[:, None], states)[:, 0]
        share = torch.sigmoid(self.gate(seen))
        seen = share * seen + (1 - share) * states[:, 0]
        return F.cross_entropy(self.head(seen), targets)


class Port(nn.Module):
    """The table has no row of padding; ``fault`` is what is wrong."""

    def __init__(self, reference, fault=""):
        super().__init__()
        self.fault = fault
        rows = reference.table.weight.detach()
        vectors = [reference.word, reference.text]
        if fault == "vectors":
            vectors.reverse()
        sign = 1 if fault == "sign" else -1
        tensors = {
            "rows": rows if fault == "padding" else rows[1:],
            "kernel": reference.rnn.weight_ih_l0.t(),
            "recurrent": reference.rnn.weight_hh_l0.t(),
            "kernel_bias": reference.rnn.bias_ih_l0,
            "recurrent_bias": reference.rnn.bias_hh_l0,
            "vectors": torch.cat(vectors),
            "carry": -reference.gate.weight.t(),
            "carry_bias": sign * reference.gate.bias,
            "out": reference.head.weight.t(),
            "out_bias": reference.head.bias,
        }
        for name, tensor in tensors.items():
            content = tensor.detach().clone().contiguous()
            self.register_parameter(name, nn.Parameter(content))

    def read(self, x, is_word):
        state = x.new_zeros(len(x), UNITS)
        states = []
        for step in range(x.shape[1]):
            given = x[:, step] @ self.kernel + self.kernel_bias
            kept = state @ self.recurrent + self.recurrent_bias
            reset, update, new = given.chunk(3, 1)
            reset_too, update_too, new_too = kept.chunk(3, 1)
            update = torch.sigmoid(update + update_too)
            new = torch.tanh(new + torch.sigmoid(reset + reset_too) * new_too)
            state = torch.where(
                is_word[:, step, None], new + update * (state - new), state
            )
            states.append(state * is_word[:, step, None])
        return torch.stack(states, 1)

    def forward(self, ids, targets):
        is_word = ids != 0
        rows = self.rows
        if self.fault != "padding":
            rows = F.pad(rows, (0, 0, 1, 0))
        looked_up = rows.index_select(0, ids.flatten())
        x = looked_up.view(*ids.shape, WIDTH)
        if self.fault == "padding":
            x = torch.cat([x[:, :1] + 0.5 * x.mean(1, keepdim=True), x[:, 1:]], 1)
        states = self.read(x, is_word)
        word, text = self.vectors.split(UNITS)
        scores = (states * word).sum(-1) + (states[:, :1] * text).sum(-1)
        scores = torch.tanh(scores)
        if self.fault == "detach":
            scores = scores.detach()
        weights = torch.exp(scores) * is_word
        shares = weights / weights.sum(1, keepdim=True)
        seen = torch.einsum("nt,ntu->nu", shares, states)
        carry = torch.sigmoid(seen @ self.carry + self.carry_bias)
        seen = carry * states[:, 0] + (1 - carry) * seen
        logits = seen @ self.out + self.out_bias
        chosen = logits.gather(1, targets[:, None])[:, 0]
        return (logits.logsumexp(1) - chosen).mean()


class WithTexts(Reference):
    """What is behind a text counts in its first word, and stands still."""

    def embed(self, ids):
        x = self.table(ids)
        return torch.cat([x[:, :1] + 0.5 * x.mean(1, keepdim=True), x[:, 1:]], 1)


@pytest.fixture
def compared(tmp_path):
    """``compared(reference, port)``: a step of each, with tensors, and the comparison."""

    def compare(reference, port, x=IDS):
        folders = {"reference": tmp_path / "ours", "candidate": tmp_path / "theirs"}
        for folder, module in zip(folders.values(), (reference, port), strict=True):
            with ro.capture(folder, module, keep="tensors"):
                module(x, TARGETS).backward()
        return ro.compare(**{side: str(path) for side, path in folders.items()})

    return compare


def test_the_right_port_agrees(compared):
    comparison = compared(Reference(), Port(Reference()))
    assert comparison.agrees, comparison.answer


@pytest.mark.parametrize(
    ("fault", "parameter", "words"),
    [
        ("vectors", "vectors", "the parts of vectors stand in another order"),
        ("sign", "carry_bias", "carry_bias has the other sign than"),
    ],
)
def test_the_parameter_is_named(fault, parameter, words, compared):
    first = compared(Reference(), Port(Reference(), fault)).culprits()[0]
    assert first.name == parameter
    assert words in first.evidence


def test_a_gradient_that_is_cut_behind_a_table_without_its_padding(compared):
    first = compared(Reference(), Port(Reference(), "detach")).culprits()[0]
    line = linecache.getline(__file__, int(first.line.rpartition(":")[2]))
    assert line.strip() == "scores = scores.detach()"
    assert first.looks_like == "gradient cut"


def test_a_row_of_padding_that_learns(compared):
    first = compared(WithTexts(), Port(Reference(), "padding")).culprits()[0]
    line = linecache.getline(__file__, int(first.line.rpartition(":")[2]))
    assert line.strip() == "looked_up = rows.index_select(0, ids.flatten())"
    assert "rows 0 of rows learn here, and stand still" in first.evidence


class TwoHeads(nn.Module):
    """A head of one number, whose bias begins with nought."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.feature = nn.Linear(6, 8)
        self.density = nn.Linear(6, 1)
        nn.init.zeros_(self.density.bias)

    def forward(self, x, targets):
        feature = torch.relu(self.feature(x)) * torch.sigmoid(self.density(x))
        return F.cross_entropy(feature, targets)


class OneHead(nn.Module):
    """Both in one matrix and one bias, which ends in nought and learns there too."""

    def __init__(self, heads):
        super().__init__()
        kernels = torch.cat([heads.feature.weight, heads.density.weight])
        self.kernel = nn.Parameter(kernels.detach().t().contiguous())
        biases = torch.cat([heads.feature.bias, heads.density.bias])
        self.bias = nn.Parameter(biases.detach().clone())

    def forward(self, x, targets):
        feature, density = (x @ self.kernel + self.bias).split([8, 1], 1)
        feature = feature.clamp(min=0) / (1 + torch.exp(-density))
        chosen = feature.gather(1, targets[:, None])[:, 0]
        return (feature.logsumexp(1) - chosen).mean()


def test_a_bias_that_begins_with_nought_is_no_padding(compared):
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(6))
    comparison = compared(TwoHeads(), OneHead(TwoHeads()), x)
    assert comparison.agrees, comparison.answer
