"""A clip that meets gradients times the loss scale, against a loop without a scale."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundoff

SCALE = 1024.0
LIMIT = 0.01


def trained(folder, scaled, *, unscaled_first=True, keep="tensors"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=scaled)
    with roundoff.capture(folder, model, keep=keep) as run:
        for step in range(2):
            x = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            scaler.scale(model(x).square().sum()).backward()
            if unscaled_first:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
            scaler.step(optimizer)
            scaler.update()
            run.step()
    return folder


@pytest.mark.parametrize("keep", ["tensors", "stats"])
@pytest.mark.parametrize("unscaled_first", [True, False])
def test_only_a_clip_before_the_unscaling_is_wrong(unscaled_first, keep, tmp_path):
    """The update is SCALE times too small: its norm is LIMIT, before it is divided."""
    right = trained(tmp_path / "right", False, keep=keep)
    other = trained(tmp_path / "other", True, unscaled_first=unscaled_first, keep=keep)
    found = roundoff.compare(reference=right, candidate=other)
    assert found.agrees == unscaled_first, found.answer
    if not unscaled_first:
        assert "clip" in (found.culprits(1)[0].evidence or ""), found.answer
