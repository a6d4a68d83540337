"""A step that is written in another way: it leaves the same, and other values stand in between."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import roundoff


def trained(folder: Path, losses_of, step_of) -> Path:
    """Record two steps of a model with two heads: ``losses_of`` its results, then ``step_of`` these."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"body": nn.Linear(6, 8), "kind": nn.Linear(8, 3), "size": nn.Linear(8, 1)}
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with roundoff.capture(folder, model, keep="tensors") as run:
        for step in range(2):
            x = torch.linspace(-1, 1 + step, 30).view(5, 6)
            optimizer.zero_grad()
            seen = model["body"](x).tanh()
            step_of(
                losses_of(model["kind"](seen), model["size"](seen)), model.parameters()
            )
            optimizer.step()
            run.step()
    return folder


def losses(kind, size, factor=1.0, constant=0.0):
    target = torch.tensor([0, 2, 1, 1, 0])
    of_kind = nn.functional.cross_entropy(kind, target)
    return of_kind, factor * (size - 0.5).square().mean() + constant


def losses_by_sample(kind, size, **settings):
    """The same of one sample after the other; sums and their parts have other shapes."""
    target = torch.tensor([0, 2, 1, 1, 0])
    chosen = [
        row.log_softmax(0)[index] for row, index in zip(kind, target, strict=True)
    ]
    return -torch.stack(chosen).mean(), losses(kind, size, **settings)[1]


def limited(kind, size, **settings):
    """The first loss is that of ratios, of which the one that gains less counts."""
    ratio, gain = kind.exp(), torch.linspace(-1, 1, 15).view(5, 3)
    less = torch.minimum(ratio * gain, ratio.clamp(0.9, 1.1) * gain)
    return -less.mean(), losses(kind, size, **settings)[1]


def limited_on_one_side(kind, size, **settings):
    """The same: a gain is limited above, a loss below."""
    ratio, gain = kind.exp(), torch.linspace(-1, 1, 15).view(5, 3)
    limit = torch.where(gain > 0, ratio.clamp(max=1.1), ratio.clamp(min=0.9))
    return -(limit * gain).mean(), losses(kind, size, **settings)[1]


def one_pass(losses, parameters, limit=None):
    sum(losses).backward()
    if limit is not None:
        nn.utils.clip_grad_norm_(parameters, limit)


def a_pass_each(losses, parameters):
    first, second = losses
    first.backward(retain_graph=True)
    second.backward()


#: Losses of the reference, losses of the candidate, and how it steps.
WAYS = {
    "two backward passes": (losses, losses, a_pass_each),
    "a loss of each sample": (losses, losses_by_sample, a_pass_each),
    "limits of one side": (limited, limited_on_one_side, one_pass),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_another_way_to_the_same_results_agrees(tmp_path, way):
    ours, *theirs = way
    reference = trained(tmp_path / "a", ours, one_pass)
    candidate = trained(tmp_path / "b", *theirs)
    comparison = roundoff.compare(reference=reference, candidate=candidate)
    assert comparison.agrees, comparison.answer


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_shows_in_the_results_is_told(tmp_path, way):
    ours, losses_of, step_of = way
    reference = trained(tmp_path / "a", ours, one_pass)

    def doubled(kind, size):
        return losses_of(kind, size, factor=2.0)

    candidate = trained(tmp_path / "b", doubled, step_of)
    assert not roundoff.compare(reference=reference, candidate=candidate).agrees


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_another_loss_with_the_same_gradients_is_told(tmp_path, way):
    ours, losses_of, step_of = way
    reference = trained(tmp_path / "a", ours, one_pass)

    def more(kind, size):
        return losses_of(kind, size, constant=math.log(2 * math.pi))

    candidate = trained(tmp_path / "b", more, step_of)
    assert not roundoff.compare(reference=reference, candidate=candidate).agrees


def test_a_factor_that_a_clip_hides_is_told(tmp_path):
    def clipped(losses, parameters):
        one_pass(losses, [*parameters], limit=1e-3)

    def clipped_of_half(losses, parameters):
        first, second = losses
        (first / 2).backward(retain_graph=True)
        (second / 2).backward()
        nn.utils.clip_grad_norm_([*parameters], 1e-3)

    reference = trained(tmp_path / "a", losses, clipped)
    candidate = trained(tmp_path / "b", losses, clipped_of_half)
    assert not roundoff.compare(reference=reference, candidate=candidate).agrees


def test_a_number_beside_the_loss_is_told(tmp_path):
    """Nothing reads it, and it is no part of what is trained."""

    def with_accuracy(by):
        def both(kind, size):
            by(kind).float().mean()
            return losses(kind, size)

        return both

    reference = trained(
        tmp_path / "a", with_accuracy(lambda kind: kind.sigmoid()), one_pass
    )
    candidate = trained(
        tmp_path / "b", with_accuracy(lambda kind: kind.sigmoid().neg()), a_pass_each
    )
    assert not roundoff.compare(reference=reference, candidate=candidate).agrees


def averaged(folder: Path, step_of, write) -> Path:
    """Record two steps that keep an average of the parameters, which has no name."""
    average: list[torch.Tensor] = []

    def step_and_write(losses, parameters):
        parameters = [*parameters]
        average.extend(p.detach().clone() for p in parameters[len(average) :])
        step_of(losses, parameters)
        with torch.no_grad():
            for slow, fast in zip(average, parameters, strict=True):
                write(slow, fast)

    return trained(folder, losses, step_and_write)


def stacked(losses, parameters):
    torch.stack(losses).sum().backward()


def written(decay):
    def write(slow, fast):
        slow.copy_(fast + decay * (slow - fast))

    return write


@pytest.mark.parametrize("decay", [0.9, 0.5])
def test_an_average_beside_losses_in_one_pass_back(tmp_path, decay):
    """The sum of the losses and the copies are in the candidate only: they are values of
    the reference, unless the average is another one."""

    def moved(slow, fast):
        slow.mul_(0.9).add_(fast, alpha=0.1)

    reference = averaged(tmp_path / "a", a_pass_each, moved)
    candidate = averaged(tmp_path / "b", stacked, written(decay))
    comparison = roundoff.compare(reference=reference, candidate=candidate)
    assert comparison.agrees == (decay == 0.9), comparison.answer


LIMIT = 0.05


def clipped_by_the_library(losses, parameters):
    one_pass(losses, [*parameters], limit=LIMIT)


def clipped_by_hand(limit):
    def step(losses, parameters):
        parameters = [*parameters]
        a_pass_each(losses, parameters)
        gradients = [p.grad for p in parameters]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for gradient in gradients:
            gradient.mul_((limit / (norm + 1e-6)).clamp(max=1.0))

    return step


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_two_passes_that_are_clipped_by_hand(tmp_path, factor):
    reference = trained(tmp_path / "a", losses, clipped_by_the_library)
    candidate = trained(tmp_path / "b", losses, clipped_by_hand(factor * LIMIT))
    comparison = roundoff.compare(reference=reference, candidate=candidate)
    assert comparison.agrees == (factor == 1.0), comparison.answer
