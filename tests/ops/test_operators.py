"""roundoff.ops.operators: the names and kinds of torch-level functions."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from roundoff.ops import MATRIX_KINDS, operators_that
from roundoff.ops.operators import Operator, einsum_axes
from roundoff.ops.table import CONTRACTING
from roundoff.plan.seconds import KINDS


@pytest.mark.parametrize(
    ("function", "name", "inplace"),
    [
        (torch.add, "add", False),
        (Tensor.add, "add", False),
        (Tensor.__add__, "add", False),
        (Tensor.__radd__, "add", False),
        (Tensor.__iadd__, "add", True),
        (Tensor.add_, "add", True),
        (torch.sub, "sub", False),
        (Tensor.subtract, "sub", False),
        (Tensor.__isub__, "sub", True),
        (torch.multiply, "mul", False),
        (Tensor.__imul__, "mul", True),
        (torch.true_divide, "div", False),
        (Tensor.__truediv__, "div", False),
        (Tensor.__itruediv__, "div", True),
        (Tensor.__rmatmul__, "rmatmul", False),
        (Tensor.__matmul__, "matmul", False),
        (Tensor.__invert__, "invert", False),
        (Tensor.__int__, "int", False),
        (Tensor.__index__, "index", False),
        (Tensor.__setitem__, "setitem", True),
        (Tensor.__getitem__, "getitem", False),
        (torch.relu_, "relu", True),
        (F.gelu, "gelu", False),
        (torch._C._nn.silu_, "silu", True),
        (Tensor.requires_grad_, "requires_grad_", False),
        (Tensor.T.__get__, "T", False),  # type: ignore[attr-defined]
        (Tensor.shape.__get__, "shape", False),  # type: ignore[attr-defined]
    ],
)
def test_the_name_of_a_function_and_whether_it_writes(function, name, inplace):
    assert Operator.of(function) == Operator(name, inplace)


def test_every_in_place_method_of_a_tensor_has_the_name_of_its_twin():
    kept = {"requires_grad_", "retain_grad_"}
    methods = [
        n
        for n in dir(Tensor)
        if n.endswith("_") and not n.startswith("_") and n not in kept
    ]
    assert (
        len(methods) > 100
    )  # the method list of the pinned torch; a shrunken list would test nothing
    for name in methods:
        found = Operator.of(getattr(Tensor, name))
        twin = getattr(Tensor, name[:-1], None)
        assert found.inplace, name
        if callable(twin):
            assert found.name == Operator.of(twin).name, name


@pytest.mark.parametrize(
    "name", ["add", "sub", "mul", "truediv", "matmul", "mod", "pow", "floordiv"]
)
def test_every_python_operator_on_tensors(name):
    plain = Operator.of(getattr(Tensor, f"__{name}__"))
    assert not plain.inplace
    assert getattr(operator, name)  # the spelling is Python's own
    if hasattr(Tensor, f"__i{name}__"):
        assert Operator.of(getattr(Tensor, f"__i{name}__")) == Operator(
            plain.name, True
        )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("linear", "linear"),
        ("bilinear", "linear"),
        ("matmul", "matmul"),
        ("einsum", "matmul"),
        ("addmm", "matmul"),
        ("conv2d", "conv"),
        ("conv_transpose1d", "conv"),
        ("scaled_dot_product_attention", "attention"),
        ("embedding", "embedding"),
        ("lstm", "rnn"),
        ("gru_cell", "rnn"),
        ("layer_norm", "normalization"),
        ("batch_norm", "normalization"),
        ("softmax", "softmax"),
        ("log_softmax", "softmax"),
        ("mean", "reduction"),
        ("max_pool2d", "reduction"),
        ("relu", "elementwise"),
        ("something_new", "elementwise"),
    ],
)
def test_kinds(name, kind):
    assert Operator(name, False).kind == kind
    assert kind in KINDS  # what the cost model knows


def test_the_tables_do_not_overlap():
    moves = operators_that("move values")
    creates = operators_that("create")
    draws = operators_that("draw")
    for one, other in [(moves, creates), (moves, draws), (creates, draws)]:
        assert not one & other
    assert not set(CONTRACTING) & (moves | creates | draws)
    assert {spec.kind for spec in CONTRACTING.values()} == MATRIX_KINDS


@pytest.mark.parametrize(
    ("equation", "operand", "summed", "kept"),
    [
        ("ij,jk->ik", 0, -1, -2),
        ("ij,jk->ik", 1, -2, -1),
        ("ij,jk", 1, -2, -1),  # without an arrow: labels that occur once
        ("bi,oi->bo", 1, -1, -2),
        ("hbi,hio->hbo", 1, -2, -1),  # h is in both: o is the output channel
        ("bhqd,bhkd->bhqk", 1, -1, -2),
        ("...ij,jk", 0, -1, -2),
        ("i...,io->o...", 0, 0, 0),  # before an ellipsis, counted from the front
        (" b i , b i -> b ", 1, -1, -2),
        ("i,j->ij", 0, -1, -1),  # nothing is summed: the last axis
        ("ij,ij->", 1, -1, 0),  # nothing is kept: the first axis
    ],
)
def test_the_axes_of_an_einsum_operand(equation, operand, summed, kept):
    assert einsum_axes(equation, operand) == (summed, kept)


@given(st.permutations("abcd"), st.integers(1, 3))
def test_a_random_product_sums_over_what_both_have_and_the_result_lacks(letters, kept):
    shared = letters[-1]
    left, right = letters[:kept], letters[kept:-1]
    first, second = "".join([*left, shared]), "".join([shared, *right])
    equation = f"{first},{second}->{''.join([*left, *right])}"
    assert einsum_axes(equation, 0)[0] % len(first) == first.index(shared)
    assert einsum_axes(equation, 1)[0] % len(second) == second.index(shared)
    assert first[einsum_axes(equation, 0)[1]] in left
    if right:
        assert second[einsum_axes(equation, 1)[1]] in right


# For each contracting operator: arguments, and the axis of each operand along which the result is a sum.
x, w = torch.randn(2, 3, 4), torch.randn(5, 4)
SUMMED = [
    ("linear", F.linear, (x, w)),
    ("matmul", torch.matmul, (x, w.T)),
    ("mm", torch.mm, (x[0], w.T)),
    ("bmm", torch.bmm, (x, torch.randn(2, 4, 5))),
    ("addmm", torch.addmm, (torch.randn(5), x[0], w.T)),
    ("conv1d", F.conv1d, (torch.randn(2, 4, 6), torch.randn(5, 4, 3))),
    ("conv2d", F.conv2d, (torch.randn(2, 4, 6, 6), torch.randn(5, 4, 3, 3))),
    (
        "conv_transpose2d",
        F.conv_transpose2d,
        (torch.randn(2, 4, 6, 6), torch.randn(4, 5, 3, 3)),
    ),
]


@pytest.mark.parametrize(
    ("name", "function", "arguments"), SUMMED, ids=[s[0] for s in SUMMED]
)
def test_the_contracted_axis_is_one_that_the_result_sums_over(
    name, function, arguments
):
    """Two entries along the contracted axis exchanged in both operands leave the result unchanged."""
    order = torch.tensor([1, 0, 2, 3])
    changed = list(arguments)
    for operand in CONTRACTING[name].operands:
        if not operand.bias:
            changed[operand.index] = changed[operand.index].index_select(
                operand.reduce, order
            )
    # sums of at most 4 * 3 * 3 products in another order: n eps relative to the sum of magnitudes, below 36 * 4
    torch.testing.assert_close(
        function(*changed), function(*arguments), rtol=0, atol=36 * 2**-23 * 144
    )


@pytest.mark.parametrize(
    ("name", "function", "arguments"), SUMMED, ids=[s[0] for s in SUMMED]
)
def test_the_axis_that_keeps_a_scale_reaches_one_output_channel(
    name, function, arguments
):
    """A scale along ``channel`` can be taken out of the sum: doubling one entry doubles one slice of the result."""
    _, weight = [o for o in CONTRACTING[name].operands if not o.bias]
    arguments = [
        torch.zeros_like(a) if o.bias else a
        for a, o in zip(arguments, _all(name, arguments), strict=True)
    ]
    scaled = list(arguments)
    scaled[weight.index] = scaled[weight.index].clone()
    scaled[weight.index].select(weight.channel, 0).mul_(2)
    before, after = function(*arguments), function(*scaled)
    axis = 1 if weight.index and CONTRACTING[name].kind == "conv" else -1
    ratio = after / before
    torch.testing.assert_close(
        ratio.select(axis, 0),
        torch.full_like(ratio.select(axis, 0), 2.0),
        rtol=0,
        atol=0,
    )
    assert torch.equal(after.narrow(axis, 1, 4), before.narrow(axis, 1, 4))


def _all(name, arguments):
    by_index = {o.index: o for o in CONTRACTING[name].operands}
    return [by_index[i] for i in range(len(arguments))]
