"""Weights in a dict, and slow copies beside the optimizer: what one run alone changes."""

from __future__ import annotations

import copy

import pytest
import torch

import roundoff
from roundoff.compare.loop.unnamed_updates import unnamed_state
from roundoff.compare.records.recorded_rows import RecordedRow

KEEP = pytest.mark.parametrize("keep", ["tensors", "stats"])


def trained(
    folder, keep, *, frozen=(), left_out=(), follows=True, early=False, decay=0.0
):
    """Record two steps of a regression whose weights stand in a dict."""
    draw = torch.Generator().manual_seed(1)
    weights = {
        "in": torch.randn(6, 4, generator=draw),
        "gain": torch.randn(4, generator=draw),
        "out": torch.randn(4, 2, generator=draw),
    }
    for name, value in weights.items():
        value.requires_grad_(name not in frozen)
    slow = {name: value.detach().clone() for name, value in weights.items()}
    held = [value for name, value in weights.items() if name not in left_out]
    optimizer = torch.optim.AdamW(held, lr=0.01, weight_decay=decay)
    x = torch.randn(8, 6, generator=draw)
    with roundoff.capture(folder, keep=keep) as run:
        for _ in range(2):
            hidden = torch.tanh(x @ weights["in"]) * weights["gain"]
            loss = (hidden @ weights["out"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if early:
                follow(slow, weights)
            optimizer.step()
            if follows and not early:
                follow(slow, weights)
            run.step()
    return folder


@torch.no_grad()
def follow(slow, weights):
    for name, value in slow.items():
        value.lerp_(weights[name], 0.1)


@KEEP
@pytest.mark.parametrize("how", ["frozen", "left_out"])
def test_a_weight_without_a_module_that_is_not_updated(how, keep, tmp_path):
    right = trained(tmp_path / "right", keep)
    wrong = trained(tmp_path / "wrong", keep, **{how: ("gain",)})
    found = roundoff.compare(reference=right, candidate=wrong)
    first = found.culprits()[0]
    assert first.looks_like == "missing update"
    assert "a parameter that no module names, of 4 (" in first.evidence
    assert "is not changed here" in first.evidence
    assert not any("were fed" in culprit.evidence for culprit in found.culprits())


@KEEP
def test_a_weight_that_only_the_candidate_updates(keep, tmp_path):
    right = trained(tmp_path / "right", keep, left_out=("gain",))
    wrong = trained(tmp_path / "wrong", keep)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "extra update"
    assert "is changed here by" in first.evidence


@KEEP
def test_slow_copies_that_are_moved_before_the_optimizer_steps(keep, tmp_path):
    right = trained(tmp_path / "right", keep)
    wrong = trained(tmp_path / "wrong", keep, early=True)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert "slow copies of the weights are moved before the optimizer steps" in (
        first.evidence
    )
    back = roundoff.compare(reference=wrong, candidate=right).culprits()[0]
    assert "are moved after the optimizer steps" in back.evidence


@KEEP
def test_slow_copies_that_stay_behind_do_not_agree(keep, tmp_path):
    right = trained(tmp_path / "right", keep)
    wrong = trained(tmp_path / "wrong", keep, follows=False)
    found = roundoff.compare(reference=right, candidate=wrong)
    assert not found.agrees
    first = found.culprits()[0]
    assert first.looks_like == "missing update"
    assert "3 values from before the step, of a parameter's shape" in first.evidence
    assert "lerp_" in first.evidence
    back = roundoff.compare(reference=wrong, candidate=right)
    assert back.culprits()[0].looks_like == "extra update"


@KEEP
def test_equal_runs_agree(keep, tmp_path):
    right = trained(tmp_path / "right", keep)
    again = trained(tmp_path / "again", keep)
    found = roundoff.compare(reference=right, candidate=again)
    assert found.agrees
    assert not found.culprits()


def made(folder, *, left_out=()):
    """Record a step in which the model is made, and then trained."""
    with roundoff.capture(folder, keep="tensors") as run:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        held = [p for name, p in model.named_parameters() if name not in left_out]
        optimizer = torch.optim.SGD(held, lr=0.1)
        model(torch.ones(3, 4)).square().sum().backward()
        optimizer.step()
        run.step()
    return folder


def test_what_a_module_names_later_is_told_by_that_name(tmp_path):
    right = made(tmp_path / "right")
    wrong = made(tmp_path / "wrong", left_out=("bias",))
    found = roundoff.compare(reference=right, candidate=wrong)
    assert found.culprits()[0].name == "bias"
    assert not any("no module names" in c.evidence for c in found.culprits())


@pytest.mark.parametrize(
    ("operator", "found"),
    [("add_", [0]), ("_amp_foreach_non_finite_check_and_unscale_", [])],
)
def test_the_flags_of_a_loss_scaler_are_no_weights(operator, found):
    made = RecordedRow(record=0, call=0, operator="full", phase="forward")
    write = RecordedRow(
        record=1,
        call=1,
        operator=operator,
        overload="Tensor" if operator == "add_" else "default",
        phase="optimizer",
        inputs=(0,),
        inplace=True,
    )
    assert [row.record for row in unnamed_state({0: made, 1: write})] == found


@KEEP
def test_a_weight_that_decays_in_one_run_alone_is_updated_in_both(keep, tmp_path):
    right = trained(tmp_path / "right", keep)
    wrong = trained(tmp_path / "wrong", keep, decay=0.1)
    found = roundoff.compare(reference=right, candidate=wrong)
    first = found.culprits()[0]
    assert (first.kind, first.name) == ("loop", "weight decay")
    assert not [other for other in found.culprits() if other.kind == "update"]


def stepped(folder, *, by_hand):
    """Record two steps of SGD on weights in a list, with a decay of its own or by hand."""
    draw = torch.Generator().manual_seed(1)
    weights = [torch.randn(6, 4, generator=draw), torch.randn(4, 2, generator=draw)]
    for value in weights:
        value.requires_grad_()
    optimizer = torch.optim.SGD(weights, lr=0.1, weight_decay=0.0 if by_hand else 0.1)
    x = torch.randn(8, 6, generator=draw)
    with roundoff.capture(folder, keep="tensors") as run:
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            (torch.tanh(x @ weights[0]) @ weights[1]).square().mean().backward()
            if by_hand:
                with torch.no_grad():
                    for value in weights:
                        value.grad.add_(value, alpha=0.1)
            optimizer.step()
            run.step()
    return folder


def test_a_decay_that_is_added_to_gradients_by_hand_moves_no_copy(tmp_path):
    right = stepped(tmp_path / "right", by_hand=False)
    hand = stepped(tmp_path / "hand", by_hand=True)
    found = roundoff.compare(reference=right, candidate=hand)
    assert not any("slow copies" in culprit.evidence for culprit in found.culprits())


def evaluated(folder, *, follows):
    """Record two steps after which a slow copy of a layer is put into a second one."""
    torch.manual_seed(0)
    net, other = torch.nn.Linear(6, 4), torch.nn.Linear(6, 4)
    slow = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    with roundoff.capture(folder, torch.nn.ModuleList([net, other])) as run:
        for _ in range(2):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for name, p in net.named_parameters():
                    if follows:
                        slow[name].lerp_(p, 0.3)
                    other.get_parameter(name).copy_(slow[name])
                other(x)
            run.step()
    return folder


def test_a_slow_copy_goes_before_the_parameter_that_it_is_copied_to(tmp_path):
    right = evaluated(tmp_path / "right", follows=True)
    wrong = evaluated(tmp_path / "wrong", follows=False)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "missing update"
    assert "a slow copy of the weights stays behind" in first.evidence


class OfItsOwn(torch.optim.Optimizer):
    """AdamW without decay, which makes its averages before it steps."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        held = self.param_groups[0]["params"]
        self.first = [torch.zeros_like(p, requires_grad=False) for p in held]
        self.second = [torch.zeros_like(p, requires_grad=False) for p in held]
        self.number = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.number += 1
        for p, m, v in zip(
            self.param_groups[0]["params"], self.first, self.second, strict=True
        ):
            m.copy_(0.9 * m + 0.1 * p.grad)
            v.copy_(0.999 * v + 0.001 * p.grad.square())
            down = (v / (1 - 0.999**self.number)).sqrt() + 1e-8
            p.sub_(0.01 * m / (1 - 0.9**self.number) / down)


def from_its_making(folder, keep, optimizer_of):
    with roundoff.capture(folder, keep=keep) as run:
        torch.manual_seed(0)
        model = torch.nn.Linear(6, 3)
        x = torch.randn(8, 6)
        optimizer = optimizer_of(list(model.parameters()))
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            run.step()
    return folder


@KEEP
def test_averages_that_an_optimizer_makes_early_are_no_weights(keep, tmp_path):
    def of_torch(parameters):
        return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.0)

    right = from_its_making(tmp_path / "right", keep, of_torch)
    other = from_its_making(tmp_path / "other", keep, OfItsOwn)
    found = roundoff.compare(reference=right, candidate=other)
    assert not any("no module names" in c.evidence for c in found.culprits())
    assert found.agrees or keep == "stats"


def with_a_copied_module(folder, *, early):
    """A module that is copied in the first step, and a copy that follows its weights."""
    torch.manual_seed(2)
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(8, 6)
    with roundoff.capture(folder, net) as run:
        slow = copy.deepcopy(net)
        for _ in range(2):
            (net(x).square().mean() + (slow(x) - net(x)).abs().mean()).backward()
            if early:
                follow(slow.state_dict(), net.state_dict())
            optimizer.step()
            if not early:
                follow(slow.state_dict(), net.state_dict())
            optimizer.zero_grad()
            run.step()
    return folder


def test_a_copied_module_that_is_moved_before_the_optimizer_steps(tmp_path):
    right = with_a_copied_module(tmp_path / "right", early=False)
    wrong = with_a_copied_module(tmp_path / "wrong", early=True)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert "are moved before the optimizer steps" in first.evidence
