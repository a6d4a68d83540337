"""sizes: elements and multiply-accumulates, against torch's flop counter and by hand."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from roundoff.ops.calls import float_tensors
from roundoff.ops.sizes import sizes


class Weights(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4))
        self.b = nn.Parameter(torch.randn(6))
        self.w1 = nn.Parameter(torch.randn(6, 4, 3))
        self.w2 = nn.Parameter(torch.randn(6, 2, 3, 2))
        self.t1 = nn.Parameter(torch.randn(4, 5, 3))
        self.table = nn.Parameter(torch.randn(50, 6))


W = Weights()
X = torch.randn(2, 3, 4)
IMAGE = torch.randn(2, 4, 7, 5)


def work(seen, function):
    found = seen(function, owner=W)
    (call,) = found.calls
    return sizes(call, float_tensors(found.recorder.results[-1]))


@pytest.mark.parametrize(
    "function",
    [
        lambda: F.linear(X, W.w, W.b),
        lambda: F.linear(X[0, 0], W.w),
        lambda: X @ W.w.T,
        lambda: torch.mm(X[0], W.w.T),
        lambda: torch.bmm(X, X.transpose(1, 2)),
        lambda: X @ X.transpose(1, 2),
        lambda: torch.addmm(W.b, X[0], W.w.T),
        lambda: torch.baddbmm(torch.zeros(2, 3, 3), X, X.transpose(1, 2)),
        lambda: F.conv1d(X.transpose(1, 2), W.w1, padding=1, stride=2),
        lambda: F.conv1d(X[0].T, W.w1, W.b),  # without a batch axis
        lambda: F.conv2d(IMAGE, W.w2, W.b, groups=2, dilation=2),
        lambda: F.conv2d(IMAGE[0], W.w2, groups=2),
        lambda: F.conv_transpose1d(X.transpose(1, 2), W.t1, stride=2),
        lambda: F.conv_transpose1d(X[0].T, W.t1),
        lambda: torch.einsum("bti,oi->bto", X, W.w),
        lambda: torch.einsum("bqd,bkd->bqk", X, X),
        lambda: F.scaled_dot_product_attention(
            X[:, None], X[:, None, :2], torch.randn(2, 1, 2, 8)
        ),
    ],
)
def test_multiply_accumulates_are_half_the_flops_that_torch_counts(seen, function):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        function()
    assert counter.get_total_flops() > 0
    assert 2 * work(seen, function)["macs"] == counter.get_total_flops()


@pytest.mark.parametrize(
    ("function", "activation", "weight", "output", "macs"),
    [
        (lambda: F.linear(X, W.w, W.b), 24, 24 + 6, 36, 36 * 4),
        (lambda: X + X, 48, 0, 24, 0),
        (lambda: X.sum(), 24, 0, 1, 0),
        (lambda: F.layer_norm(X, (3, 4), W.w1[:4, :, 0].T[:3]), 24, 12, 24, 0),
        (
            lambda: F.embedding(torch.tensor([[1, 2, 1]]), W.table),
            0,
            3 * 6,
            18,
            0,
        ),  # three rows of the table
        (
            lambda: F.embedding(torch.arange(50).repeat(2), W.table),
            0,
            50 * 6,
            100 * 6,
            0,
        ),  # the table once
        (lambda: torch.einsum("bti,oi->bto", X, W.w), 24, 24, 36, 36 * 4),
        (lambda: torch.einsum("bti->b", X), 24, 0, 2, 0),  # a sum, no product
        (lambda: torch.einsum("...i,oi->...o", X, W.w), 24, 24, 36, 36 * 4),
        (lambda: torch.dot(X[0, 0], X[0, 1]), 8, 0, 1, 4),
        (lambda: torch.mv(X[0], X[0, 0]), 16, 0, 3, 12),
        # y[b, o] = sum over i and j of x1[b, i] W[o, i, j] x2[b, j]: 4 * 3 products for each of 3 * 6 results
        (lambda: F.bilinear(X[0], X[1][:, :3], W.w1), 12 + 9, 72, 18, 18 * 4 * 3),
        # the batch is summed too: 3 * 3 results of 2 * 4 products
        (
            lambda: torch.addbmm(torch.zeros(3, 3), X, X.transpose(1, 2)),
            48,
            9,
            9,
            9 * 8,
        ),
        (lambda: X.max(dim=-1), 24, 0, 6, 0),
    ],
)
def test_sizes_by_hand(seen, function, activation, weight, output, macs):
    expected = {
        "activation_elements": activation,
        "weight_elements": weight,
        "output_elements": output,
        "macs": macs,
    }
    assert work(seen, function) == expected


@pytest.mark.parametrize(
    ("module", "macs"),
    [
        # each of 2 * 3 steps multiplies 4 inputs and 5 states into 4 gates of 5
        (nn.LSTM(4, 5, batch_first=True), 6 * (4 + 5) * 20),
        (
            nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True),
            6 * 2 * ((4 + 5) * 20 + (10 + 5) * 20),
        ),
        (nn.GRU(4, 5, batch_first=True), 6 * (4 + 5) * 15),
        (nn.RNN(4, 5, batch_first=True), 6 * (4 + 5) * 5),
    ],
)
def test_recurrent_layers_by_hand(seen, module, macs):
    found = seen(module, X)
    (call,) = found.calls
    assert sizes(call, float_tensors(found.recorder.results[-1]))["macs"] == macs


def test_a_packed_sequence_counts_its_steps_alone(seen):
    lstm = nn.LSTM(4, 5, batch_first=True)
    packed = nn.utils.rnn.pack_padded_sequence(
        X, torch.tensor([3, 1]), batch_first=True
    )
    found = seen(lstm, packed)
    (call,) = found.calls
    assert (
        sizes(call, float_tensors(found.recorder.results[-1]))["macs"]
        == (3 + 1) * 9 * 20
    )


def test_a_recurrent_cell(seen):
    found = seen(nn.GRUCell(4, 5), X[0])
    (call,) = found.calls
    assert sizes(call, float_tensors(found.recorder.results[-1]))["macs"] == 3 * 9 * 15
