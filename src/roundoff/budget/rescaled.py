"""A budget whose rows say what a run has shown."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import polars as pl

from roundoff.budget.noise_power import Array
from roundoff.budget.table import Budget, MeasuredTerm, term_frame


def rescaled(
    budget: Budget, factors: Mapping[tuple[str, str], float], output: str
) -> Budget:
    """Return a budget whose rows have other powers at one output.

    Args:
        budget: stays as it is.
        factors: of the noise power, by site and format.
        output: name of the output; the others stay.
    """
    number = [row.name for row in budget.outputs].index(output)
    rows = [
        MeasuredTerm(site, fmt, replace(term, values=values))
        for (site, fmt), factor in factors.items()
        for term in budget.rows(site, fmt)
        for values in [_scaled(term.values, budget, number, math.sqrt(factor))]
    ]
    if not rows:
        return budget
    pairs = pl.DataFrame(list(factors), schema=["site", "format"], orient="row")
    kept = budget.terms.join(pairs, on=["site", "format"], how="anti")
    terms = pl.concat([kept, term_frame(rows, len(budget.outputs))])
    return replace(budget, terms=terms)


def _scaled(values: Array, budget: Budget, output: int, factor: float) -> Array:
    probes = budget.about.probes
    scaled = values.copy()
    scaled[output * probes : (output + 1) * probes] *= factor
    return scaled
