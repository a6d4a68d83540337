"""What optimizers by different hands make of the same parameters, with tensors and without."""

from __future__ import annotations

import linecache
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import roundoff as ro
from roundoff.compare.ports.port_updates import (
    UPDATE,
    _are_known,
    _Parameters,
    _statistics_apart,
    _Updated,
)
from roundoff.compare.records.recorded_rows import RecordedRow

RATE = 0.05
MOMENTUM = 0.9
DECAY = 0.02


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.second = nn.Linear(16, 3)

    def forward(self, x, y):
        scores = self.second(torch.tanh(self.first(x)))
        return nn.functional.cross_entropy(scores, y)


class Port(nn.Module):
    def __init__(self, reference):
        super().__init__()
        layers = (reference.first, reference.second)
        self.w = nn.ParameterList(
            [layer.weight.detach().t().clone() for layer in layers]
        )
        self.b = nn.ParameterList([layer.bias.detach().clone() for layer in layers])

    def forward(self, x, y):
        hidden = torch.einsum("bi,ih->bh", x, self.w[0]) + self.b[0]
        hidden = (hidden.exp() - (-hidden).exp()) / (hidden.exp() + (-hidden).exp())
        scores = torch.einsum("bh,ho->bo", hidden, self.w[1]) + self.b[1]
        shares = scores.softmax(-1)
        return -shares[torch.arange(len(y)), y].log().mean()


class ByHand(torch.optim.Optimizer):
    """SGD with Nesterov's momentum, written out; ``wrong`` leaves a part out."""

    def __init__(self, parameters, wrong=""):
        super().__init__(parameters, {})
        self.wrong = wrong

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            gradient = parameter.grad
            if self.wrong != "decay":
                gradient = gradient + DECAY * parameter
            velocity = gradient.clone()
            ahead = velocity
            if self.wrong != "nesterov":
                ahead = gradient + MOMENTUM * velocity
            parameter -= (1.01 if self.wrong == "rate" else 1.0) * RATE * ahead


def recorded(folder, module, optimizer):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(7, 12, generator=generator)
    y = torch.randint(0, 3, (7,), generator=generator)
    with ro.capture(folder, module, keep="tensors"):
        module(x, y).backward()
        optimizer.step()
    return str(folder)


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("wrong", ["", "decay", "nesterov", "rate"])
def test_an_optimizer_by_hand_is_right_or_wrong(wrong, tensors, tmp_path):
    torch.manual_seed(0)
    reference = Reference()
    port = Port(reference)
    optimizer = torch.optim.SGD(
        reference.parameters(),
        RATE,
        momentum=MOMENTUM,
        nesterov=True,
        weight_decay=DECAY,
    )
    comparison = ro.compare(
        reference=recorded(tmp_path / "ours", reference, optimizer),
        candidate=recorded(tmp_path / "theirs", port, ByHand(port.parameters(), wrong)),
        tensors=tensors,
    )
    assert comparison.agrees == (wrong == "")
    assert {culprit.phase for culprit in comparison.culprits(3)} <= {"optimizer"}


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("lost", [True, False])
def test_one_optimizer_alone_changes_the_biases(lost, tensors, tmp_path):
    """They are a small share of all values: it is found by what is written."""
    torch.manual_seed(0)
    reference = Reference()
    port = Port(reference)
    layers = (reference.first, reference.second)
    all_of_ours = list(reference.parameters())
    ours = all_of_ours if lost else [layer.weight for layer in layers]
    theirs = list(port.w) if lost else list(port.parameters())
    settings = {"momentum": MOMENTUM, "nesterov": True, "weight_decay": DECAY}
    comparison = ro.compare(
        reference=recorded(
            tmp_path / "ours", reference, torch.optim.SGD(ours, RATE, **settings)
        ),
        candidate=recorded(tmp_path / "theirs", port, ByHand(theirs)),
        tensors=tensors,
    )
    [first] = comparison.culprits(3)
    assert first.name == "b.0"
    assert first.phase == "optimizer"
    assert first.looks_like == ("missing update" if lost else "extra update")
    assert first.evidence.startswith("b.0 and b.1 are")
    if lost:
        assert "The runs part in the update of b.0" in comparison.answer


class WithAverage(torch.optim.Optimizer):
    """Plain descent; what a buffer holds follows the weight."""

    def __init__(self, weight, average, share):
        super().__init__([weight], {})
        self.average = average
        self.share = share

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        [weight] = self.param_groups[0]["params"]
        weight -= RATE * weight.grad
        self.average += self.share * (weight - self.average)


class Wrapping(WithAverage):
    """Another optimizer steps inside of it, before the average follows."""

    def __init__(self, weight, average, share):
        super().__init__(weight, average, share)
        self.inner = torch.optim.SGD([weight], RATE)

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        self.inner.step()
        [weight] = self.param_groups[0]["params"]
        self.average.lerp_(weight, self.share)


class ThroughAView(WithAverage):
    """The average is written as ``state_dict`` hands it out."""

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        [weight] = self.param_groups[0]["params"]
        weight.data.sub_(RATE * weight.grad)
        self.average.detach().lerp_(weight, self.share)


class Averaged(nn.Module):
    def __init__(self, *, turned):
        super().__init__()
        weight = torch.randn(12, 3, generator=torch.Generator().manual_seed(4))
        self.turned = turned
        weight = weight.t().contiguous() if turned else weight
        self.register_parameter("weight" if turned else "w", nn.Parameter(weight))
        self.register_buffer("slow" if turned else "mean", weight.clone())

    def forward(self, x, y):
        if self.turned:
            return nn.functional.cross_entropy(nn.functional.linear(x, self.weight), y)
        shares = torch.einsum("bi,io->bo", x, self.w).softmax(-1)
        return -shares[torch.arange(len(y)), y].log().mean()


@pytest.mark.parametrize("tensors", [True, False])
@pytest.mark.parametrize("share", [0.1, 0.02])
@pytest.mark.parametrize("reference", [WithAverage, Wrapping, ThroughAView])
def test_an_average_that_no_gradient_reaches_is_compared(
    reference, share, tensors, tmp_path
):
    ours, theirs = Averaged(turned=True), Averaged(turned=False)
    comparison = ro.compare(
        reference=recorded(
            tmp_path / "ours", ours, reference(ours.weight, ours.slow, 0.1)
        ),
        candidate=recorded(
            tmp_path / "theirs", theirs, WithAverage(theirs.w, theirs.mean, share)
        ),
        tensors=tensors,
    )
    assert comparison.agrees == (share == 0.1)
    for first in comparison.culprits(1):
        number = int(first.line.rpartition(":")[2])
        assert "self.share * (weight" in linecache.getline(__file__, number)


def row(values):
    return RecordedRow(
        record=0,
        call=-1,
        operator="",
        dtype="float32",
        numel=values.numel(),
        min=values.min().item(),
        max=values.max().item(),
        mean=values.double().mean().item(),
        l2=values.double().norm().item(),
    )


def apart(start, change, other_change):
    return _statistics_apart(
        _Updated(updated(start, change), updated(start, other_change))
    )


def updated(start, change):
    return _Parameters((row(start),), (row(start + change),))


@pytest.mark.parametrize(("size", "factor"), [(1e-1, 1.02), (1e-3, 1.02), (1e-5, 1.5)])
def test_updates_apart_by_rounding_and_by_more(size, factor):
    """The last update is a hundred roundings of the parameter: a small share is lost."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(400, generator=generator)
    change = torch.randn(400, generator=generator) * size
    assert apart(start, change, change) == 0
    # each element of the update rounded once more
    rounded = change * (1 + torch.randn(400, generator=generator) * 2**-24)
    assert apart(start, change, rounded) < UPDATE
    assert apart(start, change, factor * change) > UPDATE
    assert apart(start, change, change + 0.5 * size * start) > UPDATE
    assert apart(start, torch.zeros(400), torch.zeros(400)) == 0


def test_updates_of_what_is_not_finite_or_not_known_are_not_apart():
    start = torch.ones(4)
    nan = torch.full((4,), torch.nan)
    assert apart(start, nan, start) == 0
    unknown = RecordedRow(record=0, call=-1, operator="", numel=4)
    theirs = _Parameters((unknown,), (unknown,))
    assert _statistics_apart(_Updated(updated(start, start), theirs)) == 0


def test_what_a_compiled_program_writes_is_not_known():
    """Its buffers are written in kernels that nobody sees into: nothing left them as they
    were."""
    filled = RecordedRow(
        record=1, call=0, operator="fill_", numel=4, name="running_var"
    )
    compiled = RecordedRow(record=2, call=1, operator="compiled", numel=4)
    buffer = _Parameters((filled,), (filled,))

    def are_known(*rows):
        step = SimpleNamespace(rows={each.record: each for each in rows})
        return _are_known(SimpleNamespace(step=step), buffer)

    assert are_known(filled)
    assert not are_known(filled, compiled)
    # what is written after it is seen
    assert are_known(replace(compiled, record=0), filled)


class Modes(nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.kernel = nn.Parameter(kernel)

    def forward(self, x, y):
        waves = torch.fft.rfft(x) * self.kernel
        return (torch.fft.irfft(waves, x.shape[-1]) - y[:, None]).square().mean()


class TransposedModes(Modes):
    def forward(self, x, y):
        waves = torch.fft.rfft(x.t(), dim=0) * self.kernel[:, None]
        away = torch.fft.irfft(waves, x.shape[-1], dim=0) - y[None]
        return (away**2).sum() / away.numel()


class AdamByHand(torch.optim.Optimizer):
    """The first step of Adam on complex numbers: of both parts, or of the absolute value."""

    def __init__(self, parameters, of_parts):
        super().__init__(parameters, {})
        self.of_parts = of_parts

    @torch.no_grad()
    def step(self):  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            slope = parameter.grad
            if self.of_parts:
                parts = torch.view_as_real(slope)
                moved = torch.view_as_complex(parts / (parts.square().sqrt() + 1e-8))
            else:
                moved = slope / (slope.abs() + 1e-8)
            parameter -= RATE * moved


@pytest.mark.parametrize("of_parts", [True, False])
def test_an_optimizer_of_complex_parameters_is_right_or_wrong(of_parts, tmp_path):
    torch.manual_seed(0)
    kernel = torch.randn(7, dtype=torch.complex64)
    reference = Modes(kernel)
    port = TransposedModes(kernel.clone())
    ours = torch.optim.Adam(reference.parameters(), RATE, foreach=False)
    theirs = AdamByHand(port.parameters(), of_parts)
    comparison = ro.compare(
        reference=recorded(tmp_path / "ours", reference, ours),
        candidate=recorded(tmp_path / "theirs", port, theirs),
    )
    assert comparison.agrees == of_parts


class WithTable(Reference):
    """A table that hardly counts: its gradient is a small share of the others'."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 12))

    def forward(self, x, y):
        return super().forward(x + 1e-3 * self.table, y)


class PortWithTable(Port):
    def __init__(self, reference):
        super().__init__(reference)
        self.places = nn.Parameter(reference.table.detach().clone())

    def forward(self, x, y):
        return super().forward(0.001 * self.places + x, y)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_update_of_a_parameter_that_hardly_counts_is_compared(decay, tmp_path):
    torch.manual_seed(0)
    reference = WithTable()
    port = PortWithTable(reference)
    settings = {"lr": RATE, "betas": (0.9, 0.99)}
    ours = torch.optim.AdamW(reference.parameters(), weight_decay=0.0, **settings)
    rest = [p for p in port.parameters() if p is not port.places]
    groups = [
        {"params": rest, "weight_decay": 0.0},
        {"params": [port.places], "weight_decay": 0.0},
    ]
    theirs = DecayingByHand(groups, port.places, decay, **settings)
    comparison = ro.compare(
        reference=recorded(tmp_path / "ours", reference, ours),
        candidate=recorded(tmp_path / "theirs", port, theirs),
    )
    assert comparison.agrees == (not decay)
    assert {culprit.phase for culprit in comparison.culprits(3)} <= {"optimizer"}


class DecayingByHand(torch.optim.AdamW):
    """Takes a share of one parameter away beside its step."""

    def __init__(self, groups, decayed, share, **settings):
        super().__init__(groups, **settings)
        self.decayed = decayed
        self.share = share

    @torch.no_grad()
    def step(self, closure=None):
        if self.share:
            self.decayed.mul_(1 - self.param_groups[0]["lr"] * self.share)
        return super().step(closure)
