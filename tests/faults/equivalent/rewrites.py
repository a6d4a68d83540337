"""The same network written in another way, with the same weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..program import Program
from ..program import replace as with_methods
from . import models

#: name, change, network
REWRITES: list[tuple[str, Callable[[Program], Program], str]] = []
#: The same with a bug, and where it is: globs over sites and parameters.
WRONG: list[tuple[str, Callable[[Program], Program], str, str]] = []


def rewrite(name: str, *networks: str, sites: str = "") -> Callable[..., Any]:
    """Enters the decorated function, which rewrites a model, for these networks.

    With ``sites`` the rewritten model has a bug there.
    """

    def enter(change: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
        def changed(p: Program) -> Program:
            change(p.model)
            optimizer = torch.optim.AdamW(
                p.model.parameters(), lr=1e-2, weight_decay=0.1
            )
            return replace(p, optimizer=optimizer)

        for network in networks:
            if sites:
                WRONG.append((name, changed, network, sites))
            else:
                REWRITES.append((name, changed, network))
        return change

    return enter


def _joined(layers: list[nn.Linear]) -> nn.Linear:
    width = layers[0].in_features
    has_bias = layers[0].bias is not None
    outputs = sum(layer.out_features for layer in layers)
    joined = nn.Linear(width, outputs, bias=has_bias)
    with torch.no_grad():
        joined.weight.copy_(torch.cat([layer.weight for layer in layers]))
        if has_bias:
            joined.bias.copy_(torch.cat([layer.bias for layer in layers]))
    return joined


@rewrite("query, key and value fused", "gpt")
def fuse(model):
    """One layer for queries, keys and values of a ``models.Gpt``."""

    def forward(self, x: Tensor, mask: Tensor, cache: None) -> Tensor:
        q, k, v = (self.split(part) for part in self.qkv(x).chunk(3, -1))
        return self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))

    for block in model.blocks:
        attention = block.attention
        attention.qkv = _joined([attention.query, attention.key, attention.value])
        del attention.query, attention.key, attention.value
        with_methods(attention, forward=forward)


@rewrite("query, key and value fused", "encoder")
def _fused_in_encoder(model):
    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (self.split(part) for part in self.qkv(x).chunk(3, -1))
        weights = self.weights(self.masked(self.scores(q, k), real))
        return self.out(self.join(weights @ v))

    for block in model.blocks:
        attention = block.attention
        attention.qkv = _joined([attention.query, attention.key, attention.value])
        del attention.query, attention.key, attention.value
        with_methods(attention, forward=forward)


@rewrite("scaled_dot_product_attention", "gpt")
def _sdpa(model):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    for block in model.blocks:
        with_methods(block.attention, attend=attend)


@rewrite("scaled_dot_product_attention", "encoder")
def _sdpa_in_encoder(model):
    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (self.split(f(x)) for f in (self.query, self.key, self.value))
        mask = real[:, None, None, :]
        return self.out(
            self.join(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))
        )

    for block in model.blocks:
        with_methods(block.attention, forward=forward)


@rewrite("a softmax without the maximum", "gpt")
def _plain_softmax(model):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        raised = scores.masked_fill(~mask, -math.inf).exp()
        return raised / raised.sum(-1, keepdim=True) @ v

    for block in model.blocks:
        with_methods(block.attention, attend=attend)


@rewrite("a softmax without the maximum", "encoder", "decoder")
def _plain_weights(model: nn.Module) -> None:
    def weights(self, scores: Tensor) -> Tensor:
        raised = scores.exp()
        return raised / raised.sum(-1, keepdim=True)

    for block in model.blocks:
        with_methods(block.attention, weights=weights)


@rewrite("einsum for matmul", "gpt")
def _einsum(model):
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
        return torch.einsum("bhqk,bhkd->bhqd", weights, v)

    for block in model.blocks:
        with_methods(block.attention, attend=attend)


@rewrite("layer norm by hand", "gpt", "encoder", "mixer")
def _layer_norm(model: nn.Module) -> None:
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred * (variance + self.eps).rsqrt() * self.weight + self.bias

    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            with_methods(module, forward=forward)


@rewrite("GELU by its formula", "gpt", "encoder")
def _gelu(model):
    def erf_gelu(x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))

    def forward(self, x: Tensor, mask: Tensor, cache: None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask, cache)
        return x + self.down(erf_gelu(self.up(self.norm2(x))))

    for module in model.modules():
        if isinstance(module, nn.GELU):
            with_methods(module, forward=lambda _, x: erf_gelu(x))
        elif isinstance(module, models.Block):
            with_methods(module, forward=forward)


@rewrite("convolution as a matrix product", "digits")
def _unfolded(model: models.Digits) -> None:
    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(x, 3, padding=self.padding)
        height = x.shape[-2] - 2 + 2 * self.padding[0]
        product = self.weight.flatten(1) @ columns + self.bias[:, None]
        return product.unflatten(-1, (height, -1))

    for layer in (model.first, model.second):
        with_methods(layer, forward=forward)


@rewrite("embedding as a product with one-hot rows", "gpt", "tagger")
def _one_hot(model: nn.Module) -> None:
    def forward(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, models.VOCABULARY).to(self.weight.dtype) @ self.weight

    with_methods(model.tokens, forward=forward)


@rewrite("a gated cell by hand", "graph")
def _cell(model: models.Graph) -> None:
    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        gates = F.linear(x, self.weight_ih, self.bias_ih)
        kept = F.linear(h, self.weight_hh, self.bias_hh)
        reset, update, new = zip(gates.chunk(3, 1), kept.chunk(3, 1), strict=True)
        r = torch.sigmoid(reset[0] + reset[1])
        z = torch.sigmoid(update[0] + update[1])
        n = torch.tanh(new[0] + r * new[1])
        return n + z * (h - n)

    with_methods(model.update, forward=forward)


@rewrite("two layers in one Sequential", "digits")
def _sequential(model: models.Digits) -> None:
    tail = nn.Sequential(model.hidden, nn.ReLU(), model.head)
    del model.hidden, model.head
    model.tail = tail

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        return self.tail(F.relu(self.second(x)).flatten(1))

    with_methods(model, forward=forward)


@rewrite("feed-forward as a module of its own", "gpt")
def _module(model):
    class FeedForward(nn.Module):
        def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
            super().__init__()
            self.layers = nn.Sequential(up, nn.GELU(), down)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    def forward(self, x: Tensor, mask: Tensor, cache: None) -> Tensor:
        x = x + self.attention(self.norm1(x), mask, cache)
        return x + self.feed(self.norm2(x))

    for block in model.blocks:
        block.feed = FeedForward(block.up, block.down)
        del block.up, block.down
        with_methods(block, forward=forward)


@rewrite("vmap over the batch", "digits", "mixer")
def _vmapped(model: nn.Module) -> None:
    inner = copy.copy(model).forward

    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda sample: inner(sample[None])[0])(x)

    with_methods(model, forward=forward)


def _with_joined(attention: Any, name: str, parts: tuple[str, ...]) -> None:
    """Put one layer in the place of several."""
    setattr(attention, name, _joined([getattr(attention, part) for part in parts]))
    for part in parts:
        delattr(attention, part)


@rewrite("key and value fused", "gpt")
def _key_and_value(model, names=("key", "value")):
    def forward(self, x: Tensor, mask: Tensor, cache: None) -> Tensor:
        parts = dict(zip(names, self.pair(x).chunk(2, -1), strict=True))
        q, k, v = (
            self.split(parts[n] if n in parts else getattr(self, n)(x))
            for n in ("query", "key", "value")
        )
        return self.out(self.attend(q, k, v, mask).transpose(1, 2).flatten(2))

    for block in model.blocks:
        _with_joined(block.attention, "pair", names)
        with_methods(block.attention, forward=forward)


@rewrite("query and key fused", "gpt")
def _query_and_key(model):
    _key_and_value(model, ("query", "key"))


@rewrite("key and value fused", "encoder")
def _key_and_value_in_encoder(model, order=1):
    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        k, v = (self.split(part) for part in self.pair(x).chunk(2, -1)[::order])
        q = self.split(self.query(x))
        weights = self.weights(self.masked(self.scores(q, k), real))
        return self.out(self.join(weights @ v))

    for block in model.blocks:
        _with_joined(block.attention, "pair", ("key", "value"))
        with_methods(block.attention, forward=forward)


@rewrite("query, key and value fused", "llama")
def _fused_of_other_sizes(model, order=1):
    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        size = self.out.in_features
        shared = size * self.shared // self.heads
        query, *rest = self.qkv(x).split([size, shared, shared], -1)
        return query, *rest[::order]

    for block in model.blocks:
        _with_joined(block.attention, "qkv", ("query", "key", "value"))
        with_methods(block.attention, project=project)


@rewrite("gate and up merged", "llama")
def _gate_and_up(model, order=1):
    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)[::order]
        return self.down(F.silu(gate) * up)

    for block in model.blocks:
        _with_joined(block.feed, "both", ("gate", "up"))
        with_methods(block.feed, forward=forward)


@rewrite("gate and up in turns", "llama")
def _gate_and_up_in_turns(model):
    """Rows of both in turn, as some checkpoints have them."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).unflatten(-1, (-1, 2)).unbind(-1)
        return self.down(F.silu(gate) * up)

    for block in model.blocks:
        feed = block.feed
        rows = torch.stack([feed.gate.weight, feed.up.weight], 1).flatten(0, 1)
        _with_joined(feed, "both", ("gate", "up"))
        with torch.no_grad():
            feed.both.weight.copy_(rows)
        with_methods(feed, forward=forward)


@rewrite("root mean square by the library", "llama")
def _rms_norm(model):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, 1e-6)

    for module in model.modules():
        if isinstance(module, models.RmsNorm):
            with_methods(module, forward=forward)


@rewrite("rotations as complex numbers", "llama")
def _complex(model, sign=1):
    def turn(self, x: Tensor) -> Tensor:
        turned = models.angles(x.shape[-2], x.shape[-1])
        factors = torch.polar(torch.ones_like(turned), sign * turned)
        pairs = torch.stack(x.chunk(2, -1), -1).contiguous()
        product = torch.view_as_real(torch.view_as_complex(pairs) * factors)
        return torch.cat(product.unbind(-1), -1)

    for block in model.blocks:
        with_methods(block.attention, turn=turn)


@rewrite("keys shared by broadcasting", "llama")
def _expanded(model):
    def spread(self, x: Tensor) -> Tensor:
        times = self.heads // self.shared
        return x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)

    for block in model.blocks:
        with_methods(block.attention, spread=spread)


@rewrite("gates of one cell joined", "graph")
def _joined_cell(model):
    """Reset and update of the cell in one product of both inputs."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        size = h.shape[1]
        weight = torch.cat([self.weight_ih[: 2 * size], self.weight_hh[: 2 * size]], 1)
        bias = self.bias_ih[: 2 * size] + self.bias_hh[: 2 * size]
        both = torch.sigmoid(F.linear(torch.cat([x, h], 1), weight, bias))
        r, z = both.chunk(2, 1)
        new = F.linear(x, self.weight_ih[2 * size :], self.bias_ih[2 * size :])
        kept = F.linear(h, self.weight_hh[2 * size :], self.bias_hh[2 * size :])
        n = torch.tanh(new + r * kept)
        return (1 - z) * n + z * h

    with_methods(model.update, forward=forward)


# -- with a bug --------------------------------------------------------------------------

IN_ATTENTION = "blocks.*.attention/* blocks.*.attention.* blocks.*.attention.*/*"


@rewrite("key and value fused, exchanged", "gpt", sites=IN_ATTENTION)
def _exchanged(model):
    _key_and_value(model, ("key", "value"))
    for block in model.blocks:
        size = block.attention.out.in_features
        with torch.no_grad():
            pair = block.attention.pair
            pair.weight.copy_(pair.weight.roll(size, 0))
            pair.bias.copy_(pair.bias.roll(size, 0))


@rewrite("key and value fused, exchanged", "encoder", sites=IN_ATTENTION)
def _exchanged_in_encoder(model):
    _key_and_value_in_encoder(model, -1)


@rewrite("query, key and value fused, exchanged", "llama", sites=IN_ATTENTION)
def _exchanged_of_other_sizes(model):
    _fused_of_other_sizes(model, -1)


@rewrite("query, key and value fused, a bias lost", "gpt", sites=IN_ATTENTION)
def _bias_lost(model):
    fuse(model)
    with torch.no_grad():
        model.blocks[1].attention.qkv.bias.zero_()


IN_FEED = "blocks.*.feed/* blocks.*.feed.* blocks.*.feed.*/*"


@rewrite("gate and up merged, exchanged", "llama", sites=IN_FEED)
def _gate_for_up(model):
    _gate_and_up(model, -1)


@rewrite("rotations the other way", "llama", sites=IN_ATTENTION)
def _conjugated(model):
    _complex(model, -1)


@rewrite(
    "root mean square of the wrong axis",
    "llama",
    sites="blocks.*.norm*/* norm/* /*norm*",
)
def _rms_norm_of_places(model):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[1:], eps=1e-6) * self.weight

    for module in model.modules():
        if isinstance(module, models.RmsNorm):
            with_methods(module, forward=forward)
