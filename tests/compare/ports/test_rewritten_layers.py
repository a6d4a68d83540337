"""A layer that is written anew in a program that is the same elsewhere."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

import roundoff


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 8)
        self.v = nn.Linear(8, 8)

    def heads(self, x):
        return (f(x).view(2, 5, 2, 4).transpose(1, 2) for f in (self.q, self.k, self.v))

    def forward(self, x):
        q, k, v = self.heads(x)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(2, 5, 8)


class ByHand(Attention):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, x):
        q, k, v = self.heads(x)
        scores = torch.einsum("nhtd,nhsd->nhts", q, k)
        scores = scores * (0.25 if self.fault == "scale" else 0.5)
        later = torch.ones(5, 5).triu(2 if self.fault == "mask" else 1) > 0
        scores = scores.masked_fill(later, float("-inf"))
        largest = scores.amax(-1, keepdim=True)
        each = (scores - largest).exp()
        share = each / each.sum(-2 if self.fault == "axis" else -1, keepdim=True)
        y = torch.einsum("nhts,nhsd->nhtd", share, v)
        return y.transpose(1, 2).reshape(2, 5, 8)


class Kernel(nn.Module):
    """A linear layer that holds its weight transposed, under another name."""

    def __init__(self, linear, change):
        super().__init__()
        self.kernel = nn.Parameter(change(linear.weight.detach()).t().contiguous())
        self.shift = nn.Parameter(linear.bias.detach().clone())

    def forward(self, x):
        return torch.einsum("ntd,do->nto", x, self.kernel) + self.shift


class Block(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.first = nn.LayerNorm(8)
        self.attention = attention
        self.second = nn.LayerNorm(8)
        self.feed = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.leave = nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.attention(self.first(x))
        x = x + self.feed(self.second(x))
        return self.leave(torch.tanh(x))


X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(3))


def block(attention=Attention):
    torch.manual_seed(1)
    return Block(attention())


@pytest.fixture
def compared(tmp_path):
    """``compared(candidate)``: its forward pass against that of ``block()``, or another's."""

    def compare(candidate, reference=None):
        sides = ("reference", reference or block()), ("candidate", candidate)
        for name, module in sides:
            with (
                torch.no_grad(),
                roundoff.capture(tmp_path / name, module, keep="tensors") as run,
            ):
                module(X)
                run.step()
        return roundoff.compare(
            reference=tmp_path / "reference", candidate=tmp_path / "candidate"
        )

    return compare


def test_a_layer_written_anew_agrees(compared):
    assert compared(block(lambda: ByHand(""))).agrees


@pytest.mark.parametrize(
    ("fault", "text", "words"),
    [
        ("scale", "scores = scores * (", "with 0.5, not 0.25"),
        ("mask", ".triu(2 if", "with diagonal=1, not 2"),
        ("axis", "each.sum(-2 if", "over axes [3], not [-2]"),
    ],
)
def test_the_line_inside_the_layer_is_named(compared, fault, text, words):
    first = compared(block(lambda: ByHand(fault))).culprits(1)[0]
    lines, start = inspect.getsourcelines(ByHand)
    [number] = [start + n for n, line in enumerate(lines) if text in line]
    assert first.line.endswith(f":{number}")
    assert words in first.evidence


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda w: w * 1.01,
            "kernel is the reference's leave.weight transposed and times 1.01",
        ),
        (torch.zeros_like, "kernel is the reference's leave.weight set to zero"),
        (lambda w: w.t(), "leave.kernel"),
    ],
)
def test_the_parameter_of_another_name_is_named(compared, change, words):
    candidate = block()
    candidate.leave = Kernel(candidate.leave, change)
    first = compared(candidate).culprits(1)[0]
    assert first.name == "leave.kernel"
    assert words in first.evidence


def test_a_parameter_of_another_name_may_be_right(compared):
    candidate = block()
    candidate.leave = Kernel(candidate.leave, lambda w: w)
    assert compared(candidate).agrees


def test_a_parameter_that_both_name_alike_is_told_by_its_name(compared):
    candidate = block(lambda: ByHand(""))
    with torch.no_grad():
        candidate.attention.q.weight.copy_(candidate.attention.q.weight.t().clone())
    first = compared(candidate).culprits(1)[0]
    assert first.kind == "parameter"
    assert first.name == "attention.q.weight"
    assert "transposed" in first.evidence


class Grouped(nn.Module):
    """Four heads that share two of key and value."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 16)
        self.k = nn.Linear(8, 8)
        self.v = nn.Linear(8, 8)
        self.o = nn.Linear(16, 8)

    def forward(self, x):
        q = self.q(x).view(2, 5, 4, 4).transpose(1, 2)
        k = self.k(x).view(2, 5, 2, 4).transpose(1, 2)
        v = self.v(x).view(2, 5, 2, 4).transpose(1, 2)
        q, k = q * 1.5, k * 1.5
        y = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return self.o(y.transpose(1, 2).reshape(2, 5, 16))


class GroupedByHand(Grouped):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, x):
        q = self.q(x).view(2, 5, 4, 4) * 1.5
        k = self.k(x).view(2, 5, 2, 4) * 1.5
        v = self.v(x).view(2, 5, 2, 4)
        if self.fault == "repeat":
            k = k.repeat(1, 1, 2, 1)
            v = v.repeat(1, 1, 2, 1)
        elif self.fault == "cat":
            k = torch.cat([k, k], 2)
            v = torch.cat([v, v], 2)
        elif self.fault == "expand":
            k = k[:, :, None].expand(2, 5, 2, 2, 4).reshape(2, 5, 4, 4)
            v = v[:, :, None].expand(2, 5, 2, 2, 4).reshape(2, 5, 4, 4)
        else:
            k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
        scores = torch.einsum("nthd,nshd->nhts", q, k) / 2
        y = torch.einsum("nhts,nshd->nthd", scores.softmax(-1), v)
        return self.o(y.reshape(2, 5, 16))


def seeded(module):
    torch.manual_seed(2)
    return module()


def test_heads_of_key_and_value_that_are_shared(compared):
    assert compared(seeded(lambda: GroupedByHand("")), seeded(Grouped)).agrees


@pytest.mark.parametrize("fault", ["repeat", "cat", "expand"])
def test_one_mistake_on_the_lines_of_key_and_value(compared, fault):
    candidate = seeded(lambda: GroupedByHand(fault))
    first = compared(candidate, seeded(Grouped)).culprits(1)[0]
    lines, start = inspect.getsourcelines(GroupedByHand)
    [at] = [n for n, line in enumerate(lines) if f'"{fault}"' in line]
    assert first.line.endswith((f":{start + at + 1}", f":{start + at + 2}"))
