"""After Flax: a tree of arrays, functions of it, and transformations of gradients.

Pictures are [batch, y, x, channel] and kernels [y, x, in, out]. Projections of the attention
keep heads as an axis of their own; both branches of the gate have their own kernels.
"""

import math
from pathlib import Path

import torch
from torch import nn

HEADS = {"encoder": 2, "bottleneck": 3, "decoder": 2}
MULTIPLE = 4


# ------------------------------------------------------------------ primitives


def windows(x, size=3):
    """Views [b, y, x, c, size, size] of what is around each pixel; zeros outside."""
    before = (size - 1) // 2
    after = size - 1 - before
    x = nn.functional.pad(x, (0, 0, before, after, before, after))
    return x.unfold(1, size, 1).unfold(2, size, 1)


def conv(p, x):
    y = torch.einsum("byxcij,ijco->byxo", windows(x), p["kernel"])
    return y + p["bias"] if "bias" in p else y


def depthwise(p, x):
    return torch.einsum("byxcij,ijc->byxc", windows(x), p["kernel"]) + p["bias"]


def dense(p, x):
    return torch.einsum("...i,io->...o", x, p["kernel"]) + p["bias"]


def layer_norm(p, x, eps=1e-5):
    """What has no shift is not centred either."""
    mean = torch.mean(x, dim=-1, keepdim=True)
    var = torch.mean(torch.square(x), dim=-1, keepdim=True) - torch.square(mean)
    mul = torch.rsqrt(var + eps) * p["scale"]
    if "shift" in p:
        return (x - mean) * mul + p["shift"]
    return x * mul


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def unit(x, axis, eps=1e-12):
    norm = torch.sqrt(torch.sum(x * x, dim=axis, keepdim=True))
    return x / torch.clamp(norm, min=eps)


def pixel_unshuffle(x, r=2):
    """b (y r1) (x r2) c -> b y x (c r1 r2)"""
    b, y, w, c = x.shape
    x = x.reshape(b, y // r, r, w // r, r, c)
    return x.permute(0, 1, 3, 5, 2, 4).reshape(b, y // r, w // r, c * r * r)


def pixel_shuffle(x, r=2):
    """b y x (c r1 r2) -> b (y r1) (x r2) c"""
    b, y, w, c = x.shape
    x = x.reshape(b, y, w, c // (r * r), r, r)
    return x.permute(0, 1, 4, 2, 5, 3).reshape(b, y * r, w * r, c // (r * r))


# ------------------------------------------------------------------ network


def channel_attention(p, x):
    b, height, width, c = x.shape
    qkv = torch.einsum("byxc,cshd->byxshd", x, p["qkv"]["kernel"]) + p["qkv"]["bias"]
    heads, features = qkv.shape[-2:]
    qkv = depthwise(p["mix"], qkv.flatten(3))
    qkv = qkv.reshape(b, height * width, 3, heads, features)
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    q, k = unit(q, axis=1), unit(k, axis=1)
    logits = torch.einsum("bnhd,bnhe->bhde", q, k)
    logits = logits * p["temperature"][:, None, None]
    weights = torch.softmax(logits, dim=-1)
    mixed = torch.einsum("bhde,bnhe->bnhd", weights, v)
    y = torch.einsum("bnhd,hdc->bnc", mixed, p["out"]["kernel"]) + p["out"]["bias"]
    return y.reshape(b, height, width, c)


def gated_mlp(p, x):
    gate = depthwise(p["gate_mix"], dense(p["gate"], x))
    value = depthwise(p["value_mix"], dense(p["value"], x))
    return dense(p["down"], gelu(gate) * value)


def block(p, x):
    x = x + channel_attention(p["attn"], layer_norm(p["norm_attn"], x))
    return x + gated_mlp(p["mlp"], layer_norm(p["norm_mlp"], x))


def restormer(p, image):
    skip = block(p["encoder"], conv(p["stem"], image))
    deep = block(p["bottleneck"], pixel_unshuffle(conv(p["shrink"], skip)))
    up = pixel_shuffle(conv(p["grow"], deep))
    fused = dense(p["fuse"], torch.cat([up, skip], dim=-1))
    return image + conv(p["head"], block(p["decoder"], fused))


# ------------------------------------------------------------------ parameters


def to_hwio(weight):
    return weight.permute(2, 3, 1, 0)


def to_hwc(weight):
    """A depthwise kernel [channel, 1, y, x]."""
    return weight[:, 0].permute(1, 2, 0)


def to_io(weight):
    return weight[:, :, 0, 0].T


def convert_norm(sd, prefix):
    norm = {"scale": sd[prefix + ".body.weight"]}
    if prefix + ".body.bias" in sd:
        norm["shift"] = sd[prefix + ".body.bias"]
    return norm


def convert_attention(sd, prefix, heads):
    qkv = to_io(sd[prefix + ".qkv.weight"])
    width = qkv.shape[0]
    return {
        "temperature": sd[prefix + ".temperature"].reshape(heads),
        "qkv": {
            "kernel": qkv.reshape(width, 3, heads, width // heads),
            "bias": sd[prefix + ".qkv.bias"].reshape(3, heads, width // heads),
        },
        "mix": {
            "kernel": to_hwc(sd[prefix + ".qkv_dwconv.weight"]),
            "bias": sd[prefix + ".qkv_dwconv.bias"],
        },
        "out": {
            "kernel": to_io(sd[prefix + ".project_out.weight"]).reshape(
                heads, width // heads, width
            ),
            "bias": sd[prefix + ".project_out.bias"],
        },
    }


def convert_mlp(sd, prefix):
    inner, inner_bias = (
        sd[prefix + ".project_in.weight"],
        sd[prefix + ".project_in.bias"],
    )
    mix, mix_bias = sd[prefix + ".dwconv.weight"], sd[prefix + ".dwconv.bias"]
    half = len(inner) // 2
    return {
        "gate": {"kernel": to_io(inner[:half]), "bias": inner_bias[:half]},
        "value": {"kernel": to_io(inner[half:]), "bias": inner_bias[half:]},
        "gate_mix": {"kernel": to_hwc(mix[:half]), "bias": mix_bias[:half]},
        "value_mix": {"kernel": to_hwc(mix[half:]), "bias": mix_bias[half:]},
        "down": {
            "kernel": to_io(sd[prefix + ".project_out.weight"]),
            "bias": sd[prefix + ".project_out.bias"],
        },
    }


def convert_block(sd, prefix, heads):
    return {
        "norm_attn": convert_norm(sd, prefix + ".norm1"),
        "attn": convert_attention(sd, prefix + ".attn", heads),
        "norm_mlp": convert_norm(sd, prefix + ".norm2"),
        "mlp": convert_mlp(sd, prefix + ".ffn"),
    }


def convert(sd):
    return {
        "stem": {"kernel": to_hwio(sd["patch_embed.proj.weight"])},
        "encoder": convert_block(sd, "encoder_level1", HEADS["encoder"]),
        "shrink": {"kernel": to_hwio(sd["down1_2.body.0.weight"])},
        "bottleneck": convert_block(sd, "latent", HEADS["bottleneck"]),
        "grow": {"kernel": to_hwio(sd["up2_1.body.0.weight"])},
        "fuse": {
            "kernel": to_io(sd["reduce_chan_level1.weight"]),
            "bias": sd["reduce_chan_level1.bias"],
        },
        "decoder": convert_block(sd, "decoder_level1", HEADS["decoder"]),
        "head": {
            "kernel": to_hwio(sd["output.weight"]),
            "bias": sd["output.bias"],
        },
    }


class Tree(nn.Module):
    """A node of the tree of parameters; reads as a dictionary does."""

    def __init__(self, tree):
        super().__init__()
        for key, value in tree.items():
            if isinstance(value, dict):
                self.add_module(key, Tree(value))
            else:
                leaf = nn.Parameter(value.detach().clone().contiguous())
                self.register_parameter(key, leaf)

    def __getitem__(self, key):
        return getattr(self, key)

    def __contains__(self, key):
        return key in self._parameters or key in self._modules


def model():
    return Tree(convert(torch.load(Path(__file__).with_name("weights.pt"))))


# ------------------------------------------------------------------ task


def to_unit_range(pixels):
    return torch.movedim(pixels, 1, -1).to(torch.float32) / 255.0


def mirror_index(size):
    """Rows of a side that is long enough; the last one is not doubled."""
    index = torch.arange(math.ceil(size / MULTIPLE) * MULTIPLE)
    return torch.where(index < size, index, 2 * (size - 1) - index)


def forward(net, batch):
    noisy = to_unit_range(batch["noisy"])
    height, width = noisy.shape[1:3]
    image = noisy[:, mirror_index(height)][:, :, mirror_index(width)]
    restored = restormer(net, image)[:, :height, :width]
    return torch.movedim(restored, -1, 1)


def charbonnier(error, eps=1e-3):
    return torch.sqrt(torch.square(error) + eps**2)


def blur_line(x, axis):
    """Five taps along an axis; the border goes on outside."""
    size = x.shape[axis]
    at = torch.arange(size)
    taps = {-2: 0.05, -1: 0.25, 0: 0.4, 1: 0.25, 2: 0.05}
    return sum(
        tap * torch.index_select(x, axis, torch.clamp(at + d, 0, size - 1))
        for d, tap in taps.items()
    )


def blur(x):
    return blur_line(blur_line(x, 1), 2)


def lattice(height, width):
    """One where both row and column are even."""
    rows = (torch.arange(height) + 1) % 2
    cols = (torch.arange(width) + 1) % 2
    return (rows[:, None] * cols)[..., None]


def high_pass(x):
    kept = blur(x) * lattice(*x.shape[1:3]) * 4.0
    return x - blur(kept)


def extent_mask(extent, height, width):
    rows = torch.arange(height)[None, :] < extent[:, :1]
    cols = torch.arange(width)[None, :] < extent[:, 1:]
    return (rows[:, :, None] & cols[:, None, :])[..., None].to(torch.float32)


def loss(output, batch):
    restored = torch.movedim(output, 1, -1)
    clean = to_unit_range(batch["clean"])
    mask = extent_mask(batch["extent"], *clean.shape[1:3])
    error = restored - clean
    count = torch.sum(mask) * clean.shape[-1]
    pixel = torch.sum(charbonnier(error) * mask) / count
    edge = torch.mean(charbonnier(high_pass(error * mask)))
    return pixel + 0.05 * edge


# ------------------------------------------------------------------ optimizer


def clip_by_global_norm(max_norm):
    def update(grads, state, params):
        norm = torch.sqrt(sum(torch.sum(g**2) for g in grads.values()))
        trigger = norm < max_norm
        return {
            k: torch.where(trigger, g, g / (norm + 1e-6) * max_norm)
            for k, g in grads.items()
        }, state

    return lambda params: None, update


def scale_by_adam(b1=0.9, b2=0.999, eps=1e-8):
    def init(params):
        def zeros():
            return {k: torch.zeros_like(p) for k, p in params.items()}

        return {"count": 0, "mu": zeros(), "nu": zeros()}

    def update(grads, state, params):
        count = state["count"] + 1
        mu = {k: b1 * state["mu"][k] + (1 - b1) * g for k, g in grads.items()}
        nu = {k: b2 * state["nu"][k] + (1 - b2) * g**2 for k, g in grads.items()}
        updates = {}
        for k in grads:
            mu_hat = mu[k] / (1 - b1**count)
            nu_hat = nu[k] / (1 - b2**count)
            updates[k] = mu_hat / (torch.sqrt(nu_hat) + eps)
        return updates, {"count": count, "mu": mu, "nu": nu}

    return init, update


def add_decayed_weights(rate, mask):
    def update(updates, state, params):
        return {
            k: u + rate * params[k] if mask(k) else u for k, u in updates.items()
        }, state

    return lambda params: None, update


def scale_by_learning_rate(schedule):
    def update(updates, count, params):
        return {k: -schedule(count) * u for k, u in updates.items()}, count + 1

    return lambda params: 0, update


def cosine_decay(init_value, decay_steps, alpha):
    def schedule(count):
        count = min(count, decay_steps)
        cosine = 0.5 * (1.0 + math.cos(math.pi * count / decay_steps))
        return init_value * ((1.0 - alpha) * cosine + alpha)

    return schedule


def decays(path):
    """Kernels only."""
    return path.endswith("kernel")


def transformations():
    return [
        clip_by_global_norm(1.0),
        scale_by_adam(),
        add_decayed_weights(0.1, decays),
        scale_by_learning_rate(cosine_decay(1e-3, decay_steps=8, alpha=0.01)),
    ]


class Chain(torch.optim.Optimizer):
    """Applies transformations one after the other, and then adds what came out."""

    def __init__(self, net):
        self.tree = dict(net.named_parameters())
        super().__init__(list(self.tree.values()), {})
        chain = transformations()
        self.updates = [update for _, update in chain]
        self.states = [init(self.tree) for init, _ in chain]

    @torch.no_grad()
    def step(self, closure=None):
        updates = {path: p.grad for path, p in self.tree.items()}
        for i, update in enumerate(self.updates):
            updates, self.states[i] = update(updates, self.states[i], self.tree)
        for path, p in self.tree.items():
            p.add_(updates[path])


def optimizer(net):
    return Chain(net)
