"""Distances of two values, from tensors and from statistics alone: against numpy, and every special case."""

from __future__ import annotations

import math

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import roundoff
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.rounding.distance import (
    VALUES,
    Distances,
    StatisticColumns,
    differently_masked,
    largest_difference,
    of_metrics,
    of_statistics,
    of_unmasked,
)
from roundoff.compare.tensors.metrics import measure
from roundoff.record.statistics import STATISTICS
from roundoff.record.statistics import measure as statistics

INF, NAN = math.inf, math.nan


def row(values, dtype=torch.float32, **columns):
    """A row of a recording of these values, its statistics by numpy in fp64 over what is finite."""
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    x = tensor.double().numpy()
    finite = x[np.isfinite(x)]
    some = finite.size > 0
    usual = {
        "shape": list(x.shape),
        "numel": x.size,
        "dtype": str(dtype).removeprefix("torch."),
        "nan": int(np.isnan(x).sum()),
        "posinf": int((x == INF).sum()),
        "neginf": int((x == -INF).sum()),
        "min": finite.min() if some else None,
        "max": finite.max() if some else None,
        "mean": finite.mean() if some else None,
        "std": finite.std() if some else None,
        "l2": float(np.linalg.norm(finite)) if some else None,
    }
    return RecordedRow(record=0, call=0, operator="add", **usual | columns)


def by_hand(one, other):
    """The formula of the docstring, in numpy on the tensors themselves."""
    a, b = np.asarray(one), np.asarray(other)
    rms, amax = np.sqrt(np.mean(a * a)), np.abs(a).max()
    return max(
        abs(np.linalg.norm(a) - np.linalg.norm(b)) / np.linalg.norm(a),
        abs(a.mean() - b.mean()) / rms,
        abs(a.std() - b.std()) / rms,
        abs(a.min() - b.min()) / amax,
        abs(a.max() - b.max()) / amax,
    )


numbers = st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=12)


@given(numbers, st.floats(-2, 2), st.integers(0, 11))
def test_of_statistics_is_the_formula(values, change, at):
    other = list(values)
    other[at % len(values)] += change
    one, two = row(values, torch.float64), row(other, torch.float64)
    found = of_statistics(one, two)
    if all(getattr(one, n) == getattr(two, n) for n in VALUES):
        assert (found.error, found.equal) == (0.0, True)
    elif one.l2 == 0:
        assert found.error == INF
    else:
        assert found.error == pytest.approx(
            by_hand(values, other), rel=1e-9, abs=1e-300
        )
        assert not found.equal


def test_of_statistics_of_recorded_tensors():
    """The recorder's own statistics, of tensors of three formats, give numpy's distance."""
    generator = torch.Generator().manual_seed(2)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(500, generator=generator).to(dtype)
        y = (x.float() * (1 + 0.01 * torch.randn(500, generator=generator))).to(dtype)
        rows = []
        for tensor in (x, y):
            known = statistics([tensor])
            recorded = {n: known[STATISTICS.index(n)] for n in VALUES}
            rows.append(row(tensor.tolist(), dtype, **recorded))
        # statistics are recorded to 2**-20 or better, and the distance is a difference of them, about 1e-3
        expected = by_hand(x.double().numpy(), y.double().numpy())
        assert of_statistics(*rows).error == pytest.approx(expected, rel=1e-2, abs=1e-5)


@given(
    st.lists(numbers.filter(lambda v: any(v)), min_size=2, max_size=6).filter(
        lambda v: len(v) % 2 == 0
    )
)
def test_relative_of_columns_is_that_of_numbers(lists):
    ones, others = lists[::2], lists[1::2]
    pairs = [
        (row(a, torch.float64), row(b, torch.float64))
        for a, b in zip(ones, others, strict=True)
    ]
    names = (*VALUES, "numel", "nan", "posinf", "neginf")
    left, right = (
        StatisticColumns(
            **{n: np.array([getattr(pair[i], n) for pair in pairs]) for n in names}
        )
        for i in (0, 1)
    )
    found = largest_difference(
        left, right, lambda *v: np.maximum.reduce(np.broadcast_arrays(*v))
    )
    assert found.tolist() == pytest.approx(
        [largest_difference(a, b, max) for a, b in pairs], rel=1e-12
    )


def test_equal_hashes_are_equal_whatever_else():
    one = row([1.0, NAN], hash="x")
    assert of_statistics(one, row([5.0, 2.0, 3.0], hash="x")).equal
    # the same statistics are not the same tensor where the hashes say so
    found = of_statistics(row([1.0, 2.0], hash="x"), row([2.0, 1.0], hash="y"))
    assert (found.error, found.equal) == (0.0, False)
    assert of_statistics(
        row([1.0, 2.0], hash="x"), row([2.0, 1.0])
    ).equal  # taken for equal: nothing says otherwise


@pytest.mark.parametrize(
    ("one", "other", "error"),
    [
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([0.0, 0.0], [0.0, 1.0], INF),  # no relative distance from zero
        ([2.0, 0.0], [0.0, 0.0], 1.0),
        ([1.0, NAN], [1.0, NAN], 0.0),
        ([1.0, NAN], [1.0, 1.0], INF),
        ([1.0, INF], [1.0, INF], 0.0),
        ([1.0, INF], [1.0, -INF], INF),
        ([NAN, NAN], [NAN, NAN], 0.0),
        ([], [], 0.0),
        ([1.0, 2.0], [1.0], INF),  # another shape
    ],
)
def test_special_values(one, other, error):
    assert of_statistics(row(one), row(other)).error == error


def test_unknown_without_statistics():
    bare = row([1.0], **dict.fromkeys(("nan", "posinf", "neginf", *VALUES)))
    for pair in ((bare, row([1.0])), (row([1.0]), bare), (bare, bare)):
        assert of_statistics(*pair).error is None


LOWEST = {d: torch.finfo(d).min for d in (torch.float32, torch.bfloat16, torch.float16)}


def test_additive_masks():
    """-Inf in one program, the lowest number of a format in the other: their distance means nothing."""
    infinite, lowest = row([0.0, -INF]), row([0.0, LOWEST[torch.float32]])
    half = row([0.0, LOWEST[torch.bfloat16]], torch.bfloat16)
    for pair in ((infinite, lowest), (lowest, infinite), (half, lowest)):
        assert differently_masked(*pair)
        assert (of_statistics(*pair).error, of_statistics(*pair).masked) == (0.0, True)
    assert not differently_masked(
        infinite, row([1.0, -INF])
    )  # the same mask: the rest is compared
    assert not differently_masked(lowest, lowest)
    assert not differently_masked(
        infinite, row([0.0, -1e4])
    )  # too small a number for a mask: a finding
    assert of_statistics(infinite, row([0.0, -1e4])).error == INF
    assert not differently_masked(row([NAN, -INF]), lowest)
    assert not differently_masked(row([INF, -INF]), lowest)
    assert not differently_masked(
        row([0, -(2**31)], torch.int32), row([0, 1], torch.int32)
    )


class Kept(dict):
    """The tensors of a step, by record; views have the key of what they are views of."""

    reads = 0

    def key(self, record):
        return self[record].data_ptr(), tuple(self[record].shape)

    def dense(self, record):
        return None  # views of other memory

    def __getitem__(self, record):
        Kept.reads += 1
        return super().__getitem__(record)


def test_from_tensors_where_both_kept_them():
    x = torch.tensor([1.0, 2.0, 2.0])
    y = torch.tensor([1.0, 2.0, 2.5])
    ours = {0: row([1.0, 2.0, 2.0]), 1: row([1.0, 2.0, 2.0])}
    theirs = {0: row([1.0, 2.0, 2.5]), 1: row([1.0, 2.0, 2.5])}
    measured = Distances(ours, theirs, Kept({0: x}), Kept({0: y}))
    assert measured(0, 0).error == 0.5 / 3  # |x| = 3
    assert measured.full(0, 0)[1].max_abs == 0.5
    distance, metrics = measured.full(1, 1)  # no tensors there
    assert metrics is None
    assert distance.error == by_hand(x.double().numpy(), y.double().numpy())
    assert Distances(ours, theirs, None, None).full(0, 0)[1] is None


def test_a_tensor_of_another_shape_is_infinitely_far():
    ours, theirs = {0: row([1.0, 2.0])}, {0: row([1.0, 2.0, 2.0])}
    kept = Kept({0: torch.ones(2)}), Kept({0: torch.ones(3)})
    assert Distances(ours, theirs, *kept)(0, 0).error == math.inf


def test_axes_of_one_element_are_no_difference():
    x = torch.tensor([1.0, 2.0])
    ours, theirs = {0: row([1.0, 2.0])}, {0: row([[1.0, 2.5]])}
    kept = Kept({0: x}), Kept({0: torch.tensor([[1.0, 2.5]])})
    assert Distances(ours, theirs, *kept)(0, 0).error == pytest.approx(0.5 / 5**0.5)
    assert Distances(ours, theirs, None, None)(0, 0).error < math.inf


@pytest.mark.parametrize(
    ("one", "other", "error", "equal"),
    [
        ([], [], 0.0, True),
        ([1.0, 2.0], [1.0, 2.0], 0.0, True),
        ([3.0, 4.0], [3.0, 4.5], 0.1, False),
        ([NAN, 1.0], [NAN, 1.0], 0.0, True),
        ([NAN, 1.0], [1.0, 1.0], INF, False),
        ([INF], [-INF], INF, False),
        ([0.0, 0.0], [0.0, 1.0], INF, False),
        ([0.0], [-0.0], 0.0, False),
        ([NAN, 3.0, 4.0], [NAN, 3.0, 4.5], 0.1, False),
    ],
)
def test_of_metrics(one, other, error, equal):
    found = of_metrics(measure(torch.tensor(one), torch.tensor(other)))
    assert found.error == (
        error if math.isinf(error) else pytest.approx(error, rel=1e-7)
    )
    assert found.equal == equal


def test_a_tensor_and_its_views_are_measured_once(tmp_path):
    """Of all views of one memory that show all of it the metrics are those of the memory, each with its own index."""
    base, other = torch.arange(12.0).view(3, 4), torch.arange(12.0).view(3, 4)
    other[2, 1] = 100
    for name, tensor in (("one", base), ("two", other)):
        with roundoff.capture(tmp_path / name, keep="tensors") as run:
            (tensor.clone().t() * 1).view(4, 3)
            run.step()
    table = roundoff.compare(
        reference=tmp_path / "one", candidate=tmp_path / "two"
    ).table
    found = {row["site"]: row for row in table.filter(pl.col("error") > 0).to_dicts()}
    assert found["/clone"]["worst_index"] == [2, 1]
    assert (
        found["/t"]["worst_index"]
        == [1, 2]
        == found["/mul"]["worst_index"]
        == found["/view"]["worst_index"]
    )
    assert {row["worst_candidate"] for row in found.values()} == {100.0}
    assert len({row["rel_l2"] for row in found.values()}) == 1


MASK = float(np.finfo(np.float32).min)


@pytest.mark.parametrize(
    ("ours", "theirs", "error"),
    [
        # 5 of 5: sqrt((8 - 4)^2 + 0) / sqrt(4^2 + 3^2)
        ([4.0, 3.0, MASK], [8.0, 3.0, -INF], 4 / 5),
        ([4.0, 3.0, -INF], [4.0, 3.0, MASK], 0.0),
    ],
)
def test_what_two_masks_leave_is_compared(ours, theirs, error):
    found = of_unmasked(torch.tensor(ours), torch.tensor(theirs))
    assert found.error == pytest.approx(error)
    assert not found.masked


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [([4.0, MASK], [-INF, 1.0]), ([MASK, MASK], [-INF, -INF])],
)
def test_masks_of_other_elements_or_of_all_have_no_distance(ours, theirs):
    assert of_unmasked(torch.tensor(ours), torch.tensor(theirs)).masked
