"""A shortcut around a norm where the reference has one through it, in both layers."""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import nn

import roundoff as ro

WIDTH = 6


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.5, 1.5)

    def forward(self, x):
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(torch.tanh(layer(x)) + x)
        return self.head(x)


class Port(nn.Module):
    def __init__(self, state, *, around):
        super().__init__()
        for i in range(2):
            kept = state[f"layers.{i}.weight"].T.clone().contiguous()
            self.register_parameter(f"kernel_{i}", nn.Parameter(kept))
            for name, of in (("bias", "layers"), ("gain", "norms"), ("shift", "norms")):
                last = {"bias": "bias", "gain": "weight", "shift": "bias"}[name]
                tensor = nn.Parameter(state[f"{of}.{i}.{last}"].clone())
                self.register_parameter(f"{name}_{i}", tensor)
        self.out = nn.Parameter(state["head.weight"].T.clone().contiguous())
        self.out_bias = nn.Parameter(state["head.bias"].clone())
        self.around = around

    def normed(self, x, i):
        centred = x - x.mean(-1, keepdim=True)
        size = torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)
        gain, shift = getattr(self, f"gain_{i}"), getattr(self, f"shift_{i}")
        return centred * size * gain + shift

    def forward(self, x):
        for i in range(2):
            h = x @ getattr(self, f"kernel_{i}") + getattr(self, f"bias_{i}")
            h = torch.tanh(h)
            if self.around:
                x = self.normed(h, i) + x
            else:
                x = self.normed(h + x, i)
        return x @ self.out + self.out_bias


def recorded(folder, net):
    draw = torch.Generator().manual_seed(2)
    x = torch.randn(5, 7, WIDTH, generator=draw)
    with ro.capture(folder, net):
        net(x).square().mean().backward()
    return folder


@pytest.mark.parametrize("around", [False, True])
def test_the_sum_behind_the_norm_is_named(around, tmp_path):
    reference = Reference()
    found = ro.compare(
        reference=recorded(tmp_path / "reference", reference),
        candidate=recorded(
            tmp_path / "port", Port(reference.state_dict(), around=around)
        ),
    )
    assert found.agrees != around
    if around:
        first = found.culprits()[0]
        file, number = first.line.rsplit(":", 1)
        assert "self.normed(h, i) + x" in linecache.getline(file, int(number))
        assert "where the reference adds it before" in first.evidence
