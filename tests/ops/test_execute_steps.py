"""steps: the parts of a call's error, which add up to the whole, and nothing is counted twice or written to."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

from roundoff.formats import FORMATS, parse_format
from roundoff.ops.calls import float_tensors, watch
from roundoff.ops.execute import execute, rounding_steps, runs

FORMAT_NAMES = [
    "bf16",
    "fp16",
    "tf32",
    "fp8_e4m3fn",
    "fp8_e5m2",
    "int8",
    "int4",
    "ternary",
    "mxfp4",
    "nvfp4",
]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))
        self.b = nn.Parameter(torch.randn(8))
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.lstm = nn.LSTM(8, 4, batch_first=True)
        self.embed = nn.Embedding(10, 8)
        self.norm = nn.LayerNorm(8)
        self.bag = nn.EmbeddingBag(10, 8, mode="mean")


NET = Net()
X = torch.randn(3, 5, 8)
CALLS = {
    "linear": lambda: F.linear(X, NET.w, NET.b),
    "matmul": lambda: X @ X.transpose(1, 2),
    "addmm": lambda: torch.addmm(NET.b, X[0], NET.w),
    "baddbmm": lambda: torch.baddbmm(X.sin(), X[:, :, :5], X),
    "einsum": lambda: torch.einsum("bti,ij->btj", X, NET.w),
    "conv2d": lambda: NET.conv(
        X[..., :2].permute(0, 2, 1)[..., None].expand(3, 2, 5, 5)
    ),
    "unbatched conv2d": lambda: NET.conv(
        X[..., :2].permute(0, 2, 1)[0, ..., None].expand(2, 5, 6)
    ),
    "unbatched conv1d": lambda: F.conv1d(X[0].T, NET.w[..., None], NET.b),
    "conv_transpose1d": lambda: F.conv_transpose1d(
        X.transpose(1, 2), NET.w[..., None], NET.b
    ),
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(X, X, X),
    "lstm": lambda: NET.lstm(X),
    "embedding": lambda: NET.embed(torch.tensor([[1, 2], [3, 1]])),
    "embedding of no parameter": lambda: F.embedding(torch.tensor([1, 2]), X[0]),
    "embedding_bag": lambda: NET.bag(torch.tensor([[1, 2, 5], [3, 1, 1]])),
    "layer_norm": lambda: NET.norm(X),
    "bilinear": lambda: F.bilinear(X[0], X[1], NET.w[None].expand(2, 8, 8)),
    "softmax": lambda: X.softmax(-1),
    "relu": lambda: X.relu(),
    "add": lambda: X + NET.b,
    "in-place mul": lambda: X.clone().mul_(NET.b),
    "max": lambda: X.max(dim=-1),
    "mse_loss": lambda: F.mse_loss(X, X.roll(1, 0)),
}


class Last:
    """Keeps the last call with the result it had."""

    def call(self, call):
        self.kept = call
        self.before = [
            t.clone() if isinstance(t, torch.Tensor) else t for t in call.leaves
        ]
        self.result = call.run()
        return self.result

    def before_write(self, tensor):
        return None


def last_call(function):
    handler = Last()
    with torch.no_grad(), watch(NET, handler) as mode, mode:
        function()
    handler.kept.leaves = list(handler.before)  # as before an in-place operator wrote
    return handler.kept, handler.result


PAIRS = [
    (name, fmt)
    for name in CALLS
    for fmt in FORMAT_NAMES
    if not runs(last_call(CALLS[name])[0], FORMATS[fmt])
]


@pytest.mark.parametrize(("name", "fmt"), PAIRS)
def test_the_steps_end_where_the_execution_ends(name, fmt):
    """So the differences between consecutive steps, from the reference on, add up to the whole error."""
    call, exact = last_call(CALLS[name])
    rule = FORMATS[fmt]
    reference = [t.clone() for t in float_tensors(exact)]
    *_, end = rounding_steps(call, rule, exact)
    whole = float_tensors(execute(call, rule))
    if rule.execution.bias and any(operand.role == "bias" for operand in call.operands):
        # the bias is added in a step of its own: 3 more fp32 roundings of the largest value, after which a sum near a
        # tie of the format may round to the other side, by one ulp
        ulp = 2.0**-rule.fraction_bits if rule.execution.output else 0.0
        bounds = [
            w.abs() * ulp + 4 * 2**-24 * r.abs().max()
            for w, r in zip(whole, reference, strict=True)
        ]
    else:
        bounds = [torch.zeros(()) for _ in whole]
    for last, executed, bound in zip(
        float_tensors(end.result), whole, bounds, strict=True
    ):
        assert bool(((last - executed).abs() <= bound).all())
        assert (
            float((last != executed).float().mean()) < 0.02
        )  # ties are rare: one in 2**13 sums
    if name != "relu":
        assert any(not torch.equal(w, r) for w, r in zip(whole, reference, strict=True))


def test_most_pairs_are_there():
    """Every call in bf16 and fp16, the 14 that contract in the matrix formats (ternary has no weight in 4 of them)."""
    assert len([p for p in PAIRS if p[1] == "bf16"]) == len(CALLS) == 22
    assert len([p for p in PAIRS if p[1] == "int8"]) == 14


@pytest.mark.parametrize("fmt", ["bf16", "int8", "mxfp4"])
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_written_to(name, fmt):
    call, exact = last_call(CALLS[name])
    reference = [t.clone() for t in tree_leaves(exact)]
    leaves = [t.clone() if isinstance(t, torch.Tensor) else t for t in call.leaves]
    list(rounding_steps(call, parse_format(fmt), exact))
    assert all(
        torch.equal(a, b) for a, b in zip(tree_leaves(exact), reference, strict=True)
    )
    for now, was in zip(call.leaves, leaves, strict=True):
        assert torch.equal(now, was) if isinstance(was, torch.Tensor) else now == was


def parts(name, fmt):
    call, exact = last_call(CALLS[name])
    return [
        (s.part, -1 if s.operand is None else s.operand.leaf)
        for s in rounding_steps(call, parse_format(fmt), exact)
    ]


@pytest.mark.parametrize(
    ("name", "fmt", "expected"),
    [
        (
            "linear",
            "bf16",
            [("activation", 0), ("weight", 1), ("weight", 2), ("output", -1)],
        ),
        (
            "linear",
            "int8",
            [("activation", 0), ("weight", 1)],
        ),  # the bias and the result stay
        ("linear", "ternary", [("weight", 1)]),
        ("linear", "e8m0", []),
        ("matmul", "bf16", [("activation", 0), ("activation", 1), ("output", -1)]),
        ("add", "bf16", [("activation", 0), ("weight", 1), ("output", -1)]),
        ("embedding", "bf16", [("weight", 1)]),
        (
            "layer_norm",
            "bf16",
            [("activation", 0), ("weight", 2), ("weight", 3), ("output", -1)],
        ),
    ],
)
def test_the_parts_of_a_call(name, fmt, expected):
    found = parts(name, fmt)
    assert [p for p, _ in found] == [p for p, _ in expected]
    assert [leaf < 0 for _, leaf in found] == [leaf < 0 for _, leaf in expected]


def test_a_relu_whose_operand_is_rounded_has_no_output_error():
    call, exact = last_call(CALLS["relu"])
    operand, output = rounding_steps(call, parse_format("bf16"), exact)
    assert torch.equal(operand.result, X.bfloat16().float().relu())
    assert torch.equal(output.result, operand.result)


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(["bf16", "fp8_e4m3fn", "int8", "int4", "mxfp6_e2m3", "binary"]),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 70),
    st.integers(1, 4),
    st.integers(0, 2**31),
)
def test_sums_on_random_shapes(fmt, batch, rows, inner, columns, seed):
    generator = torch.Generator().manual_seed(seed)
    owner = nn.Module()
    owner.w = nn.Parameter(
        torch.randn(columns, inner, generator=generator, dtype=torch.float64)
    )
    x = torch.randn(batch, rows, inner, generator=generator, dtype=torch.float64)
    handler = Last()
    with torch.no_grad(), watch(owner, handler) as mode, mode:
        F.linear(x, owner.w)
    rule = FORMATS[fmt]
    *_, end = rounding_steps(handler.kept, rule, handler.result)
    whole = execute(handler.kept, rule)
    assert end.result.shape == whole.shape == (batch, rows, columns)
    assert torch.equal(
        end.result, whole
    )  # without a bias, the last step is the execution itself
