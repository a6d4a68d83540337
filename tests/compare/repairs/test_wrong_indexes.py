"""Whole numbers and masks that a port computes itself: what moves them wrongly is named."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {"a": drawn(5, 7, seed=1), "b": drawn(7, 9, seed=2)}
X = drawn(3, 12, 5, seed=3)
WORDS = torch.randint(0, 9, (3, 12), generator=torch.Generator().manual_seed(4))
BEGINS = torch.tensor([[3], [5], [2]])
LENGTHS = torch.tensor([[12], [9], [11]])


def reference(m, x):
    """The loss of the next words, of those that are part of the answer."""
    logits = (torch.tanh(x @ m.a) @ m.b)[:, :-1]
    place = torch.arange(1, 12)
    keep = (place >= BEGINS) & (place < LENGTHS)
    return F.cross_entropy(logits[keep], WORDS[:, 1:][keep])


def port(m, x):
    logits = (torch.tanh(x @ m.a) @ m.b)[:, :-1]
    place = torch.arange(12)[None, :]
    answer = (place >= BEGINS) & (place < LENGTHS)
    weights = answer[:, 1:].float()
    logp = torch.log_softmax(logits, dim=-1)
    picked = torch.gather(logp, -1, WORDS[:, 1:, None])[..., 0]
    return -(picked * weights).sum() / weights.sum()


def with_other_weights(m, x):
    logits = (torch.tanh(x @ m.a) @ m.b)[:, :-1]
    place = torch.arange(12)[None, :]
    answer = (place >= BEGINS) & (place < LENGTHS)
    weights = answer[:, :-1].float()
    logp = torch.log_softmax(logits, dim=-1)
    picked = torch.gather(logp, -1, WORDS[:, 1:, None])[..., 0]
    return -(picked * weights).sum() / weights.sum()


def test_the_port_is_right(at_fault):
    assert not at_fault(reference, port, LEAVES, X)


def test_another_part_of_a_mask_is_named_where_it_is_cut_out(at_fault, blamed_text):
    [row] = at_fault(reference, with_other_weights, LEAVES, X)
    assert blamed_text(row) == "weights = answer[:, :-1].float()"


KERNEL = torch.tensor([[[-1.0, 2.0, -1.0]]])


def at_edges(m, x):
    """A loss where the words change."""
    edges = F.conv1d(WORDS[:, None].float(), KERNEL, padding=1).clamp(min=0) > 0.5
    scores = torch.tanh(x @ m.a) @ m.b
    return (scores.square().mean(-1) * edges[:, 0]).sum() / 9


def edges_by_neighbours(words, centre):
    words = F.pad(words.float(), (1, 1))
    return centre * words[:, 1:-1] - (words[:, :-2] + words[:, 2:])


def at_edges_by_hand(m, x, centre=2.0):
    edges = (edges_by_neighbours(WORDS, centre) > 0.5).float()
    scores = torch.einsum("ntd,dk->ntk", torch.tanh(x @ m.a), m.b)
    return torch.sum((scores**2).mean(-1) * edges) / 9


def at_edges_of_another_height(m, x):
    return at_edges_by_hand(m, x, centre=2.5)


def test_what_a_comparison_reads_is_named_where_it_is_wrong(at_fault, blamed_text):
    assert not at_fault(at_edges, at_edges_by_hand, LEAVES, X)
    [row] = at_fault(at_edges, at_edges_of_another_height, LEAVES, X)
    assert blamed_text(row).startswith("return centre * words[:, 1:-1]")


COSTS = drawn(3, 12, 4, seed=5).abs()
TARGETS = drawn(3, 4, 9, seed=6)


def nearest_of_each(m, x):
    """Sample by sample each place has the target that costs least."""
    total = x.new_zeros(())
    for one, costs, targets in zip(x, COSTS, TARGETS, strict=True):
        _, matched = costs.min(1)
        total = total + (torch.tanh(one @ m.a) @ m.b - targets[matched]).square().sum()
    return total / 9


def nearest(m, x):
    matched = COSTS.argmin(2)
    targets = TARGETS.take_along_dim(matched[..., None], 1)
    return (torch.tanh(x @ m.a) @ m.b - targets).square().sum() / 9


def first_below(m, x):
    matched = (COSTS < 0.6).long().argmax(2)
    targets = TARGETS.take_along_dim(matched[..., None], 1)
    return (torch.tanh(x @ m.a) @ m.b - targets).square().sum() / 9


def test_what_the_reference_makes_sample_by_sample(at_fault, blamed_text):
    assert not at_fault(nearest_of_each, nearest, LEAVES, X)
    [row] = at_fault(nearest_of_each, first_below, LEAVES, X)
    assert "in its place all that follows is right" in row.evidence
    assert blamed_text(row).startswith("matched = (COSTS < 0.6)")
