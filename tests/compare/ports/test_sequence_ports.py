"""Ports of models of sequences: padding, tables with a row for it, events in another order."""

from __future__ import annotations

import itertools
import linecache
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

import roundoff

ITEMS, WIDTH, HEADS, PLACES = 12, 8, 2, 6
SMOOTHING = 0.1
LENGTHS = torch.tensor([6, 4, 5, 3])
REAL = torch.arange(PLACES) < LENGTHS[:, None]


def drawn(*shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * scale


def batch():
    generator = torch.Generator().manual_seed(5)
    items = torch.randint(1, ITEMS + 1, (4, PLACES), generator=generator)
    targets = torch.randint(0, ITEMS, (4, PLACES), generator=generator)
    has_target = torch.rand(4, PLACES, generator=generator) > 0.3
    return items * REAL, torch.where(REAL & has_target, targets, -1)


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.item = nn.Embedding(ITEMS + 1, WIDTH, padding_idx=0)
        self.position = nn.Embedding(PLACES + 1, WIDTH, padding_idx=0)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed = nn.Linear(WIDTH, 2 * WIDTH)
        self.back = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, items, targets):
        real = items > 0
        itself = torch.eye(PLACES, dtype=torch.bool)
        allowed = (real[:, None] & itself.cumsum(0).t().bool().t()) | itself
        x = self.item(items) + self.position(real.cumsum(1) * real)
        scores = x @ x.transpose(1, 2) / math.sqrt(WIDTH)
        scores = scores.masked_fill(~allowed, -math.inf)
        heads = self.value(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        heads = scores.softmax(-1)[:, None] @ heads
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        x = x + self.back(F.gelu(self.feed(x)))
        logits = x[real] @ self.item.weight[1:].t()
        told = F.cross_entropy(
            logits, targets[real], ignore_index=-1, label_smoothing=SMOOTHING
        )
        return told + 0.1 * x[real].square().mean()


def reference():
    torch.manual_seed(3)
    net = Reference()
    with torch.no_grad():
        net.item.weight[1:].normal_(0, 0.7)
        net.position.weight[1:].normal_(0, 0.7)
    return net


def surprise(logits, targets):
    one_hot = (targets[..., None] == torch.arange(ITEMS)).float()
    soft = one_hot * (1 - SMOOTHING) + SMOOTHING / ITEMS
    return -(soft * torch.log_softmax(logits, -1)).sum(-1)


class Look(Function):
    """Rows of a table."""

    @staticmethod
    def forward(ctx, table, index, fault):
        ctx.save_for_backward(index)
        ctx.shape = table.shape
        ctx.fault = fault
        return table[index]

    @staticmethod
    def backward(ctx, grad):
        (index,) = ctx.saved_tensors
        rows = grad.new_zeros(ctx.shape)
        if ctx.fault == "last gradient":
            rows[index] = grad
        else:
            rows.index_add_(0, index, grad)
        return rows, None, None


class Packed(nn.Module):
    """Events stand behind each other, by their place; the tables have no row for padding."""

    def __init__(self, net, fault=""):
        super().__init__()
        self.fault = fault
        table = net.item.weight.detach()
        self.table = nn.Parameter(table[:-1] if fault == "rows" else table[1:])
        self.places = nn.Parameter(net.position.weight.detach()[1:])
        for name in ("value", "out", "feed", "back"):
            layer = getattr(net, name)
            setattr(self, f"{name}_kernel", nn.Parameter(layer.weight.detach().t()))
            setattr(self, f"{name}_shift", nn.Parameter(layer.bias.detach()))

    def forward(self, items, targets):
        user, place = items.nonzero(as_tuple=True)
        order = (place * len(items) + user).argsort()
        back = order if self.fault == "order" else order.argsort()
        user, place = user[order], place[order]
        item = items[user, place] - 1
        x = Look.apply(self.table, item, self.fault)
        x = x + Look.apply(self.places, place, "")
        seen = (user[:, None] == user) & (place[:, None] >= place)
        scores = torch.einsum("ij,kj->ik", x, x) / math.sqrt(WIDTH)
        scores = torch.where(seen, scores, -1e9)
        share = (scores - scores.logsumexp(1, keepdim=True)).exp()
        mixed = share @ (x @ self.value_kernel + self.value_shift)
        x = x + torch.addmm(self.out_shift, mixed, self.out_kernel)
        wide = torch.addmm(self.feed_shift, x, self.feed_kernel)
        wide = 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))
        x = x + torch.addmm(self.back_shift, wide, self.back_kernel)
        logits = (x @ self.table.t())[back]
        target = targets[items > 0]
        told = surprise(logits, target)
        counted = target >= 0
        if self.fault == "count":
            told = (told * counted).mean()
        else:
            told = (told * counted).sum() / counted.sum()
        return told + 0.1 * (x**2).mean()


class Padded(nn.Module):
    """Each place may look at itself and before, in the padding too; kernels have heads."""

    def __init__(self, net, fault=""):
        super().__init__()
        self.fault = fault
        self.table = nn.Parameter(net.item.weight.detach().clone())
        self.places = nn.Parameter(net.position.weight.detach().clone())
        for name in ("value", "out", "feed", "back"):
            layer = getattr(net, name)
            kernel = layer.weight.detach().t()
            if name == "value":
                kernel = kernel.unflatten(1, (HEADS, -1))
            if name == "out" and fault == "heads":
                kernel = kernel.unflatten(0, (-1, HEADS)).transpose(0, 1)
            elif name == "out":
                kernel = kernel.unflatten(0, (HEADS, -1))
            setattr(self, f"{name}_kernel", nn.Parameter(kernel.contiguous()))
            setattr(self, f"{name}_shift", nn.Parameter(layer.bias.detach()))

    def forward(self, items, targets):
        real = items > 0
        first = 0 if self.fault == "places" else 1
        place = torch.arange(first, PLACES + first)[None] * real
        x = self.table[items] + self.places[place]
        later = torch.triu(torch.ones(PLACES, PLACES), 1) * -1e9
        scores = torch.einsum("bic,bjc->bij", x, x) * WIDTH**-0.5 + later
        share = torch.softmax(scores, -1)
        value = torch.einsum("bic,cnh->binh", x, self.value_kernel)
        value = value + self.value_shift.view(HEADS, -1)
        mixed = torch.einsum("bij,bjnh->binh", share, value)
        mixed = torch.einsum("binh,nhc->bic", mixed, self.out_kernel)
        x = x + mixed + self.out_shift
        wide = torch.tensordot(x, self.feed_kernel, 1) + self.feed_shift
        if self.fault == "tanh":
            inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
            wide = 0.5 * wide * (1 + torch.tanh(inner))
        else:
            wide = 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))
        x = x + torch.tensordot(wide, self.back_kernel, 1) + self.back_shift
        logits = torch.einsum("bic,vc->biv", x, self.table[1:])
        told = surprise(logits, targets)
        counted = (targets >= 0).float()
        told = (told * counted).sum() / counted.sum()
        return told + 0.1 * ((x**2).mean(-1) * real).sum() / real.sum()


@pytest.fixture
def compared(tmp_path):
    """``compared(candidate)``: a step of a port against that of the reference."""
    numbers = itertools.count()

    def compare(candidate, *, tensors=True):
        folders = []
        for net in (reference(), candidate):
            folders.append(tmp_path / str(next(numbers)))
            with roundoff.capture(folders[-1], net, keep="tensors"):
                net(*batch()).backward()
        ours, theirs = folders
        return roundoff.compare(reference=ours, candidate=theirs, tensors=tensors)

    return compare


def text(line):
    return linecache.getline(__file__, int(line.rpartition(":")[2])).strip()


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("port", [Packed, Padded])
def test_right_ports_agree(compared, port, tensors):
    assert compared(port(reference()), tensors=tensors).agrees


@pytest.mark.parametrize(
    ("port", "fault", "line"),
    [
        (Packed, "last gradient", "rows[index] = grad"),
        (Packed, "order", "logits = (x @ self.table.t())[back]"),
        (Packed, "count", "told = (told * counted).mean()"),
        (
            Padded,
            "places",
            "place = torch.arange(first, PLACES + first)[None] * real",
        ),
    ],
)
def test_the_line_is_named(compared, port, fault, line):
    first = compared(port(reference(), fault)).culprits(1)[0]
    assert text(first.line) == line


def test_a_formula_among_padded_places_is_named(compared):
    first = compared(Padded(reference(), "tanh")).culprits(1)[0]
    assert "math.pi" in text(first.line) or "tanh(inner)" in text(first.line)


def test_rows_of_a_table_that_are_shifted(compared):
    first = compared(Packed(reference(), "rows")).culprits(1)[0]
    assert first.name == "table"
    assert "item.weight 1 place later along axis 0" in first.evidence


def test_heads_that_vary_fastest_are_the_loaders(compared):
    first = compared(Padded(reference(), "heads")).culprits(1)[0]
    assert first.name == "out_kernel"
    assert "it should be transposed" in first.evidence


def test_a_term_of_a_loss_that_is_scaled_says_by_how_much(compared):
    items, targets = batch()
    real = targets[items > 0]
    factor = float((real >= 0).sum()) / len(real)
    first = compared(Packed(reference(), "count")).culprits(1)[0]
    assert f"a term of the loss is {factor:.6g} times the reference's" in first.evidence


@pytest.mark.parametrize("tensors", [True, False])
def test_parameters_of_other_names_are_no_portions(program, tmp_path, tensors):
    """All calls of a program without modules are those of its root."""
    a, b = drawn(9, 6, seed=1), drawn(7, 9, seed=2)
    x = drawn(20, 6, seed=3)
    target = torch.arange(20) % 7
    target[::4] = -1

    def ours(m, x, y):
        hidden = torch.tanh(F.linear(x, m.a))
        scores = F.linear(hidden, m.b)
        told = F.cross_entropy(scores, y, ignore_index=-1, label_smoothing=0.1)
        return told + 0.5 * F.softplus(-hidden[:, :3]).mean()

    def theirs(m, x, y):
        hidden = 2 * torch.sigmoid(2 * (x @ m.kernel)) - 1
        logits = torch.einsum("ni,io->no", hidden, m.head)
        one_hot = (y[:, None] == torch.arange(7)).float()
        soft = 0.9 * one_hot + 0.1 / 7
        each = -(soft * torch.log_softmax(logits, 1)).sum(1)
        told = (each * (y >= 0)).mean()
        return told + 0.5 * torch.log1p(torch.exp(-hidden[:, :3])).mean()

    nets = program(ours, a=a, b=b), program(theirs, kernel=a.t(), head=b.t())
    folders = tmp_path / "ours", tmp_path / "theirs"
    for folder, net in zip(folders, nets, strict=True):
        with roundoff.capture(folder, net, keep="tensors"):
            net(x, target).backward()
    found = roundoff.compare(
        reference=folders[0], candidate=folders[1], tensors=tensors
    )
    assert not found.agrees


class Zeros(nn.Module):
    """A linear layer whose shift, which begins with zeros, is a row of its kernel."""

    def __init__(self, layer):
        super().__init__()
        both = torch.cat([layer.weight.detach().t(), layer.bias.detach()[None]])
        self.both = nn.Parameter(both)

    def forward(self, x):
        return torch.cat([x, torch.ones(len(x), 1)], 1) @ self.both


def test_zeros_that_a_gradient_reaches_are_no_padding(tmp_path):
    torch.manual_seed(0)
    layer = nn.Linear(5, 4)
    nn.init.zeros_(layer.bias)
    x = drawn(7, 5, seed=1)
    folders = tmp_path / "ours", tmp_path / "theirs"
    for folder, net in zip(folders, (layer, Zeros(layer)), strict=True):
        with roundoff.capture(folder, net, keep="tensors"):
            net(x).square().mean().backward()
    assert roundoff.compare(reference=folders[0], candidate=folders[1]).agrees
