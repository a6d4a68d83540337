"""As in Haiku: pure functions of a flat tree, channels last; convolutions are matrices.

The filters of all layers are made at once, before the first of them. The streams of an
operator stand in the order in which they are used: value, first gate, second gate.
"""

from functools import partial
from math import pi
from pathlib import Path

import torch
from torch import nn

LAYERS, DIM, STREAMS, HORIZON = 3, 12, 3, 32
BANDS = 3
SHIFT = 0.05


def linear(p, name, x):
    return torch.einsum("...i,io->...o", x, p[name + "/w"]) + p[name + "/b"]


def layer_norm(p, name, x, eps=1e-5):
    mean = torch.mean(x, dim=-1, keepdim=True)
    centred = x - mean
    variance = torch.mean(centred * centred, dim=-1, keepdim=True)
    # the scale is kept as what it differs from one by
    scale = 1 + p[name + "/scale"]
    return centred / torch.sqrt(variance + eps) * scale + p[name + "/offset"]


def gelu(x):
    return x * torch.sigmoid(2 * (2 / pi) ** 0.5 * (x + 0.044715 * x * x * x))


# filters


def features(steps):
    """(time, features): cosines, sines, and the time itself."""
    speed = torch.linspace(1e-4, BANDS - 1, BANDS)
    angle = 2 * pi * steps[:, None] / HORIZON * speed
    time = steps[:, None] / (HORIZON - 1)
    return torch.cat([torch.cos(angle), torch.sin(angle), time], dim=1)


def make_filters(p, length):
    """Return the filters of all layers and orders (layers, time, orders, channels)."""
    steps = torch.arange(length).to(p["embed"])
    omega = p["filters/omega"][:, None]
    h = torch.einsum("te,lew->ltw", features(steps), p["filters/enter/w"])
    h = torch.sin(omega * (h + p["filters/enter/b"][:, None]))
    h = torch.einsum("ltv,lvw->ltw", h, p["filters/middle/w"])
    h = torch.sin(omega * (h + p["filters/middle/b"][:, None]))
    h = torch.einsum("ltw,lwod->ltod", h, p["filters/leave/w"])

    rate = p["filters/rate"][:, None]
    window = torch.exp(-rate * steps[:, None, None] / (HORIZON - 1))
    h = h * (window + SHIFT)
    size = torch.sum(torch.abs(h), dim=1, keepdim=True)
    return h / size


def toeplitz(h, skip):
    """Matrices (to, from, channels) of causal filters (time, channels)."""
    steps = torch.arange(len(h))
    lag = steps[:, None] - steps[None, :]
    matrix = h[torch.clamp(lag, min=0)]
    matrix = torch.where((lag >= 0)[:, :, None], matrix, torch.zeros_like(matrix))
    return matrix + torch.eye(len(h)).to(h)[:, :, None] * skip


# blocks


def shifted(x, by):
    """Later by some steps; zeros come in."""
    if by == 0:
        return x
    return torch.cat([torch.zeros_like(x[:, :by]), x[:, :-by]], dim=1)


def short_conv(p, name, x):
    """x: (batch, time, streams, channels); the first tap is that of the present."""
    taps = p[name + "/w"]
    y = sum(shifted(x, by) * tap for by, tap in enumerate(taps))
    return y + p[name + "/b"]


def mixer(p, name, filters, skips, x):
    streams = torch.einsum("btc,csd->btsd", x, p[name + "/streams/w"])
    streams = streams + p[name + "/streams/b"]
    streams = short_conv(p, name + "/taps", streams)
    value, *gates = streams.unbind(2)
    for i, gate in enumerate(gates):
        matrix = toeplitz(filters[:, i], skips[i])
        value = torch.einsum("ijd,bjd->bid", matrix, value) * gate
    return linear(p, name + "/out", value)


def mlp(p, name, x):
    return linear(p, name + "/down", gelu(linear(p, name + "/up", x)))


def block(p, name, filters, skips, x):
    mixed = layer_norm(p, name + "/norm_mixer", x)
    x = x + mixer(p, name + "/mixer", filters, skips, mixed)
    fed = layer_norm(p, name + "/norm_mlp", x)
    return x + mlp(p, name + "/mlp", fed)


def apply(p, tokens):
    filters = make_filters(p, tokens.shape[1])
    x = p["embed"][tokens]
    for i in range(LAYERS):
        x = block(p, f"block{i}", filters[i], p["filters/skip"][i], x)
    x = layer_norm(p, "norm_out", x)
    return torch.einsum("btd,vd->btv", x, p["embed"])


# the tree


def streams(rows):
    """(3 * channels, ...) of second gate, first gate, value -> (streams, channels, ...)."""
    return rows.unflatten(0, (STREAMS, DIM)).flip(0)


def filter_tree(w):
    def stacked(name):
        return torch.stack(
            [w[f"layers.{i}.mixer.filter_fn.{name}"] for i in range(LAYERS)]
        )

    enter = stacked("implicit_filter.0.weight").transpose(1, 2)
    time, cosines, sines = enter.split([1, BANDS, BANDS], dim=1)
    leave = stacked("implicit_filter.4.weight").transpose(1, 2)
    learned = {
        # the waves of the other side turn backwards
        "filters/enter/w": torch.cat([cosines, -sines, time], dim=1),
        "filters/enter/b": stacked("implicit_filter.0.bias"),
        "filters/middle/w": stacked("implicit_filter.2.weight").transpose(1, 2),
        "filters/middle/b": stacked("implicit_filter.2.bias"),
        "filters/leave/w": leave.unflatten(2, (-1, DIM)),
        "filters/omega": stacked("implicit_filter.1.freq")[:, 0],
        "filters/skip": stacked("bias").unflatten(1, (-1, DIM)),
    }
    rate = stacked("modulation.deltas").abs()[:, 0, 0]
    return learned, {"filters/rate": rate.unflatten(1, (-1, DIM))}


def block_tree(w, source, name):
    p = {}
    for ours, theirs in (("norm_mixer", "norm1"), ("norm_mlp", "norm2")):
        p[f"{name}/{ours}/scale"] = w[f"{source}.{theirs}.weight"] - 1
        p[f"{name}/{ours}/offset"] = w[f"{source}.{theirs}.bias"]
    entering = source + ".mixer.in_proj"
    p[f"{name}/mixer/streams/w"] = streams(w[entering + ".weight"]).permute(2, 0, 1)
    p[f"{name}/mixer/streams/b"] = streams(w[entering + ".bias"])
    # correlation there, convolution here
    taps = streams(w[source + ".mixer.short_filter.weight"])[:, :, 0].flip(2)
    p[f"{name}/mixer/taps/w"] = taps.permute(2, 0, 1)
    p[f"{name}/mixer/taps/b"] = streams(w[source + ".mixer.short_filter.bias"])
    for ours, theirs in (
        ("mixer/out", "mixer.out_proj"),
        ("mlp/up", "mlp.fc1"),
        ("mlp/down", "mlp.fc2"),
    ):
        p[f"{name}/{ours}/w"] = w[f"{source}.{theirs}.weight"].T
        p[f"{name}/{ours}/b"] = w[f"{source}.{theirs}.bias"]
    return p


def tree(w):
    learned, fixed = filter_tree(w)
    learned["embed"] = w["embeddings.weight"]
    for i in range(LAYERS):
        learned |= block_tree(w, f"layers.{i}", f"block{i}")
    learned["norm_out/scale"] = w["ln_f.weight"] - 1
    learned["norm_out/offset"] = w["ln_f.bias"]
    return learned, fixed


class Transformed(nn.Module):
    def __init__(self, learned, fixed):
        super().__init__()
        for name, value in learned.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))
        for name, value in fixed.items():
            self.register_buffer(name, value.clone().contiguous())

    def forward(self, tokens):
        p = {**dict(self.named_parameters()), **dict(self.named_buffers())}
        return apply(p, tokens)


def model():
    return Transformed(*tree(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    return net(batch["input_ids"][:, :-1])


def loss(logits, batch):
    targets = batch["input_ids"][:, 1:]
    weights = (targets != 0).to(logits)
    one_hot = torch.eye(logits.shape[-1]).to(logits)[targets]
    losses = -torch.sum(one_hot * torch.log_softmax(logits, dim=-1), dim=-1)
    return torch.sum(losses * weights) / torch.sum(weights)


# as in optax


def label(name):
    if name.startswith("filters/"):
        return "filter"
    return "matrix" if name.endswith("/w") or name == "embed" else "vector"


def scale_by_adam(state, grad, b1, b2, eps):
    state["count"] = count = state.get("count", 0) + 1
    state["mu"] = b1 * state.get("mu", 0) + (1 - b1) * grad
    state["nu"] = b2 * state.get("nu", 0) + (1 - b2) * grad**2
    mu_hat = state["mu"] / (1 - b1**count)
    nu_hat = state["nu"] / (1 - b2**count)
    return mu_hat / (torch.sqrt(nu_hat) + eps)


class Optax(torch.optim.Optimizer):
    def __init__(self, net, rates, decays, transform):
        named = list(net.named_parameters())
        groups = [
            {
                "params": [value for name, value in named if label(name) == each],
                "rate": rates[each],
                "decay": decays[each],
            }
            for each in rates
        ]
        super().__init__(groups, {})
        self.transform = transform

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for value in group["params"]:
                update = self.transform(self.state[value], value.grad)
                update = update + group["decay"] * value
                value.copy_(value - group["rate"] * update)


def optimizer(net):
    return Optax(
        net,
        rates={"matrix": 3e-3, "vector": 3e-3, "filter": 1e-3},
        decays={"matrix": 0.1, "vector": 0.0, "filter": 0.0},
        transform=partial(scale_by_adam, b1=0.9, b2=0.98, eps=1e-8),
    )
