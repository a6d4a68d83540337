"""The streaming histogram against numpy in fp64 on all values."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.quantize.observers.histogram import FINE, Histogram

SIDE = 16
# Not so far apart that a value is below 2**-126 bin widths, where it counts as 0.
values = st.floats(-100.0, 100.0, width=32).filter(lambda v: v == 0 or abs(v) > 1e-28)
values |= st.sampled_from([0.0, -0.0, 6.0, 1e-3, -64.0, 3e-30, 2.0**-99, 1e8])
batches = st.lists(st.lists(values, min_size=1, max_size=12), min_size=1, max_size=6)


def filled(data, side=SIDE, weights=None):
    """A histogram of the batches, each a list for one set or an array (sets, elements)."""
    histogram = None
    for i, batch in enumerate(data):
        x = torch.tensor(np.atleast_2d(np.float32(batch)))
        histogram = histogram or Histogram(len(x), side)
        weight = (
            None
            if weights is None
            else torch.tensor(np.atleast_2d(np.float32(weights[i])))
        )
        histogram.add(x, x.amin(1), x.amax(1), weight)
    return histogram


def expected_parts(x, histogram, row=0, side=SIDE, weights=None):
    """Part ±i holds ((i - 1) w, i w]: away from zero."""
    u = np.float64(x) / (float(histogram.width[row]) / FINE)
    at = (np.sign(u) * np.ceil(np.abs(u))).astype(int) + side * FINE
    return np.bincount(at, weights, 2 * side * FINE + 1)


@given(data=batches)
@settings(max_examples=60, deadline=None)
def test_every_value_is_in_its_bin(data):
    histogram, x = filled(data), np.concatenate([np.float32(b) for b in data])
    width = float(histogram.width[0])
    amax = np.abs(np.float64(x)).max()
    assert width * SIDE >= amax
    assert (
        width * SIDE == 2.0**-100 or width * SIDE < 2 * amax
    )  # the smallest power of two that holds all
    parts = expected_parts(x, histogram)
    assert histogram.parts[0].tolist() == parts.tolist()
    zero = SIDE * FINE
    below, above = (
        parts[:zero].reshape(-1, FINE).sum(1),
        parts[zero + 1 :].reshape(-1, FINE).sum(1),
    )
    assert histogram.counts()[0].tolist() == [*below, parts[zero], *above]
    assert (float(histogram.low[0]), float(histogram.high[0])) == (x.min(), x.max())


@given(data=batches)
@settings(max_examples=60, deadline=None)
def test_bins_have_the_moments_of_their_parts(data):
    """Sums over the parts' uniform densities: mean, and variance from ∫ x² over each part."""
    histogram = filled(data)
    bins, part = histogram.bins(), float(histogram.width[0]) / FINE
    zero = SIDE * FINE
    count = np.delete(histogram.parts[0].numpy(), zero).reshape(-1, FINE)
    left = (
        np.delete(
            np.concatenate([np.arange(-zero, 0), [0], np.arange(zero)]), zero
        ).reshape(-1, FINE)
        * 1.0
    )
    used = count.sum(1) > 0
    n, count, left = count.sum(1)[used], count[used], left[used]
    mean = (count * (left + 0.5)).sum(1) / n
    second = (count * ((left + 1) ** 3 - left**3) / 3).sum(1) / n
    if not used.any():
        assert bins.weight.tolist() == [[0.0]]
        return
    assert bins.weight[0].tolist() == n.tolist()
    np.testing.assert_allclose(bins.mean[0] / part, mean, rtol=1e-13)
    # eps of fp64 times the 128² parts that cancel in the variance here
    np.testing.assert_allclose(
        (bins.half[0] / part) ** 2 / 3, second - mean**2, atol=1e-11, rtol=1e-11
    )


@given(data=batches, rank=st.integers(1, 72), zeros=st.booleans())
@settings(max_examples=60, deadline=None)
def test_ranks_are_within_a_bin(data, rank, zeros):
    histogram, x = (
        filled(data),
        np.float64(np.concatenate([np.float32(b) for b in data])),
    )
    x = x if zeros else x[x != 0]
    if rank > len(x):
        return
    width, exact = float(histogram.width[0]) / FINE, np.sort(x)
    top = float(histogram.largest(torch.tensor([rank]), zeros=zeros)[0])
    bottom = float(histogram.smallest(torch.tensor([rank]), zeros=zeros)[0])
    assert abs(top - exact[-rank]) <= width
    assert abs(bottom - exact[rank - 1]) <= width


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_sets_and_weights_are_independent(seed):
    rng = np.random.default_rng(seed)
    data = [
        rng.standard_normal((3, 7)) * np.array([[1e-3], [1.0], [200.0]]) * 3**i
        for i in range(4)
    ]
    weights = [rng.random((3, 7)) for _ in data]
    together = filled(data, weights=weights)
    for row in range(3):
        alone = filled([d[row] for d in data], weights=[w[row] for w in weights])
        assert torch.equal(together.exponent[row], alone.exponent[0])
        torch.testing.assert_close(
            together.parts[row], alone.parts[0], rtol=1e-14, atol=0.0
        )
        x = np.concatenate([np.float32(d[row]) for d in data])
        weight = np.float64(np.concatenate([np.float32(w[row]) for w in weights]))
        np.testing.assert_allclose(
            together.parts[row],
            expected_parts(x, together, row, weights=weight),
            rtol=1e-12,
        )


def test_large_tensors_are_counted_in_parts():
    x = np.random.default_rng(0).standard_normal((2, 300_001)).astype(np.float32)
    histogram = filled([x])
    for row in range(2):
        assert (
            histogram.parts[row].tolist()
            == expected_parts(x[row], histogram, row).tolist()
        )


def test_bins_leave_out_zeros_and_empty_bins():
    bins = filled([np.float32([[0, 0, 0, 6, 6, -3], [0, 0, 0, 0, 0, 1.5]])]).bins()
    assert bins.weight.tolist() == [[1.0, 2.0], [1.0, 0.0]]
    # Bins of 1/2 and 1/8, parts of 1/16 and 1/64 that end with the value, since bins are closed away from 0.
    assert [*bins.mean[0].tolist(), float(bins.mean[1, 0])] == [
        -3 + 1 / 32,
        6 - 1 / 32,
        1.5 - 1 / 128,
    ]
    assert bins.half[:, 0].tolist() == [1 / 32, 1 / 128]


def test_half_width_of_a_uniform_bin():
    """Evenly filled bins of width 1, in eight parts: 1/2."""
    bins = filled([(np.arange(32_000) + 0.5) / 2000]).bins()
    np.testing.assert_allclose(bins.half[0], 0.5, rtol=1e-12)
    np.testing.assert_allclose(bins.mean[0], np.arange(16) + 0.5, rtol=1e-12)


def test_a_set_of_zeros_ranks_as_zero():
    histogram = filled([np.float32([[0, 0, 0], [1, 2, 0]])])
    rank = torch.tensor([1, 1])
    assert histogram.largest(rank, zeros=False).tolist() == [0.0, 2.0]
    assert histogram.smallest(rank, zeros=False).tolist() == [
        0.0,
        1 - 2 / SIDE / FINE / 2,
    ]  # the middle of its part
    assert histogram.smallest(rank).tolist() == [0.0, 0.0]
