"""One call again as it was: the same bits are no error, another kernel's rounding is none, one per cent is."""

from __future__ import annotations

import pytest
import torch

from roundoff.compare.records.recorded_calls import RecentResults
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.rounding.same_kernel import run_as_it_was
from roundoff.ops import describe


def judged(overload, inputs, actual, place=0):
    """What is said of ``actual`` as the result of a call on ``inputs`` (tensors and numbers)."""
    tensors = {n: x for n, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
    numbers = {id(x): n for n, x in tensors.items()}
    row = RecordedRow(
        record=len(inputs),
        call=0,
        operator=overload.split(".")[1],
        overload=overload,
        place=place,
        arguments=describe(inputs, {}, lambda x: numbers[id(x)]),
    )
    read = [
        RecordedRow(
            record=number,
            call=-1,
            operator="input",
            dtype=str(x.dtype).removeprefix("torch."),
            shape=x.shape,
        )
        for number, x in tensors.items()
    ]
    tensors[row.record] = actual
    return run_as_it_was(row, row, tensors, RecentResults(), read)


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_same_bits_are_no_error(dtype):
    x = drawn(8, 16, dtype=dtype)
    assert judged("aten.gelu.default", (x,), torch.ops.aten.gelu(x)).excess == 0


def test_nan_in_the_same_places_is_the_same():
    x = drawn(8, 16, dtype=torch.bfloat16)
    assert judged("aten.log.default", (x,), x.log()).excess == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("overload", ["aten.gelu.default", "aten.exp.default"])
def test_one_per_cent_in_every_eighth_element_is_an_error(overload, dtype):
    x = drawn(8, 16, dtype=dtype)
    wrong = getattr(torch.ops.aten, overload.split(".")[1])(x)
    wrong.view(-1)[::8] *= 1.01
    assert judged(overload, (x,), wrong).at_fault


def test_one_per_cent_of_a_matrix_product_in_bf16_is_an_error():
    x = drawn(16, 32, dtype=torch.bfloat16)
    w = drawn(32, 24, dtype=torch.bfloat16, seed=1)
    wrong = ((x @ w).double() * 1.01).bfloat16()
    assert judged("aten.mm.default", (x, w), wrong).at_fault


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_result_rounded_the_other_way_is_none(dtype):
    """A kernel that cuts digits off is within one ulp, 2 u of it: more than a rounding, less than the band of 1.5."""
    x = drawn(64, 64, dtype=dtype)
    exact = x.double().exp()
    nearest = exact.to(dtype)
    other = torch.nextafter(nearest, torch.full_like(nearest, torch.inf))
    closer = (other.double() - exact).abs() < 0.7 * torch.finfo(dtype).eps * exact
    assert not judged(
        "aten.exp.default", (x,), torch.where(closer, other, nearest)
    ).at_fault


def test_a_sum_in_another_order_is_none():
    """Sums of 4096 terms in fp32 in two orders, of values that nearly cancel."""
    x = drawn(4096, 16)
    x = x - x.mean(0)
    reversed_sum = x.flip(0).cumsum(0)[-1]
    assert not judged("aten.sum.dim_IntList", (x, [0]), reversed_sum).at_fault


def test_what_draws_cannot_be_judged():
    x = drawn(8, 8)
    replay = judged("aten.bernoulli.default", (x.abs().clamp(max=1),), x)
    assert replay.excess is None
    assert "random" in replay.reason


def test_infinite_where_the_kernel_here_is_finite():
    x = drawn(8, 8)
    wrong = x.exp()
    wrong[0, 0] = torch.inf
    assert judged("aten.exp.default", (x,), wrong).at_fault
