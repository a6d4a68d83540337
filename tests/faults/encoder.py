"""A small BERT: token and position embeddings, masked attention, layer norm after the residual, GELU, mean pooling."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, LENGTH = 300, 12


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width) for _ in range(4)
        )
        self.dropout = nn.Dropout(0.1)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])

    def masked(self, scores: Tensor, real: Tensor) -> Tensor:
        return scores.masked_fill(~real[:, None, None, :], -math.inf)

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def join(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (self.split(layer(x)) for layer in (self.query, self.key, self.value))
        weights = self.dropout(self.weights(self.masked(self.scores(q, k), real)))
        return self.out(self.join(weights @ v))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = (
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads), nn.LayerNorm(width)
        self.feed, self.norm2 = FeedForward(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, real))
        return self.norm2(x + self.feed(x))


class Pool(nn.Module):
    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        weights = real.to(x.dtype)[..., None]
        return (x * weights).sum(1) / weights.sum(1)


class Encoder(nn.Module):
    """Token ids (batch, length), 0 where padded, to 6 logits."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width, padding_idx=0)
        self.places = nn.Embedding(LENGTH + 2, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(3))
        self.pool, self.head = Pool(), nn.Linear(width, 6)

    def positions(self, real: Tensor) -> Tensor:
        """Counted over the real tokens alone, so that padding on the left does not matter."""
        return (real.long().cumsum(1) - 1).clamp(min=0)

    def encode(self, ids: Tensor) -> Tensor:
        real = ids != 0
        x = self.norm(self.tokens(ids) + self.places(self.positions(real)))
        for block in self.blocks:
            x = block(x, real)
        return self.pool(x, real)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encode(ids))


def batch(seed: int, size: int = 4) -> tuple[Tensor, Tensor]:
    """Sentences of 5 to 12 tokens, padded on the left, and their labels."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (size, LENGTH), generator=draw)
    lengths = torch.randint(5, LENGTH + 1, (size, 1), generator=draw)
    ids[torch.arange(LENGTH) < LENGTH - lengths] = 0
    return ids, torch.randint(6, (size,), generator=draw)


def loss(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(ids), labels)
