"""What is named where a function is wrong in several places, and no repair of one is enough."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

NAMES = ("a", "b", "c")


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    f"{name}{i}": drawn(6, 6, seed=3 * i + j)
    for i in range(4)
    for j, name in enumerate(NAMES)
}
X = drawn(9, 6, seed=9)
SHARE = torch.tensor([0.3, 0.7])


def reference(m, x):
    def mean(x, i):
        return torch.stack([x @ getattr(m, f"{n}{i}") for n in NAMES], -1).mean(-1)

    for layer in (0, 2):
        turns = [mean(F.gelu(mean(x[:, order], layer)), layer + 1) for order in ORDERS]
        x = (torch.stack(turns, -1) * SHARE).sum(-1) + x
    return x.square().mean()


ORDERS = ([0, 1, 2, 3, 4, 5], [3, 1, 5, 0, 2, 4])


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def averaged(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total / len(parts)


def summed(parts):
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def port_with(joined):
    def port(m, x):
        def of_all(x, i):
            return joined(
                [torch.einsum("ni,io->no", x, getattr(m, f"{n}{i}")) for n in NAMES]
            )

        for layer in (0, 2):
            out = x
            for order, share in zip(ORDERS, SHARE, strict=True):
                h = F.gelu(of_all(x[:, order], layer))
                out = out + of_all(h, layer + 1) * share
            x = out
        return (x**2).mean()

    return port


def test_the_port_is_right(at_fault):
    assert not at_fault(reference, port_with(averaged), LEAVES, X)


def test_the_rest_of_a_call_that_is_left_out_is_named(at_fault):
    [row] = at_fault(reference, port_with(summed), LEAVES, X)
    assert "left out is" in row.evidence
    assert "of /mean" in row.evidence
