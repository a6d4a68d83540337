"""Is a term added behind a function where the reference adds it before?

A shortcut around a norm in the place of one through it: what the norm is given lacks the
term, and what it gives has it. Neither edit alone makes anything right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import permutations

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.judging.step_causes import with_line
from roundoff.compare.repairs.edits.inputs import handing_on
from roundoff.compare.repairs.goals import SEVERAL
from roundoff.compare.repairs.trials import BUDGET, Trials
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides

#: Sums of a region that are tried.
MOST_SUMS = 8


def moved_term(sides: Sides, trials: Trials, part: Part) -> Blamed | None:
    """Return the sum whose term belongs before a function, if with it there more is right.

    Args:
        sides: both programs.
        trials: of the candidate.
        part: where the two part.
    """
    trials.left = BUDGET
    flow = sides.candidate
    for wanted in part.wanted:
        for value, term in _terms_that_agree(sides, part, wanted):
            held, added = flow.tensor(value.key), flow.tensor(term.key)
            if held is None or added is None or held.shape != added.shape:
                continue
            for total, rest in _sums_with(flow, part.region, term):
                if trials.left < 0:
                    return None
                call = trials.program.calls[total.row.call]
                edit = handing_on(total.inputs.index(rest.key))(call)
                if edit is None:
                    continue
                edits = {total.row.call: edit}
                agrees, gained = trials.outcome(edits, {value.key: held + added})
                if agrees or len(gained) >= SEVERAL:
                    sources = (flow.behind(term.key), flow.behind(value.key))
                    return _blamed(total, *sources, wanted, agrees=agrees)
    return None


def _terms_that_agree(
    sides: Sides, part: Part, wanted: Value
) -> Iterator[tuple[Value, Value]]:
    """Yield what the reference adds up, as the region reads it, either one as the term."""
    if wanted.operator != "add" or wanted.inner:
        return
    twins = [sides.agreeing.get(key) for key in wanted.inputs]
    if len(twins) != 2:
        return
    flow = sides.candidate
    known = [flow.behind(twin[0]).key for twin in twins if twin is not None]
    read = {key for each in part.region for key in flow.values[each].inputs}
    shown = [
        [
            flow.values[key]
            for key in sorted(read & flow.values.keys())
            if flow.behind(key).key == source
        ]
        for source in known
    ]
    if len(shown) == 2 and all(shown):
        yield from permutations([values[0] for values in shown])


def _sums_with(
    flow: Flow, region: Collection[int], term: Value
) -> Iterator[tuple[Value, Value]]:
    """Yield the first sums of a region that add a term to what is wrong, and that."""
    sums = [flow.values[key] for key in region]
    sums = [each for each in sums if each.operator == "add" and not each.inner]
    sums.sort(key=lambda each: each.order)
    for total in sums[:MOST_SUMS]:
        if len(total.inputs) == 2:
            for first, second in permutations(total.inputs):
                is_term = flow.behind(first).key == flow.behind(term.key).key
                if is_term and second in region:
                    yield total, flow.values[second]


def _blamed(
    total: Value, term: Value, value: Value, wanted: Value, *, agrees: bool
) -> Blamed:
    more = "all that" if agrees else "more of what"
    words = (
        f"adds {with_line(term.row.site, term.row.line)} behind what is made of "
        f"{value.row.site}, where the reference adds it before; there, {more} follows is right"
    )
    return Blamed(total, wanted, words, is_operator=True)
