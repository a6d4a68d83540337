"""Rotations as products of complex numbers, as in the first published code; fused attention."""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

HEADS = 4
GROUPS = 2


def turns(width, length, theta=10000.0):
    rates = 1.0 / (theta ** (torch.arange(0, width, 2).float() / width))
    angles = torch.outer(torch.arange(length).float(), rates)
    return torch.polar(torch.ones_like(angles), angles)


def turned(x, freqs):
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs[None, :, None, :]).flatten(3).type_as(x)


def pairs_of(weight, heads):
    rows, columns = weight.shape
    return (
        weight.view(heads, 2, rows // heads // 2, columns)
        .transpose(1, 2)
        .reshape(rows, columns)
    )


class RMSNorm(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.gain = nn.Parameter(weight.clone())

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gain


class Layer(nn.Module):
    def __init__(self, w, at):
        super().__init__()
        self.n1 = RMSNorm(w[at + "input_norm.weight"])
        self.n2 = RMSNorm(w[at + "post_norm.weight"])
        self.wq = nn.Parameter(pairs_of(w[at + "attention.q_proj.weight"], HEADS))
        self.wk = nn.Parameter(pairs_of(w[at + "attention.k_proj.weight"], GROUPS))
        self.wv = nn.Parameter(w[at + "attention.v_proj.weight"].clone())
        self.wo = nn.Parameter(w[at + "attention.o_proj.weight"].clone())
        self.w1 = nn.Parameter(w[at + "gate_proj.weight"].clone())
        self.w3 = nn.Parameter(w[at + "up_proj.weight"].clone())
        self.w2 = nn.Parameter(w[at + "down_proj.weight"].clone())

    def attention(self, x, freqs):
        n, t, d = x.shape
        q = F.linear(x, self.wq).view(n, t, HEADS, -1)
        k = F.linear(x, self.wk).view(n, t, GROUPS, -1)
        v = F.linear(x, self.wv).view(n, t, GROUPS, -1)
        q = turned(q, freqs)
        k = turned(k, freqs)
        k = k.repeat_interleave(HEADS // GROUPS, dim=2)
        v = v.repeat_interleave(HEADS // GROUPS, dim=2)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.linear(y.transpose(1, 2).reshape(n, t, d), self.wo)

    def forward(self, x, freqs):
        x = x + self.attention(self.n1(x), freqs)
        h = self.n2(x)
        return x + F.linear(
            F.silu(F.linear(h, self.w1)) * F.linear(h, self.w3), self.w2
        )


class Decoder(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.table = nn.Parameter(w["embed.weight"].clone())
        self.layers = nn.ModuleList(Layer(w, f"layers.{i}.") for i in range(2))
        self.n = RMSNorm(w["norm.weight"])
        self.out = nn.Parameter(w["lm_head.weight"].clone())
        width = w["layers.0.attention.q_proj.weight"].shape[0] // HEADS
        self.register_buffer("freqs", turns(width, 64), persistent=False)

    def forward(self, tokens):
        x = F.embedding(tokens, self.table)
        freqs = self.freqs[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, freqs)
        return F.linear(self.n(x), self.out)


def model():
    return Decoder(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["tokens"][:, :-1])
