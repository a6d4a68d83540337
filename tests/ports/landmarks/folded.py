"""Blocks are functions of a bag of matrices; separable kernels are folded into whole ones.

A convolution is a matrix times unfolded patches. Sizes are doubled by matrices, too. The
soft-argmax and the wing loss have gradients by hand; losses are added up image by image.
"""

from math import cos, log, pi
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

SIZE = (24.0, 32.0)  # width, height
SHARPNESS = 8.0
SPREAD = 1.2
BEND, CURVE = 5.0, 2.0
EPS = 1e-3
SPEED = 0.03

# --- functions with a backward


class ExpectedPlace(torch.autograd.Function):
    """heat (n, points, cells), grid (cells, 2) -> where the heat is, (n, points, 2)."""

    @staticmethod
    def forward(ctx, heat, grid):
        p = torch.softmax(SHARPNESS * heat, dim=-1)
        place = p @ grid
        ctx.save_for_backward(p, place, grid)
        return place

    @staticmethod
    def backward(ctx, g):
        p, place, grid = ctx.saved_tensors
        pull = g @ grid.t()
        mean_pull = (g * place).sum(-1, keepdim=True)
        return SHARPNESS * p * (pull - mean_pull), None


class Wing(torch.autograd.Function):
    """gap (points, 2), weight (points) -> the weighted sum."""

    @staticmethod
    def forward(ctx, gap, weight):
        size = gap.abs()
        bent = BEND * torch.log1p(size / CURVE)
        straight = size - BEND + BEND * log(1 + BEND / CURVE)
        ctx.save_for_backward(gap, weight)
        return torch.where(size < BEND, bent, straight).sum(-1).dot(weight)

    @staticmethod
    def backward(ctx, g):
        gap, weight = ctx.saved_tensors
        size = gap.abs()
        slope = torch.where(size < BEND, BEND / (CURVE + size), 1.0)
        return g * weight[:, None] * slope * gap.sign(), None


# --- pieces


def patches(x, matrix, pad, stride=1, spacing=1):
    """3 x 3 patches times a matrix (out, in * 9); pad is left, right, top, bottom."""
    x = F.pad(x, pad)
    h, w = ((side - 2 * spacing - 1) // stride + 1 for side in x.shape[2:])
    columns = F.unfold(x, 3, dilation=spacing, stride=stride)
    return (matrix @ columns).unflatten(2, (h, w))


def mix(x, matrix):
    """1 x 1."""
    return (matrix @ x.flatten(2)).unflatten(2, x.shape[2:])


def norm(bag, key, x):
    var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0)
    scale = bag[key + "_gain"] * torch.rsqrt(var + EPS)
    offset = bag[key + "_shift"] - mean * scale
    with torch.no_grad():
        m = x[:, 0].numel()
        bag[key + "_mean"].lerp_(mean, SPEED)
        bag[key + "_var"].lerp_(var * (m / (m - 1)), SPEED)
    return torch.addcmul(offset[:, None, None], x, scale[:, None, None])


def doubling(x, size):
    """(2 * size, size): three quarters of the nearest cell, a quarter of the next."""
    matrix = x.new_zeros(2 * size, size)
    for i in range(2 * size):
        near = i // 2
        far = near - 1 if i % 2 == 0 else near + 1
        matrix[i, near] += 0.75
        matrix[i, min(max(far, 0), size - 1)] += 0.25
    return matrix


def smooth_up(x):
    h, w = x.shape[2:]
    return doubling(x, h) @ x @ doubling(x, w).t()


def blocky_up(x):
    return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


# --- blocks


def stem(bag, x):
    x = patches(x, bag["stem"], (0, 1, 0, 1), stride=2)
    return norm(bag, "stem", x).relu()


def gate(bag, key, x):
    s = x.mean((2, 3))
    s = F.linear(s, bag[key + "_squeeze"], bag[key + "_squeeze_bias"]).relu()
    s = F.linear(s, bag[key + "_excite"], bag[key + "_excite_bias"])
    return (s / 6 + 0.5).clamp(0, 1)


def residual(bag, key, x, spacing=1):
    y = patches(x, bag[key + "_a"], (spacing,) * 4, spacing=spacing)
    y = norm(bag, key + "_a", y).relu()
    y = patches(y, bag[key + "_b"], (1, 1, 1, 1))
    y = norm(bag, key + "_b", y)
    s = gate(bag, key, y)
    y = torch.einsum("nchw,nc->nchw", y, s)
    return (x + y).relu()


def shrink(bag, key, x):
    depth, point = bag[key + "_depth"], bag[key + "_point"]
    whole = torch.einsum("oc,kc->ock", point, depth).flatten(1)
    y = norm(bag, key, patches(x, whole, (0, 1, 0, 1), stride=2))
    corners = [x[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]
    kept = torch.stack(corners).amax(0)
    zeros = kept.new_zeros(len(x), y.shape[1] - kept.shape[1], *kept.shape[2:])
    return (y + torch.cat([kept, zeros], 1)).relu()


def pyramid(bag, fine, middle, coarse):
    both = [smooth_up(mix(coarse, bag["side3"])), mix(middle, bag["side2"])]
    y = patches(torch.cat(both, 1), bag["join2"], (1, 1, 1, 1))
    y = norm(bag, "join2", y).relu()
    y = blocky_up(y) + mix(fine, bag["side1"])
    y = patches(y, bag["join1"], (1, 1, 1, 1))
    return norm(bag, "join1", y).relu()


def centres(heat):
    """x and y of the cells' centres, (h * w, 2)."""
    h, w = heat.shape[2:]
    y = (torch.arange(h) + 0.5).div(h).repeat_interleave(w)
    x = (torch.arange(w) + 0.5).div(w).repeat(h)
    return torch.stack([x, y], 1).to(heat.dtype)


class Bag(nn.Module):
    def __init__(self, learned, followed):
        super().__init__()
        for key, value in learned.items():
            self.register_parameter(key, nn.Parameter(value.clone().contiguous()))
        for key, value in followed.items():
            self.register_buffer(key, value.clone().contiguous())
        for key, value in learned.items():
            self.register_buffer("slow_" + key, value.clone().contiguous())

    def __getitem__(self, key):
        return getattr(self, key)

    def forward(self, x):
        fine = residual(self, "one", stem(self, x))
        middle = residual(self, "two", shrink(self, "into_two", fine), spacing=2)
        coarse = residual(self, "three", shrink(self, "into_three", middle))

        y = pyramid(self, fine, middle, coarse)
        heat = mix(y, self["heat"]) + self["heat_bias"][:, None, None]
        place = ExpectedPlace.apply(heat.flatten(2), centres(heat))
        seen = F.linear(coarse.mean((2, 3)), self["seen"], self["seen_bias"])
        return heat, place, seen


# --- weights


class Packer:
    """Collects matrices and vectors, and what the norms follow."""

    def __init__(self, state):
        self.state, self.learned, self.followed = state, {}, {}

    def matrix(self, key, name):
        self.learned[key] = self.state[name + ".weight"].flatten(1)

    def linear(self, key, name):
        self.matrix(key, name)
        self.learned[key + "_bias"] = self.state[name + ".bias"]

    def norm(self, key, name):
        self.learned[key + "_gain"] = self.state[name + ".weight"]
        self.learned[key + "_shift"] = self.state[name + ".bias"]
        self.followed[key + "_mean"] = self.state[name + ".running_mean"]
        self.followed[key + "_var"] = self.state[name + ".running_var"]

    def residual(self, key, name):
        for letter, number in (("a", "1"), ("b", "2")):
            self.matrix(f"{key}_{letter}", f"{name}.conv{number}")
            self.norm(f"{key}_{letter}", f"{name}.bn{number}")
        self.linear(key + "_squeeze", name + ".se.fc1")
        self.linear(key + "_excite", name + ".se.fc2")

    def shrink(self, key, name):
        depth = self.state[name + ".depthwise.weight"]
        self.learned[key + "_depth"] = depth.flatten(1).t()
        self.matrix(key + "_point", name + ".pointwise")
        self.norm(key, name + ".bn")


def model():
    pack = Packer(torch.load(Path(__file__).with_name("weights.pt")))
    pack.matrix("stem", "stem.conv")
    pack.norm("stem", "stem.bn")
    pack.residual("one", "layer1")
    pack.shrink("into_two", "down1")
    pack.residual("two", "layer2")
    pack.shrink("into_three", "down2")
    pack.residual("three", "layer3")
    for i in ("1", "2", "3"):
        pack.matrix("side" + i, "lateral" + i)
    for i in ("1", "2"):
        pack.matrix("join" + i, f"smooth{i}.0")
        pack.norm("join" + i, f"smooth{i}.1")
    pack.linear("heat", "heatmap_head")
    pack.linear("seen", "visibility_head")
    return Bag(pack.learned, pack.followed)


def forward(net, batch):
    heat, place, seen = net((batch["image"].float() - 127.5) / 127.5)
    return {"heatmaps": heat, "points": place, "visibility": seen}


# --- losses


def blot(point, h, w):
    """A point in pixels -> h x w, a product of two bells."""
    x, y = (point / 2 - 0.5).tolist()
    across = torch.exp((torch.arange(w) - x).square() / (-2 * SPREAD**2))
    down = torch.exp((torch.arange(h) - y).square() / (-2 * SPREAD**2))
    return torch.outer(down, across)


def loss(output, batch):
    size = torch.tensor(SIZE)
    heat_total, wing_total, seen_total = torch.zeros(3)
    for heat, place, seen, points, visible in zip(
        output["heatmaps"],
        output["points"],
        output["visibility"],
        batch["points"],
        batch["visible"],
    ):
        wanted = torch.stack([blot(point, *heat.shape[1:]) for point in points])
        apart = (heat - wanted).pow(2).mean((1, 2))
        heat_total = heat_total + apart.dot(visible)
        wing_total = wing_total + Wing.apply(place * size - points, visible)
        wrong = F.softplus(torch.where(visible > 0, -seen, seen))
        seen_total = seen_total + wrong.mean()
    count = batch["visible"].sum()
    heat_loss, wing_loss = heat_total / count, wing_total / count
    seen_loss = seen_total / len(batch["visible"])
    return 10 * heat_loss + 0.2 * wing_loss + 0.5 * seen_loss


# --- training


class Nesterov(torch.optim.Optimizer):
    def __init__(self, bag, peak, end, pull):
        named = list(bag.named_parameters())
        flat = [p for _, p in named if p.dim() == 1]
        square = [p for _, p in named if p.dim() == 2]
        groups = [{"params": flat, "pull": 0.0}, {"params": square, "pull": pull}]
        super().__init__(groups, {})
        self.peak, self.end, self.time = peak, end, 0
        self.fast = [p for _, p in named]
        self.slow = [bag["slow_" + key] for key, _ in named]

    def rate(self):
        return self.peak * cos(pi * self.time / self.end / 2) ** 2

    @torch.no_grad()
    def step(self, closure=None):
        rate = self.rate()
        for group in self.param_groups:
            params = group["params"]
            grads = [p.grad for p in params]
            if group["pull"]:
                grads = list(torch._foreach_add(grads, params, alpha=group["pull"]))
            if "speed" not in group:
                group["speed"] = [torch.zeros_like(p) for p in params]
            torch._foreach_mul_(group["speed"], 0.9)
            torch._foreach_add_(group["speed"], grads)
            ahead = torch._foreach_add(grads, group["speed"], alpha=0.9)
            torch._foreach_add_(params, ahead, alpha=-rate)
        self.time += 1
        self.follow()

    def follow(self):
        keep = min(0.99, (1 + self.time) / (10 + self.time))
        torch._foreach_lerp_(self.slow, self.fast, 1 - keep)


def optimizer(net):
    return Nesterov(net, peak=0.03, end=8, pull=4e-3)
