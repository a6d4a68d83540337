"""What a loader did wrong to several parameters in one way, or what a layout did instead.

The reference is a convolution, an attention with heads and a gated layer; the port keeps
heads as an axis of its parameters, and joins what the reference has apart.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port

HEADS, WIDTH = 2, 4
DIM = HEADS * WIDTH


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "stem": drawn(DIM, 3, 3, 3, seed=1),
    **{f"{n}_w": drawn(DIM, DIM, seed=s) * 0.5 for s, n in enumerate("qkv", 2)},
    **{f"{n}_b": drawn(DIM, seed=s) for s, n in enumerate("qkv", 5)},
    **{f"n{n}_w": drawn(DIM, seed=20 + n) + 2 for n in (1, 2)},
    **{f"n{n}_b": drawn(DIM, seed=22 + n) for n in (1, 2)},
    "gate": drawn(10, DIM, seed=8),
    "up": drawn(10, DIM, seed=9),
    "down": drawn(3, 10, seed=10),
}
X = drawn(2, 3, 5, 5, seed=11)


def split(x):
    return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)


def reference(m, x):
    x = torch.tanh(F.conv2d(x, m.stem, padding=1)).flatten(2).transpose(1, 2)
    x = F.layer_norm(x, (DIM,), m.n1_w, m.n1_b)
    q = split(F.linear(x, m.q_w, m.q_b))
    k = split(F.linear(x, m.k_w, m.k_b))
    v = split(F.linear(x, m.v_w, m.v_b))
    x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    x = F.layer_norm(x, (DIM,), m.n2_w, m.n2_b)
    return F.linear(F.silu(F.linear(x, m.gate)) * F.linear(x, m.up), m.down)


def leaves(fault):
    w = {name: tensor.clone() for name, tensor in LEAVES.items()}
    held = {"kernel": w["stem"].permute(2, 3, 1, 0)}
    if fault == "kernel turned":
        held["kernel"] = w["stem"].permute(3, 2, 1, 0)
    source = {"query": "q", "key": "k", "value": "v"}
    if fault == "layers exchanged":
        source = {"query": "q", "key": "v", "value": "k"}
    for name, letter in source.items():
        matrix = w[f"{letter}_w"].t()
        heads = matrix.reshape(DIM, HEADS, WIDTH)
        if fault == "heads last" and name != "value":
            heads = matrix.reshape(DIM, WIDTH, HEADS).transpose(1, 2)
        held[f"{name}_kernel"] = heads
        held[f"{name}_bias"] = w[f"{letter}_b"].reshape(HEADS, WIDTH)
    if fault == "heads last":
        for letter, name in (("q", "query"), ("k", "key")):
            bias = w[f"{letter}_b"].reshape(WIDTH, HEADS).t()
            held[f"{name}_bias"] = bias
    norms = ["n1", "n2"]
    if fault == "norms exchanged":
        norms.reverse()
    for name, norm in zip(("early", "late"), norms, strict=True):
        held[f"{name}_gain"] = w[f"{norm}_w"]
        held[f"{name}_shift"] = w[f"{norm}_b"]
    parts = [w["gate"], w["up"]]
    if fault == "parts joined the other way round":
        parts.reverse()
    held["both"] = torch.cat(parts)
    held["down"] = w["down"]
    if fault == "stored in half":
        held["down"] = held["down"].half().float()
    return {name: tensor.contiguous() for name, tensor in held.items()}


def port(m, x, fault):
    x = F.conv2d(x, m.kernel.permute(3, 2, 0, 1), padding=1)
    x = torch.tanh(x).permute(0, 2, 3, 1).reshape(2, 25, DIM)
    x = F.layer_norm(x, (DIM,), m.early_gain, m.early_shift)
    q = torch.einsum("bnc,chd->bnhd", x, m.query_kernel) + m.query_bias
    k = torch.einsum("bnc,chd->bnhd", x, m.key_kernel) + m.key_bias
    v = torch.einsum("bnc,chd->bnhd", x, m.value_kernel) + m.value_bias
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    if fault == "queries viewed":
        flat = x @ m.query_kernel.flatten(1) + m.query_bias.flatten()
        q = flat.reshape(2, HEADS, 25, WIDTH)
    y = F.scaled_dot_product_attention(q, k, v)
    x = y.permute(0, 2, 1, 3).reshape(2, 25, DIM) + x
    if fault == "first norm twice":
        x = F.layer_norm(x, (DIM,), m.early_gain, m.early_shift)
    else:
        x = F.layer_norm(x, (DIM,), m.late_gain, m.late_shift)
    gate, up = (x @ m.both.t()).chunk(2, -1)
    return (gate * torch.sigmoid(gate) * up) @ m.down.t()


def named(program, step_of, fault):
    ours = program(reference, **LEAVES)
    theirs = program(lambda m, x: port(m, x, fault), **leaves(fault))
    sides = Sides(step_of(ours, X, tensors=True), step_of(theirs, X, tensors=True))
    return [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]


def test_the_port_is_right(program, step_of):
    assert not named(program, step_of, "")


@pytest.mark.parametrize(
    ("fault", "names", "words"),
    [
        ("kernel turned", {"kernel"}, "in the order [3, 2, 1, 0]"),
        ("layers exchanged", {"key_kernel", "value_kernel"}, "stand in for each other"),
        ("norms exchanged", {"early_gain"}, "holds the reference's n2_w, not n1_w"),
        ("heads last", {"query_kernel", "key_kernel"}, "the other way round"),
        ("parts joined the other way round", {"both"}, "stand in another order than"),
        ("stored in half", {"down"}, "is the reference's down rounded to float16"),
    ],
)
def test_the_parameter_is_named(program, step_of, fault, names, words):
    [row] = named(program, step_of, fault)
    assert row.name in names, row.evidence
    assert words in row.evidence


def test_a_joined_parameter_is_named_with_the_line_that_cuts(program, step_of):
    [row] = named(program, step_of, "parts joined the other way round")
    text = Path(__file__).read_text().splitlines()
    assert ".chunk(2, -1)" in text[int(row.blamed_line.rpartition(":")[2]) - 1]


def test_an_operand_that_a_layout_put_in_another_order(program, step_of):
    [row] = named(program, step_of, "queries viewed")
    text = Path(__file__).read_text().splitlines()
    assert "reshape(2, HEADS" in text[int(row.blamed_line.rpartition(":")[2]) - 1]
    assert row.looks_like == "wrong axis or layout", row.evidence


def test_a_parameter_that_serves_another_call_rightly_is_not_to_blame(program, step_of):
    [row] = named(program, step_of, "first norm twice")
    assert "it reads early_gain, where the reference reads n2_w" in row.evidence
    text = Path(__file__).read_text().splitlines()
    line = int(row.blamed_line.rpartition(":")[2])
    assert "first norm twice" in text[line - 2]


# -- pairs of channels that turn, in each head of two layers -----------------------------

TURNING = {
    f"{layer}_{name}": drawn(DIM, DIM, seed=40 + 10 * layer + place) * 0.5
    for layer in (0, 1)
    for place, name in enumerate("qkv")
}
TURNING = {f"layer{name}": tensor for name, tensor in TURNING.items()}
ANGLES = torch.arange(25.0)[:, None] * torch.tensor([1.0, 0.1])
POINTS = drawn(2, 25, DIM, seed=60)


def turned_halves(x):
    first, second = x.chunk(2, -1)
    cos, sin = ANGLES.cos(), ANGLES.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)


def turned_pairs(x):
    first, second = x[..., ::2], x[..., 1::2]
    cos, sin = ANGLES.cos(), ANGLES.sin()
    pairs = [first * cos - second * sin, first * sin + second * cos]
    return torch.stack(pairs, -1).flatten(-2)


def turning(turned):
    def run(m, x):
        for layer in (0, 1):
            weights = [m.get_parameter(f"layer{layer}_{name}") for name in "qkv"]
            q, k, v = (split(F.linear(x, weight)) for weight in weights)
            y = F.scaled_dot_product_attention(turned(q), turned(k), v)
            x = x + y.transpose(1, 2).flatten(2)
        return x

    return run


def in_pairs(weight):
    """Return the rows of a weight as ``turned_pairs`` wants what ``turned_halves`` turns."""
    heads = weight.reshape(HEADS, 2, WIDTH // 2, DIM)
    return heads.transpose(1, 2).reshape(DIM, DIM).contiguous()


def turning_port(program, step_of, left):
    held = {
        name: tensor if name[-1] in ("v", *left) else in_pairs(tensor)
        for name, tensor in TURNING.items()
    }
    ours = program(turning(turned_halves), **TURNING)
    theirs = program(turning(turned_pairs), **held)
    steps = [step_of(each, POINTS, tensors=True) for each in (ours, theirs)]
    rows = compare_port(Sides(*steps), EarlierSteps())
    return [row for row in rows if row.cause == "own"]


def test_pairs_and_halves_turn_alike(program, step_of):
    assert not turning_port(program, step_of, "")


def test_rows_of_each_head_in_another_order_in_all_layers(program, step_of):
    [row] = turning_port(program, step_of, "q")
    assert row.name == "layer0_q", row.evidence


# -- two layers in one tensor -------------------------------------------------------------

TWINS = {
    f"{who}_{name}": drawn(*shape, seed=70 + place)
    for who, first in (("left", 0), ("right", 3))
    for place, (name, shape) in enumerate(
        (("w1", (5, 4)), ("w2", (5, 5)), ("b2", (5,))), first
    )
}
POINT = drawn(7, 4, seed=80)


def two_networks(m, x):
    left = torch.tanh(F.linear(x, m.left_w1))
    right = torch.tanh(F.linear(x, m.right_w1))
    left = torch.tanh(F.linear(left, m.left_w2, m.left_b2))
    right = torch.tanh(F.linear(right, m.right_w2, m.right_b2))
    return left.sum(1) * right.sum(1).exp()


def at_once(m, x):
    both = torch.tanh(x.expand(2, -1, -1) @ m.one_kernels)
    both = torch.tanh(torch.baddbmm(m.two_biases, both, m.two_kernels))
    left, right = both.sum(2).unbind(0)
    return left * right.exp()


def stacked(order):
    def pair(name, sides):
        return torch.stack([TWINS[f"{side}_{name}"] for side in sides])

    return {
        "one_kernels": pair("w1", ("left", "right")).transpose(1, 2).contiguous(),
        "two_kernels": pair("w2", order).transpose(1, 2).contiguous(),
        "two_biases": pair("b2", order).unsqueeze(1),
    }


def twins_named(program, step_of, order):
    ours = step_of(program(two_networks, **TWINS), POINT, tensors=True)
    theirs = step_of(program(at_once, **stacked(order)), POINT, tensors=True)
    rows = compare_port(Sides(ours, theirs), EarlierSteps())
    return [row for row in rows if row.cause == "own"]


def test_layers_in_one_tensor_are_right(program, step_of):
    assert not twins_named(program, step_of, ("left", "right"))


def test_layers_that_stand_in_one_tensor_the_other_way_round(program, step_of):
    [row] = twins_named(program, step_of, ("right", "left"))
    assert row.name in ("two_kernels", "two_biases"), row.evidence
