"""Steps that a loss scale skipped, and which group a learning rate is of."""

from __future__ import annotations

import pytest
import torch

import roundoff
from roundoff.cli.app import main


def record(path, *, overflowing=(), rates=(0.1,), fused=False):
    """Record six steps; the gradients of some overflow."""
    torch.manual_seed(0)
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in rates]
    groups = [
        {"params": [w], "lr": rate} for w, rate in zip(weights, rates, strict=True)
    ]
    kind = torch.optim.Adam if fused else torch.optim.SGD
    optimizer = kind(groups, **({"fused": True} if fused else {}))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    with roundoff.capture(path) as run:
        for step in range(6):
            factor = float("inf") if step in overflowing else 1.0
            loss = sum((weight * factor).sum() for weight in weights)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            run.step()
    return path


@pytest.mark.parametrize("fused", [False, True])
def test_skipped_steps_are_counted(fused, tmp_path, capsys):
    ours = record(tmp_path / "a", fused=fused)
    theirs = record(tmp_path / "b", overflowing=(2, 4), fused=fused)
    texts = [each.text for each in roundoff.check(ours, theirs).differences]
    # the scale is halved by each of two steps
    assert (
        "the loss scale skipped 2 of 6 steps (the first is step 2) in b, none of 6 "
        "steps in a; it ended at 256 in b, 1024 in a"
    ) in texts
    again = record(tmp_path / "c", overflowing=(2, 4), fused=fused)
    assert main(["check", str(theirs), str(again)]) in (0, 4)
    words = "1024 at first, 256 last, 2 steps skipped"
    assert words in " ".join(capsys.readouterr().out.split())


def test_a_rate_is_of_its_group_where_there_are_several(tmp_path):
    ours = record(tmp_path / "a", rates=(0.1, 0.01))
    theirs = record(tmp_path / "b", rates=(0.2, 0.01))
    first = roundoff.check(ours, theirs).differences[0]
    assert first.text == "the learning rate of parameter group 0 is 0.2 in b, 0.1 in a"
