"""Whose ``detach`` is it: autograd's, which keeps a result, or the user's, which cuts a gradient?"""

from __future__ import annotations

import linecache

import pytest
import torch
from torch import nn

import roundoff
from roundoff.compare.records.kept_results import cuts_a_gradient, cutting_detaches
from roundoff.compare.records.recorded_rows import rows_of
from roundoff.ops import operators_that


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.function = function

    def forward(self, x):
        return self.function(self.layer(x))


def softmax_detached(x):
    share = x.softmax(-1)
    return x * share.detach()


@pytest.mark.parametrize(
    ("function", "cuts"),
    [
        (lambda x: x.softmax(-1), 0),
        (lambda x: x.logsumexp(-1), 0),
        (lambda x: x.tanh().exp().sqrt(), 0),
        (lambda x: x * x.detach(), 1),
        (softmax_detached, 1),
        (lambda x: x * x.exp().detach(), 1),
    ],
)
def test_only_what_somebody_wrote_cuts_a_gradient(function, cuts, tmp_path):
    torch.manual_seed(0)
    model = Net(function)
    with roundoff.capture(tmp_path / "run", model) as run:
        model(torch.ones(2, 4)).sum().backward()
        run.step()
    rows = rows_of(roundoff.load(tmp_path / "run"), 0, 0)
    inside = [row for row in rows.values() if not row.site.startswith("/")]
    found = [row.site for row in rows.values() if cuts_a_gradient(row, rows)]
    assert inside
    assert len([site for site in found if site.startswith("/")]) >= cuts


def test_the_first_of_two_written_detaches_of_one_memory_is_the_one(tmp_path):
    def twice(x):
        return x * x.detach() + x.detach()

    model = Net(twice)
    with roundoff.capture(tmp_path / "run", model) as run:
        model(torch.ones(2, 4)).sum().backward()
        run.step()
    rows = rows_of(roundoff.load(tmp_path / "run"), 0, 0)
    first, second = (row for row in rows.values() if cuts_a_gradient(row, rows))
    assert first.record in second.inputs  # what memory holds came by the first
    assert next(cutting_detaches(rows, [first.record]), None) is first
    assert next(cutting_detaches(rows, [second.record]), None) is second


def test_the_table_has_the_operators_that_autograd_asks_for_their_result():
    """Each of them gives its node the saved tensor ``result``, by torch's own naming."""
    x = torch.rand(3, 4, requires_grad=True) + 0.1
    calls = {
        "_softmax": x.softmax(-1),
        "_log_softmax": x.log_softmax(-1),
        "logsumexp": x.logsumexp(-1),
        "exp": x.exp(),
        "sigmoid": x.sigmoid(),
        "tanh": x.tanh(),
        "sqrt": x.sqrt(),
        "rsqrt": x.rsqrt(),
        "reciprocal": x.reciprocal(),
        "linalg_vector_norm": torch.linalg.vector_norm(x, dim=-1),
    }
    kept = operators_that("keep their result for the gradient")
    for name, value in calls.items():
        assert hasattr(value.grad_fn, "_saved_result"), name
        assert name in kept
    others = {"mul": x * x, "log": x.log(), "sin": x.sin(), "add": x + x}
    for name, value in others.items():
        assert not hasattr(value.grad_fn, "_saved_result"), name
        assert name not in kept


def divergence(post, prior):
    p = post.softmax(-1).log()
    return (p.exp() * (p - prior.softmax(-1).log())).sum()


def balanced(x):
    post, prior = x, x.flip(-1)
    return divergence(post.detach(), prior) + 0.1 * divergence(post, prior.detach())


def balanced_the_other_way(x):
    post, prior = x, x.flip(-1)
    return divergence(post, prior.detach()) + 0.1 * divergence(post.detach(), prior)


def test_results_that_autograd_keeps_of_other_calls_are_no_fault(tmp_path):
    """Which of two calls keeps its result follows from what was detached before."""
    folders = []
    for function in (balanced, balanced_the_other_way):
        torch.manual_seed(0)
        model = Net(function)
        folders.append(tmp_path / function.__name__)
        with roundoff.capture(folders[-1], model, keep="tensors") as run:
            model(torch.tensor([[1.0, -2.0, 0.5, 3.0]])).backward()
            run.step()
    [first, *_] = roundoff.compare(
        reference=folders[0], candidate=folders[1]
    ).culprits()
    written = linecache.getline(__file__, int(first.line.rpartition(":")[2]))
    assert "detach()" in written, first.evidence
