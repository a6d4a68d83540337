"""An optimizer on lists beside the same one on single tensors, element by element."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import roundoff


class WrongRoot(TorchDispatchMode):
    """The second root of each list is 1 % too large, beneath the recording."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ == "_foreach_sqrt":
            result[1].mul_(1.01)
        return result


def train(folder, kind, damage=None, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    x = torch.randn(5, 6)
    below = damage or contextlib.nullcontext()
    with below, roundoff.capture(folder, model, keep="stats") as run:
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            run.step()
    return folder


@pytest.fixture
def compared(tmp_path):
    def compare(kind, damage=None):
        return roundoff.compare(
            reference=train(tmp_path / "single", kind, foreach=False),
            candidate=train(tmp_path / "lists", kind, damage, foreach=True),
        )

    return compare


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam])
def test_right_forms_agree(kind, compared):
    comparison = compared(kind)
    assert not comparison.fails, comparison.answer


def test_moments_have_counterparts(compared):
    comparison = compared(torch.optim.Adam)
    lerps = comparison.table.filter(operator="_foreach_lerp_")
    assert set(lerps["status"]) == {"matched"}
    # two steps of four parameters each
    assert len(lerps) == 8


def test_a_wrong_root_of_one_tensor_is_named(compared):
    comparison = compared(torch.optim.Adam, WrongRoot())
    first = comparison.culprits(1)[0]
    assert first.operator == "_foreach_sqrt"
    assert first.looks_like != "other operator"
