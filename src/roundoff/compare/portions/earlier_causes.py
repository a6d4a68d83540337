"""Causes of a step in portions that lie before its first wrong value, or explain all of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import torch

from roundoff.compare.judging.explain import RecordedStep
from roundoff.compare.portions.location import multiple
from roundoff.compare.portions.pieces import (
    Piece,
    Place,
    StepPieces,
    hands_on,
    last_values,
    values_of,
)
from roundoff.compare.records.recorded_rows import RecordedRow
from roundoff.compare.rounding.rounding_bound import EXPONENTIALS, unit
from roundoff.ops import operators_that

#: A sum of terms is once the reference's value to this share.
_NEAR = 1e-3
#: Read the shape of a tensor, not its values.
_CREATE = operators_that("create")
_CUT = operators_that("cut out")


def _misplaced_shard(step: StepPieces, _: Piece) -> tuple[Piece, str] | None:
    """Return a shard of a parameter that stands elsewhere than the others of its rank do."""
    shards: dict[str, list[Piece]] = defaultdict(list)
    for piece in step.pieces.values():
        row = piece.row
        if row.is_call or not row.name or piece.location is None:
            continue
        if not bool(piece.location.covered.all()):
            shards[row.name].append(piece)
    orders = {name: _order(pieces) for name, pieces in shards.items()}
    if not orders:
        return None
    usual = Counter(orders.values()).most_common(1)[0][0]
    for name, order in orders.items():
        if order == usual or len(order) != len(usual):
            continue
        pieces = shards[name]
        moved = [p for p, a, b in zip(pieces, order, usual, strict=True) if a != b]
        ranks = ", ".join(str(piece.rank) for piece in moved)
        evidence = (
            f"the parts of {name} lie in the order {_listed(order)} of the ranks, those "
            f"of the other parameters in the order {_listed(usual)}: rank {ranks} has "
            "the part of another rank"
        )
        return moved[0], evidence
    return None


def _updated_more_often(step: StepPieces, _: Piece) -> tuple[Piece, str] | None:
    """Return the first update of a parameter, where there are more than in the reference."""
    usual = _updates(step.reference)
    for rank, candidate in step.candidates.items():
        updates = _updates(candidate)
        more = [n for n in updates if len(updates[n]) > len(usual.get(n, ())) > 0]
        if not more or len(more) <= len(updates) / 2:
            continue
        row = min((updates[name][0] for name in more), key=lambda row: row.record)
        piece = step.pieces.get((rank, row.record))
        if piece is not None:
            often = len(updates[row.name or ""])
            evidence = (
                f"parameters are updated {often} times in this step, and "
                f"{len(usual[row.name or ''])} times in the reference's: between them "
                "the candidate works with other weights"
            )
            return piece, evidence
    return None


def _updates(step: RecordedStep) -> dict[str, list[RecordedRow]]:
    """Return the calls of optimizers that write each parameter, by its name."""
    updates: dict[str, dict[int, RecordedRow]] = defaultdict(dict)
    parameters = {row.name for row in step.rows.values() if row.operator == "parameter"}
    for row in step.rows.values():
        is_update = row.is_call and row.phase == "optimizer"
        if is_update and row.name in parameters:
            updates[row.name or ""][row.call] = row
    return {name: list(rows.values()) for name, rows in updates.items()}


def _order(pieces: Iterable[Piece]) -> tuple[int, ...]:
    """Return which part of the whole each rank has, counted from 0."""
    starts = []
    for piece in sorted(pieces, key=lambda piece: piece.rank):
        location = piece.location
        if location is not None:
            starts.append(int(location.covered.flatten().to(torch.uint8).argmax()))
    numbers = {start: number for number, start in enumerate(sorted(set(starts)))}
    return tuple(numbers[start] for start in starts)


def _listed(order: Iterable[int]) -> str:
    return ", ".join(map(str, order))


def _lost_part(step: StepPieces, first: Piece) -> tuple[Piece, str] | None:
    """Return the first value of which no rank and no portion has a part, ever after."""
    if not first.row.is_call:
        return None
    lost = _lost(step) & step.covered.keys()
    culprit_twin = first.twin.record if first.twin is not None else None
    for record in sorted(lost):
        row = step.reference.rows[record]
        if not unit(row.dtype) or any(source in lost for source in _sources(step, row)):
            continue
        pieces = [
            piece
            for piece in step.pieces.values()
            if piece.twin is row and piece.row.base_operator == row.base_operator
        ]
        if not pieces or record == culprit_twin or not _leads_to(step, pieces, first):
            continue
        covered = step.covered[record]
        share = 1 - float(covered.to(torch.float64).mean())
        times = len(pieces)
        evidence = (
            f"{share:.0%} of the reference's value is in none of its {times} portions, "
            "while others have it twice or read beyond it: a wrong slice, position or "
            "sample"
        )
        cut = _losing_cut(step, pieces[-1])
        if cut is not None:
            evidence += f"; {cut.base_operator} ({cut.line}) leaves out a part"
        return pieces[-1], evidence
    return None


def _losing_cut(step: StepPieces, piece: Piece) -> RecordedRow | None:
    """Return the last view before a value that cuts its source, of which the step leaves out
    a part."""
    rows = step.candidates[piece.rank].rows
    waiting = list(piece.row.inputs)
    seen: set[int] = set()
    while waiting:
        row = rows.get(waiting.pop(0))
        if row is None or row.record in seen or not row.inputs:
            continue
        seen.add(row.record)
        if (piece.rank, row.record) in step.pieces:
            continue
        source = rows.get(row.inputs[0])
        if row.base_operator in _CUT and row.line is not None and source is not None:
            cuts = {
                (each.arguments, each.place): each.numel or 0
                for each in rows.values()
                if each.base_operator in _CUT and each.inputs[:1] == row.inputs[:1]
            }
            if sum(cuts.values()) < (source.numel or 0):
                return row
        waiting += row.inputs
    return None


def _lost(step: StepPieces) -> set[int]:
    """Return forward values of the reference of which a part is nowhere, and of all that is
    made of them too."""
    rows = step.reference.rows
    readers: dict[int, list[int]] = defaultdict(list)
    for row in rows.values():
        if row.base_operator not in _CREATE:
            for record in row.inputs:
                readers[record].append(row.record)
    lost: set[int] = set()
    for record in sorted(rows, reverse=True):
        row = rows[record]
        if row.phase != "forward" or not row.is_call or not row.inputs:
            continue
        after = [r for r in readers[record] if rows[r].phase == "forward"]
        covered = step.covered.get(record)
        if covered is not None and bool(covered.all()):
            continue
        if all(reader in lost for reader in after):
            lost.add(record)
    return lost


def _sources(step: StepPieces, row: RecordedRow) -> set[int]:
    """Return the reference's values behind a value, through views."""
    rows = step.reference.rows
    waiting = list(row.inputs)
    sources: set[int] = set()
    while waiting:
        record = waiting.pop()
        if record in sources or record not in rows:
            continue
        sources.add(record)
        waiting += rows[record].inputs
    return sources


def _leads_to(step: StepPieces, pieces: Iterable[Piece], first: Piece) -> bool:
    """Return True where the wrong value is made of one of the pieces, or of their twin.

    And where nobody knows what it is made of, as of gradients in a buffer of several.
    """
    if first.row.phase != "forward" and not step.read_by(first):
        return True
    places = {piece.place for piece in pieces}
    waiting = [first]
    visited: set[Place] = set()
    while waiting:
        piece = waiting.pop()
        if piece.place in visited:
            continue
        visited.add(piece.place)
        if piece.place in places:
            return True
        waiting += step.read_by(piece)
    return False


def _lost_call(step: StepPieces, first: Piece) -> tuple[Piece, str] | None:
    """Return a value that holds several of the reference's, and lacks the first of them
    that is made of nothing but what is there."""
    whole = {record for record, covered in step.covered.items() if bool(covered.all())}
    joined: dict[tuple[str, str], list[Piece]] = defaultdict(list)
    for piece in step.pieces.values():
        if piece.location is not None and not piece.location.complete:
            joined[piece.row.module, piece.row.base_operator].append(piece)
    for record, row in step.reference.rows.items():
        pieces = joined.get((step.rename(row.module), row.base_operator))
        if not pieces or row.phase != "forward" or not unit(row.dtype) or row.place:
            continue
        if record in step.covered or not _is_made_of(step, row, whole):
            continue
        if not _leads_to(step, pieces, first):
            continue
        evidence = (
            f"all that the reference makes {row.site} of is there, and it is not: "
            "another position, slice or mask"
        )
        return _unmasked(step, pieces[0]) or (pieces[0], evidence)
    return None


def _is_made_of(step: StepPieces, row: RecordedRow, whole: set[int]) -> bool:
    """Return True where all numbers that a value of the reference reads are in ``whole``."""
    rows = step.reference.rows
    waiting = list(row.values_read())
    read = False
    while waiting:
        record = waiting.pop()
        source = rows.get(record)
        if source is None or not unit(source.dtype) or not source.is_call:
            continue
        if record in whole:
            read = True
        elif source.view_of is not None or hands_on(source):
            waiting += source.inputs
        elif not source.name:
            return False
    return read


def _padding_read(step: StepPieces, first: Piece) -> tuple[Piece, str] | None:
    """Return what a softmax reads, where it is more than the reference's and not masked."""
    return None if first.stands else _unmasked(step, first)


def _unmasked(step: StepPieces, softmax: Piece) -> tuple[Piece, str] | None:
    if softmax.row.base_operator not in EXPONENTIALS:
        return None
    for piece in step.read_by(softmax):
        location = piece.location
        if location is None or location.complete or not unit(piece.row.dtype):
            continue
        twin = piece.twin
        wanted = "" if twin is None else f" where the reference's has {twin.numel:,}"
        evidence = (
            f"{softmax.row.site} reads {piece.row.numel:,} elements of it{wanted}: what "
            "is beyond them is not masked"
        )
        return piece, evidence
    return None


def _sent(step: StepPieces, first: Piece) -> tuple[Piece, str] | None:
    """Return the value of another rank that the first wrong value was received from."""
    rows = step.candidates[first.rank].rows
    for record in first.row.values_read():
        row = rows.get(record)
        received = step.candidates[first.rank].tensor(record)
        if row is None or row.is_call or row.name or received is None:
            continue
        for piece in step.pieces.values():
            if piece.rank == first.rank or piece.stands or not piece.row.is_call:
                continue
            values = values_of(step.candidates[piece.rank], piece.row)
            if values is None or not _is_equal(values, received):
                continue
            wrong = _earliest_wrong(step, piece)
            evidence = (
                f"its values stand nowhere in the reference, and {first.row.site} of "
                f"rank {first.rank} works on what is made of them"
            )
            return wrong, evidence
    return None


def _is_equal(values: torch.Tensor, other: torch.Tensor) -> bool:
    if values.shape != other.shape or values.dtype != other.dtype:
        return False
    return torch.equal(values, other)


def _earliest_wrong(step: StepPieces, piece: Piece) -> Piece:
    """Return the first value behind a wrong one that stands nowhere either."""
    visited = {piece.place}
    while True:
        before = [
            each
            for each in step.read_by(piece)
            if each.row.is_call and not each.stands and each.place not in visited
        ]
        if not before:
            return piece
        piece = before[0]
        visited.add(piece.place)


def _multiplied_terms(step: StepPieces, first: Piece) -> tuple[Piece, str] | None:
    """Return the first of the terms whose sum is a multiple of the reference's value."""
    for piece in step.read_by(first):
        factor = piece.term_of
        if factor is None or abs(factor - 1) <= _NEAR or piece.row.phase != "forward":
            continue
        before = [each for each in step.read_by(piece) if each.term_of is not None]
        if before and all(
            abs(each.term_of - 1) <= _NEAR for each in before if each.term_of
        ):
            evidence = (
                f"the sum of these over the ranks is {factor:.4g} times the reference's "
                f"value; that of {before[0].row.site}, which it reads, is not"
            )
            return piece, evidence
    return None


def _gradients_alike(step: StepPieces, first: Piece) -> tuple[Piece, str] | None:
    """Return the first gradient, where all are wrong in one way: what makes them so is the
    loop's, not an operator's."""
    gradients = _last_gradients(step)
    if first.row.phase == "forward" or len(gradients) < 2:
        return None
    culprit = next(iter(gradients.values()))[0]
    alone = {_multiple(step, name, pieces[:1]) for name, pieces in gradients.items()}
    if len(alone) == 1 and not alone & {None, "1"}:
        evidence = (
            f"it is {alone.pop()} times the reference's, as all gradients are: the loss "
            "is scaled, or they are summed where the reference takes the mean"
        )
        return culprit, evidence
    together = {_multiple(step, name, pieces) for name, pieces in gradients.items()}
    if len(step.candidates) > 1 and None in alone and None not in together:
        evidence = (
            "as all gradients it is one term of a sum: the sum over the ranks "
            f"{', '.join(map(str, step.candidates))} is missing, or was cleared"
        )
        return culprit, evidence
    return None


def _last_gradients(step: StepPieces) -> dict[str, list[Piece]]:
    """Return the last value of each gradient that is more than rounding, by rank."""
    names = {step.rename(name) for name in last_values(step.reference)}
    last: dict[str, dict[int, Piece]] = defaultdict(dict)
    for (rank, _), piece in step.pieces.items():
        name = piece.row.name or ""
        is_gradient = name.endswith(".grad") and name in names
        if is_gradient and name.removesuffix(".grad") not in step.noisy:
            last[name][rank] = piece
    return {name: list(pieces.values()) for name, pieces in last.items()}


def _multiple(step: StepPieces, name: str, pieces: Iterable[Piece]) -> str | None:
    """Return how many times the reference's value of a name the sum of pieces is."""
    ours = {step.rename(n): row for n, row in last_values(step.reference).items()}
    twin = ours[name]
    whole = step.reference.tensor(twin.record)
    parts = [values_of(step.candidates[piece.rank], piece.row) for piece in pieces]
    kept = [part.to(torch.float64) for part in parts if part is not None]
    if whole is None or len(kept) < len(parts):
        return None
    if any(part.shape != whole.shape for part in kept):
        return None
    factor = multiple(whole, torch.stack(kept).sum(0), step.allowed(twin))
    return None if factor is None else f"{factor:.4g}"


#: Causes before the first wrong value, and what each looks like.
EARLIER = (
    (_updated_more_often, "extra operator"),
    (_misplaced_shard, "wrong axis or layout"),
    (_lost_part, "wrong axis or layout"),
    (_sent, "value of its own"),
    (_padding_read, "other input"),
    (_lost_call, "other input"),
    (_multiplied_terms, "constant factor"),
    (_gradients_alike, "constant factor"),
)
