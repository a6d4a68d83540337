"""Scale search: against a dense scan of scales in numpy float64, and its guarantees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import QuantizationError
from roundoff.formats import (
    PerAxis,
    PerGroup,
    PerTensor,
    PerToken,
    choose_qparams,
    fake_quantize,
    integer,
    parse_format,
)
from roundoff.quantize.weights.scales import search_scales


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 6])
def test_symmetric_search_finds_the_best_of_a_dense_scan(bits, weighted):
    """Every scale from 0.25 to 1.2 of min-max in 4000 steps, in numpy: the search is within 1 % of the least error."""
    torch.manual_seed(bits)
    w = torch.randn(6, 200, dtype=torch.float64)
    h = (
        torch.rand(200, dtype=torch.float64) ** 4
        if weighted
        else torch.ones(200, dtype=torch.float64)
    )
    fmt = integer(bits)
    found = search_scales(w, fmt, PerAxis(0), importance=h if weighted else None)
    top = 2 ** (bits - 1) - 1
    for row, scale in zip(
        w.numpy(), found.qparams.scale.flatten().tolist(), strict=True
    ):
        scan = np.abs(row).max() / top * np.linspace(0.25, 1.2, 4000)[:, None]
        losses = (
            (np.clip(np.rint(row / scan), -top, top) * scan - row) ** 2 * h.numpy()
        ).sum(1)
        mine = (
            (np.clip(np.rint(row / scale), -top, top) * scale - row) ** 2 * h.numpy()
        ).sum()
        assert mine <= 1.01 * losses.min()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_asymmetric_search_comes_near_to_a_scan_of_both_ends(bits):
    """All pairs of 60 low and 60 high ends, in numpy: within 3 %."""
    torch.manual_seed(bits)
    w = torch.rand(4, 120, dtype=torch.float64) ** 3 * 2 - 0.3
    fmt = integer(bits, symmetric=False)
    found = search_scales(w, fmt, PerAxis(0))
    levels, lowest = 2**bits - 1, -(2 ** (bits - 1))
    for r, row in enumerate(w.numpy()):
        low = min(row.min(), 0) * np.linspace(0.2, 1.1, 60)[:, None, None]
        high = max(row.max(), 0) * np.linspace(0.2, 1.1, 60)[None, :, None]
        scale = (high - low) / levels
        zero = np.clip(np.rint(lowest - low / scale), lowest, lowest + levels)
        codes = np.clip(np.rint(row / scale) + zero, lowest, lowest + levels)
        least = (((codes - zero) * scale - row) ** 2).sum(-1).min()
        assert float(((found.weight[r] - w[r]) ** 2).sum()) <= 1.03 * least


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    exponent=st.integers(-36, 36),
    constant=st.booleans(),
    name=st.sampled_from(
        [
            "int8",
            "int4",
            "int4_asym",
            "int2",
            "ternary",
            "binary",
            "fp8_e4m3fn",
            "fp4_e2m1",
            "hif8",
            "int8_asym",
        ]
    ),
    granularity=st.sampled_from([PerTensor(), PerAxis(0), PerToken(), PerGroup(4)]),
)
def test_never_worse_than_min_max(seed, exponent, constant, name, granularity):
    fmt = parse_format(name)
    w = torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    if constant:
        w[0] = w[0, 0]
        w[1] = 0.0
    h = torch.rand(8, generator=torch.Generator().manual_seed(seed + 1))
    found = search_scales(w, fmt, granularity, importance=h)
    assert (found.qparams.scale > 0).all()
    plain = choose_qparams(w, fmt, granularity)
    unit = 2.0**-exponent  # squares of 2**-36 are fine in float64
    exact = (w.double() * unit, h.double())
    losses = [
        float(
            (
                (fake_quantize(w, q, fmt).double() * unit - exact[0]) ** 2 * exact[1]
            ).sum()
        )
        for q in (found.qparams, plain)
    ]
    assert losses[0] <= losses[1] * (1 + 1e-5) + 1e-12  # compared set by set in fp32
    assert torch.equal(found.weight, fake_quantize(w, found.qparams, fmt))
    if fmt.has_zero:
        assert found.gain.db >= -1e-4


def test_degenerate_sets():
    fmt = parse_format("int4")
    w = torch.tensor([[0.0, 0.0, 0.0], [0.7, 0.7, 0.7], [-3.0, -3.0, -3.0]])
    found = search_scales(w, fmt, PerAxis(0))
    assert found.qparams.scale[0].item() == 1
    torch.testing.assert_close(found.weight, w)
    one = search_scales(torch.tensor(-0.3), parse_format("int4_asym"))
    assert one.weight.item() == pytest.approx(-0.3, rel=1e-6)
    # nothing depends on these weights: min-max
    unused = search_scales(w, fmt, PerAxis(0), importance=torch.zeros(3))
    assert torch.equal(unused.qparams.scale, choose_qparams(w, fmt, PerAxis(0)).scale)
    assert unused.gain.db == 0


def test_the_smallest_scale_is_reported():
    found = search_scales(torch.tensor([1e-39, 2e-39]), parse_format("int8"))
    assert found.gain.note == "1 scales are the smallest normal number"
    assert found.qparams.scale.item() == torch.finfo(torch.float32).tiny


def test_importance_moves_the_scale_to_what_counts():
    """The large weight multiplies an input that is almost zero: its error is not worth a coarse step."""
    w, fmt = torch.tensor([[8.0, 1.0, -1.0, 0.9, 0.5]]), parse_format("int4")
    h = torch.tensor([[1e-6, 1.0, 1.0, 1.0, 1.0]])
    plain, aware = search_scales(w, fmt), search_scales(w, fmt, importance=h)
    assert aware.qparams.scale < 0.6 * plain.qparams.scale
    assert aware.gain.db > 6


@pytest.mark.parametrize(
    ("weight", "more", "text"),
    [
        (torch.tensor([1.0, torch.inf]), {}, "the weight holds NaN or Inf"),
        (
            torch.ones(2),
            {"importance": torch.tensor([1.0, -1.0])},
            "the importance does not fit the weight",
        ),
        (
            torch.ones(2),
            {"importance": torch.ones(3)},
            "the importance does not fit the weight",
        ),
        (torch.ones(2), {"ratios": (1.0, 0.0)}, "a ratio is not positive"),
    ],
)
def test_what_is_refused(weight, more, text):
    with pytest.raises(QuantizationError, match=text):
        search_scales(weight, parse_format("int4"), **more)
