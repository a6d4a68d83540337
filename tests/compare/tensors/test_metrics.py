"""Metrics against fp64 arithmetic written out in numpy, mpmath and exhaustive lists of codes."""

from __future__ import annotations

import math
from dataclasses import astuple

import ml_dtypes
import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.compare.tensors.metrics import Metrics, measure

nan, inf = math.nan, math.inf
FLOATS = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
#: fp32 sums of a row: four pieces, 64 terms in each of 16 lanes, then the lanes: (2 + 64 + 4) 2**-24 of the sum at most, and
#: a few for the arithmetic of a term. All terms of these sums are positive.
ROWS = 2.0**-17
NORMS = (
    "rel_l2",
    "mean_abs",
    "mean_rel",
    "ulp_mean",
    "l2_reference",
    "l2_candidate",
    "l2_error",
)
EXACT = (
    "numel compared equal rel_undefined nan_both nan_reference nan_candidate inf_both inf_reference inf_candidate"
).split()


def wide(tensor):
    if tensor.is_complex():
        return tensor.to(torch.complex128).resolve_conj().numpy().ravel()
    return (
        tensor.to(torch.float32).to(torch.float64).numpy().ravel()
        if tensor.element_size() == 1 and tensor.is_floating_point()
        else tensor.detach().to(torch.float64).numpy().ravel()
    )


def oracle(reference, candidate):
    """Straight from the definitions, in fp64."""
    r, c = wide(reference), wide(candidate)
    with np.errstate(all="ignore"):
        ok = np.isfinite(r) & np.isfinite(c)
        x, y = r[ok], c[ok]
        d = np.abs(x - y)
        solid = x != 0
        signed = np.isinf(r) & np.isinf(c) & (r == c)
        found = {
            "numel": r.size,
            "compared": int(ok.sum()),
            "rel_undefined": int((~solid & (y != 0)).sum()),
            "nan_both": int((np.isnan(r) & np.isnan(c)).sum()),
            "nan_reference": int((np.isnan(r) & ~np.isnan(c)).sum()),
            "nan_candidate": int((~np.isnan(r) & np.isnan(c)).sum()),
            "inf_both": int(signed.sum()),
            "inf_reference": int((np.isinf(r) & ~signed).sum()),
            "inf_candidate": int((np.isinf(c) & ~signed).sum()),
            "max_abs": float(d.max()),
            "mean_abs": float(d.mean()),
            "l2_reference": float(np.sqrt((np.abs(x) ** 2).sum())),
            "l2_candidate": float(np.sqrt((np.abs(y) ** 2).sum())),
            "l2_error": float(np.sqrt((d**2).sum())),
        }
        if solid.any():
            rel = d[solid] / np.abs(x[solid])
            found |= {"max_rel": float(rel.max()), "mean_rel": float(rel.mean())}
            found["rel_l2"] = found["l2_error"] / found["l2_reference"]
    return found


def check(reference, candidate, tolerance=ROWS):
    before = reference.clone(), candidate.clone()
    metrics = measure(reference, candidate)
    for tensor, copy in zip((reference, candidate), before, strict=True):
        if tensor.numel() and not tensor.is_complex():
            raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[
                tensor.element_size()
            ]
            assert torch.equal(
                tensor.detach().contiguous().view(raw),
                copy.detach().contiguous().view(raw),
            )
    for name, value in oracle(reference, candidate).items():
        got = getattr(metrics, name)
        if name in EXACT:
            assert got == value, name
        elif value and (value < 1e-150 or value > 1e150):
            pass  # squares of the oracle's own leave fp64
        else:
            assert got == pytest.approx(
                value, rel=2.0**-22 if name.startswith("max") else tolerance, abs=0
            ), name
    for value in astuple(metrics):
        assert not (isinstance(value, float) and math.isnan(value))
    return metrics


def noisy(n, dtype, other=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, generator=generator, dtype=torch.float32).mul(3)
    return x.to(dtype), (x * (1 + 0.01 * torch.randn(n, generator=generator))).to(
        other or dtype
    )


@pytest.mark.parametrize(
    "size", [1, 5, 2047, 2048, 2049, 5000, 131_072, 140_001, 600_000]
)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floating_point(dtype, size):
    metrics = check(*noisy(size, dtype))
    r, c = (wide(t) for t in noisy(size, dtype))
    place = int(np.abs(r - c).argmax())
    # in fp32 the largest differences may round to the same
    (index,) = metrics.worst_index
    assert abs(r[index] - c[index]) == pytest.approx(
        abs(r[place] - c[place]), rel=2.0**-23
    )
    assert (metrics.worst_reference, metrics.worst_candidate) == (r[index], c[index])
    assert metrics.equal == np.mean(r == c)
    assert metrics.cosine == pytest.approx(
        float(r @ c / np.sqrt((r @ r) * (c @ c))), abs=1e-9
    )
    assert metrics.sqnr_db == (
        inf if not metrics.rel_l2 else pytest.approx(-20 * math.log10(metrics.rel_l2))
    )


PAIRS = [
    (torch.float32, torch.bfloat16),
    (torch.float16, torch.float32),
    (torch.bfloat16, torch.float16),
    (torch.float64, torch.float32),
    (torch.float8_e4m3fn, torch.float16),
    (torch.float8_e4m3fnuz, torch.float8_e4m3fn),
    (torch.float32, torch.int32),
    (torch.complex64, torch.float32),
    (torch.int64, torch.bool),
]


@pytest.mark.parametrize("pair", PAIRS, ids=str)
@pytest.mark.parametrize("size", [100, 3000, 150_000])
def test_formats_may_differ(pair, size):
    reference, candidate = noisy(size, *pair)
    check(reference, candidate)
    metrics = check(candidate, reference)
    assert metrics.equal == np.mean(wide(reference) == wide(candidate))


@pytest.mark.parametrize("dtype", FLOATS[:5], ids=str)
@pytest.mark.parametrize("size", [40, 3000, 140_000])
def test_special_values_by_sign_and_place(dtype, size):
    reference, candidate = noisy(size, dtype)
    values = [(nan, nan), (nan, 1.0), (2.0, nan)]
    if dtype is not torch.float8_e4m3fn:
        values += [
            (inf, inf),
            (-inf, -inf),
            (inf, -inf),
            (inf, 5.0),
            (-3.0, inf),
            (nan, inf),
        ]
    for place, (r, c) in enumerate(values):
        reference[4 * place + 3], candidate[4 * place + 3] = r, c
    metrics = check(reference, candidate)
    assert metrics.worst_index == [7]
    assert (metrics.worst_reference, metrics.worst_candidate) == (None, 1.0)
    if size == 3000:  # the same payload of NaN counts as equal
        same = measure(reference, reference)
        assert (same.equal, same.rel_l2, same.sqnr_db) == (1.0, 0.0, inf)


def test_nothing_finite_in_both():
    metrics = measure(torch.tensor([nan, inf, 1.0]), torch.tensor([1.0, inf, nan]))
    assert (
        metrics.compared,
        metrics.nan_reference,
        metrics.nan_candidate,
        metrics.inf_both,
    ) == (0, 1, 1, 1)
    assert metrics.reason == "no element is finite in both"
    assert (
        metrics.cosine is metrics.max_abs is metrics.ulp_max is metrics.l2_error is None
    )
    assert metrics.worst_index == [0]


def test_zeros():
    zero, one = torch.zeros(3), torch.tensor([1.0, 0.0, 0.0])
    both = measure(zero, zero)
    assert (both.cosine, both.rel_l2, both.sqnr_db, both.max_rel, both.reason) == (
        None,
        0.0,
        inf,
        None,
        "both are zero",
    )
    gone = measure(one, zero)
    assert (gone.cosine, gone.rel_l2, gone.sqnr_db, gone.reason) == (
        None,
        1.0,
        0.0,
        "the candidate is zero",
    )
    new = measure(zero, one)
    assert (new.cosine, new.rel_l2, new.sqnr_db, new.rel_undefined) == (
        None,
        None,
        None,
        1,
    )
    assert new.reason == "the reference is zero"


@pytest.mark.parametrize("size", [1, 1000, 3000, 140_000])
def test_a_part_that_was_not_written(size):
    reference, candidate = noisy(size, torch.float32)
    candidate[size // 2 :] = 0.0
    check(reference, candidate)
    check(candidate, reference)


def test_cosine_close_to_one():
    """A turn by a small angle, against 50 digits of mpmath: fp64 sums of products would only have 1e-16."""
    torch.manual_seed(0)
    r = torch.randn(4096, dtype=torch.float64)
    r[-1] = 0
    for turn in (1e-3, 1e-6):
        c = r.clone()
        c[-1] = turn * r.norm()
        for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 2.0**-12)):
            x, y = r.to(dtype), c.to(dtype)
            with mpmath.workdps(50):
                a, b = [[mpmath.mpf(v) for v in t.tolist()] for t in (x, y)]
                off = 1 - mpmath.fdot(a, b) / mpmath.sqrt(
                    mpmath.fdot(a, a) * mpmath.fdot(b, b)
                )
            # a result of fp64 beside 1 has steps of 2**-53
            assert 1 - measure(x, y).cosine == pytest.approx(
                float(off), rel=tolerance, abs=2.0**-52
            )
    assert measure(r, 3 * r).cosine == pytest.approx(1.0, abs=2.0**-52)
    assert measure(r, -r).cosine == pytest.approx(-1.0, abs=2.0**-50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [1e-44, 1e-30, 1e-18, 1e15, 1e25, 2e38])
def test_where_squares_leave_fp32(scale, dtype):
    r, c = (t.double() for t in noisy(5000, torch.float32))
    r, c = (t.clamp(-1.5, 1.5) * scale for t in (r, c))
    metrics = check(r.to(dtype), c.to(dtype))
    assert metrics.cosine == pytest.approx(
        check(r, c).cosine, abs=0.3 if scale == 1e-44 else 1e-6
    )


def test_where_squares_leave_fp64():
    r, c = torch.tensor([3.0, 4.0]).double(), torch.tensor([3.0, 4.5]).double()
    for scale in (1e-300, 1e-160, 1.0, 1e160, 1e300):
        metrics = measure(r * scale, c * scale)
        assert metrics.l2_reference == pytest.approx(5 * scale, rel=1e-12)
        assert metrics.rel_l2 == pytest.approx(0.1, rel=1e-9)
        assert metrics.cosine == pytest.approx(0.99846035320541, rel=1e-9)
    most = torch.tensor([torch.finfo(torch.float64).max, 1.0], dtype=torch.float64)
    assert measure(most, -most).max_abs == inf


def test_integers_are_exact_where_fp64_is_not():
    big = 2**62
    r = torch.tensor([big, -(2**63), 5], dtype=torch.int64)
    c = torch.tensor([big + 1, 2**63 - 1, 5], dtype=torch.int64)
    metrics = measure(r, c)
    assert (metrics.equal, metrics.max_abs, metrics.worst_index) == (
        1 / 3,
        2.0**64,
        [1],
    )
    assert metrics.ulp_max is None
    assert measure(r[:1], c[:1]).max_abs == 1.0
    assert (
        measure(
            torch.tensor([2**64 - 1], dtype=torch.uint64),
            torch.tensor([0], dtype=torch.uint64),
        ).max_abs
        == 2.0**64
    )
    flags = measure(torch.tensor([True, False]), torch.tensor([True, True]))
    assert (flags.equal, flags.max_abs, flags.rel_undefined) == (0.5, 1.0, 1)


def test_complex_by_modulus():
    r = torch.tensor([3 + 4j, 1j])
    metrics = check(r, r * (1 + 1e-3j))
    assert metrics.max_abs == pytest.approx(
        5e-3, abs=5 * 2.0**-23
    )  # the product is rounded to complex64
    assert metrics.ulp_max is None
    turned = measure(r.to(torch.complex128), r.to(torch.complex128) * 1j)
    assert turned.cosine == pytest.approx(0.0, abs=1e-15)
    check(r.conj(), r)
    check(
        torch.tensor([complex(nan, 1), complex(inf, 0), 1j]),
        torch.tensor([complex(1, nan), complex(inf, 0), 1j]),
    )


@pytest.mark.parametrize(
    ("reference", "candidate", "reason"),
    [
        (torch.ones(2, 3), torch.ones(3, 2), "shape (2, 3) against (3, 2)"),
        (torch.ones(1), torch.ones(()), "shape (1,) against ()"),
        (torch.empty(0, 3), torch.empty(0, 3), "empty"),
        (
            torch.empty(2, device="meta"),
            torch.ones(2),
            "reference: a meta tensor has no values",
        ),
        (
            torch.ones(2),
            torch.ones(2).to_sparse(),
            "candidate: a sparse tensor is not compared",
        ),
        (
            torch.empty(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            torch.ones(2),
            "reference: float4_e2m1fn_x2 has no numbers that torch can read",
        ),
    ],
)
def test_what_cannot_be_compared_says_why(reference, candidate, reason):
    metrics = measure(reference, candidate)
    assert metrics == Metrics(
        reason=reason, numel=metrics.numel, compared=metrics.compared
    )
    assert (metrics.numel, metrics.compared) == (
        (0, 0) if reason == "empty" else (None, None)
    )


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized():
    quantized = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    assert (
        measure(quantized, torch.ones(2)).reason
        == "reference: a quantized tensor is not compared"
    )


def test_layouts_and_the_index_of_the_worst():
    torch.manual_seed(0)
    base = torch.randn(4, 8, 20, 30)
    other = base.clone()
    other[3, 1, 19, 7] += 9
    for view in (
        lambda t: t.transpose(1, 3),
        lambda t: t[:, 1::3],
        lambda t: t.to(memory_format=torch.channels_last),
    ):
        for reference in (view(base), view(base).contiguous()):
            metrics = check(reference, view(other))
            assert metrics.max_abs == pytest.approx(9, abs=1e-5)
            assert (
                view(other)[tuple(metrics.worst_index)]
                == metrics.worst_candidate
                == other[3, 1, 19, 7]
            )
    assert measure(base[0, 0, 0, :1].expand(4), torch.zeros(4)).compared == 4
    assert measure(torch.tensor(2.0), torch.tensor(2.5)).worst_index == []
    assert measure(torch.nn.Parameter(base), other).worst_index == [3, 1, 19, 7]
    odd = torch.randn(200_001).bfloat16()
    check(odd[1:], (odd * 1.01)[1:])


def test_storage_may_be_resized_afterwards():
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64):
        for size in (10, 3000):
            tensor = torch.ones(size, dtype=dtype)
            measure(tensor, tensor.clone())
            tensor.untyped_storage().resize_(0)


@settings(deadline=None, max_examples=150)
@given(st.data())
def test_any_values(data):
    dtype, other = (data.draw(st.sampled_from(FLOATS)) for _ in range(2))
    shape = data.draw(st.lists(st.integers(1, 5), max_size=3))
    values = st.lists(
        st.floats(width=32), min_size=math.prod(shape), max_size=math.prod(shape)
    )
    r = torch.tensor(data.draw(values), dtype=torch.float32).view(shape).to(dtype)
    c = torch.tensor(data.draw(values), dtype=torch.float32).view(shape).to(other)
    if data.draw(st.booleans()) and len(shape) > 1:
        r, c = r.transpose(0, -1), c.transpose(0, -1)
    if data.draw(
        st.booleans()
    ):  # the compiled pass, with the same values again and again
        r, c = (
            r.repeat(900, *[1] * max(0, r.dim() - 1)),
            c.repeat(900, *[1] * max(0, c.dim() - 1)),
        )
    finite = np.isfinite(wide(r)) & np.isfinite(wide(c))
    if finite.any():
        check(r, c)
    else:
        assert measure(r, c).reason == "no element is finite in both"


def test_values_of_fp8_are_those_of_ml_dtypes():
    for dtype, name in (
        (torch.float8_e4m3fn, "float8_e4m3fn"),
        (torch.float8_e5m2, "float8_e5m2"),
    ):
        raw = np.arange(256, dtype=np.uint8)
        values = raw.view(getattr(ml_dtypes, name)).astype(np.float64)
        finite = values[np.isfinite(values)]
        metrics = measure(torch.from_numpy(raw).view(dtype), torch.zeros(256).to(dtype))
        assert metrics.l2_reference == pytest.approx(
            np.sqrt((finite**2).sum()), rel=1e-12
        )
        assert metrics.max_abs == np.abs(finite).max()
