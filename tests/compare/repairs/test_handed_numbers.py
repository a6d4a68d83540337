"""A number that was handed to a function is named where it was handed on."""

from __future__ import annotations

import torch


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {"a": drawn(5, 8, seed=1), "b": drawn(4, 4, seed=2)}
X = drawn(3, 8, 5, seed=3)


def reference(m, x):
    h = x @ m.a
    h = torch.tanh(h[..., :4]) * torch.sigmoid(h[..., 4:])
    return (torch.tanh(h[:, :6] @ m.b) + h[:, 2:]).square().mean()


def slice_axis(data, axis, begin, length):
    return torch.narrow(data, axis, begin, length)


def port(m, x):
    h = torch.tensordot(x, m.a, dims=1)
    values = slice_axis(h, -1, 0, 4)
    gates = slice_axis(h, -1, 4, 4)
    h = torch.tanh(values) * torch.sigmoid(gates)
    early = slice_axis(h, 1, 0, 6)
    late = slice_axis(h, 1, 2, 6)
    return ((torch.tanh(torch.tensordot(early, m.b, dims=1)) + late) ** 2).mean()


def with_other_rows(m, x):
    h = torch.tensordot(x, m.a, dims=1)
    values = slice_axis(h, -1, 0, 4)
    gates = slice_axis(h, -1, 4, 4)
    h = torch.tanh(values) * torch.sigmoid(gates)
    early = slice_axis(h, 1, 0, 6)
    late = slice_axis(h, 1, 1, 6)
    return ((torch.tanh(torch.tensordot(early, m.b, dims=1)) + late) ** 2).mean()


def last_rows(data, length):
    begin = data.shape[1] - length - 1
    return torch.narrow(data, 1, begin, length)


def with_a_wrong_function(m, x):
    h = torch.tensordot(x, m.a, dims=1)
    values = slice_axis(h, -1, 0, 4)
    gates = slice_axis(h, -1, 4, 4)
    h = torch.tanh(values) * torch.sigmoid(gates)
    early = slice_axis(h, 1, 0, 6)
    late = last_rows(h, 6)
    return ((torch.tanh(torch.tensordot(early, m.b, dims=1)) + late) ** 2).mean()


def test_the_port_is_right(at_fault):
    assert not at_fault(reference, port, LEAVES, X)


def test_the_line_that_hands_a_number_on_is_named(at_fault, blamed_text):
    [row] = at_fault(reference, with_other_rows, LEAVES, X)
    assert blamed_text(row) == "late = slice_axis(h, 1, 1, 6)"


def test_a_number_that_a_function_works_out_is_its_own(at_fault, blamed_text):
    [row] = at_fault(reference, with_a_wrong_function, LEAVES, X)
    assert blamed_text(row) == "return torch.narrow(data, 1, begin, length)"
