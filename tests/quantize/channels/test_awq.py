"""AWQ and clipped ranges: the paper's grid in numpy, and losses measured on samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roundoff.errors import QuantizationError
from roundoff.formats import (
    PerGroup,
    PerTensor,
    PerToken,
    choose_qparams,
    fake_quantize,
    parse_format,
)
from roundoff.quantize.channels.awq import awq, clip_search
from roundoff.quantize.weights.hessian import Hessian
from roundoff.quantize.weights.matrix import matrix_view, patches
from roundoff.quantize.weights.output_error import quadratic

INT4 = parse_format("int4")


def test_awq_is_the_grid_of_the_paper():
    """Equations 4 and 5 on samples in numpy, α of the grid one by one."""
    g = torch.Generator().manual_seed(0)
    x = (
        torch.randn(300, 16, generator=g, dtype=torch.float64)
        * torch.linspace(0, 3, 16).exp()
    )
    weight = torch.randn(1, 8, 16, generator=g, dtype=torch.float64)
    found = awq([(weight, (x.T @ x / 300)[None])], x.abs().mean(0), INT4)
    power, losses = x.abs().mean(0).numpy(), []
    for alpha in np.arange(20) / 20:
        s = power**alpha
        s /= np.sqrt(s.max() * s.min())
        scaled = weight[0].numpy() * s
        step = np.abs(scaled).max(1, keepdims=True) / 7
        delta = np.rint(scaled / step) * step / s - weight[0].numpy()
        losses.append(np.square(delta @ x.numpy().T).sum())
    assert found.strength == pytest.approx(np.argmin(losses) / 20)
    signal = np.square(weight[0].numpy() @ x.numpy().T).sum()
    assert found.gain.before_db == pytest.approx(10 * np.log10(signal / losses[0]))
    assert found.gain.after_db == pytest.approx(10 * np.log10(signal / min(losses)))
    with_clip = awq(
        [(weight, (x.T @ x / 300)[None])], x.abs().mean(0), INT4, clip=(0.9, 0.8, 0.7)
    )
    assert with_clip.gain.after_db >= found.gain.after_db


def test_awq_of_convolutions_that_share_an_input():
    torch.manual_seed(0)
    x = torch.randn(4, 6, 10, 10) * torch.linspace(0, 3, 6).exp()[:, None, None]
    weights = [torch.randn(8, 6, 3, 3), torch.randn(6, 1, 3, 3)]
    readers = []
    for w, groups in zip(weights, (1, 6), strict=True):
        hessian = Hessian()
        hessian.add(patches(x, "conv2d", (3, 3), padding=1, groups=groups))
        readers.append((matrix_view(w, "conv2d", groups), hessian.matrix))
    found = awq(readers, x.abs().mean((0, 2, 3)), INT4)
    assert found.factors.shape == (6,)
    assert [w.shape for w in found.weights] == [(1, 8, 54), (6, 1, 9)]
    assert found.gain.db >= 0


def test_awq_without_activation_changes_nothing():
    weight = torch.randn(1, 4, 8)
    found = awq([(weight, torch.eye(8)[None])], torch.zeros(8), INT4)
    assert found.factors.tolist() == [1.0] * 8
    assert found.gain.db == 0


@pytest.mark.parametrize("granularity", [PerToken(), PerGroup(4)])
@pytest.mark.parametrize("name", ["int4", "int3_asym", "fp4_e2m1"])
def test_clip_search_tries_each_set_alone(name, granularity):
    from roundoff.formats import integer

    fmt = integer(3, symmetric=False) if name == "int3_asym" else parse_format(name)
    torch.manual_seed(0)
    x = torch.randn(100, 8, dtype=torch.float64) @ torch.randn(
        8, 8, dtype=torch.float64
    )
    w, h = torch.randn(3, 8, dtype=torch.float64), x.T @ x / 100
    found = clip_search(w, h, fmt, granularity, ratios=(0.8, 0.6))
    size = 8 if granularity == PerToken() else 4
    for r in range(3):
        for start in range(0, 8, size):
            part = slice(start, start + size)
            row, block = w[r, part], h[part, part]
            tried = []
            for ratio in (1.0, 0.8, 0.6):
                q = choose_qparams(
                    row.clamp(row.min() * ratio, row.max() * ratio), fmt, PerTensor()
                )
                tried.append(
                    float(quadratic(fake_quantize(row, q, fmt)[None] - row, block))
                )
            assert float(
                quadratic(found.weight[r, part][None] - row, block)
            ) == pytest.approx(min(tried), rel=1e-9)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: awq([], torch.ones(3), INT4), "nothing to scale"),
        (
            lambda: awq([(torch.ones(2, 4), torch.eye(4))], torch.ones(4), INT4),
            "the weight does not fit the activation",
        ),
        (
            lambda: clip_search(torch.ones(2, 4), torch.eye(4), INT4, PerTensor()),
            "ranges cannot be clipped",
        ),
    ],
)
def test_what_is_refused(call, text):
    with pytest.raises(QuantizationError, match=text):
        call()
