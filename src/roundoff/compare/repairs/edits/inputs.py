"""Another value that a call reads, or none of it at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from roundoff.compare.repairs.edits.edited_calls import (
    Ingredients,
    Template,
    is_move,
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

#: They put the elements of an axis in another order.
_TURN = operators_that("reorder")
_JOIN = operators_that("join")
#: Fewer values that are put together may be of one turn.
FEWEST_TURNS = 3


def other_inputs(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """Another value of the shape of one of its inputs."""
    for place, record in enumerate(records_in(call.parsed)):
        for choose in ingredients.similar(call, record):
            yield _reading(place, choose)


def exchanged_inputs(call: TracedCall, _: Ingredients) -> Iterator[Template]:
    """The two that it reads, the other way round."""
    records = records_in(call.parsed)
    if len(records) == 2 and records[0] != records[1]:
        yield _swapped


def _swapped(call: TracedCall) -> Edit | None:
    records = records_in(call.parsed)
    if len(records) != 2:
        return None
    exchanged = renamed(call.parsed, {records[0]: records[1], records[1]: records[0]})
    step = EditStep(call.first.overload or "", exchanged)
    return Edit((step,), "with its inputs exchanged")


def opposite_masks(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """A mask that it reads, the other way round."""
    for place, record in enumerate(records_in(call.parsed)):
        if ingredients.mask_format(record) is not None:
            yield _opposite(place, ingredients)


def _opposite(place: int, ingredients: Ingredients) -> Template:
    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        if place >= len(records):
            return None
        mask = {"record": records[place]}
        kind = ingredients.mask_format(records[place])
        if kind is None:
            return None
        opposite = EditStep("aten.rsub.Scalar", [[mask, 1], {}])
        if kind == "bool":
            opposite = EditStep("aten.logical_not.default", [[mask], {}])
        arguments = reading_another(call, place, BEFORE)
        last = EditStep(call.first.overload or "", arguments)
        return Edit((opposite, last), "with its mask the other way round")

    return template


def exchanged_makers(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """It and the call that makes what it reads, the other way round.

    Of two values that two calls make alike: the smaller of each pair, and then the mean.
    """
    if _made_before(call, ingredients):
        yield _exchanged_with_maker(ingredients)


def _made_before(call: TracedCall, ingredients: Ingredients) -> dict[int, TracedCall]:
    """Return by record the calls that make what a call reads: one, or several alike.

    Empty where one of them does not compute, or reads more than one tensor where there
    are several.
    """
    records = records_in(call.parsed)
    made = {}
    for record in records:
        maker = ingredients.maker(record)
        if maker is None or maker.first.record != record or is_move(maker):
            return {}
        made[record] = maker
    makers = [*made.values()]
    if not makers or is_move(call) or not records_in(makers[0].parsed):
        return {}
    if len(makers) > 1 and len({_without_records(maker) for maker in makers}) > 1:
        return {}
    reads_one = all(len(records_in(maker.parsed)) == 1 for maker in makers)
    return made if len(makers) == 1 or reads_one else {}


def _without_records(call: TracedCall) -> str:
    """Return what a call does, whatever tensors it reads."""
    records = dict.fromkeys(records_in(call.parsed), BEFORE)
    return f"{call.first.overload} {renamed(call.parsed, records)}"


def _exchanged_with_maker(ingredients: Ingredients) -> Template:
    def template(call: TracedCall) -> Edit | None:
        made = _made_before(call, ingredients)
        if not made:
            return None
        sources = {key: records_in(maker.parsed)[0] for key, maker in made.items()}
        first = EditStep(call.first.overload or "", renamed(call.parsed, sources))
        maker = next(iter(made.values()))
        arguments = reading_another(maker, 0, BEFORE)
        last = EditStep(maker.first.overload or "", arguments)
        return Edit((first, last), f"before {maker.first.base_operator}, not after it,")

    return template


def _reading(place: int, choose: Callable[[TracedCall], int | None]) -> Template:
    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        other = choose(call)
        if other is None or place >= len(records) or records[place] == other:
            return None
        arguments = reading_another(call, place, other)
        step = EditStep(call.first.overload or "", arguments)
        return Edit((step,), "of another value")

    return template


def reading_instead(record: int, tensor: Tensor) -> Template:
    """Read a tensor from elsewhere in the place of a value."""

    def template(call: TracedCall) -> Edit | None:
        if record not in records_in(call.parsed):
            return None
        arguments = renamed(call.parsed, {record: BEFORE - 1})
        step = EditStep(call.first.overload or "", arguments)
        return Edit((step,), "of another value", held={BEFORE - 1: tensor})

    return template


def left_out_calls(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """One of its inputs of the same shape in its place."""
    shape = tuple(call.first.shape or ())
    for place, record in enumerate(records_in(call.parsed)):
        if ingredients.shapes(record) == shape:
            yield handing_on(place)


def other_turns(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """What a loop has collected, of another of the values that its turns make."""
    records = records_in(call.parsed)
    are_turns = len(records) >= FEWEST_TURNS and len({*records}) == len(records)
    if not is_move(call, _JOIN) or not are_turns:
        return
    for calls in ingredients.turns(len(records), ingredients.shapes(records[0])):
        others = [each.first.record for each in calls]
        if others != records:
            made = calls[0].first
            words = f"of what {made.base_operator} ({made.line}) gives in each turn"
            yield _collecting(records, others, words)


def _collecting(records: Sequence[int], others: Sequence[int], words: str) -> Template:
    def template(call: TracedCall) -> Edit | None:
        if list(records_in(call.parsed)) != list(records):
            return None
        arguments = renamed(call.parsed, dict(zip(records, others, strict=True)))
        step = EditStep(call.first.overload or "", arguments)
        return Edit((step,), words)

    return template


def not_turned(call: TracedCall, ingredients: Ingredients) -> Iterator[Template]:
    """What it only turns round: turning another value round says less of the same."""
    if call.first.base_operator in _TURN:
        yield from left_out_calls(call, ingredients)


def handing_on(place: int) -> Template:
    """One of the tensors that a call is given in its place."""

    def template(call: TracedCall) -> Edit | None:
        records = records_in(call.parsed)
        if place >= len(records):
            return None
        step = EditStep("aten.alias.default", [[{"record": records[place]}], {}])
        return Edit((step,), f"without {call.first.base_operator}")

    return template
