"""Small layers by another hand, each with one wrong line, which is named.

A parameter in another order than what it is added to, whole numbers that the port
computes, heads that are cut the other way, an operator that one of two readers lacks, and
a table of positions that is turned.
"""

from __future__ import annotations

import linecache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundoff as ro

WORDS, WIDTH, HEADS, LENGTH, CLASSES = 12, 12, 3, 6, 5


class Layer(nn.Module):
    """Parameters by name; of a port each matrix is turned."""

    def __init__(self, fault=None, **tensors):
        super().__init__()
        self.fault = fault
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))


class Joined(Layer):
    """The first columns of the input are the last ones of the port, in its layers too.

    Its rows stand otherwise, time before samples.
    """

    def forward(self, x):
        if self.fault is None:
            h = torch.relu(F.linear(x, self.weight, self.bias))
            return F.linear(h, self.head)
        x = torch.cat([x[..., 5:], x[..., :5]], -1).transpose(0, 1)
        h = torch.relu(torch.matmul(x, self.kernel) + self.offset)
        return torch.matmul(h, self.out).transpose(0, 1)

    @classmethod
    def ported(cls, fault, weight, bias, head):
        def turned(tensor, axis):
            return tensor.roll(-5, axis)

        return cls(
            fault,
            kernel=turned(turned(weight, 0), 1).t().contiguous(),
            offset=bias if fault else turned(bias, 0),
            out=turned(head, 1).t().contiguous(),
        )


class Looked(Layer):
    """Words that the table does not have are word 1; of two texts, one after the other."""

    def forward(self, words):
        texts = (words[:, :2], words[:, 2:])
        return torch.cat([self.of_text(text) for text in texts], 1)

    def of_text(self, words):
        if self.fault is None:
            known = words.masked_fill(words >= WORDS, 1)
            return F.linear(F.embedding(known, self.table), self.head)
        other = torch.zeros_like(words) if self.fault else torch.ones_like(words)
        words = torch.where(words < WORDS, words, other)
        return torch.einsum("bti,io->bto", self.vectors[words], self.out)

    @classmethod
    def ported(cls, fault, table, head):
        return cls(fault, vectors=table, out=head.t().contiguous())


class Shifted(Layer):
    """What stands before each word; the port has the words of one place side by side.

    Where texts end in padding, words that are shifted wrongly are the same, in other places.
    """

    def forward(self, words):
        return torch.cat([self.of_texts(words[:4]), self.of_texts(words[4:])])

    def of_texts(self, words):
        if self.fault is None:
            before = F.pad(words, (1, 0))[:, :-1]
            x = F.embedding(before, self.table) + self.place
            return F.linear(torch.tanh(x), self.head)
        size, length = words.shape
        flat = words.t().flatten()
        moved = 1 if self.fault else size
        before = torch.cat([flat.new_zeros(moved), flat[:-moved]])
        x = self.vectors[before].view(length, size, -1) + self.place[:, None]
        return torch.einsum("tbi,io->bto", torch.tanh(x), self.out)

    @classmethod
    def ported(cls, fault, table, place, head):
        return cls(fault, vectors=table, place=place, out=head.t().contiguous())


class Attending(Layer):
    """Heads are cut out of the width: those of one head lie side by side."""

    def forward(self, x):
        b, t, d = x.shape
        if self.fault is None:
            q, k, v = (x @ self.qkv + self.bias).chunk(3, -1)
            q, k, v = (y.view(b, t, HEADS, -1).transpose(1, 2) for y in (q, k, v))
            share = (q @ k.mT / 2.0).softmax(-1)
            return F.linear((share @ v).transpose(1, 2).flatten(2), self.out)
        packed = torch.addmm(self.offset, x.flatten(0, 1), self.kernel)
        if self.fault:
            packed = packed.view(b, t, 3, d // HEADS, HEADS).permute(2, 0, 4, 1, 3)
        else:
            packed = packed.view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = packed
        y = F.scaled_dot_product_attention(q, k, v, scale=0.5)
        return y.permute(0, 2, 1, 3).reshape(b, t, d) @ self.merge

    @classmethod
    def ported(cls, fault, qkv, bias, out):
        return cls(fault, kernel=qkv, offset=bias, merge=out.t().contiguous())


class Recurrent(Layer):
    """The state of a cell is read twice: by its result, and by the next step."""

    def forward(self, x):
        h = c = x.new_zeros(len(x), WIDTH)
        outs = []
        for step in range(x.shape[1]):
            if self.fault is None:
                gates = F.linear(torch.cat([x[:, step], h], 1), self.weight)
                i, f, g, o = gates.chunk(4, 1)
                c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
                h = torch.sigmoid(o) * torch.tanh(c)
            else:
                h, c = self.cell(x[:, step], h, c)
            outs.append(h)
        return torch.stack(outs, 1)

    def cell(self, x, h, c):
        gates = x @ self.kernel[: x.shape[1]] + h @ self.kernel[x.shape[1] :]
        i, f, g, o = gates.split(WIDTH, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        if self.fault:
            return c * o.sigmoid(), c
        return c.tanh() * o.sigmoid(), c

    @classmethod
    def ported(cls, fault, weight):
        return cls(fault, kernel=weight.t().contiguous())


class Placed(Layer):
    """A bias by how far a key is before its query."""

    def forward(self, x):
        t = x.shape[1]
        here = torch.arange(t)
        if self.fault is None:
            far = here[None, :] - here[:, None]
            bias = self.table[far + t]
            return (x.roll(1, 2) @ x.mT + bias).softmax(-1) @ x
        far = here[:, None] - here[None, :]
        if not self.fault:
            far = -far
        rows = F.one_hot(far + t, len(self.row)).float()
        scores = torch.einsum("bti,bsi->bts", x.roll(1, 2), x) + rows @ self.row
        return torch.einsum("bts,bsi->bti", scores.softmax(-1), x)

    @classmethod
    def ported(cls, fault, table):
        return cls(fault, row=table)


def _numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


CASES = {
    Joined: (
        {
            "weight": _numbers(WIDTH, WIDTH),
            "bias": _numbers(WIDTH),
            "head": _numbers(CLASSES, WIDTH),
        },
        _numbers(3, 4, WIDTH),
        "h = torch.relu(torch.matmul(x, self.kernel) + self.offset)",
    ),
    Looked: (
        {"table": _numbers(WORDS, WIDTH), "head": _numbers(CLASSES, WIDTH)},
        torch.arange(20).reshape(4, 5),
        "other = torch.zeros_like(words) if self.fault else torch.ones_like(words)",
    ),
    Shifted: (
        {
            "table": _numbers(WORDS, WIDTH),
            "place": _numbers(LENGTH, WIDTH),
            "head": _numbers(CLASSES, WIDTH),
        },
        (1 + torch.arange(42).reshape(7, LENGTH) % 11)
        * (torch.arange(LENGTH) < torch.tensor([6, 3, 4, 5, 5, 2, 4])[:, None]),
        "before = torch.cat([flat.new_zeros(moved), flat[:-moved]])",
    ),
    Attending: (
        {
            "qkv": _numbers(WIDTH, 3 * WIDTH),
            "bias": _numbers(3 * WIDTH),
            "out": _numbers(WIDTH, WIDTH),
        },
        _numbers(2, LENGTH, WIDTH),
        "packed = packed.view(b, t, 3, d // HEADS, HEADS).permute(2, 0, 4, 1, 3)",
    ),
    Recurrent: (
        {"weight": _numbers(4 * WIDTH, 2 * WIDTH) / 3},
        _numbers(4, LENGTH, WIDTH),
        "return c * o.sigmoid(), c",
    ),
    Placed: (
        {"table": _numbers(2 * LENGTH)},
        _numbers(2, LENGTH, WIDTH) / 2,
        "far = here[:, None] - here[None, :]",
    ),
}


@pytest.mark.parametrize("fault", [False, True])
@pytest.mark.parametrize("layer", CASES, ids=lambda layer: layer.__name__)
def test_the_wrong_line_of_a_layer_is_named(layer, fault, tmp_path):
    tensors, x, line = CASES[layer]
    paths = {}
    for side, net in (
        ("reference", layer(None, **tensors)),
        ("candidate", layer.ported(fault, **tensors)),
    ):
        with ro.capture(tmp_path / side, net, keep="tensors"):
            F.cross_entropy(
                net(x).flatten(0, -2), torch.arange(x.numel())[: _rows(x)] % 5
            )
        paths[side] = str(tmp_path / side)
    found = ro.compare(**paths)
    assert found.agrees == (not fault), found.answer
    for first in found.culprits(1):
        number = int(first.line.rpartition(":")[2])
        assert linecache.getline(__file__, number).strip() == line, found.answer


def _rows(x):
    return x.numel() if x.dtype == torch.int64 else x.shape[:-1].numel()


def test_a_bias_in_another_order_is_named_by_its_name(tmp_path):
    tensors, x, _ = CASES[Joined]
    paths = {}
    for side, net in (
        ("reference", Joined(None, **tensors)),
        ("candidate", Joined.ported(True, **tensors)),
    ):
        with ro.capture(tmp_path / side, net, keep="tensors"):
            net(x).square().mean()
        paths[side] = str(tmp_path / side)
    [first] = ro.compare(**paths).culprits(1)
    assert first.name == "offset"
    assert "offset is not in the order of what it is used with" in first.evidence


class Smoothed(Layer):
    """A loss of which no value but the loss itself is the reference's."""

    def forward(self, x, labels):
        seen = labels != 0
        if self.fault is None:
            scores = F.linear(torch.tanh(F.linear(x, self.weight)), self.head)
            loss = F.cross_entropy(
                scores, labels, ignore_index=0, label_smoothing=0.1, reduction="sum"
            )
            return loss / seen.sum()
        h = 2 * torch.sigmoid(2 * torch.einsum("bi,io->bo", x, self.kernel)) - 1
        scores = torch.einsum("bi,io->bo", h, self.out)
        scores = scores - scores.logsumexp(1, keepdim=True)
        chosen = -scores.gather(1, labels[:, None])
        reduced = scores.sum if self.fault else scores.mean
        spread = reduced(1, keepdim=True)
        losses = 0.9 * chosen - 0.1 * spread
        return (losses * seen[:, None]).sum() / seen.sum()

    @classmethod
    def ported(cls, fault, weight, head):
        return cls(fault, kernel=weight.t().contiguous(), out=head.t().contiguous())


def test_an_edit_that_makes_the_loss_alone_right_is_named(tmp_path):
    paths = {}
    tensors = {"weight": _numbers(WIDTH, WIDTH), "head": _numbers(CLASSES, WIDTH)}
    for side, net in (
        ("reference", Smoothed(None, **tensors)),
        ("candidate", Smoothed.ported(True, **tensors)),
    ):
        with ro.capture(tmp_path / side, net, keep="tensors"):
            net(_numbers(24, WIDTH), torch.arange(24) % CLASSES).backward()
        paths[side] = str(tmp_path / side)
    [first] = ro.compare(**paths).culprits(1)
    line = linecache.getline(__file__, int(first.line.rpartition(":")[2]))
    assert line.strip() == "spread = reduced(1, keepdim=True)"
    assert "as mean, not sum" in first.evidence
