"""A small Fourier neural operator on an interval: spectral blocks, the last of them padded."""

import torch
from torch import nn
from torch.nn import functional as F

FINE, SUB = 120, 2
POINTS = FINE // SUB
WIDTH, HIDDEN, DEPTH = 24, 40, 3
MODES, LAST_MODES, PADDING = 10, 14, 9
EPS = 1e-5
LR, GAMMA, WEIGHT_DECAY = 2e-3, 0.7, 2e-2


class UnitGaussianNormalizer(nn.Module):
    """Statistics are those of each point."""

    def __init__(self, points):
        super().__init__()
        self.register_buffer("mean", torch.zeros(points))
        self.register_buffer("std", torch.ones(points))

    def encode(self, x):
        return (x - self.mean) / (self.std + EPS)

    def decode(self, x):
        return x * (self.std + EPS) + self.mean


class SpectralConv1d(nn.Module):
    def __init__(self, inp, out, modes):
        super().__init__()
        self.modes = modes
        self.weights = nn.Parameter(torch.zeros(inp, out, modes, dtype=torch.cfloat))

    def forward(self, x):
        b, _, n = x.shape
        x_ft = torch.fft.rfft(x)
        out_ft = x.new_zeros(
            b, self.weights.shape[1], n // 2 + 1, dtype=self.weights.dtype
        )
        out_ft[:, :, : self.modes] = torch.einsum(
            "bix,iox->box", x_ft[:, :, : self.modes], self.weights
        )
        return torch.fft.irfft(out_ft, n=n)


class FNO1d(nn.Module):
    def __init__(self):
        super().__init__()
        self.a_norm = UnitGaussianNormalizer(POINTS)
        self.u_norm = UnitGaussianNormalizer(POINTS)
        self.fc0 = nn.Linear(2, WIDTH)
        self.convs = nn.ModuleList(
            [SpectralConv1d(WIDTH, WIDTH, MODES) for _ in range(DEPTH)]
        )
        self.ws = nn.ModuleList([nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(DEPTH)])
        self.last_conv = SpectralConv1d(WIDTH, WIDTH, LAST_MODES)
        self.last_w = nn.Conv1d(WIDTH, WIDTH, 1)
        self.fc1 = nn.Linear(WIDTH, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, 1)

    def forward(self, a):
        grid = torch.linspace(0, 1, POINTS).expand_as(a)
        x = torch.stack([self.a_norm.encode(a), grid], dim=-1)
        x = self.fc0(x).permute(0, 2, 1)
        for conv, w in zip(self.convs, self.ws):
            x = F.gelu(conv(x) + w(x))
        x = F.pad(x, (0, PADDING))
        x = self.last_conv(x) + self.last_w(x)
        x = x[..., :-PADDING].permute(0, 2, 1)
        x = self.fc2(F.gelu(self.fc1(x))).squeeze(-1)
        return self.u_norm.decode(x)


def model():
    torch.manual_seed(2010)
    net = FNO1d()
    place = torch.linspace(0, 6.28, POINTS)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, SpectralConv1d):
                module.weights.normal_(0, WIDTH**-0.5)
            elif isinstance(module, nn.Linear | nn.Conv1d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
                module.bias.normal_(0, 0.2)
        net.a_norm.mean.copy_(0.8 + 0.4 * place.sin())
        net.a_norm.std.copy_(1.1 + 0.3 * (2 * place).cos())
        net.u_norm.mean.copy_(1.2 + 0.5 * (place + 1).cos())
        net.u_norm.std.copy_(0.7 + 0.2 * place.sin())
    return net


def batches():
    """Waves that drift, lose their short parts, and lean where they are high."""
    generator = torch.Generator().manual_seed(2011)
    place = 6.2832 * torch.arange(120.0) / 120
    wave = torch.arange(1.0, 17.0)
    made = []
    for size in (5, 4):
        height = torch.randn(2, size, 16, generator=generator) / wave**0.6
        offset = 0.8 + 0.5 * torch.randn(size, 1, generator=generator)
        angle = wave[:, None] * place
        a = offset + height[0] @ angle.cos() + height[1] @ angle.sin()
        later = angle - 0.9 * wave[:, None]
        kept = height * torch.exp(-0.02 * wave**2)
        u = offset + kept[0] @ later.cos() + kept[1] @ later.sin()
        made.append({"a": a, "u": u + 0.2 * u * u.roll(3, dims=1)})
    return made


def forward(net, batch):
    return net(batch["a"][:, ::SUB])


def loss(output, batch):
    """L2, relative to the target of each sample."""
    target = batch["u"][:, ::SUB]
    away = torch.linalg.vector_norm(output - target, dim=1)
    return (away / torch.linalg.vector_norm(target, dim=1)).mean()


class DecayingAdam(torch.optim.Adam):
    """The rate falls after each step."""

    done = 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = LR * GAMMA**self.done
        self.done += 1
        return super().step(closure)


def optimizer(net):
    """Biases do not decay."""
    weights = [p for p in net.parameters() if p.ndim > 1]
    biases = [p for p in net.parameters() if p.ndim == 1]
    groups = [
        {"params": weights, "weight_decay": WEIGHT_DECAY},
        {"params": biases, "weight_decay": 0.0},
    ]
    return DecayingAdam(groups, lr=LR, betas=(0.9, 0.999), eps=1e-8)
