"""A language model by retention: what was read fades with distance, without softmax."""

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, DIM, HEADS, DEPTH = 37, 24, 3, 2


class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps)
        return x * scale * self.weight


def rotated(x):
    """Turn neighbouring numbers of each head by an angle that grows with the place."""
    length, size = x.shape[-2:]
    speed = 1.0 / 10000 ** torch.linspace(0, 1, size // 2)
    angle = torch.arange(length)[:, None] * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


class Retention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(dim, dim, bias=False)
        self.key = nn.Linear(dim, dim, bias=False)
        self.value = nn.Linear(dim, 2 * dim, bias=False)
        self.gate = nn.Linear(dim, 2 * dim, bias=False)
        self.out = nn.Linear(2 * dim, dim, bias=False)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def fading(self, length):
        rate = torch.log(1 - 2.0 ** (-2 - torch.arange(self.heads)))
        place = torch.arange(length)
        distance = place[:, None] - place[None, :]
        fade = torch.exp(distance.clamp(min=0) * rate[:, None, None]) * (distance >= 0)
        return fade / fade.sum(dim=-1, keepdim=True).sqrt()

    def forward(self, x):
        q = rotated(self.split(self.query(x)))
        k = rotated(self.split(self.key(x)))
        k = k * k.shape[-1] ** -0.5
        scores = (q @ k.transpose(2, 3)) * self.fading(x.shape[1])
        y = scores @ self.split(self.value(x))
        y = F.layer_norm(y, y.shape[-1:], eps=1e-6)
        y = y.transpose(1, 2).flatten(2)
        return self.out(F.silu(self.gate(x)) * y)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate = nn.Linear(dim, hidden)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.gelu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1 = RMSNorm(dim)
        self.retention = Retention(dim, HEADS)
        self.norm2 = RMSNorm(dim)
        self.feed = FeedForward(dim, 2 * dim)

    def forward(self, x):
        x = x + self.retention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class RetNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList([Block(DIM) for _ in range(DEPTH)])
        self.norm = RMSNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.embed(ids) * math.sqrt(DIM)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model():
    torch.manual_seed(330)
    net = RetNet()
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, RMSNorm):
                module.weight.uniform_(0.5, 1.5)
        net.embed.weight.normal_(0, 0.2)
    return net


def batches():
    generator = torch.Generator().manual_seed(331)
    ids = torch.randint(0, 37, (3, 13), generator=generator)
    targets = ids[:, 1:].clone()
    targets[0, 9:] = -100
    targets[2, 6:] = -100
    return [{"ids": ids[:, :-1], "targets": targets}]


def forward(net, batch):
    return net(batch["ids"])


def loss(logits, batch):
    targets = batch["targets"].flatten()
    error = F.cross_entropy(logits.flatten(0, 1), targets, label_smoothing=0.1)
    size = torch.logsumexp(logits.flatten(0, 1)[targets >= 0], dim=-1)
    return error + 1e-2 * size.square().mean()


def optimizer(net):
    matrices = [p for p in net.parameters() if p.ndim > 1]
    others = [p for p in net.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.05},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.98))
