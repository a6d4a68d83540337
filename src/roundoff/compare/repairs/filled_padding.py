"""Is padding filled with other numbers than in the reference, before they count?

What stands behind the ends of sequences is anybody's guess as long as nothing reads it.
Scores that are zero there, and not far below all others, take a share of each softmax: they
agree where the sequences are, and what is made of them does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.judging.step_causes import with_line
from roundoff.compare.repairs.rejoins import Rejoin
from roundoff.compare.repairs.transplants import in_layout_of
from roundoff.compare.repairs.trials import BUDGET, Trials
from roundoff.compare.values.value_flow import Flow, Value
from roundoff.compare.values.value_regions import Sides


def filled_padding(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    """Return the value that agrees but for its padding, if all is right with the reference's.

    Args:
        sides: both programs.
        trials: of what the wrong value is made of.
        rejoin: the value, and what it should be.
    """
    trials.left = BUDGET
    flow = sides.candidate
    for value in _read(flow, rejoin.region):
        held = flow.tensor(value.key)
        if held is None or held.is_complex():
            continue
        for twin, moved in _in_its_place(sides, value, held):
            other = (moved - held).abs() > sides.limit * held.abs().max()
            filled = _alike(moved[other])
            if filled is None or trials.left < 0:
                continue
            if trials.outcome({}, {value.key: moved})[0]:
                return _blamed(value, twin, filled, _alike(held[other]))
    return None


def _in_its_place(
    sides: Sides, value: Value, held: Tensor
) -> Iterator[tuple[Value, Tensor]]:
    """Yield what the reference has for a value that agrees, laid out as this is."""
    for key in sides.all_twins(value):
        wanted = sides.reference.tensor(key)
        if wanted is not None and wanted.numel() == held.numel():
            for moved in in_layout_of(sides, held, wanted):
                yield sides.reference.values[key], moved


def _read(flow: Flow, region: Collection[int]) -> list[Value]:
    """Return the numbers that a region is made of, of whole calls."""
    waiting = [*region]
    seen = set(waiting)
    read = []
    while waiting:
        for key in flow.values[waiting.pop()].inputs:
            if key in seen or key not in flow.values:
                continue
            seen.add(key)
            value = flow.values[key]
            if value.inner:
                waiting.append(key)
            elif value.is_call and value.is_number and not value.says_nothing:
                read.append(value)
    return sorted(read, key=lambda value: value.order)


def _alike(numbers: Tensor) -> float | None:
    """Return the number that all of these are; None where they differ, or are none.

    >>> import torch
    >>> _alike(torch.tensor([2.0, 2.0])), _alike(torch.tensor([2.0, 3.0]))
    (2.0, None)
    """
    if not numbers.numel() or bool((numbers != numbers[0]).any()):
        return None
    return float(numbers[0])


def _blamed(value: Value, twin: Value, wanted: float, held: float | None) -> Blamed:
    here = "other numbers" if held is None else f"{held:g}"
    place = with_line(twin.row.site, twin.row.line)
    words = f"holds {here} where {place} holds {wanted:g}; with these all is right"
    return Blamed(value, twin, words, is_operator=True, label="wrong constant")
