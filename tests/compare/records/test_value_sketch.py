"""Values without their places: what is equal, how far others are apart, several as one, the nearest."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.records.value_sketch import (
    STRETCHES,
    SketchIndex,
    sketch_of_row,
    sketch_of_tensor,
    together,
)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def row_of(x, **others):
    x = x.double()
    return RecordedRow(
        record=0,
        call=0,
        operator="add",
        numel=x.numel(),
        min=float(x.min()),
        max=float(x.max()),
        mean=float(x.mean()),
        l2=float(x.norm()),
        std=float(x.std(unbiased=False)),
        **others,
    )


def test_places_say_nothing():
    x = drawn(3, 4, 5)
    sketch = sketch_of_tensor(x)
    other = sketch_of_tensor(x.permute(2, 0, 1).reshape(15, 4).flip(0))
    assert sketch.distance(other) == 0


def test_the_distance_is_that_of_the_sorted_values():
    x = drawn(7)
    y = drawn(7, seed=1)
    a, b = np.sort(x.double().numpy()), np.sort(y.double().numpy())
    expected = np.linalg.norm(a - b) / np.linalg.norm(a)
    # sums of seven squares in fp64
    assert sketch_of_tensor(x).distance(sketch_of_tensor(y)) == pytest.approx(
        expected, rel=1e-14
    )


@pytest.mark.parametrize(
    ("x", "y", "distance"),
    [
        (torch.zeros(3), torch.zeros(3), 0.0),
        (torch.zeros(3), torch.ones(3), math.inf),
        (torch.ones(3), torch.zeros(3), 1.0),
        (torch.ones(3), torch.ones(4), math.inf),
    ],
)
def test_zeros_and_other_sizes(x, y, distance):
    assert sketch_of_tensor(x).distance(sketch_of_tensor(y)) == distance


def test_statistics_are_no_sorted_values():
    x = drawn(5)
    assert sketch_of_tensor(x).distance(sketch_of_row(row_of(x))) == math.inf


def test_what_has_no_sketch():
    assert sketch_of_tensor(torch.empty(0, 3)) is None
    assert sketch_of_row(RecordedRow(record=0, call=0, operator="add", numel=4)) is None


def test_masks_and_what_is_not_finite_are_left_out():
    x = torch.tensor([3.0, 4.0, -1e9, math.nan, math.inf, -math.inf])
    sketch = sketch_of_tensor(x)
    assert (sketch.masked, sketch.size) == (4, 5.0)
    assert sketch_of_row(row_of(drawn(4), nan=1, neginf=2)).masked == 3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bool, torch.int64])
def test_every_ordered_format(dtype):
    x = torch.tensor([1, 0, 1]).to(dtype)
    assert sketch_of_tensor(x).values.tolist() == [0, 1, 1]


def test_a_constant():
    assert sketch_of_tensor(torch.full((4,), 2.0)).constant
    assert not sketch_of_tensor(torch.tensor([2.0, 3.0])).constant


def test_stretches_are_no_further_apart_than_the_values():
    # a mean is a projection: it never makes a distance of values larger
    x, y = drawn(5 * STRETCHES + 3), drawn(5 * STRETCHES + 3, seed=1)
    first, second = sketch_of_tensor(x), sketch_of_tensor(y)
    assert len(first.values) == STRETCHES
    whole = (x.double().sort().values - y.double().sort().values).norm()
    assert np.linalg.norm(first.values - second.values) <= float(whole) * (1 + 1e-12)
    assert first.size == pytest.approx(float(x.double().norm()), rel=1e-12)


def test_statistics_of_equal_and_scaled_values():
    x = drawn(50)
    sketch = sketch_of_row(row_of(x))
    assert sketch.distance(sketch_of_row(row_of(x))) == 0
    # every statistic of 1.5 x is 1.5 of that of x; the largest ratio is that of the norm
    scaled = sketch_of_row(row_of(1.5 * x))
    assert sketch.distance(scaled) == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(
    "sketch_of", [sketch_of_tensor, lambda x: sketch_of_row(row_of(x))]
)
def test_several_are_as_one(sketch_of):
    parts = [drawn(6, seed=seed) for seed in range(4)]
    whole = together([sketch_of(part) for part in parts])
    assert whole.numel == 24
    # the same sums in fp64, in another order
    assert sketch_of(torch.cat(parts)).distance(whole) < 1e-12


def test_of_means_several_are_not_known():
    large = sketch_of_tensor(drawn(STRETCHES + 1))
    assert large is not None
    assert together([large, large]) is None


def test_the_nearest_comes_first():
    x = drawn(20)
    index = SketchIndex(
        (key, sketch_of_tensor(y))
        for key, y in enumerate((x * 1.01, x * 1.001, x * 2, drawn(21)))
    )
    near = index.near(sketch_of_tensor(x), 0.05)
    assert [key for _, key in near] == [1, 0]
    assert [distance for distance, _ in near] == pytest.approx([1e-3, 1e-2], rel=1e-3)
    assert index.near(sketch_of_tensor(drawn(22)), 1.0) == []


def test_the_index_loses_none():
    sketches = [sketch_of_tensor(drawn(9, seed=seed)) for seed in range(40)]
    index = SketchIndex(enumerate(sketches))
    for sketch in sketches[:5]:
        near = {key for _, key in index.near(sketch, 0.3)}
        assert near == {
            key for key, other in enumerate(sketches) if sketch.distance(other) <= 0.3
        }


@pytest.mark.parametrize("numel", [1, 7, 1024, 5000])
def test_the_negative_of_a_sketch_is_that_of_the_negative(numel):
    """Of many values means of stretches are kept, which begin elsewhere: they differ by little."""
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)) + 0.3
    one, other = sketch_of_tensor(values), sketch_of_tensor(-values)
    allowed = 0.0 if numel <= STRETCHES else 0.02
    assert one.negative.distance(other) <= allowed
    if numel > 1:
        assert one.negative.distance(one) > 0.1
    row = RecordedRow(
        record=0,
        call=0,
        operator="",
        numel=2,
        min=-1.0,
        max=3.0,
        mean=1.0,
        l2=3.2,
        std=2.0,
    )
    negative = RecordedRow(
        record=0,
        call=0,
        operator="",
        numel=2,
        min=-3.0,
        max=1.0,
        mean=-1.0,
        l2=3.2,
        std=2.0,
    )
    assert sketch_of_row(row).negative.distance(sketch_of_row(negative)) == 0


@pytest.mark.parametrize("of", ["tile", "repeat_interleave"])
def test_values_laid_out_several_times(of):
    x = drawn(5, 7)
    whole = x.tile(3, 1) if of == "tile" else x.repeat_interleave(3, dim=1)
    sketch = sketch_of_tensor(whole)
    assert sketch.repeats == 3
    assert sketch.without_repeats.distance(sketch_of_tensor(x)) == 0
    assert sketch.without_repeats.size == pytest.approx(float(x.double().norm()))
    assert sketch.negative.without_repeats.distance(sketch_of_tensor(-x)) == 0


def test_many_values_laid_out_twice():
    x = drawn(2 * STRETCHES)
    sketch = sketch_of_tensor(torch.cat([x, x]))
    assert sketch.repeats == 2
    assert sketch.without_repeats.distance(sketch_of_tensor(x)) == 0


@pytest.mark.parametrize(
    "x",
    [
        pytest.param(torch.tensor([1.0, 1.0, 2.0]), id="one of them once"),
        pytest.param(torch.tensor([1.0, 1.0]), id="one value alone"),
        pytest.param(torch.tensor([1.0, 1.0, 2.0, 2.0, math.inf]), id="masked"),
    ],
)
def test_values_that_are_not_laid_out_several_times(x):
    sketch = sketch_of_tensor(x)
    assert sketch.repeats == 1
    assert sketch.without_repeats is sketch
