"""What is named for an edit: a function that is one too many, and not what reads it."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


LEAVES = {"a": drawn(5, 6, seed=1), "b": drawn(6, 6, seed=2), "c": drawn(6, 2, seed=3)}
X = drawn(4, 7, 5, seed=4)


def reference(m, x):
    h = F.gelu(x @ m.a)[:, 1:]
    return F.gelu((h @ m.b) @ m.c).square().mean()


def gelu(x):
    return 0.5 * x * (1.0 + torch.erf(x / math.sqrt(2.0)))


def middle(m, h):
    return h @ m.b


def middle_with_activation(m, h):
    return gelu(h @ m.b)


def port(m, x):
    h = middle(m, gelu(x @ m.a)[:, 1:])
    return (gelu(h @ m.c) ** 2).mean()


def with_one_more(m, x):
    h = middle_with_activation(m, gelu(x @ m.a)[:, 1:])
    return (gelu(h @ m.c) ** 2).mean()


def test_the_port_is_right(at_fault):
    assert not at_fault(reference, port, LEAVES, X)


def test_a_function_that_is_one_too_many_is_named(at_fault, blamed_text):
    [row] = at_fault(reference, with_one_more, LEAVES, X)
    assert "it is one too many" in row.evidence
    assert blamed_text(row) == "return gelu(h @ m.b)"


def weighed(m, x):
    scores = x @ m.a @ m.c[:, 0]
    hits = (x[..., 0] > 0).float()
    return F.binary_cross_entropy_with_logits(
        scores, hits, pos_weight=torch.tensor(2.5)
    )


def by_logarithms(m, x, of_hits=2.5, of_others=1.0):
    scores = x @ m.a @ m.c[:, 0]
    hits = (x[..., 0] > 0).float()
    log_p, log_not_p = F.logsigmoid(scores), F.logsigmoid(-scores)
    losses = of_hits * hits * log_p + of_others * (1.0 - hits) * log_not_p
    return -losses.mean()


def of_the_others(m, x):
    scores = x @ m.a @ m.c[:, 0]
    hits = (x[..., 0] > 0).float()
    log_p, log_not_p = F.logsigmoid(scores), F.logsigmoid(-scores)
    losses = hits * log_p + 2.5 * (1.0 - hits) * log_not_p
    return -losses.mean()


def test_a_factor_that_belongs_to_the_other_term_is_named(at_fault, blamed_text):
    assert not at_fault(weighed, by_logarithms, LEAVES, X)
    [row] = at_fault(weighed, of_the_others, LEAVES, X)
    assert "with the factor 2.5 on its other term" in row.evidence
    assert blamed_text(row).startswith("losses = hits * log_p + 2.5")


PARTS = {"gate": drawn(5, 4, seed=5), "skip": drawn(5, 6, seed=6)}


def of_two_layers(m, x):
    return torch.sigmoid(x @ m.gate).mean() + torch.tanh(x @ m.skip).square().mean()


def of_one_cut(m, x):
    both = x @ m.both
    gate, skip = both[..., :4], both[..., 4:]
    return torch.sigmoid(gate).mean() + (torch.tanh(skip) ** 2).mean()


def of_one_cut_too_early(m, x):
    both = x @ m.both
    gate, skip = both[..., :4], both[..., 3:9]
    return torch.sigmoid(gate).mean() + (torch.tanh(skip) ** 2).mean()


def joined(*names):
    return {"both": torch.cat([PARTS[name] for name in names], dim=1)}


def test_parts_of_other_lengths_that_stand_the_other_way_round(at_fault):
    right = joined("gate", "skip")
    assert not at_fault(of_two_layers, of_one_cut, PARTS, X, others=right)
    wrong = joined("skip", "gate")
    [row, *_] = at_fault(of_two_layers, of_one_cut, PARTS, X, others=wrong)
    assert row.name == "both", row.evidence
    assert "the parts of both stand in another order" in row.evidence


def test_a_cut_that_leaves_a_gap_is_named_itself(at_fault, blamed_text):
    right = joined("gate", "skip")
    [row] = at_fault(of_two_layers, of_one_cut_too_early, PARTS, X, others=right)
    assert blamed_text(row).startswith("gate, skip = both")


def in_two_layers(m, x):
    h = torch.relu(x @ m.a)
    return torch.sigmoid(h @ m.b).mean()


def activation(x, kind):
    return torch.clamp(x, min=0.0) if kind == "relu" else torch.tanh(x)


def by_a_function(m, x):
    h = activation(torch.tensordot(x, m.a, dims=1), "relu")
    return (1.0 / (1.0 + torch.exp(-torch.tensordot(h, m.b, dims=1)))).mean()


def by_a_function_once_too_often(m, x):
    h = activation(torch.tensordot(x, m.a, dims=1), "relu")
    h = activation(torch.tensordot(h, m.b, dims=1), "relu")
    return (1.0 / (1.0 + torch.exp(-h))).mean()


def test_the_line_that_calls_a_function_too_often_is_named(at_fault, blamed_text):
    assert not at_fault(in_two_layers, by_a_function, LEAVES, X)
    [row] = at_fault(in_two_layers, by_a_function_once_too_often, LEAVES, X)
    # a lower bound of 0 is no threshold of 0: nothing goes through as hardshrink
    assert "without clamp" in row.evidence
    assert blamed_text(row).startswith("h = activation(torch.tensordot(h, m.b")


KERNELS = {"first": drawn(6, 5, 3, 3, seed=11), "second": drawn(5, 6, 3, 3, seed=12)}
SERIES = drawn(2, 5, 12, seed=13)


def in_columns(m, x):
    total = x
    for columns in (2, 3):
        plane = x.unflatten(2, (12 // columns, columns))
        plane = F.conv2d(
            torch.tanh(F.conv2d(plane, m.first, padding=1)), m.second, padding=1
        )
        total = total + plane.mean((2, 3))[:, :, None]
    return total.square().mean()


def folded(m, x, plane):
    plane = torch.tanh(F.conv2d(F.pad(plane, [1, 1, 1, 1]), m.first))
    return x + torch.flatten(F.conv2d(plane, m.second, padding=1), start_dim=2).mean(
        2, keepdim=True
    )


def by_rows(m, x):
    total = x
    for columns in (2, 3):
        total = folded(m, total, torch.reshape(x, [2, 5, -1, columns]))
    return (total**2).mean()


def by_columns(m, x):
    total = x
    for columns in (2, 3):
        total = folded(m, total, torch.reshape(x, [2, 5, columns, -1]))
    return (total**2).mean()


def test_rows_that_are_folded_as_columns_are_named(at_fault, blamed_text):
    assert not at_fault(in_columns, by_rows, KERNELS, SERIES)
    [row] = at_fault(in_columns, by_columns, KERNELS, SERIES)
    assert "torch.reshape(x, [2, 5, columns, -1])" in blamed_text(row)
    assert "with the lengths" in row.evidence


LABELS = torch.tensor([1, 0, 1, 1, 0, 0, 1]).repeat(4)


def smoothed(m, x):
    scores = (x @ m.a @ m.c).flatten(0, 1)
    return F.cross_entropy(scores, LABELS, label_smoothing=0.2)


def smoothed_by_hand(m, x, share=0.8):
    logits = x.flatten(0, 1) @ m.a @ m.c
    target = (LABELS[..., None] == torch.arange(2)).to(logits.dtype)
    whole = torch.logsumexp(logits, -1)
    picked = (target * logits).sum(-1)
    if share == 1.0:
        return (whole - 0.2 * logits.mean(-1) - picked).mean()
    return (whole - 0.2 * logits.mean(-1) - share * picked).mean()


def test_the_sum_is_named_of_which_a_term_is_not_weighed(at_fault, blamed_text):
    def whole(m, x):
        return smoothed_by_hand(m, x, 1.0)

    assert not at_fault(smoothed, smoothed_by_hand, LEAVES, X)
    [row] = at_fault(smoothed, whole, LEAVES, X)
    assert "product with 0.8" in row.evidence
    assert blamed_text(row).startswith("return (whole - 0.2")
