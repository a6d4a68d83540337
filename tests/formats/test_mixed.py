"""Formats of two widths by name: w4a8, w4, w4g64."""

import pytest
import torch

from roundoff.errors import FormatError
from roundoff.formats import FORMATS, fake_quantize, integer, parse_format
from roundoff.formats.affine import choose_qparams
from roundoff.formats.granularity import PerAxis
from roundoff.plan.cost_models import Work, cost


@pytest.mark.parametrize(
    ("name", "weight", "activation", "rule", "group"),
    [
        ("w4a8", 4, 8, "channel", 32),
        ("W2A4", 2, 4, "channel", 32),
        ("w8a8", 8, 8, "channel", 32),
        ("w4", 4, None, "channel", 32),
        ("w4g64", 4, None, "group", 64),
        ("w3a8g16", 3, 8, "group", 16),
    ],
)
def test_the_name_says_widths_and_group(name, weight, activation, rule, group):
    fmt = parse_format(name)
    assert (fmt.name, fmt.width) == (name.lower(), weight)
    assert fmt.bits == (weight + 32 / group if rule == "group" else weight)
    assert (fmt.max_finite, fmt.min_finite, fmt.symmetric) == (
        2 ** (weight - 1) - 1,
        -(2 ** (weight - 1)) + 1,
        True,
    )
    assert fmt.execution.weight == rule
    assert fmt.group_size == group
    if activation is None:
        assert fmt.execution.activation is None
        assert fmt.of_activations is fmt
    else:
        assert fmt.execution.activation == "tensor"
        own = fmt.of_activations
        assert (own.width, own.symmetric) == (activation, False)
        assert (own.min_finite, own.max_finite) == (
            -(2 ** (activation - 1)),
            2 ** (activation - 1) - 1,
        )


@pytest.mark.parametrize(
    "name",
    [
        "w",
        "a8",
        "w4a",
        "w4g",
        "w4g0",
        "w1a8",
        "w4a1",
        "w0",
        "w17",
        "w4a99",
        "wa8",
        "w4a8g",
        "w-4",
        "w4a8x",
    ],
)
def test_names_that_are_none(name):
    with pytest.raises(FormatError, match="unknown format"):
        parse_format(name)


def test_all_other_formats_have_one_format():
    for fmt in FORMATS.values():
        assert fmt.of_activations is fmt


def test_its_weights_are_plain_integers():
    torch.manual_seed(0)
    x = torch.randn(5, 7)
    q = choose_qparams(x, parse_format("w4a8"), PerAxis(0))
    scale = x.abs().amax(1, keepdim=True) / 7
    assert torch.equal(q.scale, scale)
    assert torch.equal(
        fake_quantize(x, q, parse_format("w4a8")),
        (x / scale).round().clamp(-7, 7) * scale,
    )
    assert torch.equal(
        fake_quantize(x, q, integer(4)), fake_quantize(x, q, parse_format("w4a8"))
    )


def test_two_of_one_name_are_one_format():
    assert parse_format("w4a8") == parse_format("w4a8")
    assert len({parse_format("w4a8"), parse_format("W4A8")}) == 1
    assert parse_format("w4g64") != parse_format("w4g32")


def test_cost_counts_each_width():
    """By hand: bytes = (activations · 8 + weights · 4 + outputs · 32) / 8; bit operations = macs · 8 · 4."""
    work = Work("linear", 1e6, 1e4, weight_elements=1e5, output_elements=1e3)
    assert cost(work, parse_format("w4a8"), "bytes") == pytest.approx(
        (1e4 * 8 + 1e5 * 4 + 1e3 * 32) / 8 / 1e6
    )
    assert cost(work, parse_format("w4a8"), "bitops") == pytest.approx(
        1e6 * 8 * 4 / 1e9
    )
    assert cost(work, parse_format("w4"), "bytes") == pytest.approx(
        (1e4 * 32 + 1e5 * 4 + 1e3 * 32) / 8 / 1e6
    )
    assert cost(work, parse_format("w4"), "bitops") == pytest.approx(1e6 * 32 * 4 / 1e9)


def test_cost_of_groups_counts_their_scales():
    """A group of 64 weights of 4 bits has one scale of 32 bits: 4.5 bits a weight."""
    work = Work("linear", 1e6, 0, weight_elements=64.0, output_elements=0)
    assert cost(work, parse_format("w4g64"), "bytes") == pytest.approx(
        64 * 4.5 / 8 / 1e6
    )
