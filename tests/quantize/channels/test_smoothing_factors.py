"""SmoothQuant and DMQ: their formulas channel by channel in Python."""

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
from roundoff.quantize.channels.smoothing_factors import (
    dmq,
    input_amax,
    scale_inputs,
    smoothquant,
)
from roundoff.quantize.weights.matrix import matrix_view

INT4 = parse_format("int4")
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
    ],
)
def test_what_is_refused(call, text):
    with pytest.raises(QuantizationError, match=text):
        call()
