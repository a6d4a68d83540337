"""Balancing, AWQ, bias correction and outlier splitting: formulas in numpy, and losses measured on samples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import QuantizationError
from roundoff.formats import (
    PerGroup,
    PerTensor,
    PerToken,
    choose_qparams,
    fake_quantize,
    parse_format,
)
from roundoff.quantize.channels.awq import awq, clip_search
from roundoff.quantize.channels.smoothing_factors import (
    dmq,
    input_amax,
    predicted_gain,
    scale_inputs,
    smoothquant,
)
from roundoff.quantize.weights.bias import OutputErrors, mean_error
from roundoff.quantize.weights.channel_splitting import (
    merge_channels,
    mixed_precision,
    split_channels,
)
from roundoff.quantize.weights.hessian import Hessian
from roundoff.quantize.weights.matrix import matrix_view, patches
from roundoff.quantize.weights.output_error import quadratic

INT4, INT8 = parse_format("int4"), parse_format("int8")
POSITIVE = st.lists(
    st.sampled_from([0.0, 1e-30, 0.01, 0.5, 1.0, 3.0, 100.0, 1e30]),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(
    pairs=st.lists(
        st.tuples(*[st.sampled_from([0.0, 0.01, 0.5, 1.0, 3.0, 100.0])] * 2),
        min_size=1,
        max_size=6,
    ),
    strength=st.sampled_from([0.2, 0.5, 0.8]),
)
def test_dmq_by_its_table(pairs, strength):
    """The four rows of the table, channel by channel in Python."""
    x, w = (list(v) for v in zip(*pairs, strict=True))
    factors = [a**strength / b ** (1 - strength) if a and b else None for a, b in pairs]
    tops = [(b * f, a / f) for (a, b), f in zip(pairs, factors, strict=True) if f]
    expected = []
    for (a, b), f in zip(pairs, factors, strict=True):
        if f or not tops or (not a and not b):
            expected.append(f or 1.0)
        else:
            expected.append(
                max(t[0] for t in tops) / b if b else a / max(t[1] for t in tops)
            )
    found = dmq(torch.tensor(x), [torch.tensor(w)], strength)
    np.testing.assert_allclose(
        found.numpy(), expected, rtol=1e-5
    )  # a few fp32 roundings


@settings(max_examples=60, deadline=None)
@given(x=POSITIVE, seed=st.integers(0, 100))
def test_smoothquant_is_equation_4_and_always_usable(x, seed):
    activation = torch.tensor(x)
    weight = torch.rand(len(x), generator=torch.Generator().manual_seed(seed))
    other = 2 * weight.flip(0)
    factors = smoothquant(activation, [weight, other], 0.6)
    both = np.maximum(weight.numpy(), other.numpy()).astype(np.float64)
    expected = np.where(
        activation.numpy() > 0,
        activation.numpy().astype(np.float64) ** 0.6 / both**0.4,
        1.0,
    )
    np.testing.assert_allclose(
        factors.numpy(), np.clip(expected, 2.0**-60, 2.0**60), rtol=1e-6
    )
    assert (factors > 0).all()
    assert (1 / factors).isfinite().all()


@pytest.mark.parametrize(
    ("operator", "shape", "groups", "channels"),
    [
        ("linear", (5, 6), 1, 6),
        ("matmul", (6, 5), 1, 6),
        ("conv2d", (4, 3, 3, 3), 2, 6),
        ("conv2d", (6, 1, 3, 3), 6, 6),
        ("conv_transpose2d", (6, 2, 2, 2), 2, 6),
        ("conv1d", (4, 6, 3), 1, 6),
    ],
)
def test_scaled_weights_on_divided_inputs_give_the_same_output(
    operator, shape, groups, channels
):
    torch.manual_seed(0)
    weight, factors = (
        torch.randn(shape, dtype=torch.float64),
        torch.rand(channels, dtype=torch.float64) + 0.5,
    )
    if operator in ("linear", "matmul"):
        x, wide = torch.randn(3, channels, dtype=torch.float64), factors

        def run(x, w):
            return x @ matrix_view(w, operator)[0].mT
    else:
        dimensions = len(shape) - 2
        x = torch.randn(2, channels, *[7] * dimensions, dtype=torch.float64)
        wide = factors.reshape(-1, *[1] * dimensions)

        def run(x, w):
            return getattr(torch.nn.functional, operator)(x, w, groups=groups)

    torch.testing.assert_close(
        run(x / wide, scale_inputs(weight, factors, operator, groups)), run(x, weight)
    )
    # amax of each channel: zero it, and only that channel's amax changes to 0
    alone = scale_inputs(
        weight, torch.eye(channels, dtype=torch.float64)[2], operator, groups
    )
    amax = input_amax(alone, operator, groups)
    assert amax[2] == input_amax(weight, operator, groups)[2] > 0
    assert amax.count_nonzero() == 1


def test_predicted_gain_is_what_samples_show():
    """An activation with channels of very different size, uniform within each: predicted and measured SQNR agree to 0.5 dB
    (2000 samples, the model of uniform rounding noise)."""
    g = torch.Generator().manual_seed(0)
    x = (torch.rand(2000, 24, generator=g) * 2 - 1) * torch.linspace(0, 4, 24).exp()
    weight = torch.randn(1, 16, 24, generator=g)
    amax = x.abs().amax(0)
    factors = smoothquant(amax, [weight.abs().amax((0, 1))])
    gain = predicted_gain(
        "SmoothQuant",
        factors,
        amax,
        [(weight, (x.T @ x / 2000)[None])],
        INT8,
        INT8,
        PerToken(),
    )
    for s, db in ((torch.ones(24), gain.before_db), (factors, gain.after_db)):
        xs, ws = x / s, weight[0] * s
        rounded = fake_quantize(ws, choose_qparams(ws, INT8, PerToken()), INT8)
        out = fake_quantize(xs, choose_qparams(xs, INT8), INT8) @ rounded.T
        exact = x @ weight[0].T
        measured = 10 * torch.log10(exact.square().sum() / (out - exact).square().sum())
        assert db == pytest.approx(float(measured), abs=0.5)
    assert gain.db > 3


def test_awq_is_the_grid_of_the_paper():
    """Equations 4 and 5 on samples in numpy, α of the grid one by one."""
    g = torch.Generator().manual_seed(0)
    x = (
        torch.randn(300, 16, generator=g, dtype=torch.float64)
        * torch.linspace(0, 3, 16).exp()
    )
    weight = torch.randn(1, 8, 16, generator=g, dtype=torch.float64)
    found = awq([(weight, (x.T @ x / 300)[None])], x.abs().mean(0), INT4)
    power, losses = x.abs().mean(0).numpy(), []
    for alpha in np.arange(20) / 20:
        s = power**alpha
        s /= np.sqrt(s.max() * s.min())
        scaled = weight[0].numpy() * s
        step = np.abs(scaled).max(1, keepdims=True) / 7
        delta = np.rint(scaled / step) * step / s - weight[0].numpy()
        losses.append(np.square(delta @ x.numpy().T).sum())
    assert found.strength == pytest.approx(np.argmin(losses) / 20)
    signal = np.square(weight[0].numpy() @ x.numpy().T).sum()
    assert found.gain.before_db == pytest.approx(10 * np.log10(signal / losses[0]))
    assert found.gain.after_db == pytest.approx(10 * np.log10(signal / min(losses)))
    with_clip = awq(
        [(weight, (x.T @ x / 300)[None])], x.abs().mean(0), INT4, clip=(0.9, 0.8, 0.7)
    )
    assert with_clip.gain.after_db >= found.gain.after_db


def test_awq_of_convolutions_that_share_an_input():
    torch.manual_seed(0)
    x = torch.randn(4, 6, 10, 10) * torch.linspace(0, 3, 6).exp()[:, None, None]
    weights = [torch.randn(8, 6, 3, 3), torch.randn(6, 1, 3, 3)]
    readers = []
    for w, groups in zip(weights, (1, 6), strict=True):
        hessian = Hessian()
        hessian.add(patches(x, "conv2d", (3, 3), padding=1, groups=groups))
        readers.append((matrix_view(w, "conv2d", groups), hessian.matrix))
    found = awq(readers, x.abs().mean((0, 2, 3)), INT4)
    assert found.factors.shape == (6,)
    assert [w.shape for w in found.weights] == [(1, 8, 54), (6, 1, 9)]
    assert found.gain.db >= 0


def test_awq_without_activation_changes_nothing():
    weight = torch.randn(1, 4, 8)
    found = awq([(weight, torch.eye(8)[None])], torch.zeros(8), INT4)
    assert found.factors.tolist() == [1.0] * 8
    assert found.gain.db == 0


@pytest.mark.parametrize("granularity", [PerToken(), PerGroup(4)])
@pytest.mark.parametrize("name", ["int4", "int3_asym", "fp4_e2m1"])
def test_clip_search_tries_each_set_alone(name, granularity):
    from roundoff.formats import integer

    fmt = integer(3, symmetric=False) if name == "int3_asym" else parse_format(name)
    torch.manual_seed(0)
    x = torch.randn(100, 8, dtype=torch.float64) @ torch.randn(
        8, 8, dtype=torch.float64
    )
    w, h = torch.randn(3, 8, dtype=torch.float64), x.T @ x / 100
    found = clip_search(w, h, fmt, granularity, ratios=(0.8, 0.6))
    size = 8 if granularity == PerToken() else 4
    for r in range(3):
        for start in range(0, 8, size):
            part = slice(start, start + size)
            row, block = w[r, part], h[part, part]
            tried = []
            for ratio in (1.0, 0.8, 0.6):
                q = choose_qparams(
                    row.clamp(row.min() * ratio, row.max() * ratio), fmt, PerTensor()
                )
                tried.append(
                    float(quadratic(fake_quantize(row, q, fmt)[None] - row, block))
                )
            assert float(
                quadratic(found.weight[r, part][None] - row, block)
            ) == pytest.approx(min(tried), rel=1e-9)


def test_bias_correction_takes_the_mean_away_only_where_it_helps():
    """Channel 0 has an offset, channel 1 only noise: the mean of its few samples is chance, and is left alone."""
    g = torch.Generator().manual_seed(0)
    exact = torch.randn(8, 3, 5, 5, generator=g, dtype=torch.float64)
    noise = torch.randn(8, 3, 5, 5, generator=g, dtype=torch.float64)
    noise[:4, 1] -= noise[:4, 1].mean() - 0.3  # the halves disagree
    noise[4:, 1] -= noise[4:, 1].mean() + 0.3
    offset = torch.tensor([2.0, 0.0, 0.0])[:, None, None]
    errors = OutputErrors()
    errors.add(exact, exact + noise - offset)
    found = errors.correction(torch.float64)
    assert found.applied[0]
    assert not found.applied[1]
    assert found.correction[0] == pytest.approx(float((offset[0] - noise[:, 0]).mean()))
    assert found.correction[1] == 0
    assert found.gain.db > 1
    assert "channels corrected" in found.gain.note
    # what it promises, measured on samples not seen
    fresh = torch.randn(100, 3, 5, 5, generator=g, dtype=torch.float64) - offset
    assert (
        fresh + found.correction[:, None, None]
    ).square().sum() < 0.5 * fresh.square().sum()


def test_bias_correction_does_not_depend_on_how_it_is_streamed():
    exact, got = torch.randn(6, 4), torch.randn(6, 4)
    whole, single = OutputErrors(), OutputErrors()
    whole.add(exact[[0, 2, 4, 1, 3, 5]], got[[0, 2, 4, 1, 3, 5]])
    for i in range(6):
        single.add(exact[i : i + 1], got[i : i + 1])
    torch.testing.assert_close(
        whole.correction().correction, single.correction().correction
    )
    assert whole.correction().gain.after_db == pytest.approx(
        single.correction().gain.after_db
    )


def test_bias_correction_never_promises_a_loss():
    for seed in range(20):
        g = torch.Generator().manual_seed(seed)
        errors = OutputErrors(axis=-1)
        exact = torch.randn(6, 5, generator=g)
        errors.add(exact, exact + torch.randn(6, 5, generator=g))
        assert errors.correction().gain.db >= 0
    alone = OutputErrors()
    alone.add(torch.zeros(1, 2), torch.ones(1, 2))
    assert alone.correction().correction.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("exact", "got", "text"),
    [
        (torch.ones(2, 3), torch.ones(2, 4), "the outputs do not fit"),
        (torch.ones(2), torch.ones(2), "the outputs do not fit"),
        (torch.ones(2, 4), torch.ones(2, 4), "the outputs do not fit"),
        (torch.ones(2, 3) * torch.inf, torch.ones(2, 3), "the exact holds NaN or Inf"),
    ],
)
def test_bias_correction_refuses(exact, got, text):
    errors = OutputErrors()
    errors.add(torch.ones(2, 3), torch.ones(2, 3))
    with pytest.raises(QuantizationError, match=text):
        errors.add(exact, got)
    with pytest.raises(QuantizationError, match="no outputs were seen"):
        OutputErrors().correction()


def test_mean_error_from_second_moments_is_that_of_the_outputs():
    torch.manual_seed(0)
    x = torch.randn(2, 50, 6, dtype=torch.float64).relu()
    noisy = x + 0.1
    hessian = Hessian()
    hessian.add(noisy, reference=x)
    w, rounded = (
        torch.randn(2, 3, 6, dtype=torch.float64),
        torch.randn(2, 3, 6, dtype=torch.float64),
    )
    torch.testing.assert_close(
        mean_error(w, rounded, hessian), (x @ w.mT - noisy @ rounded.mT).mean(1)
    )


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    groups=st.integers(1, 3),
    taps=st.sampled_from([1, 2]),
    aware=st.booleans(),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.5]),
)
def test_split_channels_keep_the_product(seed, groups, taps, aware, share):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(groups, 3, 6 * taps, generator=g, dtype=torch.float64) ** 3
    x = torch.randn(groups, 5, 6, taps, generator=g, dtype=torch.float64)
    found = split_channels(w, INT4, share=share, taps=taps, aware=aware)
    extra = -(-int(share * 60) // 10)  # share of 6 channels, rounded up
    assert found.index.shape == (groups, 6 + extra)
    read = torch.stack([x[i][:, found.index[i]] for i in range(groups)]).flatten(-2)
    torch.testing.assert_close(
        read @ found.weight.mT, x.flatten(-2) @ w.mT, rtol=1e-9, atol=1e-9
    )
    torch.testing.assert_close(
        merge_channels(found.weight, found.index, 6, taps), w, rtol=1e-9, atol=1e-12
    )
    assert found.weight.abs().max() <= w.abs().max() * (
        1 + 1 / 14
    )  # aware halves are a quarter step off


def test_splitting_an_outlier_gains():
    w = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
    w[:, 5] *= 10
    aware, plain = (
        split_channels(w, INT4, share=0.05, aware=aware).gain.db
        for aware in (True, False)
    )
    assert plain > 2
    assert (
        aware > plain + 1
    )  # the errors of equal halves add up, those of aware ones do not


def test_aware_halves_round_to_what_the_whole_rounds_to():
    """Section 3.3 of the paper: Q(w) = Q((w - Δ/2)/2) + Q((w + Δ/2)/2) on the same grid, away from ties."""
    step = 0.5
    for w in np.linspace(-3, 3, 997):
        whole = np.rint(w / step)
        assert (
            np.rint((w - step / 2) / 2 / step) + np.rint((w + step / 2) / 2 / step)
            == whole
        )
    # and that is what split_channels makes of a column on its own grid
    found = split_channels(torch.tensor([[7.0, 1.0]]), INT4, share=0.5)
    assert found.weight.tolist() == [[3.25, 1.0, 3.75]]


def test_mixed_precision_is_equation_8():
    torch.manual_seed(0)
    w, x = (
        torch.randn(4, 10, dtype=torch.float64),
        torch.randn(50, 10, dtype=torch.float64),
    )
    x[:, 3] *= 40
    w[:, 3] *= 5
    found = mixed_precision(w, x.abs().amax(0), INT4, hessian=x.T @ x / 50)
    assert found.columns.tolist() == [3]
    rest = [i for i in range(10) if i != 3]
    scale = w[:, rest].abs().amax(1, keepdim=True) / 7
    expected = (
        x[:, rest] @ (torch.round(w[:, rest] / scale) * scale).T
        + x[:, [3]] @ w[:, [3]].T
    )
    torch.testing.assert_close(
        x @ found.low.T + x[:, found.columns] @ found.high.T, expected
    )
    exact = x @ w.T
    db = 10 * torch.log10(exact.square().sum() / (expected - exact).square().sum())
    assert found.gain.after_db == pytest.approx(float(db))
    assert found.gain.db > 10


@pytest.mark.parametrize(("threshold", "count"), [(0.0, 10), (1e9, 0)])
def test_mixed_precision_of_all_or_nothing(threshold, count):
    w = torch.randn(4, 10)
    found = mixed_precision(w, torch.ones(10), INT4, threshold=threshold)
    assert found.high.shape == (4, count)
    whole = found.low.index_add(1, found.columns, found.high)
    assert torch.equal(
        whole,
        w if count else fake_quantize(w, choose_qparams(w, INT4, PerToken()), INT4),
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: smoothquant(torch.ones(3), []), "these channels cannot be balanced"),
        (
            lambda: smoothquant(torch.ones(3), [torch.ones(2)]),
            "these channels cannot be balanced",
        ),
        (
            lambda: smoothquant(-torch.ones(3), [torch.ones(3)]),
            "these channels cannot be balanced",
        ),
        (
            lambda: dmq(torch.ones(3), [torch.ones(3)], 0.9),
            "these channels cannot be balanced",
        ),
        (
            lambda: dmq(torch.ones(3) * torch.nan, [torch.ones(3)]),
            "the activation holds NaN or Inf",
        ),
        (
            lambda: scale_inputs(torch.ones(2, 3), torch.ones(2), "linear"),
            "the factors do not fit the weight",
        ),
        (lambda: awq([], torch.ones(3), INT4), "nothing to scale"),
        (
            lambda: awq([(torch.ones(2, 4), torch.eye(4))], torch.ones(4), INT4),
            "the weight does not fit the activation",
        ),
        (
            lambda: clip_search(torch.ones(2, 4), torch.eye(4), INT4, PerTensor()),
            "ranges cannot be clipped",
        ),
        (
            lambda: split_channels(torch.ones(2, 4), INT4, taps=3),
            "these channels cannot be split",
        ),
        (
            lambda: split_channels(torch.ones(2, 4), INT4, share=-0.1),
            "these channels cannot be split",
        ),
        (
            lambda: mixed_precision(torch.ones(2, 4), torch.ones(3), INT4),
            "the activation does not fit the weight",
        ),
    ],
)
def test_what_is_refused(call, text):
    with pytest.raises(QuantizationError, match=text):
        call()
