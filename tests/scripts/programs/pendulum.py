"""A damped pendulum from few measurements: a network that keeps to the equation, two optimizers in turns."""

import copy
import math

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import weight_norm

DAMPING, STIFFNESS, END, WIDTH, MEASURED, PLACES = 0.3, 2.0, 4.0, 10, 12, 16
PHYSICS, START, PATIENCE = 0.1, 0.5, 1


class Wave(torch.autograd.Function):
    """x + sin(a x)^2 / a with a learned frequency for each unit, and its derivatives by hand."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, a):
        return x + torch.sin(a * x).square() / a

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, a = inputs
        ctx.save_for_backward(x, a)

    @staticmethod
    def backward(ctx, grad_output):
        x, a = ctx.saved_tensors
        twice = torch.sin(2 * a * x)
        grad_x = grad_output * (1 + twice)
        grad_a = grad_output * (x * twice / a - torch.sin(a * x).square() / a.square())
        return grad_x, grad_a


class Rectified(torch.autograd.Function):
    """The pinball loss of a quantile, one kernel for the loss and its slope."""

    @staticmethod
    def forward(ctx, wrong, quantile):
        ctx.save_for_backward(wrong)
        ctx.quantile = quantile
        return torch.where(wrong > 0, quantile * wrong, (quantile - 1) * wrong)

    @staticmethod
    def backward(ctx, grad_output):
        (wrong,) = ctx.saved_tensors
        slope = torch.where(wrong > 0, ctx.quantile, ctx.quantile - 1)
        return grad_output * slope, None


class Layer(nn.Module):
    def __init__(self, inputs, outputs, frequency):
        super().__init__()
        self.linear = weight_norm(nn.Linear(inputs, outputs))
        self.frequency = nn.Parameter(torch.full((outputs,), frequency))

    def forward(self, x):
        x = self.linear(x)
        return Wave.apply(x, self.frequency.expand_as(x))


class Path(nn.Module):
    """The angle at a time, and how wide its errors are."""

    def __init__(self):
        super().__init__()
        self.first = Layer(2, WIDTH, 1.0)
        self.second = Layer(WIDTH, WIDTH, 0.5)
        self.angle = nn.Linear(WIDTH, 1)
        self.spread = nn.Linear(WIDTH, 2)
        nn.init.uniform_(self.first.linear.bias, -1, 1)
        nn.init.normal_(self.angle.weight, std=0.3)
        nn.init.zeros_(self.angle.bias)

    def hidden(self, time):
        time = 2 * time / END - 1
        return self.second(self.first(torch.cat([time, time.square()], -1)))

    def forward(self, time):
        return self.angle(self.hidden(time)).squeeze(-1)

    def quantiles(self, time):
        hidden = self.hidden(time)
        middle = self.angle(hidden).detach()
        below, above = nn.functional.softplus(self.spread(hidden)).chunk(2, -1)
        return torch.cat([middle - below, middle + above], -1)


def truth(time):
    speed = math.sqrt(STIFFNESS - DAMPING**2 / 4)
    return torch.exp(-DAMPING * time / 2) * torch.cos(speed * time)


def measured(seed, size):
    g = torch.Generator().manual_seed(seed)
    time = END * torch.rand(size, generator=g)
    return time[:, None], truth(time) + 0.05 * torch.randn(size, generator=g)


def residuals(path, times):
    """How far each place is from keeping to the equation."""
    values = dict(path.named_parameters())

    def angle(time):
        return functional_call(path, values, (time[None],))

    def residual(time):
        speed = grad(angle)
        return grad(speed)(time) + DAMPING * speed(time) + STIFFNESS * angle(time)

    return vmap(residual)(times)


def start(path):
    """At time 0 the angle is 1 and the speed that of the solution."""
    time = torch.zeros(1, 1, requires_grad=True)
    angle = path(time)
    (speed,) = torch.autograd.grad(angle.sum(), time, create_graph=True)
    return (angle - 1).square().sum() + (speed + DAMPING / 2).square().sum()


def fit_loss(path, time, angle, places):
    error = (path(time) - angle).square().mean()
    physics = residuals(path, places).square().mean()
    return error + PHYSICS * physics + START * start(path)


def spread_loss(path, time, angle):
    wrong = angle[:, None] - path.quantiles(time)
    low = Rectified.apply(wrong[:, 0], 0.1)
    high = Rectified.apply(wrong[:, 1], 0.9)
    return (low + high).mean()


class Best:
    """Keeps the best weights; says when to stop."""

    def __init__(self):
        self.value, self.weights, self.waited = math.inf, None, 0

    def seen(self, value, path):
        if value < self.value - 1e-4:
            self.value, self.weights, self.waited = value, copy.deepcopy(path.state_dict()), 0
        else:
            self.waited += 1
        return self.waited > PATIENCE


def held_out(path, time, angle):
    with torch.no_grad():
        return (path(time) - angle).abs().mean().item()


def main():
    torch.manual_seed(90)
    path = Path()
    fitted = [p for name, p in path.named_parameters() if not name.startswith("spread")]
    adam = torch.optim.Adam(fitted, lr=2e-2, betas=(0.8, 0.99))
    sgd = torch.optim.SGD(path.spread.parameters(), lr=0.2, momentum=0.7, nesterov=True)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, factor=0.5, patience=0, threshold=0.8)
    best = Best()
    valid = measured(1, 20)
    plateau.step(held_out(path, *valid))
    g = torch.Generator().manual_seed(91)
    for turn in range(4):
        time, angle = measured(100 + turn, MEASURED)
        places = END * (torch.arange(PLACES) + torch.rand(PLACES, generator=g)) / PLACES
        adam.zero_grad()
        fit = fit_loss(path, time, angle, places)
        fit.backward()
        nn.utils.clip_grad_value_(fitted, 1.0)
        adam.step()
        sgd.zero_grad()
        spread = spread_loss(path, time, angle)
        spread.backward()
        sgd.step()
        value = held_out(path, *valid)
        plateau.step(value)
        print(turn, f"{fit.item():.5f} {spread.item():.5f} {value:.5f}")
        if best.seen(value, path):
            break
    path.load_state_dict(best.weights)


main()
