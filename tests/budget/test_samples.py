"""Which axis counts the samples: found by a probe that looks at some samples only."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import roundoff
from roundoff import Workload
from roundoff.budget.samples import BATCH_FIRST, divide, divisions, sample_axis

#: The adjoint alone.
budget = functools.partial(roundoff.budget, trials=0)

KEEP = torch.tensor([True, False, True, False])


def masked(shape, axis, repeats=1):
    """A gradient that is zero on the samples that are not kept, dense elsewhere."""
    gradient = torch.rand(shape) + 0.1
    keep = KEEP.repeat_interleave(repeats)
    return gradient * keep.view(-1, *[1] * (len(shape) - axis - 1))


@pytest.mark.parametrize(
    ("gradient", "expected"),
    [
        (masked((4, 3), 0), (0, 1)),
        (masked((4,), 0), (0, 1)),
        (masked((4, 4), 0), (0, 1)),
        (masked((4, 4), 1), (1, 1)),  # sequence first, as many steps as samples
        (masked((5, 4, 3), 1), (1, 1)),
        (
            masked((12, 3), 0, repeats=3),
            (0, 3),
        ),  # batch and steps flattened, samples slowest
        (torch.rand(4, 3) + 0.1, None),  # every sample reaches every element: mixed
        (torch.rand(3, 3) + 0.1, None),  # no axis of that length: a table, say
        (masked((5, 3, 4), 2), None),  # only the first two axes are looked at
        (torch.zeros(4, 3), None),  # nothing to tell from
        (
            torch.rand(12, 3) * KEEP.repeat(3)[:, None],
            None,
        ),  # flattened with the samples fastest
        (torch.tensor(1.0), None),
        (torch.zeros(0, 4), None),
    ],
)
def test_the_axis(gradient, expected):
    assert sample_axis(gradient, 4, KEEP) == expected


def test_one_sample_has_no_axis():
    assert sample_axis(torch.rand(1, 3), 1, torch.tensor([True])) is None


class BatchFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.to_inner, self.from_inner = lambda x: x, lambda x: x

    def forward(self, x):  # x and the result: (batch, steps, channels)
        y = self.from_inner(torch.tanh(self.inner(self.to_inner(x))))
        return self.head(y + (y @ y.transpose(1, 2)).softmax(-1) @ y)  # mixes the steps


class SequenceFirst(BatchFirst):
    def __init__(self):
        super().__init__()
        self.to_inner = self.from_inner = lambda x: x.transpose(0, 1)


class Flattened(BatchFirst):
    def __init__(self):
        super().__init__()
        self.to_inner = lambda x: x.flatten(0, 1)
        self.from_inner = lambda y: y.unflatten(0, (-1, 4))


class Pooled(BatchFirst):
    def __init__(self):
        super().__init__()
        self.from_inner = lambda y: y - y.mean(0)


class ReversedSteps(BatchFirst):
    """Flattened with the samples fastest: no axis on which a sample is one run."""

    def __init__(self):
        super().__init__()
        self.to_inner = lambda x: x.transpose(0, 1).reshape(-1, 4)
        self.from_inner = lambda y: y.unflatten(0, (4, -1)).transpose(0, 1)


@pytest.mark.parametrize(
    ("model", "pooled"),
    [
        (BatchFirst, False),
        (SequenceFirst, False),
        (Flattened, False),
        (Pooled, True),
        (ReversedSteps, True),
    ],
)
@pytest.mark.parametrize("samples", [3, 4])  # 4: as many as steps
def test_models(model, pooled, samples):
    """The noise is that of the model computed in fp64 with the inner layer's result in bf16, to first order."""
    torch.manual_seed(0)
    net = model().double().requires_grad_(False)
    x = torch.randn(samples, 4, 4, dtype=torch.float64)
    probes = 4000 if pooled else 1500
    measured = budget(Workload(net, [x]), ["bf16"], probes=probes)
    found = dict(measured.terms.select("site", "pooled").iter_rows())
    assert found["inner/linear"] is pooled
    assert found["/tanh"] is pooled
    assert found["head/linear"] is False
    (row,) = [r for r in measured.table.to_dicts() if r["site"] == "/tanh"]

    exact = net(x)
    original = net.from_inner
    inner = torch.tanh(net.inner(net.to_inner(x)))
    low = torch.tanh(net.inner(net.to_inner(x)).bfloat16().double()).bfloat16().double()
    step = (
        2.0**-10
    )  # a directional derivative: J e from a step so small that second order is 2**-10 of it
    net.from_inner = lambda y: original(inner + step * (low - inner))
    expected = float(((net(x) - exact) / step).square().sum() / exact.square().sum())
    # 4 sigma of at least 1500 * 3 (or 4000) products, and the second order
    assert row["noise"] == pytest.approx(expected, rel=4 * (2 / 4000) ** 0.5 + 2**-9)


def test_the_axes_of_the_first_batch_serve_the_others():
    torch.manual_seed(0)
    net = Flattened()
    batches = [
        torch.randn(n, 4, 4) for n in (1, 6, 2, 1)
    ]  # the first has one sample, so the second tells
    measured = budget(Workload(net, batches), ["bf16"])
    assert not measured.terms["pooled"].any()
    assert measured.about.batch_samples == (1, 6, 2, 1)
    widths = measured.terms["projections"].list.len() / measured.about.probes
    assert widths.unique().to_list() == [10]


def test_outputs_with_unlike_first_axes_share_the_batch_axis():
    """An LSTM's states are (layers, batch, channels), its output (batch, steps, channels)."""
    torch.manual_seed(0)
    measured = budget(
        Workload(nn.LSTM(3, 3, batch_first=True), [torch.randn(4, 5, 3)]), ["bf16"]
    )
    assert measured.about.samples == 4
    assert not measured.terms["pooled"].any()


class Rows(BatchFirst):
    """Returns (batch * steps, channels), as language models for training do."""

    def forward(self, x):
        return super().forward(x).flatten(0, 1)


@pytest.mark.parametrize("batch_first", [True, False])
def test_rows_of_the_output_that_are_no_samples(batch_first):
    """The samples are counted by an axis of the input, the first or the second."""
    torch.manual_seed(0)

    class Turned(Rows):
        def forward(self, x):
            if batch_first:
                return super().forward(x)
            turned = BatchFirst.forward(self, x.transpose(0, 1))
            return turned.transpose(0, 1)

    x = torch.randn(6, 4, 4) if batch_first else torch.randn(4, 6, 4)
    measured = budget(Workload(Turned(), [x]), ["bf16"])
    assert measured.about.samples == 6
    assert not measured.terms["pooled"].any()


def test_as_many_steps_as_samples_and_the_steps_first():
    """The output is (steps, batch, channels), with as many steps as samples."""
    torch.manual_seed(0)

    class StepsFirst(BatchFirst):
        def forward(self, x):
            return super().forward(x).transpose(0, 1)

    measured = budget(Workload(StepsFirst(), [torch.randn(4, 4, 4)] * 2), ["bf16"])
    assert measured.about.samples == 8
    assert not measured.terms["pooled"].any()


def test_the_division_of_a_batch():
    rows = torch.zeros(12, 5)
    assert [d.samples for d in divisions(torch.zeros(4, 3, 2), [rows])] == [12, 4, 3]
    (only,) = divisions(torch.zeros(5, 7), [torch.zeros(1, 9)])
    assert only.samples == 1
    division = divide(
        BATCH_FIRST, {"ids": torch.zeros(4, 3)}, [rows, rows.view(3, 4, 5)]
    )
    assert division.axes == ((0, 3), (1, 1))
    ones = torch.ones(2, 12, 5)
    kept = division.masked(ones, 0)[:, :, 0]
    assert kept.tolist() == [[1.0] * 3 + [0.0] * 3 + [1.0] * 3 + [0.0] * 3] * 2
    assert division.power(torch.ones(3, 4, 5), 1).tolist() == [15.0] * 4
