"""A layer that reads what another layer of its kind reads, not what that one makes."""

from __future__ import annotations

import linecache

import pytest
import torch
import torch.nn.functional as F

CHANNELS, HEIGHT, WIDTH = 4, 6, 8


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "lateral": drawn(CHANNELS, 3, 1, 1, seed=1),
    "smooth": drawn(CHANNELS, CHANNELS, 3, 3, seed=2),
    "extra": drawn(CHANNELS, CHANNELS, 3, 3, seed=3),
    "head": drawn(2, CHANNELS, 3, 3, seed=4),
}
MAPS = drawn(2, 3, HEIGHT, WIDTH, seed=5)


def reference(m, maps):
    smooth = F.conv2d(F.conv2d(maps, m.lateral), m.smooth, padding=1)
    extra = F.conv2d(smooth, m.extra, padding=1)
    heads = [F.conv2d(x, m.head, padding=1) for x in (smooth, extra)]
    return torch.cat([x.permute(0, 2, 3, 1).flatten(1) for x in heads], 1).tanh().mean()


def port(read):
    """The head takes both maps at once, as rows."""

    def run(m, maps):
        side = F.conv2d(maps, m.lateral)
        smooth = F.conv2d(side, m.smooth, padding=1)
        extra = F.conv2d(read(side, smooth), m.extra, padding=1)
        rows = torch.cat([F.unfold(x, 3, padding=1) for x in (smooth, extra)], 2)
        return (m.head.flatten(1) @ rows).tanh().mean()

    return run


@pytest.fixture
def own(at_fault):
    """``own(port)``: the rows at fault of a port."""
    return lambda port: at_fault(reference, port, LEAVES, MAPS)


def test_the_port_is_right(own):
    assert not own(port(lambda side, smooth: smooth))


def test_a_layer_that_reads_what_the_one_before_reads(own):
    [row] = own(port(lambda side, smooth: side))
    number = int(row.blamed_line.rpartition(":")[2])
    assert "extra = F.conv2d(read(side, smooth)" in linecache.getline(__file__, number)
    assert "it should read what convolution" in row.evidence
