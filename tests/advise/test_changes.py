"""Each change keeps what the model computes, and is undone where it is the process's."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from roundoff.advise import Change, Runner, Setup, Tuning, changed, observe, read_tuning
from roundoff.advise.facts import (
    habits_of,
    normalized_layers_of,
    subnormal_share,
    written_attention_of,
)
from roundoff.errors import WorkloadError
from roundoff.workload import Workload

# fp32 sums in another order: 2^-24 relative a term, some hundred terms
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.up_norm = nn.BatchNorm2d(4)
        self.head = nn.Linear(4, 6)
        self.head_norm = nn.BatchNorm1d(6)

    def forward(self, x):
        x = self.norm(self.conv(x)).relu()
        x = self.up_norm(self.up(x)).mean((2, 3))
        return self.head_norm(self.head(x))


def net() -> Net:
    model = Net()
    for _ in range(3):  # running statistics that are not 0 and 1
        model(torch.randn(4, 3, 8, 8) * 2 + 1)
    return model.eval()


def setup_of(model, *batches, train=False, **parts) -> Setup:
    return Setup(Workload(model, list(batches), **parts), train)


def pairs_of(setup) -> tuple[str, ...]:
    return tuple(f"{p.layer} > {p.norm}" for p in normalized_layers_of(setup))


def test_layers_before_batch_norms_are_found_by_running():
    setup = setup_of(net(), torch.randn(2, 3, 8, 8))
    assert pairs_of(setup) == ("conv > norm", "up > up_norm", "head > head_norm")


def test_a_layer_that_runs_twice_is_not_folded():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            return self.norm(self.conv(self.conv(x)))

    assert normalized_layers_of(setup_of(Twice(), torch.randn(2, 3, 4, 4))) == ()


@pytest.mark.parametrize("name", ["fold_batch_norm", "drop_bias_before_norm"])
def test_normalized_layers_keep_their_outputs(name):
    x = torch.randn(2, 3, 8, 8)
    model = net()
    setup = setup_of(model, x)
    other = changed(setup, [Change(name, pairs_of(setup))]).model
    torch.testing.assert_close(other(x), model(x), **CLOSE)
    kinds = [type(m).__name__ for m in other.modules()]
    if name == "fold_batch_norm":
        assert "BatchNorm2d" not in kinds
    else:
        assert other.get_submodule("conv").bias is None
    assert model.conv.bias is not None


@pytest.mark.parametrize("name", ["channels_last", "inference_mode", "no_fp64"])
def test_calls_keep_their_outputs(name):
    x = torch.randn(2, 3, 8, 8)
    model = net()
    other = changed(setup_of(model, x), [Change(name)]).model
    torch.testing.assert_close(other(x), model(x), **CLOSE)


def test_autocast_runs_in_bf16():
    layer = nn.Linear(4, 4)
    other = changed(setup_of(layer, torch.ones(1, 4)), [Change("bf16_autocast")]).model
    assert other(torch.ones(1, 4)).dtype == torch.bfloat16


def test_a_copy_of_a_changed_model_runs_its_own_weights():
    setup = setup_of(nn.Linear(2, 2), torch.ones(1, 2))
    model = changed(setup, [Change("channels_last"), Change("inference_mode")]).model
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert twin(torch.ones(1, 2)).abs().sum() == 0
    assert model(torch.ones(1, 2)).abs().sum() > 0


class Attention(nn.Module):
    """Attention written out, in one of the ways in which people do."""

    def __init__(self, way: str):
        super().__init__()
        self.way = way
        self.dropout = nn.Dropout(0.0)
        self.softmax = nn.Softmax(-1)
        self.register_buffer("hidden", torch.ones(6, 6).triu(1).bool())

    def forward(self, q, k, v):
        if self.way == "divided":
            scores = torch.matmul(q, k.transpose(-2, -1)) / q.shape[-1] ** 0.5
            return torch.matmul(functional.softmax(scores, dim=-1), v)
        if self.way == "scaled":
            scores = (q @ k.transpose(2, 3)) * 0.3
            return self.dropout(scores.softmax(dim=-1)) @ v
        if self.way == "unscaled":
            return torch.softmax(q @ k.mT, -1) @ v
        if self.way == "masked":
            scores = 0.5 * (q @ k.transpose(-1, -2))
            scores = scores.masked_fill(self.hidden, float("-inf"))
            return self.softmax(scores) @ v
        bias = torch.arange(6.0)
        return functional.dropout((q @ k.mT + bias).softmax(-1), 0.0) @ v


@pytest.mark.parametrize("way", ["divided", "scaled", "unscaled", "masked", "added"])
def test_written_attention_becomes_the_fused_operator(way):
    model = nn.ModuleDict({"attention": Attention(way)})
    q, k, v = torch.randn(3, 2, 4, 6, 8).unbind(0)
    assert written_attention_of(model) == ("attention",)
    Change("fused_attention", ("attention",)).edit(model)
    fused = model["attention"]
    expected = Attention(way)(q, k, v)
    torch.testing.assert_close(fused(q, k, v), expected, **CLOSE)
    with torch.profiler.profile() as profile:
        fused(q, k, v)
    names = {event.key for event in profile.key_averages()}
    assert "aten::scaled_dot_product_attention" in names


@pytest.mark.parametrize(
    "forward",
    [
        lambda q, k, v: (q @ k.mT).softmax(-2) @ v,  # not along the keys
        lambda q, k, v: (q @ k).softmax(-1) @ v,  # not transposed
        lambda q, k, v: (q @ k.mT).sigmoid() @ v,
        lambda q, k, v: (q @ k.mT).masked_fill(q > 0, 0.0).softmax(-1) @ v,
    ],
)
def test_what_is_no_attention_is_left(forward):
    class Other(nn.Module):
        def forward(self, q, k, v):
            return forward(q, k, v)

    model = nn.ModuleDict({"other": Other()})
    assert written_attention_of(model) == ()


def test_what_cannot_be_traced_is_left():
    class Branching(nn.Module):
        def forward(self, q, k, v):
            if q.sum() > 0:
                return q
            return (q @ k.mT).softmax(-1) @ v

    assert written_attention_of(nn.ModuleDict({"a": Branching()})) == ()


def linear_step(model, optimizer, batch):
    with torch.autograd.set_detect_anomaly(True):
        optimizer.zero_grad(set_to_none=False)
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
    return loss


def test_habits_of_a_step_are_seen_and_changed():
    setup = setup_of(nn.Linear(3, 3), torch.ones(2, 3), train=True, step=linear_step)
    habits = habits_of(setup)
    assert habits.zeroes_gradients
    assert habits.detects_anomalies
    other = changed(setup, [Change("no_anomaly_mode"), Change("gradients_to_none")])
    runner = Runner(other)
    seen = []
    other.model.register_forward_pre_hook(
        lambda *_: seen.append((torch.is_anomaly_enabled(), other.model.weight.grad))
    )
    runner.step()
    runner.step()
    assert seen == [(False, None), (False, None)]
    assert not torch.is_anomaly_enabled()


def test_the_step_by_default_has_no_such_habits():
    setup = setup_of(
        nn.Linear(3, 3),
        torch.ones(2, 3),
        train=True,
        loss=lambda output, batch: output.sum() + batch.sum(),
    )
    habits = habits_of(setup)
    assert not habits.zeroes_gradients
    assert not habits.detects_anomalies


def test_fp64_in_a_model_becomes_fp32():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            y = x.double() * self.scale + torch.zeros(3, dtype=torch.float64)
            return y + x.to(torch.float64)

    other = changed(setup_of(Wide(), torch.ones(3)), [Change("no_fp64")]).model
    assert other(torch.ones(3)).dtype == torch.float32


def test_subnormal_parameters_are_seen_and_flushed():
    layer = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1e-40)
    setup = setup_of(layer, torch.ones(1, 4))
    assert subnormal_share(setup) == 1.0
    outputs = observe(changed(setup, [Change("flush_subnormals")]), 1).outputs
    assert outputs[0]["output"].abs().max() == 0
    assert bool(torch.tensor(1e-30) * torch.tensor(1e-10))


def test_options_of_the_optimizer():
    setup = setup_of(
        nn.Linear(3, 3),
        torch.ones(2, 3),
        train=True,
        optimizer=lambda model: torch.optim.Adam(model.parameters()),
        loss=lambda output, _: output.sum(),
    )
    runner = Runner(changed(setup, [Change("fused_optimizer")]))
    with torch.profiler.profile() as profile:
        runner.step()
    assert any("_fused_adam_" in event.key for event in profile.key_averages())


def test_a_tuning_is_written_and_read_again(tmp_path):
    model = nn.Sequential(net(), nn.ReLU())
    changes = (
        Change("fold_batch_norm", ("0.conv > 0.norm",)),
        Change("threads", value=1),
    )
    Tuning(changes).write(tmp_path / "tuned.toml", ())
    tuning = read_tuning(tmp_path / "tuned.toml")
    assert tuning.changes == changes
    x = torch.randn(2, 3, 8, 8)
    model.eval()
    torch.testing.assert_close(tuning.apply(model)(x), model(x), **CLOSE)
    tuning.apply_to_process()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no changes in it"),
        ("change = 3", "no changes in it"),
        ("change = [3]", "no table"),
        ('[[change]]\nname = "faster"', "unknown change"),
        ("[[change]]\nname = 3", "malformed"),
        ('[[change]]\nname = "threads"\nvalue = "two"', "malformed"),
        ('[[change]]\nname = "threads"\nmodules = [1]', "malformed"),
        ("[[", "cannot read it"),
    ],
)
def test_a_damaged_tuning_is_refused(text, message, tmp_path):
    path = tmp_path / "tuned.toml"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=message):
        read_tuning(path)


def test_a_tuning_of_another_model_is_refused():
    tuning = Tuning((Change("fused_attention", ("layers.3",)),))
    with pytest.raises(WorkloadError, match="no module 'layers.3'"):
        tuning.apply(nn.Linear(2, 2))
