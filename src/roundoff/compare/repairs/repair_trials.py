"""Which small edit of the candidate makes it agree with the reference?

Between two programs by different hands a value that only one of them has says nothing by
itself: it may be another way to compute the same. What can be tried is the repair. Each
call near the place where the two part is edited in small ways (see ``call_edits``), in
all turns of a loop and all layers that the same line computes; what is made of it runs
again. Where the results then agree, that call is at fault, and the edit says how.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.records.call_stacks import stack_of
from roundoff.compare.repairs.alike_leaves import is_one_number
from roundoff.compare.repairs.call_edits import proposals
from roundoff.compare.repairs.edits.edited_calls import (
    CHANGE,
    INPUT,
    LAYOUT,
    LEFT_OUT,
    ONE_MORE,
    Proposal,
)
from roundoff.compare.repairs.goals import SEVERAL
from roundoff.compare.repairs.ingredients import ingredients_of
from roundoff.compare.repairs.lost_values import loses
from roundoff.compare.repairs.suspects import suspects
from roundoff.compare.repairs.trials import (
    Region,
    Trials,
    calls_by_function,
    calls_by_line,
    edits_of,
)
from roundoff.compare.values.fault_lines import alike_inside
from roundoff.compare.values.traced_calls import Edit, TracedCall, TracedProgram
from roundoff.compare.values.value_regions import Sides

#: Turns of a loop, and places of a line, that are tried each by itself.
MOST_TURNS = 8


@dataclass(frozen=True, slots=True)
class Repair:
    """An edit that makes the candidate agree.

    Attributes:
        call: the first call that is edited.
        words: what the edit does.
        ends: True where the results of the forward pass agree with it.
        gained: how many values of the reference the candidate has now, and had not.
        unlikely: see ``call_edits``.
        gives_first: True where the first value of the reference that the candidate
            lacked is among those.
        exchanges: True where it exchanges parts of one value.
        is_whole: True where it is made in all calls of the place.
        is_of_caller: True where it is made for one caller of a function, and other calls of
            its lines stay as they are.
        factor: the record of a value that the call's input is multiplied with.
        scales: True where the call's result is multiplied with a number.
        may_be_chance: True where the results are few numbers that agree, and nothing that
            was lost before them is there.
        edits: of all calls that are edited.
    """

    call: TracedCall
    words: str
    ends: bool
    gained: int
    unlikely: int
    gives_first: bool = False
    exchanges: bool = False
    is_whole: bool = True
    is_of_caller: bool = False
    factor: int | None = None
    scales: bool = False
    may_be_chance: bool = False
    edits: Mapping[int, Edit] = field(default_factory=dict)

    @property
    def rank(self) -> tuple[bool, int, int]:
        """What gains more is better, the first value that was lost above all."""
        return self.gives_first, self.gained, -self.unlikely


def _of_kinds(
    sides: Sides, trials: Trials, region: Region, kinds: range
) -> Iterator[Repair]:
    """Yield edits of some kinds, the likely ones first, that give what was lost.

    Only those that make all results agree, or give several values.
    """
    program = trials.program
    families = trials.families
    by_line = calls_by_line(program)
    by_function = calls_by_function(program)
    ingredients = ingredients_of(sides, trials, region)
    waiting = [
        (proposal, call)
        for call in suspects(sides, trials, region.parted)
        for proposal in proposals(call, ingredients)
        if proposal.unlikely in kinds
    ]
    for kind in kinds:
        trials.left = trials.budget
        for proposal, call in waiting:
            if proposal.unlikely != kind or trials.left <= 0:
                continue
            edited = families[call.first.call]
            if proposal.on_line:
                edited = by_line.get(call.first.line or "", edited)
            repair = _tried(trials, proposal, call, edited)
            if repair is None and proposal.in_function:
                beside = by_function.get(call.first.callers or "", [])
                repair = _tried_in_function(trials, proposal, call, edited, beside)
            if repair is None and proposal.is_copied:
                repair = _tried_in_copies(trials, proposal, call, edited)
            if repair is None and kind != LAYOUT:
                repair = _tried_where_wrong(sides, trials, proposal, call, edited)
            if repair is None and kind != LAYOUT:
                repair = _tried_at_places(trials, proposal, edited)
            if repair is None and kind in (LAYOUT, LEFT_OUT, INPUT):
                repair = _tried_for_callers(trials, proposal, call, edited)
            if repair is None and kind == CHANGE:
                repair = _tried_in_one_turn(trials, proposal, call, edited)
            if repair is not None and not _moves_the_fault(sides, trials, repair):
                yield repair


def _moves_the_fault(sides: Sides, trials: Trials, repair: Repair) -> bool:
    """Return True for what makes one value right alone, and others wrong that were right."""
    is_alone = trials.only is not None and trials.whole is None
    if not is_alone or not repair.ends:
        return False
    return loses(sides, trials.program, repair.edits, {})


def _tried_in_function(
    trials: Trials,
    proposal: Proposal,
    call: TracedCall,
    line: Sequence[TracedCall],
    function: Sequence[TracedCall],
) -> Repair | None:
    """Return what an edit repairs in all lines of a function, where several have it."""
    in_all = edits_of(proposal.template, function).keys()
    on_line = edits_of(proposal.template, line).keys()
    if in_all <= on_line:
        return None
    repair = _tried(trials, proposal, call, function)
    if repair is None or on_line <= in_all:
        return repair
    return replace(repair, is_of_caller=True)


def _tried_where_wrong(
    sides: Sides,
    trials: Trials,
    proposal: Proposal,
    call: TracedCall,
    family: Sequence[TracedCall],
) -> Repair | None:
    """Return what an edit repairs in the turns of a loop that do not agree alone."""
    wrong = [each for each in family if each.first.record not in sides.twins]
    if call not in wrong or len(wrong) == len(family):
        return None
    return _tried(trials, proposal, call, wrong, is_whole=False)


def _tried_at_places(
    trials: Trials, proposal: Proposal, family: Sequence[TracedCall]
) -> Repair | None:
    """Return what an edit repairs for one of the values for which a line does the same."""
    members = {each.first.call for each in family}
    places = {}
    for each in family:
        place = trials.places.get(each.first.call, [])
        if place and {other.first.call for other in place} < members:
            places[place[0].first.call] = place
    for place in list(places.values())[:MOST_TURNS]:
        repair = _tried(trials, proposal, place[0], place, is_whole=False)
        if repair is not None:
            return repair
    return None


def _tried_in_one_turn(
    trials: Trials, proposal: Proposal, call: TracedCall, family: Sequence[TracedCall]
) -> Repair | None:
    """Return what another mask repairs in one turn of a loop, where the others' are right.

    A mask alone has no equal that says in which turn it is wrong.
    """
    if call.first.dtype != "bool" or not 1 < len(family) <= MOST_TURNS:
        return None
    for each in family:
        repair = _tried(trials, proposal, each, [each], is_whole=False)
        if repair is not None and repair.ends:
            return repair
    return None


def _tried_for_callers(
    trials: Trials, proposal: Proposal, call: TracedCall, family: Sequence[TracedCall]
) -> Repair | None:
    """Return what an edit repairs where a function is right, and one of its callers is not.

    Tried with all calls of that caller, then with those of its own caller alone, and so on.
    """
    for alike in _called_alike(family, call):
        repair = _tried(trials, proposal, call, alike, is_whole=False)
        if repair is not None:
            return repair
    return None


def _tried_in_copies(
    trials: Trials, proposal: Proposal, call: TracedCall, family: Sequence[TracedCall]
) -> Repair | None:
    """Return what an edit repairs in all calls alike, where other lines have them too."""
    copies = trials.copies_of(call)
    if not {each.first.call for each in copies} > {each.first.call for each in family}:
        return None
    return _tried(trials, proposal, call, copies)


def _called_alike(
    calls: Sequence[TracedCall], call: TracedCall
) -> Iterator[list[TracedCall]]:
    """Yield fewer and fewer of some calls: those that more of the same lines have led to."""
    stack = stack_of(call.first)
    depths = [alike_inside(stack, stack_of(each.first)) for each in calls]
    for depth in sorted(set(depths))[1:]:
        pairs = zip(calls, depths, strict=True)
        yield [each for each, its_depth in pairs if its_depth >= depth]


def _tried(
    trials: Trials,
    proposal: Proposal,
    call: TracedCall,
    family: Sequence[TracedCall],
    *,
    is_whole: bool = True,
) -> Repair | None:
    """Return what an edit repairs in all calls of a family; None where it is too little.

    ``is_whole``: the family is all that one place of a line has made.
    """
    edits = edits_of(proposal.template, family)
    edit = edits.get(call.first.call)
    if edit is None:
        return None
    agrees, gained = trials.outcome(edits)
    least = 1 if proposal.unlikely == LAYOUT else SEVERAL
    if not agrees and len(gained) < least:
        return None
    if proposal.unlikely == CHANGE and _levels(trials.program, call, edit):
        return None
    if not agrees and proposal.everywhere:
        # a default that is not the reference's is wrong in every layer that takes it
        edits = edits_of(proposal.template, trials.program.calls.values())
        agrees, _ = trials.outcome(edits)
        call = trials.program.calls[min(edits)] if agrees else call
    is_first = trials.goal.first in gained
    return Repair(
        call,
        edit.words,
        agrees,
        len(gained),
        proposal.unlikely,
        is_first,
        proposal.exchanges,
        is_whole=is_whole and len(edits) >= len(family),
        factor=edit.factor,
        scales=edit.scales,
        may_be_chance=trials.goal.is_far and not gained,
        edits=edits,
    )


def _levels(program: TracedProgram, call: TracedCall, edit: Edit) -> bool:
    """Return True for an edit that makes one number of values that differ.

    With a factor that is 1 everywhere all is right where the reference has no such factor.
    """
    made = program.one(call, {}, edit)
    recorded = [program.tensor(row.record) for row, _ in made]
    differ = any(each is not None and not is_one_number(each) for each in recorded)
    return differ and all(is_one_number(tensor) for _, tensor in made)


def best_repair(
    sides: Sides,
    trials: Trials,
    region: Region,
    between: Callable[[], Blamed | None],
) -> Repair | Blamed | None:
    """Return the first edit after which all results agree, else the one that gains most.

    ``between`` is asked after the likely kinds of edits; what it returns ends the search.
    Where nothing but a result that is one number agrees, after many other values that were
    lost, the search goes on: that may be chance.
    """
    likely, best, chance = first_end(
        _of_kinds(sides, trials, region, range(LAYOUT)), None
    )
    if likely is not None:
        return likely
    blamed = between()
    if blamed is not None:
        return blamed
    kinds = range(LAYOUT, ONE_MORE + 1)
    unlikely, best, late = first_end(_of_kinds(sides, trials, region, kinds), best)
    end = unlikely or chance or late
    if end is not None or best is None:
        return end
    proven = _to_the_end(trials, best)
    return best if _moves_the_fault(sides, trials, proven) else proven


def _to_the_end(trials: Trials, repair: Repair) -> Repair:
    """Return a repair with what its trial gives that is not given up.

    In a long loop nothing that was lost may be there for long.
    """
    trials.left = trials.budget
    agrees, _ = trials.outcome(repair.edits, to_the_end=True, is_patient=True)
    return replace(repair, ends=agrees)


def first_end(
    repairs: Iterable[Repair], best: Repair | None
) -> tuple[Repair | None, Repair | None, Repair | None]:
    """Return the repair after which all agrees, if any, the best of the others, and the first
    after which all may agree by chance."""
    chance = None
    for repair in repairs:
        if repair.ends and not repair.may_be_chance:
            # what repairs only a later part does not explain the first
            is_later = best is not None and _is_earlier(best, repair)
            return (best if is_later else repair), best, chance
        if repair.ends:
            chance = chance or repair
        elif best is None or repair.rank > best.rank:
            best = repair
    return None, best, chance


def _is_earlier(one: Repair, other: Repair) -> bool:
    return one.gives_first and not other.gives_first
