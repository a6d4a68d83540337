"""What kernels that exist in low precision alone, or are slow in fp64, compute, written out to be run in fp64.

The attention kernels of CUDA and the LSTM of oneDNN have no fp64 form. Each function here takes the arguments of an
operator by name (tensors already in fp64) and gives its results in order, None for those that only its own backward
kernel can read; None altogether leaves the call to torch. Dropout never comes here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from roundoff.ops.convolution import convolution, convolution_backward
from roundoff.ops.refusals import Refusal

Results = list[Tensor | None]
Gates = tuple[Tensor, Tensor, Tensor, Tensor]

_LSTM = 2  # oneDNN's and cuDNN's number of the mode


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    **_: Any,
) -> Results:
    """softmax(scale q kᵀ + bias) v over the last two axes, and the log of each softmax's sum; a row that attends to
    nothing is 0. Fewer key heads than query heads are repeated, causal counts from the first position."""
    scores = _scores(query, _heads(key, query), attn_bias, is_causal, scale)
    logsumexp = scores.logsumexp(-1)
    return [_weights(scores, logsumexp) @ _heads(value, query), logsumexp]


def attention_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    grad_out: Tensor | None = None,
    grad_out_: Tensor | None = None,
    attn_bias: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    grad_input_mask: list[bool] | None = None,
    **_: Any,
) -> Results:
    """Gradients of query, key, value (and of the bias where ``grad_input_mask`` asks for it), from the output and the
    logarithms that the forward kernel has saved."""
    grad = grad_out if grad_out is not None else grad_out_
    if grad is None:
        raise Refusal("attention without a gradient")
    bias = attn_bias if attn_bias is not None and attn_bias.numel() else None
    k, v = _heads(key, query), _heads(value, query)
    # the memory-efficient kernel pads the logarithms to whole blocks
    weights = _weights(
        _scores(query, k, bias, is_causal, scale), logsumexp[..., : query.shape[-2]]
    )
    into = weights * (
        grad @ v.mT - (grad * out).sum(-1, keepdim=True)
    )  # gradient at the scores
    factor = _factor(query, scale)
    grads: Results = [
        factor * into @ k,
        _fold(factor * into.mT @ query, key),
        _fold(weights.mT @ grad, value),
    ]
    if grad_input_mask is None:
        return grads
    if bias is not None and grad_input_mask[3]:
        grads.append(into.sum_to_size(bias.shape))
    return [g for g, asked in zip(grads, grad_input_mask, strict=False) if asked]


def lstm(
    input: Tensor,
    weight0: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    weight3: Tensor,
    hx_: Tensor,
    cx_: Tensor,
    reverse: bool,
    batch_sizes: list[int],
    mode: int,
    has_biases: bool,
    **_: Any,
) -> Results:
    """One direction of one layer, ``input`` of shape (time, batch, features): output, last state, last cell state."""
    _only_lstm(mode, batch_sizes)
    bias = weight2 + weight3 if has_biases else None
    _gates, cells, states = _unroll(input, weight0, weight1, bias, hx_, cx_, reverse)
    hidden = states[1:]
    return [
        torch.stack(hidden[::-1] if reverse else hidden),
        hidden[-1],
        cells[-1],
        None,
    ]


def lstm_backward(
    input: Tensor,
    weight1: Tensor,
    weight2: Tensor,
    weight3: Tensor,
    weight4: Tensor,
    hx_: Tensor,
    cx_tmp: Tensor,
    grad_output: Tensor | None,
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    reverse: bool,
    mode: int,
    has_biases: bool,
    batch_sizes: list[int],
    **_: Any,
) -> Results:
    """Gradients of input, both weights, both biases and both states. The gates are computed again, since the forward
    kernel's are in bytes that only oneDNN can read."""
    _only_lstm(mode, batch_sizes)
    bias = weight3 + weight4 if has_biases else None
    gates, cells, states = _unroll(input, weight1, weight2, bias, hx_, cx_tmp, reverse)
    grad_h = torch.zeros_like(hx_) if grad_hy is None else grad_hy.reshape(hx_.shape)
    grad_c = (
        torch.zeros_like(cx_tmp) if grad_cy is None else grad_cy.reshape(cx_tmp.shape)
    )
    steps = _order(input, reverse)
    grad_input = torch.empty_like(input)
    grad_ih, grad_hh = torch.zeros_like(weight1), torch.zeros_like(weight2)
    grad_bias = input.new_zeros(weight1.shape[0])
    for n in range(len(steps) - 1, -1, -1):
        t = steps[n]
        i, f, g, o = gates[n]
        if grad_output is not None:
            grad_h = grad_h + grad_output[t]
        tanh = cells[n + 1].tanh()
        grad_c = grad_c + grad_h * o * (1 - tanh * tanh)
        into = torch.cat(
            [
                grad_c * g * i * (1 - i),
                grad_c * cells[n] * f * (1 - f),
                grad_c * i * (1 - g * g),
                grad_h * tanh * o * (1 - o),
            ],
            -1,
        )
        grad_input[t] = into @ weight1
        grad_ih += into.mT @ input[t]
        grad_hh += into.mT @ states[n]
        grad_bias += into.sum(0)
        grad_h, grad_c = into @ weight2, grad_c * f
    return [grad_input, grad_ih, grad_hh, grad_bias, grad_bias, grad_h, grad_c]


def _unroll(
    x: Tensor,
    ih: Tensor,
    hh: Tensor,
    bias: Tensor | None,
    hidden: Tensor,
    cell: Tensor,
    reverse: bool,
) -> tuple[list[Gates], list[Tensor], list[Tensor]]:
    """Gates of each step in the order they run, and all cell and hidden states, the first ones included."""
    gates: list[Gates] = []
    cells, states = [cell], [hidden]
    for t in _order(x, reverse):
        sums = x[t] @ ih.mT + states[-1] @ hh.mT
        i, f, g, o = (sums if bias is None else sums + bias).chunk(4, -1)
        gates.append((i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()))
        i, f, g, o = gates[-1]
        cells.append(f * cells[-1] + i * g)
        states.append(o * cells[-1].tanh())
    return gates, cells, states


def _order(x: Tensor, reverse: bool) -> list[int]:
    return list(range(len(x) - 1, -1, -1)) if reverse else list(range(len(x)))


def _only_lstm(mode: int, batch_sizes: list[int]) -> None:
    if mode != _LSTM or batch_sizes:
        raise Refusal("a fused recurrent kernel in low precision alone")


def _scores(
    query: Tensor, key: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> Tensor:
    scores = _factor(query, scale) * query @ key.mT
    if bias is not None:
        scores = scores + bias
    if causal:
        scores = scores.masked_fill(
            torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf
        )
    return scores


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    return (
        (scores - logsumexp.unsqueeze(-1)).exp().masked_fill(scores == -torch.inf, 0.0)
    )


def _factor(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _heads(key: Tensor, query: Tensor) -> Tensor:
    return (
        key
        if key.shape[-3] == query.shape[-3]
        else key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    )


def _fold(grad: Tensor, key: Tensor) -> Tensor:
    """The gradient of heads that were repeated."""
    heads = key.shape[-3]
    return (
        grad
        if grad.shape[-3] == heads
        else torch.unflatten(grad, -3, (heads, -1)).sum(-3)
    )


def _forward(missing: int) -> Callable[..., Results]:
    def run(**arguments: Any) -> Results:
        return attention(**arguments) + [None] * missing

    return run


#: By the name of the operator's schema; the numbers count the tensors after output and logarithms (fewer in some cases).
STAND_INS: dict[str, Callable[..., Results | None]] = {
    "aten::convolution": convolution,
    "aten::convolution_backward": convolution_backward,
    "aten::_scaled_dot_product_flash_attention": _forward(5),
    "aten::_scaled_dot_product_efficient_attention": _forward(2),
    "aten::_scaled_dot_product_cudnn_attention": _forward(5),
    "aten::_scaled_dot_product_flash_attention_backward": attention_backward,
    "aten::_scaled_dot_product_efficient_attention_backward": attention_backward,
    "aten::_scaled_dot_product_cudnn_attention_backward": attention_backward,
    "aten::mkldnn_rnn_layer": lstm,
    "aten::mkldnn_rnn_layer_backward": lstm_backward,
}
