"""What is run again, once, from which tensors, and why it cannot be; what the reference gives on the candidate's values."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.records import recorded_calls
from roundoff.compare.records.recorded_calls import (
    CannotRun,
    RecentResults,
    ReferenceCalls,
)
from roundoff.compare.records.recorded_rows import RecordedRow

aten = torch.ops.aten


def well(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("arguments", None, "its arguments were not recorded"),
        ("overload", "mylib.scale.default", "torch does not know this operator"),
        ("overload", "aten.bernoulli.default", "random"),
        ("overload", "_c10d_functional.all_reduce.default", ""),
    ],
)
def test_what_cannot_be_run_says_why(recorded_call, replayed, name, value, reason):
    rows, tensors = recorded_call(aten.exp.default, well((5,), 0))
    found = replayed([replace(rows[0], **{name: value})], tensors)
    assert found.reason is not None
    assert reason in found.reason
    assert (found.semantic, found.excess, found.own, found.at_fault) == (
        None,
        None,
        None,
        False,
    )


def test_tensors_that_were_not_kept(recorded_call, replayed):
    rows, tensors = recorded_call(aten.mm.default, well((2, 3), 0), well((3, 2), 1))
    assert (
        replayed(rows, {0: tensors[0], 1: tensors[1]}).reason
        == "its result was not stored"
    )
    assert (
        replayed(rows, {0: tensors[0], 2: tensors[2]}).reason
        == "one of its inputs was not stored"
    )


def test_calls_on_other_shapes_are_not_set_side_by_side(recorded_call, replayed):
    ours, _ = recorded_call(aten.mul.Tensor, well((4,), 0), well((4,), 1))
    theirs, tensors = recorded_call(aten.mul.Tensor, well((9,), 0), well((9,), 1))
    found = replayed(theirs, tensors, twin=ours[0], fits=lambda _a, _b: False)
    assert (found.semantic, found.reason) == (None, None)
    assert found.excess <= 1
    one, _ = recorded_call(aten.square.default, well((9,), 0))
    assert replayed(theirs, tensors, twin=one[0]).semantic is None, (
        "another number of tensors"
    )


def test_a_result_of_another_shape_is_infinitely_far(recorded_call, replayed):
    x = well((6, 4), 0)
    ours, _ = recorded_call(aten.sum.dim_IntList, x, [0])
    theirs, tensors = recorded_call(aten.sum.dim_IntList, x, [1])
    found = replayed(theirs, tensors, twin=ours[0])
    assert found.semantic == math.inf


def test_the_reference_may_be_the_one_that_is_wrong(recorded_call, replayed):
    """Both had the same inputs, and the candidate is right."""
    rows, tensors = recorded_call(aten.mm.default, well((5, 6), 0), well((6, 5), 1))
    right = tensors[rows[0].record]
    assert not replayed(rows, tensors, result=right).at_fault
    found = replayed(rows, tensors, result=right * 1.001)
    assert found.at_fault
    assert found.excess <= 1 < found.reference_excess


def test_a_call_on_lists_runs_once(recorded_call, replayed, monkeypatch):
    calls = []
    real = recorded_calls.run_call

    def counted(*arguments):
        calls.append(arguments[3])
        return real(*arguments)

    monkeypatch.setattr(recorded_calls, "run_call", counted)
    lists = [well((5,), i) for i in range(40)]
    rows, tensors = recorded_call(aten._foreach_mul.Scalar, lists, 0.3)
    results = RecentResults()
    found = [replayed(rows, tensors, place, results=results) for place in range(40)]
    assert len(rows) == 40
    assert all(f.excess <= 1 for f in found)
    assert sorted(map(str, calls)) == ["torch.float32", "torch.float64"]


def test_nothing_that_is_kept_is_changed(recorded_call, replayed):
    a, b = well((6,), 0), well((6,), 1)
    for call in (
        (aten.add_.Tensor, a, b),
        (aten._foreach_mul_.Scalar, [a, b], 0.3),
        (aten.index_put_.default, a, [torch.tensor([3, 1])], b[:2]),
        (
            aten.native_batch_norm.default,
            well((5, 6), 2),
            None,
            None,
            a,
            b.abs(),
            True,
            0.1,
            1e-5,
        ),
    ):
        rows, tensors = recorded_call(*call)
        before = {r: t.clone() for r, t in tensors.items()}
        replayed(rows, tensors)
        assert all(torch.equal(before[r], t) for r, t in tensors.items()), call[0]


def reference(*calls):
    """The reference's rows of calls ``(operator, arguments)``, numbered from 10.

    Arguments are JSON, as recorded; ``<n>`` stands for record n.
    """
    rows = {}
    for record, (overload, arguments) in enumerate(calls, 10):
        text = arguments.replace("<", '{"record":').replace(">", "}")
        rows[record] = RecordedRow(
            record=record,
            call=record,
            operator="",
            overload=overload,
            arguments=text,
        )
    return rows


NORM = reference(
    ("aten.native_layer_norm.default", "[[<1>,[8],null,null,1e-05],{}]"),
    ("aten.gelu.default", "[[<10>],{}]"),
    ("aten.mul.Scalar", "[[<11>,0.5],{}]"),
)


def expected(rows, tensors, holders, fits=lambda _a, _b: True):
    return ReferenceCalls(rows, rows, holders, tensors, fits)


def test_all_calls_of_the_reference_run_on_what_the_candidate_has():
    """A fused kernel that gives norm, gelu and product at once is asked for all three."""
    x = well((5, 8), 0)
    run = expected(NORM, {7: x}, {1: 7}).leading_to(12, judged=99)
    exact = F.gelu(F.layer_norm(x.double(), [8])) * 0.5
    assert torch.allclose(
        run(torch.float64), exact, rtol=1e-14, atol=1e-15
    )  # other order of sums of eight: some u = 1e-16
    assert run(torch.float32).dtype is torch.float32


def test_what_the_candidate_computed_in_between_is_believed_but_for_what_is_judged():
    x, gelu = well((5, 8), 0), well((5, 8), 1)
    tensors = {7: x, 8: gelu}
    known = expected(NORM, tensors, {1: 7, 11: 8})
    assert torch.equal(
        known.leading_to(12, judged=99)(torch.float64), gelu.double() * 0.5
    )
    assert torch.equal(known.leading_to(11, judged=99)(torch.float64), gelu.double())
    alone = known.leading_to(12, judged=8)(torch.float64)
    assert torch.allclose(
        alone, F.gelu(F.layer_norm(x.double(), [8])) * 0.5, rtol=1e-14, atol=1e-15
    )


@pytest.mark.parametrize(
    ("holders", "tensors", "fits", "reason"),
    [
        ({}, {}, True, "one of its inputs was not recorded"),
        ({1: 7}, {}, True, "one of its inputs was not recorded"),
        ({1: 7}, {7: well((5, 8), 0)}, False, "one of its inputs has another shape"),
        ({1: 7, 12: 8}, {7: well((5, 8), 0)}, True, "one of its inputs was not stored"),
    ],
)
def test_regions_that_cannot_be_run_say_why(holders, tensors, fits, reason):
    run = expected(NORM, tensors, holders, lambda _a, _b: fits).leading_to(
        12, judged=99
    )
    with pytest.raises(CannotRun, match=reason):
        run(torch.float64)


def test_regions_are_not_followed_for_ever():
    calls = [("aten.mul.Scalar", f"[[<{9 + i}>,2.0],{{}}]") for i in range(40)]
    deep = reference(*calls)
    run = expected(deep, {7: torch.ones(3)}, {9: 7})
    assert torch.equal(
        run.leading_to(10 + recorded_calls.DEEPEST - 1, 99)(torch.float64),
        torch.full((3,), 2.0**recorded_calls.DEEPEST).double(),
    )
    with pytest.raises(CannotRun, match="what it is made of was not recorded"):
        run.leading_to(10 + recorded_calls.DEEPEST, 99)(torch.float64)


def test_a_region_is_judged_by_the_reference_of_all_its_calls(recorded_call, replayed):
    x = well((5, 8), 0)
    rows, tensors = recorded_call(aten.mul.Scalar, F.gelu(F.layer_norm(x, [8])), 0.5)
    tensors[7] = x
    region = expected(NORM, tensors, {1: 7}).leading_to(12, judged=rows[0].record)
    honest = replayed(rows, tensors, aligned=False, region=region)
    assert honest.region_excess <= 1
    assert not honest.at_fault
    tensors[rows[0].record] = F.gelu(F.layer_norm(x, [8]), approximate="tanh") * 0.5
    other = replayed(rows, tensors, aligned=False, region=region)
    assert other.region_excess > 1
    assert other.at_fault


def test_each_call_of_a_region_runs_once(monkeypatch):
    # each reads the one before it twice: by paths there are 2**11 runs of the first
    calls = [("aten.mul.Tensor", f"[[<{9 + i}>,<{9 + i}>],{{}}]") for i in range(12)]
    made = []
    run_call = recorded_calls.run_call

    def counted(*args):
        made.append(args)
        return run_call(*args)

    monkeypatch.setattr(recorded_calls, "run_call", counted)
    run = expected(reference(*calls), {7: torch.ones(3)}, {9: 7}).leading_to(21, 99)
    assert torch.equal(run(torch.float64), torch.ones(3).double())
    assert len(made) == len(calls)
