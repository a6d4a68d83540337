"""The settings of two optimizers, for each group of parameters: which are others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product

from roundoff.compare.judging.step_causes import listed
from roundoff.record import HELD, LoopEvent, same_groups

#: Settings that choose how an optimizer computes, or are not used by it.
_HOW_COMPUTED = (
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "initial_lr",
    HELD,
)
#: Stands between a setting and the number of its group of parameters.
_OF_GROUP = " (group "
#: Settings that differ by this share differ by rounding: a number kept in fp32 is 2**-24
#: off, and one that a schedule made of it in 16 steps 2**-20.
_SAME_NUMBER = 1e-6

_Groups = Mapping[str, Mapping[str, float]]


def differing_settings(reference: LoopEvent, candidate: LoopEvent) -> dict[str, str]:
    """Return what differs in the settings of two optimizer steps, in words by name.

    Groups of parameters are paired by what they hold, in whatever order they stand.
    Where a setting is each of its numbers for as many values, it is the same however the
    values are cut into groups. Of a group that one of them lacks, nothing is said: its
    parameters are not updated. A setting that a step changes itself may be used before or
    after: it differs where neither is the other's.
    """
    forms = list(product(_forms(reference), _forms(candidate)))
    names = dict.fromkeys(name for group in forms[0][1].values() for name in group)
    words: dict[str, str] = {}
    for name in names:
        texts = [
            listed(list(_differences(ours, theirs, name))) for ours, theirs in forms
        ]
        if name not in _HOW_COMPUTED and all(texts):
            words[name] = texts[0]
    return words


def _forms(event: LoopEvent) -> list[_Groups]:
    """Return the settings as they are before a step, and as it has changed them."""
    forms = [_by_group(event.numbers)]
    if event.changed:
        forms.append(_by_group({**event.numbers, **event.changed}))
    return forms


def values_held(event: LoopEvent) -> float:
    """Return how many values the groups of an optimizer hold together; 0 where none says."""
    groups = _by_group(event.numbers).values()
    return sum(group.get(HELD, 0.0) for group in groups)


def settings_of(event: LoopEvent) -> frozenset[str]:
    """Return the names of an optimizer's settings."""
    return frozenset(
        name for group in _by_group(event.numbers).values() for name in group
    )


def _by_group(numbers: Mapping[str, float]) -> _Groups:
    """Return the settings by their names, for each group of parameters: `` (group 1)``."""
    groups: dict[str, dict[str, float]] = {}
    for name, value in numbers.items():
        plain, mark, number = name.partition(_OF_GROUP)
        groups.setdefault(mark + number, {})[plain] = value
    return groups


def _differences(ours: _Groups, theirs: _Groups, name: str) -> Iterator[str]:
    sizes = _sizes(ours, name)
    other_sizes = _sizes(theirs, name)
    twins = {group: group for group in theirs if group in ours}
    if sizes and other_sizes and sizes != other_sizes:
        spread = _spread(ours, name)
        other_spread = _spread(theirs, name)
        if spread == other_spread:
            return
        are_moved = sorted(sizes) != sorted(other_sizes)
        if are_moved and sum(sizes) == sum(other_sizes):
            yield f"{_shown(other_spread)} where the reference has {_shown(spread)}"
            return
        places = zip(theirs, same_groups(sizes, other_sizes), strict=True)
        named = list(ours)
        twins = {group: named[place] for group, place in places if place < len(named)}
    for group, other in twins.items():
        mine = ours[other].get(name)
        value = theirs[group].get(name)
        if mine is not None and value is not None and not same_number(mine, value):
            yield f"{value:g} where the reference has {mine:g}{group}"


def _sizes(groups: _Groups, name: str) -> list[float]:
    """Return how many values each group holds; none where one does not say, or has no
    such setting."""
    if not all(HELD in group and name in group for group in groups.values()):
        return []
    return [group[HELD] for group in groups.values()]


def _spread(groups: _Groups, name: str) -> Mapping[str, float]:
    """Return for how many values a setting has each of its numbers."""
    spread: dict[str, float] = defaultdict(float)
    for group in groups.values():
        spread[f"{group[name]:g}"] += group[HELD]
    return spread


def _shown(spread: Mapping[str, float]) -> str:
    return listed([f"{value} for {held:,.0f} values" for value, held in spread.items()])


def same_number(one: float, other: float) -> bool:
    """Return True for settings that are equal up to the rounding of a schedule; NaN
    equals NaN."""
    if one == other or (one != one and other != other):
        return True
    return abs(one - other) <= _SAME_NUMBER * max(abs(one), abs(other))
