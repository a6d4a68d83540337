"""Burgers' equation on a rod: a field from a few noisy sensors, the physics and the edges.

u_t + u u_x = nu u_xx on [-1, 1] x [0, 1.5], u(x, 0) = -sin(pi x), nought at both ends.
"""

import argparse
import copy
import math
from itertools import pairwise

import torch
from torch import nn
from torch.quasirandom import SobolEngine

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--seed", type=int, default=3)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--width", type=int, default=20)
parser.add_argument("--depth", type=int, default=3)
parser.add_argument("--features", type=int, default=8)
parser.add_argument("--points", type=int, default=96)
parser.add_argument("--edge-points", type=int, default=24)
parser.add_argument("--sensor-batch", type=int, default=16)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--gamma", type=float, default=0.8)
parser.add_argument("--clip", type=float, default=1.0)
parser.add_argument("--ema", type=float, default=0.8)
parser.add_argument("--balance", type=float, default=0.7)
parser.add_argument("--causal", type=float, default=0.5)
args = parser.parse_args()

NU = 0.05
T_END = 1.5
STEEP = 5.0  # slopes are learnt as multiples of it (Jagtap et al., 2020)
BINS = 4
TERMS = ("residual", "initial", "boundary", "sensors")
FIRST_WEIGHTS = (1.0, 12.0, 6.0, 4.0)


# -- the field and who measures it


def start_of(x):
    return -torch.sin(math.pi * x)


def exact(x, t):
    """Cole and Hopf's solution, by the trapezoidal rule."""
    x, t = x.double()[:, None], t.double()[:, None].clamp(min=1e-4)
    eta = torch.linspace(-9, 9, 2001, dtype=torch.float64) * (2 * NU * t).sqrt()
    kernel = torch.exp(-torch.cos(math.pi * (x - eta)) / (2 * math.pi * NU))
    kernel = kernel * torch.exp(-eta.square() / (4 * NU * t))
    above = torch.trapezoid(torch.sin(math.pi * (x - eta)) * kernel, eta)
    return (-above / torch.trapezoid(kernel, eta)).float()


def make_sensors(n, gen):
    """Where, when and what; one in ten is off."""
    x = 2 * torch.rand(n, generator=gen) - 1
    t = T_END * torch.rand(n, generator=gen)
    u = exact(x, t) + 0.02 * torch.randn(n, generator=gen)
    off = torch.rand(n, generator=gen) < 0.1
    return x, t, torch.where(off, u + 1.5, u)


class Sampler:
    """Collocation points by Sobol's sequence, edges at random, anew at each call."""

    def __init__(self, sensors, seed, gen):
        self.sobol = SobolEngine(2, scramble=True, seed=seed)
        self.sensors = sensors
        self.gen = gen

    def inside(self):
        points = self.sobol.draw(args.points)
        return 2 * points[:, 0] - 1, T_END * points[:, 1]

    def initial(self):
        x = 2 * torch.rand(args.edge_points, generator=self.gen) - 1
        return x, torch.zeros_like(x), start_of(x)

    def boundary(self):
        t = T_END * torch.rand(args.edge_points, generator=self.gen)
        side = torch.ones_like(t)
        side[::2] = -1.0
        return side, t

    def measured(self):
        rows = torch.randperm(len(self.sensors[0]), generator=self.gen)
        return [column[rows[: args.sensor_batch]] for column in self.sensors]


# -- kernels


class SlopedTanh(torch.autograd.Function):
    """tanh(STEEP slope z), a slope for each column. Can be differentiated again."""

    @staticmethod
    def forward(ctx, z, slope):
        y = torch.tanh(STEEP * slope * z)
        ctx.save_for_backward(z, slope, y)
        return y

    @staticmethod
    def backward(ctx, grad):
        z, slope, y = ctx.saved_tensors
        inner = STEEP * grad * (1 - y * y)
        return inner * slope, (inner * z).sum(0)


class PseudoHuber(torch.autograd.Function):
    """Mean of d^2 (sqrt(1 + (e / d)^2) - 1): outliers pull with a bounded force."""

    @staticmethod
    def forward(ctx, error, delta):
        root = (1 + (error / delta).square()).sqrt()
        ctx.save_for_backward(error, root)
        return (delta**2 * (root - 1)).mean()

    @staticmethod
    def backward(ctx, grad):
        error, root = ctx.saved_tensors
        return grad * error / (root * error.numel()), None


# -- model


class Field(nn.Module):
    def __init__(self, features, width, depth):
        super().__init__()
        self.register_buffer("low", torch.tensor([-1.0, 0.0]))
        self.register_buffer("high", torch.tensor([1.0, T_END]))
        spread = torch.tensor([[1.0], [0.4]])
        self.register_buffer("waves", spread * torch.randn(2, features))
        sizes = [2 * features] + [width] * depth
        self.layers = nn.ModuleList(nn.Linear(n, m) for n, m in pairwise(sizes))
        self.slopes = nn.ParameterList(
            torch.full((width,), 1 / STEEP) for _ in range(depth)
        )
        self.outlet = nn.Linear(width, 1)
        for layer in self.layers:
            nn.init.xavier_normal_(layer.weight, gain=nn.init.calculate_gain("tanh"))
            nn.init.zeros_(layer.bias)

    def hidden(self, x, t):
        place = torch.stack([x, t], 1)
        place = 2 * (place - self.low) / (self.high - self.low) - 1
        angle = math.pi * place @ self.waves
        h = torch.cat([angle.sin(), angle.cos()], 1)
        for layer, slope in zip(self.layers, self.slopes):
            h = SlopedTanh.apply(layer(h), slope)
        return h

    def forward(self, x, t):
        return self.outlet(self.hidden(x, t)).squeeze(1)


@torch.no_grad()
def fit_outlet(net, ridge=1.0):
    """The last layer begins as a ridge regression of the initial state."""
    x = torch.linspace(-1, 1, 65)
    h = net.hidden(x, torch.zeros_like(x)).double()
    normal = h.T @ h + ridge * torch.eye(h.shape[1], dtype=torch.float64)
    net.outlet.weight[0] = torch.linalg.solve(
        normal, h.T @ start_of(x).double()
    ).float()
    net.outlet.bias.zero_()


def residual(net, x, t):
    x, t = x.clone().requires_grad_(), t.clone().requires_grad_()
    u = net(x, t)
    u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
    (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
    return u_t + u * u_x - NU * u_xx


def causal_mean(error, t):
    """Mean square by spans of time; a span counts once those before it are solved."""
    span = (t / T_END * BINS).long().clamp(max=BINS - 1)
    total = torch.zeros(BINS).index_add(0, span, error.square())
    mean = total / torch.bincount(span, minlength=BINS).clamp(min=1)
    before = mean.detach().cumsum(0) - mean.detach()
    weight = torch.exp(-args.causal * before)
    return (weight * mean).mean()


class Balance(nn.Module):
    """Weights of terms by the norms of their gradients, as a moving average."""

    def __init__(self, keep):
        super().__init__()
        self.keep = keep
        self.register_buffer("weight", torch.tensor(FIRST_WEIGHTS))

    def update(self, terms, params):
        norms = []
        for name in TERMS:
            grads = torch.autograd.grad(
                terms[name], params, retain_graph=True, materialize_grads=True
            )
            norms.append(torch.cat([g.flatten() for g in grads]).norm())
        norms = torch.stack(norms)
        target = norms.sum() / (norms + 1e-6)
        self.weight = self.weight.lerp(target, 1 - self.keep)

    def forward(self, terms):
        return (self.weight * torch.stack([terms[name] for name in TERMS])).sum()


@torch.no_grad()
def follow(average, net, decay):
    for a, p in zip(average.parameters(), net.parameters()):
        a.mul_(decay).add_(p, alpha=1 - decay)


def losses(net, sampler):
    x, t = sampler.inside()
    terms = {"residual": causal_mean(residual(net, x, t), t)}
    x, t, u = sampler.initial()
    terms["initial"] = (net(x, t) - u).square().mean()
    side, t = sampler.boundary()
    terms["boundary"] = net(side, t).square().mean()
    x, t, u = sampler.measured()
    terms["sensors"] = PseudoHuber.apply(net(x, t) - u, 0.1)
    return terms


def main():
    torch.manual_seed(args.seed)
    gen = torch.Generator().manual_seed(args.seed + 100)
    sampler = Sampler(make_sensors(60, gen), args.seed, gen)
    net = Field(args.features, args.width, args.depth)
    fit_outlet(net)
    average = copy.deepcopy(net).requires_grad_(False)
    balance = Balance(args.balance)
    params = list(net.parameters())
    opt = torch.optim.Adam(params, lr=args.lr, betas=(0.9, 0.99), eps=1e-4)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, args.gamma)

    for step in range(args.steps):
        terms = losses(net, sampler)
        balance.update(terms, params)
        loss = balance(terms)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, args.clip)
        opt.step()
        follow(average, net, args.ema)
        sched.step()
        shown = " ".join(f"{name} {term.item():.4f}" for name, term in terms.items())
        print(f"step {step} loss {loss.item():.4f} {shown}")

    x, t = torch.meshgrid(
        torch.linspace(-1, 1, 41), torch.linspace(0, T_END, 16), indexing="ij"
    )
    x, t = x.flatten(), t.flatten()
    truth = exact(x, t)
    with torch.no_grad():
        error = (average(x, t) - truth).norm() / truth.norm()
    print(f"relative error {error.item():.4f}")


if __name__ == "__main__":
    main()
