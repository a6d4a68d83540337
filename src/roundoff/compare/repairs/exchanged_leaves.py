"""Has a loader filled two parameters, or two parts of one, the wrong way round?

Keys and values, gates and ways up: what holds one may hold the other, and neither alone
makes anything right. So two are exchanged together, and what is made of them runs again.
Several that together hold one of the reference's may have been cut out of it otherwise,
every third row for a third of the rows, and are cut again. What a loader does wrong to
one parameter it does to others: those of one layer have their parts in one order, and all
that stand in several axes may have two of these exchanged.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import combinations, permutations, product

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.leaf_contents import turned
from roundoff.compare.blame.near_leaves import leaves_of, of_leaves_alone
from roundoff.compare.judging.step_causes import listed
from roundoff.compare.records.parameter_names import numbers_in, without_numbers
from roundoff.compare.records.value_sketch import rising
from roundoff.compare.repairs.added_leaves import with_what_is_added, with_zeros_filled
from roundoff.compare.repairs.exchanged_parts import (
    exchanged_parts,
    parts_of_all_read_alike,
    parts_of_several,
    parts_of_stacked,
)
from roundoff.compare.repairs.exchanged_words import exchanged_words
from roundoff.compare.repairs.found_rows import moved_rows
from roundoff.compare.repairs.goals import SEVERAL
from roundoff.compare.repairs.leaf_changes import (
    Held,
    LeafChange,
    made_ready,
    of_other_sign,
    recut,
)
from roundoff.compare.repairs.lost_values import loses
from roundoff.compare.repairs.other_layers import (
    in_all_layers,
    in_all_modules,
    in_all_read_alike,
    in_shared_module,
)
from roundoff.compare.repairs.packed_leaves import (
    PARTS,
    laid_out_as,
    packings,
    parts_of,
)
from roundoff.compare.repairs.replaceable_values import before
from roundoff.compare.repairs.rows_beside import rows_as_beside
from roundoff.compare.repairs.trials import BUDGET, Region, Trials
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides, first_of
from roundoff.ops import operators_that

_PRODUCTS = operators_that("multiply")
#: Parameters of a region of which pairs are tried.
MOST_LEAVES = 16
#: Calls between the layers and what a region reads of them: moves, a bias, a norm, a turn.
MOST_BEFORE = 48
#: Axes from the last on of which two may stand the other way round.
MOST_AXES = 4
#: Parameters that a loader turned alike, where it turned not all of one kind: two
#: projections with their biases.
MOST_ALIKE = 4


def exchanged_leaves(sides: Sides, trials: Trials, region: Region) -> Blamed | None:
    """Return a parameter after whose exchange all agrees; None where none is exchanged.

    Args:
        sides: both programs.
        trials: of the candidate.
        region: where the two part.
    """
    leaves = _read_near(sides.candidate, region.parted)
    ours = _read_near(sides.reference, region.expected)
    held = [(leaf, sides.candidate.tensor(leaf.key)) for leaf in leaves]
    present = [(leaf, tensor) for leaf, tensor in held if tensor is not None]
    kinds = (
        rows_as_beside(sides, present),
        with_what_is_added(sides, present),
        with_zeros_filled(sides, present),
        of_other_sign(present),
        _exchanges(sides, leaves),
        exchanged_words(sides.candidate, leaves),
        parts_of_all_read_alike(sides.candidate, present),
        _with_axes_exchanged(present),
        _alike(sides, leaves),
        _cuts(sides, ours, leaves),
        _packed_otherwise(sides, leaves),
        moved_rows(sides, present),
        recut(sides, present),
        made_ready(sides.reference, present),
        parts_of_stacked(present),
    )
    search = _Search(sides, trials)
    tried = (search.first_right(kind) for kind in kinds)
    found = next((blamed for blamed in tried if blamed is not None), None)
    return found or search.several()


class _Search:
    """The trials of a region, and the changes that helped without making all right."""

    def __init__(self, sides: Sides, trials: Trials) -> None:
        self._sides = sides
        self._trials = trials
        self._helpful: list[tuple[int, LeafChange]] = []

    def first_right(self, changes: Iterator[LeafChange]) -> Blamed | None:
        """Return the first parameter after whose change all agrees, while trials are left."""
        trials = self._trials
        trials.left = BUDGET
        for change in changes:
            if trials.left < 0:
                return None
            agrees, gained = trials.outcome(
                {}, change.tensors, is_patient=change.is_patient
            )
            is_by_chance = trials.goal.is_far and not gained
            if agrees and not is_by_chance and not self._loses(change.tensors):
                return self._blamed(change)
            helps = len(gained) >= SEVERAL
            if helps:
                self._helpful.append((len(gained), change))
            if trials.is_unconfirmed or (trials.whole is None and helps):
                blamed = self._in_other_layers(change)
                if blamed is not None:
                    return blamed
        return None

    def _in_other_layers(self, change: LeafChange) -> Blamed | None:
        """Return the parameter of a change that is right in all layers, and not in one alone."""
        flow = self._sides.candidate
        most = len(change.tensors)
        everywhere = (
            in_all_layers(flow, change),
            in_all_modules(flow, change),
            in_all_read_alike(flow, change),
            in_shared_module(flow, change),
        )
        for tensors in everywhere:
            if len(tensors) > most:
                most = len(tensors)
                agrees = self._trials.outcome({}, tensors)[0]
                if agrees and not self._loses(tensors):
                    return self._blamed(change)
        return None

    def several(self) -> Blamed | None:
        """Return the first of several parameters, changed one after the other, with which all
        agrees: what helps most goes first, and each has to help more.
        """
        self._helpful.sort(key=lambda each: each[0], reverse=True)
        if len(self._helpful) < 2:
            return None
        trials = self._trials
        trials.left = BUDGET
        most, first = self._helpful[0]
        tensors = {**first.tensors}
        for _, change in self._helpful[1:]:
            if trials.left < 0:
                return None
            if not tensors.keys().isdisjoint(change.tensors):
                continue
            together = {**tensors, **change.tensors}
            agrees, gained = trials.outcome({}, together)
            if agrees and not self._loses(together):
                return self._blamed(first)
            if len(gained) > most:
                most = len(gained)
                tensors = together
        return None

    def _blamed(self, change: LeafChange) -> Blamed:
        """Name the largest of several, a weight and not its bias; of equal ones the first."""
        values = self._sides.candidate.values
        changed = [values[key] for key in change.tensors]
        changed.sort(key=lambda leaf: (-(leaf.row.numel or 0), leaf.order))
        leaf = changed[0]
        return Blamed(leaf, None, change.words, change.tensors[leaf.key])

    def _loses(self, tensors: Mapping[int, Tensor]) -> bool:
        return loses(self._sides, self._trials.program, {}, tensors)


def _read_near(flow: Flow, region: Collection[int]) -> list[Value]:
    """Return the parameters that a region reads, and what it is made of.

    The nearest to where it begins first: parts that were cut otherwise agree as long as
    they are taken together. Those of one name in several layers wait for other names.
    """
    heads = [value.key for value in first_of(flow, set(region))]
    near: dict[Value, None] = {}
    for keys in (heads, sorted(region)):
        source = [value for value in before(flow, keys) if value.is_call]
        layers = [value.key for value in _layers_of_values(flow, source)]
        for key in (*keys, *layers):
            near |= dict.fromkeys(leaves_of(flow, [key]))
    alike: Counter[str] = Counter()
    turns: dict[Value, int] = {}
    for leaf in near:
        name = without_numbers(leaf.row.name or "")
        turns[leaf] = alike[name]
        alike[name] += 1
    return sorted(near, key=lambda leaf: turns[leaf])[:MOST_LEAVES]


def _layers_of_values(flow: Flow, values: Sequence[Value]) -> Iterator[Value]:
    """Yield what values are made of, back to the products with weights.

    Scaled, normed or turned, their elements stand where these have put them. A product of
    two values that are computed, as scores are of queries and keys, is looked behind once.
    """
    waiting = [(value, 1) for value in values]
    seen: set[int] = set()
    while waiting and len(seen) < MOST_BEFORE:
        value, products = waiting.pop(0)
        if value.key in seen:
            continue
        seen.add(value.key)
        yield value
        inputs = [flow.values[key] for key in value.inputs if key in flow.values]
        computed = [each for each in inputs if each.is_call and each.is_number]
        if value.operator in _PRODUCTS:
            weights = [each for each in computed if of_leaves_alone(flow, each)]
            is_of_two = len(computed) - len(weights) > 1
            computed = computed if is_of_two and products else weights
            products -= is_of_two
        waiting += [(each, products) for each in computed]


def _exchanges(sides: Sides, leaves: Sequence[Value]) -> Iterator[LeafChange]:
    held = {leaf.key: sides.candidate.tensor(leaf.key) for leaf in leaves}
    for leaf, other in combinations(leaves, 2):
        first = held[leaf.key]
        second = held[other.key]
        if first is None or second is None or first.shape != second.shape:
            continue
        if first.dtype == second.dtype and not torch.equal(first, second):
            tensors = {leaf.key: second, other.key: first}
            words = f"{leaf.row.name} and {other.row.name} stand in for each other"
            yield LeafChange(tensors, words)
    yield from _of_layers(sides.candidate, leaves)
    yield from _of_layers_alike(sides.candidate, leaves)
    for leaf in leaves:
        tensor = held[leaf.key]
        if tensor is not None:
            yield from exchanged_parts(leaf, tensor)


def _of_layers(flow: Flow, leaves: Sequence[Value]) -> Iterator[LeafChange]:
    """Yield two layers with all their parameters of one name and shape exchanged."""
    layers = _layers_of(leaves)
    for (name, layer), (other_name, other) in combinations(layers.items(), 2):
        tensors = _exchanged(flow, layer, other)
        if len(tensors) > 2:
            words = f"{name} and {other_name} stand in for each other"
            yield LeafChange(tensors, words)


def _of_layers_alike(flow: Flow, leaves: Sequence[Value]) -> Iterator[LeafChange]:
    """Yield two layers exchanged wherever they stand beside each other: in every head, as
    the queries and keys of each, whose names differ in numbers alone."""
    every = [v for v in flow.in_order() if not v.is_call and v.row.name]
    alike: dict[str, dict[tuple[str, ...], dict[str, Value]]] = {}
    for name, layer in _layers_of(every).items():
        alike.setdefault(without_numbers(name), {})[numbers_in(name)] = layer
    near = {without_numbers(name) for name in _layers_of(leaves)}
    for kind, other_kind in combinations(sorted(near), 2):
        others = alike[other_kind]
        pairs = [(a, others[n]) for n, a in alike[kind].items() if n in others]
        tensors: dict[int, Tensor] = {}
        for layer, other in pairs:
            tensors |= _exchanged(flow, layer, other)
        if len(pairs) > 1 and tensors:
            words = f"each {kind} and {other_kind} stand in for each other"
            yield LeafChange(tensors, words)


def _exchanged(
    flow: Flow, layer: Mapping[str, Value], other: Mapping[str, Value]
) -> dict[int, Tensor]:
    """Return what two layers hold if all parameters of one name and shape are exchanged."""
    tensors: dict[int, Tensor] = {}
    for last in layer.keys() & other.keys():
        first = flow.tensor(layer[last].key)
        second = flow.tensor(other[last].key)
        if first is not None and second is not None and first.shape == second.shape:
            tensors |= {layer[last].key: second, other[last].key: first}
    return tensors


def _layers_of(leaves: Sequence[Value]) -> dict[str, dict[str, Value]]:
    """Return the parameters of each layer by the last word of their names."""
    layers: dict[str, dict[str, Value]] = {}
    for leaf in leaves:
        name = leaf.row.name or ""
        last = re.split(r"[._/]", name)[-1]
        layers.setdefault(name[: -len(last) - 1], {})[last] = leaf
    return layers


def _alike(sides: Sides, leaves: Sequence[Value]) -> Iterator[LeafChange]:
    """Yield several parameters, each changed in the same way."""
    held = [(leaf, sides.candidate.tensor(leaf.key)) for leaf in leaves]
    present = [(leaf, tensor) for leaf, tensor in held if tensor is not None]
    for layer in _layers_of(leaves).values():
        members = [(leaf, tensor) for leaf, tensor in present if leaf in layer.values()]
        if len(members) > 1:
            yield from parts_of_several(members)


def _with_axes_exchanged(present: Sequence[Held]) -> Iterator[LeafChange]:
    """Yield several parameters, each with the same two axes the other way round.

    All that have two axes of these sizes, those of equal sizes first, as a kernel has; then
    some of them.
    """
    groups = [
        (places, group)
        for places in combinations(range(-MOST_AXES, 0), 2)
        for group in _of_equal_axes(present, places)
    ]

    def is_square(places: tuple[int, int], group: Sequence[Held]) -> bool:
        shape = group[0][1].shape
        return shape[places[0]] == shape[places[1]]

    groups.sort(key=lambda each: not is_square(*each))
    for is_of_some in (False, True):
        for places, group in groups:
            yield from _together(group, places, _axes_exchanged, is_of_some)
            if not is_square(places, group):
                yield from _together(group, places, _axes_split_otherwise, is_of_some)


def _of_equal_axes(
    present: Sequence[Held], places: tuple[int, int]
) -> Iterator[list[Held]]:
    """Yield the parameters that have two axes of the same sizes, two at least."""
    groups: dict[tuple[int, ...], list[Held]] = {}
    for leaf, tensor in present:
        if tensor.dim() >= -places[0]:
            sizes = tuple(tensor.shape[place] for place in places)
            groups.setdefault(sizes, []).append((leaf, tensor))
    yield from (group for group in groups.values() if len(group) > 1)


def _axes_exchanged(tensor: Tensor, places: tuple[int, int]) -> Tensor:
    """Return what stands in two axes the other way round, in the shape that it has."""
    return tensor.transpose(*places).reshape(tensor.shape)


def _axes_split_otherwise(tensor: Tensor, places: tuple[int, int]) -> Tensor:
    """Return the same elements where one axis was cut in two the other way round."""
    shape = list(tensor.shape)
    first, second = places
    shape[first] = tensor.shape[second]
    shape[second] = tensor.shape[first]
    return tensor.reshape(shape).transpose(*places).contiguous()


def _together(
    group: Sequence[Held],
    places: tuple[int, int],
    change: Callable[[Tensor, tuple[int, int]], Tensor],
    is_of_some: bool,
) -> Iterator[LeafChange]:
    """Yield all of them changed, or each few of them."""
    dims = group[0][1].dim()

    def made(tensor: Tensor) -> Tensor:
        return change(tensor, places) if tensor.dim() == dims else tensor

    changed = [(leaf, change(tensor, places)) for leaf, tensor in group]
    few = range(2, min(MOST_ALIKE, len(group) - 1) + 1)
    for count in few if is_of_some else (len(group),):
        for some in combinations(changed, count):
            tensors = {leaf.key: tensor for leaf, tensor in some}
            names = " and ".join(leaf.row.name or "" for leaf, _ in some)
            words = f"{names} have axes {places[0]} and {places[1]} the other way round"
            yield LeafChange(tensors, words, None if is_of_some else made)


def _packed_otherwise(sides: Sides, theirs: Sequence[Value]) -> Iterator[LeafChange]:
    """Yield parameters that hold several of the reference's, packed in other orders.

    A weight with its bias, then one of the two alone.
    """
    ours = [v for v in sides.reference.in_order() if not v.is_call and v.row.name]
    held = [(leaf, sides.candidate.tensor(leaf.key)) for leaf in theirs]
    present = [(leaf, tensor) for leaf, tensor in held if tensor is not None]
    weights = [pair for pair in present if pair[1].dim() > 1]
    biases = [pair for pair in present if pair[1].dim() == 1]
    for leaf, weight in weights:
        for group, parts in parts_of(sides, weight, ours):
            count, rows = len(parts), parts[0].shape[0]
            with_bias = _bias_of(sides, biases, ours, (count, rows))
            names = listed([each.row.name or "" for each in group])
            for packing in packings(count, rows):
                words = (
                    f"it holds {names}; packed as {packing.words} it would be what reads "
                    "it takes it for"
                )
                words_of_bias = (
                    f"the weight beside it holds {names}; it would have to be packed as "
                    f"{packing.words}, as what reads both takes them for"
                )
                tensors: dict[int, Tensor] = {}
                for bias, bias_parts in with_bias:
                    packed = packing.packed(bias_parts).reshape(-1)
                    tensors = {bias.key: packed}
                    yield LeafChange(tensors, words_of_bias)
                for turned_weight in laid_out_as(packing.packed(parts), weight):
                    if torch.equal(turned_weight, weight):
                        continue
                    yield LeafChange({leaf.key: turned_weight, **tensors}, words)
                    if tensors:
                        yield LeafChange({leaf.key: turned_weight}, words)


def _bias_of(
    sides: Sides,
    biases: Sequence[tuple[Value, Tensor]],
    ours: Sequence[Value],
    packed: tuple[int, int],
) -> list[tuple[Value, list[Tensor]]]:
    """Return the bias that is packed as a weight of so many parts and rows, and its parts."""
    vectors = [leaf for leaf in ours if len(leaf.row.shape or ()) == 1]
    for bias, held in biases:
        for _, parts in parts_of(sides, held, vectors):
            if (len(parts), len(parts[0])) == packed:
                return [(bias, parts)]
    return []


def _cuts(
    sides: Sides, ours: Sequence[Value], theirs: Sequence[Value]
) -> Iterator[LeafChange]:
    """Yield several parameters that hold the elements of one, as parts of it.

    Weights alone, and weights with biases that were cut in the same way.
    """
    cuts = list(_cuts_of_one(sides, ours, theirs))
    for choices in cuts:
        yield from choices
    for choices, others in combinations(cuts, 2):
        for cut, other in product(choices, others):
            tensors = {**cut.tensors, **other.tensors}
            yield LeafChange(tensors, cut.words)


def _cuts_of_one(
    sides: Sides, ours: Sequence[Value], theirs: Sequence[Value]
) -> Iterator[list[LeafChange]]:
    """Yield the ways to cut each of the reference's parameters that was cut otherwise."""
    alike: dict[object, list[Held]] = {}
    for leaf in theirs:
        held = sides.candidate.tensor(leaf.key)
        if held is not None:
            alike.setdefault((held.shape, held.dtype), []).append((leaf, held))
    for wanted in ours:
        whole = sides.reference.tensor(wanted.key)
        if whole is None:
            continue
        for count, members in product(PARTS, alike.values()):
            _, part = members[0]
            if part.dtype != whole.dtype or part.numel() * count != whole.numel():
                continue
            for group in combinations(members, count):
                parts = [tensor for _, tensor in group]
                if _have_the_elements(parts, whole):
                    leaves = [leaf for leaf, _ in group]
                    yield list(_cut_again(leaves, parts, wanted, whole))


def _have_the_elements(parts: Sequence[Tensor], whole: Tensor) -> bool:
    together = torch.cat([part.reshape(-1) for part in parts])
    return torch.equal(together[rising(together)], whole.reshape(-1)[rising(whole)])


def _cut_again(
    group: Sequence[Value], held: Sequence[Tensor], wanted: Value, whole: Tensor
) -> Iterator[LeafChange]:
    """Yield the equal parts of a tensor along each axis, in each order."""
    names = ", ".join(leaf.row.name or "" for leaf in group)
    words = f"{names} are cut out of the reference's {wanted.row.name} in another way"
    for axis in range(whole.dim()):
        if whole.shape[axis] % len(group):
            continue
        parts = [list(turned(p, held[0])) for p in whole.chunk(len(group), axis)]
        for layouts in zip(*parts, strict=True):
            for order in permutations(layouts):
                tensors = {
                    leaf.key: part.contiguous()
                    for leaf, part in zip(group, order, strict=True)
                }
                yield LeafChange(tensors, words)
