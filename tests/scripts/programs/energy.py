"""An energy for small grey textures, by contrastive divergence with a replay buffer.

Low energy is a likely picture. Samples come from Langevin dynamics, begun where earlier ones
ended. The stem and the signs of the head come from the encoder of a denoiser.
"""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    seed: int = 23
    images: int = 90
    side: int = 8
    batch: int = 12
    width: int = 12
    updates: int = 3
    # sampler
    replay: int = 30
    fresh: float = 0.2
    walk: int = 6
    stride: float = 0.6
    noise: float = 0.05
    kick: float = 0.2
    # training
    tame: float = 0.15
    lr: float = 6e-3
    gamma: float = 0.7
    clip: float = 0.03
    ema: float = 0.8


cfg = Config()


# ------------------------------------------------------------------ pictures


def textures(n, gen):
    """Waves in four directions, lighter at the bottom left: uint8 [n, 1, side, side]."""
    y, x = torch.meshgrid(torch.arange(cfg.side), torch.arange(cfg.side), indexing="ij")
    turn = torch.randint(4, (n, 1, 1), generator=gen) * math.pi / 4
    turn = turn + 0.1 * torch.randn(n, 1, 1, generator=gen)
    phase = 2 * math.pi * torch.rand(n, 1, 1, generator=gen)
    wave = torch.sin(1.4 * (turn.cos() * x + turn.sin() * y) + phase)
    grey = 90 + 60 * wave + 9 * y - 5 * x + 6 * torch.randn(n, *x.shape, generator=gen)
    return grey.round().clamp(0, 255).to(torch.uint8).unsqueeze(1)


def batches(images, gen):
    """Endless; pictures in [-1, 1], mirrored by chance."""
    while True:
        order = torch.randperm(len(images), generator=gen)
        for rows in order.split(cfg.batch)[: len(images) // cfg.batch]:
            x = images[rows].float()
            x = (x + torch.rand(x.shape, generator=gen)) / 256
            mirror = torch.rand(len(x), 1, 1, 1, generator=gen) < 0.5
            x = torch.where(mirror, x.flip(-1), x)
            yield 2 * x - 1


# ------------------------------------------------------------------ kernels


class Swish(torch.autograd.Function):
    """x sigmoid(x), the sigmoid made anew on the way back."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(x)
        return grad * gate * (1 + x * (1 - gate))


class SoftPool(torch.autograd.Function):
    """log mean exp over all positions: [n, c, h, w] -> [n, c]."""

    @staticmethod
    def forward(ctx, x, sharp):
        flat = sharp * x.flatten(2)
        total = flat.logsumexp(2)
        ctx.save_for_backward(flat, total)
        ctx.shape = x.shape
        return (total - math.log(flat.shape[2])) / sharp

    @staticmethod
    def backward(ctx, grad):
        flat, total = ctx.saved_tensors
        share = torch.exp(flat - total[..., None])
        return (grad[..., None] * share).view(ctx.shape), None


def unit(x):
    return x / x.norm().clamp(min=1e-12)


# ------------------------------------------------------------------ net


class SpectralConv(nn.Module):
    """A convolution whose weight, as a matrix, has a largest singular value of `bound`."""

    def __init__(self, n_in, n_out, size, stride=1, bound=1.2):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_out, n_in, size, size))
        self.bias = nn.Parameter(torch.zeros(n_out))
        nn.init.orthogonal_(self.weight)
        with torch.no_grad():
            self.weight.mul_(torch.linspace(0.5, 1.5, n_out)[:, None, None, None])
        self.stride, self.pad, self.bound = stride, size // 2, bound
        self.register_buffer("u", unit(torch.randn(n_out)))

    def singular(self):
        flat = self.weight.flatten(1)
        with torch.no_grad():
            v = unit(flat.T @ self.u)
            u = unit(flat @ v)
            if self.training:
                self.u.copy_(u)
        return u @ flat @ v

    def forward(self, x):
        weight = self.weight * (self.bound / self.singular())
        return F.conv2d(x, weight, self.bias, stride=self.stride, padding=self.pad)


class Energy(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.register_buffer("centre", torch.zeros(1, cfg.side, cfg.side))
        self.register_buffer("spread", torch.ones(1, cfg.side, cfg.side))
        self.stem = SpectralConv(1, width, 3)
        self.down = SpectralConv(width, 2 * width, 3, stride=2)
        self.mix = SpectralConv(2 * width, 2 * width, 3)
        self.head = nn.Linear(2 * width, 1)
        self.precision = nn.Parameter(torch.zeros(()))  # a logarithm

    def forward(self, x):
        z = (x - self.centre) / self.spread
        h = Swish.apply(self.stem(z))
        h = Swish.apply(self.down(h))
        h = h + Swish.apply(self.mix(h))
        pooled = SoftPool.apply(h, 2.0)
        bowl = 0.5 * self.precision.exp() * z.square().mean((1, 2, 3))
        return self.head(pooled).squeeze(1) + bowl


def denoiser(images):
    """What the denoiser left: filters as [size, size, out], moments of pixels, scores."""
    gen = torch.Generator().manual_seed(404)
    pixels = images.double() / 127.5 - 1
    return {
        "filters": 0.4 * torch.randn(3, 3, cfg.width, generator=gen),
        "sum": pixels.sum(0).float(),
        "squares": pixels.square().sum(0).float(),
        "count": len(images),
        "score": 0.2 * torch.randn(2 * cfg.width, generator=gen) + 0.1,
        "precision": 0.4,
    }


@torch.no_grad()
def adopt(net, saved):
    """A score is high where a picture is likely, an energy low."""
    net.stem.weight.copy_(saved["filters"].permute(2, 0, 1)[:, None])
    mean = saved["sum"] / saved["count"]
    net.centre.copy_(mean)
    net.spread.copy_((saved["squares"] / saved["count"] - mean**2).sqrt())
    net.head.weight.copy_(-saved["score"][None])
    net.precision.fill_(math.log(saved["precision"]))


# ------------------------------------------------------------------ sampler


class Replay:
    """Where earlier walks ended; a share begins anew from uniform noise."""

    def __init__(self, gen):
        self.gen = gen
        self.images = self.uniform(cfg.replay)

    def uniform(self, n):
        return 2 * torch.rand(n, 1, cfg.side, cfg.side, generator=self.gen) - 1

    def draw(self, n):
        rows = torch.randperm(cfg.replay, generator=self.gen)[:n]
        fresh = torch.rand(n, 1, 1, 1, generator=self.gen) < cfg.fresh
        return rows, torch.where(fresh, self.uniform(n), self.images[rows])

    def put(self, rows, x):
        self.images[rows] = x


def langevin(net, x, gen):
    """Down the energy, with noise; the net is as it was afterwards."""
    net.eval()
    for _ in range(cfg.walk):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(net(x).sum(), x)
        slope = slope.clamp(-cfg.kick, cfg.kick)
        noise = torch.randn(x.shape, generator=gen)
        x = x.detach() - cfg.stride * slope + cfg.noise * noise
        x = x.clamp(-1, 1)
    net.train()
    return x


# ------------------------------------------------------------------ training


def divergence(real, fake):
    """Real pictures down, samples up, and all energies near nought."""
    size = (real.square() + fake.square()).mean()
    return real.mean() - fake.mean() + cfg.tame * size


@torch.no_grad()
def follow(average, net):
    for a, p in zip(average.parameters(), net.parameters(), strict=True):
        a.mul_(cfg.ema).add_(p, alpha=1 - cfg.ema)
    for a, b in zip(average.buffers(), net.buffers(), strict=True):
        a.copy_(b)


def main():
    torch.manual_seed(cfg.seed)
    gen = torch.Generator().manual_seed(cfg.seed + 1)
    images = textures(cfg.images, gen)
    net = Energy(cfg.width)
    adopt(net, denoiser(images))
    for layer in (net.stem, net.down, net.mix):
        for _ in range(8):
            layer.singular()
    average = copy.deepcopy(net).requires_grad_(False)
    opt = torch.optim.Adam(net.parameters(), lr=cfg.lr, betas=(0.0, 0.99), eps=1e-4)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, cfg.gamma)
    replay = Replay(gen)
    stream = batches(images, gen)

    for update in range(cfg.updates):
        real = next(stream)
        opt.zero_grad()
        rows, start = replay.draw(cfg.batch)
        fake = langevin(net, start, gen)
        replay.put(rows, fake)
        e_real, e_fake = net(torch.cat([real, fake])).split(cfg.batch)
        loss = divergence(e_real, e_fake)
        loss.backward()
        nn.utils.clip_grad_value_(net.parameters(), cfg.clip)
        opt.step()
        sched.step()
        follow(average, net)
        print(
            f"{update} loss {loss:.4f} real {e_real.mean():.4f} fake {e_fake.mean():.4f}"
        )

    average.eval()
    with torch.no_grad():
        gap = average(replay.images).mean() - average(next(stream)).mean()
    print(f"gap of the average {gap:.4f}")


if __name__ == "__main__":
    main()
