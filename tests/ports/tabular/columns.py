"""Each column by itself, tables of their own for categories, attention by sums over pairs."""

from math import pi
from pathlib import Path

import torch
from torch import nn

KINDS, WIDTH, HEADS, SIZE = (4, 6, 3), 12, 2, 6


def weights():
    return torch.load(Path(__file__).with_name("weights.pt"))


class Number(nn.Module):
    def __init__(self, w, i):
        super().__init__()
        self.freq = nn.Parameter(w["tokens.waves"][i].clone())
        half = len(self.freq)
        kernel = w["tokens.number"][i]
        self.cos = nn.Parameter(kernel[:half].clone())
        self.sin = nn.Parameter(kernel[half:].clone())
        self.bias = nn.Parameter(w["tokens.number_bias"][i].clone())

    def forward(self, x, missing):
        turns = x[:, None] * self.freq
        y = torch.cos(2 * pi * turns) @ self.cos + torch.sin(2 * pi * turns) @ self.sin
        y = (y + self.bias).clamp(min=0)
        return torch.where(missing[:, None], torch.zeros_like(y), y)


class Norm(nn.Module):
    def __init__(self, w, at, eps=1e-5):
        super().__init__()
        self.g = nn.Parameter(w[at + ".weight"].clone())
        self.b = nn.Parameter(w[at + ".bias"].clone())
        self.eps = eps

    def forward(self, x):
        mu = x.mean(-1, keepdim=True)
        d = x - mu
        return d / (d.pow(2).mean(-1, keepdim=True) + self.eps) ** 0.5 * self.g + self.b


class Layer(nn.Module):
    def __init__(self, w, at, first):
        super().__init__()
        self.pre = None if first else Norm(w, at + ".norm1")
        q, k, v = w[at + ".qkv.weight"].split(WIDTH)
        bq, bk, bv = w[at + ".qkv.bias"].split(WIDTH)
        self.wq, self.wk, self.wv = (nn.Parameter(m.T.contiguous()) for m in (q, k, v))
        self.bq, self.bk, self.bv = (nn.Parameter(b.clone()) for b in (bq, bk, bv))
        self.wo = nn.Parameter(w[at + ".out.weight"].T.contiguous())
        self.bo = nn.Parameter(w[at + ".out.bias"].clone())
        self.mid = Norm(w, at + ".norm2")
        value, gate = w[at + ".up.weight"].split(2 * WIDTH)
        bias_value, bias_gate = w[at + ".up.bias"].split(2 * WIDTH)
        self.value = nn.Parameter(value.T.contiguous())
        self.gate = nn.Parameter(gate.T.contiguous())
        self.value_b = nn.Parameter(bias_value.clone())
        self.gate_b = nn.Parameter(bias_gate.clone())
        self.wd = nn.Parameter(w[at + ".down.weight"].T.contiguous())
        self.bd = nn.Parameter(w[at + ".down.bias"].clone())

    def attend(self, x, lost):
        heads = []
        q = (x @ self.wq + self.bq) / SIZE**0.5
        k = x @ self.wk + self.bk
        v = x @ self.wv + self.bv
        for h in range(HEADS):
            part = slice(h * SIZE, (h + 1) * SIZE)
            score = (q[:, :, None, part] * k[:, None, :, part]).sum(-1)
            score = score.masked_fill(lost[:, None, :], -1e9)
            share = torch.softmax(score, dim=-1)
            heads.append((share[..., None] * v[:, None, :, part]).sum(2))
        return torch.cat(heads, -1) @ self.wo + self.bo

    def forward(self, x, lost):
        x = x + self.attend(x if self.pre is None else self.pre(x), lost)
        h = self.mid(x)
        gate = torch.relu(h @ self.gate + self.gate_b)
        gated = (h @ self.value + self.value_b) * gate
        return x + gated @ self.wd + self.bd


class Columns(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.numbers = nn.ModuleList(Number(w, i) for i in range(4))
        tables = w["tokens.kinds.weight"].split(list(KINDS))
        biased = [t + b for t, b in zip(tables, w["tokens.kind_bias"], strict=True)]
        self.tables = nn.ParameterList(nn.Parameter(t.clone()) for t in tables)
        self.shifts = nn.ParameterList(
            nn.Parameter(b.clone()) for b in w["tokens.kind_bias"]
        )
        assert len(biased) == len(self.tables)
        self.summary = nn.Parameter(w["tokens.cls"].clone())
        self.layers = nn.ModuleList(
            [Layer(w, "blocks.0", True), Layer(w, "blocks.1", False)]
        )
        self.last = Norm(w, "norm")
        self.kernel = nn.Parameter(w["head.weight"].T.contiguous())
        self.bias = nn.Parameter(w["head.bias"].clone())

    def forward(self, numbers, kinds, missing):
        n = numbers.shape[0]
        rows = [self.summary.repeat(n, 1)]
        for i, number in enumerate(self.numbers):
            rows.append(number(numbers[:, i], missing[:, i]))
        for i, (table, shift) in enumerate(zip(self.tables, self.shifts, strict=True)):
            rows.append(table[kinds[:, i]] + shift)
        x = torch.stack(rows, dim=1)
        lost = torch.zeros(n, len(rows), dtype=torch.bool)
        lost[:, 1:5] = missing
        for layer in self.layers:
            x = layer(x, lost)
        return torch.relu(self.last(x[:, 0])) @ self.kernel + self.bias


def model():
    return Columns(weights())


def forward(net, batch):
    return net(batch["numbers"], batch["kinds"], batch["missing"])


def loss(scores, batch, smooth=0.1, gamma=2):
    classes = scores.shape[1]
    logs = torch.log_softmax(scores, dim=1)
    weight = scores.new_tensor([1.0, 2.0, 0.5, 1.5])
    target = torch.eye(classes, dtype=scores.dtype)[batch["label"]]
    soft = target * (1 - smooth) + smooth / classes
    each = -(soft * weight * logs).sum(1)
    sure = (target * logs).sum(1).exp()
    focal = (1 - sure) ** gamma * each
    whole = (target @ weight).sum()
    return focal.sum() / whole + 1e-3 * (scores * scores).mean()


class AdamW(torch.optim.Optimizer):
    def __init__(self, net, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, decay=0.05):
        free = ("bias", "summary", ".g", ".b", "bq", "bk", "bv", "bo", "bd", "_b")
        yes, no = [], []
        for name, p in net.named_parameters():
            is_free = name.endswith(free) or name.startswith("shifts")
            (no if is_free else yes).append(p)
        groups = [{"params": yes, "decay": decay}, {"params": no, "decay": 0.0}]
        super().__init__(groups, dict(lr=lr, betas=betas, eps=eps))
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        for group in self.param_groups:
            one, two = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m = state.get("m", 0) * one + p.grad * (1 - one)
                v = state.get("v", 0) * two + p.grad**2 * (1 - two)
                state["m"], state["v"] = m, v
                move = m / (1 - one**self.t)
                size = (v / (1 - two**self.t)) ** 0.5 + group["eps"]
                p.copy_(p - group["lr"] * (move / size + group["decay"] * p))


def optimizer(net):
    return AdamW(net)
