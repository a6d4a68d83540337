"""``Skip``: why a step was skipped, as data and in words."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from roundoff.train.scaling.backward_graph import BackwardGraph, operator_of
from roundoff.train.scaling.rerun_step import StepCalls
from roundoff.train.scaling.step_gradients import StepGradients, first_few

_PHASES = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "loss": "outside of the model, in the loss",
    "data": "before the model ran: it came in with the data, or with what the script makes of them",
    "weights": "before the step: it came in with the weights",
    "gradients": "between the backward pass and the optimizer's step",
}
#: Unscaling rounds, so a saturated gradient may end this much below the limit.
_UNSCALED = 1 - 2**-20


@dataclass(frozen=True)
class Birth:
    """Where the first NaN or Inf of the gradients comes from; fields are None where
    they are not known.

    Attributes:
        gradient: the parameter whose gradient was the first in backward order to hold NaN
            or Inf (or to reach the largest value, where saturation counts).
        made_by: the operator call that made that gradient.
        operator: its operator.
        dtype: format of the gradient that it made.
        born: NaN or Inf was born in that call; else it was inherited from ``origin``.
        origin: the call where it was born.
        origin_operator: its operator.
        phase: of ``origin``: forward, backward, loss (outside of the model), data, weights.
        line: the user's line of the origin.
        cause: what its numbers show.
        advice: what to try.
    """

    gradient: str | None = None
    made_by: str | None = None
    operator: str | None = None
    dtype: str | None = None
    born: bool | None = None
    origin: str | None = None
    origin_operator: str | None = None
    phase: str | None = None
    line: str | None = None
    cause: str | None = None
    advice: str | None = None

    def updated(self, newer: Birth) -> Birth:
        """Take over what ``newer`` knows."""
        fields = {k: v for k, v in asdict(newer).items() if v is not None}
        return replace(self, **fields)


@dataclass(frozen=True, kw_only=True)
class Skip:
    """One skipped step.

    Attributes:
        step: its number.
        scale: the loss scale.
        loss_finite: the loss was finite before it was scaled.
        gradient: the parameter whose gradient was the first in backward order to hold NaN
            or Inf; this and what follows down to ``advice`` as in ``Birth``.
        gradients: number of gradients that were not finite.
        parameters: number of all.
        made_by: the operator call that made that gradient.
        operator: its operator.
        dtype: format of the gradient that it made.
        born: NaN or Inf was born in that call; else it was inherited from ``origin``.
        origin: the call where it was born.
        origin_operator: its operator.
        phase: phase of ``origin``.
        line: the user's line of ``origin``.
        cause: what its numbers show.
        advice: what to try.
        saturation: a gradient that reaches the largest value counts too.
        notes: why fields are not known, and what else to know.
    """

    step: int
    scale: float
    loss_finite: bool
    gradient: str | None
    gradients: int
    parameters: int
    made_by: str | None = None
    operator: str | None = None
    dtype: str | None = None
    born: bool | None = None
    origin: str | None = None
    origin_operator: str | None = None
    phase: str | None = None
    line: str | None = None
    cause: str | None = None
    advice: str | None = None
    saturation: bool = False
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self) | {"notes": list(self.notes)}

    def __str__(self) -> str:
        kind = "not finite or saturated" if self.saturation else "not finite"
        count = f"{self.gradients} of {self.parameters} gradients are {kind}"
        parts = [f"step {self.step} skipped at loss scale {self.scale:g}: {count}"]
        if self.gradient is not None:
            maker = f", made by {self.made_by}" if self.made_by else ""
            parts.append(
                f"the first in backward order is that of {self.gradient}{maker}"
            )
        if self.origin is not None and self.phase is not None:
            parts.append(self._birth(self.origin, self.phase))
        if not self.loss_finite:
            parts.append("the loss itself was not finite before it was scaled")
        if self.cause:
            parts.append(self.cause)
        if self.advice:
            parts.append(f"try: {self.advice}")
        return "; ".join([*parts, *filter(None, self.notes)])

    def _birth(self, origin: str, phase: str) -> str:
        line = f" ({self.line})" if self.line else ""
        if self.born:
            return f"it was born there, {_PHASES[phase]}{line}"
        return f"it was inherited: born at {origin} {_PHASES[phase]}{line}"


def explain_skip(
    gradients: StepGradients,
    graph: BackwardGraph,
    calls: StepCalls | None,
    *,
    step: int,
    scale: float,
    loss_finite: bool,
    saturation: float | None = None,
) -> Skip:
    """Explain a skipped step by its unscaled ``gradients``; with ``calls`` by running it once more.

    Never fails: what could not be found out is a note.
    """
    limit = None if saturation is None else saturation / scale
    bad = _bad_gradients(gradients, limit)
    birth = _by_the_graph(bad, graph, loss_finite)
    notes = ["LossScaler(model) would name the operator that made it"]
    if calls is not None:
        try:
            birth, notes = _by_a_rerun(birth, graph, calls, loss_finite)
        except Exception as error:  # noqa: BLE001 (the training goes on without an explanation)
            reason = str(error).splitlines()[0][:200]
            notes = [
                f"the step could not be run again: {type(error).__name__}: {reason}"
            ]
    return Skip(
        step=step,
        scale=scale,
        loss_finite=loss_finite,
        gradients=len(bad),
        parameters=len(gradients.parameters),
        saturation=saturation is not None,
        notes=tuple(notes),
        **asdict(birth),
    )


def _bad_gradients(gradients: StepGradients, saturated: float | None) -> dict[int, str]:
    """Name, by identity, each parameter whose unscaled gradient is not finite or at
    least ``saturated``.
    """
    bad = {}
    rows = zip(gradients.names(), gradients.parameters, gradients.values(), strict=True)
    for name, parameter, value in rows:
        if not value.numel():
            continue
        limit = torch.finfo(value.dtype).max
        if saturated is not None:
            limit = saturated * _UNSCALED
        largest = float(value.abs().max())  # NaN where there is one
        if not largest < limit:
            bad[id(parameter)] = name
    return bad


def _by_the_graph(
    bad: dict[int, str], graph: BackwardGraph, loss_finite: bool
) -> Birth:
    """Say what the graph of the loss alone shows."""
    born = None if loss_finite else False
    for parameter, node in graph.gradients():
        if id(parameter) in bad:
            return Birth(
                gradient=bad[id(parameter)],
                made_by=node,
                operator=operator_of(node),
                born=born,
            )
    return Birth(gradient=next(iter(bad.values()), None), born=born)


def _by_a_rerun(
    birth: Birth, graph: BackwardGraph, calls: StepCalls, loss_finite: bool
) -> tuple[Birth, list[str]]:
    from roundoff.train.scaling.origin import find_origin

    origin = find_origin(calls)
    birth = birth.updated(origin.birth)
    notes = list(origin.notes)
    if birth.phase == "loss":
        birth, in_the_loss = _in_the_loss(birth, graph, loss_finite)
        notes += in_the_loss
    spoilt = calls.spoilt_buffers()
    if spoilt:
        notes.append(
            f"the forward pass has left NaN or Inf in {first_few(spoilt)}, which skipping does not undo"
        )
    return birth, notes


def _in_the_loss(
    birth: Birth, graph: BackwardGraph, loss_finite: bool
) -> tuple[Birth, list[str]]:
    """Name the node of the loss that made a NaN or Inf which came from outside the model."""
    nodes = graph.loss_nodes()
    node = graph.born_in_the_loss()
    if node is None:
        return birth, []
    operator = operator_of(node.name)
    cause = f"the gradient that {node.name} gives back is the first that is not finite"
    advice = "compute the loss in float32"
    if not loss_finite:
        cause += (
            ", and the loss was not finite either, though all outputs of the model are"
        )
        advice += ", and away from log(0) and division by zero"
    elif operator == "_to_copy":
        cause += ": times the scale it has no room in the format it is cast to"
    in_the_loss = replace(
        birth,
        origin=operator,
        origin_operator=operator,
        cause=cause,
        advice=advice,
    )
    return in_the_loss, [f"the loss, from its end: {' <- '.join(nodes)}"]


def diagnosis(steps: int, scale: float, rule: str, last: Skip | None) -> dict[str, str]:
    """Return the parts of the error for a scaler that cannot help any more."""
    static = ", which is static" if rule == "static" else ""
    parts = {
        "what": f"{steps} steps in a row were skipped and the scale cannot go lower: no step will be good again",
        "where": f"loss scale {scale:g}{static}",
        "do": _advice(last),
    }
    if last is not None:
        parts["got"] = str(last)
    return parts


def _advice(last: Skip | None) -> str:
    if last is None:
        return "LossScaler(model) names the operator that makes the first non-finite gradient"
    if not last.loss_finite:
        return "the loss itself is NaN or Inf before it is scaled: look for it in the data and the weights of a checkpoint"
    if last.advice:
        return last.advice
    return "keep the operator in float32 or bfloat16; a NaN in the weights needs an earlier checkpoint"
