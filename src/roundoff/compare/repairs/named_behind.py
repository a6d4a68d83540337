"""What to name behind a value that should be what the reference has, where no repair is found."""

from __future__ import annotations

import math
from itertools import repeat

import torch
from torch import Tensor

from roundoff.compare.blame.blamed import Blamed
from roundoff.compare.blame.contained_values import after_contained
from roundoff.compare.blame.near_leaves import leaves_of
from roundoff.compare.records.call_arguments import argument_differences
from roundoff.compare.records.parameter_content import EQUAL, REORDERED, relation
from roundoff.compare.records.recorded_rows import shape_read_first
from roundoff.compare.records.value_sketch import (
    Sketch,
    in_reals,
    sketch_of_tensor,
)
from roundoff.compare.repairs.fitted_leaves import (
    fitted_factor,
    fitted_leaf,
    fitted_table,
)
from roundoff.compare.repairs.goals import FEWEST
from roundoff.compare.repairs.left_out_values import leaf_behind
from roundoff.compare.repairs.named_repairs import there
from roundoff.compare.repairs.other_numbers import odd_number, other_number
from roundoff.compare.repairs.rejoins import Rejoin
from roundoff.compare.repairs.transplants import trials_of_value
from roundoff.compare.repairs.trials import PATIENCE
from roundoff.compare.repairs.unlike_values import UnlikeValues, is_clear_fault
from roundoff.compare.values.fault_lines import FaultLines, is_read_rightly
from roundoff.compare.values.value_flow import Value, constants_of
from roundoff.compare.values.value_regions import Sides, first_of


def unlike_behind(sides: Sides, rejoin: Rejoin, likely: Blamed | None) -> Blamed | None:
    """Return what to name behind a value for which no repair is found.

    ``likely``: what the contents of parameters say. It is believed of a parameter with
    another one's values, as one of two that a loader exchanged is, which no repair of one
    shows; and of one that the wrong region reads and that holds nothing of the
    reference's. None where more lies between
    than one operator takes that is written out: then the value does not say where, but a
    number may that the reference does not have.
    """
    trials = trials_of_value(sides, rejoin)
    blamed = (
        _other_constants(sides, rejoin)
        or fitted_leaf(sides, trials, rejoin)
        or fitted_table(sides, trials, rejoin)
        or fitted_factor(sides, rejoin)
    )
    blamed = blamed or _believed(sides, rejoin, likely)
    blamed = blamed or _part_of_another(sides, rejoin) or _scaled(sides, rejoin)
    if blamed is not None:
        return blamed
    flow = sides.candidate
    between = [flow.values[key] for key in rejoin.region]
    steps = {(v.row.line, v.operator) for v in between if v.computes and not v.inner}
    if len(steps) > PATIENCE:
        return odd_number(sides, rejoin)
    number = other_number(sides, rejoin)
    if number is not None:
        return number
    first = UnlikeValues(sides, rejoin).blamed()
    if first.value.key in constants_of(flow):
        return first
    contained = after_contained(sides, rejoin.region, rejoin.expected, rejoin.twin)
    return contained or first


def _part_of_another(sides: Sides, rejoin: Rejoin) -> Blamed | None:
    """Return a parameter of which a part is read that another of the reference's holds.

    A loader that stacks layers may take two parameters for each other in all of them.
    Where the reference reads a parameter that is not there, it reads one of the same size
    that does not belong there.
    """
    reference, flow = sides.reference, sides.candidate
    ours = leaves_of(reference, sorted(rejoin.expected | {rejoin.twin.key}))
    theirs = [
        (flow.values[key], source)
        for reader in sorted(rejoin.region | {rejoin.value.key})
        for key in flow.values[reader].inputs
        if key in flow.values
        and (source := leaf_behind(flow, flow.values[key])) is not None
    ]
    present = {key for piece, _ in theirs for key in sides.all_twins(piece)}
    lost = [leaf for leaf in ours if leaf.key not in present and not leaf.says_nothing]
    for piece, source in theirs:
        twins = [reference.values[key] for key in sides.all_twins(piece)]
        others = {
            leaf.key: leaf
            for leaf in map(leaf_behind, repeat(reference), twins)
            if leaf
        }
        if piece.says_nothing or not others or any(leaf.key in others for leaf in ours):
            continue
        wanted = [leaf for leaf in lost if leaf.row.numel == piece.row.numel]
        # what is repeated for each sample may have the size of any other parameter
        is_part = (piece.row.numel or 0) <= (source.row.numel or 0)
        if wanted and is_part:
            held = min(others.values(), key=lambda leaf: leaf.order)
            words = (
                f"{source.row.name} holds {held.row.name} there; the reference has "
                f"{wanted[0].row.name}"
            )
            return Blamed(source, wanted[0], words)
    return None


def _scaled(sides: Sides, rejoin: Rejoin) -> Blamed | None:
    """Return a value that is so many times what the reference has, in every element."""
    present = sides.candidate.tensor(rejoin.value.key)
    if present is None or present.numel() < FEWEST or not rejoin.value.is_number:
        return None
    wanted = in_reals(rejoin.held).to(torch.float64).reshape(-1)
    values = in_reals(present).to(torch.float64).reshape(-1)
    square = float(wanted @ wanted)
    if values.shape != wanted.shape or not square > 0 or not values.any():
        return None
    factor = float(values @ wanted) / square
    rest = float((values - factor * wanted).norm())
    if not math.isfinite(rest) or rest > sides.limit * float(values.norm()):
        return None
    words = f"it is {factor:.6g} times what {there(rejoin.twin)} gives"
    line = FaultLines(sides, rejoin.region).of_operator(rejoin.value)
    return Blamed(rejoin.value, rejoin.twin, words, is_operator=True, line=line)


def _other_constants(sides: Sides, rejoin: Rejoin) -> Blamed | None:
    """Return a call that reads what the reference's reads, with other constants.

    It is no other way to the same where it is the first of what is wrong: a repair whose
    result has another shape cannot run.
    """
    for value in first_of(sides.candidate, set(rejoin.region)):
        for twin in first_of(sides.reference, set(rejoin.expected)):
            if value.inner or twin.inner or value.operator != twin.operator:
                continue
            if not _read_the_same(sides, twin, value):
                continue
            if _is_multiple(sides, twin, value):
                continue
            apart = _constants_of(sides, twin, value)
            if apart:
                words = f"{'; '.join(apart)}, on what the reference's reads too"
                lines = FaultLines(
                    sides, rejoin.region, is_clear=is_clear_fault(sides, rejoin)
                )
                line = lines.of_operator(value)
                return Blamed(value, twin, words, is_operator=True, line=line)
    return None


def _is_multiple(sides: Sides, twin: Value, value: Value) -> bool:
    """Return True for what the reference has times a number: a spectrum may be scaled before
    or after."""
    ours = sides.reference.tensor(twin.key)
    theirs = sides.candidate.tensor(value.key)
    if ours is None or theirs is None or ours.numel() != theirs.numel():
        return False
    one = _of_length_one(ours)
    other = _of_length_one(theirs)
    if one is None or other is None:
        return False
    return one.distance(other) <= sides.limit


def _of_length_one(tensor: Tensor) -> Sketch | None:
    """Return the sketch of a tensor divided by its norm; None for zeros."""
    values = in_reals(tensor.detach()).to(torch.float64)
    norm = values.norm()
    return sketch_of_tensor(values / norm) if norm > 0 else None


def _read_the_same(sides: Sides, twin: Value, value: Value) -> bool:
    """Return True where all that a call reads is what the reference's call reads."""
    if not value.inputs or len(value.inputs) != len(twin.inputs):
        return False
    return all(
        key in sides.candidate.values
        and other in sides.all_twins(sides.candidate.values[key])
        for key, other in zip(value.inputs, twin.inputs, strict=True)
    )


def _constants_of(sides: Sides, twin: Value, value: Value) -> tuple[str, ...]:
    """Return the constants that differ between two calls; none on other shapes."""
    rows = sides.reference.step.rows
    other_rows = sides.candidate.step.rows
    ours = sides.reference.first.get(twin.row.call)
    theirs = sides.candidate.first.get(value.row.call)
    if ours is None or theirs is None:
        return ()
    shape = shape_read_first(rows, ours)
    other_shape = shape_read_first(other_rows, theirs)
    if shape is None or other_shape is None or len(shape) != len(other_shape):
        return ()
    return argument_differences(ours, theirs, (shape, other_shape))


def _believed(sides: Sides, rejoin: Rejoin, likely: Blamed | None) -> Blamed | None:
    if likely is None or likely.value.is_call:
        return None
    is_read = is_read_behind(sides, rejoin, likely.value)
    if likely.other is not None:
        return likely if is_read or not rejoin.agrees else None
    if not is_read or likely.value.key in sides.twins:
        return None
    return None if is_read_rightly(sides, likely.value) else likely


def is_read_behind(sides: Sides, rejoin: Rejoin, leaf: Value) -> bool:
    """Return True for a parameter that a value is made of: one that is read after a value
    with which all is right is right too."""
    region = sorted(rejoin.region | {rejoin.value.key})
    return any(read.key == leaf.key for read in leaves_of(sides.candidate, region))


def is_rightly_filled(sides: Sides, likely: Blamed) -> bool:
    """Return True for a parameter that no mistake of a loader has filled.

    It holds what the reference's does as it is, or with the slices of an axis in an order
    of its own, or is the whole of one where it should be a part of another: two that a
    loader exchanges have as many elements.
    """
    held = sides.candidate.tensor(likely.value.key)
    twin = likely.reference
    wanted = None if twin is None else sides.reference.tensor(twin.key)
    if held is None or wanted is None or likely.value.is_call:
        return False
    if likely.value.key in sides.twins and wanted.numel() != held.numel():
        return True
    how = relation(wanted, held)
    return how is not None and how.kind in (EQUAL, REORDERED)
