"""AdaRound: the paper's formulas in numpy, the best rounding by exhaustion, and its guarantees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import QuantizationError
from roundoff.formats import PerToken, choose_qparams, fake_quantize, parse_format
from roundoff.quantize.weights.adaround import (
    _beta,
    _Choice,
    _regularizer_slope,
    adaround,
    adaround_hessian,
)
from roundoff.quantize.weights.output_error import quadratic

INT4 = parse_format("int4")


def data(out: int, features: int, rows: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    mix = torch.randn(max(features // 2, 1), features, generator=g, dtype=torch.float64)
    x = (
        torch.randn(rows, max(features // 2, 1), generator=g, dtype=torch.float64) @ mix
    ).relu()
    w = torch.randn(out, features, generator=g, dtype=torch.float64)
    return w, x, x.T @ x / rows


def test_v_starts_where_the_soft_weights_are_the_weights():
    """Equations 22 and 23 in numpy: s clip(floor(w/s) + h(V), n, p) with h(V) = clip(1.2 σ(V) - 0.1, 0, 1) is w itself."""
    w, _, _ = data(3, 20, 5, 0)
    q = choose_qparams(
        w * 0.8, INT4, PerToken()
    )  # so that some weights lie beyond the range
    choice = _Choice(w, INT4, q)
    h = np.clip(1.2 / (1 + np.exp(-choice.v.numpy())) - 0.1, 0, 1)
    s = q.scale.numpy()
    soft = s * np.clip(np.floor(w.numpy() / s) + h, -7, 7)
    inside = np.abs(w.numpy() / s) <= 7
    np.testing.assert_allclose(soft[inside], w.numpy()[inside], rtol=1e-9, atol=1e-12)
    assert inside.sum() < inside.size
    np.testing.assert_allclose(
        choice.soft(choice.v)[1].numpy()[inside], soft[inside], rtol=1e-9, atol=1e-12
    )
    # rounding V at once is rounding to nearest, to the last bit
    assert torch.equal(choice.hard(choice.v), choice.nearest)


def test_regularizer_is_equation_24_and_beta_falls_from_20_to_2():
    h = torch.rand(50, dtype=torch.float64, requires_grad=True)
    (1 - (2 * h - 1).abs() ** 3.7).sum().backward()
    torch.testing.assert_close(_regularizer_slope(h.detach(), 3.7), h.grad)
    assert _beta(0.0, 0.2) == _beta(0.2, 0.2) == 20
    assert _beta(1.0, 0.2) == 2
    assert _beta(0.6, 0.2) == pytest.approx(11)  # half a cosine's middle


def test_finds_nearly_the_best_up_or_down():
    """All 2**8 roundings of a row of eight weights: within 1.5 times the least loss on average, nearest is above twice."""
    found, plain = [], []
    for seed in range(6):
        w, _, h = data(4, 8, 60, seed)
        q = choose_qparams(w, INT4, PerToken())
        low = torch.floor(w / q.scale)
        ups = torch.tensor(
            list(itertools.product([0, 1], repeat=8)), dtype=torch.float64
        )
        best = torch.stack(
            [
                quadratic((low[r] + ups).clamp(-7, 7) * q.scale[r] - w[r], h).min()
                for r in range(4)
            ]
        )
        found.append(quadratic(adaround_hessian(w, h, INT4, q).weight - w, h) / best)
        plain.append(quadratic(fake_quantize(w, q, INT4) - w, h) / best)
    assert torch.cat(found).min() >= 1 - 1e-9
    assert torch.cat(found).mean() < 1.5
    assert torch.cat(plain).mean() > 2


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(
        ["int4", "int4_asym", "int2", "fp4_e2m1", "binary", "ternary"]
    ),
)
def test_every_weight_is_one_of_its_two_neighbours(seed, name):
    fmt = parse_format(name)
    w, _, h = data(3, 7, 20, seed)
    q = choose_qparams(w, fmt, PerToken())
    found = adaround_hessian(w, h, fmt, q, iterations=40)
    nearest = fake_quantize(w, q, fmt)
    again = fake_quantize(found.weight, q, fmt)
    torch.testing.assert_close(
        again, found.weight, rtol=1e-12, atol=1e-12
    )  # on the grid
    assert (
        quadratic(found.weight - w, h) <= quadratic(nearest - w, h) * (1 + 1e-9)
    ).all()
    lower, upper = (
        torch.minimum(found.weight, nearest),
        torch.maximum(found.weight, nearest),
    )
    moved = (upper - lower) > 1e-9
    # a weight that did not go to the nearest value went to the one on its other side
    assert ((w >= lower - 1e-9) & (w <= upper + 1e-9))[moved].all()


def test_with_data_and_the_activation_that_follows():
    """Outputs far below 0 are cut off by the ReLU: only the loss behind it knows that they do not count."""
    w, x, _ = data(6, 16, 400, 3)
    q = choose_qparams(w, INT4, PerToken())
    bias = -torch.linspace(0, 12, 6, dtype=torch.float64)
    target = x @ w.T + bias
    found = adaround(
        w, x, target, INT4, q, bias=bias, activation=torch.relu, iterations=300
    )
    blind = adaround(w, x, target, INT4, q, bias=bias, iterations=300)

    def loss(weight):
        return ((x @ weight.T + bias).relu() - target.relu()).square().sum()

    assert loss(found.weight) < 0.5 * loss(fake_quantize(w, q, INT4))
    assert loss(found.weight) < loss(blind.weight)
    assert 10 * torch.log10(
        target.relu().square().sum() / loss(found.weight)
    ) == pytest.approx(found.gain.after_db)


def test_the_same_seed_gives_the_same_codes_and_no_other_generator_is_touched():
    w, x, _ = data(3, 8, 50, 1)
    q = choose_qparams(w, INT4, PerToken())
    state = torch.get_rng_state()
    first, second = (
        adaround(w, x, x @ w.T, INT4, q, iterations=30, batch=8).weight
        for _ in range(2)
    )
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        assert torch.equal(
            adaround(w, x, x @ w.T, INT4, q, iterations=30, batch=8).weight, first
        )


def test_groups_and_degenerate_layers():
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(4, 1, 9, generator=g), torch.randn(4, 100, 9, generator=g)
    q = choose_qparams(w, INT4, PerToken())
    assert adaround(w, x, x @ w.mT, INT4, q, iterations=100).gain.db >= 0
    # weights on the grid already: nothing to learn, nothing divided by zero
    exact = fake_quantize(w, q, INT4)
    for found in (
        adaround(exact, x, x @ exact.mT, INT4, q, iterations=5),
        adaround_hessian(exact, x.mT @ x, INT4, q),
    ):
        assert torch.equal(found.weight, exact)
        assert found.gain.db == 0
    one = torch.tensor([[0.3]])
    assert adaround_hessian(
        one, torch.zeros(1, 1), INT4, choose_qparams(one, INT4)
    ).weight.item() == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("inputs", "targets", "more", "text"),
    [
        (torch.ones(5, 3), torch.ones(5, 2), {}, "the data does not fit the weight"),
        (torch.ones(5, 4), torch.ones(4, 2), {}, "the data does not fit the weight"),
        (torch.ones(0, 4), torch.ones(0, 2), {}, "the data does not fit the weight"),
        (
            torch.ones(5, 4) * torch.nan,
            torch.ones(5, 2),
            {},
            "the inputs holds NaN or Inf",
        ),
        (torch.ones(5, 4), torch.ones(5, 2), {"iterations": 0}, "no steps to learn in"),
        (torch.ones(5, 4), torch.ones(5, 2), {"warm_up": 1.0}, "no steps to learn in"),
    ],
)
def test_what_is_refused(inputs, targets, more, text):
    w = torch.ones(2, 4)
    with pytest.raises(QuantizationError, match=text):
        adaround(w, inputs, targets, INT4, choose_qparams(w, INT4), **more)
