"""What a loader did wrong in every layer, where names and shapes differ from layer to layer."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port
from roundoff.compare.repairs.alike_leaves import leaves_alike


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


WEIGHTS = {
    "depth1_weight": drawn(6, 1, 3, 3, seed=1),
    "norm1_weight": drawn(6, seed=2) + 2,
    "norm1_bias": drawn(6, seed=3),
    "point": drawn(10, 6, seed=4),
    "depth2_weight": drawn(10, 1, 5, 5, seed=5),
    "norm2_weight": drawn(10, seed=6) + 2,
    "norm2_bias": drawn(10, seed=7),
    "wider": drawn(12, 10, seed=10),
    "depth3_weight": drawn(12, 1, 3, 3, seed=11),
    "norm3_weight": drawn(12, seed=12) + 2,
    "norm3_bias": drawn(12, seed=13),
    "last": drawn(4, 12, seed=8),
}
IMAGE = drawn(3, 6, 7, 7, seed=9)


def reference(m, x):
    x = F.conv2d(x, m.depth1_weight, padding=1, groups=6)
    x = F.relu(F.batch_norm(x, None, None, m.norm1_weight, m.norm1_bias, True))
    x = F.conv2d(x, m.point[:, :, None, None])
    x = F.conv2d(x, m.depth2_weight, padding=2, groups=10)
    x = F.relu(F.batch_norm(x, None, None, m.norm2_weight, m.norm2_bias, True))
    x = F.conv2d(x, m.wider[:, :, None, None])
    x = F.conv2d(x, m.depth3_weight, padding=1, groups=12)
    x = F.relu(F.batch_norm(x, None, None, m.norm3_weight, m.norm3_bias, True))
    return F.linear(x.mean((2, 3)), m.last)


def loaded(fault):
    held = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    for name, layer in (("early", 1), ("wide", 2), ("late", 3)):
        taps = held.pop(f"depth{layer}_weight").flatten(1)
        held[f"{name}_taps"] = taps.t().contiguous()
        shift = held.pop(f"norm{layer}_bias")
        held[f"{name}_shift"] = shift * 0 if fault == "not loaded" else shift
    return held


def by_taps(x, taps, fault):
    size = int(len(taps) ** 0.5)
    padded = F.pad(x, [size // 2] * 4)
    total = 0.0
    for row in range(size):
        for column in range(size):
            tap = column * size + row if fault == "columns" else row * size + column
            moved = padded[:, :, row : row + 7, column : column + 7]
            total = total + moved * taps[tap][:, None, None]
    return total


def normed(x, scale, shift):
    x = x - x.mean((0, 2, 3), keepdim=True)
    x = x / (x.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
    return x * scale[:, None, None] + shift[:, None, None]


def port(m, x, fault):
    x = by_taps(x, m.early_taps, fault)
    x = normed(x, m.norm1_weight, m.early_shift).clamp(min=0)
    x = torch.einsum("nchw,dc->ndhw", x, m.point)
    x = by_taps(x, m.wide_taps, fault)
    x = normed(x, m.norm2_weight, m.wide_shift).clamp(min=0)
    x = torch.einsum("nchw,dc->ndhw", x, m.wider)
    x = by_taps(x, m.late_taps, fault)
    x = normed(x, m.norm3_weight, m.late_shift).clamp(min=0)
    return torch.einsum("ndhw,kd->nk", x, m.last) / 49


def named(program, step_of, fault):
    ours = program(reference, **WEIGHTS)
    theirs = program(lambda m, x: port(m, x, fault), **loaded(fault))
    steps = step_of(ours, IMAGE, tensors=True), step_of(theirs, IMAGE, tensors=True)
    rows = compare_port(Sides(*steps), EarlierSteps())
    return [row for row in rows if row.cause == "own"]


def test_the_port_is_right(program, step_of):
    assert not named(program, step_of, "")


@pytest.mark.parametrize(
    ("fault", "parameter", "words"),
    [
        ("columns", "early_taps", "depth1_weight with its axes in the order"),
        ("not loaded", "early_shift", "norm1_bias set to zero"),
    ],
)
def test_the_parameter_of_the_first_layer_is_named(
    program, step_of, fault, parameter, words
):
    [row] = named(program, step_of, fault)
    assert row.name == parameter, row.evidence
    assert words in row.evidence


def by_name(flow):
    return {v.row.name: v for v in flow.values.values() if v.row.name}


def held_by(sides, leaves):
    return {sides.candidate.values[key].row.name: t for key, t in leaves.items()}


def test_axes_are_turned_in_all_layers(program, sides_of):
    port_ = program(lambda m, x: port(m, x, ""), **loaded(""))
    sides = sides_of(program(reference, **WEIGHTS), port_, IMAGE)
    leaf = by_name(sides.candidate)["early_taps"]
    wanted = by_name(sides.reference)["depth1_weight"]
    other = WEIGHTS["depth1_weight"].permute(3, 2, 0, 1).reshape(9, 6)
    [leaves] = leaves_alike(sides, leaf, wanted, other)
    moved = held_by(sides, leaves)
    assert sorted(moved) == ["early_taps", "late_taps", "wide_taps"]
    wide = WEIGHTS["depth2_weight"].permute(3, 2, 0, 1).reshape(25, 10)
    assert torch.equal(moved["wide_taps"], wide)


def test_what_was_not_loaded_is_loaded_in_all_layers(program, sides_of):
    port_ = program(lambda m, x: port(m, x, ""), **loaded("not loaded"))
    sides = sides_of(program(reference, **WEIGHTS), port_, IMAGE)
    leaf = by_name(sides.candidate)["early_shift"]
    wanted = by_name(sides.reference)["norm1_bias"]
    [leaves] = leaves_alike(sides, leaf, wanted, WEIGHTS["norm1_bias"])
    given = held_by(sides, leaves)
    for name, layer in (("early", 1), ("wide", 2), ("late", 3)):
        assert torch.equal(given[f"{name}_shift"], WEIGHTS[f"norm{layer}_bias"])
