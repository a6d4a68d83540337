"""execute: what an operator computes in a format, against the same done by hand with torch's own casts and integers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from roundoff.formats import FORMATS, parse_format
from roundoff.ops.execute import execute, gradient_format, round_gradient, runs

BF16 = torch.bfloat16


def near(shape, step=1 / 16, top=100):
    """Multiples of a power of two, and the same moved by less than half a bf16 ulp: a cast brings them back."""
    exact = torch.randint(-top, top + 1, shape) * step
    return exact * (1 + 2.0**-12), exact  # 101 has 7 bits, bf16 holds 8


class Net(nn.Module):
    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))


def run(seen, site, fmt, function, *inputs, owner):
    return execute(seen(function, *inputs, owner=owner).call(site), parse_format(fmt))


def test_bf16_linear_rounds_operands_bias_and_result(seen):
    """x.bf16 @ w.bf16 accumulated without error (products of 7-bit integers, 8 of them, fit fp32's 24 bits)."""
    (x, x16), (w, w16), (b, b16) = near((5, 8)), near((3, 8)), near((3,))
    owner = Net(w=w, b=b)
    found = run(
        seen, "/linear", "bf16", lambda x: F.linear(x, owner.w, owner.b), x, owner=owner
    )
    assert not torch.equal(x, x16)
    assert torch.equal(found, (x16 @ w16.T + b16).to(BF16).float())


@pytest.mark.parametrize("fmt", ["bf16", "fp16"])
def test_a_real_half_precision_linear_agrees_to_one_last_place(seen, fmt):
    dtype = parse_format(fmt).torch_dtype
    x, w, b = torch.randn(16, 32), torch.randn(8, 32), torch.randn(8)
    owner = Net(w=w, b=b)
    found = run(
        seen, "/linear", fmt, lambda x: F.linear(x, owner.w, owner.b), x, owner=owner
    )
    real = F.linear(x.to(dtype), w.to(dtype), b.to(dtype)).float()
    # both are a sum accumulated in fp32 and rounded once, so they differ where it lies near a tie: by one ulp of the
    # format, at most eps of the value; where terms cancel, by 33 fp32 roundings of the sum of magnitudes
    eps = torch.finfo(dtype).eps
    bound = real.abs() * eps + 33 * 2**-24 * (x.abs() @ w.abs().T + b.abs())
    assert bool(((found - real).abs() <= bound).all())
    assert (
        float((found != real).float().mean()) < 0.05
    )  # a tie every 2**(24 - 11) times, and a little


def test_int8_linear_is_an_integer_matmul(seen):
    """One scale for x, one for each row of w, exact accumulation; the bias stays, the result is not rounded."""
    x, w, b = (
        torch.randn(6, 16, dtype=torch.float64),
        torch.randn(4, 16, dtype=torch.float64),
        torch.randn(4).double(),
    )
    w[2] *= 30.0
    owner = Net(w=w, b=b)
    found = run(
        seen, "/linear", "int8", lambda x: F.linear(x, owner.w, owner.b), x, owner=owner
    )
    sx = x.abs().max() / 127
    sw = w.abs().amax(dim=1) / 127
    qx = torch.round(x / sx).to(torch.int32)
    qw = torch.round(w / sw[:, None]).to(torch.int32)
    assert qw.abs().amax(dim=1).eq(127).all()
    expected = (qx @ qw.T).double() * sx * sw + b
    # the same products in another order: (n + 3) roundings of the sum of magnitudes in fp64
    scale = (x.abs() @ w.abs().T + b.abs()).max()
    torch.testing.assert_close(found, expected, rtol=0, atol=float(scale) * 20 * 2**-52)


def test_int8_convolution_keeps_a_scale_for_each_output_channel(seen):
    x, w = (
        torch.randn(2, 3, 6, 6, dtype=torch.float64),
        torch.randn(4, 3, 3, 3, dtype=torch.float64),
    )
    w[1] *= 50
    owner = Net(w=w)
    found = run(
        seen,
        "/conv2d",
        "int8",
        lambda x: F.conv2d(x, owner.w, padding=1),
        x,
        owner=owner,
    )
    sx, sw = x.abs().max() / 127, w.abs().amax(dim=(1, 2, 3)) / 127
    qx, qw = torch.round(x / sx), torch.round(w / sw.view(-1, 1, 1, 1))
    expected = (
        F.conv2d(qx, qw, padding=1) * sx * sw.view(1, -1, 1, 1)
    )  # whole numbers: exact in fp64
    # 27 products, in another order
    torch.testing.assert_close(
        found, expected, rtol=0, atol=float(expected.abs().max()) * 30 * 2**-52 * 27
    )


@pytest.mark.parametrize("transposed", [True, False])
def test_int8_matmul_scales_the_weight_along_the_axis_that_is_kept(seen, transposed):
    """x @ W has one scale for each column of W, x @ W.T one for each row: never along the axis summed over."""
    x, w = (
        torch.randn(5, 8, dtype=torch.float64),
        torch.randn(8, 3, dtype=torch.float64),
    )
    w[:, 1] *= 40
    owner = Net(w=w.T.contiguous() if transposed else w)
    found = run(
        seen,
        "/matmul",
        "int8",
        lambda x: x @ (owner.w.T if transposed else owner.w),
        x,
        owner=owner,
    )
    sx, sw = x.abs().max() / 127, w.abs().amax(dim=0) / 127
    expected = (torch.round(x / sx) @ torch.round(w / sw)) * sx * sw
    torch.testing.assert_close(
        found, expected, rtol=0, atol=float(expected.abs().max()) * 12 * 2**-52 * 8
    )


@pytest.mark.parametrize("name", ["addmm", "einsum", "einsum_t"])
def test_int8_weights_of_other_products(seen, name):
    """GPT-2's Conv1D is addmm with W (in, out); einsum names its axes: the scale lies along ``out`` in all of them."""
    x, w = (
        torch.randn(5, 8, dtype=torch.float64),
        torch.randn(8, 3, dtype=torch.float64),
    )
    w[:, 1] *= 40
    owner = Net(
        w=w.T.contiguous() if name == "einsum_t" else w, b=torch.zeros(3).double()
    )
    function = {
        "addmm": lambda x: torch.addmm(owner.b, x, owner.w),
        "einsum": lambda x: torch.einsum("ni,io->no", x, owner.w),
        "einsum_t": lambda x: torch.einsum("ni,oi->no", x, owner.w),
    }[name]
    found = run(seen, "/" + name.removesuffix("_t"), "int8", function, x, owner=owner)
    sx, sw = x.abs().max() / 127, w.abs().amax(dim=0) / 127
    expected = (torch.round(x / sx) @ torch.round(w / sw)) * sx * sw
    torch.testing.assert_close(
        found, expected, rtol=0, atol=float(expected.abs().max()) * 12 * 2**-52 * 8
    )


def test_mx_blocks_lie_along_the_summed_axis_and_may_be_short(seen):
    """Blocks of 32 with the scale 2**(floor(log2 amax) - 8): OCP MX 1.0, section 6.3, e4m3 elements."""
    x, w = torch.randn(3, 40), torch.randn(5, 40)
    x[:, 32:] *= 1000.0  # the last block has 8 elements
    owner = Net(w=w)
    found = run(
        seen, "/linear", "mxfp8_e4m3", lambda x: F.linear(x, owner.w), x, owner=owner
    )

    def blocks(t):
        parts = []
        for part in t.split(32, dim=-1):
            shared = 2.0 ** (
                torch.floor(torch.log2(part.abs().amax(dim=-1, keepdim=True))) - 8
            )
            parts.append(
                (part / shared).clamp(-448, 448).to(torch.float8_e4m3fn).float()
                * shared
            )
        return torch.cat(parts, dim=-1)

    expected = blocks(x) @ blocks(w).T
    # fp32 products and sums of 40 terms in another order
    torch.testing.assert_close(
        found, expected, rtol=0, atol=float((x.abs() @ w.abs().T).max()) * 42 * 2**-23
    )


@pytest.mark.parametrize("fmt", ["bf16", "int8", "fp8_e4m3fn", "mxfp8_e4m3"])
def test_rounding_the_rows_that_are_looked_up_is_rounding_the_table(seen, fmt):
    table = torch.randn(10, 40)
    owner = Net(w=table)
    ids = torch.tensor([[3, 1], [9, 3]])
    found = run(
        seen, "/embedding", fmt, lambda i: F.embedding(i, owner.w), ids, owner=owner
    )
    if fmt == "bf16":
        whole = table.to(BF16).float()
    elif fmt == "mxfp8_e4m3":
        whole = torch.cat([_mx(table[:, :32]), _mx(table[:, 32:])], dim=1)
    else:
        top = 127 if fmt == "int8" else 448
        scale = table.abs().amax(dim=1, keepdim=True) / top
        whole = (
            torch.round(table / scale)
            if fmt == "int8"
            else (table / scale).to(torch.float8_e4m3fn).float()
        ) * scale
    # the scale times a code is one fp32 rounding in both
    torch.testing.assert_close(found, whole[ids], rtol=2**-23, atol=0)


def _mx(block):
    shared = 2.0 ** (
        torch.floor(torch.log2(block.abs().amax(dim=-1, keepdim=True))) - 8
    )
    return (block / shared).clamp(-448, 448).to(torch.float8_e4m3fn).float() * shared


def test_bf16_elementwise_work_rounds_both_operands_and_the_result(seen):
    x, y = torch.randn(50), torch.randn(50)
    found = run(seen, "/add", "bf16", lambda x, y: x + y, x, y, owner=Net())
    assert torch.equal(
        found, x.to(BF16) + y.to(BF16)
    )  # torch's own bf16 addition, correctly rounded
    found = run(seen, "/mul", "bf16", lambda x: x * 3.0, x, owner=Net())
    assert torch.equal(found, (x.to(BF16) * 3.0).float())


def test_python_numbers_and_masks_are_not_rounded(seen):
    x = torch.randn(8)
    third = torch.tensor(1 / 3)
    found = run(seen, "/mul", "bf16", lambda x: x * third, x, owner=Net())
    assert torch.equal(found, (x.to(BF16).float() * third).to(BF16).float())


def test_an_in_place_operator_writes_when_executed(seen):
    x = torch.randn(8)
    found = seen(lambda x: x.sin().add_(0.25), x)
    call = found.call("/add")
    target = call.leaves[0] = torch.randn(8)
    before = target.clone()
    result = execute(call, parse_format("bf16"))
    assert result is target
    assert torch.equal(target, (before.to(BF16) + 0.25).float())


OWNER = Net(w=torch.randn(4, 4))


@pytest.mark.parametrize(
    ("fmt", "function", "reason"),
    [
        ("bf16", lambda x: x.sin(), None),
        ("int8", lambda x: x.sin(), "no int8 arithmetic for elementwise operators"),
        ("int8", lambda x: x.softmax(-1), "no int8 arithmetic for softmax operators"),
        ("tf32", lambda x: x.mean(), "no tf32 arithmetic for reduction operators"),
        ("int8", lambda x: x @ x.T, None),
        (
            "ternary",
            lambda x: x @ x.T,
            "ternary is for weights, and this operator has none",
        ),
        ("ternary", lambda x: x @ OWNER.w, None),
        ("e8m0", lambda x: x @ x.T, "e8m0 holds scales, not values"),
        (
            "int8",
            lambda x: F.embedding(torch.tensor([0]), x),
            "the looked-up table is not a parameter",
        ),
        ("int8", lambda x: F.embedding(torch.tensor([0]), OWNER.w), None),
    ],
)
def test_which_operators_run_in_which_format(seen, fmt, function, reason):
    (call,) = seen(function, torch.randn(4, 4), owner=OWNER).calls
    assert runs(call, parse_format(fmt)) == reason


@pytest.mark.parametrize("fmt", [f for f in FORMATS if FORMATS[f].execution])
def test_every_format_runs_a_linear_and_leaves_its_arguments_alone(seen, fmt):
    owner = Net(w=torch.randn(6, 40), b=torch.randn(6))
    x = torch.randn(3, 40)
    call = seen(lambda x: F.linear(x, owner.w, owner.b), x, owner=owner).call("/linear")
    copies = [t.detach().clone() for t in call.leaves]
    result = execute(call, parse_format(fmt)).detach()
    assert result.shape == (3, 6)
    assert bool(result.isfinite().all())
    for leaf, copy in zip(call.leaves, copies, strict=True):
        assert torch.equal(leaf, copy)
    exact = F.linear(*copies)
    error = float((result - exact).norm() / exact.norm())
    if fmt in ("fp32", "fp64"):
        assert error < 1e-6  # 41 fp32 roundings in another order: below 41 * 2**-24
    else:
        assert (
            0 < error < (1.5 if FORMATS[fmt].bits < 3 else 0.5)
        )  # a sign that it was rounded, and to what it says


def test_empty_tensors_pass(seen):
    call = seen(lambda x: F.linear(x, OWNER.w), torch.zeros(0, 4), owner=OWNER).call(
        "/linear"
    )
    for fmt in ("bf16", "int8", "mxfp4"):
        assert execute(call, parse_format(fmt)).shape == (0, 4)


def test_overflow_is_infinite_and_infinities_do_not_spoil_scales(seen):
    x = torch.tensor([[70000.0, 1.0, -2.0, 0.5]])
    call = seen(lambda x: x * 1.0, x, owner=OWNER).call("/mul")
    assert execute(call, parse_format("fp16")).tolist() == [[math.inf, 1.0, -2.0, 0.5]]


ADDED = replace(
    parse_format("bf16"),
    name="fp20_added",
    width=20,
    fraction_bits=11,
    torch_name=None,
)


def test_a_format_added_to_the_table_rounds_its_gradients(monkeypatch):
    monkeypatch.setitem(FORMATS, ADDED.name, ADDED)
    assert gradient_format(ADDED) is ADDED
    gradient = torch.tensor([1 + 2.0**-12, 1.0, 3.0])
    rounded = round_gradient(gradient, ADDED, written=False)
    assert rounded.tolist() == [1.0, 1.0, 3.0]


def test_a_format_may_name_another_for_its_gradients():
    fmt = replace(parse_format("fp8_e4m3fn"), name="e4m3_added", gradient_format=ADDED)
    assert gradient_format(fmt) is ADDED


def test_gradients_are_in_a_format_as_wide_as_fp8_e5m2():
    """Micikevicius et al., arXiv:2209.05433, table 1: e5m2 reaches from 2**-14 to 57344."""
    for fmt in FORMATS.values():
        found = gradient_format(fmt)
        if found is not None:
            assert found.max_finite >= 2.0**15
            assert found.smallest_normal <= 2.0**-14


@pytest.mark.parametrize("name", ["int8", "fp6_e3m2", "mxfp8_e5m2", "ternary", "w4a8"])
def test_integers_narrow_and_block_formats_leave_gradients_alone(name):
    fmt = parse_format(name)
    gradient = torch.tensor([1 + 2.0**-20])
    assert gradient_format(fmt) is None
    assert round_gradient(gradient, fmt, written=False) is gradient
