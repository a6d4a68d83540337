"""Calls run again: honest kernels are within what rounding explains, broken ones and other arguments are not.

Real kernels are called in each format, as a recording has them. Honest ones may be at most 1 in units of what rounding
explains, damaged ones are further: damage is a multiple of the whole result's largest magnitude, or of one element that is
as large as the result's root mean square, in both cases hundreds of units of roundoff.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from roundoff.compare.records.call_arguments import (
    argument_differences,
    results_made,
)
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.records.replay import SAME

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def ill(shape, seed):
    """Values over six orders of magnitude, of both signs, around a mean that is large for their spread."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (3 * torch.rand(shape, generator=generator) - 2)
    return size * torch.randn(shape, generator=generator).sign() + 3


def well(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def conv(x, w, b, transposed=False):
    return (
        aten.convolution.default,
        x,
        w,
        b,
        [1, 1],
        [1, 1],
        [1, 1],
        transposed,
        [0, 0],
        1,
    )


def batch_norm(v, training):
    return (
        aten.native_batch_norm.default,
        v(8, 5, 4),
        v(5),
        v(5),
        v(5),
        v(5).abs(),
        training,
        0.1,
        1e-5,
    )


#: name -> what is called, given values of a shape in a format
CALLS = {
    "mm": lambda v: (aten.mm.default, v(7, 65), v(65, 9)),
    "mm long": lambda v: (aten.mm.default, v(2, 3000), v(3000, 3)),
    "addmm": lambda v: (aten.addmm.default, v(9), v(7, 33), v(33, 9)),
    "bmm": lambda v: (aten.bmm.default, v(3, 5, 17), v(3, 17, 4)),
    "convolution": lambda v: conv(v(2, 3, 9, 9), v(4, 3, 3, 3), v(4)),
    "convolution, transposed": lambda v: conv(v(2, 4, 6, 6), v(4, 3, 3, 3), None, True),
    "layer norm": lambda v: (
        aten.native_layer_norm.default,
        v(6, 40),
        [40],
        v(40),
        v(40),
        1e-5,
    ),
    "batch norm, training": lambda v: batch_norm(v, True),
    "batch norm, evaluation": lambda v: batch_norm(v, False),
    "softmax": lambda v: (aten._softmax.default, v(6, 33), -1, False),
    "log softmax": lambda v: (aten._log_softmax.default, v(6, 33), -1, False),
    "gelu": lambda v: (aten.gelu.default, v(40, 20)),
    "gelu backward": lambda v: (aten.gelu_backward.default, v(40, 20), v(40, 20)),
    "exp": lambda v: (aten.exp.default, v(300) / 2),
    "rsqrt": lambda v: (aten.rsqrt.default, v(300).abs() + 1),
    "mul": lambda v: (aten.mul.Tensor, v(40, 20), v(20)),
    "sub": lambda v: (aten.sub.Tensor, v(500), v(500)),
    "scale": lambda v: (aten.mul.Scalar, v(100), 0.1),
    "embedding": lambda v: (
        aten.embedding.default,
        v(20, 6),
        torch.arange(15).reshape(3, 5),
    ),
    "embedding backward": lambda v: (
        aten.embedding_dense_backward.default,
        v(50, 6),
        torch.arange(50) % 7,
        20,
        -1,
        False,
    ),
    "sum": lambda v: (aten.sum.dim_IntList, v(40, 300), [1]),
    "sum of all": lambda v: (aten.sum.default, v(30, 30)),
    "mean": lambda v: (aten.mean.dim, v(40, 300), [0]),
    "cumsum": lambda v: (aten.cumsum.default, v(4, 300), 1),
    "in place": lambda v: (aten.add_.Tensor, v(50), v(50)),
    "in place, scaled": lambda v: (aten.addcmul_.default, v(50), v(50), v(50)),
    "foreach": lambda v: (aten._foreach_add.List, [v(30), v(4, 5)], [v(30), v(4, 5)]),
    "foreach in place": lambda v: (
        aten._foreach_mul_.Scalar,
        [v(30), v(4, 5), v(1)],
        0.3,
    ),
    "view": lambda v: (aten.view.default, v(6, 4), [2, 12]),
    "transposed": lambda v: (aten.t.default, v(6, 4)),
    "slice": lambda v: (aten.slice.Tensor, v(9, 4), 0, 1, 7, 2),
    "cast": lambda v: (aten._to_copy.default, v(90)),
    "index": lambda v: (aten.index.Tensor, v(9, 4), [torch.tensor([3, 1, 1])]),
    "gather": lambda v: (
        aten.gather.default,
        v(9, 4),
        1,
        torch.tensor([[0, 3], [1, 1]]),
    ),
    "index put": lambda v: (
        aten.index_put_.default,
        v(9, 4),
        [torch.tensor([3, 1])],
        v(2, 4),
    ),
    "cat": lambda v: (aten.cat.default, [v(9, 4), v(3, 4)]),
    "max pool": lambda v: (
        aten.max_pool2d_with_indices.default,
        v(2, 3, 8, 8),
        [2, 2],
        [2, 2],
    ),
    "zeros": lambda v: (aten.mul.Tensor, v(40), torch.zeros(40, dtype=v(1).dtype)),
}
EXACT = {
    "view",
    "transposed",
    "slice",
    "cast",
    "index",
    "gather",
    "cat",
    "embedding",
    "zeros",
    "index put",
}


def values(dtype, make, seed):
    count = iter(range(1000 * seed, 1000 * seed + 100))
    return lambda *shape: make(shape, next(count)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_honest_kernels_are_within_what_rounding_explains(
    recorded_call, replayed, name, dtype
):
    for seed in range(4):
        for make in (well, ill):
            rows, tensors = recorded_call(*CALLS[name](values(dtype, make, seed)))
            for place in range(len(rows)):
                found = replayed(rows, tensors, place)
                if rows[place].dtype == "float32" and found.reason is not None:
                    assert place > 0, found  # a workspace
                    continue
                assert found.reason is None
                assert found.excess is not None
                assert found.excess <= 1, (make.__name__, seed, place)
                assert (found.semantic or 0.0) <= SAME
                assert not found.at_fault
                if name in EXACT:
                    assert found.own == 0


def one_element(result):
    result.view(-1)[result.numel() // 2] += (
        3 * result.float().square().mean().sqrt() + 1
    )


def tail(result):
    result.view(-1)[-max(1, result.numel() // 5) :] = 7


def drift(result):
    result.mul_(1.001 if result.dtype is torch.float32 else 1.05)


def drift_of_long_sums(result):
    """Kernels may add thousands of terms in bf16 itself: that rounds by a twentieth."""
    result.mul_(1.001 if result.dtype is torch.float32 else 1.5)


LONG = ("mm long", "sum", "sum of all")


def not_a_number(result):
    result.view(-1)[-1] = torch.nan


DAMAGE = (one_element, tail, drift, not_a_number)


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", [n for n in CALLS if n not in ("zeros", "exp")])
def test_damage_is_more_than_rounding(recorded_call, replayed, name, damage):
    """5e-2 in bf16 is 13 units of roundoff, 1e-3 in fp32 some 17,000; both beyond four fp32 errors scaled and 2 u."""
    for dtype in (torch.float32, torch.bfloat16):
        rows, tensors = recorded_call(*CALLS[name](values(dtype, well, 1)))
        broken = tensors[rows[0].record].contiguous()
        if damage is tail and broken.numel() < 2:
            continue
        (drift_of_long_sums if damage is drift and name in LONG else damage)(broken)
        tensors[rows[0].record] = broken
        found = replayed(rows, tensors)
        assert found.excess is not None
        assert found.excess > 1, dtype
        assert found.at_fault
        assert math.isinf(found.excess) or damage is not not_a_number


def test_integers_booleans_and_complex_numbers(recorded_call, replayed):
    whole = torch.arange(12).reshape(3, 4)
    rows, tensors = recorded_call(aten.add.Tensor, whole, whole)
    assert replayed(rows, tensors).excess == 0
    tensors[1 + 0] = whole + (whole == 5)
    assert replayed(rows, tensors).excess == math.inf, "integers have no rounding"

    rows, tensors = recorded_call(aten.lt.Scalar, well((30,), 0), 0.5)
    assert replayed(rows, tensors).excess == 0
    tensors[1] = ~tensors[1]
    assert replayed(rows, tensors).at_fault

    turning = torch.complex(well((8, 5), 0), well((8, 5), 1))
    rows, tensors = recorded_call(aten.mul.Tensor, turning, turning.flip(0))
    assert replayed(rows, tensors).excess <= 1
    tensors[2] = tensors[2].conj().resolve_conj()
    assert replayed(rows, tensors).at_fault


@pytest.mark.parametrize(
    ("func", "args", "other", "text"),
    [
        (
            aten.native_layer_norm.default,
            ([20], None, None, 1e-5),
            ([20], None, None, 1e-3),
            "eps: 1e-05, here 0.001",
        ),
        (aten.leaky_relu.default, (0.01,), (0.2,), "negative_slope: 0.01, here 0.2"),
        (aten._softmax.default, (1, False), (0, False), "dim: 1, here 0"),
        (aten.mul.Scalar, (0.125,), (0.25,), "factor: 0.125, here 0.25"),
        (
            aten.gelu.default,
            (),
            {"approximate": "tanh"},
            "approximate: none, here tanh",
        ),
        (aten.sum.dim_IntList, ([0],), ([0], True), "keepdim: False, here True"),
    ],
    ids=str,
)
def test_another_constant_is_another_program(
    recorded_call, replayed, func, args, other, text
):
    """In fp64 it stays: rounding would be gone."""
    by_name = other if isinstance(other, dict) else {}
    for dtype in DTYPES:
        x = well((20, 20), 0).to(dtype)
        ours, _ = recorded_call(func, x, *args)
        theirs, tensors = recorded_call(
            func, x.clone(), *(() if by_name else other), **by_name
        )
        found = replayed(theirs, tensors, twin=ours[0])
        assert found.semantic > SAME
        assert argument_differences(ours[0], theirs[0]) == (text,)
        assert found.at_fault
        assert found.excess is None or found.excess <= 1, (
            "the kernel does what it is told"
        )


def test_a_constant_that_changes_nothing_is_no_fault(recorded_call, replayed):
    x = well((20, 20), 0).abs() + 1
    ours, _ = recorded_call(aten.leaky_relu.default, x, 0.01)
    theirs, tensors = recorded_call(aten.leaky_relu.default, x, 0.2)
    found = replayed(theirs, tensors, twin=ours[0])
    assert (found.semantic, found.at_fault) == (0, False)


def test_differences_leaves_formats_devices_and_tensors_alone(recorded_call):
    x = well((4,), 0)
    one, _ = recorded_call(aten._to_copy.default, x, dtype=torch.float32)
    other, _ = recorded_call(aten._to_copy.default, x, dtype=torch.bfloat16)
    assert argument_differences(one[0], other[0]) == ()
    assert argument_differences(one[0], replace(other[0], arguments=None)) == ()
    assert (
        argument_differences(
            one[0], replace(other[0], overload="gone.operator.default")
        )
        == ()
    )


@pytest.mark.parametrize(
    "text", ["null", "3", "[]", "[1, 2]", "[[], []]", "[{}, {}]", '"ab"', "[[]"]
)
def test_what_are_no_arguments_differ_in_nothing(recorded_call, text):
    x = well((4,), 0)
    rows, _ = recorded_call(aten.leaky_relu.default, x, 0.2)
    other = replace(rows[0], arguments=text)
    assert argument_differences(rows[0], other) == ()
    assert argument_differences(other, rows[0]) == ()


def test_differences_take_the_lowest_numbers_of_formats_for_one_another(recorded_call):
    x, mask = well((4,), 0), torch.tensor([True, False, True, False])
    least, half, four = (
        recorded_call(aten.masked_fill.Scalar, x, mask, v)[0][0]
        for v in (torch.finfo(torch.float32).min, torch.finfo(torch.float16).min, -1e4)
    )
    assert argument_differences(least, half) == ()
    assert argument_differences(least, four) == (
        "value: -3.4028234663852886e+38, here -10000.0",
    )


def test_long_arguments_are_cut(recorded_call):
    x = well((4, 40), 0)
    one, _ = recorded_call(aten.split_with_sizes.default, x, [1] * 40, 1)
    other, _ = recorded_call(aten.split_with_sizes.default, x, [2] + [1] * 38, 1)
    [text] = argument_differences(one[0], other[0])
    assert text.startswith("split_sizes: [1, 1,")
    assert len(text) < 150


@pytest.mark.parametrize(
    ("overload", "ours", "theirs", "text"),
    [
        (
            "aten._softmax.default",
            ['{"record":0}', -1, False],
            ['{"record":0}', 2, True],
            (),
        ),
        (
            "aten._softmax.default",
            ['{"record":0}', -1, False],
            ['{"record":0}', 1, False],
            ("dim: 2, here 1",),
        ),
        (
            "aten.sum.dim_IntList",
            ['{"record":0}', [-1, 0]],
            ['{"record":0}', [2, 0]],
            (),
        ),
        (
            "aten.native_layer_norm.default",
            ['{"record":0}', [4], '{"record":1}', '{"record":2}', 1e-5],
            ['{"record":7}', [4], '{"record":8}', None, 1e-5],
            ("bias: a tensor, here None",),
        ),
        (  # left out it is the width's inverse root
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
            ['{"record":0}'] * 3 + [0.0, False, None, 1 / math.sqrt(4)],
            ['{"record":0}'] * 3 + [0.0, False, None, None],
            (),
        ),
        (
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
            ['{"record":0}'] * 3 + [0.0, False, None, 0.25],
            ['{"record":0}'] * 3 + [0.0, False, None, None],
            ("scale: 0.25, here 0.5",),
        ),
        (  # one over n - 1, as torch does without a word
            "aten.var.correction",
            ['{"record":0}', [2], 1],
            ['{"record":0}', [2], None],
            (),
        ),
        (  # one number by two expressions
            "aten.mul.Scalar",
            ['{"record":0}', 0.1 + 0.2],
            ['{"record":0}', 0.3],
            (),
        ),
    ],
)
def test_axes_may_be_counted_from_the_end_and_tensors_be_missing(
    overload, ours, theirs, text
):
    rows = [
        RecordedRow(
            record=9,
            call=0,
            operator=overload.split(".")[1],
            overload=overload,
            arguments=json.dumps(
                [[json.loads(a) if isinstance(a, str) else a for a in arguments], {}]
            ),
        )
        for arguments in (ours, theirs)
    ]
    assert argument_differences(rows[0], rows[1], ((2, 3, 4), (2, 3, 4))) == text


def test_a_tensor_of_another_name_in_the_form_on_lists_is_no_other_argument():
    record = '{"record":1}'
    one = RecordedRow(
        record=2,
        call=0,
        operator="lerp_",
        overload="aten.lerp_.Scalar",
        arguments=f"[[{record},{record},0.1],{{}}]",
    )
    on_lists = RecordedRow(
        record=2,
        call=0,
        operator="_foreach_lerp_",
        overload="aten._foreach_lerp_.Scalar",
        arguments=f"[[[{record}],[{record}],0.2],{{}}]",
    )
    # the weight is a constant of both
    assert argument_differences(one, on_lists) == ("weight: 0.1, here 0.2",)


def test_a_number_for_a_tensor_under_another_name_is_no_constant(recorded_call):
    """Their overloads call it ``scalar`` and ``other``; the values say if it is the same."""
    xs = [well((4,), 0), well((3,), 0)]
    tensor, _ = recorded_call(aten._foreach_mul.Tensor, xs, torch.tensor(0.5))
    number, _ = recorded_call(aten._foreach_mul.Scalar, xs, 0.5)
    assert argument_differences(tensor[0], number[0]) == ()
    assert argument_differences(number[0], tensor[0]) == ()
    other, _ = recorded_call(aten._foreach_mul.Scalar, xs, 0.25)
    assert argument_differences(number[0], other[0]) == ("scalar: 0.5, here 0.25",)


@pytest.mark.parametrize(
    ("mask", "made"), [([False, True, True], [1, 2]), ([True, True, False], [0, 1])]
)
def test_which_gradients_a_backward_kernel_was_asked_for(recorded_call, mask, made):
    grad, x, weight = well((2, 3, 4), 0), well((2, 2, 6), 0), well((3, 2, 3), 0)
    rows, _ = recorded_call(
        aten.convolution_backward.default,
        *(grad, x, weight, [3], [1], [0], [1], False, [0], 1, mask),
    )
    assert results_made(rows[0]) == made
    assert len(rows) == len(made)
    other, _ = recorded_call(aten.relu.default, x)
    assert results_made(other[0]) is None
    assert results_made(replace(rows[0], arguments=None)) is None
