"""A call on a whole sum, where one of its terms alone is meant."""

from __future__ import annotations

from collections.abc import Iterator

from roundoff.compare.repairs.edits.edited_calls import (
    Ingredients,
    Template,
    reading_another,
    renamed,
)
from roundoff.compare.values.traced_calls import (
    BEFORE,
    Edit,
    EditStep,
    TracedCall,
    records_in,
)
from roundoff.ops import operators_that

_SUMS = operators_that("add or subtract")
_WORKING = (
    operators_that("work element by element")
    | operators_that("activate")
    | operators_that("scale elements")
)


def terms_alone(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """What it does to a sum done to one of the two terms, and the other added then."""
    if call.first.base_operator in _WORKING and len(call.rows) == 1:
        for place, _ in enumerate(records_in(call.parsed)):
            yield from (_of_term(place, term, ingredients) for term in range(2))


def _of_term(place: int, term: int, ingredients: Ingredients) -> Template:
    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        if place >= len(records):
            return None
        total = ingredients.maker(records[place])
        if total is None or total.first.base_operator not in _SUMS:
            return None
        terms = records_in(total.parsed)
        if len(terms) != 2 or total.first.shape != call.first.shape:
            return None
        alone = reading_another(call, place, terms[term])
        first = EditStep(call.first.overload or "", alone)
        summed = renamed(total.parsed, {terms[term]: BEFORE})
        last = EditStep(total.first.overload or "", summed)
        words = f"of one term of {total.first.base_operator} alone"
        return Edit((first, last), words)

    return template
