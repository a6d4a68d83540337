"""Where a step in portions goes wrong: the first value that stands nowhere, and matters.

A value that stands nowhere in the reference may be a helper: a mask, a term of a sum, a
score that a mask hides. It matters where something wrong is left of it: a gradient or a
parameter that is not the reference's, or a result that nothing reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from roundoff.compare.judging.table import STALE
from roundoff.compare.loop.loaded_values import GRADIENT
from roundoff.compare.loop.loop_words import times
from roundoff.compare.portions.earlier_causes import EARLIER
from roundoff.compare.portions.location import holds_stretch, locate, multiple
from roundoff.compare.portions.pieces import (
    Piece,
    Place,
    StepPieces,
    last_values,
    values_of,
)
from roundoff.compare.records.recorded_rows import RecordedRow, Rows
from roundoff.compare.rounding.rounding_bound import unit

#: The label of a value of which nothing is known but that it stands nowhere.
UNEXPLAINED = "value of its own"


@dataclass
class Blame:
    """What is wrong in a step.

    Attributes:
        wrong: values that matter and stand nowhere, by rank and record.
        ends: those of them that the step leaves behind, or that nothing reads.
        culprit: the value to name; None where nothing is wrong.
        label: what its error looks like, a key of ``symptoms.ADVICE``.
        evidence: what is known of it.
    """

    wrong: dict[Place, Piece] = field(default_factory=dict)
    ends: set[Place] = field(default_factory=set)
    culprit: Piece | None = None
    label: str = ""
    evidence: str = ""


def blame(step: StepPieces) -> Blame:
    """Return what is wrong in a step whose pieces were found."""
    result = Blame()
    result.ends = {*_wrong_ends(step), *_wrong_results(step)}
    for rank in step.candidates:
        _follow_back(step, rank, result)
    if not result.wrong:
        return result
    first = _first(step, result.wrong)
    result.culprit = first
    result.label, result.evidence = _described(step, first)
    for rule, label in EARLIER:
        earlier = rule(step, first)
        if earlier is not None:
            result.culprit, result.evidence = earlier
            result.label = label
            result.wrong[result.culprit.place] = result.culprit
            break
    return result


# -- what the step leaves ----------------------------------------------------------------


def _wrong_ends(step: StepPieces) -> Iterable[Place]:
    """Yield the last values of names that are not the reference's, nor a stretch of it."""
    ours = {step.rename(name): row for name, row in last_values(step.reference).items()}
    for name, row in ours.items():
        if not name.endswith(".grad"):
            continue
        parameter = name.removesuffix(".grad")
        if row.record in step.noise:
            step.noisy.add(parameter)
        else:
            _note_noisy_elements(step, parameter, row)
    for rank, candidate in step.candidates.items():
        for name, row in last_values(candidate).items():
            twin = ours.get(name)
            if twin is None or name.removesuffix(".grad") in step.noisy:
                continue
            piece = step.pieces.get((rank, row.record))
            if piece is None or _is_stretch(step, piece, twin):
                continue
            if _is_same_beside_noise(step, piece, twin):
                continue
            if not _is_written_later(step, piece, twin):
                yield piece.place


def _note_noisy_elements(
    step: StepPieces, parameter: str, gradient: RecordedRow
) -> None:
    """Note where a gradient is rounding alone, in this step or one before.

    The bias of keys has no gradient in exact arithmetic, that of queries and values
    beside it has one. An optimizer that divides by the gradient makes updates of both.
    """
    values = step.reference.tensor(gradient.record)
    if values is None or not values.numel():
        return
    rounding = step.allowed(gradient) * float(values.norm()) / values.numel() ** 0.5
    elements = values.abs() <= rounding
    before = step.noisy_elements.get(parameter)
    if before is not None and before.shape == elements.shape:
        elements = elements | before
    step.noisy_elements[parameter] = elements


def _is_same_beside_noise(step: StepPieces, piece: Piece, twin: RecordedRow) -> bool:
    """Return True where a parameter differs only in elements whose gradient is noise."""
    noisy = step.noisy_elements.get(piece.row.name or "")
    whole = step.reference.tensor(twin.record)
    values = values_of(step.candidates[piece.rank], piece.row)
    if noisy is None or whole is None or values is None or bool(noisy.all()):
        return False
    if not whole.shape == values.shape == noisy.shape:
        return False
    others = whole[~noisy].to(torch.float64)
    distance = float((others - values[~noisy].to(torch.float64)).norm())
    return distance <= step.allowed(twin) * float(others.norm())


def _is_written_later(step: StepPieces, piece: Piece, twin: RecordedRow) -> bool:
    """Return True where the right value is written after the last seen under its name.

    So it comes into memory that a parameter shares with a buffer of several, or with
    a tensor without a name.
    """
    wanted = step.reference.tensor(twin.record)
    if wanted is None:
        return False
    candidate = step.candidates[piece.rank]
    allowed = step.allowed(twin)
    for row in candidate.rows.values():
        is_later = row.record > piece.row.record and row.is_call
        if not is_later or not row.inplace or row.name:
            continue
        if (row.numel or 0) < wanted.numel():
            continue
        values = candidate.tensor(row.record)
        if values is not None and holds_stretch(values, wanted, allowed):
            return True
    return False


def _is_stretch(step: StepPieces, piece: Piece, twin: RecordedRow) -> bool:
    """Return True for a value that is that of the reference, or a shard of it."""
    location = piece.location
    if location is not None and piece.twin is twin and location.factor == 1.0:
        return True
    whole = step.reference.tensor(twin.record)
    values = values_of(step.candidates[piece.rank], piece.row)
    if whole is None or values is None:
        return True
    piece.twin = twin
    piece.tolerance = step.allowed(twin)
    located = (
        locate(whole, form, piece.tolerance, reordered=False)
        for form in _shards(values, whole)
    )
    piece.location = next((each for each in located if each is not None), None)
    return piece.location is not None


def _shards(values: torch.Tensor, whole: torch.Tensor) -> list[torch.Tensor]:
    """Return the shapes that the elements of a shard may have."""
    if values.numel() == whole.numel():
        return [values.reshape(whole.shape)]
    if values.ndim == whole.ndim:
        return [values]
    parts, rest = divmod(whole.numel(), max(1, values.numel()))
    if rest or not parts:
        return [values]
    shape = whole.shape
    return [
        values.reshape(*shape[:axis], size // parts, *shape[axis + 1 :])
        for axis, size in enumerate(shape)
        if size % parts == 0
    ]


def _wrong_results(step: StepPieces) -> Iterable[Place]:
    """Yield forward results that nothing reads and that stand nowhere.

    The reference has the same operator there, whose result nothing reads either.
    """
    unread = {
        (step.rename(row.module), row.base_operator)
        for row in _unread(step.reference.rows)
    }
    for rank, candidate in step.candidates.items():
        same_place = [
            row
            for row in candidate.rows.values()
            if row.is_call and (row.module, row.base_operator) in unread
        ]
        for row in [*_unread(candidate.rows), *same_place]:
            piece = step.pieces.get((rank, row.record))
            if piece is None or piece.stands or row.phase != "forward":
                continue
            if (row.module, row.base_operator) in unread or _is_in(row.module, unread):
                yield piece.place
        for row in _unread(candidate.rows):
            if (row.module, row.base_operator) in unread and row.phase == "forward":
                yield from _wrong_before_a_number(step, rank, row)


def _wrong_before_a_number(
    step: StepPieces, rank: int, number: RecordedRow
) -> Iterable[Place]:
    """Yield the values that stand nowhere of which a result is one number.

    It may cancel, or stand somewhere by chance: many values say more than their sum.
    """
    if number.numel != 1:
        return
    for record in number.inputs:
        piece = step.pieces.get((rank, record))
        if piece is None or piece.stands or piece.noise or not unit(piece.row.dtype):
            continue
        if (piece.row.numel or 0) > 1 and piece.term_of is None:
            yield piece.place


def _is_in(module: str, unread: Iterable[tuple[str, str]]) -> bool:
    """Return True for a module, other than the root, whose result the reference ends with."""
    return bool(module) and any(module == name for name, _ in unread)


def _unread(rows: Rows) -> list[RecordedRow]:
    """Return forward results that nothing reads, behind views and copies."""
    read = _read_by_computing(rows)
    return [
        row
        for row in rows.values()
        if row.is_call and row.phase != "backward" and row.record not in read
        if row.phase != "optimizer" and not row.name
    ]


def _read_by_computing(rows: Rows) -> set[int]:
    """Return the records that some call reads, other than by views that nothing reads."""
    read: set[int] = set()
    for row in sorted(rows.values(), key=lambda row: -row.record):
        is_view = row.view_of is not None and not row.inplace
        if is_view and row.record not in read:
            continue
        read.update(row.inputs)
    return read


# -- from what is left back to where it comes from ---------------------------------------


def _follow_back(step: StepPieces, rank: int, result: Blame) -> None:
    """Enter the values behind wrong ends of a rank that stand nowhere either."""
    waiting = [step.pieces[place] for place in result.ends if place[0] == rank]
    while waiting:
        piece = waiting.pop()
        if piece.place in result.wrong:
            continue
        result.wrong[piece.place] = piece
        wrong = [each for each in step.read_by(piece) if not _is_right(step, each)]
        # masks, positions and labels are made for the portions: they stand nowhere in
        # right ones too, and explain nothing where an operand is wrong
        operands = [each for each in wrong if unit(each.row.dtype)]
        waiting += operands or wrong


def _is_right(step: StepPieces, piece: Piece) -> bool:
    """Return True for a value that stands in the reference, and for what was there before
    and has no counterpart there. A term of a sum is right where what it reads is."""
    if piece.term_of is not None and piece.location is None:
        read = step.read_by(piece)
        return all(_is_right(step, each) for each in read if each.row.is_call)
    if piece.stands or piece.row.is_call:
        return piece.stands
    named = {step.rename(row.name) for row in step.reference.rows.values() if row.name}
    return piece.row.name not in named


def _first(step: StepPieces, wrong: Mapping[Place, Piece]) -> Piece:
    """Return the first wrong value whose inputs are right, in the reference's order."""
    first = [
        piece
        for piece in wrong.values()
        if not any(each.place in wrong for each in step.read_by(piece))
    ]
    first = [piece for piece in first if unit(piece.row.dtype)] or first
    order = {
        (step.rename(row.module), row.base_operator, row.phase): number
        for number, row in enumerate(step.reference.rows.values())
    }

    def at(piece: Piece) -> tuple[int, int, int]:
        row = piece.row
        number = order.get((row.module, row.base_operator, row.phase), row.record)
        return int(row.is_call), number, piece.rank

    alone = [piece for piece in first if not piece.row.is_call]
    return min(alone or first or wrong.values(), key=at)


# -- what is known of it -------------------------------------------------------------------


def _described(step: StepPieces, piece: Piece) -> tuple[str, str]:
    """Return the label and the evidence of the first wrong value."""
    factor = _factor(step, piece)
    if factor is not None and piece.term_of is None:
        evidence = f"it is {factor:.4g} times the reference's value"
        return "constant factor", evidence
    written = _times_written(step, piece)
    if written is not None:
        here, there = written
        evidence = (
            f"{piece.row.name} is written {times('time', here)} in this step, in the "
            f"reference {times('time', there)}: it holds what the reference's does before "
            "the last"
        )
        return STALE, evidence
    terms = [each for each in step.read_by(piece) if each.term_of is not None]
    if terms and piece.row.phase != "collective":
        over = "portions"
        if len(step.candidates) > 1:
            over = f"ranks {', '.join(map(str, step.candidates))}"
        evidence = (
            f"it reads {terms[0].row.site}, which is one term of a sum: the sum over "
            f"the {over} is missing, or was cleared"
        )
        return "missing operator", evidence
    read = [each for each in step.read_by(piece) if each.row.is_call]
    if not piece.row.is_call:
        return "other values", "it is no part of the reference's value of this name"
    inputs = ", ".join(sorted({each.row.site for each in read})[:3])
    evidence = "its values stand nowhere in the reference"
    if inputs:
        evidence += f"; those that it reads do: {inputs}"
    return UNEXPLAINED, evidence


def _times_written(step: StepPieces, piece: Piece) -> tuple[int, int] | None:
    """Return how often a name is written here and in the reference, where less often here.

    None for a last value that the reference's name never holds, and for gradients, which
    are sums.
    """
    row = piece.row
    if (row.name or "").endswith(GRADIENT):
        return None
    values = values_of(step.candidates[piece.rank], row)
    here = _writes(step.candidates[piece.rank].rows, row.name)
    there = _writes(step.reference.rows, row.name, step.rename)
    if values is None or not row.is_call or len(here) >= len(there):
        return None
    for twin in there.values():
        whole = step.reference.tensor(twin.record)
        if whole is not None and holds_stretch(whole, values, step.allowed(twin)):
            return len(here), len(there)
    return None


def _writes(
    rows: Rows, name: str | None, rename: Callable[[str], str] = str
) -> dict[int, RecordedRow]:
    """Return what each call leaves that writes a name in place."""
    return {
        row.call: row
        for row in rows.values()
        if row.name and row.inplace and rename(row.name) == name
    }


def _factor(step: StepPieces, piece: Piece) -> float | None:
    """Return how many times the reference's value a wrong one is; None for no multiple."""
    twins = [piece.twin] if piece.twin is not None else step.twins_of(piece.row)
    values = values_of(step.candidates[piece.rank], piece.row)
    for twin in twins:
        whole = step.reference.tensor(twin.record)
        if whole is None or values is None or whole.shape != values.shape:
            continue
        factor = multiple(whole, values, step.allowed(twin))
        if factor is not None:
            return factor
    return None
