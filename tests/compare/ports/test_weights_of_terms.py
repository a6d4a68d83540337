"""Terms of a loss whose weight lacks a factor, or what they are divided by."""

from __future__ import annotations

import linecache
import math

import pytest
import torch
import torch.nn.functional as F

LEAVES = {
    "a": torch.randn(6, 5, generator=torch.Generator().manual_seed(1)),
    "b": torch.randn(3, 6, generator=torch.Generator().manual_seed(2)),
}
X = torch.randn(8, 5, generator=torch.Generator().manual_seed(3))
Y = torch.randn(8, 3, generator=torch.Generator().manual_seed(4))


def reference(m, x, y):
    found = F.linear(torch.tanh(F.linear(x, m.a)), m.b)
    nats = 0.5 * (found.exp() - found - 1)
    bits = nats.mean(1) / math.log(2)
    return ((found - y).square().mean(1) + bits / 10).mean()


def port(*, is_in_bits):
    def run(m, x, y):
        found = torch.matmul(torch.tanh(torch.matmul(x, m.a.t())), m.b.t())
        simple = (y - found).pow(2).mean(1)
        excess = torch.exp(found) - 1 - found
        nats = 0.5 * torch.mean(excess, 1)
        bound = nats / math.log(2) if is_in_bits else nats
        return torch.mean(simple + bound * 0.1)

    return run


@pytest.mark.parametrize("is_in_bits", [True, False])
def test_what_a_term_is_divided_by_is_left_out(at_fault, is_in_bits):
    wrong = at_fault(reference, port(is_in_bits=is_in_bits), LEAVES, X, Y)
    assert bool(wrong) != is_in_bits
    for row in wrong[:1]:
        line = linecache.getline(__file__, int(row.blamed_line.rpartition(":")[2]))
        assert line.strip() == "return torch.mean(simple + bound * 0.1)"
        assert "followed by a division by 0.693147" in row.evidence
