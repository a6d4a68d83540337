"""Another operator in the place of one that computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from roundoff.compare.repairs.edits.edited_calls import (
    Ingredients,
    Insertion,
    Template,
    numbers_of,
)
from roundoff.compare.values.traced_calls import Edit, EditStep, TracedCall, records_in
from roundoff.ops import operators_that, overload_of

_UNARY = operators_that("work element by element") | {"relu", "abs", "neg"}
_PAIRS = operators_that("pair elements")
_REDUCE = operators_that("reduce axes")
_COMPARE = operators_that("say which is larger")
#: With or without equal values: the last letter of a comparison says it.
_OTHER_LETTER = {"t": "e", "e": "t"}
#: Ports write them out, as other libraries have them.
_ACTIVATIONS = sorted(operators_that("activate"))


def other_operators(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Another operator on the same operands."""
    name = call.first.base_operator
    reductions: tuple[str, ...] = ("dim", "dim_IntList", "default")
    if len(call.parsed[0]) == 1:
        # of all elements
        reductions = ("default",)
    for names, overloads in (
        (_UNARY, ("default",)),
        (_PAIRS, ("Tensor", "default")),
        (_COMPARE, _overloads_like(call)),
        (_REDUCE, reductions),
    ):
        if name not in names:
            continue
        for other in sorted(names - {name, _with_equal_values(name)}):
            overload = _overload(other, overloads)
            if overload is not None:
                yield _exchanged(name, overload, other)
    if len(records_in(call.parsed[0])) == 1 and name in _UNARY:
        for insertion in ingredients.inserted:
            if not insertion.held:
                yield _replaced(name, insertion)


def inclusive_comparisons(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """A comparison that equal values pass, or do not: masks are off by one."""
    other = _with_equal_values(call.first.base_operator)
    if other is not None:
        overload = _overload(other, _overloads_like(call))
        if overload is not None:
            yield _exchanged(call.first.base_operator, overload, other)


def _with_equal_values(name: str) -> str | None:
    """Return the comparison that differs from one for equal values alone; None for others.

    >>> _with_equal_values("lt"), _with_equal_values("ge"), _with_equal_values("ne")
    ('le', 'gt', None)
    """
    other = name[:-1] + _OTHER_LETTER.get(name[-1], "")
    return other if {name, other} <= _COMPARE and other != name else None


def bounds_and_summands(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """A small number added where it is a lower bound, or the other way round: an epsilon."""
    name = call.first.base_operator
    if name in ("clamp", "clamp_min") and len(records_in(call.parsed)) == 1:
        yield _guarded_by("aten.add.Tensor", "added to it, not as its lower bound")
    elif name == "add" and len(records_in(call.parsed)) == 1:
        yield _guarded_by(
            "aten.clamp_min.default", "as its lower bound, not added to it"
        )


def _guarded_by(overload: str, words: str) -> Template:
    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        numbers = list(numbers_of(call))
        if len(records) != 1 or len(numbers) != 1:
            return None
        [(place, number)] = numbers
        is_upper_bound = place in (2, "max")
        if is_upper_bound or not number > 0:
            return None
        step = EditStep(overload, [[{"record": records[0]}, number], {}])
        return Edit((step,), f"with {number:.6g} {words}")

    return template


def other_activations(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """An activation in the place of all that a line computes of a value."""
    if ingredients.written_out(call) is not None:
        yield from (_activation(name, ingredients) for name in _ACTIVATIONS)


def _activation(name: str, ingredients: Ingredients) -> Template:
    def template(call: TracedCall) -> Edit | None:
        source = ingredients.written_out(call)
        if source is None:
            return None
        step = EditStep(f"aten.{name}.default", [[{"record": source}], {}])
        return Edit((step,), f"as {name} of what this line computes it of")

    return template


def _overloads_like(call: TracedCall) -> tuple[str, ...]:
    """Return a call's own overload: with a tensor or with a number."""
    return ((call.first.overload or "").rpartition(".")[2],)


def _overload(name: str, overloads: Sequence[str]) -> str | None:
    for overload in overloads:
        packet = getattr(torch.ops.aten, name, None)
        if packet is not None and overload in packet.overloads():
            return f"aten.{name}.{overload}"
    return None


def _exchanged(operator: str, overload: str, name: str) -> Template:
    """One operator in the place of another."""

    def template(call: TracedCall) -> Edit | None:
        if call.first.base_operator != operator:
            return None
        step = EditStep(overload, [_carried_over(call, overload), {}])
        return Edit((step,), f"as {name}, not {operator}")

    return template


def _carried_over(call: TracedCall, overload: str) -> list[Any]:
    """Return the arguments of a call that another operator takes too.

    A number is what its name says: a lower bound is no threshold. A deviation in the place
    of a mean is that of all there is, as the mean is.
    """
    positional, _ = call.parsed
    declared = overload_of(call.first.overload or "")._schema.arguments
    by_name = {d.name: value for d, value in zip(declared, positional, strict=False)}
    arguments: list[Any] = []
    for place, theirs in enumerate(overload_of(overload)._schema.arguments):
        is_tensor = place < len(positional) and bool(records_in(positional[place]))
        if theirs.kwarg_only:
            break
        if is_tensor:
            arguments.append(positional[place])
        elif theirs.name in by_name:
            arguments.append(by_name[theirs.name])
        elif theirs.name == "unbiased":
            arguments.append(False)
        else:
            break
    return arguments


def _replaced(operator: str, insertion: Insertion) -> Template:
    """A call of the reference on the first input, in the place of an operator."""

    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed[0])
        if not records or call.first.base_operator != operator:
            return None
        first = EditStep("aten.alias.default", [[{"record": records[0]}], {}])
        return Edit((first, insertion.step), f"as {insertion.words}")

    return template
