"""Noise in the last bit: its distribution, what it moves and what it leaves alone, and that nothing else notices."""

from __future__ import annotations

import json
import math

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

import roundoff
from roundoff.errors import RunError
from roundoff.record.noise import Noise

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
HALF = {torch.bfloat16: ml_dtypes.bfloat16, torch.float16: np.float16}


def values(*shape, seed=0, dtype=torch.float32):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def neighbours(x):
    """The next values below and above, by torch or (in half precision) numpy with ml_dtypes."""
    if x.dtype not in HALF:
        inf = torch.tensor(math.inf, dtype=x.dtype)
        return torch.nextafter(x, -inf), torch.nextafter(x, inf)
    array = x.contiguous().view(torch.int16).numpy().view(HALF[x.dtype])
    infinity = np.array(math.inf, dtype=HALF[x.dtype])
    with np.errstate(all="ignore"):
        both = np.nextafter(array, -infinity), np.nextafter(array, infinity)
    return tuple(torch.from_numpy(b.view(np.int16).copy()).view(x.dtype) for b in both)


def moved(before, after):
    """-1, 0 or 1 for each element: to the next value below, none, to that above. Fails for any other move."""
    down, up = neighbours(before)
    steps = (after == up).int() - (after == down).int()
    assert bool(((after == before) | (steps != 0)).all())
    return torch.where(after == before, 0, steps)


def noisy(path, function, *, noise=1, **options):
    with roundoff.capture(path, noise=noise, overwrite=True, **options) as run:
        result = function()
        run.step()
    assert run.stopped is None
    return result


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quarter_moves_up_and_a_quarter_down(dtype):
    count = 2**18
    before = values(count, dtype=dtype)
    # at +-1 the move away from zero is not made
    before[before.abs() == 1] = 1.5
    after = before.clone()
    Noise(7).perturb_(after)
    steps = moved(before, after)
    sigma = math.sqrt(count * 0.25 * 0.75)  # binomial
    for way in (-1, 1):
        assert abs((steps == way).sum().item() - count / 4) < 3 * sigma  # seed 7
    # neighbours are independent: the mean of the products of their steps has a standard deviation of 1/2 / sqrt(count)
    for shift in (1, 2, 32, 2**16, 2**17):
        product = (steps * steps.roll(shift)).double().mean().item()
        assert abs(product) < 3 * 0.5 / math.sqrt(count)
    assert abs(steps.double().mean().item()) < 3 * math.sqrt(0.5 / count)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_a_format(dtype):
    """All 65,536 codes, with 8 seeds."""
    codes = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    before = codes.view(dtype)
    largest = torch.finfo(dtype).max
    ever = torch.zeros(len(codes), dtype=torch.int64)
    for seed in range(8):
        after = before.clone()
        Noise(seed).perturb_(after)
        special = ~before.isfinite() | (before == 0)
        assert torch.equal(
            after.view(torch.int16)[special], codes[special]
        )  # payloads and the sign of zero too
        steps = moved(before[~special], after[~special])
        assert bool(after[~special].isfinite().all())
        assert bool((after.signbit() == before.signbit()).all())
        assert bool((after.abs()[before.abs() == 1] <= 1).all())
        assert bool((after.abs()[before.abs() == largest] <= largest).all())
        ever[~special] |= torch.where(steps < 0, 1, torch.where(steps > 0, 2, 0))
    # an element misses one of its two moves with all of 8 seeds with probability 2 * 0.75**8 - 0.5**8 = 0.196
    share = (ever == 3).sum().item() / 2**16
    assert share > 0.75


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_every_number_of_fp8(dtype):
    """The finite numbers of one sign in order are the codes in order, by ml_dtypes."""
    codes = np.arange(256, dtype=np.uint8)
    numbers = codes.view(getattr(ml_dtypes, str(dtype).removeprefix("torch."))).astype(
        np.float64
    )
    order = np.unique(numbers[np.isfinite(numbers)])
    before = torch.from_numpy(codes.copy()).view(dtype)
    for seed in range(8):
        after = before.clone()
        Noise(seed).perturb_(after)
        moved_to = after.double().numpy()
        for x, y in zip(numbers, moved_to, strict=True):
            if not np.isfinite(x) or x == 0:
                assert np.array_equal(x, y, equal_nan=True)
            else:
                assert abs(np.searchsorted(order, x) - np.searchsorted(order, y)) <= 1
                assert np.isfinite(y)
        assert (numbers != moved_to)[np.isfinite(numbers)].any()


@given(st.lists(st.floats(width=32), max_size=70), st.integers(0, 2**62))
def test_any_numbers(numbers, seed):
    before = torch.tensor(numbers, dtype=torch.float32)
    after, again = before.clone(), before.clone()
    Noise(seed).perturb_(after)
    Noise(seed).perturb_(again)
    assert torch.equal(after.view(torch.int32), again.view(torch.int32))
    usual = before.isfinite() & (before != 0)
    assert torch.equal(
        after[~usual].view(torch.int32), before[~usual].view(torch.int32)
    )
    moved(before[usual], after[usual])
    assert bool(after[usual].isfinite().all())


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.T,
        lambda t: t[::2],
        lambda t: t[:, 3:9],
        lambda t: t[0, 0],
        lambda t: t[:0],
        lambda t: t.diagonal(),
        lambda t: t.view(4, 2, 4, 8).permute(0, 3, 1, 2),
    ],
)
def test_views_move_in_place_and_nothing_beside_them(view):
    whole = values(16, 16)
    before = whole.clone()
    Noise(3).perturb_(view(whole))
    mask = torch.zeros_like(whole)
    view(mask).fill_(1)
    assert torch.equal(whole[mask == 0], before[mask == 0])
    steps = moved(before, whole)
    if mask.sum() > 20:
        assert bool(steps.any())


def test_complex_and_what_is_no_number():
    z = torch.complex(values(500, seed=1), values(500, seed=2))
    after = z.clone()
    Noise(0).perturb_(after)
    assert bool(moved(z.real, after.real).any())
    assert bool(moved(z.imag, after.imag).any())
    for other in (
        torch.arange(9),
        torch.ones(9, dtype=torch.bool),
        torch.empty(0),
        torch.ones(9, device="meta"),
    ):
        kept = other.clone()
        Noise(0).perturb_(other)
        assert other.is_meta or torch.equal(other, kept)
    one = torch.full((1,), 1.5).expand(40)
    Noise(0).perturb_(one)  # a value in forty places
    assert one.unique().numel() == 1


X, Y = values(24, 24), values(24, 24, seed=1)
ROUNDS = {
    "mm": lambda: X @ Y,
    "exp": lambda: X.exp(),
    "add": lambda: X + Y,
    "times a tenth": lambda: X * 0.1,
    "in place": lambda: X.clone().mul_(Y),
    "in a view": lambda: X.clone()[::2].mul_(0.3),
    "out": lambda: torch.mul(X, Y, out=torch.empty(24, 24)),
    "list": lambda: torch._foreach_mul([X, Y], 0.1)[1],
    "list in place": lambda: _in_place(torch._foreach_mul_),
    "softmax": lambda: X.softmax(-1),
    "narrowing": lambda: X.bfloat16(),
    "copy into fp16": lambda: torch.empty(24, 24, dtype=torch.float16).copy_(X),
    "fp64": lambda: X.double().sin(),
    "bf16": lambda: X.bfloat16() * Y.bfloat16(),
    "accumulate": lambda: X.clone().index_put_((torch.arange(24),), Y, accumulate=True),
    "layer norm": lambda: F.layer_norm(X, (24,)),
    "not unique": lambda: torch.linalg.svd(X)[1],
}
EXACT = {
    "views": lambda: X.T[2:].reshape(-1),
    "copies": lambda: torch.cat([X.clone(), Y.repeat(2, 1).contiguous()]),
    "wider": lambda: X.double(),
    "comparisons": lambda: (X > Y).float() + 0,
    "max": lambda: torch.maximum(X.relu(), Y.amax(0)).clamp(-1, 1.5),
    "sign": lambda: (-X).abs().neg_(),
    "gather": lambda: X.gather(0, torch.zeros(3, 24, dtype=torch.int64))[
        torch.tensor([1, 0])
    ],
    "embedding": lambda: F.embedding(torch.tensor([3, 1]), X),
    "stored": lambda: (
        X.clone().index_put_((torch.tensor([1]),), Y[0]).masked_fill_(Y > 0, 2.5)
    ),
    "sort": lambda: X.sort().values,
    "where": lambda: torch.where(X > 0, X, Y).tril(),
    "pad and pool": lambda: F.max_pool2d(F.pad(X[None, None], (1, 1)), 2),
    "fill": lambda: torch.full_like(X, 0.1),
    "factories": lambda: torch.linspace(0, 1, 30),
    "round": lambda: X.round() + X.floor().trunc_(),
    "lists": lambda: torch._foreach_neg(torch._foreach_abs([X, Y]))[0],
    "mask": lambda: (1.0 - (X > 0).float()) * torch.finfo(torch.float32).min,
    "power of two": lambda: X * 0.25 * 65536.0 / 8,
    "step count": lambda: torch.tensor(3.0).add_(1),
    "known numbers": lambda: X.round().bfloat16(),
    "integers": lambda: torch.arange(9) * 3 // 2,
    "random": lambda: torch.rand(40, generator=torch.Generator().manual_seed(1)),
    "uniform": lambda: torch.empty(30).normal_(
        generator=torch.Generator().manual_seed(1)
    ),
}


def _in_place(function):
    made = [X.clone(), Y.clone()]
    function(made, 0.1)
    return made[1]


@pytest.mark.parametrize("name", ROUNDS)
def test_what_rounds_moves(name, path):
    before, after = ROUNDS[name](), noisy(path, ROUNDS[name])
    if name == "bf16":  # the casts move too
        assert not torch.equal(before, after)
    else:
        assert bool(moved(before, after).any())


@pytest.mark.parametrize("name", EXACT)
def test_what_rounds_nothing_stays(name, path):
    assert torch.equal(EXACT[name](), noisy(path, EXACT[name]))


def test_only_the_elements_that_were_rounded_move(path):
    mixed = torch.cat([X[0].round(), X[1]])
    before, after = mixed * 0.75, noisy(path, lambda: mixed * 0.75)
    assert torch.equal(
        before[:24], after[:24]
    )  # whole numbers below 10 times 3/4: at most 6 bits
    assert bool(moved(before[24:], after[24:]).any())


def train(run=None, autocast=None, fused=False, steps=3):
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(8 * 36, 5),
        nn.Sigmoid(),
    )
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    x, losses = values(4, 3, 8, 8, seed=3), []
    kept = x.clone()
    for _ in range(steps):
        with torch.autocast(
            "cpu", autocast or torch.bfloat16, enabled=autocast is not None
        ):
            loss = F.binary_cross_entropy(net(x).float(), torch.ones(4, 5))
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
        if run is not None:
            run.step(loss=loss)
    assert torch.equal(x, kept)
    steps_of = [s["step"].item() for s in opt.state_dict()["state"].values()]
    assert set(steps_of) == {float(steps)}
    return losses, [p.detach().clone() for p in net.parameters()], torch.get_rng_state()


@pytest.mark.parametrize(
    ("autocast", "fused"), [(None, False), (None, True), (torch.bfloat16, False)]
)
def test_training_with_noise(autocast, fused, path):
    plain = train(autocast=autocast, fused=fused)
    found = []
    for seed in (1, 1, 2):
        with roundoff.capture(path, noise=seed, overwrite=True) as run:
            found.append(train(run, autocast, fused))
        assert run.stopped is None
    first, again, other = found
    assert first[0] == again[0]
    assert all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first[1], other[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first[1], plain[1], strict=True))
    assert all(
        torch.equal(run[2], plain[2]) for run in found
    )  # the program's random state
    # three steps of AdamW move a weight by 3 lr at most, whatever the gradient
    assert (
        max((a - b).abs().max().item() for a, b in zip(first[1], plain[1], strict=True))
        < 2 * 3 * 1.01e-2
    )
    assert json.loads((path / "run.json").read_text())["noise"] == 2


def test_without_noise_nothing_moves(path):
    plain = train()
    with roundoff.capture(path, noise=None) as run:
        assert train(run)[0] == plain[0]
    about = json.loads((path / "run.json").read_text())
    assert about["noise"] is None
    assert about["of"] is None


def test_recorded_values_are_those_the_program_had(path):
    with roundoff.capture(path, noise=1, keep="tensors") as run:
        result = (X @ Y).exp_()
        run.step()
    assert torch.equal(roundoff.load(path).tensor("/exp_"), result)


def test_steps_before_the_recorded_ones_have_noise_too(path):
    with roundoff.capture(path, noise=1, steps="2") as run:
        results = []
        for _ in range(4):
            results.append(X @ Y)
            run.step()
    assert [torch.equal(r, X @ Y) for r in results] == [False, False, False, True]
    assert roundoff.load(path).steps == [2]


def test_sites_that_are_not_recorded_have_noise_too(path):
    def both():
        return X @ Y, X.exp()

    with roundoff.capture(path, noise=1, sites=["*/exp"]) as run:
        product, _ = both()
        run.step()
    assert not torch.equal(product, X @ Y)
    assert set(roundoff.load(path).ops.collect()["operator"]) == {"exp", "input"}


def test_saturated_probabilities_stay_probabilities(path):
    large = torch.full((400,), 30.0)
    found = noisy(path, large.sigmoid)
    assert bool((found <= 1).all())
    assert bool((found < 1).any())


def test_inference_mode(path):
    with torch.inference_mode():
        assert not torch.equal(noisy(path, lambda: F.gelu(X @ Y)), F.gelu(X @ Y))


def test_restored_after_an_exception(path):
    state = torch.get_rng_state()
    with (
        pytest.raises(ValueError, match="of the program"),
        roundoff.capture(path, noise=1),
    ):
        X @ Y
        raise ValueError("of the program")
    assert _get_current_dispatch_mode() is None
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(X @ Y, X.clone() @ Y.clone())


@pytest.mark.parametrize("seed", [-1, True, 1.0, "3", 2**63])
def test_what_is_no_seed(seed, path):
    with pytest.raises(RunError, match="no seed") as caught:
        roundoff.capture(path, noise=seed)
    assert "a whole number from 0 on" in str(caught.value)


def test_module_level_has_no_operators(path):
    with pytest.raises(RunError, match="noise is added to the results of operators"):
        roundoff.capture(path, noise=0, level="module")
    assert not path.exists()
