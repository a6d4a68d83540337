"""Every call of real models again in fp64: close to what it did, or refused for a listed reason; nothing disturbed."""

import collections
import contextlib
import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundoff.ops.refusals import Reason, holds
from roundoff.ops.rerun import run_again, tensors_made, written_out_in_fp64
from roundoff.record.own_error import own_error, shadow

aten = torch.ops.aten


class Again(TorchDispatchMode):
    """Runs every call again before it runs; keeps own errors with all tensors given, or the reason."""

    def __init__(self):
        super().__init__()
        self.errors = []
        self.reasons = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [
            t.detach().clone()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        ]
        again = run_again(func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(again, Reason):
            self.reasons[func.overloadpacket.__name__, again.text] += 1
        else:
            outputs = tensors_made(func, args, kwargs, result)
            dtypes = [t.dtype for t in outputs]
            self.errors.append(
                (func, given, args, kwargs, dtypes, own_error(outputs, again))
            )
        return result


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = (
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.Conv2d(width, width, 3, padding=1),
        )
        self.norm, self.group = nn.BatchNorm2d(width), nn.GroupNorm(2, width)

    def forward(self, x):
        return (x + self.group(self.two(self.norm(self.one(x)).relu()))).relu_()


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block, self.drop = (
            nn.Conv2d(3, 8, 3, stride=2),
            Residual(8),
            nn.Dropout(0.1),
        )
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        x = nn.functional.max_pool2d(self.block(self.stem(x)), 2)
        return self.head(self.drop(x.mean((2, 3))))


class Text(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.block = nn.TransformerEncoderLayer(
            16, 2, 32, dropout=0.0, batch_first=True, activation="gelu"
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.block(self.embed(x))[:, 0])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = (
            nn.LSTM(6, 7, num_layers=2, bidirectional=True, batch_first=True),
            nn.Linear(14, 5),
        )

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


MODELS = {
    "convnet": (ConvNet, lambda: torch.randn(4, 3, 13, 13)),
    "transformer": (Text, lambda: torch.randint(20, (4, 9))),
    "lstm": (Recurrent, lambda: torch.randn(4, 5, 6)),
}

#: The operators that are not run again on these models, and why.
REASONS = {
    **dict.fromkeys(
        "alias detach expand lift_fresh permute select slice split squeeze t transpose unsqueeze view".split(),
        "a view rounds nothing",
    ),
    "_to_copy": "a cast that rounds nothing",
    "empty": "uninitialised memory",
    "empty_like": "uninitialised memory",
    "bernoulli_": "draws random numbers",
    "_local_scalar_dense": "returns no tensor",
    "_record_function_enter_new": "called for its effect",
    "_record_function_exit": "called for its effect",
}


def train(name, optimizer, amp, mode):
    """Two steps; gives all numbers they leave behind."""
    torch.manual_seed(1)
    make, data = MODELS[name]
    model, x, y = make(), data(), torch.randint(5, (4,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **optimizer)
    with mode:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return [loss.detach(), *model.state_dict().values(), torch.get_rng_state()]


#: Linear in each tensor: error bounds scale with the operator on absolute values (Higham, section 3.5).
LINEAR = {
    "mm",
    "addmm",
    "bmm",
    "convolution",
    "convolution_backward",
    "sum",
    "mean",
    "add",
    "add_",
    "mul",
    "_foreach_add_",
}
#: The other backward kernels cancel too: their results are small beside the gradient that comes in.
BACKWARD = ("_backward", "_backward_data", "_for_cpu_backward")


def tolerances(func, given, args, kwargs, dtypes, errors):
    """What rounding explains: u (8 + sqrt(n)) times the size of what is summed, u the unit roundoff of the widest
    rounding in it and n, not less than any reduction's length, the elements of the largest tensor."""
    name = func.overloadpacket.__name__
    sizes = [e.reference for e in errors]
    if name in LINEAR:
        positive = run_again(
            func, *[absolute(v, given_to(args, kwargs, given)) for v in (args, kwargs)]
        )
        sizes = [float(t.double().norm()) for t in positive]
    elif name.endswith(BACKWARD):
        sizes = [
            max(s, *(float(t.double().norm()) for t in given if t.is_floating_point()))
            for s in sizes
        ]
    length = max((t.numel() for t in given), default=1)
    floating = [t.dtype for t in given if t.is_floating_point()] + [
        d for d in dtypes if d.is_floating_point
    ]
    roundoff = max((torch.finfo(d).eps / 2 for d in floating), default=0.0)
    return [roundoff * (8 + math.sqrt(length)) * size for size in sizes]


def given_to(args, kwargs, given):
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return {id(t): copy for t, copy in zip(leaves, given, strict=True)}


def absolute(value, copies):
    if isinstance(value, torch.Tensor):
        return copies[id(value)].abs()
    if isinstance(value, dict):
        return {k: absolute(v, copies) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [absolute(v, copies) for v in value]
    return value


OPTIMIZERS = [{"foreach": True}, {"foreach": False}, {"fused": True}]


@pytest.mark.parametrize("amp", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: f"{o}"[2:9])
@pytest.mark.parametrize("name", MODELS)
def test_every_call_is_close_or_refused_for_a_listed_reason(
    name, optimizer, amp, request
):
    if name == "lstm" and amp:
        request.getfixturevalue("bf16_lstm")
    mode = Again()
    with_it = train(name, optimizer, amp, mode)
    without = train(name, optimizer, amp, contextlib.nullcontext())
    assert all(torch.equal(a, b) for a, b in zip(with_it, without, strict=True))
    for operator, reason in mode.reasons:
        assert REASONS[operator] == reason
    for call in mode.errors:
        if None in call[-1]:
            assert call[0] is aten.mkldnn_rnn_layer.default  # its workspace
            assert call[-1].index(None) == 3
            call = (*call[:-1], call[-1][:3])
        for error, limit in zip(call[-1], tolerances(*call), strict=True):
            assert error.l2 <= limit, call[0]
    assert len(mode.errors) > 100


def test_a_kernel_that_knows_no_fp64_has_gradients_there():
    """Both passes of an LSTM of oneDNN, on tensors in fp64, against torch's own layer."""
    torch.manual_seed(0)
    layer = torch.nn.LSTM(3, 4).double()
    x = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    hidden, cell = torch.randn(2, 2, 4, dtype=torch.float64, requires_grad=True)
    expected, _ = layer(x, (hidden[None], cell[None]))
    weights = [p.detach().requires_grad_() for p in layer.parameters()]
    rest = (False, [], 2, 4, 1, True, False, False, True)
    func = aten.mkldnn_rnn_layer.default
    with pytest.raises(RuntimeError):
        func(x, *weights, hidden, cell, *rest)
    again, *_ = written_out_in_fp64(func, (x, *weights, hidden, cell, *rest), {})
    torch.testing.assert_close(again, expected)
    wanted = torch.autograd.grad(expected.square().sum(), [x, *layer.parameters()])
    got = torch.autograd.grad(again.square().sum(), [x, *weights])
    torch.testing.assert_close(got, wanted)
    assert written_out_in_fp64(aten.add.Tensor, (x, x), {}) is None


class Replaced(TorchDispatchMode):
    """Every call gives what it gives when run again, so that fp64 tensors flow through an fp32 model."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        again = run_again(func, args, kwargs or {})
        if isinstance(again, Reason):
            return func(*args, **(kwargs or {}))
        return again[0] if len(func._schema.returns) == 1 else tuple(again)


@pytest.mark.parametrize("name", MODELS)
def test_a_chain_of_calls_run_again_is_the_model_in_double(name):
    make, data = MODELS[name]
    model, x = make().eval(), data()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.bias = None  # which must have the format of the input already above the dispatcher
    with torch.no_grad():
        with Replaced():
            ours = model(x)
        double = model.double()(x.double() if x.is_floating_point() else x)
    assert ours.dtype is torch.float64
    if (
        name == "lstm"
    ):  # written out, where torch multiplies all time steps at once; a sum of 7 + 6 products, 10 times
        assert (ours - double).abs().max() < 10 * 13 * torch.finfo(
            torch.float64
        ).eps * double.abs().max()
    else:
        assert torch.equal(ours, double)


def test_in_place_list_and_out_operators_write_copies_only():
    x, y, out = torch.rand(3), torch.rand(3), torch.zeros(3)
    mean, var = torch.zeros(3), torch.ones(3)
    before = [t.clone() for t in (x, y, out, mean, var)]
    [again] = run_again(aten.add_.Tensor, (x, x), {})
    assert torch.equal(again, 2 * x.double())  # one tensor given twice stays one
    first, second = run_again(aten._foreach_mul_.Scalar, ([x, y], 3.0), {})
    assert torch.equal(first, 3 * x.double())
    assert torch.equal(second, 3 * y.double())
    [again] = run_again(aten.add.out, (x, y), {"out": out})
    assert torch.equal(again, x.double() + y.double())
    batch = torch.rand(5, 3)
    normal, *_ = run_again(
        aten.native_batch_norm.default,
        (batch, None, None, mean, var, True, 0.1, 1e-5),
        {},
    )
    assert normal.dtype is torch.float64
    already = torch.rand(3, dtype=torch.float64)
    kept = already.clone()
    run_again(aten.add_.Tensor, (already, x), {})
    assert torch.equal(already, kept)
    assert all(
        torch.equal(a, b) for a, b in zip((x, y, out, mean, var), before, strict=True)
    )


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "reason"),
    [
        (aten.t.default, (torch.ones(2, 2),), {}, "a view rounds nothing"),
        (
            aten.transpose_.default,
            (torch.ones(2, 2), 0, 1),
            {},
            "a view rounds nothing",
        ),
        (
            aten._to_copy.default,
            (torch.ones(2),),
            {"dtype": torch.float64},
            "a cast that rounds nothing",
        ),
        (
            aten._to_copy.default,
            (torch.ones(2).bfloat16(),),
            {"dtype": torch.float32},
            "a cast that rounds nothing",
        ),
        (aten.uniform_.default, (torch.ones(2),), {}, "draws random numbers"),
        (
            aten.native_dropout.default,
            (torch.ones(2), 0.5, True),
            {},
            "draws random numbers",
        ),
        (aten.randn.default, ([2],), {}, "draws random numbers"),
        (aten.empty.memory_format, ([2],), {}, "uninitialised memory"),
        (aten._local_scalar_dense.default, (torch.ones(1),), {}, "returns no tensor"),
        (aten._linalg_eigh.default, (torch.eye(2),), {}, "its result is not unique"),
        (
            aten.exp.default,
            (torch.ones(2, device="meta"),),
            {},
            "a meta tensor has no values",
        ),
        (aten.exp.default, (torch.ones(2).double(),), {}, "already runs in float64"),
        (torch.ops.prim.device.default, (torch.ones(2),), {}, "returns no tensor"),
        (print, (torch.ones(2),), {}, "not an operator with a schema"),
        (
            aten.mm.default,
            (torch.ones(2, 3), torch.ones(2, 3)),
            {},
            "cannot run in float64: RuntimeError: mat1 and",
        ),
    ],
)
def test_reasons(func, args, kwargs, reason):
    found = run_again(func, args, kwargs)
    assert isinstance(found, Reason)
    assert found.text.startswith(reason)


@pytest.mark.parametrize("p", [0.0, 0.2])
def test_attention_draws_only_with_dropout(p):
    q = torch.randn(1, 2, 5, 4)
    found = run_again(
        aten._scaled_dot_product_flash_attention_for_cpu.default, (q, q, q, p), {}
    )
    assert isinstance(found, Reason) is (p > 0)


def test_the_own_error_of_a_cast_is_its_rounding():
    x = torch.tensor([1.0, 1.0 + 2**-9, 3.0])
    [error] = own_error(
        x.bfloat16(), run_again(aten._to_copy.default, (x,), {"dtype": torch.bfloat16})
    )
    assert (error.l2, error.max) == (
        2**-9,
        2**-9,
    )  # half a unit in the last place of bf16, to even


def test_dtype_arguments_and_integer_inputs_give_the_format_asked_for():
    ints, x = torch.tensor([1, 2, 4]), torch.rand(3).bfloat16()
    calls = [
        (aten.sum.dim_IntList, (x, [0]), {"dtype": torch.float32}),
        (aten.div.Tensor, (ints, torch.tensor(3)), {}),
        (aten.mean.dim, (ints, [0]), {"dtype": torch.float32}),
        (aten.sqrt.default, (ints,), {}),
        (aten.linspace.default, (0, 1, 7), {}),
        (aten.full.default, ([2], 0.1), {"dtype": torch.bfloat16}),
        (
            aten._softmax_backward_data.default,
            (x.float(), x.float(), 0, torch.bfloat16),
            {},
        ),
        (aten._to_copy.default, (ints,), {"dtype": torch.float16}),
    ]
    for func, args, kwargs in calls:
        [again] = run_again(func, args, kwargs)
        assert again.dtype is torch.float64, func
    assert run_again(*calls[1])[0].tolist() == [1 / 3, 2 / 3, 4 / 3]
    assert run_again(*calls[5])[0].tolist() == [0.1, 0.1]
    [again] = run_again(aten.exp.default, (torch.ones(2, dtype=torch.complex64),), {})
    assert again.dtype is torch.complex128
    [again] = run_again(aten.argmax.default, (x,), {})
    assert again.dtype is torch.int64


def test_other_formats_and_none():
    x = torch.rand(5)
    assert (
        run_again(aten.exp.default, (x,), {}, dtype=torch.bfloat16)[0].dtype
        is torch.bfloat16
    )
    assert torch.equal(run_again(aten.exp.default, (x,), {}, dtype=None)[0], x.exp())
    assert (
        run_again(aten.exp.default, (x,), {}, dtype=None, device="meta")[0].device.type
        == "meta"
    )


class Counting(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Counting.calls += 1
        return func(*args, **(kwargs or {}))


def test_modes_autocast_grad_mode_and_random_states_are_left_alone():
    x = torch.rand(4, 4, requires_grad=True)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    with Counting(), torch.autocast("cpu", torch.bfloat16):
        before = Counting.calls
        [again] = run_again(aten.mm.default, (x, x), {})
        assert Counting.calls == before
        assert torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert (x @ x).dtype is torch.bfloat16
    assert Counting.calls > before
    assert not again.requires_grad
    assert torch.equal(again, x.detach().double() @ x.detach().double())
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert np.array_equal(states[2], np.random.get_state()[1])


@pytest.fixture
def library():
    with torch.library._scoped_library("roundoff_again", "DEF") as lib:
        lib.define("half_only(Tensor x) -> Tensor")
        lib.define("noise(Tensor x) -> Tensor")
        lib.define("twice(Tensor x) -> Tensor")

        def half_only(x):
            if x.dtype is torch.float64:
                raise AssertionError("half or single")
            return x * 2

        lib.impl("half_only", half_only, "CPU")
        lib.impl("noise", lambda x: x + torch.randn_like(x), "CPU")
        lib.impl("twice", lambda x: x * 2, "CPU")
        yield torch.ops.roundoff_again


def test_custom_operators(library):
    x = torch.rand(3)
    assert torch.equal(run_again(library.twice.default, (x,), {})[0], 2 * x.double())
    assert run_again(library.half_only.default, (x,), {}) == Reason(
        "cannot run in float64: AssertionError: half or single"
    )
    state = torch.get_rng_state()
    assert run_again(library.noise.default, (x,), {}) == Reason("draws random numbers")
    assert torch.equal(state, torch.get_rng_state())


def test_shadow_writes_own_errors_and_reasons_by_record():
    x, own = torch.rand(3), {}
    compare = shadow(aten.mul_.Scalar, (x, 0.1), {})
    compare([x.mul_(0.1)], [4], own)
    shadow(aten.t.default, (x,), {})(
        [x.t()], [4], own
    )  # the same record: the error stays
    shadow(aten.uniform_.default, (x,), {})([x], [5], own)
    shadow(aten.exp.default, (x,), {})([x.exp()], [-1], own)
    assert set(own) == {4, 5}
    assert 0 < own[4][1] <= own[4][0] < 1e-7
    assert own[4][2] is None
    assert own[5] == (None, None, "draws random numbers")


@pytest.mark.parametrize(
    "narrow", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
@pytest.mark.parametrize(
    "wide", [torch.float16, torch.bfloat16, torch.float32, torch.float8_e5m2]
)
def test_holds_is_true_where_all_values_survive_the_cast(wide, narrow):
    width = torch.int16 if narrow.itemsize == 2 else torch.int8
    every = torch.arange(2 ** (8 * narrow.itemsize)).to(width).view(narrow)
    there = every.to(wide).to(torch.float64)
    exact = every.to(torch.float64)
    survive = bool(((there == exact) | exact.isnan()).all())
    assert holds(wide, narrow) is survive
