"""Which costs less for a workload: trials of every row, or the adjoint.

Costs are in forward passes of one batch, as measured on networks of 3 to 130 sites; a
step of a program counts as its share of a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

from roundoff.budget.noise_power import casts
from roundoff.budget.trials import Programs
from roundoff.formats import Format
from roundoff.ops import Call, runs

#: What a part of a row costs besides what runs again, more than by the adjoint.
PART = 0.03
#: What a probe costs: to go back, and to be projected on.
PROBE = 2.5
#: What the adjoint costs besides, in looking for rows that first order has wrong.
SEARCH = 30.0
#: And where a decision is taken, in trials of the rows that reach it.
DECISION = 60.0
#: Probes of a batch that a measurement has at least, but for the smallest ones.
USUAL_PROBES = 8
#: Least share of a forward pass that follows from a site, in the mean over the sites.
LEAST_SHARE = 0.1


class TrialCost:
    """What trials of every row of a batch cost.

    Args:
        programs: of the first batch, which was followed.
        formats: to be measured.
    """

    def __init__(self, programs: Programs, formats: Sequence[Format]) -> None:
        self.programs = programs
        self.first = programs.recording
        self.parts = {
            place.number: _parts(place.call, formats)
            for batch in self.first.batches.values()
            for place in batch.places.values()
            if place.reaches
        }

    @property
    def at_least(self) -> float:
        """A cost that it is above, without a run.

        Infinite without a site, and where forward passes change the model: there is no
        program then.
        """
        parts = sum(self.parts.values())
        is_possible = parts and self.first.is_pure
        return parts * (LEAST_SHARE + PART) if is_possible else math.inf

    @cached_property
    def exact(self) -> float:
        """The cost, by the program of the first batch; infinite without one."""
        program = self.programs.of(0)
        if program is None:
            return math.inf
        cost = sum(
            parts * (program.share_after(number) + PART)
            for number, parts in self.parts.items()
        )
        # not held while the adjoint holds its gradients
        self.programs.forget()
        return cost

    def is_below(self, limit: float) -> bool:
        """Return True if trials cost less than ``limit``."""
        return self.at_least < limit and self.exact < limit


def adjoint_cost(probes: int, *, decides: bool) -> float:
    """Return what the adjoint of a batch costs, without what trials cost as well."""
    return PROBE * probes + SEARCH + (DECISION if decides else 0.0)


def _parts(call: Call, formats: Sequence[Format]) -> int:
    """Return how many parts of the rows of a site are measured one by one."""
    return sum(_parts_in(call, fmt) for fmt in formats if runs(call, fmt) is None)


def _parts_in(call: Call, fmt: Format) -> int:
    rule = fmt.execution
    if rule is None:
        return 0
    roles = [operand.role for operand in call.operands]
    activations = roles.count("activation") if rule.activation is not None else 0
    if not casts(fmt.name):
        activations = min(1, activations)
    has_weights = len(roles) > roles.count("activation")
    return activations + has_weights + bool(rule.output)
