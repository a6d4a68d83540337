"""The loop stands behind portions that leave a part out, and not behind those that do all."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import roundoff


def record(
    folder,
    parts,
    *,
    rows=8,
    scale=1.0,
    clip=None,
    weight=1.0,
    taken=None,
    looks_first=False,
):
    """Train one step on the first ``rows`` of a batch, in so many equal parts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 6)
    with roundoff.capture(folder, model, keep="tensors") as run:
        if looks_first:
            with torch.no_grad():
                model[2].bias.copy_(-model(x.repeat(8, 1)).mean(0))
        optimizer.zero_grad()
        portions = x[:rows].chunk(parts)
        for part in portions if taken is None else [portions[n] for n in taken]:
            (weight * model(part * scale).square().sum() / 8).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        run.step()
    return folder


@pytest.fixture
def compared(tmp_path):
    def compare(reference, candidate):
        ours = record(tmp_path / "ours", **reference)
        theirs = record(tmp_path / "theirs", **candidate)
        return roundoff.compare(reference=ours, candidate=theirs)

    return compare


def names(found):
    return [culprit.name for culprit in found.culprits() if culprit.kind == "loop"]


def test_a_batch_in_two_halves_is_no_finding(compared):
    found = compared({"parts": 1}, {"parts": 2})
    assert found.agrees, found.answer


def test_a_part_that_is_left_out_is_told_by_the_loop(compared):
    found = compared({"parts": 2}, {"parts": 1, "rows": 4})
    assert names(found)[:1] == ["backward"]
    assert "1 backward pass before" in found.answer


def test_a_part_is_left_out_though_the_model_looked_at_all_data_before(compared):
    found = compared(
        {"parts": 2, "looks_first": True},
        {"parts": 1, "rows": 4, "looks_first": True},
    )
    assert "backward" in names(found)


def test_a_fault_in_halves_is_none_of_the_loop(compared):
    found = compared({"parts": 1}, {"parts": 2, "scale": 1.5})
    assert not found.agrees
    assert names(found) == []


def test_a_clip_in_halves_is_told_by_the_loop(compared):
    found = compared({"parts": 1}, {"parts": 2, "clip": 1e-3})
    assert names(found) == ["clip of the gradients"]


def test_gradients_that_are_all_a_multiple_are_told_of_the_loop(compared):
    """Where the loss of each half is weighed twice, no operator is wrong."""
    found = compared({"parts": 1}, {"parts": 2, "weight": 2.0})
    first = found.culprits()[0]
    assert first.name.endswith(".grad")
    assert "it is 2 times the reference's, as all gradients are" in first.evidence


def test_a_half_that_is_taken_twice_is_a_wrong_slice(compared):
    """The loss reads the shape alone for the start of the backward pass."""
    found = compared({"parts": 1}, {"parts": 2, "taken": (0, 0)})
    first = found.culprits()[0]
    assert first.phase == "forward"
    assert "50% of the reference's value is in none of its 2 portions" in first.evidence


class Embedded(nn.Module):
    """What is looked up, behind a learnt first row."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(20, 6)
        self.first = nn.Parameter(torch.randn(1, 1, 6))
        self.layer = nn.Linear(6, 3)

    def forward(self, words, scale=None):
        rows = self.table(words)
        if scale is not None:
            rows = rows * scale(rows)
        first = self.first.expand(len(rows), 1, 6)
        return self.layer(torch.cat([first, rows], 1).tanh())


def embedded(folder, parts, *, start=0, scale=None, trained=True):
    torch.manual_seed(0)
    model = Embedded()
    words = torch.randint(0, 20, (8, 5))
    run = roundoff.capture(folder, model, keep="tensors")
    with run, torch.set_grad_enabled(trained):
        results = [model(part[:, start:], scale) for part in words.chunk(parts)]
        if trained:
            for result in results:
                (result.square().sum() / 8).backward()
        else:
            torch.cat(results)
    return folder


def test_what_is_joined_stands_where_all_of_it_does(tmp_path):
    """The learnt row alone is right in the halves: it is no part of a right value."""
    found = roundoff.compare(
        reference=embedded(tmp_path / "ours", 1, trained=False),
        candidate=embedded(
            tmp_path / "theirs",
            2,
            scale=lambda rows: 1 + rows.mean().abs(),
            trained=False,
        ),
    )
    first = found.culprits()[0]
    assert first.site.split("#")[0] in ("/mean", "/abs", "/add", "/mul"), found.answer


def test_the_slice_that_leaves_out_a_column_is_told(tmp_path):
    found = roundoff.compare(
        reference=embedded(tmp_path / "ours", 1),
        candidate=embedded(tmp_path / "theirs", 2, start=1),
    )
    first = found.culprits()[0]
    assert "slice (tests/compare/portions/test_portions_causes.py" in first.evidence
    assert "leaves out a part" in first.evidence
