"""Causes of a step in portions that lie before its first wrong value, or explain all of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import torch

from roundoff.compare.explain import RecordedStep
from roundoff.compare.portions.location import multiple
from roundoff.compare.portions.pieces import (
    Piece,
    Place,
    StepPieces,
    last_values,
    values_of,
)
from roundoff.compare.recorded_rows import RecordedRow
from roundoff.compare.rounding_bound import unit
from roundoff.ops import operators_that

#: Read the shape of a tensor, not its values.
_CREATE = operators_that("create")


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
        return pieces[-1], evidence
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
    """Return True where the wrong value is made of one of the pieces, or of their twin."""
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
    (_gradients_alike, "constant factor"),
)
