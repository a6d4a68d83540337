"""What a step is fed: data from outside, and numbers that the program draws, which are none."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import roundoff

KEEP = pytest.mark.parametrize("keep", ["tensors", "stats"])


def record(folder, keep, work):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    with roundoff.capture(folder, model, keep=keep) as run:
        work(model)
        run.step()
    return folder


def drawing(seed):
    """A program that draws its batch while it is recorded."""

    def work(model):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(5, 6, generator=generator) * 2 + 1
        model(x).square().mean().backward()

    return work


def filling(seed):
    """The loss is weighed by memory that a draw fills in place."""

    def work(model):
        generator = torch.Generator().manual_seed(seed)
        weights = torch.empty(3).uniform_(0.5, 1.5, generator=generator)
        (model(torch.ones(5, 6)) * weights).sum().backward()

    return work


@KEEP
@pytest.mark.parametrize(
    ("program", "operator"), [(drawing, "randn"), (filling, "uniform_")]
)
def test_what_a_program_draws_is_not_fed(program, operator, keep, tmp_path):
    right = record(tmp_path / "right", keep, program(1))
    wrong = record(tmp_path / "wrong", keep, program(2))
    found = roundoff.compare(reference=right, candidate=wrong)
    first = found.culprits()[0]
    assert (first.operator, first.looks_like) == (operator, "other draws")
    assert "draws other numbers" in found.answer
    assert not any("were fed" in culprit.evidence for culprit in found.culprits())


def shuffled(order):
    """The samples' order, and then their noise, are drawn from one generator."""

    def work(model):
        generator = torch.Generator().manual_seed(1)
        samples = torch.linspace(-1, 1, 60).reshape(10, 6)
        rows = order(10, generator)[:5]
        x = samples[rows] + 0.1 * torch.randn(5, 6, generator=generator)
        model(x).square().mean().backward()

    return work


def drawn_order(n, generator):
    return torch.randperm(n, generator=generator)


def unshuffled(n, _):
    return torch.arange(n)


@KEEP
def test_draw_that_is_left_out_goes_before_those_that_are_other_numbers_by_it(
    keep, tmp_path
):
    right = record(tmp_path / "right", keep, shuffled(drawn_order))
    wrong = record(tmp_path / "wrong", keep, shuffled(unshuffled))
    found = roundoff.compare(reference=right, candidate=wrong)
    first = found.culprits()[0]
    assert (first.operator, first.looks_like) == ("arange", "other data")
    assert "stands where the reference draws randperm" in first.evidence


@KEEP
def test_other_data_beside_equal_draws(keep, tmp_path):
    def work(x):
        def run(model):
            noise = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
            model(x + noise).square().mean().backward()

        return run

    x = torch.linspace(-1, 1, 30).view(5, 6)
    right = record(tmp_path / "right", keep, work(x))
    wrong = record(tmp_path / "wrong", keep, work(3 * x))
    found = roundoff.compare(reference=right, candidate=wrong)
    assert found.culprits()[0].looks_like == "other data"


@KEEP
def test_inputs_of_calls_that_one_run_alone_has_are_no_data(keep, tmp_path):
    """A cast in front of a layer reads a part of the batch, where a slice reads all."""

    def work(gain, *, autocast):
        def run(model):
            x = torch.linspace(-1, 1, 120).view(5, 4, 6)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                outputs = [model(x[:, t]).square().mean() for t in range(4)]
            (gain * sum(outputs)).backward()

        return run

    right = record(tmp_path / "right", keep, work(1.0, autocast=False))
    wrong = record(tmp_path / "wrong", keep, work(0.5, autocast=True))
    found = roundoff.compare(reference=right, candidate=wrong)
    assert not found.agrees
    assert "other data" not in {culprit.looks_like for culprit in found.culprits()}


def picking(folder, keep, samples, *, detached):
    """Record a program that makes its model and its data while it is recorded."""
    with roundoff.capture(folder, keep=keep) as run:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        data = torch.linspace(-1, 1, 60).view(10, 6)
        layer = nn.Linear(6, 6)
        weight = layer.weight.detach() if detached else layer.weight
        for _ in range(2):
            batch = torch.stack([data[number] for number in samples])
            model(functional.linear(batch, weight)).square().mean().backward()
            optimizer.step()
            run.step()
    return folder


@KEEP
@pytest.mark.parametrize("detached", [False, True])
def test_samples_picked_one_by_one_are_data(detached, keep, tmp_path):
    """Also in the step that makes the model: the calls that pick only show it."""
    right = picking(tmp_path / "right", keep, [3, 8, 1, 5], detached=detached)
    wrong = picking(tmp_path / "wrong", keep, [0, 1, 2, 4], detached=detached)
    found = roundoff.compare(reference=right, candidate=wrong)
    assert [culprit.looks_like for culprit in found.culprits()] == ["other data"]


def dealing(high):
    """The data are drawn between bounds that a call is given."""

    def work(model):
        x = torch.randint(0, high, (5, 6)).float()
        model(x).square().mean().backward()

    return work


@KEEP
def test_draws_with_other_arguments_are_not_another_seed(keep, tmp_path):
    right = record(tmp_path / "right", keep, dealing(9))
    wrong = record(tmp_path / "wrong", keep, dealing(4))
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "other data"
    assert "draws with other arguments: high: 9, here 4" in first.evidence


def dropping(both_ways):
    """Of pairs of numbers some are dropped, both numbers of a pair or each by itself."""

    def work(model):
        generator = torch.Generator().manual_seed(1)
        if both_ways:
            is_kept = (torch.rand(15, generator=generator) > 0.3).repeat_interleave(2)
        else:
            is_kept = torch.rand(30, generator=generator) > 0.3
        x = torch.linspace(-1, 1, 30).mul(is_kept).view(5, 6)
        model(x).square().mean().backward()

    return work


@KEEP
def test_draws_of_another_shape_are_not_another_seed(keep, tmp_path):
    right = record(tmp_path / "right", keep, dropping(True))
    wrong = record(tmp_path / "wrong", keep, dropping(False))
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "other data"
    assert "draws numbers of the shape [30] where the reference's" in first.evidence


def copying(factor):
    """A table outside of the model is copied, by way of storages, and used."""

    def work(model):
        table = torch.arange(30.0).view(5, 6) * factor / 9
        model(copy.deepcopy(table)).square().mean().backward()

    return work


@KEEP
def test_the_memory_that_a_copy_is_made_in_holds_no_data(keep, tmp_path):
    right = record(tmp_path / "right", keep, copying(1.0))
    again = record(tmp_path / "again", keep, copying(1.0))
    assert roundoff.compare(reference=right, candidate=again).agrees
    wrong = record(tmp_path / "wrong", keep, copying(1.5))
    found = roundoff.compare(reference=right, candidate=wrong)
    assert "is 1.5 times the reference's" in found.culprits()[0].evidence
    assert "noise" not in found.answer


def acting(folder, scale):
    """What the model makes of its first input is its second."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].weight.data *= scale
    with roundoff.capture(folder, model, keep="tensors") as run:
        act = model(torch.ones(5, 6)).detach().numpy().repeat(2, axis=1)
        model(torch.as_tensor(act)).square().mean().backward()
        run.step()
    return folder


def test_data_that_a_wrong_parameter_has_made_come_after_it(tmp_path):
    right = acting(tmp_path / "right", 1.0)
    wrong = acting(tmp_path / "wrong", 0.5)
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert (first.kind, first.name) == ("parameter", "0.weight")


@KEEP
def test_a_number_that_is_only_printed_is_not_fed(keep, tmp_path):
    sides = []
    for name, number in (("right", 1.0), ("wrong", 2.0)):
        kept = torch.tensor(number)

        def work(model, kept=kept):
            kept.item()
            model(torch.ones(5, 6)).sum().backward()

        sides.append(record(tmp_path / name, keep, work))
    found = roundoff.compare(reference=sides[0], candidate=sides[1])
    assert not any("were fed" in culprit.evidence for culprit in found.culprits())


def test_a_draw_after_more_of_them_says_so(tmp_path):
    def drawing_after(count):
        def work(model):
            for _ in range(count):
                torch.rand(3)
            model(torch.rand(5, 6)).sum().backward()

        return work

    right = record(tmp_path / "right", "tensors", drawing_after(1))
    wrong = record(tmp_path / "wrong", "tensors", drawing_after(2))
    found = roundoff.compare(reference=right, candidate=wrong)
    assert "after 2 draws in this step where the reference has 1" in found.answer


def guessing(wanted):
    """A step in which a model guesses the noise, or what is made of it."""

    def run(model):
        draw = torch.Generator().manual_seed(1)
        picture = torch.randn(5, 6, generator=draw)
        noise = torch.randn(5, 6, generator=draw)
        values = {"noise": noise, "velocity": 0.6 * noise - 0.8 * picture}
        guess = model(0.8 * picture + 0.6 * noise)
        torch.nn.functional.l1_loss(guess, values[wanted][:, :3]).backward()

    return run


@KEEP
def test_a_value_in_another_ones_place_is_told_by_what_reads_it(keep, tmp_path):
    right = record(tmp_path / "right", keep, guessing("velocity"))
    wrong = record(tmp_path / "wrong", keep, guessing("noise"))
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    line = guessing("noise").__code__.co_firstlineno + 6
    assert first.line.endswith(f"test_fed_data.py:{line}")
    assert "where the reference reads" in first.evidence


@KEEP
def test_missing_values_are_the_same_on_both_sides(keep, tmp_path):
    """NaN for what was not measured, and infinite for what is out of range."""

    def work(gain):
        x = torch.linspace(-1, 1, 30).view(5, 6)
        x[0, 1:3] = torch.nan
        x[1, 4] = torch.inf

        def run(model):
            seen = x.nan_to_num(0.0, 1.0, -1.0)
            model(seen).mul(gain).square().mean().backward()

        return run

    right = record(tmp_path / "right", keep, work(1.0))
    wrong = record(tmp_path / "wrong", keep, work(2.0))
    found = roundoff.compare(reference=right, candidate=wrong)
    assert found.culprits()[0].operator == "mul"
    assert not any("were fed" in culprit.evidence for culprit in found.culprits())


MEAN = [0.4, 0.5, 0.1, 0.3, 0.7, 0.2]


def picking_after_set_up(picked):
    """Samples of a set that is made around the mean that the model subtracts, picked after
    a weight was normed: no data went into that."""

    def work(_model):
        generator = torch.Generator().manual_seed(4)
        samples = [
            torch.tensor(MEAN) + torch.randn(6, generator=generator) for _ in range(8)
        ]
        layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))
        model = nn.Sequential(Centred(), layer)
        batch = torch.stack([samples[place] * 2 for place in picked])
        model(batch).square().mean().backward()

    return work


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.tensor(MEAN))

    def forward(self, x):
        return x - self.mean


@KEEP
def test_samples_are_data_also_beside_constants_of_the_model(keep, tmp_path):
    right = record(tmp_path / "right", keep, picking_after_set_up([0, 1, 2, 3]))
    wrong = record(tmp_path / "wrong", keep, picking_after_set_up([4, 1, 5, 3]))
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    assert first.looks_like == "other data"
    assert "has 2 of the reference's 4 samples, and others" in first.evidence


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.outer = nn.Linear(4, 3)

    def forward(self, x):
        return self.outer(torch.relu(self.inner(x)))


def averaging(is_copied):
    """A second network begins as a copy, or is made anew."""

    def work(_model):
        model = Block()
        average = copy.deepcopy(model) if is_copied else Block()
        for mean, parameter in zip(
            average.parameters(), model.parameters(), strict=True
        ):
            mean.data.mul_(0.9).add_(parameter.data, alpha=0.1)
        noise = torch.rand(5, 6)
        (model(noise) - average(noise).detach()).square().mean().backward()

    return work


@KEEP
def test_draws_of_a_call_that_the_reference_lacks_are_named_where_it_is_called(
    keep, tmp_path
):
    right = record(tmp_path / "right", keep, averaging(True))
    wrong = record(tmp_path / "wrong", keep, averaging(False))
    first = roundoff.compare(reference=right, candidate=wrong).culprits()[0]
    line = averaging.__code__.co_firstlineno + 5
    assert first.line.endswith(f"test_fed_data.py:{line}")
    assert "what the candidate alone draws is called from" in first.evidence


@pytest.mark.parametrize("is_same", [True, False])
def test_a_batch_that_is_fed_twice_is_other_data(is_same, tmp_path):
    """The second is drawn while the model runs: it is data all the same."""
    numbers = torch.randn(20, 6, generator=torch.Generator().manual_seed(2)) * 2 + 1

    def accumulating(is_same):
        def work(model):
            order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
            for turn in range(2):
                if not (turn and is_same):
                    batch = numbers[order[5 * turn : 5 * turn + 5]]
                    batch = (batch - numbers.mean(0)) / numbers.std(0)
                (model(batch).square().mean() / 2).backward()

        return work

    right = record(tmp_path / "right", "tensors", accumulating(False))
    wrong = record(tmp_path / "wrong", "tensors", accumulating(is_same))
    found = roundoff.compare(reference=right, candidate=wrong)
    assert found.agrees is not is_same
    if is_same:
        first = found.culprits()[0]
        assert "fed other data" in first.evidence
        assert "where the reference reads" in first.evidence


def counted_first(order):
    """Ragged samples begin a bias with their counts, and are what the model reads later."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 8), nn.Tanh(), nn.Linear(8, 9))
    generator = torch.Generator().manual_seed(4)
    words = torch.randint(0, 9, (40,), generator=generator).tolist()
    samples = [torch.tensor(words[i : i + 3 + i % 4]) for i in range(0, 32, 4)]
    counts = torch.bincount(torch.cat(samples), minlength=9)
    with torch.no_grad():
        model[2].bias.copy_((counts + 1.0).log())
    for rows in order(8, generator).split(4):
        padded = [
            functional.pad(samples[i], (6 - len(samples[i]), 0)) for i in rows.tolist()
        ]
        model(torch.stack(padded)).square().mean().backward()


@KEEP
def test_samples_that_a_parameter_was_counted_from_are_data(keep, tmp_path):
    folders = []
    for name, order in (("right", drawn_order), ("wrong", unshuffled)):
        folders.append(tmp_path / name)
        with roundoff.capture(folders[-1], keep=keep) as run:
            counted_first(order)
            run.step()
    found = roundoff.compare(reference=folders[0], candidate=folders[1])
    first = found.culprits()[0]
    assert first.looks_like == "other data"
    assert "it begins at /arange" in first.evidence
    assert "arange where the reference has randperm" in first.evidence


def collected(limit):
    """What the model likes is collected, and samples of it are drawn."""

    def work(model):
        generator = torch.Generator().manual_seed(1)
        x = torch.linspace(-1, 1, 144).sin().reshape(24, 6)
        with torch.no_grad():
            liked = limit(model(x).sum(1)) > 0.1
        kept = x[liked]
        rows = torch.randperm(len(kept), generator=generator)[:4]
        model(kept[rows]).square().mean().backward()

    return work


@KEEP
def test_how_many_samples_a_model_collects_is_no_other_data(keep, tmp_path):
    right = record(tmp_path / "right", keep, collected(lambda told: torch.tanh(told)))
    wrong = record(tmp_path / "wrong", keep, collected(lambda told: told - 0.2))
    found = roundoff.compare(reference=right, candidate=wrong)
    assert found.culprits()[0].operator in ("sub", "tanh")
    drawn = [each for each in found.culprits() if each.operator == "randperm"]
    assert all("fed other data" not in each.evidence for each in drawn)
