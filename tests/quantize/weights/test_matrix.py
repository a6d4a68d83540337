"""Matrix views and patches: torch's own operators must come out of ``rows @ Wᵀ``."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from roundoff.errors import QuantizationError
from roundoff.formats import (
    PerAxis,
    PerGroup,
    PerTensor,
    QParams,
    choose_qparams,
    parse_format,
)
from roundoff.quantize.weights.hessian import Hessian
from roundoff.quantize.weights.matrix import (
    from_matrix,
    matrix_qparams,
    matrix_view,
    patches,
    weight_qparams,
)

LENGTHS = {1: (11,), 2: (9, 8), 3: (6, 5, 7)}
KERNELS = {1: (3,), 2: (3, 2), 3: (2, 3, 1)}


def product(x, weight, operator, groups, shape, **call):
    """The operator through its matrices, in the shape of its output."""
    rows = patches(x, operator, weight.shape[2:], groups=groups, **call)
    out = (
        rows @ matrix_view(weight, operator, groups).mT
    )  # [groups, batch * positions, out / groups]
    batch, channels, *space = shape
    return (
        out.reshape(groups, batch, *space, channels // groups)
        .movedim(-1, 2)
        .transpose(0, 1)
        .reshape(shape)
    )


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"stride": 2, "padding": 1},
        {"dilation": 2, "padding": 2},
        {"groups": 2},
        {"groups": 4, "stride": 2},
        {"padding": "same"},
        {"padding": "valid"},
        {"padding": "same", "dilation": 2},
    ],
)
@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_convolutions(dimensions, call):
    torch.manual_seed(0)
    groups = call.get("groups", 1)
    x = torch.randn(2, 4, *LENGTHS[dimensions], dtype=torch.float64)
    weight = torch.randn(8, 4 // groups, *KERNELS[dimensions], dtype=torch.float64)
    want = getattr(F, f"conv{dimensions}d")(x, weight, **call)
    rest = {k: v for k, v in call.items() if k != "groups"}
    got = product(x, weight, f"conv{dimensions}d", groups, want.shape, **rest)
    torch.testing.assert_close(
        got, want, rtol=1e-12, atol=1e-12
    )  # sums of 36 float64 products


@pytest.mark.parametrize("dimensions", [1, 2, 3])
@pytest.mark.parametrize(
    "call",
    [
        {},
        {"stride": 2, "padding": 1},
        {"stride": 3, "output_padding": 1, "padding": 1},
        {"dilation": 2},
        {"groups": 2, "stride": 2},
        {"groups": 4},
        {"padding": 3, "stride": 2},
    ],
)
def test_transposed_convolutions(dimensions, call):
    torch.manual_seed(0)
    groups = call.get("groups", 1)
    x = torch.randn(2, 4, *LENGTHS[dimensions], dtype=torch.float64)
    weight = torch.randn(
        4, 6 // (1 if groups != 4 else 2), *KERNELS[dimensions], dtype=torch.float64
    )
    want = getattr(F, f"conv_transpose{dimensions}d")(x, weight, **call)
    rest = {k: v for k, v in call.items() if k != "groups"}
    got = product(x, weight, f"conv_transpose{dimensions}d", groups, want.shape, **rest)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_linear_and_matmul():
    x, weight = torch.randn(3, 5, 6), torch.randn(4, 6)
    for operator, w in (("linear", weight), ("matmul", weight.T)):
        rows = patches(x, operator)
        assert rows.shape == (1, 15, 6)
        torch.testing.assert_close(
            (rows @ matrix_view(w, operator).mT).reshape(3, 5, 4), F.linear(x, weight)
        )
        assert torch.equal(from_matrix(matrix_view(w, operator), w.shape, operator), w)


@pytest.mark.parametrize(
    ("operator", "shape", "groups"),
    [
        ("conv2d", (8, 2, 3, 3), 2),
        ("conv2d", (6, 1, 3, 3), 6),
        ("conv_transpose2d", (4, 3, 2, 2), 2),
        ("conv1d", (2, 3, 4), 1),
    ],
)
def test_there_and_back(operator, shape, groups):
    weight = torch.randn(shape)
    assert torch.equal(
        from_matrix(matrix_view(weight, operator, groups), shape, operator, groups),
        weight,
    )


@pytest.mark.parametrize(
    ("operator", "shape", "groups", "granularity"),
    [
        ("conv2d", (8, 4, 3, 3), 2, PerAxis(0)),
        ("conv_transpose2d", (4, 4, 2, 2), 1, PerAxis(1)),
        ("conv2d", (4, 4, 3, 3), 1, PerGroup(2, axis=1)),
        ("linear", (4, 6), 1, PerGroup(3)),
        ("matmul", (6, 4), 1, PerAxis(1)),
        ("conv2d", (4, 1, 3, 3), 4, PerTensor()),
    ],
)
def test_qparams_there_and_back(operator, shape, groups, granularity):
    weight, fmt = torch.randn(shape), parse_format("int8_asym")
    q = choose_qparams(weight, fmt, granularity)
    wide = matrix_qparams(q, shape, operator, groups)
    assert wide.scale.shape == matrix_view(weight, operator, groups).shape
    back = weight_qparams(wide, shape, operator, groups, granularity)
    assert torch.equal(back.scale, q.scale)
    assert torch.equal(back.zero_point, q.zero_point)
    assert back.granularity == granularity


def test_different_scales_in_one_set_are_refused():
    with pytest.raises(
        QuantizationError, match="elements that share a scale have different ones"
    ):
        weight_qparams(
            QParams(torch.tensor([[[1.0], [2.0]]])), (2, 3), "linear", 1, PerTensor()
        )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda: matrix_view(torch.ones(2, 3), "softmax"),
            "this operator's weight is no matrix",
        ),
        (
            lambda: matrix_view(torch.ones(2, 3), "conv4d"),
            "this operator's weight is no matrix",
        ),
        (
            lambda: matrix_view(torch.ones(2, 3), "conv2d"),
            "the weight does not fit the operator",
        ),
        (
            lambda: matrix_view(torch.ones(4, 3, 3, 3), "conv2d", 3),
            "the weight does not fit the operator",
        ),
        (
            lambda: patches(torch.ones(1, 3, 8, 8), "conv2d", (3, 3), groups=2),
            "the input does not fit the operator",
        ),
        (
            lambda: patches(torch.ones(3), "linear", share=0.0),
            "no such share of the positions",
        ),
    ],
)
def test_what_is_refused(call, text):
    with pytest.raises(QuantizationError, match=text):
        call()


def test_a_share_of_the_positions_is_whole_patches():
    x = torch.randn(3, 4, 10, 10)
    whole = patches(x, "conv2d", (3, 3), padding=1).reshape(3, 100, 36)
    some = patches(
        x,
        "conv2d",
        (3, 3),
        padding=1,
        share=0.25,
        generator=torch.Generator().manual_seed(1),
    )
    some = some.reshape(3, 25, 36)
    at = [int((whole[0] == row).all(-1).nonzero()) for row in some[0]]
    assert at == sorted(set(at))
    assert torch.equal(some, whole[:, at])  # the same positions of every image
    assert patches(torch.randn(40, 6), "linear", share=0.1).shape == (1, 4, 6)


def test_unbatched_input():
    x = torch.randn(4, 10, 10)
    assert torch.equal(patches(x, "conv2d", (3, 3)), patches(x[None], "conv2d", (3, 3)))


def test_hessian_is_the_moment_of_all_rows():
    torch.manual_seed(0)
    x, exact, g = (
        torch.randn(2, 30, 5, dtype=torch.float64),
        torch.randn(2, 30, 5, dtype=torch.float64),
        torch.rand(30),
    )
    hessian = Hessian()
    for part in (slice(0, 7), slice(7, 30)):
        hessian.add(x[:, part], g[part], exact[:, part])
    w = g.double() / g.double().sum()
    torch.testing.assert_close(hessian.matrix, torch.einsum("n,gni,gnj->gij", w, x, x))
    torch.testing.assert_close(
        hessian.cross, torch.einsum("n,gni,gnj->gij", w, exact, x)
    )
    torch.testing.assert_close(hessian.mean, torch.einsum("n,gni->gi", w, x))
    centred = x - hessian.mean[:, None]
    torch.testing.assert_close(
        hessian.centred, torch.einsum("n,gni,gnj->gij", w, centred, centred)
    )
    away = exact - hessian.reference_mean[:, None]
    torch.testing.assert_close(
        hessian.centred_cross, torch.einsum("n,gni,gnj->gij", w, away, centred)
    )
    assert hessian.rows == 30


def test_constant_inputs_have_no_centred_moments():
    """Their variance is what fp32 rounding leaves of it, of either sign."""
    torch.manual_seed(0)
    x = torch.rand(1000, 6)
    x[:, 2], x[:, 4] = 0.1234567, 0.0
    hessian = Hessian()
    for part in x.split(100):
        hessian.add(part, reference=part + 0.01 * torch.randn(100, 6))
    assert not hessian.centred[0, [2, 4]].any()
    assert not hessian.centred[0, :, [2, 4]].any()
    assert hessian.centred_cross is not None
    assert not hessian.centred_cross[0, :, [2, 4]].any()
    kept = [0, 1, 3, 5]
    want = np.cov(x.double().numpy().T, bias=True)[np.ix_(kept, kept)]
    # 1000 fp32 products of size 1/3, summed in batches: a few eps of their sum, 1e-6 of a mean
    np.testing.assert_allclose(
        hessian.centred[0][kept][:, kept].numpy(), want, atol=1e-6
    )
    assert hessian.matrix[0, 2, 2] > 0


def test_hessian_does_not_depend_on_batches_and_ignores_zero_weights():
    x = torch.randn(20, 4, dtype=torch.float64)
    once, twice = Hessian(), Hessian()
    once.add(x[:10])
    twice.add(x, torch.tensor([1.0] * 10 + [0.0] * 10))
    torch.testing.assert_close(once.matrix, twice.matrix)


@pytest.mark.parametrize(
    ("rows", "more", "text"),
    [
        (torch.ones(3, 5), {}, r"\(groups, in\) = \(1, 5\) after \(1, 4\)"),
        (
            torch.ones(3, 4),
            {"reference": torch.ones(3, 4)},
            "a reference in some batches only",
        ),
        (torch.ones(3, 4), {"reference": torch.ones(2, 4)}, "a reference of shape"),
        (torch.ones(3, 4), {"weights": torch.ones(2)}, "weights of shape"),
        (torch.ones(3, 4), {"weights": -torch.ones(3)}, "weights below 0"),
        (torch.full((3, 4), torch.nan), {}, "the inputs holds NaN or Inf"),
    ],
)
def test_hessian_refuses_and_stays_as_it_was(rows, more, text):
    hessian = Hessian()
    hessian.add(torch.eye(4))
    before = hessian.matrix.clone()
    with pytest.raises(QuantizationError, match=text):
        hessian.add(rows, **more)
    assert torch.equal(hessian.matrix, before)
    assert hessian.rows == 4


def test_hessian_without_data():
    with pytest.raises(QuantizationError, match="no inputs were seen"):
        _ = Hessian().matrix
    silent = Hessian()
    silent.add(torch.ones(2, 3), torch.zeros(2))
    with pytest.raises(QuantizationError, match="all weights of the rows are zero"):
        _ = silent.matrix
