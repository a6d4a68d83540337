"""The monitor: its numbers against numpy in float64, what it sees, and that the program does not notice it."""

from __future__ import annotations

import copy
import gc
import math
import weakref

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from roundoff.errors import PatternError, RoundoffError
from roundoff.train.watch import monitor as module
from roundoff.train.watch.monitor import Monitor
from roundoff.train.watch.tensor_summary import (
    from_reduced,
    reduced,
    summarize_tensor,
)

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def train(model, steps=2, monitor=None, x=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        batch = (
            torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
            if x is None
            else x
        )
        model(batch).square().mean().backward()
        optimizer.step()
        if monitor is not None:
            monitor.step()
    return [p.detach().clone() for p in model.parameters()]


def rows(monitor, **where):
    return monitor.table.filter(**where).to_dicts()


def expected(x):
    wide = x.detach().double().numpy().ravel()
    finite = wide[np.isfinite(wide)]
    bad = wide.size - finite.size
    if not finite.size:
        return None, None, None, None, bad
    return finite.min(), finite.max(), finite.mean(), math.sqrt((finite**2).sum()), bad


# -- the numbers -----------------------------------------------------------------------------------------------------


def agrees(found, x):
    """fp32 sums of n terms err by at most n 2**-24 of the sum of magnitudes (Higham, Accuracy and Stability, eq. 4.4);
    rows of 1024 and lanes make n 2**11 here: 2**-13."""
    low, high, mean, norm, bad = expected(x)
    assert found[4] == bad
    assert (found[0], found[1]) == (low, high)
    if low is not None:
        finite = x.detach().double()
        magnitude = finite[finite.isfinite()].abs().mean().item()
        assert found[2] == pytest.approx(mean, abs=2**-13 * magnitude)
        assert found[3] == pytest.approx(norm, rel=2**-13)


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    size=st.sampled_from([1, 3, 100, 1024, 2048, 4095, 4096, 10_000, 20_480]),
    special=st.lists(
        st.sampled_from([math.nan, math.inf, -math.inf, 1e38, 1e-40, 0.0]), max_size=3
    ),
    exponent=st.integers(-100, 60),
    offset=st.sampled_from([0.0, 1.0, -100.0]),
)
def test_a_summary_is_that_of_numpy(dtype, size, special, exponent, offset):
    torch.manual_seed(size)
    x = ((torch.randn(size, dtype=torch.float64) + offset) * 2.0**exponent).to(dtype)
    x[: min(size, len(special))] = torch.tensor(special[:size], dtype=torch.float64).to(
        dtype
    )
    agrees(summarize_tensor(x), x)


@pytest.mark.parametrize(
    "shape",
    [
        lambda x: x.t(),
        lambda x: x[:, ::3],
        lambda x: x[::2],
        lambda x: x.expand(3, *x.shape),
        lambda x: x.view(4, 16, 8, 16).to(memory_format=torch.channels_last),
        lambda x: x.view(64, 128)[:, 64:],
    ],
)
def test_any_layout(shape):
    x = shape(torch.randn(64, 128))
    agrees(summarize_tensor(x), x.contiguous())


def test_special_tensors():
    assert summarize_tensor(torch.empty(0, 3)) == (None, None, None, None, 0)
    assert summarize_tensor(torch.full((3,), math.nan)) == (None, None, None, None, 3)
    assert summarize_tensor(torch.zeros(5000)) == (0, 0, 0, 0, 0)
    assert summarize_tensor(torch.empty(3, device="meta")) is None
    x = torch.randn(8, 8).to(torch.float8_e4m3fn)
    agrees(summarize_tensor(x), x.float())
    low, high, mean, norm, bad = summarize_tensor(
        torch.full((4096,), 3e38)
    )  # squares beyond fp32, and the sum too
    assert (low, high, bad) == (x32 := float(np.float32(3e38)), x32, 0)
    assert mean == pytest.approx(x32)
    assert norm == pytest.approx(64 * x32)


@pytest.mark.parametrize(
    ("x", "finite"),
    [([1.0, -2.0], True), ([1.0, math.inf], False), ([math.nan, 1.0], False)],
)
def test_other_devices_keep_four_numbers(x, finite):
    values = torch.stack(reduced(torch.tensor(x))).tolist()
    expected = (-2.0, 1.0, -0.5, pytest.approx(math.sqrt(5)), 0)
    assert from_reduced(values, 2) == (
        expected if finite else (None, None, None, None, None)
    )


# -- what it sees ----------------------------------------------------------------------------------------------------


def test_outputs_and_gradients():
    model, x = mlp(), torch.randn(6, 4)
    a = model[0](x)
    a.retain_grad()
    b = model[1](a)
    b.retain_grad()
    c = model[2](b)
    c.retain_grad()
    c.square().mean().backward()
    with Monitor(model) as monitor:
        model(x).square().mean().backward()
    seen = [(r["phase"], r["module"], r["kind"]) for r in rows(monitor)]
    forward = [("0", "Linear"), ("1", "ReLU"), ("2", "Linear"), ("", "Sequential")]
    backward = [("2", "Linear"), ("", "Sequential"), ("1", "ReLU"), ("0", "Linear")]
    assert seen == [("forward", *r) for r in forward] + [
        ("backward", *r) for r in backward
    ]
    for path, tensor in (("0", a), ("1", b), ("2", c), ("", c)):
        for phase, value in (("forward", tensor), ("backward", tensor.grad)):
            (row,) = rows(monitor, module=path, phase=phase)
            agrees(
                tuple(row[k] for k in ("min", "max", "mean", "norm", "non_finite")),
                value,
            )
            assert row["numel"] == value.numel()
            assert row["finite"] is True


def test_steps_are_a_ring_and_every_nth():
    model = mlp()
    with Monitor(model, every=3, keep=2) as monitor:
        train(model, 10, monitor)
    assert monitor.table["step"].unique().sort().to_list() == [6, 9]
    assert monitor.first_bad is None
    assert monitor.table.height == 16


@pytest.mark.parametrize(
    ("modules", "paths"),
    [
        ("0", {"0"}),
        (("0", "2"), {"0", "2"}),
        ("class:Linear", {"0", "2"}),
        ("*", {"", "0", "1", "2"}),
        ((), {"", "0", "1", "2"}),
    ],
)
def test_modules_by_pattern(modules, paths):
    model = mlp()
    with Monitor(model, modules=modules, gradients=False) as monitor:
        assert sum(len(m._forward_hooks) for m in model.modules()) == len(paths)
        train(model, 1, monitor)
    assert set(monitor.table["module"]) == paths
    assert set(monitor.table["phase"]) == {"forward"}


def test_a_pattern_without_a_module():
    with pytest.raises(PatternError) as caught, Monitor(mlp(), modules="encoder.*"):
        pass
    assert str(caught.value) == (
        "Monitor(modules=...): no module to watch\n  expected: encoder.*\n  got: the 4 modules of Sequential\n"
        "  do: take paths from model.named_modules(), or class:LayerNorm"
    )


@pytest.mark.parametrize("options", [{"every": 0}, {"keep": 0}, {"every": 1.5}])
def test_no_number_of_steps(options):
    with pytest.raises(RoundoffError, match="no number of steps"):
        Monitor(mlp(), **options)


class Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient.view(-1)[:2] = math.inf
        return gradient


class Bad(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.first, self.second, self.third = (
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 2),
        )
        self.where = where

    def forward(self, x):
        x = self.first(x)
        x = Poison.apply(x) if self.where == "backward" else x
        x = self.second(x * (math.nan if self.where == "forward" else 1.0))
        return self.third(x)


def test_the_first_that_is_not_finite():
    with Monitor(Bad("forward")) as monitor:
        monitor.model(torch.ones(3, 4)).sum().backward()
        monitor.step()
    bad = monitor.first_bad
    assert str(bad) == "the output of second (Linear), 12 of 12 elements"
    assert (bad.step, bad.module, bad.phase, bad.non_finite, bad.numel) == (
        0,
        "second",
        "forward",
        12,
        12,
    )
    with Monitor(Bad("backward")) as monitor:
        monitor.model(torch.ones(3, 4)).sum().backward()
        monitor.step()
    assert (
        str(monitor.first_bad)
        == "the gradient at the output of first (Linear), 2 of 12 elements"
    )


def test_only_the_latest_step_counts():
    model = mlp()
    with Monitor(model) as monitor:
        train(model, 1, monitor, torch.full((1, 4), math.inf))
        before = monitor.first_bad
        assert before is not None
        for p in model.parameters():
            p.data.zero_()
        train(model, 1, monitor)
    assert monitor.first_bad is None
    assert rows(monitor, step=0, finite=False)


def test_a_module_called_twice_and_several_outputs():
    lstm = nn.LSTM(3, 5)
    with Monitor(lstm) as monitor:
        for _ in range(2):
            lstm(torch.randn(4, 2, 3))[0].sum().backward()
    seen = [
        (r["call"], r["output"], r["numel"]) for r in rows(monitor, phase="forward")
    ]
    assert seen == [
        (0, 0, 40),
        (0, 1, 10),
        (0, 2, 10),
        (1, 0, 40),
        (1, 1, 10),
        (1, 2, 10),
    ]
    assert [r["call"] for r in rows(monitor, phase="backward")] == [0, 1]


class Residual(nn.Module):
    """Adds in place to what a module returned, as the library's ResNet does: a full backward hook fails here."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm(self.conv(x))
        y += x
        return self.act(y)


def test_in_place_residuals():
    model, x = Residual(), torch.randn(2, 3, 5, 5)
    with Monitor(model) as monitor:
        model(x).sum().backward()
    with torch.no_grad():
        y = functional.batch_norm(model.conv(x), None, None, training=True)
        for path, value in (("norm", y), ("act", (y + x).relu()), ("", (y + x).relu())):
            (row,) = rows(monitor, module=path, phase="forward")
            assert row["norm"] == pytest.approx(value.norm().item(), rel=1e-5)
    # at the normalization's output the gradient is that of the residual's sum: what ReLU lets through
    (row,) = rows(monitor, module="norm", phase="backward")
    assert row["norm"] == pytest.approx(math.sqrt(((y + x) > 0).sum().item()))


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(reentrant):
    model, x = mlp(), torch.randn(6, 4, requires_grad=True)
    with Monitor(model) as monitor:
        checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
    assert [r["module"] for r in rows(monitor, phase="forward")] == ["0", "1", "2", ""]
    assert sorted(r["module"] for r in rows(monitor, phase="backward")) == [
        "",
        "0",
        "1",
        "2",
    ]


def test_modules_of_a_second_model():
    first, second = mlp(), mlp()
    with Monitor(first) as monitor:
        monitor.add(second, "critic")
        second(first(torch.randn(2, 4)).repeat(1, 2)).sum().backward()
    assert set(monitor.table["module"]) == {
        "",
        "0",
        "1",
        "2",
        "critic",
        "critic.0",
        "critic.1",
        "critic.2",
    }


# -- what the program notices ----------------------------------------------------------------------------------------


def test_the_numbers_of_a_training_do_not_change():
    model = nn.Sequential(Residual(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(75, 2))
    twin = copy.deepcopy(model)
    x = torch.randn(4, 3, 5, 5)

    def run(model, monitor=None):
        torch.manual_seed(1)
        train(model, 5, monitor, x)
        return [*model.state_dict().values(), torch.rand(1)]

    with Monitor(twin) as monitor:
        watched = run(twin, monitor)
    assert all(torch.equal(a, b) for a, b in zip(run(model), watched, strict=True))


def hooks(model):
    return [
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in model.modules()
    ]


def test_everything_is_removed_also_after_an_exception():
    model = mlp()
    with pytest.raises(ZeroDivisionError), Monitor(model) as monitor:
        output = model(torch.ones(1, 4))
        assert sum(hooks(model)) == 4
        1 / 0  # noqa: B018
    assert sum(hooks(model)) == 0
    before = monitor.table.height
    output.sum().backward()  # its hooks do nothing any more
    model(torch.ones(1, 4))
    assert monitor.table.height == before


class Weight(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(3))

    def forward(self):
        return self.w


def test_no_hook_stays_on_a_parameter_and_no_tensor_is_kept():
    model = Weight()
    with Monitor(model) as monitor:
        model().sum().backward()
        monitor.step()
        assert not model.w._backward_hooks
    assert rows(monitor, phase="backward")[0]["norm"] == pytest.approx(math.sqrt(3))
    linear = nn.Linear(2, 2)
    with Monitor(linear) as monitor:
        kept = weakref.ref(linear(torch.ones(1, 2)))
        gc.collect()
        assert kept() is None


def test_a_fault_of_the_monitor_does_not_stop_the_program(monkeypatch):
    model, twin = mlp(), mlp()
    monkeypatch.setattr(module, "summarize_tensor", lambda tensor: 1 / 0)
    text = "the monitor stopped in step 0 .*division by zero.*the program goes on"
    with pytest.warns(RuntimeWarning, match=text), Monitor(model) as monitor:
        watched = train(model, 2, monitor)
    assert monitor.stopped is not None
    assert all(torch.equal(a, b) for a, b in zip(train(twin, 2), watched, strict=True))


def test_without_gradients_and_in_inference_mode():
    model = mlp()
    with Monitor(model) as monitor, torch.inference_mode():
        model(torch.ones(1, 4))
    assert set(monitor.table["phase"]) == {"forward"}


def test_under_vmap():
    linear = nn.Linear(2, 3)
    with Monitor(linear) as monitor:
        torch.vmap(linear)(torch.ones(5, 2))
    assert monitor.stopped is None
    assert rows(monitor)[0]["numel"] in (3, 15)  # of one sample, or of the batch


# -- compiled --------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled():
    torch._dynamo.reset()
    yield lambda model: torch.compile(model, backend="aot_eager", fullgraph=True)
    torch._dynamo.reset()


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::UserWarning"
)  # torch's own, while it compiles
def test_compiled_without_a_break(compiled):
    model, twin, x = Residual(), Residual(), torch.randn(2, 3, 5, 5)
    twin.load_state_dict(model.state_dict())
    fast, counters = compiled(model), torch._dynamo.utils.counters
    with Monitor(twin) as eager, Monitor(fast) as monitor:
        for step in range(3):
            fast(x).sum().backward()
            twin(x).sum().backward()
            eager.step()
            monitor.step()
            if step == 0:
                counters.clear()
    assert not counters["stats"]  # nothing is compiled again
    same = eager.table.drop("non_finite").sort("step", "phase", "module")
    found = monitor.table.drop("non_finite").sort("step", "phase", "module")
    assert found.drop("min", "max", "mean", "norm").equals(
        same.drop("min", "max", "mean", "norm")
    )
    for name in ("min", "max", "mean", "norm"):
        # other kernels, other last bits: 75 terms an element at most
        assert np.allclose(found[name], same[name], rtol=1e-4, atol=1e-5)
    assert all(
        torch.allclose(a, b, rtol=1e-5)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )
    assert sum(hooks(model)) == sum(hooks(fast)) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_finds_the_first_bad(compiled):
    model = Bad("forward")
    fast = compiled(model)
    with Monitor(fast) as monitor:
        fast(torch.ones(3, 4)).sum().backward()
        assert str(monitor.first_bad) == "the output of second (Linear)"
        monitor.step()
    assert monitor.first_bad.module == "second"
    assert monitor.table.filter(pl.col("phase") == "backward").height


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_compiled_before(compiled):
    model = mlp()
    fast = compiled(model)
    fast(torch.ones(1, 4))
    with Monitor(fast) as monitor:
        for _ in range(2):
            fast(torch.ones(1, 4)).sum().backward()
            if monitor.number:
                monitor.step()  # said once
                continue
            with pytest.warns(
                RuntimeWarning, match="torch.compile had compiled it before"
            ):
                monitor.step()
    assert monitor.table.height == 0
