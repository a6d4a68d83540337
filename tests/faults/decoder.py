"""A small Llama: RMS norm, rotary positions, causal attention by an additive mask, SwiGLU, tied embeddings."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH, START = 80, 16, 500


class RmsNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def scale(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale(x) * self.weight


class Rotary(nn.Module):
    """Cosines and sines of the angles, (length, head width); the text goes on at position START, as with a cache."""

    base = 10000.0

    def places(self, length: int) -> Tensor:
        return torch.arange(START, START + length, dtype=torch.float32)

    def tables(self, angles: Tensor) -> tuple[Tensor, Tensor]:
        return angles.cos(), angles.sin()

    def forward(self, length: int, width: int) -> tuple[Tensor, Tensor]:
        rates = self.base ** (torch.arange(0, width, 2, dtype=torch.float32) / -width)
        angles = self.places(length)[:, None] * rates
        return self.tables(torch.cat([angles, angles], -1))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.rotary = heads, Rotary()
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def turned(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1)
        return torch.cat([-right, left], -1)

    def rotated(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        return x * tables[0] + self.turned(x) * tables[1]

    def mask(self, length: int) -> Tensor:
        return torch.full((length, length), -math.inf).triu(1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        b, n, width = x.shape
        q, k, v = (
            f(x).view(b, n, self.heads, -1).transpose(1, 2)
            for f in (self.query, self.key, self.value)
        )
        tables = self.rotary(n, width // self.heads)
        scores = self.scores(
            self.rotated(q, tables), self.rotated(k, tables)
        ) + self.mask(n)
        return self.out((self.weights(scores) @ v).transpose(1, 2).reshape(b, n, width))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, 3 * width, bias=False),
        )
        self.down = nn.Linear(3 * width, width, bias=False)

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate) * up

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gated(self.gate(x), self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attention = RmsNorm(width), Attention(width, heads)
        self.norm2, self.feed = RmsNorm(width), FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Decoder(nn.Module):
    """Token ids (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(3))
        self.norm, self.head = RmsNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embed.weight, std=0.1)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(seed: int, size: int = 3) -> tuple[Tensor]:
    """Texts in which some tokens repeat, as in language."""
    draw = torch.Generator().manual_seed(seed)
    return ((torch.rand(size, LENGTH, generator=draw) ** 2 * VOCABULARY).long(),)


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
