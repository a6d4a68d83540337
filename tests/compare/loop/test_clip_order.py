"""Gradients that a loop changes by hand: clipped before that, or after it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundoff

KEEP = pytest.mark.parametrize("keep", ["tensors", "stats"])


def trained(folder, order, keep="tensors"):
    """Record two steps with what is done to gradients in between, in an order."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masks = [torch.rand_like(p).gt(0.5).float() for p in model.parameters()]
    batches = torch.randn(2, 4, 6)

    def mask():
        for parameter, one in zip(model.parameters(), masks, strict=True):
            parameter.grad.mul_(one)

    def mask_anew():
        for parameter, one in zip(model.parameters(), masks, strict=True):
            parameter.grad = parameter.grad * one

    def clip():
        nn.utils.clip_grad_norm_(model.parameters(), 1e-2)

    changes = {"mask": mask, "mask anew": mask_anew, "clip": clip}
    with roundoff.capture(folder, model, keep=keep) as run:
        for batch in batches:
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            for name in order:
                changes[name]()
            optimizer.step()
            run.step()
    return folder


@KEEP
@pytest.mark.parametrize("mask", ["mask", "mask anew"])
def test_a_clip_before_gradients_are_masked(mask, keep, tmp_path):
    right = trained(tmp_path / "right", [mask, "clip"], keep)
    wrong = trained(tmp_path / "wrong", ["clip", mask], keep)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.evidence.startswith("the gradients are clipped (clip_grad_norm_")
    assert "before they are changed by mul" in first.evidence
    assert first.evidence.endswith("the reference clips after it")
    back = roundoff.compare(reference=wrong, candidate=right).culprits()[0]
    assert "after they are changed by mul" in back.evidence
    assert back.evidence.endswith("the reference clips before it")


def test_the_same_order_in_new_memory_is_none(tmp_path):
    one = trained(tmp_path / "one", ["mask", "clip"])
    other = trained(tmp_path / "other", ["mask anew", "clip"])
    found = roundoff.compare(reference=one, candidate=other)
    assert found.agrees, found.answer


def test_a_mask_that_is_left_out_is_no_other_order(tmp_path):
    right = trained(tmp_path / "right", ["mask", "clip"])
    wrong = trained(tmp_path / "wrong", ["clip"])
    culprits = roundoff.compare(reference=right, candidate=wrong).culprits()
    assert culprits
    assert not any("are clipped" in culprit.evidence for culprit in culprits)
