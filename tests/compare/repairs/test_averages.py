"""Averages that count places which are padding, or which weigh nothing."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {"a": drawn(5, 6, seed=1), "c": drawn(6, 4, seed=2)}
X = drawn(4, 9, 5, seed=3)
#: Two of the words have no label.
LABELS = torch.tensor([2, -1, 0, 3, 1, -1, 2, 0, 1])
WEIGHTS = torch.tensor([0.5, 1.0, 2.5, 1.5])


def pooled(m, x):
    h = F.avg_pool1d((x @ m.a).transpose(1, 2), 3, 2, 1, count_include_pad=False)
    return (h.transpose(1, 2).tanh() @ m.c).square().mean()


def windows(x):
    return F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 2)


def same(m, x):
    h = windows(x @ m.a)
    h = h.sum(-1) / windows(torch.ones_like(x @ m.a)).sum(-1)
    return (h.tanh() @ m.c).square().mean()


def with_padding(m, x):
    h = windows(x @ m.a).mean(-1)
    return (h.tanh() @ m.c).square().mean()


def test_an_average_that_counts_the_padding_is_named(at_fault, blamed_text):
    assert not at_fault(pooled, same, LEAVES, X)
    [row] = at_fault(pooled, with_padding, LEAVES, X)
    assert "averaged over the places that are no padding" in row.evidence
    assert blamed_text(row) == "h = windows(x @ m.a).mean(-1)"


def labelled(m, x):
    scores = (x @ m.a @ m.c).transpose(1, 2)
    return F.cross_entropy(scores, LABELS.expand(4, 9), ignore_index=-1)


def losses(m, x):
    logits = x @ m.a @ m.c
    picked = logits.gather(-1, LABELS.clamp(min=0).expand(4, 9)[..., None])
    return logits.exp().sum(-1).log() - picked[..., 0]


def by_labels(m, x):
    known = (LABELS >= 0).float().expand(4, 9)
    return (losses(m, x) * known).sum() / known.sum()


def by_words(m, x):
    known = (LABELS >= 0).float().expand(4, 9)
    return (losses(m, x) * known).mean()


def test_a_loss_that_is_divided_by_how_many_words_there_are(at_fault, blamed_text):
    assert not at_fault(labelled, by_labels, LEAVES, X)
    [row] = at_fault(labelled, by_words, LEAVES, X)
    assert "divided by the sum of the weights, not by how many" in row.evidence
    assert blamed_text(row) == "return (losses(m, x) * known).mean()"


def in_rows(m, x):
    weights = m.c[:, 0].abs()
    return ((x @ m.a).tanh() * weights).sum(-1).div(weights.sum()).exp().mean()


def by_columns(m, x):
    weights = m.c[:, :1].abs().t()[None]
    return ((x @ m.a).tanh() * weights).mean(-1).exp().mean()


def test_a_weighted_mean_along_an_axis(at_fault, blamed_text):
    [row] = at_fault(in_rows, by_columns, LEAVES, X)
    assert "divided by the sum of the weights" in row.evidence
    assert "mean(-1).exp()" in blamed_text(row)
