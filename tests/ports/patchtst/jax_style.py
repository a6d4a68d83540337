"""After JAX: a flat dict of arrays, pure functions, layers in a stack for a scan.

Channels and batch are one axis of series, channels first; einsums name the others: m series,
n frames, d features, h heads, k features of a head. Norm and softmax have gradients by hand.
"""

import math
from pathlib import Path

import torch
from torch import nn

CONFIG = {"layers": 3, "heads": 4, "patch": 12, "stride": 6, "channels": 5}
MEAN = torch.tensor([18.0, 52.0, 1013.0, 3.5, 240.0])
STD = torch.tensor([6.0, 15.0, 9.0, 1.6, 110.0])
REVIN_EPS = 1e-5
NORM_EPS = 1e-5
NORM_DECAY = 0.9


# --------------------------------------------------------------- custom_vjp


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        e = torch.exp(x - torch.amax(x, dim=-1, keepdim=True))
        y = e / torch.sum(e, dim=-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, g):
        (y,) = ctx.saved_tensors
        return y * (g - torch.sum(g * y, dim=-1, keepdim=True))


class Normalize(torch.autograd.Function):
    """Features over series and frames; mean and var come out for the averages."""

    @staticmethod
    def forward(ctx, x, scale, bias):
        mean = torch.mean(x, dim=(0, 1))
        var = torch.mean(torch.square(x), dim=(0, 1)) - torch.square(mean)
        rstd = torch.rsqrt(var + NORM_EPS)
        unit = (x - mean) * rstd
        ctx.save_for_backward(unit, rstd, scale)
        ctx.mark_non_differentiable(mean, var)
        return unit * scale + bias, mean, var

    @staticmethod
    def backward(ctx, g, _mean, _var):
        unit, rstd, scale = ctx.saved_tensors
        d_bias = torch.sum(g, dim=(0, 1))
        d_scale = torch.sum(g * unit, dim=(0, 1))
        count = g.shape[0] * g.shape[1]
        d_x = scale * rstd * (g - (d_bias + unit * d_scale) / count)
        return d_x, d_scale, d_bias


# --------------------------------------------------------------- functions


def gelu(x, approximate=False):
    if approximate:
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1.0 + torch.tanh(inner))
    return 0.5 * x * torch.erfc(-x * math.sqrt(0.5))


def batch_norm(x, scale, bias, stats, train):
    """Return the normed x and the new averages [2, d]."""
    if not train:
        mean, var = stats
        return (x - mean) * torch.rsqrt(var + NORM_EPS) * scale + bias, stats
    y, mean, var = Normalize.apply(x, scale, bias)
    count = x.shape[0] * x.shape[1]
    seen = torch.stack([mean, var * (count / (count - 1))])
    return y, NORM_DECAY * stats + (1.0 - NORM_DECAY) * seen


def attention(w, x, carried):
    """The carried scores are not scaled; they are where they become shares."""
    packed = torch.einsum("mnd,dshk->smhnk", x, w["qkv"])
    query, key, value = packed
    query = query + w["q_bias"][:, None, :]
    scores = carried + torch.einsum("mhqk,mhnk->mhqn", query, key)
    shares = Softmax.apply(scores / math.sqrt(query.shape[-1]))
    mixed = torch.einsum("mhqn,mhnk->mqhk", shares, value)
    return torch.einsum("mqhk,hkd->mqd", mixed, w["out"]), scores


def layer(w, stats, x, carried, train):
    y, scores = attention(w, x, carried)
    x, first = batch_norm(x + y, w["scale"][0], w["bias"][0], stats[0], train)
    y = gelu(x @ w["up"] + w["up_bias"]) @ w["down"]
    x, second = batch_norm(x + y, w["scale"][1], w["bias"][1], stats[1], train)
    return x, scores, torch.stack([first, second])


def encoder(params, stats, x, train):
    """Scan over the layers."""
    stacked = {
        k.removeprefix("layers/"): v
        for k, v in params.items()
        if k.startswith("layers/")
    }
    series, frames, _ = x.shape
    carried = x.new_zeros(series, CONFIG["heads"], frames, frames)
    new_stats = []
    for i in range(CONFIG["layers"]):
        w = {k: v[i] for k, v in stacked.items()}
        x, carried, new = layer(w, stats[i], x, carried, train)
        new_stats.append(new)
    return x, torch.stack(new_stats)


def frame(x, size, stride):
    """[m, time] -> [m, frames, size]; the last value goes on for one stride."""
    x = nn.functional.pad(x[:, None], (0, stride), mode="replicate")[:, 0]
    first, last = 0, x.shape[1] - size
    starts = range(first, last + 1, stride)
    return torch.stack([x[:, i : i + size] for i in starts], dim=1)


def instance_stats(x):
    """[b, time, c] -> mean and deviation [b, 1, c]."""
    mean = torch.mean(x, dim=1, keepdim=True)
    var = torch.mean(torch.square(x - mean), dim=1, keepdim=True)
    return mean, torch.sqrt(var + REVIN_EPS)


def apply(params, stats, x, train):
    """[b, time, c] -> forecast [b, horizon, c] and the new averages of the norms."""
    gain, shift = params["revin/gain"], params["revin/shift"]
    mean, std = instance_stats(x)
    x = (x - mean) / std * gain + shift

    batch, _, channels = x.shape
    series = torch.permute(x, (2, 0, 1)).reshape(channels * batch, -1)
    patches = frame(series, CONFIG["patch"], CONFIG["stride"])
    x = patches @ params["embed/kernel"] + params["embed/bias"]
    x = x + params["embed/positions"]
    x, stats = encoder(params, stats, x, train)
    y = torch.einsum("mnd,ndt->mt", x, params["head/kernel"]) + params["head/bias"]
    y = torch.permute(y.reshape(channels, batch, -1), (1, 2, 0))

    back = std / (gain + REVIN_EPS**2)
    return (y - shift) * back + mean, stats


# --------------------------------------------------------------- weights


def convert(state):
    """PyTorch's state dict -> (params, stats)."""

    def stack(name):
        return torch.stack(
            [state[f"layers.{i}.{name}"] for i in range(CONFIG["layers"])]
        )

    def pair(name):
        return torch.stack([stack("norm_attn." + name), stack("norm_ff." + name)], 1)

    heads = CONFIG["heads"]
    packed = [stack(f"attn.W_{kind}.weight") for kind in "QKV"]
    packed = torch.stack(packed, dim=1).unflatten(2, (heads, -1))
    d_model = packed.shape[-1]
    head = state["head.weight"].unflatten(1, (d_model, -1))
    params = {
        "revin/gain": state["revin.affine_weight"],
        "revin/shift": state["revin.affine_bias"],
        "embed/kernel": state["W_P.weight"].T,
        "embed/bias": state["W_P.bias"],
        "embed/positions": state["W_pos"],
        "layers/qkv": torch.permute(packed, (0, 4, 1, 2, 3)),
        "layers/q_bias": stack("attn.W_Q.bias").unflatten(1, (heads, -1)),
        "layers/out": stack("attn.to_out.weight").mT.unflatten(1, (heads, -1)),
        "layers/up": stack("ff.0.weight").mT,
        "layers/up_bias": stack("ff.0.bias"),
        "layers/down": stack("ff.2.weight").mT,
        "layers/scale": pair("weight"),
        "layers/bias": pair("bias"),
        "head/kernel": torch.permute(head, (2, 1, 0)),
        "head/bias": state["head.bias"],
    }
    stats = torch.stack([pair("running_mean"), pair("running_var")], dim=2)
    return params, stats


class Network(nn.Module):
    """Holds the arrays for ``apply``."""

    def __init__(self, params, stats):
        super().__init__()
        self.params = nn.ParameterDict(
            {k: nn.Parameter(v.clone().contiguous()) for k, v in params.items()}
        )
        self.register_buffer("stats", stats)

    def forward(self, x, train=True):
        y, stats = apply(dict(self.params.items()), self.stats, x, train)
        self.stats.copy_(stats.detach())
        return y


def model():
    return Network(*convert(torch.load(Path(__file__).with_name("weights.pt"))))


# --------------------------------------------------------------- training


def standardize(x):
    return (x - MEAN) / STD


def forward(net, batch):
    return net(standardize(batch["past"]))


def loss(output, batch):
    error = output - standardize(batch["future"])
    return torch.mean(torch.square(error) + 0.1 * torch.abs(error))


def clip_by_global_norm(max_norm):
    def update(grads, state, params):
        norm = torch.linalg.vector_norm(torch.cat([g.ravel() for g in grads.values()]))
        trigger = norm + 1e-6 > max_norm
        factor = torch.where(trigger, max_norm / (norm + 1e-6), 1.0)
        return {k: g * factor for k, g in grads.items()}, state

    return lambda params: (), update


def scale_by_adam(b1=0.9, b2=0.999, eps=1e-8):
    def init(params):
        zeros = {k: torch.zeros_like(p) for k, p in params.items()}
        return 0, zeros, zeros

    def update(grads, state, params):
        count, mu, nu = state
        count = count + 1
        mu = {k: b1 * mu[k] + (1.0 - b1) * g for k, g in grads.items()}
        nu = {k: b2 * nu[k] + (1.0 - b2) * g * g for k, g in grads.items()}
        mu_hat = {k: m / (1.0 - b1**count) for k, m in mu.items()}
        nu_hat = {k: v / (1.0 - b2**count) for k, v in nu.items()}
        updates = {k: mu_hat[k] / (torch.sqrt(nu_hat[k]) + eps) for k in grads}
        return updates, (count, mu, nu)

    return init, update


DECAYED = ("kernel", "qkv", "out", "up", "down")


def add_decayed_weights(rate, mask=lambda name: name.split("/")[1] in DECAYED):
    def update(updates, state, params):
        decayed = {k: u + rate * params[k] * mask(k) for k, u in updates.items()}
        return decayed, state

    return lambda params: (), update


def scale_by_learning_rate(schedule):
    def update(updates, count, params):
        return {k: -schedule(count) * u for k, u in updates.items()}, count + 1

    return lambda params: 0, update


def cosine_onecycle(steps, peak, pct_start=0.4, div=5.0, final_div=1e3):
    """Half a cosine between two of three values."""
    places = (0.0, pct_start * steps - 1.0, steps - 1.0)
    values = (peak / div, peak, peak / (div * final_div))

    def schedule(count):
        i = 0 if count <= places[1] else 1
        share = (count - places[i]) / (places[i + 1] - places[i])
        weight = (1.0 - math.cos(math.pi * share)) / 2.0
        return values[i] * (1.0 - weight) + values[i + 1] * weight

    return schedule


class Chain(torch.optim.Optimizer):
    """Transformations of the gradient, one after the other."""

    def __init__(self, params, *transforms):
        self.params = dict(params)
        super().__init__(self.params.values(), {})
        self.updates = [update for _, update in transforms]
        self.states = [init(self.params) for init, _ in transforms]

    @torch.no_grad()
    def step(self, closure=None):
        changes = {k: p.grad for k, p in self.params.items()}
        for i, update in enumerate(self.updates):
            changes, self.states[i] = update(changes, self.states[i], self.params)
        for k, p in self.params.items():
            p.add_(changes[k])


def optimizer(net):
    return Chain(
        net.params.items(),
        clip_by_global_norm(0.5),
        scale_by_adam(),
        add_decayed_weights(0.1),
        scale_by_learning_rate(cosine_onecycle(steps=12, peak=1e-2)),
    )
