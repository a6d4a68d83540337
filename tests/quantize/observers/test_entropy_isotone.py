"""Entropy against the definition, a bin at a time; isotone against counting."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from roundoff.errors import QuantizationError
from roundoff.formats import PerAxis, fake_quantize, parse_format
from roundoff.quantize.observers import make_observer
from roundoff.quantize.observers.entropy import Entropy, divergences
from roundoff.quantize.observers.isotone import Isotone


def naive(counts, i, levels):
    """KL(P ‖ Q) as written down: P clipped to i bins, Q merged to levels and spread over P's filled bins."""
    p = np.array(counts[:i], float)
    q = np.zeros(i)
    p[-1] += sum(counts[i:])
    for level in range(levels):
        part = slice(level * i // levels, (level + 1) * i // levels)
        filled = p[part] > 0
        if filled.any():
            q[part][filled] = np.sum(counts[part]) / filled.sum()
    p, q = p / p.sum(), q / q.sum()
    if np.any((p > 0) & (q == 0)):
        return math.inf
    return float(sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0))


@pytest.mark.parametrize("levels", [8, 12])
@pytest.mark.parametrize("seed", range(4))
def test_divergences_by_definition(levels, seed):
    rng = np.random.default_rng(seed)
    counts = rng.poisson(200 * np.exp(-np.arange(90) / (8 + 5 * seed))) * (
        rng.random(90) < 0.8
    )
    counts[70 - seed] = 3
    counts[71:] = 0
    found = divergences(torch.tensor(counts, dtype=torch.float64), levels)
    length = int(np.flatnonzero(counts)[-1]) + 1
    assert list(found) == sorted({*range(levels, length, 4), length})
    for i, value in found.items():
        # Sums of n log n with n <= 2000 in fp64 cancel to eps * 2000 * 8 / 2000 = 2e-15 times the terms' 100.
        assert value == pytest.approx(naive(counts, i, levels), abs=1e-12)


def test_entropy_takes_the_least():
    x = torch.from_numpy(
        np.random.default_rng(0).laplace(size=30_000).astype(np.float32)
    )
    observer = make_observer("entropy")
    assert isinstance(observer, Entropy)
    observer.see(x)
    q = observer.qparams(parse_format("int8"))
    sums, width = observer.histogram.counts()[0], float(observer.histogram.width[0])
    counts = (sums[4097:] + sums[:4096].flip(0)).numpy()
    length = int(np.flatnonzero(counts)[-1]) + 1
    tried = [*range(128, length, 4 * 25), length]
    mine = float(q.scale) * 127 / width
    least = min(naive(counts, i, 128) for i in tried)
    assert naive(counts, round(mine), 128) <= least + 1e-9
    assert abs(mine - round(mine)) < 1e-2  # an edge of a bin, up to fp32
    assert mine < 0.9 * length  # it does clip


@pytest.mark.parametrize(("name", "levels"), [("int8_asym", 256), ("int8", 128)])
def test_entropy_of_one_sided_values_has_all_levels(name, levels):
    x = torch.from_numpy(
        np.abs(np.random.default_rng(0).laplace(size=30_000)).astype(np.float32)
    )
    observer = make_observer("entropy")
    assert isinstance(observer, Entropy)
    observer.see(x)
    fmt = parse_format(name)
    q = observer.qparams(fmt)
    counts = observer.histogram.counts()[0, 4097:]
    found = divergences(counts, levels)
    bound = min(found, key=found.get) * float(observer.histogram.width[0])
    assert float(q.scale) == pytest.approx(
        bound / (fmt.max_finite - (0 if fmt.symmetric else fmt.min_finite)), rel=1e-6
    )


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "int2"])
def test_entropy_needs_levels(name):
    observer = make_observer("entropy", bins=64)
    observer.see(torch.randn(100))
    if name == "int2":
        assert float(observer.qparams(parse_format(name)).scale) > 0
        with pytest.raises(
            QuantizationError,
            match=r"fewer than bins\n  expected: .*at most 64 levels\n  got: int8\n",
        ):
            observer.qparams(parse_format("int8"))
    else:
        with pytest.raises(
            QuantizationError, match=r"^observer entropy: the divergence needs levels"
        ):
            observer.qparams(parse_format(name))


# --- isotone ---------------------------------------------------------------------------------------------------------


def lost(x, q, fmt):
    """Rows whose largest is no longer larger than all others."""
    y, at = fake_quantize(x, q, fmt), x.argmax(-1, keepdim=True)
    rest = y.scatter(-1, at, -math.inf).amax(-1)
    return int((y.gather(-1, at)[..., 0] <= rest).sum())


@pytest.mark.parametrize("name", ["int8", "int8_asym", "int4", "int4_asym", "fp4_e2m1"])
def test_isotone_keeps_more_rows_than_minmax(name):
    fmt = parse_format(name)
    x = torch.randn(4, 100, 10, generator=torch.Generator().manual_seed(1)) * 3
    isotone, minmax = make_observer("isotone"), make_observer("minmax")
    assert isinstance(isotone, Isotone)
    for batch in x:
        isotone.see(batch)
        minmax.see(batch)
    q = isotone.qparams(fmt)
    assert lost(x, q, fmt) == isotone.lost <= lost(x, minmax.qparams(fmt), fmt)
    amax = x.abs().max()
    tried = [lost(x, minmax_like(x, f, fmt), fmt) for f in np.linspace(0.3, 1.4, 30)]
    # Another grid of ranges: by chance it may have some better one, but none by more than a fifth.
    assert isotone.lost <= 1.2 * min(tried) + 2
    assert float(q.scale) <= 1.51 * float(amax)


def minmax_like(x, factor, fmt):
    from roundoff.formats import choose_qparams

    return choose_qparams(torch.stack([x.min(), x.max()]) * float(factor), fmt)


def test_isotone_keeps_the_hardest_rows_only():
    x = torch.randn(500, 10, generator=torch.Generator().manual_seed(1))
    few, all_rows = make_observer("isotone", rows=60), make_observer("isotone")
    assert isinstance(few, Isotone)
    assert isinstance(all_rows, Isotone)
    for batch in x.split(50):
        few.see(batch)
        all_rows.see(batch)
    assert len(few.pairs) <= 120
    top = x.topk(2).values
    gaps = (top[:, 0] - top[:, 1]).sort().values[:60]
    assert torch.equal((few.pairs[:, 0] - few.pairs[:, 1]).sort().values[:60], gaps)
    assert torch.equal(
        few.pairs[:, 1].sort().values[-60:], top[:, 1].sort().values[-60:]
    )
    fmt = parse_format("int8")
    assert torch.equal(few.qparams(fmt).scale, all_rows.qparams(fmt).scale)
    assert few.lost == all_rows.lost


def test_isotone_without_rows_is_a_search_of_least_error():
    x = torch.randn(300, 1, generator=torch.Generator().manual_seed(1))
    observer = make_observer("isotone")
    assert isinstance(observer, Isotone)
    observer.see(x)
    observer.see(torch.tensor(0.5))
    observer.see(torch.ones(1, 3))  # equal ones have no order to keep
    assert observer.pairs.shape == (0, 2)
    assert float(observer.qparams(parse_format("int8")).scale) > 0
    assert observer.lost == 0


def test_isotone_is_per_tensor():
    with pytest.raises(
        QuantizationError,
        match=r"^observer isotone: order is kept by one scale for all elements",
    ):
        make_observer("isotone", PerAxis(1))
