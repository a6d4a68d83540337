"""Other numbers in the place of those that a call takes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from roundoff.compare.repairs.edits.edited_calls import (
    Ingredients,
    Template,
    numbers_of,
    places_of,
    setting,
    with_argument,
)
from roundoff.compare.rounding.rounding_bound import DIFFERENCES, PRODUCTS
from roundoff.compare.values.traced_calls import (
    BEFORE,
    Edit,
    EditStep,
    TracedCall,
    records_in,
)
from roundoff.ops import operators_that

#: Numbers that are tried for a constant in a call besides those of the reference.
NEUTRAL = (0.0, 1.0, -1.0, 0.5, 2.0)
#: What masks add to scores so that they never count: large, and finite, as a row of
#: which all is masked has to stay a number.
NEVER = -1e9
#: Products of one term that are looked through for its constant factors.
MOST_FACTORS = 4
_FILL = operators_that("create") | {"where", "masked_fill", "fill"}
#: What one of them does with a number, the other does with its reciprocal.
_INVERSE = {"mul": "div", "div": "mul"}


def unshared_constants(
    call: TracedCall, ingredients: Ingredients
) -> Iterator[Template]:
    """Other numbers in the place of one that the reference does not have."""
    yield from _other_constants(call, ingredients, is_shared=False)


def shared_constants(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Other numbers in the place of one that the reference has too."""
    yield from _other_constants(call, ingredients, is_shared=True)


def _other_constants(
    call: TracedCall, ingredients: Ingredients, *, is_shared: bool
) -> Iterator[Template]:
    if call.first.base_operator == "arange":
        return  # it would be longer or shorter
    pool = ingredients.numbers_of(call.first.base_operator)
    for place, value in numbers_of(call):
        if (float(value) in pool) != is_shared:
            continue
        numbers = _other_numbers(float(value), pool)
        if call.first.base_operator in _FILL:
            numbers.append(NEVER)
        if isinstance(value, int):
            numbers.sort(key=lambda number: not number.is_integer())
        for other in numbers:
            yield setting(
                place, value, other, f"with {other:.6g}, not {float(value):.6g}"
            )
        if isinstance(value, int) and not is_shared:
            yield _counting_on(place, 1)
            yield _counting_on(place, -1)


def _counting_on(place: int | str, step: int) -> Template:
    """The next whole number: for sides of other lengths it is another one."""

    def template(call: TracedCall) -> Edit | None:
        present = dict(numbers_of(call)).get(place)
        if not isinstance(present, int):
            return None
        words = f"with {present + step}, not {present}"
        return setting(place, present, present + step, words)(call)

    return template


def reciprocals(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """One over a number that the reference divides by where this multiplies, or turned round."""
    inverse = _INVERSE.get(call.first.base_operator)
    if inverse is None:
        return
    numbers = [number for number in ingredients.numbers_of(inverse) if number]
    for place, value in numbers_of(call):
        for number in numbers:
            words = f"with {1 / number:.6g}, not {float(value):.6g}"
            yield setting(place, value, 1 / number, words)


def factors_of_other_terms(
    call: TracedCall, ingredients: Ingredients
) -> Iterator[Template]:
    """The constant factor of one term of a sum on the other one, as that of a class."""
    is_number = "float" in (call.first.dtype or "")
    records = records_in(call.parsed[0])
    is_sum = call.first.base_operator in DIFFERENCES and len(records) == 2
    if not is_sum or not is_number:
        return
    for place, record in enumerate(records):
        factors = _factors_of(ingredients, record, call.first.line, MOST_FACTORS)
        for factor in dict.fromkeys(factors):
            if factor not in (0, 1, -1):
                yield _with_factor_on_the_other(place, factor)


def _factors_of(
    ingredients: Ingredients, record: int, line: str | None, depth: int
) -> Iterator[float]:
    """Yield the numbers that a line multiplies a term with."""
    maker = ingredients.maker(record)
    if maker is None or maker.first.line != line or not depth:
        return
    if maker.first.base_operator in PRODUCTS:
        yield from (float(number) for _, number in numbers_of(maker))
        for each in records_in(maker.parsed[0]):
            yield from _factors_of(ingredients, each, line, depth - 1)


def _with_factor_on_the_other(place: int, factor: float) -> Template:
    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed[0])
        if len(records) != 2 or call.first.base_operator not in DIFFERENCES:
            return None
        of_first = 1 / factor if place == 0 else factor
        alpha = call.parsed[1].get("alpha", 1) / of_first
        product = [[{"record": records[0]}, of_first], {}]
        total = [[{"record": BEFORE}, {"record": records[1]}], {"alpha": alpha}]
        steps = (
            EditStep("aten.mul.Tensor", product),
            EditStep(call.first.overload or "", total),
        )
        return Edit(steps, f"with the factor {factor:.6g} on its other term")

    return template


def exchanging_numbers(one: float, other: float) -> Template:
    """The second number in the place of the first, and the other way round; signs stay."""
    stands_for = {one: other, other: one}

    def template(call: TracedCall) -> Edit | None:
        for place, value in numbers_of(call):
            number = stands_for.get(abs(value))
            if number is not None:
                words = f"with {number:.6g}, not {abs(value):.6g}"
                changed = math.copysign(number, value)
                return setting(place, value, changed, words)(call)
        return None

    return template


def _other_numbers(value: float, pool: Sequence[float]) -> list[float]:
    numbers = [*pool, *NEUTRAL, 2 * value, value / 2, -value, value * value]
    if value.is_integer():
        numbers += [value + 1, value - 1]
    if value:
        numbers.append(1 / value)
    if value > 0:
        numbers += [math.sqrt(value), 1 / math.sqrt(value)]
    return [n for n in dict.fromkeys(numbers) if n != value and math.isfinite(n)]


def diagonals(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """The next diagonal of a triangle: masks that are one off."""
    for place, declared, value in places_of(call):
        if declared.name == "diagonal" and type(value) is int:
            for other in (value - 1, value + 1):
                words = f"with diagonal={other}, not {value}"
                yield setting(place, value, other, words)


def pairs_of_numbers(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """Pairs of numbers, as paddings are, the other way round or made equal."""
    for place, _declared, value in places_of(call):
        if isinstance(place, int) and _is_pairs(value):
            for change in (_turned_pairs, _even_pairs):
                yield _changing_pairs(place, change)


def _turned_pairs(numbers: Sequence[int]) -> list[int]:
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return [number for before, after in pairs for number in (after, before)]


def _even_pairs(numbers: Sequence[int]) -> list[int]:
    pairs = zip(numbers[::2], numbers[1::2], strict=True)
    return [sum(pair) // 2 for pair in pairs for _side in pair]


def _changing_pairs(
    place: int, change: Callable[[Sequence[int]], list[int]]
) -> Template:
    def template(call: TracedCall) -> Edit | None:
        positional = call.parsed[0]
        numbers: Any = positional[place] if place < len(positional) else None
        if not _is_pairs(numbers) or change(numbers) == numbers:
            return None
        changed = change(numbers)
        step = EditStep(
            call.first.overload or "", with_argument(call.parsed, place, changed)
        )
        return Edit((step,), f"with {changed}, not {numbers}")

    return template


def _is_pairs(value: Any) -> bool:
    if not isinstance(value, list) or not value or len(value) % 2:
        return False
    return all(type(number) is int for number in value)
