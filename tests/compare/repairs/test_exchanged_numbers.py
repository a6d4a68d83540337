"""Two calls of a port that take each other's number."""

from __future__ import annotations

import linecache

import pytest
import torch
import torch.nn.functional as F


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {"a": drawn(6, 5, seed=1), "b": drawn(4, 6, seed=2)}
X = drawn(8, 5, seed=3)
TARGETS = (drawn(8, 4, seed=4) > 0.6).float()


def logits(m, x):
    return F.linear(torch.tanh(F.linear(x, m.a)), m.b)


def focal(m, x, targets):
    """The loss of dense detectors: one formula for both classes."""
    z = logits(m, x)
    p = torch.sigmoid(z)
    p_t = p * targets + (1 - p) * (1 - targets)
    weight = 0.25 * targets + 0.75 * (1 - targets)
    ce = F.binary_cross_entropy_with_logits(z, targets, reduction="none")
    return (weight * (1 - p_t) ** 2 * ce).sum()


def of_each_class(positives, negatives):
    def run(m, x, targets):
        z = logits(m, x)
        positive = -positives * (1.0 - torch.sigmoid(z)) ** 2 * F.logsigmoid(z)
        negative = -negatives * torch.sigmoid(z) ** 2 * F.logsigmoid(-z)
        return (targets * positive + (1.0 - targets) * negative).sum()

    return run


@pytest.fixture
def own(at_fault):
    """``own(port)``: the rows at fault of a port."""
    return lambda port: at_fault(focal, port, LEAVES, X, TARGETS)


def test_weights_of_two_classes_stand_in_for_each_other(own):
    [row] = own(of_each_class(positives=0.75, negatives=0.25))
    number = int(row.blamed_line.rpartition(":")[2])
    assert "positive = -positives" in linecache.getline(__file__, number)
    assert "with the two exchanged all results are right" in row.evidence


def test_one_of_two_weights_is_wrong_alone(own):
    [row] = own(of_each_class(positives=0.25, negatives=0.25))
    number = int(row.blamed_line.rpartition(":")[2])
    assert "negative = -negatives" in linecache.getline(__file__, number)
    assert "the two exchanged" not in row.evidence


def test_right_weights_are_no_finding(own):
    assert not own(of_each_class(positives=0.25, negatives=0.75))
