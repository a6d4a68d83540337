"""Small networks, quantized with min-max scales and nearest codes: what the exported files are made of."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from roundoff.formats import choose_qparams, parse_format
from roundoff.quantize.graph import trace
from roundoff.quantize.model import Passing, QuantizedModel
from roundoff.quantize.options import Options
from roundoff.quantize.schemes import scheme
from roundoff.workload.workload import Workload


class Net(nn.Module):
    """Convolutions (plain, depthwise, 1x1), ReLU and ReLU6, a residual add, three poolings and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.r6 = nn.Conv2d(3, 16, 3, padding=1), nn.ReLU6()
        self.dw, self.c2 = (
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            nn.Conv2d(16, 16, 1),
        )
        self.ap, self.pool, self.fc = (
            nn.AvgPool2d(2),
            nn.AdaptiveAvgPool2d(1),
            nn.Linear(16, 10),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.r6(self.c1(x))
        return self.fc(self.pool(self.ap(x + self.c2(self.dw(x).relu()))).flatten(1))


class Table(nn.Module):
    """An embedding and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.a, self.b = (
            nn.Embedding(50, 32),
            nn.Linear(32, 64),
            nn.Linear(64, 10),
        )

    def forward(self, ids: Tensor) -> Tensor:
        return self.b(self.a(self.table(ids)).relu())


class _Calibrating(Passing):
    def value(self, _name: str, quantizer: Any, value: Tensor) -> Tensor:
        if quantizer.scale is None and not quantizer.dynamic:
            quantizer.set_(choose_qparams(value, quantizer.fmt, quantizer.granularity))
        return quantizer(value)


def quantized(
    workload: Workload, formats: str, options: Options | None = None
) -> QuantizedModel:
    """Every conv, linear, matmul and embedding of a workload's model in one format, scales from its batches."""
    graph = trace(workload, workload.batches[:1])
    kinds = ("conv", "linear", "matmul", "embedding", "rnn")
    sites = {
        s: parse_format(formats)
        for s, node in graph.nodes.items()
        if node.kind in kinds
    }
    model = QuantizedModel(
        copy.deepcopy(workload.model), scheme(graph, sites, options or Options())
    ).eval()
    with torch.no_grad(), model.through(_Calibrating()):
        for batch in workload.batches:
            workload.with_model(model).run(batch)
    return model


@pytest.fixture(scope="session")
def quantize() -> Callable[..., QuantizedModel]:
    return quantized


@pytest.fixture(scope="session")
def net() -> Workload:
    torch.manual_seed(0)
    batches = [torch.randn(8, 3, 8, 8) for _ in range(3)]

    def metric(outputs: list[Tensor], reference: list[Tensor]) -> float:
        same = [
            (o.argmax(1) == r.argmax(1)).double()
            for o, r in zip(outputs, reference, strict=True)
        ]
        return torch.cat(same).mean().item()

    return Workload(
        Net().eval(), batches[:2], metric=metric, held_out=batches[2:], name="net"
    )


@pytest.fixture(scope="session")
def table() -> Workload:
    torch.manual_seed(0)
    return Workload(
        Table().eval(), [torch.randint(0, 50, (4, 7)) for _ in range(2)], name="table"
    )
