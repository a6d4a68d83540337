"""Numbers that are changed from step to step: a schedule that one program lacks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundoff

KEEP = pytest.mark.parametrize("keep", ["tensors", "stats"])


def trained(folder, keep, share, by_draws):
    """Two steps with a share that ``share`` gives for each: a weight, or a limit of draws."""
    torch.manual_seed(0)
    net = nn.Linear(6, 6)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    with roundoff.capture(folder, net, keep=keep) as run:
        for step in range(2):
            x = torch.randn(16, 6, generator=generator)
            optimizer.zero_grad()
            made = torch.tanh(net(x))
            if by_draws:
                is_kept = torch.rand(16, generator=generator) < share(step)
                made = torch.where(is_kept[:, None], made, x)
            else:
                made = made * share(step)
            (made - x).square().mean().backward()
            optimizer.step()
            run.step()
    return folder


def falling(step):
    return 0.9 if step == 0 else 0.4


def rising(step):
    return 0.9 if step == 0 else 1.3


def fixed(step):
    return 0.9


@KEEP
@pytest.mark.parametrize("by_draws", [True, False])
@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        (falling, fixed, "the reference changes it from step to step, here it stays"),
        (fixed, falling, "it stays in the reference, here it changes"),
        (falling, rising, "both change it from step to step"),
    ],
)
def test_a_schedule_is_named_where_its_number_is_read(
    ours, theirs, words, by_draws, keep, tmp_path
):
    right = trained(tmp_path / "right", keep, ours, by_draws)
    wrong = trained(tmp_path / "wrong", keep, theirs, by_draws)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "other schedule"
    assert first.operator == ("lt" if by_draws else "mul")
    assert words in first.evidence


@KEEP
def test_a_number_that_is_wrong_from_the_first_step_on_is_no_schedule(keep, tmp_path):
    right = trained(tmp_path / "right", keep, fixed, False)
    wrong = trained(tmp_path / "wrong", keep, lambda step: 0.7, False)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "wrong constant"


@KEEP
def test_the_same_schedule_agrees(keep, tmp_path):
    folders = [trained(tmp_path / name, keep, falling, True) for name in "ab"]
    assert roundoff.compare(reference=folders[0], candidate=folders[1]).agrees
