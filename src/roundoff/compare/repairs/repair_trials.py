"""Which small edit of the candidate makes it agree with the reference?

Between two programs by different hands a value that only one of them has says nothing by
itself: it may be another way to compute the same. What can be tried is the repair. Each
call near the place where the two part is edited in small ways (see ``call_edits``), in
all turns of a loop and all layers that the same line computes; what is made of it runs
again. Where the results then agree, that call is at fault, and the edit says how.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from roundoff.compare.blame.blamed_leaves import (
    LAYOUTS,
    PLAIN_LAYOUTS,
    Blamed,
    is_in_order,
    is_right_elsewhere,
    leaves_of,
    of_leaves_alone,
    tried_leaves,
)
from roundoff.compare.records.call_stacks import stack_of
from roundoff.compare.records.parameter_content import (
    FLIPPED,
    REORDERED,
    SHUFFLED,
    TURNED,
    relation,
)
from roundoff.compare.records.parameter_names import name_in_module
from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.records.value_sketch import (
    MASK,
    Sketch,
    SketchIndex,
    in_reals,
    rising,
    sketch_of_tensor,
)
from roundoff.compare.repairs.alike_leaves import is_one_number
from roundoff.compare.repairs.call_edits import proposals
from roundoff.compare.repairs.edits.edited_calls import (
    CHANGE,
    INPUT,
    LAYOUT,
    ONE_MORE,
    Ingredients,
    Insertion,
    Proposal,
    floats_in,
    label_of,
)
from roundoff.compare.values.fault_lines import alike_inside
from roundoff.compare.values.padded_rows import kept_rows, kept_values
from roundoff.compare.values.traced_calls import (
    BEFORE,
    Edit,
    EditStep,
    TracedCall,
    TracedProgram,
    records_in,
)
from roundoff.compare.values.value_flow import Flow, Value, values_of_parameters
from roundoff.compare.values.value_regions import Sides
from roundoff.ops import operators_that, run_in_this_process

#: Calls after the place where two programs part, whose edits are tried: of those that one
#: place of a line makes in turns of a loop or in several layers the first. So many that
#: compute, and so many that move values.
MOST_CALLS = 64
#: Operators that an activation takes where a line writes it out.
MOST_STEPS = 12
#: Calls before it, which only move values.
MOST_MOVES = 48
#: Operators of lines whose values an edit changes without one that the reference has: it
#: is given up. The longest way to write out one operator of the reference that ports take is
#: a turn of a recurrent cell with a layer for each gate: four to eight products, four
#: gates and five calls that use them, 17; normalization takes 9, attention 8. Turns of a
#: loop count once.
PATIENCE = 17
#: What the candidate does to other values, of which each is tried.
MOST_DONE = 6
#: Values that came back, after which a trial is not given up any more.
MUCH = 2 * PATIENCE
#: A result that was put right is this many times nearer than before.
CLEARLY = 8.0
#: The least size that a distance is relative to.
TINY = 1e-30
#: Fewer values that an edit gives may be chance, or that edit itself.
SEVERAL = 2
#: Elements that the trials of one kind of edit may compute together.
BUDGET = 25 * 10**7
#: Times that, where nothing else was found: of a network that runs in turns a trial takes
#: hundreds of calls.
LONGER = 8
#: A call costs as much as so many elements.
CALL = 20_000
#: In another process a call, and an element that goes there and back, costs so many times that.
ELSEWHERE = 10
#: Values of fewer elements agree by chance.
FEWEST = 16
#: A result of so few elements that nothing else confirms has to be as near as this: it is
#: made of the last wide value in a few roundings, and one of hundreds of trials may come
#: near to it by chance.
CLOSE = 2.0**-20
#: Parameters of each side, and what they might hold, that are tried.
MOST_LEAVES = 12
MOST_CONTENTS = 300
#: Numbers that are tried in a call.
MOST_NUMBERS = 24
#: Which parameters are tried, and how: see ``leaf_on_trial``.
ANY = "any"
ODD = "odd"
PLAIN = "plain"
#: Values nearest before a call that it might read instead.
SIMILAR = 10

_MOVE = operators_that("move values")
_DONE = operators_that("pair elements") | operators_that("fill")
_PAIRS = operators_that("pair elements")
_UNARY = operators_that("work element by element") | operators_that("choose values")
_NORMALIZE = operators_that("normalize")
_JOIN = operators_that("join")


#: For results of the candidate the sketches, any of which they should have, and how far
#: they may be from it.
Ends = Mapping[int, Sequence[tuple[Sketch, float]]]


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
        factor: the record of a value that the call's input is multiplied with.
        scales: True where the call's result is multiplied with a number.
        edited: all calls that are edited.
    """

    call: TracedCall
    words: str
    ends: bool
    gained: int
    unlikely: int
    gives_first: bool = False
    exchanges: bool = False
    is_whole: bool = True
    factor: int | None = None
    scales: bool = False
    edited: frozenset[int] = frozenset()

    @property
    def rank(self) -> tuple[bool, int, int]:
        """What gains more is better, the first value that was lost above all."""
        return self.gives_first, self.gained, -self.unlikely


@dataclass(frozen=True, slots=True)
class Region:
    """Where two programs part: the keys that lead to results that differ.

    Attributes:
        parted: the candidate's.
        expected: the reference's.
    """

    parted: Collection[int]
    expected: Collection[int]


@dataclass(slots=True)
class Goal:
    """What has to agree.

    Attributes:
        lost: the reference's values that the candidate lacks.
        first: the first of them.
        limit: how far values that agree may be apart.
        ends: the results of the candidate.
        needed: those without which nothing is right. Of the others each may be another
            value of the same formula, which no repair makes equal: where one is not,
            lost values that are there now speak for it.
        held: what results are to be element by element, where that is known.
        kept: where elements of a result count, if not all do.
        padding: masks of places that count for something: see ``padded_rows``.
        is_trusting: a result of few elements agrees by no chance.
    """

    lost: SketchIndex
    first: int | None
    limit: float
    ends: Ends
    needed: frozenset[int] = frozenset()
    held: Mapping[int, Tensor] = field(default_factory=dict)
    kept: Mapping[int, Tensor] = field(default_factory=dict)
    padding: Sequence[Tensor] = ()
    is_trusting: bool = False

    def is_reached(
        self, right: Collection[int], sure: AbstractSet[int], gained: Collection[int]
    ) -> bool:
        """Return True where these results are right, and that is enough.

        ``sure``: those that are so by no chance.
        """
        if not right or not self.needed.issubset(right):
            return False
        is_enough = self.is_trusting or len(gained) >= SEVERAL
        is_sure = bool(self.needed) and self.needed <= sure
        return len(right) == len(self.ends) or is_enough or is_sure

    def gains(self, tensor: Tensor) -> list[int]:
        """Return the reference's values that a new value is, or is but for its padding."""
        tensor = in_reals(tensor)
        kept = (rows for mask in self.padding for rows in kept_rows(tensor, mask))
        for each in chain([tensor], kept):
            gained = self._gained(each)
            if gained:
                return gained
        return []

    def _gained(self, tensor: Tensor) -> list[int]:
        if not tensor.is_floating_point() or tensor.numel() < FEWEST:
            return []
        if not self.lost.has_numel(tensor.numel()):
            return []
        norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
        # masks count in this norm and not in that of a sketch
        if norm < MASK and not self.lost.has_size(tensor.numel(), norm, self.limit):
            return []
        sketch = sketch_of_tensor(tensor)
        if sketch is None or sketch.constant:
            return []
        return [key for _, key in self.lost.near(sketch, self.limit)[:1]]

    def is_right_end(self, record: int, tensor: Tensor, factor: float = 1.0) -> bool:
        """Return True for a result that agrees, up to ``factor`` times what is allowed."""
        if record not in self.ends:
            return False
        kept = self.kept.get(record)
        if kept is not None and kept.shape == tensor.shape:
            tensor = tensor[kept]
        if record in self.held:
            [(_, limit)] = self.ends[record]
            return apart(self.held[record], tensor) <= factor * limit
        sketch = sketch_of_tensor(tensor)
        if sketch is None:
            return False
        return any(
            wanted.distance(sketch) <= factor * limit
            for wanted, limit in self.ends[record]
        )

    def is_sure_end(self, record: int, tensor: Tensor) -> bool:
        """Return True for a result that agrees not by chance."""
        if record not in self.ends or record in self.held or self.is_trusting:
            return self.is_right_end(record, tensor)
        largest = max(limit for _, limit in self.ends[record])
        is_few = tensor.numel() < FEWEST and largest > CLOSE
        return self.is_right_end(record, tensor, CLOSE / largest if is_few else 1.0)


def apart(wanted: Tensor, tensor: Tensor) -> float:
    """Return how far two tensors are apart element by element, relative to the first."""
    if wanted.shape != tensor.shape:
        return math.inf
    # what stands for "never" is no number to compare
    seen = in_reals(wanted).to(torch.float64).clamp(-MASK, MASK)
    present = in_reals(tensor).to(torch.float64).clamp(-MASK, MASK)
    if present.shape != seen.shape:
        return math.inf
    apart = present - seen
    return float(apart.norm()) / max(float(seen.norm()), TINY)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a trial gave.

    Attributes:
        agrees: all ends agree.
        gained: the lost values that are there.
        price: how much of the budget it took.
    """

    agrees: bool
    gained: frozenset[int]
    price: int


def _what_is_tried(edits: Mapping[int, Edit], leaves: Mapping[int, Tensor]) -> object:
    """Return what two trials have in common that are the same."""
    edited = [
        (call, repr(edit.steps), edit.places, _contents(edit.held))
        for call, edit in sorted(edits.items())
    ]
    return tuple(edited), _contents(leaves)


def _contents(tensors: Mapping[int, Tensor]) -> object:
    return tuple((key, _content(tensor)) for key, tensor in sorted(tensors.items()))


def _content(tensor: Tensor) -> object:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return tensor.shape, tensor.dtype, hash(flat.view(torch.uint8).numpy().tobytes())


@dataclass(slots=True)
class Trials:
    """The candidate's forward pass, edited and run again.

    Attributes:
        budget: elements that the trials of one kind of edit may compute.
        only: the records that matter; None for all.
        whole: where only a part matters, the trials of all: what agrees has to agree
            there too.
        is_unconfirmed: True where what was tried last agreed in the part alone.
        unconfirmed: how often that was so.
        known: what was tried before, with what it cost: several rules try the same.
    """

    program: TracedProgram
    goal: Goal
    left: int = BUDGET
    budget: int = BUDGET
    only: Collection[int] | None = None
    whole: Trials | None = None
    is_unconfirmed: bool = False
    unconfirmed: int = 0
    known: dict[object, _Outcome] = field(default_factory=dict)
    families: Mapping[int, Sequence[TracedCall]] = field(init=False)
    _copies: dict[object, list[TracedCall]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.families = families_of(self.program)

    def copies_of(self, call: TracedCall) -> Sequence[TracedCall]:
        """Return the calls of the program that differ from one in nothing but their inputs."""
        if not self._copies:
            for each in self.program.calls.values():
                self._copies.setdefault(_form_of(each), []).append(each)
        return self._copies[_form_of(call)]

    def outcome(
        self,
        edits: Mapping[int, Edit],
        leaves: Mapping[int, Tensor] | None = None,
        *,
        to_the_end: bool = False,
        is_patient: bool = False,
    ) -> tuple[bool, set[int]]:
        """Return True where all ends agree, and the lost values that are there now.

        With ``to_the_end`` it is given up sooner as long as there is none of these, turns
        of a loop counted each, and not at all once there is one; with ``is_patient`` it
        is never given up.
        """
        agrees, gained = self._known_outcome(edits, leaves, to_the_end, is_patient)
        self.is_unconfirmed = False
        if not agrees or self.whole is None:
            return agrees, gained
        self.whole.left = BUDGET
        agrees, _ = self.whole.outcome(edits, leaves, to_the_end=True)
        self.is_unconfirmed = not agrees
        self.unconfirmed += not agrees
        return agrees, gained

    def alone(self) -> Trials:
        """Return the same trials where what agrees need not agree in the whole."""
        return replace(self, whole=None, left=BUDGET)

    def patient(self) -> Trials:
        """Return the same trials, of which there may be many more."""
        return replace(self, budget=LONGER * BUDGET)

    def trusting(self) -> Trials:
        """Return the same trials where one number that agrees is enough."""
        return replace(self, goal=replace(self.goal, is_trusting=True), known={})

    def _known_outcome(
        self,
        edits: Mapping[int, Edit],
        leaves: Mapping[int, Tensor] | None,
        to_the_end: bool,
        is_patient: bool,
    ) -> tuple[bool, set[int]]:
        """Return what a trial gives; of one that is tried again what it gave, at its price."""
        tried = _what_is_tried(edits, leaves or {})
        key = (tried, to_the_end, is_patient)
        known = self.known.get(key)
        if known is None:
            before = self.left
            agrees, gained = self._outcome(edits, leaves, to_the_end, is_patient)
            if self.left < 0:
                return agrees, gained
            known = _Outcome(agrees, frozenset(gained), before - self.left)
            self.known[key] = known
        else:
            self.left -= known.price
        return known.agrees, {*known.gained}

    def _outcome(
        self,
        edits: Mapping[int, Edit],
        leaves: Mapping[int, Tensor] | None,
        to_the_end: bool,
        is_patient: bool,
    ) -> tuple[bool, set[int]]:
        gained: set[int] = set()
        right = set()
        sure = set()
        waiting = _Waiting(to_the_end, is_patient or self.only is not None)
        values = self.program.flow.values
        factor = 1 if run_in_this_process() else ELSEWHERE
        try:
            for row, tensor in self.program.again(edits, leaves, self.only):
                self.left -= (tensor.numel() + CALL) * factor
                if self.left < 0:
                    return False, set()
                if self.goal.is_right_end(row.record, tensor):
                    right.add(row.record)
                    if self.goal.is_sure_end(row.record, tensor):
                        sure.add(row.record)
                value = values[row.record]
                if not value.computes and value.operator not in _JOIN:
                    continue
                # a turn of what the reference does at once is never one of these
                if to_the_end and not self.goal.lost.has_numel(
                    in_reals(tensor).numel()
                ):
                    continue
                more = set(self.goal.gains(tensor)) - gained
                gained |= more
                waiting.add(value, gained=len(more))
                if waiting.is_over:
                    break
        except CannotRun:
            return False, set()
        is_known = bool(sure or gained)
        return is_known and self.goal.is_reached(right, sure, gained), gained


@dataclass(slots=True)
class _Waiting:
    """How long nothing that was lost has been there again.

    Attributes:
        to_the_end: turns of a loop count each, and nothing is given up after a gain.
            Else nothing is after many.
        forever: nothing is given up at all.
    """

    to_the_end: bool
    forever: bool
    _since: set[object] = field(default_factory=set)
    #: What was followed by something right before, as in another layer.
    _fruitful: set[object] = field(default_factory=set)
    _gained: int = 0

    def add(self, value: Value, *, gained: int) -> None:
        row = value.row
        place = (row.line or row.call, value.operator, row.place)
        self._gained += gained
        if gained:
            self._fruitful |= self._since
            self._since.clear()
        elif self.to_the_end:
            self._since.add(row.record)
        elif place not in self._fruitful:
            self._since.add(place)

    @property
    def is_over(self) -> bool:
        """True where the trial is given up."""
        # what is chosen by what was computed may be no value of the reference for long
        has_much = self._gained > MUCH
        goes_on = self.forever or has_much or (self.to_the_end and self._gained > 0)
        return len(self._since) > PATIENCE * (1 + self.to_the_end) and not goes_on


def trials_of(sides: Sides, ends: Ends, needed: Iterable[int]) -> Trials:
    """Return the candidate's forward pass, to be tried.

    ``ends`` and ``needed``: see ``Goal``.
    """
    lost = _lost(sides)
    sketches = [(v.key, v.sketch) for v in lost if v.sketch is not None]
    keys = {value.key for value in lost}
    kept = kept_values(sides.reference, sides.padding)
    sketches += [(each.key, each.sketch) for each in kept if each.key in keys]
    index = SketchIndex(sketches)
    first = lost[0].key if lost else None
    is_needed = frozenset(needed) & ends.keys()
    goal = Goal(index, first, sides.limit, ends, is_needed, padding=sides.padding)
    return Trials(TracedProgram(sides.candidate), goal)


def _of_kinds(
    sides: Sides, trials: Trials, region: Region, kinds: range
) -> Iterator[Repair]:
    """Yield edits of some kinds, the likely ones first, that give what was lost.

    Only those that make all results agree, or give several values.
    """
    program = trials.program
    families = trials.families
    by_line = _by_line(program)
    ingredients = _ingredients(sides, trials, region)
    waiting = [
        (proposal, call)
        for call in _suspects(sides, trials, region.parted)
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
            if repair is None and proposal.is_copied:
                repair = _tried_in_copies(trials, proposal, call, edited)
            if repair is None and kind != LAYOUT:
                repair = _tried_where_wrong(sides, trials, proposal, call, edited)
            if repair is None and kind == INPUT:
                repair = _tried_for_callers(trials, proposal, call, edited)
            if repair is not None:
                yield repair


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


def _form_of(call: TracedCall) -> object:
    """Return the operator, the constants and the shape of what a call makes."""
    names = dict.fromkeys(records_in(call.parsed), 0)
    constants = repr(_with_names(call.parsed, names))
    return call.first.overload, tuple(call.first.shape or ()), constants


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
        edited=frozenset(edits),
    )


def _levels(program: TracedProgram, call: TracedCall, edit: Edit) -> bool:
    """Return True for an edit that makes one number of values that differ.

    With a factor that is 1 everywhere all is right where the reference has no such factor.
    """
    made = list(program.one(call, {}, edit))
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
    """
    likely, best = _first_end(_of_kinds(sides, trials, region, range(LAYOUT)), None)
    if likely is not None:
        return likely
    blamed = between()
    if blamed is not None:
        return blamed
    kinds = range(LAYOUT, ONE_MORE + 1)
    unlikely, best = _first_end(_of_kinds(sides, trials, region, kinds), best)
    return unlikely or best


def _first_end(
    repairs: Iterable[Repair], best: Repair | None
) -> tuple[Repair | None, Repair | None]:
    """Return the repair after which all agrees, if any, and the best of the others."""
    for repair in repairs:
        if repair.ends:
            # what repairs only a later part does not explain the first
            is_later = best is not None and _is_earlier(best, repair)
            return (best if is_later else repair), best
        if best is None or repair.rank > best.rank:
            best = repair
    return None, best


def _is_earlier(one: Repair, other: Repair) -> bool:
    return one.gives_first and not other.gives_first


def edits_of(
    template: Callable[[TracedCall], Edit | None], calls: Iterable[TracedCall]
) -> dict[int, Edit]:
    edits = {call.first.call: template(call) for call in calls if call.parsed[0]}
    return {call: edit for call, edit in edits.items() if edit is not None}


def _lost(sides: Sides) -> list[Value]:
    """Return the reference's values of the forward pass that the candidate lacks."""
    return [
        value
        for value in sides.reference.in_order()
        if value.computes
        and value.is_number
        and value.key not in sides.agreeing
        and not value.says_nothing
        and not value.inner
        and value.row.phase == "forward"
    ]


# -- which calls ---------------------------------------------------------------------


def _suspects(
    sides: Sides, trials: Trials, region: Collection[int]
) -> list[TracedCall]:
    """Return the calls whose edits are tried: the first of a region, and moves before it."""
    flow = sides.candidate
    records = {flow.values[key].row.record for key in region}
    parted = sorted(
        {flow.values[r].row.call for r in records if flow.values[r].row.is_call}
    )
    program = trials.program
    families = trials.families
    calls = [program.calls[call] for call in parted if call in program.calls]
    firsts = _nearest(one_of_each(calls, families))
    starts = {row.record for call in calls for row in call.rows}
    before = [program.calls[n] for n in _moves_before(flow, program, starts)]
    moves = list(islice(one_of_each(before, families), MOST_MOVES))
    masks = [program.calls[n] for n in _masks_before(flow, program, records)]
    masks = list(islice(one_of_each(masks, families), MOST_MOVES))
    chosen = {call.first.call: call for call in (*firsts, *moves, *masks)}
    far = [program.calls[n] for n in _moves_before_scaling(flow, program, moves)]
    last = [c for c in one_of_each(far, families) if c.first.call not in chosen]
    # what agrees is right, unless nothing behind it is wrong: the nearest first
    nearest = list(chosen.values())
    if trials.only is None:
        nearest.sort(key=lambda call: call.first.call)
    # with one of the last all runs again
    return [*nearest, *last[:MOST_MOVES]]


def _nearest(calls: Iterable[TracedCall]) -> list[TracedCall]:
    """Return the first calls that compute, and as many that only move values.

    A product over named axes moves its inputs half a dozen times.
    """
    left = {False: MOST_CALLS, True: MOST_CALLS}
    nearest = []
    for call in calls:
        is_move = call.first.base_operator in _MOVE
        if left[is_move]:
            left[is_move] -= 1
            nearest.append(call)
    return nearest


def _moves_before(flow: Flow, program: TracedProgram, records: set[int]) -> list[int]:
    """Return the calls that move what these read, and those that made it."""
    moves: dict[int, None] = {}
    waiting = [i for record in sorted(records) for i in flow.values[record].row.inputs]
    seen = set(records)
    while waiting:
        record = waiting.pop(0)
        if record in seen or record not in flow.values:
            continue
        seen.add(record)
        row = flow.values[record].row
        if row.call in program.calls:
            moves[row.call] = None
        if not row.is_call or row.base_operator in _MOVE:
            waiting += row.inputs
    return list(moves)


def _moves_before_scaling(
    flow: Flow, program: TracedProgram, near: Sequence[TracedCall]
) -> list[int]:
    """Return the calls that move what other calls scale or shift before it is read.

    Pictures that are cut and turned lie as they do until their mean is taken off.
    """
    scaling = {
        row.record
        for call in near
        if call.first.base_operator in _PAIRS | _UNARY
        for row in call.rows
        if flow.values[row.record].is_number
    }
    far = [program.calls[n] for n in _moves_before(flow, program, scaling)]
    return [each.first.call for each in far if each.first.base_operator in _MOVE]


def _masks_before(
    flow: Flow, program: TracedProgram, records: Collection[int]
) -> list[int]:
    """Return the calls that make what a region chooses by.

    Of two masks as many elements may be true in other places.
    """
    masks: dict[int, None] = {}
    waiting = [i for record in sorted(records) for i in flow.values[record].row.inputs]
    seen = set(records)
    while waiting:
        record = waiting.pop(0)
        row = flow.values[record].row if record in flow.values else None
        if record in seen or row is None or row.dtype != "bool":
            continue
        seen.add(record)
        if row.call in program.calls:
            masks[row.call] = None
        waiting += row.inputs
    return list(masks)


def families_of(program: TracedProgram) -> dict[int, list[TracedCall]]:
    """Return for each call those that the same place of the same line has made.

    The calls of a line repeat themselves: in turns of a loop, in layers of one class; of a
    line that computes something else for one caller, in those of each caller.
    """
    families: dict[int, list[TracedCall]] = {}
    for call in program.calls.values():
        if call.first.line is None:
            families[call.first.call] = [call]
    for calls in _by_line(program).values():
        for repeated in _repeating(calls):
            period = _period([call.first.operator for call in repeated])
            for place in range(period):
                family = repeated[place::period]
                families.update((call.first.call, family) for call in family)
    return families


def _repeating(calls: list[TracedCall]) -> Iterable[list[TracedCall]]:
    """Return the calls of a line, by who called it where all of them do not repeat."""
    if _period([call.first.operator for call in calls]) < len(calls):
        return [calls]
    by_caller: dict[tuple[str, ...], list[TracedCall]] = defaultdict(list)
    for call in calls:
        by_caller[stack_of(call.first)].append(call)
    return by_caller.values()


def _by_line(program: TracedProgram) -> dict[str, list[TracedCall]]:
    """Return the calls of each line that is known."""
    by_line: dict[str, list[TracedCall]] = defaultdict(list)
    for call in program.calls.values():
        if call.first.line is not None:
            by_line[call.first.line].append(call)
    return by_line


def _period(names: Sequence[str]) -> int:
    """Return after how many names a sequence repeats itself."""
    for period in range(1, len(names) // 2 + 1):
        if len(names) % period == 0 and all(
            name == names[place % period] for place, name in enumerate(names)
        ):
            return period
    return len(names)


def one_of_each(
    calls: Sequence[TracedCall], families: Mapping[int, Sequence[TracedCall]]
) -> Iterator[TracedCall]:
    seen: set[int] = set()
    for call in calls:
        first = families[call.first.call][0].first.call
        if first not in seen:
            seen.add(first)
            yield call


# -- what edits are made of ----------------------------------------------------------


def _ingredients(sides: Sides, trials: Trials, region: Region) -> Ingredients:
    program = trials.program
    reference = sides.reference
    theirs = TracedProgram(reference)
    near = _calls_near(reference, theirs, region.expected)
    similar = _Similar(program)

    def shapes(record: int) -> tuple[int, ...]:
        row = sides.candidate.step.rows.get(record)
        return tuple(row.shape or ()) if row is not None else ()

    @cache
    def mask_format(record: int) -> str | None:
        row = sides.candidate.step.rows.get(record)
        values = None if row is None else sides.candidate.tensor(record)
        if row is None or values is None or not values.numel():
            return None
        is_truth = values.dtype == torch.bool
        return row.dtype if is_truth or _are_zeros_and_ones(values) else None

    def maker(record: int) -> TracedCall | None:
        row = sides.candidate.step.rows.get(record)
        return None if row is None else program.calls.get(row.call)

    by_line = _by_line(program)

    def siblings(call: TracedCall) -> list[Any]:
        return [each.parsed for each in by_line.get(call.first.line or "", ())]

    return Ingredients(
        list(theirs.calls.values()),
        constants=_numbers_in(near, reference),
        inserted=[
            *_insertable(reference, near),
            *_done_to_others(sides.candidate, program, region.parted),
        ],
        activations=_activations(reference, region.expected),
        is_read_again=lambda record: len(sides.candidate.readers.get(record, ())) > 1,
        shapes=shapes,
        mask_format=mask_format,
        maker=maker,
        written_out=_WrittenOut(trials).source,
        siblings=siblings,
        similar=similar.to,
    )


class _WrittenOut:
    """What a line computes of one value in several operators, element by element."""

    def __init__(self, trials: Trials) -> None:
        self._program = trials.program
        self._rows = trials.program.flow.step.rows
        self._families = trials.families

    def source(self, call: TracedCall) -> int | None:
        """Return the value that a call is the last to compute with; None of any other."""
        flow = self._program.flow
        readers = flow.readers.get(call.rows[0].record, ())
        rows = [flow.values[key].row for key in readers]
        if not self._is_step(call) or any(self._is_beside(call, row) for row in rows):
            return None
        seen = [call]
        sources: set[int] = set()
        waiting = [call]
        while waiting and len(seen) <= MOST_STEPS:
            for record in records_in(waiting.pop().parsed):
                row = self._rows.get(record)
                made = None if row is None else self._program.calls.get(row.call)
                is_inside = row is not None and self._is_beside(call, row)
                if made is None or not is_inside or self._is_turn_of(seen, made):
                    sources.add(record)
                elif made not in seen:
                    seen.append(made)
                    waiting.append(made)
        if waiting or len(sources) != 1 or len(seen) < 2:
            return None
        [source] = sources
        row = self._rows.get(source)
        is_alike = row is not None and row.shape == call.first.shape
        return source if is_alike else None

    def _is_step(self, call: TracedCall) -> bool:
        name = call.first.base_operator
        return name in _UNARY | _PAIRS and len(call.rows) == 1

    def _is_beside(self, call: TracedCall, row: RecordedRow) -> bool:
        made = self._program.calls.get(row.call)
        is_step = made is not None and self._is_step(made)
        return is_step and row.line is not None and row.line == call.first.line

    def _is_turn_of(self, seen: Sequence[TracedCall], made: TracedCall) -> bool:
        """Return True for what the same place of the line has made in another turn."""
        family = self._families.get(made.first.call)
        return any(
            each is not made and self._families.get(each.first.call) is family
            for each in seen
        )


def _are_zeros_and_ones(values: Tensor) -> bool:
    ones = values == 1
    zeros = values == 0
    return bool((ones | zeros).all() and ones.any() and zeros.any())


def _calls_near(
    flow: Flow, program: TracedProgram, wanted: Collection[int]
) -> list[TracedCall]:
    """Return the first calls of a region of one program."""
    calls = sorted({flow.values[key].row.call for key in wanted})
    return [program.calls[call] for call in calls if call in program.calls][:MOST_CALLS]


def _numbers_in(calls: Sequence[TracedCall], flow: Flow) -> list[float]:
    """Return the numbers in the arguments of calls, and the roots of their sizes."""
    numbers: dict[float, None] = {}
    for call in calls:
        for value in floats_in(call.parsed):
            numbers[value] = None
        if call.first.base_operator not in _MOVE:
            for record in records_in(call.parsed)[:1]:
                shape = flow.step.rows[record].shape if record in flow.step.rows else ()
                for size in (shape or ())[-1:]:
                    if size > 1:
                        numbers[float(size) ** -0.5] = None
    return list(numbers)[:MOST_NUMBERS]


def _activations(flow: Flow, expected: Collection[int]) -> list[str]:
    """Return the activations of a region, those inside of its calls included."""
    computed = {flow.values[key].operator for key in expected}
    return sorted(computed & operators_that("activate"))


def _insertable(flow: Flow, calls: Sequence[TracedCall]) -> Iterator[Insertion]:
    """Yield the reference's calls that a value may go through: activations and norms."""
    seen: set[str] = set()
    for call in calls:
        if call.first.base_operator not in _UNARY | _NORMALIZE:
            continue
        insertion = _insertion(flow, call)
        if insertion is None:
            continue
        key = f"{insertion.step.overload} {insertion.step.arguments}"
        if key not in seen or insertion.held:
            seen.add(key)
            yield insertion


def _done_to_others(
    flow: Flow, program: TracedProgram, parted: Collection[int]
) -> Iterator[Insertion]:
    """Yield what the candidate does to values of a region with others that learn nothing.

    Of blocks that are masked alike one may be left as it is.
    """
    learnt = values_of_parameters(flow)
    by_line: dict[object, TracedCall] = {}
    for call in _calls_near(flow, program, parted):
        records = list(dict.fromkeys(records_in(call.parsed)))
        is_masking = call.first.base_operator in _DONE and len(records) == 2
        if is_masking and records[0] in learnt and records[1] not in learnt:
            by_line.setdefault((call.first.line, call.first.overload), call)
    for call in islice(by_line.values(), MOST_DONE):
        insertion = _insertion(flow, call)
        if insertion is not None:
            yield insertion


def _insertion(flow: Flow, call: TracedCall) -> Insertion | None:
    """Return a call with its first input left open; None where its others were not kept."""
    records = list(dict.fromkeys(records_in(call.parsed)))
    overload = call.first.overload
    if not records or overload is None:
        return None
    names = {records[0]: BEFORE}
    held: dict[int, Tensor] = {}
    for record in records[1:]:
        tensor = flow.tensor(record)
        if tensor is None:
            return None
        names[record] = BEFORE - 1 - len(held)
        held[names[record]] = tensor
    rows = flow.step.rows
    read = records_in(call.parsed)
    shapes = tuple(tuple(rows[r].shape or ()) for r in read if r in rows)
    step = EditStep(overload, _with_names(call.parsed, names), shapes)
    name = call.first.base_operator
    words = f"{name} ({call.first.line})" if call.first.line else name
    shape = tuple(call.first.shape or ()) if held else ()
    return Insertion(step, held, words, shape)


def _with_names(value: object, names: Mapping[int, int]) -> object:
    if isinstance(value, dict):
        if "record" in value:
            return {"record": names[value["record"]]}
        return {key: _with_names(v, names) for key, v in value.items()}
    if isinstance(value, list):
        return [_with_names(v, names) for v in value]
    return value


class _Similar:
    """Values that a call might read in place of another: of the same shape and format.

    A choice is made for one call and holds for its family: the value that the same place
    of the same line made last before each of them, or a parameter of the same name in
    another layer.
    """

    def __init__(self, program: TracedProgram) -> None:
        self._rows = program.flow.step.rows
        self._labels: dict[int, object] = {}
        self._by_label: dict[object, list[RecordedRow]] = defaultdict(list)
        by_line: dict[object, list[TracedCall]] = defaultdict(list)
        for call in program.calls.values():
            by_line[call.first.line].append(call)
        for line, calls in by_line.items():
            period = _period([call.first.operator for call in calls])
            for number, call in enumerate(calls):
                for row in call.rows:
                    self._label(row, (line, number % period, row.place))
        for row in self._rows.values():
            if not row.is_call and row.name:
                self._label(row, label_of(row))
        self._alike: dict[object, list[RecordedRow]] = defaultdict(list)
        for row in self._rows.values():
            if row.record in self._labels:
                self._alike[_form(row)].append(row)

    def _label(self, row: RecordedRow, label: object) -> None:
        self._labels[row.record] = label
        self._by_label[label].append(row)

    def to(
        self, call: TracedCall, record: int
    ) -> Iterator[Callable[[TracedCall], int | None]]:
        """Yield choices of another value for what a call reads, the nearest first."""
        read = self._rows.get(record)
        if read is None or record not in self._labels:
            return
        rows = [row for row in self._alike[_form(read)] if _fits(row, read, call)]
        rows.sort(key=lambda row: abs(row.record - record))
        labels = dict.fromkeys(self._labels[row.record] for row in rows)
        for label in list(labels)[:SIMILAR]:
            yield self._chooser(label)

    def _chooser(self, label: object) -> Callable[[TracedCall], int | None]:
        rows = self._by_label[label]

        def choose(call: TracedCall) -> int | None:
            end = call.first.record
            if not rows[0].is_call:
                return min(rows, key=lambda row: abs(row.record - end)).record
            before = [row.record for row in rows if row.record < end]
            return before[-1] if before else None

        return choose


def _form(row: RecordedRow) -> object:
    return tuple(row.shape or ()), row.dtype


def _fits(row: RecordedRow, read: RecordedRow, call: TracedCall) -> bool:
    """Return True for another value than the one read, which is there before the call."""
    return row is not read and (not row.is_call or row.record < call.first.record)


def leaf_on_trial(
    sides: Sides,
    trials: Trials,
    region: Region,
    *,
    several: int | None = None,
    of: str = ANY,
) -> Blamed | None:
    """Return the parameter with which all results agree once it holds other values.

    With ``several``: with which so many values agree, where other parameters are wrong
    too. ``of`` is ``ODD`` for those alone that hold the elements of one of the
    reference's in places that no order of axes explains, ``PLAIN`` for none but such
    orders.
    """
    trials.left = BUDGET
    ours = leaves_of(sides.reference, region.expected)
    ours += _ready_made(sides.reference, region.expected)
    calls = _suspects(sides, trials, region.parted)
    read = [row.record for call in calls for row in call.rows]
    misplaced = leaves_of(sides.candidate, _misplaced(sides, region.parted))
    theirs = leaves_of(sides.candidate, read)

    def agrees(leaf: Value, other: Tensor) -> bool:
        if trials.left < 0:
            return False
        ends, gained = trials.outcome({}, {leaf.key: other})
        if ends or (several is not None and len(gained) >= several):
            return True
        if not trials.is_unconfirmed and len(gained) < SEVERAL:
            return False
        # what a loader does wrong to one layer it does to the others
        alike = _alike(sides.candidate, leaf, other)
        return len(alike) > 1 and trials.outcome({}, alike)[0]

    # what is right where another call reads it is not what the loader filled wrongly
    theirs = [leaf for leaf in theirs if not is_right_elsewhere(sides, leaf)]
    theirs = [*dict.fromkeys((*misplaced, *theirs))]
    if of == ODD:
        theirs = [leaf for leaf in theirs if _is_odd(sides, leaf)]
    theirs = theirs[:MOST_LEAVES]
    ours = [*dict.fromkeys((*_twins_of(sides, theirs), *ours))][:MOST_LEAVES]
    kinds = PLAIN_LAYOUTS if of == PLAIN else LAYOUTS
    return tried_leaves(sides, ours, theirs, agrees, MOST_CONTENTS, kinds)


def _misplaced(sides: Sides, region: Collection[int]) -> list[int]:
    """Return what a region reads, if any of it has the right elements in other places.

    Then the others may have to stand so too.
    """
    flow = sides.candidate
    waiting = [i for key in region for i in flow.values[key].inputs if i not in region]
    seen = set()
    read = []
    while waiting:
        value = flow.values.get(waiting.pop())
        if value is None or value.key in seen or not value.is_call:
            continue
        seen.add(value.key)
        if not value.computes or value.operator in _MOVE:
            waiting += value.inputs
        elif value.key in sides.twins:
            read.append(value)
    if all(is_in_order(sides, value) for value in read):
        return []
    return sorted(value.key for value in read)


def _twins_of(sides: Sides, leaves: Sequence[Value]) -> list[Value]:
    """Return the reference's parameters that hold what these do, in some order."""
    values = sides.reference.values
    twins = [values[key] for leaf in leaves for key in sides.all_twins(leaf)]
    return [twin for twin in twins if twin.row.name and not twin.is_call]


def _alike(flow: Flow, leaf: Value, other: Tensor) -> dict[int, Tensor]:
    """Return what parameters of the same name in other layers hold in the order of one's.

    Args:
        flow: of the candidate.
        leaf: the parameter.
        other: its elements in another order; of anything else nothing is made.
    """
    held = flow.tensor(leaf.key)
    if held is None:
        return {}
    places = rising(held)
    moved = rising(other)
    if not torch.equal(held.flatten()[places], other.flatten()[moved]):
        return {}
    order = torch.empty_like(places)
    order[moved] = places
    alike = {}
    for value in parameters_alike(flow, leaf):
        tensor = flow.tensor(value.key)
        if tensor is not None:
            alike[value.key] = tensor.flatten()[order].reshape(held.shape)
    return alike


def parameters_alike(flow: Flow, leaf: Value) -> list[Value]:
    """Return the parameters of one's name and shape in all layers, with itself."""
    return [
        value
        for value in flow.values.values()
        if value.row.name
        and not value.is_call
        and value.row.shape == leaf.row.shape
        and _have_one_name(value.row, leaf.row)
    ]


def _have_one_name(one: RecordedRow, other: RecordedRow) -> bool:
    """Return True for the same parameter of two layers, or of two models of one class."""
    last = name_in_module(one.name or "")
    return label_of(one) == label_of(other) or (
        bool(last) and last == name_in_module(other.name or "")
    )


def _ready_made(flow: Flow, region: Collection[int]) -> list[Value]:
    """Return what a region makes of parameters alone: a loader may store it ready."""
    values = [flow.values[key] for key in region]
    ready = [
        value for value in values if value.computes and of_leaves_alone(flow, value)
    ]
    return sorted(ready, key=lambda value: -value.order[0])


def _is_odd(sides: Sides, leaf: Value) -> bool:
    """Return True for the elements of a parameter of the reference in unlikely places."""
    held = sides.candidate.tensor(leaf.key)
    if held is None or held.dim() < 2:
        return False
    kinds = set()
    for key in sides.all_twins(leaf):
        tensor = sides.reference.tensor(key)
        if tensor is not None:
            how = relation(tensor, held)
            kinds.add(SHUFFLED if how is None else how.kind)
    return bool(kinds) and kinds <= {FLIPPED, REORDERED, SHUFFLED, TURNED}
