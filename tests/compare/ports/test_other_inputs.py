"""A layer or a loss that reads another value than it should, and a ratio of other numbers.

The reference is an autoencoder of pictures: its encoder reads them from -1 to 1, its loss
from 0 to 1.
"""

from __future__ import annotations

import linecache

import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port

COUNT, SIZE, CHANNELS = 2, 12, 4


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "down": drawn(CHANNELS, 1, 4, 4, seed=1),
    "gain": drawn(CHANNELS, seed=2) + 2,
    "shift": drawn(CHANNELS, seed=3),
    "up": drawn(1, CHANNELS, 3, 3, seed=4),
    "bias": drawn(1, seed=5),
}
PICTURES = torch.randint(
    0, 256, (COUNT, 1, SIZE, SIZE), generator=torch.Generator().manual_seed(6)
).float()


def reference(m, pictures):
    x = pictures / 255
    h = F.conv2d(2 * x - 1, m.down, stride=2, padding=1)
    h = F.relu(F.batch_norm(h, None, None, m.gain, m.shift, training=True))
    h = F.avg_pool2d(h, 4, ceil_mode=True, count_include_pad=False)
    h = F.interpolate(h, scale_factor=6, mode="nearest")
    logits = F.conv2d(h, m.up, m.bias, padding=1)
    return F.binary_cross_entropy_with_logits(logits, x)


def convolved(x, kernel, stride):
    """Both results have as many elements."""
    kernel = kernel.permute(0, 2, 3, 1).flatten(1)
    size = 4 if stride == 2 else 3
    windows = F.pad(x, (1, 1, 1, 1)).unfold(2, size, stride).unfold(3, size, stride)
    rows = windows.permute(0, 2, 3, 4, 5, 1).flatten(3)
    return torch.einsum("nhwk,ok->nohw", rows, kernel)


def signed(pictures):
    return (pictures - 127.5) / 127.5


def port(m, pictures, *, encoder_reads=None, loss_reads=None, count=None):
    x = pictures / 255
    h = (encoder_reads or signed)(pictures)
    h = convolved(h, m.down, 2)
    mean = h.mean((0, 2, 3), keepdim=True)
    var = h.square().mean((0, 2, 3), keepdim=True) - mean.square()
    h = (h - mean) * (var + 1e-5).rsqrt()
    h = (h * m.gain[:, None, None] + m.shift[:, None, None]).clamp(min=0)
    total = F.pad(h, (0, 2, 0, 2)).unfold(2, 4, 4).unfold(3, 4, 4).sum((4, 5))
    inside = F.pad(torch.ones_like(h), (0, 2, 0, 2))
    inside = inside.unfold(2, 4, 4).unfold(3, 4, 4).sum((4, 5))
    h = total / (inside if count is None else count)
    h = h.repeat_interleave(6, 2).repeat_interleave(6, 3)
    logits = convolved(h, m.up, 1) + m.bias
    target = loss_reads(pictures) if loss_reads else x
    surprise = torch.logaddexp(logits, torch.zeros_like(logits)).sum()
    surprise = surprise - torch.einsum("nchw,nchw->", logits, target)
    return surprise / logits.numel()


def named(program, step_of, **faults):
    ours = program(reference, **LEAVES)
    theirs = program(lambda m, x: port(m, x, **faults), **LEAVES)
    sides = Sides(
        step_of(ours, PICTURES, tensors=True), step_of(theirs, PICTURES, tensors=True)
    )
    return [row for row in compare_port(sides, EarlierSteps()) if row.cause == "own"]


def line_of(row):
    return linecache.getline(__file__, int(row.blamed_line.rpartition(":")[2])).strip()


def test_the_port_is_right(program, step_of):
    assert not named(program, step_of)


def test_a_scale_that_is_left_out_before_a_normalization(program, step_of):
    """The normalization hides nearly all of it; the loss reads the value rightly."""
    [row] = named(program, step_of, encoder_reads=lambda pictures: pictures / 255)
    assert line_of(row) == "h = convolved(h, m.down, 2)"
    assert "left out" in row.evidence


def test_a_value_that_is_read_where_another_is_meant(program, step_of):
    """It has a counterpart, and the loss is one number."""
    [row] = named(program, step_of, loss_reads=signed)
    assert "einsum" in line_of(row)
    assert "it should read what div of" in row.evidence


def test_a_ratio_that_needs_another_number_at_each_place(program, step_of):
    [row] = named(program, step_of, count=16)
    assert line_of(row) == "h = total / (inside if count is None else count)"
    assert "a factor for each index" in row.evidence
