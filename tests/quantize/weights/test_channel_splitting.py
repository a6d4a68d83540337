"""Outlier channel splitting: the product is kept, and splitting an outlier gains."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import QuantizationError
from roundoff.formats import (
    parse_format,
)
from roundoff.quantize.weights.channel_splitting import (
    merge_channels,
    split_channels,
)

INT4 = parse_format("int4")


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


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: split_channels(torch.ones(2, 4), INT4, taps=3),
            "these channels cannot be split",
        ),
        (
            lambda: split_channels(torch.ones(2, 4), INT4, share=-0.1),
            "these channels cannot be split",
        ),
    ],
)
def test_what_is_refused(call, text):
    with pytest.raises(QuantizationError, match=text):
        call()
