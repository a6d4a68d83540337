"""What is made of right values by other operators than the reference's."""

from __future__ import annotations

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.repairs.goals import apart
from roundoff.compare.repairs.left_out_values import idle_leaf
from roundoff.compare.repairs.named_repairs import there
from roundoff.compare.repairs.read_by_region import hands_on
from roundoff.compare.repairs.rejoins import Rejoin
from roundoff.compare.repairs.replaceable_values import before
from roundoff.compare.repairs.trials import families_of
from roundoff.compare.values.fault_lines import FaultLines, changes_nothing
from roundoff.compare.values.traced_calls import TracedProgram
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Sides, first_of, first_over_turns
from roundoff.ops import operators_that

_JOIN = operators_that("join")


def unlike(sides: Sides, rejoin: Rejoin) -> Blamed:
    """Return a value with which all is right, where nothing says what of it is made wrongly."""
    words = f"with {there(rejoin.twin)} all that follows is right"
    line = FaultLines(sides, rejoin.region).of_operator(rejoin.value)
    value = rejoin.value
    return Blamed(value, rejoin.twin, words, is_operator=True, line=line, is_sure=False)


def is_clear_fault(sides: Sides, rejoin: Rejoin) -> bool:
    """Return True for a fault that does so much that it would show elsewhere too.

    As far from what agrees as from values that have nothing in common.
    """
    present = sides.candidate.tensor(rejoin.value.key)
    return present is not None and apart(rejoin.held, present) > sides.limit**0.5


class UnlikeValues:
    """The operator to name where no repair is found."""

    def __init__(self, sides: Sides, rejoin: Rejoin) -> None:
        self._sides = sides
        self._rejoin = rejoin
        self._families = families_of(TracedProgram(sides.candidate))
        region = rejoin.region | {rejoin.value.key}
        is_clear = is_clear_fault(sides, rejoin)
        self._lines = FaultLines(sides, region, is_clear=is_clear)

    def blamed(self) -> Blamed:
        """Name the first operator behind the values that agree.

        Where an operator before it adds nothing, which the reference does not have, it
        is that one.
        """
        flow = self._sides.candidate
        rejoin = self._rejoin
        heads = first_of(flow, set(rejoin.region))
        region = [flow.values[key] for key in rejoin.region]
        joins = [value for value in region if value.operator in _JOIN]
        idle = next((v for v in before(flow, rejoin.region) if self._is_idle(v)), None)
        if idle is not None:
            expected = sorted(rejoin.expected | {rejoin.twin.key})
            leaf = idle_leaf(self._sides, idle, expected)
            if leaf is not None:
                return leaf
            words = f"it changes nothing; the reference has {there(rejoin.twin)}"
            line = self._lines.of_operator(idle)
            return Blamed(
                idle, rejoin.twin, words, is_operator=True, line=line, is_sure=False
            )
        # where no number is computed, the first place or mask is wrong, or the first move
        calls = [value for value in region if value.is_call and not value.inner]
        places = [value for value in calls if value.inputs and not hands_on(value)]
        candidates = heads + joins or places or calls or [rejoin.value]
        first = min(candidates, key=lambda v: v.order)
        first = first_over_turns(flow, first, heads, set(rejoin.region))
        if first.inner:
            first = flow.values[first.row.record]
        unfinished = self._unfinished(first)
        if unfinished is not None:
            return unfinished
        what = "all that follows" if rejoin.agrees else "more of what follows"
        words = f"with {there(rejoin.twin)} {what} is right"
        line = self._lines.of_operator(first)
        return Blamed(
            first, rejoin.twin, words, is_operator=True, line=line, is_sure=False
        )

    def _unfinished(self, reader: Value) -> Blamed | None:
        """Return what is left out of a call of the reference, of which a value is the first part.

        A sum is read where the reference's mean divides it first.
        """
        reference = self._sides.reference
        flow = self._sides.candidate
        for key in filter(flow.values.__contains__, reader.row.inputs):
            value = flow.behind(key)
            twins = [reference.values[twin] for twin in self._sides.all_twins(value)]
            if not twins or not all(twin.inner for twin in twins):
                continue
            rest = [
                made
                for twin in twins
                for key in reference.readers.get(twin.key, ())
                if (made := reference.values[key]).inner
                and made.row.call == twin.row.call
                and made.key not in self._sides.agreeing
            ]
            if rest:
                named, line = self._lines.of_left_out(value, rest[0])
                words = f"left out is {there(rest[0])}"
                return Blamed(named, rest[0], words, is_operator=True, line=line)
        return None

    def _is_idle(self, value: Value) -> bool:
        """Return True for a sum or product that is what it was made of, in each turn."""
        flow = self._sides.candidate
        calls = self._families.get(value.row.call, ())
        rows = [row for call in calls for row in call.rows]
        turns = [flow.values[row.record] for row in rows]
        return bool(turns) and all(changes_nothing(flow, turn) for turn in turns)
