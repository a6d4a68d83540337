"""Is one layer read twice, where the reference goes on to the next?

``self.second`` written once more for ``self.third``, a function made in a loop that keeps
the loop's last number: the parameters of the layer that is meant are then read by nothing,
and no recording has them. Those of the layer that is read are right; a loader did nothing
wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.misused_leaves import reads_instead
from roundoff.compare.blame.near_leaves import leaves_of
from roundoff.compare.repairs.edits.inputs import reading_instead
from roundoff.compare.repairs.goals import apart
from roundoff.compare.repairs.trials import BUDGET, Trials, edits_of
from roundoff.compare.values.fault_lines import FaultLines, alike_inside
from roundoff.compare.values.learnt_layouts import layouts_for, stand_in
from roundoff.compare.values.traced_calls import Edit, TracedCall
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Part, Sides

_FORWARD = "forward"

#: Which of the layers each turn reads, by number.
_Order = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Read:
    """A parameter that is read in several turns.

    Attributes:
        leaf: the candidate's.
        turns: the calls that read it, of each turn.
        meant: what the reference has in its layer and in those that may be meant, in order.
        contents: what they hold, laid out as the parameter is.
        own: the place of its own layer among these.
    """

    leaf: Value
    turns: Sequence[Sequence[TracedCall]]
    meant: Sequence[Value]
    contents: Sequence[Tensor]
    own: int

    @property
    def form(self) -> tuple[int, int, int]:
        """Parameters of one layer are read alike."""
        return len(self.turns), len(self.meant), self.own

    def edits(self, order: _Order) -> dict[int, Edit]:
        """Return the edits with which each turn reads the parameter of one layer."""
        edits: dict[int, Edit] = {}
        for turn, place in zip(self.turns, order, strict=True):
            if place != self.own:
                template = reading_instead(self.leaf.key, self.contents[place])
                edits |= edits_of(template, turn)
        return edits


def read_again(sides: Sides, part: Part, trials: Trials) -> Blamed | None:
    """Return the first call that reads one layer's parameter where another's is meant.

    None where no such layer makes all results right.
    """
    lost = [
        leaf
        for leaf in leaves_of(sides.reference, sorted(part.expected))
        if leaf.key not in sides.agreeing and not leaf.says_nothing
    ]
    if not lost:
        return None
    trials.left = BUDGET
    by_form: dict[object, list[_Read]] = defaultdict(list)
    for read in _read_several_times(sides, part, trials, lost):
        by_form[read.form].append(read)
    for reads in by_form.values():
        for order in _orders(*reads[0].form):
            edits = {call: e for read in reads for call, e in read.edits(order).items()}
            if trials.outcome(edits, is_patient=True)[0]:
                return _blamed(sides, part, trials, reads, edits)
    return None


def _read_several_times(
    sides: Sides, part: Part, trials: Trials, lost: Sequence[Value]
) -> Iterator[_Read]:
    for leaf in leaves_of(sides.candidate, sorted(part.region)):
        turns = _turns(trials, leaf)
        twins = [sides.reference.values[key] for key in sides.all_twins(leaf)]
        twins = [twin for twin in twins if twin.row.name and not twin.is_call]
        if len(turns) < 2 or len(twins) != 1:
            continue
        [twin] = twins
        layers = sorted([twin, *_meant(twin, lost)], key=lambda value: value.order)
        contents = _laid_out(sides, leaf, twin, layers)
        if len(layers) > 1 and contents is not None:
            yield _Read(leaf, turns, layers, contents, layers.index(twin))


def _turns(trials: Trials, leaf: Value) -> list[list[TracedCall]]:
    """Return the calls of the forward pass that read a parameter, of each turn.

    None where its lines do not read it equally often.
    """
    by_place: dict[object, list[TracedCall]] = defaultdict(list)
    program = trials.program
    for key in program.flow.readers.get(leaf.key, ()):
        row = program.flow.values[key].row
        call = program.calls.get(row.call)
        if call is not None and row.phase == _FORWARD:
            by_place[row.line, row.operator].append(call)
    if len({len(calls) for calls in by_place.values()}) != 1:
        return []
    return [list(turn) for turn in zip(*by_place.values(), strict=True)]


def _meant(twin: Value, lost: Sequence[Value]) -> list[Value]:
    """Return the parameters of other layers, those whose names share most with one's."""
    alike = [
        leaf
        for leaf in lost
        if leaf.row.shape == twin.row.shape and _are_called_alike(leaf, twin)
    ]
    most = max((_shared(leaf, twin) for leaf in alike), default=0)
    return [leaf for leaf in alike if _shared(leaf, twin) == most]


def _are_called_alike(one: Value, other: Value) -> bool:
    """Return True for two weights, or two biases; and for parameters of no module."""
    names = [one.row.name or "", other.row.name or ""]
    last = {name.rpartition(".")[2] for name in names}
    return len(last) == 1 or not any("." in name for name in names)


def _shared(one: Value, other: Value) -> int:
    """Return how many modules two parameters have in common."""
    names = [(each.row.name or "").split(".") for each in (one, other)]
    # a stack has its innermost line last, a name its outermost module first
    return alike_inside(names[0][::-1], names[1][::-1])


def _laid_out(
    sides: Sides, leaf: Value, twin: Value, layers: Sequence[Value]
) -> list[Tensor] | None:
    """Return what parameters of the reference hold, as the candidate would hold it."""
    held = sides.candidate.tensor(leaf.key)
    content = sides.reference.tensor(twin.key)
    present = [sides.reference.tensor(layer.key) for layer in layers]
    if held is None or content is None:
        return None
    for layout in layouts_for(sides, content, held):
        moved = stand_in(layout, content, held)
        if moved is None or apart(moved, held) > sides.limit_for(leaf):
            continue
        laid_out = [
            stand_in(layout, each, held) for each in present if each is not None
        ]
        fitting = [each for each in laid_out if each is not None]
        return fitting if len(fitting) == len(layers) else None
    return None


def _orders(turns: int, layers: int, own: int) -> Iterator[_Order]:
    """Yield which layer each turn may be meant to read: one after the other, or one turn.

    Turns may go several times through all layers, or each layer have several turns.

    >>> list(_orders(2, 2, own=1))
    [(0, 1)]
    >>> list(_orders(3, 2, own=0))
    [(1, 0, 0), (0, 1, 0), (0, 0, 1)]
    """
    orders: dict[_Order, None] = {}
    if turns % layers == 0:
        orders[tuple(turn * layers // turns for turn in range(turns))] = None
        orders[tuple(turn % layers for turn in range(turns))] = None
    else:
        for turn in range(turns):
            for layer in range(layers):
                order = [own] * turns
                order[turn] = layer
                orders[tuple(order)] = None
    return (order for order in orders if set(order) != {own})


def _blamed(
    sides: Sides,
    part: Part,
    trials: Trials,
    reads: Sequence[_Read],
    edits: Mapping[int, Edit],
) -> Blamed:
    call = trials.program.calls[min(edits)]
    value = sides.candidate.values[call.first.record]
    read = next(each for each in reads if any(call in turn for turn in each.turns))
    meant = [each for place, each in enumerate(read.meant) if place != read.own]
    twin = meant[0]
    own = read.meant[read.own].row.name
    words = (
        f"{reads_instead(read.leaf, twin)}, which nothing here reads; "
        f"{read.leaf.row.name} is the reference's {own}"
    )
    line = FaultLines(sides, part.region).of_operator(value)
    return Blamed(value, twin, words, is_operator=True, line=line)
