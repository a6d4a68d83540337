"""A rank that has some of the layers: which of the whole's they are, by their parameters."""

from __future__ import annotations

import pytest
import torch

from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.portions.stages import named_as_whole
from roundoff.compare.records.recorded_rows import RecordedRow


def values(number):
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(number))


def step(parameters, modules=()):
    """Parameters by name, and calls of modules."""
    rows = {}
    tensors = {}
    for name, tensor in parameters.items():
        rows[len(rows)] = RecordedRow(len(rows), -1, "parameter", name=name)
        tensors[len(tensors)] = tensor
    for module in modules:
        rows[len(rows)] = RecordedRow(len(rows), len(rows), "relu", module=module)
    return RecordedStep(rows, tensors)


WHOLE = step({f"layers.{n}.weight": values(n) for n in (0, 2, 4, 6)})


def names(part, known=None):
    renamed = named_as_whole(WHOLE, part, {} if known is None else known)
    return [row.name or row.module for row in renamed.rows.values()]


def test_layers_that_are_counted_anew_get_the_names_of_the_whole():
    stage = step({"0.weight": values(4), "2.weight": values(6)}, ["1", ""])
    assert names(stage) == ["layers.4.weight", "layers.6.weight", "layers.5", ""]


def test_later_steps_keep_the_names_and_gradients_have_them_too():
    known: dict[str, str] = {}
    names(step({"0.weight": values(4)}), known)
    trained = step({"0.weight": values(9), "0.weight.grad": values(8)})
    assert names(trained, known) == ["layers.4.weight", "layers.4.weight.grad"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"layers.0.weight": values(0)},
        # a shard, which is none of the whole's parameters
        {"0.weight": values(4)[:2]},
        # exchanged: a fault, and to be told
        {"layers.0.weight": values(2), "layers.2.weight": values(0)},
    ],
)
def test_other_ranks_keep_their_names(parameters):
    assert names(step(parameters)) == list(parameters)
