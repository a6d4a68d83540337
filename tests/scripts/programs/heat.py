"""Finds how fast heat spreads: a network that must obey the equation, and its unknown constant."""

import math

import torch
from torch import nn

torch.set_default_dtype(torch.float64)
POINTS, WALL, SEEN = 40, 12, 20


class Sine(nn.Module):
    def forward(self, x):
        return torch.sin(x)


class Field(nn.Module):
    """The temperature at (t, x), with waves as features."""

    def __init__(self, width=14):
        super().__init__()
        waves = torch.linspace(0.5, 2.0, 4)
        self.register_buffer("waves", torch.stack([waves, waves.flip(0)]))
        self.body = nn.Sequential(
            nn.Linear(10, width), Sine(), nn.Linear(width, width), nn.Tanh()
        )
        self.leave = nn.Linear(width, 1)
        self.log_speed = nn.Parameter(torch.tensor(-1.0))

    def forward(self, t, x):
        point = torch.cat([t, x], dim=1)
        turned = math.pi * point @ self.waves
        features = torch.cat([point, turned.sin(), turned.cos()], dim=1)
        return self.leave(self.body(features)).squeeze(1)

    @property
    def speed(self):
        return self.log_speed.exp()


def slope(y, x):
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return grad


def residual(field, t, x):
    t, x = t.requires_grad_(), x.requires_grad_()
    u = field(t, x)
    second = slope(slope(u, x), x)
    return (slope(u, t) - field.speed * second).squeeze(1)


def truth(t, x, speed=0.25):
    one = torch.exp(-speed * math.pi**2 * t) * torch.sin(math.pi * x)
    two = torch.exp(-4 * speed * math.pi**2 * t) * torch.sin(2 * math.pi * x)
    return (one + 0.5 * two).squeeze(1)


def points(seed):
    draw = torch.Generator().manual_seed(seed)
    inner = torch.rand(POINTS, 2, generator=draw)
    time = torch.rand(WALL, 1, generator=draw)
    side = torch.randint(0, 2, (WALL, 1), generator=draw).to(time.dtype)
    place = torch.rand(SEEN, 2, generator=draw)
    seen = truth(place[:, :1], place[:, 1:])
    seen = seen + 0.01 * torch.randn(SEEN, generator=draw)
    return inner.split(1, dim=1), (time, side), place.split(1, dim=1), seen


def losses(field, inner, wall, place, seen):
    physics = residual(field, *inner).square().mean()
    border = field(*wall).square().mean()
    fit = (field(*place) - seen).square().mean()
    return torch.stack([physics, border, fit])


def smoothness(field, place):
    """How steep the field is beyond 2, as a penalty."""
    t, x = (part.detach().clone().requires_grad_() for part in place)
    steep = torch.autograd.grad(field(t, x).sum(), (t, x), create_graph=True)
    length = torch.cat(steep, dim=1).norm(dim=1)
    return torch.relu(length - 0.5).square().mean()


def start(field):
    """Weights of an earlier search, which had its layers in a list."""
    draw = torch.Generator().manual_seed(9)
    earlier = []
    for layer in (field.body[0], field.body[2], field.leave):
        weight = torch.randn(layer.weight.shape, generator=draw) / layer.in_features**0.5
        bias = 0.1 * torch.randn(layer.bias.shape, generator=draw)
        earlier.append((weight, bias))
    with torch.no_grad():
        for layer, (weight, bias) in zip((field.body[0], field.body[2], field.leave), earlier):
            layer.weight.copy_(weight)
            layer.bias.copy_(bias)


def run():
    torch.manual_seed(2)
    field = Field()
    start(field)
    data = points(seed=33)
    balance = torch.zeros(3, requires_grad=True)
    network = [p for name, p in field.named_parameters() if name != "log_speed"]
    search = torch.optim.LBFGS(network, lr=0.5, max_iter=2, history_size=5)
    adapt = torch.optim.RMSprop(
        [
            {"params": [field.log_speed], "lr": 0.05},
            {"params": [balance], "lr": 0.01, "maximize": True},
        ],
        alpha=0.9,
        momentum=0.3,
    )

    def closure():
        search.zero_grad()
        weights = 3 * balance.detach().softmax(0)
        parts = losses(field, *data)
        loss = weights @ parts + 0.1 * smoothness(field, data[2])
        loss.backward()
        return loss

    for turn in range(2):
        loss = search.step(closure)
        adapt.zero_grad()
        (3 * balance.softmax(0) @ losses(field, *data)).backward()
        adapt.step()
        print(turn, loss.item(), field.speed.item())


run()
