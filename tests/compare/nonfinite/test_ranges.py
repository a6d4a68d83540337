"""Bounds of formats, shares beyond them, margins and loss scales, against ml_dtypes, torch.finfo and numpy."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.compare.nonfinite.loss_scale import power_below
from roundoff.compare.nonfinite.overflow import trace_overflow
from roundoff.errors import FormatError
from roundoff.formats import FORMATS, round_tensor
from roundoff.formats.limits import LARGEST, limits, plain_formats

CASTS = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}


def row(values, *, sample=None, dtype="float32", **about):
    values = np.asarray(values, dtype=np.float64)
    finite = values[np.isfinite(values)]
    taken = (
        values.ravel()
        if sample is None
        else values.ravel()[:: -(-values.size // sample)]
    )
    nonzero = np.abs(taken[np.isfinite(taken) & (taken != 0)])
    exponents = np.frexp(nonzero)[1] - 1
    low = int(exponents.min()) if exponents.size else 0
    return {
        "record": 0,
        "call": 0,
        "operator": "mul",
        "inputs": [],
        "dtype": dtype,
        "numel": values.size,
        "shape": list(values.shape),
        "min": finite.min() if finite.size else None,
        "max": finite.max() if finite.size else None,
        "nan": int(np.isnan(values).sum()),
        "posinf": int((values == np.inf).sum()),
        "neginf": int((values == -np.inf).sum()),
        "zero": int((values == 0).sum()),
        "exponent": low,
        "sampled": taken.size,
        "phase": "forward",
        "exponents": np.bincount(exponents - low).tolist() if exponents.size else [],
        "step": 0,
    } | about


def measured(*rows, **options):
    return trace_overflow(pl.DataFrame(list(rows), infer_schema_length=None), **options)


def rounded_shares(values, fmt):
    """By casting: (overflow, subnormal, zero) of the finite nonzero values."""
    values = np.abs(values[np.isfinite(values) & (values != 0)])
    with np.errstate(over="ignore"):
        cast = values.astype(CASTS[fmt])
    back = cast.astype(np.float64)
    info = ml_dtypes.finfo(CASTS[fmt])
    lost = ~np.isfinite(back)
    return (
        lost.mean(),
        ((back < float(info.smallest_normal)) & (back > 0)).mean(),
        (back == 0).mean(),
    )


@pytest.mark.parametrize("fmt", CASTS)
def test_bounds_are_exact(fmt):
    cast = lambda x: float(np.float32(x).astype(CASTS[fmt]))  # noqa: E731
    ends, info = limits(fmt), ml_dtypes.finfo(CASTS[fmt])

    # ml_dtypes rounds fp64 by way of fp32, so neighbours are those in fp32
    def around(x):
        return [np.nextafter(np.float32(x), np.float32(to)) for to in (0, x, np.inf)]

    with np.errstate(over="ignore"):
        assert [math.isfinite(cast(x)) for x in around(ends.overflow)] == [
            True,
            not ends.overflow_tie,
            False,
        ]
    assert [cast(x) >= float(info.smallest_normal) for x in around(ends.normal)] == [
        False,
        True,
        True,
    ]
    assert [cast(x) > 0 for x in around(ends.zero)] == [False, not ends.zero_tie, True]


def rounded(value, form, saturate=None):
    """One fp64 value in a format; tests/formats compares this with a scalar oracle."""
    return round_tensor(
        torch.tensor(value, dtype=torch.float64), form, saturate=saturate
    ).item()


@pytest.mark.parametrize("fmt", sorted(set(plain_formats()) - {"fp64"}))
def test_bounds_of_all_formats_are_those_of_rounding(fmt):
    ends, form = limits(fmt), FORMATS[fmt]
    saturate = None if form.has_inf or form.has_nan else True
    for x, out in (
        (ends.overflow, ends.overflow_tie),
        (math.nextafter(ends.overflow, 0), False),
    ):
        if saturate is None:
            assert math.isfinite(rounded(x, form, saturate=False)) != out
    assert (rounded(ends.zero, form) == 0) == ends.zero_tie
    assert rounded(math.nextafter(ends.zero, math.inf), form) > 0
    assert (
        rounded(ends.normal, form) >= form.smallest_normal or ends.normal == ends.zero
    )
    assert rounded(math.nextafter(ends.normal, 0), form) < form.smallest_normal


def test_largest_values_are_those_of_torch():
    for name, largest in LARGEST.items():
        assert torch.finfo(getattr(torch, name)).max == largest


@pytest.mark.parametrize("fmt", ["int8", "mxfp8_e4m3", "e8m0"])
def test_formats_with_scales_are_refused(fmt):
    with pytest.raises(FormatError, match="scale"):
        measured(row([1.0]), formats=[fmt])


NUMBERS = st.floats(-1e6, 1e6, width=32, allow_subnormal=False) | st.sampled_from(
    [
        0.0,
        math.inf,
        math.nan,
        65504.0,
        65519.0,
        65520.0,
        448.0,
        464.0,
        2.0**-25,
        2.0**-24,
        2.0**-14,
        2.0**-17,
        61440.0,
    ]
)


@given(st.lists(NUMBERS, min_size=1, max_size=40), st.sampled_from(list(CASTS)))
@settings(max_examples=300, deadline=None)
def test_shares_hold_the_exact_ones_when_the_sample_is_everything(values, fmt):
    values = np.array(values)
    if not (np.isfinite(values) & (values != 0)).any():
        return
    table = measured(row(values), formats=[fmt]).format_table
    for fate, exact in zip(
        ("overflow", "subnormal", "zero"), rounded_shares(values, fmt), strict=True
    ):
        (found,) = table.filter(pl.col("fate") == fate).to_dicts()
        # sums of at most 40 shares: 1e-12 is far above their rounding
        assert found["low"] - 1e-12 <= exact <= found["high"] + 1e-12
        assert found["low"] - 1e-12 <= found["share"] <= found["high"] + 1e-12
        assert found["stderr"] == 0


@pytest.mark.parametrize("fmt", ["fp16", "fp8_e4m3fn", "fp8_e5m2"])
@pytest.mark.parametrize("spread", [2.0**-15, 1.0, 300.0, 40000.0])
def test_shares_of_a_sample_are_within_their_standard_error(fmt, spread):
    misses = 0
    for seed in range(20):
        values = np.random.default_rng(seed).normal(0, spread, 2**16)
        table = measured(row(values, sample=512), formats=[fmt]).format_table
        for found, exact in zip(
            table.to_dicts(), rounded_shares(values, fmt), strict=True
        ):
            # a bin that the bound cuts adds what the density changes in it: at most a tenth of its values here
            room = 3 * found["stderr"] + 0.1 * (found["high"] - found["low"]) + 3 / 512
            misses += abs(found["share"] - exact) > room
    assert misses <= 2  # 60 estimates at 3 sigma: 0.2 expected


def test_an_outlier_that_the_sample_missed_counts_once():
    values = np.ones(10_000)
    values[1] = 70000.0
    (over, *_) = measured(
        row(values, sample=100), formats=["fp16"]
    ).format_table.to_dicts()
    assert over["share"] == pytest.approx(1e-4)
    assert over["low"] == pytest.approx(1e-4)
    assert over["site"] == "/mul"


def test_phases_are_apart_and_weighted_by_size():
    rows = (
        row([1e5] * 10, record=0),
        row([1.0] * 30, record=1, index=1),
        row([1e-9] * 4, record=2, phase="backward"),
        row([1e5] * 10, record=3, view_of=0),
    )
    table = measured(*rows, formats=["fp16"]).format_table
    shares = {(r["phase"], r["fate"]): r["share"] for r in table.to_dicts()}
    assert shares["forward", "overflow"] == 0.25
    assert shares["backward", "zero"] == 1.0
    assert shares["backward", "overflow"] == 0.0


def test_margins():
    rows = (
        row([65504.0, 1.0], dtype="float16", record=0, operator="a"),
        row([8188.0], dtype="float16", record=1, operator="b"),
        row([-2.0], dtype="float16", record=2, operator="c"),
        row([0.0], dtype="float16", record=3, operator="d"),
        row([448.0], dtype="float8_e4m3fn", record=4, operator="e"),
        row([1, 2], dtype="int64", record=5, operator="f"),
        row([-4.0, math.inf], dtype="float16", record=6, step=1, operator="c"),
    )
    table = measured(*rows, within=3).margin_table
    found = {r["site"]: r for r in table.to_dicts()}
    assert table["site"].to_list() == ["/a", "/e", "/b", "/c", "/d"]
    assert [found[s]["margin"] for s in ("/a", "/e", "/b")] == pytest.approx([0, 0, 3])
    assert [found[s]["saturated"] for s in ("/a", "/e", "/b", "/c")] == [1, 1, 0, 0]
    assert [found[s]["latent"] for s in ("/a", "/b", "/c", "/d")] == [
        True,
        True,
        False,
        False,
    ]
    assert (found["/c"]["amax"], found["/c"]["step"], found["/c"]["infinite"]) == (
        4.0,
        1,
        1,
    )
    assert found["/d"]["margin"] is None


@given(st.floats(1e-10, 1e10), st.floats(1e-25, 1e10))
def test_power_below_is_the_largest(limit, value):
    scale = power_below(limit, value)
    assert value * scale < limit <= value * (2 * scale)
    assert math.frexp(scale)[0] == 0.5


@given(
    st.lists(st.floats(2.0**-40, 100.0, width=32), min_size=1, max_size=30),
    st.integers(0, 3),
)
@settings(deadline=None)
def test_the_loss_scale_is_the_largest_that_fits_and_says_what_is_lost(
    gradients, margin
):
    gradients = np.array(gradients)
    found = measured(row(gradients, phase="backward"), margin=margin).loss_scale
    top = 65504.0 / 2**margin
    assert (gradients * found.scale < top).all()
    assert not (gradients * found.scale * 2 < top).all()
    for scale, share in ((1.0, found.zero_at_1), (found.scale, found.zero_at_scale)):
        exact = ((gradients * scale).astype(np.float16) == 0).mean()
        ties = (
            gradients * scale == 2.0**-25
        ).mean()  # on the bound: in the bin above it
        assert share == pytest.approx(exact - ties, abs=1e-9) or share == pytest.approx(
            exact, abs=1e-9
        )


def test_a_recorded_loss_scale_is_divided_out():
    gradients = np.geomspace(1e-9, 1e-3, 64)
    plain = measured(row(gradients, phase="backward")).loss_scale
    scalars = pl.DataFrame({"step": [0], "name": ["loss_scale"], "value": [1024.0]})
    scaled = measured(
        row(gradients * 1024, phase="backward"), scalars=scalars
    ).loss_scale
    assert (scaled.scale, scaled.recorded, plain.recorded) == (
        plain.scale,
        1024.0,
        None,
    )
    assert scaled.largest == pytest.approx(1e-3)
    assert scaled.zero_at_1 == pytest.approx(plain.zero_at_1)
    assert plain.zero_at_1 > 0.1
    assert plain.zero_at_scale < plain.zero_at_1


def test_a_scale_that_overflowed_caps_the_recommendation():
    rows = (
        row([1e-4], phase="backward", record=0),
        row([1e-4, math.inf], phase="backward", record=1, dtype="float16"),
    )
    scalars = pl.DataFrame({"step": [0], "name": ["loss_scale"], "value": [65536.0]})
    found = measured(*rows, scalars=scalars).loss_scale
    assert (found.scale, found.overflowed) == (32768.0, 1)
    assert "65536" in found.note


def test_the_seed_of_the_backward_pass_does_not_count():
    rows = (
        row(1.0, phase="backward", record=0),
        row(512.0, phase="backward", record=1),
        row([2.0**-10] * 4, phase="backward", record=2),
        row(2.0**-8, phase="backward", record=3),
    )
    found = measured(*rows, margin=0).loss_scale
    assert found.largest == 2.0**-8
    assert found.scale == 2.0**23
    assert (
        measured(row([0.0], phase="backward")).loss_scale.note
        == "every gradient is zero"
    )
