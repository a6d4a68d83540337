"""Rounding with scales from the largest magnitude: bit for bit what the general way gives."""

import math

import pytest
import torch

from roundoff.formats import (
    PerAxis,
    PerGroup,
    PerTensor,
    PerToken,
    amax,
    choose_qparams,
    fake_quantize,
    parse_format,
    round_tensor,
)
from roundoff.formats.amax import round_by_amax

FORMATS = ("int8", "int4", "int2", "fp8_e4m3fn", "fp8_e5m2", "hif8")
GRANULARITIES = (PerTensor(), PerAxis(0), PerAxis(-1), PerToken(), PerGroup(2))
LARGEST = torch.finfo(torch.float32).max


def _cases() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(6, 8, generator=generator)
    spread = normal * 10.0 ** torch.randint(-38, 38, (6, 8), generator=generator)
    rows = normal * torch.logspace(-45, 38, 6)[:, None]
    rows[2] = 0.0
    rows[3] = -LARGEST
    return {
        "normal": normal,
        "spread": spread,
        "rows of zeros, of subnormals, of the largest number": rows,
        "zeros": torch.zeros(6, 8),
        "negative zeros": -torch.zeros(6, 8),
        "largest": torch.full((6, 8), LARGEST),
        "not contiguous": normal.T.contiguous().T,
    }


@pytest.mark.parametrize("small", [amax.SMALL, 0], ids=["small", "large"])
@pytest.mark.parametrize("granularity", GRANULARITIES, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_the_bits_are_those_of_the_general_way(
    name, granularity, small, monkeypatch
) -> None:
    monkeypatch.setattr(amax, "SMALL", small)
    fmt = parse_format(name)
    for case, x in _cases().items():
        general = fake_quantize(x, choose_qparams(x, fmt, granularity), fmt)
        quick = round_by_amax(x, fmt, granularity)
        assert quick is not None, case
        same = quick.view(torch.int32) == general.view(torch.int32)
        assert bool(same.all()), case


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_go_the_general_way(value: float) -> None:
    fmt = parse_format("int8")
    x = torch.tensor([[1.0, value], [0.5, -0.25]])
    for granularity in (PerTensor(), PerAxis(0)):
        assert round_by_amax(x, fmt, granularity) is None
        general = fake_quantize(x, choose_qparams(x, fmt, granularity), fmt)
        rounded = round_tensor(x, fmt, granularity=granularity)
        torch.testing.assert_close(rounded, general, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["int8_asym", "ternary"])
def test_other_scales_go_the_general_way(name: str) -> None:
    assert round_by_amax(torch.ones(3), parse_format(name), PerTensor()) is None


def test_other_dtypes_and_empty_tensors_go_the_general_way() -> None:
    fmt = parse_format("int8")
    assert round_by_amax(torch.ones(3).double(), fmt, PerTensor()) is None
    assert round_by_amax(torch.ones(0), fmt, PerTensor()) is None
    assert round_tensor(torch.ones(0), fmt, granularity=PerTensor()).shape == (0,)


def test_the_tensor_stays_as_it_is() -> None:
    x = torch.randn(4, 4)
    before = x.clone()
    for granularity in (PerTensor(), PerAxis(0)):
        round_tensor(x, "int8", granularity=granularity)
        assert torch.equal(x, before)
