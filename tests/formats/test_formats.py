"""Names, fields, and the relations between formats."""

from __future__ import annotations

import ast
import math
import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from roundoff.errors import FormatError
from roundoff.formats import (
    FORMATS,
    BlockFormat,
    Execution,
    Format,
    all_values,
    integer,
    parse_format,
    round_tensor,
)
from roundoff.formats.named import ALIASES

from .scalar import round_scalar

DOCS = Path(__file__).parents[2] / "docs" / "formats.md"
ELEMENTS = [f for f in FORMATS.values() if not isinstance(f, BlockFormat)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("float16", "fp16"),
        ("bfloat16", "bf16"),
        ("half", "fp16"),
        ("e4m3", "fp8_e4m3fn"),
        ("BF16", "bf16"),
        (" fp8-e5m2 ", "fp8_e5m2"),
        ("torch.float8_e4m3fnuz", "fp8_e4m3fnuz"),
        ("mxfp8", "mxfp8_e4m3"),
        ("mxfp6", "mxfp6_e2m3"),
        ("fp4", "fp4_e2m1"),
        ("hifloat8", "hif8"),
    ],
)
def test_names(name, expected):
    assert parse_format(name).name == expected


def test_every_name_and_alias_parses():
    for name, fmt in FORMATS.items():
        assert parse_format(name) is fmt
        assert parse_format(fmt) is fmt
        assert fmt.name == name
    assert set(ALIASES.values()) <= set(FORMATS)
    assert not set(ALIASES) & set(FORMATS)


def test_unknown_names_get_the_nearest():
    with pytest.raises(FormatError) as caught:
        parse_format("fp8_e4m4")
    message = str(caught.value)
    assert message.startswith("unknown format\n  expected: fp64, fp32, tf32, bf16, ")
    assert "\n  got: fp8_e4m4\n  do: did you mean fp8_e4m3fn" in message
    with pytest.raises(FormatError, match="did you mean bf16"):
        parse_format("bf61")
    with pytest.raises(FormatError, match="do: choose one of these"):
        parse_format("?")


@pytest.mark.parametrize(
    "name",
    [
        n
        for n, f in FORMATS.items()
        if f.torch_dtype and f.torch_dtype.is_floating_point
    ],
)
def test_fields_are_those_of_torch_finfo(name):
    fmt = FORMATS[name]
    info = torch.finfo(fmt.torch_dtype)
    assert (fmt.bits, fmt.max_finite) == (info.bits, info.max)
    if (
        name != "e8m0"
    ):  # no fraction and no sign: finfo's eps and min mean something else there
        assert (fmt.smallest_normal, fmt.min_finite) == (info.smallest_normal, info.min)
        if (
            name != "fp8_e5m2fnuz"
        ):  # 1.25 is a value of it, but torch 2.13's finfo has eps 0.125
            assert 2.0**-fmt.fraction_bits == info.eps


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp6_e3m2", ml_dtypes.float6_e3m2fn),
        ("fp6_e2m3", ml_dtypes.float6_e2m3fn),
        ("fp4_e2m1", ml_dtypes.float4_e2m1fn),
    ],
)
def test_fields_are_those_of_ml_dtypes_finfo(name, dtype):
    fmt, info = FORMATS[name], ml_dtypes.finfo(dtype)
    assert (fmt.width, fmt.max_finite) == (info.bits, float(info.max))
    assert (fmt.smallest_normal, fmt.smallest_subnormal) == (
        float(info.smallest_normal),
        float(info.smallest_subnormal),
    )


def test_torch_dtypes():
    named = {n: f.torch_dtype for n, f in FORMATS.items() if f.torch_dtype is not None}
    assert named == {
        "fp64": torch.float64,
        "fp32": torch.float32,
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp8_e4m3fn": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
        "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
        "e8m0": torch.float8_e8m0fnu,
        "int8": torch.int8,
        "int8_asym": torch.int8,
    }


def test_bits():
    bits = {n: f.bits for n, f in FORMATS.items()}
    assert bits["tf32"] == 32  # it lies in fp32
    assert [
        bits[n] for n in ("mxfp8_e4m3", "mxfp6_e3m2", "mxfp4", "mxint8", "nvfp4")
    ] == [
        8.25,
        6.25,
        4.25,
        8.25,
        4.5,
    ]
    assert [bits[n] for n in ("fp64", "bf16", "hif8", "int4", "ternary", "binary")] == [
        64,
        16,
        8,
        4,
        2,
        1,
    ]


def test_execution():
    full = Execution("all", "exact", "exact", bias=True, output=True)
    scaled = Execution("matrix", "tensor", "channel", bias=False, output=False)
    weight_only = Execution("matrix", None, "channel", bias=False, output=False)
    blocks = Execution("matrix", "block", "block", bias=False, output=False)
    expected: dict[str, Execution | None] = dict.fromkeys(
        ("fp64", "fp32", "bf16", "fp16"), full
    )
    expected |= {
        "tf32": Execution("matrix", "exact", "exact", bias=False, output=False),
        "e8m0": None,
    }
    expected |= dict.fromkeys(("ternary", "binary"), weight_only)
    for name, fmt in FORMATS.items():
        assert fmt.execution == expected.get(
            name, blocks if isinstance(fmt, BlockFormat) else scaled
        ), name


def numbers(fmt: Format) -> set[float]:
    return {v for v in all_values(fmt) if math.isfinite(v)}


SMALL = [f for f in ELEMENTS if f.width <= 16] + [
    integer(8, narrow_range=False),
    integer(4, narrow_range=False),
]


@pytest.mark.parametrize("outer", SMALL, ids=lambda f: f.name)
def test_contains_is_a_subset_of_values(outer):
    values = numbers(outer)
    for inner in SMALL:
        assert outer.contains(inner) == (numbers(inner) <= values), inner.name


@pytest.mark.parametrize("wide", ["fp64", "fp32", "tf32"])
def test_contains_for_wide_formats(wide):
    """tf32 holds what keeps its value when the lower 13 bits of fp32 are cleared."""
    for inner in SMALL:
        values = np.array(sorted(numbers(inner)))
        narrow = values.astype(np.float32)
        exact = values == narrow if wide != "fp64" else np.ones_like(values, bool)
        if wide == "tf32":
            exact &= (narrow.view(np.uint32) & 0x1FFF) == 0
        assert FORMATS[wide].contains(inner) == bool(exact.all()), inner.name
    assert [
        n
        for n in ("fp64", "fp32", "tf32", "bf16", "fp16")
        if FORMATS[wide].contains(FORMATS[n])
    ] == [
        n
        for n in ("fp64", "fp32", "tf32", "bf16", "fp16")
        if list(FORMATS).index(n) >= list(FORMATS).index(wide)
    ]
    for fmt in SMALL:
        assert not fmt.contains(FORMATS[wide])


def test_contains_powers_of_two():
    """2**-9 is e4m3fn's smallest value."""
    powers = replace(FORMATS["e8m0"], emin=-9, min_finite=2.0**-9, max_finite=256.0)
    assert FORMATS["fp8_e4m3fn"].contains(powers)
    assert not FORMATS["fp8_e4m3fn"].contains(
        replace(powers, emin=-10, min_finite=2.0**-10)
    )


def test_block_formats_contain_only_themselves():
    for fmt in FORMATS.values():
        assert fmt.contains(fmt)
        if isinstance(fmt, BlockFormat):
            assert [
                o.name for o in FORMATS.values() if o.contains(fmt) or fmt.contains(o)
            ] == [fmt.name]


def test_a_new_format_is_data():
    """gfloat's and ml_dtypes' e3m4, which we do not name: fields alone are enough."""
    fmt = replace(
        FORMATS["fp8_e5m2"],
        name="e3m4",
        fraction_bits=4,
        emin=-2,
        max_finite=15.5,
        min_finite=-15.5,
        torch_name=None,
    )
    codes = np.arange(256, dtype=np.uint8)
    with np.errstate(invalid="ignore"):
        expected = codes.view(ml_dtypes.float8_e3m4).astype(np.float64)
    np.testing.assert_array_equal(all_values(fmt), expected)


def test_a_format_without_subnormals():
    """Two fraction bits from 2**0 on: 0, 1, 1.25, ... 3.5; below 1 only 0 and 1 remain."""
    fmt = Format(
        name="flushed",
        width=4,
        fraction_bits=2,
        emin=0,
        max_finite=3.5,
        min_finite=-3.5,
        has_subnormals=False,
        nan_code=None,
    )
    x = torch.tensor([0.0, 0.3, 0.5, 0.6, 0.9, 1.1, 1.2, 3.3, 9.0, -0.6])
    expected = [0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.25, 3.5, 3.5, -1.0]
    assert round_tensor(x, fmt).tolist() == expected
    assert [round_scalar(v, fmt) for v in x.tolist()] == expected


def test_formats_are_values():
    for fmt in FORMATS.values():
        again = pickle.loads(pickle.dumps(fmt))
        assert again == fmt
        assert hash(again) == hash(fmt)
        with pytest.raises(FrozenInstanceError):
            fmt.name = "other"
    assert FORMATS["mxfp8_e4m3"] != FORMATS["fp8_e4m3fn"]


def test_importing_a_format_by_fields_needs_no_torch():
    """types, named and codes are plain Python; torch is only named for the type checker."""
    folder = Path(__file__).parents[2] / "src" / "roundoff" / "formats"
    for name in ("types", "named", "codes", "granularity"):
        tree = ast.parse((folder / f"{name}.py").read_text(encoding="utf-8"))
        top = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        found = {
            alias.name for n in top if isinstance(n, ast.Import) for alias in n.names
        }
        found |= {n.module for n in top if isinstance(n, ast.ImportFrom)}
        assert not {"torch", "roundoff.formats.rounding"} & found, name


def power(value: float | None) -> str:
    """2^n where that is exact, else the number."""
    if value is None:
        return "-"
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and not 2**-3 <= value <= 2**15:
        return f"2^{exponent - 1}"
    return f"{value:g}" if float(f"{value:g}") == value else f"{value:.8g}"


def row(fmt: Format) -> str:
    specials = [
        *(["Inf"] if fmt.has_inf else []),
        *(["NaN"] if fmt.has_nan else []),
        *(["-0"] if fmt.has_negative_zero else []),
        *([] if fmt.has_zero else ["no 0"]),
    ]
    beyond = "saturates" if fmt.saturate else "Inf" if fmt.has_inf else "NaN"
    cells = [
        f"`{fmt.name}`",
        f"{fmt.bits:g}",
        power(fmt.max_finite),
        power(fmt.smallest_normal),
        power(fmt.smallest_subnormal),
        ", ".join(specials) or "-",
        beyond,
    ]
    return "| " + " | ".join(cells) + " |"


def test_the_table_in_the_documentation_is_true():
    lines = DOCS.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("| `")]
    assert rows == [row(fmt) for fmt in FORMATS.values()]


@pytest.mark.parametrize("width", range(2, 17))
@pytest.mark.parametrize("suffix", ["", "_asym"])
def test_integers_of_any_width_have_a_name(width, suffix):
    """As ``w6a6`` has: two's complement, the lowest code left out where the scale is symmetric."""
    fmt = parse_format(f"int{width}{suffix}")
    assert fmt == integer(width, symmetric=not suffix)
    assert fmt.max_finite == 2 ** (width - 1) - 1
    assert fmt.min_finite == -(2 ** (width - 1)) + (not suffix)
    assert fmt.bits == width


@pytest.mark.parametrize(
    "name", ["int1", "int17", "int06", "int", "int6_full", "uint6"]
)
def test_other_integers_are_unknown(name):
    with pytest.raises(FormatError, match="unknown format"):
        parse_format(name)
