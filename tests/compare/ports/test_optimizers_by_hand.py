"""An optimizer and a clip that a script writes itself, against those of the library."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundoff

RATE, BETAS, EPS, LIMIT = 0.05, (0.9, 0.99), 1e-5, 0.1


class OwnAdam(torch.optim.Optimizer):
    def __init__(self, params, eps=EPS):
        super().__init__(params, {"eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                first, second, count = self.state[p].get("moments", (0.0, 0.0, 0))
                first = BETAS[0] * first + (1 - BETAS[0]) * p.grad
                second = BETAS[1] * second + (1 - BETAS[1]) * p.grad.square()
                count += 1
                self.state[p]["moments"] = first, second, count
                size = torch.sqrt(second / (1 - BETAS[1] ** count)) + group["eps"]
                p.sub_(RATE / (1 - BETAS[0] ** count) * first / size)


def clipped_by_hand(net, limit=LIMIT):
    norm = sum(p.grad.square().sum() for p in net.parameters()).sqrt()
    for p in net.parameters():
        p.grad *= min(1.0, limit / (norm.item() + 1e-6))


def trained(folder, net, optimizer, clip):
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(16, 6, generator=draw), torch.randn(16, 2, generator=draw)
    with roundoff.capture(folder, net) as run:
        for _ in range(2):
            optimizer.zero_grad()
            (net(x) - y).square().mean().backward()
            clip(net)
            optimizer.step()
            run.step()
    return folder


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture(scope="module")
def of_library(tmp_path_factory):
    net = small()
    adam = torch.optim.Adam(net.parameters(), RATE, BETAS, EPS)
    return trained(
        tmp_path_factory.mktemp("library") / "run",
        net,
        adam,
        lambda net: nn.utils.clip_grad_norm_(net.parameters(), LIMIT),
    )


def test_both_by_hand_agree(of_library, tmp_path):
    net = small()
    own = trained(tmp_path / "own", net, OwnAdam(net.parameters()), clipped_by_hand)
    found = roundoff.compare(reference=of_library, candidate=own)
    assert found.agrees, found.answer
    assert not found.culprits()


@pytest.mark.parametrize(
    ("eps", "clip"),
    [(EPS, lambda net: clipped_by_hand(net, 1.5 * LIMIT)), (1e-2, clipped_by_hand)],
    ids=["limit", "epsilon"],
)
def test_another_number_does_not(of_library, eps, clip, tmp_path):
    net = small()
    own = trained(tmp_path / "own", net, OwnAdam(net.parameters(), eps), clip)
    assert not roundoff.compare(reference=of_library, candidate=own).agrees


def test_no_clip_is_named(of_library, tmp_path):
    net = small()
    adam = torch.optim.Adam(net.parameters(), RATE, BETAS, EPS)
    free = trained(tmp_path / "free", net, adam, lambda net: None)
    first = roundoff.compare(reference=of_library, candidate=free).culprits()[0]
    assert first.looks_like == "other loop"
    assert "the gradients are not clipped" in first.evidence
