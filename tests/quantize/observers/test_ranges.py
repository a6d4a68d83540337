"""The loss of a range and its search, against numpy in fp64 on all values."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roundoff.formats import PerAxis, PerTensor, choose_qparams, integer, parse_format
from roundoff.quantize.observers import OBSERVERS, make_observer
from roundoff.quantize.observers.ascend import greedy_path
from roundoff.quantize.observers.histogram import FINE, Bins, Histogram
from roundoff.quantize.observers.ranges import HistogramObserver
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


NAMES = [
    "normal",
    "shifted",
    "relu",
    "sparse",
    "relu6",
    "laplace",
    "heavy",
    "outlier",
    "uniform",
    "negative",
    "levels",
]


def error(x, scale, zero_point, fmt):
    """Σ (x - x̂)² by ONNX's definition, in fp64."""
    code = np.clip(np.round(x / scale) + zero_point, fmt.min_finite, fmt.max_finite)
    return float((((code - zero_point) * scale - x) ** 2).sum())


def qparams(low, high, fmt) -> tuple[float, float]:
    """Scale and zero point of a range as fp32 rounds them."""
    if fmt.symmetric:
        return float(np.float32(max(high, -low)) / np.float32(fmt.max_finite)), 0.0
    low, high = np.float32(min(low, 0)), np.float32(max(high, 0))
    levels = np.float32(fmt.max_finite - fmt.min_finite)
    scale = high / levels - low / levels
    zero_point = np.clip(
        np.round(np.float32(fmt.min_finite) - low / scale),
        fmt.min_finite,
        fmt.max_finite,
    )
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


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_loss_is_that_of_all_values(name, bits, symmetric):
    """Moving a value by d changes its square error e² by at most 2 |e| d + d². A bin's density has its values' mean and
    variance up to a part of it, so moves them by a part w / FINE where all of the bin is clipped (there the error is
    quadratic), and else by 2 σ <= w on average, with e <= scale / 2 + w."""
    fmt, x = integer(bits, symmetric=symmetric), data(name, n=4000)
    histogram, view = Histogram(1, 4096), torch.from_numpy(x)[None]
    histogram.add(view, view.amin(1), view.amax(1))
    amax = float(np.abs(x).max())
    low, high = amax * RNG(2).uniform(-1.2, 0, 40), amax * RNG(3).uniform(0.02, 1.2, 40)
    loss = losses(
        histogram.bins(), torch.tensor(low)[None], torch.tensor(high)[None], fmt
    )[0]
    width = float(histogram.width[0])
    for i, (a, b) in enumerate(zip(low, high, strict=True)):
        scale, zero_point = qparams(a, b, fmt)
        exact = error(np.float64(x), scale, zero_point, fmt)
        n, part = np.count_nonzero(x), width / FINE
        inside = n * ((scale + 2 * width) * width + width**2)
        clipped = (
            2 * part * np.sqrt(exact * n) + n * part**2
        )  # Cauchy-Schwarz over the clipped values
        assert abs(float(loss[i]) - exact) <= inside + clipped
        # The bound above is for the worst placing; placed anyhow, the differences average out.
        assert abs(float(loss[i]) - exact) <= 0.05 * exact + 0.1 * n * part**2 + clipped


@pytest.mark.parametrize("bits", [2, 3, 8, 16])
@pytest.mark.parametrize("symmetric", [True, False])
def test_loss_is_the_integral_over_uniform_bins(bits, symmetric):
    """Against the midpoint rule on 4001 points a bin; also where a bin is wider than many steps, or partly clipped."""
    fmt = integer(bits, symmetric=symmetric)
    mean, half = (
        np.array([-3.1, -0.2, 0.05, 0.4, 2.0, 9.0]),
        np.array([0.5, 0.1, 0.02, 0.3, 0.25, 2.0]),
    )
    weight = np.array([1.0, 20.0, 5.0, 3.0, 2.0, 1.0])
    points = (np.arange(4001) + 0.5) / 4001 * 2 - 1
    bins = Bins(*(torch.tensor(part)[None] for part in (weight, mean, half)))
    for low, high in ((-3.0, 8.0), (-0.5, 0.7), (0.0, 2.1)):
        scale, zero_point = qparams(low, high, fmt)
        rows = [
            w * error(m + h * points, scale, zero_point, fmt) / 4001
            for m, h, w in zip(mean, half, weight, strict=True)
        ]
        loss = float(losses(bins, torch.tensor([[low]]), torch.tensor([[high]]), fmt))
        # The midpoint rule errs by a step's kink at most once a point's interval: h / 4001 wide, slope <= scale.
        slack = sum(
            w * max(scale, 1e-9) * 2 * h / 4001
            for h, w in zip(half, weight, strict=True)
        )
        assert abs(loss - sum(rows)) <= slack + 1e-7 * sum(rows)


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e5m2"])
def test_loss_of_floats_is_torchs_cast(name):
    """x / scale cast by torch, clipped first."""
    fmt, x = parse_format(name), data("laplace", n=4000)
    histogram, view = Histogram(1, 4096), torch.from_numpy(x)[None]
    histogram.add(view, view.amin(1), view.amax(1))
    bound = float(np.abs(x).max()) * np.linspace(0.1, 1.2, 15)
    loss = losses(
        histogram.bins(), torch.tensor(-bound)[None], torch.tensor(bound)[None], fmt
    )[0]
    for i, b in enumerate(bound):
        scale = torch.tensor(b, dtype=torch.float32) / fmt.max_finite
        scaled = (view / scale).clamp(-fmt.max_finite, fmt.max_finite)
        exact = (
            (scaled.to(fmt.torch_dtype).double() * scale.double() - view.double()) ** 2
        ).sum()
        # Most of the error is where the format's step is at least 2**-4 of the value, many bins. So it averages out,
        # as n = 4000 draws of a square error of standard deviation 0.9 times its mean would: 3 * 0.9 / sqrt(4000).
        assert abs(float(loss[i]) - float(exact)) <= 0.043 * float(exact)


def brute_force(x, fmt):
    """The least error over ranges: amplitudes 0.1 % apart, or 60 x 60 ends and then those around the best."""
    x = np.float64(x)
    top, bottom = max(x.max(), 0), min(x.min(), 0)
    amax = max(top, -bottom)
    if fmt.symmetric:
        return min(
            error(x, *qparams(-b, b, fmt), fmt)
            for b in amax * 1.4 * 0.99 ** np.arange(450)
        )
    lows = -amax * 1.1 * 0.85 ** np.arange(35) if bottom < 0 else [0.0]
    highs = amax * 1.1 * 0.85 ** np.arange(35) if top > 0 else [0.0]
    best = min((error(x, *qparams(a, b, fmt), fmt), a, b) for a in lows for b in highs)
    near = np.linspace(0.86, 1.16, 13)
    lows = best[1] * near if bottom < 0 else [0.0]
    highs = best[2] * near if top > 0 else [0.0]
    return min(
        best[0], *(error(x, *qparams(a, b, fmt), fmt) for a in lows for b in highs)
    )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("name", NAMES)
def test_mse_is_as_good_as_brute_force(name, bits, symmetric):
    """On all values. 2 %: the last factors are 0.5 % apart (0.03 % at the bottom of a parabola), and the error within a
    bin, w / scale <= 1/8 at 8 bits, is that of a density that changes over w."""
    fmt, x = integer(bits, symmetric=symmetric), data(name, n=3000)
    assert chosen(observed("mse", x), x, fmt) <= 1.02 * brute_force(x, fmt) + 1e-9


@pytest.mark.parametrize("name", ["normal", "heavy", "relu6"])
@pytest.mark.parametrize("fmt_name", ["fp8_e4m3fn", "fp4_e2m1", "hif8"])
def test_mse_of_floats_is_as_good_as_brute_force(name, fmt_name):
    """fake_quantize with amplitudes 1 % apart on all values; the bins' two points stand for w = 1/2048 of the range."""
    from roundoff.formats import fake_quantize

    fmt, x = parse_format(fmt_name), torch.from_numpy(data(name, n=2000))

    def exact(q):
        return float(((fake_quantize(x, q, fmt) - x).double() ** 2).sum())

    amax = x.abs().max()
    best = min(exact(choose_qparams(amax * 1.4 * 0.99**i, fmt)) for i in range(300))
    assert exact(observed("mse", x.numpy()).qparams(fmt)) <= 1.02 * best


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_ifmr_is_ifmr_on_all_values(name, symmetric):
    """AMCT's search in numpy: the same factor but for one step, or a loss within 1 %."""
    fmt, x = integer(8, symmetric=symmetric), data(name)
    k = len(x) - int(0.999 * len(x))
    top, bottom = max(np.sort(x)[-k], 0), min(np.sort(x)[k - 1], 0)
    if name == "sparse":  # fewer than k values above 0: never without one
        top, bottom = min(x[x > 0]), 0
    elif name == "negative":
        top = 0
    best = []
    for factor in 0.7 + 0.01 * np.arange(61):
        if symmetric:
            low, high = -factor * max(top, -bottom), factor * max(top, -bottom)
            scale = high / 127
        else:
            low, high = bottom, factor * top
            scale = (high - low) / 255
        clipped = np.clip(np.float64(x), low, high)
        best.append(
            (
                float(((np.round(clipped / scale) * scale - x) ** 2).sum()),
                factor,
                low,
                high,
            )
        )
    loss, _, low, high = min(best)
    observer = observed("ifmr", x, max_percentile=0.999, min_percentile=0.999)
    q = observer.qparams(fmt)
    mine = float(q.scale) * (254 / 2 if symmetric else 255)
    near = abs(mine - (high if symmetric else high - low)) <= 0.0101 * max(top, -bottom)
    # AMCT's loss has no rounded zero point: with it, the exact one's own range is what counts.
    true = error(np.float64(x), *qparams(low, high, fmt), fmt)
    assert near or chosen(observer, x, fmt) <= 1.01 * min(true, loss)


def test_ifmr_can_search_both_ends():
    x = data("outlier")
    fmt = parse_format("int8_asym")
    one, both = (
        chosen(observed("ifmr", x, both_ends=b), x, fmt) for b in (False, True)
    )
    assert both < one


def naive_path(counts, side):
    """HFMG's walk, a bin at a time."""
    counts = list(counts)
    counts[side] = 0
    left, right = min(np.flatnonzero(counts)), max(np.flatnonzero(counts))
    step = max(int(np.ceil(sum(counts) / 100_000)), 1)
    fewest, path = int(np.ceil((right - left + 1) / 4)), []
    while True:
        path.append((left, right))
        if right - left + 1 <= fewest:
            return path
        i, cut = left, 0
        while cut < step:
            cut, i = cut + counts[i], i + 1
        j, cut = right, 0
        while cut < step:
            cut, j = cut + counts[j], j - 1
        if i > right or j < left:
            return path
        if i - left > right - j:
            left = i
        else:
            right = j


@pytest.mark.parametrize("name", NAMES)
def test_hfmg_walks_as_described(name):
    side = 64
    histogram, x = Histogram(1, side), torch.from_numpy(data(name, n=2000))[None]
    histogram.add(x, x.amin(1), x.amax(1))
    counts = histogram.counts()[0].tolist()
    walked = greedy_path(counts, side)
    # A range as (first bin, last bin): the lower edge of bin i > 0 is i - 1, the upper edge of bin i < 0 is i + 1.
    naive = [
        (i - side - (i > side), j - side + (j < side))
        for i, j in naive_path(counts, side)
    ]
    assert walked == [(float(i), float(j)) for i, j in naive]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_hfmg_takes_the_best_of_its_path(name, symmetric):
    fmt, x = integer(8, symmetric=symmetric), data(name, n=3000)
    observer = observed("hfmg", x, num_of_bins=1024)
    histogram = observer.histogram
    path = np.array(greedy_path(histogram.counts()[0].tolist(), 1024)) * float(
        histogram.width[0]
    )
    path = np.clip(path, x.min(), x.max())
    every = [
        error(np.float64(x), *qparams(a, b, fmt), fmt) for a, b in path[::3] if b > a
    ]
    # w / scale is up to 1/2 here, so the loss of smooth data errs by some (w / scale)² / 12; and every third is tried.
    assert chosen(observer, x, fmt) <= 1.03 * min(every) + 1e-9


@pytest.mark.parametrize("name", sorted(set(OBSERVERS) - {"arq", "isotone"}))
def test_relu_gives_the_lowest_code_as_zero_point(name):
    x = data("relu")
    q = observed(name, x).qparams(parse_format("int8_asym"))
    assert float(q.zero_point) == -128.0


@pytest.mark.parametrize(
    "name", ["percentile", "mse", "ifmr", "hfmg", "entropy", "adjoint"]
)
def test_zeros_change_nothing(name):
    """Ten zeros for each value: the same qparams; but for IFMR's rank, which counts them and is 1 with so few values."""
    x = data("normal", n=500)
    padded = RNG(0).permutation(np.concatenate([x, np.zeros(5000, np.float32)]))
    for fmt in (parse_format("int8"), parse_format("int4_asym")):
        a, b = (observed(name, v).qparams(fmt) for v in (x, padded))
        assert torch.equal(a.scale, b.scale)


@pytest.mark.parametrize(
    "name", ["percentile", "mse", "ifmr", "hfmg", "entropy", "adjoint"]
)
def test_channels_are_independent(name):
    """Per channel as each channel alone; ranges 100 times apart, and one channel of zeros."""
    x = (
        torch.from_numpy(data("laplace", n=2400)).reshape(4, 4, 150)
        * torch.tensor([0.01, 1.0, 0.0, 30.0])[:, None]
    )
    parameters = {"num_of_bins": 1024} if name == "hfmg" else {"bins": 1024}
    for fmt in (parse_format("int8"), parse_format("int8_asym")):
        observer = make_observer(name, PerAxis(1), **parameters)
        for batch in x.split(1):
            observer.see(batch)
        q = observer.qparams(fmt)
        assert q.scale.shape == (1, 4, 1)
        assert observer.degenerate == "1 of 4 ranges zero: scale 1"
        for channel in range(4):
            alone = make_observer(name, PerTensor(), **parameters)
            for batch in x.split(1):
                alone.see(batch[:, channel])
            one = alone.qparams(fmt)
            torch.testing.assert_close(
                q.scale[0, channel], one.scale[0], rtol=2**-23, atol=0
            )
            if one.zero_point is not None:
                assert q.zero_point[0, channel, 0] == one.zero_point


def test_percentile_is_the_rank_among_what_is_not_zero():
    x = (
        RNG(0)
        .permutation(
            np.concatenate([np.zeros(9000), np.arange(1, 1001) / 8, -np.arange(1, 501)])
        )
        .astype(np.float32)
    )
    q = observed("percentile", x, percentile=0.99, bins=4096).qparams(
        parse_format("int8_asym")
    )
    # 1500 values, rank 1500 - 1485 = 15: -486 and 123.25, up to a part of a bin each.
    exact, part = (123.25 + 486) / 255, 512 / 4096 / FINE
    assert abs(float(q.scale) - exact) <= 2 * part / 255


def test_memory_does_not_grow():
    observer = make_observer("mse")
    assert isinstance(observer, HistogramObserver)
    sizes = set()
    for i in range(20):
        observer.see(torch.randn(100) * 1.3**i)
        sizes.add(observer.histogram.parts.numel())
    assert sizes == {2 * 4096 * FINE + 1}


def test_order_of_batches_does_not_matter():
    parts = [torch.from_numpy(data("heavy", n=700, seed=i)) * 2.0**i for i in range(5)]
    scales = []
    for order in (parts, parts[::-1]):
        observer = make_observer("mse")
        for part in order:
            observer.see(part)
        scales.append(float(observer.qparams(parse_format("int8")).scale))
    assert scales[0] == scales[1]


# --- the adjoint -----------------------------------------------------------------------------------------------------


def test_adjoint_without_power_is_mse():
    x = data("heavy")
    for name in ("int8", "int4_asym", "fp8_e4m3fn"):
        fmt = parse_format(name)
        assert torch.equal(
            observed("adjoint", x).qparams(fmt).scale,
            observed("mse", x).qparams(fmt).scale,
        )


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [3, 8])
def test_adjoint_minimises_the_weighted_error(bits, symmetric):
    """Against weighted brute force; and what carries no power is clipped away."""
    fmt, x = integer(bits, symmetric=symmetric), data("shifted", n=3000)
    power = np.where(
        np.abs(x) > 2.5, 0.0, np.exp(RNG(5).standard_normal(len(x)))
    ).astype(np.float32)
    observer = make_observer("adjoint")
    for part, weight in zip(
        np.array_split(x, 3), np.array_split(power, 3), strict=True
    ):
        observer.see(torch.from_numpy(part), torch.from_numpy(weight))
    q = observer.qparams(fmt)

    def weighted(scale, zero_point):
        code = np.clip(
            np.round(np.float64(x) / scale) + zero_point, fmt.min_finite, fmt.max_finite
        )
        return float((power * ((code - zero_point) * scale - x) ** 2).sum())

    mine = weighted(
        float(q.scale), 0.0 if q.zero_point is None else float(q.zero_point)
    )
    ends = 12 * 0.93 ** np.arange(45)
    pairs = (
        [(-b, b) for b in 12 * 0.995 ** np.arange(600)]
        if symmetric
        else [(-a, b) for a in ends for b in ends]
    )
    assert mine <= 1.02 * min(weighted(*qparams(a, b, fmt)) for a, b in pairs)
    levels = fmt.max_finite if symmetric else fmt.max_finite - fmt.min_finite
    assert float(q.scale) * levels <= 2.6 * (1 if symmetric else 2)


def test_power_broadcasts_and_its_unit_does_not_matter():
    x = torch.from_numpy(data("heavy", n=1200)).reshape(3, 4, 100)
    power = torch.rand(4, 1) + 0.1
    fmt, scales = parse_format("int8"), []
    for weight in (power, power.expand(3, 4, 100) * 2.0**-40):
        observer = make_observer("adjoint")
        observer.see(x, weight)
        scales.append(observer.qparams(fmt).scale)
    assert torch.equal(*scales)
