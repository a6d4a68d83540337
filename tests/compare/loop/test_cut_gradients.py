"""A gradient that one program cuts, and the other hands on."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundoff

KEEP = pytest.mark.parametrize("keep", ["tensors", "stats"])


class Net(nn.Module):
    """One head reads what the encoder gives without teaching it, another teaches it too."""

    def __init__(self, *, is_cut):
        super().__init__()
        self.encoder = nn.Conv1d(2, 4, 3, padding=1)
        self.aside = nn.Conv1d(4, 1, 3)
        self.head = nn.Conv1d(4, 1, 3)
        self.is_cut = is_cut

    def forward(self, x):
        inner = torch.tanh(self.encoder(x))
        read = inner.detach() if self.is_cut else inner
        return self.aside(read), self.head(inner)


def trained(folder, keep, is_cut):
    torch.manual_seed(0)
    net = Net(is_cut=is_cut)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with roundoff.capture(folder, net, keep=keep) as run:
        for _ in range(2):
            optimizer.zero_grad()
            aside, head = net(torch.randn(3, 2, 7))
            (aside.square().mean() + head.square().mean()).backward()
            optimizer.step()
            run.step()
    return folder


@KEEP
@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (True, False, "only the reference detaches at"),
        (False, True, "the reference does not detach at"),
    ],
)
def test_a_cut_is_named_by_the_program_that_has_it(ours, theirs, words, keep, tmp_path):
    right = trained(tmp_path / "right", keep, ours)
    wrong = trained(tmp_path / "wrong", keep, theirs)
    culprits = roundoff.compare(reference=right, candidate=wrong).culprits()
    assert culprits[0].looks_like == "gradient cut"
    assert words in culprits[0].evidence
    assert not any(culprit.looks_like == "other shape" for culprit in culprits)
