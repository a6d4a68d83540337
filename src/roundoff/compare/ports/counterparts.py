"""Which parameters of two programs by different hands hold the same values.

One is another's counterpart, or several are together that of one or of several: queries,
keys and values packed into one, all layers stacked, a part of each layer in one tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from roundoff.compare.loop.loaded_values import GRADIENT
from roundoff.compare.records.recorded_rows import last_named
from roundoff.compare.records.value_sketch import (
    Array,
    Sketch,
    in_reals,
    sketch_of_tensor,
    together,
    zeros_sketch,
)
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides

#: Elements of each parameter that are looked for in those of the other program.
SAMPLED = 16
#: How large a share of them has to be there.
SHARE = 0.25
#: They stand in too many parameters to say anything.
_COMMON = {0.0, 1.0, -1.0}
_OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Counterparts:
    """Names of parameters of the reference and of the candidate that hold together the
    same values; mostly one of each.

    Attributes:
        ours: the reference's.
        theirs: the candidate's.
        numel: how many elements they have where one side leaves zeros out, such as the row
            of the padding: those of the other side.
    """

    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    numel: int | None = None


def counterparts(sides: Sides) -> list[Counterparts]:
    """Return the parameters that are each other's only counterpart, alone or together.

    Those that are counterparts together are found where their tensors were kept. What are
    counterparts in a step stay so in later ones, where rounding may have moved them apart.
    """
    known = [Counterparts(*each) for each in sides.paired]
    names = {name for each in known for name in each.ours}
    others = {name for each in known for name in each.theirs}
    pairs = [
        pair
        for pair in same_parameters(sides)
        if pair[0] not in names and pair[1] not in others
    ]
    alone = [Counterparts((name,), (other,)) for name, other in pairs]
    found = sides.together.get(tuple(pairs))
    if found is None:
        joined = _together(
            sides,
            names.union(name for name, _ in pairs),
            others.union(name for _, name in pairs),
        )
        found = tuple((each.ours, each.theirs, each.numel) for each in joined)
        sides.together[tuple(pairs)] = found
    return [*known, *alone, *(Counterparts(*each) for each in found)]


def same_parameters(sides: Sides) -> list[tuple[str, str]]:
    """Return names of parameters that are each other's only counterpart.

    Of several that hold the same, as a teacher and its student do, those are that get a
    gradient in both programs, or none in either; then those that are called alike.
    """
    ours = named_leaves(sides.reference)
    theirs = named_leaves(sides.candidate)
    learnt = with_gradient(sides.reference), with_gradient(sides.candidate)
    pairs = []
    for name, value in theirs.items():
        if value.sketch is None or value.says_nothing:
            continue
        limit = sides.limit_for(value)
        twins = {
            other
            for other, twin in ours.items()
            if twin.sketch is not None
            and twin.sketch.numel == value.sketch.numel
            and twin.sketch.distance(value.sketch) <= limit
        }
        if len(twins) > 1:
            is_learnt = name in learnt[1]
            twins = {other for other in twins if (other in learnt[0]) == is_learnt}
        if len(twins) > 1:
            twins &= {name}
        if len(twins) == 1:
            pairs.append((twins.pop(), name))
    counted = Counter(name for name, _ in pairs)
    pairs = [pair for pair in pairs if counted[pair[0]] == 1]
    return [*pairs, *_constants_called_alike(sides, pairs)]


def _constants_called_alike(
    sides: Sides, pairs: Sequence[tuple[str, str]]
) -> list[tuple[str, str]]:
    """Return the parameters that are one number everywhere, as gains begin, by name.

    Only where names are borne out: each other parameter whose name both programs have is
    the counterpart of that name.
    """
    ours = named_leaves(sides.reference)
    theirs = named_leaves(sides.candidate)
    alike = [name == other for name, other in pairs if other in ours]
    if not alike or not all(alike):
        return []
    constants = (name for name, value in theirs.items() if value.says_nothing)
    return [(n, n) for n in constants if n in ours and _are_equal(ours[n], theirs[n])]


def _are_equal(ours: Value, theirs: Value) -> bool:
    if ours.sketch is None or theirs.sketch is None:
        return False
    return ours.row.shape == theirs.row.shape and not ours.sketch.distance(
        theirs.sketch
    )


def named_leaves(flow: Flow) -> dict[str, Value]:
    """Return the parameters and buffers of a program, as it begins with them.

    One that is made in the step is what it was when the first module ran, or the first
    parameter was computed with; one that is learnt may have run before it was ready, and
    is what the first optimizer begins with.
    """
    leaves: dict[str, Value] = {}
    made: dict[str, Value] = {}
    learnt = with_gradient(flow)
    is_set_up = True
    is_before_updates = True
    for value in flow.values.values():
        name = value.row.name
        is_set_up &= not _runs(flow, value, learnt)
        is_before_updates &= value.row.phase != _OPTIMIZER
        if name and not value.is_call:
            leaves.setdefault(name, value)
        elif name and (is_set_up or (is_before_updates and name in learnt)):
            made[name] = value
    return made | leaves


def _runs(flow: Flow, value: Value, learnt: Collection[str]) -> bool:
    """Return True for a call of a module, or with a learnt parameter that it leaves as it is."""
    if value.is_call and value.row.module:
        return True
    if not value.computes or value.row.inplace:
        return False
    sources = [flow.behind(key) for key in value.inputs if key in flow.values]
    return any(source.row.name in learnt for source in sources)


def with_gradient(flow: Flow) -> set[str]:
    """Return the names of the parameters that a step leaves a gradient of."""
    names = (row.name for row in flow.step.rows.values() if row.name)
    gradients = (name for name in names if name.endswith(GRADIENT))
    return {name.removesuffix(GRADIENT) for name in gradients}


def joined_sketch(
    flow: Flow,
    names: Sequence[str],
    values: Mapping[str, Value],
    numel: int | None = None,
) -> Sketch | None:
    """Return the sketch of what belongs to several parameters, such as their gradients.

    As exact as those of each; None where one is not known. A parameter that has none
    counts with zeros where tensors were kept, unless it is the only one. With ``numel``
    zeros fill up what is fewer elements.
    """
    sketches = [values[name].sketch for name in names if name in values]
    known = [sketch for sketch in sketches if sketch is not None]
    lacking = 0 if numel is None else numel - _elements(flow, names)
    if len(names) == 1 and not lacking:
        return next(iter(sketches), None)
    if len(known) < len(sketches):
        return None
    if not all(sketch.exact for sketch in known):
        zeros = [zeros_sketch(lacking)] if lacking else []
        return together([*known, *zeros]) if len(known) == len(names) else None
    leaves = {} if values.keys() >= set(names) else named_leaves(flow)
    parts = [torch.zeros(lacking)]
    for name in names:
        if name not in values:
            parts.append(torch.zeros(leaves[name].row.numel or 0))
            continue
        tensor = flow.tensor(values[name].key)
        if tensor is None:
            return None
        parts.append(in_reals(tensor.detach()).reshape(-1))
    return sketch_of_tensor(torch.cat(parts))


def _elements(flow: Flow, names: Sequence[str]) -> int:
    """Return how many elements parameters have together."""
    leaves = named_leaves(flow)
    return sum(leaves[name].row.numel or 0 for name in names)


def _together(
    sides: Sides, names: Collection[str], others: Collection[str]
) -> list[Counterparts]:
    """Return which of the parameters without a counterpart are several that are one's.

    They share values, and all their values are the same. ``names`` and ``others`` have one.
    Those that get a gradient go first: an average begins with what they hold.
    """
    ours = _contents(sides.reference, names)
    theirs = _contents(sides.candidate, others)
    learnt = _held_together(
        sides,
        _only(ours, with_gradient(sides.reference)),
        _only(theirs, with_gradient(sides.candidate)),
    )
    found = {name for each in learnt for name in each.ours}
    found_there = {name for each in learnt for name in each.theirs}
    rest = _held_together(
        sides,
        _only(ours, ours.keys() - found),
        _only(theirs, theirs.keys() - found_there),
    )
    return [*learnt, *rest]


def _only(contents: Mapping[str, Array], names: Collection[str]) -> dict[str, Array]:
    return {name: values for name, values in contents.items() if name in names}


def _held_together(
    sides: Sides, ours: Mapping[str, Array], theirs: Mapping[str, Array]
) -> list[Counterparts]:
    """Return which of some contents are the same together."""
    links = _links(ours, theirs) | {(b, a) for a, b in _links(theirs, ours)}
    found = []
    for linked, linked_there in _components(links):
        one = np.concatenate([ours[name] for name in linked])
        other = np.concatenate([theirs[name] for name in linked_there])
        if not _hold_the_same(one, other):
            continue
        lacking = len(one) - len(other)
        flow = sides.reference if lacking > 0 else sides.candidate
        longer = linked if lacking > 0 else linked_there
        may_be_another = lacking and _has_lone_constant(sides, lacking > 0)
        if may_be_another and not _are_zeros_kept(flow, longer):
            continue
        numel = max(len(one), len(other)) if lacking else None
        found.append(Counterparts(linked, linked_there, numel))
    return found


def _contents(flow: Flow, but: Collection[str]) -> dict[str, Array]:
    """Return the values of parameters that are no constants, flat."""
    contents = {}
    for name, leaf in named_leaves(flow).items():
        tensor = None if name in but or leaf.says_nothing else flow.tensor(leaf.key)
        if tensor is not None and tensor.is_floating_point():
            flat = tensor.detach().reshape(-1)
            # NumPy has no narrower formats that torch has
            contents[name] = (flat if flat.element_size() > 2 else flat.float()).numpy()
    return contents


def _links(
    sought: Mapping[str, Array], among: Mapping[str, Array]
) -> set[tuple[str, str]]:
    """Return which of the first have values that one of the second has too.

    A share of those that are looked for: one alone may be there by chance.
    """
    samples = {name: _sample(values) for name, values in sought.items()}
    counted = Counter(v for values in samples.values() for v in values)
    owner = {v: name for name, values in samples.items() for v in values}
    rare = np.array(sorted(value for value, count in counted.items() if count == 1))
    links = set()
    for other, values in among.items() if len(rare) else ():
        wanted = rare.astype(values.dtype)
        places = np.searchsorted(wanted, values).clip(max=len(wanted) - 1)
        present = np.unique(places[wanted[places] == values])
        hits = Counter(owner[value] for value in rare[present].tolist())
        links |= {(n, other) for n, c in hits.items() if c >= SHARE * len(samples[n])}
    return links


def _sample(values: Array) -> set[float]:
    """Return elements from all over a tensor, but for common ones."""
    step = max(1, len(values) // SAMPLED)
    some = values[::step].astype(np.float64)
    return set(some[np.isfinite(some)].tolist()) - _COMMON


def _components(
    links: Collection[tuple[str, str]],
) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return names of both sides that are linked, directly or by others."""
    waiting = set(links)
    components = []
    while waiting:
        name, other = waiting.pop()
        ours, theirs = {name}, {other}
        grown = True
        while grown:
            reached = {(a, b) for a, b in waiting if a in ours or b in theirs}
            waiting -= reached
            ours |= {a for a, _ in reached}
            theirs |= {b for _, b in reached}
            grown = bool(reached)
        components.append((tuple(sorted(ours)), tuple(sorted(theirs))))
    return sorted(components)


def _has_lone_constant(sides: Sides, of_candidate: bool) -> bool:
    """Return True where zeros may be another parameter of one program: a bias.

    It learns, and begins with one number everywhere.
    """
    flow = sides.candidate if of_candidate else sides.reference
    leaves = named_leaves(flow)
    sketches = [leaves[name].sketch for name in with_gradient(flow) & leaves.keys()]
    return any(sketch is None or sketch.constant for sketch in sketches)


def _are_zeros_kept(flow: Flow, names: Sequence[str]) -> bool:
    """Return True where no gradient reaches what is zero: biases begin with zeros too."""
    leaves = named_leaves(flow)
    last = last_named(flow.step.rows)
    for name in names:
        held = flow.tensor(leaves[name].key)
        row = last.get(name + GRADIENT)
        gradient = None if row is None else flow.tensor(row.record)
        if held is None or gradient is None or held.shape != gradient.shape:
            return False
        if bool(gradient[held == 0].any()):
            return False
    return True


def _hold_the_same(one: Array, other: Array) -> bool:
    """Return True for the same values in any order; one side may leave zeros out."""
    if len(one) != len(other):
        one, other = one[one != 0], other[other != 0]
    if len(one) != len(other) or one.dtype != other.dtype:
        return False
    return bool(np.array_equal(np.sort(one), np.sort(other)))
