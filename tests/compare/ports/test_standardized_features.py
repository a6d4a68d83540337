"""Features that a port makes of signals of several lengths, all at once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {"a": drawn(6, 5, seed=1)}
SIGNALS = drawn(4, 14, 5, seed=2).relu()
LENGTHS = torch.tensor([14, 9, 6, 11])


def reference(m, signals, lengths):
    x = torch.log(signals + 1e-2)
    normed = torch.zeros_like(x)
    for i, n in enumerate(lengths.tolist()):
        mean, std = x[i, :n].mean(dim=0), x[i, :n].std(dim=0)
        normed[i, :n] = (x[i, :n] - mean) / (std + 1e-4)
    return torch.tanh(F.linear(normed, m.a)).square().mean()


def added(signals):
    return torch.log(signals + 1e-2)


def bounded(signals):
    return torch.log(torch.clamp(signals, min=1e-2))


def port(logarithm=added, count=lambda lengths: lengths - 1):
    """Time first; the variance is a sum divided by a count."""

    def run(m, signals, lengths):
        x = logarithm(signals.transpose(0, 1))
        inside = (torch.arange(len(x))[:, None] < lengths)[:, :, None]
        mean = torch.where(inside, x, 0.0).sum(0) / lengths[:, None]
        offset = torch.where(inside, x - mean, 0.0)
        var = (offset**2).sum(0) / count(lengths)[:, None]
        x = offset / (torch.sqrt(var) + 1e-4)
        return torch.tanh(torch.einsum("tbc,dc->tbd", x, m.a)).square().mean()

    return run


@pytest.fixture
def own(at_fault):
    """``own(port)``: the rows at fault of a port."""
    return lambda port: at_fault(reference, port, LEAVES, SIGNALS, LENGTHS)


def test_the_port_is_right(own):
    assert not own(port())


def test_an_epsilon_that_is_a_lower_bound(own, blamed_text):
    """The input may be what the reference adds it to: the bound does nothing to that."""
    [row] = own(port(logarithm=bounded))
    assert blamed_text(row) == "return torch.log(torch.clamp(signals, min=1e-2))"
    assert "with 0.01 added to it, not as its lower bound" in row.evidence


def test_a_variance_by_the_number_of_frames(own, blamed_text):
    [row] = own(port(count=lambda lengths: lengths))
    assert blamed_text(row).startswith("var = (offset**2).sum(0) /")
    assert "a factor for each index of axis 0" in row.evidence
