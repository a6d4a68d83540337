"""A decoder as Llama's: RMSNorm, rotary positions, grouped queries, SwiGLU."""

import argparse
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--wd", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

VOCAB, DIM, HEADS, GROUPS, LENGTH = 48, 32, 4, 2, 10
HEAD = DIM // HEADS


def rotary_tables(length, theta=10000.0):
    rates = theta ** (-torch.arange(0, HEAD, 2).float() / HEAD)
    angles = torch.outer(torch.arange(length).float(), rates)
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * scale * self.weight


def rotate(x, cos, sin):
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat([-right, left], -1) * sin


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(DIM, DIM, bias=False)
        self.k = nn.Linear(DIM, GROUPS * HEAD, bias=False)
        self.v = nn.Linear(DIM, GROUPS * HEAD, bias=False)
        self.o = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x, cos, sin):
        b, n, _ = x.shape
        q = self.q(x).view(b, n, HEADS, HEAD).transpose(1, 2)
        k = self.k(x).view(b, n, GROUPS, HEAD).transpose(1, 2)
        v = self.v(x).view(b, n, GROUPS, HEAD).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k = k.repeat_interleave(HEADS // GROUPS, 1)
        v = v.repeat_interleave(HEADS // GROUPS, 1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(HEAD)
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, float("-inf"))
        mixed = scores.softmax(-1) @ v
        return self.o(mixed.transpose(1, 2).reshape(b, n, DIM))


class FeedForward(nn.Module):
    def __init__(self, hidden=48):
        super().__init__()
        self.gate = nn.Linear(DIM, hidden, bias=False)
        self.up = nn.Linear(DIM, hidden, bias=False)
        self.down = nn.Linear(hidden, DIM, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = RMSNorm(DIM), Attention()
        self.norm2, self.feed = RMSNorm(DIM), FeedForward()

    def forward(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.feed(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        cos, sin = rotary_tables(LENGTH)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))


def weights(seed):
    torch.manual_seed(seed)
    state = Llama().state_dict()
    for name in state:
        if "norm" in name:
            state[name] = state[name] + 0.3 * torch.randn(DIM)
    return state


torch.manual_seed(args.seed)
model = Llama()
state = weights(3)
model.load_state_dict(state)
norms = [p for p in model.parameters() if p.ndim < 2]
others = [p for p in model.parameters() if p.ndim >= 2]
groups = [
    dict(params=others, weight_decay=args.wd),
    dict(params=norms, weight_decay=0.0),
]
optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-8)
warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (t + 1) / 4))
g = torch.Generator().manual_seed(args.seed + 100)
corpus = torch.randint(VOCAB, (600,), generator=g)
for step in range(3):
    start = torch.randint(600 - LENGTH, (6,), generator=g)
    batch = corpus[start[:, None] + torch.arange(LENGTH)]
    logits = model(batch)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    warmup.step()
    print(f"{step} loss {loss:.4f} norm {norm:.3f}")
