"""Sites that share a weight have one format: one that stays in fp32 for another's sake says so."""

from __future__ import annotations

import torch
from torch import nn

from roundoff import Workload, budget


class Tied(nn.Module):
    """An embedding whose weight is the last layer's too; ``twisted`` also squares it."""

    def __init__(self, *, twisted):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 30, bias=False)
        self.head.weight = self.embed.weight
        self.twisted = twisted

    def forward(self, ids):
        h = torch.tanh(self.mix(self.embed(ids)))
        scores = self.head(h)
        return scores + self.head.weight.square().sum(1) if self.twisted else scores


def tied(*, twisted=False):
    torch.manual_seed(0)
    ids = torch.randint(0, 30, (16, 6))
    return budget(Workload(Tied(twisted=twisted), [ids]), ["int8"])


def test_what_shares_a_weight_with_a_call_that_has_no_such_format_says_so():
    shared = tied(twisted=True).plan(20).figures.shared
    assert set(shared) == {"embed/embedding", "head/linear"}
    for reason in shared.values():
        assert "shares embed.weight with /square, which stays in fp32" in reason
        assert "no int8 arithmetic for elementwise operators" in reason


def test_what_shares_a_weight_with_a_pinned_call_says_so():
    shared = tied().plan(20, pin={"head/linear": "fp32"}).figures.shared
    assert shared == {
        "embed/embedding": "shares embed.weight with head/linear, whose formats are fixed"
    }


def test_what_shares_a_weight_and_is_too_dear_says_so():
    plan = tied().plan(300)
    assert plan.rules == ()
    assert plan.figures.shared["embed/embedding"] == (
        "shares embed.weight with head/linear: one format for both, "
        "and the plan leaves them in fp32"
    )
    assert tied().plan(20).figures.shared == {}
