"""The tensors of a step, computed again from what the step began with.

A recording without the tensors that calls made may have those from before the step:
parameters, buffers, data, random numbers. Every call is recorded, so that the step can be
run again, call by call. What comes out counts as kept where it has the statistics that were
recorded. Where a value has others, a kernel did not do here what it did then; so it may
with sums that are zero but for rounding, of which the terms say how far off they may be.
From there on statistics alone decide: about the optimizer, about the backward pass too, or
about the whole step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.records.computed_tensors import ComputedTensors
from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.records.recorded_rows import (
    RecordedRow,
    Rows,
    elements_of_pass,
    first_rows,
)
from roundoff.compare.values.traced_calls import TracedCall, TracedProgram
from roundoff.compare.values.value_flow import flow_of
from roundoff.ops import operators_that
from roundoff.record import LEAVES, Run, StepTensors, cannot_run_again, is_view

#: Larger steps are not run again.
MOST_ELEMENTS = 10**8
#: A recording may ask for as many.
MOST_THREADS = 256
#: Statistics of one tensor that were computed in two ways differ by less, relative to its
#: largest element: they are sums in fp32 or wider, of which parts are added together, and
#: what one call rounds another way all that follow are made of.
SAME = 2.0**-17

_WITH_SUMS = operators_that("add up a gradient in further results")
#: What they make of such sums is rounded as these are.
_KEEP_TERMS = (
    operators_that("move values")
    | operators_that("pair elements")
    | operators_that("divide")
)

_FORWARD = "forward"
_BACKWARD = "backward"
_UNWRITTEN = operators_that("leave memory unwritten")


def restored_tensors(
    run: Run, rank: int, step: int, rows: Rows
) -> ComputedTensors | None:
    """Return the tensors of a step; None where not all of its forward pass comes out as it was.

    Args:
        run: that has the step.
        rank: of the step.
        step: its number.
        rows: its rows.
    """
    if run.about.keep not in ("stats", "tensors"):
        return None
    if elements_of_pass(rows) > MOST_ELEMENTS:
        return None
    kept = StepTensors(run, rank, step)
    first = first_rows(rows)
    leaves = _given(rows, first, kept)
    if leaves is None or not _is_for_statistics(run, leaves):
        return None
    with _threads_of(run):
        return _computed(rows, leaves)


def _given(
    rows: Rows, first: Mapping[int, RecordedRow], kept: StepTensors
) -> dict[int, Tensor] | None:
    """Return what running the calls again does not give; None where it was not kept."""
    leaves = {}
    for record, row in rows.items():
        if row.dtype is None or not _is_given(row, rows, first):
            continue
        if record not in kept or row.stride is None:
            return None
        leaves[record] = kept[record]
    return leaves


def _is_for_statistics(run: Run, given: Mapping[int, Tensor]) -> bool:
    """Return True for what a recording of statistics keeps: a run with tensors has more."""
    if run.about.keep == "stats":
        return True
    return sum(tensor.nbytes for tensor in given.values()) <= LEAVES * 2**20


def _is_given(row: RecordedRow, rows: Rows, first: Mapping[int, RecordedRow]) -> bool:
    """Return True for what was there before, and for what no call gives again.

    Another view of the memory of such a value is one too.
    """
    shown: RecordedRow | None = row
    while shown is not None and not shown.is_leaf:
        if shown.is_call and (shown is row or not is_view(shown.overload)):
            head = first[shown.call]
            return cannot_run_again(head.operator, head.overload, head.arguments)
        source = rows.get(shown.inputs[0]) if shown.inputs else None
        is_before = source is not None and source.record < shown.record
        shown = source if is_before else None
    return shown is not None


@contextmanager
def _threads_of(run: Run) -> Iterator[None]:
    """Let torch add up in as many threads as it did while recording."""
    before = torch.get_num_threads()
    recorded = [s.value for s in run.about.environment or () if s.name == "threads"]
    is_known = bool(recorded) and recorded[0].isdecimal()
    count = int(recorded[0]) if is_known else before
    torch.set_num_threads(count if 0 < count <= MOST_THREADS else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _computed(rows: Rows, given: Mapping[int, Tensor]) -> ComputedTensors | None:
    """Run all calls; return None from the first on that cannot, or makes something else."""
    tensors = dict(given)
    blank: set[int] = set()
    lost: set[str] = set()
    flow = flow_of(RecordedStep(rows), frozenset())
    program = TracedProgram(flow, tensors, phases=None, keeps_strides=True)
    terms = _Terms(program)
    for entry in program.order:
        entries = entry.rows if isinstance(entry, TracedCall) else (entry,)
        if all(row.record in given or row.dtype is None for row in entries):
            continue
        is_blank = entries[0].base_operator in _UNWRITTEN
        if is_blank:
            blank.update(row.record for row in entries)
        results = _blanks(entries) if is_blank else _as_recorded(program, entry, terms)
        if results is None and entries[0].phase == _FORWARD:
            return None
        if results is None:
            lost.add(entries[0].phase)
        tensors |= results or {}
    kept = {r: t for r, t in tensors.items() if r not in blank}
    if not lost:
        return ComputedTensors(kept)
    phases = (_FORWARD,) if _BACKWARD in lost else (_FORWARD, _BACKWARD)
    return _of_phases(rows, kept, phases)


class _Terms:
    """How large the terms are of what is the sum of more than its size tells.

    What is left of a sum that cancels is rounded as its terms are.
    """

    def __init__(self, program: TracedProgram) -> None:
        self._program = program
        self._largest: dict[int, float] = {}

    def of(self, row: RecordedRow) -> float:
        """Return the size of the largest term; 0 for a result that is no such sum."""
        operator = row.base_operator
        if operator == "sum" or (operator in _WITH_SUMS and row.place):
            read = self._program.tensor(row.inputs[0]) if row.inputs else None
            largest = 0.0 if read is None or not read.numel() else _largest(read)
        elif row.view_of is not None or operator in _KEEP_TERMS:
            largest = max(
                (self._largest.get(key, 0.0) for key in row.inputs), default=0.0
            )
        else:
            return 0.0
        self._largest[row.record] = largest
        return largest


def _largest(tensor: Tensor) -> float:
    sizes = tensor.abs() if tensor.is_complex() else tensor.to(torch.float64).abs()
    return float(torch.where(sizes.isfinite(), sizes, 0.0).max())


def tensors_of_all(steps: Sequence[RecordedStep]) -> list[RecordedStep]:
    """Return the steps with the tensors of as many phases in each; without, if one has none."""
    if any(step.tensors is None for step in steps):
        return [replace(step, tensors=None) for step in steps]
    phases = [
        step.tensors.phases
        for step in steps
        if isinstance(step.tensors, ComputedTensors)
    ]
    known = [each for each in phases if each is not None]
    if not known:
        return list(steps)
    fewest = min(known, key=len)
    return [
        replace(step, tensors=_of_phases(step.rows, step.tensors, fewest))
        for step in steps
        if step.tensors is not None
    ]


def is_whole(step: RecordedStep) -> bool:
    """Return True for a step with tensors of all of its phases."""
    tensors = step.tensors
    if tensors is None:
        return False
    return not isinstance(tensors, ComputedTensors) or tensors.phases is None


def _of_phases(
    rows: Rows,
    tensors: Mapping[int, Tensor] | StepTensors,
    phases: tuple[str, ...],
) -> ComputedTensors:
    """Return the tensors of these phases alone."""
    kept = {
        record: tensors[record]
        for record, row in rows.items()
        if row.phase in phases and record in tensors
    }
    return ComputedTensors(kept, phases=phases)


def _as_recorded(
    program: TracedProgram, entry: TracedCall | RecordedRow, terms: _Terms
) -> dict[int, Tensor] | None:
    """Return what a call makes; None where it cannot run, or makes something else."""
    try:
        results = [(row, _placed(row, tensor)) for row, tensor in program.one(entry)]
    except CannotRun:
        return None
    if not all(_is_as_recorded(row, each, terms.of(row)) for row, each in results):
        return None
    return {row.record: tensor for row, tensor in results}


def _blanks(rows: Sequence[RecordedRow]) -> dict[int, Tensor] | None:
    """Return zeros in the place of memory that was made without values; None if unknown."""
    blanks = {}
    for row in rows:
        dtype = getattr(torch, row.dtype or "", None)
        shape = tuple(row.shape or ())
        is_known = isinstance(dtype, torch.dtype) and min(shape, default=0) >= 0
        if not is_known or math.prod(shape) != row.numel:
            return None
        blanks[row.record] = _placed(row, torch.zeros(shape, dtype=dtype))
    return blanks


def _placed(row: RecordedRow, tensor: Tensor) -> Tensor:
    """Return a tensor that lies in memory as it was recorded: kernels add up in that order."""
    stride = tuple(row.stride or ())
    if tensor.shape != tuple(row.shape or ()) or tensor.stride() == stride:
        return tensor
    if not _is_dense(tensor.shape, stride):
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype).copy_(tensor)


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True where strides give every element a place of its own, without gaps."""
    if len(shape) != len(stride):
        return False
    expected = 1
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _is_as_recorded(row: RecordedRow, tensor: Tensor, largest_term: float) -> bool:
    """Return True for a tensor with the format, shape and statistics of a row.

    NaN and infinities count; a row without statistics says nothing. What is a sum may be
    as far off as its terms are rounded.
    """
    if tuple(row.shape or ()) != tuple(tensor.shape):
        return False
    if str(tensor.dtype) != f"torch.{row.dtype}":
        return False
    if row.reason is not None or row.l2 is None or not tensor.numel():
        return True
    values = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)
    finite = values[torch.isfinite(values)]
    if row.nonfinite != values.numel() - finite.numel():
        return False
    if not finite.numel() or tensor.is_complex():
        return True
    largest = max(float(finite.abs().max()), largest_term)
    pairs = (
        (row.min, float(finite.min())),
        (row.max, float(finite.max())),
        (row.mean, float(finite.mean())),
        (row.l2 / math.sqrt(finite.numel()), float(finite.square().mean().sqrt())),
    )
    return all(
        recorded is None or abs(recorded - computed) <= SAME * largest
        for recorded, computed in pairs
    )
