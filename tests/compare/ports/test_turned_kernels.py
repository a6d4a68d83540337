"""Kernels of transposed convolutions that a loader of another framework has to turn.

The port puts zeros between the pixels and convolves, one sample of each set after the other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.ports.port_comparison import compare_port

SETS, SAMPLES = 3, 4


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "first": drawn(5, 6, 3, 3, seed=1),
    "second": drawn(6, 2, 5, 5, seed=2),
    "shift": drawn(6, seed=3),
}
X = drawn(SETS, SAMPLES, 5, 3, 4, seed=4)


def reference(m, x):
    x = F.conv_transpose2d(
        x.flatten(0, 1), m.first, m.shift, stride=2, padding=1, output_padding=1
    )
    x = F.conv_transpose2d(
        torch.relu(x), m.second, stride=2, padding=2, output_padding=1
    )
    return torch.tanh(x).unflatten(0, (SETS, SAMPLES)).mean(1)


def leaves(*, turned):
    axes = (0, 1) if turned else ()
    return {
        "kernel_0": LEAVES["first"].permute(2, 3, 0, 1).flip(axes).contiguous(),
        "kernel_1": LEAVES["second"].permute(2, 3, 0, 1).flip(axes).contiguous(),
        "bias": LEAVES["shift"],
    }


def spread(x):
    """A row of zeros after each row, a column after each column; (n, h, w, channels)."""
    x = torch.stack([x, torch.zeros_like(x)], 2).flatten(1, 2)
    return torch.stack([x, torch.zeros_like(x)], 3).flatten(2, 3)


def convolved(x, kernel):
    margin = len(kernel) // 2
    x = F.pad(spread(x), (0, 0, margin, margin, margin, margin))
    y = F.conv2d(x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1))
    return y.permute(0, 2, 3, 1)


def port(m, x):
    results = []
    for sample in range(SAMPLES):
        one = convolved(x[:, sample].permute(0, 2, 3, 1), m.kernel_0) + m.bias
        results.append(torch.tanh(convolved(one.clamp(min=0), m.kernel_1)))
    return torch.stack(results).mean(0)


def named(program, step_of, *, turned):
    sides = Sides(
        step_of(program(reference, **LEAVES), X, tensors=True),
        step_of(program(port, **leaves(turned=turned)), X, tensors=True),
    )
    rows = compare_port(sides, EarlierSteps())
    return [row for row in rows if row.cause == "own"]


def test_turned_kernels_are_right(program, step_of):
    assert not named(program, step_of, turned=True)


def test_kernels_that_are_not_turned(program, step_of):
    [row] = named(program, step_of, turned=False)
    assert row.name == "kernel_0"
    assert "backwards along axes [0, 1]" in row.evidence


def test_one_kernel_alone_that_is_not_turned(program, step_of):
    held = leaves(turned=True)
    held["kernel_1"] = held["kernel_1"].flip(0, 1).contiguous()
    sides = Sides(
        step_of(program(reference, **LEAVES), X, tensors=True),
        step_of(program(port, **held), X, tensors=True),
    )
    [row] = [r for r in compare_port(sides, EarlierSteps()) if r.cause == "own"]
    assert row.name == "kernel_1"
