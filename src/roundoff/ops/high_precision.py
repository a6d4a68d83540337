"""Kernels that exist in low precision alone, or are slow in fp64, written out to run in fp64.

The attention kernels of CUDA and the LSTM of oneDNN have no fp64 form. Each function
here takes the arguments of an operator by name (tensors already in fp64) and gives its
results in order, None for those that only its own backward kernel can read; None
altogether leaves the call to torch. Dropout never comes here.
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
    """Return softmax(scale q kᵀ + bias) v over the last two axes, and the log of each
    softmax's sum.

    A row that attends to nothing is 0. Fewer key heads than query heads are repeated,
    causal counts from the first position.
    """
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
    """Return the gradients of query, key and value, and of the bias where ``grad_input_mask`` asks.

    They are computed from the output and the logarithms that the forward kernel has saved.
    """
    grad = grad_out if grad_out is not None else grad_out_
    if grad is None:
        raise Refusal("attention without a gradient")
    bias = attn_bias if attn_bias is not None and attn_bias.numel() else None
    k = _heads(key, query)
    v = _heads(value, query)
    scores = _scores(query, k, bias, is_causal, scale)
    # the memory-efficient kernel pads the logarithms to whole blocks
    weights = _weights(scores, logsumexp[..., : query.shape[-2]])
    at_scores = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
    factor = _factor(query, scale)
    grads: Results = [
        factor * at_scores @ k,
        _fold(factor * at_scores.mT @ query, key),
        _fold(weights.mT @ grad, value),
    ]
    if grad_input_mask is None:
        return grads
    if bias is not None and grad_input_mask[3]:
        grads.append(at_scores.sum_to_size(bias.shape))
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
    """Run one direction of one layer; ``input`` has the shape (time, batch, features).

    Returns:
        The output, the last hidden state, the last cell state, and None for the workspace.
    """
    _only_lstm(mode, batch_sizes)
    bias = weight2 + weight3 if has_biases else None
    _gates, cells, states = _unroll(input, weight0, weight1, bias, hx_, cx_, reverse)
    hidden = states[1:]
    output = torch.stack(hidden[::-1] if reverse else hidden)
    return [output, hidden[-1], cells[-1], None]


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
    """Return the gradients of input, both weights, both biases and both states.

    The gates are computed again, since the forward kernel's are in bytes that only
    oneDNN can read.
    """
    _only_lstm(mode, batch_sizes)
    bias = weight3 + weight4 if has_biases else None
    gates, cells, states = _unroll(input, weight1, weight2, bias, hx_, cx_tmp, reverse)
    grad_h = _gradient_or_zeros(grad_hy, hx_)
    grad_c = _gradient_or_zeros(grad_cy, cx_tmp)
    steps = _order(input, reverse)
    grad_input = torch.empty_like(input)
    grad_ih = torch.zeros_like(weight1)
    grad_hh = torch.zeros_like(weight2)
    grad_bias = input.new_zeros(weight1.shape[0])
    for n in range(len(steps) - 1, -1, -1):
        t = steps[n]
        i, f, g, o = gates[n]
        if grad_output is not None:
            grad_h = grad_h + grad_output[t]
        tanh = cells[n + 1].tanh()
        grad_c = grad_c + grad_h * o * (1 - tanh * tanh)
        at_gates = [
            grad_c * g * i * (1 - i),
            grad_c * cells[n] * f * (1 - f),
            grad_c * i * (1 - g * g),
            grad_h * tanh * o * (1 - o),
        ]
        at_sums = torch.cat(at_gates, -1)
        grad_input[t] = at_sums @ weight1
        grad_ih += at_sums.mT @ input[t]
        grad_hh += at_sums.mT @ states[n]
        grad_bias += at_sums.sum(0)
        grad_h = at_sums @ weight2
        grad_c = grad_c * f
    return [grad_input, grad_ih, grad_hh, grad_bias, grad_bias, grad_h, grad_c]


def _gradient_or_zeros(gradient: Tensor | None, state: Tensor) -> Tensor:
    if gradient is None:
        return torch.zeros_like(state)
    return gradient.reshape(state.shape)


def _unroll(
    x: Tensor,
    ih: Tensor,
    hh: Tensor,
    bias: Tensor | None,
    hidden: Tensor,
    cell: Tensor,
    reverse: bool,
) -> tuple[list[Gates], list[Tensor], list[Tensor]]:
    """The gates of each step in the order they run, all cell states and all hidden states."""
    gates: list[Gates] = []
    cells = [cell]
    states = [hidden]
    for t in _order(x, reverse):
        sums = x[t] @ ih.mT + states[-1] @ hh.mT
        i, f, g, o = (sums if bias is None else sums + bias).chunk(4, -1)
        gates.append((i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()))
        i, f, g, o = gates[-1]
        cells.append(f * cells[-1] + i * g)
        states.append(o * cells[-1].tanh())
    return gates, cells, states


def _order(x: Tensor, reverse: bool) -> list[int]:
    order = list(range(len(x)))
    return order[::-1] if reverse else order


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
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores


def _weights(scores: Tensor, logsumexp: Tensor) -> Tensor:
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    return weights.masked_fill(scores == -torch.inf, 0.0)


def _factor(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _heads(key: Tensor, query: Tensor) -> Tensor:
    """Keys with as many heads as the queries have."""
    if key.shape[-3] == query.shape[-3]:
        return key
    return key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)


def _fold(grad: Tensor, key: Tensor) -> Tensor:
    """The gradient of heads that were repeated."""
    heads = key.shape[-3]
    if grad.shape[-3] == heads:
        return grad
    return torch.unflatten(grad, -3, (heads, -1)).sum(-3)


def _forward(missing: int) -> Callable[..., Results]:
    def run(**arguments: Any) -> Results:
        return attention(**arguments) + [None] * missing

    return run


#: By the name of the operator's schema; the numbers count the tensors after output and
#: logarithms (fewer in some cases).
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
