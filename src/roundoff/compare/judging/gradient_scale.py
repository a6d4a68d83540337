"""Loss scales divided out: gradients of a scaled loss, compared with those of another.

A loss that is multiplied by a scale multiplies every gradient, until it is divided out
again before the optimizer reads it. The scale is followed through the rows of a step:
backward calls are linear in the gradient that they read, and a product with one number
multiplies the scale. That is a product of the whole loss: one of its terms may have a
weight. Where a scale is not divided out, nothing is done: the gradients that
the optimizer reads are wrong. A clip divides nothing out: what it multiplies by was made
of the gradients, and would hide any scale.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from roundoff.compare.judging.explain import RecordedStep, Sides
from roundoff.compare.judging.scale_left import scale_left
from roundoff.compare.records.recorded_rows import RecordedRow, Rows, last_named
from roundoff.compare.rounding.rounding_bound import DIVISIONS, PRODUCTS
from roundoff.ops import operators_that

#: Scales that differ by less are one: fp16 gradients that are subnormal have few bits,
#: with six left they are 2**-6 off.
SAME = 0.02
#: A loss is looked for behind at most so many sums and products.
MOST_DEEP = 64
#: These give the elements of their input.
HANDS_ON = operators_that("hand on in order")
#: What changes a gradient by one factor, after the backward pass too.
_FACTORS = PRODUCTS | DIVISIONS | operators_that("unscale gradients")
_OPTIMIZER = "optimizer"
_SUM = "add"
_VALUES = ("min", "max", "mean", "l2", "std")


def without_loss_scales(sides: Sides) -> Sides:
    """Return a step of both runs with the scales of their losses divided out.

    The same sides where neither loss is scaled, or a scale is left in the gradients
    that a step ends with, on either side. Where one and the same is left in both, it is
    taken out up to there: one divides its loss by what the other divides gradients by.
    """
    ours = _scales(sides.reference.rows)
    theirs = _scales(sides.candidate.rows)
    if not ours and not theirs:
        return sides
    if not _are_divided_out(sides, ours, theirs):
        if not _leave_the_same(sides, ours, theirs):
            return sides
        ours = _of_the_pass(sides.reference.rows, ours)
        theirs = _of_the_pass(sides.candidate.rows, theirs)
    return Sides(_divided(sides.reference, ours), _divided(sides.candidate, theirs))


def rescaling(step: RecordedStep) -> frozenset[int]:
    """Return the records of calls that multiply a loss or a gradient by its scale alone.

    And of sums of gradients up to which a scale is taken out, which stays in them.
    """
    scales = step.scales
    if not scales:
        return frozenset()
    changed = set()
    for record, row in step.rows.items():
        read = [r for r in row.inputs if r in step.rows]
        same_size = [r for r in read if step.rows[r].numel == row.numel]
        scaled = [r for r in same_size if r in scales]
        may_change = row.base_operator in _FACTORS or row.base_operator == _SUM
        if not may_change or not (scaled or record in scales):
            continue
        # what a gradient is multiplied with beside it, as a saved result, carries no scale
        before = [scales.get(r, 1.0) for r in scaled or same_size]
        if not all(_same(scales.get(record, 1.0), each) for each in before):
            changed.add(record)
    return frozenset(changed)


def _divided(step: RecordedStep, scales: Mapping[int, float]) -> RecordedStep:
    if not scales:
        return step
    rows = {
        record: _unscaled_row(row, scales.get(record, 1.0))
        for record, row in step.rows.items()
    }
    return RecordedStep(rows, step.tensors, scales)


def _unscaled_row(row: RecordedRow, scale: float) -> RecordedRow:
    if scale == 1.0:
        return row
    values = {name: getattr(row, name) for name in _VALUES}
    divided = {name: v if v is None else v / scale for name, v in values.items()}
    unscaled: RecordedRow = replace(row, hash=None, **divided)  # type: ignore[arg-type]
    return unscaled


def _are_divided_out(
    sides: Sides, ours: Mapping[int, float], theirs: Mapping[int, float]
) -> bool:
    """Return True where the gradients that both end with carry no scale.

    What a loss is divided by for good, as by the number of words that count, stays in them.
    """
    reference, candidate = sides.reference.rows, sides.candidate.rows
    last, other_last = last_named(reference), last_named(candidate)
    names = [n for n in other_last if n.endswith(".grad") and n in last]
    return bool(names) and all(
        _is_divided_out(reference, last[name], ours)
        and _is_divided_out(candidate, other_last[name], theirs)
        for name in names
    )


def _leave_the_same(
    sides: Sides, ours: Mapping[int, float], theirs: Mapping[int, float]
) -> bool:
    """Return True where both sides' gradients have one scale when they are read.

    And another one on the way there.
    """
    factors, other_factors = _distinct(ours.values()), _distinct(theirs.values())
    together = _distinct([*factors, *other_factors])
    if len(factors) == len(other_factors) == len(together):
        return False
    left = scale_left(sides.reference.rows, ours)
    other_left = scale_left(sides.candidate.rows, theirs)
    return left is not None and other_left is not None and _same(left, other_left)


def _of_the_pass(rows: Rows, scales: Mapping[int, float]) -> dict[int, float]:
    """Return the scales before a gradient is a parameter's, where they stay in it.

    What several passes add up to is one, with a name or without.
    """
    read = {i for row in rows.values() if row.phase == _OPTIMIZER for i in row.inputs}
    return {
        record: scale
        for record, scale in scales.items()
        if rows[record].phase != _OPTIMIZER
        and not _is_gradient(rows[record])
        and not (record in read and rows[record].base_operator == _SUM)
    }


def _is_divided_out(
    rows: Rows, gradient: RecordedRow, scales: Mapping[int, float]
) -> bool:
    if _same(scales.get(gradient.record, 1.0), 1.0):
        return True
    return _is_unscaled_by_the_optimizer(rows, gradient, scales)


def _is_unscaled_by_the_optimizer(
    rows: Rows, gradient: RecordedRow, scales: Mapping[int, float]
) -> bool:
    """Return True where the optimizer's call reads the scale beside the gradient."""
    scale = scales.get(gradient.record, 1.0)
    for row in rows.values():
        if row.phase != _OPTIMIZER or gradient.record not in row.inputs:
            continue
        numbers = [rows[r] for r in row.inputs if r in rows and rows[r].numel == 1]
        if any(_same(number.l2 or 0.0, scale) for number in numbers):
            return True
    return False


def _same(one: float, other: float) -> bool:
    return abs(one - other) <= SAME * abs(other)


def _scales(rows: Rows) -> dict[int, float]:
    """Return the scale of each gradient that has another one than 1, by record.

    And of the products that multiply a whole loss.
    """
    losses: dict[int, float] = {}
    scales: dict[int, float] = {}
    # the factors of its loss that a gradient has not met yet: each is met once
    ahead: dict[int, Sequence[float]] = {}
    made_of_gradients: set[int] = set()
    for record in sorted(rows):
        row = rows[record]
        if _is_seed(row, rows):
            products = _scaled_loss(row, rows)
            losses |= products
            scales[record] = 1.0
            ahead[record] = _distinct(products.values())
            continue
        source = _gradient_read(row, rows, scales)
        factors = ahead.get(source.record, ()) if source else ()
        scale = _scale(row, source, rows, scales, factors)
        if source is None or scale is None:
            if any(i in scales or i in made_of_gradients for i in row.inputs):
                made_of_gradients.add(record)
        elif _is_clip(row, made_of_gradients):
            scales[record] = next(scales[i] for i in row.inputs if i in scales)
        else:
            before = scales[source.record]
            ahead[record] = [f for f in factors if not _same(scale, before * f)]
            scales[record] = scale
    scaled = {r: s for r, s in scales.items() if not _same(s, 1.0)}
    if not scaled:
        return {}
    known = set(scaled.values())
    return scaled | {
        record: factor
        for record, factor in losses.items()
        if any(_same(factor, scale) for scale in known)
    }


def _distinct(factors: Iterable[float]) -> list[float]:
    """Return factors that are not one, of near ones one: all terms of a loss have it."""
    found: list[float] = []
    for factor in factors:
        if not any(_same(factor, other) for other in (1.0, *found)):
            found.append(factor)
    return found


def _scale(
    row: RecordedRow,
    source: RecordedRow | None,
    rows: Rows,
    scales: Mapping[int, float],
    factors: Collection[float],
) -> float | None:
    """Return the scale of a gradient; None for what is none.

    ``source`` is the gradient that a call reads, and ``factors`` are those that its loss
    as a whole is multiplied by: in the backward pass any other is the weight of a term.
    """
    if not row.is_call or source is None:
        return None
    before = scales[source.record]
    # what a hook makes of a finished gradient may be an update: that is not linear
    goes_backward = row.phase == "backward" and not _is_gradient(source)
    if goes_backward and row.numel != 1:
        return before
    if row.base_operator not in _FACTORS:
        stays = goes_backward or _is_gradient(row) or _is_written_over(source, row)
        return before if stays else None
    if row.numel != source.numel or _is_an_update(row, source, rows, before):
        return None
    after = _rescaled(row, source, before)
    is_of_a_loss = any(_same(after, before * factor) for factor in factors)
    return after if row.phase != "backward" or is_of_a_loss else before


def _is_written_over(gradient: RecordedRow, row: RecordedRow) -> bool:
    """Return True for a call that changes a gradient in place, as a limit to its values."""
    return bool(row.inplace) and row.inputs[0] == gradient.record


def _is_an_update(
    row: RecordedRow, source: RecordedRow, rows: Rows, before: float
) -> bool:
    """Return True for a product that is part of an update, not of a scale.

    It is not with one number alone, or of a gradient that carries no scale any more.
    """
    if row.phase == "backward" or _is_gradient(row):
        return False
    read = (rows[record] for record in row.inputs if record in rows)
    others = [each for each in read if each.record != source.record]
    return before == 1.0 or any((each.numel or 0) > 1 for each in others)


def _gradient_read(
    row: RecordedRow, rows: Rows, scales: Mapping[int, float]
) -> RecordedRow | None:
    """Return the first gradient that a call reads; of a list the one of the same name."""
    read = [rows[record] for record in row.inputs if record in scales]
    same_name = [each for each in read if row.name and each.name == row.name]
    return next(iter(same_name or read), None)


def _rescaled(row: RecordedRow, source: RecordedRow, before: float) -> float:
    """Return the scale after a product of a gradient with one number.

    Of a gradient without a norm nothing is known: outside of the backward pass it counts
    as not scaled.
    """
    factor = (row.l2 or 0.0) / source.l2 if source.l2 else 0.0
    if not factor or not math.isfinite(factor):
        return 1.0 if row.phase != "backward" else before
    after = before * factor
    return 1.0 if _same(after, 1.0) else after


def _is_clip(row: RecordedRow, made_of_gradients: set[int]) -> bool:
    """Return True for a product of a gradient with what was made of gradients."""
    if row.phase == "backward" or row.base_operator not in PRODUCTS | DIVISIONS:
        return False
    return not made_of_gradients.isdisjoint(row.inputs)


def _is_seed(row: RecordedRow, rows: Rows) -> bool:
    """Return True for the gradient of the loss to itself: a number from no other gradient."""
    if not row.is_call or row.numel != 1 or row.l2 != 1.0:
        return False
    read = [rows[record] for record in row.inputs if record in rows]
    return row.base_operator in operators_that("create exactly") and all(
        each.phase == "forward" for each in read
    )


def _is_gradient(row: RecordedRow) -> bool:
    return bool(row.name) and str(row.name).endswith(".grad")


def _scaled_loss(seed: RecordedRow, rows: Rows) -> dict[int, float]:
    """Return the forward products of a whole loss, each with what it multiplies by.

    ``seed`` is the gradient of the loss to itself.
    """
    losses: dict[int, float] = {}
    for record in seed.inputs:
        losses |= _products_behind(rows, record)
    return losses


def _products_behind(rows: Rows, record: int, depth: int = 0) -> dict[int, float]:
    """Return the products that made a number out of another, or each of its summands."""
    row = rows.get(record)
    if row is None or not row.is_call or row.numel != 1 or depth > MOST_DEEP:
        return {}
    if row.base_operator == _SUM:
        return _of_all([_products_behind(rows, i, depth + 1) for i in row.inputs])
    source = rows.get(row.inputs[0]) if row.inputs else None
    if source is None or source.numel != 1:
        return {}
    if row.base_operator in HANDS_ON:
        return _products_behind(rows, source.record, depth + 1)
    if row.base_operator not in PRODUCTS | DIVISIONS or not source.l2 or not row.l2:
        return {}
    behind = _products_behind(rows, source.record, depth + 1)
    return behind | {record: row.l2 / source.l2}


def _of_all(summands: Sequence[Mapping[int, float]]) -> dict[int, float]:
    """Return the products whose factor all summands have."""
    return {
        record: factor
        for products in summands
        for record, factor in products.items()
        if all(any(_same(factor, f) for f in p.values()) for p in summands)
    }
