"""DoReFa, TWN, TTQ, BNN and XNOR-Net against their papers' formulas in numpy, float64."""

import numpy as np
import pytest
import torch

from roundoff.errors import QuantizationError
from roundoff.formats import (
    PerAxis,
    PerGroup,
    PerTensor,
    QParams,
    fake_quantize,
    integer,
)
from roundoff.quantize.qat.learners import make_learner
from roundoff.quantize.qat.low_bit import quantize_gradient

WAYS = {
    "tensor": (PerTensor(), lambda x: x.reshape(1, -1)),
    "axis": (PerAxis(0), lambda x: x.reshape(4, -1)),
    "group": (PerGroup(6), lambda x: x.reshape(8, 6)),
}


def draw(seed=0, shape=(4, 12)):
    rng = np.random.default_rng(seed)
    return rng.normal(0.1, 0.8, shape), rng.normal(size=shape)


def run(learner, x, g):
    leaf = torch.tensor(x, requires_grad=True)
    result = learner(leaf)
    result.backward(torch.tensor(g))
    on_grid, qparams = learner.frozen(leaf)
    assert torch.equal(on_grid, result), (
        "frozen: the weight of the forward pass, bit for bit"
    )
    assert torch.equal(fake_quantize(on_grid, qparams, learner.grid), on_grid), (
        "which lies on the grid that convert gives"
    )
    return result.detach().numpy(), leaf.grad.numpy()


def close(actual, expected):
    # a few roundings of numbers below 10, and sums of at most 48 of them, in float64
    np.testing.assert_allclose(actual, expected, rtol=0, atol=10 * 48 * 4 * 2.0**-52)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [2, 4])
def test_dorefa_weights_are_equation_9(way, bits):
    granularity, rows_of = WAYS[way]
    x, g = draw()
    rows, upstream = rows_of(x), rows_of(g)
    learner = make_learner("dorefa", integer(bits), granularity)
    value, by_x = run(learner, x, g)
    t = np.tanh(rows)
    largest = np.abs(t).max(1, keepdims=True)
    steps = 2**bits - 1
    close(rows_of(value), 2 * np.round(steps * (t / (2 * largest) + 0.5)) / steps - 1)
    # the gradient of tanh(w) / max|tanh(w)|: its second part reaches the largest element alone
    expected = upstream * (1 - t**2) / largest
    at = np.abs(t).argmax(1)
    row = np.arange(len(rows))
    through = (upstream * t).sum(1) / largest[:, 0] ** 2
    expected[row, at] -= through * (1 - t[row, at] ** 2) * np.sign(t[row, at])
    close(rows_of(by_x), expected)
    assert learner.grid.width == bits + 1


def test_dorefa_gradient_is_the_derivative_without_rounding():
    x, g = draw(1, (3, 5))
    _, by_x = run(make_learner("dorefa", "int4"), x, g)
    h = 1e-6
    for place in np.ndindex(x.shape):
        ends = []
        for sign in (1, -1):
            y = x.copy()
            y[place] += sign * h
            t = np.tanh(y)
            ends.append((g * t / np.abs(t).max()).sum())
        # truncation below h**2 * 100, cancellation 15 * 2**-52 / h
        assert by_x[place] == pytest.approx((ends[0] - ends[1]) / (2 * h), abs=1e-7)


@pytest.mark.parametrize("way", WAYS)
def test_dorefa_weights_of_one_bit_are_equation_7(way):
    granularity, rows_of = WAYS[way]
    x, g = draw(2)
    rows = rows_of(x)
    value, by_x = run(make_learner("dorefa", "binary", granularity), x, g)
    close(
        rows_of(value), np.where(rows >= 0, 1, -1) * np.abs(rows).mean(1, keepdims=True)
    )
    np.testing.assert_array_equal(by_x, g)


@pytest.mark.parametrize("end", [1.0, 2.5])
def test_dorefa_activations_are_equation_11(end):
    x, g = draw(3)
    qparams = (
        None
        if end == 1.0
        else QParams(torch.tensor(end / 3, dtype=torch.float64), torch.tensor(-2.0))
    )
    value, by_x = run(
        make_learner("dorefa", "int2_asym", None, qparams, role="activation"), x, g
    )
    close(value, end * np.round(3 * np.clip(x / end, 0, 1)) / 3)
    np.testing.assert_array_equal(by_x, g * ((x >= 0) & (x <= end)))


def test_dorefa_gradients_are_equation_12():
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(2, 6, dtype=torch.float64, generator=generator) * torch.tensor(
        [[1.0], [100.0]]
    )
    x = torch.zeros(2, 6, dtype=torch.float64, requires_grad=True)
    total, largest, count = torch.zeros_like(g), g.abs().amax(1, keepdim=True), 4000
    for _ in range(count):
        x.grad = None
        quantize_gradient(x, 2, generator).backward(g)
        total += x.grad
        steps = (x.grad / (2 * largest) + 0.5) * 3
        assert (
            steps - steps.round()
        ).abs().max() < 1e-5  # of 2 bits: four values, in fp32
    # the noise makes the mean right: each draw is off by at most one step of 2 M / 3, so 5 sigma of the mean
    error = (total / count - g).abs() / (2 * largest / 3)
    assert error.max() < 5 * 0.5 / count**0.5
    (found,) = torch.autograd.grad(quantize_gradient(x, 4), x, torch.zeros_like(g))
    assert not found.any()  # zeros stay, without 0 / 0
    with pytest.raises(QuantizationError, match="a gradient needs one bit or more"):
        quantize_gradient(x, 0)


def test_dorefa_rounds_the_gradient_that_goes_back():
    learner = make_learner("dorefa", "int4_asym", role="activation", gradient_bits=3)
    x = torch.rand(2, 50, requires_grad=True)
    learner(x).backward(torch.randn(2, 50, generator=torch.Generator().manual_seed(0)))
    assert len(x.grad[0].unique()) <= 8 < 50
    assert len(make_learner("dorefa", "int4_asym", role="activation").extra_repr()) > 0


@pytest.mark.parametrize("way", WAYS)
def test_twn_is_equations_3_to_6(way):
    granularity, rows_of = WAYS[way]
    x, g = draw(4)
    value, by_x = run(make_learner("twn", "ternary", granularity), x, g)
    for row, got in zip(rows_of(x), rows_of(value), strict=True):
        threshold = 0.7 * np.abs(row).mean()
        large = np.abs(row) > threshold
        close(got, np.sign(row) * large * np.abs(row)[large].mean())
    np.testing.assert_array_equal(by_x, g)


@pytest.mark.parametrize("way", WAYS)
def test_ttq_is_equations_6_to_9(way):
    granularity, rows_of = WAYS[way]
    x, g = draw(5)
    rows, upstream = rows_of(x), rows_of(g)
    learner = make_learner("ttq", "ternary", granularity)
    learner(torch.tensor(x))
    with torch.no_grad():  # two different values
        learner.positive.mul_(1.3)
        learner.negative.mul_(0.6)
    wp, wn = (
        p.detach().numpy().reshape(-1, 1) for p in (learner.positive, learner.negative)
    )
    value, by_x = run(learner, x, g)
    threshold = 0.05 * np.abs(rows).max(1, keepdims=True)
    above, below = rows > threshold, rows < -threshold
    expected = np.where(above, wp, np.where(below, -wn, 0.0))
    # both values are rounded to steps of max / 127
    assert (
        np.abs(rows_of(value) - expected) <= np.maximum(wp, wn) / 127 / 2 * (1 + 1e-12)
    ).all()
    assert (np.abs(rows_of(value)).max(1, keepdims=True) == np.maximum(wp, wn)).all()
    # eq. 8 in units of the mean magnitude above the threshold, where both values start (the authors' start at 1)
    large = np.abs(rows) > threshold
    unit = (np.abs(rows) * large).sum(1, keepdims=True) / large.sum(1, keepdims=True)
    close(
        rows_of(by_x),
        upstream * np.where(above, wp / unit, np.where(below, wn / unit, 1.0)),
    )
    close(learner.positive.grad.flatten(), (upstream * above).sum(1))
    close(learner.negative.grad.flatten(), -(upstream * below).sum(1))
    # the gradients are the derivatives of the unrounded result by both values
    h = 1e-6
    for parameter, slope in ((wp, above), (wn, -1 * below)):
        up, down = slope * (parameter + h), slope * (parameter - h)
        name = "positive" if parameter is wp else "negative"
        near = (upstream * (up - down)).sum(1) / (2 * h)
        np.testing.assert_allclose(
            getattr(learner, name).grad.flatten(), near, atol=1e-7
        )


@pytest.mark.parametrize("role", ["weight", "activation"])
def test_bnn_is_sign_with_the_saturated_gradient(role):
    x = np.array([[-3.0, -1.0, -0.2], [-0.0, 0.0, 0.5], [1.0, 1.0000001, 2.0]])
    g = np.arange(1.0, 10.0).reshape(3, 3)
    value, by_x = run(make_learner("bnn", "binary", role=role), x, g)
    np.testing.assert_array_equal(value, [[-1, -1, -1], [1, 1, 1], [1, 1, 1]])
    np.testing.assert_array_equal(by_x, g * (np.abs(x) <= 1))


@pytest.mark.parametrize("way", WAYS)
def test_xnor_is_the_papers_scale_and_gradient(way):
    granularity, rows_of = WAYS[way]
    x, g = draw(6)
    rows, upstream = rows_of(x), rows_of(g)
    value, by_x = run(make_learner("xnor", "binary", granularity), x, g)
    alpha = np.abs(rows).mean(1, keepdims=True)
    close(rows_of(value), alpha * np.where(rows >= 0, 1, -1))
    close(rows_of(by_x), upstream * (1 / rows.shape[1] + alpha * (np.abs(rows) <= 1)))


@pytest.mark.parametrize(
    ("name", "fmt"),
    [
        ("dorefa", "int2"),
        ("dorefa", "binary"),
        ("twn", "ternary"),
        ("ttq", "ternary"),
        ("bnn", "binary"),
        ("xnor", "binary"),
    ],
)
def test_special_values(name, fmt):
    """A weight of zeros is no division by zero; NaN stays NaN, and Inf is as large as any."""
    learner = make_learner(name, fmt, PerAxis(0))
    zeros = learner(torch.zeros(2, 4))
    assert zeros.isfinite().all()
    if name in ("twn", "ttq"):
        assert not zeros.any()
    if name == "xnor":
        assert (
            zeros.abs().max() == torch.finfo(torch.float32).tiny
        )  # alpha is 0, and a scale may not be
    if name != "dorefa" or fmt == "binary":
        x = torch.tensor(
            [[1.0, float("nan"), -2.0, float("inf")], [1.0, 1.0, 1.0, 1.0]]
        )
        found = make_learner(name, fmt, PerAxis(0))(x)
        assert found[0].isnan().tolist() == [False, True, False, False]
        assert found[0, 3] == found[0].nan_to_num().max() > 0
