"""What the tests of comparisons share: the rows of a recording, small programs and single calls, recorded."""

from __future__ import annotations

import itertools
import linecache

import pytest
import torch

import roundoff
from roundoff.compare.judging.explain import EarlierSteps, RecordedStep
from roundoff.compare.judging.explain import Sides as RecordedSides
from roundoff.compare.ports.port_comparison import compare_port
from roundoff.compare.records.recorded_rows import RecordedRow, rows_of
from roundoff.compare.records.replay import (
    CallReplay,
    ReferenceSide,
    WorkingFormat,
    replay_call,
)
from roundoff.compare.rounding.rounding_bound import SUMS, smallest, terms, unit
from roundoff.compare.values.value_flow import flow_of
from roundoff.compare.values.value_regions import Sides, limit_of
from roundoff.ops import describe, tensors_made
from roundoff.record import StepTensors


class Program(torch.nn.Module):
    """Computes ``function(self, *inputs)``; its parameters are the leaves of these names."""

    def __init__(self, function, **leaves):
        super().__init__()
        self.function = function
        for name, tensor in leaves.items():
            self.register_parameter(name, torch.nn.Parameter(tensor.clone()))

    def forward(self, *inputs):
        return self.function(self, *inputs)


@pytest.fixture
def program():
    """``program(function, **leaves)``: a module that computes it."""
    return Program


@pytest.fixture
def step_of(tmp_path):
    """``step_of(module, *inputs)``: one recorded call of it, a step; without tensors where asked."""
    numbers = itertools.count()

    def step(module, *inputs, tensors=True):
        folder = tmp_path / f"step{next(numbers)}"
        with torch.no_grad(), roundoff.capture(folder, module, keep="tensors") as run:
            module(*inputs)
            run.step()
        recorded = roundoff.load(folder)
        kept = StepTensors(recorded, 0, 0) if tensors else None
        return RecordedStep(rows_of(recorded, 0, 0), kept)

    return step


@pytest.fixture
def sides_of(step_of):
    """``sides_of(reference, candidate, *inputs)``: the values of both, and which agree."""

    def sides(reference, candidate, *inputs, tensors=True):
        ours = flow_of(step_of(reference, *inputs, tensors=tensors))
        theirs = flow_of(step_of(candidate, *inputs, tensors=tensors))
        values = Sides(ours, theirs, limit_of(ours, theirs))
        values.match()
        return values

    return sides


@pytest.fixture
def at_fault(step_of):
    """``at_fault(reference, port, leaves, *inputs)``: what compare_port finds of two programs.

    ``others``: the parameters of the port, where it has others.
    """

    def found(reference, port, leaves, *inputs, others=None):
        ours = step_of(Program(reference, **leaves), *inputs)
        theirs = step_of(Program(port, **(others or leaves)), *inputs)
        rows = compare_port(RecordedSides(ours, theirs), EarlierSteps())
        return [row for row in rows if row.cause == "own"]

    return found


@pytest.fixture
def blamed_text(request):
    """``blamed_text(row)``: the text of the line of the test's file that is named."""

    def text(row):
        number = int(row.blamed_line.rpartition(":")[2])
        return linecache.getline(str(request.path), number).strip()

    return text


@pytest.fixture
def step_rows():
    """``step_rows(run)``: its rows by record."""
    return lambda run, rank=0, step=0: rows_of(run, rank, step)


@pytest.fixture
def recorded_call():
    """The rows of one call, one for each result, and the tensors that it took and gave.

    Tensors are by record.
    """

    def call(func, *args, **kwargs):
        operands: list[torch.Tensor] = []

        def record_of(tensor):
            for record, operand in enumerate(operands):
                if operand is tensor:
                    return record
            operands.append(tensor)
            return len(operands) - 1

        arguments = describe(args, kwargs, record_of)
        tensors = {record: t.clone() for record, t in enumerate(operands)}
        results = tensors_made(func, args, kwargs, func(*args, **kwargs))
        rows = []
        for place, result in enumerate(results):
            record = len(tensors)
            tensors[record] = result.clone()
            rows.append(
                RecordedRow(
                    record=record,
                    call=0,
                    place=place,
                    arguments=arguments,
                    overload=str(func),
                    operator=func._schema.name.removeprefix("aten::"),
                    inputs=list(range(len(operands))),
                    dtype=str(result.dtype).removeprefix("torch."),
                    shape=list(result.shape),
                )
            )
        return rows, tensors

    return call


@pytest.fixture
def replayed():
    """As a comparison asks: in the result's format, sums with the number of their terms.

    ``twin`` is the first row of the reference's call; the same call without one.
    """

    def replay(
        rows, tensors, place=0, twin=None, aligned=True, results=None, **reference
    ) -> CallReplay:
        row = rows[place]
        inputs = [
            RecordedRow(record=r, call=-1, operator="input", shape=tensors[r].shape)
            for r in row.inputs
            if r in tensors
        ]
        added = terms(row, inputs) if row.base_operator in SUMS else 1.0
        working = WorkingFormat(unit(row.dtype), smallest(row.dtype), added)
        first = (twin or rows[0]) if aligned else None
        side = ReferenceSide(first=first, **reference)
        return replay_call(row, rows[0], tensors, working, side, results)

    return replay
