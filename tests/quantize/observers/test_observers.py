"""What holds for every observer: names, parameters, bad input, special values, and that refused batches change nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from roundoff.errors import QuantizationError
from roundoff.formats import (
    PerAxis,
    PerGroup,
    PerTensor,
    PerToken,
    fake_quantize,
    parse_format,
)
from roundoff.quantize.observers import OBSERVERS, make_observer

NAMES = sorted(OBSERVERS)
HISTOGRAMS = sorted(set(NAMES) - {"minmax", "moving_average", "arq"})
INT8 = parse_format("int8")
X = torch.randn(200, 10, generator=torch.Generator().manual_seed(0))


def seen(name, *batches, **parameters):
    observer = make_observer(name, **parameters)
    for batch in batches:
        observer.see(batch)
    return observer


def test_names():
    assert NAMES == [
        "adjoint",
        "arq",
        "entropy",
        "hfmg",
        "ifmr",
        "isotone",
        "minmax",
        "moving_average",
        "mse",
        "percentile",
    ]
    assert all(make_observer(name).name == name for name in NAMES)


def test_unknown_name():
    with pytest.raises(QuantizationError) as caught:
        make_observer("min_max")
    assert str(caught.value) == (
        "unknown observer\n  expected: minmax, moving_average, percentile, entropy, mse, ifmr, hfmg, arq, isotone, adjoint\n"
        "  got: min_max\n  do: did you mean minmax?"
    )


def test_unknown_parameter():
    with pytest.raises(QuantizationError) as caught:
        make_observer("ifmr", search_steps=0.1)
    assert str(caught.value) == (
        "observer ifmr: unknown parameter\n"
        "  expected: search_range, search_step, max_percentile, min_percentile, both_ends, bins\n"
        "  got: search_steps\n  do: did you mean search_step?"
    )


@pytest.mark.parametrize(
    ("name", "parameter", "value"),
    [
        ("percentile", "percentile", 1.5),
        ("percentile", "percentile", math.nan),
        ("percentile", "percentile", "0.9"),
        ("moving_average", "averaging_constant", 0.0),
        ("ifmr", "search_step", 0.0),
        ("ifmr", "search_range", (1.3, 0.7)),
        ("ifmr", "max_percentile", 0.2),
        ("hfmg", "num_of_bins", 1000),
        ("mse", "bins", 100),
        ("mse", "bins", 128.0),
        ("isotone", "rows", 0),
    ],
)
def test_parameters_out_of_range(name, parameter, value):
    with pytest.raises(
        QuantizationError, match=rf"^observer {name}: {parameter} is "
    ) as caught:
        make_observer(name, **{parameter: value})
    assert caught.value.expected
    assert caught.value.got == (
        str(value) if parameter == "bins" and value == 100 else repr(value)
    )


@pytest.mark.parametrize("name", NAMES)
def test_never_fired(name):
    observer = make_observer(name)
    observer.see(torch.zeros(0, 4))
    assert observer.count == 0
    with pytest.raises(
        QuantizationError,
        match=rf"^observer {name}: the observer never fired, so there is no range\n",
    ):
        observer.qparams(INT8)


@pytest.mark.parametrize("name", NAMES)
def test_nan_and_inf_are_refused_and_change_nothing(name):
    observer, bad = seen(name, X), X.clone()
    bad[3, 4], bad[5, 6], bad[7, 8] = math.nan, math.inf, -math.inf
    before = copy.deepcopy(observer).qparams(INT8)
    with pytest.raises(QuantizationError) as caught:
        observer.see(bad)
    assert str(caught.value).startswith(
        f"observer {name}: 3 of 2000 values are NaN or Inf\n  got: a tensor of shape (200, 10)\n  do: "
    )
    assert observer.count == 2000
    assert torch.equal(observer.qparams(INT8).scale, before.scale)


@pytest.mark.parametrize("name", NAMES)
def test_empty_batches_change_nothing(name):
    observer, other = seen(name, X), seen(name, X, X[:0])
    assert torch.equal(observer.qparams(INT8).scale, other.qparams(INT8).scale)
    assert observer.count == other.count == 2000


@pytest.mark.parametrize("name", NAMES)
def test_integers_are_refused(name):
    with pytest.raises(
        QuantizationError,
        match=rf"observer {name}: a range needs floating-point values\n  got: dtype",
    ):
        seen(name, X.to(torch.int8))


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"minmax"}))
def test_per_token_is_for_minmax(name):
    with pytest.raises(
        QuantizationError,
        match=rf"^observer {name}: a token's range belongs to one batch, [^$]*use minmax",
    ):
        make_observer(name, PerToken())


@pytest.mark.parametrize("name", ["minmax", "mse"])
def test_other_channels_are_refused(name):
    observer = make_observer(name, PerAxis(1))
    observer.see(X)
    with pytest.raises(QuantizationError) as caught:
        observer.see(X[:, :5])
    assert str(caught.value).startswith(
        f"observer {name}, PerAxis(axis=1): this batch has other sets of elements than the ones before\n"
        "  expected: a scale of shape (1, 10)\n  got: one of shape (1, 5)\n  do: "
    )
    observer.see(X[:50])
    assert observer.count == 2500


@pytest.mark.parametrize("name", NAMES)
def test_batches_of_any_rank_share_one_scale(name):
    observer = seen(name, X, X[0], X[:, None])
    q = observer.qparams(INT8)
    assert q.scale.shape == ()
    for x in (X, X[0], X[:, None]):
        assert fake_quantize(x, q, INT8).shape == x.shape


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4", "ternary", "binary"])
def test_formats_with_a_rule_of_their_own(name):
    with pytest.raises(
        QuantizationError,
        match=rf"^observer mse: the scales of {name} do not come from a range\n",
    ):
        seen("mse", X).qparams(parse_format(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_range_of_zero_is_told(name):
    observer = seen(name, torch.zeros(3, 3))
    assert float(observer.qparams(INT8).scale) == 1.0
    assert observer.degenerate == "1 of 1 range zero: scale 1"
    observer.see(X)
    observer.qparams(INT8)
    assert observer.degenerate == ""


@pytest.mark.parametrize("name", NAMES)
def test_a_scale_below_the_smallest_normal_number_is_told(name):
    observer = seen(name, torch.full((3, 3), 1e-38))
    tiny = torch.finfo(torch.float32).tiny
    assert float(observer.qparams(INT8).scale) == tiny
    assert (
        observer.degenerate
        == "1 of 1 range too small: the scale would be below 1.18e-38 and is that"
    )


@pytest.mark.parametrize("fmt", ["int8", "int4_asym", "fp8_e4m3fn"])
@pytest.mark.parametrize("value", [5.0, -5.0, 3e38, -1e-30])
@pytest.mark.parametrize("name", NAMES)
def test_one_repeated_value(name, value, fmt):
    """Every observer keeps it within half a step, but for IFMR's grid of factors, which may clip by up to 1 %."""
    if (name == "arq" and fmt == "int4_asym") or (
        name == "entropy" and fmt == "fp8_e4m3fn"
    ):
        pytest.skip("no zero point, or no levels")
    x, form = torch.full((4, 2), value), parse_format(fmt)
    q = seen(name, x).qparams(form)
    y = fake_quantize(x, q, form)
    assert torch.isfinite(y).all()
    # Half a step of a 4-bit asymmetric grid over [0, |value|] is 1/30, of e4m3 2**-4.
    assert abs(float(y[0, 0]) / value - 1) <= 1 / 16 + 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_one_element(name):
    assert (
        0 < float(seen(name, torch.tensor(0.7)).qparams(INT8).scale) <= 1.5 * 0.7 / 127
    )


@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_observed_in_fp32_and_fp64_stays(name):
    x = X.to(torch.bfloat16)
    q = seen(name, x).qparams(INT8)
    assert q.scale.dtype == torch.float32
    assert torch.equal(q.scale, seen(name, x.float()).qparams(INT8).scale)
    assert seen(name, X.double()).qparams(INT8).scale.dtype == torch.float64


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_left_alone(name):
    x = X.clone().requires_grad_()
    seen(name, x)
    assert torch.equal(x, X)
    assert x.grad is None


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_too_many_sets_are_refused(name):
    if name == "isotone":
        pytest.skip("per tensor only")
    parameters = {"num_of_bins": 8192} if name == "hfmg" else {"bins": 8192}
    with pytest.raises(
        QuantizationError,
        match=r"histograms for 4096 sets .* take 4\.0 GiB\n  expected: at most 1\.0",
    ):
        seen(name, torch.ones(4096, 2), granularity=PerAxis(0), **parameters)


def test_groups():
    q = seen("mse", X, granularity=PerGroup(5)).qparams(parse_format("int4"))
    assert q.scale.shape == (200, 2, 1)
    assert fake_quantize(X, q, parse_format("int4")).shape == X.shape


def test_power_is_checked():
    observer = make_observer("adjoint")
    with pytest.raises(
        QuantizationError,
        match=r"^observer adjoint: power does not fit the tensor\n  exp.*\(200, 10\)",
    ):
        observer.see(X, torch.ones(3))
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(
            QuantizationError,
            match=r"^observer adjoint: power has negative, NaN or infinite values",
        ):
            observer.see(X, torch.full((10,), bad))
    observer.see(X, torch.ones(10))
    with pytest.raises(
        QuantizationError,
        match=r"power came with some batches only\n  expected: power\n  got: none",
    ):
        observer.see(X)
    assert observer.count == 2000
    observer.see(X[:0])


def test_no_power_at_all_keeps_the_range():
    observer = make_observer("adjoint", PerTensor())
    observer.see(X, torch.zeros(()))
    for fmt in (INT8, parse_format("int8_asym")):
        assert torch.equal(
            observer.qparams(fmt).scale, seen("minmax", X).qparams(fmt).scale
        )
