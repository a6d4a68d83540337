"""Parameters and buffers that differ before the first operator reads them, and how.

Each is held against the reference's of the same name, and then against its others: it
may be turned, reordered, scaled, partly zero, or hold another's values.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from roundoff.compare.judging.changing_values import unstable_records
from roundoff.compare.judging.explain import Sides
from roundoff.compare.judging.step_causes import LOADED, Cause, listed, with_line
from roundoff.compare.judging.table import STALE, ComparedRow
from roundoff.compare.pairing.call_pairs import TRANSPARENT
from roundoff.compare.records.parameter_content import EQUAL, relation
from roundoff.compare.records.recorded_rows import RecordedRow, Rows, maker
from roundoff.compare.records.saved_values import SavedValues
from roundoff.compare.records.shared_memory import read_by
from roundoff.compare.rounding.distance import of_metrics, of_statistics
from roundoff.compare.rounding.reproducibility import UnstableRow
from roundoff.compare.rounding.rounding_bound import REGION, REGION_LIMIT, unit
from roundoff.compare.tensors.metrics import measure
from roundoff.compare.tensors.structure import fewer_digits, structure

#: A parameter that was made or cast otherwise may differ by this many roundings.
ROUNDINGS = 16.0
#: Statistics of the same values, added up in another order, are this near.
REORDERED = 1e-6
#: At most this share of the slices of an axis are a few of them.
FEW = 0.5
GRADIENT = ".grad"
#: What an operator looks like that reads the wrong value.
_OF_INPUTS = ("missing operator", "other input", STALE)
_STATISTICS = ("min", "max", "mean", "l2", "std")


@dataclass(frozen=True, slots=True)
class NamedPair:
    """A parameter or buffer of both sides as it was before the step."""

    name: str
    twin: RecordedRow
    row: RecordedRow
    error: float | None


def values_before(rows: Rows) -> dict[str, RecordedRow]:
    """Return the first row of each parameter and buffer by its name."""
    first: dict[str, RecordedRow] = {}
    for row in rows.values():
        if row.name and not row.name.endswith(GRADIENT):
            first.setdefault(row.name, row)
    return first


def loaded_causes(
    sides: Sides,
    compared: Sequence[ComparedRow],
    names: Mapping[str, str],
    *,
    unstable: Sequence[UnstableRow] = (),
    are_carried: bool = False,
    rank: int,
    step: int,
) -> list[Cause]:
    """Return what differs in the parameters and buffers before the first step.

    What does not repeat itself is left out: another run would have other values too.

    Args:
        sides: the first compared step.
        compared: its rows.
        names: name in the reference -> name in the candidate, of those that have one.
        unstable: what repeats show to change from run to run.
        are_carried: they come from a step before, and carry its roundings: those alone
            count that its comparison does not explain.
        rank: of the step.
        step: its number.
    """
    of_reference, of_candidate = unstable_records(sides, unstable)
    pairs = [
        pair
        for pair in _differing(sides, names)
        if pair.twin.record not in of_reference and pair.row.record not in of_candidate
    ]
    ours, theirs = SavedValues(sides.reference.rows), SavedValues(sides.candidate.rows)
    pairs = [
        pair
        for pair in pairs
        if None in (ours.saved(pair.twin), theirs.saved(pair.row))
    ]
    wrong = {row.record for row in compared if row.cause is not None}
    pairs = [pair for pair in pairs if not _is_moved_by(pair.row, wrong)]
    if are_carried:
        pairs = [pair for pair in pairs if pair.row.record in wrong]
    if not any(row.cause is not None for row in compared):
        pairs = [pair for pair in pairs if _is_proven(pair)]
        if _is_made_up_for(sides.candidate.rows, compared, pairs):
            return []
    if not pairs:
        return []
    holders = _contents(sides)
    shown_by = _made_before(sides.candidate.rows, pairs)
    maker = _made_otherwise(compared, shown_by, pairs)
    detail = "" if maker is None else _detail(maker)
    shown_by += _misread(sides.candidate.rows, compared, pairs)
    causes = []
    for words, group in _grouped(sides, pairs, holders).items():
        first = group[0]
        causes.append(
            Cause(
                kind=LOADED,
                label="other parameter",
                evidence=_sentence(words, group)
                + _makers(sides.candidate.rows, group)
                + detail,
                step=step,
                rank=rank,
                phase="forward",
                name=first.name,
                row=first.row,
                twin=first.twin,
                line=None if maker is None else maker.blamed_line,
                reference_line=None if maker is None else maker.blamed_reference_line,
                error=first.error,
                names=[pair.name for pair in group],
                shown_by=shown_by,
                decides=True,
            )
        )
    return causes


def _is_moved_by(row: RecordedRow, wrong: Container[int | None]) -> bool:
    """Return True for a value that is first seen where other values that differ move it on.

    Such as statistics that a script updates before it calls their module; what is copied
    is loaded.
    """
    is_moved = row.is_call and bool(row.inplace) and row.base_operator != "copy"
    return is_moved and any(record in wrong for record in row.inputs[1:])


def _is_made_up_for(
    rows: Rows, compared: Sequence[ComparedRow], pairs: Sequence[NamedPair]
) -> bool:
    """Return True where all that is made of other parameters agrees again.

    A norm may be folded into the weights before it. What reaches the end of the step,
    and is not compared on its way, is not made up for. Nor is what the forward pass
    writes again: in training a norm moves its statistics and does not use them.
    """
    last = {row.name: row for row in rows.values() if row.phase == "forward"}
    if any(last.get(pair.row.name, pair.row) is not pair.row for pair in pairs):
        return False
    agreeing = {
        row.record
        for row in compared
        if row.record is not None and row.error is not None
        if row.tolerance is not None and row.error <= row.tolerance
    }
    readers: dict[int, list[int]] = {}
    for row in rows.values():
        for record in row.inputs:
            readers.setdefault(record, []).append(row.record)
    waiting = [pair.row.record for pair in pairs]
    visited: set[int] = set()
    while waiting:
        record = waiting.pop()
        if record in visited:
            continue
        visited.add(record)
        if not readers.get(record):
            return False
        waiting += [reader for reader in readers[record] if reader not in agreeing]
    return bool(pairs)


def _is_proven(pair: NamedPair) -> bool:
    """Return False where sums of statistics alone speak for another order."""
    if pair.error and not is_reordered(pair.twin, pair.row):
        return True
    hashes = (pair.twin.hash, pair.row.hash)
    return None not in hashes and hashes[0] != hashes[1]


def _differing(sides: Sides, names: Mapping[str, str]) -> list[NamedPair]:
    ours = values_before(sides.reference.rows)
    theirs = values_before(sides.candidate.rows)
    renamed = {names.get(name, name): row for name, row in ours.items()}
    pairs = []
    for name, row in theirs.items():
        twin = renamed.get(name)
        if twin is None or twin.shape != row.shape:
            continue
        differs, error = _distance(sides, twin, row)
        if differs:
            pairs.append(NamedPair(name, twin, row, error))
    return pairs


def _distance(
    sides: Sides, twin: RecordedRow, row: RecordedRow
) -> tuple[bool, float | None]:
    """Return if two values differ by more than a rounding of them, and how far."""
    # a buffer was computed before the recording, in any number of operators
    roundings = REGION if row.operator == "buffer" else ROUNDINGS
    allowed = min(roundings * max(unit(twin.dtype), unit(row.dtype)), REGION_LIMIT)
    ours = sides.reference.tensor(twin.record)
    theirs = sides.candidate.tensor(row.record)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        distance = of_statistics(twin, row)
        if distance.error is None or distance.equal:
            return False, distance.error
        return distance.error > allowed or is_reordered(twin, row), distance.error
    error = of_metrics(measure(ours, theirs)).error
    return error is not None and error > allowed, error


def is_reordered(twin: RecordedRow, row: RecordedRow) -> bool:
    """Return True where statistics are those of the same values in another order.

    The smallest and largest are equal, the sums nearly, and not all of them are equal.
    """
    if twin.dtype != row.dtype or _order(twin) != _order(row):
        return False
    if (twin.min, twin.max) != (row.min, row.max) or twin.min == twin.max:
        return False
    if twin.hash is not None and row.hash is not None:
        if twin.hash == row.hash:
            return False
        if all(getattr(twin, s) == getattr(row, s) for s in _STATISTICS):
            return True
    return _sums_differ_by_order(twin, row)


def _sums_differ_by_order(twin: RecordedRow, row: RecordedRow) -> bool:
    """Return True where sums over the values are nearly equal, and not all are equal."""
    sums = [(getattr(twin, s), getattr(row, s)) for s in ("mean", "l2", "std")]
    if any(a is None or b is None for a, b in sums):
        return False
    size = twin.l2 or 0.0
    near = all(abs(a - b) <= REORDERED * max(abs(a), size) for a, b in sums)
    return near and any(a != b for a, b in sums)


def _order(row: RecordedRow) -> tuple[int, ...]:
    """Return the axes in the order of memory: sums are added up in it."""
    stride = row.stride or ()
    return tuple(sorted(range(len(stride)), key=lambda axis: -stride[axis]))


# -- who holds which values ------------------------------------------------------------


def _contents(sides: Sides) -> dict[object, list[str]]:
    """Return the names of the reference's values by what they hold."""
    holders: dict[object, list[str]] = {}
    for name, row in values_before(sides.reference.rows).items():
        key = _content(sides.reference.tensor(row.record), row)
        if key is not None:
            holders.setdefault(key, []).append(name)
    return holders


def _content(tensor: torch.Tensor | None, row: RecordedRow) -> object | None:
    """Return what is equal for equal values; None for constants, which say nothing."""
    if row.min == row.max or (row.numel or 0) < 2:
        return None
    if tensor is not None:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        return tuple(row.shape or ()), flat.numpy(force=True).tobytes()
    if row.hash is not None:
        return row.hash
    return tuple(row.shape or ()), *(getattr(row, name) for name in _STATISTICS)


def _grouped(
    sides: Sides, pairs: Sequence[NamedPair], holders: Mapping[object, list[str]]
) -> dict[str, list[NamedPair]]:
    """Return the pairs by what is said of them; those that hold another's come first."""
    holds = {}
    for pair in pairs:
        key = _content(sides.candidate.tensor(pair.row.record), pair.row)
        others = [n for n in holders.get(key, ()) if n != pair.name]
        if others:
            holds[pair.name] = others[0]
    groups: dict[str, list[NamedPair]] = {}
    for pair in pairs:
        if pair.name in holds:
            groups.setdefault(_holding(pair.name, holds), []).append(pair)
    for pair in pairs:
        if pair.name not in holds:
            groups.setdefault(_words(sides, pair), []).append(pair)
    return _joined(groups)


def _holding(name: str, holds: Mapping[str, str]) -> str:
    other = holds[name]
    if holds.get(other) == name:
        first, second = sorted((name, other))
        return f"{first} and {second} hold each other's values (swapped)"
    return f"{name} holds the reference's {other}"


def _joined(groups: dict[str, list[NamedPair]]) -> dict[str, list[NamedPair]]:
    """Return at most one group of several swaps, and one of several copies."""
    joined: dict[str, list[NamedPair]] = {}
    for kind in ("hold each other's", "holds the reference's"):
        some = {words: group for words, group in groups.items() if kind in words}
        if not some:
            continue
        words = [*some]
        text = "; ".join(words[:2])
        if len(words) > 2:
            text += f"; and {len(words) - 2:,} more"
        joined[text] = [pair for group in some.values() for pair in group]
    rest = {w: g for w, g in groups.items() if not _is_holding(w)}
    return joined | rest


def _is_holding(words: str) -> bool:
    return "hold each other's" in words or "holds the reference's" in words


# -- how one differs -------------------------------------------------------------------


def _words(sides: Sides, pair: NamedPair) -> str:
    """Return what follows the name: ``is the reference's transposed``."""
    ours = sides.reference.tensor(pair.twin.record)
    theirs = sides.candidate.tensor(pair.row.record)
    if ours is None or theirs is None:
        return _statistics_words(pair)
    if ours.numel() == 1:
        return f"is {float(theirs):g} where the reference has {float(ours):g}"
    value = theirs.reshape(-1)[0]
    if bool((theirs == value).all()):
        return f"is {float(value):g} everywhere"
    how = relation(ours, theirs)
    if how is not None and how.kind != EQUAL:
        return f"is the reference's {how.words}"
    few = _differing_slices(ours, theirs)
    if few:
        return few
    digits = fewer_digits(ours, theirs, unit(pair.row.dtype))
    if digits is not None:
        return f"is the reference's in the digits of {digits}"
    described = structure(ours, theirs, unit(pair.row.dtype))
    if described is not None and described.label in ("constant offset", "overflow"):
        return f"differs by a {described.label}: {described.evidence}"
    return "differs: other values than the reference's"


def _differing_slices(ours: torch.Tensor, theirs: torch.Tensor) -> str | None:
    """Return which slices of an axis differ where the others agree."""
    for axis in range(ours.dim()):
        count = ours.shape[axis]
        same = (ours == theirs).movedim(axis, 0).reshape(count, -1).all(dim=1)
        wrong = (~same).nonzero()[:, 0]
        if not 0 < len(wrong) <= FEW * count:
            continue
        where = f"{_axis_name(axis, ours.dim())} {_places(wrong.tolist())}"
        mine = ours.movedim(axis, 0)[wrong]
        other = theirs.movedim(axis, 0)[wrong]
        if not bool(other.any()):
            return f"differs in {where}: zero where the reference has values"
        if not bool(mine.any()):
            return f"differs in {where}: not zero, as the reference has it"
        return f"differs in {where} alone"
    return None


def _axis_name(axis: int, dim: int) -> str:
    if dim == 2:
        return ("rows", "columns")[axis]
    return f"axis {axis} at" if dim > 1 else "elements"


def _places(places: Sequence[int]) -> str:
    first = places[0]
    last = places[-1]
    if last - first + 1 == len(places):
        return f"{first} to {last}" if last > first else f"{first}"
    return listed([str(place) for place in places], 4)


def _statistics_words(pair: NamedPair) -> str:
    twin = pair.twin
    row = pair.row
    if is_reordered(twin, row):
        return (
            "has the reference's values in another order (transposed or permuted), by "
            "its statistics"
        )
    if not row.l2 and twin.l2:
        return "is zero"
    zeros = (row.zero or 0) - (twin.zero or 0)
    if zeros and (twin.numel or 0) > 1:
        kind = "more" if zeros > 0 else "fewer"
        return f"has {abs(zeros):,} {kind} zeros than the reference's"
    factor = statistics_factor(twin, row)
    if factor is not None:
        return f"is the reference's times {factor:.6g}"
    return "differs: other values than the reference's"


def statistics_factor(twin: RecordedRow, row: RecordedRow) -> float | None:
    """Return the factor between two rows whose statistics all have it; None for none."""
    if not twin.l2 or not row.l2 or twin.min == twin.max:
        return None
    size = row.l2 / twin.l2
    for factor in (size, -size):
        ends = (twin.min, twin.max) if factor > 0 else (twin.max, twin.min)
        scaled = (*ends, twin.mean)
        actual = (row.min, row.max, row.mean)
        if any(value is None for value in (*scaled, *actual)):
            return None
        near = [
            abs((a or 0.0) * factor - (b or 0.0)) <= REORDERED * row.l2
            for a, b in zip(scaled, actual, strict=True)
        ]
        if all(near) and abs(size - 1) > REORDERED:
            return factor
    return None


# -- the sentence ----------------------------------------------------------------------


def _sentence(words: str, group: Sequence[NamedPair]) -> str:
    if _is_holding(words):
        return words
    names = listed([pair.name for pair in group])
    if len(group) == 1:
        return f"{names} {words}"
    plural = words.replace("is the", "are the", 1).replace("has the", "have the", 1)
    plural = re.sub(r"\bis\b", "are", plural.replace("differs", "differ", 1), count=1)
    return f"{names} {plural}"


def _makers(rows: Rows, group: Sequence[NamedPair]) -> str:
    """Say what made the value, where both sides show it and it is not the same."""
    twin = group[0].twin
    row = maker(rows, group[0].row)
    if not twin.is_call or twin.base_operator == row.base_operator:
        return ""
    ours = with_line(twin.operator, twin.line)
    it = "it" if len(group) == 1 else "them"
    if not row.is_call:
        return f"; the reference writes {it} by {ours}, the candidate does not"
    if row.values_read():
        return ""  # made of other values: it was loaded from them
    theirs = with_line(row.operator, row.line)
    return (
        f"; the reference writes {it} by {ours}, the candidate leaves what {theirs} "
        "made: not loaded"
    )


def _made_before(rows: Rows, pairs: Sequence[NamedPair]) -> tuple[int, ...]:
    """Return the records of the values and of all that they were made of."""
    waiting = [pair.row.record for pair in pairs]
    behind: set[int] = set()
    while waiting:
        record = waiting.pop()
        if record in behind or record not in rows:
            continue
        behind.add(record)
        waiting += read_by(rows, rows[record])
    return tuple(sorted(behind))


def _misread(
    rows: Rows, compared: Sequence[ComparedRow], pairs: Sequence[NamedPair]
) -> tuple[int, ...]:
    """Return the operators that are only blamed for reading one of the values."""
    values = {pair.row.record for pair in pairs}
    for row in rows.values():
        if row.operator in TRANSPARENT and values.intersection(row.inputs):
            values.add(row.record)
    misread = []
    for compared_row in compared:
        if compared_row.looks_like not in _OF_INPUTS or compared_row.record is None:
            continue
        if values.intersection(rows[compared_row.record].inputs):
            misread.append(compared_row.record)
    return tuple(misread)


def _made_otherwise(
    compared: Sequence[ComparedRow],
    made_of: Sequence[int],
    pairs: Sequence[NamedPair],
) -> ComparedRow | None:
    """Return the operator that made a value otherwise, where one did before it was loaded."""
    values = {pair.row.record for pair in pairs}
    for row in _own(compared, made_of):
        if row.record in values and not row.evidence:
            continue
        if row.call is not None and row.call >= 0 and row.looks_like != "noise":
            return row
    return None


def _detail(maker: ComparedRow) -> str:
    place = with_line(maker.blamed or maker.site or "an operator", maker.blamed_line)
    return f"; it comes from {place}: {maker.looks_like}, {maker.evidence}"


def _own(rows: Sequence[ComparedRow], made_of: Sequence[int]) -> Iterator[ComparedRow]:
    wanted = set(made_of)
    for row in rows:
        if row.cause == "own" and row.record in wanted:
            yield row
