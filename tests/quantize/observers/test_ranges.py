"""The loss of a range and its search, against numpy in fp64 on all values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roundoff.formats import PerAxis, PerTensor, choose_qparams, integer, parse_format
from roundoff.quantize.observers import OBSERVERS, make_observer
from roundoff.quantize.observers.ascend import greedy_path
from roundoff.quantize.observers.histogram import Bins, Histogram
from roundoff.quantize.observers.search import losses

RNG = np.random.default_rng


def data(name, n=20_000, seed=0):
    rng = RNG(seed)
    normal = rng.standard_normal(n)
    return {
        "normal": normal,
        "shifted": normal * 2 + 1.5,
        "relu": np.maximum(normal, 0),
        "sparse": np.where(rng.random(n) < 0.995, 0, np.abs(normal)),
        "relu6": np.clip(normal * 4 + 2, 0, 6),
        "laplace": rng.laplace(size=n),
        "heavy": rng.standard_t(2.5, size=n),
        "outlier": np.concatenate([normal, [-300.0]]),
        "uniform": rng.random(n) * 3 - 1,
        "negative": -np.abs(normal) - 0.1,
        "levels": rng.integers(0, 256, n) / 255 * 2.8 - 0.42,
    }[name].astype(np.float32)


NAMES = ["normal", "shifted", "relu", "sparse", "relu6", "laplace", "heavy", "outlier", "uniform", "negative", "levels"]


def error(x, scale, zero_point, fmt):
    """Σ (x - x̂)² by ONNX's definition, in fp64."""
    code = np.clip(np.round(x / scale) + zero_point, fmt.min_finite, fmt.max_finite)
    return float((((code - zero_point) * scale - x) ** 2).sum())


def qparams(low, high, fmt):
    """Scale and zero point of a range as fp32 rounds them."""
    if fmt.symmetric:
        return float(np.float32(max(high, -low)) / np.float32(fmt.max_finite)), 0.0
    low, high = np.float32(min(low, 0)), np.float32(max(high, 0))
    levels = np.float32(fmt.max_finite - fmt.min_finite)
    scale = high / levels - low / levels
    zero_point = np.clip(np.round(np.float32(fmt.min_finite) - low / scale), fmt.min_finite, fmt.max_finite)
    return float(scale), float(zero_point)


def observed(name, x, batches=4, granularity=None, **parameters):
    observer = make_observer(name, granularity, **parameters)
    for part in np.array_split(x, batches):
        observer.see(torch.from_numpy(part))
    return observer


def chosen(observer, x, fmt):
    q = observer.qparams(fmt)
    zero_point = 0.0 if q.zero_point is None else float(q.zero_point)
    return error(np.float64(x), float(q.scale), zero_point, fmt)


@pytest.mark.parametrize("bits", [2, 4, 8, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_loss_is_exact_for_separate_values(bits, symmetric):
    """One value to a bin: the bins' mean is the value. The half width is at least 1e-6 scale, which adds 1e-12 / 3."""
    fmt = integer(bits, symmetric=symmetric)
    x = RNG(1).permutation(np.arange(-400, 1200))[:300].astype(np.float32) * np.float32(0.0371)
    histogram = Histogram(1, 8192)
    view = torch.from_numpy(x)[None]
    histogram.add(view, view.amin(1), view.amax(1))
    low, high = np.float64(RNG(2).uniform(-20, 0, 40)), np.float64(RNG(3).uniform(0.1, 60, 40))
    loss = losses(histogram.bins(), torch.tensor(low)[None], torch.tensor(high)[None], fmt)[0]
    exact = [error(np.float64(x), *qparams(a, b, fmt), fmt) for a, b in zip(low, high, strict=True)]
    scales = np.array([qparams(a, b, fmt)[0] for a, b in zip(low, high, strict=True)])
    # Values may be as far as 1e-6 bins off by the rounding of their variance; times the slope of the error, a scale.
    np.testing.assert_allclose(loss, exact, rtol=1e-6, atol=len(x) * 1e-6 * scales.max() ** 2)


@pytest.mark.parametrize("bits", [2, 3, 8, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_loss_is_the_integral_over_uniform_bins(bits, symmetric):
    """Against the midpoint rule on 4001 points a bin; also where a bin is wider than many steps, or partly clipped."""
    fmt = integer(bits, symmetric=symmetric)
    mean, half = np.array([-3.1, -0.2, 0.05, 0.4, 2.0, 9.0]), np.array([0.5, 0.1, 0.02, 0.3, 0.25, 2.0])
    weight = np.array([1.0, 20.0, 5.0, 3.0, 2.0, 1.0])
    points = (np.arange(4001) + 0.5) / 4001 * 2 - 1
    bins = Bins(*(torch.tensor(part)[None] for part in (weight, mean, half)))
    for low, high in ((-3.0, 8.0), (-0.5, 0.7), (0.0, 2.1)):
        scale, zero_point = qparams(low, high, fmt)
        rows = [w * error(m + h * points, scale, zero_point, fmt) / 4001 for m, h, w in zip(mean, half, weight, strict=True)]
        loss = float(losses(bins, torch.tensor([[low]]), torch.tensor([[high]]), fmt))
        # The midpoint rule errs by a step's kink at most once a point's interval: h / 4001 wide, slope <= scale.
        slack = sum(w * max(scale, 1e-9) * 2 * h / 4001 for h, w in zip(half, weight, strict=True))
        assert abs(loss - sum(rows)) <= slack + 1e-7 * sum(rows)


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e5m2"])
def test_loss_of_floats_is_torchs_cast(name):
    """One value to a bin: x / scale cast by torch, clipped first."""
    fmt = parse_format(name)
    x = np.float32(RNG(1).permutation(np.arange(-700, 700))[:300] * 0.0371)
    histogram = Histogram(1, 8192)
    view = torch.from_numpy(x)[None]
    histogram.add(view, view.amin(1), view.amax(1))
    bound = np.linspace(3, 40, 15)
    loss = losses(histogram.bins(), torch.tensor(-bound)[None], torch.tensor(bound)[None], fmt)[0]
    for i, b in enumerate(bound):
        scale = torch.tensor(b, dtype=torch.float32) / fmt.max_finite
        scaled = (view / scale).clamp(-fmt.max_finite, fmt.max_finite)
        exact = ((scaled.to(fmt.torch_dtype).double() * scale.double() - view.double()) ** 2).sum()
        # fp32 division may tip a tie that fp64 has not: one value, half a step of it to either side, costs the same.
        assert abs(float(loss[i]) - float(exact)) <= 1e-5 * float(exact)


def brute_force(x, fmt):
    """The least error over ranges: amplitudes 0.1 % apart, or 60 x 60 ends and then those around the best."""
    x = np.float64(x)
    top, bottom = max(x.max(), 0), min(x.min(), 0)
    amax = max(top, -bottom)
    if fmt.symmetric:
        return min(error(x, *qparams(-b, b, fmt), fmt) for b in amax * 1.4 * 0.99 ** np.arange(450))
    lows = -amax * 1.1 * 0.85 ** np.arange(35) if bottom < 0 else [0.0]
    highs = amax * 1.1 * 0.85 ** np.arange(35) if top > 0 else [0.0]
    best = min((error(x, *qparams(a, b, fmt), fmt), a, b) for a in lows for b in highs)
    near = np.linspace(0.86, 1.16, 13)
    lows = best[1] * near if bottom < 0 else [0.0]
    highs = best[2] * near if top > 0 else [0.0]
    return min(best[0], *(error(x, *qparams(a, b, fmt), fmt) for a in lows for b in highs))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_mse_is_as_good_as_brute_force(name, bits, symmetric):
    """On all values. 2 %: the last factors are 0.5 % apart (0.03 % at the bottom of a parabola), and the error within a
    bin, w / scale <= 1/8 at 8 bits, is that of a density that changes over w."""
    fmt, x = integer(bits, symmetric=symmetric), data(name, n=3000)
    assert chosen(observed("mse", x), x, fmt) <= 1.02 * brute_force(x, fmt) + 1e-9
