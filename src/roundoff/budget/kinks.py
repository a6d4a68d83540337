"""Operators whose derivative jumps: rounding there costs gradients no linear effect.

Where an error d moves x over the kink of a ReLU, the whole gradient of that element
appears or vanishes. This happens with probability p E|d| (p: the density of x at the
kink), so its power grows with |d|, not with d^2. To keep one quadratic measure the jump
is smeared: in the window |x| < w its derivative is taken as c, with a random sign for
each element (jumps of different elements are independent), and c such that the mean
square agrees at the errors that a given choice of formats really makes:
c^2 E d^2 2 w p = p E|d|. Where a plan is more exact than that choice, this part of its
prediction is too good by half the difference in dB; measure again around the plan then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from roundoff.budget.signs import draw_signs
from roundoff.ops import Call, facts

#: Share of the elements in the window.
SHARE = 0.05
#: Fewest elements in the window: fewer say little of the density.
LEAST = 64


@dataclass
class Kinks:
    """The inputs of operators with kinks under a choice of formats, by site."""

    generator: torch.Generator
    moved: dict[str, Tensor] = field(default_factory=dict)

    def record(self, call: Call) -> None:
        """Keep the input of a call in the rounded model."""
        if facts(call.operator.name).kinks:
            rounded_input = call.leaves[call.operands[0].leaf]
            self.moved[str(call.site)] = rounded_input.detach().clone()

    def derivative(self, call: Call, exact: Tensor) -> Tensor | None:
        """Return the smeared derivative of this operator's derivative.

        One value for each element of its input ``exact``; None where nothing jumps.
        """
        moved = self.moved.get(str(call.site))
        if moved is None or moved.shape != exact.shape or not exact.numel():
            return None
        error = (moved - exact).abs()
        derivative = torch.zeros_like(exact)
        for place, jump in facts(call.operator.name).kinks:
            derivative += _smeared(exact - place, error, jump)
        return derivative * draw_signs(exact.shape, self.generator, exact)


def _smeared(offset: Tensor, error: Tensor, jump: float) -> Tensor:
    """Return the smeared derivative of one jump.

    ``offset`` is where the elements lie from the kink, ``error`` how far they move.
    """
    distance = offset.abs()
    count = min(offset.numel(), max(LEAST, int(SHARE * offset.numel())))
    width = distance.flatten().kthvalue(count).values
    inside = distance <= width
    moved = error[inside].double()
    absolute = float(moved.mean())
    square = float(moved.square().mean())
    if not (0 < square < math.inf and float(width) > 0):
        return torch.zeros_like(offset)
    return inside * (jump * math.sqrt(absolute / (2 * float(width) * square)))
