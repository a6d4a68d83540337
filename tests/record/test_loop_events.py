"""What a recording notes of a loop, in the order in which it goes into an update."""

from __future__ import annotations

import torch
from torch import nn

import roundoff
from roundoff.compare.loop.loop_order import optimizer_steps


def searched(folder, *, clears=True):
    """Two steps of an optimizer that runs the model itself, once each."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    search = torch.optim.LBFGS(model.parameters(), max_iter=1)
    x = torch.randn(8, 4)

    def closure():
        if clears:
            search.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    with roundoff.capture(folder, model) as run:
        for _ in range(2):
            search.step(closure)
            run.step()
    return folder


def test_what_a_closure_does_goes_into_the_step_that_calls_it(tmp_path):
    loop = roundoff.load(searched(tmp_path / "run")).loop
    events = [(number, event) for number in (0, 1) for event in loop(0, number)]
    names = [event.what for _, event in events if event.what != "frozen"]
    assert names == ["zero_grad", "backward", "optimizer.step"] * 2
    assert [step.gathered for step in optimizer_steps(events)] == [1, 1]


def test_a_closure_that_does_not_clear_is_told_first(tmp_path):
    right = searched(tmp_path / "right")
    wrong = searched(tmp_path / "wrong", clears=False)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.name == "zero_grad"
    assert "those of 2 backward passes add up before LBFGS steps" in first.evidence
