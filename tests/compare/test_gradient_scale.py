"""Gradients of a scaled loss are those of the loss: the scale is divided out, where the program does so too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundoff

SCALE = 512.0


def trained(folder, scale, *, unscaled=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 6)
    with roundoff.capture(folder, model, keep="tensors") as run:
        loss = model(x).square().mean()
        if scale is not None:
            loss = loss * scale
        loss.backward()
        if scale is not None and unscaled:
            for parameter in model.parameters():
                parameter.grad.div_(scale)
        optimizer.step()
        run.step()


@pytest.fixture
def compared(tmp_path):
    def compare(candidate, **options):
        trained(tmp_path / "reference", None)
        trained(tmp_path / "candidate", candidate, **options)
        sides = {name: tmp_path / name for name in ("reference", "candidate")}
        return roundoff.compare(**sides)

    return compare


def test_a_scale_that_is_divided_out_is_no_difference(compared):
    found = compared(SCALE)
    assert found.agrees, found.answer
    backward = found.table.filter(phase="backward", status="matched")
    # powers of two change no bit
    assert backward["error"].max() == 0


def test_a_scale_that_stays_is_one(compared):
    found = compared(SCALE, unscaled=False)
    assert not found.agrees
    assert found.culprits(1)[0].operator == "mul"


def test_two_scales(tmp_path):
    trained(tmp_path / "one", 1024.0)
    trained(tmp_path / "other", 3.0)
    found = roundoff.compare(reference=tmp_path / "one", candidate=tmp_path / "other")
    assert found.agrees, found.answer


def clipped(folder, factor, keep, clip):
    """Train with a clip that gradients are above, so that it hides a factor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 6)
    with roundoff.capture(folder, model, keep=keep) as run:
        loss = model(x).square().mean()
        if factor != 1:
            loss = loss * factor
        loss.backward()
        clip(model.parameters(), 1e-3)
        optimizer.step()
        run.step()


@pytest.mark.parametrize("keep", ["tensors", "stats"])
@pytest.mark.parametrize(
    "clip", [nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_], ids=["norm", "value"]
)
def test_a_clip_divides_no_scale_out(keep, clip, tmp_path):
    clipped(tmp_path / "one", 1, keep, clip)
    clipped(tmp_path / "other", 64.0, keep, clip)
    found = roundoff.compare(reference=tmp_path / "one", candidate=tmp_path / "other")
    assert not found.agrees
    assert found.culprits(1)[0].operator == "mul"
