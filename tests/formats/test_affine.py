"""Scales, zero points and granularity: values worked out by hand, from ONNX's definition, and in exact arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from roundoff.errors import FormatError
from roundoff.formats import (
    FORMATS,
    PerAxis,
    PerBlock,
    PerGroup,
    PerTensor,
    PerToken,
    QParams,
    RoundingMode,
    choose_qparams,
    fake_quantize,
    integer,
    round_tensor,
)

INT8, INT8_ASYM = FORMATS["int8"], FORMATS["int8_asym"]


def test_divide_round_then_add():
    """ONNX QuantizeLinear with zero point 1: x / scale = 0.5, 1.5, 2.5 gives codes 1, 3, 3 (not 2, 2, 4)."""
    x = torch.tensor([0.5, 1.5, 2.5]) * 0.25
    q = QParams(torch.tensor(0.25), torch.tensor(1.0))
    assert (fake_quantize(x, q, INT8_ASYM) / 0.25 + 1).tolist() == [1, 3, 3]


def test_division_is_not_multiplication_by_the_reciprocal():
    """Among multiples of half a scale there are ties that the reciprocal misses; numpy divides in fp32."""
    scale = np.float32(0.011)
    x = (np.arange(-250, 250, dtype=np.float32) * np.float32(0.5)) * scale
    expected = np.clip(np.rint(x / scale), -127, 127) * scale
    reciprocal = np.clip(np.rint(x * (np.float32(1) / scale)), -127, 127) * scale
    assert (expected != reciprocal).any()
    np.testing.assert_array_equal(
        round_tensor(torch.tensor(x), INT8, scale=float(scale)), expected
    )


def test_symmetric_scale_is_amax_over_the_largest_code():
    x = torch.tensor([[1.0, -2.0], [0.5, 0.25]])
    assert choose_qparams(x, INT8).scale.item() == np.float32(2) / np.float32(127)
    assert choose_qparams(x, INT8, PerAxis(0)).scale.flatten().tolist() == [
        np.float32(2) / np.float32(127),
        np.float32(0.5) / np.float32(127),
    ]
    assert choose_qparams(x, FORMATS["fp8_e4m3fn"]).scale.item() == np.float32(
        2
    ) / np.float32(448)
    assert choose_qparams(x, FORMATS["hif8"]).scale.item() == np.float32(
        2
    ) / np.float32(15)
    assert choose_qparams(x, FORMATS["binary"]).scale.item() == 3.75 / 4
    assert choose_qparams(
        x, FORMATS["ternary"], PerAxis(0)
    ).scale.flatten().tolist() == [
        1.5,
        0.375,
    ]


def test_one_axis_kept_of_one_is_a_scale_for_each_element():
    x = torch.tensor([1.0, -300.0, 0.0])
    for name in ("int8", "int8_asym", "ternary"):
        q = choose_qparams(x, FORMATS[name], PerAxis(0))
        assert q.scale.shape == (3, 1)
        torch.testing.assert_close(
            fake_quantize(x, q, FORMATS[name]), x, rtol=2**-22, atol=0
        )
    assert round_tensor(torch.tensor(3.0), INT8, granularity=PerTensor()).item() == 3.0


def test_mean_magnitude_leaves_out_what_is_not_finite():
    x = torch.tensor(
        [[1.0, -3.0, math.nan, math.inf], [2.0**127, -(2.0**127), 2.0**127, 2.0**127]]
    )
    q = choose_qparams(x, FORMATS["binary"], PerAxis(0))
    assert q.scale.flatten().tolist() == [
        2.0,
        2.0**127,
    ]  # the second row's sum is past fp32
    alone = choose_qparams(torch.tensor([math.nan, math.inf]), FORMATS["binary"])
    assert alone.scale.tolist() == [1.0]


def test_narrow_range_is_a_field():
    x = torch.tensor([-128.0, 127.0])
    assert round_tensor(x, INT8, scale=1.0).tolist() == [-127, 127]
    assert round_tensor(x, integer(8, narrow_range=False), scale=1.0).tolist() == [
        -128,
        127,
    ]
    assert integer(8, symmetric=False, narrow_range=True).name == "int8_asym_narrow"
    with pytest.raises(FormatError, match="an integer format needs two bits"):
        integer(1)


def test_asymmetric_range_uses_all_codes_and_keeps_zero():
    x = torch.linspace(0.0, 5.1, 256)  # one code each: scale 0.02, zero point -128
    q = choose_qparams(x, INT8_ASYM)
    assert q.scale.item() == pytest.approx(0.02, rel=2**-22)
    assert q.zero_point is not None
    assert q.zero_point.item() == -128
    np.testing.assert_allclose(
        fake_quantize(x, q, INT8_ASYM), x, rtol=0, atol=5.1 * 2**-22
    )
    only_positive = choose_qparams(
        torch.tensor([3.0, 5.1]), INT8_ASYM
    )  # the range is widened to 0
    assert only_positive.scale.item() == pytest.approx(0.02, rel=2**-22)
    wide = torch.tensor([-3e38, 3e38])  # max - min is more than fp32 holds
    np.testing.assert_allclose(
        round_tensor(wide, INT8_ASYM, granularity=PerTensor()), wide, rtol=0.01
    )


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if f.execution])
def test_zero_and_empty_sets(name):
    zeros = torch.zeros(2, 32)
    block = name.startswith(("mx", "nv"))
    rounded = round_tensor(zeros, name, granularity=None if block else PerTensor())
    expected = (
        torch.ones_like(zeros) if name == "binary" else zeros
    )  # binary has no zero: +1 times scale 1
    torch.testing.assert_close(rounded, expected, rtol=0, atol=0)
    empty = torch.zeros(0, 32)
    assert round_tensor(
        empty, name, granularity=None if block else PerAxis(1)
    ).shape == (0, 32)
    if not block:
        assert choose_qparams(
            zeros, FORMATS[name], PerAxis(0)
        ).scale.flatten().tolist() == [1, 1]
        assert choose_qparams(empty, FORMATS[name], PerAxis(1)).scale.shape == (1, 32)


@pytest.mark.parametrize(
    "name",
    [
        "int8",
        "int8_asym",
        "int4",
        "fp8_e4m3fn",
        "fp8_e5m2",
        "hif8",
        "ternary",
        "mxfp4",
        "mxint8",
        "nvfp4",
    ],
)
def test_nan_stays_inf_saturates_and_neither_moves_the_scale(name):
    x = torch.linspace(-1, 1, 32)
    x[3] = 0.0
    options = {} if name.startswith(("mx", "nv")) else {"granularity": PerTensor()}
    clean = round_tensor(x, name, **options)
    x[3], x[5], x[9] = math.nan, math.inf, -math.inf
    y = round_tensor(x, name, **options)
    assert y.isnan().nonzero().flatten().tolist() == [3]
    same = [i for i in range(32) if i not in (3, 5, 9)]
    if name != "ternary":  # its scale is a mean, over fewer values now
        torch.testing.assert_close(y[same], clean[same], rtol=0, atol=0)
    assert y[5] >= clean.max()
    assert y[9] <= clean.min() or name.startswith("int8_asym")
    assert math.isfinite(y[5])


def test_sets_of_nan_and_inf_alone():
    x = torch.tensor([[math.nan, math.inf], [-math.inf, math.nan], [1.0, 127.0]])
    for name in ("int8", "int8_asym"):
        assert choose_qparams(x, FORMATS[name], PerAxis(0)).scale.flatten()[
            :2
        ].tolist() == [1, 1]
    assert round_tensor(x, INT8, granularity=PerAxis(0))[:2].nan_to_num(7).tolist() == [
        [7, 127],
        [-127, 7],
    ]


def test_a_tiny_amax_gets_the_smallest_normal_scale():
    x = torch.tensor([1e-44, -3e-39])
    q = choose_qparams(x, INT8)
    assert q.scale.item() == 2.0**-126
    assert round_tensor(x, INT8, granularity=PerTensor()).tolist() == [0, 0]
    assert choose_qparams(x.double(), INT8).scale.item() == pytest.approx(3e-39 / 127)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_kept(dtype):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(5)).to(dtype)
    for name in ("int8", "int8_asym", "fp8_e4m3fn", "binary"):
        y = round_tensor(x, name, granularity=PerToken())
        assert y.dtype == dtype
        if dtype != torch.float64:
            torch.testing.assert_close(
                y,
                round_tensor(x.float(), name, granularity=PerToken()).to(dtype),
                rtol=0,
                atol=0,
            )


@pytest.mark.parametrize(
    ("granularity", "slices"),
    [
        (PerTensor(), [(slice(None), slice(None))]),
        (PerAxis(0), [(i, slice(None)) for i in range(6)]),
        (PerAxis(-2), [(i, slice(None)) for i in range(6)]),
        (PerAxis(1), [(slice(None), j) for j in range(4)]),
        (PerToken(), [(i, slice(None)) for i in range(6)]),
        (PerGroup(2), [(i, slice(j, j + 2)) for i in range(6) for j in (0, 2)]),
        (PerGroup(3, axis=0), [(slice(i, i + 3), j) for i in (0, 3) for j in range(4)]),
        (
            PerBlock((3, 2)),
            [(slice(i, i + 3), slice(j, j + 2)) for i in (0, 3) for j in (0, 2)],
        ),
        (PerBlock((6, 4)), [(slice(None), slice(None))]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["int8", "int4_asym", "fp8_e4m3fn", "ternary"])
def test_a_granularity_is_each_part_alone(granularity, slices, name):
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(6)) * torch.arange(
        1, 25
    ).reshape(6, 4)
    expected = torch.full_like(x, math.nan)
    for part in slices:
        expected[part] = round_tensor(x[part], name, granularity=PerTensor())
    torch.testing.assert_close(
        round_tensor(x, name, granularity=granularity), expected, rtol=2e-7, atol=0
    )


def test_stochastic_integers_keep_the_mean():
    """20,000 draws of Bernoulli(0.3) steps: sigma of the mean sqrt(0.3 * 0.7 / 20000) = 0.0032; 5 sigma."""
    x = torch.full((20_000,), 5.3)
    y = round_tensor(
        x,
        INT8,
        scale=1.0,
        rounding=RoundingMode.STOCHASTIC,
        generator=torch.Generator().manual_seed(7),
    )
    assert set(y.tolist()) == {5.0, 6.0}
    assert abs(y.double().mean().item() - 5.3) < 5 * 0.0033
    y = round_tensor(
        x,
        INT8_ASYM,
        scale=1.0,
        zero_point=3,
        rounding=RoundingMode.STOCHASTIC,
        generator=torch.Generator().manual_seed(7),
    )
    assert abs(y.double().mean().item() - 5.3) < 5 * 0.0033


def test_saturation_can_be_refused_with_a_scale():
    x = torch.tensor([1.0, 1e6])
    assert round_tensor(x, "fp8_e5m2", scale=1.0).tolist() == [1.0, 57344.0]
    assert round_tensor(x, "fp8_e5m2", scale=1.0, saturate=False).tolist() == [
        1.0,
        math.inf,
    ]


X = torch.zeros(6, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: round_tensor(X, INT8),
            "int8 needs a scale\n  expected: granularity= or scale=",
        ),
        (lambda: round_tensor(X, "ternary"), "ternary needs a scale"),
        (lambda: round_tensor(X, INT8, zero_point=1), "a zero point needs a scale"),
        (
            lambda: round_tensor(X, "fp8", scale=1.0, zero_point=1),
            "a zero point needs an integer format",
        ),
        (
            lambda: round_tensor(X, INT8, scale=torch.ones(3)),
            "the scale does not fit the tensor\n  expected: a shape that broadcasts to (6, 4)\n"
            "  got: a scale of shape (3,)",
        ),
        (
            lambda: round_tensor(X, INT8, scale=torch.ones(2, 6, 4)),
            "the scale does not fit the tensor",
        ),
        (
            lambda: round_tensor(X, INT8, granularity=PerAxis(2)),
            "PerAxis(axis=2): axis 2 is out of range\n  expected: an axis in [-2, 2)\n  got: a tensor of shape (6, 4)",
        ),
        (
            lambda: round_tensor(X, INT8, granularity=PerAxis(-3)),
            "axis -3 is out of range",
        ),
        (
            lambda: round_tensor(torch.ones(()), INT8, granularity=PerToken()),
            "PerToken(): axis -1 is out of range\n  expected: a tensor with axes",
        ),
        (
            lambda: round_tensor(X, INT8, granularity=PerGroup(3)),
            "PerGroup(group_size=3, axis=-1): size 3 does not divide axis 1\n  expected: a positive divisor of 4",
        ),
        (
            lambda: round_tensor(X, INT8, granularity=PerGroup(0)),
            "size 0 does not divide axis 1",
        ),
        (
            lambda: round_tensor(X, INT8, granularity=PerBlock((3,))),
            "one block size per axis is needed\n  expected: 2 sizes, for shape (6, 4)\n  got: 1 sizes",
        ),
        (
            lambda: round_tensor(X, INT8, granularity=PerBlock((4, 4))),
            "size 4 does not divide axis 0",
        ),
        (
            lambda: choose_qparams(X, FORMATS["mxfp4"]),
            "mxfp4 has a scale rule of its own",
        ),
        (
            lambda: choose_qparams(X.int(), INT8),
            "only floating-point tensors can be rounded",
        ),
        (
            lambda: fake_quantize(X.int(), QParams(torch.ones(())), INT8),
            "only floating-point tensors can be rounded",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(FormatError) as caught:
        call()
    assert message in str(caught.value)
