"""The candidate's forward pass, edited and run again: what a trial gives, and when it ends.

A trial ends soon where nothing comes back that was lost, and the trials of a kind where they
have made so many calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from roundoff.compare.records.call_stacks import stack_of
from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.records.value_sketch import SketchIndex, in_reals
from roundoff.compare.repairs.goals import (
    FEWEST,
    MOST_IN_LOSS,
    SEVERAL,
    Ends,
    Goal,
    apart,
)
from roundoff.compare.values.padded_rows import kept_values
from roundoff.compare.values.traced_calls import (
    Edit,
    TracedCall,
    TracedProgram,
    records_in,
)
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Sides
from roundoff.ops import operators_that, run_in_this_process

#: Operators of lines whose values an edit changes without one that the reference has: it
#: is given up. The longest way to write out one operator of the reference that ports take is
#: a turn of a recurrent cell with a layer for each gate: four to eight products, four
#: gates and five calls that use them, 17; normalization takes 9, attention 8. Turns of a
#: loop count once.
PATIENCE = 17
#: Values that came back, after which a trial is not given up any more.
MUCH = 2 * PATIENCE
#: Elements that the trials of one kind of edit may compute together.
BUDGET = 25 * 10**7
#: Times that, where nothing else was found: of a network that runs in turns a trial takes
#: hundreds of calls.
LONGER = 8
#: Trials that go on for nothing where several values came back at first: behind them a
#: recurrent layer may have hundreds of calls that are none of the reference's.
CHANCES = 3
#: A call costs as much as so many elements.
CALL = 20_000
#: In another process a call, and an element that goes there and back, costs so many times that.
ELSEWHERE = 10
_JOIN = operators_that("join")


@dataclass(frozen=True, slots=True)
class Region:
    """Where two programs part: the keys that lead to results that differ.

    Attributes:
        parted: the candidate's.
        expected: the reference's.
    """

    parted: Collection[int]
    expected: Collection[int]


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
        chances: trials that may still go on though nothing came back for long.
        never_give_up: all do: a loss whose formula is another one has no value of the
            reference before its end.
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
    chances: int = CHANCES
    never_give_up: bool = False
    #: Of each call those that its place of its line has made.
    families: Mapping[int, Sequence[TracedCall]] = field(default_factory=dict)
    #: Of each call those that stand at the same place in other runs of its line.
    places: Mapping[int, Sequence[TracedCall]] = field(default_factory=dict)
    _copies: dict[object, list[TracedCall]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if not self.families:
            self.families = families_of(self.program)
            self.places = places_of_runs(self.program)

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

    def changes_results(self, leaves: Mapping[int, Tensor]) -> bool:
        """Return True where a result is another one with other values in some places.

        What stands in padding may be anything in two right programs.
        """
        limit = self.goal.limit
        try:
            with torch.no_grad():
                for row, tensor in self.program.again({}, leaves, self.only):
                    recorded = self.program.tensor(row.record)
                    if row.record not in self.goal.ends or recorded is None:
                        continue
                    if apart(recorded, tensor) > limit:
                        return True
        except CannotRun:
            return True
        return False

    def alone(self) -> Trials:
        """Return the same trials where what agrees need not agree in the whole."""
        return replace(self, whole=None, left=BUDGET)

    def of_part(self, only: Collection[int]) -> Trials:
        """Return trials in which nothing but these records counts, with what is left of the
        budget."""
        return replace(self, only=only, whole=None, budget=BUDGET, known={})

    def patient(self) -> Trials:
        """Return the same trials, of which there may be many more, each to its end."""
        return replace(self, budget=LONGER * BUDGET, never_give_up=True, known={})

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
            with torch.no_grad():
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
        is_patient |= self.never_give_up or self.only is not None
        waiting = _Waiting(to_the_end, is_patient)
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
                if more and _is_opposite(self.program.tensor(row.record), tensor):
                    more = set()
                gained |= more
                waiting.add(value, gained=len(more))
                if waiting.is_over:
                    if len(gained) < SEVERAL or not self.chances:
                        break
                    self.chances -= 1
                    waiting.forever = True
                    factor = 0
        except CannotRun:
            return False, set()
        is_known = bool(sure or gained)
        return is_known and self.goal.is_reached(right, sure, gained), gained


def _is_opposite(recorded: Tensor | None, tensor: Tensor) -> bool:
    """Return True for what a program has with the other sign: it says nothing new.

    >>> _is_opposite(torch.tensor([1.0, -2.0]), torch.tensor([-1.0, 2.0]))
    True
    """
    if recorded is None or recorded.shape != tensor.shape or tensor.dtype == torch.bool:
        return False
    return torch.equal(recorded, -tensor)


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


def trials_of(
    sides: Sides, ends: Ends, needed: Iterable[int], expected: Collection[int] = ()
) -> Trials:
    """Return the candidate's forward pass, to be tried.

    ``ends`` and ``needed``: see ``Goal``; ``expected``: what leads from what agrees to the
    results in the reference.
    """
    lost = _lost(sides)
    between = [value for value in lost if value.key in expected]
    between = [value for value in between if (value.numel or 0) >= FEWEST]
    sketches = [(v.key, v.sketch) for v in lost if v.sketch is not None]
    keys = {value.key for value in lost}
    kept = kept_values(sides.reference, sides.padding)
    sketches += [(each.key, each.sketch) for each in kept if each.key in keys]
    index = SketchIndex(sketches)
    first = lost[0].key if lost else None
    is_needed = frozenset(needed) & ends.keys()
    wanted = [sketch for end in ends.values() for sketch, _ in end]
    are_few = all(sketch.numel < FEWEST for sketch in wanted)
    goal = Goal(
        index,
        first,
        sides.limit,
        ends,
        is_needed,
        padding=sides.padding,
        is_far=are_few and len(between) > MOST_IN_LOSS,
    )
    return Trials(TracedProgram(sides.candidate), goal)


def _form_of(call: TracedCall) -> object:
    """Return the operator, the constants and the shape of what a call makes."""
    names = dict.fromkeys(records_in(call.parsed), 0)
    constants = repr(with_names(call.parsed, names))
    return call.first.overload, tuple(call.first.shape or ()), constants


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


def families_of(program: TracedProgram) -> dict[int, list[TracedCall]]:
    """Return for each call those that the same place of the same line has made.

    The calls of a line repeat themselves: in turns of a loop, in layers of one class; of a
    line that computes something else for one caller, in those of each caller.
    """
    families: dict[int, list[TracedCall]] = {}
    for call in program.calls.values():
        if call.first.line is None:
            families[call.first.call] = [call]
    for calls in calls_by_line(program).values():
        for repeated in _repeating(calls):
            period = period_of([call.first.operator for call in repeated])
            for place in range(period):
                family = repeated[place::period]
                families.update((call.first.call, family) for call in family)
    return families


def places_of_runs(program: TracedProgram) -> dict[int, list[TracedCall]]:
    """Return for each call those that stand at the same place in other runs of its line.

    In one run a line may call one function for several values, of which one is meant: the
    turns of a loop over a tuple are run after run of the line inside of the loop, and one
    run of a line that has the whole loop. Without those of lines whose runs differ.
    """
    runs: dict[str, list[list[TracedCall]]] = defaultdict(list)
    last: dict[str, int] = {}
    calls = list(program.calls.values())
    stacks = [stack_of(call.first) for call in calls]
    for number, call in enumerate(calls):
        line = call.first.line
        if line is None:
            continue
        stack = stacks[number]
        since = stacks[last[line] : number] if line in last else []
        if not since or any(each[: len(stack)] != stack for each in since):
            runs[line].append([])
        runs[line][-1].append(call)
        last[line] = number
    places: dict[int, list[TracedCall]] = {}
    for of_line in runs.values():
        names = [[call.first.operator for call in run] for run in of_line]
        if any(each != names[0] for each in names):
            continue
        for family in zip(*of_line, strict=True):
            places.update((call.first.call, list(family)) for call in family)
    return places


def _repeating(calls: list[TracedCall]) -> Iterable[list[TracedCall]]:
    """Return the calls of a line, by who called it where all of them do not repeat."""
    if period_of([call.first.operator for call in calls]) < len(calls):
        return [calls]
    by_caller: dict[tuple[str, ...], list[TracedCall]] = defaultdict(list)
    for call in calls:
        by_caller[stack_of(call.first)].append(call)
    return by_caller.values()


def calls_by_line(program: TracedProgram) -> dict[str, list[TracedCall]]:
    """Return the calls of each line that is known."""
    by_line: dict[str, list[TracedCall]] = defaultdict(list)
    for call in program.calls.values():
        if call.first.line is not None:
            by_line[call.first.line].append(call)
    return by_line


def calls_by_function(program: TracedProgram) -> dict[str, list[TracedCall]]:
    """Return the calls of each function that is called from a line, by who calls it."""
    by_callers: dict[str, list[TracedCall]] = defaultdict(list)
    for call in program.calls.values():
        if call.first.callers:
            by_callers[call.first.callers].append(call)
    return by_callers


def period_of(names: Sequence[str]) -> int:
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


def with_names(value: object, names: Mapping[int, int]) -> object:
    if isinstance(value, dict):
        if "record" in value:
            return {"record": names[value["record"]]}
        return {key: with_names(v, names) for key, v in value.items()}
    if isinstance(value, list):
        return [with_names(v, names) for v in value]
    return value
