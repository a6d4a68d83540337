"""Calls that differ by name, of which all results agree: a formula that is written otherwise."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import roundoff
from roundoff.compare.judging.explain import EarlierSteps, RecordedStep, Sides
from roundoff.compare.loop.step_results import losses_of
from roundoff.compare.ports.port_comparison import StepByValues
from roundoff.compare.records.recorded_rows import rows_of
from roundoff.record import StepTensors

X = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (6,), generator=torch.Generator().manual_seed(2))


class Net(nn.Module):
    """``before`` and ``after`` a matrix a number is multiplied with: their product counts."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.mixed = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 3)
        self.before = 2.0
        self.after = 0.5

    def forward(self, x):
        h = torch.tanh(self.first(x)) * self.before
        return self.last(torch.relu(self.mixed(h) * self.after))


def likeness(net):
    a, b = F.normalize(net(X), dim=1), F.normalize(net(X + 1), dim=1)
    return a @ b.T / 0.2


def by_cross_entropy(net):
    """Each is like its own other view, from both sides."""
    logits = likeness(net)
    same = torch.arange(len(logits))
    contrast = 0.5 * (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same))
    (contrast + net(X).square().mean() / 3).backward()


def by_trace(net, temperature=1.0):
    logits = likeness(net) * temperature
    others = torch.stack([logits.logsumexp(0), logits.logsumexp(1)])
    contrast = others.mean() - logits.trace() / len(logits)
    (contrast + net(X).square().mean() / 3).backward()


@pytest.fixture
def recorded(tmp_path):
    """``recorded(step)``: the folder of a recorded step of a network."""
    count = itertools.count()

    def record(step):
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        folder = tmp_path / str(next(count))
        with roundoff.capture(folder, net, keep="tensors"):
            step(net)
            optimizer.step()
        return folder

    return record


def at_once(net, before=2.0, after=0.5):
    net.before, net.after = before, after
    F.cross_entropy(net(X), Y).backward()


def in_halves(net):
    for half in (slice(0, 3), slice(3, 6)):
        (F.cross_entropy(net(X[half]), Y[half]) / 2).backward()


def halves_together(net, factor=1.0):
    halves = (slice(0, 3), slice(3, 6))
    losses = [F.cross_entropy(net(X[half]), Y[half]) for half in halves]
    (factor * torch.stack(losses).mean()).backward()


WEIGHTS = (0.5, 1.5, 3.0, 0.25, 2.0, 1.0)


def weighed_in_pairs(net):
    """What a batch is made of is read pair by pair."""
    weights = torch.zeros(6)
    shares = torch.zeros(6)
    for place in range(0, 6, 2):
        weights[place : place + 2] = torch.tensor(WEIGHTS[place : place + 2])
        shares[place : place + 2] = torch.tensor([0.1 * place + 1, 2.0])
    each = F.cross_entropy(net(X), Y, reduction="none")
    (each * weights * shares).sum().backward()


def weighed_at_once(net, last=2.0):
    weights = torch.tensor(WEIGHTS)
    shares = torch.tensor([1.0, 2.0, 1.2, 2.0, 1.4, last])
    each = F.cross_entropy(net(X), Y, reduction="none")
    (each * weights * shares).sum().backward()


GROUPS = torch.tensor([0, 0, 1, 1, 1, 2])


def ranked_at_once(net):
    """What is wanted before what is not, within a group; each group counts once."""
    score = net(X)[:, 0]
    wanted = Y > 0
    pair = (GROUPS[:, None] == GROUPS) & (wanted[:, None] & ~wanted)
    many = torch.zeros(3).index_add_(0, GROUPS, pair.sum(1).float())
    weight = pair / many.clamp(min=1.0)[GROUPS][:, None]
    gap = score[:, None] - score - 0.1
    ((weight * F.softplus(-gap)).sum() / (many > 0).sum()).backward()


def ranked_group_by_group(net, margin=0.1):
    """Groups of which all or none is wanted are picked, and left."""
    score = net(X)[:, 0]
    losses = []
    for number in GROUPS.unique():
        mine = number == GROUPS
        wanted, others = score[mine & (Y > 0)], score[mine & (Y == 0)]
        if len(wanted) and len(others):
            gap = (wanted.unsqueeze(1) - others).flatten() - margin
            losses.append(-F.logsigmoid(gap).mean())
    torch.stack(losses).mean().backward()


def parts_one_by_one(net):
    """Each column is embedded by itself; one network reads each."""
    weight, bias = net.first.weight, net.first.bias
    parts = [F.linear(X[:, i : i + 1], weight[:, i : i + 1], bias) for i in range(3)]
    share = torch.cat(parts, 1).unflatten(1, (3, 8)).sum(2).softmax(1)
    told = torch.stack([net.mixed(torch.tanh(part)) for part in parts], 1)
    F.cross_entropy(net.last((share[:, :, None] * told).sum(1)), Y).backward()


def parts_together(net, scale=1.0):
    slope = torch.stack([net.first.weight[:, i] for i in range(3)])
    parts = torch.addcmul(net.first.bias, X[:, :3].unsqueeze(2), slope)
    share = (scale * parts.sum(2)).log_softmax(1).exp()
    told = torch.stack([net.mixed(torch.tanh(parts[:, i])) for i in range(3)], 2)
    mixed = torch.einsum("bv,bwv->bw", share, told)
    F.cross_entropy(net.last(mixed), Y).backward()


def slope_at(net, x):
    """How fast each output changes with the input: a loss is made of it."""
    x = x.clone().requires_grad_()
    told = net(x).square().sum(1)
    return told, x


def slopes_of_the_sum(net):
    told, x = slope_at(net, X)
    (slope,) = torch.autograd.grad(told.sum(), x, create_graph=True)
    (told.mean() + (slope.sum(1) - 0.3).square().mean()).backward()


def slopes_by_hand(net, wanted=0.3):
    """The pull of ones, and the same square by its parts."""
    told, x = slope_at(net, X)
    slope = torch.autograd.grad(told, x, torch.ones(len(X)), create_graph=True)[0]
    total = slope @ torch.ones(5)
    away = total * total - 2 * wanted * total + wanted**2
    (torch.ones(len(X)) @ (told + away) / len(X)).backward()


def padded(fill):
    """Two lines of a batch, the second shorter; what is behind it does not count."""
    return torch.cat([X[:3], torch.cat([X[3:5], fill(X[5:])])]).view(2, 3, 5)


def with_zeros_behind(net):
    lines = padded(torch.zeros_like)
    there = torch.tensor([[True, True, True], [True, True, False]])
    F.cross_entropy(net(lines)[there], Y[:5]).backward()


def with_a_number_behind(net, counted=False):
    lines = padded(lambda row: torch.full_like(row, -7.5))
    there = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, float(counted)]])
    losses = F.cross_entropy(net(lines).flatten(0, 1), Y, reduction="none")
    ((losses * there.flatten()).sum() / 5).backward()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (slopes_of_the_sum, slopes_by_hand),
        (with_zeros_behind, with_a_number_behind),
        (at_once, partial(at_once, before=0.5, after=2.0)),
        (weighed_in_pairs, weighed_at_once),
        (by_cross_entropy, by_trace),
        (in_halves, halves_together),
        (ranked_at_once, ranked_group_by_group),
        (parts_one_by_one, parts_together),
    ],
)
def test_another_way_to_the_same_results_agrees(recorded, ours, theirs):
    found = roundoff.compare(reference=recorded(ours), candidate=recorded(theirs))
    assert found.agrees


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (slopes_of_the_sum, partial(slopes_by_hand, wanted=0.31)),
        (with_zeros_behind, partial(with_a_number_behind, counted=True)),
        (at_once, partial(at_once, before=0.5)),
        (weighed_in_pairs, partial(weighed_at_once, last=2.02)),
        (at_once, partial(at_once, before=0.5, after=2.01)),
        (by_cross_entropy, partial(by_trace, temperature=1.02)),
        (in_halves, partial(halves_together, factor=1.01)),
        (ranked_at_once, partial(ranked_group_by_group, margin=0.11)),
        (parts_one_by_one, partial(parts_together, scale=1.01)),
    ],
)
def test_another_way_to_other_results_does_not(recorded, ours, theirs):
    found = roundoff.compare(reference=recorded(ours), candidate=recorded(theirs))
    assert not found.agrees


def test_an_average_that_stays_as_it_was_is_no_agreement(recorded):
    """What it holds is what the parameter held, which the reference has too."""

    def follow(net, share):
        average = [p.detach().clone() for p in net.parameters()]
        at_once(net)
        with torch.no_grad():
            for mean, parameter in zip(average, net.parameters(), strict=True):
                mean.lerp_(parameter + 1, share)

    found = roundoff.compare(
        reference=recorded(lambda net: follow(net, 0.1)),
        candidate=recorded(lambda net: follow(net, 0.0)),
    )
    assert not found.agrees


class Parts(nn.Module):
    """Three layers in a row of one input, or one of all their outputs."""

    def __init__(self, *, joint):
        super().__init__()
        parts = [nn.Linear(5, 4) for _ in range(3)]
        self.head = nn.Linear(4, 3)
        if joint:
            self.weight = nn.Parameter(torch.cat([p.weight.data for p in parts]))
            self.bias = nn.Parameter(torch.cat([p.bias.data for p in parts]))
        else:
            self.a, self.b, self.c = parts

    def forward(self, x):
        if hasattr(self, "weight"):
            a, b, c = F.linear(x, self.weight, self.bias).chunk(3, 1)
        else:
            a, b, c = self.a(x), self.b(x), self.c(x)
        return self.head(torch.tanh(a) * torch.sigmoid(b) + c)


@pytest.fixture
def averaged(tmp_path):
    """``averaged(joint, share)``: the folder of two steps with an average of all weights."""
    count = itertools.count()

    def record(*, joint, share=0.1):
        torch.manual_seed(0)
        net = Parts(joint=joint)
        parameters = [*net.parameters()]
        average = [p.detach().clone() for p in parameters]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        folder = tmp_path / str(next(count))
        with roundoff.capture(folder, net, keep="tensors") as run:
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(net(X), Y).backward()
                optimizer.step()
                with torch.no_grad():
                    for mean, parameter in zip(average, parameters, strict=True):
                        mean.mul_(1 - share).add_(parameter, alpha=share)
                run.step()
        return folder

    return record


def step_of(folder, step):
    run = roundoff.load(folder)
    return RecordedStep(rows_of(run, 0, step), StepTensors(run, 0, step))


@pytest.mark.parametrize(("share", "agrees"), [(0.1, True), (0.11, False)])
def test_an_average_that_stands_in_several_results_is_computed_there(
    averaged, share, agrees
):
    folders = (
        averaged(joint=False),
        averaged(joint=True, share=share),
    )
    memory = EarlierSteps()
    for step in range(2):
        sides = Sides(*(step_of(folder, step) for folder in folders))
        compared = StepByValues(sides).after(memory).compared
        averages = {
            tuple(row.shape): row.record
            for row in sides.candidate.rows.values()
            if row.operator == "add_" and not row.name
        }
        assert compared.agree([averages[12, 5], averages[12,]]) is agrees


def test_the_average_of_parameters_that_are_put_together_agrees(averaged):
    reference = averaged(joint=False)
    assert roundoff.compare(reference=reference, candidate=averaged(joint=True)).agrees


@pytest.mark.parametrize("share", [0.0, 0.11])
def test_another_average_of_parameters_that_are_put_together(averaged, share):
    found = roundoff.compare(
        reference=averaged(joint=False), candidate=averaged(joint=True, share=share)
    )
    assert not found.agrees


def test_a_loss_is_not_what_another_is_made_of(recorded):
    for step, size in ((slopes_of_the_sum, 1), (in_halves, 2)):
        folder = recorded(step)
        rows = rows_of(roundoff.load(folder), 0, 0)
        assert len(losses_of(rows)) == size
