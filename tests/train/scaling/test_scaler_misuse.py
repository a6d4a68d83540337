"""A scaler used wrongly: the message, and that nothing was changed."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import roundoff as ro
from roundoff.errors import ScalerError

from .conftest import Planted

X = torch.linspace(-1, 1, 8).reshape(2, 4)


def everything(model, scaler):
    gradients = (p.grad.clone() for p in model.parameters() if p.grad is not None)
    return [
        *(p.detach().clone() for p in model.parameters()),
        *gradients,
        torch.tensor(scaler.get_scale()),
        torch.tensor(scaler.steps),
        torch.get_rng_state(),
    ]


@pytest.fixture
def setting():
    model = Planted()
    return (
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        ro.LossScaler(model, init_scale=256.0),
    )


def fails(setting, action, message):
    model, _, scaler = setting
    before = everything(model, scaler)
    with pytest.raises(ScalerError) as error:
        action()
    assert str(error.value) == message
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, everything(model, scaler), strict=True)
    )


def test_step_without_backward(setting):
    model, optimizer, scaler = setting
    model(X).mean().backward()
    fails(
        setting,
        lambda: scaler.step(optimizer),
        "LossScaler.step: nothing was run backward by this scaler\n"
        "  do: scaler.backward(loss) instead of loss.backward()",
    )


def test_two_steps_in_one(setting):
    _, optimizer, scaler = setting
    scaler.backward(setting[0](X).mean())
    scaler.step(optimizer)
    fails(
        setting,
        lambda: scaler.step(optimizer),
        "LossScaler.step: nothing was run backward by this scaler since its last step\n"
        "  do: scaler.backward(loss) instead of loss.backward(); give all optimizers of a step to one call: "
        "scaler.step(first, second)",
    )


def test_backward_twice_through_a_freed_graph(setting):
    model, _, scaler = setting
    loss = model(X).mean()
    scaler.backward(loss)
    fails(
        setting,
        lambda: scaler.backward(loss),
        "LossScaler.backward: this loss was run backward already, and its graph "
        "was freed\n  do: backward once, or retain_graph=True the first time",
    )
    other = model(X).mean()
    scaler.backward(other, retain_graph=True)
    scaler.backward(other)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda m: m(X),
            "LossScaler.backward: the loss is not one floating-point number\n  got: shape [2, 3], float32\n"
            "  do: take its mean or sum",
        ),
        (
            lambda m: m(X).mean().detach(),
            "LossScaler.backward: the loss has no graph to run backward\n"
            "  do: don't detach it or compute it under no_grad",
        ),
    ],
)
def test_what_is_no_loss(setting, loss, message):
    fails(setting, lambda: setting[2].backward(loss(setting[0])), message)


def test_an_optimizer_without_gradients(setting):
    model, optimizer, scaler = setting
    scaler.backward(model(X).mean())
    other = torch.optim.AdamW(nn.Linear(2, 2).parameters())
    fails(
        setting,
        lambda: scaler.step(optimizer, other),
        "optimizer 1, AdamW: no parameter of this optimizer has a gradient\n  do: leave it out of this step, or see why "
        "the loss does not reach its parameters (frozen, detached, or made before the model was moved or replaced)",
    )
    scaler.step(optimizer)  # nothing was lost


def test_no_optimizer_twice_the_same_and_none(setting):
    model, optimizer, scaler = setting
    scaler.backward(model(X).mean())
    fails(
        setting,
        scaler.step,
        "LossScaler.step: no optimizer to step\n  do: scaler.step(optimizer)",
    )
    fails(
        setting,
        lambda: scaler.step(optimizer, optimizer),
        "LossScaler.step: SGD is given twice",
    )
    fails(
        setting,
        lambda: scaler.step(model),
        "argument 0 of LossScaler.step: not an optimizer\n  got: Planted",
    )
    fails(
        setting,
        lambda: scaler.step(torch.optim.LBFGS(model.parameters())),
        "LossScaler.step: LBFGS evaluates the loss by itself, several times a step, so that it cannot be scaled\n"
        "  do: train with it in float32 or bfloat16, without a scaler",
    )
    fails(
        setting,
        lambda: scaler.step(optimizer, clip=0.0),
        "LossScaler.step: clip is the largest norm of the gradients\n  expected: a positive number\n  got: clip=0.0",
    )


def test_weights_in_fp16():
    model = nn.Linear(4, 3).half()
    scaler = ro.LossScaler(model)
    scaler.backward(model(X.half()).float().mean())
    fails(
        (model, None, scaler),
        lambda: scaler.step(torch.optim.SGD(model.parameters(), lr=0.1)),
        "weight: weights in float16 cannot be trained with a loss scale: their updates underflow, and so do unscaled "
        "gradients\n  expected: float32 weights\n  do: keep the model in float32 and run it under autocast; where memory "
        "is short, bfloat16 weights with stochastic rounding or Kahan summation, without a scaler",
    )


def test_bf16_needs_no_scaler():
    model = nn.Linear(4, 3).bfloat16()
    scaler = ro.LossScaler()
    expected = (
        r"\[bf16\]: bfloat16 has the range of float32: its gradients need no loss scale"
    )
    for told in (pytest.warns(RuntimeWarning, match=expected), nullcontext()):  # once
        model.zero_grad()
        scaler.backward(model(X.bfloat16()).float().mean())
        with told:
            scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    model = nn.Linear(4, 3)
    scaler = ro.LossScaler(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(X).float().mean()
    scaler.backward(loss)
    with pytest.warns(RuntimeWarning, match=r"\[bf16\]"):
        scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_loss_in_fp16_and_backward_inside_autocast():
    weight = nn.Parameter(torch.ones(3))
    scaler = ro.LossScaler()
    with pytest.warns(RuntimeWarning, match=r"\[fp16-loss\].*loss\.float\(\)"):
        scaler.backward(weight.half().sum())
    scaler = ro.LossScaler()
    with (
        torch.autocast("cpu", dtype=torch.float16),
        pytest.warns(RuntimeWarning, match=r"\[autocast-backward\]"),
    ):
        scaler.backward((weight * 1).sum())


def test_a_clip_outside_and_another_scaler_are_noticed(setting):
    model, optimizer, scaler = setting
    for number in range(3):
        optimizer.zero_grad()
        scaler.backward(model(X).square().mean())
        if number == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            expected = r"\[changed-gradients\]: first\.weight, first\.bias, second\.weight and 1 more"
            with pytest.warns(RuntimeWarning, match=expected):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
    other = torch.amp.GradScaler("cpu")
    scaler = ro.LossScaler(model)
    for told in (
        nullcontext(),
        pytest.warns(RuntimeWarning, match="another scaler unscales twice"),
    ):
        optimizer.zero_grad()
        scaler.backward(model(X).square().mean())
        other.scale(torch.ones(()))
        other.unscale_(optimizer)
        other.update()
        with told:
            scaler.step(optimizer)


def test_gradients_that_were_not_cleared(setting):
    model, optimizer, scaler = setting
    scaler.backward(model(X).square().mean())
    scaler.step(optimizer)
    scaler.backward(model(X).square().mean())
    fails(
        setting,
        lambda: scaler.step(optimizer),
        "LossScaler.step: first.weight, first.bias, second.weight and 1 more: scaled gradients were added to the unscaled "
        "ones of the step before\n  do: optimizer.zero_grad() after each step",
    )


@pytest.mark.parametrize("to_none", [True, False])
def test_two_networks_in_turns_are_no_misuse(to_none):
    """As a GAN is trained: the loss of one also reaches the other, whose gradients are cleared before its own turn."""
    g, d = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizers = (
        torch.optim.SGD(g.parameters(), lr=0.1),
        torch.optim.SGD(d.parameters(), lr=0.1),
    )
    scaler = ro.LossScaler()
    for _ in range(3):
        optimizers[1].zero_grad(set_to_none=to_none)
        scaler.backward(d(X).mean() - d(g(X).detach()).mean())
        scaler.step(optimizers[1], clip=1.0)
        optimizers[0].zero_grad(set_to_none=to_none)
        scaler.backward(d(g(X)).mean())
        scaler.step(optimizers[0], clip=1.0)
    assert scaler.steps == 6


def test_backward_after_unscale_and_other_optimizers(setting):
    model, optimizer, scaler = setting
    scaler.backward(model(X).mean())
    scaler.unscale(optimizer)
    loss = model(X).mean()
    fails(
        setting,
        lambda: scaler.backward(loss),
        "LossScaler.backward: backward between unscale and step would mix scaled "
        "gradients with unscaled ones\n  do: unscale after the last backward of the step",
    )
    fails(
        setting,
        lambda: scaler.unscale(optimizer),
        "LossScaler.unscale: the gradients of this step are unscaled already",
    )
    fails(
        setting,
        lambda: scaler.step(torch.optim.SGD(model.first.parameters(), lr=0.1)),
        "LossScaler.step: other gradients than those that were unscaled\n  do: give unscale and step the same optimizers",
    )


def test_an_optimizer_that_fails_can_be_stepped_again():
    model = Planted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ro.LossScaler(init_scale=256.0)
    scaler.backward(model(X).square().mean())

    def full(*_):
        raise OSError("no space")

    handle = optimizer.register_step_pre_hook(full)
    with pytest.raises(OSError, match="no space"):
        scaler.step(optimizer)
    handle.remove()
    scaler.step(optimizer)
    twin = Planted()
    twin(X).square().mean().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert all(
        torch.equal(p, q)
        for p, q in zip(model.parameters(), twin.parameters(), strict=True)
    )


def test_a_step_that_failed_can_be_given_up():
    model = Planted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = ro.LossScaler(model, init_scale=256.0)
    for number in range(3):
        optimizer.zero_grad()
        scaler.backward(model(X).square().mean())
        if number == 1:
            optimizer.param_groups[0]["lr"] = "0.1"
            with pytest.raises(TypeError):
                scaler.step(optimizer)
            optimizer.param_groups[0]["lr"] = 0.0
        else:
            scaler.step(optimizer)
    assert scaler.steps == 2
    twin = Planted()
    twin(X).square().mean().backward()
    assert torch.equal(model.first.weight.grad, twin.first.weight.grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"floor": 4.0, "init_scale": 2.0},
            "LossScaler: the initial scale lies outside its bounds\n"
            "  expected: floor (4) <= scale <= ceiling (inf)\n  got: 2",
        ),
        (
            {"bad_loss": "raise"},
            "LossScaler(bad_loss='raise'): unknown bad_loss\n  expected: keep or lower",
        ),
        (
            {"saturation": "mxfp8_e4m3"},
            "LossScaler(saturation='mxfp8_e4m3'): a block format has scales of its own\n"
            "  expected: fp16",
        ),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ScalerError) as error:
        ro.LossScaler(**options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {},
            "LossScaler.load_state_dict: the checkpoint holds no loss scale: was it saved by a disabled scaler?\n"
            "  expected: scale, _growth_tracker, ...\n  got: an empty dict",
        ),
        (
            {"scale": 0.0},
            "LossScaler.load_state_dict: the checkpoint's loss scale is of no use\n  expected: a positive "
            "number\n  got: 0\n  do: start with a new LossScaler, and see why every step was skipped before it",
        ),
        (
            {"scale": 8.0, "rule": "static"},
            "LossScaler.load_state_dict: the checkpoint is of another rule\n"
            "  expected: dynamic\n  got: static\n  do: LossScaler(rule='static')",
        ),
    ],
)
def test_wrong_checkpoints(state, message):
    scaler = ro.LossScaler()
    with pytest.raises(ScalerError) as error:
        scaler.load_state_dict(state)
    assert str(error.value) == message
    assert scaler.get_scale() == 2.0**16


def test_underflow_counts_what_fp16_loses():
    """Against numpy's own rounding to float16."""
    weight = nn.Parameter(torch.ones(4096))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = ro.LossScaler(init_scale=64.0)
    with pytest.raises(ScalerError, match="which gradients"):
        scaler.underflow()
    true = torch.exp2(torch.linspace(-40, 3, 4096)) * torch.where(
        torch.arange(4096) % 2 == 0, 1, -1
    )
    true[:10] = 0.0
    true[10] = (
        2.0**-31
    )  # at the scale half of the smallest, 2**-24: the tie rounds to zero
    scaler.backward((weight * true).sum())
    before = scaler.underflow(optimizer)
    scaler.step(optimizer)
    after = scaler.underflow()
    assert before == after
    rounded = (true.double() * 64).numpy().astype("float16")
    assert (
        after.share
        == ((rounded == 0) & (true != 0).numpy()).sum() / (true != 0).sum().item()
    )
    assert after.zero == 10 / 4096
    assert after.largest == 8.0
    assert (
        after.recommended == 2.0**11
    )  # the largest power of two with 8 * s < 65504 / 2
    weight.grad[3] = math.inf
    assert scaler.underflow().nonfinite == 1
    weight.grad.zero_()
    empty = scaler.underflow()
    assert (empty.share, empty.recommended, empty.zero) == (None, None, 1.0)
