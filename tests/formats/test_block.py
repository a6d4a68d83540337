"""Block formats against gfloat's block code, and against values worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import gfloat
import gfloat.formats
import numpy as np
import pytest
import torch

from roundoff.errors import FormatError
from roundoff.formats import (
    FORMATS,
    BlockFormat,
    PerGroup,
    PerTensor,
    ScaleRule,
    round_tensor,
)

from .scalar import round_block_scalar

GFLOAT = {
    "mxfp8_e4m3": gfloat.formats.format_info_mxfp8_e4m3,
    "mxfp8_e5m2": gfloat.formats.format_info_mxfp8_e5m2,
    "mxfp6_e3m2": gfloat.formats.format_info_mxfp6_e3m2,
    "mxfp6_e2m3": gfloat.formats.format_info_mxfp6_e2m3,
    "mxfp4": gfloat.formats.format_info_mxfp4_e2m1,
}


def blocks(seed: int) -> torch.Tensor:
    """Blocks of very different sizes, with subnormal, huge, all-zero and power-of-two ones."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(20, 32, generator=g) * 2.0 ** torch.randint(
        -40, 40, (20, 1), generator=g
    )
    x[1], x[2] = 0.0, x[2] * 2.0**-160
    x[3] = torch.randn(32, generator=g) * 2.0**124
    x[4], x[4, 7] = torch.randn(32, generator=g).clamp(-1, 1), 4.0
    return x


@pytest.mark.parametrize("name", GFLOAT)
def test_mx_is_that_of_gfloat(name):
    x = blocks(1)
    expected = np.array(
        [
            gfloat.quantize_block(GFLOAT[name], b, gfloat.compute_scale_amax)
            for b in x.double().numpy()
        ]
    )
    np.testing.assert_array_equal(round_tensor(x, name), expected)
    oracle = [round_block_scalar(b, FORMATS[name]) for b in x.tolist()]
    np.testing.assert_array_equal(oracle, expected)


def exact_mxint8(block: list[float]) -> list[float]:
    """OCP MX v1.0: scale 2**floor(log2 amax), elements multiples of 2**-6 up to 127/64."""
    amax = max(map(abs, block))
    if amax == 0:
        return block
    scale = Fraction(2) ** max(math.frexp(amax)[1] - 1, -127)
    return [
        float(min(max(round(Fraction(v) / scale * 64), -127), 127) * scale / 64)
        for v in block
    ]  # round is half-even


def test_mxint8_in_exact_arithmetic():
    x = blocks(2)
    expected = [exact_mxint8(b) for b in x.tolist()]
    np.testing.assert_array_equal(round_tensor(x, "mxint8"), expected)
    np.testing.assert_array_equal(
        [round_block_scalar(b, FORMATS["mxint8"]) for b in x.tolist()], expected
    )


@pytest.mark.parametrize(
    ("amax", "floor", "ceil", "rceil"),
    # e2m1: emax 2, largest 6. 4 and 8 are powers of two; 6 still fits into scale 1; 6.5 saturates under floor.
    [
        (4.0, 1, 1, 1),
        (6.0, 1, 2, 1),
        (6.5, 1, 2, 2),
        (8.0, 2, 2, 2),
        (12.0, 2, 4, 2),
        (12.5, 2, 4, 4),
        (0.75, 0.125, 0.25, 0.125),
    ],
)
def test_scale_rules(amax, floor, ceil, rceil):
    x = torch.zeros(32)
    x[0], x[1] = amax, -amax
    fmt = FORMATS["mxfp4"]
    assert isinstance(fmt, BlockFormat)
    assert fmt.scale_rule is ScaleRule.FLOOR
    for rule, scale in zip(
        (ScaleRule.FLOOR, ScaleRule.CEIL, ScaleRule.RCEIL),
        (floor, ceil, rceil),
        strict=True,
    ):
        element = round_tensor(torch.tensor(amax / scale), "fp4_e2m1").item()
        expected = [element * scale, -element * scale]
        assert round_tensor(x, fmt, scale_rule=rule)[:2].tolist() == expected
        assert round_tensor(x, replace(fmt, scale_rule=rule))[:2].tolist() == expected
        assert (
            round_block_scalar(x.tolist(), replace(fmt, scale_rule=rule))[:2]
            == expected
        )


def test_nvfp4_worked_out():
    """Tensor amax 2688 = 448 * 6 makes the tensor scale 1; then block scales are e4m3(amax / 6)."""
    x = torch.zeros(3, 16)
    x[0, 0], x[0, 1], x[0, 2] = (
        2688.0,
        448.0,
        336.0,
    )  # scale 448: 6, 1, and 0.75, a tie between 0.5 and 1 (even: 1)
    x[1, 0], x[1, 1] = (
        7.0,
        -1.0,
    )  # 7 / 6 = 1.1667 -> e4m3 1.125; 7 / 1.125 = 6.2 -> 6; 1 / 1.125 = 0.89 -> 1
    x[2, 0] = (
        0.001  # 0.001 / 6 is under half of e4m3's smallest 2**-9: scale 0, the block is lost
    )
    expected = torch.zeros(3, 16)
    expected[0, 0], expected[0, 1], expected[0, 2] = 2688.0, 448.0, 448.0
    expected[1, 0], expected[1, 1] = 6.75, -1.125
    torch.testing.assert_close(round_tensor(x, "nvfp4"), expected, rtol=0, atol=0)
    oracle = [
        round_block_scalar(b, FORMATS["nvfp4"], tensor_amax=2688.0) for b in x.tolist()
    ]
    np.testing.assert_array_equal(oracle, expected)
    # the tensor scale is a plain factor: everything times a power of two gives everything times it
    torch.testing.assert_close(
        round_tensor(x * 2**-20, "nvfp4"), expected * 2**-20, rtol=0, atol=0
    )


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_blocks_lie_along_the_axis(name):
    x = torch.randn(3, 64, 5, generator=torch.Generator().manual_seed(3))
    fmt = FORMATS[name]
    assert isinstance(fmt, BlockFormat)
    along_last = round_tensor(x.movedim(1, -1).contiguous(), name).movedim(-1, 1)
    torch.testing.assert_close(
        round_tensor(x, name, axis=1), along_last, rtol=0, atol=0
    )
    torch.testing.assert_close(
        round_tensor(x, name, granularity=PerGroup(fmt.block_size, -2)),
        along_last,
        rtol=0,
        atol=0,
    )


def test_dtypes_and_empty_tensors():
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(4))
    for dtype in (torch.bfloat16, torch.float16):
        torch.testing.assert_close(
            round_tensor(x.to(dtype), "mxfp8"),
            round_tensor(x.to(dtype).float(), "mxfp8").to(dtype),
            rtol=0,
            atol=0,
        )
    torch.testing.assert_close(
        round_tensor(x.double(), "mxfp8").float(),
        round_tensor(x, "mxfp8"),
        rtol=0,
        atol=0,
    )
    assert round_tensor(torch.zeros(0, 32), "mxfp4").shape == (0, 32)
    assert round_tensor(torch.zeros(4, 0), "nvfp4").shape == (4, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: round_tensor(torch.ones(4, 30), "mxfp4"),
            "size 32 does not divide axis 1\n  expected: a positive divisor of 30\n  got: a tensor of shape (4, 30)\n"
            "  do: choose a size that divides the axis, or fill the axis up with zeros",
        ),
        (
            lambda: round_tensor(torch.ones(4, 32), "mxfp4", axis=2),
            "axis 2 is out of range",
        ),
        (
            lambda: round_tensor(torch.ones(4, 32), "mxfp4", granularity=PerTensor()),
            "mxfp4 has blocks of 32 elements along one axis\n  expected: PerGroup(32, axis)\n  got: PerTensor()",
        ),
        (
            lambda: round_tensor(torch.ones(4, 32), "nvfp4", granularity=PerGroup(32)),
            "nvfp4 has blocks of 16 elements",
        ),
        (
            lambda: round_tensor(torch.ones(4, 32), "mxfp4", scale=1.0),
            "mxfp4 chooses its own scales",
        ),
        (
            lambda: round_tensor(torch.ones(4, 32), "mxfp8", saturate=False),
            "mxfp8_e4m3 chooses its own scales",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(FormatError) as caught:
        call()
    assert message in str(caught.value)
