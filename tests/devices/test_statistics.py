"""Statistics of tensors on each device, and of the largest numbers there are."""

import math

import mpmath
import pytest
import torch

from roundoff.record import statistics
from roundoff.record.statistics import Statistics


def measured(tensor):
    step = Statistics()
    step.add(0, tensor)
    rows, _ = step.finish()
    return rows[0]


def exact(tensor):
    """Mean, norm and deviation, in mpmath."""
    values = [mpmath.mpf(x) for x in tensor.double().cpu().tolist()]
    mean = mpmath.fsum(values) / len(values)
    norm = mpmath.sqrt(mpmath.fsum(x * x for x in values))
    spread = mpmath.fsum((x - mean) ** 2 for x in values) / len(values)
    return mean, norm, mpmath.sqrt(spread)


def near_the_largest(dtype, pattern, count):
    largest = torch.finfo(dtype).max
    return torch.tensor(pattern * count, dtype=torch.float64).mul(largest).to(dtype)


@pytest.mark.parametrize("count", [1, 1000])
@pytest.mark.parametrize("pattern", [[1, 1, 1, -1], [-1, -1, 1], [1, -1], [0.5, -1, 1]])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
def test_the_largest_numbers_of_both_signs(device, dtype, pattern, count):
    tensor = near_the_largest(dtype, pattern, count)
    row = measured(tensor.to(device))
    mean, norm, deviation = exact(tensor)
    # sums of 4000 terms in rows of 1024 that are added in fp32: about 2**-20 (_quick),
    # of a mean that is no less than a twelfth of the terms
    close = {"rel_tol": 1e-5}
    assert math.isclose(row.mean, mean, abs_tol=1e-6 * float(deviation), **close)
    assert math.isclose(row.std, deviation, **close)
    if norm <= torch.finfo(torch.float64).max:
        assert math.isclose(row.l2, norm, **close)
    else:
        assert row.l2 == math.inf  # it is larger than any float


def test_numbers_of_all_sizes_beside_the_largest(device):
    tensor = torch.tensor([1e308, 1.0, -1e308, 1e-308, 3e307], dtype=torch.float64)
    row = measured(tensor.repeat(200).to(device))
    mean, _, deviation = exact(tensor)
    assert math.isclose(row.mean, mean, rel_tol=1e-12)
    assert math.isclose(row.std, deviation, rel_tol=1e-12)


def test_parts_of_a_large_tensor_are_put_together(device, monkeypatch):
    monkeypatch.setattr(statistics, "_DEVICE_CHUNK", 1000)
    x = torch.randn(3500, generator=torch.Generator().manual_seed(0)).double() * 7 + 3
    x[17] = math.inf
    x[1900] = math.nan
    row = measured(x.to(device))
    finite = x[x.isfinite()]
    mean, norm, deviation = exact(finite)
    # fp64 sums of 3500 terms
    for got, expected in zip(row[2:5], (mean, norm, deviation), strict=True):
        assert math.isclose(got, expected, rel_tol=1e-12)
    assert (row.min, row.max) == (float(finite.min()), float(finite.max()))
    assert (row.nan, row.posinf, row.neginf) == (1, 1, 0)


class Stream:
    """A stream that says when somebody has waited for it."""

    def __init__(self, name, log):
        self.name = name
        self.log = log

    def synchronize(self):
        self.log.append(self.name)


def test_each_stream_has_its_own_memory_and_is_waited_for(monkeypatch):
    """The contract of streams, on the CPU: two that write side by side.

    The queue is the only place that knows of streams.
    """
    log = []
    main, side = Stream("main", log), Stream("side", log)
    current = main
    monkeypatch.setattr(
        statistics, "_queue_of", lambda device: statistics._Queue(device, current)
    )
    step = Statistics()
    step.add(0, torch.ones(4))
    current = side
    step.add(1, torch.full((4,), 2.0))
    current = main
    step.add(2, torch.full((4,), 3.0))
    assert len(step._slabs) == 2
    rows, _ = step.finish()
    assert sorted(log) == ["main", "side"]
    assert [rows[n].mean for n in range(3)] == [1.0, 2.0, 3.0]
