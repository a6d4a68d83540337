"""Oracle and twin against independent libraries: around every midpoint, out of range, and the special values."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

import gfloat
import gfloat.formats
import ml_dtypes
import numpy as np
import pytest
import torch

from roundoff.formats import FORMATS, RoundingMode, all_values, round_tensor

from .scalar import round_scalar

GFLOAT = {
    "fp8_e4m3fn": gfloat.formats.format_info_ocp_e4m3,
    "fp8_e5m2": gfloat.formats.format_info_ocp_e5m2,
    "fp6_e3m2": gfloat.formats.format_info_ocp_e3m2,
    "fp6_e2m3": gfloat.formats.format_info_ocp_e2m3,
    "fp4_e2m1": gfloat.formats.format_info_ocp_e2m1,
}
GFLOAT_MODES = {
    RoundingMode.NEAREST_EVEN: gfloat.RoundMode.TiesToEven,
    RoundingMode.NEAREST_AWAY: gfloat.RoundMode.TiesToAway,
    RoundingMode.TOWARD_ZERO: gfloat.RoundMode.TowardZero,
}
ML_DTYPES = {
    "fp8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
}
SPECIALS = [
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    1e38,
    -1e38,
    1e-44,
    -1e-44,
    2.0**-149,
    3.4028234663852886e38,
]


def neighbourhoods(fmt, count: int | None = None) -> torch.Tensor:
    """Between every two adjacent values: the ends, quarters, the midpoint and its fp32 neighbours; past the ends."""
    values = sorted({v for v in all_values(fmt) if math.isfinite(v)})
    last = values[-1] + (values[-1] - values[-2])
    values = [-last, *values, last] if values[0] < 0 else [*values, last]
    step = 1 if count is None else max(1, len(values) // count)
    low = torch.tensor(values[:-1:step], dtype=torch.float64)
    gap = torch.tensor(values[1::step], dtype=torch.float64)[: len(low)] - low
    fractions = torch.tensor([0, 0.1, 0.25, 0.5, 0.75, 0.9], dtype=torch.float64)
    exact = (low[:, None] + gap[:, None] * fractions).float()
    middle = exact[:, 3]
    nearly = torch.stack(
        [torch.nextafter(middle, torch.tensor(s * math.inf)) for s in (-1, 1)], 1
    )
    out = torch.tensor(
        [s * last * f for s in (1, -1) for f in (1, 1.01, 1.5, 4, 1000)],
        dtype=torch.float64,
    )
    return torch.cat(
        [exact.flatten(), nearly.flatten(), out.float(), torch.tensor(SPECIALS)]
    )


def assert_same(actual, expected, x=None) -> None:
    """Equal with the sign of zero; every NaN equals every NaN."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    equal = (actual == expected) & (np.signbit(actual) == np.signbit(expected))
    equal |= np.isnan(actual) & np.isnan(expected)
    wrong = np.flatnonzero(~equal)[:5]
    source = actual if x is None else np.asarray(x, np.float64)
    assert not wrong.size, [
        (float(source[i]), float(actual[i]), float(expected[i])) for i in wrong
    ]


@pytest.mark.parametrize("name", ML_DTYPES)
def test_nearest_even_is_that_of_ml_dtypes(name):
    fmt = FORMATS[name]
    x = neighbourhoods(fmt)
    if not fmt.has_nan:
        x = x[~x.isnan()]  # ml_dtypes has to turn NaN into a number
    with np.errstate(all="ignore"):
        expected = x.numpy().astype(ML_DTYPES[name]).astype(np.float64)
    saturate = (
        None if not fmt.has_nan else False
    )  # ml_dtypes saturates only where there is neither Inf nor NaN
    assert_same(round_tensor(x, fmt, saturate=saturate), expected, x)
    assert_same(
        [round_scalar(v, fmt, saturate=saturate) for v in x.tolist()], expected, x
    )


@pytest.mark.parametrize("rounding", GFLOAT_MODES)
@pytest.mark.parametrize("name", GFLOAT)
def test_each_mode_is_that_of_gfloat(name, rounding):
    fmt, info = FORMATS[name], GFLOAT[name]
    x = neighbourhoods(fmt)
    x = x[~x.isnan()]
    for saturate in [True, False] if fmt.has_nan else [True]:
        expected = [
            gfloat.round_float(info, v, GFLOAT_MODES[rounding], saturate)
            for v in x.tolist()
        ]
        assert_same(
            round_tensor(x, fmt, rounding=rounding, saturate=saturate), expected, x
        )
        assert_same(
            round_tensor(x.double(), fmt, rounding=rounding, saturate=saturate),
            expected,
            x,
        )
        assert_same(
            [
                round_scalar(v, fmt, rounding=rounding, saturate=saturate)
                for v in x.tolist()
            ],
            expected,
            x,
        )


@pytest.mark.parametrize(
    "name", ["fp8_e4m3fn", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz", "bf16", "fp16"]
)
def test_nearest_even_is_that_of_torch(name):
    fmt = FORMATS[name]
    x = neighbourhoods(fmt, 4000)
    expected = x.to(fmt.torch_dtype).float()
    inside = x.abs() <= fmt.max_finite
    assert_same(round_tensor(x, fmt)[inside], expected[inside], x[inside])


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)]
)
def test_16_bit_formats(name, dtype):
    fmt = FORMATS[name]
    x = neighbourhoods(fmt)  # every code, and eight points around each
    with np.errstate(all="ignore"):
        expected = x.numpy().astype(dtype).astype(np.float64)
    assert_same(round_tensor(x, fmt), expected, x)
    # The steps are also right where the cast is not used: fp64 tensors, which torch's own casts round twice.
    assert_same(round_tensor(x.double(), fmt), expected, x)
    some = torch.cat([x[::211], x[-21:]])
    assert_same(
        [round_scalar(v, fmt) for v in some.tolist()],
        np.r_[expected[::211], expected[-21:]],
        some,
    )
    clipped = np.where(
        np.isnan(x.numpy()), np.nan, np.clip(expected, fmt.min_finite, fmt.max_finite)
    )
    assert_same(round_tensor(x, fmt, saturate=True), clipped, x)


@pytest.mark.parametrize("name", ["bf16", "fp16", "fp8_e4m3fn"])
@pytest.mark.parametrize("carrier", [torch.bfloat16, torch.float16])
def test_every_16_bit_input(name, carrier):
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(carrier)
    wide = round_tensor(x.float(), FORMATS[name])
    rounded = round_tensor(x, FORMATS[name])
    assert rounded.dtype == carrier
    assert_same(rounded.double(), wide.to(carrier).double(), x.double())


def test_fp64_is_rounded_once():
    """Just above a midpoint of the target, by less than fp32 can tell: via fp32 it would be a tie."""
    x = torch.tensor(
        [
            1 + 2**-8 + 2**-40,
            1 + 2**-11 + 2**-40,
            1 + 2**-4 + 2**-40,
            1 + 2**-24 + 2**-50,
        ],
        dtype=torch.float64,
    )
    for i, (name, up) in enumerate(
        [("bf16", 2**-7), ("fp16", 2**-10), ("fp8_e4m3fn", 2**-3), ("fp32", 2**-23)]
    ):
        assert (
            round_tensor(x[i], name).item()
            == 1 + up
            == round_scalar(x[i].item(), FORMATS[name])
        )


def test_fp32_from_fp64_is_that_of_numpy():
    x = torch.cat(
        [
            torch.tensor(SPECIALS),
            torch.tensor([2.0**-150, 3.4028235677973366e38, 1e300, 1e-60]),
        ]
    ).double()
    x = torch.cat(
        [
            x,
            torch.randn(
                2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64
            )
            * 1e-38,
        ]
    )
    with np.errstate(all="ignore"):
        expected = x.numpy().astype(np.float32)
    assert_same(round_tensor(x, "fp32"), expected, x)
    assert_same([round_scalar(v, FORMATS["fp32"]) for v in x.tolist()], expected, x)


@pytest.mark.parametrize("rounding", GFLOAT_MODES)
def test_tf32_is_that_of_gfloat(rounding):
    info = gfloat.FormatInfo(
        "tf32",
        19,
        11,
        bias=127,
        is_signed=True,
        domain=gfloat.Domain.Extended,
        has_nz=True,
        num_high_nans=2**10 - 1,
        has_subnormals=True,
        is_twos_complement=False,
    )
    g = torch.Generator().manual_seed(1)
    x = torch.randn(400, generator=g) * 2.0 ** torch.randint(
        -150, 127, (400,), generator=g
    )
    x = torch.cat(
        [
            x,
            torch.tensor(
                [1 + 2**-11, 1 + 3 * 2**-11, 3.4028235e38, 3.4e38, *SPECIALS[:4]]
            ),
        ]
    )
    expected = [gfloat.round_float(info, v, GFLOAT_MODES[rounding]) for v in x.tolist()]
    assert_same(round_tensor(x, "tf32", rounding=rounding), expected, x)
    assert_same(
        [round_scalar(v, FORMATS["tf32"], rounding=rounding) for v in x.tolist()],
        expected,
        x,
    )


def nearest_away(value: float, values: list[float]) -> float:
    """By search among positive values, in exact arithmetic."""
    exact = abs(Fraction(min(max(value, -1e300), 1e300)))
    i = bisect.bisect_left(values, exact)
    low, high = values[max(i - 1, 0)], values[min(i, len(values) - 1)]
    best = high if Fraction(high) - exact <= exact - Fraction(low) else low
    return math.copysign(best, value) if best else 0.0


def test_hif8_against_a_search_among_the_published_values():
    bits = {e: 3 if abs(e) <= 3 else 2 if abs(e) <= 7 else 1 for e in range(-15, 16)}
    values = [
        2.0**e * (1 + m / 2**b) for e, b in bits.items() for m in range(2**b)
    ]  # the last one's code is Inf
    values = [0.0, *sorted([2.0 ** (m - 23) for m in range(1, 8)] + values)]
    x = neighbourhoods(FORMATS["hif8"])
    expected = [
        v
        if math.isnan(v)
        else math.copysign(math.inf, v)
        if abs(nearest_away(v, values)) > 32768
        else nearest_away(v, values)
        for v in x.tolist()
    ]
    assert FORMATS["hif8"].rounding is RoundingMode.NEAREST_AWAY
    assert_same(round_tensor(x, "hif8"), expected, x)
    assert_same(round_tensor(x.double(), "hif8"), expected, x)
    assert_same([round_scalar(v, FORMATS["hif8"]) for v in x.tolist()], expected, x)
    assert round_tensor(torch.tensor([40959.0, 40960.0, -1e9]), "hif8").tolist() == [
        32768,
        math.inf,
        -math.inf,
    ]
    assert round_tensor(
        torch.tensor([40960.0, -math.inf]), "hif8", saturate=True
    ).tolist() == [
        32768,
        -32768,
    ]


def test_e8m0_is_that_of_ml_dtypes():
    """Positive normal fp32 only: of fp32's subnormals ml_dtypes rounds 1.25 * 2**-127 up, though 2**-127 is nearer."""
    x = neighbourhoods(FORMATS["e8m0"])
    inside = (x >= 2.0**-126) | x.isnan()
    expected = x[inside].numpy().astype(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    assert_same(round_tensor(x[inside], "e8m0"), expected, x[inside])
    assert_same(
        [round_scalar(v, FORMATS["e8m0"]) for v in x[inside].tolist()],
        expected,
        x[inside],
    )


def test_e8m0_has_no_zero_and_no_sign():
    x = torch.tensor([0.0, -0.0, 1e-44, 1.25 * 2**-127, -1.0, -math.inf])
    expected = [2**-127, 2**-127, 2**-127, 2**-127, math.nan, math.nan]
    assert_same(round_tensor(x, "e8m0"), expected)
    assert_same([round_scalar(v, FORMATS["e8m0"]) for v in x.tolist()], expected)


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "int8_asym", "ternary"])
def test_integers_are_numpy_rint_and_clip(name):
    fmt = FORMATS[name]
    x = neighbourhoods(fmt)
    expected = (
        np.clip(np.rint(x.numpy().astype(np.float64)), fmt.min_finite, fmt.max_finite)
        + 0.0
    )
    assert_same([round_scalar(v, fmt) for v in x.tolist()], expected, x)
    np.testing.assert_array_equal(round_tensor(x, fmt, scale=1.0), expected)


@pytest.mark.parametrize("name", ["int4", "mxint8", "fp4_e2m1"])
@pytest.mark.parametrize(
    "rounding", [RoundingMode.NEAREST_AWAY, RoundingMode.TOWARD_ZERO]
)
def test_directed_integers_by_search(name, rounding):
    fmt = FORMATS[name]
    values = sorted(v for v in all_values(fmt) if v >= 0)
    x = neighbourhoods(fmt)
    x = x[~x.isnan()]
    lower = [
        math.copysign(values[bisect.bisect_right(values, abs(v)) - 1], v)
        for v in x.tolist()
    ]
    expected = (
        [nearest_away(v, values) for v in x.tolist()]
        if rounding is RoundingMode.NEAREST_AWAY
        else lower
    )
    actual = [round_scalar(v, fmt, rounding=rounding) for v in x.tolist()]
    np.testing.assert_array_equal(actual, expected)


def test_binary_is_the_sign_and_zero_is_plus():
    x = torch.tensor(
        [0.0, -0.0, 1e-40, -1e-40, 0.3, -7.0, math.inf, -math.inf, math.nan]
    )
    expected = [1, 1, 1, -1, 1, -1, 1, -1, math.nan]
    assert_same(round_tensor(x, "binary", scale=1.0), expected)
    assert_same([round_scalar(v, FORMATS["binary"]) for v in x.tolist()], expected)


def test_toward_zero_never_overflows_and_inf_stays():
    x = torch.tensor([1e9, -1e9, math.inf, -math.inf])
    away = {"rounding": RoundingMode.TOWARD_ZERO, "saturate": False}
    assert_same(round_tensor(x, "fp16", **away), [65504, -65504, math.inf, -math.inf])
    assert_same(round_tensor(x, "fp8_e4m3fn", **away), [448, -448, math.nan, math.nan])
    assert_same(
        [round_scalar(v, FORMATS["fp8_e4m3fn"], **away) for v in x.tolist()],
        [448, -448, math.nan, math.nan],
    )
