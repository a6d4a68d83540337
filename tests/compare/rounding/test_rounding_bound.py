"""What rounding explains: the formats by their libraries, and bounds that honest kernels keep, measured against fp64."""

from __future__ import annotations

import math
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.rounding.rounding_bound import (
    MARGIN,
    REGION,
    amplification,
    condition,
    format_of,
    smallest,
    terms,
    tolerance,
    unit,
    working_formats,
)

NONE: frozenset[str] = frozenset()
FORMATS = [
    "float64",
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
]


def row(tensor, operator="add", *, place=0, call=1, view_of=None, inputs=(0,)):
    """A row of a recording that says of this tensor what the bounds read."""
    x = tensor.double()
    usual = {
        "operator": operator,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(x.shape),
        "place": place,
        "numel": x.numel(),
        "call": call,
        "view_of": view_of,
        "inputs": list(inputs),
        "min": x.min().item(),
        "max": x.max().item(),
        "l2": x.norm().item(),
        "std": x.std(unbiased=False).item(),
        "mean": x.mean().item(),
    }
    return RecordedRow(record=1, **usual)


def typed(dtype, operator="mm", call=1, **columns):
    usual = {
        "dtype": dtype,
        "operator": operator,
        "call": call,
        "view_of": None,
        "inputs": [0],
        "shape": [4],
        "place": 0,
    }
    return RecordedRow(record=1, **usual | columns)


@pytest.mark.parametrize("name", FORMATS)
def test_unit_and_smallest(name):
    """By ml_dtypes and numpy: half the distance of 1 to the next number, the smallest subnormal."""
    dtype = getattr(ml_dtypes, name, None) or getattr(np, name)
    info = ml_dtypes.finfo(dtype)
    assert unit(name) == float(info.eps) / 2
    assert smallest(name) == float(info.smallest_subnormal) > 0


def test_unit_of_what_does_not_round():
    for name in ("int64", "uint8", "bool", None, "", "no_such", "nn"):
        assert (unit(name), smallest(name)) == (0.0, 0.0)
    assert (unit("complex64"), unit("complex128")) == (2.0**-24, 2.0**-53)


def test_the_formats_a_run_works_in():
    """Those of a fifth of its matrix products; of all results where it has none; views, leaves, integers don't count."""
    products = [typed("bfloat16")] * 8 + [typed("float32")] * 2
    others = [typed("float32", "relu")] * 50
    assert working_formats(products + others) == {"bfloat16", "float32"}
    assert working_formats(products[:-1] + others) == {"bfloat16"}  # one of nine
    assert working_formats(others + [typed("bfloat16", "_to_copy")]) == {"float32"}
    not_counted = [
        typed("float16", call=-1),
        typed("float16", view_of=3),
        typed("int64"),
    ] * 9
    assert working_formats(not_counted + others) == {"float32"}
    assert working_formats([]) == working_formats([typed("int64")]) == NONE


@pytest.mark.parametrize(
    ("ours", "theirs", "adopted", "expected"),
    [
        ("float32", "float32", NONE, "float32"),
        (
            "float32",
            "bfloat16",
            NONE,
            "float32",
        ),  # an isolated narrow format is a finding
        ("float32", "bfloat16", {"bfloat16"}, "bfloat16"),  # autocast is none
        ("float32", "float16", {"bfloat16"}, "float32"),
        (
            "bfloat16",
            "float32",
            NONE,
            "bfloat16",
        ),  # the reference is no better than its own format
        ("float64", "float32", {"float32"}, "float32"),
        ("float32", "int64", NONE, "float32"),
        ("int64", "float32", NONE, "float32"),
        ("int64", "int64", NONE, "int64"),
        (None, None, NONE, None),
    ],
)
def test_the_format_by_which_a_row_is_judged(ours, theirs, adopted, expected):
    assert format_of(typed(ours), typed(theirs), frozenset(adopted)) == expected


def test_tolerance_by_hand():
    one = typed("float32", "relu")
    assert (
        tolerance(one, one, NONE) == MARGIN * 2**-23
    )  # one rounding of the format, one of what it accumulates in
    product = typed("bfloat16", "mm")
    inputs = [typed("bfloat16", shape=[5, 64]), typed("bfloat16", shape=[64, 3])]
    # 64 products each, accumulated in fp32
    assert tolerance(product, product, NONE, inputs) == MARGIN * (2**-8 + 2**-24 * 8)
    double = typed("float64", "sum", shape=[])
    assert tolerance(
        double, double, NONE, [typed("float64", shape=[10, 40])]
    ) == MARGIN * 2**-53 * (1 + math.sqrt(400))
    assert tolerance(typed("int64"), typed("int64"), NONE) == 0.0
    # a result of one run against a value from outside of the other: a compiled region, of any depth
    leaf = typed("float32", call=-1, inputs=[])
    assert tolerance(leaf, one, NONE) == tolerance(one, leaf, NONE) == REGION * 2**-24
    leaf, one = (replace(r, dtype="bfloat16") for r in (leaf, one))
    assert tolerance(leaf, one, NONE) == 0.1


@pytest.mark.parametrize(
    ("operator", "shape", "inputs", "expected"),
    [
        ("mm", [5, 3], [[5, 64], [64, 3]], 64),
        ("bmm", [2, 5, 3], [[2, 5, 7], [2, 7, 3]], 35),
        (
            "convolution",
            [1, 8, 4, 4],
            [[1, 3, 6, 6], [8, 3, 3, 3]],
            108,
        ),  # at most: the image counts as one
        ("sum", [5], [[5, 64]], 64),
        ("sum", [], [[5, 64]], 320),
        ("mean", [1], [[9]], 9),
        ("sum", [0], [[0, 3]], 1),
        ("dot", [], [[33], [33]], 33),
        ("relu", [5], [[5]], 1),
        ("mm", [0, 3], [], 1),
        ("add_", [4], [[4]], 1),
    ],
)
def test_terms(operator, shape, inputs, expected):
    read = [typed("float32", shape=each) for each in inputs]
    assert terms(typed("float32", operator, shape=shape), read) == expected


def draw(*shape, seed=0, shift=0.0, scale=1.0):
    return shift + scale * torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


OPERATORS = {  # name: operator of the recording, function, operands
    "mm": (
        "mm",
        torch.mm,
        lambda s: (draw(24, 200, seed=s), draw(200, 16, seed=s + 1)),
    ),
    "addmm": (
        "addmm",
        torch.addmm,
        lambda s: (
            draw(16, seed=s),
            draw(24, 512, seed=s + 1),
            draw(512, 16, seed=s + 2),
        ),
    ),
    "bmm": (
        "bmm",
        torch.bmm,
        lambda s: (draw(3, 8, 64, seed=s), draw(3, 64, 8, seed=s + 1)),
    ),
    "conv2d": (
        "convolution",
        lambda x, w: F.conv2d(x, w, padding=1),
        lambda s: (draw(2, 8, 9, 9, seed=s), draw(6, 8, 3, 3, seed=s + 1)),
    ),
    "sum": ("sum", lambda x: x.sum(1), lambda s: (draw(20, 3000, seed=s, shift=1.0),)),
    "mean": (
        "mean",
        lambda x: x.mean(1),
        lambda s: (draw(20, 3000, seed=s, shift=1.0),),
    ),
    "softmax": (
        "_softmax",
        lambda x: x.softmax(-1),
        lambda s: (draw(20, 100, seed=s),),
    ),
    "log_softmax": (
        "_log_softmax",
        lambda x: x.log_softmax(-1),
        lambda s: (draw(20, 100, seed=s),),
    ),
    "layer_norm": (
        "native_layer_norm",
        lambda x: F.layer_norm(x, (128,)),
        lambda s: (draw(20, 128, seed=s),),
    ),
    "gelu": ("gelu", F.gelu, lambda s: (draw(1000, seed=s),)),
    "exp": ("exp", torch.exp, lambda s: (draw(1000, seed=s),)),
    "sigmoid": ("sigmoid", torch.sigmoid, lambda s: (draw(1000, seed=s),)),
    "mul": ("mul", torch.mul, lambda s: (draw(1000, seed=s), draw(1000, seed=s + 1))),
    "div": (
        "div",
        torch.div,
        lambda s: (draw(1000, seed=s), 2 + draw(1000, seed=s + 1).abs()),
    ),
    "rsqrt": ("rsqrt", torch.rsqrt, lambda s: (0.5 + draw(1000, seed=s).abs(),)),
    "attention": (
        "scaled_dot_product_attention",
        F.scaled_dot_product_attention,
        lambda s: tuple(draw(2, 4, 32, 16, seed=s + i) for i in range(3)),
    ),
}


def measured(function, operands, dtype):
    """The relative error of a kernel on operands of the format, against the same in fp64, and the rows of both."""
    given = [x.to(dtype) for x in operands]
    result = function(*given)
    exact = function(*(x.double() for x in given))
    error = ((result.double() - exact).norm() / exact.norm()).item()
    return error, result, given


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize("name", OPERATORS)
def test_honest_kernels_stay_within(name, dtype):
    """torch's kernel makes an error, and one below the bound."""
    operator, function, operands = OPERATORS[name]
    for seed in range(5):
        error, result, given = measured(function, operands(10 * seed), dtype)
        made, read = row(result, operator), [row(x) for x in given]
        assert 0 < error <= tolerance(made, made, NONE, read) * condition(made, read), (
            seed,
            error,
        )


CANCELLING = {
    # x - x' of sums whose terms are 1e3 times larger than the result
    "sum": (
        "sum",
        lambda x: x.sum(1),
        lambda s: (
            (lambda h: torch.cat([h, -h + 1e-6 * draw(20, 400, seed=s + 1)], 1))(
                draw(20, 400, seed=s, scale=10)
            ),
        ),
    ),
    "mm": (
        "mm",
        torch.mm,
        lambda s: (lambda h, w: (torch.cat([h, h + 1e-3], 1), torch.cat([w, -w], 0)))(
            draw(8, 100, seed=s), draw(100, 8, seed=s + 1)
        ),
    ),
    "add": (
        "add",
        torch.add,
        lambda s: (lambda x: (x, -x + 1e-4 * draw(500, seed=s + 1)))(draw(500, seed=s)),
    ),
    "layer norm of a large mean": (
        "native_layer_norm",
        lambda x: F.layer_norm(x, (256,)),
        lambda s: (draw(16, 256, seed=s, shift=1000.0),),
    ),
    "softmax of large inputs": (
        "_softmax",
        lambda x: x.softmax(-1),
        lambda s: (draw(20, 100, seed=s, scale=300.0),),
    ),
    "exp of large inputs": (
        "exp",
        torch.exp,
        lambda s: (draw(500, seed=s, scale=10.0, shift=-50.0),),
    ),
}


@pytest.mark.parametrize("name", CANCELLING)
def test_condition_covers_what_cancels(name):
    """In fp32: the operands are perturbed in the last bit, as another program would give them."""
    operator, function, operands = CANCELLING[name]
    beyond = 0
    for seed in range(5):
        given = [x.float() for x in operands(10 * seed)]
        # 2**-23: between half an ulp and a whole one of each element
        moved = [
            x * (1 + 2.0**-23 * draw(*x.shape, seed=100 * i + seed).sign().float())
            for i, x in enumerate(given, 1)
        ]
        exact = function(*(x.double() for x in given))
        error = ((function(*moved).double() - exact).norm() / exact.norm()).item()
        made, read = row(function(*given), operator), [row(x) for x in given]
        limit = tolerance(made, made, NONE, read)
        assert error <= limit * condition(made, read), (
            seed,
            error,
            limit,
            condition(made, read),
        )
        beyond += error > limit
    assert condition(made, read) > 3
    assert beyond or name in ("softmax of large inputs", "exp of large inputs"), (
        "the bound needed no help"
    )


def test_condition_of_what_does_not_cancel():
    x = draw(20, 30).float()
    for operator, result in (
        ("relu", x.relu()),
        ("mul", x * x),
        ("sum", x.abs().sum(1) * 10),
        ("mm", x @ x.t() * 100),
    ):
        assert condition(row(result, operator), [row(x)]) == 1.0
    assert condition(row(x, "add"), []) == 1.0  # nothing known of what it read
    assert condition(replace(row(x), l2=None), [row(x)]) == 1.0
    zero = torch.zeros(20)
    assert condition(row(zero, "sum"), [row(x)]) == math.inf  # all of it cancelled
    assert (
        condition(row(x, "native_layer_norm"), [row(torch.ones(20, 30))]) == math.inf
    )  # no spread at all
    assert condition(row(zero, "native_layer_norm", place=1), [row(x)]) == 1.0


@pytest.mark.parametrize(
    ("operator", "function"),
    [
        ("mul", torch.mul),
        ("div", torch.div),
        ("sum", lambda x, _: x.sum(1)),
        ("mean", lambda x, _: x.mean(1)),
    ],
)
def test_amplification_bounds_any_error(operator, function):
    """Errors of 1e-4 in one input, wherever they do most: below the gain times 1e-4, for each of many directions."""
    x, y = draw(8, 40, seed=1), draw(8, 40, seed=2)
    y = y + 3.5 if operator == "div" else y
    exact = function(x, y)
    read = [row(t.float()) for t in ((x, y) if operator in ("mul", "div") else (x,))]
    gain = amplification(row(exact.float(), operator), read)
    places = [
        (exact / x.clamp_min(0.1)).abs().argmax() if exact.shape == x.shape else 0,
        x.abs().argmax(),
        y.abs().argmax(),
    ]
    for place in places:
        direction = torch.zeros(8 * 40, dtype=torch.float64)
        direction[place] = x.norm()
        same = x.norm() / math.sqrt(320)
        for d in (direction.view(8, 40), x.sign() * same, torch.ones(8, 40) * same):
            error = (function(x + 1e-4 * d, y) - exact).norm() / exact.norm()
            assert error <= 1e-4 * gain * (1 + 1e-6)
