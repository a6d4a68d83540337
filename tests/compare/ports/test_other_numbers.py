"""What a port makes ready itself: pixels by other numbers, lengths that lack one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


def drawn(*shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * scale


LEAVES = {
    "a": drawn(6, 1, 3, 3, seed=1, scale=0.5),
    "b": drawn(6, 6, seed=2, scale=0.5),
    "c": drawn(5, 6, seed=3, scale=0.5),
}
IMAGES = torch.randint(256, (3, 4, 12), generator=torch.Generator().manual_seed(4))
WIDTHS = torch.tensor([12, 7, 9])


@pytest.fixture
def own(at_fault):
    """``own(port)``: the rows at fault of a port."""
    return lambda port: at_fault(reference, port, LEAVES, IMAGES, WIDTHS)


def reference(m, images, widths):
    x = (images.unsqueeze(1).float() / 255 - 0.5) / 0.5
    behind = torch.arange(x.shape[3]) >= widths.view(-1, 1, 1, 1)
    x = F.relu(F.conv2d(x.masked_fill(behind, 0.0), m.a, padding=1)).mean(2)
    x = F.max_pool1d(x, 2, 1, padding=1)[:, :, ::2]
    steps = widths // 2 + 1
    held = torch.zeros(len(x), 6)
    outputs = []
    for t, x_t in enumerate(x.unbind(2)):
        held = torch.where((t < steps)[:, None], torch.tanh(x_t + held @ m.b), held)
        outputs.append(held)
    scores = F.linear(torch.stack(outputs).mean(0), m.c)
    return (scores / steps[:, None]).square().mean()


def to_the_end(places, lengths):
    return places < lengths


def port(
    *,
    mean=0.5,
    deviation=0.5,
    steps=lambda widths: (widths + 2) // 2,
    inside=to_the_end,
):
    """Each image by itself on a canvas; a mask of all turns, made before them."""

    def run(m, images, widths):
        canvas = torch.zeros(len(images), 1, *images.shape[1:])
        for i, w in enumerate(widths.tolist()):
            line = images[i, :, :w].float() * (1 / 255)
            line = line.sub(mean)
            line = line.div(deviation)
            canvas[i, 0, :, :w] = line
        x = F.conv2d(canvas, m.a, padding=1).clamp_min(0).mean(2)
        x = F.max_pool1d(x, 2, 1, padding=1)[:, :, ::2].permute(2, 0, 1)
        mask = inside(torch.arange(len(x))[:, None], steps(widths)).float().unsqueeze(2)
        held = torch.zeros(len(images), 6)
        total = 0.0
        for x_t, is_there in zip(x, mask, strict=True):
            new = 2 * torch.sigmoid(2 * (x_t + held @ m.b)) - 1
            held = is_there * new + (1 - is_there) * held
            total = total + held
        scores = (total / len(x)) @ m.c.t() / steps(widths).unsqueeze(1)
        return (scores * scores).sum() / scores.numel()

    return run


def test_a_right_port_agrees(own):
    assert not own(port())


def test_the_first_number_that_the_reference_has_not_is_named(own, blamed_text):
    [row] = own(port(mean=0.485, deviation=0.229))
    assert blamed_text(row) == "line = line.sub(mean)"
    assert (
        row.evidence
        == "it takes 0.485, which is no number of the reference's: 255, 0.5"
    )
    assert row.looks_like == "wrong constant"


def half(widths):
    return widths // 2


def test_lengths_that_lack_one_are_named(own, blamed_text):
    [row] = own(port(steps=half))
    assert blamed_text(row) == "return widths // 2"
    assert "with add of " in row.evidence


def one_too_many(places, lengths):
    return places <= lengths


def test_a_comparison_that_counts_one_too_many_is_named(own, blamed_text):
    [row] = own(port(inside=one_too_many))
    assert blamed_text(row) == "return places <= lengths"
    assert row.evidence == "as lt, not le, all that follows is right"
