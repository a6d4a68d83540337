"""LossScaler beside torch.amp.GradScaler, bit for bit, and what it does on purpose otherwise."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import roundoff as ro
from roundoff.errors import StuckError

from .conftest import Planted


def bits(*models):
    return [
        p.detach().clone().view(torch.int32) for m in models for p in m.parameters()
    ]


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def micro_batches(seed, count):
    return torch.randn(count, 6, 4, generator=torch.Generator().manual_seed(seed))


step_plans = st.lists(
    st.tuples(
        st.sampled_from([1.0, 1.0, math.inf, math.nan, -math.inf]), st.integers(1, 3)
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=25, deadline=None)
@given(
    plan=step_plans,
    clip=st.sampled_from([None, 0.1, 1e6]),
    interval=st.integers(1, 4),
    make=st.sampled_from(
        [
            lambda p: torch.optim.SGD(p, 0.1, 0.9),
            lambda p: torch.optim.AdamW(p, 0.01),
            lambda p: torch.optim.AdamW(p, 0.01, fused=True),
        ]
    ),
)
def test_scales_and_weights_are_those_of_torch(plan, clip, interval, make):
    """One optimizer, gradients accumulated over some micro-batches, NaN and Inf planted in the gradients."""
    theirs, ours = Planted(), Planted()
    optimizers = make(theirs.parameters()), make(ours.parameters())
    reference = torch.amp.GradScaler("cpu", growth_interval=interval)
    scaler = ro.LossScaler(growth_interval=interval, floor=0.0, patience=None)
    for number, (plant, count) in enumerate(plan):
        theirs.plant = ours.plant = plant
        for optimizer in optimizers:
            optimizer.zero_grad()
        for x in micro_batches(number, count):
            reference.scale(theirs(x).square().mean()).backward()
            scaler.backward(ours(x).square().mean())
        reference.unscale_(optimizers[0])
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        reference.step(optimizers[0])
        reference.update()
        scaler.step(optimizers[1], clip=clip)
        assert bool(scaler.skipped) == (not math.isfinite(plant))
        assert scaler.get_scale() == reference.get_scale()
        assert same(bits(theirs), bits(ours))
    assert (
        scaler.state_dict()["_growth_tracker"]
        == reference.state_dict()["_growth_tracker"]
    )


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("reads", ["nothing", "gradients", "norm"])
def test_scales_that_are_no_powers_of_two(optimizer, fused, reads):
    """Kernels of fused optimizers divide; torch multiplies with the reciprocal elsewhere.

    So the last bit depends on whether the program unscales before the step, as it does
    where it reads gradients or clips them.
    """
    theirs, ours = Planted(), Planted()
    constants = {"init_scale": 777.7, "growth_factor": 1.7, "growth_interval": 2}
    reference = torch.amp.GradScaler("cpu", **constants)
    scaler = ro.LossScaler(**constants)
    one, other = (optimizer(m.parameters(), 0.01, fused=fused) for m in (theirs, ours))
    for number in range(6):
        one.zero_grad()
        other.zero_grad()
        (x,) = micro_batches(number, 1)
        reference.scale(theirs(x).square().mean()).backward()
        scaler.backward(ours(x).square().mean())
        clip = 0.1 if reads == "norm" else None
        if reads != "nothing":
            reference.unscale_(one)
        if reads == "gradients":
            scaler.unscale(other)
        if clip is not None:
            nn.utils.clip_grad_norm_(theirs.parameters(), clip)
        reference.step(one)
        reference.update()
        scaler.step(other, clip=clip)
        assert scaler.get_scale() == reference.get_scale()
        assert same(bits(theirs), bits(ours))


@settings(max_examples=20, deadline=None)
@given(
    pattern=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=15)
)
def test_several_optimizers_step_all_or_none(pattern):
    """torch steps the one whose gradients are finite; the scale moves alike."""
    models = Planted(0), Planted(1)
    theirs = Planted(0), Planted(1)
    ours = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    reference = [torch.optim.SGD(m.parameters(), lr=0.1) for m in theirs]
    scaler, torchs = (
        ro.LossScaler(growth_interval=2),
        torch.amp.GradScaler("cpu", growth_interval=2),
    )
    x = micro_batches(3, 1)[0]
    for bad in pattern:
        before, apart = bits(*models), False
        for model, twin, b in zip(models, theirs, bad, strict=True):
            model.zero_grad()
            twin.zero_grad()
            model.plant = twin.plant = math.inf if b else 1.0
            scaler.backward(model(x).square().mean())
            torchs.scale(twin(x).square().mean()).backward()
        twins = [bits(t) for t in theirs]
        scaler.step(*ours)
        for optimizer in reference:
            torchs.step(optimizer)
        torchs.update()
        assert scaler.get_scale() == torchs.get_scale()
        for twin, old, b in zip(theirs, twins, bad, strict=True):
            apart |= same(bits(twin), old) != b
        assert not apart  # torch: each for itself
        assert [
            same(bits(m), old)
            for m, old in zip(models, (before[:4], before[4:]), strict=True)
        ] == [any(bad)] * 2


def test_the_clip_is_that_of_all_unscaled_gradients_together():
    models = Planted(0), Planted(1)
    scaler = ro.LossScaler(init_scale=2.0**20)
    x = micro_batches(0, 1)[0]
    expected = copy.deepcopy(models)
    for model in models:
        scaler.backward(model(x).square().sum())
    for model in expected:
        model(x).square().sum().backward()
    nn.utils.clip_grad_norm_([p for m in expected for p in m.parameters()], 0.5)
    scaler.step(*(torch.optim.SGD(m.parameters(), lr=1.0) for m in models), clip=0.5)
    for model, twin in zip(models, expected, strict=True):
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            # 2**20 is a power of two and the gradients are far from float32's ends: unscaled they are the same bits
            assert torch.equal(p.grad, q.grad)


def test_a_parameter_of_two_optimizers_is_unscaled_once():
    weight = nn.Parameter(torch.tensor([3.0]))
    scaler = ro.LossScaler(init_scale=1024.0)
    scaler.backward((weight * 2).sum())
    scaler.step(torch.optim.SGD([weight], lr=0.5), torch.optim.SGD([weight], lr=0.25))
    assert weight.grad.item() == 2.0
    assert weight.item() == 3.0 - 2 * 0.5 - 2 * 0.25


@pytest.mark.parametrize("saturates", [False, True])
def test_saturated_gradients_count_as_overflow_when_asked(saturates):
    """A device that saturates gives 65504 where another gives Inf."""
    weight = nn.Parameter(torch.tensor([1.0, 1.0]))
    scaler = ro.LossScaler(init_scale=2.0, saturation="fp16" if saturates else None)
    for largest, expected in [
        (65504.0, saturates),
        (-65504.0, saturates),
        (65472.0, False),
    ]:  # 65472 precedes 65504
        weight.grad = None
        scaler._state = None
        scaler.backward((weight * torch.tensor([largest / 2, 1.0])).sum())
        scaler.step(torch.optim.SGD([weight], lr=0.0))
        assert bool(scaler.skipped) == expected
        assert scaler.get_scale() == (1.0 if expected else 2.0)
    if saturates:
        assert "1 of 1 gradients are not finite or saturated" in str(scaler.last_skip)


def test_skipped_is_for_schedulers():
    model = Planted()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = ro.LossScaler()
    assert not scaler.skipped
    rates = []
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for plant in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        model.plant = plant
        scaler.backward(model(micro_batches(0, 1)[0]).mean())
        scaler.step(optimizer)
        if not scaler.skipped:
            schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.5, 0.5, 0.25]
    assert scaler.skipped.dtype is torch.bool


def test_disabled_it_passes_everything_through():
    model, twin = Planted(), Planted()
    x = micro_batches(0, 1)[0]
    scaler = ro.LossScaler(model, enabled=False)
    scaler.backward(model(x).square().sum())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.unscale(optimizer)
    scaler.step(optimizer, clip=0.5)
    twin(x).square().sum().backward()
    nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert same(bits(model), bits(twin))
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}
    assert not scaler.skipped
    scaler.load_state_dict({})


def train(scaler, model, optimizer, steps, *, torchs=False):
    for number, plant in steps:
        optimizer.zero_grad()
        model.plant = plant
        loss = model(micro_batches(number, 1)[0]).square().mean()
        if torchs:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            scaler.backward(loss)
            scaler.step(optimizer)


PLAN = list(enumerate([1.0, math.inf, 1.0, 1.0, 1.0, math.nan, 1.0, 1.0, 1.0, 1.0]))


@pytest.mark.parametrize("first", ["ours", "torch"])
def test_a_checkpoint_moves_between_torch_and_here(first):
    whole, model = Planted(), Planted()
    straight = ro.LossScaler(growth_interval=3)
    train(straight, whole, torch.optim.SGD(whole.parameters(), lr=0.1), PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scalers: list[ro.LossScaler | torch.amp.GradScaler] = [
        ro.LossScaler(growth_interval=3),
        torch.amp.GradScaler("cpu", growth_interval=9),
    ]
    if first == "torch":
        scalers = [
            torch.amp.GradScaler("cpu", growth_interval=3),
            ro.LossScaler(growth_interval=9),
        ]
    train(scalers[0], model, optimizer, PLAN[:4], torchs=first == "torch")
    scalers[1].load_state_dict(scalers[0].state_dict())
    train(scalers[1], model, optimizer, PLAN[4:], torchs=first != "torch")
    assert scalers[1].get_scale() == straight.get_scale()
    assert same(bits(whole), bits(model))
    assert scalers[1].state_dict()["growth_interval"] == 3


@pytest.mark.parametrize(
    "rule",
    [
        {"rule": "static", "init_scale": 8.0},
        {"growth_interval": 2},
        {
            "rule": "exponential",
            "init_loss_scale": 64.0,
            "incr_every_n_steps": 3,
            "decr_every_n_nan_or_inf": 2,
        },
    ],
)
def test_a_checkpoint_in_the_middle_changes_nothing(rule, tmp_path):
    whole, model = Planted(), Planted()
    straight = ro.LossScaler(**rule)
    train(straight, whole, torch.optim.SGD(whole.parameters(), lr=0.1), PLAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ro.LossScaler(**rule)
    for number, plan in enumerate(PLAN):
        torch.save(scaler.state_dict(), tmp_path / f"{number}.pt")
        scaler = ro.LossScaler(**rule)
        scaler.load_state_dict(torch.load(tmp_path / f"{number}.pt", weights_only=True))
        train(scaler, model, optimizer, [plan])
    assert scaler.state_dict() == straight.state_dict()
    assert same(bits(whole), bits(model))


def test_twenty_skips_at_the_floor_stop_with_a_diagnosis():
    model = Planted()
    before = bits(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = ro.LossScaler(model, init_scale=4.0)
    model.plant = math.inf
    x = micro_batches(0, 1)[0]
    for _ in range(2 + 19):  # two to come down to 1, then 19 at the floor
        optimizer.zero_grad()
        scaler.backward(model(x).square().mean())
        scaler.step(optimizer)
    optimizer.zero_grad()
    scaler.backward(model(x).square().mean())
    with pytest.raises(StuckError) as error:
        scaler.step(optimizer)
    message = str(error.value)
    assert message.startswith(
        "loss scale 1: 20 steps in a row were skipped and the scale cannot go lower"
    )
    assert "second.bias" in message
    assert scaler.get_scale() == 1.0
    assert same(bits(model), before)
    assert not optimizer.state
    model.plant = 1.0  # and it can be gone on with
    optimizer.zero_grad()
    scaler.backward(model(x).square().mean())
    scaler.step(optimizer)
    assert not scaler.skipped


def test_a_good_step_in_between_keeps_it_going():
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = ro.LossScaler(rule="static", init_scale=2.0, patience=3)
    for plant in [math.inf, math.inf, 1.0, math.inf, math.inf, 1.0]:
        optimizer.zero_grad()
        scaler.backward(
            weight.sum() if plant == 1.0 else (weight - 1).sqrt().sum()
        )  # the derivative of sqrt at 0
        scaler.step(optimizer)
    assert scaler.steps == 6


def test_nan_in_the_data_skips_and_does_not_lower_the_scale():
    model = Planted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ro.LossScaler(model)
    before = bits(model)
    x = micro_batches(0, 1)[0].clone()
    x[2, 1] = math.nan
    expected = r"\[nan-loss\]: the loss itself was NaN or Inf before it was scaled"
    for told in (
        pytest.warns(RuntimeWarning, match=expected),
        nullcontext(),
        nullcontext(),
    ):  # once
        optimizer.zero_grad()
        scaler.backward(model(x).square().mean())
        with told:
            scaler.step(optimizer)
        assert scaler.skipped
    assert scaler.get_scale() == 2.0**16
    assert same(bits(model), before)
    skip = scaler.last_skip
    assert (skip.loss_finite, skip.phase, skip.born) == (False, "data", False)
    assert "it came in with the data, or with what the script makes" in str(skip)
    assert "0/0, log(0)" in skip.advice


def test_a_bad_loss_lowers_the_scale_as_torch_when_asked():
    model = Planted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ro.LossScaler(bad_loss="lower")
    scaler.backward(model(torch.full((2, 4), math.nan)).mean())
    with pytest.warns(RuntimeWarning, match="a lower scale will not help"):
        scaler.step(optimizer)
    assert scaler.get_scale() == 2.0**15


def test_nan_losses_without_end_stop():
    model = Planted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = ro.LossScaler(patience=2)
    for expected in (
        pytest.warns(RuntimeWarning, match="nan-loss"),
        pytest.raises(StuckError, match="the loss itself is NaN or Inf"),
    ):
        optimizer.zero_grad()
        scaler.backward(model(torch.full((2, 4), math.nan)).mean())
        with expected:
            scaler.step(optimizer)
    assert scaler.steps == 2


def test_sparse_gradients():
    tables = [nn.Embedding(5, 2, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    rows = torch.tensor([1, 3, 1])
    scaler, reference = ro.LossScaler(), torch.amp.GradScaler("cpu")
    scaler.backward(tables[0](rows).square().sum())
    reference.scale(tables[1](rows).square().sum()).backward()
    scaler.step(torch.optim.SGD(tables[0].parameters(), lr=0.1))
    reference.step(torch.optim.SGD(tables[1].parameters(), lr=0.1))
    assert same(bits(tables[0]), bits(tables[1]))


def test_unscale_lets_one_look_and_step_does_not_do_it_again():
    model = Planted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = ro.LossScaler(init_scale=512.0)
    x = micro_batches(0, 1)[0]
    scaler.backward(model(x).square().sum())
    scaler.unscale(optimizer)
    seen = model.first.weight.grad.clone()
    model.first.weight.grad.mul_(2)  # no warning: it is allowed now
    scaler.step(optimizer)
    twin = Planted()
    twin(x).square().sum().backward()
    assert torch.equal(seen, twin.first.weight.grad)
    assert torch.equal(model.first.weight.grad, seen * 2)


@pytest.mark.parametrize(
    "make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD]
)
def test_an_optimizer_that_takes_found_inf_skips_by_itself(make):
    """The way of a GPU, without asking the device: torch's fused optimizers leave weights and state alone."""
    from roundoff.train.scaling.scaler import _step
    from roundoff.train.scaling.step_gradients import takes_found_inf

    model, twin = Planted(), Planted()
    optimizer, plain = (
        make(model.parameters(), lr=0.1, fused=True),
        make(twin.parameters(), lr=0.1),
    )
    assert takes_found_inf(optimizer)
    assert not takes_found_inf(plain)
    x = micro_batches(0, 1)[0]
    for found in (0.0, 1.0, 0.0):
        before = bits(model)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        _step(optimizer, torch.tensor(found))
        assert same(bits(model), before) == bool(found)
        if not found:
            plain.zero_grad()
            twin(x).square().mean().backward()
            plain.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        # fused and plain kernels round in another order: Adam's quotient is of size 1, times lr 0.1 and two steps
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)
    assert not hasattr(optimizer, "found_inf")


def test_fused_sgd_with_momentum_is_not_trusted_with_found_inf():
    from roundoff.train.scaling.step_gradients import takes_found_inf

    model = Planted()
    assert takes_found_inf(torch.optim.SGD(model.parameters(), lr=0.1, fused=True))
    assert not takes_found_inf(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_nothing_waits_and_torch_is_matched():
    model, twin = Planted().cuda(), Planted().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    reference = torch.optim.AdamW(twin.parameters(), lr=0.1, fused=True)
    scaler, torchs = (
        ro.LossScaler(growth_interval=2),
        torch.amp.GradScaler("cuda", growth_interval=2),
    )
    x = micro_batches(0, 1)[0].cuda()
    for plant in (1.0, math.inf, 1.0, 1.0, math.nan, 1.0):
        for net, opt in ((model, optimizer), (twin, reference)):
            net.plant = plant
            opt.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            scaler.backward(model(x).square().mean())
            scaler.step(optimizer, clip=1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torchs.scale(twin(x).square().mean()).backward()
        torchs.unscale_(reference)
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        torchs.step(reference)
        torchs.update()
        assert scaler.get_scale() == torchs.get_scale()
        assert same(bits(model), bits(twin))
