"""Programs against the models themselves, run with the same call changed by a hook."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from roundoff.budget.program import DivergedError, record_program
from roundoff.budget.trial_cost import adjoint_cost


class Written(nn.Module):
    """Writes into memory that it made, in slices and in place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x)
        total = torch.zeros(x.shape[0], 8)
        total[:, :4] = h
        before = total * 2
        total[:, 4:].add_(self.second(h).relu_())
        return before.sum(1) + total.mean(1)


class Reads(nn.Module):
    """Goes on by a value that it read."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x)
        return h * 2 if h.sum() > 0 else h.exp()


class Picks(nn.Module):
    """The number of rows depends on the values."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        h = self.layer(x)
        return h[h[:, 0] > 0].sum(0)


class Split(nn.Module):
    """Several results, lists of arguments, keywords, a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(4, 6, batch_first=True)
        self.head = nn.Linear(6, 6)

    def forward(self, x):
        y, last = self.rnn(x)
        a, b = self.head(y).chunk(2, dim=-1)
        joined = torch.cat([a * b, torch.stack((a, b)).sum(dim=0)], dim=-1)
        return joined.mean(dim=1) + last[0]


class OverNumpy(nn.Module):
    """Leaves torch and comes back."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        h = self.first(x)
        return self.second(torch.from_numpy(h.numpy() * 2))


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 3

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


class OwnFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x):
        return self.second(Hidden.apply(self.first(x)))


class Scripted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.hidden = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

    def forward(self, x):
        return self.hidden(self.first(x))


def recorded(model, x):
    """The program, and the numbers of the calls that a module makes."""
    model.eval().requires_grad_(False)

    def forward():
        return {"output": model(x)}

    first = record_program(forward, set())
    numbers = set() if first is None else linear_calls(first)
    return record_program(forward, numbers), numbers


def linear_calls(program):
    of_layers = ("linear", "gru")
    return {s.number for s in program.steps if s.func.__name__ in of_layers}


def doubled(step, args, kwargs):
    return doubled_result(step.func(*args, **kwargs))


def doubled_result(result):
    if isinstance(result, tuple):
        return tuple(map(doubled_result, result))
    return result * 2


def by_hand(model, x, layer):
    """The model with the result of one module doubled."""
    hook = layer.register_forward_hook(lambda _, __, result: doubled_result(result))
    try:
        return model(x)
    finally:
        hook.remove()


@pytest.mark.parametrize("kind", [Written, Split, OwnFunction])
def test_a_changed_call_gives_what_the_model_gives(kind):
    torch.manual_seed(0)
    model = kind()
    x = torch.randn(5, 3, 4) if kind is Split else torch.randn(5, 4)
    program, numbers = recorded(model, x)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear | nn.GRU)]
    assert len(numbers) == len(layers)
    for number, layer in zip(sorted(numbers), layers, strict=True):
        ran = program.run(doubled, number)["output"]
        assert torch.equal(ran, by_hand(model, x, layer))
        assert 0 < program.share_after(number) <= 1
    # the recorded tensors are as they were
    assert torch.equal(program.targets["output"], model(x))


def test_it_is_seen_where_memory_is_written_over():
    model = Written()
    program, _ = recorded(model, torch.randn(5, 4))
    assert program.writes_over
    plain, _ = recorded(Split(), torch.randn(5, 3, 4))
    assert not plain.writes_over


@pytest.mark.parametrize("kind", [Reads, Picks])
def test_a_run_that_would_go_on_otherwise_is_given_up(kind):
    torch.manual_seed(0)
    model = kind()
    x = torch.randn(5, 4)
    program, [number] = recorded(model, x)

    def shifted(step, args, kwargs):
        return -step.func(*args, **kwargs)

    with pytest.raises(DivergedError, match="another"):
        program.run(shifted, number)
    assert torch.equal(
        program.run(doubled, number)["output"], by_hand(model, x, model.layer)
    )


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("kind", [OverNumpy, Scripted])
def test_what_is_not_seen_makes_no_program(kind):
    torch.manual_seed(0)
    program, _ = recorded(kind(), torch.randn(5, 4))
    assert program is None


class Counts(nn.Module):
    """Counts, as floating-point numbers, say which rows belong together."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        y = self.first(x)
        counts = torch.histc(x[:, 0], 3, -2.0, 2.0)
        ends = counts.cumsum(0, dtype=torch.int64)
        scales = torch.tensor([1.0, 10.0, 100.0])
        group = torch.bucketize(torch.arange(1, len(x) + 1), ends)
        return y * scales[group][:, None]


def test_counts_stay_whole_where_a_program_is_held_against_its_model():
    """A hundredth of a row more or less, and the last row is in no group at all."""
    torch.manual_seed(0)
    model = Counts().eval().requires_grad_(False)
    x = torch.randn(9, 4).clamp(-1.9, 1.9)

    def forward():
        return {"output": model(x)}

    program = record_program(forward, set())
    numbers = {s.number for s in program.steps if s.func.__name__ == "histc"}
    numbers |= linear_calls(program)
    assert len(numbers) == 2
    assert record_program(forward, numbers) is not None


def test_what_follows_from_several_changed_calls_runs_again():
    torch.manual_seed(0)
    model = Written()
    x = torch.randn(5, 4)
    program, numbers = recorded(model, x)
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    hooks = [
        layer.register_forward_hook(lambda _, __, result: doubled_result(result))
        for layer in layers
    ]
    expected = model(x)
    for hook in hooks:
        hook.remove()
    assert torch.equal(program.run_changed(doubled, numbers)["output"], expected)
    assert torch.equal(program.run_changed(doubled, [])["output"], model(x))


def test_a_call_that_was_not_made():
    program, _ = recorded(Picks(), torch.randn(5, 4))
    with pytest.raises(DivergedError, match="no such call"):
        program.run(doubled, 10_000)
    assert program.share_after(10_000) == 1.0


def test_probes_and_decisions_make_the_adjoint_dearer():
    assert adjoint_cost(8, decides=False) < adjoint_cost(9, decides=False)
    assert adjoint_cost(8, decides=False) < adjoint_cost(8, decides=True)
