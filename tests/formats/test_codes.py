"""Every code of every format of at most 16 bits, against independent libraries and the specifications' tables."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from roundoff.errors import FormatError
from roundoff.formats import FORMATS, all_values, integer
from roundoff.formats.codes import decode

ML_DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "fp6_e3m2": ml_dtypes.float6_e3m2fn,
    "fp6_e2m3": ml_dtypes.float6_e2m3fn,
    "fp4_e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}

# Typed out from the public description of HiFloat8 (arXiv 2409.16626): sign, dot, exponent, fraction.
HIF8 = {
    "0 0000 000": 0.0,
    "1 0000 000": math.nan,
    "0 0000 001": 2**-22,
    "0 0000 010": 2**-21,
    "0 0000 011": 2**-20,
    "0 0000 100": 2**-19,
    "0 0000 101": 2**-18,
    "0 0000 110": 2**-17,
    "0 0000 111": 2**-16,
    "1 0000 001": -(2**-22),
    "1 0000 111": -(2**-16),
    "0 0001 000": 1.0,
    "0 0001 001": 1.125,
    "0 0001 111": 1.875,
    "1 0001 100": -1.5,
    "0 001 0 000": 2.0,
    "0 001 0 111": 3.75,
    "0 001 1 000": 0.5,
    "0 001 1 001": 0.5625,
    "1 001 1 111": -0.9375,
    "0 01 00 000": 4.0,
    "0 01 01 000": 8.0,
    "0 01 01 111": 15.0,
    "0 01 10 000": 0.25,
    "0 01 11 000": 0.125,
    "0 01 11 111": 0.234375,
    "1 01 00 100": -6.0,
    "0 10 000 00": 16.0,
    "0 10 001 01": 40.0,
    "0 10 011 00": 128.0,
    "0 10 011 11": 224.0,
    "0 10 100 00": 2**-4,
    "0 10 111 00": 2**-7,
    "0 10 111 11": 1.75 * 2**-7,
    "1 10 010 10": -96.0,
    "0 11 0000 0": 256.0,
    "0 11 0000 1": 384.0,
    "0 11 0110 1": 24576.0,
    "0 11 0111 0": 32768.0,
    "0 11 0111 1": math.inf,
    "1 11 0111 1": -math.inf,
    "0 11 1000 0": 2**-8,
    "0 11 1111 0": 2**-15,
    "0 11 1111 1": 1.5 * 2**-15,
    "1 11 0111 0": -32768.0,
}


def hif8_values() -> list[float]:
    """The positive values, from the ranges of the description instead of its codes."""
    bits = {e: 3 if abs(e) <= 3 else 2 if abs(e) <= 7 else 1 for e in range(-15, 16)}
    normal = [2.0**e * (1 + m / 2**b) for e, b in bits.items() for m in range(2**b)]
    normal.remove(1.5 * 2**15)  # its code is Inf
    return sorted([2.0 ** (m - 23) for m in range(1, 8)] + normal)


def same(actual: list[float], expected: list[float]) -> None:
    """Equal, sign of zero included; every NaN equals every NaN."""
    np.testing.assert_array_equal(np.array(actual), np.array(expected))
    signs = np.where(np.isnan(expected), 0, np.signbit(expected))
    np.testing.assert_array_equal(
        np.where(np.isnan(actual), 0, np.signbit(actual)), signs
    )


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_code_decodes_as_in_ml_dtypes(name):
    fmt = FORMATS[name]
    codes = np.arange(2**fmt.width, dtype=np.uint16 if fmt.width > 8 else np.uint8)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        expected = codes.view(ML_DTYPES[name]).astype(np.float64)
    same(all_values(fmt), expected.tolist())


@pytest.mark.parametrize(
    "name", [n for n, f in FORMATS.items() if f.torch_name and 8 < f.width <= 16]
)
def test_every_16_bit_code_decodes_as_in_torch(name):
    fmt = FORMATS[name]
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    same(all_values(fmt), codes.view(fmt.torch_dtype).double().tolist())


def test_integers_are_twos_complement():
    same(
        all_values(integer(8, narrow_range=False)),
        np.arange(256, dtype=np.uint8).view(np.int8).astype(float).tolist(),
    )
    same(
        all_values(FORMATS["int8"]),
        [*map(float, range(128)), *map(float, range(-127, 0))],
    )
    same(
        all_values(FORMATS["int4_asym"]),
        [*map(float, range(8)), *map(float, range(-8, 0))],
    )
    assert all_values(FORMATS["int2_asym"]) == [0, 1, -2, -1]
    assert all_values(FORMATS["ternary"]) == [0, 1, -1]
    assert all_values(FORMATS["binary"]) == [1, -1]
    assert all_values(FORMATS["mxint8"])[:2] == [
        0,
        2**-6,
    ]  # OCP MX v1.0, 5.3.4: an implied scale of 2**-6
    assert max(all_values(FORMATS["mxint8"])) == 1.984375


@pytest.mark.parametrize(("code", "value"), HIF8.items())
def test_hif8_codes_of_the_publication(code, value):
    number = int(code.replace(" ", ""), 2)
    same([decode(number, FORMATS["hif8"])], [value])


def test_hif8_has_exactly_the_published_values():
    values = all_values(FORMATS["hif8"])
    finite = [v for v in values if math.isfinite(v)]
    positive = hif8_values()
    assert sorted(finite) == sorted([-v for v in positive] + [0.0] + positive)
    assert [values[c] for c in (0x6F, 0xEF)] == [math.inf, -math.inf]
    assert [c for c, v in enumerate(values) if math.isnan(v)] == [0x80]


@pytest.mark.parametrize("name", FORMATS)
def test_no_two_codes_have_the_same_value(name):
    fmt = FORMATS[name]
    if fmt.width > 16:
        pytest.skip("too many codes")
    values = [v for v in all_values(fmt) if not math.isnan(v)]
    signed = {(value, math.copysign(1.0, value)) for value in values}
    assert len(signed) == len(values)


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_wide_codes_are_those_of_the_hardware(name):
    fmt = FORMATS[name]
    kinds = {"fp32": (np.float32, np.uint32), "fp64": (np.float64, np.uint64)}[name]
    smallest = fmt.smallest_subnormal
    assert smallest is not None
    for value in [
        0.0,
        -0.0,
        1.0,
        -1.5,
        fmt.max_finite,
        fmt.smallest_normal,
        smallest,
        math.inf,
        -math.inf,
    ]:
        code = int(np.array(value, kinds[0]).view(kinds[1]))
        same([decode(code, fmt)], [value])
    assert fmt.nan_code is not None
    assert math.isnan(decode(fmt.nan_code, fmt))


def test_tf32_codes_are_the_upper_19_bits_of_fp32():
    for value in [1.0, -1.5, 3.0e38, 2.0**-136, -math.inf]:
        value = float(
            np.array(
                np.array(value, np.float32).view(np.uint32) & 0xFFFFE000, np.uint32
            ).view(np.float32)
        )
        code = int(np.array(value, np.float32).view(np.uint32)) >> 13
        same([decode(code, FORMATS["tf32"])], [value])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: decode(256, FORMATS["int8"]),
            "int8 has no such code\n  expected: 0 <= code < 256\n  got: 256",
        ),
        (lambda: decode(-1, FORMATS["bf16"]), "expected: 0 <= code < 65536"),
        (
            lambda: decode(0x80, FORMATS["int8"]),
            "the narrow range of int8 leaves out this code",
        ),
        (lambda: all_values(FORMATS["fp32"]), "fp32 has too many values to list"),
    ],
)
def test_what_is_no_code_is_refused(call, message):
    with pytest.raises(FormatError) as caught:
        call()
    assert message in str(caught.value)
