"""Updates of low-precision weights: what each method computes, what it leaves alone, and when it warns."""

from __future__ import annotations

import copy
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from roundoff.errors import OptimizerError
from roundoff.train.low_precision import round_updates_, watch_updates

BF16 = torch.bfloat16
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=2**-6, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=2**-8),
    "foreach": lambda p: torch.optim.AdamW(p, lr=2**-8, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=2**-8, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=2**-6),
}


def parameters(dtype=BF16, n=40):
    torch.manual_seed(0)
    return [
        nn.Parameter(torch.randn(n, 3).to(dtype)),
        nn.Parameter(torch.randn(n).to(dtype)),
    ]


def gradients(step, of):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in of]


def run(optimizer, weights, steps, start=0):
    for step in range(start, start + steps):
        for p, g in zip(weights, gradients(step, weights), strict=True):
            p.grad = g
        optimizer.step()
    return [p.detach().clone() for p in weights]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


# -- what is computed ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_nearest_is_a_step_in_fp32_rounded(name, dtype):
    weights = parameters(dtype)
    optimizer = OPTIMIZERS[name](weights)
    handle = round_updates_(optimizer, "nearest")
    wide = [nn.Parameter(p.detach().float()) for p in weights]
    reference = OPTIMIZERS[name](wide)
    for step in range(5):
        run(optimizer, weights, 1, step)
        for w, g in zip(wide, gradients(step, weights), strict=True):
            w.grad = g.float()
        reference.step()
        with torch.no_grad():
            for w in wide:
                w.copy_(w.to(dtype))  # its state stays in fp32
        assert equal(weights, [w.to(dtype) for w in wide])
    assert all(p.dtype == dtype for p in weights)
    assert handle.unchanged.dtype == torch.float32


def kahan(weights, updates):
    """Zamirai et al., algorithm 1, in ml_dtypes: every operation rounds, but for the sum, whose operands fp32 holds."""
    half = ml_dtypes.bfloat16
    w, c = weights.astype(half), np.zeros_like(weights).astype(half)
    for u in updates:
        y = np.float32(u) - c.astype(np.float32)
        s = (w.astype(np.float32) + y).astype(half)
        c = ((s.astype(np.float32) - w.astype(np.float32)) - y).astype(half)
        w = s
    return w.astype(np.float32), c.astype(np.float32)


def test_kahan_is_the_published_algorithm():
    """Updates are whole multiples of 2**-16 and weights lie in [1, 2): all fp32 sums are exact, in either order."""
    rng = np.random.default_rng(0)
    start = np.float32(1 + rng.integers(0, 100, 200) * 2**-7)
    updates = rng.integers(-40, 41, (50, 200)).astype(np.float32) * np.float32(2**-16)
    updates = updates.astype(ml_dtypes.bfloat16).astype(np.float32)
    weight = nn.Parameter(torch.from_numpy(start).to(BF16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    round_updates_(optimizer, "kahan")
    for u in updates:
        weight.grad = torch.from_numpy(-u).to(BF16)
        optimizer.step()
    w, c = kahan(start, updates)
    np.testing.assert_array_equal(weight.detach().float().numpy(), w)
    np.testing.assert_array_equal(
        optimizer.state[weight]["compensation"].float().numpy(), c
    )


def test_stochastic_rounding_keeps_the_mean():
    """64 updates of 2**-12 to n weights of 1, whose neighbour is 2**-8 below: the mean moves by 2**-6. A move is one of
    2**-8 with probability 2**-4, so a weight's variance is at most 64 * 2**-4 * 2**-16; 4 sigma of the mean of n."""
    n = 20_000
    weight = nn.Parameter(torch.ones(n, dtype=BF16))
    optimizer = torch.optim.SGD([weight], lr=2.0**-12)
    handle = round_updates_(optimizer, "stochastic")
    for _ in range(64):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    sigma = math.sqrt(64 * 2**-4 * 2**-16 / n)
    assert abs(weight.detach().double().mean().item() - (1 - 2**-6)) <= 4 * sigma
    assert abs(handle.unchanged.item() - (1 - 2**-4)) <= 4 * math.sqrt(2**-4 / n)


@pytest.mark.parametrize("method", ["stochastic", "kahan", "nearest"])
def test_specials_pass(method):
    weight = nn.Parameter(torch.tensor([1.0, 3e38, -1.0, 0.0]).to(BF16))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    round_updates_(optimizer, method)
    weight.grad = torch.tensor([math.nan, -3e38, -math.inf, 0.0]).to(BF16)
    optimizer.step()
    assert weight[0].isnan()
    assert weight[1:].tolist() == [math.inf, math.inf, 0.0]
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert weight[1:].tolist() == [
        math.inf,
        math.inf,
        -1.0,
    ]  # and Kahan's rest did not make it NaN


def regression(method, seed):
    """Full-batch gradient descent on 64 weights, fp32 but for the weights; the excess of the loss over that of fp32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(256, 64, generator=generator)
    true = torch.randn(64, generator=generator)
    y = x @ true
    start = (true + 0.05 * torch.randn(64, generator=generator)).to(BF16)
    weight = nn.Parameter(start.clone() if method != "fp32" else start.float())
    optimizer = torch.optim.SGD([weight], lr=0.02)
    if method in ("stochastic", "kahan"):
        round_updates_(optimizer, method, seed=seed)
    for _ in range(600):
        optimizer.zero_grad()
        (x @ weight.float() - y).square().mean().div(2).backward()
        optimizer.step()
    return (x @ weight.detach().float() - y).square().mean().item(), true


@pytest.mark.parametrize("method", ["stochastic", "kahan"])
def test_training_reaches_what_fp32_reaches_where_plain_bf16_stalls(method):
    """A weight that is right but for rounding is off by at most one spacing (stochastic) of 2**-7 |w|. Independent errors of
    that size cost the loss 2**-14 |w|**2 on average (the columns of x have variance 1), about 0.004, and spacings are half
    of that at the upper end of each binade: so less than the bound. Plain bf16 stops where 0.02 times the gradient, which
    is the error there, falls below half the spacing: at errors of up to 0.2 |w|; it ends above 4 times the bound."""
    for seed in range(3):
        reached, true = regression(method, seed)
        bound = 2.0**-14 * true.square().sum().item()
        assert regression("fp32", seed)[0] < bound / 10
        assert reached < bound
        assert regression("plain", seed)[0] > 4 * bound


# -- what is measured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e-3, 1e-4, 1e-5])
def test_share_of_weights_that_adamw_never_moves(rate):
    """Steps of AdamW are at most the rate (the first is). A bf16 weight in [2**e, 2**(e + 1)) moves where the step passes
    half its spacing, 2**(e - 8); so normal weights above the first binade for which this is too much stay: a share of
    erfc(2**e / sqrt 2): 61.7 %, 97.5 % and 99.7 %. 4 sigma of n weights, and 1 % for the few in between whose later steps
    add decay."""
    n = 20_000
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(n).to(BF16))
    optimizer = torch.optim.AdamW([weight], lr=rate)
    handle = watch_updates(optimizer, patience=100)
    never = torch.ones(n, dtype=torch.bool)
    for _ in range(20):
        weight.grad, before = torch.randn(n).to(BF16), weight.detach().clone()
        optimizer.step()
        same = weight.detach() == before
        never &= same
        assert handle.unchanged.item() == pytest.approx(
            (same & (weight.grad != 0)).float().mean().item(), abs=1e-3
        )
    e = math.floor(math.log2(rate)) + 9
    share = math.erfc(2.0**e / math.sqrt(2))
    assert (
        abs(never.float().mean().item() - share)
        <= 4 * math.sqrt(share * (1 - share) / n) + 0.01
    )


def test_weights_without_an_update_do_not_count():
    table = nn.Parameter(torch.ones(10, 4, dtype=BF16))
    other = nn.Parameter(torch.ones(5, dtype=BF16))
    optimizer = torch.optim.SGD(
        [{"params": [table]}, {"params": [other], "lr": 2.0**-12}], lr=1.0
    )
    handle = round_updates_(optimizer, "nearest")
    table.grad, other.grad = torch.zeros_like(table), torch.ones_like(other)
    table.grad[0] = 1.0
    optimizer.step()
    assert [share.item() for share in handle.by_group] == [0.0, 1.0]
    assert handle.unchanged.item() == pytest.approx(5 / 9)
    table.grad.zero_(), other.grad.zero_()
    optimizer.step()
    assert handle.unchanged.item() == 0.0


@pytest.mark.parametrize(
    "watch", [watch_updates, lambda o, **k: round_updates_(o, "nearest", **k)]
)
def test_a_warning_once_when_updates_vanish(watch):
    weight, fine = nn.Parameter(torch.ones(8, dtype=BF16)), nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD(
        [{"params": [fine], "lr": 0.1}, {"params": [weight]}], lr=1e-4
    )
    watch(optimizer, patience=3)

    def step():
        weight.grad, fine.grad = torch.ones_like(weight), torch.ones_like(fine)
        optimizer.step()

    step(), step()
    with pytest.warns(RuntimeWarning) as told:
        step()
    (warning,) = told
    assert str(warning.message) == (
        "roundoff: 100.0% of the weights that should have changed did not, in the last of 3 such steps: parameter group 1, "
        "bfloat16, lr 0.0001. Updates below half the distance between neighbouring values are lost. Round them "
        "stochastically or by Kahan's summation (roundoff.train.round_updates_), or keep the weights in "
        "float32 and compute under autocast"
    )
    step(), step(), step()  # warnings are errors here


def test_watching_changes_nothing():
    weights, twins = parameters(), parameters()
    one, two = OPTIMIZERS["adamw"](weights), OPTIMIZERS["adamw"](twins)
    watch_updates(one)
    assert equal(run(one, weights, 4), run(two, twins, 4))


# -- checkpoints, closures, wrappers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["stochastic", "kahan", "nearest"])
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_a_checkpoint_goes_on_bit_by_bit(name, method):
    weights = parameters()
    optimizer = OPTIMIZERS[name](weights)
    round_updates_(optimizer, method)
    run(optimizer, weights, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    twins = [nn.Parameter(p.detach().clone()) for p in weights]
    second = OPTIMIZERS[name](twins)
    round_updates_(second, method)
    second.load_state_dict(saved)
    assert equal(run(optimizer, weights, 3, 3), run(second, twins, 3, 3))


def test_a_plain_checkpoint_can_be_loaded_and_an_optimizer_that_has_stepped_be_taken():
    weights = parameters()
    optimizer = OPTIMIZERS["adamw"](weights)
    run(optimizer, weights, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    round_updates_(optimizer, "nearest")
    twins = [nn.Parameter(p.detach().clone()) for p in weights]
    second = OPTIMIZERS["adamw"](twins)
    round_updates_(second, "nearest")
    second.load_state_dict(saved)
    assert equal(run(optimizer, weights, 2, 2), run(second, twins, 2, 2))


def test_remove_gives_back_a_plain_optimizer():
    weights = parameters()
    optimizer = OPTIMIZERS["adamw"](weights)
    keys = set(optimizer.state_dict()["param_groups"][0])
    handle = round_updates_(optimizer, "kahan")
    run(optimizer, weights, 2)
    assert optimizer.state[weights[0]]["exp_avg"].dtype == torch.float32
    handle.remove()
    handle.remove()
    assert "step" not in vars(optimizer)
    assert set(optimizer.state_dict()["param_groups"][0]) == keys
    assert set(optimizer.state[weights[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert optimizer.state[weights[0]]["exp_avg"].dtype == BF16
    run(optimizer, weights, 2)
    round_updates_(optimizer, "stochastic").remove()


def test_replicas_draw_alike_and_the_programs_generator_is_not_touched():
    weights, twins = parameters(), parameters()
    one, two = OPTIMIZERS["sgd"](weights), OPTIMIZERS["sgd"](twins)
    round_updates_(one), round_updates_(two)
    state = torch.get_rng_state()
    assert equal(run(one, weights, 3), run(two, twins, 3))
    assert torch.equal(state, torch.get_rng_state())
    others = parameters()
    third = OPTIMIZERS["sgd"](others)
    round_updates_(third, seed=1)
    assert not equal(weights, run(third, others, 3))
    fourth, last = OPTIMIZERS["sgd"](p := parameters()), None
    round_updates_(fourth, generator=(last := torch.Generator().manual_seed(0)))
    before = last.get_state()
    run(fourth, p, 1)
    assert not torch.equal(before, last.get_state())


def test_parameters_are_the_same_objects_in_the_same_storage():
    low, high = nn.Parameter(torch.ones(3, dtype=BF16)), nn.Parameter(torch.ones(3))
    frozen = nn.Parameter(torch.ones(3, dtype=BF16), requires_grad=False)
    optimizer = torch.optim.AdamW([low, high, frozen], lr=0.1)
    round_updates_(optimizer)
    low.grad, high.grad = torch.ones_like(low), torch.ones_like(high)
    gradient, storage = low.grad, low.data_ptr()
    accumulator = low.view_as(low).grad_fn.next_functions[0][0]
    optimizer.step()
    assert low.grad is gradient
    assert low.data_ptr() == storage
    assert (
        low.view_as(low).grad_fn.next_functions[0][0] is accumulator
    )  # what DistributedDataParallel hooks
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(
        map(id, (low, high, frozen))
    )
    assert set(optimizer.state) == {low, high}
    assert frozen.tolist() == [1, 1, 1]


class Fails(torch.optim.SGD):
    fail = False

    def step(self, closure=None):
        result = super().step(closure)
        if self.fail:
            raise ZeroDivisionError
        return result


@pytest.mark.parametrize("method", ["stochastic", "kahan"])
def test_an_exception_in_step_leaves_weights_and_gradients(method):
    weights = parameters()
    optimizer = Fails(weights, lr=0.1, momentum=0.9)
    round_updates_(optimizer, method)
    before, kept = run(optimizer, weights, 2), [p.grad for p in weights]
    optimizer.fail = True
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    assert equal(weights, before)
    assert all(p.grad is g for p, g in zip(weights, kept, strict=True))
    assert set(optimizer.state) == set(weights)
    assert all(
        ("compensation" in s) == (method == "kahan") for s in optimizer.state.values()
    )
    optimizer.fail = False
    run(optimizer, weights, 1, 2)


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.LBFGS(p, max_iter=4)],
)
def test_a_closure_computes_with_the_weights_in_their_own_format(make):
    weight = nn.Parameter(torch.full((4,), 2.0, dtype=BF16))
    optimizer = make([weight])
    round_updates_(optimizer, "nearest")
    seen = []

    def closure():
        optimizer.zero_grad()
        seen.append(weight.detach().clone())
        loss = (weight - 1).square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(6)]
    assert losses[-1] < losses[0] / 5
    assert all(w.dtype == BF16 for w in seen)
    assert losses == sorted(losses, reverse=True)

    def broken():
        closure()
        raise ZeroDivisionError

    before = weight.detach().clone()
    with pytest.raises(ZeroDivisionError):
        optimizer.step(broken)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("first", ["scheduler", "rounding"])
def test_with_a_scheduler(first):
    (weight, _), rates = parameters(), []
    optimizer = torch.optim.SGD([weight], lr=1.0)
    if first == "rounding":
        handle = round_updates_(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    if first == "scheduler":
        handle = round_updates_(optimizer)
    for _ in range(3):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        scheduler.step()  # warns where it has not seen the optimizer step
        rates.append(scheduler.get_last_lr()[0])
    assert rates == [0.5, 0.25, 0.125]
    assert handle.unchanged.item() < 1
    handle.remove()
    optimizer.step()
    scheduler.step()


# -- what is refused -------------------------------------------------------------------------------------------------


def test_refused():
    weights = parameters()
    optimizer = torch.optim.SGD(weights, lr=0.1)
    with pytest.raises(OptimizerError) as caught:
        round_updates_(optimizer, "kahn")
    assert str(caught.value) == (
        "round_updates_(method='kahn'): unknown method\n  expected: stochastic, kahan, nearest"
    )
    with pytest.raises(
        OptimizerError, match="no parameter is in low precision"
    ) as caught:
        round_updates_(torch.optim.SGD(parameters(torch.float32), lr=0.1))
    assert "got: torch.float32" in str(caught.value)
    round_updates_(optimizer)
    with pytest.raises(OptimizerError, match="handled already"):
        watch_updates(optimizer)


def test_sparse_gradients_are_refused_before_anything_changes():
    table = nn.Embedding(5, 2, sparse=True, dtype=BF16)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    round_updates_(optimizer)
    table(torch.tensor([1])).sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(OptimizerError) as caught:
        optimizer.step()
    assert str(caught.value) == (
        "parameter 0 of group 0: a sparse gradient\n  expected: a dense one\n  got: torch.sparse_coo\n"
        "  do: nn.Embedding(sparse=False), or leave it to an optimizer of its own"
    )
    assert torch.equal(table.weight, before)
    assert optimizer.param_groups[0]["params"][0] is table.weight
