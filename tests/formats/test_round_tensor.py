"""Stochastic rounding, special tensors, and what is refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from roundoff.errors import FormatError
from roundoff.formats import FORMATS, RoundingMode, all_values, round_tensor

from .scalar import round_scalar


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "bf16", "hif8", "fp4_e2m1"])
def test_stochastic_rounding_keeps_the_mean(name):
    """n draws at remainder r hit the upper neighbour n*r times on average, with sigma sqrt(n*r*(1-r)); 5 sigma."""
    n, generator = 40_000, torch.Generator().manual_seed(20)
    for value, low, high in [
        (1.0 + 0.3 * _gap(name, 1.0), 1.0, 1.0 + _gap(name, 1.0)),
        (-2.0 - 0.9 * _gap(name, 2.0), -2.0, -2.0 - _gap(name, 2.0)),
    ]:
        x = torch.full((n,), value)
        rounded = round_tensor(
            x, name, rounding=RoundingMode.STOCHASTIC, generator=generator
        )
        r = (x[0].item() - low) / (high - low)
        hits = int((rounded == high).sum())
        assert hits + int((rounded == low).sum()) == n
        assert abs(hits - n * r) <= 5 * math.sqrt(n * r * (1 - r))


def _gap(name: str, value: float) -> float:
    return 2.0 ** FORMATS[name].quantum_exponent(math.frexp(value)[1] - 1)


def test_stochastic_rounding_leaves_values_and_repeats_with_the_generator():
    values = torch.tensor(
        [v for v in all_values(FORMATS["fp8_e5m2"]) if not math.isnan(v)]
    )
    np.testing.assert_array_equal(
        round_tensor(
            values, "fp8_e5m2", rounding=RoundingMode.STOCHASTIC, saturate=False
        ),
        values,
    )
    x = torch.randn(100, generator=torch.Generator().manual_seed(3))
    one, two = (
        round_tensor(
            x,
            "bf16",
            rounding=RoundingMode.STOCHASTIC,
            generator=torch.Generator().manual_seed(4),
        )
        for _ in range(2)
    )
    np.testing.assert_array_equal(one, two)
    state = torch.get_rng_state()
    round_tensor(
        x, "bf16", rounding=RoundingMode.STOCHASTIC, generator=torch.Generator()
    )
    torch.testing.assert_close(torch.get_rng_state(), state, rtol=0, atol=0)


def test_stochastic_oracle_takes_the_draw():
    fmt = FORMATS["fp4_e2m1"]
    got = [
        round_scalar(1.125, fmt, rounding=RoundingMode.STOCHASTIC, draw=d)
        for d in (0.0, 0.24, 0.25, 0.9)
    ]
    assert got == [1.5, 1.5, 1.0, 1.0]


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if not f.has_nan])
def test_nan_stays_nan_even_where_there_is_none(name):
    assert math.isnan(round_scalar(math.nan, FORMATS[name]))
    x = torch.full((32,), math.nan)
    x[0] = 1.0
    rounded = round_tensor(
        x, name, **({"scale": 1.0} if FORMATS[name].one_quantum == 1 else {})
    )
    assert rounded.isnan().tolist() == [False] + [True] * 31


@pytest.mark.parametrize("name", ["fp4_e2m1", "fp6_e3m2", "int8"])
def test_saturation_cannot_be_refused_without_inf_and_nan(name):
    for call in (
        lambda: round_tensor(torch.ones(2), name, saturate=False, scale=1.0),
        lambda: round_scalar(1.0, FORMATS[name], saturate=False),
    ):
        with pytest.raises(
            FormatError,
            match=f"{name} has neither Inf nor NaN for what is out of range\n  expected: saturate=True",
        ):
            call()


@pytest.mark.parametrize(
    "name", ["fp64", "fp32", "tf32", "bf16", "fp8_e5m2", "hif8", "e8m0", "fp4_e2m1"]
)
@pytest.mark.parametrize("shape", [(0,), (3, 0), ()])
def test_empty_and_scalar_tensors(name, shape):
    x = torch.ones(shape)
    rounded = round_tensor(x, name)
    assert rounded.shape == x.shape
    assert rounded.dtype == torch.float32


def test_neither_the_argument_nor_its_gradient_is_touched():
    x = torch.linspace(-3, 3, 64).requires_grad_()
    before = x.detach().clone()
    for name in FORMATS:
        rounded = round_tensor(
            x, name, **({"scale": 0.5} if FORMATS[name].one_quantum == 1 else {})
        )
        assert not rounded.requires_grad
        torch.testing.assert_close(x.detach(), before, rtol=0, atol=0)
    strided = torch.randn(8, 6).t()[::2]
    np.testing.assert_array_equal(
        round_tensor(strided, "fp6_e3m2").flatten(),
        round_tensor(strided.contiguous(), "fp6_e3m2").flatten(),
    )


def test_inf_becomes_the_largest_value_of_the_carrier_when_it_must_saturate():
    x = torch.tensor([math.inf, -math.inf, 1.0])
    largest = torch.finfo(torch.float32).max
    assert round_tensor(x, "fp64", saturate=True).tolist() == [largest, -largest, 1.0]
    assert round_tensor(x, "fp32", saturate=True).tolist() == [largest, -largest, 1.0]
    assert round_tensor(x, "fp32").tolist() == x.tolist()


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_only_floating_point_tensors_are_rounded(dtype):
    with pytest.raises(FormatError) as caught:
        round_tensor(torch.zeros(2, 3).to(dtype), "bf16")
    assert "only floating-point tensors can be rounded" in str(caught.value)
    assert f"got: a tensor of dtype {dtype} and shape (2, 3)" in str(caught.value)
