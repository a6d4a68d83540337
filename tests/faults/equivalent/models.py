"""Networks for clean pairs, schedules and layouts: a few hundred to a few thousand parameters each."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..program import FAMILIES, Program
from ..program import program as program_of_family

VOCABULARY = 40
LENGTH = 12


class Attention(nn.Module):
    """Causal attention; with a cache the keys and values so far are read and extended."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        return weights @ v

    def forward(self, x: Tensor, mask: Tensor, cache: list[Tensor] | None) -> Tensor:
        q = self.split(self.query(x))
        k = self.split(self.key(x))
        v = self.split(self.value(x))
        if cache is not None:
            if cache:
                k = torch.cat([cache[0], k], 2)
                v = torch.cat([cache[1], v], 2)
            cache[:] = [k, v]
        return self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, mask: Tensor, cache: list[Tensor] | None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask, cache)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(nn.Module):
    """Token ids (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, width: int = 16, heads: int = 4, depth: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(2 * LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(
        self,
        ids: Tensor,
        places: Tensor | None = None,
        mask: Tensor | None = None,
        caches: list[list[Tensor]] | None = None,
    ) -> Tensor:
        if places is None:
            places = torch.arange(ids.shape[1])
        if mask is None:
            mask = causal(ids.shape[1], ids.shape[1])
        x = self.tokens(ids) + self.places(places)
        for number, block in enumerate(self.blocks):
            x = block(x, mask, None if caches is None else caches[number])
        return self.head(self.norm(x))


def causal(queries: int, keys: int) -> Tensor:
    """Which keys the last ``queries`` of ``keys`` places may see."""
    return torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)


def gpt_batch(seed: int, size: int = 4) -> tuple[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randint(1, VOCABULARY, (size, LENGTH), generator=draw),)


def gpt_loss(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class Digits(nn.Module):
    """Images (batch, 1, 14, 14) to 10 logits: one channel, as of handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.second = nn.Conv2d(6, 8, 3)
        self.hidden = nn.Linear(8 * 5 * 5, 24)
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.relu(self.second(x)).flatten(1)
        return self.head(F.relu(self.hidden(x)))


class Mixer(nn.Module):
    """Images (batch, 3, 12, 12) cut into patches; tokens and channels are mixed in turn."""

    def __init__(self, width: int = 16, patches: int = 9) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, width, 4, stride=4)
        self.norm1 = nn.LayerNorm(width)
        self.tokens = nn.Linear(patches, patches)
        self.norm2 = nn.GroupNorm(4, patches * 4)
        self.channels = nn.Sequential(
            nn.Linear(width, 32), nn.SiLU(), nn.Linear(32, width)
        )
        self.head = nn.Linear(width, 6)
        self.widen = nn.Conv1d(patches, patches * 4, 1)
        self.shrink = nn.Conv1d(patches * 4, patches, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x).flatten(2).transpose(1, 2)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.shrink(self.norm2(self.widen(x)))
        return self.head((x + self.channels(x)).mean(1))


class Tagger(nn.Module):
    """Token ids (batch, length) to 5 logits a token: a GRU in both directions."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 5)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.rnn(self.tokens(ids))[0])


class Graph(nn.Module):
    """Node features (nodes, 8) and edges (2, edges) to a number for each node."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.message = nn.Linear(2 * width, width)
        self.update = nn.GRUCell(width, width)
        self.leave = nn.Linear(width, 1)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x = torch.tanh(self.enter(nodes))
        for _ in range(2):
            pairs = torch.cat([x[edges[0]], x[edges[1]]], 1)
            sent = F.elu(self.message(pairs))
            x = self.update(torch.zeros_like(x).index_add(0, edges[1], sent), x)
        return self.leave(x).squeeze(1)


class Unet(nn.Module):
    """Images (batch, 1, 16, 16) to a map of the same size: instance norm, a skip, a transposed convolution."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.enter = nn.Conv2d(1, width, 3, padding=1)
        self.norm1 = nn.InstanceNorm2d(width, affine=True)
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.norm2 = nn.InstanceNorm2d(2 * width, affine=True)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.leave = nn.Conv2d(2 * width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = F.leaky_relu(self.norm1(self.enter(x)), 0.1)
        coarse = F.leaky_relu(self.norm2(self.down(fine)), 0.1)
        return torch.sigmoid(self.leave(torch.cat([fine, self.up(coarse)], 1)))


class RmsNorm(nn.Module):
    """Divides by the root mean square over the last axis."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


def angles(length: int, size: int) -> Tensor:
    """By how much each pair of features of a place is turned, (length, size / 2)."""
    rates = 100.0 ** -(torch.arange(0, size, 2) / size)
    return torch.arange(length)[:, None] * rates


class SharedKeys(nn.Module):
    """Causal attention with turned queries and keys; several heads share a key."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.heads = heads
        self.shared = shared
        size = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, size * shared, bias=False)
        self.value = nn.Linear(width, size * shared, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    def turn(self, x: Tensor) -> Tensor:
        turned = angles(x.shape[-2], x.shape[-1])
        first, second = x.chunk(2, -1)
        cos, sin = turned.cos(), turned.sin()
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

    def spread(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // self.shared, 1)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.query(x), self.key(x), self.value(x)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x)
        q = self.turn(self.split(query, self.heads))
        k = self.spread(self.turn(self.split(key, self.shared)))
        v = self.spread(self.split(value, self.shared))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        mask = causal(x.shape[1], x.shape[1])
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """Feed-forward with a gate."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.up = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class LlamaBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = RmsNorm(width)
        self.attention = SharedKeys(width, 4, 2)
        self.norm2 = RmsNorm(width)
        self.feed = Gated(width, 24)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Llama(nn.Module):
    """Token ids (batch, length) to logits: root mean squares, rotations, gates."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(LlamaBlock(width) for _ in range(2))
        self.norm = RmsNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T


def _images(channels: int, size: int, classes: int):
    def batch(seed: int, count: int = 4) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(seed)
        images = torch.rand(count, channels, size, size, generator=draw)
        return images, torch.randint(classes, (count,), generator=draw)

    return batch


def _tagged(seed: int) -> tuple[Tensor, Tensor]:
    (ids,) = gpt_batch(seed)
    return ids, ids % 5


def _graph(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    edges = torch.randint(14, (2, 40), generator=draw)
    return torch.randn(14, 8, generator=draw), edges, torch.randn(14, generator=draw)


def _maps(seed: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    images = torch.rand(2, 1, 16, 16, generator=draw)
    return images, (images > 0.5).float()


def classified(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, -2), labels.flatten())


def _regressed(model: nn.Module, nodes: Tensor, edges: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(model(nodes, edges), y)


def _segmented(model: nn.Module, images: Tensor, maps: Tensor) -> Tensor:
    return F.binary_cross_entropy(model(images), maps)


#: name -> network, batch of a seed, loss
NETWORKS = {
    "gpt": (Gpt, gpt_batch, gpt_loss),
    "digits": (Digits, _images(1, 14, 10), classified),
    "mixer": (Mixer, _images(3, 12, 6), classified),
    "tagger": (Tagger, _tagged, classified),
    "graph": (Graph, _graph, _regressed),
    "unet": (Unet, _maps, _segmented),
    "llama": (Llama, gpt_batch, gpt_loss),
}

#: All names that ``program`` takes.
NAMES = (*FAMILIES, *NETWORKS)


def program(name: str) -> Program:
    """The training of a network with AdamW, without dropout, the same each time."""
    if name in FAMILIES:
        p = program_of_family(name)
        for module in p.model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return p
    torch.manual_seed(0)
    network, batch, loss = NETWORKS[name]
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return Program(model, [batch(seed) for seed in (1, 2)], loss, optimizer)
