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

from roundoff.compare.blame.blamed_leaves import Blamed
from roundoff.compare.repairs.named_repairs import there
from roundoff.compare.repairs.repair_trials import BUDGET, Trials
from roundoff.compare.repairs.transplants import in_layout_of
from roundoff.compare.values.fault_lines import FaultLines
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides, upstream

#: Whole numbers of each program that are tried.
MOST_TRIED = 12
#: Layouts of one that are tried.
MOST_LAYOUTS = 2
_FORWARD = "forward"


def wrong_index(sides: Sides, part: Part, trials: Trials) -> Blamed | None:
    """Return the whole numbers with which all is right, once they are the reference's."""
    ours = _whole_numbers(sides.reference, part.expected, sides.agreeing)
    theirs = _whole_numbers(sides.candidate, part.region, sides.twins)
    trials.left = BUDGET
    for value, twin in product(theirs[:MOST_TRIED], ours[:MOST_TRIED]):
        for tensors in _given(sides, value, twin, theirs, ours):
            if trials.left < 0:
                return None
            if trials.outcome({}, tensors)[0]:
                words = f"with {there(twin)} in its place all that follows is right"
                line = FaultLines(sides, part.region).of_operator(value)
                return Blamed(value, twin, words, is_operator=True, line=line)
    return None


def _given(
    sides: Sides,
    value: Value,
    twin: Value,
    theirs: Sequence[Value],
    ours: Sequence[Value],
) -> Iterator[dict[int, Tensor]]:
    """Yield the reference's whole numbers in a value's place, and in that of all that the
    same line makes: a function is called for several."""
    alone = list(islice(_moved(sides, value, twin), MOST_LAYOUTS))
    yield from ({value.key: tensor} for tensor in alone)
    if not alone:
        return
    together = {value.key: alone[0]}
    twins = [each for each in ours if _place(each) == _place(twin) and each is not twin]
    for other in theirs:
        if _place(other) != _place(value) or other is value:
            continue
        for each in twins:
            tensor = next(_moved(sides, other, each), None)
            if tensor is not None:
                together[other.key] = tensor
                twins.remove(each)
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


def _place(value: Value) -> tuple[str | None, str]:
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
