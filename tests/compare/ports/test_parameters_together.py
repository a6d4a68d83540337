"""Parameters that are counterparts only together: a port stacks what the layers of the reference hold.

Their gradients and updates count as those of others do, and what a loader leaves in a
stack, or takes for another one, is named by the parameter.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import roundoff
from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.counterparts import (
    Counterparts,
    counterparts,
    joined_sketch,
    named_leaves,
)
from roundoff.compare.ports.port_comparison import compare_port
from roundoff.compare.values.value_flow import flow_of
from roundoff.compare.values.value_regions import Sides as ValueSides
from roundoff.compare.values.value_regions import limit_of

LAYERS, DIM, ROWS = 3, 8, 5
NAMES = ("first_scale", "first_shift", "weight", "bias", "last_scale", "last_shift")
RATE = 0.05


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.5


LEAVES = {
    f"layer{i}_{name}": drawn(
        *((DIM, DIM) if name == "weight" else (DIM,)), seed=10 * i + n
    )
    for i in range(LAYERS)
    for n, name in enumerate(NAMES)
}
X = drawn(ROWS, DIM, seed=99)
Y = drawn(ROWS, DIM, seed=98)


def reference(m, x):
    for i in range(LAYERS):
        w = {name: getattr(m, f"layer{i}_{name}") for name in NAMES}
        y = F.layer_norm(x, (DIM,), w["first_scale"], w["first_shift"])
        y = torch.tanh(F.linear(y, w["weight"], w["bias"]))
        x = x + F.layer_norm(y, (DIM,), w["last_scale"], w["last_shift"])
    return x


class Product(torch.autograd.Function):
    """x times a matrix; ``wrong``: the gradient of the matrix is a mean over the rows."""

    @staticmethod
    def forward(ctx, x, w, wrong):
        ctx.save_for_backward(x, w)
        ctx.wrong = wrong
        return torch.einsum("bi,io->bo", x, w)

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        of_rows = x[:, :, None] * gradient[:, None, :]
        of_w = of_rows.mean(0) if ctx.wrong else of_rows.sum(0)
        return torch.einsum("bo,io->bi", gradient, w), of_w, None


def port(fault):
    def norm(x, scale, shift):
        apart = x - x.mean(-1, keepdim=True)
        size = torch.rsqrt(apart.square().mean(-1, keepdim=True) + 1e-5)
        if fault == "size without a gradient":
            size = size.detach()
        return apart * size * scale + shift

    def forward(m, x):
        for i in range(LAYERS):
            y = norm(x, m.first_scale[i], m.first_shift[i])
            bias = m.bias.detach() if fault == "bias is not learnt" else m.bias
            y = Product.apply(y, m.weight[i], fault == "mean for sum") + bias[i]
            y = 2 * torch.sigmoid(2 * y) - 1
            scale = m.last_scale[i]
            if fault == "scales less one":
                scale = scale + 1
            x = norm(y, scale, m.last_shift[i]) + x
        return x

    return forward


def leaves(fault):
    held = {
        n: torch.stack([LEAVES[f"layer{i}_{n}"] for i in range(LAYERS)]) for n in NAMES
    }
    held["weight"] = held["weight"].mT.contiguous()
    if fault == "bias left out":
        held["bias"] = torch.zeros(LAYERS, DIM)
    if fault == "scale left out":
        held["last_scale"] = torch.ones(LAYERS, DIM)
    if fault == "scales less one":
        held["last_scale"] = held["last_scale"] - 1
    if fault == "one norm for both":
        for name in ("scale", "shift"):
            held[f"first_{name}"] = held[f"last_{name}"]
    if fault == "loaded in another order":
        vectors = [name for name in NAMES if name != "weight"]
        moved = [*vectors[3:], *vectors[:3]]
        held |= dict(zip(vectors, [held[name] for name in moved], strict=True))
    if fault == "norms exchanged":
        for name in ("scale", "shift"):
            one, other = f"first_{name}", f"last_{name}"
            held[one], held[other] = held[other], held[one]
    return held


@pytest.fixture
def compared(program, tmp_path):
    """``compared(fault)``: one training step of the reference and of the port, compared."""

    def compare(fault, *, tensors=True):
        sides = (program(reference, **LEAVES), program(port(fault), **leaves(fault)))
        for name, module in zip(("ours", "theirs"), sides, strict=True):
            rate = 2 * RATE if fault == "bias at another rate" else RATE
            biases = [p for n, p in module.named_parameters() if n.endswith("bias")]
            others = [p for n, p in module.named_parameters() if not n.endswith("bias")]
            groups = [
                {"params": others},
                {"params": biases, "lr": rate if name == "theirs" else RATE},
            ]
            optimizer = torch.optim.SGD(groups, RATE)
            with roundoff.capture(tmp_path / name, module, keep="tensors"):
                (module(X) - Y).square().mean().backward()
                optimizer.step()
        return roundoff.compare(
            reference=tmp_path / "ours", candidate=tmp_path / "theirs", tensors=tensors
        )

    return compare


@pytest.mark.parametrize("tensors", [True, False])
def test_the_port_is_right(compared, tensors):
    comparison = compared("", tensors=tensors)
    assert comparison.agrees, comparison.answer


def test_what_is_not_compared_is_told(compared):
    comparison = compared("scales less one")
    assert comparison.agrees
    told = "no parameter of the reference holds what its parameter does (2)"
    assert told in comparison.answer


def line_of(text):
    with open(__file__) as file:
        lines = [n for n, line in enumerate(file, 1) if text in line]
    return f"{__file__.rpartition('/')[2]}:{lines[0]}"


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize(
    ("fault", "line", "words"),
    [
        ("size without a gradient", "size = size.detach()", "it hands no gradient on"),
        ("mean for sum", "of_w = of_rows.mean(0)", "as sum, not mean it gives what"),
    ],
)
def test_a_gradient_that_is_wrong_is_named_where_it_becomes_so(
    compared, fault, line, words, tensors
):
    comparison = compared(fault, tensors=tensors)
    first = comparison.culprits(1)[0]
    assert words in first.evidence
    assert first.line.endswith(line_of(line))


@pytest.mark.parametrize("tensors", [True, False])
def test_a_gradient_that_is_missing_is_a_difference(compared, tensors):
    comparison = compared("bias is not learnt", tensors=tensors)
    assert not comparison.agrees
    first = comparison.culprits(1)[0]
    assert first.name == "bias"
    assert "The runs part in the gradient of bias" in comparison.answer
    assert first.evidence.startswith("bias gets no gradient; the reference's layer")


@pytest.mark.parametrize("tensors", [True, False])
def test_an_update_that_is_wrong_is_a_difference(compared, tensors):
    comparison = compared("bias at another rate", tensors=tensors)
    assert not comparison.agrees
    assert {culprit.phase for culprit in comparison.culprits(3)} <= {"optimizer"}


@pytest.mark.parametrize(
    ("fault", "name", "words"),
    [
        (
            "bias left out",
            "bias",
            "holds 0 there, which changes nothing; the reference has layer0_bias",
        ),
        ("scale left out", "last_scale", "layer0_last_scale"),
        ("one norm for both", "first_scale", "and should hold layer#_first_scale"),
        (
            "loaded in another order",
            "first_scale",
            "holds layer0_last_scale there; the reference has layer0_first_scale",
        ),
        ("norms exchanged", "first_scale", "first and last stand in for each other"),
    ],
)
def test_what_a_loader_left_or_mistook_is_named(program, step_of, fault, name, words):
    ours = program(reference, **LEAVES)
    theirs = program(port(""), **leaves(fault))
    sides = Sides(step_of(ours, X, tensors=True), step_of(theirs, X, tensors=True))
    named = [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]
    assert [row.name for row in named] == [name]
    assert words in named[0].evidence


@pytest.fixture
def together(program, step_of):
    """``together(ours, theirs)``: counterparts among leaves of two programs that read them."""

    def read(m):
        return sum(leaf.sum() for leaf in m.parameters())

    def found(ours, theirs):
        reference, candidate = (
            flow_of(step_of(program(read, **held))) for held in (ours, theirs)
        )
        sides = ValueSides(reference, candidate, limit_of(reference, candidate))
        sides.match()
        return counterparts(sides)

    return found


A, B, C = (drawn(4, 3, seed=n) for n in (1, 2, 3))


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        ({"x": A.mT.contiguous(), "y": B}, [("a", "x"), ("b", "y")]),
        ({"x": torch.cat([B, A])}, [("a b", "x")]),
        (
            {"x": torch.cat([A[:2], B[2:]]), "y": torch.cat([A[2:], B[:2]])},
            [("a b", "x y")],
        ),
        # other values, one too many, and constants say nothing
        ({"x": torch.cat([B, A + 1])}, []),
        ({"x": torch.cat([B, A, C])}, []),
        ({"x": torch.zeros(4, 3), "y": torch.ones(8, 3)}, []),
    ],
)
def test_which_parameters_are_counterparts(together, theirs, expected):
    found = together({"a": A, "b": B}, theirs)
    wanted = [Counterparts(tuple(a.split()), tuple(b.split())) for a, b in expected]
    assert sorted(found, key=lambda each: each.ours) == wanted


def test_constants_are_no_counterparts(together):
    zeros = {"a": torch.zeros(4), "b": torch.zeros(4)}
    assert together(zeros, {"x": torch.zeros(8)}) == []


@pytest.mark.parametrize("tensors", [True, False])
def test_what_belongs_to_several_parameters_is_as_it_were_one(
    program, step_of, tensors
):
    """The recorder's own statistics of the whole are what is expected."""

    def read(m):
        return sum(leaf.sum() for leaf in m.parameters())

    parts = {"a": drawn(4, 3, seed=1), "b": drawn(5, seed=2) + 3}
    whole = torch.cat([part.reshape(-1) for part in parts.values()])
    flow, expected = (
        flow_of(step_of(program(read, **held), tensors=tensors))
        for held in (parts, {"w": whole})
    )
    joined = joined_sketch(flow, ("a", "b"), named_leaves(flow))
    wanted = named_leaves(expected)["w"].sketch
    assert joined.numel == 17
    assert joined.exact == tensors
    # statistics are means of up to 17 numbers in fp32: as many roundings of 2**-24
    assert wanted.distance(joined) <= 17 * 2**-24
    assert joined.size == pytest.approx(wanted.size, rel=17 * 2**-24)


def test_statistics_do_not_say_which_parameter_has_no_gradient(program, step_of):
    def read(m):
        return sum(leaf.sum() for leaf in m.parameters())

    for tensors in (True, False):
        step = step_of(program(read, a=A, b=B), tensors=tensors)
        flow = flow_of(step)
        leaves = named_leaves(flow)
        joined = joined_sketch(flow, ("a", "b"), {"a": leaves["a"]})
        assert (joined is None) == (not tensors)
        if joined is not None:
            assert joined.size == pytest.approx(A.double().norm().item(), rel=1e-12)
