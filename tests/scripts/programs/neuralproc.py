"""An attentive neural process: what is the whole curve, seen at a few points?

It learns from draws of Gaussian processes whose length scale, height and smoothness change
from curve to curve. One path attends to the points seen, the other draws what is still open.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Settings:
    seed: int = 23
    steps: int = 3
    curves: int = 12
    points: int = 20  # of a curve, at most
    context: tuple[int, int] = (3, 9)
    more: tuple[int, int] = (4, 11)  # points to tell beside those of the context
    noise: float = 0.15
    width: int = 32
    heads: int = 4
    latent: int = 12
    octaves: int = 4
    floor: float = 0.1  # no deviation is below
    begin: float = 0.6  # deviation that an untrained decoder tells
    gain: float = 1.6
    beta: float = 0.8
    warm: int = 4
    decay: float = 0.9
    clip: float = 0.7
    up: int = 3


S = Settings()
RATES = {
    "attend": 4e-3,
    "infer": 8e-3,
    "decode": 2e-3,
}
PEAK = 3.0  # times the rate, at the top of a cycle


# ------------------------------------------------------------------ curves


class Curves:
    """Temperatures along a line, from Gaussian processes."""

    def __init__(self, seed: int):
        self.gen = torch.Generator().manual_seed(seed)

    def draw(self, n: int) -> tuple[Tensor, Tensor]:
        gen = self.gen
        x = 4 * torch.rand(n, S.points, generator=gen, dtype=torch.float64) - 2
        length = 0.3 + 0.9 * torch.rand(n, 1, 1, generator=gen)
        height = 0.5 + torch.rand(n, 1, 1, generator=gen)
        smooth = torch.rand(n, 1, 1, generator=gen) < 0.5
        gap = (x[:, :, None] - x[:, None, :]).abs() / length
        matern = (1 + math.sqrt(3) * gap) * torch.exp(-math.sqrt(3) * gap)
        shape = torch.where(smooth, torch.exp(-0.5 * gap.square()), matern)
        cov = height**2 * shape + S.noise**2 * torch.eye(S.points)
        eps = torch.randn(n, S.points, 1, generator=gen, dtype=torch.float64)
        y = torch.linalg.cholesky(cov) @ eps
        return x.float(), 15 + 6 * y.squeeze(2).float()

    def batch(self, n: int):
        """Points, their values, which are seen and which are to be told (also those seen)."""
        x, y = self.draw(n)
        seen = torch.randint(*S.context, (n, 1), generator=self.gen)
        told = seen + torch.randint(*S.more, (n, 1), generator=self.gen)
        place = torch.arange(S.points)
        x = x.masked_fill(place >= told, 0.0)
        y = y.masked_fill(place >= told, 0.0)
        keep = int(told.max())
        return x[:, :keep], y[:, :keep], (place < seen)[:, :keep], (place < told)[:, :keep]


# ------------------------------------------------------------------ kernels


class MaskedAttention(torch.autograd.Function):
    """softmax(q k' / sqrt(d)) v over the points that are there; q, k, v: [b, h, n, d]."""

    @staticmethod
    def forward(ctx, q, k, v, there):
        ctx.scale = q.shape[-1] ** -0.5
        score = q @ k.mT * ctx.scale
        score = score.masked_fill(~there[:, None, None, :], -math.inf)
        weight = score.softmax(-1)
        ctx.save_for_backward(q, k, v, weight)
        return weight @ v

    @staticmethod
    def backward(ctx, grad):
        q, k, v, weight = ctx.saved_tensors
        d_weight = grad @ v.mT
        inner = (weight * d_weight).sum(-1, keepdim=True)
        d_score = weight * (d_weight - inner) * ctx.scale
        return d_score @ k, d_score.mT @ q, weight.mT @ grad, None


class GaussianNLL(torch.autograd.Function):
    """-log N(y; mean, dev) of each point, dev = floor + (1 - floor) softplus(raw)."""

    @staticmethod
    def forward(ctx, mean, raw, y, floor):
        dev = floor + (1 - floor) * F.softplus(raw)
        z = (y - mean) / dev
        ctx.save_for_backward(raw, dev, z)
        ctx.floor = floor
        return 0.5 * z.square() + dev.log() + 0.5 * math.log(2 * math.pi)

    @staticmethod
    def backward(ctx, grad):
        raw, dev, z = ctx.saved_tensors
        d_mean = -z / dev
        d_dev = (1 - z.square()) / dev
        d_raw = d_dev * (1 - ctx.floor) * raw.sigmoid()
        return grad * d_mean, grad * d_raw, None, None


def divergence(p, q):
    """KL(p || q) of diagonal Gaussians, for each curve."""
    (p_mean, p_dev), (q_mean, q_dev) = p, q
    ratio = (p_dev / q_dev).square()
    gap = ((p_mean - q_mean) / q_dev).square()
    return 0.5 * (ratio + gap - 1 - ratio.log()).sum(-1)


# ------------------------------------------------------------------ model


class Attend(nn.Module):
    """The deterministic path: what the points seen say about any other point."""

    def __init__(self, features: int):
        super().__init__()
        self.inlet = nn.Linear(features + 1, S.width)
        self.value = nn.Linear(S.width, S.width)
        self.query = nn.Linear(features, S.width, bias=False)
        self.key = nn.Linear(features, S.width, bias=False)
        self.out = nn.Linear(S.width, S.width)

    def split(self, h: Tensor) -> Tensor:
        return h.unflatten(2, (S.heads, -1)).transpose(1, 2)

    def forward(self, phi, y, seen):
        h = F.gelu(self.inlet(torch.cat([phi, y[..., None]], 2)))
        q, k, v = self.query(phi), self.key(phi), self.value(h)
        mixed = MaskedAttention.apply(self.split(q), self.split(k), self.split(v), seen)
        return self.out(mixed.transpose(1, 2).reshape(phi.shape[0], -1, S.width))


class Infer(nn.Module):
    """The latent path: mean and deviation of the code of a set of points."""

    def __init__(self, features: int):
        super().__init__()
        self.inlet = nn.Linear(features + 1, S.width)
        self.hidden = nn.Linear(S.width, S.width)
        self.pooled = nn.Linear(S.width, S.width)
        self.head = nn.Linear(S.width, 2 * S.latent)

    def forward(self, phi, y, there):
        h = F.gelu(self.inlet(torch.cat([phi, y[..., None]], 2)))
        h = self.hidden(h) * there[..., None]
        h = h.sum(1) / there.sum(1, keepdim=True)
        mean, raw = self.head(F.gelu(self.pooled(h))).chunk(2, -1)
        return mean, 0.1 + 0.9 * raw.sigmoid()


class NeuralProcess(nn.Module):
    def __init__(self):
        super().__init__()
        features = 1 + 2 * S.octaves
        self.register_buffer("freqs", math.pi / 4 * 2.0 ** torch.arange(S.octaves))
        self.register_buffer("centre", torch.zeros(()))
        self.register_buffer("spread", torch.ones(()))
        self.register_buffer("losses", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.attend = Attend(features)
        self.infer = Infer(features)
        self.decode = nn.Sequential(
            nn.Linear(features + S.width + S.latent, S.width),
            nn.SiLU(),
            nn.Linear(S.width, 2),
        )

    def features(self, x: Tensor) -> Tensor:
        angle = x[..., None] * self.freqs
        return torch.cat([x[..., None], angle.sin(), angle.cos()], -1)

    def forward(self, x, y, seen, told, eps):
        """The loss of each point, and the divergence of each curve."""
        y = (y - self.centre) / self.spread
        phi = self.features(x)
        prior = self.infer(phi, y, seen)
        posterior = self.infer(phi, y, told)
        mean, dev = posterior
        z = mean + dev * eps
        path = self.attend(phi, y, seen)
        z = z[:, None, :].expand(-1, x.shape[1], -1)
        told_mean, raw = self.decode(torch.cat([phi, path, z], 2)).unbind(2)
        nll = GaussianNLL.apply(told_mean, raw, y, S.floor)
        return nll, divergence(posterior, prior)

    @torch.no_grad()
    def watch(self, *losses):
        """Running averages of the losses, started at the first."""
        now = torch.stack(losses)
        self.losses.copy_(torch.where(self.count > 0, S.decay * self.losses + (1 - S.decay) * now, now))
        self.count += 1


@torch.no_grad()
def prepare(model: NeuralProcess, y: Tensor):
    """Units from a pilot draw; attention begins as a kernel, codes wide, deviations known."""
    model.centre.copy_(y.mean())
    model.spread.copy_(y.std())
    nn.init.orthogonal_(model.attend.query.weight, gain=S.gain)
    model.attend.key.weight.copy_(model.attend.query.weight)
    nn.init.normal_(model.infer.head.weight, std=0.5)
    soft = (S.begin - S.floor) / (1 - S.floor)
    model.decode[2].bias.copy_(torch.tensor([0.0, math.log(math.expm1(soft))]))


def anneal(step: int) -> float:
    return S.beta * min(1.0, (step + 1) / S.warm)


def main():
    torch.manual_seed(S.seed)
    model = NeuralProcess()
    prepare(model, Curves(S.seed + 1).draw(64)[1])
    curves = Curves(S.seed + 2)
    groups = [{"params": [*model.get_submodule(n).parameters()], "lr": r} for n, r in RATES.items()]
    opt = torch.optim.Adam(groups, betas=(0.9, 0.98), eps=1e-5)
    low = list(RATES.values())
    high = [PEAK * rate for rate in low]
    sched = torch.optim.lr_scheduler.CyclicLR(opt, low, high, step_size_up=S.up, cycle_momentum=False)
    gen = torch.Generator().manual_seed(S.seed + 3)
    for step in range(S.steps):
        x, y, seen, told = curves.batch(S.curves)
        eps = torch.randn(S.curves, S.latent, generator=gen)
        each, open_ = model(x, y, seen, told, eps)
        nll = (each * told).sum() / told.sum()
        kl = open_.mean()
        loss = nll + anneal(step) * kl
        opt.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), S.clip)
        opt.step()
        sched.step()
        model.watch(nll, kl)
        print(f"step {step} nll {nll.item():.5f} kl {kl.item():.5f} norm {norm.item():.4f}")
    print("averages", [round(v, 4) for v in model.losses.tolist()])


if __name__ == "__main__":
    main()
