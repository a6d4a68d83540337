"""State that one step writes for the next: what the reference alone writes is named."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import roundoff

KEEP = pytest.mark.parametrize("keep", ["tensors", "stats"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.outer = nn.Linear(6, 2)

    def forward(self, x):
        return self.outer(torch.relu(self.norm(self.inner(x))))


def local(server, x):
    """The gradients of a copy of the server, and the statistics of its batch."""
    net = copy.deepcopy(server)
    loss = net(x).square().mean()
    slopes = torch.autograd.grad(loss, list(net.parameters()))
    return slopes, dict(net.named_buffers())


def rounds(folder, keep, *, averages=True):
    """Two rounds in which copies of a server train, and the server takes what they give."""
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(2)
    server = Net()
    with torch.no_grad():
        server.norm.running_mean.copy_(torch.randn(6, generator=draw))
    with roundoff.capture(folder, keep=keep) as run:
        for _ in range(2):
            given = [local(server, torch.randn(8, 4, generator=draw)) for _ in range(2)]
            with torch.no_grad():
                for p, *slopes in zip(
                    server.parameters(), *(slopes for slopes, _ in given), strict=True
                ):
                    p -= 0.1 * (slopes[0] + slopes[1])
                if averages:
                    for name in ("norm.running_mean", "norm.running_var"):
                        both = given[0][1][name] + given[1][1][name]
                        server.get_buffer(name).copy_(both / 2)
            run.step()
    return folder


@KEEP
def test_statistics_that_a_server_keeps_as_they_were(keep, tmp_path):
    right = rounds(tmp_path / "right", keep)
    wrong = rounds(tmp_path / "wrong", keep, averages=False)
    found = roundoff.compare(reference=right, candidate=wrong)
    assert not found.agrees
    first = found.culprits()[0]
    assert first.looks_like == "missing update"
    assert "here that memory stays as it was" in first.evidence
    assert "/copy_" in first.evidence


@KEEP
def test_the_same_rounds_agree(keep, tmp_path):
    folders = [rounds(tmp_path / name, keep) for name in ("one", "other")]
    found = roundoff.compare(reference=folders[0], candidate=folders[1])
    assert found.agrees
    assert not found.culprits()
