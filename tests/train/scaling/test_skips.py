"""A skip names the operator that was made to overflow, and the step leaves nothing behind."""

from __future__ import annotations

import copy
import gc
import io
import logging
import math
import random
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import roundoff as ro
from roundoff.plan.rules import Rule
from roundoff.train.scaling.backward_graph import backward_order
from roundoff.train.scaling.rerun_step import StepCalls

from .planted import CASES, MODELS, H, Plant, build

SMALL = [case for case in CASES if case.model in ("mlp", "cnn", "lstm", "transformer")]
SCALE = 2.0**14


def one_step(model, loss, **options):
    scaler = ro.LossScaler(model, init_scale=SCALE, **options)
    scaler.backward(loss())
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    return scaler


@pytest.mark.filterwarnings("ignore:roundoff loss scaler .nan-loss")
@pytest.mark.parametrize("case", SMALL, ids=lambda c: f"{c.model}, {c.plant}")
def test_the_planted_operator_is_named(case):
    skip = one_step(*build(case)).last_skip
    assert case.names(skip.origin, skip.phase), str(skip)
    assert skip.born is (skip.made_by == skip.origin)
    assert "planted.py" in skip.line
    assert skip.cause
    assert skip.notes == ()


@pytest.mark.parametrize("model", ["mlp", "cnn", "lstm", "transformer"])
def test_without_a_plant_nothing_is_skipped(model):
    scaler = one_step(*build(model))
    assert not scaler.skipped
    assert scaler.last_skip is None


@pytest.mark.parametrize("model", ["mlp", "cnn", "transformer"])
def test_the_first_gradient_is_the_first_that_autograd_finishes(model):
    """Against hooks, which the engine runs in its order."""
    net, loss = build(model)
    value, order = loss(), []
    for parameter in net.parameters():
        parameter.register_hook(lambda g, p=parameter: order.append(id(p)))
    value.backward()
    walked = [id(variable) for variable, _ in backward_order(value.grad_fn)]
    assert walked == order


def state_of(model, optimizer=None):
    """Everything that a repeat could change."""
    return [
        *(p.detach().clone() for p in model.parameters()),
        *(b.clone() for b in model.buffers()),
        torch.get_rng_state(),
        torch.tensor([m.training for m in model.modules()]),
        torch.tensor(np.random.get_state()[1].astype(np.int64)),
        torch.tensor(random.getstate()[1]),
        torch.tensor(torch.is_autocast_enabled("cpu")),
        torch.tensor(
            [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        ),
        torch.tensor([len(p._backward_hooks or ()) for p in model.parameters()]),
    ]


class Everything(nn.Module):
    """Dropout, BatchNorm, a buffer that the forward reads and writes, numpy's and Python's random numbers, a plant."""

    calls: torch.Tensor

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.drop = (
            nn.Linear(4, 6),
            nn.BatchNorm1d(6),
            nn.Dropout(0.5),
        )
        self.plant, self.last = Plant("square"), nn.Linear(6, 2)
        self.register_buffer("calls", torch.zeros(()))
        self.seen = []
        self.fail = False

    def forward(self, x):
        if (
            self.fail
            and torch.utils._python_dispatch._get_current_dispatch_mode() is not None
        ):
            raise OSError("only once")
        h = self.drop(self.norm(self.first(x))) * float(
            1 + np.random.rand() + random.random()
        )
        h = h * (1.0 + self.calls)
        self.calls += 1
        self.seen.append(h.detach().clone())
        return self.last(self.plant(h))


def everything(seed=0):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    return Everything(), torch.randn(8, 4)


@pytest.mark.filterwarnings("ignore:roundoff loss scaler .nan-loss")
@pytest.mark.parametrize("fail", [False, True])
def test_the_step_runs_again_as_it_was_and_everything_is_restored(fail):
    model, x = everything()
    scaler = ro.LossScaler(model, init_scale=SCALE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):  # from the second call on the buffer that it reads is known
        optimizer.zero_grad()
        model.seen.clear()
        model.fail = False
        with torch.autocast("cpu", dtype=H):
            loss = model(x).float().mean()
        model.fail = fail
        scaler.backward(loss)
        gradients = [p.grad for p in model.parameters()]
        before = state_of(model)
        scaler.step(optimizer)
        assert all(
            torch.equal(a, b) for a, b in zip(before, state_of(model), strict=True)
        )
        assert all(
            p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)
        )
        if fail:
            assert scaler.last_skip.notes == (
                "the step could not be run again: OSError: only once",
            )
            assert scaler.last_skip.gradient == "last.weight"
    if not fail:
        assert scaler.last_skip.origin == "plant/pow"
        assert len(model.seen) == 2
        assert torch.equal(
            *model.seen
        )  # the same dropout, statistics, random numbers and buffer


@pytest.mark.filterwarnings("ignore:roundoff loss scaler .nan-loss")
def test_of_several_micro_batches_the_one_at_fault_is_named():
    model, _ = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ro.LossScaler(model, init_scale=SCALE)
    batches = torch.randn(4, 6, 8)
    batches[1] *= 1e6  # 0/linear in float16
    for x in batches:
        with torch.autocast("cpu", dtype=H):
            loss = model(x).float().square().mean()
        scaler.backward(loss)
    scaler.step(optimizer)
    skip = scaler.last_skip
    assert skip.origin.partition("#")[0] == "0/_to_copy"  # x to float16
    assert skip.notes == ("in call 2 of 4 of the model",)
    assert scaler._calls.calls == []


class WithLoss(nn.Module):
    """As those of transformers: gives its loss and what it was made of."""

    def __init__(self, plant="nothing"):
        super().__init__()
        self.body, self.plant, self.head = (
            nn.Linear(4, 5),
            Plant(plant),
            nn.Linear(5, 3),
        )

    def forward(self, x):
        logits = self.head(self.plant(self.body(x)))
        return {"loss": logits.float().square().mean(), "logits": logits}


@pytest.mark.filterwarnings("ignore:roundoff loss scaler .nan-loss")
@pytest.mark.parametrize("auxiliary", [False, True])
def test_a_model_that_gives_its_loss(auxiliary):
    torch.manual_seed(0)
    model = WithLoss("sqrt at 0")

    def loss():
        with torch.autocast("cpu", dtype=H):
            out = model(torch.randn(6, 4))
            return out["loss"] + (out["logits"].float().mean() if auxiliary else 0.0)

    skip = one_step(model, loss).last_skip
    assert (skip.origin, skip.phase, skip.gradient) == (
        "plant/div",
        "backward",
        "body.weight",
    )


@pytest.mark.parametrize("outside", [False, True])
def test_the_gradient_of_one_output_does_not_count_what_came_through_another(outside):
    """On finite numbers: the repeat's gradients are those of the step, whose sum over both outputs would be another."""
    from roundoff.train.scaling import origin

    torch.manual_seed(0)
    model, x = WithLoss(), torch.randn(6, 4)
    steps = StepCalls(model)
    out = model(x)
    (out["loss"] + (out["logits"].mean() if outside else 0.0)).backward()
    expected = [p.grad for p in model.parameters()]
    (call,) = steps.calls
    gradients = origin._gradients_from_outside(model, call)
    made, _ = origin._forward(model, call)
    found = torch.autograd.grad(
        [made[p] for p in gradients], list(model.parameters()), list(gradients.values())
    )
    for one, other in zip(found, expected, strict=True):
        # the gradient of the logits is a difference of two float32 numbers: a few roundings of 2**-24 relative to its parts
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_what_is_born_in_the_loss_is_named_there():
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    x = torch.zeros(2, 4)
    nn.init.zeros_(model.bias)
    skip = one_step(
        model, lambda: model(x).square().sum().sqrt() + 1.0
    ).last_skip  # the derivative of sqrt at 0
    assert (skip.phase, skip.origin, skip.loss_finite, skip.born) == (
        "loss",
        "sqrt",
        True,
        False,
    )
    assert skip.notes == (
        "the loss, from its end: AddBackward0 <- SqrtBackward0 <- SumBackward0 <- PowBackward0",
    )
    assert (
        "the gradient that SqrtBackward0 gives back is the first that is not finite"
        in skip.cause
    )


def test_the_gradient_of_the_loss_has_no_room_in_fp16():
    model = nn.Linear(4, 4)

    def loss():
        with torch.autocast("cpu", dtype=H):
            return model(torch.ones(2, 4)).float().sum() * 8  # 8 * 2**14 > 65504

    skip = one_step(model, loss).last_skip
    assert (skip.phase, skip.origin) == ("loss", "_to_copy")
    assert "times the scale it has no room in the format it is cast to" in skip.cause


@pytest.mark.filterwarnings("ignore:roundoff loss scaler .nan-loss")
def test_nan_in_the_weights():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    skip = one_step(model, lambda: model(torch.ones(2, 4)).sum()).last_skip
    assert (skip.phase, skip.born) == ("weights", False)
    assert "it came in with the weights" in str(skip)


def test_without_a_model_the_graph_still_names_parameter_and_node():
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    scaler = ro.LossScaler()
    y = model(torch.ones(2, 4))
    y.register_hook(lambda g: g * math.inf)
    scaler.backward(y.sum())
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    skip = scaler.last_skip
    assert skip.gradient == "parameter 3 of optimizer 0, SGD"
    assert (skip.made_by, skip.operator, skip.born) == ("AddmmBackward0", "addmm", None)
    assert skip.notes == ("LossScaler(model) would name the operator that made it",)
    assert skip.to_dict()["notes"] == [
        "LossScaler(model) would name the operator that made it"
    ]


@pytest.mark.filterwarnings("ignore:roundoff loss scaler .nan-loss")
def test_the_log_has_one_line_for_each_skip(caplog):
    model, loss = build(SMALL[0])
    with caplog.at_level(logging.INFO, "roundoff"):
        scaler = one_step(model, loss)
    assert [record.getMessage() for record in caplog.records] == [str(scaler.last_skip)]
    start = "step 0 skipped at loss scale 16384: 4 of 4 gradients are not finite; the first in backward order is that of "
    assert str(scaler.last_skip).startswith(start + "3.weight, made by 3/mm")


def test_a_hook_outside_the_model_cannot_be_repeated_and_that_is_said():
    model = nn.Linear(4, 3)
    scaler = ro.LossScaler(model)
    scaler.backward(model(torch.ones(2, 4)).sum())
    model.weight.grad[0, 0] = math.inf
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    skip = scaler.last_skip
    assert skip.gradient == "weight"
    assert skip.notes[0].startswith("run once more, the step had only finite gradients")


def test_inputs_changed_in_place_are_noticed():
    model = nn.Linear(4, 3)
    x = torch.ones(2, 4)
    scaler = ro.LossScaler(model)
    y = model(x)
    y.register_hook(lambda g: g * math.inf)
    scaler.backward(y.sum())
    x.mul_(2.0)
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert (
        "inputs were changed in place since the forward pass" in scaler.last_skip.notes
    )


@pytest.mark.filterwarnings("ignore:roundoff loss scaler .nan-loss")
def test_running_statistics_that_the_skipped_step_has_spoilt_are_named():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Plant("exp"), nn.BatchNorm1d(4))
    scaler = ro.LossScaler(model)
    scaler.backward(model(torch.randn(3, 4)).mean())
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    expected = "the forward pass has left NaN or Inf in 2.running_mean, 2.running_var, which skipping does not undo"
    assert scaler.last_skip.notes == (expected,)


def test_a_forward_without_backward_keeps_nothing():
    model = nn.Linear(4, 3)
    steps = StepCalls(model)
    x = torch.ones(2, 4)
    gone = weakref.ref(x)
    y = model(x)
    assert steps.calls == []
    del x, y
    gc.collect()
    assert gone() is None
    with torch.no_grad():
        model(torch.ones(2, 4))
    assert not steps.calls
    assert not steps._open


def test_a_forward_that_fails_leaves_nothing_open():
    model = nn.Linear(4, 3)
    steps = StepCalls(model)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 5))
    assert steps._open == []


def test_a_scaler_that_is_gone_leaves_no_hooks():
    model = nn.Linear(4, 3)
    scaler = ro.LossScaler(model)
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    del scaler
    gc.collect()
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_copies_and_pickles_of_the_model_are_not_watched():
    model = nn.Linear(4, 3)
    scaler = ro.LossScaler(model)
    twin = copy.deepcopy(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (twin, torch.load(file, weights_only=False)):
        other(torch.ones(2, 4)).sum().backward()
    assert scaler._calls.calls == []


@pytest.mark.filterwarnings("ignore:roundoff loss scaler .nan-loss")
def test_a_compiled_model_runs_uncompiled_for_its_report():
    model, _ = build(SMALL[0])
    compiled = torch.compile(model, backend="eager")
    scaler = ro.LossScaler(compiled, init_scale=SCALE)
    with torch.autocast("cpu", dtype=H):
        loss = compiled(torch.randn(6, 8)).float().square().mean()
    scaler.backward(loss)
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert scaler.last_skip.origin == "2/exp"
    scaler = ro.LossScaler(model, init_scale=SCALE)  # not what is called
    with torch.autocast("cpu", dtype=H):
        loss = (
            torch.compile(model, backend="eager", fullgraph=True)(torch.randn(6, 8))
            .float()
            .square()
            .mean()
        )
    scaler.backward(loss)
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert scaler.last_skip.gradient == "3.weight"


def test_every_model_is_used():
    assert {case.model for case in CASES} == set(MODELS)
    assert len(CASES) == 20


@pytest.mark.filterwarnings(
    "ignore:roundoff loss scaler .nan-loss", "ignore:fp16 on this CPU"
)
def test_a_region_of_roundoffs_autocast_is_entered_again():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plan = ro.Plan((Rule("fp32", ("0/linear",)),), autocast="fp16")
    scaler = ro.LossScaler(model, init_scale=2.0**8)
    with ro.autocast(plan, model, device="cpu"):
        loss = (
            model(torch.full((2, 4), 1e5)).float().mean()
        )  # beyond float16, which only the second layer runs in
    scaler.backward(loss)
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    assert scaler.last_skip.origin.startswith("1/")
