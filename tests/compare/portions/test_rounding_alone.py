"""Values that are rounding alone in one step, and what a later step keeps of them."""

from __future__ import annotations

import itertools

import torch
from torch import nn

import roundoff


class Pooled(nn.Module):
    """Pooled by attention: the bias of its scores has no gradient in exact arithmetic."""

    def __init__(self):
        super().__init__()
        self.look = nn.Linear(8, 1)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        scores = self.look(x).softmax(1)
        return self.head((scores * x).sum(1))


def trained(recorded, parts, momentum=0.9):
    """Record two steps of SGD with clipped gradients, each in so many parts."""
    torch.manual_seed(0)
    model = Pooled()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
    inputs = torch.randn(2, 8, 6, 8)
    labels = torch.randint(3, (2, 8))
    steps = itertools.count()

    def work(model):
        step = next(steps)
        optimizer.zero_grad()
        halves = inputs[step].chunk(parts[step]), labels[step].chunk(parts[step])
        for x, y in zip(*halves, strict=True):
            (nn.functional.cross_entropy(model(x), y) / parts[step]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()

    return recorded(work, model, steps=2)


def test_the_moment_of_a_gradient_without_value_says_nothing(recorded):
    whole = trained(recorded, (1, 1))
    halves = trained(recorded, (2, 1))
    compared = roundoff.compare(reference=whole, candidate=halves)
    assert compared.agrees, compared.answer


def test_another_momentum_is_found_beside_it(recorded):
    whole = trained(recorded, (1, 1))
    halves = trained(recorded, (2, 1), momentum=0.8)
    compared = roundoff.compare(reference=whole, candidate=halves)
    [first, *_] = compared.culprits(3)
    assert "momentum" in first.evidence
