"""A recorded forward pass differentiated again: which values hand on a gradient, and what.

Its calls run once more under autograd, in one way after the other (``pass_under_autograd``),
until the gradients of parameters come out as they were recorded, or as they should be. What
ran under ``no_grad`` has no backward calls; which of the other reads hand nothing on, the
recorded gradients say (``gradient_shares``).
"""

from __future__ import annotations

from collections.abc import (
    Callable,
    Container,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from itertools import chain, islice

import torch
from torch import Tensor

from roundoff.compare.ports.gradient_shares import (
    handing_nothing_on,
    handing_on,
    scaled_by_hand,
)
from roundoff.compare.ports.pass_under_autograd import (
    DifferentiatedFlow,
    Edge,
    LostGradient,
    Place,
    Run,
    Way,
    place_of,
)
from roundoff.compare.ports.port_results import (
    gradients_left,
    inner_gradients,
    last_result,
)
from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.ops import operators_that

_FORWARD = "forward"
_BACKWARD = "backward"
_WITHOUT_CALL = operators_that("hand the gradient on without a call")
#: Recorded gradients with what they may be of that are begun with, at most.
MOST_STARTS = 48
#: Values that one of them may be of.
MOST_ALIKE = 12
#: Gradients of fewer elements may be others'.
FEWEST = 8
#: Reads of parameters that are read several times, each of which may hand nothing on.
MOST_READS = 128
#: Reads one behind the other of which each hands on what the others leave.
MOST_ROUNDS = 4
#: Reads of detached values that are opened one by one.
MOST_DETACHED = 16
#: Lines that detach values, each tried as the only one that means it, at most.
MOST_LINES = 8


def differentiated(flow: Flow, limit: float, least: float) -> DifferentiatedFlow | None:
    """Return a forward pass under autograd that gives the recorded gradients.

    None where it cannot run so, or gives other ones: with a backward pass by hand.

    Args:
        flow: with the tensors of both passes.
        limit: how far a gradient may be off.
        least: the share of the largest one below which one may be rounding.
    """
    wanted = _recorded_gradients(flow)
    end = last_result(flow)
    if not wanted or end is None or end.row.numel != 1:
        return None

    smallest = least * max(float(tensor.norm()) for tensor in wanted.values())

    def is_right(found: DifferentiatedFlow) -> bool:
        for name, gradient in wanted.items():
            got = found.gradients.get(name, torch.zeros_like(gradient))
            allowed = limit * max(float(gradient.norm()), smallest)
            if float((got - gradient).norm()) > allowed:
                return False
        return True

    try:
        runs = _attempts(flow, wanted, end, limit)
        return next((run for run in runs if is_right(run)), None)
    except CannotRun:
        return None


def differentiated_rightly(
    flow: Flow,
    is_right: Callable[[Mapping[str, Tensor]], bool],
    agreeing: Container[int],
) -> DifferentiatedFlow | None:
    """Return a forward pass under autograd that gives right gradients, whatever was recorded.

    With what goes back to each value, and through each read of one. None where it cannot
    run, or gives none that ``is_right``: gradients by the names of their parameters.

    It begins with the loss, or with a recorded gradient that is ``agreeing`` with the
    reference's: a loss in logarithms of zeros has none that autograd could give.
    """
    end = last_result(flow)
    if end is None or end.row.numel != 1:
        return None
    for way in _ways(flow):
        try:
            found = _rightly(flow, way, end, is_right, agreeing)
        except CannotRun:
            continue
        if found is not None:
            return found
    return None


def _rightly(
    flow: Flow,
    way: Way,
    end: Value,
    is_right: Callable[[Mapping[str, Tensor]], bool],
    agreeing: Container[int],
) -> DifferentiatedFlow | None:
    whole = Run(flow, way)
    plain = whole.run(end)
    edges = frozenset(whole.doubtful)
    standing = frozenset(whole.standing)
    for cut in dict.fromkeys([frozenset[Edge](), standing, edges]):
        way = replace(way, cut=cut)
        found = Run(flow, way).run(end) if cut else plain
        if is_right(found.gradients):
            return Run(flow, way, is_whole=True).run(end)
        for value, gradient in islice(_starts(found, agreeing), MOST_STARTS):
            if is_right(found.given(value.key, gradient)):
                return Run(flow, way, is_whole=True).run(value, gradient)
    return None


def _starts(
    found: DifferentiatedFlow, agreeing: Container[int]
) -> Iterator[tuple[Value, Tensor]]:
    """Yield recorded gradients that agree with the reference's, each with what it may be of.

    The first of them, going back, and the last values of their shape that hand it on.
    """
    flow = found.flow
    values = list(flow.in_order())
    later = [v for v in reversed(values) if v.key in found.tensors and v.is_call]
    going_back = [v for v in values if v.row.phase == _BACKWARD and v.key in agreeing]
    for recorded in going_back:
        gradient = flow.tensor(recorded.key)
        if gradient is None or gradient.numel() < FEWEST or recorded.says_nothing:
            continue
        alike = [v for v in later if found.tensors[v.key].shape == gradient.shape]
        for value in islice((v for v in alike if found.hands_on(v.key)), MOST_ALIKE):
            yield value, gradient


def _attempts(
    flow: Flow, wanted: Mapping[str, Tensor], end: Value, limit: float
) -> Iterator[DifferentiatedFlow]:
    """Yield a forward pass under autograd in each way that it may have been meant.

    As it is, with reads of detached values cut, and with gradients scaled by hand.
    """
    for way in _ways(flow):
        whole = Run(flow, way)
        try:
            plain = whole.run(end)
        except CannotRun:
            continue
        if way.through_views and not whole.doubtful:
            continue
        yield plain
        for cut in chain([frozenset[Edge]()], _cuts(whole, plain, wanted, end, limit)):
            run = plain
            if cut:
                run = Run(flow, replace(way, cut=cut)).run(end)
                yield run
            for scaled in scaled_by_hand(run, limit):
                yield Run(flow, replace(way, cut=cut, scaled=scaled)).run(end)


def lost_gradients(
    found: DifferentiatedFlow, is_known: Callable[[int], bool]
) -> Sequence[LostGradient]:
    """Return where values are read that hand no gradient on.

    Each is the last one that ``is_known`` on the way to a result that has a gradient.
    """
    end = last_result(found.flow)
    if end is None:
        return []

    def goes_on(key: int) -> bool:
        return not found.hands_on(key) and is_known(key)

    try:
        return Run(found.flow, found.way, goes_on).run(end).lost
    except CannotRun:
        return []


def _cuts(
    whole: Run,
    found: DifferentiatedFlow,
    wanted: Mapping[str, Tensor],
    end: Value,
    limit: float,
) -> Iterator[frozenset[Edge]]:
    """Yield which reads may hand nothing on, the likeliest first.

    Reads of detached values, most of them: what a cut read is made of may have been cut
    before too. Then those of parameters that are read several times: in one of the passes
    of a step they may ask for no gradient; then those where no backward call stands. Last
    those of detached values again, one behind the other.
    """
    if whole.doubtful:
        yield from _cuts_of_detached(whole, found, wanted, end)
    frozen = whole.several_reads
    if 0 < len(frozen) <= MOST_READS:
        read = Run(whole.flow, whole.way, is_whole=True).run(end)
        yield frozenset(
            handing_nothing_on(frozen | whole.doubtful.keys(), read, wanted)
        )
    unseen = whole.reads_at(_without_backward(whole.flow))
    if unseen and len(unseen | frozen) <= MOST_READS:
        every = unseen | frozen | whole.doubtful.keys()
        yield from _added_back(whole, wanted, end, every)
    if 0 < len(whole.doubtful) <= MOST_DETACHED:
        yield from _opened_one_by_one(whole, wanted, end, limit)


def _opened_one_by_one(
    whole: Run, wanted: Mapping[str, Tensor], end: Value, limit: float
) -> Iterator[frozenset[Edge]]:
    """Yield fewer and fewer reads of detached values: each time without one of them.

    The one without which most gradients are those that were recorded, while these become
    more. What goes back to a value of which both reads were cut shows behind other reads.
    """

    def right_with(cut: frozenset[Edge]) -> int:
        run = Run(whole.flow, replace(whole.way, cut=cut)).run(end)
        pairs = ((run.gradients.get(name), tensor) for name, tensor in wanted.items())
        return sum(_is_near(got, tensor, limit) for got, tensor in pairs)

    cut = frozenset(whole.doubtful)
    most = right_with(cut)
    while cut:
        fewer = [cut - {edge} for edge in sorted(cut)]
        counts = [right_with(each) for each in fewer]
        if max(counts) <= most:
            return
        most = max(counts)
        cut = fewer[counts.index(most)]
        yield cut


def _is_near(got: Tensor | None, wanted: Tensor, limit: float) -> bool:
    if got is None:
        return not wanted.any()
    return float((got - wanted).norm()) <= limit * float(wanted.norm())


def _added_back(
    whole: Run, wanted: Mapping[str, Tensor], end: Value, edges: frozenset[Edge]
) -> Iterator[frozenset[Edge]]:
    """Yield what is left of reads that hand nothing on, as long as some have to.

    All are cut, and those added that the recorded gradients lack: one behind another one
    shows when that is there.
    """
    cut = edges
    for _ in range(MOST_ROUNDS):
        run = Run(whole.flow, replace(whole.way, cut=cut)).run(end)
        added = handing_on(run, wanted)
        if not added:
            return
        cut -= added
        yield cut


def _cuts_of_detached(
    whole: Run, found: DifferentiatedFlow, wanted: Mapping[str, Tensor], end: Value
) -> Iterator[frozenset[Edge]]:
    edges = frozenset(whole.doubtful)
    without = Run(whole.flow, replace(whole.way, cut=edges)).run(end)
    yield edges - handing_on(without, wanted, together=True)
    yield frozenset(handing_nothing_on(edges, found, wanted, together=True))
    yield frozenset(whole.standing)
    lines = list(dict.fromkeys(line for _, line, _ in whole.doubtful.values()))
    for line in lines[:MOST_LINES] if len(lines) > 1 else []:
        yield frozenset(e for e, place in whole.doubtful.items() if place[1] == line)


def _recorded_gradients(flow: Flow) -> dict[str, Tensor]:
    recorded = {}
    for name, row in gradients_left(flow.step.rows).items():
        tensor = flow.step.tensor(row.record)
        if tensor is not None:
            recorded[name.removesuffix(".grad")] = tensor
    return recorded


def _ways(flow: Flow) -> list[Way]:
    """Return how it may have been differentiated, the plainest way first."""
    hidden = _without_backward(flow)
    may_be_twice = (True, False) if inner_gradients(flow) else (False,)
    return [
        Way(lines, is_straight, is_twice, through_views)
        for through_views in (False, True)
        for is_straight in (False, True)
        for is_twice in may_be_twice
        for lines in (frozenset[Place](), hidden)
    ]


def _without_backward(flow: Flow) -> frozenset[Place]:
    """Return where calls stand to which no backward call belongs."""
    rows = flow.step.rows.values()
    going_back = {place_of(row) for row in rows if row.phase == _BACKWARD}
    standing = {
        place_of(row)
        for row in rows
        if row.phase == _FORWARD
        and row.is_call
        and row.base_operator not in _WITHOUT_CALL
    }
    return frozenset(standing - going_back)
