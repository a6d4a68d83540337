"""What is copied whole, as a state that is kept for later, is as wrong as what it copies."""

from __future__ import annotations

import copy

import torch
from torch import nn

import roundoff


def kept(folder, *, divides):
    """Speeds of an earlier run become a momentum, which is kept and put back."""
    torch.manual_seed(0)
    net = nn.Linear(6, 5)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    speeds = [torch.randn(p.shape) for p in net.parameters()]
    x = torch.randn(4, 6)
    with roundoff.capture(folder, net, keep="tensors") as run:
        for parameter, speed in zip(net.parameters(), speeds, strict=True):
            momentum = -speed.contiguous()
            momentum = momentum / 0.2 if divides else momentum
            optimizer.state[parameter]["momentum_buffer"] = momentum
        state = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(state)
        net(x).square().mean().backward()
        optimizer.step()
        run.step()
    return folder


def test_what_is_left_out_before_a_copy_is_named(tmp_path):
    right = kept(tmp_path / "right", divides=True)
    wrong = kept(tmp_path / "wrong", divides=False)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "missing operator"
    assert "/div" in first.evidence
