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


# -- parameters in another layout, under the same name ---------------------------------


class Square(nn.Module):
    """A linear layer that keeps its weight transposed; the name is the same."""

    def __init__(self, linear, fault):
        super().__init__()
        self.fault = fault
        self.weight = nn.Parameter(linear.weight.detach().t().contiguous())
        self.bias = linear.bias

    def forward(self, x):
        y = torch.matmul(x, self.weight)
        if self.fault == "scale":
            return torch.mul(y, 0.5) + self.bias
        return y + self.bias


class Patches(nn.Module):
    """A convolution whose weight has its channels last."""

    def __init__(self, conv, fault):
        super().__init__()
        self.fault = fault
        self.weight = nn.Parameter(
            conv.weight.detach().permute(0, 2, 3, 1).contiguous()
        )
        self.bias = conv.bias

    def forward(self, x):
        windows = x.unfold(2, 2, 2).unfold(3, 2, 2)
        if self.fault == "step":
            windows = windows.flip(4)
        return (
            torch.einsum("ncijkl,oklc->noij", windows, self.weight)
            + self.bias[:, None, None]
        )


class Columns(nn.Module):
    """A table of words with one word a column."""

    def __init__(self, table, fault):
        super().__init__()
        self.fault = fault
        self.weight = nn.Parameter(table.weight.detach().t().contiguous())

    def forward(self, ids):
        at = ids.clamp(max=3) if self.fault == "clamp" else ids
        return self.weight[:, at].movedim(0, -1)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.table = nn.Embedding(9, 9)
        self.square = nn.Linear(9, 9)
        self.patches = nn.Conv2d(3, 4, 2, stride=2)
        self.leave = nn.Linear(4, 2)

    def forward(self, ids):
        x = torch.tanh(self.square(self.table(ids)))
        image = x.reshape(2, 3, 6, 6)
        return self.leave(torch.tanh(self.patches(image)).mean((2, 3)))


IDS = torch.randint(9, (2, 12), generator=torch.Generator().manual_seed(4))
LAYOUTS = {"square": Square, "patches": Patches, "table": Columns}


@pytest.fixture
def words_compared(tmp_path):
    """``words_compared(name, fault, steps)``: trained, with one layer in another layout."""

    def compare(name, fault="", steps=2):
        for side in ("reference", "candidate"):
            model = Words()
            if side == "candidate":
                setattr(model, name, LAYOUTS[name](getattr(model, name), fault))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with roundoff.capture(tmp_path / side, model, keep="tensors") as run:
                for _ in range(steps):
                    optimizer.zero_grad()
                    model(IDS).square().sum().backward()
                    optimizer.step()
                    run.step()
        return roundoff.compare(
            reference=tmp_path / "reference", candidate=tmp_path / "candidate"
        )

    return compare


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layer_with_its_parameter_in_another_layout_agrees(name, words_compared):
    found = words_compared(name)
    assert found.agrees, found.answer


@pytest.mark.parametrize(
    ("name", "fault", "text"),
    [
        ("square", "scale", "torch.mul(y, 0.5)"),
        ("patches", "step", "windows.flip(4)"),
        ("table", "clamp", "ids.clamp(max=3)"),
    ],
)
def test_the_line_is_named_and_not_the_layout(name, fault, text, words_compared):
    found = words_compared(name, fault, steps=1)
    lines, start = inspect.getsourcelines(LAYOUTS[name])
    [number] = [start + n for n, line in enumerate(lines) if text in line]
    first = found.culprits(1)[0]
    assert first.line.endswith(f":{number}"), found.answer


def test_a_transposed_weight_in_the_same_layer_is_named(tmp_path):
    for side in ("reference", "candidate"):
        model = Words()
        if side == "candidate":
            model.square.weight.data = model.square.weight.data.t().contiguous()
        with (
            torch.no_grad(),
            roundoff.capture(tmp_path / side, model, keep="tensors") as run,
        ):
            model(IDS)
            run.step()
    found = roundoff.compare(
        reference=tmp_path / "reference", candidate=tmp_path / "candidate"
    )
    assert found.culprits(1)[0].name == "square.weight"


# -- one operator that does another thing in the layer by another hand ------------------


class Weighted(nn.Module):
    """Softmax attention over rows; the mask is a bias that is filled, and weights are normed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 8)

    def forward(self, x, hidden):
        bias = torch.zeros(2, 1, 5).masked_fill(hidden[:, None], -1e9)
        scores = self.q(x) @ self.k(x).mT + bias
        each = (scores - scores.amax(-1, keepdim=True)).exp()
        weights = each / each.sum(-1, keepdim=True)
        return weights @ x


class NormedLater(Weighted):
    """The scores are filled, and the sums of values are normed."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def forward(self, x, hidden):
        scores = self.q(x) @ self.k(x).mT
        seen = hidden.flip(1) if self.fault == "mask" else hidden
        scores = scores.masked_fill(seen[:, None], -1e9)
        each = (scores - scores.amax(-1, keepdim=True)).exp()
        return (each @ x) / each.sum(-1).unsqueeze(-1)


class Hidden(nn.Module):
    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(6)
        self.enter = nn.Linear(8, 8)
        self.layer = layer
        self.leave = nn.Linear(8, 3)

    def forward(self, x):
        hidden = torch.arange(5) >= torch.tensor([[5], [3]])
        return self.leave(torch.tanh(self.layer(self.enter(x), hidden)))


@pytest.fixture
def masked_compared(tmp_path):
    def compare(fault, keep):
        for side in ("reference", "candidate"):
            model = Hidden(Weighted() if side == "reference" else NormedLater(fault))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with roundoff.capture(tmp_path / side, model, keep=keep) as run:
                for _ in range(2):
                    optimizer.zero_grad()
                    model(X).square().mean().backward()
                    optimizer.step()
                    run.step()
        return roundoff.compare(
            reference=tmp_path / "reference", candidate=tmp_path / "candidate"
        )

    return compare


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_one_operator_may_do_two_things(keep, masked_compared):
    found = masked_compared("", keep)
    assert found.agrees, found.answer


def test_a_fault_beside_it_is_named(masked_compared):
    found = masked_compared("mask", "tensors")
    lines, start = inspect.getsourcelines(NormedLater)
    [number] = [start + n for n, line in enumerate(lines) if "hidden.flip(1)" in line]
    assert found.culprits(1)[0].line.endswith(f":{number}"), found.answer
