"""Which operator made the first non-finite gradient of a step: the step runs again, recorded, and the recording is asked."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roundoff.compare import LOWER_SCALE, overflow
from roundoff.ops import base, operators_that
from roundoff.preserve import preserve
from roundoff.record import Capture, load, site_name
from roundoff.train.scaling.rerun_step import Call, Steps

#: What an "arrived" NaN or Inf came in with.
LOSS, DATA, WEIGHTS = "loss", "data", "weights"
#: Casts and copies: what made a gradient is the operator before them.
_PASSING = (
    operators_that("keep values") | operators_that("cast") | operators_that("copy in")
)


@dataclass
class Origin:
    """What the repeat has shown; the fields are those of ``Skip``."""

    found: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def explain(steps: Steps) -> Origin:
    """Run the calls of the last step again, in backward order, up to the first with a gradient that is not finite.

    The model, its gradients, buffers, hooks and modes, and the random generators are as before afterwards. Inside,
    ``.grad`` is not touched by autograd, and nothing is communicated.
    """
    origin = Origin()
    if steps.sharded:
        origin.notes.append(
            "the model is sharded, so that one rank cannot run it again"
        )
        return origin
    if not steps.calls:
        origin.notes.append(
            "the model that was given was not called in this step, or only in compiled code: give the "
            "module that the step calls, and of a compiled one what torch.compile returned"
        )
        return origin
    with _apart(steps):
        for call in steps.calls:
            changed = call.since()
            found = _again(steps.model, call)
            if found:
                if changed:
                    origin.notes.append(
                        f"{' and '.join(changed)} were changed in place since the forward pass"
                    )
                if len(steps.calls) > 1:
                    origin.notes.append(
                        f"in call {call.number} of {len(steps.calls)} of the model"
                    )
                origin.found = found
                return origin
            if changed:
                origin.notes.append(
                    f"{' and '.join(changed)} were changed in place since the forward pass"
                )
    origin.notes.append(
        "run once more, the step had only finite gradients: what the model computes is not deterministic, only the sum of "
        "the gradients overflowed, or the gradient was changed after the backward pass"
    )
    return origin


@contextmanager
def _apart(steps: Steps) -> Iterator[None]:
    """Nothing that runs inside is seen by the model's owner, or by ``steps``."""
    before, steps.paused = steps.paused, True
    try:
        with preserve(steps.model), torch.enable_grad():
            yield
    finally:
        steps.paused = before


def _again(model: nn.Module, call: Call) -> dict[str, Any]:
    """The first non-finite gradient of one call and what made it; empty where all are finite."""
    gradients = _from_outside(model, call)
    parameters = [p for p in model.parameters() if p.requires_grad]
    order: list[Tensor] = []
    handles = [_hooked(p, _Seen(order, p)) for p in parameters]
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "skip")
            with Capture(path, model, eager=True) as run:
                made, outputs, inputs = _forward(model, call)
                ends = [
                    run.recorder.known(o)
                    for o in outputs
                    if o.is_floating_point() and not _finite(o)
                ]
                places = [place for place in gradients if place < len(made)]
                with torch.autograd.set_multithreading_enabled(False):
                    found = torch.autograd.grad(
                        [made[p] for p in places],
                        [*parameters, *inputs],
                        [gradients[p] for p in places],
                        allow_unused=True,
                    )
                gradients_of: list[Tensor | None] = list(found)
                for parameter, gradient in zip(parameters, gradients_of, strict=False):
                    parameter.grad = gradient
                names = {id(p): run.paths.name_of(p) for p in parameters}
                run.step()
            bad = [p for p in order if p.grad is not None and not _finite(p.grad)]
            came_in = [
                g
                for g in gradients_of[len(parameters) :]
                if g is not None and not _finite(g)
            ]
            if not bad and not came_in:
                return {}
            rows = load(path).ops.collect()
    finally:
        for handle in handles:
            handle.remove()
        for parameter in parameters:
            parameter.grad = None
    return read(rows, names[id(bad[0])] if bad else None, ends)


def read(
    rows: pl.DataFrame, gradient: str | None, outputs: list[int | None]
) -> dict[str, Any]:
    """From the rows of one step: what made the gradient of the parameter, and where its NaN or Inf was born.

    ``outputs`` are the records of outputs of the model that are not finite.
    """
    events = overflow(rows).events
    by_record = {e["record"]: e for e in events.to_dicts()}
    named = (
        rows.filter(pl.col("name") == f"{gradient}.grad")["record"].to_list()
        if gradient
        else []
    )
    maker = _maker(rows, named[0]) if named else None
    event = None if maker is None else by_record.get(maker["record"])
    born = None if event is None else by_record.get(event["origin"])
    if born is not None and born["kind"] == "arrived" and born["phase"] == "backward":
        through = [
            by_record[r] for r in outputs if r in by_record
        ]  # what came back went out first
        forward = [
            by_record[e["origin"]]
            for e in through
            if e["origin"] in by_record and not e["allowed"]
        ]
        born = min(forward, key=lambda e: int(e["record"]), default=born)
    if born is None:
        births = [
            e
            for e in events.to_dicts()
            if e["kind"] in ("birth", "arrived") and not e["allowed"]
        ]
        born = births[0] if births else None
    found: dict[str, Any] = {"gradient": gradient}
    if maker is not None and event is not None:
        found |= {
            "made_by": maker["site"],
            "operator": maker["operator"],
            "dtype": maker["dtype"],
            "born": born is not None and maker["call"] == born["call"],
        }
    if born is not None:
        found |= {
            "origin": born["site"],
            "origin_operator": born["operator"],
            "phase": _phase(born),
            "line": born["line"],
            "cause": born["cause"],
            "advice": _advice(born),
        }
    return found


def _maker(rows: pl.DataFrame, record: int) -> dict[str, Any]:
    """The row of what computed a value: before casts, copies and views of it, in the backward pass."""
    by_record = {
        row["record"]: row for row in rows.with_columns(site_name()).to_dicts()
    }
    row = by_record[record]
    while base(row["operator"]) in _PASSING or row["view_of"] is not None:
        before = by_record.get(
            row["view_of"]
            if row["view_of"] is not None
            else next(iter(row["inputs"]), None)
        )
        if (
            before is None
            or before["phase"] != "backward"
            or before["call"] < 0
            or before["record"] >= row["record"]
        ):
            break
        row = before
    return row


def _advice(event: dict[str, Any]) -> str | None:
    advice: str | None = event["advice"]
    return (
        "nothing while it is rare, as the scale is lowered now; else this operator in bfloat16 or float32"
        if advice == LOWER_SCALE
        else advice
    )


def _phase(event: dict[str, Any]) -> str:
    if event["kind"] != "arrived":
        return str(event["phase"])
    if event["operator"] in ("parameter", "buffer"):
        return WEIGHTS
    return LOSS if event["phase"] == "backward" else DATA


def _forward(
    model: nn.Module, call: Call
) -> tuple[list[Any], list[Tensor], list[Tensor]]:
    """All outputs, those that are tensors, and the inputs with a gradient."""
    args, kwargs, inputs = call.inputs()
    with call.as_it_was():
        made = tree_leaves(model(*args, **kwargs))
    return made, [o for o in made if isinstance(o, Tensor)], inputs


def _from_outside(model: nn.Module, call: Call) -> dict[int, Tensor]:
    """The gradients of the outputs, without what came to one output (logits) through another (the loss made of them)."""
    came = {
        place: torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]
        for place, parts in call.gradients.items()
    }
    if len(came) == 1:
        return came
    with torch.compiler.set_stance("force_eager"):
        made, _, _ = _forward(model, call)
    outside = dict(came)
    for later in came:
        for earlier in came:
            if earlier == later or not _before(made[earlier], made[later]):
                continue
            (through,) = torch.autograd.grad(
                [made[later]],
                [made[earlier]],
                [came[later]],
                allow_unused=True,
                retain_graph=True,
            )
            if (
                through is not None
            ):  # where it is not finite itself, there is nothing to take away from
                rest = torch.where(
                    torch.isfinite(through), outside[earlier] - through, 0.0
                )
                outside[earlier] = rest.to(outside[earlier].dtype)
    return outside


def _before(earlier: Any, later: Any) -> bool:
    """Whether ``later`` was made of ``earlier``."""
    target, stack, seen = earlier.grad_fn, [later.grad_fn], set()
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is target:
                return True
            if node is not None and node not in seen:
                seen.add(node)
                stack.append(node)
    return False


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor._values() if tensor.is_sparse else tensor).all())


def _hooked(tensor: Any, hook: Any) -> Any:
    return tensor.register_hook(hook)


class _Seen:
    def __init__(self, order: list[Tensor], parameter: Tensor) -> None:
        self.order, self.parameter = order, parameter

    def __call__(self, _: Tensor) -> None:
        self.order.append(self.parameter)
