"""Stochastic rounding of fp32 to bf16 by bits: every gap between neighbours, and draw for draw the exact oracle."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from roundoff.formats import FORMATS, RoundingMode, round_tensor

from .scalar import round_scalar

BF16 = FORMATS["bf16"]


def rounded(x, seed=0, name="bf16"):
    generator = torch.Generator().manual_seed(seed)
    return round_tensor(
        x, name, rounding=RoundingMode.STOCHASTIC, saturate=False, generator=generator
    )


def test_draw_for_draw_as_exact_arithmetic():
    """A 16-bit draw d carries where d + rest reaches 2**16: where (2**16 - 1 - d) / 2**16 lies below the remainder."""
    codes = np.random.default_rng(0).integers(0, 2**32, 4000, dtype=np.uint32)
    codes[:4] = [
        0x00000001,
        0x807FFFFF,
        0x7F7FFFFF,
        0x7F7F0001,
    ]  # smallest, largest subnormal, around the largest
    x = torch.from_numpy(codes.view(np.int32)).view(torch.float32)
    words = torch.empty(1000, dtype=torch.int64).random_(
        -(2**63), None, generator=torch.Generator().manual_seed(0)
    )
    draws = words.view(torch.int16).numpy().view(np.uint16)
    for value, draw, found in zip(
        x.tolist(), draws.tolist(), rounded(x).tolist(), strict=True
    ):
        expected = round_scalar(
            value,
            BF16,
            rounding=RoundingMode.STOCHASTIC,
            saturate=False,
            draw=(2**16 - 1 - draw) / 2**16,
        )
        assert found == expected or math.isnan(found) and math.isnan(expected)
        assert math.copysign(1, found) == math.copysign(1, expected) or math.isnan(
            found
        )


@pytest.mark.parametrize("rest", [0.0, 0.25, 0.5, 0.9375])
@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_between_all_neighbours(name, dtype, rest):
    """Every pair of neighbours, subnormals too. The hits of all pairs together are binomial: 4 sigma; and each result is one
    of the two."""
    low = torch.arange(0, 0x7F7F if name == "bf16" else 0x7BFF, dtype=torch.int16).view(
        dtype
    )
    high = torch.arange(1, len(low) + 1, dtype=torch.int16).view(dtype)
    x = (low.double() + rest * (high.double() - low.double())).float()
    exact = x.double() == low.double() + rest * (high.double() - low.double())
    assert (
        exact.float().mean() > 0.99
    )  # of bf16, the lowest subnormals have no such fp32 number
    for sign in (1, -1):
        hits = 0
        for seed in range(4):
            found = rounded(sign * x, seed, name) * sign
            up = found == high.float()
            assert bool((up | (found == low.float()))[exact].all())
            hits += int(up[exact].sum())
        n = 4 * int(exact.sum())
        assert abs(hits - n * rest) <= 4 * math.sqrt(n * rest * (1 - rest))


def test_specials_and_the_step_to_infinity():
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
    found = rounded(x)
    assert found[0].isnan()
    assert found[1:].tolist() == x[1:].tolist()
    assert math.copysign(1, found[4]) == -1
    past = torch.full(
        (4000,), torch.finfo(torch.float32).max
    )  # 0xFFFF of 0x10000 on the way to Inf
    assert rounded(past).isinf().float().mean() > 0.99
    assert (
        not round_tensor(past, "bf16", rounding=RoundingMode.STOCHASTIC, saturate=True)
        .isinf()
        .any()
    )


@pytest.mark.parametrize("shape", [(), (0,), (1,), (5,), (3, 7)])
def test_shapes_and_layouts(shape):
    assert rounded(torch.ones(shape)).shape == shape
    x = torch.randn(6, 8).t()
    assert rounded(x).stride() == x.stride() or rounded(x).shape == x.shape
    assert bool(((rounded(x) - x).abs() <= x.abs() * 2**-7).all())
