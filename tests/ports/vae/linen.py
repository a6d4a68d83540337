"""As in flax and optax: trees of params and batch_stats, NHWC, HWIO, a chain of transformations.

A transposed convolution is a convolution of a dilated input; its kernel is turned on loading.
"""

from pathlib import Path
from typing import Any, Callable, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

LATENT = 10
SHAPE = (4, 6, 16)
CONFIG = {"beta": 0.8, "free_bits": 0.3}


# ---------------------------------------------------------------- lax


def conv_general_dilated(lhs, rhs, strides, padding, lhs_dilation=1):
    """NHWC, HWIO -> NHWC. Zeros go between the pixels, then around them."""
    if lhs_dilation > 1:
        n, h, w, c = lhs.shape
        wide = lhs.new_zeros(n, h, lhs_dilation, w, lhs_dilation, c)
        wide[:, :, 0, :, 0] = lhs
        wide = wide.reshape(n, h * lhs_dilation, w * lhs_dilation, c)
        lhs = wide[:, : 1 - lhs_dilation, : 1 - lhs_dilation]
    (top, bottom), (left, right) = padding
    lhs = F.pad(lhs, (0, 0, left, right, top, bottom))
    kernel = rhs.permute(3, 2, 0, 1).contiguous()
    out = F.conv2d(lhs.permute(0, 3, 1, 2), kernel, stride=strides)
    return out.permute(0, 2, 3, 1)


def leaky_relu(x, negative_slope=0.2):
    return torch.where(x >= 0, x, negative_slope * x)


def silu(x):
    return x * torch.sigmoid(x)


# ---------------------------------------------------------------- layers


def dense(params, x):
    return x @ params["kernel"] + params["bias"]


def conv(params, x, strides=1, padding=((1, 1), (1, 1)), lhs_dilation=1):
    y = conv_general_dilated(x, params["kernel"], strides, padding, lhs_dilation)
    return y + params["bias"] if "bias" in params else y


def conv_transpose(params, x):
    """From torch's kernel of 3, stride of 2, padding of 1 and output padding of 1."""
    return conv(params, x, padding=((1, 2), (1, 2)), lhs_dilation=2)


def group_norm(params, x, num_groups=4, epsilon=1e-5):
    n, h, w, c = x.shape
    grouped = x.reshape(n, h, w, num_groups, c // num_groups)
    mean = grouped.mean((1, 2, 4), keepdim=True)
    mean2 = (grouped * grouped).mean((1, 2, 4), keepdim=True)
    var = mean2 - mean * mean
    y = ((grouped - mean) * torch.rsqrt(var + epsilon)).reshape(x.shape)
    return y * params["scale"] + params["bias"]


def batch_norm(params, stats, x, momentum=0.9, epsilon=1e-5):
    """Normalized by the batch's moments; also the new averages of these."""
    axes = (0, 1, 2)
    mean = x.mean(axes)
    var = (x * x).mean(axes) - mean * mean
    mul = torch.rsqrt(var + epsilon) * params["scale"]
    y = (x - mean) * mul + params["bias"]

    count = x.shape[0] * x.shape[1] * x.shape[2]
    unbiased = var * (count / (count - 1))
    new_stats = {
        "mean": momentum * stats["mean"] + (1 - momentum) * mean.detach(),
        "var": momentum * stats["var"] + (1 - momentum) * unbiased.detach(),
    }
    return y, new_stats


def res_block(params, x):
    h = silu(group_norm(params["norm_0"], x))
    h = conv(params["conv_0"], h)
    h = silu(group_norm(params["norm_1"], h))
    h = conv(params["conv_1"], h)
    return x + h


def upsample(x):
    return x.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)


# ---------------------------------------------------------------- the model


def encode(params, stats, x):
    updates = {}
    for i in range(2):
        x = conv(params[f"conv_{i}"], x, strides=2)
        x, updates[f"bn_{i}"] = batch_norm(params[f"bn_{i}"], stats[f"bn_{i}"], x)
        x = leaky_relu(x)
    x = silu(res_block(params["res_block"], x))
    x = x.reshape(x.shape[0], -1)
    return dense(params["mean"], x), dense(params["log_var"], x), updates


def decode(params, stats, z):
    updates = {}
    x = dense(params["dense"], z).reshape(-1, *SHAPE)
    x = res_block(params["res_block"], x)

    x = conv_transpose(params["conv_0"], x)
    x, updates["bn_0"] = batch_norm(params["bn_0"], stats["bn_0"], x)
    x = leaky_relu(x)

    x = conv(params["conv_1"], upsample(x))
    x, updates["bn_1"] = batch_norm(params["bn_1"], stats["bn_1"], x)
    x = leaky_relu(x)
    return conv(params["conv_2"], x), updates


def reparameterize(noise, mean, log_var):
    stddev = torch.exp(0.5 * log_var)
    return mean[:, None] + stddev[:, None] * noise


def apply(params, stats, image, noise):
    mean, log_var, enc = encode(params["encoder"], stats["encoder"], image)
    z = reparameterize(noise, mean, log_var)
    logits, dec = decode(params["decoder"], stats["decoder"], z.reshape(-1, LATENT))
    logits = logits.reshape(*noise.shape[:2], *logits.shape[1:])
    return (logits, mean, log_var), {"encoder": enc, "decoder": dec}


# ---------------------------------------------------------------- trees


class Tree(nn.Module):
    """A nested dict of arrays, which learn or not."""

    def __init__(self, arrays, learns):
        super().__init__()
        for key, value in arrays.items():
            if isinstance(value, dict):
                self.add_module(key, Tree(value, learns))
            elif learns:
                self.register_parameter(key, nn.Parameter(value.clone().contiguous()))
            else:
                self.register_buffer(key, value.clone())

    def __getitem__(self, key):
        return getattr(self, key)

    def __contains__(self, key):
        return hasattr(self, key)

    @torch.no_grad()
    def replace(self, arrays):
        for key, value in arrays.items():
            if isinstance(value, dict):
                self[key].replace(value)
            else:
                self[key].copy_(value)


class TrainState(nn.Module):
    def __init__(self, params, batch_stats):
        super().__init__()
        self.params = Tree(params, learns=True)
        self.batch_stats = Tree(batch_stats, learns=False)

    def forward(self, image, noise):
        out, updates = apply(self.params, self.batch_stats, image, noise)
        self.batch_stats.replace(updates)
        return out


# ---------------------------------------------------------------- torch's checkpoint


def conv_params(sd, name):
    params = {"kernel": sd[f"{name}.weight"].permute(2, 3, 1, 0)}
    if f"{name}.bias" in sd:
        params["bias"] = sd[f"{name}.bias"]
    return params


def conv_transpose_params(sd, name):
    kernel = sd[f"{name}.weight"].permute(2, 3, 0, 1)
    return {"kernel": kernel.flip((0, 1))}


def norm_params(sd, name):
    return {"scale": sd[f"{name}.weight"], "bias": sd[f"{name}.bias"]}


def norm_stats(sd, name):
    return {"mean": sd[f"{name}.running_mean"], "var": sd[f"{name}.running_var"]}


def block_params(sd, name):
    return {
        "norm_0": norm_params(sd, f"{name}.norm1"),
        "conv_0": conv_params(sd, f"{name}.conv1"),
        "norm_1": norm_params(sd, f"{name}.norm2"),
        "conv_1": conv_params(sd, f"{name}.conv2"),
    }


def head_params(sd, name):
    """A dense layer of a picture: rows go from CHW to HWC."""
    h, w, c = SHAPE
    kernel = sd[f"{name}.weight"].reshape(-1, c, h, w)
    kernel = kernel.permute(2, 3, 1, 0).reshape(h * w * c, -1)
    return {"kernel": kernel, "bias": sd[f"{name}.bias"]}


def start_params(sd, name):
    """A dense layer that makes a picture: columns go from CHW to HWC."""
    h, w, c = SHAPE
    kernel = sd[f"{name}.weight"].reshape(c, h, w, -1)
    bias = sd[f"{name}.bias"].reshape(c, h, w)
    return {
        "kernel": kernel.permute(3, 1, 2, 0).flatten(1),
        "bias": bias.permute(1, 2, 0).flatten(),
    }


def from_torch(sd):
    params = {
        "encoder": {
            "conv_0": conv_params(sd, "encoder.down1.0"),
            "bn_0": norm_params(sd, "encoder.down1.1"),
            "conv_1": conv_params(sd, "encoder.down2.0"),
            "bn_1": norm_params(sd, "encoder.down2.1"),
            "res_block": block_params(sd, "encoder.block"),
            "mean": head_params(sd, "encoder.mean"),
            "log_var": head_params(sd, "encoder.log_var"),
        },
        "decoder": {
            "dense": start_params(sd, "decoder.start"),
            "res_block": block_params(sd, "decoder.block"),
            "conv_0": conv_transpose_params(sd, "decoder.up1.0"),
            "bn_0": norm_params(sd, "decoder.up1.1"),
            "conv_1": conv_params(sd, "decoder.up2.1"),
            "bn_1": norm_params(sd, "decoder.up2.2"),
            "conv_2": conv_params(sd, "decoder.out"),
        },
    }
    stats = {
        "encoder": {
            "bn_0": norm_stats(sd, "encoder.down1.1"),
            "bn_1": norm_stats(sd, "encoder.down2.1"),
        },
        "decoder": {
            "bn_0": norm_stats(sd, "decoder.up1.1"),
            "bn_1": norm_stats(sd, "decoder.up2.2"),
        },
    }
    return params, stats


# ---------------------------------------------------------------- optax


class GradientTransformation(NamedTuple):
    init: Callable[[Any], Any]
    update: Callable[[Any, Any, Any], Any]


def clip_by_global_norm(max_norm):
    def update(updates, state, params):
        norm = torch.sqrt(sum((g * g).sum() for g in updates))
        scale = torch.where(norm < max_norm, torch.ones_like(norm), max_norm / norm)
        return [g * scale for g in updates], state

    return GradientTransformation(lambda params: None, update)


def scale_by_adam(b1, b2, eps):
    def init(params):
        mu = [torch.zeros_like(p) for p in params]
        nu = [torch.zeros_like(p) for p in params]
        return 0, mu, nu

    def update(updates, state, params):
        count, mu, nu = state
        count = count + 1
        mu = [b1 * m + (1 - b1) * g for m, g in zip(mu, updates)]
        nu = [b2 * v + (1 - b2) * g * g for v, g in zip(nu, updates)]
        mu_hat = [m / (1 - b1**count) for m in mu]
        nu_hat = [v / (1 - b2**count) for v in nu]
        updates = [m / (torch.sqrt(v) + eps) for m, v in zip(mu_hat, nu_hat)]
        return updates, (count, mu, nu)

    return GradientTransformation(init, update)


def add_decayed_weights(weight_decay, mask):
    def update(updates, state, params):
        updates = [
            u + weight_decay * p if mask(p) else u for u, p in zip(updates, params)
        ]
        return updates, state

    return GradientTransformation(lambda params: None, update)


def scale_by_schedule(schedule):
    def update(updates, count, params):
        rate = schedule(count)
        return [-rate * u for u in updates], count + 1

    return GradientTransformation(lambda params: 0, update)


def chain(*transforms):
    def init(params):
        return [t.init(params) for t in transforms]

    def update(updates, states, params):
        new_states = []
        for transform, state in zip(transforms, states):
            updates, state = transform.update(updates, state, params)
            new_states.append(state)
        return updates, new_states

    return GradientTransformation(init, update)


def warmup(count, peak=2e-3, steps=4):
    return peak * min(1.0, (count + 1) / steps)


class Optax(torch.optim.Optimizer):
    def __init__(self, params, tx):
        super().__init__(params, {})
        self.tx = tx
        self.opt_state = tx.init(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        grads = [p.grad for p in params]
        updates, self.opt_state = self.tx.update(grads, self.opt_state, params)
        for p, u in zip(params, updates):
            p.add_(u)


# ---------------------------------------------------------------- training


def model():
    state_dict = torch.load(Path(__file__).with_name("weights.pt"))
    return TrainState(*from_torch(state_dict))


def load_image(batch):
    return batch["image"].to(torch.float32).permute(0, 2, 3, 1) / 255.0


def forward(net, batch):
    image = load_image(batch) * 2.0 - 1.0
    logits, mean, log_var = net(image, batch["noise"])
    return {
        "logits": logits.permute(0, 1, 4, 2, 3),
        "mean": mean,
        "log_var": log_var,
    }


def sigmoid_binary_cross_entropy(logits, labels):
    log_p = F.logsigmoid(logits)
    log_not_p = F.logsigmoid(-logits)
    return -labels * log_p - (1.0 - labels) * log_not_p


def kl_divergence(mean, log_var):
    """From a normal of this mean and variance to the standard one."""
    return -0.5 * (1.0 + log_var - torch.square(mean) - torch.exp(log_var))


def loss(output, batch):
    labels = load_image(batch)[:, None]
    logits = output["logits"].permute(0, 1, 3, 4, 2)
    bce = sigmoid_binary_cross_entropy(logits, labels).sum((2, 3, 4))
    kld = kl_divergence(output["mean"], output["log_var"])
    kld = torch.clip(kld.mean(0), min=CONFIG["free_bits"]).sum()
    return bce.mean() + CONFIG["beta"] * kld


def optimizer(net):
    tx = chain(
        clip_by_global_norm(100.0),
        scale_by_adam(b1=0.9, b2=0.99, eps=1e-8),
        add_decayed_weights(0.05, mask=lambda p: p.ndim > 1),
        scale_by_schedule(warmup),
    )
    return Optax(net.parameters(), tx)
