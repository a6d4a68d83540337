"""Models whose values decide what runs, that write in place, or that are quantized already: each verb
says what it can of them, and none ends in an error that is not about the model.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic
from torch.nn import functional as F

import roundoff
from roundoff.errors import QuantizationError

Forward = Callable[[nn.Module, Tensor], Tensor]


def counted(net, x):
    for _ in range(int(x.abs().max()) + 1):
        x = net.a(x).relu()
    return net.b(x)


def until_small(net, x):
    x = net.a(x)
    while x.norm() > 1:
        x = x / 2
    return net.b(x)


def as_often_as_a_mask(net, x):
    mask = x > 0.5
    y = net.a(x)
    for _ in range(mask.sum()):
        y = y + 0.1 * y.tanh()
    return net.b(y)


def branch_on_the_largest(net, x):
    y = net.a(x)
    return net.b(y.relu() if y.max() > 0.3 else y.tanh())


def multiplied_by_an_item(net, x):
    y = net.a(x)
    return net.b(y * y.mean().item())


def as_many_rows_as_are_positive(net, x):
    y = net.a(x)
    count = max(1, int((y[:, 0] > 0).sum()))
    return net.b(y[y[:, 0].argsort()[:count]])


def row_by_row(net, x):
    y = net.a(x)
    out = torch.zeros_like(y)
    for i in (y[:, 0] > -9).nonzero().flatten().tolist():
        out[i] = y[i].relu()
    return net.b(out)


def by_way_of_numpy(net, x):
    y = net.a(x)
    return net.b(y * (1 + int(y.detach().abs().max().numpy())))


def rounded_to_a_count(net, x):
    y = net.a(x)
    largest = float(y.abs().max())
    for i in range(round(largest * 3)):
        y = y + i * 0.1
    return net.b(y / (largest or 1.0))


def until_all_are_whole(net, x):
    y = net.a(x)
    tries = 0
    while not torch.allclose(y, y.round()) and tries < 3:
        y = y * 2
        tries += 1
    return net.b(y.sigmoid() if (y > 0).any() and not y.isnan().any() else y)


def written_in_place(net, x):
    y = net.a(x)
    y += 1
    y.mul_(0.5)
    y[:, 0] = 0
    y.clamp_(max=2.0).relu_()
    return net.b(y)


def written_through_views(net, x):
    y = net.a(x)
    y[:, :3].add_(1.0)
    y.t().mul_(0.3)
    F.relu(y, inplace=True)
    return net.b(F.dropout(y, 0.0, inplace=True))


FORWARDS: list[Forward] = [
    counted,
    until_small,
    as_often_as_a_mask,
    branch_on_the_largest,
    multiplied_by_an_item,
    as_many_rows_as_are_positive,
    row_by_row,
    by_way_of_numpy,
    rounded_to_a_count,
    until_all_are_whole,
    written_in_place,
    written_through_views,
]


class Net(nn.Module):
    def __init__(self, run: Forward) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 3)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def workload(model: nn.Module, width: int = 6) -> roundoff.Workload:
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(4, width, generator=generator) for _ in range(3)]
    return roundoff.Workload(model, batches)


def net(run: Forward) -> Net:
    torch.manual_seed(0)
    return Net(run).eval()


@pytest.mark.parametrize("run", FORWARDS)
def test_a_budget(run: Forward) -> None:
    budget = roundoff.budget(workload(net(run)), formats=["bf16", "int8"])
    assert {"a/linear", "b/linear"} <= set(budget.table["site"])


@pytest.mark.parametrize("run", FORWARDS)
def test_a_quantized_model_takes_the_same_path(run: Forward) -> None:
    model = net(run)
    batches = workload(model).batches
    quantized = roundoff.quantize(model, "int8", batches)
    assert "a/linear" in {row.site for row in quantized.rows if row.format != "fp32"}
    assert math.isfinite(quantized.steps[-1].after)


def quantized_already() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize_dynamic(layers, {nn.Linear}, torch.qint8)


def test_what_is_quantized_already_has_a_budget_of_the_rest() -> None:
    answer = roundoff.diagnose(workload(quantized_already()), formats=["bf16"])
    assert "1/relu" in set(answer.budget.table["site"])


def test_what_is_quantized_already_is_not_quantized_again() -> None:
    model = quantized_already()
    with pytest.raises(QuantizationError, match="nothing would be quantized"):
        roundoff.quantize(model, "int8", workload(model).batches)
