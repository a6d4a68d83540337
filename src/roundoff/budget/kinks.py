"""Operators whose derivative jumps: what rounding costs the gradients there is no first-order effect.

Where an error d moves x over the kink of a ReLU, the whole gradient of that element appears or vanishes. This happens
with probability p E|d| (p: the density of x at the kink), so its power grows with |d|, not with d^2. To keep one
quadratic measure the jump is smeared: in the window |x| < w its derivative is taken as c, with a random sign for each
element (jumps of different elements are independent), and c such that the mean square agrees at the errors that a given
choice of formats really makes: c^2 E d^2 2 w p = p E|d|. Where a plan is more exact than that choice, this part of its
prediction is too good by half the difference in dB; measure again around the plan then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from roundoff.budget.signs import draw_signs
from roundoff.ops import Call, facts

#: Share of the elements in the window, and the least number of them: few would say little of the density.
SHARE, LEAST = 0.05, 64


@dataclass
class Kinks:
    """What the inputs of the operators with kinks are under a choice of formats (``moved``, by site)."""

    generator: torch.Generator
    moved: dict[str, Tensor] = field(default_factory=dict)

    def seen(self, call: Call) -> None:
        """Keep the input of a call in the rounded model."""
        if facts(call.operator.name).kinks:
            self.moved[str(call.site)] = (
                call.leaves[call.operands[0].leaf].detach().clone()
            )

    def derivative(self, call: Call, exact: Tensor) -> Tensor | None:
        """The smeared derivative of this operator's derivative at each element of its input; None where nothing jumps."""
        moved = self.moved.get(str(call.site))
        if moved is None or moved.shape != exact.shape or not exact.numel():
            return None
        error = (moved - exact).abs()
        found = torch.zeros_like(exact)
        for where, jump in facts(call.operator.name).kinks:
            distance = (exact - where).abs()
            count = min(exact.numel(), max(LEAST, int(SHARE * exact.numel())))
            width = distance.flatten().kthvalue(count).values
            inside = distance <= width
            absolute = float(error[inside].double().mean())
            square = float(error[inside].double().square().mean())
            if square > 0 and math.isfinite(square) and float(width) > 0:
                found += inside * (
                    jump * math.sqrt(absolute / (2 * float(width) * square))
                )
        return found * draw_signs(exact.shape, self.generator, exact)
