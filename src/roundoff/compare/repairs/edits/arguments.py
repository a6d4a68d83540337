"""The arguments of a call as the reference has them in its own, or switched."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from roundoff.compare.repairs.edits.edited_calls import (
    Ingredients,
    Template,
    holds_record,
    is_move,
    numbers_of,
    places_of,
    schema_of,
    setting,
)
from roundoff.compare.values.traced_calls import (
    Edit,
    EditStep,
    TracedCall,
    trusts_sizes,
)
from roundoff.ops import operators_that

_PAIRS = operators_that("pair elements")


def transferred_arguments(
    call: TracedCall, ingredients: Ingredients
) -> Iterator[Template]:
    """Constant arguments as the reference has them in a call of the same operator."""
    seen: set[str] = set()
    if trusts_sizes(call.first.base_operator):
        yield from _groups_of_another(call, ingredients)
        return
    shared = ingredients.numbers_of(call.first.base_operator)
    is_pair = call.first.base_operator in _PAIRS
    if is_pair and any(value in shared for _, value in numbers_of(call)):
        # its number is the reference's: see ``shared_constants``
        return
    for other in ingredients.arguments_of(call.first.overload or ""):
        template = _taking_over(other)
        edit = template(call)
        if edit is None or str(edit.steps) in seen:
            continue
        seen.add(str(edit.steps))
        if edit.steps[0].arguments != call.parsed:
            yield template


def _groups_of_another(
    call: TracedCall, ingredients: Ingredients
) -> Iterator[Template]:
    """Another number of groups: the one size that a kernel checks."""
    for place, declared, value in places_of(call):
        if declared.name != "group":
            continue
        numbers = {
            other[0][place]
            for other in ingredients.arguments_of(call.first.overload or "")
            if isinstance(place, int) and place < len(other[0])
        }
        for number in sorted(numbers - {value}):
            yield setting(place, value, number, f"with {number} groups, not {value}")


def switched_arguments(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """A switch the other way, among them those that were left at their default."""
    if is_move(call):
        return
    places = {
        declared.name: (place, value) for place, declared, value in places_of(call)
    }
    for position, declared in enumerate(schema_of(call)):
        if str(declared.type) != "bool":
            continue
        place, value = places.get(
            declared.name, (declared.name, declared.default_value)
        )
        words = f"with {declared.name}={not value}"
        if declared.name in places:
            yield setting(place, value, not value, words)
        elif isinstance(value, bool):
            yield _adding_argument(position, declared, not value, words)


def _adding_argument(position: int, declared: Any, value: bool, words: str) -> Template:
    def template(call: TracedCall) -> Edit | None:
        parsed = copy.deepcopy(call.parsed)
        positional, keywords = parsed
        if declared.kwarg_only:
            keywords[declared.name] = value
        else:
            defaults = [d.default_value for d in schema_of(call)]
            positional += defaults[len(positional) : position]
            positional.append(value)
        return Edit((EditStep(call.first.overload or "", parsed),), words)

    return template


def _taking_over(other: Any) -> Template:
    def template(call: TracedCall) -> Edit | None:
        parsed = copy.deepcopy(call.parsed)
        positional, keywords = other
        if len(parsed[0]) != len(positional):
            return None
        changed = []
        for place, value in enumerate(positional):
            if holds_record(value) or holds_record(parsed[0][place]):
                continue
            if parsed[0][place] != value:
                parsed[0][place] = value
                changed.append(_shown(value))
        for name in {*keywords, *parsed[1]}:
            if holds_record(keywords.get(name)) or name not in keywords:
                changed += [f"no {name}"] if name in parsed[1] else []
                parsed[1].pop(name, None)
            elif parsed[1].get(name) != keywords[name]:
                parsed[1][name] = keywords[name]
                changed.append(f"{name}={_shown(keywords[name])}")
        step = EditStep(call.first.overload or "", parsed)
        return Edit((step,), f"with {', '.join(changed) or 'its other arguments'}")

    return template


def _shown(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
