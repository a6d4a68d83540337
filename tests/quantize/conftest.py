"""Quantized models of small networks."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from roundoff.formats import parse_format
from roundoff.quantize.graph import trace
from roundoff.quantize.model import QuantizedModel
from roundoff.quantize.options import Options, Rounding
from roundoff.quantize.round_in_order import round_in_order_
from roundoff.quantize.schemes import scheme
from roundoff.workload.workload import Workload

PLAIN = Rounding(observer="minmax", weights="nearest", scales="minmax", bias=False)


def laid(model, batches, formats="int8", **options):
    """(quantized model without scales, its workload, its graph); ``formats``: of all sites, or site to format."""
    workload = Workload(copy.deepcopy(model).eval(), batches)
    graph = trace(workload)
    if not isinstance(formats, Mapping):
        formats = dict.fromkeys(graph.nodes, formats)
    formats = {site: parse_format(fmt) for site, fmt in formats.items()}
    return (
        QuantizedModel(
            workload.model, scheme(graph, formats, Options(**options)), graph
        ),
        workload,
        graph,
    )


def calibrated(model, batches, formats="int8", how=PLAIN, **options):
    """A quantized model with min-max scales and weights rounded to nearest, unless ``how`` says otherwise."""
    found, workload, _ = laid(model, batches, formats, **options)
    round_in_order_(found, workload, workload.batches, how)
    return found


@pytest.fixture(name="laid")
def _laid():
    return laid


@pytest.fixture(name="calibrated")
def _calibrated():
    return calibrated


class Model(nn.Module):
    """A module from a function ``f(self, *inputs)`` and what it uses."""

    def __init__(self, function, **parts):
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, torch.Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *inputs, **named):
        return self.function(self, *inputs, **named)


class Tied(nn.Module):
    """A language model's ends: table and head are one weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids):
        return self.head(self.table(ids))


@pytest.fixture(name="Model")
def _model():
    return Model


@pytest.fixture(name="Tied")
def _tied():
    return Tied
