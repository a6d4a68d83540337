"""Queries, keys and values that a loader packs into one parameter of each layer, and the merge of heads.

What reads a packed weight says in which order its parts, heads and elements stand; a loader
that packs them otherwise does so in every layer, to weights and biases alike.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port
from roundoff.compare.repairs.packed_leaves import Packing, packings

HEADS, WIDTH, LAYERS = 2, 4, 2
DIM = HEADS * WIDTH
PARTS = ("query", "key", "value")


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    f"{part}_{layer}": drawn(DIM, DIM, seed=10 * layer + place) * 0.6
    for layer in range(LAYERS)
    for place, part in enumerate((*PARTS, "out"))
} | {
    f"{part}_bias_{layer}": drawn(DIM, seed=40 + 10 * layer + place)
    for layer in range(LAYERS)
    for place, part in enumerate(PARTS)
}
LEAVES |= {"enter": drawn(DIM, 5, seed=80), "leave": drawn(6, DIM, seed=81)}
X = drawn(3, 7, 5, seed=90)


def split(x):
    return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)


def reference(m, x):
    x = torch.tanh(F.linear(x, m.enter))
    for layer in range(LAYERS):
        q, k, v = (
            split(
                F.linear(x, getattr(m, f"{p}_{layer}"), getattr(m, f"{p}_bias_{layer}"))
            )
            for p in PARTS
        )
        weights = torch.softmax(q @ k.transpose(-1, -2) * WIDTH**-0.5, -1)
        joined = (weights @ v).transpose(1, 2).flatten(2)
        x = F.layer_norm(x + F.linear(joined, getattr(m, f"out_{layer}")), (DIM,))
    return F.linear(x, m.leave)


def packed(tensors, axes):
    """Parts of (DIM, ...) in one tensor whose rows are ``axes`` of (parts, heads, elements)."""
    whole = torch.stack(tensors).unflatten(1, (HEADS, WIDTH))
    return whole.permute(*axes, *range(3, whole.dim())).flatten(0, 2)


def leaves(fault):
    held = {"enter": LEAVES["enter"].t(), "leave": LEAVES["leave"].t()}
    names = PARTS
    if fault == "values before keys":
        names = ("query", "value", "key")
    right = (1, 0, 2)
    for layer in range(LAYERS):
        weights = [LEAVES[f"{name}_{layer}"] for name in names]
        biases = [LEAVES[f"{name}_bias_{layer}"] for name in names]
        by_parts = fault == "packed by parts"
        held[f"kernel_{layer}"] = packed(weights, (0, 1, 2) if by_parts else right).t()
        by_parts |= fault == "biases by parts"
        held[f"bias_{layer}"] = packed(biases, (0, 1, 2) if by_parts else right)
        merge = LEAVES[f"out_{layer}"].t()
        if fault == "merge interleaved":
            merge = merge.unflatten(0, (WIDTH, HEADS)).transpose(0, 1)
        held[f"merge_{layer}"] = merge.reshape(HEADS, WIDTH, DIM)
    return {name: tensor.contiguous() for name, tensor in held.items()}


def port(m, x):
    x = torch.tanh(x @ m.enter)
    for layer in range(LAYERS):
        every = x @ getattr(m, f"kernel_{layer}") + getattr(m, f"bias_{layer}")
        every = every.view(*x.shape[:2], HEADS, 3, WIDTH)
        q, k, v = every.unbind(3)
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / WIDTH**0.5
        power = torch.exp(scores - scores.amax(-1, keepdim=True))
        weights = power / power.sum(-1, keepdim=True)
        mixed = torch.einsum("bhqk,bkhe->bqhe", weights, v)
        x = x + torch.einsum("bqhe,hed->bqd", mixed, getattr(m, f"merge_{layer}"))
        x = x - x.mean(-1, keepdim=True)
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)
    return x @ m.leave


def named(program, step_of, fault):
    ours = step_of(program(reference, **LEAVES), X, tensors=True)
    theirs = step_of(program(port, **leaves(fault)), X, tensors=True)
    rows = compare_port(Sides(ours, theirs), EarlierSteps())
    return [row for row in rows if row.cause == "own"]


def test_the_port_is_right(program, step_of):
    assert not named(program, step_of, "")


@pytest.mark.parametrize(
    ("fault", "names"),
    [
        ("packed by parts", {"kernel_0", "bias_0"}),
        ("values before keys", {"kernel_0", "bias_0"}),
        ("biases by parts", {"bias_0"}),
        ("merge interleaved", {"merge_0"}),
    ],
)
def test_the_parameter_is_named(program, step_of, fault, names):
    [row] = named(program, step_of, fault)
    assert row.name in names, row.evidence


def test_each_packing_is_tried_once():
    parts = list(torch.arange(12).view(2, 6, 1))
    packed_rows = [tuple(p.packed(parts).flatten().tolist()) for p in packings(2, 6)]
    # 2 orders of the parts, each with 1, 2 and 3 heads
    assert len(packed_rows) == 2 * (2 + 6 + 6)
    assert all(sorted(rows) == list(range(12)) for rows in packed_rows)
    # rows of parts whose heads are one element each are those of elements and heads exchanged
    by_heads = Packing((0, 1), 3, (1, 0, 2)).packed(parts).flatten().tolist()
    assert by_heads == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]
