"""Arrays and functions: (batch, time, channels) all through, products by hand."""

from pathlib import Path

import numpy as np
import torch
from torch import nn


def swish(x):
    return x / (1 + torch.exp(-x))


def normalized(x, g, b):
    m = x.mean(-1, keepdim=True)
    s = (x - m).square().mean(-1, keepdim=True)
    return (x - m) / torch.sqrt(s + 1e-5) * g + b


def dense(p, name, x):
    return torch.tensordot(x, p[name + "/w"], dims=([-1], [0])) + p[name + "/b"]


def ln(p, name, x):
    return normalized(x, p[name + "/g"], p[name + "/b"])


def feed(p, at, x):
    h = ln(p, at + "/ln", x)
    h = swish(dense(p, at + "/up", h))
    return dense(p, at + "/down", h)


def attention(p, at, x, is_word):
    b, t, d = x.shape
    heads = []
    for h in range(2):
        part = slice(h * d // 2, (h + 1) * d // 2)
        q = dense(p, at + "/q", x)[..., part]
        k = dense(p, at + "/k", x)[..., part]
        v = dense(p, at + "/v", x)[..., part]
        score = torch.einsum("bqc,bkc->bqk", q, k) / np.sqrt(d // 2)
        score = score + (1.0 - is_word[:, None, :].to(x.dtype)) * -1e30
        share = torch.exp(score - score.amax(-1, keepdim=True))
        share = share / share.sum(-1, keepdim=True)
        heads.append(torch.einsum("bqk,bkc->bqc", share, v))
    return dense(p, at + "/o", torch.cat(heads, -1))


def depthwise(x, kernel, bias):
    taps = kernel.shape[0]
    pad = taps // 2
    b, t, c = x.shape
    edge = torch.zeros(b, pad, c)
    padded = torch.cat([edge, x, edge], 1)
    y = padded[:, 0:t] * kernel[0]
    for k in range(1, taps):
        y = y + padded[:, k : k + t] * kernel[k]
    return y + bias


def conv_module(p, at, x):
    h = ln(p, at + "/ln", x)
    h = dense(p, at + "/wide", h)
    d = h.shape[-1] // 2
    h = h[..., :d] * torch.sigmoid(h[..., d:])
    h = depthwise(h, p[at + "/deep/w"], p[at + "/deep/b"])
    mean = h.mean((0, 1))
    variance = h.var((0, 1), unbiased=False)
    h = (h - mean) / torch.sqrt(variance + 1e-5) * p[at + "/bn/g"] + p[at + "/bn/b"]
    return dense(p, at + "/narrow", swish(h))


def block(p, at, x, is_word):
    x = x + feed(p, at + "/ff1", x) / 2
    x = x + attention(p, at + "/mha", ln(p, at + "/ln", x), is_word)
    x = x + conv_module(p, at + "/conv", x)
    x = x + feed(p, at + "/ff2", x) / 2
    return ln(p, at + "/end", x)


def positions(t, d):
    place = np.arange(t)[:, None] / np.power(100.0, np.arange(0, d, 2) / d)
    return torch.tensor(
        np.concatenate([np.sin(place), np.cos(place)], 1), dtype=torch.float32
    )


def patches(x):
    # windows of 3 x 3, two steps apart
    x = x.unfold(1, 3, 2).unfold(2, 3, 2)
    return x.reshape(*x.shape[:3], 9)


def network(p, x, lengths):
    h = torch.relu(dense(p, "sub", patches(x)))
    b, t = h.shape[:2]
    h = dense(p, "enter", h.reshape(b, t, -1))
    h = h * np.sqrt(12) + positions(t, 12)
    is_word = torch.arange(t)[None] < lengths[:, None]
    for i in range(2):
        h = block(p, f"block{i}", h, is_word)
    h = dense(p, "leave", h)
    return h - torch.logsumexp(h, -1, keepdim=True)


class Arrays(nn.Module):
    def __init__(self, arrays):
        super().__init__()
        self.p = nn.ParameterDict(
            {k: nn.Parameter(v.clone()) for k, v in arrays.items()}
        )

    def forward(self, x, lengths):
        return network(self.p, x, lengths)


def read(w):
    p = {}

    def put(name, source):
        weight = w[source + ".weight"]
        p[name + "/w"] = weight.reshape(len(weight), -1).t()
        p[name + "/b"] = w[source + ".bias"]

    def scale(name, source):
        p[name + "/g"] = w[source + ".weight"]
        p[name + "/b"] = w[source + ".bias"]

    put("sub", "sub")
    p["enter/w"] = w["enter.weight"].reshape(12, 4, 4).permute(2, 1, 0).reshape(16, 12)
    p["enter/b"] = w["enter.bias"]
    for i in range(2):
        a = f"block{i}"
        b = f"blocks.{i}"
        for ff in ("ff1", "ff2"):
            scale(f"{a}/{ff}/ln", f"{b}.{ff}.norm")
            put(f"{a}/{ff}/up", f"{b}.{ff}.one")
            put(f"{a}/{ff}/down", f"{b}.{ff}.two")
        scale(a + "/ln", b + ".norm")
        kernels = w[b + ".attention.in_proj_weight"].t().chunk(3, 1)
        biases = w[b + ".attention.in_proj_bias"].chunk(3)
        for name, kernel, bias in zip("qkv", kernels, biases):
            p[f"{a}/mha/{name}/w"] = kernel
            p[f"{a}/mha/{name}/b"] = bias
        put(a + "/mha/o", b + ".attention.out_proj")
        scale(a + "/conv/ln", b + ".conv.norm")
        put(a + "/conv/wide", b + ".conv.wide")
        p[a + "/conv/deep/w"] = w[b + ".conv.deep.weight"][:, 0].t()
        p[a + "/conv/deep/b"] = w[b + ".conv.deep.bias"]
        scale(a + "/conv/bn", b + ".conv.batch")
        put(a + "/conv/narrow", b + ".conv.narrow")
        scale(a + "/end", b + ".last")
    put("leave", "leave")
    return p


def model():
    return Arrays(read(torch.load(Path(__file__).with_name("weights.pt"))))


def forward(net, batch):
    return net(batch["x"], batch["lengths"])
