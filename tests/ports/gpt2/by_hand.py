import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

W = Path(__file__).parent / "weights.pt"


class Norm(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.g = nn.Parameter(torch.ones(n))
        self.b = nn.Parameter(torch.zeros(n))

    def forward(self, x):
        m = x.mean(-1, keepdim=True)
        v = (x - m).square().mean(-1, keepdim=True)
        return (x - m) * torch.rsqrt(v + 1e-5) * self.g + self.b


class Mix(nn.Module):
    def __init__(self, n, heads):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(n, n)
        self.k = nn.Linear(n, n)
        self.v = nn.Linear(n, n)
        self.o = nn.Linear(n, n)

    def cut(self, y):
        return y.view(y.shape[0], y.shape[1], self.heads, -1).transpose(1, 2)

    def forward(self, x):
        q, k, v = self.cut(self.q(x)), self.cut(self.k(x)), self.cut(self.v(x))
        t = x.shape[1]
        seen = torch.ones(t, t, dtype=torch.bool).tril()
        s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        s = s.masked_fill(~seen, float("-inf"))
        y = s.softmax(-1) @ v
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, n, heads):
        super().__init__()
        self.n1 = Norm(n)
        self.mix = Mix(n, heads)
        self.n2 = Norm(n)
        self.up = nn.Linear(n, 4 * n)
        self.down = nn.Linear(4 * n, n)

    def forward(self, x):
        x = x + self.mix(self.n1(x))
        h = F.gelu(self.up(self.n2(x)), approximate="tanh")
        return x + self.down(h)


class LM(nn.Module):
    def __init__(self, vocab=90, n=32, heads=4, depth=2, length=24):
        super().__init__()
        self.tok = nn.Parameter(torch.zeros(vocab, n))
        self.pos = nn.Parameter(torch.zeros(length, n))
        self.blocks = nn.ModuleList([Block(n, heads) for _ in range(depth)])
        self.last = Norm(n)

    def forward(self, ids):
        x = F.embedding(ids, self.tok)
        x = x + self.pos[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return torch.einsum("btn,vn->btv", self.last(x), self.tok)


def model():
    w = torch.load(W)
    net = LM()
    s = {"tok": w["transformer.wte.weight"], "pos": w["transformer.wpe.weight"]}
    names = {"ln_1": "n1", "ln_2": "n2"}
    for i in range(2):
        a, b = f"transformer.h.{i}.", f"blocks.{i}."
        for ours, theirs in names.items():
            s[b + theirs + ".g"] = w[a + ours + ".weight"]
            s[b + theirs + ".b"] = w[a + ours + ".bias"]
        qkv = w[a + "attn.c_attn.weight"].t().chunk(3)
        biases = w[a + "attn.c_attn.bias"].chunk(3)
        for n, weight, bias in zip("qkv", qkv, biases):
            s[b + f"mix.{n}.weight"] = weight
            s[b + f"mix.{n}.bias"] = bias
        for ours, theirs in (
            ("attn.c_proj", "mix.o"),
            ("mlp.c_fc", "up"),
            ("mlp.c_proj", "down"),
        ):
            s[b + theirs + ".weight"] = w[a + ours + ".weight"].t()
            s[b + theirs + ".bias"] = w[a + ours + ".bias"]
    s["last.g"] = w["transformer.ln_f.weight"]
    s["last.b"] = w["transformer.ln_f.bias"]
    net.load_state_dict(s)
    return net


def forward(model, batch):
    return model(batch)


def loss(output, batch):
    scores = output[:, :-1]
    picked = scores.log_softmax(-1).gather(-1, batch[:, 1:, None])
    return -picked.mean()


def optimizer(model):
    plain = [p for p in model.parameters() if p.ndim == 1]
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    groups = [dict(params=plain, weight_decay=0.0), dict(params=decayed)]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
