"""A small N-BEATS: stacks of trend, season and generic blocks that explain what is left."""

import math

import torch
from torch import nn
from torch.nn import functional as F

BACK, AHEAD, WIDTH, DEGREE, HARMONICS = 20, 6, 14, 3, 3


class TrendBasis(nn.Module):
    def __init__(self):
        super().__init__()
        for name, size in (("backcast", BACK), ("forecast", AHEAD)):
            time = torch.arange(size).float() / size
            basis = torch.stack([time**power for power in range(DEGREE)])
            self.register_buffer(name, basis)

    def forward(self, theta):
        return theta[:, :DEGREE] @ self.backcast, theta[:, DEGREE:] @ self.forecast


class SeasonalityBasis(nn.Module):
    def __init__(self):
        super().__init__()
        frequency = torch.arange(HARMONICS).float()[:, None]
        back = -2 * math.pi * frequency * torch.arange(BACK) / AHEAD
        ahead = 2 * math.pi * frequency * torch.arange(AHEAD) / AHEAD
        self.register_buffer("backcast", torch.cat([back.cos(), back.sin()]))
        self.register_buffer("forecast", torch.cat([ahead.cos(), ahead.sin()]))

    def forward(self, theta):
        n = 2 * HARMONICS
        return theta[:, :n] @ self.backcast, theta[:, n:] @ self.forecast


class GenericBasis(nn.Module):
    def forward(self, theta):
        return theta[:, :BACK], theta[:, BACK:]


class Block(nn.Module):
    def __init__(self, basis, thetas):
        super().__init__()
        sizes = [BACK, WIDTH, WIDTH, WIDTH]
        self.layers = nn.ModuleList(nn.Linear(i, o) for i, o in zip(sizes, sizes[1:]))
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in sizes[1:])
        self.theta = nn.Linear(WIDTH, thetas, bias=False)
        self.basis = basis

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms):
            x = norm(F.relu(layer(x)))
        return self.basis(self.theta(x))


class NBeats(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = []
        for basis, thetas in (
            (TrendBasis(), 2 * DEGREE),
            (SeasonalityBasis(), 4 * HARMONICS),
            (GenericBasis(), BACK + AHEAD),
            (GenericBasis(), BACK + AHEAD),
        ):
            blocks.append(Block(basis, thetas))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x, input_mask):
        scale = x.abs().amax(dim=1, keepdim=True).clamp(min=1e-8)
        residuals = (x / scale).flip(dims=(1,))
        input_mask = input_mask.flip(dims=(1,))
        forecast = x[:, -1:] / scale
        for block in self.blocks:
            backcast, block_forecast = block(residuals)
            residuals = (residuals - backcast) * input_mask
            forecast = forecast + block_forecast
        return forecast * scale


def model():
    torch.manual_seed(640)
    net = NBeats()
    with torch.no_grad():
        for block in net.blocks:
            for norm in block.norms:
                norm.weight.uniform_(0.6, 1.4)
                norm.bias.normal_(0, 0.2)
                norm.running_mean.uniform_(0, 0.4)
                norm.running_var.uniform_(0.5, 1.5)
    return net


def batches():
    generator = torch.Generator().manual_seed(641)
    time = torch.arange(26)
    slope = torch.randn(16, 1, generator=generator) * 0.2
    wave = torch.sin(time * (0.5 + torch.rand(16, 1, generator=generator)))
    series = 4 + slope * time + wave + 0.2 * torch.randn(16, 26, generator=generator)
    mask = torch.ones(16, 20)
    mask[1, :4] = mask[3, :7] = 0
    known = torch.ones(16, 6)
    known[2, 4:] = 0
    return [
        {
            "insample": series[:, :20] * mask,
            "mask": mask,
            "target": series[:, 20:],
            "known": known,
        }
    ]


def forward(net, batch):
    return net(batch["insample"], batch["mask"])


def loss(output, batch):
    """Symmetric percentages of the known targets."""
    target, known = batch["target"], batch["known"]
    size = output.abs() + target.abs()
    error = torch.where(size == 0, 0.0, (output - target).abs() / size)
    return 200 * torch.mean(error * known)


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=1e-3, eps=1e-7)
