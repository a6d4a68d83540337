"""After Flax: a nested dictionary of tensors, ``init`` and ``apply``, a chain of updates.

Maps are [batch, time, channels]. Convolutions are patches and an einsum; a transposed one
puts zeros between the frames. Speakers are folded into the batch, one after the other.
"""

from itertools import permutations
from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

CONFIG = {"speakers": 2, "window": 16, "hop": 8, "dilations": (1, 2, 4) * 2}
NORM_EPS = 1e-8
SNR_EPS = 1e-8


# ---------------------------------------------------------------- lax


def pad_time(x, low, high, interior=0):
    """Zeros before, behind and between the steps of [batch, time, channels]."""
    batch, time, channels = x.shape
    if interior:
        x = torch.cat([x[:, :, None], x.new_zeros(batch, time, interior, channels)], 2)
        x = x.reshape(batch, -1, channels)[:, : (time - 1) * (interior + 1) + 1]
    return nn.functional.pad(x, (0, 0, low, high))


def patches(x, width, stride, dilation):
    """[batch, steps, channels, width]"""
    reach = dilation * (width - 1) + 1
    return x.unfold(1, reach, stride)[..., ::dilation]


def conv_general_dilated(
    lhs,
    rhs,
    window_strides=1,
    padding=(0, 0),
    lhs_dilation=1,
    rhs_dilation=1,
    depthwise=False,
):
    """Kernels are [width, in, out], or [width, 1, channels] where each has its own."""
    x = pad_time(lhs, *padding, interior=lhs_dilation - 1)
    x = patches(x, rhs.shape[0], window_strides, rhs_dilation)
    if depthwise:
        return torch.einsum("btcw,wc->btc", x, rhs[:, 0])
    return torch.einsum("btcw,wco->bto", x, rhs)


def conv_transpose(lhs, rhs, stride):
    """The kernel is not turned over, as transpose_kernel=False has it."""
    reach = rhs.shape[0] - 1
    return conv_general_dilated(lhs, rhs, padding=(reach, reach), lhs_dilation=stride)


class LeakySlope(torch.autograd.Function):
    """custom_vjp: max(x, 0) + slope * min(x, 0)"""

    @staticmethod
    def forward(ctx, x, slope):
        ctx.save_for_backward(x, slope)
        return torch.where(x >= 0, x, slope * x)

    @staticmethod
    def backward(ctx, g):
        x, slope = ctx.saved_tensors
        d_x = torch.where(x >= 0, g, slope * g)
        d_slope = torch.sum(g * torch.clamp(x, max=0))
        return d_x, d_slope


# ---------------------------------------------------------------- apply


def dense(p, x):
    return torch.einsum("btc,co->bto", x, p["kernel"]) + p["bias"]


def prelu(p, x):
    return LeakySlope.apply(x, p["negative_slope"])


def global_layer_norm(p, x, valid):
    """Statistics of what is valid; what is not becomes 0."""
    axes = (1, 2)
    where = valid[:, :, None].expand_as(x)
    count = torch.sum(where, dim=axes, keepdim=True)
    x = torch.where(where, x, 0.0)
    mean = torch.sum(x, dim=axes, keepdim=True) / count
    centred = torch.where(where, x - mean, 0.0)
    var = torch.sum(torch.square(centred), dim=axes, keepdim=True) / count
    y = centred * torch.rsqrt(var + NORM_EPS)
    return torch.where(where, y * p["scale"] + p["bias"], 0.0)


def conv_block(p, x, valid, dilation):
    """Return what goes on to the next block, and to the masks."""
    h = dense(p["in"], x)
    h = prelu(p["act_in"], h)
    h = global_layer_norm(p["norm_in"], h, valid)
    h = conv_general_dilated(
        h,
        p["depthwise"]["kernel"],
        padding=(dilation, dilation),
        rhs_dilation=dilation,
        depthwise=True,
    )
    h = prelu(p["act_out"], h + p["depthwise"]["bias"])
    h = global_layer_norm(p["norm_out"], h, valid)
    skip = dense(p["skip"], h)
    if "residual" in p:
        x = x + dense(p["residual"], h)
    return x, skip


def separator(p, encoded, valid):
    """[batch, time, filters] -> [speakers, batch, time, filters]"""
    x = global_layer_norm(p["norm"], encoded, valid)
    x = dense(p["bottleneck"], x)
    skips = torch.zeros_like(x)
    for i, dilation in enumerate(CONFIG["dilations"]):
        x, skip = conv_block(p[f"block_{i}"], x, valid, dilation)
        skips = skips + skip
    h = prelu(p["act"], skips)
    logits = torch.einsum("btc,cso->sbto", h, p["masks"]["kernel"])
    logits = logits + p["masks"]["bias"][:, None, None, :]
    return torch.sigmoid(logits)


def apply(params, mixture, lengths):
    """[batch, time] -> [batch, speakers, time]"""
    batch, time = mixture.shape
    hop = CONFIG["hop"]
    hops = -(-time // hop)
    x = pad_time(mixture[:, :, None], hop, (hops + 1) * hop - time)
    encoded = conv_general_dilated(x, params["encoder"]["kernel"], hop)
    encoded = torch.clamp(encoded, min=0)

    last_frame = torch.div(lengths - 1, hop, rounding_mode="floor") + 1
    valid = torch.arange(encoded.shape[1]) <= last_frame[:, None]
    masks = separator(params["separator"], encoded, valid)
    sources = (masks * encoded).flatten(0, 1)
    waves = conv_transpose(sources, params["decoder"]["kernel"], hop)
    waves = waves.reshape(CONFIG["speakers"], batch, -1)
    return waves[:, :, hop : hop + time].transpose(0, 1)


# ---------------------------------------------------------------- init


def init(state):
    """PyTorch's state dict as a tree."""

    def dense_of(name):
        kernel = state[f"{name}.weight"][:, :, 0].T
        return {"kernel": kernel, "bias": state[f"{name}.bias"]}

    def norm_of(name):
        scale, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        return {"scale": scale.ravel(), "bias": bias.ravel()}

    def act_of(name):
        return {"negative_slope": state[f"{name}.weight"].reshape(())}

    def block_of(name):
        kernel = state[f"{name}.dconv.weight"].permute(2, 1, 0)
        tree = {
            "in": dense_of(f"{name}.conv"),
            "act_in": act_of(f"{name}.prelu1"),
            "norm_in": norm_of(f"{name}.norm1"),
            "depthwise": {"kernel": kernel, "bias": state[f"{name}.dconv.bias"]},
            "act_out": act_of(f"{name}.prelu2"),
            "norm_out": norm_of(f"{name}.norm2"),
            "skip": dense_of(f"{name}.skip"),
        }
        if f"{name}.res.weight" in state:
            tree["residual"] = dense_of(f"{name}.res")
        return tree

    masks = dense_of("separator.masks")
    tree = {
        "norm": norm_of("separator.norm"),
        "bottleneck": dense_of("separator.bottleneck"),
        "act": act_of("separator.prelu"),
        "masks": {k: v.unflatten(-1, (2, -1)) for k, v in masks.items()},
    }
    for i in range(len(CONFIG["dilations"])):
        tree[f"block_{i}"] = block_of(f"separator.blocks.{i}")
    decoder = state["decoder.weight"].permute(2, 0, 1)
    return {
        "encoder": {"kernel": state["encoder.weight"].permute(2, 1, 0)},
        "separator": tree,
        "decoder": {"kernel": torch.flip(decoder, (0,))},
    }


class Variables(nn.Module):
    """Holds the leaves of a tree."""

    def __init__(self, tree):
        super().__init__()
        self.names = list(tree)
        for name, value in tree.items():
            if isinstance(value, dict):
                self.add_module(name, Variables(value))
            else:
                leaf = nn.Parameter(value.clone().contiguous())
                self.register_parameter(name, leaf)

    def tree(self):
        values = {name: getattr(self, name) for name in self.names}
        return {
            name: value.tree() if isinstance(value, Variables) else value
            for name, value in values.items()
        }


class TrainState(nn.Module):
    def __init__(self, tree):
        super().__init__()
        self.params = Variables(tree)

    def forward(self, mixture, lengths):
        return apply(self.params.tree(), mixture, lengths)


def model():
    return TrainState(init(torch.load(Path(__file__).with_name("weights.pt"))))


# ---------------------------------------------------------------- data and loss


def clean(batch):
    """[batch, speakers, time] from bytes and decibels."""
    gain = 10.0 ** (0.05 * batch["gain"])
    return torch.einsum("bst,bs->bst", batch["speech"] * 2.0**-15, gain)


def forward(net, batch):
    mixture = torch.einsum("bst->bt", clean(batch))
    return net(mixture, batch["lengths"])


def remove_mean(x, valid):
    total = torch.sum(torch.where(valid, x, 0.0), dim=-1, keepdim=True)
    count = torch.sum(valid, dim=-1, keepdim=True)
    return torch.where(valid, x - total / count, 0.0)


def si_snr_matrix(estimates, targets):
    """[batch, estimates, targets] in decibels, out of inner products."""
    cross = torch.einsum("bit,bjt->bij", estimates, targets)
    power = torch.einsum("bit,bit->bi", estimates, estimates)[:, :, None]
    reference = torch.einsum("bjt,bjt->bj", targets, targets)[:, None, :]
    signal = torch.square(cross) / (reference + SNR_EPS)
    noise = power - signal
    return 10.0 * torch.log10(signal / (noise + SNR_EPS) + SNR_EPS)


def assignments(n):
    """[n!, n, n]: in each matrix a 1 where an estimate belongs to a target."""
    return torch.stack([torch.eye(n)[list(p)] for p in permutations(range(n))])


def loss(output, batch):
    valid = torch.arange(output.shape[-1]) < batch["lengths"][:, None, None]
    estimates = remove_mean(output, valid)
    targets = remove_mean(clean(batch), valid)
    matrix = si_snr_matrix(estimates, targets)
    chosen = assignments(CONFIG["speakers"])
    totals = torch.einsum("bij,pij->bp", matrix, chosen)
    best = torch.amax(totals, dim=1) / CONFIG["speakers"]
    return -torch.mean(best)


# ---------------------------------------------------------------- optax


class GradientTransformation(NamedTuple):
    init: Callable[[Any], Any]
    update: Callable[[Any, Any], Any]


def clip_by_global_norm(max_norm):
    def update(updates, state):
        norm = torch.linalg.vector_norm(torch.cat([g.ravel() for g in updates]))
        if norm < max_norm:
            return updates, state
        return [g / norm * max_norm for g in updates], state

    return GradientTransformation(lambda params: (), update)


def scale_by_adam(b1=0.9, b2=0.999, eps=1e-8):
    def init(params):
        mu = [torch.zeros_like(p) for p in params]
        nu = [torch.zeros_like(p) for p in params]
        return 0, mu, nu

    def update(updates, state):
        count, mu, nu = state
        count = count + 1
        mu = [b1 * m + (1.0 - b1) * g for m, g in zip(mu, updates)]
        nu = [b2 * n + (1.0 - b2) * torch.square(g) for n, g in zip(nu, updates)]
        mu_hat = [m / (1.0 - b1**count) for m in mu]
        nu_hat = [n / (1.0 - b2**count) for n in nu]
        updates = [m / (torch.sqrt(n) + eps) for m, n in zip(mu_hat, nu_hat)]
        return updates, (count, mu, nu)

    return GradientTransformation(init, update)


def scale_by_schedule(schedule):
    def update(updates, count):
        rate = schedule(count)
        return [rate * u for u in updates], count + 1

    return GradientTransformation(lambda params: 0, update)


def piecewise_constant_schedule(value, boundaries_and_scales):
    def schedule(count):
        rate = value
        for boundary, scale in boundaries_and_scales.items():
            if count >= boundary:
                rate = rate * scale
        return rate

    return schedule


def chain(*transforms):
    def init(params):
        return tuple(t.init(params) for t in transforms)

    def update(updates, states):
        new_states = []
        for transform, state in zip(transforms, states):
            updates, state = transform.update(updates, state)
            new_states.append(state)
        return updates, tuple(new_states)

    return GradientTransformation(init, update)


class Optax(torch.optim.Optimizer):
    def __init__(self, params, tx):
        super().__init__(params, {})
        self.tx = tx
        self.opt_state = tx.init(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        grads = [p.grad for p in params]
        updates, self.opt_state = self.tx.update(grads, self.opt_state)
        for p, u in zip(params, updates):
            p.add_(u)


def optimizer(net):
    halving = piecewise_constant_schedule(
        -4e-3, {boundary: 0.5 for boundary in range(2, 200, 2)}
    )
    tx = chain(
        clip_by_global_norm(5.0),
        scale_by_adam(),
        scale_by_schedule(halving),
    )
    return Optax(net.parameters(), tx)
