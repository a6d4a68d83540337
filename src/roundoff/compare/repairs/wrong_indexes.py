"""Which whole numbers, that a port computes itself, are others than the reference's?

Words by number, positions, segments, masks: what is looked up or chosen by them is the
first number that differs, and says nothing of where they were made. Where all is right
with the reference's whole numbers in their place, the first of them is at fault that the
reference does not have.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterator, Sequence
from itertools import islice, product

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.repairs.named_repairs import there
from roundoff.compare.repairs.transplants import in_layout_of
from roundoff.compare.repairs.trials import BUDGET, Trials
from roundoff.compare.values.fault_lines import FaultLines
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides, upstream
from roundoff.ops import operators_that

#: Whole numbers of each program that are tried.
MOST_TRIED = 12
#: Layouts of one that are tried.
MOST_LAYOUTS = 2
_FORWARD = "forward"
_MOVE = operators_that("move values")
_COMPARE = operators_that("say which is larger")


def wrong_index(
    sides: Sides, part: Part, trials: Trials, *, is_patient: bool = False
) -> Blamed | None:
    """Return the whole numbers with which all is right, once they are the reference's.

    Those that the reference does not have; then those of which it makes others: lengths
    that lack one. Last what is chosen by at once, which may hold the same in other places:
    words that are shifted, with padding at both ends.
    ``is_patient``: what is looked up may go through all steps of a layer written out.
    """
    trials.left = BUDGET
    ours = _whole_numbers(sides.reference, part.expected, sides.agreeing)
    theirs = _whole_numbers(sides.candidate, part.region, sides.twins)
    found = _other_end(sides, part, trials, theirs, is_patient)
    if found is None:
        found = _turned_round(sides, part, trials, is_patient)
    if found is None:
        found = _transposed(sides, part, trials, is_patient)
    if found is None:
        found = _first_right(sides, part, trials, theirs, ours, is_patient)
    if found is None:
        found = _changed_further(sides, part, trials, ours)
    if found is not None:
        return found
    read = _whole_numbers_read(sides.reference, part.expected)
    read_there = _whole_numbers_read(sides.candidate, part.region)
    return _first_right(sides, part, trials, read_there, read, is_patient)


def _other_end(
    sides: Sides, part: Part, trials: Trials, theirs: Sequence[Value], is_patient: bool
) -> Blamed | None:
    """Return the comparison with which all is right, once what is equal counts, or no more.

    The last of a length belongs to it, or does not: that says less than other lengths do.
    """
    for value in theirs:
        operands = [sides.candidate.tensor(key) for key in value.inputs]
        if value.operator not in _COMPARE or trials.left < 0:
            continue
        if len(operands) != 2 or operands[0] is None or operands[1] is None:
            continue
        is_strict = value.operator.endswith("t")
        meant = value.operator[:-1] + ("e" if is_strict else "t")
        tensor = getattr(torch, meant)(*operands)
        if trials.outcome({}, {value.key: tensor}, is_patient=is_patient)[0]:
            words = f"as {meant}, not {value.operator}, all that follows is right"
            line = FaultLines(sides, part.region).of_operator(value)
            return Blamed(value, None, words, is_operator=True, line=line)
    return None


def _turned_round(
    sides: Sides, part: Part, trials: Trials, is_patient: bool
) -> Blamed | None:
    """Return the order of elements with which all is right the other way round.

    It says where each goes where it should say from where each comes.
    """
    flow = sides.candidate
    made_of = upstream(flow, sorted(part.region), lambda _value: True)
    values = sorted((flow.values[key] for key in made_of), key=lambda v: v.order)
    for value in values:
        order = None if value.is_number else flow.tensor(value.key)
        if order is None or not _is_order(order) or trials.left < 0:
            continue
        inverse = order.argsort().to(order.dtype)
        if torch.equal(inverse, order):
            continue
        if trials.outcome({}, {value.key: inverse}, is_patient=is_patient)[0]:
            words = (
                f"{value.row.name or value.row.site} says where each element goes; the "
                "other way round, from where each comes, all is right"
            )
            return Blamed(value, None, words, is_operator=value.is_call)
    return None


def _transposed(
    sides: Sides, part: Part, trials: Trials, is_patient: bool
) -> Blamed | None:
    """Return the table of places with which all is right once its axes are exchanged.

    Distances from keys to queries hold the numbers of those from queries to keys.
    """
    flow = sides.candidate
    made_of = upstream(flow, sorted(part.region), lambda _value: True)
    values = sorted((flow.values[key] for key in made_of), key=lambda v: v.order)
    tables = [v for v in values if v.is_call and v.computes and not v.is_number]
    seen: set[object] = set()
    for value in filter(_is_square, tables):
        if place_of(value) in seen or len(seen) >= MOST_TRIED:
            continue
        seen.add(place_of(value))
        # a function makes it for several layers
        alike = [value, *filter(_is_square, made_alike(flow, value))]
        held = {each.key: flow.tensor(each.key) for each in alike}
        turned = {
            key: tensor.mT.contiguous()
            for key, tensor in held.items()
            if tensor is not None and not torch.equal(tensor, tensor.mT)
        }
        if not turned or trials.left < 0:
            continue
        if trials.outcome({}, turned, is_patient=is_patient)[0]:
            words = "with its last two axes exchanged all that follows is right"
            return Blamed(value, None, words, is_operator=True)
    return None


def _is_square(value: Value) -> bool:
    *_, rows, columns = (0, 1, *(value.row.shape or ()))
    return rows == columns > 1


def _is_order(numbers: Tensor) -> bool:
    """Return True for all places of a row, each once.

    >>> _is_order(torch.tensor([2, 0, 1])), _is_order(torch.tensor([2, 0, 2]))
    (True, False)
    """
    if numbers.dim() != 1 or numbers.dtype not in (torch.int64, torch.int32):
        return False
    return torch.equal(numbers.sort().values, torch.arange(len(numbers)).to(numbers))


def _first_right(
    sides: Sides,
    part: Part,
    trials: Trials,
    theirs: Sequence[Value],
    ours: Sequence[Value],
    is_patient: bool,
) -> Blamed | None:
    tried = islice(_one_of_each_family(trials, theirs), MOST_TRIED)
    for value, twin in product(tried, ours[:MOST_TRIED]):
        for tensors in _given(sides, value, twin):
            if trials.left < 0:
                return None
            if trials.outcome({}, tensors, is_patient=is_patient)[0]:
                first = min(tensors, key=lambda key: sides.candidate.values[key].order)
                value_there = sides.candidate.values[first]
                made = _moved_from(sides, value_there, tensors[first])
                compared = _wrongly_compared(sides, trials, made, twin, is_patient)
                made, twin = compared or (made, twin)
                words = f"with {there(twin)} in its place all that follows is right"
                line = None
                if len(tensors) == 1:
                    line = FaultLines(sides, part.region).of_operator(made)
                return Blamed(made, twin, words, is_operator=True, line=line)
    return None


def _one_of_each_family(trials: Trials, values: Sequence[Value]) -> Iterator[Value]:
    """Yield the first of what one place of a line has made in turns, or for each sample."""
    seen: set[int] = set()
    for value in values:
        family = trials.families.get(value.row.call)
        first = family[0].first.call if family else value.row.call
        if first not in seen:
            seen.add(first)
            yield value


def _wrongly_compared(
    sides: Sides, trials: Trials, mask: Value, twin: Value, is_patient: bool
) -> tuple[Value, Value] | None:
    """Return the number that a comparison reads with which all is right too, and whose it is.

    Where edges are is decided by what is computed of the colours.
    """
    if mask.operator not in _COMPARE or twin.operator not in _COMPARE:
        return None
    flow, reference = sides.candidate, sides.reference
    ours = [reference.values[key] for key in twin.inputs if key not in sides.agreeing]
    theirs = [flow.values[key] for key in mask.inputs if key not in sides.twins]
    for value, other in product(theirs, ours):
        held = flow.tensor(value.key)
        content = reference.tensor(other.key)
        is_number = value.is_number and value.computes and other.is_number
        if not is_number or held is None or content is None:
            continue
        if held.numel() != content.numel():
            continue
        for tensor in islice(in_layout_of(sides, held, content), MOST_LAYOUTS):
            if trials.outcome({}, {value.key: tensor}, is_patient=is_patient)[0]:
                return value, other
    return None


def _moved_from(sides: Sides, value: Value, wanted: Tensor) -> Value:
    """Return the whole numbers of the candidate alone that a value only is a part of.

    The value itself where what should be there is another part of them.
    """
    flow = sides.candidate
    while value.operator in _MOVE and value.inputs:
        source = flow.values.get(value.inputs[0])
        if source is None or not source.is_call or source.inner:
            return value
        if source.key in sides.twins or source.row.dtype != value.row.dtype:
            return value  # it is right, or what the value is chosen by
        whole = flow.tensor(source.key)
        if whole is not None and _is_window(whole, wanted):
            return value
        value = source
    return value


def _is_window(whole: Tensor, part: Tensor) -> bool:
    """Return True for what stands next to each other along one axis of another tensor.

    >>> _is_window(torch.arange(6).view(2, 3), torch.tensor([[1, 2], [4, 5]]))
    True
    >>> _is_window(torch.arange(6).view(2, 3), torch.tensor([[2, 1], [5, 4]]))
    False
    """
    if whole.dim() != part.dim():
        return False
    pairs = zip(whole.shape, part.shape, strict=True)
    shorter = [axis for axis, (size, length) in enumerate(pairs) if size > length]
    if len(shorter) != 1 or part.numel() == 0:
        return False
    [axis] = shorter
    windows = whole.unfold(axis, part.shape[axis], 1).movedim(-1, axis + 1)
    return any(torch.equal(each, part) for each in windows.unbind(axis))


def _whole_numbers_read(flow: Flow, region: Collection[int]) -> list[Value]:
    """Return the computed whole numbers, more than one, that a region reads, behind views."""
    read = {key for value in region for key in flow.values[value].inputs}
    values = [flow.behind(key) for key in sorted(read) if key in flow.values]
    return [
        value
        for value in dict.fromkeys(values)
        if value.is_call and not value.is_number and (value.row.numel or 0) > 1
    ]


def _given(sides: Sides, value: Value, twin: Value) -> Iterator[dict[int, Tensor]]:
    """Yield the reference's whole numbers in a value's place, and in that of all that the
    same line makes: a function is called for several.

    In the layouts that the shapes allow, the same one for all.
    """
    alone = list(islice(_moved(sides, value, twin), MOST_LAYOUTS))
    yield from ({value.key: tensor} for tensor in alone)
    turns = None if alone else _of_all_turns(sides, value, twin)
    if turns is not None:
        yield {value.key: turns}
    others = made_alike(sides.candidate, value) if alone else []
    for layout, tensor in enumerate(alone):
        together = {value.key: tensor}
        twins = made_alike(sides.reference, twin)
        for other in others:
            # the reference may call it once for both
            for each in (*twins, twin):
                moved = list(islice(_moved(sides, other, each), layout + 1))
                if moved:
                    together[other.key] = moved[-1]
                    twins = [left for left in twins if left is not each]
                    break
        if len(together) > 1:
            yield together


def _moved(sides: Sides, value: Value, twin: Value) -> Iterator[Tensor]:
    held = sides.candidate.tensor(value.key)
    content = sides.reference.tensor(twin.key)
    if held is None or content is None or held.numel() != content.numel():
        return
    if (held.dtype == torch.bool) != (content.dtype == torch.bool):
        return
    yield from in_layout_of(sides, held, content)


def _of_all_turns(sides: Sides, value: Value, twin: Value) -> Tensor | None:
    """Return what the reference makes in the turns of a loop, sample by sample, for what the
    candidate makes of all samples at once."""
    held = sides.candidate.tensor(value.key)
    content = sides.reference.tensor(twin.key)
    if held is None or content is None or held.shape[1:] != content.shape:
        return None
    turns = [each for each in made_alike(sides.reference, twin) if _is_turn(each, twin)]
    if len(turns) + 1 != held.shape[0] or any(t.order < twin.order for t in turns):
        return None
    tensors = [sides.reference.tensor(each.key) for each in (twin, *turns)]
    known = [tensor for tensor in tensors if tensor is not None]
    if len(known) < len(tensors) or (held.dtype == torch.bool) != (
        content.dtype == torch.bool
    ):
        return None
    return torch.stack(known).to(held.dtype)


def _is_turn(one: Value, other: Value) -> bool:
    return one.row.shape == other.row.shape and one.row.place == other.row.place


def _changed_further(
    sides: Sides, part: Part, trials: Trials, ours: Sequence[Value]
) -> Blamed | None:
    """Return whole numbers of both programs of which the reference alone makes others.

    There are few of them, and loops read lengths: each is tried to the end.
    """
    for value in _whole_numbers(sides.candidate, part.region, ()):
        twins = set(sides.all_twins(value))
        made = [twin for twin in ours if not twins.isdisjoint(twin.inputs)]
        if value.computes and made:
            trials.left = BUDGET
            found = _first_right(sides, part, trials, [value], made, True)
            if found is not None:
                return found
    return None


def made_alike(flow: Flow, value: Value) -> list[Value]:
    """Return what other whole numbers the same line makes with the same operator."""
    return [
        each
        for each in flow.in_order()
        if place_of(each) == place_of(value)
        and each.is_call
        and not each.is_number
        and each is not value
    ]


def place_of(value: Value) -> tuple[str | None, str]:
    return value.row.line, value.operator


def _whole_numbers(
    flow: Flow, region: Collection[int], agreeing: Container[int]
) -> list[Value]:
    """Return what a region is made of that is no floating point, computed and of one program
    alone, the first first."""
    made_of = upstream(flow, sorted(region), lambda value: value.is_call)
    values = [flow.values[key] for key in made_of if key not in agreeing]
    values = [v for v in values if v.row.phase == _FORWARD and not v.inner]
    whole = [v for v in values if v.is_call and not v.is_number and v.row.numel]
    return sorted(whole, key=lambda value: value.order)
