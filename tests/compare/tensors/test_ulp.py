"""Distances in ulp against exhaustive lists of codes, numpy's nextafter and exact integers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from roundoff.compare.tensors.exact import distance, grid_of
from roundoff.compare.tensors.metrics import measure

inf = math.inf
#: As in test_metrics.py: fp32 sums of a row.
ROWS = 2.0**-17


def codes(dtype):
    """Every finite number of a 8- or 16-bit format, in the order of the numbers, with -0 and +0 at one place."""
    size = torch.finfo(dtype).bits
    raw = (
        torch.arange(2**size, dtype=torch.int32)
        .to(torch.int16 if size == 16 else torch.uint8)
        .view(dtype)
    )
    values = raw.to(torch.float32).to(torch.float64).numpy()
    return np.unique(values[np.isfinite(values)] + 0.0)


SMALL = [
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]


@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_ulp_is_the_number_of_neighbours_between_any_two(dtype):
    ordered = codes(dtype)
    grid = grid_of(dtype, dtype)
    places = np.arange(len(ordered), dtype=float)
    for step in (1, 2, 37, len(ordered) // 2, len(ordered) - 1):
        found = distance(ordered[:-step], ordered[step:], grid)
        assert (found == places[step:] - places[:-step]).all()


@pytest.mark.parametrize("other", [None, torch.float32], ids=str)
@pytest.mark.parametrize("dtype", SMALL, ids=str)
def test_ulp_of_the_compiled_pass_for_every_neighbour(dtype, other):
    """Subnormals, the crossing of zero, and steps into the next binade; also where one side is fp32."""
    ordered = codes(dtype)
    values = torch.from_numpy(ordered)
    values = torch.cat([values] * (1 + 3000 // len(values)))  # enough for the pass
    values = values[: 2 * (len(values) // 2)]
    reference, candidate = values.to(dtype), values.roll(-1).to(other or dtype)
    metrics = measure(reference, candidate)
    place = np.searchsorted(ordered, values.numpy())
    expected = np.abs(place - np.roll(place, -1))
    assert metrics.ulp_max == expected.max()
    assert metrics.ulp_mean == pytest.approx(expected.mean(), rel=ROWS)
    assert metrics.ulp_share == np.mean(expected > 1)


@pytest.mark.parametrize("count", [20, 3000, 140_000])
def test_ulp_of_fp32_neighbours(count):
    """One by one with numpy's nextafter, subnormals among them, and across zero."""
    torch.manual_seed(0)
    r = (torch.randn(count) * torch.logspace(-44, 3, count)).numpy()
    r[:3] = 0.0, -1e-45, 1e-45
    once = np.nextafter(r, np.float32(inf), dtype=np.float32)
    c = once.copy()
    c[::2] = np.nextafter(once[::2], np.float32(inf))
    metrics = measure(torch.from_numpy(r), torch.from_numpy(c))
    assert (metrics.ulp_max, metrics.ulp_share, metrics.equal) == (
        2,
        np.mean(np.arange(count) % 2 == 0),
        0.0,
    )
    assert metrics.ulp_mean == 1.5


def test_ulp_of_fp64_neighbours_and_of_signs():
    r = np.array([0.0, -5e-324, 1.0, -1.0, 1e300])
    c = np.nextafter(r, inf)
    metrics = measure(torch.from_numpy(r), torch.from_numpy(c))
    assert (metrics.ulp_max, metrics.ulp_mean, metrics.max_abs) == (
        1,
        1,
        np.spacing(1e300),
    )
    one = np.float64(1).view(np.int64).item()
    assert measure(
        torch.tensor([1.0]).double(), torch.tensor([-1.0]).double()
    ).ulp_max == float(2 * one)


def test_ulp_between_formats_is_a_share_of_the_coarser_one():
    r = torch.tensor([1.0, 1.0, 2.0**-24, -1.0])
    c = torch.tensor([1 + 2.0**-8, 1 + 2.0**-7, 2.0**-25, -1.0])
    assert measure(r.to(torch.bfloat16)[:2], c[:2]).ulp_max == 1.0
    assert measure(r.to(torch.bfloat16)[:1], c[:1]).ulp_max == 0.5
    assert (
        measure(r.to(torch.float16)[2:3], c[2:3]).ulp_max == 0.5
    )  # half of fp16's smallest
    for repeat in (1, 1000):  # both ways of measuring
        metrics = measure(
            r.to(torch.float16).repeat(repeat)[2:-1], c.repeat(repeat)[2:-1]
        )
        assert metrics.ulp_max in (0.5, 8.0)


def test_signed_zeros_are_no_ulp_apart_but_not_the_same_bits():
    for repeat in (1, 3000):
        r, c = (
            torch.tensor([0.0, 1.0]).repeat(repeat),
            torch.tensor([-0.0, 1.0]).repeat(repeat),
        )
        metrics = measure(r, c)
        assert (
            metrics.equal,
            metrics.ulp_max,
            metrics.max_abs,
            metrics.rel_undefined,
        ) == (0.5, 0, 0, 0)
        assert measure(r, c.to(torch.bfloat16)).equal == 1.0  # of two dtypes, values


def signed_codes(values):
    """The numbers of fp32 in order, as 64-bit integers."""
    bits = values.numpy().view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


@pytest.mark.parametrize("size", [3000, 140_000])
@pytest.mark.parametrize("same", [0.0, 0.5], ids=str)
def test_ulp_across_zero_goes_beyond_2_to_the_31(size, same):
    """Distances of fp32 of unlike signs, as exact integers; all of them, or half beside equal values."""
    torch.manual_seed(0)
    r = torch.randn(size) * 2.0 ** torch.randint(
        -20, 50, (size,)
    )  # squares are in fp32's range
    c = torch.where(torch.rand(size) < same, r, -r * (1 + torch.rand(size)))
    apart = np.abs(signed_codes(r) - signed_codes(c))
    assert apart.max() > 2**31
    metrics = measure(r, c)
    assert metrics.ulp_max == pytest.approx(
        float(apart.max()), rel=2.0**-23
    )  # rounded to fp32, twice
    assert metrics.ulp_mean == pytest.approx(float(apart.mean()), rel=ROWS)
    assert metrics.ulp_share == np.mean(apart > 1)
    assert metrics.equal == np.mean(apart == 0)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_signed_zeros_among_many_values(dtype):
    """All pairs of signs of zero, equal values and unequal ones, in rows of every kind."""
    r = (
        torch.tensor([0.0, 0.0, -0.0, -0.0, 1.0, -1.0, 0.0, 2.0])
        .repeat(20_000)
        .to(dtype)
    )
    c = (
        torch.tensor([0.0, -0.0, 0.0, -0.0, 1.0, 1.0, -3.0, 2.0])
        .repeat(20_000)
        .to(dtype)
    )
    for n in (3000, len(r)):
        metrics = measure(r[:n], c[:n])
        assert (metrics.equal, metrics.rel_undefined, metrics.max_abs) == (
            0.5,
            n // 8,
            3.0,
        )
        assert metrics.mean_rel == pytest.approx(
            2 / 3, rel=ROWS
        )  # of r other than 0, one in three is -1 against 1
