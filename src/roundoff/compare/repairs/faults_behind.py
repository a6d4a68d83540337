"""What is wrong in what a value is made of, where it is known what the value should be?

After a transplant (see ``transplants``) one value of the candidate is known element by
element, and the fault lies between the values that agree and this one. Edits and
parameters are tried that make it so. Where none does, the reference computes there what
no small edit of the candidate gives, and the operator is named that it has no equal of.
"""

from __future__ import annotations

from itertools import product

import torch

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.repairs.exchanged_leaves import exchanged_leaves
from roundoff.compare.repairs.filled_padding import filled_padding
from roundoff.compare.repairs.fitted_masks import fitted_mask
from roundoff.compare.repairs.leaf_trials import ODD, PLAIN, leaf_on_trial
from roundoff.compare.repairs.left_out_values import left_out
from roundoff.compare.repairs.misordered_values import misordered
from roundoff.compare.repairs.misread_values import blamed_reader, exchanged
from roundoff.compare.repairs.named_repairs import blamed_for
from roundoff.compare.repairs.read_by_region import (
    MOST_READ,
    in_region_alone,
    values_read,
)
from roundoff.compare.repairs.rejoins import Rejoin
from roundoff.compare.repairs.repair_trials import best_repair
from roundoff.compare.repairs.replaceable_values import before
from roundoff.compare.repairs.trials import BUDGET, Region, Trials
from roundoff.compare.values.fault_lines import computing_readers
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Sides
from roundoff.ops import operators_that

_JOIN = operators_that("join")


def repaired_behind(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    """Return what makes a value right that is wrong; None where no repair is found."""
    return (
        filled_padding(sides, trials, rejoin)
        or _repaired(sides, trials, rejoin)
        or fitted_mask(sides, trials, rejoin)
        or left_out(sides, trials, rejoin, several=True)
    )


def _repaired(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    region = Region(
        rejoin.region | {rejoin.value.key}, rejoin.expected | {rejoin.twin.key}
    )
    odd = leaf_on_trial(sides, trials, region, of=ODD)
    if odd is not None:
        return odd
    repair = best_repair(
        sides, trials, region, lambda: _between(sides, trials, rejoin, region)
    )
    if isinstance(repair, Blamed):
        return repair
    if repair is not None and repair.ends:
        return blamed_for(sides, repair, region.parted, rejoin.twin)
    return leaf_on_trial(sides, trials, region)


def _between(
    sides: Sides, trials: Trials, rejoin: Rejoin, region: Region
) -> Blamed | None:
    """Return a parameter, values that are exchanged or in another order, what is left out."""
    found = (
        leaf_on_trial(sides, trials, region, of=PLAIN)
        or exchanged_leaves(sides, trials, region)
        or exchanged(sides, trials, rejoin)
        or _mistaken(sides, trials, rejoin)
    )
    if found is not None:
        return found
    if rejoin.twin.key in sides.all_twins(rejoin.value):
        # the elements are right: what is left out would change them
        return misordered(sides, trials, rejoin) or left_out(sides, trials, rejoin)
    return left_out(sides, trials, rejoin) or misordered(sides, trials, rejoin)


def _mistaken(sides: Sides, trials: Trials, rejoin: Rejoin) -> Blamed | None:
    """Return the first call that reads one value where another is meant, each time.

    In all that the wrong region computes, and nowhere else. What is meant is another
    value that the region reads, or one that the reference's reads.
    """
    trials.left = BUDGET
    flow = sides.candidate
    read = values_read(flow, rejoin)
    meant = {each.key: each for each in (*read, *_read_by_reference(sides, rejoin))}
    near = trials
    for value, other in product(read, meant.values()):
        first = flow.tensor(value.key)
        second = flow.tensor(other.key)
        if first is None or second is None or first.shape != second.shape:
            continue
        near = in_region_alone(flow, near, rejoin, value)
        if torch.equal(first, second) or not near.outcome({}, {value.key: second})[0]:
            continue
        readers = [v for v in computing_readers(flow, value) if v.key in rejoin.region]
        if readers:
            first_reader = _joining(sides, value, rejoin) or min(
                readers, key=lambda each: each.order
            )
            return blamed_reader(sides, rejoin, first_reader, (value, other))
    return None


def _joining(sides: Sides, value: Value, rejoin: Rejoin) -> Value | None:
    """Return what joins a value to others for a wrong region, where nothing else that reads
    them so is right."""
    flow = sides.candidate
    readers = (flow.values[key] for key in flow.readers.get(value.key, ()))
    for reader in readers:
        is_join = reader.operator in _JOIN and reader.row.phase == value.row.phase
        if is_join and reader.row.line is not None and not reader.inner:
            computing = {each.key for each in computing_readers(flow, reader)}
            is_read_there = not computing.isdisjoint(rejoin.region)
            if is_read_there and computing.isdisjoint(sides.twins):
                return reader
    return None


def _read_by_reference(sides: Sides, rejoin: Rejoin) -> list[Value]:
    """Return the candidate's values that are what the reference reads there."""
    wanted = {value.key for value in before(sides.reference, rejoin.expected)}
    return [
        value
        for value in sides.candidate.in_order()
        if value.is_call
        and value.is_number
        and not value.inner
        and not value.says_nothing
        and wanted.intersection(sides.all_twins(value))
    ][:MOST_READ]
