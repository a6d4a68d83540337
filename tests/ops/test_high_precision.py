"""Fused kernels written out: against torch's own, in fp64 where it has one, and against autograd."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from roundoff.ops import high_precision as stand_in
from roundoff.ops.convolution import convolution, convolution_backward
from roundoff.ops.refusals import Refusal

aten = torch.ops.aten
#: 5 keys, 4 features: sums of at most 20 products, with exp in between
CLOSE = {"rtol": 0, "atol": 100 * torch.finfo(torch.float64).eps}


def attention_inputs(heads=3, key_heads=3):
    return [
        torch.randn(2, h, n, 4, dtype=torch.float64)
        for h, n in ((heads, 5), (key_heads, 5), (key_heads, 5))
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_is_torchs_own_in_fp64(causal, masked):
    q, k, v = attention_inputs()
    mask = (
        torch.randn(2, 3, 5, 5, dtype=torch.float64) if masked and not causal else None
    )
    kernel = aten._scaled_dot_product_flash_attention_for_cpu
    out, logs = kernel(q, k, v, 0.0, causal, attn_mask=mask, scale=0.3)
    ours = stand_in.attention(q, k, v, attn_bias=mask, is_causal=causal, scale=0.3)
    torch.testing.assert_close(ours, [out, logs], **CLOSE)
    grad = torch.randn_like(out)
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    theirs = backward(grad, q, k, v, out, logs, 0.0, causal, attn_mask=mask, scale=0.3)
    ours = stand_in.attention_backward(
        q, k, v, out, logs, grad_out=grad, attn_bias=mask, is_causal=causal, scale=0.3
    )
    torch.testing.assert_close(ours, list(theirs), **CLOSE)


def test_repeated_heads_bias_and_padded_logarithms():
    q, k, v = (t.requires_grad_() for t in attention_inputs(heads=6, key_heads=2))
    bias = torch.randn(1, 6, 5, 5, dtype=torch.float64, requires_grad=True)
    true = nn.functional.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True)
    grad = torch.randn_like(true)
    expected = torch.autograd.grad(true, (q, k, v, bias), grad)
    with torch.no_grad():
        out, logs = stand_in.attention(q, k, v, attn_bias=bias)
        torch.testing.assert_close(out, true, **CLOSE)
        padded = nn.functional.pad(logs, (0, 27))
        arguments = {"grad_out_": grad, "attn_bias": bias}
        ours = stand_in.attention_backward(
            q, k, v, out, padded, grad_input_mask=[True] * 4, **arguments
        )
        torch.testing.assert_close(ours, list(expected), **CLOSE)
        some = stand_in.attention_backward(
            q,
            k,
            v,
            out,
            padded,
            grad_input_mask=[True, False, True, False],
            **arguments,
        )
    torch.testing.assert_close(some, [expected[0], expected[2]], **CLOSE)


def test_a_row_that_attends_to_nothing_is_zero():
    q, k, v = attention_inputs()
    bias = torch.zeros(5, 5, dtype=torch.float64)
    bias[1] = -torch.inf
    out, _ = stand_in.attention(q, k, v, attn_bias=bias)
    assert (out[..., 1, :] == 0).all()
    assert out.isfinite().all()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_lstm_is_torchs_own_in_fp64_with_gradients(reverse, bias):
    lstm = nn.LSTM(6, 7, bias=bias, dtype=torch.float64)
    x, h, c = (
        torch.randn(n, 3, m, dtype=torch.float64, requires_grad=True)
        for n, m in ((5, 6), (1, 7), (1, 7))
    )
    given = x.flip(0) if reverse else x
    out, (hy, cy) = lstm(given, (h, c))
    out = out.flip(0) if reverse else out
    weights = list(lstm.parameters())
    fill = weights if bias else [*weights, *weights]
    inputs = [x, *fill, h[0], c[0]]
    common = {"reverse": reverse, "mode": 2, "has_biases": bias, "batch_sizes": []}
    with torch.no_grad():
        ours = stand_in.lstm(*inputs, **common)
    torch.testing.assert_close(ours[:3], [out, hy[0], cy[0]], **CLOSE)
    assert ours[3] is None
    grads = [torch.randn_like(t) for t in (out, hy, cy)]
    expected = torch.autograd.grad((out, hy, cy), (x, *weights, h, c), grads)
    with torch.no_grad():
        ours = stand_in.lstm_backward(
            *inputs,
            grad_output=grads[0],
            grad_hy=grads[1][0],
            grad_cy=grads[2][0],
            **common,
        )
    found = ours if bias else [*ours[:3], *ours[5:]]
    torch.testing.assert_close(
        found,
        [e.squeeze(0) if e.shape[0] == 1 else e for e in expected],
        rtol=1e-13,
        atol=1e-13,
    )


def test_other_recurrent_kernels_are_refused():
    x = torch.randn(5, 3, 6)
    with pytest.raises(Refusal):
        stand_in.lstm(
            x, x, x, x, x, x, x, reverse=False, mode=3, has_biases=True, batch_sizes=[]
        )


SIZES = st.tuples(
    st.integers(1, 3), st.integers(1, 4), st.integers(3, 7), st.integers(3, 7)
)


@settings(max_examples=60, deadline=None)
@given(
    SIZES,
    st.integers(1, 4),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.integers(1, 2),
    st.integers(0, 1),
    st.booleans(),
)
def test_convolutions_are_torchs(size, out, kernel, stride, padding, bias):
    torch.manual_seed(0)
    x = torch.randn(size, dtype=torch.float64)
    weight = torch.randn(out, size[1], *kernel, dtype=torch.float64)
    shift = torch.randn(out, dtype=torch.float64) if bias else None
    rest = {
        "stride": [stride] * 2,
        "padding": [padding] * 2,
        "dilation": [1, 1],
        "transposed": False,
        "output_padding": [0, 0],
        "groups": 1,
    }
    true = torch.ops.aten.convolution(x, weight, shift, *rest.values())
    found = convolution(x, weight, shift, **rest)
    few = true[0, 0].numel() <= 32
    assert (found is not None) == few
    if not few:
        return
    # sums of at most 4 * 9 products of normal numbers, in another order
    torch.testing.assert_close(found[0], true, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(true)
    for mask in ([True, True, bias], [False, True, False], [True, False, False]):
        wanted = torch.ops.aten.convolution_backward(
            grad, x, weight, [out], *rest.values(), mask
        )
        got = convolution_backward(
            grad, x, weight, bias_sizes=[out], output_mask=mask, **rest
        )
        for a, b in zip(
            got, [w for w in wanted if w is not None and w.numel()], strict=True
        ):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-11)


@pytest.mark.parametrize(
    "change", [{"groups": 2}, {"dilation": [2, 2]}, {"transposed": True}]
)
def test_other_convolutions_are_left_to_torch(change):
    rest = {
        "stride": [1, 1],
        "padding": [0, 0],
        "dilation": [1, 1],
        "transposed": False,
        "groups": 1,
    }
    x, weight = (
        torch.ones(1, 4, 5, 5, dtype=torch.float64),
        torch.ones(4, 4, 3, 3, dtype=torch.float64),
    )
    assert convolution(x, weight, None, **rest | change) is None
