"""The elements that differ, against Python loops over the values."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.compare.tensors.element_differences import element_differences
from roundoff.report import plain

nan, inf = math.nan, math.inf


def elements(*args, **options):
    """The differences as plain data."""
    return plain(element_differences(*args, **options))


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str
)
def test_first_worst_and_axes(dtype):
    torch.manual_seed(0)
    r = torch.randn(6, 5, 7)
    c = r.clone()
    c[4:] += 0.25 * torch.randn(2, 5, 7)  # the last rows
    c[5, 2] += 8.0
    r, c = r.to(dtype), c.to(dtype)
    found = elements(r, c, limit=4)
    x, y = r.double().numpy(), c.double().numpy()
    where = np.argwhere(x != y)
    assert found["differing"] == len(where)
    assert [e["index"] for e in found["first"]] == where[:4].tolist()
    worst = sorted(where.tolist(), key=lambda i: -abs(x[tuple(i)] - y[tuple(i)]))[:4]
    assert [e["error"] for e in found["worst"]] == [
        abs(x[tuple(i)] - y[tuple(i)]) for i in worst
    ]
    for entry in found["first"] + found["worst"]:
        assert (entry["reference"], entry["candidate"]) == (
            x[tuple(entry["index"])],
            y[tuple(entry["index"])],
        )
        assert entry["error"] == abs(entry["reference"] - entry["candidate"])
    squares = (x - y) ** 2
    for axis, entry in enumerate(found["axes"]):
        along = squares.sum(tuple(a for a in range(3) if a != axis))
        assert (entry["axis"], entry["index"]) == (axis, along.argmax())
        # sums of at most 210 positive fp64 terms
        assert entry["share"] == pytest.approx(
            along.max() / along.sum(), rel=300 * 2.0**-53
        )
    assert (found["axes"][0]["index"], found["axes"][1]["index"]) == (5, 2)
    json.dumps(found, allow_nan=False)


def test_decades():
    """At powers of ten themselves, where a logarithm may be rounded to the wrong side."""
    errors = [float(f"1e{k}") for k in range(-20, 20)] + [9.99e-5, 0.3, 5e-324]
    found = elements(
        torch.zeros(43).double(), torch.tensor(errors, dtype=torch.float64)
    )
    expected = dict.fromkeys(range(-20, 20), 1) | {-324: 1}
    expected[-5] += 1
    expected[-1] += 1
    assert found["errors"] == [
        {"low": k, "count": expected[k]} for k in sorted(expected)
    ]


def test_special_values_that_disagree_are_worst():
    r = torch.tensor([1.0, nan, inf, inf, 5.0, nan, 0.0])
    c = torch.tensor([9.0, nan, inf, -inf, nan, 2.0, -0.0])
    found = elements(r, c)
    assert found["differing"] == 5  # the same NaN is the same; -0 is not +0
    assert [e["index"] for e in found["worst"]] == [[3], [4], [5], [0], [6]]
    assert found["worst"][1] == {
        "index": [4],
        "reference": 5.0,
        "candidate": None,
        "error": None,
        "ulp": None,
    }
    assert found["worst"][4]["ulp"] == 0.0
    assert found["errors"] == [{"low": 0, "count": 1}]
    assert found["axes"] == [{"axis": 0, "index": 0, "share": 1.0}]


def test_two_formats_integers_complex_scalars():
    assert (
        elements(
            torch.tensor([1.0, -0.0]), torch.tensor([1.0, 0.0], dtype=torch.bfloat16)
        )["differing"]
        == 0
    )
    assert (
        elements(torch.tensor([nan]), torch.tensor([nan], dtype=torch.float16))[
            "differing"
        ]
        == 0
    )
    big = elements(torch.tensor([2**62, 1]), torch.tensor([2**62 + 1, 1]))["first"]
    assert big == [
        {
            "index": [0],
            "reference": 2**62,
            "candidate": 2**62 + 1,
            "error": 1.0,
            "ulp": None,
        }
    ]
    assert (
        elements(torch.tensor([3 + 4j]), torch.tensor([0j]))["worst"][0]["error"] == 5.0
    )
    assert elements(torch.tensor(1.0), torch.tensor(2.0))["first"][0]["index"] == []
    assert elements(torch.tensor(1.0), torch.tensor(2.0), limit=0)["first"] == []
    same = elements(torch.ones(3), torch.ones(3))
    assert same == {"differing": 0, "first": [], "worst": [], "errors": [], "axes": []}


def test_errors_whose_squares_vanish_or_overflow():
    for scale in (1e-300, 1e300):
        r = torch.zeros(2, 3, dtype=torch.float64)
        c = r.clone()
        c[1, 2], c[0, 2] = 2 * scale, scale
        shares = [e["share"] for e in elements(r, c)["axes"]]
        assert shares == [pytest.approx(0.8), 1.0]


@pytest.mark.parametrize(
    ("reference", "candidate", "reason"),
    [
        (torch.ones(2), torch.ones(3), "shape (2,) against (3,)"),
        (torch.empty(0), torch.empty(0), "empty"),
        (
            torch.ones(2),
            torch.empty(2, device="meta"),
            "candidate: a meta tensor has no values",
        ),
    ],
)
def test_reasons(reference, candidate, reason):
    assert elements(reference, candidate) == {"reason": reason}


def test_in_chunks(monkeypatch):
    torch.manual_seed(0)
    r = torch.randn(40, 25).mul(4).round()
    c = r + torch.randint(-1, 2, r.shape)
    whole = elements(r, c)
    monkeypatch.setattr("roundoff.compare.tensors.element_differences._CHUNK", 64)
    assert elements(r, c) == whole
    assert elements(r.t().contiguous().t(), c) == whole


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(*[st.floats(width=32)] * 2), min_size=1, max_size=40),
    st.integers(1, 5),
)
def test_any_values(values, limit):
    r, c = (torch.tensor(v, dtype=torch.float32) for v in zip(*values, strict=True))
    found = elements(r, c, limit)
    json.dumps({**found, "first": [], "worst": []}, allow_nan=False)
    differ = (r.view(torch.int32) != c.view(torch.int32)).nonzero().flatten().tolist()
    assert found["differing"] == len(differ)
    assert [e["index"] for e in found["first"]] == [[i] for i in differ[:limit]]
    errors = [math.inf if e["error"] is None else e["error"] for e in found["worst"]]
    assert errors == sorted(errors, reverse=True)
    assert len(errors) == min(limit, len(differ))
