"""What a step makes and does not read itself: states that are left, answers for later steps."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import roundoff

WIDTH, UNITS = 4, 3
LENGTHS = torch.tensor([4, 2, 3])


class Reader(nn.Module):
    """Both directions over texts of several lengths, packed or one by one."""

    def __init__(self, *, packed):
        super().__init__()
        torch.manual_seed(2)
        self.gru = nn.GRU(WIDTH, UNITS, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * UNITS, 3)
        self.packed = packed

    def forward(self, x, lengths):
        if self.packed:
            texts = pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=False
            )
            states, _ = pad_packed_sequence(self.gru(texts)[0], batch_first=True)
        else:
            each = [
                self.gru(text[:size])[0]
                for text, size in zip(x, lengths.tolist(), strict=True)
            ]
            states = pad_sequence(each, batch_first=True)
        return self.head(states)


def read(folder, *, packed):
    net = Reader(packed=packed)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(5)
    there = torch.arange(4) < LENGTHS[:, None]
    with roundoff.capture(folder, net) as run:
        for _ in range(2):
            x = torch.randn(3, 4, WIDTH, generator=draw)
            optimizer.zero_grad()
            net(x, LENGTHS)[there].square().mean().backward()
            optimizer.step()
            run.step()
    return folder


def test_texts_that_are_read_one_by_one_agree(tmp_path):
    found = roundoff.compare(
        reference=read(tmp_path / "packed", packed=True),
        candidate=read(tmp_path / "apart", packed=False),
    )
    assert found.agrees, found.answer
    assert not found.culprits()


def distilled(folder, *, masked):
    """The answers of a teacher for all samples, of which each step reads two."""
    torch.manual_seed(7)
    teacher, net = nn.Linear(8, 8), nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(6)
    samples = torch.randn(4, 6, 8, generator=draw)
    sizes = torch.tensor([6, 6, 3, 5])
    with roundoff.capture(folder, net) as run:
        with torch.no_grad():
            scores = torch.tanh(teacher(samples)) @ samples.transpose(1, 2)
            every = torch.ones(6, 6, dtype=torch.bool).tril()
            there = (torch.arange(6) < sizes[:, None])[:, None]
            seen = every & there if masked else every.expand(4, -1, -1)
            seen = seen | torch.eye(6, dtype=torch.bool)
            weights = scores.masked_fill(~seen, -torch.inf).softmax(2)
            known = (weights @ samples)[:, :, :4].mean(1)
        for step in range(2):
            rows = slice(2 * step, 2 * step + 2)
            optimizer.zero_grad()
            (net(samples[rows].mean(1)) - known[rows]).square().mean().backward()
            optimizer.step()
            run.step()
    return folder


def test_answers_that_a_later_step_reads_are_results_of_the_first(tmp_path):
    found = roundoff.compare(
        reference=distilled(tmp_path / "right", masked=True),
        candidate=distilled(tmp_path / "wrong", masked=False),
    )
    first = found.culprits()[0]
    assert first.step == 0
    assert "bitwise" in first.evidence + first.operator
