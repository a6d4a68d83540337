"""A normalizing flow over rows of a table: activation norm, a mix by LU, couplings."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class ActNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(dim))
        self.log_scale = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum()


class Mix(nn.Module):
    def __init__(self, dim):
        super().__init__()
        q = torch.linalg.qr(torch.randn(dim, dim))[0]
        order, lower, upper = torch.linalg.lu(q)
        diagonal = upper.diagonal()
        self.register_buffer("order", order)
        self.register_buffer("sign", diagonal.sign())
        self.lower = nn.Parameter(lower)
        self.upper = nn.Parameter(upper.triu(1))
        self.log_s = nn.Parameter(diagonal.abs().log())

    def forward(self, x):
        lower = self.lower.tril(-1) + torch.eye(len(self.lower), dtype=x.dtype)
        upper = self.upper.triu(1) + torch.diag(self.sign * self.log_s.exp())
        weight = self.order @ lower @ upper
        return F.linear(x, weight), self.log_s.sum()


class Coupling(nn.Module):
    def __init__(self, dim, hidden, flip):
        super().__init__()
        self.flip = flip
        self.net = nn.Sequential(
            nn.Linear(dim // 2, hidden),
            nn.SiLU(),
            nn.Linear(hidden, hidden),
            nn.SiLU(),
            nn.Linear(hidden, dim),
        )

    def forward(self, x):
        a, b = x.chunk(2, -1)
        if self.flip:
            a, b = b, a
        log_s, t = self.net(a).chunk(2, -1)
        log_s = 2 * torch.tanh(log_s / 2)
        b = b * log_s.exp() + t
        y = torch.cat([b, a] if self.flip else [a, b], -1)
        return y, log_s.sum(-1)


class Flow(nn.Module):
    def __init__(self, dim=8, hidden=14, depth=3):
        super().__init__()
        layers = []
        for i in range(depth):
            layers += [ActNorm(dim), Mix(dim), Coupling(dim, hidden, i % 2 == 1)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        log_det = torch.zeros(len(x), dtype=x.dtype)
        for layer in self.layers:
            x, change = layer(x)
            log_det = log_det + change
        return x, log_det


def model():
    torch.manual_seed(200)
    net = Flow()
    with torch.no_grad():
        for layer in net.layers:
            if isinstance(layer, ActNorm):
                layer.shift.normal_(0, 0.3)
                layer.log_scale.normal_(0, 0.2)
            elif isinstance(layer, Mix):
                layer.log_s.add_(torch.randn(8) * 0.1)
    return net


def batches():
    generator = torch.Generator().manual_seed(201)
    return [{"x": torch.randn(6, 8, generator=generator) * 1.3}]


def forward(net, batch):
    return net(batch["x"])


def loss(output, batch):
    z, log_det = output
    log_p = -0.5 * (z**2).sum(-1) - 0.5 * z.shape[-1] * math.log(2 * math.pi)
    return -(log_p + log_det).mean() / (z.shape[-1] * math.log(2))


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=2e-3, betas=(0.9, 0.98))
