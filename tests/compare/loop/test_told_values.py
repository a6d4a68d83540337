"""Scores that a model gives once before its loop, and that the loss reads from a list."""

from __future__ import annotations

import copy

import torch
from torch import nn

import roundoff

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))


class Net(nn.Module):
    def __init__(self, *, is_bounded):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 4)
        self.last = nn.Linear(4, 1)
        self.is_bounded = is_bounded

    def forward(self, x):
        x = self.first(x)
        x = torch.tanh(x) if self.is_bounded else torch.relu(x)
        return self.last(x).flatten()


def trained(folder, *, is_bounded=True, of_others=False):
    net = Net(is_bounded=is_bounded)
    frozen = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    both = nn.ModuleDict({"net": net, "frozen": frozen})
    with roundoff.capture(folder, both, keep="tensors") as run:
        with torch.no_grad():
            scores = frozen(X).tolist()
        told = scores[::-1] if of_others else scores
        gains = net(X) - torch.tensor(told)
        nn.functional.softplus(-gains).mean().backward()
        optimizer.step()
        run.step()
    return folder


def first_of(tmp_path, **wrong):
    right = trained(tmp_path / "right")
    wrong = trained(tmp_path / "wrong", **wrong)
    return roundoff.compare(reference=right, candidate=wrong).culprits(1)[0]


def test_what_made_them_is_named_and_not_the_data(tmp_path):
    first = first_of(tmp_path, is_bounded=False)
    assert "relu" in first.site


def test_those_of_other_samples_are_other_data(tmp_path):
    first = first_of(tmp_path, of_others=True)
    assert first.looks_like == "other data"
