"""What stands behind operators: parameters, data and updates, in plain words."""

import pytest
import torch
from torch import nn

import roundoff
from roundoff.verbs.compare import Comparison

STEPS = 2


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))


def batch(number):
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(number))


def record(folder, keep, *, change=lambda model: None, feed=lambda x: x, held=None):
    """Train for two steps, and record it; the data are made outside the recording."""
    model = net()
    change(model)
    parameters = [p for n, p in model.named_parameters() if held is None or n in held]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    batches = [feed(batch(step)) for step in range(STEPS)]
    with roundoff.capture(folder, model, keep=keep) as run:
        for x in batches:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            run.step()
    return folder


def turned(model):
    model[2].weight.data = model[2].weight.data.t().contiguous()


def exchanged(model):
    model[0].weight, model[2].weight = model[2].weight, model[0].weight


def frozen(model):
    model[0].weight.requires_grad_(False)


@pytest.mark.parametrize("keep", ["tensors", "stats"])
@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ({"change": turned}, "parameter", "2.weight"),
        ({"change": exchanged}, "parameter", "hold each other's values"),
        ({"change": frozen}, "update", "0.weight is frozen here"),
        (
            {"held": ("0.weight", "0.bias", "2.bias")},
            "update",
            "2.weight is not changed here: its gradient is there",
        ),
        ({"feed": lambda x: x.flip(1)}, "data", "in another order"),
        ({"feed": lambda x: 1.02 * x}, "data", "1.02 times the reference's"),
        ({"feed": lambda x: 2 * x - 1}, "data", "scaled otherwise"),
    ],
)
def test_the_cause_comes_first(how, kind, words, keep, tmp_path):
    right = record(tmp_path / "right", keep)
    wrong = record(tmp_path / "wrong", keep, **how)
    found = roundoff.compare(reference=right, candidate=wrong)
    first = found.culprits()[0]
    assert (first.kind, first.step) == (kind, 0)
    assert words in first.evidence
    assert not found.agrees
    assert words in found.answer


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_an_update_that_is_left_out_shows_in_one_step(keep, tmp_path):
    sides = []
    for name, change in (("right", lambda model: None), ("wrong", frozen)):
        model = net()
        change(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with roundoff.capture(tmp_path / name, model, keep=keep) as run:
            model(batch(0)).square().sum().backward()
            optimizer.step()
            run.step()
        sides.append(tmp_path / name)
    found = roundoff.compare(reference=sides[0], candidate=sides[1])
    assert not found.agrees
    assert "0.weight is frozen here" in found.answer


@pytest.mark.parametrize("keep", ["tensors", "stats"])
def test_nothing_stands_behind_equal_runs(keep, tmp_path):
    right = record(tmp_path / "right", keep)
    again = record(tmp_path / "again", keep)
    found = roundoff.compare(reference=right, candidate=again)
    assert found.agrees
    assert found.culprits() == []


def test_causes_are_saved_with_the_comparison(tmp_path):
    right = record(tmp_path / "right", "tensors")
    wrong = record(tmp_path / "wrong", "tensors", change=turned)
    found = roundoff.compare(reference=right, candidate=wrong)
    found.save(tmp_path / "saved")
    again = Comparison.load(tmp_path / "saved")
    assert again.culprits() == found.culprits()
    assert not again.agrees
