"""The streaming histogram against numpy in fp64 on all values."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.quantize.observers.histogram import Histogram

SIDE = 16
# Not so far apart that a value is below 2**-126 bin widths, where it counts as 0.
values = st.floats(-100.0, 100.0, width=32).filter(lambda v: v == 0 or abs(v) > 1e-28) | st.sampled_from([0.0, -0.0, 6.0, 1e-3, -64.0, 3e-30, 2.0**-99, 1e8])
batches = st.lists(st.lists(values, min_size=1, max_size=12), min_size=1, max_size=6)


def filled(data, side=SIDE, weights=None):
    """A histogram of the batches, each a list for one set or an array (sets, elements)."""
    histogram = None
    for i, batch in enumerate(data):
        x = torch.tensor(np.atleast_2d(np.float32(batch)))
        histogram = histogram or Histogram(len(x), side)
        weight = None if weights is None else torch.tensor(np.atleast_2d(np.float32(weights[i])))
        histogram.add(x, x.amin(1), x.amax(1), weight)
    return histogram


def expected_bins(x, width, side=SIDE):
    """Bin ±i holds ((i - 1) w, i w]: away from zero."""
    u = np.float64(x) / width
    return (np.sign(u) * np.ceil(np.abs(u))).astype(int) + side


@given(data=batches)
@settings(max_examples=150, deadline=None)
def test_every_value_is_in_its_bin(data):
    histogram, x = filled(data), np.concatenate([np.float32(b) for b in data])
    width = float(histogram.width[0])
    amax = np.abs(np.float64(x)).max()
    assert width * SIDE >= amax
    assert width * SIDE == 2.0**-100 or width * SIDE < 2 * amax  # the smallest power of two that holds all
    at = expected_bins(x, width)
    count = np.bincount(at, minlength=2 * SIDE + 1)
    assert histogram.sums[0, 0].tolist() == count.tolist()
    first = np.bincount(at, np.float64(x), 2 * SIDE + 1)
    second = np.bincount(at, np.float64(x) ** 2, 2 * SIDE + 1)
    # A sum of n <= 72 terms of at most w * SIDE: relative to that, n eps; times 16 for its square.
    np.testing.assert_allclose(histogram.sums[1, 0] * width, first, rtol=1e-12, atol=1e-13 * width * SIDE)
    np.testing.assert_allclose(histogram.sums[2, 0] * width**2, second, rtol=1e-12, atol=1e-13 * (width * SIDE) ** 2)
    assert (float(histogram.low[0]), float(histogram.high[0])) == (x.min(), x.max())


@given(data=batches, rank=st.integers(1, 72), zeros=st.booleans())
@settings(max_examples=150, deadline=None)
def test_ranks_are_within_a_bin(data, rank, zeros):
    histogram, x = filled(data), np.float64(np.concatenate([np.float32(b) for b in data]))
    x = x if zeros else x[x != 0]
    if rank > len(x):
        return
    width, exact = float(histogram.width[0]), np.sort(x)
    top = float(histogram.largest(torch.tensor([rank]), zeros=zeros)[0])
    bottom = float(histogram.smallest(torch.tensor([rank]), zeros=zeros)[0])
    assert abs(top - exact[-rank]) <= width
    assert abs(bottom - exact[rank - 1]) <= width


@given(st.lists(st.integers(-8, 8), min_size=1, max_size=60), st.integers(1, 60))
@settings(max_examples=80, deadline=None)
def test_ranks_are_exact_where_bins_hold_one_value(levels, rank):
    """Repeated levels, at most one to a bin: eps of fp64 in the bin's mean, its square root in the deviation."""
    x = np.array(levels) * 0.75
    if rank > len(x):
        return
    histogram = filled([x], side=64)
    assert abs(float(histogram.largest(torch.tensor([rank]))[0]) - np.sort(x)[-rank]) < 1e-5


def test_two_values_in_a_bin_are_exact():
    x = np.float32([0.51, 0.57, 0.58, 5.0, 15.0])
    histogram = filled([x])  # bins are 1 wide
    ranked = [float(histogram.largest(torch.tensor([r]))[0]) for r in (1, 2, 3, 4, 5)]
    np.testing.assert_allclose(ranked[:2], [15.0, 5.0], rtol=0)
    histogram = filled([x[[0, 2, 3, 4]]])
    ranked = [float(histogram.largest(torch.tensor([r]))[0]) for r in (3, 4)]
    np.testing.assert_allclose(ranked, np.float64(x[[2, 0]]), rtol=1e-12)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_sets_and_weights_are_independent(seed):
    rng = np.random.default_rng(seed)
    data = [rng.standard_normal((3, 7)) * np.array([[1e-3], [1.0], [200.0]]) * 3**i for i in range(4)]
    weights = [rng.random((3, 7)) for _ in data]
    together = filled(data, weights=weights)
    for row in range(3):
        alone = filled([d[row] for d in data], weights=[w[row] for w in weights])
        assert torch.equal(together.exponent[row], alone.exponent[0])
        torch.testing.assert_close(together.sums[:, row], alone.sums[:, 0], rtol=1e-14, atol=0.0)
        x = np.concatenate([np.float32(d[row]) for d in data])
        weight = np.concatenate([np.float32(w[row]) for w in weights])
        wanted = np.bincount(expected_bins(x, float(together.width[row])), np.float64(weight), 2 * SIDE + 1)
        np.testing.assert_allclose(together.sums[0, row], wanted, rtol=1e-12)


def test_large_tensors_are_counted_in_parts():
    x = np.random.default_rng(0).standard_normal((2, 300_001)).astype(np.float32)
    histogram = filled([x])
    for row in range(2):
        wanted = np.bincount(expected_bins(x[row], float(histogram.width[row])), minlength=2 * SIDE + 1)
        assert histogram.sums[0, row].tolist() == wanted.tolist()


def test_bins_leave_out_zeros_and_empty_bins():
    bins = filled([np.float32([[0, 0, 0, 6, 6, -3], [0, 0, 0, 0, 0, 1.5]])]).bins()
    assert bins.weight.tolist() == [[1.0, 2.0], [1.0, 0.0]]
    assert bins.mean.tolist() == [[-3.0, 6.0], [1.5, 0.0]]
    assert bins.half.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_half_width_of_a_uniform_bin():
    """Evenly filled bins of width w: half a width, but for the n² / (n² - 1) of n numbers."""
    n, x = 1000, (np.arange(32_000) + 0.5) / 2000  # 16 bins of 1, all of 2000 numbers
    bins = filled([x]).bins()
    np.testing.assert_allclose(bins.half[0], 0.5, rtol=1 / n**2)
    np.testing.assert_allclose(bins.mean[0], np.arange(16) + 0.5, rtol=1e-6)


def test_a_set_of_zeros_ranks_as_zero():
    histogram = filled([np.float32([[0, 0, 0], [1, 2, 0]])])
    rank = torch.tensor([1, 1])
    assert histogram.largest(rank, zeros=False).tolist() == [0.0, 2.0]
    assert histogram.smallest(rank, zeros=False).tolist() == [0.0, 1.0]
    assert histogram.smallest(rank).tolist() == [0.0, 0.0]
