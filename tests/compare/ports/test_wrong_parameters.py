"""Parameters that a loader filled the wrong way round, cut otherwise, or folded wrongly.

The reference is an attention over gated features behind a normalization; its port has
parameters of its own for each part, and folds the normalization.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


DIM = 6
LEAVES = {
    "enter": drawn(DIM, DIM, seed=1),
    "mean": drawn(DIM, seed=2),
    "spread": drawn(DIM, seed=3).abs() + 0.5,
    "gain": drawn(DIM, seed=4) + 2,
    "qkv": drawn(3 * DIM, DIM, seed=5) * 0.6,
    "up": drawn(10, DIM, seed=6),
    "gate": drawn(10, DIM, seed=7),
    "down": drawn(4, 10, seed=8),
}
X = drawn(3, 5, DIM, seed=9)


def reference(m, x):
    x = F.linear(x, m.enter)
    x = (x - m.mean) / m.spread * m.gain
    q, k, v = F.linear(x, m.qkv).chunk(3, -1)
    x = F.softmax(q @ k.transpose(1, 2) * DIM**-0.5, -1) @ v
    x = F.silu(F.linear(x, m.gate)) * F.linear(x, m.up)
    return F.linear(x, m.down)


def leaves(*, cut=False, exchanged=(), folded=0.0):
    w = LEAVES
    scale = w["gain"] / w["spread"]
    parts = w["qkv"].chunk(3)
    if cut:
        parts = w["qkv"].unflatten(0, (DIM, 3)).unbind(1)
    held = {
        "first": (w["enter"] * scale[:, None]).t(),
        "shift": -w["mean"] * scale + folded * drawn(DIM, seed=10),
        "query": parts[0],
        "key": parts[1],
        "value": parts[2],
        "raised": w["up"],
        "gated": w["gate"],
        "last": w["down"],
    }
    held = {name: tensor.contiguous() for name, tensor in held.items()}
    if exchanged:
        one, other = exchanged
        held[one], held[other] = held[other], held[one]
    return held


def port(m, x):
    x = x @ m.first + m.shift
    q = x @ m.query.t()
    k = x @ m.key.t()
    v = x @ m.value.t()
    scores = torch.einsum("bqd,bkd->bqk", q, k) / DIM**0.5
    x = torch.einsum("bqk,bkd->bqd", torch.softmax(scores, 2), v)
    gate = x @ m.gated.t()
    x = gate * torch.sigmoid(gate) * (x @ m.raised.t())
    return x @ m.last.t()


def named(program, step_of, **faults):
    sides = Sides(
        step_of(program(reference, **LEAVES), X, tensors=True),
        step_of(program(port, **leaves(**faults)), X, tensors=True),
    )
    rows = compare_port(sides, EarlierSteps())
    return [row for row in rows if row.cause == "own"]


def test_the_port_is_right(program, step_of):
    assert not named(program, step_of)


@pytest.mark.parametrize("pair", [("query", "value"), ("raised", "gated")])
def test_two_parameters_the_wrong_way_round(program, step_of, pair):
    [row] = named(program, step_of, exchanged=pair)
    assert row.name in pair
    orders = (pair, pair[::-1])
    says_both = [f"{a} and {b} stand in for each other" for a, b in orders]
    evidence = row.evidence.removesuffix(", or what reads their results does")
    assert evidence in (*says_both, "gated holds the reference's up, not gate")


def test_three_parameters_cut_out_of_one_otherwise(program, step_of):
    [row] = named(program, step_of, cut=True)
    assert row.name in ("query", "key", "value")
    assert "are cut out of the reference's qkv in another way" in row.evidence


def test_a_folded_bias_that_is_off(program, step_of):
    [row] = named(program, step_of, folded=0.3)
    assert row.name == "shift"
    assert "is off by a number for each of its elements" in row.evidence


# -- two that hold one thing, and neither is read where the programs part ------------------


def centred(m, x):
    hidden = torch.tanh(F.linear(x - m.mean, m.first))
    return F.linear(hidden * m.scale, m.second).square().mean()


def with_two_means(m, x):
    off = x - (m.hidden + m.mean_again) / 2
    hidden = torch.tanh(torch.einsum("bi,oi->bo", off, m.w1))
    return (torch.einsum("bi,oi->bo", hidden * m.w2, m.w3) ** 2).mean()


def test_two_of_one_content_are_not_blamed_where_they_are_not_read(program, step_of):
    mean, scale = drawn(6, seed=1), drawn(6, seed=2)
    first, second = drawn(6, 6, seed=3), drawn(4, 6, seed=4)
    x = drawn(5, 6, seed=5)
    ours = program(centred, mean=mean, first=first, scale=scale, second=second)
    wrong = drawn(6, seed=6)
    theirs = program(
        with_two_means, hidden=mean, mean_again=mean, w1=first, w2=wrong, w3=second
    )
    sides = Sides(step_of(ours, x), step_of(theirs, x))
    rows = compare_port(sides, EarlierSteps())
    [row] = [row for row in rows if row.cause == "own"]
    assert row.name == "w2"
