"""Gradients of LSQ, LSQ+, ULQ, PACT and straight-through against their papers' formulas in numpy, float64, row by row, and
against central differences of the forward pass in which each rounding is replaced by adding what it added."""

import numpy as np
import pytest
import torch

from roundoff.formats import (
    PerAxis,
    PerGroup,
    PerTensor,
    QParams,
    fake_quantize,
    integer,
)
from roundoff.quantize.qat.learners import make_learner

SHAPE = (4, 6, 2)
#: granularity and how x is laid out in rows of elements that share a scale
WAYS = {
    "tensor": (PerTensor(), lambda x: x.reshape(1, -1)),
    "axis": (PerAxis(0), lambda x: x.reshape(4, -1)),
    "group": (
        PerGroup(3, axis=1),
        lambda x: x.reshape(4, 2, 3, 2).transpose(0, 1, 3, 2).reshape(16, 3),
    ),
}
ACTIVATION_WAYS = {
    "tensor": WAYS["tensor"],
    "axis": (PerAxis(1), lambda x: x.transpose(1, 0, 2).reshape(6, -1)),
}


def draw(seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(0.3, 1.0, SHAPE), rng.normal(size=SHAPE)


def scale_shape(granularity, rows):
    shape, dims = granularity.split(SHAPE)
    view = [1 if i in dims else n for i, n in enumerate(shape)]
    assert int(np.prod(view)) == rows
    return view


def learn(
    name, fmt, granularity, rows, scales, zero_points=None, role="weight", **parameters
):
    """A learner in float64 whose row i has the given scale and zero point."""
    view = scale_shape(granularity, rows)
    zero_point = (
        None
        if zero_points is None
        else torch.tensor(zero_points, dtype=torch.float64).reshape(view)
    )
    qparams = QParams(
        torch.tensor(scales, dtype=torch.float64).reshape(view), zero_point, granularity
    )
    return make_learner(name, fmt, granularity, qparams, role=role, **parameters)


def gradients(learner, x, g):
    leaf = torch.tensor(x, requires_grad=True)
    result = learner(leaf)
    result.backward(torch.tensor(g))
    assert torch.equal(result, fake_quantize(leaf, learner.qparams(), learner.fmt))
    return (
        result.detach().numpy(),
        leaf.grad.numpy(),
        {n: p.grad.flatten().numpy() for n, p in learner.named_parameters()},
    )


def close(actual, expected, count=48):
    # a sum of `count` products of numbers below 20, each with a few roundings in float64
    np.testing.assert_allclose(actual, expected, rtol=0, atol=count * 20 * 4 * 2.0**-52)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("full", [True, False])
def test_lsq_is_equations_1_to_3(way, full):
    granularity, rows_of = WAYS[way]
    x, g = draw()
    fmt = integer(3, narrow_range=not full)
    low, high = (-4.0 if full else -3.0), 3.0
    rows, upstream = rows_of(x), rows_of(g)
    scales = np.linspace(0.2, 0.4, len(rows))
    value, by_x, by = gradients(learn("lsq", fmt, granularity, len(rows), scales), x, g)
    v = rows / scales[:, None]
    inside = (v > low) & (v < high)
    assert 0 < inside.sum() < inside.size
    close(rows_of(value), np.clip(np.round(v), low, high) * scales[:, None])
    close(rows_of(by_x), upstream * inside)
    slope = np.where(inside, np.round(v) - v, np.where(v >= high, high, low))
    close(
        by["scale"], (upstream * slope).sum(1) / np.sqrt(rows.shape[1] * high)
    )  # Qp of section 2.2: the largest code, 3


def differences(surrogate, parameter, upstream, h=1e-6):
    """Central differences of ``sum(upstream * surrogate(parameter))``, row by row."""
    return (
        (upstream * (surrogate(parameter + h) - surrogate(parameter - h))).sum(1)
    ) / (2 * h)


def near(actual, expected):
    # piecewise smooth: truncation h**2 = 1e-12 times third derivatives (below 1e3), cancellation 48 * 20 * 2**-52 / h
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", ACTIVATION_WAYS)
def test_lsq_with_a_zero_point_is_the_derivative_with_roundings_held(way):
    granularity, rows_of = ACTIVATION_WAYS[way]
    x, g = draw(1)
    rows, upstream = rows_of(x), rows_of(g)
    scales, zero = np.linspace(0.1, 0.2, len(rows)), np.full(len(rows), -5.0)
    learner = learn(
        "lsq", "int4_asym", granularity, len(rows), scales, zero, role="activation"
    )
    _, by_x, by = gradients(learner, x, g)
    low, high = -8.0 + 5, 7.0 + 5
    v = rows / scales[:, None]
    held = np.clip(np.round(v), low, high) - np.clip(v, low, high)
    per_sample = rows.shape[1] // SHAPE[0]  # N of an activation: elements of one sample
    expected = differences(
        lambda s: s[:, None] * (np.clip(rows / s[:, None], low, high) + held),
        scales,
        upstream,
    )
    near(by["scale"], expected / np.sqrt(per_sample * 12.0))
    close(rows_of(by_x), upstream * ((v > low) & (v < high)))
    np.testing.assert_array_equal(
        learner.qparams().zero_point.flatten(), zero
    )  # it is no parameter


@pytest.mark.parametrize("way", WAYS)
def test_lsq_plus_is_the_papers_derivative(way):
    granularity, rows_of = WAYS[way]
    x, g = draw(2)
    rows, upstream = rows_of(x), rows_of(g)
    scales, zero = (
        np.linspace(0.1, 0.2, len(rows)),
        np.round(np.linspace(-5, 4, len(rows))),
    )
    offset = -zero * scales
    _, by_x, by = gradients(
        learn("lsq+", "int4_asym", granularity, len(rows), scales, zero), x, g
    )

    def codes(s, b):
        return (rows - b[:, None]) / s[:, None]

    held = np.clip(np.round(codes(scales, offset)), -8, 7) - np.clip(
        codes(scales, offset), -8, 7
    )

    def surrogate(s, b):
        return s[:, None] * (np.clip(codes(s, b), -8, 7) + held) + b[:, None]

    factor = np.sqrt(rows.shape[1] * 15.0)
    near(
        by["scale"],
        differences(lambda s: surrogate(s, offset), scales, upstream) / factor,
    )
    near(
        by["offset"],
        differences(lambda b: surrogate(scales, b), offset, upstream) / factor,
    )
    inside = (codes(scales, offset) > -8) & (codes(scales, offset) < 7)
    close(rows_of(by_x), upstream * inside)


def test_lsq_plus_rounds_the_offset_to_a_code():
    learner = learn("lsq+", "int4_asym", PerTensor(), 1, [0.25], [-8.0])
    with torch.no_grad():
        learner.offset.add_(0.1)
    found = learner.qparams()
    assert found.zero_point.item() == round(-2.1 / 0.25) == -8
    with torch.no_grad():
        learner.offset.sub_(0.5)  # 1.6 / 0.25 = 6.4
    assert learner.qparams().zero_point.item() == -6
    assert (
        learner(torch.zeros(3, dtype=torch.float64).reshape(3, 1, 1)).abs().max() == 0
    )  # real 0 stays exact


@pytest.mark.parametrize("way", ACTIVATION_WAYS)
def test_ulq_is_the_published_gradient_and_the_derivative_with_roundings_held(way):
    granularity, rows_of = ACTIVATION_WAYS[way]
    x, g = draw(3)
    rows, upstream = rows_of(x), rows_of(g)
    scales, zero = np.linspace(0.1, 0.15, len(rows)), np.full(len(rows), -3.0)
    learner = learn(
        "ulq", "int4_asym", granularity, len(rows), scales, zero, role="activation"
    )
    with torch.no_grad():
        learner.clip_max += (
            0.031  # so that real 0 lies between codes and the zero point rounds
        )
    high = learner.clip_max.detach().flatten().numpy().copy()
    low = learner.clip_min.detach().flatten().numpy().copy()
    value, by_x, by = gradients(learner, x, g)
    s = (high - low) / 15
    z = np.round(-8 - low / s)
    close(
        rows_of(value),
        (np.clip(np.round(rows / s[:, None]) + z[:, None], -8, 7) - z[:, None])
        * s[:, None],
    )
    above, below = rows > high[:, None], rows < low[:, None]
    assert above.any()
    assert below.any()
    close(rows_of(by_x), upstream * ~(above | below))
    v = np.clip(rows, low[:, None], high[:, None]) / s[:, None]
    e = (np.round(v) - v) / 15
    close(by["clip_max"], (upstream * (e + above)).sum(1))
    close(by["clip_min"], (upstream * (below - e)).sum(1))

    def surrogate(lo, hi):
        return np.clip(rows, lo[:, None], hi[:, None]) + ((hi - lo) / 15)[:, None] * (
            np.round(v) - v
        )

    near(by["clip_max"], differences(lambda hi: surrogate(low, hi), high, upstream))
    near(by["clip_min"], differences(lambda lo: surrogate(lo, high), low, upstream))


def test_ulq_with_a_fixed_minimum_learns_only_the_maximum():
    learner = make_learner("ulq", "int8_asym", role="activation", fixed_min=True)
    learner(torch.rand(4, 3) + 0.5).sum().backward()
    assert learner.clip_min.item() == 0
    assert learner.clip_min.grad is None
    assert learner.clip_max.grad is not None
    learner.freeze()
    learner.freeze(False)
    assert [p.requires_grad for p in (learner.clip_max, learner.clip_min)] == [
        True,
        False,
    ]


@pytest.mark.parametrize("way", ACTIVATION_WAYS)
def test_pact_is_equations_1_to_3(way):
    granularity, rows_of = ACTIVATION_WAYS[way]
    x, g = draw(4)
    rows, upstream = rows_of(x), rows_of(g)
    alphas = np.linspace(0.7, 1.1, len(rows))
    learner = learn(
        "pact",
        "int4_asym",
        granularity,
        len(rows),
        alphas / 15,
        np.full(len(rows), -8.0),
        role="activation",
    )
    value, by_x, by = gradients(learner, x, g)
    a = alphas[:, None]
    y = 0.5 * (np.abs(rows) - np.abs(rows - a) + a)  # eq. 1
    close(rows_of(value), np.round(y * (15 / a)) * a / 15)  # eq. 2
    close(by["alpha"], (upstream * (rows >= a)).sum(1))  # eq. 3
    close(rows_of(by_x), upstream * ((rows >= 0) & (rows < a)))
    near(
        by["alpha"],
        differences(lambda p: np.clip(rows, 0, p[:, None]), alphas, upstream),
    )


def test_saturated_elements_have_the_derivative_of_the_forward_pass_itself():
    """Where x is far outside, the forward pass is smooth in its parameters: plain differences of it, rounding and all."""
    x = torch.tensor([[9.0, -9.0]], dtype=torch.float64)
    for name, fmt, parameter in [
        ("lsq", "int4", "scale"),
        ("lsq+", "int4_asym", "scale"),
        ("pact", "int4_asym", "alpha"),
    ]:
        zero = None if fmt == "int4" else torch.tensor(-8.0, dtype=torch.float64)
        role = "weight" if name == "lsq" else "activation"
        learner = make_learner(
            name,
            fmt,
            None,
            QParams(torch.tensor(0.25, dtype=torch.float64), zero),
            role=role,
        )
        learner(x)[0, 0].backward()
        grad = getattr(learner, parameter).grad.item()
        found = []
        for step in (1e-6, -2e-6):
            with torch.no_grad():
                getattr(learner, parameter).add_(step)
            found.append(learner(x)[0, 0].item())
        factor = {"lsq": np.sqrt(2 * 7), "lsq+": np.sqrt(2 * 15), "pact": 1.0}[name]
        ends = {"lsq": 7, "lsq+": 7, "pact": 1}
        slope = (found[0] - found[1]) / 2e-6
        # lsq+ holds its offset, of which the zero point is only the rounding: its plain slope is the code minus that
        assert slope == pytest.approx(
            ends[name] + (8 if name == "lsq+" else 0), abs=1e-8
        )
        assert grad * factor == pytest.approx(ends[name], abs=1e-9)


@pytest.mark.parametrize("fmt", ["int8", "int8_asym"])
def test_straight_through_is_torchs_fake_quantize(fmt):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 7, generator=generator) * 3
    g = torch.randn(5, 7, generator=generator)
    scale = torch.rand(5, generator=generator).mul(0.02).add(0.005)
    scale = torch.exp2(
        torch.log2(scale).floor()
    )  # powers of two: torch multiplies by 1 / scale where we divide
    zero = (
        torch.tensor([0, -100, 3, 50, 127])
        if fmt == "int8_asym"
        else torch.zeros(5, dtype=torch.int32)
    )
    low = -128 if fmt == "int8_asym" else -127
    leaf = x.clone().requires_grad_()
    expected = torch.fake_quantize_per_channel_affine(
        leaf, scale, zero.int(), 0, low, 127
    )
    expected.backward(g)
    qparams = QParams(
        scale[:, None],
        zero[:, None].float() if fmt == "int8_asym" else None,
        PerAxis(0),
    )
    ours = x.clone().requires_grad_()
    result = make_learner("ste", fmt, PerAxis(0), qparams)(ours)
    result.backward(g)
    assert torch.equal(result, expected.detach())
    assert torch.equal(ours.grad, leaf.grad)
    assert 0 < (ours.grad == 0).sum() < 35


def test_lsq_is_torchs_learnable_fake_quantize():
    """torch's own counts what is outside by rounded codes; the data keeps away from the half step where we differ."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, generator=generator)
    scale = torch.tensor([0.0625])
    v = (x / scale).abs()
    x = x[(v < 15) | (v > 15.6)]
    g = torch.randn(len(x), generator=generator)
    factor = 1 / (len(x) * 15) ** 0.5
    leaf, s = x.clone().requires_grad_(), scale.clone().requires_grad_()
    torch._fake_quantize_learnable_per_tensor_affine(
        leaf, s, torch.zeros(1), -15, 15, factor
    ).backward(g)
    learner, ours = (
        make_learner("lsq", integer(5), None, QParams(scale)),
        x.clone().requires_grad_(),
    )
    learner(ours).backward(g)
    assert torch.equal(ours.grad, leaf.grad)
    # two orders of a sum of 64 products of numbers below 50, in fp32
    torch.testing.assert_close(
        learner.scale.grad, s.grad, rtol=0, atol=64 * 50 * factor * 2.0**-24
    )
    assert (v > 15.6).any()
