"""After JAX and Haiku: pure functions over nested dictionaries, channels last, HWIO.

Spectra are products with tables of cosines and sines. The calendar is one table of rows.
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn


class Hyper(NamedTuple):
    history: int = 44
    horizon: int = 14
    width: int = 16
    blocks: int = 2
    periods: int = 3
    kernels: tuple = ("1x1", "3x3", "5x5")
    peak_lr: float = 1e-2
    end_lr: float = 1e-3
    decay_steps: int = 6
    decay: float = 0.1


hp = Hyper()
FIELDS = (("month", 12), ("weekday", 7), ("hour", 24))
IMPORTANCE = (1.0, 0.4, 1.6, 0.7, 1.2)
SPECTRAL = 0.6

# ------------------------------------------------------------------ layers


def linear(p, x):
    return torch.einsum("...i,io->...o", x, p["w"]) + p["b"]


def layer_norm(p, x, eps=1e-5):
    mean = torch.mean(x, dim=-1, keepdim=True)
    second = torch.mean(x * x, dim=-1, keepdim=True)
    inv = torch.rsqrt(second - mean * mean + eps)
    return (x - mean) * inv * p["scale"] + p["offset"]


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def softmax(x):
    unnormalized = torch.exp(x - torch.amax(x, dim=-1, keepdim=True).detach())
    return unnormalized / torch.sum(unnormalized, dim=-1, keepdim=True)


def conv_same(p, x):
    """NHWC by HWIO."""
    height, width = p["w"].shape[:2]
    lhs = torch.permute(x, (0, 3, 1, 2))
    rhs = torch.permute(p["w"], (3, 2, 0, 1))
    y = nn.functional.conv2d(lhs, rhs, padding=(height // 2, width // 2))
    return torch.permute(y, (0, 2, 3, 1)) + p["b"]


def conv_ring(p, x):
    """A window of three on a ring: the past, the present, and what comes."""
    past, future = torch.roll(x, 1, dims=1), torch.roll(x, -1, dims=1)
    windows = torch.stack([past, x, future], dim=2)
    return torch.einsum("blki,kio->blo", windows, p["w"])


def inception(p, x):
    return sum(conv_same(p[name], x) for name in hp.kernels) * (1.0 / len(hp.kernels))


# ------------------------------------------------------------------ tables


def dft_tables(n):
    """[n // 2 + 1, n] each, with unit rows."""
    turns = torch.outer(torch.arange(n // 2 + 1), torch.arange(n)) % n
    angle = turns.double() * (2.0 * math.pi / n)
    norm = 1.0 / math.sqrt(n)
    return (norm * torch.cos(angle)).float(), (norm * torch.sin(angle)).float()


def amplitude(x):
    """[batch, time, channels] -> [batch, frequency, channels]"""
    cosine, sine = dft_tables(x.shape[1])
    re = torch.einsum("ft,btc->bfc", cosine, x)
    im = torch.einsum("ft,btc->bfc", sine, x)
    return torch.sqrt(re * re + im * im)


def sine_table(length, width):
    half = torch.arange(width // 2, dtype=torch.float64)
    wavelength = 10000.0 ** (2.0 * half / width)
    angle = torch.arange(length, dtype=torch.float64)[:, None] / wavelength
    pairs = torch.stack([torch.sin(angle), torch.cos(angle)], dim=-1)
    return pairs.reshape(length, width).float()


def calendar_rows(marks):
    """Numbers of rows in the one table; months count from one."""
    rows, start = [], 0
    for i, (name, size) in enumerate(FIELDS):
        first = 1 if name == "month" else 0
        rows.append(marks[..., i] - first + start)
        start += size
    return torch.stack(rows, dim=-1)


# ------------------------------------------------------------------ network


def embed(p, x, marks):
    tokens = conv_ring(p["token"], x)
    dates = torch.sum(p["calendar"]["table"][calendar_rows(marks)], dim=-2)
    return tokens + dates + sine_table(hp.history, hp.width)


def strongest(x):
    amp = amplitude(x)
    mean_amp = torch.mean(amp, dim=2)
    score = torch.mean(mean_amp.detach(), dim=0)
    score = torch.where(torch.arange(len(score)) == 0, -1.0, score)
    _, freqs = torch.topk(score, hp.periods)
    return freqs.tolist(), mean_amp[:, freqs]


def through_plane(p, x, period):
    batch, time, width = x.shape
    rows = -(-time // period)
    tail = torch.zeros(batch, rows * period - time, width)
    plane = torch.cat([x, tail], dim=1).reshape(batch, rows, period, width)
    plane = gelu(inception(p["widen"], plane))
    plane = inception(p["narrow"], plane)
    return plane.reshape(batch, rows * period, width)[:, :time]


def times_block(p, x):
    freqs, amp = strongest(x)
    lines = [through_plane(p, x, x.shape[1] // freq) for freq in freqs]
    mixed = torch.einsum("kbtc,bk->btc", torch.stack(lines), softmax(amp))
    return x + mixed


def apply(params, x, marks):
    loc = torch.mean(x, dim=1, keepdim=True)
    scale = torch.sqrt(torch.mean((x - loc) ** 2, dim=1, keepdim=True) + 1e-5)
    h = embed(params["embed"], (x - loc) / scale, marks)
    h = torch.einsum("bsc,st->btc", h, params["extend"]["w"])
    h = h + params["extend"]["b"][:, None]
    for i in range(hp.blocks):
        h = times_block(params[f"block_{i}"], h)
        h = layer_norm(params["norm"], h)
    y = linear(params["readout"], h[:, hp.history :])
    return y * scale + loc


# ------------------------------------------------------------------ parameters


def nest(flat):
    tree = {}
    for path, leaf in flat.items():
        *parents, last = path.split("/")
        here = tree
        for parent in parents:
            here = here.setdefault(parent, {})
        here[last] = leaf
    return tree


def from_torch(sd):
    """Return a flat dictionary from path to array."""
    flat = {
        "embed/token/w": torch.permute(sd["embedding.token.weight"], (2, 1, 0)),
        "embed/calendar/table": torch.cat(
            [sd[f"embedding.{name}.weight"] for name, _ in FIELDS]
        ),
        "extend/w": sd["predict_linear.weight"].T,
        "extend/b": sd["predict_linear.bias"],
        "norm/scale": sd["layer_norm.weight"],
        "norm/offset": sd["layer_norm.bias"],
        "readout/w": sd["projection.weight"].T,
        "readout/b": sd["projection.bias"],
    }
    for i in range(hp.blocks):
        for part, number in (("widen", 0), ("narrow", 2)):
            for j, kernel in enumerate(hp.kernels):
                source = f"blocks.{i}.conv.{number}.kernels.{j}"
                path = f"block_{i}/{part}/{kernel}"
                w = sd[f"{source}.weight"]
                flat[f"{path}/w"] = torch.permute(w, (2, 3, 1, 0))
                flat[f"{path}/b"] = sd[f"{source}.bias"]
    return flat


class Transformed(nn.Module):
    def __init__(self, flat):
        super().__init__()
        for path, leaf in flat.items():
            self.register_parameter(path, nn.Parameter(leaf.clone().contiguous()))

    def forward(self, x, marks):
        return apply(nest(dict(self.named_parameters())), x, marks)


def model():
    return Transformed(from_torch(torch.load(Path(__file__).with_name("weights.pt"))))


# ------------------------------------------------------------------ training


def forward(net, batch):
    return net(batch["x"], batch["marks"])


def loss(output, batch):
    seen = batch["observed"]
    residual = torch.where(seen, output - batch["y"], 0.0)
    nearness = torch.arange(1, hp.horizon + 1) ** -0.5
    weights = torch.einsum(
        "bhc,h,c->bhc", seen.float(), nearness, torch.tensor(IMPORTANCE)
    )
    absolute = torch.vdot(weights.flatten(), torch.abs(residual).flatten())
    return absolute / torch.sum(weights) + SPECTRAL * torch.mean(amplitude(residual))


def cosine_schedule(count):
    fraction = min(count, hp.decay_steps) / hp.decay_steps
    cosine = 0.5 * (1.0 + math.cos(math.pi * fraction))
    alpha = hp.end_lr / hp.peak_lr
    return hp.peak_lr * ((1.0 - alpha) * cosine + alpha)


def scale_by_adam(grads, state, b1=0.9, b2=0.98, eps=1e-7):
    count = state["count"] + 1
    mu = {k: b1 * state["mu"][k] + (1.0 - b1) * g for k, g in grads.items()}
    nu = {k: b2 * state["nu"][k] + (1.0 - b2) * g * g for k, g in grads.items()}
    updates = {
        k: (mu[k] / (1.0 - b1**count)) / (torch.sqrt(nu[k] / (1.0 - b2**count)) + eps)
        for k in grads
    }
    return updates, {"count": count, "mu": mu, "nu": nu}


def add_decayed_weights(updates, params, mask):
    return {k: u + hp.decay * params[k] if mask(k) else u for k, u in updates.items()}


def decays(path):
    return path.endswith("/w")


class Adamw(torch.optim.Optimizer):
    def __init__(self, net):
        self.params = dict(net.named_parameters())
        super().__init__(list(self.params.values()), {})
        zeros = {k: torch.zeros_like(p) for k, p in self.params.items()}
        self.adam = {"count": 0, "mu": zeros, "nu": dict(zeros)}

    @torch.no_grad()
    def step(self, closure=None):
        grads = {k: p.grad for k, p in self.params.items()}
        rate = cosine_schedule(self.adam["count"])
        updates, self.adam = scale_by_adam(grads, self.adam)
        updates = add_decayed_weights(updates, self.params, decays)
        for k, p in self.params.items():
            p.add_(updates[k], alpha=-rate)


def optimizer(net):
    return Adamw(net)
