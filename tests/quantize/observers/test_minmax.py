"""The observers that keep extremes: against choose_qparams on all data at once, and AMCT's rule in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roundoff.errors import QuantizationError
from roundoff.formats import (
    PerAxis,
    PerBlock,
    PerGroup,
    PerTensor,
    PerToken,
    choose_qparams,
    integer,
    parse_format,
)
from roundoff.quantize.observers import make_observer

FORMATS = ["int8", "int8_asym", "int4_asym", "int2", "fp8_e4m3fn", "fp4_e2m1", "hif8"]


def batches(count=3, shape=(4, 6, 8), seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator) * (i + 1) - 0.3 for i in range(count)
    ]


@pytest.mark.parametrize(
    "granularity",
    [PerTensor(), PerAxis(1), PerAxis(-1), PerGroup(4), PerBlock((2, 3, 8))],
)
@pytest.mark.parametrize("name", FORMATS)
def test_minmax_is_choose_qparams_of_all_batches(granularity, name):
    fmt, observer, data = (
        parse_format(name),
        make_observer("minmax", granularity),
        batches(),
    )
    for x in data:
        observer.see(x)
    q = observer.qparams(fmt)
    # Stacked in front of a new axis, the extremes of each position over the batches have the same sets.
    wanted = choose_qparams(torch.stack(data).amax(0), fmt, granularity)
    lows = choose_qparams(torch.stack(data).amin(0), fmt, granularity)
    if fmt.symmetric:
        assert torch.equal(q.scale, torch.maximum(wanted.scale, lows.scale))
        assert q.zero_point is None
    else:
        view, dims = granularity.split(data[0].shape)
        low = (
            torch.stack(data)
            .amin(0)
            .reshape(view)
            .amin(dims, keepdim=True)
            .clamp(max=0)
        )
        high = (
            torch.stack(data)
            .amax(0)
            .reshape(view)
            .amax(dims, keepdim=True)
            .clamp(min=0)
        )
        levels = np.float32(fmt.max_finite - fmt.min_finite)
        scale = high.numpy() / levels - low.numpy() / levels
        assert np.array_equal(q.scale.numpy(), scale)
        zero_point = np.clip(
            np.round(fmt.min_finite - low.numpy() / scale),
            fmt.min_finite,
            fmt.max_finite,
        )
        assert np.array_equal(q.zero_point.numpy(), zero_point)
    assert observer.count == sum(x.numel() for x in data)
    assert observer.degenerate == ""


def test_per_token_is_the_last_batch():
    observer = make_observer("minmax", PerToken())
    for x in (torch.ones(2, 5), torch.tensor([[1.0, -4.0], [0.5, 0.25], [0.0, 0.0]])):
        observer.see(x)
    fmt = parse_format("int8")
    assert torch.equal(
        observer.qparams(fmt).scale, choose_qparams(x, fmt, PerToken()).scale
    )
    assert observer.degenerate == "1 of 3 ranges zero: scale 1"


def test_moving_average_by_hand():
    observer = make_observer("moving_average", averaging_constant=0.25)
    for low, high in ((-1.0, 2.0), (-3.0, 10.0), (0.0, 0.0)):
        observer.see(torch.tensor([low, high]))
    # high: 2, 2 + 8/4 = 4, 4 - 4/4 = 3; low: -1, -1 - 2/4 = -1.5, -1.5 + 1.5/4 = -1.125: exact in binary
    q = observer.qparams(parse_format("int8_asym"))
    assert q.scale.item() == np.float32(3.0) / np.float32(255) + np.float32(
        1.125
    ) / np.float32(255)
    assert observer.qparams(parse_format("int8")).scale.item() == np.float32(
        3.0
    ) / np.float32(127)


@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(0)])
@pytest.mark.parametrize("bits", [4, 6, 7, 8])
def test_arq_is_amcts_rule(granularity, bits):
    """scale = |max| / (2^(b-1) - 1), or |min| / 2^(b-1) where |min| > |max|; in fp32."""
    weight = batches(1, (5, 3, 3))[0]
    weight[0] = weight[0].abs()
    weight[1, 0, 0] = -20.0
    weight[2] = torch.tensor([-1.0, 0.5, 0.997])  # AMCT clips this maximum
    observer = make_observer("arq", granularity)
    observer.see(weight)
    rows = weight.reshape(1 if isinstance(granularity, PerTensor) else 5, -1).numpy()
    top = np.float32(2 ** (bits - 1) - 1)
    low, high = rows.min(1), rows.max(1)
    wanted = np.where(
        np.abs(low) > np.abs(high), np.abs(low) / (top + 1), np.abs(high) / top
    )
    full = observer.qparams(integer(bits, narrow_range=False)).scale.flatten().numpy()
    assert np.array_equal(full, wanted)
    assert np.array_equal(
        observer.qparams(integer(bits)).scale.flatten().numpy(),
        np.abs(rows).max(1) / top,
    )


def test_arq_has_no_zero_point():
    observer = make_observer("arq")
    observer.see(torch.ones(3))
    with pytest.raises(
        QuantizationError,
        match=r"^observer arq: the rule has no zero point\n  expected: a symmetric",
    ):
        observer.qparams(parse_format("int8_asym"))
