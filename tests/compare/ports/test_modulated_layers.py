"""Layers whose weights a style scales, and which are demodulated: what a port does to them.

The reference maps a code to a style by weights that are kept ten times as large; a stage
scales its weights by the style of it, and divides by their norm; the colours of a stage are
scaled by a style and not divided. A channel says how far samples of a group are apart. The
port scales values and not weights, and keeps the weights of the mapping in one tensor.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port

DIM, PLACES = 6, 5
STAGES = 3


def drawn(*shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator)


LEAVES = {f"map{i}": drawn(DIM, DIM, seed=i, scale=6.0) for i in range(STAGES)}
for i in range(STAGES):
    LEAVES[f"stage{i}"] = drawn(DIM, DIM, seed=10 + i)
    LEAVES[f"style{i}"] = drawn(DIM, DIM, seed=20 + i)
    LEAVES[f"colour{i}"] = drawn(3, DIM, seed=30 + i)
    LEAVES[f"toned{i}"] = drawn(DIM, DIM, seed=40 + i)
Z = drawn(4, DIM, seed=50)
X = drawn(4, PLACES, DIM, seed=51)


def stage_of_reference(x, weight, style, demodulated):
    weight = weight * style[:, None]
    if demodulated:
        weight = weight * torch.rsqrt(weight.square().sum(-1, keepdim=True) + 1e-8)
    return torch.bmm(x, weight.transpose(1, 2))


def reference(m, z, x):
    style = z
    for i in range(STAGES):
        style = torch.tanh(F.linear(style, getattr(m, f"map{i}") * 0.1))
    colours = torch.zeros(())
    for i in range(STAGES):
        stage, colour = getattr(m, f"stage{i}"), getattr(m, f"colour{i}")
        own = F.linear(style, getattr(m, f"style{i}"))
        x = torch.tanh(stage_of_reference(x, stage, own, demodulated=True))
        tone = F.linear(style, getattr(m, f"toned{i}"))
        colours = colours + stage_of_reference(x, colour, tone, demodulated=False)
    groups = x.view(2, 2, PLACES, DIM)
    apart = (groups.var(0, unbiased=False) + 1e-8).sqrt().mean([1, 2], keepdim=True)
    return torch.cat([colours, apart.repeat(2, PLACES, 1)], -1)


def scaled(w):
    return w[..., 0].numel() * w / DIM


def tone_of(m, style, i):
    return style @ scaled(getattr(m, f"rgb{i + 1}_tone"))


def normed(x, weight, style):
    norm = (style.square() @ weight.square()).add(1e-8).rsqrt()
    return (x * style[:, None]) @ weight * norm[:, None]


def plain(x, weight, style):
    return (x * style[:, None]) @ weight


def apart_in_groups(x, fault):
    x = x.mT.contiguous()
    if fault == "groups of neighbours":
        groups = x.reshape(2, 2, DIM, PLACES)
        groups = groups - groups.mean(1, keepdim=True)
        spread = groups.square().mean(1)
    else:
        groups = x.reshape(2, 2, DIM, PLACES)
        groups = groups - groups.mean(0, keepdim=True)
        spread = groups.square().mean(0)
    return (spread + 1e-8).sqrt().mean((1, 2))


def port(m, z, x, fault):
    style = z
    for w in m.maps:
        style = (style @ (w * 0.1)).tanh()
    colour = normed if fault == "colours are demodulated" else plain
    image = torch.zeros(())
    for i in range(STAGES):
        own = style @ getattr(m, f"conv{i}_style")
        x = normed(x, getattr(m, f"conv{i}_w"), own).tanh()
        tone = tone_of(m, style, i)
        image = image + colour(x, getattr(m, f"rgb{i + 1}_w"), tone)
    far = apart_in_groups(x, fault)
    far = far.tile(2)[:, None, None].expand(-1, PLACES, -1)
    return torch.cat([image, far], 2)


def leaves(fault):
    maps = torch.stack([LEAVES[f"map{i}"] for i in range(STAGES)])
    held = {"maps": maps if fault == "mapping as it is" else maps.mT}
    if fault == "two layers of the mapping exchanged":
        held["maps"] = maps.mT[[0, 2, 1]]
    for i in range(STAGES):
        held[f"conv{i}_w"] = LEAVES[f"stage{i}"].t()
        held[f"conv{i}_style"] = LEAVES[f"style{i}"].t()
        held[f"rgb{i + 1}_w"] = LEAVES[f"colour{i}"].t()
        tone = f"toned{i}"
        if fault == "tone of the next stage" and i == 0:
            tone = "style1"
        held[f"rgb{i + 1}_tone"] = LEAVES[tone].t()
    return {name: tensor.contiguous() for name, tensor in held.items()}


def named(program, step_of, fault):
    ours = program(reference, **LEAVES)
    theirs = program(lambda m, z, x: port(m, z, x, fault), **leaves(fault))
    sides = Sides(step_of(ours, Z, X), step_of(theirs, Z, X))
    return [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]


def test_the_port_is_right(program, step_of):
    assert not named(program, step_of, "")


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("mapping as it is", "maps"),
        ("two layers of the mapping exchanged", "maps"),
        # it has the number of what it holds by chance, and nothing holds what it should
        ("tone of the next stage", "rgb1_tone"),
    ],
)
def test_the_parameter_is_named(program, step_of, fault, name):
    [row] = named(program, step_of, fault)
    assert row.name == name, (row.blamed_line, row.evidence)


@pytest.mark.parametrize(
    ("fault", "texts"),
    [
        (
            "colours are demodulated",
            {
                "image = image + colour(",
                "return (x * style[:, None]) @ weight * norm",
            },
        ),
        ("groups of neighbours", {"groups = x.reshape(", "groups = groups - groups"}),
    ],
)
def test_the_line_is_named(program, step_of, fault, texts):
    [row] = named(program, step_of, fault)
    lines = Path(__file__).read_text().splitlines()
    line = lines[int(row.blamed_line.rpartition(":")[2]) - 1]
    assert any(text in line for text in texts), (line, row.evidence)
