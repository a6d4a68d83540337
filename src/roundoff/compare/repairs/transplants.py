"""From which value on does the candidate compute what the reference does?

Behind a fault no value of the candidate has an equal in the reference any more, so that
nothing there says what is right. A *transplant* does: a value of the candidate is given
what the reference has in its place, and what is made of it runs again. Where all results
agree then, nothing is wrong that runs after this value. The fault is in what the earliest
such value is made of, behind the values that agree; and what a repair has to make there
is known element by element, not up to the layout.

A line that runs several times, in turns of a loop or in layers, is wrong each time: its
values are replaced together, each by the one that the reference makes in the same turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from torch import Tensor

from roundoff.compare.records.value_sketch import (
    Sketch,
    SketchIndex,
    in_reals,
    sketch_of_tensor,
)
from roundoff.compare.repairs.goals import CLEARLY, SEVERAL, Goal, apart
from roundoff.compare.repairs.rejoins import Rejoin, Transplant
from roundoff.compare.repairs.transplant_search import Search
from roundoff.compare.repairs.trials import BUDGET, Trials
from roundoff.compare.values.learnt_layouts import layouts_for, stand_in
from roundoff.compare.values.padded_rows import places_kept
from roundoff.compare.values.traced_calls import TracedProgram
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Part, Sides, upstream

#: How many budgets of ``repair_trials`` the search may use: what it finds saves others.
PATIENT = 4
#: Orders of a value's elements that are tried.
MOST_ORDERS = 16


def rejoin_of(
    sides: Sides, part: Part, trials: Trials, *, in_parts: bool = False
) -> Rejoin | None:
    """Return the earliest value after which the candidate is right; None where none is.

    With ``in_parts`` the turns of a loop are given parts of what the reference makes at
    once, and what is made at once all turns of a loop of the reference; nothing else is
    tried.

    Values are tried in the order of execution: of those that the earliest is made of none
    would do. Where no transplant makes the results agree (they may be other values of the
    same formula, or the fault is made again elsewhere), it is the one that brings back
    most of what the candidate lacks: an earlier one brings back all that a later one
    does, and a wrong one what agrees by chance. None of padding, which changes no result.
    """
    trials.left = PATIENT * BUDGET
    search = Search(sides, part, trials)
    best: Transplant | None = None
    most = SEVERAL - 1
    for transplant in search.transplants(in_parts=in_parts):
        if trials.left < 0:
            break
        agrees, gained = trials.outcome(
            {}, transplant.tensors, to_the_end=True, is_patient=transplant.is_in_parts
        )
        if not agrees and search.are_of_the_same(transplant.value, transplant.twin):
            agrees, _ = trials.trusting().outcome({}, transplant.tensors)
        is_better = len(gained) > most or (agrees and len(gained) == most)
        if is_better and (agrees or trials.changes_results(transplant.tensors)):
            best = transplant
            most = len(gained)
        if agrees:
            best = best or transplant
            is_proven = best is transplant
            best = search.in_nearer_sign(best) if is_proven else best
            best = search.after_clipped(search.before_clipped(best))
            rejoin = search.rejoin(best, agrees=is_proven)
            return replace(rejoin, in_any_order=_may_be_turned(trials, best))
    if best is None:
        return None
    return search.rejoin(search.before_clipped(best), agrees=False)


def regains_in_order(sides: Sides, part: Part, trials: Trials, value: Value) -> bool:
    """Return True where all results agree once a value's elements stand as the reference has
    them, or else the first of what was lost, and more, is there."""
    search = Search(sides, part, trials)
    for transplant in islice(search.given_to(value), MOST_ORDERS):
        agrees, gained = trials.outcome({}, transplant.tensors, to_the_end=True)
        if agrees or (trials.goal.first in gained and len(gained) >= SEVERAL):
            return True
    return False


def _may_be_turned(trials: Trials, transplant: Transplant) -> bool:
    """Return True where results agree with the elements of each value the other way round."""
    turned = {
        key: tensor.flatten().flip(0).reshape(tensor.shape)
        for key, tensor in transplant.tensors.items()
    }
    agrees, _ = trials.trusting().outcome({}, turned)
    return agrees


def trials_of_value(
    sides: Sides, rejoin: Rejoin, whole: Trials | None = None
) -> Trials:
    """Return trials of what a value is made of: it should be what the reference has.

    Element by element where all that follows proves the places, and where the value has
    the right elements in other places. Else up to the layout: behind gates in another
    order some values are right. With ``whole`` the results have to agree there too.
    """
    flow = sides.candidate
    key = rejoin.value.key
    present = flow.tensor(key)
    wanted = rejoin.held
    counts: dict[int, Tensor] = {}
    kept = _kept_places(sides, wanted, present) if present is not None else None
    if kept is not None and present is not None:
        counts[key] = kept
        wanted, present = wanted[kept], present[kept]
    sketch = sketch_of_tensor(wanted)
    ends: dict[int, list[tuple[Sketch, float]]] = {}
    has_elements = rejoin.twin.key in sides.all_twins(rejoin.value)
    is_in_place = rejoin.agrees and not rejoin.in_any_order
    held = {key: wanted} if is_in_place or has_elements else {}
    if present is not None and sketch is not None:
        off = apart(wanted, present)
        ends[key] = [(sketch, min(sides.usual, off / CLEARLY))]
    made_of = upstream(flow, [key], lambda _value: True)
    only = {k for k in made_of if not flow.values[k].inner}
    goal = Goal(SketchIndex(()), None, sides.limit, ends, frozenset(ends), held, counts)
    return Trials(TracedProgram(flow), goal, only=only, whole=whole)


def _kept_places(sides: Sides, wanted: Tensor, present: Tensor) -> Tensor | None:
    """Return where a value counts that has padding, and differs elsewhere; None otherwise.

    Of several ways in which a mask may lie the one that leaves the least difference.
    """
    if wanted.shape != present.shape:
        return None
    best: Tensor | None = None
    least = apart(wanted, present)
    for kept in places_kept(wanted.shape, sides.padding):
        off = apart(wanted[kept], present[kept])
        if sides.limit < off < least:
            best, least = kept, off
    return best


def in_layout_of(sides: Sides, held: Tensor, content: Tensor) -> Iterator[Tensor]:
    """Yield a tensor as it may stand in another one's place: broadcast, or in each layout
    that the shapes allow."""
    for layout in layouts_for(sides, content, held):
        moved = stand_in(layout, content, held)
        if moved is not None:
            yield moved
    is_as_large = in_reals(content).numel() == in_reals(held).numel()
    if (
        not is_as_large
        and held.is_complex() == content.is_complex()
        and _broadcasts(held.shape, content.shape)
    ):
        yield content.to(held.dtype).contiguous()


def _broadcasts(small: Sequence[int], large: Sequence[int]) -> bool:
    pairs = zip(reversed(small), reversed(large), strict=False)
    return len(small) <= len(large) and all(a in (1, b) for a, b in pairs)
