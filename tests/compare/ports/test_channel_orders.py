"""Ports that hold channels, and the axes of kernels, in orders of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


MEANS = (123, 117, 104)
LEAVES = {
    "first": drawn(5, 3, 3, 3, seed=1) / 5,
    "second": drawn(6, 5, 3, 3, seed=2) / 6,
    "third": drawn(4, 6, 3, 3, seed=3) / 7,
    "head": drawn(3, 4, seed=4),
}
IMAGE = (drawn(2, 3, 9, 8, seed=5) * 60 + 120).clamp(0, 255).round()


def reference(m, image):
    x = (image - torch.tensor(MEANS).view(3, 1, 1)) / 64
    for kernel in (m.first, m.second, m.third):
        x = F.relu(F.conv2d(x, kernel, padding=1))
    return F.linear(x.mean((2, 3)), m.head)


def backwards(m, image, means):
    mean = torch.tensor(means)[:, None, None]
    bgr = image[:, [2, 1, 0]]
    x = (bgr - mean) / 64
    for kernel in (m.first, m.second, m.third):
        windows = F.unfold(x, 3, padding=1)
        x = (kernel.flatten(1) @ windows).clamp(min=0).unflatten(2, image.shape[2:])
    return torch.einsum("bchw,oc->bo", x, m.head) / (x.shape[2] * x.shape[3])


def channels_last(m, image):
    x = (image.permute(0, 2, 3, 1) - torch.tensor(MEANS)) / 64
    for kernel in (m.first, m.second, m.third):
        x = F.conv2d(x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1), padding=1)
        x = x.permute(0, 2, 3, 1).clamp(min=0)
    return x.mean((1, 2)) @ m.head.t()


def named(program, step_of, port, leaves):
    ours = program(reference, **LEAVES)
    theirs = program(port, **leaves)
    sides = Sides(step_of(ours, IMAGE), step_of(theirs, IMAGE))
    return [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]


def text(line):
    lines = Path(__file__).read_text().splitlines()
    return lines[int(line.rpartition(":")[2]) - 1]


TURNED = {**LEAVES, "first": LEAVES["first"].flip(1)}
RIGHT = MEANS[::-1]


def test_channels_may_stand_backwards(program, step_of):
    port = lambda m, image: backwards(m, image, RIGHT)  # noqa: E731 - one line is enough
    assert not named(program, step_of, port, TURNED)


def test_means_in_the_order_of_the_reference_are_named(program, step_of):
    [row] = named(program, step_of, lambda m, x: backwards(m, x, MEANS), TURNED)
    assert "mean = torch.tensor" in text(row.blamed_line)
    assert "with [104, 117, 123] all results are right" in row.evidence


def test_a_kernel_in_the_order_of_the_reference_is_named_with_the_data(
    program, step_of
):
    """Either may be turned: the data's line is named, and not where both are read."""
    [row] = named(program, step_of, lambda m, x: backwards(m, x, RIGHT), LEAVES)
    assert row.name == "first" or "bgr = image" in text(row.blamed_line)


@pytest.mark.parametrize("wrong", [(), ("first", "second")])
def test_height_and_width_of_some_kernels_exchanged(wrong, program, step_of):
    leaves = {
        name: each.permute((3, 2, 1, 0) if name in wrong else (2, 3, 1, 0))
        for name, each in LEAVES.items()
        if each.dim() == 4
    }
    rows = named(program, step_of, channels_last, {**LEAVES, **leaves})
    assert [row.evidence.split()[0] in wrong for row in rows] == [True] * bool(wrong)


# -- maps that are laid one behind the other -------------------------------------------


def heads(m, image):
    maps = [
        F.conv2d(x, m.first, padding=1) for x in (image, F.avg_pool2d(image, (3, 2)))
    ]
    rows = torch.cat([x.permute(0, 2, 3, 1).flatten(1) for x in maps], 1)
    rows = rows.view(len(image), -1, 5)
    return torch.tanh(rows[:, 1:] - rows[:, :-1])


def heads_of_layers(m, image, order):
    small = image.unflatten(3, (4, 2)).unflatten(2, (3, 3)).mean((3, 5))
    parts = []
    for x in (image, small):
        windows = F.unfold(x, 3, padding=1)
        x = (m.first.flatten(1) @ windows).unflatten(2, x.shape[2:])
        turned = x.permute(order)
        parts.append(turned.flatten(1))
    rows = torch.cat(parts, 1)
    rows = rows.view(len(image), -1, 5)
    steps = rows[:, 1:] - rows[:, :-1]
    return 2 * torch.sigmoid(2 * steps) - 1


@pytest.mark.parametrize("order", [(0, 2, 3, 1), (0, 3, 2, 1)])
def test_maps_that_are_joined_lie_as_in_the_reference(order, program, step_of):
    """Alone each may be laid out as it likes: with columns before rows none is wrong."""
    ours = program(heads, first=LEAVES["first"])
    theirs = program(lambda m, x: heads_of_layers(m, x, order), first=LEAVES["first"])
    sides = Sides(step_of(ours, IMAGE), step_of(theirs, IMAGE))
    rows = [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]
    lines = [text(row.blamed_line).strip() for row in rows]
    assert lines == ["turned = x.permute(order)"] * (order != (0, 2, 3, 1))


# -- one of several alike that is not masked -------------------------------------------

VIEWS = {"a": drawn(6, 4, seed=6), "b": drawn(6, 4, seed=7)}
NEVER = 1e9


def contrast(m, weight):
    z = F.normalize(torch.cat([m.a, m.b]) * weight, dim=1)
    scores = (z @ z.t() / 0.5).masked_fill(torch.eye(12, dtype=torch.bool), -torch.inf)
    return F.cross_entropy(scores, (torch.arange(12) + 6) % 12, reduction="none")


def in_blocks(m, weight, *, is_masked):
    a, b = (v * weight for v in (m.a, m.b))
    a, b = (v / v.square().sum(1, keepdim=True).sqrt() for v in (a, b))
    mask = torch.eye(6) * NEVER
    aa = a @ b.t() / 0.5, a @ a.t() / 0.5 - mask
    bb = b @ b.t() / 0.5
    if is_masked:
        bb = bb - mask
    losses = []
    for pair in (aa, (b @ a.t() / 0.5, bb)):
        right = pair[0].diagonal()
        losses.append(torch.logsumexp(torch.cat(pair, 1), 1) - right)
    return torch.cat(losses)


def test_a_block_that_is_not_masked_as_the_other_is(program, step_of):
    weight = 1 + drawn(4, seed=8) ** 2

    def rows(is_masked):
        port = program(lambda m, w: in_blocks(m, w, is_masked=is_masked), **VIEWS)
        ours = program(contrast, **VIEWS)
        sides = Sides(step_of(ours, weight), step_of(port, weight))
        return [r for r in compare_port(sides, EarlierSteps()) if r.cause == "own"]

    assert not rows(True)
    [row] = rows(False)
    assert "bb = b @ b.t() / 0.5" in text(row.blamed_line), row.evidence
    assert "followed by sub" in row.evidence
