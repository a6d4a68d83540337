"""roundoff.plan.cost_models: sums done by hand from the definitions in its docstring."""

from __future__ import annotations

import re

import pytest

from roundoff.errors import PlanError
from roundoff.formats import parse_format
from roundoff.plan.cost_models import UNITS, Work, cost
from roundoff.plan.seconds import KINDS, SecondsRow, SecondsTable

# A linear layer 256 -> 512 on 128 tokens with bias.
LINEAR = Work("linear", 128 * 256 * 512, 128 * 256, 512 * 256 + 512, 128 * 512)
ADD = Work("elementwise", 0.0, 2000.0, 0.0, 1000.0)


def test_units():
    assert UNITS == {
        "bytes": "MB",
        "bitops": "Gbitops",
        "seconds": "ms",
        "operators": "operators",
        "storage": "MB of parameters",
    }


@pytest.mark.parametrize(
    ("fmt", "activation_bits", "weight_bits", "output_bits"),
    [
        ("fp32", 32, 32, 32),
        ("bf16", 16, 16, 16),
        ("int8", 8, 8, 32),  # leaves an fp32 output
        ("mxfp4", 4.25, 4.25, 32),  # 32 elements share an 8 bit scale
        ("ternary", 32, parse_format("ternary").bits, 32),  # weights only
    ],
)
def test_bytes_of_a_linear(fmt, activation_bits, weight_bits, output_bits):
    bits = (
        128 * 256 * activation_bits
        + (512 * 256 + 512) * weight_bits
        + 128 * 512 * output_bits
    )
    assert cost(LINEAR, parse_format(fmt), "bytes") == bits / 8 / 1e6


def test_bytes_of_elementwise_work():
    assert cost(ADD, parse_format("fp32"), "bytes") == 3000 * 4 / 1e6
    assert cost(ADD, parse_format("bf16"), "bytes") == 3000 * 2 / 1e6
    assert (
        cost(ADD, parse_format("int8"), "bytes") == 3000 * 4 / 1e6
    )  # int8 runs matrix operators alone
    assert cost(ADD, parse_format("int8"), "bytes", reference="fp64") == 3000 * 8 / 1e6


def test_storage():
    """The parameters alone, in their format: values of the call, its output and work without weights cost nothing."""
    # groups of 64 share a scale of 32 bits, blocks of 32 one of 8
    for fmt, bits in (
        ("fp32", 32),
        ("bf16", 16),
        ("int8", 8),
        ("w4a8", 4),
        ("mxfp4", 4.25),
        ("w4g64", 4.5),
    ):
        assert (
            cost(LINEAR, parse_format(fmt), "storage")
            == (512 * 256 + 512) * bits / 8 / 1e6
        )
        assert cost(ADD, parse_format(fmt), "storage") == 0


def test_bitops():
    # 128 * 256 * 512 = 16777216 multiply-accumulates.
    assert cost(LINEAR, parse_format("fp32"), "bitops") == 16777216 * 32 * 32 / 1e9
    assert cost(LINEAR, parse_format("int8"), "bitops") == 16777216 * 8 * 8 / 1e9
    assert (
        cost(LINEAR, parse_format("ternary"), "bitops")
        == 16777216 * 32 * parse_format("ternary").bits / 1e9
    )
    scores = Work("matmul", 1e6, 2e4, 0.0, 1e4)
    assert cost(scores, parse_format("bf16"), "bitops") == 1e6 * 16 * 16 / 1e9
    assert cost(ADD, parse_format("fp32"), "bitops") == 2000 * 32 / 1e9
    assert cost(ADD, parse_format("bf16"), "bitops") == 2000 * 16 / 1e9
    lookup = Work("embedding", 0.0, 128.0, 128.0 * 256, 128.0 * 256)
    assert cost(lookup, parse_format("fp32"), "bitops") == 0.0
    assert (
        cost(lookup, parse_format("bf16"), "bytes") == (128 + 2 * 128 * 256) * 2 / 1e6
    )


@pytest.mark.parametrize("model", ["bytes", "bitops"])
def test_empty_tensors_cost_nothing(model):
    for kind in KINDS:
        assert cost(Work(kind, 0.0, 0.0, 0.0, 0.0), parse_format("bf16"), model) == 0.0


def test_seconds():
    table = SecondsTable(
        [
            SecondsRow("linear", "int8", "medium", 1e-11),
            SecondsRow("linear", "int8", "any", 4e-11),
            SecondsRow("elementwise", "fp32", "any", 1e-9),
        ]
    )
    # 16.8 million is medium (4e6 .. 1e8).
    assert cost(LINEAR, parse_format("int8"), "seconds", table=table) == pytest.approx(
        16777216 * 1e-11 * 1e3
    )
    small = Work(
        "rnn", 1e6, 1e3, 1e6, 1e3
    )  # costed as linear, and as small has no row, by "any"
    assert cost(small, parse_format("int8"), "seconds", table=table) == pytest.approx(
        1e6 * 4e-11 * 1e3
    )
    assert cost(ADD, parse_format("int8"), "seconds", table=table) == pytest.approx(
        2000 * 1e-9 * 1e3
    )
    own = SecondsTable([*table.rows, SecondsRow("rnn", "int8", "any", 9e-11)])
    assert cost(small, parse_format("int8"), "seconds", table=own) == pytest.approx(
        1e6 * 9e-11 * 1e3
    )


@pytest.mark.parametrize(
    ("work", "fmt", "model", "message"),
    [
        (
            LINEAR,
            "fp32",
            "flops",
            "unknown cost model\n  expected: bytes, bitops, seconds, operators, storage\n  got: 'flops'",
        ),
        (
            Work("linaer", 1.0, 1.0, 1.0, 1.0),
            "fp32",
            "bytes",
            "unknown kind of work\n  expected: linear, matmul, conv",
        ),
        (LINEAR, "e8m0", "bytes", "this format runs no operator\n  got: e8m0"),
        (LINEAR, "fp32", "seconds", "cost model 'seconds' needs a table of seconds"),
    ],
)
def test_errors(work, fmt, model, message):
    with pytest.raises(PlanError, match=re.escape(message)):
        cost(work, parse_format(fmt), model)


def test_missing_row_says_which_and_what_is_there():
    table = SecondsTable(
        [
            SecondsRow("linear", "bf16", "large", 1e-12),
            SecondsRow("conv", "bf16", "any", 1e-12),
        ]
    )
    with pytest.raises(PlanError) as caught:
        cost(
            Work("rnn", 1e6, 1.0, 1.0, 1.0),
            parse_format("bf16"),
            "seconds",
            table=table,
        )
    assert str(caught.value) == (
        "rnn in bf16: the table of seconds has no row for a call\n"
        "  expected: kind 'rnn' or 'linear', size 'small' or 'any'\n"
        "  got: for bf16: conv any, linear large\n"
        "  do: add the row, or measure the table anew"
    )
