"""Axes that a port adds, or works along, otherwise; and corners in another order."""

from __future__ import annotations

import torch


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {
    "a": drawn(5, 4, seed=1),
    "b": drawn(5, 4, seed=2),
    "u": drawn(5, 4, 3, seed=3),
    "d": drawn(4, 6, seed=4),
}
X = drawn(7, 5, seed=5)
PLACES = torch.arange(7)
HEADS = torch.tensor([2, 0, 5, 1, 3, 3, 4])


def scores(m, x):
    """One product of both, each with a column of ones."""
    ones = x.new_ones(len(x), 1)
    dep, head = torch.cat([x[:, :5], ones], 1), torch.cat([x[:, :3].exp(), ones], 1)
    of_both = torch.cat([m.u, m.a[:, :, None]], 2)
    of_head = torch.cat([m.b[:3].t(), x.new_zeros(4, 1)], 1)[None]
    weight = torch.cat([of_both, of_head])
    return (
        (torch.einsum("di,ilj,hj->dhl", dep, weight, head) @ m.d)
        .tanh()[PLACES, HEADS]
        .mean()
    )


def in_terms(m, x):
    dep, head = x[:, :5], x[:, :3].exp()
    both = torch.einsum("di,ilj,hj->dhl", dep, m.u, head)
    of_dep, of_head = dep @ m.a, head @ m.b[:3]
    return (
        ((both + of_dep[:, None] + of_head[None, :]) @ m.d).tanh()[PLACES, HEADS].mean()
    )


def turned_terms(m, x):
    dep, head = x[:, :5], x[:, :3].exp()
    both = torch.einsum("di,ilj,hj->dhl", dep, m.u, head)
    of_dep, of_head = dep @ m.a, head @ m.b[:3]
    return (
        ((both + of_dep[None, :] + of_head[:, None]) @ m.d).tanh()[PLACES, HEADS].mean()
    )


def test_terms_along_the_other_axis(at_fault, blamed_text):
    assert not at_fault(scores, in_terms, LEAVES, X)
    [row] = at_fault(scores, turned_terms, LEAVES, X)
    assert "where axes are added here" in row.evidence
    assert "of_dep[None, :] + of_head[:, None]" in blamed_text(row)


BOXES = drawn(9, 4, seed=6).abs() + 0.1


def corners(m, x):
    left, top, right, bottom = (x @ m.d)[:, :4].exp().unbind(1)
    width = torch.minimum(left, BOXES[:, 0]) + torch.minimum(right, BOXES[:, 2])
    height = torch.minimum(top, BOXES[:, 1]) + torch.minimum(bottom, BOXES[:, 3])
    return (width * height / (left + right + top + bottom)).log().mean()


def by_rows(m, x):
    sides = (x @ m.d)[:, [1, 0, 3, 2]].exp()
    boxes = BOXES[:, [1, 0, 3, 2]]
    top, left, bottom, right = sides.unbind(1)
    t_top, t_left, t_bottom, t_right = boxes.unbind(1)
    height = torch.minimum(top, t_top) + torch.minimum(bottom, t_bottom)
    width = torch.minimum(left, t_left) + torch.minimum(right, t_right)
    return (height * width / (left + right + top + bottom)).log().mean()


def by_columns(m, x):
    sides = (x @ m.d)[:, :4].exp()
    boxes = BOXES[:, [1, 0, 3, 2]]
    top, left, bottom, right = sides.unbind(1)
    t_top, t_left, t_bottom, t_right = boxes.unbind(1)
    height = torch.minimum(top, t_top) + torch.minimum(bottom, t_bottom)
    width = torch.minimum(left, t_left) + torch.minimum(right, t_right)
    return (height * width / (left + right + top + bottom)).log().mean()


def test_corners_in_another_order(at_fault, blamed_text):
    x = drawn(9, 4, seed=8)
    assert not at_fault(corners, by_rows, LEAVES, x)
    [row] = at_fault(corners, by_columns, LEAVES, x)
    assert "each pair" in row.evidence
    assert blamed_text(row) == "top, left, bottom, right = sides.unbind(1)"


LABELS = torch.tensor([2, 0, 4, 1, 3, 5, 2])


def normalized(m, x):
    square = (x @ m.a) @ (x @ m.b).t()
    wide = (x @ m.a) @ m.d
    picked = square.log_softmax(1)[torch.arange(7), LABELS]
    return -(picked + wide.log_softmax(1)[torch.arange(7), LABELS]).mean()


def log_softmax(x):
    shifted = x - x.amax(1, keepdim=True).detach()
    return shifted - shifted.exp().sum(1, keepdim=True).log()


def in_a_function(m, x):
    square = (x @ m.a) @ (x @ m.b).t()
    wide = (x @ m.a) @ m.d
    picked = log_softmax(square)[torch.arange(7), LABELS]
    return -(picked + log_softmax(wide)[torch.arange(7), LABELS]).mean()


def over_the_other_axis(m, x):
    square = (x @ m.a) @ (x @ m.b).t()
    wide = (x @ m.a) @ m.d
    picked = log_softmax(square.t()).t()[torch.arange(7), LABELS]
    return -(picked + log_softmax(wide)[torch.arange(7), LABELS]).mean()


def test_a_function_that_is_right_elsewhere_is_not_named(at_fault, blamed_text):
    assert not at_fault(normalized, in_a_function, LEAVES, X)
    [row] = at_fault(normalized, over_the_other_axis, LEAVES, X)
    assert blamed_text(row).startswith("picked = log_softmax(square.t()).t()")
