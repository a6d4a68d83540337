"""Statistics against numpy in fp64, for every dtype, with special values, sizes around the limits of the paths."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roundoff.record.samples import SAMPLE
from roundoff.record.statistics import STATISTICS, Statistics, in_memory_order
from roundoff.record.statistics_kernel import COMPILED, FUNCTIONS, ROW, compiled

FLOATS = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def oracle(tensor):
    """By numpy on fp64 values, one element after the other where it counts."""
    tiny = torch.finfo(tensor.dtype).tiny if tensor.dtype.is_floating_point else 0.0
    wide = tensor.to(torch.float32) if tensor.dtype in FLOATS[4:] else tensor
    wide = wide.abs() if wide.is_complex() else wide
    x = wide.to(torch.float64).reshape(-1).numpy()
    finite = x[np.isfinite(x)]
    marks = (
        np.isnan(x),
        x == np.inf,
        x == -np.inf,
        x == 0,
        (np.abs(x) < tiny) & (x != 0),
    )
    counts = [mark.sum() for mark in marks]
    if not len(finite):
        return [None] * 5 + [int(c) for c in counts]
    with np.errstate(over="ignore"):
        values = [
            finite.min(),
            finite.max(),
            finite.mean(),
            np.sqrt((finite**2).sum()),
            finite.std(),
        ]
    return [float(v) for v in values] + [int(c) for c in counts]


def statistics(*tensors):
    collected = Statistics()
    for number, tensor in enumerate(tensors):
        collected.add(number, tensor)
    rows, histograms = collected.finish()
    return [rows[i] for i in range(len(tensors))], histograms


def check(row, tensor):
    found, expected = (
        dict(zip(STATISTICS, row, strict=True)),
        dict(zip(STATISTICS, oracle(tensor), strict=True)),
    )
    for name in ("nan", "posinf", "neginf", "zero", "subnormal"):
        assert found[name] == expected[name], name
    if expected["min"] is None:
        assert [found[n] for n in STATISTICS[:5]] == [None] * 5
        return
    assert (found["min"], found["max"]) == (expected["min"], expected["max"])
    # fp32 sums: lanes of 64 terms, then rows: 2**-24 * (64 + 10) of the sum of magnitudes at most
    accuracy = 2.0**-17
    magnitude = expected["l2"] / math.sqrt(
        max(1, tensor.numel())
    )  # the mean of |x| is at most this
    assert found["l2"] == pytest.approx(expected["l2"], rel=accuracy)
    assert found["mean"] == pytest.approx(
        expected["mean"], rel=accuracy, abs=accuracy * magnitude
    )
    # the spread is taken around the mean where it is below 2**-10 of the mean square: an error of 2**-17 of that is
    # 2**-7 of it
    assert found["std"] == pytest.approx(
        expected["std"], rel=2.0**-7, abs=accuracy * magnitude
    )


SIZES = [
    1,
    2,
    SAMPLE - 1,
    SAMPLE,
    SAMPLE + 1,
    ROW,
    2 * ROW - 1,
    2 * ROW,
    2 * ROW + 1,
    5000,
    70_001,
]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floating_point(dtype):
    torch.manual_seed(0)
    tensors = [torch.randn(n, dtype=torch.float32).mul(3.0).to(dtype) for n in SIZES]
    rows, _ = statistics(*tensors)
    for row, tensor in zip(rows, tensors, strict=True):
        check(row, tensor)


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool],
    ids=str,
)
def test_integers_and_booleans_count_as_numbers(dtype):
    tensors = [
        torch.randint(0, 2 if dtype is torch.bool else 100, (n,)).to(dtype)
        for n in SIZES
    ]
    rows, _ = statistics(*tensors)
    for row, tensor in zip(rows, tensors, strict=True):
        check(row, tensor)


@pytest.mark.parametrize("size", [700, 3000, 70_001])
@pytest.mark.parametrize("dtype", FLOATS[:4], ids=str)
def test_special_values_are_counted_and_left_out(dtype, size):
    torch.manual_seed(1)
    tensor = torch.randn(size).to(dtype)
    for place, value in enumerate(
        [
            math.nan,
            math.inf,
            math.inf,
            -math.inf,
            0.0,
            -0.0,
            torch.finfo(dtype).tiny / 2,
        ]
    ):
        tensor[place * 50 + 3] = value
    (row,), _ = statistics(tensor)
    check(row, tensor)
    assert row[5:8] == (1, 2, 1)


@pytest.mark.parametrize("size", [3, ROW + 3])
def test_a_signalling_nan_is_counted_without_a_warning(size):
    """As memory that was not written yet holds it: numpy says "invalid value" when it casts one."""
    x = torch.ones(size)
    x.view(torch.int32)[-1] = 0x7FA00000
    (found,), _ = statistics(x)
    check(found, x)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nothing_finite(value):
    tensors = [torch.full((n,), value) for n in (3, 5000)]
    rows, histograms = statistics(*tensors)
    for row, tensor in zip(rows, tensors, strict=True):
        check(row, tensor)
    assert histograms[1][1] == []


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((5000,), 3.0),
        torch.full((5000,), 1e-41),
        torch.full((70_000,), 3e38),
        torch.zeros(5000),
        torch.randn(5000) * 1e25,
        torch.randn(5000) * 1e-30,
        1e4 + torch.randn(5000),
        torch.randn(5000).mul(1e-3).add(1.0),
        torch.cat(
            [torch.randn(3000), torch.full((3000,), torch.finfo(torch.float32).min)]
        ),
    ],
    ids=[
        "constant",
        "subnormal",
        "huge",
        "zeros",
        "1e25",
        "1e-30",
        "far",
        "near one",
        "mask",
    ],
)
def test_where_fp32_sums_would_fail(tensor):
    (row,), _ = statistics(tensor)
    check(row, tensor)


def test_empty_scalar_complex():
    waves = torch.randn(3000, dtype=torch.complex64)
    tensors = [
        torch.empty(0),
        torch.empty(0, 3, dtype=torch.int64),
        torch.tensor(-2.5),
        waves,
    ]
    rows, histograms = statistics(*tensors)
    assert rows[0] == rows[1] == (None, None, None, None, None, 0, 0, 0, 0, 0)
    assert rows[2] == (-2.5, -2.5, -2.5, 2.5, 0.0, 0, 0, 0, 0, 0)
    check(rows[3], tensors[3])
    assert histograms[2] == (1, [1], 1)


def test_layouts_have_the_statistics_of_their_elements():
    torch.manual_seed(0)
    base = torch.randn(40, 30, 20)
    tensors = [
        base.transpose(0, 2),
        base[::2, 3:],
        base.to(memory_format=torch.contiguous_format).permute(1, 0, 2),
        base.expand(2, 40, 30, 20),
        torch.randn(4, 8, 16, 16).to(memory_format=torch.channels_last),
    ]
    for row, tensor in zip(statistics(*tensors)[0], tensors, strict=True):
        check(row, tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_slices_of_large_tensors_are_read_block_by_block(dtype):
    """Few blocks are read where they lie, crumbs are copied; a storage may still be resized afterwards."""
    torch.manual_seed(0)
    base = (torch.randn(4, 9, 3 * ROW + 7) * 20).to(dtype)
    tensors = [
        base[:, 1:8],
        base[1:3, 2:],
        base[:, :, 5:],
        base.transpose(0, 1)[2:],
        base[:, :1].expand(4, 5, 3 * ROW + 7),
    ]
    rows, histograms = statistics(*tensors)
    for number, (row, tensor) in enumerate(zip(rows, tensors, strict=True)):
        check(row, tensor)
        assert histograms[number][2] >= SAMPLE / 2
    base.untyped_storage().resize_(
        0
    )  # what FSDP does; Tensor.numpy() would have made it an error


@pytest.mark.parametrize(
    "view",
    [
        torch.arange(1.0, 65.0)[::2],
        torch.arange(1.0, 65.0).view(8, 8)[:, 0],
        torch.tensor(3.0).expand(4, 4),
        torch.tensor([2.0]).expand(3 * SAMPLE),
        torch.ones(2, dtype=torch.float64)[0].expand(5, 2 * ROW),
    ],
)
def test_one_stride_for_all_elements(view):
    """Such a view is flat without a copy, but not dense: what lies between its elements, or behind them, is not read."""
    (row,), _ = statistics(view)
    check(row, view)


def test_memory_order_is_a_view_with_every_element_once():
    tensor = torch.randn(4, 8, 6, 5).to(memory_format=torch.channels_last)
    flat = in_memory_order(tensor)
    assert flat.data_ptr() == tensor.data_ptr()
    assert torch.equal(flat.sort().values, tensor.reshape(-1).sort().values)
    assert in_memory_order(tensor[:, :3]) is None
    assert in_memory_order(torch.randn(3).expand(2, 3)) is None


@given(st.lists(st.floats(width=32), min_size=1, max_size=600))
def test_any_numbers(values):
    tensor = torch.tensor(values, dtype=torch.float32)
    (row,), histograms = statistics(tensor)
    check(row, tensor)
    exponents = [
        math.frexp(v)[1] - 1
        for v in tensor[:: -(-len(values) // SAMPLE)].tolist()
        if math.isfinite(v) and v
    ]
    low, counts, sampled = histograms[0]
    assert sampled == len(tensor[:: -(-len(values) // SAMPLE)])
    assert sum(counts) == len(exponents)
    assert {low + i: c for i, c in enumerate(counts) if c} == {
        e: exponents.count(e) for e in set(exponents)
    }


def test_the_value_when_added_counts():
    tensor = torch.ones(5000)
    collected = Statistics()
    collected.add(0, tensor)
    tensor.zero_()
    small = torch.ones(3)
    collected.add(1, small)
    small.zero_()
    rows, _ = collected.finish()
    assert rows[0][:2] == rows[1][:2] == (1.0, 1.0)


def test_without_a_compiler_the_same_statistics(monkeypatch):
    torch.manual_seed(0)
    tensors = [torch.randn(n) for n in (3000, 600_001)] + [torch.randn(3000) * 1e25]
    expected, _ = statistics(*tensors)
    monkeypatch.setenv("ROUNDOFF_KERNEL", "eager")
    compiled.cache_clear()
    found, _ = statistics(*tensors)
    compiled.cache_clear()
    for row, tensor, other in zip(found, tensors, expected, strict=True):
        check(row, tensor)
        assert row == pytest.approx(other, rel=2.0**-7, abs=1e-4)


def test_any_processor(tmp_path, monkeypatch):
    """Without the instructions of AVX2: each pass agrees with torch when it is loaded, and
    every number of fp16 is read as numpy reads it."""
    if compiled("sums", torch.float32) is None:
        pytest.skip("no compiler on this machine")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.cache_clear()
    try:
        for dtype in COMPILED:
            for name in FUNCTIONS:
                assert compiled(name, dtype) is not None, (name, dtype)
        codes = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
        (row,), _ = statistics(codes)
        check(row, codes)
        (library,) = (tmp_path / "roundoff").iterdir()
        assert library.suffix == ".so"
    finally:
        compiled.cache_clear()


def test_a_compiler_that_fails_is_asked_once(tmp_path, monkeypatch):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiled.cache_clear()
    try:
        assert compiled("counts", torch.float16) is None
        (mark,) = (tmp_path / "roundoff").glob("kernels-*.failed")
        monkeypatch.setattr(
            "roundoff.record.statistics_kernel.subprocess.run",
            lambda *a, **k: pytest.fail("asked again"),
        )
        compiled.cache_clear()
        assert compiled("counts", torch.float16) is None
        mark.unlink()
        monkeypatch.setenv("CXX", "no-such-compiler")
        compiled.cache_clear()
        assert compiled("counts", torch.float16) is None
    finally:
        compiled.cache_clear()
