"""What a script writes to its weights, and to slow copies of them, beside the optimizer."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import roundoff

KEEP = pytest.mark.parametrize("keep", ["tensors", "stats"])


@torch.no_grad()
def lerp(slow, fast):
    for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
        old.lerp_(new, 0.1)


@torch.no_grad()
def summed(slow, fast):
    for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
        old.mul_(0.9).add_(new, alpha=0.1)


@torch.no_grad()
def copied(slow, fast):
    for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
        old.copy_(0.9 * old + 0.1 * new)


@torch.no_grad()
def clamped(_, fast):
    for value in fast.parameters():
        value.clamp_(-0.1, 0.1)


def nothing(slow, fast):
    pass


def trained(folder: Path, keep: str, write, *, early=False) -> Path:
    """Record three steps of a model that a slow copy teaches."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    both = nn.ModuleDict({"fast": model, "slow": copy.deepcopy(model)})
    both["slow"].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with roundoff.capture(folder, both, keep=keep) as run:
        for _ in range(3):
            x = torch.linspace(-1, 1, 30).view(5, 6)
            loss = (both["fast"](x) - 2 * both["slow"](x)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if early:
                write(both["slow"], both["fast"])
            optimizer.step()
            if not early:
                write(both["slow"], both["fast"])
            run.step()
    return folder


class Centres(nn.Module):
    """Centres, and an average of them that only a new target reads."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(4, 3))
        self.register_buffer("slow", self.centres.detach().clone())


def refreshed(folder: Path, keep: str, follow) -> Path:
    """Record two steps, of which the first makes the target of both."""
    torch.manual_seed(0)
    model = Centres()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = None
    with roundoff.capture(folder, model, keep=keep) as run:
        for step in range(2):
            if step:
                follow(model)
            if target is None:
                target = model.slow.softmax(1)
            loss = (model.centres.softmax(1) - 2 * target).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            run.step()
    return folder


def follows(model):
    model.slow.lerp_(model.centres.detach(), 0.1)


@KEEP
def test_an_average_that_its_step_does_not_read_is_missed(keep, tmp_path):
    ours = refreshed(tmp_path / "ours", keep, follows)
    theirs = refreshed(tmp_path / "theirs", keep, lambda model: None)
    for pair, label in (((ours, theirs), "missing"), ((theirs, ours), "extra")):
        found = roundoff.compare(reference=pair[0], candidate=pair[1])
        [first] = found.culprits(1)
        assert first.name == "slow"
        assert first.looks_like == f"{label} update"
        assert not found.agrees


@KEEP
@pytest.mark.parametrize(
    ("write", "operator", "name"),
    [(lerp, "lerp_", "slow."), (clamped, "clamp_", "fast.")],
)
def test_a_write_that_one_run_lacks(write, operator, name, keep, tmp_path):
    right = trained(tmp_path / "right", keep, write)
    wrong = trained(tmp_path / "wrong", keep, nothing)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "missing update"
    assert f"{name}0.weight" in first.evidence
    assert f"the reference changes them by {operator}" in first.evidence
    back = roundoff.compare(reference=wrong, candidate=right).culprits()[0]
    assert back.looks_like == "extra update"
    assert f"by {operator}" in back.evidence


@KEEP
def test_a_slow_copy_that_moves_before_the_step(keep, tmp_path):
    right = trained(tmp_path / "right", keep, lerp)
    wrong = trained(tmp_path / "wrong", keep, lerp, early=True)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "other loop"
    assert "before the optimizer steps, in the reference after it" in first.evidence
    back = roundoff.compare(reference=wrong, candidate=right).culprits()[0]
    assert "after the optimizer steps, in the reference before it" in back.evidence


@KEEP
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(lerp, summed), (summed, lerp), (lerp, copied), (copied, summed)],
)
def test_the_same_values_written_otherwise_are_no_fault(ours, theirs, keep, tmp_path):
    right = trained(tmp_path / "right", keep, ours)
    other = trained(tmp_path / "other", keep, theirs)
    found = roundoff.compare(reference=right, candidate=other)
    assert not found.culprits()


class Prototypes(nn.Module):
    """Classes by the nearest of their prototypes, which follow the samples."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 4)
        self.register_buffer("proto", torch.randn(3, 4))

    def forward(self, x):
        return self.embed(x) @ self.proto.T


@torch.no_grad()
def class_by_class(model, x, labels):
    for label in labels.unique():
        mean = model.embed(x)[labels == label].mean(0)
        model.proto[label] = 0.9 * model.proto[label] + 0.1 * mean


@torch.no_grad()
def all_at_once(model, x, labels, keep=0.9):
    member = nn.functional.one_hot(labels, 3).float()
    mean = member.T @ model.embed(x) / member.sum(0)[:, None]
    model.proto.copy_(keep * model.proto + (1 - keep) * mean)


def too_fast(model, x, labels):
    all_at_once(model, x, labels, keep=0.8)


@pytest.fixture
def following(recorded):
    """Return two recorded steps, with the update that is given behind each."""
    x = torch.linspace(-1, 1, 48).view(8, 6).sin()
    labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])

    def run(follow, keep):
        torch.manual_seed(0)
        model = Prototypes()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def step(model):
            loss = nn.functional.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            follow(model, x, labels)

        return recorded(step, model, steps=2, keep=keep)

    return run


@KEEP
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(class_by_class, all_at_once), (all_at_once, class_by_class)],
)
def test_rows_that_are_written_at_once_are_no_extra_update(
    ours, theirs, keep, following
):
    found = roundoff.compare(
        reference=following(ours, keep), candidate=following(theirs, keep)
    )
    assert not found.culprits(), found.answer


@KEEP
def test_rows_that_move_too_far_are_found(keep, following):
    found = roundoff.compare(
        reference=following(class_by_class, keep), candidate=following(too_fast, keep)
    )
    assert "proto" in found.answer


class Filled(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("slow", torch.zeros(3, 4))

    def forward(self, x):
        return self.layer(x)


def filled_then_moved(folder, *, moves):
    """A buffer that is filled as the model is made, read once, and moved behind each step."""
    torch.manual_seed(0)
    with roundoff.capture(folder) as run:
        model = Filled()
        with torch.no_grad():
            model.slow.copy_(torch.randn(3, 4) + 1)
            targets = torch.randn(5, 4) @ model.slow.T
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            if step and moves:
                with torch.no_grad():
                    model.slow.lerp_(model.layer.weight, 0.1)
            optimizer.zero_grad()
            (model(torch.ones(5, 4)) - targets).square().mean().backward()
            optimizer.step()
            run.step()
    return folder


def test_a_buffer_that_both_fill_first_and_one_moves_later(tmp_path):
    right = filled_then_moved(tmp_path / "right", moves=True)
    wrong = filled_then_moved(tmp_path / "wrong", moves=False)
    found = roundoff.compare(reference=right, candidate=wrong)
    assert not found.agrees
    first = found.culprits()[0]
    assert first.looks_like == "missing update"
    assert "slow is not changed between the steps" in first.evidence
