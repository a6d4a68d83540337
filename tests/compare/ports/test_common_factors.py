"""A factor that the reference takes at another place is no fault of the value that gets it."""

from __future__ import annotations

import torch

LEAVES = {"w": torch.randn(5, 4, generator=torch.Generator().manual_seed(1))}
X = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
LENGTHS = torch.tensor([2.0, 3.0, 5.0, 1.0, 4.0, 2.0])


def reference(m, x, lengths):
    likely = (x @ m.w).log_softmax(-1)[:, 0]
    return -likely.sum() / lengths.sum()


def port(m, x, lengths):
    costs = -(x @ m.w).log_softmax(-1)[:, 0]
    return torch.sum(costs) / torch.sum(lengths)


def mean_of_shares(m, x, lengths):
    costs = -(x @ m.w).log_softmax(-1)[:, 0]
    return torch.mean(costs / lengths)


def test_the_port_is_right(at_fault):
    assert not at_fault(reference, port, LEAVES, X, LENGTHS)


def test_the_line_behind_the_negative_is_named(at_fault, blamed_text):
    [row] = at_fault(reference, mean_of_shares, LEAVES, X, LENGTHS)
    assert blamed_text(row) == "return torch.mean(costs / lengths)"


def of_two_means(m, x, lengths):
    scores = x @ m.w
    costs = -scores.log_softmax(-1)[:, 0]
    return costs.mean() + 0.1 * scores.logsumexp(-1).square().mean()


def of_one_mean(m, x, lengths):
    scores = x @ m.w
    costs = -scores.log_softmax(-1)[:, 0]
    both = costs + 0.1 * torch.square(scores.logsumexp(-1))
    return torch.sum(both) / both.numel()


def of_one_mean_over_lengths(m, x, lengths):
    scores = x @ m.w
    costs = -scores.log_softmax(-1)[:, 0]
    both = costs + 0.1 * torch.square(scores.logsumexp(-1))
    return torch.sum(both * lengths) / torch.sum(lengths)


def test_the_line_behind_a_sum_of_terms_is_named(at_fault, blamed_text):
    assert not at_fault(of_two_means, of_one_mean, LEAVES, X, LENGTHS)
    [row] = at_fault(of_two_means, of_one_mean_over_lengths, LEAVES, X, LENGTHS)
    assert blamed_text(row) == "return torch.sum(both * lengths) / torch.sum(lengths)"


def likelihood(m, x, lengths):
    size = torch.nn.functional.softplus(x @ m.w[:, 0])
    likely = -0.5 * (x[:, 0] / size) ** 2 - torch.log(size)
    return -(likely * lengths).sum() / lengths.sum()


def cost(m, x, lengths):
    size = torch.logaddexp(x @ m.w[:, 0], torch.zeros(6))
    costs = 0.5 * (x[:, 0] / size) ** 2 + torch.log(size)
    return torch.sum(costs * lengths) / torch.sum(lengths)


def cost_by_places(m, x, lengths):
    size = torch.logaddexp(x @ m.w[:, 0], torch.zeros(6))
    costs = 0.5 * (x[:, 0] / size) ** 2 + torch.log(size)
    places = torch.arange(6.0)
    return torch.sum(costs * places) / torch.sum(places)


def test_the_line_behind_costs_of_the_other_sign_is_named(at_fault, blamed_text):
    assert not at_fault(likelihood, cost, LEAVES, X, LENGTHS)
    [row] = at_fault(likelihood, cost_by_places, LEAVES, X, LENGTHS)
    assert blamed_text(row) in (
        "places = torch.arange(6.0)",
        "return torch.sum(costs * places) / torch.sum(places)",
    )
