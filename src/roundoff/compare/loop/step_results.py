"""What a step leaves, and what that says of the calls before.

A loop that is written anew may sum its losses before one backward pass or after two, clamp
one limit or both, compute all samples at once: calls that look like each other's counterparts
hold other values, rightly so. Where all that the step leaves agrees (what the backward pass
leaves in the gradients, the gradients that the optimizer steps with, parameters, buffers, its
state, the sum of the losses, and each number that nothing reads) the two only get there in
other ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from roundoff.compare.judging.divergence import HANDS_ON, NOISE, Divergence
from roundoff.compare.judging.read_later import ReadLater
from roundoff.compare.loop.loaded_values import GRADIENT
from roundoff.compare.records.recorded_rows import (
    RecordedRow,
    Rows,
    last_named,
    made_from,
    maker,
)
from roundoff.compare.rounding.findings import OWN, Finding
from roundoff.compare.rounding.rounding_bound import (
    REGION,
    REGION_LIMIT,
    unit,
    working_formats,
)
from roundoff.compare.rounding.two_formulas import explained_by_a_region

_FORWARD = "forward"
_BACKWARD = "backward"
_OPTIMIZER = "optimizer"
#: What a backward pass begins with; of the loss it reads the shape alone.
_SEED = "ones_like"


def clear_another_way(
    divergence: Divergence, read_later: Callable[[], ReadLater]
) -> None:
    """Take the blame from the calls of a step that leaves what the reference's leaves.

    A value that is a little off may be a fault of which the results show nothing more than
    rounding: it stays, unless it is another constant and they are the same bit for bit. So
    do values from before the step, and calls that are wrong for the inputs they had; and
    what the next step reads.
    """
    own = [f for f in divergence.findings.values() if f.cause == OWN]
    if not own or not divergence.measures.can_replay:
        return
    if not all(_may_be_another_way(divergence, finding) for finding in own):
        return
    pairs = _left_by_both(divergence)
    if pairs is None or not _agree(divergence, pairs):
        return
    are_constants = all(finding.arguments for finding in own)
    is_without_effect = are_constants and _are_same(divergence, pairs)
    if not is_without_effect and not _differ_wholly(divergence, own):
        return
    differing = [f for f in divergence.findings.values() if f.cause is not None]
    if any(_is_read_later(divergence, each, read_later()) for each in differing):
        return
    for finding in differing:
        _clear(finding)


def _is_read_later(
    divergence: Divergence, finding: Finding, read_later: ReadLater
) -> bool:
    twin = divergence.twin(finding.record)
    return read_later.has(twin, divergence.candidate[finding.record])


def _may_be_another_way(divergence: Divergence, finding: Finding) -> bool:
    """Return False for what is wrong by itself, and for what is written in place, as the
    scale of a loss and an optimizer's state are: that is a result."""
    row = divergence.candidate[finding.record]
    is_result = bool(row.inplace) and row.phase != _BACKWARD
    is_sound = finding.faulty is None and not row.nonfinite
    return row.is_call and is_sound and not is_result


def _differ_wholly(divergence: Divergence, own: Sequence[Finding]) -> bool:
    """Return True where the programs evidently compute other values here, and none that
    rounding brings about."""
    errors = [finding.error or 0.0 for finding in own]
    formats = [divergence.candidate[finding.record].dtype for finding in own]
    is_rounding = any(map(explained_by_a_region, errors, formats))
    return max(errors) >= NOISE and not is_rounding


def _clear(finding: Finding) -> None:
    """Make it a value that has no counterpart, of which a distance says nothing."""
    finding.cause = None
    finding.origin = None
    finding.error = None
    finding.own_error = 0.0


def _left_by_both(
    divergence: Divergence,
) -> list[tuple[RecordedRow, RecordedRow]] | None:
    """Return what is left under the same names, reference first; None where one side lacks any."""
    ours = _left(divergence.reference)
    theirs = _left(divergence.candidate)
    if [named.keys() for named in ours] != [named.keys() for named in theirs]:
        return None
    return [
        (named[name], others[name])
        for named, others in zip(ours, theirs, strict=True)
        for name in named
    ]


def _left(rows: Rows) -> list[dict[str, RecordedRow]]:
    """Return what backward passes have left before each optimizer steps, and at the end,
    and all that has a name at the end, by name.

    A clip, and an optimizer that divides by their size, hide a factor of gradients. What is
    computed between two parts of an optimizer is no pass.
    """
    names = _names(rows)
    before_optimizers = []
    gradients: dict[str, RecordedRow] = {}
    is_changed = False
    for row in rows.values():
        if row.phase == _OPTIMIZER and is_changed:
            before_optimizers.append({**gradients})
            is_changed = False
        if row.phase == _BACKWARD and row.record in names:
            gradients[names[row.record]] = row
            is_changed = True
    return [*before_optimizers, gradients, last_named(rows)]


def _names(rows: Rows) -> dict[int, str]:
    """Return the names of values, those included that are first written to by a name."""
    names: dict[int, str] = {}
    for row in rows.values():
        if row.name and row.inplace and row.inputs:
            names.setdefault(row.inputs[0], row.name)
        if row.name:
            names[row.record] = row.name
    return names


def _agree(
    divergence: Divergence, pairs: list[tuple[RecordedRow, RecordedRow]]
) -> bool:
    """Return True where all that the step leaves agrees."""
    if not any((row.name or "").endswith(GRADIENT) for _, row in pairs):
        return False  # a forward pass alone leaves nothing that all of it shows in
    formats = working_formats(divergence.reference.values())
    coarsest = max(map(unit, formats), default=0.0)
    if not all(_is_rounding(divergence, *pair, coarsest) for pair in pairs):
        return False
    candidate = divergence.candidate
    if not have_same_losses(divergence.reference, candidate):
        return False
    if not all(_has_counterpart(divergence, row) for row in _unread(candidate)):
        return False
    without_name = map(divergence.findings.get, _gradients_without_name(candidate))
    return all(map(_is_without_cause, without_name))


def _gradients_without_name(rows: Rows) -> Iterator[int]:
    """Yield what the backward pass hands to an optimizer for parameters without a name."""
    names = _names(rows)
    for row in rows.values():
        if row.phase != _OPTIMIZER:
            continue
        for record in row.values_read():
            read = rows.get(record)
            if read is not None and read.phase == _BACKWARD and record not in names:
                yield record


def _is_rounding(
    divergence: Divergence, ours: RecordedRow, theirs: RecordedRow, coarsest: float
) -> bool:
    """Return True where two values of a name agree.

    A gradient may be one rounding of the coarsest format off that the reference's products
    are made in: two passes add up what each has rounded, one pass rounds it once.
    """
    are_paired = divergence.counterpart.get(theirs.record) == ours.record
    if are_paired and _is_without_cause(divergence.findings.get(theirs.record)):
        return True
    error = divergence.measures.distance(ours.record, theirs.record).error
    bound = divergence.measures.bound(
        maker(divergence.reference, ours, HANDS_ON),
        maker(divergence.candidate, theirs, HANDS_ON),
    )
    allowed = bound.tolerance * bound.condition
    if theirs.phase == _BACKWARD or (theirs.name or "").endswith(GRADIENT):
        allowed = max(allowed, coarsest)
    return error is not None and error <= allowed


def _are_same(
    divergence: Divergence, pairs: list[tuple[RecordedRow, RecordedRow]]
) -> bool:
    return all(
        divergence.measures.distance(ours.record, theirs.record).equal
        for ours, theirs in pairs
    )


def have_same_losses(reference: Rows, candidate: Rows) -> bool:
    """Return True where the losses of two steps are as large together, but for rounding."""
    ours = losses_of(reference)
    theirs = losses_of(candidate)
    rounding = max((unit(row.dtype) for row in (*ours, *theirs)), default=0.0)
    return math.isclose(
        _sum(ours), _sum(theirs), rel_tol=min(REGION * rounding, REGION_LIMIT)
    )


def losses_of(rows: Rows) -> list[RecordedRow]:
    """Return the numbers that the backward passes of a step begin at.

    Not those of which only derivatives are taken that another loss is made of: one program
    goes back from the sum of what the other goes back from value by value.
    """
    passes = (row for row in rows.values() if row.phase == _BACKWARD)
    read_backward = {record for row in passes for record in row.inputs}
    seeds = (row for row in rows.values() if row.base_operator == _SEED)
    seed_of = {
        record: row.record
        for row in seeds
        if row.record in read_backward
        for record in row.inputs
    }
    numbers = [row for row in rows.values() if row.record in seed_of and row.numel == 1]
    before_updates = {key: row for key, row in rows.items() if row.phase != _OPTIMIZER}
    read = (record for number in numbers for record in number.inputs)
    made_of = made_from(before_updates, read)
    return [row for row in numbers if seed_of[row.record] not in made_of]


def _sum(numbers: Sequence[RecordedRow]) -> float:
    return math.fsum(number.mean or 0.0 for number in numbers)


def _unread(rows: Rows) -> Iterator[RecordedRow]:
    """Yield the numbers that calls outside the backward pass leave, and nothing reads.

    Those with a name are looked at by it. Views are no values of their own, and of several
    results of a call, as a maximum and its place, some may not be wanted.
    """
    read = {record for row in rows.values() for record in row.inputs}
    wanted = {rows[record].call for record in read if record in rows}
    for row in rows.values():
        is_left = row.is_call and row.phase != _BACKWARD and row.record not in read
        if not is_left or row.name or not unit(row.dtype):
            continue
        is_view = row.view_of is not None and not row.inplace
        is_further = row.call in wanted and not row.is_on_lists
        if not is_view and not is_further and not row.place:
            yield row


def _has_counterpart(divergence: Divergence, row: RecordedRow) -> bool:
    """Return True for a result that agrees; one of the forward pass with any value there."""
    if _is_without_cause(divergence.findings.get(row.record)):
        return True
    is_forward = row.phase == _FORWARD
    return is_forward and divergence.measures.stands_in_reference(row)


def _is_without_cause(finding: Finding | None) -> bool:
    return finding is not None and finding.cause is None and finding.error is not None
