"""What all learners share: dtypes, autocast, observing, invalid parameters, state, and what they refuse."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import roundoff as ro
from roundoff.errors import FormatError, QuantizationError
from roundoff.formats import (
    PerAxis,
    PerBlock,
    PerGroup,
    PerTensor,
    PerToken,
    QParams,
    choose_qparams,
    fake_quantize,
    integer,
    parse_format,
)
from roundoff.quantize.qat.learner import Learner
from roundoff.quantize.qat.learners import LEARNERS, make_learner

#: every learner with a format that it can do, before each role that it can have
CASES = [
    ("ste", "int4", "weight"),
    ("ste", "int4_asym", "activation"),
    ("ste", "fp4_e2m1", "weight"),
    ("lsq", "int4", "weight"),
    ("lsq", "int4_asym", "activation"),
    ("lsq", "fp8_e4m3fn", "activation"),
    ("lsq+", "int4", "weight"),
    ("lsq+", "int4_asym", "activation"),
    ("ulq", "int4_asym", "activation"),
    ("pact", "int4_asym", "activation"),
    ("dorefa", "int2", "weight"),
    ("dorefa", "binary", "weight"),
    ("dorefa", "int2_asym", "activation"),
    ("twn", "ternary", "weight"),
    ("ttq", "ternary", "weight"),
    ("bnn", "binary", "weight"),
    ("bnn", "binary", "activation"),
    ("xnor", "binary", "weight"),
    ("xnor", "binary", "activation"),
]
every = pytest.mark.parametrize(("name", "fmt", "role"), CASES)


def values(seed=0, shape=(6, 8), dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_every_learner_is_in_the_table():
    assert list(LEARNERS) == [
        "ste",
        "lsq",
        "lsq+",
        "ulq",
        "pact",
        "dorefa",
        "twn",
        "ttq",
        "bnn",
        "xnor",
    ]
    assert {name for name, _, _ in CASES} == set(LEARNERS)
    with pytest.raises(
        QuantizationError,
        match="make_learner: unknown learner\n  expected: ste, lsq, lsq.*\n  got: lsqq",
    ):
        make_learner("lsqq", "int8")


@every
@pytest.mark.parametrize("granularity", [PerTensor(), PerAxis(1), PerGroup(4)])
def test_frozen_fake_quantize_is_the_forward_pass_bit_for_bit(
    name, fmt, role, granularity
):
    if role == "activation" and isinstance(granularity, PerGroup):
        return
    learner = make_learner(name, fmt, granularity, role=role)
    learner(values())
    learner.eval()
    x = values(1) * 3
    on_grid, qparams = learner.frozen(x)
    assert torch.equal(learner(x), on_grid)
    assert torch.equal(fake_quantize(on_grid, qparams, learner.grid), on_grid)
    if role == "activation" or name in ("ste", "lsq", "lsq+"):
        assert learner.grid == parse_format(fmt)
        assert torch.equal(fake_quantize(x, qparams, learner.fmt), on_grid)
    assert qparams.granularity == granularity
    assert not qparams.scale.requires_grad


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_tensors_are_computed_in_fp32_and_come_back(
    name, fmt, role, dtype
):
    x = values(2, dtype=dtype)
    low, high = make_learner(name, fmt, role=role), make_learner(name, fmt, role=role)
    leaf, wide = x.clone().requires_grad_(), x.float().requires_grad_()
    result = low(leaf)
    expected = high(wide)
    assert result.dtype == dtype
    assert torch.equal(result, expected.to(dtype))
    g = values(3, dtype=dtype)
    result.backward(g)
    expected.backward(g.float())
    assert torch.equal(leaf.grad, wide.grad.to(dtype))
    for ours, theirs in zip(low.parameters(), high.parameters(), strict=True):
        assert ours.dtype == torch.float32
        assert torch.equal(ours.grad, theirs.grad)


@every
@pytest.mark.parametrize("region", ["torch", "bf16", "fp8"])
def test_an_autocast_region_changes_nothing(name, fmt, role, region):
    inside, outside = (
        make_learner(name, fmt, role=role),
        make_learner(name, fmt, role=role),
    )
    leaf, other = values(4).requires_grad_(), values(4).requires_grad_()
    regions: dict[str, Callable[[], AbstractContextManager[object]]] = {
        "torch": lambda: torch.autocast("cpu", torch.bfloat16),
        "bf16": lambda: ro.autocast("bf16", device="cpu"),
        "fp8": lambda: ro.autocast(
            "fp8_e4m3fn", inside, device="cpu"
        ),  # every operator that is seen would be simulated
    }
    with regions[region]():
        result = inside(leaf)
    result.sum().backward()
    expected = outside(other)
    expected.sum().backward()
    assert torch.equal(result, expected)
    assert torch.equal(leaf.grad, other.grad)


@every
def test_parameters_that_an_optimizer_ruined_are_put_back_and_said(name, fmt, role):
    learner = make_learner(name, fmt, role=role)
    learner(values())
    if not learner.learned:
        assert not list(learner.parameters())
        return
    before = {n: p.detach().clone() for n, p in learner.named_parameters()}
    expected = learner(values(1))
    for bad in (-1.0, float("nan"), float("inf"), 0.0):
        with torch.no_grad():
            for parameter in learner.parameters():
                parameter.fill_(bad)
        if learner.reverted:
            again = learner(values(1))  # said once
        else:
            said = f"{role} \\({name.replace('+', '.')}, {fmt}\\): .* became invalid .* 1 of 1"
            with pytest.warns(RuntimeWarning, match=said):
                again = learner(values(1))
        assert torch.equal(again, expected)
        assert {n: p.item() for n, p in learner.named_parameters()} == {
            n: v.item() for n, v in before.items()
        }
    assert learner.reverted == 4


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([c for c in CASES if c[0] != "dorefa"]),
    st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=24),
    st.floats(2.0**-7, 10, width=32),
)
def test_gradients_are_zero_or_passed_on_and_values_on_the_grid(case, numbers, scale):
    """Whatever x and scale: frozen values are fixed points, and where x has a gradient of its own it is bounded."""
    name, fmt, role = case
    x = torch.tensor([numbers])
    zero = (
        torch.tensor([[parse_format(fmt).min_finite]]) if fmt.endswith("asym") else None
    )
    learner = make_learner(
        name, fmt, None, QParams(torch.tensor([[scale]]), zero), role=role
    )
    leaf = x.clone().requires_grad_()
    result = learner(leaf)
    result.sum().backward()
    on_grid, qparams = learner.frozen(x)
    assert torch.equal(result, on_grid)
    assert torch.equal(fake_quantize(on_grid, qparams, learner.grid), on_grid)
    assert leaf.grad.isfinite().all()
    if name in ("ste", "lsq", "lsq+", "ulq", "pact", "twn"):
        assert set(leaf.grad.flatten().tolist()) <= {0.0, 1.0}
    assert all(p.grad.isfinite().all() for p in learner.parameters())


def test_only_the_invalid_places_are_put_back():
    learner = make_learner(
        "lsq",
        "int8",
        PerAxis(0),
        QParams(torch.tensor([[0.5], [0.25]]), None, PerAxis(0)),
    )
    learner(values(shape=(2, 3)))
    with torch.no_grad():
        learner.scale.copy_(torch.tensor([[-0.1], [0.3]]))
    with pytest.warns(RuntimeWarning, match="in 1 of 2 places"):
        learner(values(shape=(2, 3)))
    assert learner.scale.flatten().tolist() == pytest.approx([0.5, 0.3])


def test_ulq_takes_back_clips_that_leave_zero_outside():
    learner = make_learner(
        "ulq",
        "int8_asym",
        None,
        QParams(torch.tensor(0.1), torch.tensor(0.0)),
        role="activation",
    )
    learner(values())
    with torch.no_grad():
        learner.clip_min.fill_(0.5)
    with pytest.warns(RuntimeWarning, match="clip_max and clip_min became invalid"):
        learner(values())
    assert learner.clip_min.item() == pytest.approx(-12.8)


def test_a_scale_stays_positive_through_a_bad_learning_rate():
    learner = make_learner("lsq", "int4", role="weight")
    weight = nn.Parameter(values())
    learner(weight.detach())
    optimizer = torch.optim.SGD([learner.scale], lr=1e4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for _ in range(20):
            optimizer.zero_grad()
            learner(weight).square().sum().backward()
            optimizer.step()
        assert learner(weight).isfinite().all()
    assert learner.reverted > 0
    assert learner.scale.item() > 0


def test_straight_through_observes_a_moving_average():
    learner = make_learner("ste", "int8_asym", role="activation", momentum=0.25)
    low = high = None
    for seed in range(4):
        x = values(seed)
        learner(x)
        batch = x.min().item(), x.max().item()
        low, high = (
            batch
            if low is None
            else (0.75 * low + 0.25 * batch[0], 0.75 * high + 0.25 * batch[1])
        )
        if (
            seed == 0
        ):  # the first forward pass both starts and observes: the same range twice
            low, high = batch
    scale = (high - low) / 255
    assert learner.scale.item() == pytest.approx(scale, rel=1e-6)
    assert learner.zero_point.item() == round(-128 - low / scale)
    before = learner.scale.item()
    learner.eval()(values(5) * 100)
    learner.train().freeze()
    learner(values(5) * 100)
    assert learner.scale.item() == before
    learner.freeze(False)
    learner(values(5) * 100)
    assert learner.scale.item() > before


def test_straight_through_follows_a_weight():
    learner = make_learner("ste", "int8", PerAxis(0))
    for seed in range(2):
        x = values(seed)
        learner(x)
        assert torch.equal(
            learner.scale, choose_qparams(x, parse_format("int8"), PerAxis(0)).scale
        )
    fixed = make_learner("ste", "int8", None, QParams(torch.tensor(0.5)))
    fixed(values())
    assert fixed.scale.item() == 0.5


@pytest.mark.parametrize(
    ("fmt", "largest"),
    [
        ("int3", 3),
        ("int8", 127),
        ("fp4_e2m1", 6),
        (integer(4, narrow_range=False), 7),
        (integer(2, narrow_range=False), 1),
    ],
)
def test_lsq_starts_where_its_paper_does(fmt, largest):
    from roundoff.quantize.entry import format_named

    x = values(shape=(4, 50))
    learner = make_learner(
        "lsq", format_named(fmt) if isinstance(fmt, str) else fmt, PerAxis(0)
    )
    learner(x)
    expected = 2 * x.double().abs().mean(1) / np.sqrt(largest)
    torch.testing.assert_close(
        learner.scale.flatten().double(), expected, rtol=60 * 2.0**-24, atol=0
    )


def test_lsq_plus_starts_where_its_paper_does():
    x = values(shape=(4, 50)) + 0.3
    learner = make_learner("lsq+", "int4", PerAxis(0))
    learner(x)
    mean, sd = x.double().mean(1), x.double().std(1, correction=0)
    expected = torch.maximum((mean - 3 * sd).abs(), (mean + 3 * sd).abs()) / 8
    torch.testing.assert_close(
        learner.scale.flatten().double(), expected, rtol=200 * 2.0**-24, atol=0
    )


@every
def test_state_goes_through_a_state_dict_and_a_copy(name, fmt, role):
    import copy

    learner = make_learner(name, fmt, PerAxis(1), role=role)
    learner(values())
    learner.eval()
    other = make_learner(name, fmt, PerAxis(1), role=role).eval()
    other.load_state_dict(learner.state_dict())
    for again in (other, copy.deepcopy(learner)):
        assert torch.equal(again(values(1)), learner(values(1)))
        assert {
            n: p.requires_grad for n, p in again.named_parameters()
        } == dict.fromkeys(learner.learned, True)


def test_values_that_are_no_numbers():
    learner = make_learner("lsq", "int8")
    with pytest.raises(
        QuantizationError,
        match="the first tensor gives no scale\n.*\n  got: shape .2, 3., none",
    ):
        learner(torch.full((2, 3), float("nan")))
    with pytest.raises(QuantizationError, match="the first tensor gives no scale"):
        learner(torch.empty(0, 3))
    learner(values())
    assert learner(torch.tensor([[float("nan"), float("inf")]])).isnan().tolist() == [
        [True, False]
    ]
    assert learner(torch.empty(0, 3)).shape == (0, 3)
    with pytest.raises(FormatError, match="only floating-point tensors"):
        learner(torch.ones(2, 2, dtype=torch.int64))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_learner("lsq", "mxfp4"),
            r"weight \(lsq, mxfp4\): a block format chooses its scales itself",
        ),
        (
            lambda: make_learner("lsq", "int8", role="bias"),
            r"unknown role\n  expected: weight or activation\n  got: bias",
        ),
        (
            lambda: make_learner("lsq", "int8", PerToken(), role="activation"),
            "would depend on the batch",
        ),
        (
            lambda: make_learner("lsq", "int8", PerAxis(0), role="activation"),
            "would depend on the batch",
        ),
        (
            lambda: make_learner("lsq", "int8", PerBlock((2, 2)), role="activation"),
            r"got: PerBlock\(block_size=\(2, 2\)\)",
        ),
        (
            lambda: make_learner("ulq", "int8", role="activation"),
            "needs codes with a zero point",
        ),
        (
            lambda: make_learner("pact", "fp8_e4m3fn", role="activation"),
            "needs codes with a zero point",
        ),
        (
            lambda: make_learner("pact", "int8_asym"),
            "PACT is for activations\n  expected: role activation\n  got: weight",
        ),
        (
            lambda: make_learner("dorefa", "int4", role="activation"),
            "needs codes with a zero point",
        ),
        (lambda: make_learner("dorefa", "fp4_e2m1"), "DoReFa needs integer codes"),
        (
            lambda: make_learner("dorefa", "int4", gradient_bits=4),
            "gradients are rounded where activations are",
        ),
        (
            lambda: make_learner("twn", "int4"),
            "twn has a grid of its own\n  expected: ternary\n  got: int4",
        ),
        (
            lambda: make_learner("twn", "ternary", role="activation"),
            "twn is for weights",
        ),
        (
            lambda: make_learner("bnn", "int4"),
            "bnn has a grid of its own\n  expected: binary",
        ),
        (
            lambda: make_learner("lsq", "int8").qparams(),
            "this learner has no scale yet",
        ),
        (
            lambda: make_learner("ulq", "int8_asym").qparams(),
            "this learner has no scale yet",
        ),
        (
            lambda: make_learner(
                "lsq", "int8", None, QParams(torch.tensor([1.0, 0.0, float("nan")]))
            ),
            r"training cannot start from this scale\n  expected: finite scales of at least 1.18e-38\n  got: 2 of 3 others",
        ),
        (
            lambda: make_learner(
                "pact",
                "int8_asym",
                None,
                QParams(torch.tensor(0.1), torch.tensor(0.0)),
                role="activation",
            ),
            "PACT clips at 0, and this range goes below\n  expected: zero point -128",
        ),
        (
            lambda: make_learner(
                "dorefa",
                "int8_asym",
                None,
                QParams(torch.tensor(0.1), torch.tensor(0.0)),
                role="activation",
            ),
            "DoReFa clips activations at 0",
        ),
        (
            lambda: make_learner("bnn", "binary", role="activation")(torch.rand(3, 2)),
            "the sign of values that are never negative is a constant",
        ),
        (
            lambda: make_learner("xnor", "binary", role="activation")(torch.rand(3, 2)),
            "before the ReLU, or use dorefa",
        ),
    ],
)
def test_what_a_learner_cannot_do_is_said(make, message):
    with pytest.raises(QuantizationError, match=message):
        make()


def test_a_scale_of_another_shape_is_refused():
    learner = make_learner(
        "lsq", "int8", PerAxis(0), QParams(torch.full((4, 1), 0.1), None, PerAxis(0))
    )
    with pytest.raises(FormatError, match="the scale does not fit the tensor"):
        learner(torch.ones(3, 2))


def test_a_learner_without_a_gradient_cannot_be_made():
    class Half(Learner):
        kind = "half"

    with pytest.raises(TypeError, match="abstract"):
        Half("int8")  # type: ignore[abstract]
