"""Scales step by step beside torch.amp.GradScaler, and beside the published exponential update written in plain Python."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roundoff.errors import ScalerError
from roundoff.train.scaling.scale_rules import (
    Dynamic,
    Exponential,
    ScaleState,
    Static,
    parse_rule,
)

from .published import paddle, tensorflow


def move(rule, pattern, *, floor=0.0, ceiling=math.inf, scale=None):
    state = ScaleState(
        rule,
        torch.device("cpu"),
        rule.init_scale if scale is None else scale,
        floor,
        ceiling,
    )
    found = []
    for bad in pattern:
        state.update(torch.tensor(float(bad)))
        found.append((float(state.scale), int(state.good), int(state.bad)))
    return found


patterns = st.lists(st.booleans(), min_size=1, max_size=80)


@settings(max_examples=60, deadline=None)
@given(
    pattern=patterns,
    start=st.sampled_from([2.0**16, 1.0, 3.7, 1e30, 3e38]),
    growth=st.sampled_from([2.0, 1.5, 1e5]),
    backoff=st.sampled_from([0.5, 0.9, 0.3]),
    interval=st.integers(1, 5),
)
def test_the_dynamic_rule_is_that_of_torch(pattern, start, growth, backoff, interval):
    theirs = torch.amp.GradScaler("cpu", start, growth, backoff, interval)
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.0)
    expected = []
    for bad in pattern:
        theirs.scale(torch.ones(()))  # makes its state
        weight.grad = torch.tensor([math.inf if bad else 0.0])
        theirs.unscale_(optimizer)
        theirs.update()
        expected.append((theirs.get_scale(), theirs.state_dict()["_growth_tracker"], 0))
    assert move(Dynamic(start, growth, backoff, interval), pattern) == expected


@pytest.mark.parametrize(
    ("consecutive", "published"), [(False, tensorflow), (True, paddle)]
)
@settings(max_examples=60, deadline=None)
@given(
    pattern=patterns,
    start=st.sampled_from([2.0**32, 1.0, 2.5, 1e38]),
    every=st.integers(1, 5),
    decr_every=st.integers(1, 4),
    incr=st.sampled_from([2.0, 3.3]),
    decr=st.sampled_from([0.8, 0.5, 0.1]),
)
def test_the_exponential_rule_is_the_published_one(
    consecutive, published, pattern, start, every, decr_every, incr, decr
):
    rule = Exponential(start, every, decr_every, incr, decr, consecutive)
    expected = list(published(start, every, decr_every, incr, decr, pattern))
    assert move(rule, pattern, floor=1.0) == expected


def test_bad_steps_accumulate_over_good_ones():
    rule = Exponential(1024.0, 100, decr_every_n_nan_or_inf=2, decr_ratio=0.5)
    assert [s for s, _, _ in move(rule, [1, 0, 0, 1, 1, 0])] == [
        1024,
        1024,
        1024,
        512,
        512,
        512,
    ]
    paddles = Exponential(
        1024.0, 100, decr_every_n_nan_or_inf=2, decr_ratio=0.5, consecutive=True
    )
    assert [s for s, _, _ in move(paddles, [1, 0, 0, 1, 1, 0])] == [
        1024,
        1024,
        1024,
        1024,
        512,
        512,
    ]


def test_floor_and_ceiling_hold_what_the_rule_makes_and_move_nothing_else():
    down = [s for s, _, _ in move(Dynamic(8.0), [1] * 5, floor=2.0)]
    assert down == [4, 2, 2, 2, 2]
    up = [s for s, _, _ in move(Dynamic(8.0, growth_interval=1), [0] * 4, ceiling=32.0)]
    assert up == [16, 32, 32, 32]
    assert [s for s, _, _ in move(Dynamic(8.0), [1, 0, 1], floor=2.0, scale=0.5)] == [
        0.5,
        0.5,
        0.5,
    ]
    assert [
        s
        for s, _, _ in move(
            Dynamic(8.0, growth_interval=1), [0, 1], ceiling=16.0, scale=64.0
        )
    ] == [64, 32]
    assert [s for s, _, _ in move(Static(8.0), [1, 0, 1])] == [8, 8, 8]


def test_without_a_floor_the_scale_reaches_zero_as_torchs_does():
    assert (
        move(Dynamic(), [1] * 166)[-1][0] == 0.0
    )  # 2**16 / 2**166 = 2**-150, below float32's least, 2**-149
    assert move(Dynamic(), [1] * 166, floor=1.0)[-1][0] == 1.0


def test_a_loss_that_was_bad_before_scaling_moves_nothing():
    state = ScaleState(
        Dynamic(growth_interval=2), torch.device("cpu"), 16.0, 1.0, math.inf, good=1
    )
    state.update(torch.tensor(1.0), torch.tensor(True))
    assert (float(state.scale), int(state.good), int(state.stuck)) == (16.0, 1, 1)
    state.update(torch.tensor(1.0), torch.tensor(False))
    assert (float(state.scale), int(state.good), int(state.stuck)) == (8.0, 0, 0)


@pytest.mark.parametrize(
    ("rule", "constants", "message"),
    [
        (
            "adaptive",
            {},
            "LossScaler(rule='adaptive'): unknown rule\n  expected: static, dynamic, exponential",
        ),
        (
            "dynamic",
            {"growth": 2.0},
            "LossScaler: the dynamic rule has no 'growth'\n"
            "  expected: init_scale, growth_factor, backoff_factor, growth_interval\n  do: did you mean 'growth_factor'?",
        ),
        (
            "dynamic",
            {"incr_ratio": 2.0},
            "LossScaler: the dynamic rule has no 'incr_ratio'\n  expected: init_scale, "
            "growth_factor, backoff_factor, growth_interval\n  do: it belongs to LossScaler(rule='exponential')",
        ),
        (
            "dynamic",
            {"backoff_factor": 1.0},
            "LossScaler: backoff_factor of the dynamic rule\n  expected: between 0 and 1\n  got: 1.0",
        ),
        (
            "dynamic",
            {"init_scale": math.inf},
            "LossScaler: init_scale of the dynamic rule\n  expected: a positive number that float32 holds\n  got: inf",
        ),
        (
            "exponential",
            {"decr_every_n_nan_or_inf": 0},
            "LossScaler: decr_every_n_nan_or_inf of the exponential rule\n  expected: at least 1\n  got: 0",
        ),
        (
            Static(2.0),
            {"init_scale": 2.0},
            "LossScaler: a rule that is made already takes no constants\n  got: init_scale",
        ),
    ],
)
def test_wrong_rules(rule, constants, message):
    with pytest.raises(ScalerError) as error:
        parse_rule(rule, constants)
    assert str(error.value) == message
