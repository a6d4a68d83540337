"""Two recorded programs run again in fp64: what rounding does not explain.

In fp32 a wrong formula may do less than the roundings of a whole network: an epsilon of
1e-6 for 1e-5 changes values of size one by 5e-6. In fp64 rounding is gone, and the
difference stays.

What the programs are given is as it was recorded: parameters, data, random numbers, and
tables of constants, which one program may read and the other compute. Where such a value
agrees with the reference's as recorded, it takes the reference's numbers, so that only
what is computed with them is compared.

What runs in a narrower format because the programs work in it (autocast) runs in fp64 too:
its rounding is wanted, and hides the most. What a few calls round alone stays so: it is a
part of the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.ports.counterparts import named_leaves
from roundoff.compare.ports.made_up_values import leaves_of_pass
from roundoff.compare.ports.port_results import (
    gradient_limit,
    gradients_left,
    last_differentiated,
    least_gradient,
    read_of_backward,
)
from roundoff.compare.records.computed_tensors import ComputedTensors
from roundoff.compare.records.recorded_calls import CannotRun, run_call
from roundoff.compare.records.recorded_rows import RecordedRow, elements_of_pass
from roundoff.compare.records.value_sketch import MASK, in_reals
from roundoff.compare.rounding.rounding_bound import unit
from roundoff.compare.values.inner_values import run_decomposed
from roundoff.compare.values.traced_calls import TracedCall, TracedProgram
from roundoff.compare.values.value_flow import Flow, Value, flow_of
from roundoff.compare.values.value_regions import Sides, upstream, wanted_formats
from roundoff.ops import operators_that

#: Larger recordings are not run again.
MOST_ELEMENTS = 3 * 10**7
#: Values in fp64 agree up to this many roundings of fp32: those of the numbers that stand
#: in a program (the root of 2 as a float32 tensor) and of parameters that a loader has
#: folded, amplified by the network. Of 24 right ports the farthest is 0.6 units off, an
#: epsilon of 1e-6 for 1e-5 is 75.
ROUNDINGS = 16.0
#: A value in fp64 that is this many times farther from the recorded one than two programs
#: may be apart was not computed as the program computes it.
UNFAITHFUL = 16.0
#: However coarse the format: half of its size.
MOST_UNFAITHFUL = 0.5
_NARROW = frozenset({"float16", "bfloat16"})
_OPTIMIZER = "optimizer"
_FORWARD_ALONE = ("forward",)
_WITH_BACKWARD = ("forward", "backward")
_DRAW = operators_that("draw") | operators_that("drop out")


def in_fp64(sides: Sides) -> Sides | None:
    """Return both sides with the tensors of their forward passes in fp64.

    None where these are not known, or a call cannot run in fp64.
    """
    flows = (sides.reference, sides.candidate)
    if any(flow.step.tensors is None for flow in flows):
        return None
    if sum(elements_of_pass(flow.step.rows) for flow in flows) > MOST_ELEMENTS:
        return None
    widened = _widened(sides)
    try:
        ours = _run(sides.reference, sides.reference.tensor, widened)
        theirs = _run(sides.candidate, _Given(sides, ours), widened)
    except CannotRun:
        return None
    if not _is_faithful(sides, sides.reference, ours):
        return None
    if not _is_faithful(sides, sides.candidate, theirs):
        return None
    limit = ROUNDINGS * unit("float32")
    if sides.paired:
        # what the steps before have rounded stands in the parameters
        limit = sides.limit
    steps = [
        _wide_step(flow, tensors, widened)
        for flow, tensors in zip(flows, (ours, theirs), strict=True)
    ]
    reference, candidate = (
        flow_of(step, flow.trained, end)
        for step, flow, end in zip(
            steps, flows, last_differentiated(sides), strict=True
        )
    )
    return Sides(
        reference,
        candidate,
        limit,
        made_up=sides.made_up,
        padding=sides.padding,
        paired=sides.paired,
    )


def _widened(sides: Sides) -> frozenset[str]:
    """Return the formats that run in fp64: fp32, and the narrower ones that are wanted."""
    wanted = wanted_formats(sides.reference, sides.candidate)
    return (wanted & _NARROW) | {"float32", "complex64"}


def _is_faithful(sides: Sides, flow: Flow, tensors: Mapping[int, Tensor]) -> bool:
    """Return True where fp64 gives what was recorded, but for rounding.

    It does not where a recording lacks something: a write through a view, an argument.
    """
    allowed = min(UNFAITHFUL * sides.limit, MOST_UNFAITHFUL)
    read = {value.key for value in read_of_backward(flow)}
    for key, tensor in tensors.items():
        value = flow.values[key]
        if not value.computes or not value.is_number or value.sketch is None:
            continue
        if value.row.phase != "forward" and key not in read:
            continue  # on the way to a gradient all may be rounding
        recorded = flow.tensor(key)
        if recorded is None or recorded.shape != tensor.shape:
            continue
        seen = in_reals(recorded).to(torch.float64)
        finite = seen.abs() < MASK
        present = in_reals(tensor)
        if present.shape != seen.shape:
            return False
        apart = float((present - seen)[finite].norm())
        size = float(seen[finite].norm())
        if apart > allowed * size and apart > _rounding(tensors, value):
            return False
    return True


def _rounding(tensors: Mapping[int, Tensor], value: Value) -> float:
    """Return how far fp32 may bring a value by what it is made of: of a sum of large terms
    that is zero but for rounding, nothing else is left.

    Independent roundings of n terms add up to ``unit * sqrt(n)`` times their size: to the
    unit times the norm of what is summed up.
    """
    read = [in_reals(tensors[key]) for key in value.inputs if key in tensors]
    sizes = (float(t[t.abs() < MASK].norm()) for t in read if t.is_floating_point())
    return ROUNDINGS * unit("float32") * max(sizes, default=0.0)


def backward_in_fp64(sides: Sides, exact: Sides) -> Sides | None:
    """Return ``exact``, which ``in_fp64`` gives for ``sides``, with its backward passes.

    Recorded backward calls name what they read: they run again on what the forward pass
    gives in fp64. None where one of them cannot, or does not give what was recorded, and
    where no recorded call made a gradient, as in a compiled program.

    A backward pass may amplify the roundings of constants, which fp64 leaves as they are,
    more than a forward pass does. It amplifies those of the recorded pass as much, and
    these are known: what they do to gradients is the limit where it is more.
    """
    widened = _widened(sides)
    allowed = min(UNFAITHFUL * gradient_limit(sides), MOST_UNFAITHFUL)
    limit = exact.limit
    flows: list[Flow] = []
    for flow, forward in (
        (sides.reference, exact.reference),
        (sides.candidate, exact.candidate),
    ):
        left = gradients_left(flow.step.rows).values()
        if not all(flow.behind(row.record).is_call for row in left):
            return None
        try:
            tensors = _run_backward(flow, forward, widened)
        except CannotRun:
            return None
        rounded = _rounding_of_gradients(sides, flow, tensors)
        if rounded is None or rounded > allowed:
            return None
        limit = max(limit, rounded * unit("float32") / _coarsest(sides))
        step = _wide_step(flow, tensors, widened, _WITH_BACKWARD)
        flows.append(flow_of(step, flow.trained))
    reference, candidate = flows
    return Sides(
        reference, candidate, limit, padding=sides.padding, paired=sides.paired
    )


def _coarsest(sides: Sides) -> float:
    """Return the unit of the coarsest format that the programs work in."""
    return max(map(unit, wanted_formats(sides.reference, sides.candidate)))


def _rounding_of_gradients(
    sides: Sides, flow: Flow, tensors: Mapping[int, Tensor]
) -> float | None:
    """Return how far recorded gradients are from those in fp64, relative; None if unknown.

    Those below a share of the largest one may be nothing but rounding.
    """
    pairs = []
    for row in gradients_left(flow.step.rows).values():
        recorded = flow.tensor(row.record)
        tensor = tensors.get(row.record)
        if recorded is None or tensor is None or recorded.shape != tensor.shape:
            return None
        scale = flow.step.scales.get(row.record, 1.0)
        seen = in_reals(recorded).to(torch.float64)
        apart = in_reals(tensor) / scale - seen
        pairs.append((float(seen.norm()), float(apart.norm())))
    least = least_gradient(sides) * max((size for size, _ in pairs), default=0.0)
    shares = [apart / max(size, least) for size, apart in pairs if max(size, least)]
    return max(shares, default=0.0) if all(map(math.isfinite, shares)) else None


def _run_backward(
    flow: Flow, forward: Flow, widened: frozenset[str]
) -> dict[int, Tensor]:
    """Return the forward pass in fp64, and the backward pass on it. Raises ``CannotRun``."""
    recorded = [v.key for v in forward.values.values() if not v.inner]
    kept = {key: forward.tensor(key) for key in recorded}
    tensors = {key: tensor for key, tensor in kept.items() if tensor is not None}
    step = _wide_step(flow, tensors, widened, _WITH_BACKWARD)
    program = TracedProgram(flow_of(step, flow.trained), tensors, phases=("backward",))

    def take(rows: Iterable[RecordedRow]) -> None:
        for row in rows:
            tensor = flow.tensor(row.record)
            if tensor is not None:
                tensors[row.record] = _wide(tensor, widened)

    take(row for row in step.rows.values() if _is_given(row, tensors))
    # an optimizer may ask for gradients of its own in its step
    later = {r for r, row in flow.step.rows.items() if row.phase == _OPTIMIZER}
    for entry in program.order:
        rows = _rows_of(entry)
        if not later.isdisjoint(key for row in rows for key in row.inputs):
            later.update(row.record for row in rows)
            continue
        if _draws(entry):
            take(rows)
            continue
        take(row for row in rows if not flow.values[row.record].is_number)
        for row, tensor in _results(program, entry, tensors):
            tensors[row.record] = _wide(tensor, widened)
    return tensors


def _is_given(row: RecordedRow, tensors: Mapping[int, Tensor]) -> bool:
    """Return True for what a backward pass begins with, and nothing makes in fp64.

    Such as a workspace of a kernel of the forward pass.
    """
    is_unmade = row.phase == "forward" and row.record not in tensors
    return is_unmade or (row.phase == "backward" and row.is_leaf)


def _wide_step(
    flow: Flow,
    tensors: Mapping[int, Tensor],
    widened: frozenset[str],
    phases: Collection[str] = _FORWARD_ALONE,
) -> RecordedStep:
    rows = {
        record: _wide_row(row, widened)
        for record, row in flow.step.rows.items()
        if row.phase in phases
    }
    for name, row in gradients_left(flow.step.rows).items():
        if row.record in rows:
            rows[row.record] = replace(rows[row.record], name=name)
    return replace(flow.step, rows=rows, tensors=ComputedTensors(tensors))


def _wide_row(row: RecordedRow, widened: frozenset[str]) -> RecordedRow:
    """Return a row as if its program had been written for fp64."""
    arguments = row.arguments
    if arguments is not None:
        for name in widened:
            wide = f'"dtype":"{_wide_format(name)}"'
            arguments = arguments.replace(f'"dtype":"{name}"', wide)
    dtype = _wide_format(row.dtype) if row.dtype in widened else row.dtype
    return replace(row, dtype=dtype, arguments=arguments, blob=None)


def _wide(tensor: Tensor, widened: frozenset[str]) -> Tensor:
    name = str(tensor.dtype).removeprefix("torch.")
    return tensor.to(getattr(torch, _wide_format(name))) if name in widened else tensor


def _wide_format(name: str) -> str:
    return "complex128" if name == "complex64" else "float64"


class _Given:
    """What the candidate's program is given: the reference's numbers where these agree."""

    def __init__(self, sides: Sides, ours: Mapping[int, Tensor]) -> None:
        self._sides = sides
        self._ours = ours

    def __call__(self, record: int) -> Tensor | None:
        tensor = self._sides.candidate.tensor(record)
        value = self._sides.candidate.values[record]
        if tensor is None or not tensor.is_floating_point() or value.says_nothing:
            return tensor
        if value.sketch is not None and value.sketch.masked:
            # its sketch knows nothing of these, nor do the values that agree with it
            return tensor
        for key in self._sides.all_twins(value):
            twin = self._ours.get(key)
            sketch = self._sides.reference.values[key].sketch
            is_masked = sketch is not None and sketch.masked
            if twin is not None and twin.numel() == tensor.numel() and not is_masked:
                return _in_places_of(tensor, twin)
        return tensor


def _in_places_of(tensor: Tensor, twin: Tensor) -> Tensor:
    """Return the values of ``twin`` in the order of those of ``tensor``.

    Raises ``CannotRun`` where rounding has made the order unknown.
    """
    if unit(str(tensor.dtype).removeprefix("torch.")) > unit("float32"):
        if tensor.shape == twin.shape and torch.equal(tensor, twin.to(tensor.dtype)):
            return twin
        raise CannotRun("its parameters are rounded")
    flat = tensor.reshape(-1).to(torch.float64)
    values = torch.empty_like(flat)
    values[flat.argsort(stable=True)] = twin.reshape(-1).to(torch.float64).sort().values
    return values.reshape(tensor.shape)


def _run(
    flow: Flow, given: Callable[[int], Tensor | None], widened: frozenset[str]
) -> dict[int, Tensor]:
    """Return the forward pass in fp64. Raises ``CannotRun``.

    Leaves, constants and random numbers are what ``given`` says.
    """
    tensors: dict[int, Tensor] = {}
    going_back = _read_by_forward(flow)
    phases = _WITH_BACKWARD if going_back else _FORWARD_ALONE
    step = _wide_step(flow, tensors, widened, phases)
    program = TracedProgram(flow_of(step, flow.trained), tensors, phases=phases)
    depending: set[int] = set()
    kept = flow.step.tensors
    forced = kept.forced if isinstance(kept, ComputedTensors) else frozenset()

    def take(row: RecordedRow) -> None:
        tensor = given(row.record)
        if tensor is not None:
            tensors[row.record] = _wide(tensor, widened)

    for leaf in leaves_of_pass(flow):
        take(leaf.row)
        if leaf.is_number:
            depending.add(leaf.key)
    # a script draws its parameters in the step, and may run its model before they are ready
    drawn = named_leaves(flow).keys()
    depending.update(v.key for v in flow.values.values() if v.row.name in drawn)
    for entry in _going_on(program, going_back):
        rows = _rows_of(entry)
        recorded = [flow.step.rows[row.record].dtype for row in rows]
        is_rounded = not _NARROW.isdisjoint(recorded)
        if _is_taken(entry, rows, depending, is_rounded):
            for row in rows:
                take(row)
            continue
        # whole numbers are as they were recorded, and so is what is made of them alone
        records = (row.record for row in rows)
        depending.update(r for r in records if flow.values[r].is_number)
        for row in rows:
            if row.record in forced or not flow.values[row.record].is_number:
                take(row)
        for row, tensor in _results(program, entry, tensors):
            if row.record not in forced:
                tensors[row.record] = _wide(tensor, widened)
    return tensors


def _going_on(
    program: TracedProgram, going_back: Collection[int]
) -> Iterator[TracedCall | RecordedRow]:
    """Yield the forward pass, and what it reads of a backward pass."""
    for entry in program.order:
        first, *_ = _rows_of(entry)
        if first.phase == "forward" or first.record in going_back:
            yield entry


def _read_by_forward(flow: Flow) -> set[int]:
    """Return what leads to what the forward pass reads of a backward pass."""
    keys = [value.key for value in read_of_backward(flow)]
    return upstream(flow, keys, lambda value: value.row.phase == "backward")


def _is_taken(
    entry: TracedCall | RecordedRow,
    rows: Sequence[RecordedRow],
    depending: set[int],
    is_rounded: bool,
) -> bool:
    """Return True for a call whose results are taken as they are.

    It reads nothing that the numbers decide and is not ``is_rounded``, or draws, or hands
    over memory of its own, as that of a copy.
    """
    read = {record for row in rows for record in row.inputs}
    is_handed_over = any(row.base_operator == "set" for row in rows)
    is_independent = depending.isdisjoint(read) and not is_rounded
    return is_independent or is_handed_over or _draws(entry)


def _results(
    program: TracedProgram,
    entry: TracedCall | RecordedRow,
    tensors: Mapping[int, Tensor],
) -> list[tuple[RecordedRow, Tensor]]:
    """Run one entry, by its decomposition if need be. Raises ``CannotRun``.

    What is no floating point and cannot run, a check for one, is as it was recorded.
    """
    try:
        return program.one(entry)
    except CannotRun:
        values = [program.flow.values[row.record] for row in _rows_of(entry)]
        if isinstance(entry, RecordedRow):
            raise
        if not any(value.is_number for value in values):
            return []
        results = run_decomposed(entry.first, tensors.__getitem__)
        if results is None:
            results = _run_stand_in(entry, tensors)
    placed = [(row, row.place or 0) for row in entry.rows]
    outcomes = [(row, results[place]) for row, place in placed if place < len(results)]
    return [(row, tensor) for row, tensor in outcomes if tensor is not None]


def _run_stand_in(
    call: TracedCall, tensors: Mapping[int, Tensor]
) -> list[Tensor | None]:
    """Run a kernel that knows one format alone as it is written out for fp64."""
    overload = call.first.overload
    arguments = call.first.arguments
    if overload is None or arguments is None:
        raise CannotRun("its arguments were not recorded")

    def value(record: int) -> Tensor:
        if record not in tensors:
            raise CannotRun("one of its inputs was not stored")
        return tensors[record]

    return run_call(overload, arguments, value, torch.float64)


def _rows_of(entry: TracedCall | RecordedRow) -> tuple[RecordedRow, ...]:
    return entry.rows if isinstance(entry, TracedCall) else (entry,)


def _draws(entry: TracedCall | RecordedRow) -> bool:
    row = entry.first if isinstance(entry, TracedCall) else entry
    return row.base_operator in _DRAW
