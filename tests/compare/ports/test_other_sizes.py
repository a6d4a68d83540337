"""A port that is padded or cut so that all that follows has another size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.4


LEAVES = {
    "reduce": drawn(6, 3, 2, 2, seed=1),
    "key": drawn(5, 6, seed=2),
    "query": drawn(5, 3, seed=3),
    "scale": 1 + drawn(6, seed=4),
}
PICTURES = drawn(2, 3, 7, 9, seed=5)


def reference(m, x):
    places = x.flatten(2).transpose(1, 2)
    y = F.conv2d(x, m.reduce, stride=2).flatten(2).transpose(1, 2)
    y = F.layer_norm(y, (6,)) * m.scale
    scores = F.linear(places, m.query) @ F.linear(y, m.key).transpose(1, 2)
    return (torch.softmax(scores, -1) @ y).square().mean()


def windows(x, fault):
    """[b, h, w, c] -> [b, h', w', c, i, j]"""
    pads = {"": (0, 0), "same": (0, 1), "around": (1, 1)}[fault]
    x = F.pad(x, (0, 0, *pads, *pads))
    return x.unfold(1, 2, 2).unfold(2, 2, 2)


def port(m, x, fault):
    x = x.permute(0, 2, 3, 1)
    y = torch.einsum("bhwcij,ocij->bhwo", windows(x, fault), m.reduce)
    y = y - y.mean(-1, keepdim=True)
    y = y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * m.scale
    b, h, w, _ = y.shape
    y = y.reshape(b, h * w, -1)
    x = x.reshape(len(x), -1, 3)
    scores = torch.einsum("bnc,kc,bmd,kd->bnm", x, m.query, y, m.key)
    return (torch.einsum("bnm,bmd->bnd", scores.softmax(-1), y) ** 2).mean()


@pytest.mark.parametrize(
    ("fault", "words"),
    [("", ""), ("same", "with [0, 0, 0, 0, 0, 0]"), ("around", "padded nowhere")],
)
def test_what_is_padded_too_much_is_named(at_fault, fault, words):
    rows = at_fault(reference, lambda m, x: port(m, x, fault), LEAVES, PICTURES)
    assert len(rows) == bool(fault)
    for row in rows:
        assert row.operator == "constant_pad_nd", row.evidence
        assert words in row.evidence


DEPTH = {"enter": drawn(12, 4, seed=6), "leave": drawn(2, 3, seed=7)}
SMALL = drawn(2, 4, 3, 5, seed=8)


def shuffled(m, x):
    x = F.conv2d(x, m.enter[:, :, None, None])
    x = torch.tanh(F.pixel_shuffle(x, 2))
    return F.conv2d(x.sin(), m.leave[:, :, None, None])[..., 1:].square().mean()


def from_depth(m, x, fault):
    x = x.permute(0, 2, 3, 1) @ m.enter.t()
    b, h, w, _ = x.shape
    if fault:
        x = x.reshape(b, h, w, 2, 2, 3).permute(0, 1, 3, 2, 4, 5)
    else:
        x = x.reshape(b, h, w, 3, 2, 2).permute(0, 1, 4, 2, 5, 3)
    x = torch.tanh(x.reshape(b, 2 * h, 2 * w, 3))
    return ((torch.sin(x) @ m.leave.t())[:, :, 1:] ** 2).mean()


@pytest.mark.parametrize("fault", [False, True])
def test_channels_that_vary_in_another_order_are_named(at_fault, blamed_text, fault):
    rows = at_fault(shuffled, lambda m, x: from_depth(m, x, fault), DEPTH, SMALL)
    assert len(rows) == fault
    for row in rows:
        assert "x.reshape(b, h, w, 2, 2, 3)" in blamed_text(row)
