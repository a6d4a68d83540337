"""One layer that does what several of the reference do, and whose result is cut."""

from __future__ import annotations

import pytest
import torch


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X = drawn(9, 6, seed=1)
LEAVES = {
    "long": drawn(16, 6, seed=2),
    "short": drawn(8, 6, seed=3),
    "of_long": drawn(8, 16, seed=4),
    "last": drawn(3, 8, seed=5),
    "joint": torch.cat([drawn(16, 6, seed=2), drawn(8, 6, seed=3)]),
}


def reference(m, x):
    long = torch.tanh(x @ m.long.t())
    short = torch.tanh(x @ m.short.t())
    return (long @ m.of_long.t() + short.square()) @ m.last.t()


def joined(m, x):
    return torch.tanh(torch.einsum("bi,oi->bo", x, m.joint))


def ended(m, long, short):
    mixed = torch.einsum("bi,oi->bo", long, m.of_long) + short * short
    return torch.einsum("bi,oi->bo", mixed, m.last)


def right(m, x):
    y = joined(m, x)
    return ended(m, y[:, :16], y[:, 16:])


def mixing(m, x):
    y = joined(m, x)
    short, long = y.split([8, 16], 1)  # wrong
    return ended(m, long, short)


def from_the_front(m, x):
    y = joined(m, x)
    long = y[:, :16]
    short = y[:, :8]  # wrong
    return ended(m, long, short)


def scaled(m, x):
    y = joined(m, x)
    short = 1.5 * y[:, 16:]  # wrong
    return ended(m, y[:, :16], short)


def test_what_is_cut_rightly_agrees(at_fault):
    assert not at_fault(reference, right, LEAVES, X)


@pytest.mark.parametrize(
    ("port", "words"),
    [
        # with another order of the parameter all is right too
        (mixing, "takes what is computed with it apart so"),
        (from_the_front, "takes another part"),
    ],
)
def test_a_cut_that_takes_another_part_is_named(at_fault, blamed_text, port, words):
    row = at_fault(reference, port, LEAVES, X)[0]
    assert blamed_text(row).endswith("# wrong")
    assert words in row.evidence


def test_what_is_wrong_behind_a_right_cut_is_no_cut(at_fault, blamed_text):
    row = at_fault(reference, scaled, LEAVES, X)[0]
    assert blamed_text(row).endswith("# wrong")
    assert "takes another part" not in row.evidence
