"""One call of a training step between its edges: the tensors that pass them, and the errors that are made there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from roundoff.budget.terms import TermKey, Terms, arrange, by_sample, project
from roundoff.ops import Call

#: Where an edge lies in its call: the leaf of an operand, or the place of an output among the outputs.
Spot = tuple[str, int]
OUTPUT = "output"
OPERAND = "operand"


@dataclass
class Error:
    """One error of one tensor, kept until the probes have passed."""

    key: TermKey
    place: int
    values: Tensor


@dataclass
class Use:
    """One call of the forward pass."""

    call: Call
    name: str
    operands: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, GradientEdge] = field(default_factory=dict)
    #: what the first backward pass brings to each spot, and its edge there
    gradients: dict[Spot, Tensor] = field(default_factory=dict)
    edges: dict[Spot, Tensor] = field(default_factory=dict)
    forward: dict[Spot, list[Error]] = field(default_factory=lambda: defaultdict(list))
    backward: dict[Spot, list[Error]] = field(default_factory=lambda: defaultdict(list))
    #: of an operator whose derivative jumps: see ``kinks.py``
    bend: Tensor | None = None


def project_error(terms: Terms, error: Error, adjoint: Tensor) -> None:
    """Add what an error does to the target, as this adjoint says, to ``terms``."""
    probe = by_sample(adjoint.detach().unsqueeze(0), None, 1)
    values, overflow = project(probe, arrange(error.values, None, 1))
    terms.add(error.key, error.place, values, overflow)


def rerunnable(call: Call) -> list[Any]:
    """The arguments with copies of what the operator keeps for itself (running statistics): a second run writes them."""
    own = {o.leaf for o in call.operands}
    return [
        x.clone()
        if floating(x) and i not in own and call.kind == "normalization"
        else x.detach()
        if floating(x)
        else x
        for i, x in enumerate(call.leaves)
    ]


def power_sum(tensors: Iterable[Tensor], power: int) -> float:
    """Sum of absolute values (1) or squares (2) of all elements."""
    return sum(float(t.double().abs().pow(power).sum()) for t in tensors)


def floating(value: Any) -> bool:
    """Whether it is a tensor of real floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()
