"""Where a piece stands in a whole: slices, rows in another order, paddings, multiples."""

from __future__ import annotations

import math

import pytest
import torch

from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.judging.table import frame_of, judged, left_open
from roundoff.compare.judging.table import whole as table_of
from roundoff.compare.portions.comparison import without_tensors
from roundoff.compare.portions.location import holds_stretch, locate, multiple
from roundoff.compare.records.recorded_rows import RecordedRow

TOLERANCE = 1e-6


def test_parts_that_statistics_cannot_put_together_leave_it_open():
    """Of a layout without tensors nothing says that its parts are right."""
    counts = dict.fromkeys(("nan", "posinf", "neginf", "zero", "subnormal"), 0)
    numbers = {"min": -1.0, "max": 1.0, "mean": 0.0, "std": 0.5, **counts}

    def row(record, rows, l2):
        return RecordedRow(
            record,
            record,
            "mm",
            dtype="float32",
            shape=(rows, 3),
            numel=3 * rows,
            l2=l2,
            **numbers,
        )

    whole = RecordedStep({0: row(0, 4, 2.0), 1: row(1, 2, 1.0)})
    part = RecordedStep({0: row(0, 2, 9.0), 1: row(1, 2, 1.0)})
    compared = table_of([frame_of(without_tensors(whole, {0: part}, str))])
    table = judged(compared, {})
    assert table["verdict"].to_list() == ["undecided", "pass"]
    assert left_open(table) == 1


@pytest.fixture
def whole():
    draw = torch.Generator().manual_seed(0)
    return torch.randn(4, 6, 5, generator=draw)


@pytest.mark.parametrize(
    "part",
    [
        (slice(1, 3), slice(None), slice(None)),
        (slice(None), slice(2, 5), slice(None)),
        (slice(0, 1), slice(3, 6), slice(1, 3)),
        ([2, 0, 3, 1], slice(None), slice(None)),
        ([3, 1], slice(None), slice(0, 4)),
    ],
)
def test_a_part_covers_what_it_was_cut_from(whole, part):
    location = locate(whole, whole[part], TOLERANCE)
    assert location is not None
    assert location.complete
    expected = torch.zeros(whole.shape, dtype=torch.bool)
    expected[part] = True
    assert torch.equal(location.covered, expected)


def test_padding_is_not_of_the_whole(whole):
    padded = torch.nn.functional.pad(whole, (0, 0, 2, 1), value=7.0)
    location = locate(whole, padded, TOLERANCE)
    assert location is not None
    assert not location.complete
    assert bool(location.covered.all())


def test_rows_of_sequences_in_one_row(whole):
    packed = whole[1:3].reshape(1, 12, 5)
    location = locate(whole, packed, TOLERANCE)
    assert location is not None
    assert location.complete
    assert location.covered.all(-1).all(-1).tolist() == [False, True, True, False]


def test_other_values_and_shapes_stand_nowhere(whole):
    assert locate(whole, whole[:2] + 1e-3, TOLERANCE) is None
    assert locate(whole, whole.transpose(1, 2), TOLERANCE) is None
    assert locate(whole, torch.zeros(0, 6, 5), TOLERANCE) is None
    flipped = whole.flip(-1)
    assert locate(whole, flipped, TOLERANCE) is None


def test_a_parameter_keeps_its_order(whole):
    rows = whole[0]
    assert locate(rows, rows[2:4], TOLERANCE, reordered=False) is not None
    assert locate(rows, rows[[4, 1]], TOLERANCE, reordered=False) is None
    assert locate(rows, rows[[4, 1]], TOLERANCE) is not None


def test_special_values_stand_where_they_stood(whole):
    whole[0, 1, 2] = -math.inf
    assert locate(whole, whole[:2], TOLERANCE) is not None
    moved = whole[:2].clone()
    moved[0, 1, 2] = 0.0
    assert locate(whole, moved, TOLERANCE) is None


def test_factors_of_gradients(whole):
    half = whole[:2] * 2
    assert locate(whole, half, TOLERANCE) is None
    location = locate(whole, half, TOLERANCE, (1.0, 2.0))
    assert location is not None
    assert location.factor == 2.0


def test_multiples_of_a_sum(whole):
    assert multiple(whole, whole * 3, TOLERANCE) == pytest.approx(3)
    assert multiple(whole, whole + 1, TOLERANCE) is None
    assert multiple(whole, -whole, TOLERANCE) is None
    assert multiple(torch.zeros(3), torch.zeros(3), TOLERANCE) is None


@pytest.mark.parametrize(
    ("start", "error", "held"),
    [
        (0, 0.0, True),
        (7, 0.0, True),
        (7, 1e-7, True),
        (7, 1e-2, False),
        (12, 0.0, True),
    ],
)
def test_a_stretch_of_a_flat_buffer(start, error, held):
    draw = torch.Generator().manual_seed(3)
    wanted = torch.randn(2, 4, generator=draw)
    buffer = torch.randn(20, generator=draw)
    buffer[start : start + 8] = wanted.flatten() * (1 + error)
    assert holds_stretch(buffer, wanted, 1e-6) == held


def test_no_stretch_of_what_is_longer_or_zero():
    assert not holds_stretch(torch.ones(3), torch.ones(4), 1e-6)
    assert not holds_stretch(torch.zeros(9), torch.zeros(3), 1e-6)


def test_a_stretch_that_begins_with_zeros_is_looked_for_by_its_largest_element():
    """Every place of an empty buffer fits a zero: none of 100,000 is looked at."""
    wanted = torch.zeros(1000)
    wanted[-1] = 1.0
    buffer = torch.zeros(100_000)
    assert not holds_stretch(buffer, wanted, 1e-6)
    buffer[50_000] = 1.0
    assert holds_stretch(buffer, wanted, 1e-6)
