"""Which operator made the first non-finite gradient of a step: the step runs again,
recorded, and the recording is asked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roundoff.compare import LOWER_SCALE, NonfiniteEvent, trace_overflow
from roundoff.ops import base, operators_that
from roundoff.preserve import preserve
from roundoff.record import Capture, load, site_name
from roundoff.train.scaling.rerun_step import ModelCall, StepCalls
from roundoff.train.scaling.skip import Birth

#: What an "arrived" NaN or Inf came in with.
LOSS = "loss"
DATA = "data"
WEIGHTS = "weights"
#: Casts and copies: what made a gradient is the operator before them.
_PASSING = (
    operators_that("keep values") | operators_that("cast") | operators_that("copy in")
)
#: Of what the script gives the model: a step is run again from there on.
CALLED_WITH_IT = "the model was called with it"
LOOK_BEFORE_THE_MODEL = (
    "look for 0/0, log(0) and inf - inf in what the script computes before it calls the "
    "model, then at the batch itself"
)
NOT_CALLED = (
    "the model that was given was not called in this step, or only in compiled code: give the "
    "module that the step calls, and of a compiled one what torch.compile returned"
)

#: A row of a recording, by column.
RecordedRow = dict[str, Any]


@dataclass
class Origin:
    """What a repeat of the step has shown."""

    birth: Birth = field(default_factory=Birth)
    notes: list[str] = field(default_factory=list)


def find_origin(steps: StepCalls) -> Origin:
    """Run the calls of the last step again, in backward order, up to the first with a
    gradient that is not finite.

    The model, its gradients, buffers, hooks and modes, and the random generators are as
    before afterwards. Inside, ``.grad`` is not touched by autograd, and nothing is
    communicated.
    """
    if steps.sharded:
        return Origin(
            notes=["the model is sharded, so that one rank cannot run it again"]
        )
    if not steps.calls:
        return Origin(notes=[NOT_CALLED])
    notes = []
    with _unobserved(steps):
        for call in steps.calls:
            changed = call.changed_since()
            birth = _run_again(steps.model, call)
            if changed:
                notes.append(
                    f"{' and '.join(changed)} were changed in place since the forward pass"
                )
            if birth is None:
                continue
            if len(steps.calls) > 1:
                notes.append(
                    f"in call {call.number} of {len(steps.calls)} of the model"
                )
            return Origin(birth, notes)
    notes.append(
        "run once more, the step had only finite gradients: what the model computes is not deterministic, only the sum of "
        "the gradients overflowed, or the gradient was changed after the backward pass"
    )
    return Origin(notes=notes)


@contextmanager
def _unobserved(steps: StepCalls) -> Iterator[None]:
    """Hide what runs inside from the model's owner and from ``steps``."""
    before = steps.paused
    steps.paused = True
    try:
        with preserve(steps.model), torch.enable_grad():
            yield
    finally:
        steps.paused = before


def _run_again(model: nn.Module, call: ModelCall) -> Birth | None:
    """Find the first non-finite gradient of one call and what made it; None where all
    are finite.
    """
    gradients = _gradients_from_outside(model, call)
    parameters = [p for p in model.parameters() if p.requires_grad]
    order: list[Tensor] = []
    with _noted_order(parameters, order), tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "skip")
        with Capture(path, model, eager=True) as run:
            leaves, inputs = _forward(model, call)
            bad_leaves = filter(_is_nonfinite_output, leaves)
            outputs = [run.recorder.recorded(leaf) for leaf in bad_leaves]
            input_gradients = _backward(leaves, gradients, parameters, inputs)
            names = {id(p): run.paths.name_of(p) for p in parameters}
            run.step()
        bad = [p for p in order if p.grad is not None and not _is_finite(p.grad)]
        if not bad and all(map(_is_finite, input_gradients)):
            return None
        rows = load(path).ops.collect()
    return read_birth(rows, names[id(bad[0])] if bad else None, outputs)


@contextmanager
def _noted_order(parameters: Sequence[Tensor], order: list[Tensor]) -> Iterator[None]:
    """Add each parameter to ``order`` when its gradient is complete; forget the
    gradients afterwards.
    """
    handles = []
    for parameter in parameters:
        register: Any = parameter.register_hook
        handles.append(register(partial(_note_order, order, parameter)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for parameter in parameters:
            parameter.grad = None


def _note_order(order: list[Tensor], parameter: Tensor, _: Tensor) -> None:
    order.append(parameter)


def _backward(
    leaves: Sequence[Any],
    gradients: dict[int, Tensor],
    parameters: Sequence[Tensor],
    inputs: Sequence[Tensor],
) -> list[Tensor]:
    """Give each parameter its ``grad``; return the gradients of the inputs."""
    places = [place for place in gradients if place < len(leaves)]
    with torch.autograd.set_multithreading_enabled(False):
        values: tuple[Tensor | None, ...] = torch.autograd.grad(
            [leaves[place] for place in places],
            [*parameters, *inputs],
            [gradients[place] for place in places],
            allow_unused=True,
        )
    for parameter, gradient in zip(parameters, values, strict=False):
        parameter.grad = gradient
    return [value for value in values[len(parameters) :] if value is not None]


def read_birth(
    rows: pl.DataFrame, gradient: str | None, outputs: Sequence[int | None]
) -> Birth:
    """Read from the rows of one step what made the gradient of a parameter, and where
    its NaN or Inf was born.

    ``outputs`` are the records of outputs of the model that are not finite.
    """
    events = trace_overflow(rows).events
    by_record = {event.record: event for event in events}
    maker = _maker_of_gradient(rows, gradient)
    event = None if maker is None else by_record.get(maker["record"])
    origin = _origin(event, events, by_record, outputs)
    birth = Birth(gradient=gradient)
    if maker is not None and event is not None:
        birth = replace(
            birth,
            made_by=maker["site"],
            operator=maker["operator"],
            dtype=maker["dtype"],
            born=origin is not None and maker["call"] == origin.call,
        )
    if origin is None:
        return birth
    return replace(
        birth,
        origin=origin.site,
        origin_operator=origin.operator,
        phase=_phase(origin),
        line=origin.line,
        cause=CALLED_WITH_IT if _phase(origin) == DATA else origin.cause,
        advice=_advice(origin),
    )


def _origin(
    event: NonfiniteEvent | None,
    events: Sequence[NonfiniteEvent],
    by_record: dict[int, NonfiniteEvent],
    outputs: Sequence[int | None],
) -> NonfiniteEvent | None:
    """Return the event where the NaN or Inf of ``event`` was born; without one the
    first birth of all.
    """
    born = None
    if event is not None and event.origin is not None:
        born = by_record.get(event.origin)
    if born is None:
        births = [e for e in events if e.is_birth and not e.allowed]
        return births[0] if births else None
    if born.kind != "arrived" or born.phase != "backward":
        return born
    # what came back into the model went out of it first
    forward = _births_of_outputs(by_record, outputs)
    return min(forward, key=lambda e: e.record, default=born)


def _births_of_outputs(
    by_record: dict[int, NonfiniteEvent], outputs: Sequence[int | None]
) -> list[NonfiniteEvent]:
    """Return where the NaN or Inf in outputs of the model was born."""
    passed = [by_record[o] for o in outputs if o is not None and o in by_record]
    origins = [event.origin for event in passed if not event.allowed]
    return [by_record[o] for o in origins if o is not None and o in by_record]


def _maker_of_gradient(rows: pl.DataFrame, gradient: str | None) -> RecordedRow | None:
    """Return the row of what computed a gradient: before casts, copies and views of it,
    in the backward pass.
    """
    if not gradient:
        return None
    records = rows.filter(pl.col("name") == f"{gradient}.grad")["record"].to_list()
    if not records:
        return None
    named = rows.with_columns(site_name()).to_dicts()
    by_record = {row["record"]: row for row in named}
    row = by_record[records[0]]
    while base(row["operator"]) in _PASSING or row["view_of"] is not None:
        source = row["view_of"]
        if source is None:
            source = next(iter(row["inputs"]), None)
        before = by_record.get(source)
        if before is None or not _is_earlier_backward(before, row):
            break
        row = before
    return row


def _is_earlier_backward(before: RecordedRow, row: RecordedRow) -> bool:
    is_backward = before["phase"] == "backward" and before["call"] >= 0
    return is_backward and bool(before["record"] < row["record"])


def _advice(event: NonfiniteEvent) -> str | None:
    if _phase(event) == DATA:
        return LOOK_BEFORE_THE_MODEL
    if event.advice == LOWER_SCALE:
        return "nothing while it is rare, as the scale is lowered now; else this operator in bfloat16 or float32"
    return event.advice


def _phase(event: NonfiniteEvent) -> str:
    if event.kind != "arrived":
        return event.phase
    if event.operator in ("parameter", "buffer"):
        return WEIGHTS
    return LOSS if event.phase == "backward" else DATA


def _forward(model: nn.Module, call: ModelCall) -> tuple[list[Any], list[Tensor]]:
    """Run a call again; return the leaves of its output, and the inputs with a gradient."""
    args, kwargs, inputs = call.inputs()
    with call.as_it_was():
        leaves = tree_leaves(model(*args, **kwargs))
    return leaves, inputs


def _gradients_from_outside(model: nn.Module, call: ModelCall) -> dict[int, Tensor]:
    """Return the gradients of the outputs, without what came to one (logits) through
    another (the loss made of them).
    """
    gradients = {
        place: torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        for place, parts in call.gradients.items()
    }
    if len(gradients) == 1:
        return gradients
    with torch.compiler.set_stance("force_eager"):
        leaves, _ = _forward(model, call)
    outside = dict(gradients)
    for later in gradients:
        for earlier in gradients:
            if earlier == later or not _is_made_of(leaves[later], leaves[earlier]):
                continue
            (through,) = torch.autograd.grad(
                [leaves[later]],
                [leaves[earlier]],
                [gradients[later]],
                allow_unused=True,
                retain_graph=True,
            )
            if through is not None:
                outside[earlier] = _without(outside[earlier], through)
    return outside


def _without(gradient: Tensor, through: Tensor) -> Tensor:
    """Subtract ``through``; 0 where that is not finite, since there is nothing to take
    away from.
    """
    rest = torch.where(torch.isfinite(through), gradient - through, 0.0)
    return rest.to(gradient.dtype)


def _is_made_of(later: Any, earlier: Any) -> bool:
    """Return True if ``later`` was made of ``earlier``."""
    target = earlier.grad_fn
    stack = [later.grad_fn]
    visited = set()
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is target:
                return True
            if node is not None and node not in visited:
                visited.add(node)
                stack.append(node)
    return False


def _is_nonfinite_output(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return False
    return not _is_finite(leaf)


def _is_finite(tensor: Tensor) -> bool:
    values = tensor._values() if tensor.is_sparse else tensor
    return bool(torch.isfinite(values).all())
