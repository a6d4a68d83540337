"""roundoff.plan.clock: a short measurement."""

from __future__ import annotations

import math
import time

import pytest
import torch

from roundoff.errors import PlanError
from roundoff.plan.clock import SHAPES, measure_seconds
from roundoff.plan.seconds import BOUNDS


def test_measured_shapes_have_the_size_they_stand_for():
    macs = {
        "linear": lambda t, i, o: t * i * o,
        "matmul": lambda b, r, i, c: b * r * i * c,
        "conv": lambda c, side: c * c * 9 * side * side,  # 3 x 3, padded
        "elementwise": lambda n: n,
    }
    for kind, shapes in SHAPES.items():
        medium, large = BOUNDS["element" if kind == "elementwise" else "mac"]
        amount = {size: macs[kind](*shape) for size, shape in shapes.items()}
        assert amount["small"] < medium <= amount["medium"] < large <= amount["large"]


def test_measure_small():
    state = torch.get_rng_state()
    start = time.perf_counter()
    table = measure_seconds(["bf16", "int8", "mxfp4"], budget=0.2, sizes=["small"])
    assert (
        time.perf_counter() - start < 10
    )  # a budget, not a bar: one round takes about 5 ms
    assert torch.equal(torch.get_rng_state(), state)
    rows = {(row.kind, row.format): row for row in table.rows}
    floats = {(kind, fmt) for kind in SHAPES for fmt in ("fp32", "bf16")}
    narrow = {
        (kind, fmt)
        for kind in ("linear", "matmul", "conv")
        for fmt in ("int8", "mxfp4")
    }
    assert set(rows) == floats | narrow  # narrow formats run no elementwise work
    assert all(
        math.isfinite(row.seconds) and row.seconds > 0 and row.size == "small"
        for row in rows.values()
    )
    assert all("median of" in rows[case].note for case in floats)
    # What has no kernel costs what fp32 costs, and says so.
    assert rows["linear", "mxfp4"].seconds == rows["linear", "fp32"].seconds
    assert rows["linear", "mxfp4"].note == "no mxfp4 kernel on cpu: fp32's time"


def test_measure_refuses_unknown_sizes():
    with pytest.raises(PlanError, match="unknown size"):
        measure_seconds(["fp32"], sizes=["tiny"])
