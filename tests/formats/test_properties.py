"""Properties that hold for every format and every fp32 value."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.formats import (
    FORMATS,
    BlockFormat,
    PerAxis,
    PerTensor,
    RoundingMode,
    ScaleRule,
    choose_qparams,
    fake_quantize,
    integer,
    round_tensor,
)

from .scalar import fake_quantize_scalar, round_block_scalar, round_scalar

ELEMENTS = [f for f in FORMATS.values() if not isinstance(f, BlockFormat)]
CASTS = [f for f in ELEMENTS if f.one_quantum != 1]
BLOCKS = [f for f in FORMATS.values() if isinstance(f, BlockFormat)]
DETERMINISTIC = [
    RoundingMode.NEAREST_EVEN,
    RoundingMode.NEAREST_AWAY,
    RoundingMode.TOWARD_ZERO,
]

fp32 = st.floats(width=32)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
usual = st.floats(-64, 64, width=32)
values = st.lists(fp32 | usual, min_size=1, max_size=8)


def identical(actual, expected) -> None:
    """The same bits, except that every NaN is every other NaN."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_array_equal(actual, expected)
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(
        np.signbit(actual)[numbers], np.signbit(expected)[numbers]
    )


@settings(max_examples=40, deadline=None)
@given(xs=values)
@pytest.mark.parametrize("fmt", CASTS, ids=lambda f: f.name)
def test_twin_is_oracle_idempotent_and_symmetric(fmt, xs):
    x = torch.tensor(xs)
    for rounding in DETERMINISTIC:
        for saturate in [True, False] if fmt.has_inf or fmt.has_nan else [True]:
            options = {"rounding": rounding, "saturate": saturate}
            once = round_tensor(x, fmt, **options)
            expected = [round_scalar(v, fmt, **options) for v in x.tolist()]
            # fp64 cannot saturate within fp32: there, Inf becomes fp32's largest value
            limit = torch.finfo(torch.float32).max if saturate else math.inf
            expected = [
                v if math.isnan(v) else min(max(v, -limit), limit) for v in expected
            ]
            identical(once, expected)
            if fmt.name != "fp64":
                identical(round_tensor(x.double(), fmt, **options).float(), once)
            identical(round_tensor(once, fmt, **options), once)
            if fmt.min_finite < 0:
                np.testing.assert_array_equal(round_tensor(-x, fmt, **options), -once)


@settings(max_examples=40, deadline=None)
@given(xs=st.lists(finite | usual, min_size=2, max_size=12))
@pytest.mark.parametrize("fmt", CASTS, ids=lambda f: f.name)
def test_rounding_is_monotonic(fmt, xs):
    x = torch.tensor(sorted(xs))
    for rounding in DETERMINISTIC:
        rounded = round_tensor(
            x.abs().sort().values if fmt.min_finite > 0 else x,
            fmt,
            rounding=rounding,
            saturate=True,
        )
        assert bool((rounded.diff() >= 0).all())


@settings(max_examples=60, deadline=None)
@given(
    xs=values,
    scale=st.floats(2.0**-40, 2.0**40, width=32),
    zero_point=st.integers(-128, 127),
)
@pytest.mark.parametrize(
    "fmt",
    [f for f in ELEMENTS if f.execution and f.name not in ("fp64", "fp32")]
    + [integer(8, narrow_range=False)],
    ids=lambda f: f.name,
)
def test_fake_quantization_is_oracle(fmt, xs, scale, zero_point):
    x = torch.tensor(xs)
    point = (
        None
        if fmt.symmetric
        else int(min(max(zero_point, fmt.min_finite), fmt.max_finite))
    )
    for rounding in DETERMINISTIC:
        actual = round_tensor(x, fmt, scale=scale, zero_point=point, rounding=rounding)
        expected = [
            fake_quantize_scalar(v, scale, fmt, zero_point=point, rounding=rounding)
            for v in x.tolist()
        ]
        np.testing.assert_array_equal(actual, expected)


@settings(max_examples=60, deadline=None)
@given(xs=st.lists(usual | fp32, min_size=32, max_size=32))
@pytest.mark.parametrize("fmt", BLOCKS, ids=lambda f: f.name)
def test_blocks_are_oracle(fmt, xs):
    x = torch.tensor(xs)
    amax = max((abs(v) for v in xs if math.isfinite(v)), default=0.0)
    for rule in ScaleRule if not fmt.tensor_scale else [None]:
        ruled = fmt if rule is None else replace(fmt, scale_rule=rule)
        size = fmt.block_size
        expected = [
            v
            for i in range(0, 32, size)
            for v in round_block_scalar(
                x[i : i + size].tolist(), ruled, tensor_amax=amax
            )
        ]
        np.testing.assert_array_equal(round_tensor(x, fmt, scale_rule=rule), expected)


@settings(max_examples=60, deadline=None)
@given(xs=st.lists(finite, min_size=6, max_size=6))
@pytest.mark.parametrize(
    "fmt", [f for f in ELEMENTS if f.execution], ids=lambda f: f.name
)
def test_chosen_scales_are_good(fmt, xs):
    """Zero stays zero, nothing is out of range by more than half a quantum, and the result is finite."""
    x = torch.tensor([*xs, 0.0, 0.0]).reshape(4, 2)
    if not fmt.symmetric:
        x.clamp_(
            -(2.0**126), 2.0**126
        )  # near fp32's largest number, code times scale may round to Inf
    for granularity in (PerTensor(), PerAxis(1)):
        qparams = choose_qparams(x, fmt, granularity)
        assert bool((qparams.scale >= torch.finfo(torch.float32).tiny).all())
        assert bool(qparams.scale.isfinite().all())
        rounded = fake_quantize(x, qparams, fmt)
        assert bool(rounded.isfinite().all())
        if fmt.has_zero:
            assert bool((rounded[x == 0] == 0).all())
        if fmt.one_quantum is not None and fmt.scale_from == "amax":
            # half a step for the code; fp32's division, product and scale each round by 2**-24 of up to 2**8 steps,
            # and an asymmetric zero point by another half step
            steps = (x - rounded).abs().double() / qparams.scale.double()
            assert (
                float(steps.max())
                <= (0.5 if fmt.symmetric else 1.0) + 2**8 * 4 * 2.0**-24
            )
