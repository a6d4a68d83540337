"""The compiled pass against fp64, and how it goes through rows."""

from __future__ import annotations

import math

import pytest
import torch

from roundoff.compare.tensors import metric_rows as rows
from roundoff.compare.tensors.exact import Totals, add_exact, grid_of
from roundoff.compare.tensors.metric_kernel import WIDE
from roundoff.compare.tensors.metric_rows import add_rows
from roundoff.compare.tensors.metrics import measure
from roundoff.record.statistics_kernel import ROW, compiled

#: As in test_metrics.py: fp32 sums of a row.
ROWS = 2.0**-17
NORMS = (
    "rel_l2",
    "mean_abs",
    "mean_rel",
    "ulp_mean",
    "l2_reference",
    "l2_candidate",
    "l2_error",
)


def without_pass(reference, candidate):
    totals = Totals()
    add_exact(
        totals, reference, candidate, 0, grid_of(reference.dtype, candidate.dtype)
    )
    return totals


def agree(r, c):
    quick = Totals()
    if not add_rows(quick, r, c, grid_of(r.dtype, c.dtype)):
        pytest.skip("no compiled pass on this machine")
    slow = without_pass(r, c)
    for name in ("compared", "same", "lone", "solid", "over", "place", "max_abs"):
        assert getattr(quick, name) == getattr(slow, name), name
    assert quick.max_ulp == pytest.approx(
        slow.max_ulp, rel=2.0**-23
    )  # rounded to fp32, across zero twice
    for name in ("abs", "rel", "ulp", "max_rel"):
        assert getattr(quick, name) == pytest.approx(getattr(slow, name), rel=ROWS), (
            name
        )
    for name in ("r", "c", "d"):
        assert math.hypot(*getattr(quick, name)) == pytest.approx(
            math.hypot(*getattr(slow, name)), rel=ROWS
        )


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2], ids=str
)
@pytest.mark.parametrize("size", [2500, 150_000])
def test_the_compiled_pass_agrees_with_fp64(dtype, size):
    torch.manual_seed(1)
    r = torch.randn(size) * torch.exp(torch.randn(size) * 3)
    c = torch.where(torch.rand(size) < 0.5, r, r * (1 + 0.1 * torch.randn(size)))
    r[::7], c[::14] = 0.0, 0.0
    r, c = r.to(dtype), c.to(dtype)
    agree(r, c)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize(
    "more", [0, 1, 3, WIDE * ROW - 1, WIDE * ROW, WIDE * ROW + 5], ids=str
)
def test_blocks_of_any_number_of_rows(dtype, more, monkeypatch):
    """A last block of one row, of a part of one, and of none."""
    monkeypatch.setattr(rows, "_BLOCK", 2**16)
    monkeypatch.setattr(rows, "_WIDENED", 2**16)
    torch.manual_seed(1)
    r = torch.randn(2**17 + more)
    agree(r.to(dtype), (r * (1 + 0.1 * torch.randn(len(r)))).to(dtype))


@pytest.mark.parametrize("every", [1_000_000, 30_000, 9_000])
def test_rows_that_the_pass_cannot_sum(every):
    """NaN, values whose squares fp32 cannot hold, and parts that only one side has written."""
    torch.manual_seed(1)
    r = torch.randn(150_000)
    c = r * 1.01
    r[5_000::every], c[60_000] = math.nan, math.inf
    r[70_000:75_000] *= 1e-30
    c[70_000:80_000] *= 1e-30
    r[90_000:100_000], c[100_000:110_000], r[110_000:120_000], c[110_000:120_000] = (
        0,
        0,
        0,
        0,
    )
    agree(r, c)
    agree(c, r)


def test_without_a_compiler_the_same_metrics(monkeypatch):
    torch.manual_seed(0)
    values = 3 * torch.randn(5000)
    reference, candidate = values.bfloat16(), values * (1 + 0.01 * torch.randn(5000))
    expected = measure(reference, candidate)
    monkeypatch.setenv("ROUNDOFF_KERNEL", "eager")
    compiled.cache_clear()
    found = measure(reference, candidate)
    compiled.cache_clear()
    for name in NORMS:
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=ROWS)
