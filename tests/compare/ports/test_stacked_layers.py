"""What a loader did wrong to all layers at once, where a port holds them in one tensor.

The reference has two layers of attention over neighbours that are turned by their place,
each behind a norm whose scale is one more than what is trained, and a gated layer. The
port stacks what the layers hold, turns pairs that are neighbours, and has the two gates,
and queries and keys, in one weight.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port

LAYERS, HEADS, SIZE, HIDDEN = 2, 2, 4, 10
DIM = HEADS * SIZE


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.5


SHAPES = {
    "q_weight": (DIM, DIM),
    "k_weight": (DIM, DIM),
    "v_weight": (DIM, DIM),
    "gate_weight": (HIDDEN, DIM),
    "up_weight": (HIDDEN, DIM),
    "down_weight": (DIM, HIDDEN),
    "first_scale": (DIM,),
    "last_scale": (DIM,),
}
LEAVES = {
    f"layer{i}_{name}": drawn(*shape, seed=10 * i + n)
    for i in range(LAYERS)
    for n, (name, shape) in enumerate(SHAPES.items())
}
X = drawn(2, 5, DIM, seed=99)
ANGLES = torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.3])


def normed(x, scale):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


def attend(q, k, v):
    q, k = (each.transpose(1, 2) for each in (q, k))
    weights = (q @ k.transpose(-1, -2) / SIZE**0.5).softmax(-1)
    mixed = weights @ v.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
    return mixed.transpose(1, 2).flatten(2)


def turned_in_halves(x):
    x = x.unflatten(-1, (HEADS, SIZE))
    one, other = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    cos, sin = ANGLES.cos()[:, None], ANGLES.sin()[:, None]
    return torch.cat([one * cos - other * sin, one * sin + other * cos], -1)


def reference(m, x):
    for i in range(LAYERS):
        w = {name: getattr(m, f"layer{i}_{name}") for name in SHAPES}
        y = normed(x, 1 + w["first_scale"])
        q = turned_in_halves(F.linear(y, w["q_weight"]))
        k = turned_in_halves(F.linear(y, w["k_weight"]))
        x = x + attend(q, k, F.linear(y, w["v_weight"]))
        y = normed(x, 1 + w["last_scale"])
        y = F.silu(F.linear(y, w["gate_weight"])) * F.linear(y, w["up_weight"])
        x = x + F.linear(y, w["down_weight"])
    return x


def in_pairs(rows):
    return rows.unflatten(0, (HEADS, 2, SIZE // 2)).transpose(1, 2).flatten(0, 2)


def leaves(fault):
    def each(name):
        return [LEAVES[f"layer{i}_{name}"] for i in range(LAYERS)]

    one = 0 if fault == "without one" else 1
    last = "first_scale" if fault == "another norm" else "last_scale"
    as_is = {"keys as they are": "k", "queries and keys as they are": "qk"}.get(
        fault, ""
    )
    rows = {
        name: [w if name in as_is else in_pairs(w) for w in each(f"{name}_weight")]
        for name in "qk"
    }
    both = [
        torch.stack(pair)
        for pair in zip(each("gate_weight"), each("up_weight"), strict=True)
    ]
    if fault == "gates interleaved":
        both = [pair.transpose(0, 1) for pair in both]
    held = {
        "qk": torch.stack(
            [torch.cat(pair) for pair in zip(rows["q"], rows["k"], strict=True)]
        ),
        "v": torch.stack(each("v_weight")),
        "gates": torch.stack([pair.flatten(0, 1) for pair in both]),
        "down": torch.stack(each("down_weight")),
        "first": torch.stack(each("first_scale")) + one,
        "last": torch.stack(each(last)) + 1,
    }
    if fault == "from the last layer on":
        held = {name: tensor.flip(0) for name, tensor in held.items()}
    return {name: tensor.contiguous() for name, tensor in held.items()}


def turned_in_pairs(x):
    one, other = x[..., 0::2], x[..., 1::2]
    cos, sin = ANGLES.cos()[:, None], ANGLES.sin()[:, None]
    both = [one * cos - other * sin, one * sin + other * cos]
    return torch.stack(both, -1).flatten(-2)


def port(m, x):
    for i in range(LAYERS):
        y = normed(x, m.first[i])
        q, k = (y @ m.qk[i].mT).unflatten(-1, (2, HEADS, SIZE)).unbind(-3)
        x = attend(turned_in_pairs(q), turned_in_pairs(k), y @ m.v[i].mT) + x
        gate, up = (normed(x, m.last[i]) @ m.gates[i].mT).chunk(2, -1)
        x = (gate * torch.sigmoid(gate) * up) @ m.down[i].mT + x
    return x


def named(program, step_of, fault):
    ours = program(reference, **LEAVES)
    theirs = program(port, **leaves(fault))
    sides = Sides(step_of(ours, X, tensors=True), step_of(theirs, X, tensors=True))
    return [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]


def test_the_port_is_right(program, step_of):
    assert not named(program, step_of, "")


@pytest.mark.parametrize(
    ("fault", "name", "words"),
    [
        ("keys as they are", "qk", "the rows of the reference's layer#_k_weight"),
        ("queries and keys as they are", "qk", "the last two turned"),
        ("gates interleaved", "gates", "it holds layer0_gate_weight, layer0_up_weight"),
        ("without one", "first", "should hold layer#_first_scale after add"),
        ("another norm", "last", "and should hold layer#_last_scale after add"),
        ("from the last layer on", "gates", "the reference's layers in another order"),
    ],
)
def test_the_parameter_is_named(program, step_of, fault, name, words):
    [row] = named(program, step_of, fault)
    assert row.name == name, row.evidence
    assert words in row.evidence


WHOLE = {name: drawn(DIM, DIM, seed=s) for s, name in enumerate("qkvo", 40)}


def with_heads(m, x):
    q, k, v = (split(F.linear(x, getattr(m, name))) for name in "qkv")
    weights = (q @ k.mT / SIZE**0.5).softmax(-1)
    return F.linear((weights @ v).transpose(1, 2).flatten(2), m.o)


def split(x):
    return x.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)


def head_by_head(m, x):
    total = 0.0
    for i in range(HEADS):
        q, k, v = (x @ getattr(m, f"head{i}_{name}").mT for name in "qkv")
        scores = (q @ k.mT) * SIZE**-0.5
        scores = (scores - scores.amax(-1, keepdim=True)).exp()
        mixed = (scores / scores.sum(-1, keepdim=True)) @ v
        total = total + mixed @ getattr(m, f"head{i}_o").mT
    return total


@pytest.mark.parametrize("is_right", [True, False])
def test_heads_hold_a_stretch_of_the_rows_each(program, step_of, is_right):
    held = {}
    for i in range(HEADS):
        rows = slice(i * SIZE, (i + 1) * SIZE) if is_right else slice(i, None, HEADS)
        held |= {f"head{i}_{n}": WHOLE[n][rows].contiguous() for n in "qkv"}
        held[f"head{i}_o"] = WHOLE["o"].chunk(HEADS, 1)[i].contiguous()
    ours = step_of(program(with_heads, **WHOLE), X, tensors=True)
    theirs = step_of(program(head_by_head, **held), X, tensors=True)
    compared = compare_port(Sides(ours, theirs), EarlierSteps())
    wrong = [row for row in compared if row.cause == "own"]
    if is_right:
        assert not wrong
        return
    [row] = wrong
    assert row.name == "head0_q"
    assert "no stretch of the reference's" in row.evidence
