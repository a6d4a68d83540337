"""A Fourier neural operator: spectral convolutions of a field on a periodic grid."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, MODES, DEPTH = 6, 3, 2


class SpectralConv(nn.Module):
    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        scale = 1 / width
        self.low = nn.Parameter(scale * torch.rand(width, width, modes, modes, 2))
        self.high = nn.Parameter(scale * torch.rand(width, width, modes, modes, 2))

    def forward(self, x):
        height, width = x.shape[-2:]
        waves = torch.fft.rfft2(x, norm="ortho")
        m = self.modes
        result = torch.zeros_like(waves)
        low = torch.view_as_complex(self.low)
        high = torch.view_as_complex(self.high)
        result[:, :, :m, :m] = torch.einsum("bixy,ioxy->boxy", waves[:, :, :m, :m], low)
        result[:, :, -m:, :m] = torch.einsum(
            "bixy,ioxy->boxy", waves[:, :, -m:, :m], high
        )
        return torch.fft.irfft2(result, s=(height, width), norm="ortho")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectral = SpectralConv(WIDTH, MODES)
        self.skip = nn.Conv2d(WIDTH, WIDTH, 1)
        self.norm = nn.InstanceNorm2d(WIDTH, affine=True)
        self.mlp = nn.Sequential(
            nn.Conv2d(WIDTH, 2 * WIDTH, 1), nn.GELU(), nn.Conv2d(2 * WIDTH, WIDTH, 1)
        )

    def forward(self, x):
        y = self.norm(self.spectral(x))
        return self.mlp(F.gelu(y + self.skip(x))) + x


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.project = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, 1))
        self.register_buffer("mean", torch.tensor(0.2))
        self.register_buffer("std", torch.tensor(1.3))

    def forward(self, field):
        rows, columns = field.shape[1:]
        y = torch.linspace(0, 1, rows, dtype=field.dtype)
        x = torch.linspace(0, 1, columns, dtype=field.dtype)
        grid = torch.stack(torch.meshgrid(y, x, indexing="ij"), -1)
        grid = grid.expand(len(field), -1, -1, -1)
        normed = ((field - self.mean) / self.std).unsqueeze(-1)
        h = self.lift(torch.cat([normed, grid], -1)).permute(0, 3, 1, 2)
        h = F.pad(h, (0, 2, 0, 2))
        for block in self.blocks:
            h = block(h)
        h = h[..., :-2, :-2].permute(0, 2, 3, 1)
        return self.project(h).squeeze(-1) * self.std + self.mean


def model():
    torch.manual_seed(410)
    net = Operator()
    with torch.no_grad():
        for block in net.blocks:
            block.norm.weight.uniform_(0.6, 1.4)
            block.norm.bias.normal_(0, 0.2)
    return net


def batches():
    generator = torch.Generator().manual_seed(411)
    waves = torch.randn(2, 10, 10, generator=generator)
    field = waves + torch.roll(waves, 1, 1) + torch.roll(waves, 1, 2)
    target = 0.5 * torch.roll(field, 2, 2) + 0.1 * field.square()
    return [{"field": field, "target": target}]


def forward(net, batch):
    return net(batch["field"])


def loss(output, batch):
    target = batch["target"]
    apart = (output - target).flatten(1).norm(dim=1)
    value = (apart / target.flatten(1).norm(dim=1)).mean()
    slope = (output.roll(-1, 2) - output.roll(1, 2)) / 2
    wanted = (target.roll(-1, 2) - target.roll(1, 2)) / 2
    return value + 0.1 * F.mse_loss(slope, wanted)


def optimizer(net):
    return torch.optim.Adam(net.parameters(), lr=2e-3, weight_decay=1e-3)
