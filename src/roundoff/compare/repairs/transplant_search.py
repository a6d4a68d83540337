"""Which values are given which of the reference's, in which order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from roundoff.compare.blame.same_layouts import same_layout
from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.repairs.goals import apart
from roundoff.compare.repairs.parts_of_turns import (
    Turns,
    cut_in,
    joined,
    nested,
    one_of_each_turn,
)
from roundoff.compare.repairs.rejoins import Pairs, Rejoin, Transplant
from roundoff.compare.repairs.replaceable_values import (
    before,
    is_moved,
    is_taken_away,
    made_of,
    may_be_replaced,
    only_input,
    reading,
)
from roundoff.compare.repairs.trials import Trials, families_of
from roundoff.compare.values.learnt_layouts import (
    Layout,
    layouts_for,
    orders_of,
    stand_in,
)
from roundoff.compare.values.loop_turns import line_of_any_size
from roundoff.compare.values.other_padding import (
    behind_other_padding,
    pairs_of_paddings,
)
from roundoff.compare.values.traced_calls import TracedProgram
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Part, Sides, upstream
from roundoff.ops import operators_that

#: What one value is given, at most.
MOST_GIVEN = 64
#: And parts of a larger value, at most.
MOST_IN_PARTS = 24
#: Values that agree, before the first that does not, which may stand in the wrong place.
MOST_BEFORE = 32
_MOVE = operators_that("move values")
#: Nothing is done by one that is applied twice.
_CLIP = operators_that("clip codes")
_PRODUCTS = operators_that("multiply two matrices")
_FORWARD = "forward"
_OPPOSITE = "neg"


class Search:
    """The values that are replaced, and what each may be given."""

    def __init__(self, sides: Sides, part: Part, trials: Trials) -> None:
        self._sides = sides
        self._part = part
        self._trials = trials
        self._turns = Turns(sides.candidate, trials.families)
        theirs = TracedProgram(sides.reference)
        self._other_turns = Turns(sides.reference, families_of(theirs))
        self._paddings = [*pairs_of_paddings(sides.padding)]
        self._lost = self._lost_by_size()
        self._kinds: dict[object, list[Value]] = {}
        self._loops: dict[int, list[Sequence[Value]]] | None = None

    def are_of_the_same(self, value: Value, twin: Value) -> bool:
        """Return True where both programs make a value of the same values that agree.

        Then a loss alone, one number, that agrees with it says enough.
        """
        sides = self._sides
        sources = made_of(sides.candidate, value, sides.twins)
        twins = {
            k for key in sources for k in sides.all_twins(sides.candidate.values[key])
        }
        wanted = made_of(sides.reference, twin, sides.agreeing)
        return bool(wanted) and wanted <= twins

    def before_clipped(self, transplant: Transplant) -> Transplant:
        """Return a transplant of what the reference clips, if it brings back as much.

        Where the candidate clips the value too, as ``relu`` does, both lead to the same.
        """
        twin = transplant.twin
        value = transplant.value
        is_clipped = twin.operator in _CLIP and len(twin.inputs) == 1
        if not is_clipped or list(transplant.tensors) != [value.key]:
            return transplant
        source = self._sides.reference.values[twin.inputs[0]]
        trials = self._trials
        agrees, gained = trials.outcome({}, transplant.tensors, to_the_end=True)
        for layout in self._layouts(value, source):
            tensors = self._tensors([(value, source)], layout)
            also, others = trials.outcome({}, tensors, to_the_end=True)
            if tensors and also == agrees and gained <= others | {twin.key}:
                return Transplant(value, source, tensors)
        return transplant

    def in_nearer_sign(self, transplant: Transplant) -> Transplant:
        """Return a transplant of the same with the other sign, if the reference has that, all
        results agree too, and it is nearer to what the candidate has.

        A weight that its sum is divided by may have any sign.
        """
        value, twin = transplant.value, transplant.twin
        held = self._sides.candidate.tensor(value.key)
        if held is None or list(transplant.tensors) != [value.key]:
            return transplant
        flow = self._sides.reference
        made = [each for each in reading(flow, twin) if each.operator == _OPPOSITE]
        if twin.operator == _OPPOSITE:
            made += [flow.values[key] for key in twin.inputs if key in flow.values]
        off = apart(held, transplant.tensors[value.key])
        for other in made:
            for layout in self._layouts(value, other):
                tensors = self._tensors([(value, other)], layout)
                if not tensors or apart(held, tensors[value.key]) >= off:
                    continue
                if self._trials.outcome({}, tensors, to_the_end=True)[0]:
                    return Transplant(value, other, tensors)
        return transplant

    def after_clipped(self, transplant: Transplant) -> Transplant:
        """Return a transplant of what the candidate clips, where that does nothing to it.

        A number that is added in the reference may be a lower bound here: then what is
        clipped is right, and the clip is not.
        """
        value = transplant.value
        readers = reading(self._sides.candidate, value)
        is_clipped = len(readers) == 1 and readers[0].operator in _CLIP
        is_clip_right = any(
            reader.operator in _CLIP
            for reader in reading(self._sides.reference, transplant.twin)
        )
        if not is_clipped or is_clip_right or list(transplant.tensors) != [value.key]:
            return transplant
        [clip] = readers
        given = transplant.tensors[value.key]
        if not self._hands_on(clip, transplant.tensors, given):
            return transplant
        return replace(transplant, value=clip, tensors={clip.key: given})

    def _hands_on(
        self, value: Value, changed: Mapping[int, Tensor], given: Tensor
    ) -> bool:
        """Return True where a call gives just this tensor, with other values to read."""
        program = self._trials.program
        call = program.calls.get(value.row.call)
        if call is None:
            return False
        try:
            made = program.one(call, changed)
        except CannotRun:
            return False
        return len(made) == 1 and torch.equal(made[0][1], given)

    def _lost_by_size(self) -> dict[int, list[Value]]:
        """Return what the candidate lacks of the reference's region, the first first."""
        lost: dict[int, list[Value]] = {}
        flow = self._sides.reference
        for key in sorted(self._part.expected, key=lambda k: flow.values[k].order):
            parts = [flow.values[k] for k in flow.parts.get(key, ())]
            for value in (flow.values[key], *parts):
                if not value.computes or not value.is_number or value.says_nothing:
                    continue
                if value.sketch is None:
                    continue
                for numel in (value.sketch.numel, *self._padded_otherwise(value)):
                    lost.setdefault(numel, []).append(value)
        return lost

    def _padded_otherwise(self, value: Value) -> set[int]:
        """Return how many elements a value has behind the candidate's paddings."""
        content = self._sides.reference.tensor(value.key) if self._paddings else None
        if content is None:
            return set()
        moved = (behind_other_padding(content, pair) for pair in self._paddings)
        return {tensor.numel() for tensor in moved if tensor is not None}

    def transplants(self, *, in_parts: bool = False) -> Iterator[Transplant]:
        """Yield what is replaced, in order: of each place of a line the first value.

        Then the others, one by one. ``in_parts``: see ``rejoin_of``.
        """
        flow = self._sides.candidate
        chosen = [flow.values[key] for key in self._part.region]
        chosen = [value for value in chosen if may_be_replaced(value)]
        chosen += islice(self._turns.one_of_each(self._before()), MOST_BEFORE)
        chosen.sort(key=lambda value: value.order)
        firsts = list(self._turns.one_of_each(chosen))
        if in_parts:
            for value in firsts:
                yield from islice(self._in_parts(value), MOST_IN_PARTS)
                yield from islice(self._of_turns(value), MOST_IN_PARTS)
            return
        for value in firsts:
            yield from self.given_to(value)
        taken = {value.key for value in firsts}
        for value in chosen:
            if value.key not in taken:
                yield from self.given_to(value, alone=True)

    def _before(self) -> Iterator[Value]:
        """Yield values that agree and are read by the region, or moved to there.

        They have the right elements, which may stand in other places.
        """
        for value in before(self._sides.candidate, self._part.region):
            if may_be_replaced(value):
                yield value

    def given_to(self, value: Value, *, alone: bool = False) -> Iterator[Transplant]:
        """Yield what a value may be given: what the candidate lacks.

        For one that agrees its own elements in other places, and what it lacks that is
        made of the same: one value may be read where another is meant.

        With ``alone`` no other values of the same place of the line with it.
        """
        held = self._sides.candidate.tensor(value.key)
        if held is None or value.sketch is None:
            return
        twins = self._lost.get(value.sketch.numel, [])
        if value.key not in self._part.region:
            others = (
                [*twins, *self._read_by_reference(value)] if value.is_number else []
            )
            others = [twin for twin in others if self.are_of_the_same(value, twin)]
            twins = [*self._equal_in_other_places(value, held), *others]
        ours = _as_large(self._turns.of(value), value)
        seen: set[int] = set()
        count = 0
        for twin in twins:
            pairs = self._pairs(ours, twin)
            if twin.key in seen or (alone and pairs):
                continue
            if not alone:
                like = [other.key for _, other in pairs]
                seen.update(like or [v.key for v in self._other_turns.of(twin)])
            groups: list[Pairs] = [pairs or [(value, twin)]]
            if not alone:
                groups += self._pairs_of_other_sizes(value, twin)
            for transplant in self._turned(value, twin, groups):
                count += 1
                yield transplant
            if count >= MOST_GIVEN:
                return

    def _read_by_reference(self, value: Value) -> Iterator[Value]:
        """Yield what the reference's region reads that is as large and another value."""
        twins = self._sides.all_twins(value)
        for other in before(self._sides.reference, self._part.expected):
            is_number = other.is_number and other.sketch is not None
            if is_number and _axes(other) == _axes(value) and other.key not in twins:
                yield other

    def _pairs_of_other_sizes(self, value: Value, twin: Value) -> list[Pairs]:
        """Return what else the same place of a line makes, by size, with what it is given.

        A function that is called for several values, queries and keys, is wrong for all.
        The reference makes these with one operator too, all with a bias or all without.
        What is made of the value is left
        out: it is right whatever the value is, if it is given what the reference has.
        """
        by_size: dict[int, list[Value]] = {}
        for other in self._turns.of(value):
            if other.sketch is not None and other.key in self._part.region:
                by_size.setdefault(other.sketch.numel, []).append(other)
        groups: list[Pairs] = []
        for numel, values in by_size.items():
            if value.sketch is None or numel == value.sketch.numel:
                continue
            made_of = upstream(self._sides.candidate, [values[0].key], lambda _v: True)
            if value.key in made_of:
                continue
            for like in self._lost.get(numel, []):
                if _are_called_alike(like, twin):
                    pairs = self._pairs(values, like)
                    if pairs:
                        groups.append(pairs)
                        break
        return groups

    def _in_parts(self, value: Value) -> Iterator[Transplant]:
        """Yield what the turns of loops are given where the reference makes them at once.

        Each a part of one value: loops over examples, over heads, over moments, and over
        layers, one inside the other in any order.
        """
        held = self._sides.candidate.tensor(value.key)
        ours = _as_large(self._turns.of(value), value)
        is_turn = len(ours) > 1 and value.key in self._part.region
        if held is None or not is_turn or value.operator in _MOVE:
            return
        seen: set[object] = set()
        larger = [
            twin
            for numel, lost in self._lost.items()
            if numel > held.numel() and numel % held.numel() == 0
            for twin in lost
        ]
        # the same operator first
        larger.sort(key=lambda twin: _work(twin) != _work(value))
        for twin in larger:
            numel = twin.sketch.numel if twin.sketch is not None else 0
            parts = numel // held.numel()
            theirs = self._other_turns.of(twin)
            if len(theirs) * parts != len(ours):
                theirs = self._alike(twin)
            kind = tuple(each.key for each in theirs)
            if len(theirs) * parts != len(ours) or kind in seen:
                continue
            seen.add(kind)
            yield from self._parts_of(value, ours, theirs, parts)

    def _parts_of(
        self, value: Value, ours: Sequence[Value], theirs: Sequence[Value], count: int
    ) -> Iterator[Transplant]:
        contents = [self._sides.reference.tensor(each.key) for each in theirs]
        present = [self._sides.candidate.tensor(each.key) for each in ours]
        whole = [each for each in contents if each is not None]
        held = [each for each in present if each is not None]
        if len(whole) != len(contents) or len(held) != len(present):
            return
        if any(each.is_complex() for each in (*whole, *held)):
            return
        sizes = {each.numel() * count for each in held}
        shapes = {each.shape for each in whole}
        if len(shapes) > 1 or sizes != {each.numel() for each in whole}:
            return  # turns of several sizes
        for parts in cut_in(whole, count):
            for order in orders_of(parts[0], held[0]):
                for numbers in nested(len(theirs), count):
                    tensors = {
                        each.key: parts[numbers[place]]
                        .permute(order)
                        .reshape(held[place].shape)
                        .to(held[place].dtype)
                        .contiguous()
                        for place, each in enumerate(ours)
                    }
                    place = next(n for n, v in enumerate(ours) if v.key == value.key)
                    twin = theirs[numbers[place] // count]
                    yield Transplant(value, twin, tensors, is_in_parts=True)

    def _of_turns(self, value: Value) -> Iterator[Transplant]:
        """Yield what is made at once and is given what all turns of a loop make together.

        Loops over examples, which may have as many boxes or words each as they like.
        """
        held = self._sides.candidate.tensor(value.key)
        is_at_once = len(self._turns.of(value)) == 1 and value.key in self._part.region
        if held is None or not is_at_once or is_moved(self._sides.candidate, value):
            return
        for turns in self._loops_of_size(held.numel(), _work(value)):
            whole = joined([self._sides.reference.tensor(each.key) for each in turns])
            if whole is None or whole.is_complex() or held.is_complex():
                continue
            if _lengths(whole) != _lengths(held):
                continue
            for layout in layouts_for(self._sides, whole, held):
                moved = stand_in(layout, whole, held)
                if moved is not None:
                    yield Transplant(
                        value,
                        turns[0],
                        {value.key: moved},
                        is_in_parts=True,
                        turns=turns,
                    )

    def _loops_of_size(self, numel: int, work: str) -> list[Sequence[Value]]:
        """Return the turns of each line that has so many elements; of one operator first."""
        if self._loops is None:
            self._loops = self._loops_by_size()
        loops = self._loops.get(numel, [])
        return sorted(loops, key=lambda turns: _work(turns[0]) != work)

    def _loops_by_size(self) -> dict[int, list[Sequence[Value]]]:
        """Return what lines of the reference make in several turns, some of which is lost.

        A turn may have a call less: nothing is cut off where an example is the longest.
        """
        lines: dict[object, list[Value]] = {}
        lost = {value.key for values in self._lost.values() for value in values}
        for value in self._sides.reference.in_order():
            if value.row.phase == _FORWARD and value.is_number and value.row.numel:
                place = (line_of_any_size(value), value.inner)
                lines.setdefault(place, []).append(value)
        loops: dict[int, list[Sequence[Value]]] = {}
        for members in lines.values():
            if lost.isdisjoint(value.key for value in members):
                continue
            for turns in one_of_each_turn(members):
                total = sum(value.row.numel or 0 for value in turns)
                loops.setdefault(total, []).append(turns)
        return loops

    def _equal_in_other_places(self, value: Value, held: Tensor) -> Iterator[Value]:
        values = self._sides.reference.values
        for key in self._sides.all_twins(value)[:2]:
            tensor = self._sides.reference.tensor(key)
            if tensor is None or not values[key].is_call:
                continue
            if not same_layout(tensor, held):
                yield values[key]

    def _turned(
        self, value: Value, twin: Value, groups: Sequence[Pairs]
    ) -> Iterator[Transplant]:
        """Yield a transplant for each layout that the shapes allow.

        Values of other sizes stand in the layout of as high a number, or the last.
        """
        held = self._sides.candidate.tensor(value.key)
        if held is None:
            return
        layouts = [self._layouts(*pairs[0]) for pairs in groups]
        if not all(layouts):
            return
        for number in range(len(layouts[0])):
            tensors: dict[int, Tensor] = {}
            for pairs, of_group in zip(groups, layouts, strict=True):
                layout = of_group[min(number, len(of_group) - 1)]
                tensors |= self._tensors(pairs, layout)
            transplanted = tensors.get(value.key)
            if (
                transplanted is not None
                and apart(transplanted, held) > self._sides.limit
            ):
                yield Transplant(value, twin, tensors)
            if is_taken_away(self._sides.candidate, value) and not any(
                tensor.dtype == torch.bool for tensor in tensors.values()
            ):
                negative = {key: -tensor for key, tensor in tensors.items()}
                yield Transplant(value, twin, negative)

    def _layouts(self, value: Value, twin: Value) -> list[Layout]:
        held = self._sides.candidate.tensor(value.key)
        content = self._sides.reference.tensor(twin.key)
        if held is None or content is None:
            return []
        return list(layouts_for(self._sides, content, held))

    def _tensors(self, pairs: Pairs, layout: Layout) -> dict[int, Tensor]:
        tensors: dict[int, Tensor] = {}
        for value, other in pairs:
            content = self._sides.reference.tensor(other.key)
            present = self._sides.candidate.tensor(value.key)
            if content is None or present is None:
                continue
            moved = stand_in(layout, content, present)
            if moved is not None:
                tensors[value.key] = moved
        return tensors

    def _pairs(self, ours: Sequence[Value], twin: Value) -> list[tuple[Value, Value]]:
        """Return what is replaced together, each with what it is given; none if unknown.

        A function of the candidate may serve at several places of the reference, and a
        call of the reference may do all turns: then its values of one operator and size
        are taken together, in order. Where these are twice as many, each turn makes two
        of them, and the same one of each is taken.
        """
        count = len(ours)
        if count == 1:
            return [(ours[0], twin)]
        theirs = self._other_turns.of(twin)
        if len(theirs) != count:
            theirs = self._alike(twin)
            if len(theirs) % count == 0:
                each = len(theirs) // count
                place = next(n for n, v in enumerate(theirs) if v.key == twin.key)
                theirs = theirs[place % each :: each]
        if len(theirs) != count:
            return []
        return list(zip(ours, theirs, strict=True))

    def _alike(self, twin: Value) -> list[Value]:
        """Return the values of one operator and size, this one among them, in order."""
        kind = _kind(twin)
        if kind not in self._kinds:
            flow = self._sides.reference
            self._kinds[kind] = [v for v in flow.in_order() if _kind(v) == kind]
        return self._kinds[kind]

    def _up_to_several(self, value: Value) -> set[int]:
        """Return a value that agrees in other places, and what it is made of one by one.

        Up to the call that puts several together: which stand where is decided there.
        """
        if value.key in self._part.region:
            return set()
        flow = self._sides.candidate
        keys = {value.key}
        source: Value | None = value
        while source is not None:
            keys.add(source.key)
            source = only_input(flow, source)
        return keys

    def rejoin(self, transplant: Transplant, *, agrees: bool) -> Rejoin:
        """Return where the candidate is right again."""
        value = transplant.value
        twin = transplant.twin
        region = upstream(
            self._sides.candidate, [value.key], lambda v: v.key in self._part.region
        )
        expected = upstream(
            self._sides.reference,
            [each.key for each in transplant.turns or (twin,)],
            lambda v: v.key in self._part.expected,
        )
        held = transplant.tensors[value.key]
        return Rejoin(value, twin, held, frozenset(region), frozenset(expected), agrees)


def _work(value: Value) -> str:
    return "product" if value.operator in _PRODUCTS else value.operator.strip("_")


def _lengths(tensor: Tensor) -> list[int]:
    return sorted(size for size in tensor.shape if size != 1)


def _are_called_alike(one: Value, other: Value) -> bool:
    """Return True for two calls of one operator that read as many tensors."""
    is_same = one.operator == other.operator and one.inner == other.inner
    return is_same and len(one.row.inputs) == len(other.row.inputs)


def _as_large(values: Sequence[Value], value: Value) -> list[Value]:
    """Return the values with axes as long as those of one, in any order."""
    known = [v for v in values if v.sketch is not None]
    return [v for v in known if _axes(v) == _axes(value)]


def _axes(value: Value) -> list[int]:
    return sorted(size for size in value.row.shape or () if size != 1)


def _kind(value: Value) -> object:
    """Return what calls have in common that may be turns: a bias is one tensor more."""
    row = value.row
    axes = tuple(_axes(value))
    return value.operator, value.inner, axes, len(row.inputs), row.phase
