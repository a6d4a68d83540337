"""Where two programs of different operators part: by the values on both sides.

A value of one program *agrees* where the other one has the same values somewhere, in
whatever layout. Between values that agree each program may compute in its own operators:
what leaves there counts. Where the results of the two programs differ, the values that
lead to them without passing one that agrees are *parted*; the first of them, which are
made of values that agree, are where the difference begins. Where tensors were kept, the
parted calls are opened (see ``inner_values``) until nothing more is found inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from roundoff.compare.judging.divergence import EXACT
from roundoff.compare.judging.explain import Paired
from roundoff.compare.records.value_sketch import (
    Sketch,
    SketchIndex,
    in_reals,
    sketch_of_tensor,
)
from roundoff.compare.rounding.rounding_bound import unit, working_formats
from roundoff.compare.values.inner_values import open_calls
from roundoff.compare.values.joined_calls import joined_calls
from roundoff.compare.values.loop_turns import joined_turns, stack_of_turn
from roundoff.compare.values.padded_rows import Kept, kept_values
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.ops import operators_that

#: Values agree up to this many roundings of the coarsest working format: what a network
#: adds up to where nothing is wrong.
ROUNDINGS = 1024.0
#: A parted value is the counterpart of one that is this near.
NEAR = 0.5
#: A single number is near to many by chance: one is the counterpart that is this near.
NEAR_ALONE = 0.05
#: A later value is the counterpart only where it is this much nearer than an earlier
#: one, or as near: what is added to it is zero.
MUCH_NEARER = 0.5
AS_NEAR = 1e-6
#: Parted calls are opened this many times, one inside the other.
DEPTH = 3

#: Of what only moves values, these choose them by their size.
PICK = operators_that("add no error") - operators_that("move values")
PICK |= {"masked_fill", "where"}

Test = Callable[[Value], bool]


@dataclass(slots=True)
class Sides:
    """The values of both sides, and which agree.

    Attributes:
        reference: its values.
        candidate: its values.
        limit: the relative distance up to which values agree.
        twins: for each candidate key the nearest reference key that agrees, and how far
            it is.
        agreeing: the reference keys that agree with some candidate's.
        made_up: the values are no recorded ones.
        usual: the limit that it was made with.
        stored: the limit by the formats of what is there before the step.
        learnt: for two shapes how values of them that agree stand in each other: see
            ``learnt_layouts``.
        padding: masks of places that count for something: see ``padded_rows``.
        paired: names of parameters that held the same values in a step before.
        together: names of parameters that hold the same values together, and how many
            elements, by the pairs that do alone: they are looked for once.
    """

    reference: Flow
    candidate: Flow
    limit: float
    twins: dict[int, tuple[int, float]] = field(default_factory=dict)
    agreeing: dict[int, tuple[int, float]] = field(default_factory=dict)
    several: dict[int, int] = field(default_factory=dict)
    made_up: bool = False
    learnt: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Tensor]] = field(
        default_factory=dict
    )
    padding: tuple[Tensor, ...] = ()
    paired: Paired = ()
    together: dict[tuple[tuple[str, str], ...], Paired] = field(default_factory=dict)
    _index: SketchIndex = field(default_factory=lambda: SketchIndex(()))
    usual: float = field(init=False)
    stored: float = field(init=False)

    def __post_init__(self) -> None:
        self.usual = self.limit
        flows = (self.reference, self.candidate)
        leaves = [v for f in flows for v in f.values.values() if not v.is_call]
        self.stored = ROUNDINGS * max((unit(v.row.dtype) for v in leaves), default=0.0)

    @property
    def is_narrow(self) -> bool:
        """True where a program works in a format narrower than fp32, and may."""
        return self.usual > ROUNDINGS * unit("float32")

    def limit_for(self, value: Value) -> float:
        """Return the relative distance up to which a value agrees with another.

        What no operator made is as exact as it is stored, whatever the programs work in.
        """
        return self.limit if value.is_call else min(self.limit, self.stored)

    def all_twins(self, value: Value) -> list[int]:
        """Return the keys of the reference that agree with a candidate's value."""
        if value.sketch is None:
            return []
        if value.key in self.several:
            return [self.several[value.key]]
        near = self._index.near(value.sketch, self.limit_for(value))
        return [key for _, key in near]

    def near_in_reference(self, tensor: Tensor) -> list[int]:
        """Return the keys of the reference that agree with a tensor."""
        real = in_reals(tensor)
        is_float = real.is_floating_point()
        if is_float and not self._index.may_have(real, self.limit):
            return []
        sketch = sketch_of_tensor(tensor)
        if sketch is None:
            return []
        return [key for _, key in self._index.near(sketch, self.limit)]

    def match(self) -> None:
        """Find the values that agree, of calls that were opened too."""
        self.learnt.clear()
        self._index = _index(self.reference)
        self.twins = self._nearest(self.candidate, self._index)
        self.agreeing = self._nearest(self.reference, _index(self.candidate))
        self._join_parts(self.candidate, self.twins)
        self._join_parts(self.reference, self.agreeing)
        self.several = joined_turns(self.candidate, self.twins, self._index, self.limit)
        for key, twin in self.several.items():
            self.twins[key] = (twin, 0.0)
            self.agreeing.setdefault(twin, (key, 0.0))
        others = joined_turns(
            self.reference, self.agreeing, _index(self.candidate), self.limit
        )
        for key, twin in others.items():
            self.agreeing[key] = (twin, 0.0)
            self.twins.setdefault(twin, (key, 0.0))
        self._match_repeated()
        ours = list(kept_values(self.reference, self.padding))
        theirs = list(kept_values(self.candidate, self.padding))
        self._match_without_padding(_kept_sketches(ours), _kept_sketches(theirs))
        self._match_joined_calls(ours, theirs)

    def _match_repeated(self) -> None:
        """Let values agree that one side lays out several times, and the other fewer.

        Such as a table for both halves of a head, which are turned by the same angles.
        """
        ours = _laid_out_once(self.reference, self.agreeing)
        theirs = _laid_out_once(self.candidate, self.twins)
        twins = _first_near(theirs, SketchIndex(ours), self.limit)
        others = _first_near(ours, SketchIndex(theirs), self.limit)
        for key, (twin, distance) in twins.items():
            if twin in others:
                self.twins[key] = (twin, distance)
                self.several[key] = twin
        for key, (twin, distance) in others.items():
            if twin in twins:
                self.agreeing[key] = (twin, distance)

    def _match_without_padding(
        self, ours: Sequence[tuple[int, Sketch]], theirs: Sequence[tuple[int, Sketch]]
    ) -> None:
        """Let values agree that do where a batch is not filled up."""
        if not self.padding:
            return
        twins = _first_near(
            [*_sketches(self.candidate), *theirs], SketchIndex(ours), self.limit
        )
        twins = _first_near(theirs, self._index, self.limit) | twins
        for key in twins.keys() - self.twins.keys():
            self.twins[key] = twins[key]
            self.several[key] = twins[key][0]
        others = _first_near(
            [*_sketches(self.reference), *ours], SketchIndex(theirs), self.limit
        )
        others = _first_near(ours, _index(self.candidate), self.limit) | others
        self.agreeing = others | self.agreeing

    def _match_joined_calls(self, ours: Sequence[Kept], theirs: Sequence[Kept]) -> None:
        """Let values agree that one side makes in two calls, and the other in one."""
        index = SketchIndex([*_sketches(self.candidate), *_kept_sketches(theirs)])
        others = joined_calls(self.reference, ours, self.agreeing, index, self.limit)
        index = SketchIndex([*_sketches(self.reference), *_kept_sketches(ours)])
        twins = joined_calls(self.candidate, theirs, self.twins, index, self.limit)
        for key, twin in others.items():
            self.agreeing[key] = (twin, 0.0)
            self.twins.setdefault(twin, (key, 0.0))
            self.several.setdefault(twin, key)
        for key, twin in twins.items():
            self.twins[key] = (twin, 0.0)
            self.several[key] = twin
            self.agreeing.setdefault(twin, (key, 0.0))

    def _join_parts(self, of: Flow, agreeing: dict[int, tuple[int, float]]) -> None:
        """Let a complex value agree where both its parts do, apart from each other."""
        for key, parts in of.parts.items():
            telling = [k for k in parts if not of.values[k].says_nothing]
            if key not in agreeing and telling and agreeing.keys() >= set(telling):
                agreeing[key] = max((agreeing[k] for k in telling), key=lambda t: t[1])

    def _nearest(self, of: Flow, index: SketchIndex) -> dict[int, tuple[int, float]]:
        """Return for each key of one side the nearest of the other, and its distance."""
        nearest = {}
        for value in of.values.values():
            if value.sketch is None:
                continue
            near = index.near(value.sketch, self.limit_for(value))
            if near:
                nearest[value.key] = (near[0][1], near[0][0])
        return nearest


def _index(flow: Flow) -> SketchIndex:
    return SketchIndex(_sketches(flow))


def _first_near(
    sketches: Iterable[tuple[int, Sketch]], index: SketchIndex, limit: float
) -> dict[int, tuple[int, float]]:
    """Return the nearest in ``index`` of each key of which a sketch is near to one."""
    first: dict[int, tuple[int, float]] = {}
    for key, sketch in sketches:
        near = index.near(sketch, limit)
        if near:
            first.setdefault(key, (near[0][1], near[0][0]))
    return first


def _kept_sketches(kept: Iterable[Kept]) -> list[tuple[int, Sketch]]:
    return [(each.key, each.sketch) for each in kept]


def _sketches(flow: Flow) -> Iterator[tuple[int, Sketch]]:
    for value in flow.values.values():
        if value.sketch is not None:
            yield value.key, value.sketch


def _laid_out_once(flow: Flow, agreeing: Container[int]) -> list[tuple[int, Sketch]]:
    """Return what is laid out in the sketches of calls that do not agree as they are.

    Not of zeros and ones: which stand where is all that these say.
    """
    return [
        (value.key, value.sketch.without_repeats)
        for value in flow.values.values()
        if value.sketch is not None
        and value.is_call
        and value.is_number
        and not value.says_nothing
        and value.key not in agreeing
        and not _has_two_values(value.sketch.without_repeats)
    ]


def _has_two_values(sketch: Sketch) -> bool:
    return sketch.exact and len(np.unique(sketch.values)) == 2


def limit_of(reference: Flow, candidate: Flow) -> float:
    """Return how far values may be apart: by the coarsest format that is wanted."""
    units = map(unit, wanted_formats(reference, candidate))
    return min(ROUNDINGS * max(units, default=0.0), 0.1)


def wanted_formats(reference: Flow, candidate: Flow) -> frozenset[str]:
    """Return the formats whose roundings are no fault of the candidate.

    Those that the reference computes in, and those that the candidate works in. What the
    candidate has in a few calls alone is none of them.
    """
    computed = {
        value.row.dtype
        for value in reference.values.values()
        if value.computes and value.row.dtype
    }
    return frozenset(computed) | working_formats(candidate.step.rows.values())


@dataclass(frozen=True, slots=True)
class Part:
    """One place where the two programs part.

    Attributes:
        reference: the first value that the candidate does not have; None without one.
        candidate: the value that is wrong; None where the candidate has none.
        phase: where the results differ.
        distance: how far the two are apart; infinite where they are of other sizes.
        heads: the first parted values of the candidate.
        wanted: the first parted values of the reference.
        region: the candidate's keys that lead to its results, without ones that agree.
        expected: the reference's.
    """

    reference: Value | None
    candidate: Value | None
    phase: str
    distance: float
    heads: tuple[Value, ...]
    wanted: tuple[Value, ...]
    region: frozenset[int] = frozenset()
    expected: frozenset[int] = frozenset()


def parted(
    sides: Sides, reference: Sequence[int], candidate: Sequence[int], phase: str
) -> Part | None:
    """Return where two results part that do not agree; None where nothing can be named.

    Args:
        sides: the values; calls that parted are opened.
        reference: keys of results of the reference that the candidate lacks.
        candidate: keys of results of the candidate that the reference lacks.
        phase: values of other phases are taken as given.
    """
    for _ in range(DEPTH):
        ours = upstream(sides.reference, reference, _parted_in(sides.agreeing, phase))
        theirs = upstream(sides.candidate, candidate, _parted_in(sides.twins, phase))
        opened = open_calls(sides.reference, sorted(ours))
        opened |= open_calls(sides.candidate, sorted(theirs))
        if not opened:
            break
        sides.match()
    ours = upstream(sides.reference, reference, _parted_in(sides.agreeing, phase))
    theirs = upstream(sides.candidate, candidate, _parted_in(sides.twins, phase))
    used = _used_rightly(sides, ours)
    firsts = first_of(sides.reference, ours - used) or first_of(sides.reference, ours)
    firsts = _made_by_themselves(sides.reference, firsts, sides.agreeing)
    wanted = _with_siblings(sides, firsts)
    heads = first_of(sides.candidate, theirs)
    heads = _made_by_themselves(sides.candidate, heads, sides.twins)
    if not heads:
        # what they hand on agrees by itself: an update is small beside its parameter
        results = [sides.candidate.values[key] for key in candidate if key in theirs]
        heads = sorted(results, key=lambda value: value.order)
    if not heads and not wanted:
        return None
    part = _part(sides, theirs, wanted, heads, phase)
    return replace(part, region=frozenset(theirs), expected=frozenset(ours))


def _used_rightly(sides: Sides, region: set[int]) -> set[int]:
    """Return what the reference also makes values of that the candidate has.

    Such as the table of a rotation that the candidate has in another form: the layers
    before the one at fault use it too.
    """
    flow = sides.reference
    used: set[int] = set()
    for key in sorted(region, key=lambda k: flow.values[k].order, reverse=True):
        readers = flow.readers.get(key, ())
        if not used.isdisjoint(readers) or _leads_to_agreeing(sides, key, region):
            used.add(key)
    return used


def _leads_to_agreeing(sides: Sides, start: int, region: set[int]) -> bool:
    """Return True where numbers that agree are made of a value outside of the region."""
    waiting = [start]
    seen = {start}
    while waiting:
        for key in sides.reference.readers.get(waiting.pop(), ()):
            reader = sides.reference.values[key]
            if key in region or key in seen or reader.row.phase != "forward":
                continue
            if not unit(reader.row.dtype):
                continue  # what is chosen may be the same for other numbers
            if reader.computes and key in sides.agreeing and not reader.says_nothing:
                return True
            seen.add(key)
            waiting.append(key)
    return False


def _with_siblings(sides: Sides, wanted: list[Value]) -> list[Value]:
    """Add what else the calls of these values return and the candidate lacks."""
    calls = {value.row.call for value in wanted if not value.inner}
    siblings = [
        value
        for value in sides.reference.in_order()
        if value.row.call in calls and not value.inner and value.is_call
    ]
    more = [
        value
        for value in siblings
        if value.is_number
        and value.key not in sides.agreeing
        and not value.says_nothing
        and not value.row.name
    ]
    return [*wanted, *(value for value in more if value not in wanted)]


def _parted_in(agreeing: dict[int, tuple[int, float]], phase: str) -> Test:
    def test(value: Value) -> bool:
        if value.key in agreeing or value.says_nothing:
            return False
        # a tensor that was written through a view is made of what was written
        is_made = value.is_call or bool(value.inputs)
        return is_made and value.row.phase == phase

    return test


def upstream(flow: Flow, results: Sequence[int], test: Test) -> set[int]:
    """Return the keys that lead to ``results`` through values that pass a test."""
    region: set[int] = set()
    waiting = [key for key in results if key in flow.values]
    while waiting:
        key = waiting.pop()
        value = flow.values[key]
        if key in region or not (test(value) or key in results):
            continue
        region.add(key)
        waiting += [k for k in value.inputs if k in flow.values]
    return region


def first_of(flow: Flow, region: set[int]) -> list[Value]:
    """Return the values of a region that compute, and are made of none inside it.

    A value that only hands on what comes from outside of the region is looked through.
    """
    firsts = []
    behind: set[int] = set()
    for value in sorted((flow.values[key] for key in region), key=lambda v: v.order):
        makes_numbers = _makes(value) and value.is_number
        is_behind = not behind.isdisjoint(value.inputs)
        if makes_numbers and not is_behind:
            firsts.append(value)
        if makes_numbers or is_behind:
            behind.add(value.key)
    return firsts


def _made_by_themselves(
    flow: Flow, firsts: list[Value], agreeing: Container[int]
) -> list[Value]:
    """Leave out values that others choose that differ: which expert, class or place is taken.

    Whole numbers agree, in whatever order, although others are chosen.
    """
    by_themselves = [v for v in firsts if not _is_chosen(flow, v, agreeing)]
    return by_themselves or firsts


def _is_chosen(flow: Flow, value: Value, agreeing: Container[int]) -> bool:
    """Return True for what is made of whole numbers that a value decides that differs."""
    waiting = [*value.inputs]
    seen: set[int] = set()
    while waiting:
        key = waiting.pop()
        source = flow.values.get(key)
        if source is None or key in seen:
            continue
        seen.add(key)
        inputs = [flow.values[k] for k in source.inputs if k in flow.values]
        is_cast = bool(inputs) and not any(v.is_number for v in inputs)
        if not source.is_number:
            numbers = (v for v in inputs if v.is_number and not v.says_nothing)
            if any(v.is_call and v.key not in agreeing for v in numbers):
                return True
        if not source.is_number or is_cast:
            waiting += source.inputs
    return False


def first_over_turns(
    flow: Flow, first: Value, heads: Sequence[Value], region: set[int]
) -> Value:
    """Return a value that is wrong, or that of ``heads`` before it in later turns of its loop.

    In the first turn of a loop a wrong call may give what is right: of zeros, or of a place
    times zero. Then a call that is made of that one is the first that is wrong. Not where
    it gives in the later turn what it gave before, and that was used: then it was right, by
    another formula.
    """
    place = stack_of_turn(first)
    earlier = (v for v in flow.values.values() if v.order < first.order)
    if any(value.is_call and stack_of_turn(value) == place for value in earlier):
        return first
    of_line = {stack_of_turn(head): head for head in reversed(heads)}
    made_of = upstream(flow, [first.key], lambda value: value.key not in region)
    values = sorted((flow.values[key] for key in made_of), key=lambda v: v.order)
    for value in values:
        head = of_line.get(stack_of_turn(value)) if value.is_call else None
        if head is not None and not _was_right(flow, value, head):
            return head
    return first


def _was_right(flow: Flow, before: Value, head: Value) -> bool:
    """Return True for what an earlier turn has too, and computes numbers with."""
    if not _apart(before, head) <= AS_NEAR:
        return False
    readers = [flow.values[key] for key in flow.readers.get(before.key, ())]
    return any(r.row.phase == "forward" and not r.says_nothing for r in readers)


def _makes(value: Value) -> bool:
    """Return True for an operator that makes values, not one that moves or picks them."""
    return value.computes and (value.operator not in EXACT or value.operator in PICK)


def _part(
    sides: Sides,
    theirs: set[int],
    wanted: list[Value],
    heads: list[Value],
    phase: str,
) -> Part:
    """Choose the value to name: the one nearest to what the reference has first."""
    first = {value.key for value in heads}
    allowed = _made_of_the_same(sides, theirs, wanted) | first
    best: Value | None = None
    twin = wanted[0] if wanted else None
    distance = math.inf
    for key in sorted(allowed, key=lambda k: sides.candidate.values[k].order):
        value = sides.candidate.values[key]
        for other in wanted:
            apart = _apart(other, value)
            near = NEAR if other.row.numel != 1 else NEAR_ALONE
            if apart < near and _is_nearer(apart, distance):
                distance = apart
                best = value
                twin = other
    if best is None and heads:
        best = first_over_turns(sides.candidate, heads[0], heads, theirs)
    return Part(twin, best, phase, distance, tuple(heads), tuple(wanted))


def _is_nearer(apart: float, best: float) -> bool:
    """Return True for much nearer than the best before, and for as near: a later step."""
    return apart < MUCH_NEARER * best or abs(apart - best) <= AS_NEAR * best


def _apart(one: Value, other: Value) -> float:
    if one.sketch is None or other.sketch is None:
        return math.inf
    return one.sketch.distance(other.sketch)


def _made_of_the_same(
    sides: Sides, region: set[int], wanted: Sequence[Value]
) -> set[int]:
    """Return the values of a region that are made of nothing but what ``wanted`` are.

    What agrees and is read there must lead to one of ``wanted`` in the reference.
    """
    sources = upstream(sides.reference, [v.key for v in wanted], lambda _value: True)
    foreign: dict[int, bool] = {}
    for key in sorted(region, key=lambda k: sides.candidate.values[k].order):
        value = sides.candidate.values[key]
        foreign[key] = any(
            foreign[k] if k in foreign else not _leads_to(sides, k, sources)
            for k in value.inputs
        )
    return {
        key
        for key, is_foreign in foreign.items()
        if not is_foreign
        and sides.candidate.values[key].computes
        and sides.candidate.values[key].is_number
    }


def _leads_to(sides: Sides, key: int, sources: set[int]) -> bool:
    """Return True for a candidate's value that agrees with one of ``sources``."""
    value = sides.candidate.values.get(key)
    if value is None or value.says_nothing or not value.is_number:
        return True
    return not sources.isdisjoint(sides.all_twins(value))
