"""Which exchanges of a loader's are tried, and in which order."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from roundoff.compare.repairs.exchanged_leaves import _with_axes_exchanged


def leaf(key, name):
    return SimpleNamespace(key=key, row=SimpleNamespace(name=name))


def test_height_and_width_of_all_kernels_are_exchanged_first():
    """Kernels of TensorFlow lie as height, width, in, out, and a loader turns all of them."""
    kernels = [torch.randn(3, 3, 2, 4), torch.randn(3, 3, 4, 5)]
    held = [(leaf(n, f"k{n}"), kernel) for n, kernel in enumerate(kernels)]
    first = next(iter(_with_axes_exchanged(held)))
    assert {*first.tensors} == {0, 1}
    for number, kernel in enumerate(kernels):
        torch.testing.assert_close(first.tensors[number], kernel.transpose(0, 1))
    # of others it says what they would hold, and of biases that they stay
    other = torch.randn(5, 5, 1, 2)
    torch.testing.assert_close(first.made(other), other.transpose(0, 1))
    bias = torch.randn(4)
    assert first.made(bias) is bias


def test_all_parameters_of_equal_axes_go_before_some_of_them():
    held = [(leaf(n, f"w{n}"), torch.randn(4, 4)) for n in range(3)]
    counts = [len(change.tensors) for change in _with_axes_exchanged(held)]
    assert counts[0] == 3
    assert sorted(counts[1:]) == counts[1:] == [2, 2, 2]
