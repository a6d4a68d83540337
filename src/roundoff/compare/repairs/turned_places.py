"""Which table of places turns padding round with the words before it?

A sequence that is read backwards begins with its last word: its places are turned round
within its length, and what lies behind them stays.
"""

from __future__ import annotations

from itertools import islice, product

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.repairs.trials import BUDGET, Trials
from roundoff.compare.repairs.wrong_indexes import made_alike, place_of
from roundoff.compare.values.fault_lines import FaultLines
from roundoff.compare.values.padded_rows import masks_made
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Part, Sides, upstream

#: Tables of places, and masks, that are tried.
MOST_TABLES = 12
MOST_MASKS = 2


def turned_with_padding(sides: Sides, part: Part, trials: Trials) -> Blamed | None:
    """Return the places, from the last to the first, with which all is right once those of
    a sample are turned round within its length."""
    flow = sides.candidate
    made_of = upstream(flow, sorted(part.region), lambda _value: True)
    values = sorted((flow.values[key] for key in made_of), key=lambda v: v.order)
    tables = [v for v in values if v.is_call and not v.inner and _turns(sides, v)]
    firsts = {place_of(value): value for value in reversed(tables)}
    masks = _masks_of_lengths(sides) if tables else []
    for value, mask in product(list(firsts.values())[:MOST_TABLES], masks):
        alike = [value, *made_alike(flow, value)]
        turned = {
            each.key: tensor
            for number, each in enumerate(sorted(alike, key=lambda v: v.order))
            if (tensor := _within_lengths(sides, each, number, mask)) is not None
        }
        trials.left = BUDGET
        if turned and trials.outcome({}, turned, is_patient=True)[0]:
            words = "turned round within the length of each sample all that follows is right"
            line = FaultLines(sides, part.region).of_operator(value)
            return Blamed(value, None, words, is_operator=True, line=line)
    return None


def _masks_of_lengths(sides: Sides) -> list[Tensor]:
    """Return the different masks that say how long each of some samples is."""
    masks = masks_made(sides.reference, sides.candidate)
    return list(islice(filter(_is_mask_of_lengths, masks), MOST_MASKS))


def _is_mask_of_lengths(mask: Tensor) -> bool:
    """Return True for rows that are true up to a place, of several lengths.

    >>> _is_mask_of_lengths(torch.tensor([[1, 1, 1], [1, 0, 0]]).bool())
    True
    >>> _is_mask_of_lengths(torch.tensor([[1, 0, 1], [1, 0, 0]]).bool())
    False
    """
    if mask.dim() != 2:
        return False
    counts = mask.sum(1, keepdim=True)
    is_of_lengths = torch.equal(mask, torch.arange(mask.shape[1]) < counts)
    return is_of_lengths and int(counts.min()) < int(counts.max())


def _turns(sides: Sides, value: Value) -> bool:
    """Return True for places from the last to the first, for each sample the same."""
    held = sides.candidate.tensor(value.key)
    if held is None or held.dtype not in (torch.int64, torch.int32) or not held.dim():
        return False
    places = torch.arange(held.shape[-1] - 1, -1, -1).to(held)
    return held.shape[-1] > 1 and bool((held == places).all())


def _within_lengths(
    sides: Sides, value: Value, number: int, mask: Tensor
) -> Tensor | None:
    """Return the places of a sample, or of all, turned round within their lengths.

    ``number``: which of the values alike it is; samples may be turned one after the other.
    """
    held = sides.candidate.tensor(value.key)
    samples, length = mask.shape
    if held is None or not _turns(sides, value) or held.shape[-1] != length:
        return None
    places = torch.arange(length)
    lengths = mask.to(torch.int64).sum(1, keepdim=True)
    turned = torch.where(places < lengths, lengths - 1 - places, places).to(held)
    if held.dim() == 1:
        return turned[number % samples]
    return turned.clone() if held.shape == mask.shape else None
