"""The rows of a step that was computed in other portions than the reference's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.judging.symptoms import ADVICE
from roundoff.compare.judging.table import ComparedRow, names_of_both
from roundoff.compare.loop.loaded_values import GRADIENT
from roundoff.compare.loop.step_results import losses_of
from roundoff.compare.pairing.alignment import CANDIDATE_ONLY, MATCHED, uncompiled
from roundoff.compare.portions.accumulated_rounding import left_behind
from roundoff.compare.portions.blame import Blame, blame
from roundoff.compare.portions.location import locate
from roundoff.compare.portions.pieces import Piece, StepPieces, hands_on
from roundoff.compare.records.recorded_rows import Content, RecordedRow, made_from
from roundoff.compare.rounding.distance import of_statistics
from roundoff.compare.rounding.findings import INHERITED, OWN
from roundoff.compare.rounding.rounding_bound import REGION, REGION_LIMIT, unit
from roundoff.ops import operators_that

#: Calls of a module on one batch each that are held against each other.
MOST_BATCHES = 16
#: Portions are another schedule where this share of the parameters' readers work on
#: other shapes.
SHARE = 0.5
#: Work on two tensors, or on one and a number.
_PAIRED = operators_that("pair elements")
_COPIES = operators_that("change no value")
_LOOKUPS = operators_that("look up")
_MOVES = operators_that("move values")


@dataclass
class PortionsMemory:
    """What the earlier steps leave to later ones; written step by step."""

    #: Names of parameters whose gradients are rounding alone.
    noisy: set[str] = field(default_factory=set)
    #: Which elements of a parameter's gradient are rounding alone, by its name.
    noisy_elements: dict[str, Tensor] = field(default_factory=dict)
    #: How far the reference's values may be rounded by now, by name.
    rounding: dict[str, float] = field(default_factory=dict)
    #: What the reference's values that are rounding alone hold.
    noise: set[Content] = field(default_factory=set)


def in_other_portions(reference: RecordedStep, candidate: RecordedStep) -> bool:
    """Return True where one rank does the reference's work in other portions.

    Then the calls of most modules with parameters work on other shapes, or on rows in
    another order, or there are several for one of the reference. A fault changes few
    of them. Rows that are fed in another order are other data.
    """
    ours = _results_by_module(reference)
    theirs = _results_by_module(candidate)
    common = ours.keys() & theirs.keys()
    if not common:
        return False
    of_other_shapes = {
        name for name in common if _shapes(ours[name]) != _shapes(theirs[name])
    }
    reordered = [
        name
        for name in common - of_other_shapes
        if _is_reordered(reference, candidate, ours[name][0], theirs[name][0])
    ]
    if reordered and not of_other_shapes and _is_fed_otherwise(reference, candidate):
        return False
    return len(of_other_shapes) + len(reordered) > SHARE * len(common)


def _is_fed_otherwise(reference: RecordedStep, candidate: RecordedStep) -> bool:
    """Return True where data that come from outside stand in another order."""
    pairs = zip(_from_outside(reference), _from_outside(candidate), strict=False)
    return any(_is_reordered(reference, candidate, *pair) for pair in pairs)


def _from_outside(step: RecordedStep) -> list[RecordedRow]:
    """Return what is made of no other value and has no name, in order."""
    return [
        row
        for row in step.rows.values()
        if not row.inputs and not row.name and row.phase == "forward"
    ]


def is_another_batch(
    reference: RecordedStep,
    candidate: RecordedStep,
    others: Sequence[tuple[RecordedRow, RecordedRow]],
) -> bool:
    """Return True where modules are called as often as in the reference, on other data.

    Others may be called once for each place of a sequence, of which other data have more.

    ``others``: pairs of what is fed from outside, where no statistics are those of one
    in other portions.

    Nothing of what the first of them makes stands in what it makes in the other run. The
    rows of a table stand in any batch of the same words. Or what the first call makes is the
    same in both, and a later one makes what stands in none of the other run's.
    """
    ours = _results_by_module(reference)
    theirs = _results_by_module(candidate)
    common = [name for name in ours if name in theirs]
    # what a script reads of the model's own buffers is no call of a module
    common = [name for name in common if name] or common
    common = [name for name in common if len(ours[name]) == len(theirs[name])]
    if not common:
        return False
    if others:
        return _are_others(reference, candidate, others)
    results = [[*zip(ours[name], theirs[name], strict=True)] for name in common]
    computed = [[pair for pair in of if not _is_looked_up(pair[0])] for of in results]
    first = next((of for of in computed if of), results[0])
    if not any(_stand_in_each_other(reference, candidate, *pair) for pair in first):
        return True
    return _is_left_out(reference, candidate, first[:MOST_BATCHES])


def calls_as_often(reference: RecordedStep, candidate: RecordedStep) -> bool:
    """Return True where each module with parameters that both have is called as often."""
    ours = _results_by_module(reference)
    theirs = _results_by_module(candidate)
    common = ours.keys() & theirs.keys()
    return all(len(ours[name]) == len(theirs[name]) for name in common)


def _is_left_out(
    reference: RecordedStep,
    candidate: RecordedStep,
    results: Sequence[tuple[RecordedRow, RecordedRow]],
) -> bool:
    """Return True where both begin with one batch, and the candidate has none of a later one."""
    ours, theirs = results[0]
    if ours.shape != theirs.shape:
        return False
    if not _stand_in_each_other(reference, candidate, ours, theirs):
        return False
    others = [other for _, other in results]
    return not all(
        any(_stand_in_each_other(reference, candidate, one, other) for other in others)
        for one, _ in results
    )


def _are_others(
    reference: RecordedStep,
    candidate: RecordedStep,
    pairs: Sequence[tuple[RecordedRow, RecordedRow]],
) -> bool:
    """Return True where one of the reference's data stands in none of the candidate's.

    What is computed of them, as positions are of a mask, stands in that of any batch: it
    counts where there is nothing else. So do values of other numbers of axes.
    """
    given = [pair for pair in pairs if all(map(_is_given, pair))]
    alike = [(ours, theirs) for ours, theirs in given if _axes(ours) == _axes(theirs)]
    if not alike:
        return not any(_stand_in_each_other(reference, candidate, *p) for p in pairs)
    found: dict[int, bool] = {}
    for ours, theirs in alike:
        stands = _stand_in_each_other(reference, candidate, ours, theirs)
        found[ours.record] = found.get(ours.record, False) or stands
    return not all(found.values())


def _is_given(row: RecordedRow) -> bool:
    """Return True for what comes from outside, as it is."""
    return not row.is_call or row.base_operator in _MOVES


def _axes(row: RecordedRow) -> int:
    """Return how many axes a value has, but for one of single elements at its end.

    A column of classes has no rows that could be told apart: each of its elements stands
    somewhere in any table of as small numbers.
    """
    shape = row.shape or ()
    is_column = bool(shape) and shape[-1] == 1
    return len(shape) - is_column


def _is_looked_up(row: RecordedRow) -> bool:
    return row.base_operator in _LOOKUPS


def _stand_in_each_other(
    reference: RecordedStep,
    candidate: RecordedStep,
    ours: RecordedRow,
    theirs: RecordedRow,
) -> bool:
    """Return True where one value is part of the other, or nothing is known of them."""
    one = reference.tensor(ours.record)
    other = candidate.tensor(theirs.record)
    if one is None or other is None or one.ndim != other.ndim:
        return True
    rounding = min(REGION * unit(ours.dtype), REGION_LIMIT)
    return any(
        locate(*pair, rounding) is not None for pair in ((one, other), (other, one))
    )


def share_of_work(reference: RecordedStep, candidate: RecordedStep) -> float:
    """Return how many elements the modules with parameters make, for one of the reference.

    1 where a step does all of its work in other portions, less where a part is left
    out; 1 too where nothing can be compared. What no loss is made of, as a pass over all
    data that sets the model up, is no work of the loop.
    """
    ours = _for_losses(reference)
    theirs = _for_losses(candidate)
    common = ours.keys() & theirs.keys()
    wanted = sum(row.numel or 0 for name in common for row in ours[name])
    elements = sum(row.numel or 0 for name in common for row in theirs[name])
    return elements / wanted if wanted else 1.0


def _for_losses(step: RecordedStep) -> dict[str, list[RecordedRow]]:
    """Return the results of each module with parameters that the losses are made of.

    All of them where there is no loss.
    """
    results = _results_by_module(step)
    losses = [row.record for row in losses_of(step.rows)]
    if not losses:
        return results
    unnamed = {key: row for key, row in step.rows.items() if not row.name}
    made_of = made_from(unnamed, losses)
    return {
        name: [row for row in rows if row.record in made_of]
        for name, rows in results.items()
    }


def _shapes(rows: Sequence[RecordedRow]) -> list[tuple[int, ...]]:
    return [tuple(row.shape or ()) for row in rows]


def _is_reordered(
    reference: RecordedStep,
    candidate: RecordedStep,
    ours: RecordedRow,
    theirs: RecordedRow,
) -> bool:
    """Return True for the same rows in another order: equal statistics, other values."""
    rounding = min(REGION * unit(ours.dtype), REGION_LIMIT)
    distance = of_statistics(ours, theirs)
    if distance.equal and ours.hash is not None:
        return False
    if distance.error is None or distance.error > rounding:
        return False
    whole = reference.tensor(ours.record)
    piece = candidate.tensor(theirs.record)
    if whole is None or piece is None or whole.shape != piece.shape or whole.ndim < 2:
        return False
    if not whole.is_complex():
        whole = whole.to(torch.float64)
        piece = piece.to(torch.float64)
    if float((whole - piece).norm()) <= rounding * float(whole.norm()):
        return False
    return locate(whole, piece, rounding) is not None


def _results_by_module(step: RecordedStep) -> dict[str, list[RecordedRow]]:
    """Return the forward results of the calls that read the parameters of each module.

    In the first step of a script, calls may have made these; a loop that hands on its
    parameters makes new ones, which have no name. What is written to a parameter, as to a
    slow copy of it, is a parameter still. What is made of parameters alone, as a weight that
    is pruned, says nothing of the data.
    """
    named = {
        row.record: uncompiled(row.name).rpartition(".")[0]
        for row in step.rows.values()
        if row.name and row.phase == "forward" and not row.name.endswith(GRADIENT)
    }
    calls = [
        row
        for row in step.rows.values()
        if row.phase == "forward" and row.is_call and row.record not in named
    ]
    readers = _readers(step, calls, named)
    of_parameters = {*named}
    results: dict[str, list[RecordedRow]] = {}
    for row in calls:
        if row.inputs and of_parameters.issuperset(row.inputs):
            of_parameters.add(row.record)
            continue
        if row.place or hands_on(row):
            continue
        for name in readers.get((row.module, row.base_operator), ()):
            results.setdefault(name, []).append(row)
    return results


def _readers(
    step: RecordedStep, calls: Sequence[RecordedRow], named: Mapping[int, str]
) -> dict[tuple[str, str], set[str]]:
    """Return by module and operator whose parameters the calls read."""
    names = dict(named)
    readers: dict[tuple[str, str], set[str]] = {}
    for row in calls:
        for record in row.inputs:
            if record not in names:
                continue
            if hands_on(row):
                names[row.record] = names[record]
            elif row.place == 0 and not _is_update(row, step.rows[record]):
                at = (row.module, row.base_operator)
                readers.setdefault(at, set()).add(names[record])
    return readers


def _is_update(row: RecordedRow, parameter: RecordedRow) -> bool:
    """Return True for what changes a parameter or a slow copy, rather than use it."""
    is_elementwise = bool(row.inplace) or row.base_operator in _PAIRED | _COPIES
    return is_elementwise and tuple(row.shape or ()) == tuple(parameter.shape or ())


def compare_portions(
    reference: RecordedStep,
    candidates: Mapping[int, RecordedStep],
    rename: Callable[[str], str],
    memory: PortionsMemory,
) -> list[ComparedRow]:
    """Return a row for each value of every rank of the candidate in one step.

    Args:
        reference: the step of the one process that does all of it, with tensors.
        candidates: the step by rank, with tensors.
        rename: from a module of the reference to its name in the candidate.
        memory: what the steps before left; it is changed.
    """
    step = StepPieces(
        reference,
        candidates,
        rename,
        memory.noisy,
        memory.noisy_elements,
        memory.rounding,
    )
    step.find()
    memory.rounding |= left_behind(reference.rows, step.rounding)
    memory.noise |= {reference.rows[record].content for record in step.noise}
    result = blame(step)
    return [_row(result, piece) for piece in step.pieces.values()]


#: Why a value of another layout is not compared without tensors.
_NO_TENSORS = (
    "a part of a value of the reference: parts are put together from tensors alone "
    "(record both with --keep tensors)"
)


def without_tensors(
    reference: RecordedStep,
    candidates: Mapping[int, RecordedStep],
    rename: Callable[[str], str],
) -> list[ComparedRow]:
    """Return the rows of another layout where only statistics are known.

    Values at the same place of the program with the same shape and statistics agree;
    all others are undecided.
    """
    twins = {_place(row, rename(row.module)): row for row in reference.rows.values()}
    rows = []
    for rank, step in candidates.items():
        for row in step.rows.values():
            twin = twins.get(_place(row, row.module))
            columns = _names(rank, row, twin)
            distance = None if twin is None else of_statistics(twin, row).error
            tolerance = min(REGION * unit(row.dtype), REGION_LIMIT)
            if distance is not None and distance <= tolerance:
                columns |= {"status": MATCHED, "error": distance}
                columns |= {"equal": distance == 0, "tolerance": tolerance}
            else:
                columns |= {"status": CANDIDATE_ONLY, "reason": _NO_TENSORS}
                columns["undecided"] = True
            rows.append(ComparedRow(**columns))
    return rows


def _place(row: RecordedRow, module: str) -> tuple[object, ...]:
    return row.phase, module, row.operator, row.index, row.place, tuple(row.shape or ())


def _row(result: Blame, piece: Piece) -> ComparedRow:
    row = piece.row
    columns = _names(piece.rank, row, piece.twin)
    columns |= _measured(piece, result)
    if piece is result.culprit:
        columns |= _explained(piece, result)
    elif piece.place in result.wrong and result.culprit is not None:
        columns |= {"cause": INHERITED, "origin": result.culprit.row.site}
        columns["error"] = columns.get("error") or 1.0
        columns["tolerance"] = piece.tolerance
    return ComparedRow(**columns)


def _names(rank: int, row: RecordedRow, twin: RecordedRow | None) -> dict[str, Any]:
    """Return the columns that name a value; no piece is left out as a view is."""
    named = replace(row, rank=rank, site=row.site or row.name or "", view_of=None)
    return names_of_both(twin, named)


def _measured(piece: Piece, result: Blame) -> dict[str, Any]:
    """How far a piece is from the stretch of the reference where it stands."""
    location = piece.location
    if location is None:
        if piece.term_of is not None:
            reason = "a term of a sum over the ranks, which agrees"
        elif piece.noise:
            reason = "rounding is as large as the value: nothing can be told from it"
        elif piece.place in result.wrong:
            reason = "its values stand nowhere in the reference"
        else:
            reason = "it stands nowhere in the reference; nothing wrong is left of it"
        return {"status": CANDIDATE_ONLY, "reason": reason}
    covered = location.covered
    is_whole = bool(covered.all())
    share = "" if is_whole else "a part of the reference's value"
    padded = "" if location.complete else "the reference's value and padding"
    factor = "" if location.factor == 1 else f"{location.factor:.4g} times it"
    reason = "; ".join(part for part in (share, padded, factor) if part)
    return {
        "status": MATCHED,
        "reason": reason or None,
        "error": location.error,
        "equal": location.error == 0,
        "tolerance": piece.tolerance,
    }


def _explained(piece: Piece, result: Blame) -> dict[str, Any]:
    row = piece.row
    twin = piece.twin
    location = piece.location
    error = 1.0 if location is None else max(location.error, 1.0)
    return {
        "error": error,
        "own_error": error,
        "inputs_error": 0.0,
        "tolerance": piece.tolerance,
        "contribution": 1.0,
        "cause": OWN,
        "origin": row.site,
        "blamed": row.site,
        "blamed_line": row.line,
        "blamed_phase": row.phase,
        "blamed_reference": None if twin is None else twin.site,
        "blamed_reference_line": None if twin is None else twin.line,
        "looks_like": result.label,
        "evidence": result.evidence,
        "advice": ADVICE[result.label],
    }
