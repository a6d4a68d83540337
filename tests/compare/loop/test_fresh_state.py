"""Moments that one run goes on with, and the other begins anew: an optimizer without its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import roundoff

OPTIMIZERS = {
    "Adam": lambda weights: torch.optim.Adam(weights, lr=0.01),
    "Adam on lists": lambda weights: torch.optim.Adam(weights, lr=0.01, foreach=True),
    "momentum": lambda weights: torch.optim.SGD(weights, lr=0.01, momentum=0.9),
}


def trained(folder: Path, keep: str, make, *, resumes: bool, loads: bool) -> Path:
    """Record three steps; before the second the optimizer may be made again, with its state or without."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = make(model.parameters())
    with roundoff.capture(folder, model, keep=keep) as run:
        for step in range(3):
            if step == 1 and resumes:
                state = optimizer.state_dict()
                optimizer = make(model.parameters())
                if loads:
                    optimizer.load_state_dict(state)
            x = torch.linspace(-1, 1 + step, 30).view(5, 6)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            run.step()
    return folder


@pytest.mark.parametrize("keep", ["tensors", "stats"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_state_that_is_not_loaded_is_told(tmp_path, make, keep):
    right = trained(tmp_path / "right", keep, make, resumes=True, loads=True)
    wrong = trained(tmp_path / "wrong", keep, make, resumes=True, loads=False)
    comparison = roundoff.compare(reference=right, candidate=wrong)
    first = comparison.culprits()[0]
    assert (first.kind, first.looks_like, first.step) == ("update", "other state", 1)
    assert "begins anew" in first.evidence
    assert "not loaded here" in first.evidence


def test_state_that_the_reference_does_not_load_is_told(tmp_path):
    make = OPTIMIZERS["Adam"]
    right = trained(tmp_path / "right", "tensors", make, resumes=True, loads=False)
    wrong = trained(tmp_path / "wrong", "tensors", make, resumes=True, loads=True)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "other state"
    assert "loaded here alone" in first.evidence


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_state_that_is_loaded_is_the_same(tmp_path, make):
    right = trained(tmp_path / "right", "tensors", make, resumes=False, loads=False)
    wrong = trained(tmp_path / "wrong", "tensors", make, resumes=True, loads=True)
    assert roundoff.compare(reference=right, candidate=wrong).agrees


def test_counts_of_steps_are_no_state(tmp_path):
    """A fused optimizer makes them by a call, one on lists of a number: both begin anew."""

    def fused(weights):
        return torch.optim.AdamW(weights, lr=0.01, fused=True)

    def on_lists(weights):
        return torch.optim.AdamW(weights, lr=0.01, foreach=True)

    right = trained(tmp_path / "right", "tensors", on_lists, resumes=False, loads=False)
    wrong = trained(tmp_path / "wrong", "tensors", fused, resumes=False, loads=False)
    found = roundoff.compare(reference=right, candidate=wrong)
    assert found.agrees
    assert not any("begins anew" in (c.evidence or "") for c in found.culprits())
