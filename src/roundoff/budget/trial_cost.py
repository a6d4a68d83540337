"""Which costs less for a workload: trials of every row, or the adjoint.

Costs are in forward passes of one batch, as measured on networks of 3 to 130 sites; a
step of a program counts as its share of a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from roundoff.budget.noise_power import casts
from roundoff.budget.trials import Programs, Recording
from roundoff.formats import Format
from roundoff.ops import Call, runs
from roundoff.workload import Workload

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


def trial_cost(
    workload: Workload, first: Recording, formats: Sequence[Format]
) -> float:
    """Return what trials of every row of a batch cost; infinite without a program or a site.

    Args:
        workload: its model is ``prepared``.
        first: the first batch.
        formats: to be measured.
    """
    program = Programs(workload, first).of(0)
    if program is None:
        return math.inf
    places = first.batches[0].places.values()
    if not any(place.reaches for place in places):
        return math.inf
    return sum(
        _parts(place.call, fmt) * (program.share_after(place.number) + PART)
        for place in places
        for fmt in formats
        if place.reaches and runs(place.call, fmt) is None
    )


def adjoint_cost(probes: int, *, decides: bool) -> float:
    """Return what the adjoint of a batch costs, without what trials cost as well."""
    return PROBE * probes + SEARCH + (DECISION if decides else 0.0)


def _parts(call: Call, fmt: Format) -> int:
    """Return how many parts of a row are measured one by one."""
    rule = fmt.execution
    if rule is None:
        return 0
    roles = [operand.role for operand in call.operands]
    activations = roles.count("activation") if rule.activation is not None else 0
    if not casts(fmt.name):
        activations = min(1, activations)
    has_weights = len(roles) > roles.count("activation")
    return activations + has_weights + bool(rule.output)
