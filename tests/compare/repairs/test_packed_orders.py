"""Queries and keys packed into one weight, a part of each head in an order for rotations."""

from __future__ import annotations

import torch

HEADS, SIZE, WIDTH = 4, 6, 10
SHARED = 2  # heads of keys
TURNED = 4  # elements of a head


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


QUERY = drawn(HEADS * SIZE, WIDTH, seed=1)
KEY = drawn(SHARED * SIZE, WIDTH, seed=2)
LEAVES = {"query": QUERY, "key": KEY, "gain": 1 + 0.3 * drawn(SIZE, seed=3)}
X = drawn(2, 7, WIDTH, seed=4)
ANGLES = torch.arange(7)[:, None] / 3.0 ** torch.arange(TURNED // 2)


def scores(q, k):
    k = k.repeat_interleave(HEADS // SHARED, 2)
    return torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1).square().mean()


def normed(x, gain):
    return x * gain / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def in_halves(x):
    cos, sin = ANGLES.cos()[:, None], ANGLES.sin()[:, None]
    one, other, rest = x.split([TURNED // 2, TURNED // 2, SIZE - TURNED], -1)
    return torch.cat([one * cos - other * sin, one * sin + other * cos, rest], -1)


def reference(m, x):
    q = (x @ m.query.t()).unflatten(-1, (HEADS, SIZE))
    k = (x @ m.key.t()).unflatten(-1, (SHARED, SIZE))
    return scores(in_halves(normed(q, m.gain)), in_halves(normed(k, m.gain)))


def in_pairs(x):
    cos, sin = ANGLES.cos()[:, None], ANGLES.sin()[:, None]
    one, other = x[..., 0:TURNED:2], x[..., 1:TURNED:2]
    turned = torch.stack([one * cos - other * sin, one * sin + other * cos], -1)
    return torch.cat([turned.flatten(-2), x[..., TURNED:]], -1)


def port(m, x):
    both = (x @ m.both.t()).unflatten(-1, (HEADS + SHARED, SIZE))
    q, k = both[:, :, :HEADS], both[:, :, HEADS:]
    return scores(in_pairs(normed(q, m.scale)), in_pairs(normed(k, m.scale)))


def paired(rows):
    """The rows of the two halves of what is turned by turns, in each head."""
    heads = rows.unflatten(0, (-1, SIZE))
    turned = heads[:, :TURNED].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([turned, heads[:, TURNED:]], 1).flatten(0, 1)


def loaded(key):
    both = torch.cat([paired(QUERY), key])
    return {"both": both, "scale": paired(LEAVES["gain"][:, None])[:, 0]}


def test_the_port_is_right(at_fault):
    assert not at_fault(reference, port, LEAVES, X, others=loaded(paired(KEY)))


def test_keys_that_stay_in_halves_are_named(at_fault):
    [row] = at_fault(reference, port, LEAVES, X, others=loaded(KEY))
    assert row.name == "both", row.evidence
    assert "key in another order than those of query" in row.evidence


GATES = {"gates": drawn(2, 3 * WIDTH, seed=5)}


def gates_of_three(m, x):
    parts = torch.cat([x, x.tanh(), x.sigmoid()], -1)
    return (parts @ m.gates.t()).tanh().square().mean()


def gates_of_a_stack(m, x):
    parts = torch.stack([x, x.tanh(), x.sigmoid()], 2)
    return (torch.einsum("blpw,gpw->blg", parts, m.kernel).tanh() ** 2).mean()


def test_parts_and_what_they_hold_the_wrong_way_round(at_fault, blamed_text):
    right = {"kernel": GATES["gates"].unflatten(-1, (3, WIDTH))}
    wrong = {"kernel": GATES["gates"].reshape(2, WIDTH, 3).transpose(1, 2).contiguous()}
    assert not at_fault(gates_of_three, gates_of_a_stack, GATES, X, others=right)
    [row] = at_fault(gates_of_three, gates_of_a_stack, GATES, X, others=wrong)
    assert row.name == "kernel"
