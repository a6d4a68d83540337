"""What all edits of a call share: what is proposed, of what, and how an argument is replaced."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.values.traced_calls import Edit, EditStep, TracedCall, records_in
from roundoff.errors import RunError
from roundoff.ops import operators_that, overload_of

#: How unlikely each kind of edit is: the least unlikely one that explains all is named.
ARGUMENT = 0
CHANGE = 1
LAYOUT = 2
LEFT_OUT = 3
INPUT = 4
ONE_MORE = 5
#: Indexes of an axis that are tried in place of another.
MOST_INDEXES = 8
_MOVE = operators_that("move values")
_DIGITS = re.compile(r"\d+")
_NUMBERS = ("number", "float", "Tensor")
#: What an edit makes of a call; None where it does not fit.
Template = Callable[[TracedCall], Edit | None]


@dataclass(frozen=True, slots=True)
class Proposal:
    """An edit that may be made in several calls alike.

    Attributes:
        unlikely: of which kind.
        template: what it makes of a call.
        on_line: make it in every call of the line that it fits, not in one alone.
        everywhere: it may be meant for every call with the same argument, whatever line
            made it.
        exchanges: it exchanges parts of one value.
        is_copied: other lines may have it too: those of key and value have one layout.
        in_function: other lines of its function may have it too, as a softmax that is
            written out takes two.
    """

    unlikely: int
    template: Template
    on_line: bool = False
    everywhere: bool = False
    exchanges: bool = False
    is_copied: bool = False
    in_function: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Insertion:
    """A call of the reference that a value of the candidate may go through.

    Attributes:
        step: the call, with ``BEFORE`` for the value.
        held: its other tensors, from the reference.
        words: its operator and line.
        shape: that a value must have; empty for any.
    """

    step: EditStep
    held: Mapping[int, Tensor]
    words: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class Ingredients:
    """What the reference has, of which edits are made.

    Attributes:
        calls: the calls of its region and of the rest of its forward pass.
        constants: the numbers in them.
        inserted: calls that a value may go through.
        activations: the names of those that the reference's region computes.
        is_read_again: ``is_read_again(record)``: several calls read a value.
        shapes: ``shapes(record)`` gives the shape of a value of the candidate.
        mask_format: ``mask_format(record)`` gives the format of truth values, and of
            numbers of which each is 0 or 1; None of other values.
        offset: ``offset(record)`` gives by how much a value is more, everywhere, than one
            of the reference's; None of any other.
        turns: ``turns(count, shape)`` yields the calls that so many turns of a loop have
            made at one place, in order, of values of a shape.
        maker: ``maker(record)`` gives the call that makes a value; None of no call's.
        written_out: ``written_out(call)`` gives the one value that several operators of a
            line make a call's result of, element by element; None of any other.
        siblings: ``siblings(call)`` gives the arguments of the calls of its line.
        similar: ``similar(call, record)`` yields choices of another value for one that
            a call reads.
        masks: ``masks(call, record)`` yields choices of a mask that fits to what a call
            reads.
        contents: ``contents(record)`` gives what was recorded of a value.
    """

    calls: Sequence[TracedCall]
    constants: Sequence[float] = ()
    inserted: Sequence[Insertion] = ()
    activations: Sequence[str] = ()
    is_read_again: Callable[[int], bool] = lambda _record: False
    shapes: Callable[[int], tuple[int, ...]] = lambda _record: ()
    mask_format: Callable[[int], str | None] = lambda _record: None
    offset: Callable[[int], float | None] = lambda _record: None
    turns: Callable[[int, tuple[int, ...]], Iterable[Sequence[TracedCall]]] = (
        lambda _count, _shape: ()
    )
    maker: Callable[[int], TracedCall | None] = lambda _record: None
    written_out: Callable[[TracedCall], int | None] = lambda _call: None
    siblings: Callable[[TracedCall], Iterable[Any]] = lambda _call: ()
    similar: Callable[
        [TracedCall, int], Iterable[Callable[[TracedCall], int | None]]
    ] = lambda _call, _record: ()
    masks: Callable[[TracedCall, int], Iterable[Callable[[TracedCall], int | None]]] = (
        lambda _call, _record: ()
    )
    contents: Callable[[int], Tensor | None] = lambda _record: None
    _by_overload: dict[str, list[Any]] = field(default_factory=dict)
    _numbers: dict[str, dict[float, None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for call in self.calls:
            overload = call.first.overload
            if overload is not None:
                self._by_overload.setdefault(overload, []).append(call.parsed)
            numbers = self._numbers.setdefault(call.first.base_operator, {})
            numbers.update(dict.fromkeys(floats_in(call.parsed)))

    def arguments_of(self, overload: str) -> Sequence[Any]:
        """Return the arguments of the reference's calls of one overload."""
        return self._by_overload.get(overload, ())

    def numbers_of(self, operator: str) -> list[float]:
        """Return the numbers of its region, and of the reference's calls of an operator."""
        return [*self.constants, *self._numbers.get(operator, ())]

    def divisors(self) -> list[float]:
        """Return the numbers of its region that the reference divides by."""
        divides = self._numbers.get("div", {})
        return [number for number in self.constants if number and number in divides]


def schema_of(call: TracedCall) -> Sequence[Any]:
    """Return the declared arguments of a call; none where torch does not know it."""
    try:
        return list(overload_of(call.first.overload or "")._schema.arguments)
    except RunError:
        return []


def holds_record(value: Any) -> bool:
    if isinstance(value, dict):
        return "record" in value or any(holds_record(v) for v in value.values())
    return isinstance(value, list) and any(holds_record(v) for v in value)


def with_argument(parsed: Any, place: int | str, value: Any) -> Any:
    changed = copy.deepcopy(parsed)
    positional, keywords = changed
    if isinstance(place, int):
        positional[place] = value
    else:
        keywords[place] = value
    return changed


def places_of(call: TracedCall) -> Iterator[tuple[int | str, Any, Any]]:
    """Yield each argument: its place, its declaration and its value."""
    positional, keywords = call.parsed
    declared = schema_of(call)
    for place, value in enumerate(positional):
        if place < len(declared):
            yield place, declared[place], value
    by_name = {each.name: each for each in declared}
    for name, value in keywords.items():
        if name in by_name:
            yield name, by_name[name], value


def setting(place: int | str, before: Any, value: Any, words: str) -> Template:
    """Another value for an argument, in calls that have the same one there."""

    def template(call: TracedCall) -> Edit | None:
        positional, keywords = call.parsed
        fits = place in keywords if isinstance(place, str) else place < len(positional)
        if not fits:
            return None
        present = keywords[place] if isinstance(place, str) else positional[place]
        if present != before:
            return None
        step = EditStep(
            call.first.overload or "", with_argument(call.parsed, place, value)
        )
        return Edit((step,), words)

    return template


def numbers_of(call: TracedCall) -> Iterator[tuple[int | str, int | float]]:
    """Yield the numbers of a call, and where they stand."""
    for place, declared, value in places_of(call):
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        kind = str(declared.type).removeprefix("Optional[").rstrip("]")
        is_default = declared.name == "alpha" and value == 1
        if kind in _NUMBERS and not is_default:
            yield place, value


def numbers_in(value: object) -> Iterator[int | float]:
    """Yield the numbers of arguments, integers too, without those of records."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from numbers_in(each)
    elif isinstance(value, dict) and "record" not in value:
        for each in value.values():
            yield from numbers_in(each)


def floats_in(value: object) -> Iterator[float]:
    """Yield the numbers of arguments that are no integers."""
    return (number for number in numbers_in(value) if isinstance(number, float))


def is_move(call: TracedCall, names: frozenset[str] = _MOVE) -> bool:
    return call.first.base_operator in names


def renamed(value: Any, names: dict[int, int]) -> Any:
    if isinstance(value, dict):
        if "record" in value:
            return {"record": names.get(value["record"], value["record"])}
        return {key: renamed(v, names) for key, v in value.items()}
    if isinstance(value, list):
        return [renamed(v, names) for v in value]
    return value


def reading_another(call: TracedCall, place: int, record: int) -> Any:
    """Return the arguments of a call that reads another record in the place of one."""
    counter = iter(range(len(records_in(call.parsed))))
    return _with_record(call.parsed, counter, place, record)


def _with_record(value: Any, counter: Iterator[int], place: int, other: int) -> Any:
    if isinstance(value, dict):
        if "record" in value:
            return {"record": other} if next(counter) == place else value
        return {k: _with_record(v, counter, place, other) for k, v in value.items()}
    if isinstance(value, list):
        return [_with_record(v, counter, place, other) for v in value]
    return value


def label_of(row: RecordedRow) -> str:
    """Return a parameter's name without numbers: what is alike in every layer."""
    return _DIGITS.sub("#", row.name or "")
