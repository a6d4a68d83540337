"""Which line is at fault: that of an operator, or one that has called its function?

A function that gives right values where another line calls it is not at fault: what this
line hands to it is. What is left out between two operators is left out on the way from
one to the other, and belongs to the function that both are called from, to that of the
first, or to that of the second. How the reference calls the operator that is missing
says which.

A *stack* is the lines of the user's functions, the outermost first: the last one is the
operator's own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch

from roundoff.compare.judging.divergence import EXACT
from roundoff.compare.records.call_stacks import shared, stack_of
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides
from roundoff.ops import operators_that

#: Values that are looked at behind one of a function's, among which one has to agree
#: where the function is right: twice the longest way to write out an operator (see
#: ``trials.PATIENCE``), as half of them only move values.
FAR = 34

_MOVE = operators_that("move values")
_PAIRS = operators_that("pair elements")
_FORWARD = "forward"


def _are_beside(one: str | None, other: str | None) -> bool:
    """Return True for two modules neither of which is the other or a part of it."""
    if not one or not other or one == other:
        return False
    return not one.startswith(f"{other}.") and not other.startswith(f"{one}.")


def changes_nothing(flow: Flow, value: Value) -> bool:
    """Return True for a sum or product that is what it was made of; False if unknown."""
    if value.operator not in _PAIRS or value.inner or not value.is_call:
        return False
    tensor = flow.tensor(value.key)
    if tensor is None or value.says_nothing or flow.parameters_read(value.key):
        return False
    sources = [flow.tensor(key) for key in value.inputs]
    return any(
        source is not None
        and source.shape == tensor.shape
        and torch.equal(source, tensor)
        for source in sources
    )


def handed_on(value: Value, readers: Sequence[Value]) -> str | None:
    """Return the line that hands a value to what reads it: the reader's, if it is one line.

    What several lines of one function read was handed to the function.
    """
    stacks = [stack_of(reader.row) for reader in readers]
    first = stacks[0]
    if not first:
        return None
    place = min((shared(first, stack) for stack in stacks[1:]), default=len(first) - 1)
    is_one_line = all(stack[place] == first[place] for stack in stacks)
    if not is_one_line and place > shared(stack_of(value.row), first):
        place -= 1
    return first[place]


def alike_inside(one: Sequence[str], other: Sequence[str]) -> int:
    """Return how many lines two stacks share at their inner end."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _at_same_place(
    value: Value, alike: Sequence[Value], others: Sequence[Value]
) -> list[Value]:
    """Return those of a line's calls that stand at one's place, where it has several.

    Args:
        value: the one.
        alike: all that the same lines have led to, with it.
        others: all that other lines have led to.
    """
    keys = [each.key for each in sorted(alike, key=lambda v: v.order)]
    count = min(len(keys), len(others))
    place = keys.index(value.key) % count
    in_order = sorted(others, key=lambda v: v.order)
    return [v for at, v in enumerate(in_order) if at % count == place]


@dataclass(frozen=True, slots=True)
class FaultLines:
    """The lines to name for values of the candidate.

    Attributes:
        sides: both programs.
        region: the candidate's values that lead to results that differ.
        is_clear: False for a fault that does so little that the same one may not show
            elsewhere: then values that agree there do not clear the function.
    """

    sides: Sides
    region: Collection[int]
    is_clear: bool = True

    def of_operator(self, value: Value) -> str | None:
        """Return the line of an operator that computes something else.

        The innermost whose function gives right values wherever another line calls it.
        """
        stack = stack_of(value.row)
        return stack[self._innermost(value, stack)] if stack else value.row.line

    def of_left_out(
        self, value: Value, missing: Value, *, is_right_elsewhere: bool = False
    ) -> tuple[Value, str | None]:
        """Return where an operator of the reference is left out: behind what, on which line.

        Named is what makes the value, or the first that reads it, which is nearer.

        Args:
            value: the candidate's, which it should be applied to.
            missing: what the reference makes of it.
            is_right_elsewhere: others read the value as it is, and rightly.
        """
        last = value
        value = _moved_from(self.sides.candidate, value)
        value = self._chosen_from(value, missing)
        reader = self._wrong_reader(value)
        makers = stack_of(value.row) if value.is_call else ()
        read = stack_of(reader.row) if reader is not None else ()
        if reader is None or not read:
            return value, self.of_operator(value)
        within = self._shared_with_right(value, missing, reader)
        if not makers:
            # what a function makes of all it is given is not made of one input alone
            place = self._innermost(reader, read, is_used_elsewhere=True)
            return reader, read[max(within, default=place)]
        from_made, from_read = self._places_in_reference(value, missing)
        both = self._shared_by(value, reader)
        is_made_right = is_right_elsewhere or bool(within)
        is_made_right = is_made_right or self._is_right_in_other_turns(value, makers)
        is_idle = not is_right_elsewhere and self._is_idle(value)
        # of the steps inside a call of the reference all are as near
        is_beside = missing.inner and makers[:-1] == read[:-1]
        is_nearer = not is_beside and from_made.is_nearer(from_read)
        if is_idle or (not is_made_right and is_nearer):
            inner = -1
            if from_made.depth > from_read.depth:
                inner = self._innermost(value, makers) - from_made.above
            last = _moved_before(self.sides.candidate, value, last, reader)
            # what both are in may be right where another line calls it
            place = min(max(both, inner), self._innermost(value, makers))
            return _named_where_made(value, last, place)
        if from_read.depth > from_made.depth and not within:
            within = [self._innermost(reader, read) - from_read.above]
        return reader, read[max([both, *within])]

    def _chosen_from(self, value: Value, missing: Value) -> Value:
        """Return what a value is chosen from, where that is what the reference makes more of.

        Rows that are padding may be left out before, or after.
        """
        flow = self.sides.candidate
        while value.is_call and value.operator in EXACT and not value.inner:
            sources = [flow.values[key] for key in value.inputs if key in flow.values]
            sources = [s for s in sources if s.is_number and s.is_call and not s.inner]
            if len(sources) != 1:
                break
            source = _moved_from(flow, sources[0])
            twins = set(self.sides.all_twins(source))
            if _source(self.sides.reference, missing, twins) is None:
                break
            value = source
        return value

    def _shared_by(self, one: Value, other: Value) -> int:
        """Return at which place of two stacks the function stands that both run in.

        Two modules that one line calls are two functions.
        """
        stack = stack_of(one.row)
        other_stack = stack_of(other.row)
        place = shared(stack, other_stack)
        is_last = place == len(stack) - 1 == len(other_stack) - 1
        if (
            not place
            or not is_last
            or not _are_beside(one.row.module, other.row.module)
        ):
            return place
        are_functions = self._has_lines(one) and self._has_lines(other)
        return place - 1 if are_functions else place

    def _has_lines(self, value: Value) -> bool:
        """Return True where a value's module has several lines: no layer of a library."""
        stack = stack_of(value.row)
        return any(
            other.row.module == value.row.module
            and other.row.line != value.row.line
            and stack_of(other.row)[:-1] == stack[:-1]
            for other in self.sides.candidate.values.values()
        )

    def _shared_with_right(
        self, value: Value, missing: Value, reader: Value
    ) -> list[int]:
        """Return how much of its stack a wrong reader shares with each right one."""
        right = [v for v in self._right_readers(value, missing) if v.key != reader.key]
        return [self._shared_by(reader, v) for v in right]

    def _innermost(
        self, value: Value, stack: Sequence[str], *, is_used_elsewhere: bool = False
    ) -> int:
        """Return the innermost place of a stack whose function may be wrong.

        With ``is_used_elsewhere`` one that other lines call is right, as long as it does not
        give something wrong there of what agrees.
        """
        place = len(stack) - 1
        calls: dict[tuple[str, ...], list[Value]] = {}
        for other in (value, *self._of_same_code(value)):
            calls.setdefault(stack_of(other.row), []).append(other)
        alike = calls.pop(tuple(stack), [value])
        for its_stack, others in calls.items():
            others = _at_same_place(value, alike, others)
            is_right = any(self._leads_to_right(o.key) for o in others)
            is_wrong = any(self._makes_wrong_of_right(o) for o in others)
            if is_right or (is_used_elsewhere and not is_wrong):
                place = min(place, len(stack) - 1 - alike_inside(stack, its_stack))
        return max(place, 0)

    def _is_right_in_other_turns(self, value: Value, stack: Sequence[str]) -> bool:
        """Return True where the same lines give a right value in another turn or layer."""
        return any(
            stack_of(other.row) == tuple(stack)
            and not self._is_of_expression(other, value)
            and self._leads_to_right(other.key)
            for other in self._of_same_code(value)
        )

    def _is_idle(self, value: Value) -> bool:
        """Return True for what changes nothing, in no turn of a loop.

        The first turn may read a state of zeros.
        """
        turns = [
            other
            for other in self._of_same_code(value)
            if other.row.module == value.row.module
            and stack_of(other.row) == stack_of(value.row)
        ]
        flow = self.sides.candidate
        return all(changes_nothing(flow, turn) for turn in (value, *turns))

    def _of_same_code(self, value: Value) -> Iterator[Value]:
        """Yield the other values that the same operator of the same line makes."""
        for other in self.sides.candidate.values.values():
            if other.inner or not other.is_call or other.row.phase != _FORWARD:
                continue
            is_same = (other.row.line, other.operator) == (
                value.row.line,
                value.operator,
            )
            if is_same and other.row.call != value.row.call:
                yield other

    def _is_of_expression(self, part: Value, value: Value) -> bool:
        """Return True for what a value is made of without leaving the line."""
        flow = self.sides.candidate
        waiting = list(value.inputs)
        seen = set(waiting)
        while waiting:
            source = flow.values.get(waiting.pop())
            if source is None or source.row.line != value.row.line:
                continue
            if source.key == part.key:
                return True
            waiting += [key for key in source.inputs if key not in seen]
            seen.update(source.inputs)
        return False

    def _makes_wrong_of_right(self, value: Value) -> bool:
        """Return True for a value that the reference lacks, made of values that it has."""
        twins = self.sides.twins
        return value.key not in twins and all(key in twins for key in value.inputs)

    def _leads_to_right(self, key: int) -> bool:
        """Return True for a value that agrees, or of which one is computed that does.

        Of wrong numbers the signs, or which is the largest, may agree all the same.
        """
        if not self.is_clear:
            return False
        flow = self.sides.candidate
        value = flow.values[key]
        if self._agrees(value):
            return True
        waiting = [key]
        seen = {key}
        while waiting and len(seen) < FAR:
            for reader in _readers(flow, waiting.pop(0)):
                if reader.key in seen:
                    continue
                if self._agrees(reader) and reader.is_number >= value.is_number:
                    return True
                seen.add(reader.key)
                waiting.append(reader.key)
        return False

    def _agrees(self, value: Value) -> bool:
        if value.key not in self.sides.twins or value.says_nothing:
            return False
        return value.computes and value.operator not in _MOVE

    def _wrong_reader(self, value: Value) -> Value | None:
        """Return the first that computes with a value and does not agree."""
        wrong = [
            reader
            for reader in computing_readers(self.sides.candidate, value)
            if reader.key in self.region
            and reader.row.line is not None
            and not self._agrees(reader)
        ]
        if not wrong:
            # the region ends before anything computes: with what moves the value
            region = (self.sides.candidate.values[key] for key in self.region)
            wrong = [
                moved
                for moved in region
                if moved.order > value.order and moved.row.line and not moved.inner
            ]
        return min(wrong, key=lambda reader: reader.order, default=None)

    def _right_readers(self, value: Value, missing: Value) -> list[Value]:
        """Return what computes with a value as it is, as the reference does too."""
        twins = self.sides.all_twins(value)
        theirs = [self.sides.reference.values[key] for key in twins]
        reading = {
            reader.operator
            for twin in theirs
            for reader in computing_readers(self.sides.reference, twin)
            if reader.key != missing.key and not twin.inner
        }
        readers = computing_readers(self.sides.candidate, value)
        return [v for v in readers if self._agrees(v) or v.operator in reading]

    def _places_in_reference(
        self, value: Value, missing: Value
    ) -> tuple[_Place, _Place]:
        """Return where an operator stands beside what it reads, and beside what reads it."""
        flow = self.sides.reference
        at = stack_of(missing.row)
        twins = set(self.sides.all_twins(value))
        source = _source(flow, missing, twins)
        beside = _place(at, stack_of(source.row) if source is not None else ())
        readers = sorted(computing_readers(flow, missing), key=lambda v: v.order)
        read = _place(at, stack_of(readers[0].row) if readers else ())
        return beside, read


def _moved_before(flow: Flow, value: Value, last: Value, reader: Value) -> Value:
    """Return the last move of a value that does not stand on its reader's own line."""
    if value.row.line == reader.row.line:
        return last
    while last.key != value.key and last.row.line == reader.row.line:
        if len(last.inputs) != 1:
            return value
        last = flow.values[last.inputs[0]]
    return last


def _named_where_made(value: Value, last: Value, place: int) -> tuple[Value, str]:
    """Return a value and its line at a place of its stack; the innermost is the last move's.

    That stands in the same function, after what it moves.
    """
    makers = stack_of(value.row)
    moved = stack_of(last.row)
    if place == len(makers) - 1 and moved[:-1] == makers[:-1]:
        return last, moved[-1]
    return value, makers[place]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an operator stands beside another one.

    Attributes:
        depth: of the function that both run in; -1 where nobody knows.
        is_on_line: True where both stand on one line there.
        above: how many calls are between that function and the other operator.
    """

    depth: int
    is_on_line: bool
    above: int

    def is_nearer(self, other: _Place) -> bool:
        """Return True for the same function, or one further inside, and a line as near."""
        return (self.depth, self.is_on_line) >= (other.depth, other.is_on_line)


def _place(one: Sequence[str], other: Sequence[str]) -> _Place:
    if not one or not other:
        return _Place(-1, False, 0)
    depth = shared(one, other)
    return _Place(depth, one[depth] == other[depth], len(other) - 1 - depth)


def _moved_from(flow: Flow, value: Value) -> Value:
    """Return what made what a value hands on in another place or shape.

    A call, or what the model is given; of a parameter the first call that moves it.
    """
    source = value
    while source.is_call and not source.inner:
        value = source
        is_handed_on = not value.computes or value.operator in _MOVE
        if not is_handed_on or len(value.inputs) != 1:
            return value
        source = flow.values[value.inputs[0]]
    return value if source.row.name or source.inner else source


def _readers(flow: Flow, key: int) -> Iterator[Value]:
    for reader in flow.readers.get(key, ()):
        value = flow.values[reader]
        if value.row.phase == _FORWARD:
            yield value


def computing_readers(flow: Flow, value: Value) -> Iterator[Value]:
    """Yield the calls that compute with a value, or with what it is moved to."""
    waiting = [value.key]
    seen = {value.key}
    while waiting:
        for reader in _readers(flow, waiting.pop(0)):
            if reader.key in seen:
                continue
            seen.add(reader.key)
            if reader.inner:
                call = flow.values[reader.row.record]
                if call.key not in seen:
                    seen.add(call.key)
                    yield call
            elif not reader.computes or reader.operator in _MOVE:
                waiting.append(reader.key)
            else:
                yield reader


def is_read_rightly(sides: Sides, leaf: Value) -> bool:
    """Return True where all that follows from one place that reads a value agrees.

    The place itself may agree with values in another order, which what follows does not.
    """
    return any(
        _all_agrees_behind(sides, reader)
        for reader in computing_readers(sides.candidate, leaf)
    )


def _all_agrees_behind(sides: Sides, value: Value) -> bool:
    waiting = list(computing_readers(sides.candidate, value))
    seen = {each.key for each in waiting}
    if not waiting:
        return False
    while waiting:
        reader = waiting.pop(0)
        if reader.key in sides.twins and not reader.says_nothing:
            continue
        after = list(computing_readers(sides.candidate, reader))
        if not after or len(seen) > FAR:
            return False
        waiting += [each for each in after if each.key not in seen]
        seen.update(each.key for each in after)
    return True


def _source(flow: Flow, missing: Value, twins: Collection[int]) -> Value | None:
    """Return what an operator is made of that the candidate has too."""
    waiting = list(missing.inputs)
    seen = set(waiting)
    while waiting and len(seen) < FAR:
        value = flow.values.get(waiting.pop(0))
        if value is None:
            continue
        if value.key in twins:
            return value
        waiting += [key for key in value.inputs if key not in seen]
        seen.update(value.inputs)
    return None
