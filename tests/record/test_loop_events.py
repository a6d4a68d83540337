"""What a recording notes of a loop, in the order in which it goes into an update."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import nn

import roundoff
from roundoff.compare.loop.optimizer_steps import optimizer_steps
from roundoff.record import HELD


def searched(folder, *, clears=True):
    """Two steps of an optimizer that runs the model itself, once each."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    search = torch.optim.LBFGS(model.parameters(), max_iter=1)
    x = torch.randn(8, 4)

    def closure():
        if clears:
            search.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    with roundoff.capture(folder, model) as run:
        for _ in range(2):
            search.step(closure)
            run.step()
    return folder


def test_what_a_closure_does_goes_into_the_step_that_calls_it(tmp_path):
    loop = roundoff.load(searched(tmp_path / "run")).loop
    events = [(number, event) for number in (0, 1) for event in loop(0, number)]
    names = [event.what for _, event in events if event.what != "frozen"]
    assert names == ["zero_grad", "backward", "optimizer.step"] * 2
    assert [step.gathered for step in optimizer_steps(events)] == [1, 1]


def test_a_closure_that_does_not_clear_is_told_first(tmp_path):
    right = searched(tmp_path / "right")
    wrong = searched(tmp_path / "wrong", clears=False)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.name == "zero_grad"
    assert "those of 2 backward passes add up before LBFGS steps" in first.evidence


class Both(torch.optim.Optimizer):
    """Steps two others, the second of which may fail."""

    def __init__(self, model, fails=False):
        super().__init__(model.parameters(), {})
        self.fails = fails
        self.parts = [
            torch.optim.SGD([model.weight], lr=0.1),
            torch.optim.SGD([model.bias], lr=0.2),
        ]

    def step(self, closure=None):
        self.parts[0].step()
        if self.fails:
            self.fails = False
            raise ArithmeticError
        self.parts[1].step()


@pytest.mark.parametrize("fails", [False, True])
def test_which_optimizer_steps_inside_of_another_is_noted(tmp_path, fails):
    model = nn.Linear(4, 1)
    both = Both(model, fails)
    alone = torch.optim.Adagrad(model.parameters())
    with roundoff.capture(tmp_path / "run", model) as run:
        model(torch.ones(2, 4)).sum().backward()
        with suppress(ArithmeticError):
            both.step()
        both.step()
        alone.step()
        run.step()
    events = roundoff.load(tmp_path / "run").loop(0, 0)
    steps = [(e.of, e.inside) for e in events if e.what == "optimizer.step"]
    whole = [("Both", ""), ("SGD", "Both"), ("SGD#1", "Both")]
    first = whole[:2] if fails else whole
    assert steps == [*first, *whole, ("Adagrad", "")]


class WarmingUp(torch.optim.SGD):
    """Sets its own rate before it updates."""

    def __init__(self, model, rate=0.1):
        super().__init__(model.parameters(), lr=rate)
        self.rate = rate
        self.done = 0

    def step(self, closure=None):
        self.done += 1
        self.param_groups[0]["lr"] = self.rate * min(1.0, self.done / 4)
        return super().step(closure)


def warmed_up(folder, optimizer_of):
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = optimizer_of(model)
    with roundoff.capture(folder, model) as run:
        for _ in range(2):
            optimizer.zero_grad()
            (model(torch.ones(2, 4)) - 1).square().mean().backward()
            optimizer.step()
            run.step()
    return folder


def scheduled(model):
    """The same rates, by a schedule."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: (n + 1) / 4)
    optimizer.register_step_post_hook(lambda *_: schedule.step())
    return optimizer


def test_a_rate_that_a_step_sets_itself_is_the_one_that_it_takes(tmp_path):
    own = warmed_up(tmp_path / "own", WarmingUp)
    loop = roundoff.load(own).loop
    events = [event for number in (0, 1) for event in loop(0, number)]
    steps = [event for event in events if event.what == "optimizer.step"]
    assert [(e.numbers["lr"], e.changed.get("lr")) for e in steps] == [
        (0.1, 0.025),
        (0.025, 0.05),
    ]
    other = warmed_up(tmp_path / "other", scheduled)
    assert roundoff.compare(reference=own, candidate=other).agrees
    wrong = warmed_up(tmp_path / "wrong", lambda model: WarmingUp(model, rate=0.3))
    first = roundoff.compare(reference=own, candidate=wrong).culprits()[0]
    assert first.name == "learning rate"


@pytest.mark.parametrize(
    "handed", [nn.Module.parameters, lambda model: [*model.parameters()]]
)
def test_a_clip_says_how_many_values_it_is_given(handed, tmp_path):
    """The parameters of a generator are clipped though they were counted."""
    model = nn.Linear(4, 1)
    with roundoff.capture(tmp_path / "run", model) as run:
        model(torch.ones(2, 4)).sum().mul(100).backward()
        nn.utils.clip_grad_norm_(handed(model), 1.0)
        run.step()
    gradients = torch.cat([p.grad.flatten() for p in model.parameters()])
    # clip_grad_norm_ divides by the norm and 1e-6
    assert gradients.norm().item() == pytest.approx(1.0, abs=1e-5)
    [clip] = [e for e in roundoff.load(tmp_path / "run").loop(0, 0) if "clip" in e.what]
    assert clip.numbers == {"max_norm": 1.0, HELD: 5.0}
