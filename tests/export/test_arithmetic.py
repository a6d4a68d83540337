"""Plain arithmetic against independent rounding (ml_dtypes), and positions of codes against enumeration."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from roundoff.export.onnx.arithmetic import plainly, rounded
from roundoff.export.onnx.codes import why_not_expressed
from roundoff.export.onnx.differences import Power, code_steps
from roundoff.formats import (
    PerAxis,
    PerGroup,
    PerTensor,
    PerToken,
    QParams,
    parse_format,
)
from roundoff.ops.calls import Operand
from roundoff.quantize.quantizer import Quantizer

FLOATS = {
    "fp8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "bf16": ml_dtypes.bfloat16,
}


def numbers() -> torch.Tensor:
    """Every 4099th float32 between 2**-30 and 2**10, both signs, powers of two with their neighbours, and zero."""
    bits = (
        torch.arange(0x30800000, 0x44800000, 4099, dtype=torch.int64)
        .to(torch.int32)
        .view(torch.float32)
    )
    powers = torch.tensor([2.0**e for e in range(-30, 10)])
    near = torch.cat(
        [
            powers,
            torch.nextafter(powers, powers * 2),
            torch.nextafter(powers, powers * 0),
        ]
    )
    both = torch.cat([bits, near, torch.zeros(1)])
    return torch.cat([both, -both])


@pytest.mark.parametrize("name", FLOATS)
def test_rounding_by_arithmetic_is_that_of_ml_dtypes(name):
    fmt, x = parse_format(name), numbers()
    x = x.clamp(fmt.min_finite, fmt.max_finite)
    wanted = x.numpy().astype(FLOATS[name]).astype(np.float32)
    assert torch.equal(rounded(x, fmt), torch.from_numpy(wanted))


def test_what_is_out_of_range_saturates_and_nan_stays():
    fmt = parse_format("fp8_e4m3fn")
    found = rounded(torch.tensor([1e9, -1e9, float("nan")]), fmt)
    assert found[:2].tolist() == [448.0, -448.0]
    assert bool(found[2].isnan())


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "mxint8", "int8_asym", "fp8_e5m2"])
def test_dynamic_quantizers_in_plain_arithmetic_are_the_quantizers(name):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) * 3
    quantizer = Quantizer(
        "x", parse_format(name), Operand(0, "activation", -1, 0, frozenset()), None
    )
    assert torch.equal(plainly(x, quantizer), quantizer(x))


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e5m2", "fp4_e2m1"])
def test_neighbouring_values_of_a_format_are_one_code_apart(name):
    fmt = parse_format(name)
    every = (
        np.arange(256 if fmt.width == 8 else 16, dtype=np.uint8)
        .view(FLOATS[name])
        .astype(np.float32)
    )
    values = torch.from_numpy(
        np.unique(every[np.isfinite(every)])
    )  # 0 once, in rising order
    quantizer = Quantizer(
        "x", fmt, Operand(0, "activation", -1, 0, frozenset()), PerTensor()
    )
    quantizer.set_(QParams(torch.tensor([0.3]), None, PerTensor()))
    scaled = values * 0.3
    assert code_steps(scaled[1:], scaled[:-1], quantizer).unique().tolist() == [1]
    assert code_steps(scaled[5:], scaled[:-5], quantizer).unique().tolist() == [5]


def test_power_without_noise_is_infinite_and_with_nan_lost():
    power = Power()
    power.add(torch.ones(3), torch.ones(3))
    assert power.db == float("inf")
    power.add(torch.tensor([1.1]), torch.tensor([1.0]))
    # noise 0.1**2 in a signal of 4, in fp32: 2**-24 / 0.1 of the difference
    assert power.db == pytest.approx(-10 * np.log10(0.01 / 4), abs=1e-4)
    power.add(torch.tensor([float("nan")]), torch.tensor([1.0]))
    assert power.db == -float("inf")


@pytest.mark.parametrize(
    ("granularity", "reduce"),
    [
        (PerTensor(), -1),
        (PerAxis(1), -1),
        (PerToken(), -1),
        (PerToken(), -2),
        (PerGroup(8), -1),
    ],
)
@pytest.mark.parametrize("name", ["int8_asym", "int4", "fp8_e4m3fn"])
def test_dynamic_granularities_in_plain_arithmetic_are_the_quantizers(
    granularity, reduce, name
):
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)) * 3
    fmt = parse_format(name)
    quantizer = Quantizer(
        "x",
        fmt,
        Operand(0, "activation", reduce, 0, frozenset()),
        granularity,
        dynamic=True,
    )
    assert torch.equal(plainly(x, quantizer), quantizer(x))
    deployable = name == "int8_asym" and granularity == PerTensor()
    assert (why_not_expressed(quantizer) is None) == deployable
