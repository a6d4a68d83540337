"""Is it a parameter, or the layout of a value, that makes two programs part?

Where tensors were kept this is tried: the candidate's calls run again with the values
that the reference's parameter would give; where the result then agrees, the parameter is
at fault. Without tensors, contents alone speak.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations

import numpy as np
import torch
from torch import Tensor

from roundoff.compare.judging.divergence import EXACT
from roundoff.compare.records.parameter_content import (
    EQUAL,
    FLIPPED,
    JOINED,
    PART,
    RESHAPED,
    TRANSPOSED,
    TURNED,
    axis_orders,
    backward_axes,
    relation,
)
from roundoff.compare.records.recorded_calls import CannotRun
from roundoff.compare.records.value_sketch import (
    Sketch,
    SketchIndex,
    in_reals,
    sketch_of_tensor,
)
from roundoff.compare.rounding.rounding_bound import unit
from roundoff.compare.tensors.structure import fewer_digits
from roundoff.compare.values.padded_rows import kept_rows
from roundoff.compare.values.traced_calls import TracedProgram
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Part, Sides, upstream
from roundoff.ops import operators_that

#: Rows at the ends of a table that a loader may leave out: of padding, of unknown words.
MOST_LACKING = 4
#: Parameters of a region that are tried one by one.
MOST_LEAVES = 12
#: Parameters that may be put together in one.
MOST_PARTS = 4
#: Values after the first that differs, which are tried too.
NEXT = 4
#: A turn of what the reference does at once has at least so many elements: all of eight
#: within a limit of 2**-14 of some turn's are not there by chance, of two or three may be.
FEWEST_IN_TURN = 8
#: Of larger values only the turns that lie one after the other are looked at.
MOST_SORTED = 10**6
#: Values that are tried in parameters, at most.
TRIALS = 200
#: How a parameter holds all of another's values.
_LAYOUTS = (EQUAL, RESHAPED, TRANSPOSED, TURNED, FLIPPED)
#: A part of a parameter may agree though it stands in another place.
_MOVES = operators_that("move values")
_TURNS = operators_that("permute axes")
_JOINS = operators_that("join")
#: Gates of a recurrent layer, in any order.
GATES = (3, 4)


@dataclass(frozen=True, slots=True)
class Blamed:
    """What is at fault where two programs part.

    Attributes:
        value: the candidate's parameter, or the value in the wrong layout.
        reference: what it should be.
        evidence: in words.
        other: what a parameter would have to hold, where that was tried.
        is_operator: True for an operator that computes something else.
        line: the line at fault, where it is known and may not be the operator's own.
        label: what it looks like, where that is known.
        is_sure: False where nothing was found that makes the value right: it is the first
            that may be wrong.
    """

    value: Value
    reference: Value | None
    evidence: str
    other: Tensor | None = None
    is_operator: bool = False
    line: str | None = None
    label: str | None = None
    is_sure: bool = True


def leaves_near(flow: Flow, starts: Sequence[int], agreeing: object) -> list[Value]:
    """Return the parameters and buffers that values read, not behind values that agree.

    Values that are made of parameters alone are looked through.
    """
    leaves: dict[int, Value] = {}
    seen: set[int] = set()
    waiting = [(key, True) for key in starts]
    while waiting:
        key, is_start = waiting.pop()
        if key in seen or key not in flow.values:
            continue
        seen.add(key)
        value = flow.values[key]
        if value.row.name and not value.is_call:
            leaves[key] = value
            continue
        agrees = key in agreeing  # type: ignore[operator]
        if agrees and not is_start and not of_leaves_alone(flow, value):
            continue
        waiting += [(k, is_start and _is_inside(flow, k)) for k in value.inputs]
    return sorted(leaves.values(), key=lambda v: v.order)[:MOST_LEAVES]


def _is_inside(flow: Flow, key: int) -> bool:
    """Return True for a step inside a call."""
    return key in flow.values and flow.values[key].inner


def of_leaves_alone(flow: Flow, value: Value, depth: int = 8) -> bool:
    """Return True for a value that is made of parameters and constants alone."""
    if not value.is_call:
        return bool(value.row.name)
    if not depth:
        return False
    inputs = [flow.values[k] for k in value.inputs if k in flow.values]
    return all(of_leaves_alone(flow, each, depth - 1) for each in inputs)


def blamed_leaf(sides: Sides, part: Part) -> Blamed | None:
    """Return the parameter that makes the two part; None where it is none."""
    if part.candidate is None or part.reference is None:
        return None
    theirs = _read_by(sides.candidate, part.candidate, sides.twins)
    ours = _read_by(sides.reference, part.reference, sides.agreeing)
    proven = _proven(sides, part, ours, theirs)
    if proven is not None:
        return proven
    return _by_content(sides, ours, theirs)


def _read_by(flow: Flow, value: Value, agreeing: object) -> list[Value]:
    """Return the parameters of a region and of what it reads, which is one step before."""
    boundary = _boundary(flow, [value.key], agreeing)
    starts = [value.key, *value.row.inputs]
    starts += [key for key in boundary if flow.behind(key).computes]
    behind = [flow.behind(key).key for key in starts if key in flow.values]
    leaves = {
        leaf.key: leaf
        for start in (*starts, *behind)
        for leaf in leaves_near(flow, [start], agreeing)
    }
    return list(leaves.values())[:MOST_LEAVES]


# -- by trial ------------------------------------------------------------------------


def _proven(
    sides: Sides, part: Part, ours: Sequence[Value], theirs: Sequence[Value]
) -> Blamed | None:
    """Try the reference's parameters in the candidate's places."""
    value = part.candidate
    if value is None or part.reference is None or sides.candidate.step.tensors is None:
        return None
    named = _next_values(sides, value.row.record if value.inner else value.key)
    named = [key for key in named if key not in sides.twins]
    program = TracedProgram(sides.candidate)
    needed = {leaf.key: between(sides.candidate, leaf.key, named) for leaf in theirs}
    turns = _Turns(sides, part.reference)

    def agrees(leaf: Value, other: Tensor) -> bool:
        values = values_with(program, needed[leaf.key], leaf.key, other)
        return any(
            _is_in_reference(sides, tensor) or turns.have(tensor)
            for record, tensor in values
            if record in named
        )

    return tried_leaves(sides, ours, theirs, agrees, TRIALS)


def _next_values(sides: Sides, key: int) -> list[int]:
    """Return a value and the next ones made of it that do not agree."""
    flow = sides.candidate
    chosen = [key]
    waiting = [key]
    while waiting and len(chosen) < NEXT:
        for reader in flow.readers.get(waiting.pop(0), ()):
            value = flow.values[reader]
            if value.inner or value.row.phase != flow.values[key].row.phase:
                continue
            if reader not in sides.twins and reader not in waiting:
                waiting.append(reader)
                if value.computes and reader not in chosen:
                    chosen.append(reader)
    return chosen


def tried_leaves(
    sides: Sides,
    ours: Sequence[Value],
    theirs: Sequence[Value],
    agrees: Callable[[Value, Tensor], bool],
    most: int,
    kinds: Sequence[Layouts] | None = None,
) -> Blamed | None:
    """Return the first leaf that makes the two agree once it holds other values.

    None too where ``most`` trials were in vain. ``kinds``: the layouts that are tried.
    """
    for layouts in LAYOUTS if kinds is None else kinds:
        trials = 0
        for leaf in _foreign_first(sides, theirs):
            held = sides.candidate.tensor(leaf.key)
            if held is None:
                return None
            for wanted, content, other in _other_values(sides, ours, held, layouts):
                if trials == most:
                    break
                trials += 1
                if agrees(leaf, other):
                    words = _shifted_in_words(leaf, wanted, held, other)
                    if words is None:
                        words = _held_in_words(sides, leaf, wanted, content, held)
                        words += _wanted_in_words(content, held, other)
                    return Blamed(leaf, wanted, words, other)
    return None


def _foreign_first(sides: Sides, leaves: Sequence[Value]) -> list[Value]:
    """Return leaves that hold none of the reference's values before the others."""
    return sorted(leaves, key=lambda leaf: leaf.key in sides.twins)


def _other_values(
    sides: Sides,
    ours: Sequence[Value],
    held: Tensor,
    layouts: Callable[[Tensor, Tensor], Iterator[Tensor]],
) -> Iterator[tuple[Value, Tensor, Tensor]]:
    """Yield what a leaf might hold in place of ``held``, with what it is made of."""
    for wanted, content in _contents(sides, ours, held):
        how = relation(content, held)
        if how is not None and how.kind == EQUAL and held.dim() < 2:
            continue
        for other in layouts(content.to(held.dtype), held):
            if not torch.equal(other, held):
                yield wanted, content, other


def _contents(
    sides: Sides, leaves: Sequence[Value], held: Tensor
) -> Iterator[tuple[Value, Tensor]]:
    """Yield what a parameter may have to hold: one of the reference's, a part, several."""
    tensors = [(leaf, sides.reference.tensor(leaf.key)) for leaf in leaves]
    kept = [(leaf, tensor) for leaf, tensor in tensors if tensor is not None]
    numel = held.numel()
    for leaf, tensor in kept:
        if tensor.numel() == numel:
            yield leaf, tensor
        elif tensor.numel() > numel and tensor.numel() % numel == 0:
            for part in _parts(tensor, tensor.numel() // numel):
                yield leaf, part
        elif tensor.numel() > numel:
            for part in _stretches(tensor, numel):
                yield leaf, part
    for (leaf, first), (_, second) in combinations(kept, 2):
        for content in _put_together(first, second, numel):
            yield leaf, content


def _put_together(first: Tensor, second: Tensor, numel: int) -> Iterator[Tensor]:
    """Yield what two tensors make of ``numel`` elements: their sum, or one by the other."""
    if first.shape == second.shape and first.numel() == numel:
        yield first + second
    elif first.numel() + second.numel() == numel:
        yield from _joined(first, second)


def _parts(tensor: Tensor, count: int) -> Iterator[Tensor]:
    for axis in range(tensor.dim()):
        if tensor.shape[axis] % count == 0:
            yield from tensor.chunk(count, axis)


def _stretches(tensor: Tensor, numel: int) -> Iterator[Tensor]:
    """Yield most of a tensor along an axis: without its first rows, its last ones, or both.

    >>> [part.tolist() for part in _stretches(torch.arange(5), 4)]
    [[0, 1, 2, 3], [1, 2, 3, 4]]
    """
    for axis, size in enumerate(tensor.shape):
        length, rest = divmod(numel * size, tensor.numel())
        lacking = size - length
        if not rest and 0 < lacking <= MOST_LACKING and 2 * lacking < size:
            for start in range(lacking + 1):
                yield tensor.narrow(axis, start, length)


def _joined(one: Tensor, other: Tensor) -> Iterator[Tensor]:
    if one.dim() != other.dim():
        return
    for axis in range(one.dim()):
        rest = [a for a in range(one.dim()) if a != axis]
        if all(one.shape[a] == other.shape[a] for a in rest):
            yield torch.cat([one, other], axis)
            yield torch.cat([other, one], axis)


def _same_size(leaves: Sequence[Value], leaf: Value) -> list[Value]:
    numel = leaf.row.numel
    return [value for value in leaves if value.row.numel == numel]


def turned(content: Tensor, held: Tensor) -> Iterator[Tensor]:
    """Yield a tensor in each order of its axes that has the shape; those of length 1 stand anywhere."""
    wanted = held.squeeze().shape
    for order in axis_orders(content):
        other = content.permute(order)
        if other.dim() != held.dim() or other.squeeze().shape == wanted:
            yield other.reshape(held.shape)


def _backwards(content: Tensor, held: Tensor) -> Iterator[Tensor]:
    """Yield the values of one tensor in the shape of another, backwards along some axes.

    None for one that is the other as it is: what reads it is wrong then, not the loader.
    One whose axes a loader has put in another order may lack a turn in space, along
    several axes; along one alone a line would turn what it is multiplied with.
    """
    if content.shape == held.shape and torch.equal(content, held):
        return
    for layout in turned(content, held):
        for axes in backward_axes(layout):
            if len(axes) > 1 or content.shape == held.shape:
                yield layout.flip(axes)


def _gates_of(content: Tensor, held: Tensor) -> Iterator[Tensor]:
    """Yield the same with the blocks of an axis, as gates are, in every order."""
    for layout in turned(content, held):
        for axis in range(layout.dim()):
            for parts in GATES:
                size = layout.shape[axis]
                if size % parts == 0 and size > parts:
                    gates = layout.chunk(parts, axis)
                    for order in permutations(range(parts)):
                        yield torch.cat([gates[i] for i in order], axis)


def _split_axes(content: Tensor, held: Tensor) -> Iterator[Tensor]:
    """Yield the same with two axes exchanged of which another one is made.

    So do channels and pixels stand that one program flattens in the other order, and, in
    each head, the pairs of numbers that rotary attention turns.
    """
    for axis, size in enumerate(content.shape):
        for outer, first in _factors(size):
            sizes = (outer, first, size // outer // first)
            split = content.reshape(
                *content.shape[:axis], *sizes, *content.shape[axis + 1 :]
            )
            exchanged = split.transpose(axis + 1, axis + 2).flatten(axis, axis + 2)
            yield from turned(exchanged, held)


def _factors(size: int) -> list[tuple[int, int]]:
    """Return how an axis may be split in three, of which the last two are exchanged.

    The first two sizes; splits in two, whose first size is one, before the others.

    >>> _factors(8)
    [(1, 2), (1, 4), (2, 2)]
    """
    outers = [outer for outer in range(1, size) if size % outer == 0]
    return [
        (outer, first)
        for outer in outers
        for first in range(2, size // outer)
        if size // outer % first == 0
    ]


#: Yields what a tensor of some content may hold in the place of another.
Layouts = Callable[[Tensor, Tensor], Iterator[Tensor]]
PLAIN_LAYOUTS: tuple[Layouts, ...] = (turned, _split_axes)
#: Gates have 24 orders: every leaf is tried in plain layouts before.
LAYOUTS: tuple[Layouts, ...] = (turned, _backwards, _split_axes, _gates_of)


def _is_in_reference(sides: Sides, tensor: Tensor) -> bool:
    """Return True where the reference has such a value, and the candidate had none."""
    sketch = sketch_of_tensor(tensor)
    if sketch is None:
        return False
    return any(
        key not in sides.agreeing and not sides.reference.values[key].says_nothing
        for key in sides.near_in_reference(sketch)
    )


class _Turns:
    """The turns of a loop, such as single samples, of what the reference does at once."""

    def __init__(self, sides: Sides, whole: Value) -> None:
        self._limit = sides.limit
        self._whole = sides.reference.tensor(whole.key)
        self._sorted: dict[int, Tensor] = {}

    def have(self, tensor: Tensor) -> bool:
        """Return True where one of them has these elements, in any layout."""
        numel = tensor.numel()
        if self._whole is None or numel < FEWEST_IN_TURN or self._whole.numel() % numel:
            return False
        present = in_reals(tensor).reshape(-1).to(torch.float64).sort().values
        if not present.any():
            return False
        if numel not in self._sorted:
            self._sorted[numel] = _sorted_turns(self._whole, numel)
        apart = torch.linalg.vector_norm(self._sorted[numel] - present, dim=1)
        return bool((apart <= self._limit * present.norm()).any())


def _sorted_turns(whole: Tensor, numel: int) -> Tensor:
    """Return the elements of each turn of ``numel``, sorted: along any axis, or a part of one.

    Of all turns, (turns, numel): those of a batch may be taken first or last in it.
    """
    values = in_reals(whole.detach()).to(torch.float64)
    count = values.numel() // numel
    turns = [values.reshape(count, -1)]
    is_small = values.numel() <= MOST_SORTED
    for axis, size in enumerate(values.shape if is_small else ()):
        if size % count == 0:
            before, after = values.shape[:axis], values.shape[axis + 1 :]
            first = values.reshape(*before, count, size // count, *after)
            last = values.reshape(*before, size // count, count, *after)
            turns += [first.movedim(axis, 0), last.movedim(axis + 1, 0)]
    return torch.cat([each.reshape(count, -1).sort(dim=1).values for each in turns])


def values_with(
    program: TracedProgram, needed: Collection[int], leaf: int, other: Tensor
) -> Iterator[tuple[int, Tensor]]:
    """Yield recorded values as they would be with other values in a leaf.

    Of the records that are needed, in the order of execution; none from the first call
    on that cannot run.
    """
    try:
        for row, tensor in program.again({}, {leaf: other}, needed):
            yield row.record, tensor
    except CannotRun:
        return


def between(flow: Flow, leaf: int, keys: Iterable[int]) -> set[int]:
    """Return the records that lead from a leaf to some values, these among them."""
    return {record for key in keys for record in _between(flow, leaf, key)}


def _between(flow: Flow, leaf: int, key: int) -> set[int]:
    """Return the records that lead from a leaf to a value, the value among them."""
    rows = flow.step.rows
    leads: dict[int, bool] = {leaf: True}
    for record in sorted(rows):
        if record > key:
            break
        row = rows[record]
        if record != leaf and row.is_call:
            leads[record] = any(leads.get(i, False) for i in row.inputs)
    needed = {key}
    for record in sorted((r for r, does in leads.items() if does), reverse=True):
        if record in needed:
            needed.update(i for i in rows[record].inputs if leads.get(i, False))
    return {record for record in needed if record != leaf and leads.get(record, False)}


def blamed_values(sides: Sides, part: Part) -> Blamed | None:
    """Return the parameter to blame where the programs compute the same.

    The first that the first wrong value reads and nothing right does.
    """
    flow = sides.candidate
    named = [] if part.candidate is None else [part.candidate]
    near = [
        leaf
        for head in (*named, *part.heads)
        for leaf in leaves_near(flow, [head.key], sides.twins)
    ]
    region = sorted(part.region, key=lambda key: flow.values[key].order)
    further = [leaf for key in region for leaf in flow.parameters_read(key)]
    for leaf in (*near, *further):
        if not leaf.says_nothing and not is_right_elsewhere(sides, leaf):
            words = (
                f"the programs compute the same from here on; {leaf.row.name} holds "
                "other values, or the same in another order"
            )
            return Blamed(leaf, part.reference, words)
    return None


# -- by content ----------------------------------------------------------------------


def _by_content(
    sides: Sides, ours: Sequence[Value], theirs: Sequence[Value]
) -> Blamed | None:
    """Compare what the parameters on both sides hold."""
    lost = [v for v in ours if v.key not in sides.agreeing or v.says_nothing]
    foreign = [v for v in theirs if v.key not in sides.twins or v.says_nothing]
    lost = [v for v in lost if not _is_put_together(v, theirs)]
    foreign = [v for v in foreign if not _is_put_together(v, ours)]
    for leaf in foreign:
        wanted = _best_partner(sides, lost, leaf)
        if wanted is not None:
            return Blamed(leaf, wanted, _words_of(sides, leaf, wanted))
    return _of_another(sides, ours, theirs)


def _is_put_together(whole: Value, parts: Sequence[Value]) -> bool:
    """Return True where several of ``parts`` together are a parameter, or added up."""
    if whole.sketch is None or whole.says_nothing:
        return False
    others = [v for v in parts if v.sketch is not None and v.key != whole.key]
    for count in range(1, MOST_PARTS + 1):
        for chosen in combinations(others, count):
            if sum(v.sketch.numel for v in chosen if v.sketch) != whole.sketch.numel:
                continue
            if _together(whole.sketch, [v.sketch for v in chosen if v.sketch]):
                return True
    return False


def _together(whole: Sketch, parts: Sequence[Sketch]) -> bool:
    norm = float(np.sqrt(sum(part.size**2 for part in parts)))
    return abs(norm - whole.size) <= 1e-5 * whole.size


def _best_partner(sides: Sides, lost: Sequence[Value], leaf: Value) -> Value | None:
    """Return the reference's parameter that a foreign one stands for."""
    for wanted in _same_size(lost, leaf):
        ours = sides.reference.tensor(wanted.key)
        theirs = sides.candidate.tensor(leaf.key)
        if ours is None or theirs is None:
            return wanted
        how = relation(ours, theirs)
        if how is None and _holds_known_values(sides, leaf, theirs):
            continue
        if how is None or how.kind not in (EQUAL, PART, JOINED):
            return wanted
    return None


def _holds_known_values(sides: Sides, leaf: Value, held: Tensor) -> bool:
    """Return True where all that a parameter holds is in parameters of the reference.

    Cut and laid out in a way of its own, as a right port may do.
    """
    if leaf.says_nothing or not held.is_floating_point():
        return False
    wanted = torch.unique(held.reshape(-1))
    for value in sides.reference.values.values():
        if value.is_call or not value.row.name or not value.is_number:
            continue
        content = sides.reference.tensor(value.key)
        if content is not None and content.dtype == wanted.dtype:
            wanted = wanted[~torch.isin(wanted, content.reshape(-1))]
        if not wanted.numel():
            return True
    return False


def _of_another(
    sides: Sides, ours: Sequence[Value], theirs: Sequence[Value]
) -> Blamed | None:
    """A parameter that holds what the reference has elsewhere."""
    wanted_keys = {value.key for value in ours}
    read_keys = {value.key for value in theirs}
    for leaf in theirs:
        if leaf.says_nothing or is_right_elsewhere(sides, leaf):
            continue
        if _gives_only_right(sides, leaf):
            continue
        named = parameters_of_the_same(sides, leaf)
        if not named or any(value.key in wanted_keys for value in named):
            continue
        for wanted in _same_size(ours, leaf):
            twin = sides.agreeing.get(wanted.key)
            if twin is None or twin[0] not in read_keys:
                holds = f"{leaf.row.name} holds the reference's {named[0].row.name}"
                return Blamed(leaf, wanted, f"{holds}, not {wanted.row.name}")
    return None


def parameters_of_the_same(sides: Sides, leaf: Value) -> list[Value]:
    """Return the reference's parameters that hold what a candidate's does."""
    twins = [sides.reference.values[key] for key in sides.all_twins(leaf)]
    return [value for value in twins if value.row.name and not value.is_call]


def _gives_only_right(sides: Sides, leaf: Value) -> bool:
    """Return True where all calls that read a leaf agree, turns of a loop together too."""
    flow = sides.candidate
    waiting = list(flow.readers.get(leaf.key, ()))
    readers = []
    while waiting:
        reader = flow.values[waiting.pop()]
        if reader.row.phase != leaf.row.phase or reader.inner:
            continue
        if not reader.computes or reader.operator in _MOVES:
            waiting += flow.readers.get(reader.key, ())
        else:
            readers.append(reader)
    return bool(readers) and all(reader.key in sides.twins for reader in readers)


def is_right_elsewhere(sides: Sides, leaf: Value, but: Value | None = None) -> bool:
    """Return True where another call reads the leaf, and agrees, not only as a part of more.

    What agrees in another order than that of axes may be wrong for all that reads it.
    ``but``: what the same operator of the same line makes as this value is no other call.
    """
    waiting = list(sides.candidate.readers.get(leaf.key, ()))
    while waiting:
        reader = sides.candidate.values[waiting.pop()]
        if reader.row.phase != leaf.row.phase:
            continue
        if but is not None and _are_of_one_place(reader, but):
            continue
        if not reader.computes or reader.operator in _MOVES:
            waiting += sides.candidate.readers.get(reader.key, ())
            continue
        is_whole = reader.key in sides.twins and reader.key not in sides.several
        if is_whole and not reader.inner and is_in_order(sides, reader):
            return True
    return False


def _are_of_one_place(one: Value, other: Value) -> bool:
    """Return True for what one operator of one line makes, in turns of a loop too."""
    return (one.row.line, one.operator) == (other.row.line, other.operator)


def is_in_order(sides: Sides, value: Value) -> bool:
    """Return True where the elements of a value that agrees stand as the reference's do."""
    held = sides.candidate.tensor(value.key)
    if held is None:
        return True
    contents = [sides.reference.tensor(key) for key in sides.all_twins(value)]
    return any(content is None or same_layout(content, held) for content in contents)


def _words_of(sides: Sides, leaf: Value, wanted: Value) -> str:
    ours = sides.reference.tensor(wanted.key)
    theirs = sides.candidate.tensor(leaf.key)
    if ours is None or theirs is None:
        return f"{leaf.row.name} holds none of the reference's parameters"
    return _in_words(leaf, wanted, ours, theirs)


def _name_of(wanted: Value) -> str:
    return wanted.row.name or f"{wanted.operator} of {wanted.row.site}"


def _held_in_words(
    sides: Sides, leaf: Value, wanted: Value, content: Tensor, held: Tensor
) -> str:
    """Return what a parameter holds in place of what is wanted."""
    values = sides.reference.values
    twins = [values[key] for key in sides.all_twins(leaf)]
    names = [t.row.name for t in twins if t.row.name and not t.is_call]
    if relation(content, held) is None and names and wanted.row.name not in names:
        wanted_name = _name_of(wanted)
        return f"{leaf.row.name} holds the reference's {names[0]}, not {wanted_name}"
    return _in_words(leaf, wanted, content, held)


def _shifted_in_words(
    leaf: Value, wanted: Value, held: Tensor, other: Tensor
) -> str | None:
    """Return by how many rows a parameter holds what it should; None where it does not."""
    for axis, size in enumerate(held.shape):
        for lacking in range(1, min(MOST_LACKING, (size - 1) // 2) + 1):
            length = size - lacking
            ends = held.narrow(axis, lacking, length), other.narrow(axis, 0, length)
            starts = held.narrow(axis, 0, length), other.narrow(axis, lacking, length)
            is_later = torch.equal(*ends)
            if is_later or torch.equal(*starts):
                which = "later" if is_later else "earlier"
                places = "place" if lacking == 1 else "places"
                return (
                    f"{leaf.row.name} holds the reference's {_name_of(wanted)} {lacking} "
                    f"{places} {which} along axis {axis} than it should"
                )
    return None


def _wanted_in_words(content: Tensor, held: Tensor, other: Tensor) -> str:
    """Return how a parameter should hold the values that it holds in another layout."""
    before = relation(content, held)
    after = relation(content, other)
    if before is None or after is None or before.words == after.words:
        return ""
    if before.kind not in _LAYOUTS or after.kind not in _LAYOUTS:
        return ""
    return f"; here it should be {after.words}"


def _in_words(leaf: Value, wanted: Value, ours: Tensor, theirs: Tensor) -> str:
    how = relation(ours, theirs)
    name = _name_of(wanted)
    if how is not None:
        return f"{leaf.row.name} is the reference's {name} {how.words}"
    narrow = fewer_digits(ours, theirs, unit(leaf.row.dtype))
    if narrow is not None:
        rounded = ours.to(getattr(torch, narrow)).to(ours.dtype)
        if relation(rounded, theirs) is not None:
            return f"{leaf.row.name} is the reference's {name} rounded to {narrow}"
    return f"{leaf.row.name} holds other values than the reference's {name}"


def blamed_duplicate(sides: Sides, part: Part) -> Blamed | None:
    """Return a parameter that holds what another one does too, in place of a lost one.

    The reference has both; the candidate has one of them twice. Named is a holder that
    nothing reads rightly; of several the later one where the reference has the lost one
    after the other.
    """
    lost = {
        leaf.key: leaf
        for leaf in leaves_of(sides.reference, sorted(part.expected))
        if leaf.key not in sides.agreeing and not leaf.says_nothing
    }
    if not lost:
        return None
    ours = parameters_of(sides.reference)
    holders = _holders(sides, ours, list(lost.values()))
    missing: list[_Piece] = [(key,) for key in lost]
    missing += [piece for piece in _pieces_beside(holders) if piece not in holders]
    read = {leaf.key for leaf in leaves_of(sides.candidate, sorted(part.region))}
    for piece, leaves in holders.items():
        if len(leaves) <= _times_in_reference(sides, ours, leaves[0]):
            continue
        if read.isdisjoint(leaf.key for leaf in leaves):
            continue
        other = next((m for m in missing if _same_place(sides, piece, m)), None)
        if other is not None:
            wrong = [each for each in leaves if not is_right_elsewhere(sides, each)]
            wrong = wrong or leaves
            leaf = wrong[-1] if other > piece else wrong[0]
            return _held_twice(sides, leaf, piece, other)
    return None


def _held_twice(sides: Sides, leaf: Value, piece: _Piece, other: _Piece) -> Blamed:
    held = sides.reference.values[piece[0]].row.name
    wanted = sides.reference.values[other[0]]
    words = f"{leaf.row.name} holds {_piece_in_words(held, piece)}, as another "
    words += f"does, not {_piece_in_words(wanted.row.name, other)}"
    return Blamed(leaf, wanted, words)


def _times_in_reference(sides: Sides, ours: Sequence[Value], leaf: Value) -> int:
    """Return how many of the reference's parameters hold the values of a leaf; at least 1."""
    twins = set(sides.all_twins(leaf))
    return max(1, sum(each.key in twins for each in ours))


#: A parameter of the reference by key, or a part of one: key, axis, count and number.
_Piece = tuple[int, ...]


def parameters_of(flow: Flow) -> list[Value]:
    """Return the named leaves of the forward pass, in order."""
    return [
        value
        for value in flow.in_order()
        if value.row.name
        and not value.is_call
        and value.row.phase == "forward"
        and not value.says_nothing
    ]


def _holders(
    sides: Sides, ours: Sequence[Value], lost: Sequence[Value]
) -> dict[_Piece, list[Value]]:
    """Return which leaves of the candidate hold a parameter, or a part of a lost one."""
    names = {leaf.key for leaf in ours}
    parts = SketchIndex(
        (number, sketch) for number, (_, sketch) in enumerate(_parts_of(sides, lost))
    )
    pieces = [piece for piece, _ in _parts_of(sides, lost)]
    holders: dict[_Piece, list[Value]] = {}
    for leaf in parameters_of(sides.candidate):
        for key in sides.all_twins(leaf):
            if key in names:
                holders.setdefault((key,), []).append(leaf)
        if leaf.sketch is not None and leaf.key not in sides.twins:
            for _, number in parts.near(leaf.sketch, sides.limit):
                holders.setdefault(pieces[number], []).append(leaf)
    return holders


def _parts_of(sides: Sides, leaves: Sequence[Value]) -> Iterator[tuple[_Piece, Sketch]]:
    """Yield the equal parts of parameters along each axis, where tensors were kept."""
    for leaf in leaves:
        tensor = sides.reference.tensor(leaf.key)
        if tensor is None:
            continue
        for axis in range(tensor.dim()):
            for count in range(2, MOST_PARTS + 1):
                if tensor.shape[axis] % count or tensor.shape[axis] == count:
                    continue
                for number, part in enumerate(tensor.chunk(count, axis)):
                    sketch = sketch_of_tensor(part)
                    if sketch is not None and not sketch.constant:
                        yield (leaf.key, axis, count, number), sketch


def _pieces_beside(holders: Mapping[_Piece, object]) -> Iterator[_Piece]:
    """Yield the other parts of the parameters of which a part is held."""
    for piece in list(holders):
        if len(piece) > 1:
            key, axis, count, _ = piece
            yield from ((key, axis, count, number) for number in range(count))


def _same_place(sides: Sides, one: _Piece, other: _Piece) -> bool:
    """Return True for parts of one parameter, and for parameters of one shape."""
    if len(one) != len(other):
        return False
    if len(one) > 1:
        return one[:-1] == other[:-1]
    values = sides.reference.values
    return values[one[0]].row.shape == values[other[0]].row.shape


def _piece_in_words(name: str | None, piece: _Piece) -> str:
    if len(piece) == 1:
        return f"the reference's {name}"
    return f"part {piece[-1] + 1} of {piece[2]} of the reference's {name}"


def leaves_of(flow: Flow, keys: Iterable[int]) -> list[Value]:
    """Return the parameters and buffers that values read, in the order of execution."""
    leaves: dict[int, Value] = {}
    waiting = list(keys)
    seen = set(waiting)
    while waiting:
        value = flow.values[waiting.pop()]
        for key in (*value.inputs, *value.row.inputs):
            if key in seen or key not in flow.values:
                continue
            seen.add(key)
            source = flow.values[key]
            if source.row.name and not source.is_call:
                leaves[key] = source
            elif not source.computes or source.inner:
                waiting.append(key)
    return sorted(leaves.values(), key=lambda value: value.order)


# -- other values ------------------------------------------------------------------


def blamed_step(sides: Sides, part: Part) -> Blamed | None:
    """Return a step that changes nothing where the reference adds something.

    Or the one that takes what the reference has elsewhere.
    """
    if part.candidate is None or part.reference is None:
        return None
    if not math.isinf(part.distance):
        return None
    expected = set(_boundary(sides.reference, [part.reference.key], sides.agreeing))
    read = _boundary(sides.candidate, [part.candidate.key], sides.twins)
    for key in read:
        value = sides.candidate.behind(key)
        if not value.computes or expected.isdisjoint(sides.all_twins(value)):
            continue
        for source_key in value.row.inputs:
            source = sides.candidate.behind(source_key)
            if source.sketch is None or source.sketch.size or not source.is_number:
                continue
            if source.is_call:
                if _has_zeros(sides.reference, source):
                    continue
                return Blamed(value, part.reference, "what it adds is zero")
            return Blamed(source, part.reference, f"{source.row.name} holds zeros")
    return _foreign_step(sides, part.reference, read)


def _has_zeros(flow: Flow, like: Value) -> bool:
    """Return True where a side has zeros of as many elements: the state of a first turn."""
    return any(
        value.is_number
        and value.sketch is not None
        and not value.sketch.size
        and value.row.numel == like.row.numel
        for value in flow.values.values()
    )


def _foreign_step(sides: Sides, wanted: Value, read: Sequence[int]) -> Blamed | None:
    """Return what makes a value right that belongs elsewhere."""
    sources = upstream(sides.reference, [wanted.key], lambda _value: True)
    ours = _boundary(sides.reference, [wanted.key], sides.agreeing)
    beside = {
        key for value in (wanted,) for key in _readers_inputs(sides.reference, value)
    }
    for key in read:
        value = sides.candidate.values[key]
        if not value.is_call or value.says_nothing or not value.is_number:
            continue
        twins = sides.all_twins(value)
        if not twins or not sources.union(beside).isdisjoint(twins):
            continue
        if not _accounts(sides, value, ours):
            continue
        taken = value
        while not taken.computes and len(taken.inputs) == 1:
            taken = sides.candidate.values[taken.inputs[0]]
        twin = sides.reference.values[twins[0]]
        leaves = sides.candidate.parameters_read(taken.key)
        words = f"{twin.operator} of {twin.row.site} ({twin.row.line})"
        if leaves and taken.operator not in EXACT:
            holds = (
                f"with {leaves[0].row.name} it gives what the reference has at {words}"
            )
            return Blamed(leaves[0], twin, holds)
        return Blamed(taken, twin, f"it takes what the reference has at {words}")
    return None


def _accounts(sides: Sides, value: Value, wanted: Sequence[int]) -> bool:
    """Return True where what the reference reads instead makes a later value right.

    True too without tensors, where it cannot be tried.
    """
    held = sides.candidate.tensor(value.key)
    if held is None or value.inner:
        return True
    named = _next_values(sides, value.key)[1:]
    program = TracedProgram(sides.candidate)
    needed = between(sides.candidate, value.key, named)
    for key in wanted:
        other = sides.reference.tensor(key)
        if other is None or other.numel() != held.numel():
            continue
        for layout in turned(other.to(held.dtype), held):
            changed = values_with(program, needed, value.key, layout)
            if any(
                record in named and _is_in_reference(sides, tensor)
                for record, tensor in changed
            ):
                return True
    return False


def _readers_inputs(flow: Flow, value: Value) -> set[int]:
    """Return what is read together with a value."""
    keys = {
        k
        for reader in flow.readers.get(value.key, ())
        for k in flow.values[reader].inputs
    }
    return upstream(flow, sorted(keys), lambda _value: True)


# -- layouts -------------------------------------------------------------------------


def blamed_layout(sides: Sides, part: Part) -> Blamed | None:
    """Return what puts the right values into the wrong places, or reads others.

    None where what the two parts read agrees up to the order and joining of axes, and
    without tensors.
    """
    if part.candidate is None or part.reference is None:
        return None
    expected = _boundary(sides.reference, [part.reference.key], sides.agreeing)
    read = _boundary(sides.candidate, [part.candidate.key], sides.twins)
    for key in read:
        value = sides.candidate.values[key]
        if not value.is_call or value.says_nothing or not value.is_number:
            continue
        twins = [k for k in sides.all_twins(value) if k in expected]
        if not twins:
            continue
        if not any(_same_places(sides, twin, key) for twin in twins):
            return _first_wrong_place(sides, twins[0], value)
    return None


def _boundary(flow: Flow, starts: Sequence[int], agreeing: object) -> list[int]:
    """Return the values that agree and are read by a region that ends with ``starts``."""
    boundary: dict[int, None] = {}
    seen: set[int] = set()
    waiting = [k for key in starts for k in flow.values[key].inputs]
    while waiting:
        key = waiting.pop(0)
        if key in seen or key not in flow.values:
            continue
        seen.add(key)
        if key in agreeing:  # type: ignore[operator]
            boundary[key] = None
        else:
            waiting += flow.values[key].inputs
    return list(boundary)


def _same_places(sides: Sides, twin: int, key: int) -> bool:
    """Return True where a value agrees with one of the views of a reference's value."""
    theirs = sides.candidate.tensor(key)
    whole = sides.reference.tensor(twin)
    if theirs is None or whole is None or theirs.numel() != whole.numel():
        return True
    value: Value | None = sides.reference.values[twin]
    while value is not None:
        ours = sides.reference.tensor(value.key)
        if ours is None or same_layout(ours, theirs):
            return True
        if _same_but_for_padding(sides, ours, theirs):
            return True
        if value.computes or len(value.inputs) != 1:
            return False
        value = sides.reference.values.get(value.inputs[0])
    return False


def _same_but_for_padding(sides: Sides, ours: Tensor, theirs: Tensor) -> bool:
    """Return True where two values agree in the places of a batch that count."""
    return any(
        same_layout(kept, other)
        for mask in sides.padding
        for kept in kept_rows(ours, mask)
        for other in kept_rows(theirs, mask)
    )


def _is_in_place(sides: Sides, value: Value) -> bool:
    twins = sides.all_twins(value)[:MOST_LEAVES]
    return any(_same_places(sides, twin, value.key) for twin in twins)


def _first_wrong_place(sides: Sides, twin: int, value: Value) -> Blamed | None:
    """Follow a value back to the first that is in the wrong place."""
    wrong = value
    while True:
        sources = _boundary(sides.candidate, [wrong.key], sides.twins)
        moved = [
            source
            for source in (sides.candidate.values[key] for key in sources)
            if source.is_call
            and source.is_number
            and not source.says_nothing
            and not _is_in_place(sides, source)
        ]
        moved = moved or _misplaced_parts(sides, wrong)
        if not moved:
            break
        wrong = moved[0]
    if wrong is not value:
        twin = sides.twins[wrong.key][0]
    expected = sides.reference.tensor(twin)
    if expected is None:
        return None
    ours = _read_by(sides.reference, sides.reference.values[twin], sides.agreeing)
    theirs = _read_by(sides.candidate, wrong, sides.twins)

    program = TracedProgram(sides.candidate)
    flow = sides.candidate
    needed = {leaf.key: between(flow, leaf.key, [wrong.key]) for leaf in theirs}

    def agrees(leaf: Value, other: Tensor) -> bool:
        values = dict(values_with(program, needed[leaf.key], leaf.key, other))
        return wrong.key in values and same_layout(expected, values[wrong.key])

    proven = None
    if not wrong.inner:
        proven = tried_leaves(sides, ours, theirs, agrees, TRIALS)
    if proven is not None:
        return proven
    words = f"{wrong.operator} to {_shape(wrong)} puts the right values in other places"
    return Blamed(wrong, sides.reference.values[twin], words)


def _misplaced_parts(sides: Sides, joined: Value) -> list[Value]:
    """Return what turns parts that are joined as the reference does, each the other way.

    Alone a part may have its axes in any order; joined, it has to lie as the other does.
    """
    reference, candidate = sides.reference, sides.candidate
    if joined.operator not in _JOINS:
        return []
    for key in sides.all_twins(joined):
        twin = reference.values[key]
        if twin.operator not in _JOINS or len(twin.inputs) != len(joined.inputs):
            continue
        pairs = zip(joined.inputs, twin.inputs, strict=True)
        return [
            turn
            for part, other in pairs
            if other in sides.all_twins(candidate.values[part])
            and not _lie_alike(reference.tensor(other), candidate.tensor(part))
            and (turn := _last_turn(candidate, candidate.values[part])) is not None
        ]
    return []


def _lie_alike(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Return True for the same elements one after the other, and where nothing is known."""
    if ours is None or theirs is None:
        return True
    return is_close(ours, theirs)


def _last_turn(flow: Flow, value: Value) -> Value | None:
    """Return what has put the axes of a value in their order; None for nothing."""
    while value.is_call and value.operator in _MOVES:
        if value.operator in _TURNS:
            return value
        sources = [flow.values[key] for key in value.inputs if key in flow.values]
        if len(sources) != 1:
            return None
        [value] = sources
    return None


def _shape(value: Value) -> str:
    shape = value.tensor.shape if value.tensor is not None else value.row.shape
    return str(list(shape or ()))


def same_layout(ours: Tensor, theirs: Tensor) -> bool:
    """Return True where two tensors are one up to the order and the joining of axes.

    >>> x = torch.randn(2, 3, 4)
    >>> same_layout(x, x.permute(0, 2, 1)), same_layout(x, x.permute(2, 0, 1).flatten(1))
    (True, True)
    >>> same_layout(x, x.reshape(2, 4, 3))
    False
    """
    for fine, coarse in ((ours, theirs), (theirs, ours)):
        for order in axis_orders(fine):
            other = fine.permute(order)
            if _joins_to(other.shape, coarse.shape) and is_close(other, coarse):
                return True
    return False


def is_close(one: Tensor, other: Tensor) -> bool:
    """Return True for tensors of the same elements in the same order, but for rounding."""
    a = in_reals(one).reshape(-1).to(torch.float64)
    b = in_reals(other).reshape(-1).to(torch.float64)
    return a.shape == b.shape and float((a - b).norm()) <= 1e-4 * float(a.norm())


def _joins_to(fine: Sequence[int], coarse: Sequence[int]) -> bool:
    """Return True where joining neighbouring axes makes one shape of the other."""
    waiting = [size for size in fine if size != 1]
    for size in coarse:
        if size == 1:
            continue
        joined = 1
        while joined < size and waiting:
            joined *= waiting.pop(0)
        if joined != size:
            return False
    return not waiting
