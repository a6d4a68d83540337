"""The groups of parameters of two optimizers: which is which, whatever their order."""

from __future__ import annotations

from collections.abc import Sequence


def same_groups(reference: Sequence[float], candidate: Sequence[float]) -> list[int]:
    """Return the number of the reference's group for each group of the candidate.

    Groups hold the same parameters where they hold as many values: a port may cut or join
    tensors, and list the groups in another order. Where the sizes differ, as when a
    parameter is in the wrong group, the groups are paired in the order of their sizes: of
    all pairings that one leaves the fewest values in other groups.

    Args:
        reference: how many values each group of the reference holds, in its order.
        candidate: the candidate's.

    Groups of one size keep their order. Groups that the reference lacks get the numbers
    after its last.

    >>> same_groups([800, 40], [40, 800])
    [1, 0]
    >>> same_groups([800, 40], [820, 20])
    [0, 1]
    >>> same_groups([800, 40], [40, 500, 300])
    [1, 0, 2]
    """
    if list(reference) == list(candidate):
        return list(range(len(candidate)))
    left = _by_size(reference)
    numbers: dict[int, int] = {}
    for place in range(len(candidate)):
        equal = [ours for ours in left if reference[ours] == candidate[place]]
        if equal:
            numbers[place] = equal[0]
            left.remove(equal[0])
    rest = [place for place in _by_size(candidate) if place not in numbers]
    left += range(len(reference), len(reference) + len(rest))
    numbers |= dict(zip(rest, left, strict=False))
    return [numbers[place] for place in range(len(candidate))]


def _by_size(sizes: Sequence[float]) -> list[int]:
    """Return the places of the sizes, the largest first."""
    return sorted(range(len(sizes)), key=lambda place: -sizes[place])
