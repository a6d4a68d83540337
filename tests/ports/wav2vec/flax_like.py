"""As in Flax: sound as (batch, time, channels), kernels (time, in, out), masks as numbers."""

from pathlib import Path

import torch
from torch import nn


def gelu(x):
    return x * (1 + torch.erf(x * 2**-0.5)) / 2


def frames(x, size, stride):
    """(n, t, c) -> (n, steps, size, c)."""
    steps = (x.shape[1] - size) // stride + 1
    index = torch.arange(steps)[:, None] * stride + torch.arange(size)
    return x[:, index]


def normalize(x, axes, scale, bias, eps=1e-5):
    mean = x.mean(axes, keepdim=True)
    center = x - mean
    var = (center * center).mean(axes, keepdim=True)
    return center / torch.sqrt(var + eps) * scale + bias


class Slow(torch.autograd.Function):
    """A tenth of the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return 0.1 * grad


class Module(nn.Module):
    """Parameters under short names."""

    def keep(self, **values):
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.clone().contiguous()))


class Conv(Module):
    def __init__(self, params, prefix, stride, norm=False):
        super().__init__()
        self.keep(kernel=params[prefix + "0.weight"].permute(2, 1, 0))
        self.stride, self.norm = stride, norm
        if norm:
            self.keep(scale=params[prefix + "1.weight"], bias=params[prefix + "1.bias"])

    def forward(self, x):
        windows = frames(x, self.kernel.shape[0], self.stride)
        x = torch.einsum("ntkc,kcf->ntf", windows, self.kernel)
        if self.norm:
            x = normalize(x, 1, self.scale, self.bias)
        return gelu(x)


class Dense(Module):
    def __init__(self, params, name):
        super().__init__()
        self.keep(kernel=params[name + ".weight"].T, bias=params[name + ".bias"])

    def forward(self, x):
        return torch.einsum("...i,io->...o", x, self.kernel) + self.bias


class LayerNorm(Module):
    def __init__(self, params, name):
        super().__init__()
        self.keep(scale=params[name + ".weight"], bias=params[name + ".bias"])

    def forward(self, x):
        return normalize(x, -1, self.scale, self.bias)


class PositionalConv(Module):
    """Weight norm over everything but the taps; groups one after the other."""

    def __init__(self, params, groups=3):
        super().__init__()
        name = "pos_conv.conv."
        g = params[name + "parametrizations.weight.original0"]
        v = params[name + "parametrizations.weight.original1"]
        self.keep(g=g.flatten(), v=v.permute(2, 1, 0), bias=params[name + "bias"])
        self.groups = groups

    def forward(self, x):
        length = torch.sqrt((self.v**2).sum((1, 2), keepdim=True))
        kernel = self.v / length * self.g[:, None, None]
        x = nn.functional.pad(x, (0, 0, 2, 1))
        pieces = []
        for xs, ks in zip(x.chunk(self.groups, -1), kernel.chunk(self.groups, -1)):
            windows = frames(xs, ks.shape[0], 1)
            pieces.append(torch.einsum("ntkc,kcf->ntf", windows, ks))
        return gelu(torch.cat(pieces, -1) + self.bias)


class Attention(Module):
    def __init__(self, params, name, heads=2):
        super().__init__()
        weights = params[name + ".in_proj_weight"].chunk(3)
        biases = params[name + ".in_proj_bias"].chunk(3)
        for part, w, b in zip("qkv", weights, biases):
            kernel = w.T.unflatten(1, (heads, -1))
            self.keep(**{part: kernel, part + "_bias": b.unflatten(0, (heads, -1))})
        out = params[name + ".out_proj.weight"].T.unflatten(0, (heads, -1))
        self.keep(out=out, out_bias=params[name + ".out_proj.bias"])

    def forward(self, x):
        q = torch.einsum("ntc,chd->nthd", x, self.q) + self.q_bias
        k = torch.einsum("ntc,chd->nthd", x, self.k) + self.k_bias
        v = torch.einsum("ntc,chd->nthd", x, self.v) + self.v_bias
        scores = torch.einsum("nthd,nshd->nhts", q * q.shape[-1] ** -0.5, k)
        weights = torch.softmax(scores, -1)
        mixed = torch.einsum("nhts,nshd->nthd", weights, v)
        return torch.einsum("nthd,hdc->ntc", mixed, self.out) + self.out_bias


class Block(nn.Module):
    def __init__(self, params, name):
        super().__init__()
        self.attention = Attention(params, name + ".self_attn")
        self.norm_1 = LayerNorm(params, name + ".norm1")
        self.wide = Dense(params, name + ".fc1")
        self.narrow = Dense(params, name + ".fc2")
        self.norm_2 = LayerNorm(params, name + ".norm2")

    def forward(self, x):
        x = self.norm_1(self.attention(x) + x)
        return self.norm_2(self.narrow(gelu(self.wide(x))) + x)


class Model(Module):
    def __init__(self, params):
        super().__init__()
        at = "feature_extractor.conv_layers."
        self.convs = nn.Sequential(
            Conv(params, at + "0.", 5, norm=True),
            Conv(params, at + "1.", 2),
            Conv(params, at + "2.", 2),
        )
        self.feature_norm = LayerNorm(params, "layer_norm")
        self.feature_proj = Dense(params, "post_extract_proj")
        self.positions = PositionalConv(params)
        self.encoder_norm = LayerNorm(params, "norm")
        self.blocks = nn.ModuleList(Block(params, f"layers.{i}") for i in (0, 1))
        self.target_proj = Dense(params, "project_q")
        self.context_proj = Dense(params, "final_proj")
        self.keep(masked=params["mask_emb"])

    def forward(self, wave, mask, negatives):
        features = Slow.apply(self.convs(wave[..., None]))
        penalty = torch.mean(features * features)
        features = self.feature_norm(features)
        x = self.feature_proj(features)
        x = torch.where(mask[..., None], self.masked, x)
        x = self.encoder_norm(x + self.positions(x))
        for block in self.blocks:
            x = block(x)
        # one-hot rows of the masked times, in order
        order = torch.arange(1, int(mask[0].sum()) + 1)
        picked = (mask.cumsum(1)[..., None] == order) & mask[..., None]
        picked = picked.to(x.dtype)
        target = self.target_proj(torch.einsum("ntm,ntc->nmc", picked, features))
        context = self.context_proj(torch.einsum("ntm,ntc->nmc", picked, x))
        rows = torch.arange(len(wave))[:, None, None]
        drawn = target[rows, negatives]
        equal = negatives == torch.arange(target.shape[1])[:, None]
        near = self.cosine(context, target)[..., None]
        far = self.cosine(context[:, :, None], drawn)
        far = torch.where(equal, -torch.inf, far)
        logits = torch.cat([near, far], -1) / 0.2
        contrast = torch.logsumexp(logits, -1) - logits[..., 0]
        return contrast.mean(), penalty

    def cosine(self, a, b):
        lengths = a.norm(dim=-1) * b.norm(dim=-1)
        return (a * b).sum(-1) / lengths


def model():
    return Model(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["wave"], batch["mask"], batch["negatives"])


def loss(output, batch):
    contrast, penalty = output
    return contrast + 10 * penalty


class AdamW(torch.optim.Optimizer):
    def __init__(self, params, rate=2e-3, b1=0.9, b2=0.98, eps=1e-6, decay=0.01):
        super().__init__(params, {"rate": rate})
        self.b1, self.b2, self.eps, self.decay = b1, b2, eps, decay

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                s = self.state[p]
                t = s["t"] = s.get("t", 0) + 1
                s["m"] = self.b1 * s.get("m", 0) + (1 - self.b1) * p.grad
                s["v"] = self.b2 * s.get("v", 0) + (1 - self.b2) * p.grad**2
                m = s["m"] / (1 - self.b1**t)
                v = s["v"] / (1 - self.b2**t)
                p -= group["rate"] * (m / (v.sqrt() + self.eps) + self.decay * p)


def optimizer(net):
    return AdamW(net.parameters())
