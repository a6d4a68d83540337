"""Two recorded programs run on made-up values, where only statistics were kept.

A recording without tensors still has every call and its arguments: the program. Both
programs run again on numbers of the recorded range and spread, the same in parameters
that hold the same values. Where the two then differ, the program does; where they agree,
what was recorded to differ is in the values that it was given.

How a parameter of one program stands in the other (transposed, cut, joined) is not
recorded. What is tried is each layout that its shape allows; the first after which a value
agrees that was recorded to agree is taken, else the one most others have.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from roundoff.compare.blame.near_leaves import of_leaves_alone
from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.ports.port_results import last_differentiated
from roundoff.compare.records.computed_tensors import ComputedTensors
from roundoff.compare.records.parameter_content import axis_orders
from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.records.recorded_rows import RecordedRow, elements_of_pass
from roundoff.compare.records.value_sketch import Sketch, sketch_of_tensor
from roundoff.compare.values.traced_calls import TracedCall, TracedProgram
from roundoff.compare.values.value_flow import Flow, Value, flow_of
from roundoff.compare.values.value_regions import Sides, limit_of

#: Larger recordings are not run again.
MOST_ELEMENTS = 3 * 10**7
#: Layouts of one parameter that are tried.
MOST_OPTIONS = 24
#: Operators that compute after a parameter is read, in which a value must agree: one written
#: out takes up to 17 (``trials.PATIENCE``).
FAR = 17
#: Parameters that may be joined in one.
MOST_JOINED = 4
#: Statistics of parameters with the same values differ by less.
SAME = 1e-5

#: Which part of what, and the order of its axes.
Order = tuple[object, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """What a leaf of the candidate may hold.

    Attributes:
        order: how it stands there.
        source: of which part of which leaf of the reference it is made.
        tensor: the values.
    """

    order: Order
    source: Order
    tensor: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Content:
    """A leaf of the reference, a part of one, or several together."""

    kind: Order
    source: Order
    tensor: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """What leads from a leaf to a value that was recorded to agree.

    Attributes:
        entries: of the candidate's program, in order.
        signs: what the last one makes, as far as it was recorded to agree.
        leaves: the undecided ones that are read on the way.
    """

    entries: Sequence[TracedCall | RecordedRow]
    signs: Sequence[RecordedRow]
    leaves: Sequence[int]


def on_made_up_values(sides: Sides) -> Sides | None:
    """Return both sides with made-up tensors in their forward passes; None if one cannot run."""
    flows = (sides.reference, sides.candidate)
    if sum(elements_of_pass(flow.step.rows) for flow in flows) > MOST_ELEMENTS:
        return None
    try:
        ours = _Run(sides.reference)
        ours.run()
        theirs = _CandidateRun(sides, ours.tensors)
        theirs.run_all()
    except CannotRun:
        return None
    our_end, their_end = last_differentiated(sides)
    step = _with_tensors(sides.reference, ours.tensors)
    reference = flow_of(step, sides.reference.trained, our_end)
    step = _with_tensors(sides.candidate, theirs.tensors, theirs.corrected)
    candidate = flow_of(step, sides.candidate.trained, their_end)
    return Sides(reference, candidate, limit_of(reference, candidate), made_up=True)


def _with_tensors(
    flow: Flow, tensors: Mapping[int, Tensor], forced: Collection[int] = ()
) -> RecordedStep:
    rows = {
        record: replace(row, blob=None)
        for record, row in flow.step.rows.items()
        if row.phase == "forward"
    }
    return replace(flow.step, rows=rows, tensors=ComputedTensors(tensors, forced))


def _made_up(row: RecordedRow) -> Tensor:
    """Return numbers of a row's shape, range and spread. Raises ``CannotRun``."""
    dtype, shape = _format_and_shape(row)
    low = row.min or 0.0
    high = row.max or 0.0
    if not (math.isfinite(low) and math.isfinite(high)):
        raise CannotRun("its range is not finite")
    if low == high or not row.numel:
        return torch.full(shape, low).to(dtype)
    generator = torch.Generator().manual_seed(row.record)
    if dtype.is_floating_point:
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        numbers = numbers * (row.std or 0.0) + (row.mean or 0.0)
        return numbers.clamp(low, high).to(dtype)
    if dtype == torch.bool:
        return _mask(row, generator)
    return _whole_numbers(row, int(low), int(high), generator).to(dtype)


def _format_and_shape(row: RecordedRow) -> tuple[torch.dtype, list[int]]:
    """Return both where they agree with the number of elements. Raises ``CannotRun``."""
    dtype = getattr(torch, row.dtype or "", None)
    if not isinstance(dtype, torch.dtype) or row.shape is None:
        raise CannotRun("its format was not recorded")
    if math.prod(row.shape) != row.numel or row.numel > MOST_ELEMENTS:
        raise CannotRun("its shape is not that of its elements, or too large")
    return dtype, list(row.shape)


def _whole_numbers(
    row: RecordedRow, low: int, high: int, generator: torch.Generator
) -> Tensor:
    """Return the numbers from ``low`` to ``high`` once where these fit, else drawn ones."""
    shape = list(row.shape or ())
    try:
        if _is_count(row):
            return torch.arange(low, high + 1).reshape(shape)
        return torch.randint(low, high + 1, shape, generator=generator)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise CannotRun("its numbers are too large") from error


def _is_count(row: RecordedRow) -> bool:
    low = row.min or 0.0
    high = row.max or 0.0
    middle = (low + high) / 2
    is_even = abs((row.mean or 0.0) - middle) <= SAME * max(1.0, abs(middle))
    return row.numel == int(high - low) + 1 and is_even


def _mask(row: RecordedRow, generator: torch.Generator) -> Tensor:
    """A causal mask where the share of ones allows it; each row has one of both, if any."""
    shape = list(row.shape or ())
    if len(shape) >= 2 and shape[-1] == shape[-2]:
        size = shape[-1]
        ones = torch.ones(shape, dtype=torch.bool)
        for mask in (ones.tril(), ones.triu(1), ones.triu(), ones.tril(-1)):
            if abs(float(mask.double().mean()) - (row.mean or 0.0)) * size * size < 0.5:
                return mask
    return torch.rand(shape, generator=generator) < (row.mean or 0.5)


class _Run:
    """The forward pass of one side on other leaves.

    Attributes:
        tensors: by record, as far as it was run.
    """

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.tensors: dict[int, Tensor] = {}
        self.program = TracedProgram(flow, self.tensors)

    def run(self) -> None:
        """Run all; raise ``CannotRun`` where a call cannot."""
        for leaf in leaves_of_pass(self.flow):
            self.tensors[leaf.key] = _made_up(leaf.row)
        for entry in self.program.order:
            self.step(entry)

    def step(self, entry: TracedCall | RecordedRow) -> None:
        """Run one call, or bring a tensor up to date that was written through a view."""
        try:
            for row, tensor in self.program.one(entry):
                self.tensors[row.record] = tensor
        except CannotRun:
            # random numbers, or arguments that were not recorded
            for row in _rows_of(entry):
                if row.dtype is not None:
                    self.tensors[row.record] = _made_up(row)


class _CandidateRun(_Run):
    """The candidate's forward pass on the values that were made up for the reference.

    Args:
        sides: the recorded values.
        wanted: the reference's made-up tensors.
    """

    def __init__(self, sides: Sides, wanted: Mapping[int, Tensor]) -> None:
        super().__init__(sides.candidate)
        self._sides = sides
        self._wanted = wanted
        self._votes: Counter[Order] = Counter()
        self._open: dict[int, list[Option]] = {}
        self._used: set[Order] = set()
        self.corrected: set[int] = set()
        #: The reference's leaves that a leaf of the candidate holds as they are.
        self._held_whole = {
            key for leaf in leaves_of_pass(self.flow) for key in sides.all_twins(leaf)
        }

    def run_all(self) -> None:
        """Choose what each leaf holds, and run all."""
        for leaf in leaves_of_pass(self.flow):
            self._start(leaf.row)
        for number, entry in enumerate(self.program.order):
            for record in _read_by(entry):
                if record in self._open:
                    self._settle(record, number)
            self.step(entry)
            for row in _rows_of(entry):
                self._correct(row)
        if self._open:
            self._vote()

    def _start(self, row: RecordedRow) -> None:
        options = self._options(row)
        if not options:
            self.tensors[row.record] = _made_up(row)
        elif len(options) == 1:
            self._take(row.record, options[0])
        else:
            self.tensors[row.record] = options[0].tensor
            self._open[row.record] = options

    def _options(self, row: RecordedRow) -> list[Option]:
        """Return what a leaf may hold, each with the way it stands there."""
        value = self.flow.values[row.record]
        contents = self._contents(value)
        options = _turned(row, contents, lambda turned, shape: turned == shape)
        if options and not row.name:
            # data is fed as it is
            return options[:1]
        if not options:
            options = _turned(row, contents, lambda _turned, _shape: True)
        return options

    def _contents(self, value: Value) -> list[Content]:
        """Return the made-up values of the reference's leaf with the same statistics.

        Else parts of larger ones, and several together.
        """
        sketch = value.sketch
        if sketch is None or sketch.constant:
            return []
        leaves = leaves_of_pass(self._sides.reference)
        twins = [leaf for leaf in leaves if _is_near(leaf.sketch, sketch)]
        if twins:
            return [Content((), (leaf.key,), self._wanted[leaf.key]) for leaf in twins]
        if not value.is_number:
            return []
        computed = self._computed_of_leaves(value)
        if computed:
            return computed
        lost = [leaf for leaf in leaves if leaf.key not in self._held_whole]
        return [*self._parts(value, lost), *self._joined(sketch, lost)]

    def _computed_of_leaves(self, value: Value) -> list[Content]:
        """Return what the reference computes of its leaves alone with the same statistics.

        A loader may have stored it ready: a decay behind its exponential.
        """
        flow = self._sides.reference
        return [
            Content(("computed",), (key,), self._wanted[key])
            for key in self._sides.all_twins(value)
            if key in self._wanted
            and flow.values[key].computes
            and of_leaves_alone(flow, flow.values[key])
        ]

    def _parts(self, value: Value, leaves: Sequence[Value]) -> Iterator[Content]:
        """Yield parts of larger leaves: they begin at multiples of what divides both.

        Parts of one leaf need not be of one length: 2, 4 and 4 of 10.
        """
        numel = value.row.numel or 1
        for leaf in leaves:
            whole = self._wanted[leaf.key]
            if whole.numel() <= numel or not _alike(leaf.row, value.row):
                continue
            for axis in range(whole.dim()):
                size = whole.shape[axis]
                if size * numel % whole.numel():
                    continue
                length = size * numel // whole.numel()
                for start in range(0, size - length + 1, math.gcd(size, length)):
                    part = whole.narrow(axis, start, length)
                    yield Content(("part", axis), (leaf.key, axis, start), part)

    def _joined(self, sketch: Sketch, leaves: Sequence[Value]) -> Iterator[Content]:
        """Yield what several of the reference's leaves make together, as norms allow."""
        for count in range(2, MOST_JOINED + 1):
            for start in range(len(leaves) - count + 1):
                group = leaves[start : start + count]
                if _make_together(group, sketch):
                    yield from self._along_each_axis(group)

    def _along_each_axis(self, group: Sequence[Value]) -> Iterator[Content]:
        tensors = [self._wanted[leaf.key] for leaf in group]
        for axis in range(tensors[0].dim()):
            try:
                joined = torch.cat(tensors, axis)
            except RuntimeError:
                continue  # other sizes along the other axes
            source = (*(leaf.key for leaf in group), axis)
            yield Content(("joined", axis), source, joined)

    def _settle(self, record: int, start: int) -> None:
        """Take the first option after which a value agrees that was recorded to agree.

        Together with that of a second leaf, where this is read before such a value.
        """
        way = self._way_to_sign(record, start)
        if way is not None:
            for changed in self._choices(record, way):
                tensors = {leaf: option.tensor for leaf, option in changed.items()}
                if self._agrees(tensors, way):
                    for leaf, option in changed.items():
                        self._take(leaf, option)
                    return
        # it is decided by vote, and what follows runs with the likeliest for now
        self.tensors[record] = self._likeliest(record).tensor

    def _correct(self, row: RecordedRow) -> None:
        """Give a value that was recorded to agree what the reference has.

        Where it does not agree by itself, one program has read a table, whose numbers are
        made up here, and the other has computed it.
        """
        tensor = self.tensors.get(row.record)
        if tensor is None or not self._is_sign(row):
            return
        if self._verdict(row, tensor):
            return
        contents = [
            Content(("value",), (key,), self._wanted[key])
            for key in self._expected(row)
        ]
        options = _turned(row, contents, lambda turned, shape: turned == shape)
        if options:
            self.tensors[row.record] = options[0].tensor
            self.corrected.add(row.record)
        if len(options) > 1:
            self._open[row.record] = options

    def _choices(self, record: int, way: Way) -> Iterator[dict[int, Option]]:
        """Yield options of a leaf, each with every one of the next undecided leaf."""
        others = [leaf for leaf in way.leaves if leaf != record]
        for option in self._unused(record):
            if not others:
                yield {record: option}
                continue
            for second in self._unused(others[0]):
                yield {record: option, others[0]: second}

    def _way_to_sign(self, record: int, start: int) -> Way | None:
        """Return what leads from a leaf to the next value that was recorded to agree."""
        order = self.program.order
        reached = {record}
        computing = 0
        for number in range(start, len(order)):
            if reached.isdisjoint(_read_by(order[number])):
                continue
            rows = _rows_of(order[number])
            signs = [row for row in rows if self._is_sign(row)]
            if signs:
                return self._way(start, number, signs)
            reached.update(row.record for row in rows)
            computing += any(self.flow.values[row.record].computes for row in rows)
            if computing > FAR:
                break
        return None

    def _way(self, start: int, end: int, signs: list[RecordedRow]) -> Way:
        """Return the entries from ``start`` that a value at ``end`` is made of."""
        order = self.program.order
        needed = set(_read_by(order[end]))
        entries = [order[end]]
        for entry in reversed(order[start:end]):
            if not needed.isdisjoint(row.record for row in _rows_of(entry)):
                entries.insert(0, entry)
                needed.update(_read_by(entry))
        leaves = [record for record in self._open if record in needed]
        return Way(entries, signs, leaves)

    def _unused(self, record: int) -> list[Option]:
        """Return options whose source no other leaf holds; all where there is none."""
        options = self._open[record]
        unused = [each for each in options if each.source not in self._used]
        return unused or options

    def _likeliest(self, record: int) -> Option:
        return max(self._unused(record), key=lambda each: self._votes[each.order])

    def _take(self, record: int, option: Option) -> None:
        self.tensors[record] = option.tensor
        self._votes[option.order] += 1
        self._used.add(option.source)
        self._open.pop(record, None)

    def _agrees(self, leaves: Mapping[int, Tensor], way: Way) -> bool:
        """Return True where the value at the end of a way agrees with these leaves."""
        changed = dict(leaves)
        try:
            for entry in way.entries:
                for row, tensor in self.program.one(entry, changed):
                    changed[row.record] = tensor
        except CannotRun:
            return False
        first = way.signs[0]
        return first.record in changed and self._verdict(first, changed[first.record])

    def _is_sign(self, row: RecordedRow) -> bool:
        """Return True for a value that was recorded to agree, and says something."""
        return bool(self._expected(row))

    def _expected(self, row: RecordedRow) -> list[int]:
        """Return the reference's values, any of which a value was recorded to be.

        None where it is only a part of one, and where it may differ on other numbers.
        """
        value = self.flow.values[row.record]
        if not value.computes or not value.is_number or value.says_nothing:
            return []
        if value.key not in self._sides.twins or value.key in self._sides.several:
            return []
        values = self._sides.reference.values
        return [
            key
            for key in self._sides.all_twins(value)
            if key in self._wanted and values[key].computes
        ]

    def _verdict(self, row: RecordedRow, tensor: Tensor) -> bool:
        """Return if a value agrees as it should."""
        sketch = sketch_of_tensor(tensor)
        wanted = [sketch_of_tensor(self._wanted[key]) for key in self._expected(row)]
        limit = self._sides.limit
        return sketch is not None and any(_is_near(w, sketch, limit) for w in wanted)

    def _vote(self) -> None:
        """Take for the rest the layout that most others have, and run again."""
        for record in list(self._open):
            self._take(record, self._likeliest(record))
        corrected = {record: self.tensors[record] for record in self.corrected}
        for entry in self.program.order:
            self.step(entry)
            for row in _rows_of(entry):
                if row.record in corrected:
                    self.tensors[row.record] = corrected[row.record]


def _turned(
    row: RecordedRow,
    contents: Sequence[Content],
    fits: Callable[[list[int], list[int]], bool],
) -> list[Option]:
    """Return contents in each order of axes that fits, axes of length 1 left out."""
    wanted = _longer(row.shape or ())
    options: list[Option] = []
    for content in contents:
        if content.tensor.numel() != row.numel:
            continue
        for order in axis_orders(content.tensor):
            turned = content.tensor.permute(order)
            if len(options) == MOST_OPTIONS or not fits(_longer(turned.shape), wanted):
                continue
            held = turned.reshape(list(row.shape or ())).contiguous()
            held = held.to(getattr(torch, row.dtype or "", held.dtype))
            if not any(torch.equal(held, each.tensor) for each in options):
                options.append(Option((content.kind, order), content.source, held))
    return options


def _longer(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _is_near(one: Sketch | None, other: Sketch, limit: float = SAME) -> bool:
    return one is not None and one.distance(other) <= limit


def _make_together(leaves: Sequence[Value], whole: Sketch) -> bool:
    """Return True where leaves together have the size and the norm of one."""
    sketches = [leaf.sketch for leaf in leaves if leaf.sketch is not None]
    if sum(sketch.numel for sketch in sketches) != whole.numel:
        return False
    norm = math.sqrt(sum(sketch.size**2 for sketch in sketches))
    return abs(norm - whole.size) <= SAME * norm


def _alike(one: RecordedRow, other: RecordedRow) -> bool:
    """Return True for shapes of as many axes, but those of length 1."""
    return len(_longer(one.shape or ())) == len(_longer(other.shape or ()))


def leaves_of_pass(flow: Flow) -> list[Value]:
    """Return what the forward pass is given: parameters, buffers, data, and memory that was
    there before, whose views it reads."""
    return [
        value
        for value in flow.values.values()
        if not value.is_call and not value.inputs and value.row.phase == "forward"
    ]


def _rows_of(entry: TracedCall | RecordedRow) -> Sequence[RecordedRow]:
    return [entry] if isinstance(entry, RecordedRow) else entry.rows


def _read_by(entry: TracedCall | RecordedRow) -> list[int]:
    if isinstance(entry, RecordedRow):
        return list(entry.inputs)
    return list(dict.fromkeys(i for row in entry.rows for i in row.inputs))
