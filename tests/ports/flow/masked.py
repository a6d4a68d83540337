"""Couplings by binary masks over all features; torch's layers."""

from pathlib import Path

import torch
import torch.nn as nn
from torch.distributions import Normal


class MaskedAffine(nn.Module):
    """The net sees all features, of which the mask leaves half."""

    def __init__(self, mask, width):
        super().__init__()
        self.register_buffer("mask", mask)
        size = len(mask)
        self.fc1 = nn.Linear(size // 2, width)
        self.fc2 = nn.Linear(width, width)
        self.fc3 = nn.Linear(width, size)
        self.act = nn.SiLU()

    def forward(self, x):
        seen = self.mask.bool()
        h = self.act(self.fc1(x[:, seen]))
        h = self.fc3(self.act(self.fc2(h)))
        half = h.size(1) // 2
        s, t = torch.split(h, half, dim=1)
        s = 2 * (s / 2).tanh()
        full_s = torch.zeros_like(x).masked_scatter(~seen.expand_as(x), s)
        full_t = torch.zeros_like(x).masked_scatter(~seen.expand_as(x), t)
        x = self.mask * x + (1 - self.mask) * (x * full_s.exp() + full_t)
        return x, full_s.sum(dim=1)


class Affine(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, size))
        self.logs = nn.Parameter(torch.zeros(1, size))

    def forward(self, x):
        x = (x + self.bias) * torch.exp(self.logs)
        return x, torch.sum(self.logs)


class InvLinear(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("p", torch.eye(size))
        self.register_buffer("sign_s", torch.ones(size))
        self.register_buffer("eye", torch.eye(size))
        self.register_buffer("l_mask", torch.ones(size, size).tril(-1))
        self.l = nn.Parameter(torch.zeros(size, size))
        self.u = nn.Parameter(torch.zeros(size, size))
        self.log_s = nn.Parameter(torch.zeros(size))

    def forward(self, x):
        lower = self.l * self.l_mask + self.eye
        u = self.u * self.l_mask.t() + torch.diag(self.sign_s * torch.exp(self.log_s))
        w = torch.matmul(self.p, torch.matmul(lower, u))
        return torch.matmul(x, w.t()), self.log_s.sum()


class Glow(nn.Sequential):
    def __init__(self, size=8, width=14):
        first = (torch.arange(size) < size // 2).to(torch.get_default_dtype())
        layers = []
        for k in range(3):
            mask = first if k % 2 == 0 else 1 - first
            layers.extend([Affine(size), InvLinear(size), MaskedAffine(mask, width)])
        super().__init__(*layers)

    def forward(self, x):
        ldj = x.new_zeros(x.size(0))
        for layer in self:
            x, part = layer(x)
            ldj += part
        return x, ldj


def model():
    w = torch.load(Path(__file__).with_name("weights.pt"))
    net = Glow()
    state = net.state_dict()
    for k in range(0, 9, 3):
        state[f"{k}.bias"] = w[f"layers.{k}.shift"][None]
        state[f"{k}.logs"] = w[f"layers.{k}.log_scale"][None]
        a, b = f"{k + 1}.", f"layers.{k + 1}."
        for ours, theirs in (
            ("p", "order"),
            ("sign_s", "sign"),
            ("l", "lower"),
            ("u", "upper"),
            ("log_s", "log_s"),
        ):
            state[a + ours] = w[b + theirs]
        for ours, number in (("fc1", 0), ("fc2", 2), ("fc3", 4)):
            for kind in ("weight", "bias"):
                state[f"{k + 2}.{ours}.{kind}"] = w[
                    f"layers.{k + 2}.net.{number}.{kind}"
                ]
    net.load_state_dict(state)
    return net


def forward(net, batch):
    return net(batch["x"])


def loss(output, batch):
    z, ldj = output
    one = torch.ones((), dtype=z.dtype)
    prior = Normal(0 * one, one, validate_args=False).log_prob(z).sum(dim=1)
    bits = (prior + ldj) / torch.log(2 * one)
    return -torch.mean(bits) / z.size(1)


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.9, 0.98), foreach=False)
