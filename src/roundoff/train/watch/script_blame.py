"""Whose fault a NaN in a step is that no operator of the model has made: the weights of
the step before, the script's own lines, or the data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from roundoff.train.scaling.backward_graph import BackwardGraph
from roundoff.train.scaling.rerun_step import StepCalls
from roundoff.train.watch.script_calls import ScriptBirth, ScriptCalls

_IN_DATA = (
    "no operator of the script has made it: it is in the data as the script reads them"
)
_LOOK_AT_DATA = (
    "look for NaN and Inf where the data are made or read, and leave them out"
)
_KEPT_BAD = (
    "look at the step before this one: its gradients were finite, so its optimizer made "
    "them (eps of 0, too high a learning rate), or the script wrote to the weights"
)
_TOOK_BAD = (
    "the weights took the gradients of an earlier step, which were not finite: mend that "
    "step"
)


@dataclass(frozen=True, slots=True)
class ScriptCause:
    """Where a NaN or Inf was born outside of the model's operators.

    Attributes:
        phase: loss, data, weights or gradients.
        origin: the operator, or the parameter.
        line: the user's; None where it is not known.
        cause: what happened.
        advice: what to try.
    """

    phase: str
    origin: str
    line: str | None
    cause: str
    advice: str


def script_cause(
    calls: ScriptCalls,
    models: Sequence[StepCalls],
    graph: BackwardGraph,
    losses: Sequence[Tensor],
    *,
    after_bad: bool,
) -> ScriptCause | None:
    """Return what made the NaN of a step, if it was not an operator of a model.

    Args:
        calls: the script's own in this step.
        models: that were called in it.
        graph: that ran backward in it.
        losses: that ran backward.
        after_bad: the step before had gradients that were not finite.
    """
    calls.paused = True
    try:
        with torch.no_grad():
            return (
                _in_the_weights(models, after_bad=after_bad)
                or _in_the_data(calls, models)
                or _in_the_loss(calls, losses)
                or _in_the_backward(calls, graph, losses)
            )
    finally:
        calls.paused = False


def _in_the_weights(
    models: Sequence[StepCalls], *, after_bad: bool
) -> ScriptCause | None:
    for steps in models:
        for name, parameter in steps.model.named_parameters():
            if _is_finite(parameter):
                continue
            return ScriptCause(
                phase="weights",
                origin=name,
                line=None,
                cause=f"{name} ({type(steps.model).__name__}) is not finite before the "
                "step begins",
                advice=_TOOK_BAD if after_bad else _KEPT_BAD,
            )
    return None


def _in_the_data(calls: ScriptCalls, models: Sequence[StepCalls]) -> ScriptCause | None:
    for read in _inputs(models):
        if _is_finite(read):
            continue
        birth = calls.birth_of(read)
        if birth is not None:
            return _of_birth(birth, "data")
        if read.grad_fn is None:
            line = calls.first_reader(read)
            return ScriptCause("data", "the input", line, _IN_DATA, _LOOK_AT_DATA)
    return None


def _inputs(models: Sequence[StepCalls]) -> Iterator[Tensor]:
    """Yield what the script gave to the models, in the order of the calls."""
    in_order = sorted(
        (call for steps in models for call in steps.calls), key=lambda call: call.index
    )
    for call in in_order:
        for leaf in tree_leaves((call.args, call.kwargs)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                yield leaf


def _in_the_loss(calls: ScriptCalls, losses: Sequence[Tensor]) -> ScriptCause | None:
    for loss in losses:
        birth = None if _is_finite(loss) else calls.birth_of(loss)
        if birth is not None:
            return _of_birth(birth, "loss")
    return None


def _in_the_backward(
    calls: ScriptCalls, graph: BackwardGraph, losses: Sequence[Tensor]
) -> ScriptCause | None:
    if not all(map(_is_finite, losses)):
        return None
    node = graph.born_in_the_loss()
    if node is not None:
        birth = calls.of_node(node.sequence)
        return None if birth is None else _of_birth(birth, "loss")
    birth = calls.birth_in_gradients()
    return None if birth is None else _of_birth(birth, "gradients")


def _of_birth(birth: ScriptBirth, phase: str) -> ScriptCause:
    return ScriptCause(phase, birth.operator, birth.line, birth.cause, birth.advice)


def _is_finite(value: Tensor) -> bool:
    if value.is_sparse or value.is_nested:
        return True
    return bool(torch.isfinite(value.detach()).all())
