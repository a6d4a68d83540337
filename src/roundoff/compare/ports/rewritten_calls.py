"""A layer that is written anew in a program that is the same elsewhere.

Most calls have counterparts by module and operator, and where they differ that says it. A
layer that was ported has parameters of other names and layouts, and other operators: there
a comparison by values, as of two programs by different hands, names what is wrong, or says
that nothing is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

from torch import Tensor

from roundoff.compare.judging.explain import EarlierSteps, Sides
from roundoff.compare.judging.table import WRONG_CONSTANT, ComparedRow
from roundoff.compare.loop.loaded_values import GRADIENT
from roundoff.compare.loop.step_results import have_same_losses, losses_of
from roundoff.compare.pairing.alignment import CANDIDATE_ONLY, MATCHED, REFERENCE_ONLY
from roundoff.compare.ports.port_comparison import (
    StepByValues,
    ValuesCompared,
    explained_by_values,
)
from roundoff.compare.records.recorded_rows import RecordedRow, Rows
from roundoff.compare.records.value_sketch import (
    SketchIndex,
    in_reals,
    sketch_of_row,
)
from roundoff.compare.rounding.findings import OWN
from roundoff.compare.rounding.rounding_bound import REGION, unit
from roundoff.ops import operators_that

_FORWARD = "forward"
_BACKWARD = "backward"
_OPTIMIZER = "optimizer"
#: What a call looks like of which names say nothing but that it is another one.
_UNTOLD = frozenset(("other operator", "extra operator", "missing operator", "noise"))
_MOVES = operators_that("move values")
_CREATE = operators_that("create")
#: Fewer elements are in another order by chance.
_FEWEST = 8


def compared_by_values(
    step: StepByValues, rows: Sequence[ComparedRow]
) -> list[ComparedRow] | None:
    """Return the rows of a step by what they compute, where that names what is wrong.

    None where the first fault is at a call that the reference writes alike or of which
    it is known what is wrong, where tensors are missing, and where nothing is named.
    Counterparts of calls that are written otherwise were chosen by what reads them. The
    rows have no cause where names blame a call of the backward pass, and values agree.

    Args:
        step: the first in which the programs differ, or one in which they seem
            to agree.
        rows: of it, by name.
    """
    if not step.has_tensors:
        return None
    sides = step.recorded
    first = next((row for row in rows if row.cause == OWN), None)
    if first is None:
        # then nothing that was compared says that the result is right
        if not _lacks_results(sides, rows) and not _leaves_unexplained(rows):
            return None
        return explained_by_values(step, suspect=None)
    is_call = (first.call or 0) >= 0
    if _is_told(first) or not is_call:
        return None
    if first.phase == _BACKWARD:
        # the forward pass is right: written otherwise, it has another backward pass
        compared = step.compared
        is_right = compared.compares_all_results and _agree(sides, rows, compared)
        return compared.rows() if is_right else None
    if first.phase != _FORWARD:
        return None
    is_left_out = first.looks_like == "missing operator"
    return explained_by_values(step, suspect=first.record, is_left_out=is_left_out)


def agreeing_by_values(
    step: StepByValues, rows: Sequence[ComparedRow]
) -> list[ComparedRow] | None:
    """Return the rows of a step in which names blame a call, and all results agree.

    Or an input: a batch that is put together in another way has others, and more or fewer.
    Of two calls that do the same together each differs from the other program's by itself.
    What is far off, shows in a result; what hardly is may be a fault that results hide.

    Args:
        step: the first in which the programs differ by name.
        rows: of it, by name.
    """
    if not step.has_tensors:
        return None
    sides = step.recorded
    first = next((row for row in rows if row.cause == OWN), None)
    if first is None or first.phase not in (_FORWARD, _BACKWARD, _OPTIMIZER):
        return None
    # the state of an optimizer by hand has no names; a view is computed without a call
    is_input = first.operator == "input"
    is_view = _reads_some(sides.candidate.rows, first)
    if (first.call or 0) < 0 and not is_input and not is_view:
        return None
    is_told = first.looks_like not in _UNTOLD and not is_input
    # what only stands where another value is used says nothing of an optimizer by hand
    if first.phase == _OPTIMIZER and is_told and first.status == MATCHED:
        return None
    if (first.error or 0.0) < _far_off(first):
        return None
    compared = step.agreeing()
    if compared is None or not compared.compares_all_results:
        return None
    return compared.rows() if _agree(sides, rows, compared) else None


def _reads_some(rows: Rows, row: ComparedRow) -> bool:
    recorded = None if row.record is None else rows.get(row.record)
    return recorded is not None and bool(recorded.inputs)


def _far_off(row: ComparedRow) -> float:
    """Return from which error on a value shows that it is no counterpart, or a result its fault.

    As far from what agrees as from values that have nothing in common. What an optimizer
    computes once for all parameters shows in all of them.
    """
    rounding = REGION * unit(row.dtype)
    return rounding if row.phase == _OPTIMIZER else math.sqrt(rounding)


def _is_told(row: ComparedRow) -> bool:
    """Return True where names say what is wrong: the call is written alike, or is a known mistake.

    A counterpart that was chosen by its use says what should be there, and not which of
    the calls before it is wrong, unless it only puts what it reads in other places.
    """
    is_same_shape = row.shape == row.reference_shape
    is_known = row.looks_like not in _UNTOLD
    if row.status != MATCHED:
        only_moves = {row.operator, row.reference_operator} <= _MOVES
        is_itself = row.blamed == row.site
        return is_same_shape and is_known and only_moves and is_itself
    return is_same_shape or is_known


def laid_out_otherwise(
    sides: Sides, rows: Sequence[ComparedRow], names: Collection[str | None] = ()
) -> list[ComparedRow]:
    """Return the rows of parameters that differ, with the same elements in other places.

    Those of ``names`` did so before: what an update has added may be rounded otherwise.
    """
    return [
        row
        for row in _of_leaves(rows)
        if row.name in names or _is_laid_out_otherwise(sides, row)
    ]


def is_mispaired(rows: Sequence[ComparedRow]) -> bool:
    """Return True where the first fault is a call with a counterpart of another shape.

    In a layer by another hand one operator does two things: a mask is filled here, and
    scores are there. Names say nothing then; another number beside the same operands does.
    """
    first = next((row for row in rows if row.cause == OWN), None)
    if first is None or first.status != MATCHED or (first.call or 0) < 0:
        return False
    if first.looks_like == WRONG_CONSTANT and first.inputs_error == 0.0:
        return False
    if first.phase != _FORWARD or first.shape is None or first.reference_shape is None:
        return False
    return _long_axes(first.shape) != _long_axes(first.reference_shape)


def has_other_parameters(sides: Sides, rename: Callable[[str], str]) -> bool:
    """Return True where each program has parameters by names that the other lacks.

    A layer by another hand has its own; what they hold is compared, not what they are
    called.
    """
    ours = {rename(name) for name in _parameters(sides.reference.rows)}
    theirs = {rename(name) for name in _parameters(sides.candidate.rows)}
    return bool(ours - theirs) and bool(theirs - ours)


def _parameters(rows: Rows) -> set[str]:
    """Return the names of the parameters and buffers of a step."""
    names = {row.name for row in rows.values() if row.name}
    return {name for name in names if not name.endswith(GRADIENT)}


def _long_axes(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def compared_as_another_layer(
    step: StepByValues,
    rows: Sequence[ComparedRow],
    laid_out: Sequence[ComparedRow],
    memory: EarlierSteps,
) -> list[ComparedRow] | None:
    """Return the rows of a step by its values, where a layer is of another hand.

    By its name a parameter in another layout is wrong; a layer that is written for it is
    right. None where values cannot tell what is wrong. The rows have no cause where the
    values agree.

    Args:
        step: of both programs.
        rows: of it, by name.
        laid_out: those of parameters that are laid out otherwise.
        memory: of the steps before; the counterparts in it are changed.
    """
    sides = step.recorded
    compared = step.after(memory).compared
    leaves = [row.record or 0 for row in laid_out]
    if compared.differences and compared.is_sure:
        return None if compared.blames(leaves) else compared.rows()
    if compared.differences:
        rightly = compared.read_rightly(leaves)
        is_meant = all(_is_read_otherwise(sides, row) for row in laid_out)
        return compared.rows() if rightly and all(rightly) and is_meant else None
    return compared.rows() if _agree(sides, rows, compared) else None


def _agree(sides: Sides, rows: Sequence[ComparedRow], compared: ValuesCompared) -> bool:
    """Return True where values agree, with the results that names leave in doubt."""
    results = {row.record for row in _results(sides.candidate.rows)}
    alone = {row.record for row in rows if row.status == CANDIDATE_ONLY}
    last_of_both = max(results - alone, default=-1)
    differing = {row.record for row in rows if row.cause is not None}
    in_doubt = differing | {record for record in alone if (record or 0) > last_of_both}
    replaced = {row.reference_record for row in rows if row.record in differing}
    ours = {row.record for row in _results(sides.reference.rows)} & replaced
    return compared.agree(results & in_doubt, ours)


def _of_leaves(rows: Sequence[ComparedRow]) -> Iterator[ComparedRow]:
    """Yield the rows of parameters that differ from before the first call."""
    for row in rows:
        is_leaf = row.call is not None and row.call < 0 and row.name is not None
        if is_leaf and row.cause is not None and row.reference_record is not None:
            yield row


def _is_laid_out_otherwise(sides: Sides, row: ComparedRow) -> bool:
    """Return True for a parameter with the reference's elements in other places."""
    ours = sides.reference.tensor(row.reference_record or 0)
    theirs = sides.candidate.tensor(row.record or 0)
    if ours is None or theirs is None or ours.numel() != theirs.numel():
        return False
    if ours.dtype != theirs.dtype or ours.numel() < _FEWEST:
        return False
    if ours.shape == theirs.shape and ours.equal(theirs):
        return False
    return _in_order(ours).equal(_in_order(theirs))


def _is_read_otherwise(sides: Sides, row: ComparedRow) -> bool:
    """Return True where a parameter is read by other operators than the reference's."""
    ours = _readers(sides.reference.rows, row.reference_record)
    return ours != _readers(sides.candidate.rows, row.record)


def _readers(rows: Rows, record: int | None) -> set[str]:
    return {
        row.base_operator
        for row in rows.values()
        if record in row.inputs and row.phase == _FORWARD
    }


def _in_order(tensor: Tensor) -> Tensor:
    return in_reals(tensor).reshape(-1).sort().values


def _lacks_results(sides: Sides, rows: Sequence[ComparedRow]) -> bool:
    """Return True where a result of the candidate's forward pass has no counterpart.

    Nor is a value of the reference, by its statistics. The sum of all losses is one where
    the reference goes back from each by itself.
    """
    candidate = sides.candidate.rows
    alone = {row.record for row in rows if row.status == CANDIDATE_ONLY}
    if have_same_losses(sides.reference.rows, candidate):
        alone -= {row.record for row in losses_of(candidate)}
    results = [row for row in _results(candidate) if row.record in alone]
    return bool(results) and not all(_stand_in(sides.reference.rows, results))


def _leaves_unexplained(rows: Sequence[ComparedRow]) -> bool:
    """Return True where a gradient is far off, and a call before it was not compared.

    As far from what agrees as from values that have nothing in common: what it lacks may
    have been there.
    """
    is_lacking = any(row.status == REFERENCE_ONLY for row in rows)
    gradients = (row for row in rows if (row.name or "").endswith(GRADIENT))
    return is_lacking and any(
        (row.error or 0.0) > math.sqrt(REGION * unit(row.dtype)) for row in gradients
    )


def _stand_in(reference: Rows, results: Sequence[RecordedRow]) -> Iterator[bool]:
    sketches = [(record, sketch_of_row(row)) for record, row in reference.items()]
    index = SketchIndex((key, sketch) for key, sketch in sketches if sketch is not None)
    for row in results:
        sketch = sketch_of_row(row)
        yield sketch is not None and bool(index.near(sketch, REGION * unit(row.dtype)))


def _results(candidate: Rows) -> Iterator[RecordedRow]:
    """Yield the numbers of the forward pass that nothing reads, last first.

    Of a view that nothing reads it is what it shows. What is written to a part of a memory
    is read where the memory is. A constant that nothing reads is none.
    """
    read: set[int] = set()
    memories: set[int] = set()
    for row in reversed([*candidate.values()]):
        is_read = row.record in read or bool(row.inplace and row.memory in memories)
        is_view = row.view_of is not None and not row.inplace
        if not is_read and (is_view or row.base_operator in _CREATE):
            continue
        if not is_read and row.phase == _FORWARD and unit(row.dtype):
            yield row
        read.update(row.inputs)
        sources = (candidate[record] for record in row.inputs if record in candidate)
        memories.update(s.memory for s in sources if s.memory is not None)
