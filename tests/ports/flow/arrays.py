"""Nested dicts of arrays, kernels as (in, out), Adam as in the paper."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

D = 8
H = D // 2
STEPS = 3


def swish(x):
    return x * torch.sigmoid(x)


def dense(layer, x):
    return torch.einsum("...i,io->...o", x, layer["kernel"]) + layer["bias"]


def tree(arrays):
    out = nn.ParameterDict()
    for key, value in arrays.items():
        out[key] = nn.Parameter(value.clone().contiguous())
    return out


class FlowStep(nn.Module):
    def __init__(self, w, number):
        super().__init__()
        at = f"layers.{3 * number}."
        self.norm = tree({"loc": w[at + "shift"], "logs": w[at + "log_scale"]})
        at = f"layers.{3 * number + 1}."
        self.lu = tree({"l": w[at + "lower"], "u": w[at + "upper"]})
        self.lu["logs"] = nn.Parameter(w[at + "log_s"].clone())
        self.register_buffer("sign", w[at + "sign"].clone())
        self.register_buffer("rows", w[at + "order"].argmax(1))
        at = f"layers.{3 * number + 2}.net."
        self.inner = nn.ModuleList()
        for k in (0, 2):
            kernel = w[at + f"{k}.weight"].t()
            self.inner.append(tree({"kernel": kernel, "bias": w[at + f"{k}.bias"]}))
        kernel, bias = w[at + "4.weight"].t(), w[at + "4.bias"]
        self.to_scale = tree({"kernel": kernel[:, :H], "bias": bias[:H]})
        self.to_shift = tree({"kernel": kernel[:, H:], "bias": bias[H:]})
        self.even = number % 2 == 0

    def mixed(self, x):
        # y = P L U x, one factor after the other
        u = torch.triu(self.lu["u"], diagonal=1)
        y = x @ u.T + x * (self.sign * torch.exp(self.lu["logs"]))
        y = y + y @ torch.tril(self.lu["l"], diagonal=-1).T
        return y[:, self.rows]

    def coupled(self, x):
        still, moved = (x[:, :H], x[:, H:]) if self.even else (x[:, H:], x[:, :H])
        h = still
        for layer in self.inner:
            h = swish(dense(layer, h))
        s = dense(self.to_scale, h)
        s = 4 * torch.sigmoid(s) - 2
        moved = moved * torch.exp(s) + dense(self.to_shift, h)
        parts = (still, moved) if self.even else (moved, still)
        return torch.hstack(parts), s.sum(1)

    def forward(self, x):
        x = torch.exp(self.norm["logs"]) * (x + self.norm["loc"])
        x = self.mixed(x)
        x, ldj = self.coupled(x)
        return x, ldj + self.norm["logs"].sum() + self.lu["logs"].sum()


class RealNVP(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.steps = nn.ModuleList([FlowStep(w, number) for number in range(STEPS)])

    def forward(self, x):
        total = 0
        for step in self.steps:
            x, ldj = step(x)
            total = total + ldj
        return x, total


class Adam(torch.optim.Optimizer):
    def __init__(self, params, rate, b1=0.9, b2=0.98, eps=1e-8):
        super().__init__(params, {"rate": rate, "b1": b1, "b2": b2, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["b1"], group["b2"]
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s["t"] = 0
                    s["m"] = torch.zeros_like(p)
                    s["v"] = torch.zeros_like(p)
                s["t"] += 1
                s["m"] = b1 * s["m"] + (1 - b1) * p.grad
                s["v"] = b2 * s["v"] + (1 - b2) * p.grad * p.grad
                m = s["m"] / (1 - b1 ** s["t"])
                v = s["v"] / (1 - b2 ** s["t"])
                p.sub_(group["rate"] * m / (torch.sqrt(v) + group["eps"]))


def model():
    return RealNVP(torch.load(Path(__file__).with_name("weights.pt")))


def forward(net, batch):
    return net(batch["x"])


def loss(output, batch):
    z, ldj = output
    normal = torch.log(torch.tensor(2 * np.pi, dtype=z.dtype)) + z.square()
    nll = 0.5 * normal.sum(1) - ldj
    return nll.mean() / np.log(2) / D


def optimizer(net):
    return Adam(net.parameters(), 2e-3)
