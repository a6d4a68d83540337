"""One call more: a factor, a sign, an activation that is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from roundoff.compare.repairs.edits.edited_calls import (
    Ingredients,
    Insertion,
    Template,
    is_move,
    reading_another,
)
from roundoff.compare.values.traced_calls import (
    BEFORE,
    Edit,
    EditStep,
    TracedCall,
    records_in,
)
from roundoff.ops import operators_that

#: What is said of another value in a sum.
ADDED = "added to it"
_PAIRS = operators_that("pair elements")
_RESHAPE = operators_that("reshape")
_PERMUTE = operators_that("permute axes")
_SPREADS = sorted(operators_that("turn one spread into another"))


def negated_inputs(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """Its result with the other sign."""
    if not is_move(call, _RESHAPE | _PERMUTE):
        step = EditStep("aten.neg.default", [[{"record": BEFORE}], {}])
        yield _followed(Insertion(step, {}, "a change of sign", ()))


def other_spreads(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """The root, the square or the logarithm of its result: a deviation for a variance."""
    row = call.first
    least = row.min
    # of nothing but zeros the logarithm is a mask
    if least is None or least == row.max or "float" not in (row.dtype or ""):
        return
    if row.base_operator in _RESHAPE | _PERMUTE:
        return
    for name in _SPREADS:
        if getattr(torch, name)(torch.tensor(least)).isnan():
            continue
        step = EditStep(f"aten.{name}.default", [[{"record": BEFORE}], {}])
        yield _followed(Insertion(step, {}, name, ()))


def one_more(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """A call of the reference after it, or another value added to it."""
    if call.first.base_operator in _RESHAPE:
        # a product of two axes, brought back to three: what is added has three
        for choose in ingredients.similar(call, call.rows[0].record):
            yield _with_another("aten.add.Tensor", choose, ADDED)
    if call.first.base_operator in _RESHAPE | _PERMUTE:
        return
    shape = tuple(call.first.shape or ())
    for insertion in ingredients.inserted:
        if insertion.shape in ((), shape):
            yield _followed(insertion)
    for number in ingredients.constants:
        yield _scaled("mul", number, "a product with")
    for number in ingredients.divisors():
        yield _scaled("div", number, "a division by")
    for choose in ingredients.similar(call, call.rows[0].record):
        yield _with_another("aten.add.Tensor", choose, ADDED)
    for place, record in enumerate(records_in(call.parsed)[:2]):
        for choose in ingredients.similar(call, record):
            yield _scaled_input(place, choose)


def _followed(insertion: Insertion, *, scales: bool = False) -> Template:
    def template(call: TracedCall) -> Edit | None:
        if insertion.shape not in ((), tuple(call.first.shape or ())):
            return None
        first = EditStep(call.first.overload or "", call.parsed)
        words = f"followed by {insertion.words}"
        return Edit((first, insertion.step), words, insertion.held, scales=scales)

    return template


def _scaled(operator: str, number: float, words: str) -> Template:
    step = EditStep(f"aten.{operator}.Tensor", [[{"record": BEFORE}, number], {}])
    return _followed(Insertion(step, {}, f"{words} {number:.6g}", ()), scales=True)


def _with_another(
    overload: str, choose: Callable[[TracedCall], int | None], words: str
) -> Template:
    def template(call: TracedCall) -> Edit | None:
        other = choose(call)
        if other is None:
            return None
        first = EditStep(call.first.overload or "", call.parsed)
        arguments = [[{"record": BEFORE}, {"record": other}], {}]
        return Edit(
            (first, EditStep(overload, arguments)), f"with another value {words}"
        )

    return template


def activated_inputs(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """An activation of one value that it reads, which others read as it is."""
    if call.first.base_operator in _PAIRS:
        for place, record in enumerate(records_in(call.parsed)[:2]):
            if ingredients.is_read_again(record):
                yield from (_activated(place, name) for name in ingredients.activations)


def _activated(place: int, name: str) -> Template:
    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        if place >= len(records):
            return None
        first = EditStep(f"aten.{name}.default", [[{"record": records[place]}], {}])
        arguments = reading_another(call, place, BEFORE)
        last = EditStep(call.first.overload or "", arguments)
        return Edit((first, last), f"with {name} of what it reads")

    return template


def offset_inputs(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """A number that the reference adds to what it reads, or does not."""
    for place, record in enumerate(records_in(call.parsed)):
        offset = ingredients.offset(record)
        if offset is not None:
            yield _with_summand(place, -offset)


def _with_summand(place: int, number: float) -> Template:
    words = f"with {number:.6g} added to what it reads"

    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        if place >= len(records):
            return None
        total = [[{"record": records[place]}, number], {}]
        first = EditStep("aten.add.Scalar", total)
        arguments = reading_another(call, place, BEFORE)
        last = EditStep(call.first.overload or "", arguments)
        return Edit((first, last), words)

    return template


def _scaled_input(place: int, choose: Callable[[TracedCall], int | None]) -> Template:
    """One of its inputs times another value."""

    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        other = choose(call)
        if other is None or place >= len(records):
            return None
        product = [[{"record": records[place]}, {"record": other}], {}]
        first = EditStep("aten.mul.Tensor", product)
        arguments = reading_another(call, place, BEFORE)
        last = EditStep(call.first.overload or "", arguments)
        words = "with another factor in what it reads"
        return Edit((first, last), words, factor=other)

    return template
