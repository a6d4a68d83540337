"""Flow matching for labelled figures in the plane, guided without a classifier.

A straight path leads from noise to each point; a small gated net learns the velocity. The
net goes on from an earlier run that knew the same figures under another order.
"""

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

FIGURES = ("ring", "moons", "cross", "spiral")
NOTHING = len(FIGURES)  # the label that says nothing


@dataclass(frozen=True)
class Config:
    seed: int = 23
    points: int = 240
    batch: int = 48
    width: int = 24
    depth: int = 2
    waves: int = 8
    highest: float = 40.0
    drop: float = 0.25
    floor: float = 0.05  # deviation that is left at the end of a path
    time_mean: float = -0.3
    time_std: float = 1.1
    lr: float = 0.02
    decay: float = 0.1
    clip: float = 0.8
    ema: float = 0.98
    warm: int = 4
    updates: int = 3
    horizon: int = 40
    euler: int = 6
    guidance: float = 1.8


C = Config()


# ---------------------------------------------------------------- figures


def figures(n, gen):
    """Raw points of all figures, as they were digitised, and which figure each is of."""
    label = torch.multinomial(torch.tensor([0.4, 0.3, 0.2, 0.1]), n, True, generator=gen)
    label = label.sort().values
    u = torch.rand(n, generator=gen)
    side = (torch.rand(n, generator=gen) < 0.5).float()
    turn = 2 * math.pi * u
    ring = torch.stack([turn.cos(), turn.sin()], 1)
    sign = 1 - 2 * side
    moons = torch.stack([(turn / 2).cos() - 0.5 * sign, sign * (turn / 2).sin()], 1)
    arm = 2.4 * u - 1.2
    cross = torch.stack([arm * side, arm * (1 - side)], 1)
    spiral = torch.stack([u * (2 * turn).cos(), u * (2 * turn).sin()], 1) * 1.5
    every = torch.stack([ring, moons, cross, spiral], 1)
    points = every[torch.arange(n), label]
    points = points + 0.06 * torch.randn(n, 2, generator=gen)
    shear = torch.tensor([[2.2, 0.0], [1.3, 0.7]])
    return points @ shear.T + torch.tensor([3.0, -1.5]), label


def batches(points, label, gen):
    """Endless, shuffled anew in each round; half of the points are mirrored."""
    while True:
        order = torch.randperm(len(points), generator=gen)
        for rows in order.split(C.batch):
            x, y = points[rows], label[rows]
            mirror = torch.rand(len(rows), generator=gen) < 0.5
            x = torch.where(mirror[:, None], x * torch.tensor([-1.0, 1.0]), x)
            yield x, y


def draw_times(n, gen):
    """Logit-normal times, one from each of n equal parts of the distribution."""
    part = (torch.arange(n) + torch.rand(n, generator=gen)) / n
    normal = torch.special.ndtri(part.clamp(1e-4, 1 - 1e-4))
    times = torch.sigmoid(C.time_mean + C.time_std * normal)
    return times[torch.randperm(n, generator=gen)]


def forget(label, gen):
    """Some labels are left out, so that the net learns what is true of all figures."""
    gone = torch.rand(len(label), generator=gen) < C.drop
    return label.masked_fill(gone, NOTHING)


# ---------------------------------------------------------------- kernels


class GatedSilu(torch.autograd.Function):
    """silu(gate) * value; keeps the sigmoid."""

    @staticmethod
    def forward(ctx, gate, value):
        s = torch.sigmoid(gate)
        ctx.save_for_backward(gate, value, s)
        return gate * s * value

    @staticmethod
    def backward(ctx, grad):
        gate, value, s = ctx.saved_tensors
        slope = s * (1 + gate * (1 - s))
        return grad * value * slope, grad * gate * s


class Standardise(torch.autograd.Function):
    """Rows with mean 0 and deviation 1."""

    @staticmethod
    def forward(ctx, x):
        centred = x - x.mean(-1, keepdim=True)
        var = centred.square().mean(-1, keepdim=True)
        inv = torch.rsqrt(var + 1e-5)
        y = centred * inv
        ctx.save_for_backward(y, inv)
        return y

    @staticmethod
    def backward(ctx, grad):
        y, inv = ctx.saved_tensors
        along = (grad * y).mean(-1, keepdim=True)
        return inv * (grad - grad.mean(-1, keepdim=True) - y * along)


# ---------------------------------------------------------------- net


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.modulate = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(width, width)
        nn.init.normal_(self.modulate.weight, std=0.15)
        nn.init.zeros_(self.modulate.bias)

    def forward(self, h, told):
        scale, shift, gate = self.modulate(F.silu(told)).chunk(3, dim=1)
        inner = Standardise.apply(h) * (1 + scale) + shift
        a, b = self.up(inner).chunk(2, dim=1)
        return h + (1 + gate) * self.down(GatedSilu.apply(a, b))


class Velocity(nn.Module):
    def __init__(self, mean, unmix):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("unmix", unmix)
        waves = torch.exp(torch.linspace(0.0, math.log(C.highest), C.waves))
        self.register_buffer("waves", waves)
        self.clock = nn.Sequential(nn.Linear(2 * C.waves, C.width), nn.SiLU())
        self.label = nn.Embedding(len(FIGURES) + 1, C.width)
        self.inlet = nn.Linear(2, C.width)
        self.blocks = nn.ModuleList([Block(C.width) for _ in range(C.depth)])
        self.outlet = nn.Linear(C.width, 2)

    def whiten(self, points):
        return (points - self.mean) @ self.unmix.T

    def forward(self, x, t, label):
        phase = t[:, None] * self.waves
        told = self.clock(torch.cat([phase.cos(), phase.sin()], 1))
        told = told + self.label(label)
        h = self.inlet(x)
        for block in self.blocks:
            h = block(h, told)
        return self.outlet(Standardise.apply(h))


def statistics(points):
    """Mean, and the matrix that makes the covariance one."""
    mean = points.mean(0)
    centred = points - mean
    factor = torch.linalg.cholesky(centred.T @ centred / len(points))
    return mean, torch.linalg.inv(factor)


def earlier_run():
    """What the run before left: kernels as [in, out], figures in its own order."""
    gen = torch.Generator().manual_seed(5)
    kernels = torch.randn(C.depth, C.width, C.width, generator=gen) / C.width**0.5
    rows = 0.8 * torch.randn(len(FIGURES), C.width, generator=gen)
    order = ["spiral", "ring", "cross", "moons"]
    return {"down": kernels, "figures": order, "label": rows}


@torch.no_grad()
def go_on(net, saved):
    for block, kernel in zip(net.blocks, saved["down"]):
        block.down.weight.copy_(kernel.T)
    for row, name in enumerate(saved["figures"]):
        net.label.weight[FIGURES.index(name)] = saved["label"][row]
    net.label.weight[NOTHING] = saved["label"].mean(0)


# ---------------------------------------------------------------- training


def flow_loss(net, x, label, worth, gen):
    noise = torch.randn(x.shape, generator=gen)
    t = draw_times(len(x), gen)
    told = forget(label, gen)
    left = 1 - (1 - C.floor) * t[:, None]
    between = left * noise + t[:, None] * x
    target = x - (1 - C.floor) * noise
    error = (net(between, t, told) - target).square().sum(1)
    return (worth[label] * error).sum() / worth[label].sum()


def rate(update):
    if update < C.warm:
        return (update + 1) / C.warm
    done = (update - C.warm) / (C.horizon - C.warm)
    return 0.5 * (1 + math.cos(math.pi * done))


@torch.no_grad()
def follow(average, net, update):
    decay = min(C.ema, (1 + update) / (5 + update))
    for a, p in zip(average.parameters(), net.parameters()):
        a.mul_(decay).add_(p, alpha=1 - decay)


@torch.no_grad()
def sample(net, label, gen):
    x = torch.randn(len(label), 2, generator=gen)
    nothing = torch.full_like(label, NOTHING)
    for step in range(C.euler):
        t = torch.full((len(label),), step / C.euler)
        plain, guided = net(x, t, nothing), net(x, t, label)
        x = x + (plain + C.guidance * (guided - plain)) / C.euler
    return x


def energy_distance(x, y):
    across = torch.cdist(x, y).mean()
    return 2 * across - torch.cdist(x, x).mean() - torch.cdist(y, y).mean()


torch.manual_seed(C.seed)
gen = torch.Generator().manual_seed(C.seed + 1)
points, label = figures(C.points, gen)
net = Velocity(*statistics(points))
go_on(net, earlier_run())
average = copy.deepcopy(net).requires_grad_(False)
worth = torch.bincount(label, minlength=len(FIGURES)).float().rsqrt()

matrices = [p for name, p in net.named_parameters() if p.ndim == 2 and "label" not in name]
others = [p for name, p in net.named_parameters() if p.ndim == 1 or "label" in name]
groups = [{"params": matrices, "weight_decay": C.decay}, {"params": others}]
opt = torch.optim.AdamW(groups, C.lr, betas=(0.9, 0.99), weight_decay=0.0)
sched = torch.optim.lr_scheduler.LambdaLR(opt, rate)

stream = batches(net.whiten(points), label, gen)
for update in range(C.updates):
    x, y = next(stream)
    loss = flow_loss(net, x, y, worth, gen)
    opt.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), C.clip)
    opt.step()
    sched.step()
    follow(average, net, update)
    made = sample(average, y, torch.Generator().manual_seed(99))
    apart = energy_distance(made, x)
    print(f"{update}: loss {loss:.4f} norm {norm:.3f} energy distance {apart:.4f}")
