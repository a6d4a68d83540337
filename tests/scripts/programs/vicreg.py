"""Calls of five species on field recorders: a joint embedding without labels (VICReg).

Two views of each spectrogram are drawn together; variance and covariance terms keep the
embedding from collapsing. A linear probe beside it says what the features are worth.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    seed: int = 29
    mels: int = 24
    frames: int = 32
    clips: int = 144
    batch: int = 48
    halves: int = 2
    steps: int = 3
    horizon: int = 40
    warmup: int = 4
    width: int = 12
    expand: int = 40
    invariance: float = 25.0
    variance: float = 25.0
    covariance: float = 1.0
    lr: float = 1.6
    floor: float = 0.01
    momentum: float = 0.9
    decay: float = 1e-2
    trust: float = 0.02
    probe_lr: float = 0.2
    probe_clip: float = 0.3
    smoothing: float = 0.1
    stats: float = 0.8


cfg = Config()
SPECIES = {"wren": 52, "robin": 40, "thrush": 28, "owl": 9, "nightjar": 15}
FLOOR_DB, PER_DB = -60.0, 4.0


# ------------------------------------------------------------------ recordings


def archive(rng):
    """Calls as the recorders keep them, a byte for a cell, and who calls."""
    share = torch.tensor([float(n) for n in SPECIES.values()])
    who = torch.multinomial(share, cfg.clips, replacement=True, generator=rng)
    wobble = torch.randn(3, cfg.clips, 1, generator=rng)
    time, mel = torch.arange(cfg.frames), torch.arange(cfg.mels)
    kind = who[:, None].float()
    ridge = 3.0 + 1.8 * kind + 0.6 * wobble[0] + (0.1 * (kind - 2) + 0.03 * wobble[1]) * time
    beat = 0.55 + 0.45 * torch.cos(2 * math.pi * (kind + 1) * time / cfg.frames + wobble[2])
    power = 1e-4 * torch.rand(cfg.clips, cfg.mels, cfg.frames, generator=rng)
    for overtone in (1, 2):
        off = (mel[:, None] - overtone * ridge[:, None, :]) / 1.2
        power = power + torch.exp(-0.5 * off**2) * beat[:, None, :] / overtone**2
    level = 10 * torch.log10(power + 1e-6)
    coded = ((level - FLOOR_DB) * PER_DB).round().clamp(0, 255).to(torch.uint8)
    return coded, who


def decode(coded):
    """Bytes to decibels."""
    return coded.float() / PER_DB + FLOOR_DB


def wind(n, rng):
    """Decibels of noise that falls with frequency."""
    slope = 1.0 / (1.0 + torch.arange(cfg.mels)[:, None])
    return 10 * torch.log10(0.05 * slope * torch.rand(n, cfg.mels, cfg.frames, generator=rng) + 1e-6)


class Views:
    """Draws a view: wind mixed in, another gain, bands of time and frequency masked."""

    def __init__(self, mean, std, seed):
        self.mean, self.std = mean, std
        self.rng = torch.Generator().manual_seed(seed)

    def band(self, n, size, most):
        width = torch.randint(1, most + 1, (n, 1), generator=self.rng)
        start = (torch.rand(n, 1, generator=self.rng) * (size - width)).long()
        place = torch.arange(size)
        return (place >= start) & (place < start + width)

    def __call__(self, level):
        n = len(level)
        share = 0.5 * torch.rand(n, 1, 1, generator=self.rng)
        noise = wind(n, self.rng)
        mixed = (1 - share) * 10 ** (level / 10) + share * 10 ** (noise / 10)
        level = 10 * torch.log10(mixed)
        level = level + 8.0 * (torch.rand(n, 1, 1, generator=self.rng) - 0.5)
        x = (level - self.mean) / self.std
        x = x.masked_fill(self.band(n, cfg.mels, 5)[:, :, None], 0.0)
        return x.masked_fill(self.band(n, cfg.frames, 9)[:, None, :], 0.0)


# ------------------------------------------------------------------ terms of the loss


class SpreadHinge(torch.autograd.Function):
    """Mean over the dimensions of what a deviation lacks to one."""

    @staticmethod
    def forward(ctx, z, eps):
        centred = z - z.mean(0)
        std = (centred.square().sum(0) / (len(z) - 1) + eps).sqrt()
        ctx.save_for_backward(centred, std)
        return (1 - std).clamp(min=0).mean()

    @staticmethod
    def backward(ctx, grad):
        centred, std = ctx.saved_tensors
        slope = (std < 1).to(std.dtype) / (std * std.numel() * (len(centred) - 1))
        return -grad * centred * slope, None


class CrossTalk(torch.autograd.Function):
    """Squares of the covariances between dimensions, for one dimension."""

    @staticmethod
    def forward(ctx, z):
        centred = z - z.mean(0)
        cov = centred.T @ centred / (len(z) - 1)
        off = cov - torch.diag(cov.diagonal())
        ctx.save_for_backward(centred, off)
        return off.square().sum() / z.shape[1]

    @staticmethod
    def backward(ctx, grad):
        centred, off = ctx.saved_tensors
        n, d = centred.shape
        return grad * 4 * centred @ off / (d * (n - 1))


def vicreg(za, zb):
    near = F.mse_loss(za, zb)
    spread = 0.5 * (SpreadHinge.apply(za, 1e-4) + SpreadHinge.apply(zb, 1e-4))
    talk = CrossTalk.apply(za) + CrossTalk.apply(zb)
    total = cfg.invariance * near + cfg.variance * spread + cfg.covariance * talk
    return total, (near, spread, talk)


class Lars(torch.optim.Optimizer):
    """Momentum, each layer's step in proportion to its weights."""

    def __init__(self, groups, lr, momentum, trust):
        defaults = {"lr": lr, "momentum": momentum, "trust": trust, "weight_decay": 0.0}
        super().__init__(groups, {**defaults, "adapt": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                d = p.grad + group["weight_decay"] * p
                if group["adapt"]:
                    ratio = group["trust"] * p.norm() / (d.norm() + 1e-8)
                    d = d * ratio
                state = self.state[p]
                if "speed" not in state:
                    state["speed"] = torch.zeros_like(p)
                state["speed"].mul_(group["momentum"]).add_(d)
                p.add_(state["speed"], alpha=-group["lr"])


# ------------------------------------------------------------------ networks


def gabor(size, count):
    """Filters [frequency, time, filter], as the bank is kept: ridges in all directions."""
    grid = torch.arange(size) - (size - 1) / 2
    f, t = torch.meshgrid(grid, grid, indexing="ij")
    angle = torch.linspace(0, math.pi, count + 1)[:-1]
    along = f[..., None] * torch.cos(angle) + t[..., None] * torch.sin(angle)
    near = torch.exp(-(f**2 + t**2) / (0.3 * size**2))[..., None]
    return near * torch.cos(1.4 * along + 0.5)


class Encoder(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 5, padding=2, bias=False)
        self.pitch = nn.Parameter(torch.full((width, 1, 1), 0.3))
        self.register_buffer("scale", torch.linspace(-1, 1, cfg.mels))
        self.norm1 = nn.BatchNorm2d(width)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * width)
        self.mix = nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False)
        self.norm3 = nn.BatchNorm2d(2 * width)
        nn.init.constant_(self.norm3.weight, 0.25)  # the branch begins small
        with torch.no_grad():
            self.stem.weight.copy_(gabor(5, width).permute(2, 0, 1).unsqueeze(1))

    def forward(self, x):
        h = self.stem(x[:, None]) + self.pitch * self.scale[:, None]
        h = F.relu(self.norm1(h))
        h = F.relu(self.norm2(self.down(h)))
        h = F.relu(h + self.norm3(self.mix(h)))
        h = h.mean(2)
        return h.mean(2) + h.amax(2)


class FeatureStats(nn.Module):
    """Moving mean and variance of features, so that the probe reads standard scores."""

    def __init__(self, width, keep):
        super().__init__()
        self.keep = keep
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, h):
        if self.training:
            past = h.detach()
            self.mean.lerp_(past.mean(0), 1 - self.keep)
            self.var.lerp_((past - self.mean).square().mean(0), 1 - self.keep)
        return (h - self.mean) / (self.var + 1e-5).sqrt()


def expander(n_in, n_out):
    layers = []
    for a, b in ((n_in, n_out), (n_out, n_out)):
        layers += [nn.Linear(a, b, bias=False), nn.BatchNorm1d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(n_out, n_out, bias=False))


def rate(step):
    """Up in a line, down along a cosine."""
    if step < cfg.warmup:
        return (step + 1) / cfg.warmup
    done = (step - cfg.warmup) / (cfg.horizon - cfg.warmup)
    return cfg.floor + (1 - cfg.floor) * 0.5 * (1 + math.cos(math.pi * done))


def main():
    torch.manual_seed(cfg.seed)
    rng = torch.Generator().manual_seed(cfg.seed)
    coded, who = archive(rng)
    level = decode(coded)
    mean = level.mean((0, 2))[:, None]
    std = level.std((0, 2))[:, None]
    views = Views(mean, std, cfg.seed + 1)

    encoder = Encoder(cfg.width)
    expand = expander(2 * cfg.width, cfg.expand)
    stats = FeatureStats(2 * cfg.width, cfg.stats)
    probe = nn.Linear(2 * cfg.width, len(SPECIES))
    prior = torch.tensor([n / sum(SPECIES.values()) for n in SPECIES.values()])
    with torch.no_grad():
        probe.bias.copy_(prior.log())

    params = [*encoder.parameters(), *expand.parameters()]
    weights = [p for p in params if p.ndim in (2, 4)]
    others = [p for p in params if p.ndim not in (2, 4)]
    groups = [{"params": weights, "weight_decay": cfg.decay}]
    groups += [{"params": others, "adapt": False}]
    opt = Lars(groups, cfg.lr, cfg.momentum, cfg.trust)
    opt_probe = torch.optim.SGD(probe.parameters(), cfg.probe_lr, momentum=cfg.momentum)

    order = torch.randperm(cfg.clips, generator=rng)
    for step in range(cfg.steps):
        rows = order[step * cfg.batch : (step + 1) * cfg.batch]
        for group in opt.param_groups:
            group["lr"] = (cfg.lr if group["adapt"] else 0.05 * cfg.lr) * rate(step)
        opt.zero_grad()
        opt_probe.zero_grad()
        told = []
        for part in rows.chunk(cfg.halves):
            clips, labels = level[part], who[part]
            ha, hb = encoder(views(clips)), encoder(views(clips))
            loss, terms = vicreg(expand(ha), expand(hb))
            logits = probe(stats(ha.detach()))
            probe_loss = F.cross_entropy(logits, labels, label_smoothing=cfg.smoothing)
            ((loss + probe_loss) / cfg.halves).backward()
            told.append([loss.item(), probe_loss.item(), *(t.item() for t in terms)])
        nn.utils.clip_grad_norm_(probe.parameters(), cfg.probe_clip)
        opt.step()
        opt_probe.step()
        words = " ".join(f"{value:.4f}" for value in torch.tensor(told).mean(0))
        print(f"step {step}: loss, probe, near, spread, talk {words}")

    for module in (encoder, expand, stats):
        module.eval()
    with torch.no_grad():
        h = encoder((level - mean) / std)
        right = (probe(stats(h)).argmax(1) == who).float().mean()
        rank = torch.linalg.svdvals(expand(h) - expand(h).mean(0))
    print(f"probe right {right:.3f}, largest share of spread {(rank[0] / rank.sum()):.3f}")


if __name__ == "__main__":
    main()
