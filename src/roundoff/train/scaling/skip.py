"""``Skip``: why a step was skipped, as data and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from roundoff.train.scaling.autograd_graph import Graph, operator_of
from roundoff.train.scaling.rerun_step import Steps
from roundoff.train.scaling.unscale import Gradients, listed

_WHERE = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "loss": "outside of the model, in the loss",
    "data": "before the step: it came in with the data",
    "weights": "before the step: it came in with the weights",
}


@dataclass(frozen=True)
class Skip:
    """One skipped step.

    ``gradient`` is the parameter whose gradient was the first in backward order to hold NaN or Inf (or to reach the
    largest value, where saturation counts), ``made_by`` the operator call that made it, and ``born`` whether the NaN or Inf
    was born in that call; else it was inherited from ``origin``, which ran in ``phase``: forward, backward, loss (outside of
    the model), data, weights. ``line`` is the user's line of the origin, ``cause`` what its numbers show, ``advice`` what to
    try.
    Fields that are not known are None; ``notes`` say why. ``gradients`` of ``parameters`` were not finite.
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
        return asdict(self) | {"notes": list(self.notes)}

    def __str__(self) -> str:
        what = "not finite or saturated" if self.saturation else "not finite"
        count = f"{self.gradients} of {self.parameters} gradients are {what}"
        parts = [f"step {self.step} skipped at loss scale {self.scale:g}: {count}"]
        if self.gradient is not None:
            made = f", made by {self.made_by}" if self.made_by else ""
            parts.append(
                f"the first in backward order is that of {self.gradient}{made}"
            )
        if self.origin is not None and self.phase is not None:
            line = f" ({self.line})" if self.line else ""
            if self.born:
                parts.append(f"it was born there, {_WHERE[self.phase]}{line}")
            else:
                parts.append(
                    f"it was inherited: born at {self.origin} {_WHERE[self.phase]}{line}"
                )
        if not self.loss_finite:
            parts.append("the loss itself was not finite before it was scaled")
        parts += [
            text
            for text in (
                self.cause,
                f"try: {self.advice}" if self.advice else None,
                *self.notes,
            )
            if text
        ]
        return "; ".join(parts)

    @classmethod
    def explained(
        cls,
        gradients: Gradients,
        graph: Graph,
        steps: Steps | None,
        saturation: float | None,
        about: dict[str, Any],
    ) -> Skip:
        """Never fails: what could not be found out is a note."""
        bad = _bad(
            gradients, None if saturation is None else saturation / about["scale"]
        )
        first = next(((p, node) for p, node in graph.gradients() if id(p) in bad), None)
        name = (
            (bad[id(first[0])] if first else next(iter(bad.values()))) if bad else None
        )
        found: dict[str, Any] = {
            "gradient": name,
            **_by_node(first[1] if first else None, about["loss_finite"]),
        }
        notes: list[str] = []
        if steps is None:
            notes.append("LossScaler(model) would name the operator that made it")
        else:
            try:
                from roundoff.train.scaling.origin import explain

                origin = explain(steps)
                found |= {
                    key: value
                    for key, value in origin.found.items()
                    if value is not None
                }
                notes += origin.notes
                found, more = _in_the_loss(found, graph, about["loss_finite"])
                notes += more
                if spoilt := steps.spoilt():
                    notes.append(
                        f"the forward pass has left NaN or Inf in {listed(spoilt)}, which skipping does not undo"
                    )
            except Exception as error:  # noqa: BLE001 (the training goes on without an explanation)
                notes.append(
                    f"the step could not be run again: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
                )
        return cls(
            **about,
            **found,
            gradients=len(bad),
            parameters=len(gradients.parameters),
            notes=tuple(notes),
            saturation=saturation is not None,
        )


def diagnosis(steps: int, scale: float, rule: str, last: Skip | None) -> dict[str, str]:
    """The parts of the error for a scaler that cannot help any more."""
    where = f"loss scale {scale:g}" + (", which is static" if rule == "static" else "")
    if last is None:
        do = "LossScaler(model) names the operator that makes the first non-finite gradient"
    elif not last.loss_finite:
        do = "the loss itself is NaN or Inf before it is scaled: look for it in the data and the weights of a checkpoint"
    elif last.advice:
        do = last.advice
    else:
        do = "keep the operator in float32 or bfloat16; a NaN in the weights needs an earlier checkpoint"
    found = {
        "what": f"{steps} steps in a row were skipped and the scale cannot go lower: no step will be good again",
        "where": where,
        "do": do,
    }
    return found if last is None else found | {"got": str(last)}


def _by_node(node: str | None, loss_finite: bool) -> dict[str, Any]:
    """What the graph alone says."""
    found: dict[str, Any] = (
        {} if node is None else {"made_by": node, "operator": operator_of(node)}
    )
    return found if loss_finite else found | {"born": False}


def _in_the_loss(
    found: dict[str, Any], graph: Graph, loss_finite: bool
) -> tuple[dict[str, Any], list[str]]:
    """A NaN or Inf that came from outside the model: the node of the loss that made it."""
    if found.get("phase") != "loss":
        return found, []
    nodes = graph.loss_nodes()
    node = graph.born_in_the_loss()
    if node is None:
        return found, []
    operator = operator_of(node)
    cause = f"the gradient that {node} gives back is the first that is not finite"
    if not loss_finite:
        cause += (
            ", and the loss was not finite either, though all outputs of the model are"
        )
    elif operator == "_to_copy":
        cause += ": times the scale it has no room in the format it is cast to"
    advice = "compute the loss in float32" + (
        "" if loss_finite else ", and away from log(0) and division by zero"
    )
    notes = [f"the loss, from its end: {' <- '.join(nodes)}"]
    return found | {
        "origin": operator,
        "origin_operator": operator,
        "cause": cause,
        "advice": advice,
    }, notes


def _bad(gradients: Gradients, saturated: float | None) -> dict[int, str]:
    """Name by id of each parameter whose gradient, unscaled, is not finite or at least ``saturated``."""
    values: Sequence[Tensor] = gradients.values()
    found = {}
    for name, parameter, value in zip(
        gradients.names(), gradients.parameters, values, strict=True
    ):
        least = value.abs().max() if value.numel() else value.new_zeros(())
        limit = (
            torch.finfo(value.dtype).max
            if saturated is None
            else saturated * (1 - 2**-20)
        )  # unscaling rounds
        if not bool(torch.isfinite(value).all()) or float(least) >= limit:
            found[id(parameter)] = name
    return found
