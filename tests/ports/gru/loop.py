"""A cell of torch in a loop, other names."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F


class Looped(nn.Module):
    def __init__(self):
        super().__init__()
        self.unit = nn.GRUCell(8, 10)
        self.ln = nn.LayerNorm(10)
        self.out = nn.Linear(10, 5)

    def forward(self, x):
        h = None
        for t in range(x.size(1)):
            h = self.unit(x[:, t, :], h)
        h = self.ln(h)
        h = F.silu(h)
        return self.out(h)


def load(net, w):
    for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        getattr(net.unit, part).copy_(w[f"gru.{part}_l0"])
    for kind in ("weight", "bias"):
        getattr(net.ln, kind).copy_(w[f"norm.{kind}"])
        getattr(net.out, kind).copy_(w[f"head.{kind}"])


def model():
    net = Looped()
    with torch.no_grad():
        load(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


def forward(net, batch):
    return net(batch["x"])
