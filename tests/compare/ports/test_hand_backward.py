"""Backward passes by hand: each is right in its own formula, and wrong in one line."""

from __future__ import annotations

import linecache

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

import roundoff as ro

COUNT, WIDTH, CLASSES = 9, 6, 4
#: What is wrong -> the line that is to be named.
FAULTS = {
    "norm": "apart = grad - common",
    "swish": "return grad * (s + x * s), None",
    "columns": "total[:, place : place + size] = part",
    "loss": "return (shares - target) * grad, None, None",
}


class Norm(Function):
    @staticmethod
    def forward(ctx, x, fault):
        centred = x - x.mean(0)
        inverse = 1 / (centred.square().mean(0) + 1e-5).sqrt()
        hat = centred * inverse
        ctx.save_for_backward(hat, inverse)
        ctx.fault = fault
        return hat

    @staticmethod
    def backward(ctx, grad):
        hat, inverse = ctx.saved_tensors
        common = grad.mean(0)
        along = (grad * hat).mean(0)
        if ctx.fault == "norm":
            apart = grad - common
            return apart * inverse, None
        return (grad - common - hat * along) * inverse, None


class Swish(Function):
    @staticmethod
    def forward(ctx, x, fault):
        ctx.save_for_backward(x)
        ctx.fault = fault
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        if ctx.fault == "swish":
            return grad * (s + x * s), None
        return grad * (s + x * s * (1 - s)), None


class Windows(Function):
    """The sums of windows of two that overlap, (count, width - 1)."""

    @staticmethod
    def forward(ctx, x, fault):
        ctx.fault = fault
        ctx.width = x.shape[1]
        return x[:, :-1] * 0.75 + x[:, 1:] * 1.25

    @staticmethod
    def backward(ctx, grad):
        total = grad.new_zeros(len(grad), ctx.width)
        size = ctx.width - 1
        for place, factor in enumerate((0.75, 1.25)):
            part = grad * factor
            if ctx.fault == "columns":
                total[:, place : place + size] = part
            else:
                total[:, place : place + size] += part
        return total, None


class Loss(Function):
    @staticmethod
    def forward(ctx, scores, target, fault):
        shares = torch.softmax(scores, 1)
        ctx.save_for_backward(shares, target)
        ctx.fault = fault
        return -(target * shares.log()).sum() / len(scores)

    @staticmethod
    def backward(ctx, grad):
        shares, target = ctx.saved_tensors
        if ctx.fault == "loss":
            return (shares - target) * grad, None, None
        return (shares - target) * (grad / len(shares)), None, None


class LossWithZeros(Loss):
    """Of logarithms of which some are of zero: autograd has no number for these."""

    @staticmethod
    def forward(ctx, scores, target, fault):
        never = torch.logaddexp(scores - torch.inf, scores - torch.inf)
        return Loss.forward(ctx, scores, target, fault) + never.exp().sum()


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH - 1, WIDTH)
        self.third = nn.Linear(WIDTH, CLASSES)

    def forward(self, x, y):
        for layer in (self.first, self.second):
            x = layer(x)
            x = F.silu(F.batch_norm(x, None, None, training=True))
            if layer is self.first:
                x = x[:, :-1] * 0.75 + x[:, 1:] * 1.25
        return F.cross_entropy(self.third(x), y)


class Port(nn.Module):
    def __init__(self, reference, fault, loss):
        super().__init__()
        self.loss = loss
        layers = (reference.first, reference.second, reference.third)
        self.w = nn.ParameterList([layer.weight.detach().t() for layer in layers])
        self.b = nn.ParameterList([layer.bias.detach().clone() for layer in layers])
        self.fault = fault

    def forward(self, x, y):
        for number in range(2):
            x = torch.einsum("bi,io->bo", x, self.w[number]) + self.b[number]
            x = Swish.apply(Norm.apply(x, self.fault), self.fault)
            if number == 0:
                x = Windows.apply(x, self.fault)
        scores = x @ self.w[2] + self.b[2]
        return self.loss.apply(scores, F.one_hot(y, CLASSES).float(), self.fault)


def compared(fault, folder, *, tensors, loss=Loss):
    torch.manual_seed(0)
    reference = Reference()
    port = Port(reference, fault, loss)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(COUNT, WIDTH, generator=generator)
    y = torch.randint(0, CLASSES, (COUNT,), generator=generator)
    folders = {"reference": folder / "ours", "candidate": folder / "theirs"}
    for path, module in zip(folders.values(), (reference, port), strict=True):
        with ro.capture(path, module, keep="tensors"):
            module(x, y).backward()
    paths = {side: str(path) for side, path in folders.items()}
    return ro.compare(**paths, tensors=tensors)


@pytest.mark.parametrize("tensors", [True, False])
def test_other_formulas_of_the_same_derivatives_are_right(tensors, tmp_path):
    assert compared("", tmp_path, tensors=tensors).agrees


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("fault", FAULTS)
def test_the_line_of_a_wrong_one_is_named(fault, tensors, tmp_path):
    [first] = compared(fault, tmp_path, tensors=tensors).culprits(3)
    number = int(first.line.rpartition(":")[2])
    assert linecache.getline(__file__, number).strip() == FAULTS[fault]
    assert first.phase == "backward"


@pytest.mark.parametrize("fault", ["norm", "swish"])
def test_a_loss_that_autograd_cannot_differentiate(fault, tmp_path):
    """What goes back to its scores agrees with the reference's, and is begun with."""
    found = compared(fault, tmp_path, tensors=True, loss=LossWithZeros)
    [first] = found.culprits(3)
    number = int(first.line.rpartition(":")[2])
    assert linecache.getline(__file__, number).strip() == FAULTS[fault]


class Sharp(Function):
    """A softmax of so many times what it is given, which also goes another way."""

    @staticmethod
    def forward(ctx, x, fault):
        shares = torch.softmax(3 * x, 1)
        ctx.save_for_backward(shares)
        ctx.fault = fault
        return shares

    @staticmethod
    def backward(ctx, grad):
        (shares,) = ctx.saved_tensors
        inner = shares * (grad - (grad * shares).sum(1, keepdim=True))
        if ctx.fault == "sharp":
            return inner, None
        return 3 * inner, None


class Bend(Function):
    """Of one row; the logarithm of one more than its sizes, added up."""

    @staticmethod
    def forward(ctx, x, fault):
        ctx.save_for_backward(x)
        ctx.fault = fault
        return torch.log1p(x.abs() / 0.3).sum()

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if ctx.fault == "bend":
            slope = 1 / (1 + x.abs() / 0.3)
        else:
            slope = 1 / (0.3 + x.abs())
        return grad * slope * x.sign(), None


class Pair(nn.Module):
    """A layer whose result is read twice, and rows that are looked at one by one."""

    def __init__(self, weights, fault=None):
        super().__init__()
        self.fault = fault
        names = ("a", "b") if fault is None else ("kernel", "head")
        for name, weight in zip(names, weights, strict=True):
            turned = weight.clone() if fault is None else weight.t().contiguous()
            self.register_parameter(name, nn.Parameter(turned))

    def forward(self, x):
        if self.fault is None:
            h = F.linear(x, self.a)
            z = F.linear(F.softmax(3 * h, 1), self.b)
            far = torch.log1p(z.abs() / 0.3).sum(1)
            return far.mean() + h.square().mean()
        h = torch.einsum("bi,io->bo", x, self.kernel)
        z = torch.einsum("bi,io->bo", Sharp.apply(h, self.fault), self.head)
        far = sum(Bend.apply(row, self.fault) for row in z)
        return far / len(z) + (h**2).sum() / h.numel()


def compared_with_autograd(net, fault, folder, *, tensors):
    """Compare a net of two matrices without and with backward passes by hand."""
    generator = torch.Generator().manual_seed(2)
    weights = [
        torch.randn(WIDTH + 2, WIDTH, generator=generator),
        torch.randn(WIDTH, WIDTH + 2, generator=generator),
    ]
    x = torch.randn(COUNT, WIDTH, generator=generator)
    paths = {}
    for side, made in (("reference", net(weights)), ("candidate", net(weights, fault))):
        with ro.capture(folder / side, made, keep="tensors"):
            made(x).backward()
        paths[side] = str(folder / side)
    return ro.compare(**paths, tensors=tensors)


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("fault", ["", "sharp", "bend"])
def test_a_result_that_is_read_twice_and_rows_one_by_one(fault, tensors, tmp_path):
    found = compared_with_autograd(Pair, fault, tmp_path, tensors=tensors)
    lines = {
        "sharp": "inner = shares * (grad - (grad * shares).sum(1, keepdim=True))",
        # no value of the forward pass has the slope alone as its gradient
        "bend": "return grad * slope * x.sign(), None",
    }
    assert found.agrees == (not fault)
    for first in found.culprits(1):
        number = int(first.line.rpartition(":")[2])
        assert linecache.getline(__file__, number).strip() == lines[fault]


class Gelu(Function):
    """By the hyperbolic tangent; its slope is a sum of which one term has a factor."""

    @staticmethod
    def forward(ctx, x, fault):
        ctx.save_for_backward(x)
        ctx.fault = fault
        return 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.1 * x * x * x)))

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        t = torch.tanh(0.8 * (x + 0.1 * x * x * x))
        factor = 0.1 if ctx.fault == "three" else 0.3
        slope = 0.8 * (1 + factor * x * x)
        half = 1.0 if ctx.fault == "half" else 0.5
        edge = half * (1 + t)
        return grad * (0.5 * x * (1 - t * t) * slope + edge), None


class Bent(Pair):
    def forward(self, x):
        if self.fault is None:
            h = F.linear(x, self.a)
            h = 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.1 * h**3)))
            return F.linear(h, self.b).square().mean()
        h = Gelu.apply(torch.einsum("bi,io->bo", x, self.kernel), self.fault)
        z = torch.einsum("bi,io->bo", h, self.head)
        return (z * z).sum() / z.numel()


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("fault", ["", "three", "half"])
def test_a_term_of_a_slope_without_its_factor(fault, tensors, tmp_path):
    found = compared_with_autograd(Bent, fault, tmp_path, tensors=tensors)
    lines = {
        "three": ("slope = 0.8 * (1 + factor * x * x)", "3 times"),
        "half": ("edge = half * (1 + t)", "0.5 times"),
    }
    assert found.agrees == (not fault)
    for first in found.culprits(1):
        number = int(first.line.rpartition(":")[2])
        line, words = lines[fault]
        assert linecache.getline(__file__, number).strip() == line
        assert words in first.evidence
