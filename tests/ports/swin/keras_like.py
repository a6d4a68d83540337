"""In the style of Keras: kernels (in, out), channels last, einsum, three projections."""

import math
from pathlib import Path

import torch
from torch import nn


def norm(x, gamma, beta, epsilon=1e-5):
    mean = x.mean(-1, keepdim=True)
    variance = ((x - mean) ** 2).mean(-1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + epsilon) * gamma + beta


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


class Dense(nn.Module):
    def __init__(self, inputs, units, bias=True):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(inputs, units))
        self.bias = nn.Parameter(torch.empty(units)) if bias else None

    def forward(self, x):
        y = torch.einsum("...i,ij->...j", x, self.kernel)
        return y if self.bias is None else y + self.bias


class Norm(nn.Module):
    def __init__(self, units):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(units))
        self.beta = nn.Parameter(torch.empty(units))

    def forward(self, x):
        return norm(x, self.gamma, self.beta)


class Stage(nn.Module):
    def __init__(self, units, heads, side, offset):
        super().__init__()
        self.heads = heads
        self.offset = offset
        self.ln_a = Norm(units)
        self.query = Dense(units, units)
        self.key = Dense(units, units)
        self.value = Dense(units, units)
        self.out = Dense(units, units)
        self.bias_table = nn.Parameter(torch.empty(heads, 7, 7))
        self.ln_b = Norm(units)
        self.up = Dense(units, 2 * units)
        self.down = Dense(2 * units, units)
        zone = torch.arange(side)
        zone = (zone >= side - 4).int() + (zone >= side - 2).int()
        self.register_buffer("zone", zone[:, None] * 3 + zone[None, :])

    def cut(self, x):
        b, h, w = x.shape[:3]
        x = x.reshape(b, h // 4, 4, w // 4, 4, -1)
        return x.transpose(2, 3).reshape(b, (h // 4) * (w // 4), 16, -1)

    def attend(self, x):
        b, h, w, c = x.shape
        if self.offset:
            x = x.roll((-self.offset, -self.offset), (1, 2))
        parts = self.cut(x)
        q = self.query(parts).unflatten(-1, (self.heads, -1))
        k = self.key(parts).unflatten(-1, (self.heads, -1))
        v = self.value(parts).unflatten(-1, (self.heads, -1))
        logits = torch.einsum("bwqhd,bwkhd->bwhqk", q, k) / math.sqrt(c // self.heads)
        row = torch.arange(16) // 4
        column = torch.arange(16) % 4
        down = row[:, None] - row[None, :] + 3
        right = column[:, None] - column[None, :] + 3
        logits = logits + self.bias_table[:, down, right]
        if self.offset:
            zone = self.cut(self.zone[None, :, :, None])[0, :, :, 0]
            same = zone[:, :, None] == zone[:, None, :]
            logits = logits + torch.where(same, 0.0, -100.0)[None, :, None]
        weights = torch.softmax(logits, -1)
        y = torch.einsum("bwhqk,bwkhd->bwqhd", weights, v).flatten(3)
        y = self.out(y).reshape(b, h // 4, w // 4, 4, 4, c).transpose(2, 3)
        y = y.reshape(b, h, w, c)
        if self.offset:
            y = y.roll((self.offset, self.offset), (1, 2))
        return y

    def forward(self, x):
        x = x + self.attend(self.ln_a(x))
        return x + self.down(gelu(self.up(self.ln_b(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = Dense(12, 12)
        self.ln_stem = Norm(12)
        self.first = Stage(12, 3, 8, 0)
        self.second = Stage(12, 3, 8, 2)
        self.ln_merge = Norm(48)
        self.merge = Dense(48, 16, bias=False)
        self.ln_end = Norm(16)
        self.logits = Dense(16, 6)

    def forward(self, x):
        b = x.shape[0]
        x = x.permute(0, 2, 3, 1).reshape(b, 8, 2, 8, 2, 3)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(b, 8, 8, 12)
        x = self.ln_stem(self.stem(x))
        x = self.second(self.first(x))
        x = x.reshape(b, 4, 2, 4, 2, 12).permute(0, 1, 3, 4, 2, 5)
        x = self.merge(self.ln_merge(x.reshape(b, 4, 4, 48)))
        x = self.ln_end(x)
        x = x.sum((1, 2)) / 16
        return self.logits(x)


def dense(layer, w, name):
    layer.kernel.copy_(w[f"{name}.weight"].t())
    if layer.bias is not None:
        layer.bias.copy_(w[f"{name}.bias"])


def scaled(layer, w, name):
    layer.gamma.copy_(w[f"{name}.weight"])
    layer.beta.copy_(w[f"{name}.bias"])


def fill(net, w):
    net.stem.kernel.copy_(w["patch.weight"].permute(2, 3, 1, 0).reshape(12, 12))
    net.stem.bias.copy_(w["patch.bias"])
    scaled(net.ln_stem, w, "norm0")
    for i, stage in enumerate((net.first, net.second)):
        scaled(stage.ln_a, w, f"blocks.{i}.norm1")
        scaled(stage.ln_b, w, f"blocks.{i}.norm2")
        kernels = w[f"blocks.{i}.attention.qkv.weight"].chunk(3)
        biases = w[f"blocks.{i}.attention.qkv.bias"].chunk(3)
        for layer, kernel, bias in zip(
            (stage.query, stage.key, stage.value), kernels, biases
        ):
            layer.kernel.copy_(kernel.t())
            layer.bias.copy_(bias)
        dense(stage.out, w, f"blocks.{i}.attention.proj")
        table = w[f"blocks.{i}.attention.table"]
        stage.bias_table.copy_(table.t().reshape(3, 7, 7))
        dense(stage.up, w, f"blocks.{i}.fc1")
        dense(stage.down, w, f"blocks.{i}.fc2")
    scaled(net.ln_merge, w, "merge_norm")
    dense(net.merge, w, "merge")
    scaled(net.ln_end, w, "norm")
    dense(net.logits, w, "head")


def model():
    net = Net()
    with torch.no_grad():
        fill(net, torch.load(Path(__file__).with_name("weights.pt")))
    return net


def forward(net, batch):
    return net(batch["x"])
