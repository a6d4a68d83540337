"""From the rows that made an error themselves to the operators to name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from roundoff.compare.judging.table import SCHEDULE, WRONG_CONSTANT, ComparedRow
from roundoff.ops import operators_that

#: The kind of a culprit that is an operator.
OPERATOR = "operator"
#: Numbers of which no share can be told: they choose what runs.
_CHOOSING = ("int", "uint", "bool")
#: Inputs that differ by less than a rounding of fp64 agree exactly.
_EXACTLY = 2.0**-53
#: Made of nothing, in the size that is asked for.
_OF_A_SIZE = operators_that("create") | operators_that("draw")
#: What makes this share of the error is no by-product of the forward pass.
_SHARE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """An operator that made an error which rounding does not explain.

    Numbers are those of its first row, except ``contribution``, which is the sum over
    its rows of that step and rank. Errors are relative.
    """

    site: str | None
    reference_site: str | None
    module: str
    operator: str
    phase: str | None
    line: str | None
    reference_line: str | None
    rank: int
    step: int
    record: int
    #: Below 0 for a value from before the step.
    call: int
    dtype: str | None
    #: The parameter or buffer that it makes.
    name: str | None
    error: float | None
    #: The part of the error that was made here; inf where unknown.
    own_error: float = field(metadata={"json": "own"})
    #: The largest distance of what it read.
    inputs_error: float
    #: What rounding explains.
    tolerance: float
    #: Share of the error at the end of the step.
    contribution: float
    #: A key of ``symptoms.ADVICE``.
    looks_like: str | None
    evidence: str | None
    #: What to try.
    advice: str | None = field(metadata={"json": "try"})
    #: The distance that stays when both calls run in fp64 on the same inputs.
    semantic: float | None
    #: The other part, in units of what rounding explains.
    kernel_excess: float | None
    #: How many rows it made.
    calls: int = 1
    ranks: Sequence[int] = ()
    steps: Sequence[int] = ()
    #: ``operator``, or what stands behind several: ``data``, ``parameter``, ``update``,
    #: ``loop``; then ``evidence`` is a whole sentence, and ``call`` the one before which
    #: it happens.
    kind: str = OPERATOR

    @property
    def is_operator(self) -> bool:
        """False for data, a parameter, an update or the loop."""
        return self.kind == OPERATOR


@dataclass(frozen=True, slots=True, kw_only=True)
class CulpritWithShare(Culprit):
    """A culprit, and the share of the output's noise that rounding its module makes.

    None where the budget has no site in the module, or several.
    """

    share: float | None


def culprits(rows: Iterable[ComparedRow]) -> list[Culprit]:
    """Return the operators behind rows that made an error themselves, the likeliest first.

    First come those of the first step that has any, those whose inputs agreed exactly
    before others, then by their contribution to the error at the end of the step. The
    backward kernel of an operator that is named for its forward pass is the same fault,
    and what goes back through it comes behind it: gradients are of the values that are
    there.
    """
    by_key: dict[tuple[Any, ...], Culprit] = {}
    for row in sorted(rows, key=_execution_order):
        key = _key(row)
        if key not in by_key:
            key = _key_of_forward(row, by_key) or key
        culprit = by_key.get(key)
        by_key[key] = _culprit(row) if culprit is None else _with_row(culprit, row)
    named = [*by_key.values()]
    best = _places_of_edits(named)

    def place(culprit: Culprit) -> tuple[Any, ...]:
        own = _likeliest_first(culprit)
        return best.get(_edit(culprit), own), culprit.record

    in_order = sorted(named, key=place)
    return sorted(in_order, key=lambda culprit: _follows_in_size(culprit, in_order))


def _key(row: ComparedRow) -> tuple[Any, ...]:
    """Return what rows of one culprit have in common: the turns of a loop have it too."""
    if row.blamed_line is None:
        return row.blamed_phase, row.blamed, row.blamed_reference
    site, reference_site = (
        (name or "").partition("#")[0] for name in (row.blamed, row.blamed_reference)
    )
    lines = row.blamed_line, row.blamed_reference_line
    return row.blamed_phase, site, reference_site, *lines, row.name


def _execution_order(row: ComparedRow) -> tuple[int, int]:
    return row.step or 0, row.record or 0


def _edit(culprit: Culprit) -> tuple[Any, ...]:
    """Return what calls have in common that are handed the same wrong number."""
    return culprit.step, culprit.phase, culprit.looks_like, culprit.evidence


def _places_of_edits(
    culprits: Iterable[Culprit],
) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    """Return the place of the likeliest of the calls that are handed the same wrong number.

    They are one fault, and stand together, the first call before the others.
    """
    best: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for culprit in culprits:
        if culprit.looks_like in (WRONG_CONSTANT, SCHEDULE):
            edit = _edit(culprit)
            place = _likeliest_first(culprit)
            best[edit] = min(place, best.get(edit, place))
    return best


def _likeliest_first(culprit: Culprit) -> tuple[Any, ...]:
    return (
        culprit.step,
        culprit.inputs_error > _EXACTLY,
        not (culprit.dtype or "").startswith(_CHOOSING),
        culprit.phase != "forward" or _is_by_product(culprit),
        -culprit.contribution,
        culprit.record,
    )


def _is_by_product(culprit: Culprit) -> bool:
    """Return True for a fault of the forward pass that makes hardly any of the error.

    What is detached makes none in the forward pass, and decides the gradients.
    """
    return culprit.contribution < _SHARE and culprit.operator != "detach"


def _follows_in_size(culprit: Culprit, others: Sequence[Culprit]) -> tuple[int, bool]:
    """Return the step, and True for constants and draws of another size after a fault.

    The size follows from what is chosen before: how many boxes, words, nodes or samples.
    """
    is_of_other_size = culprit.operator in _OF_A_SIZE and culprit.error == math.inf
    before = (
        other
        for other in others
        if other.step == culprit.step and other.record < culprit.record
    )
    return culprit.step, is_of_other_size and any(
        other.operator not in _OF_A_SIZE for other in before
    )


def _culprit(row: ComparedRow) -> Culprit:
    blamed: Any = row  # every column of a blamed row has a value
    module, operator = _module_and_operator(row)
    return Culprit(
        site=row.blamed,
        reference_site=row.blamed_reference,
        module=module,
        operator=operator.partition("#")[0],
        phase=row.blamed_phase,
        line=row.blamed_line,
        reference_line=row.blamed_reference_line,
        rank=blamed.rank,
        step=blamed.step,
        record=blamed.record,
        call=blamed.call,
        dtype=row.dtype,
        name=row.name,
        error=row.error,
        own_error=math.inf if row.own_error is None else row.own_error,
        inputs_error=blamed.inputs_error,
        tolerance=blamed.tolerance,
        contribution=row.contribution or 0.0,
        looks_like=row.looks_like,
        evidence=row.evidence,
        advice=row.advice,
        semantic=row.semantic,
        kernel_excess=row.kernel_excess,
        ranks=[blamed.rank],
        steps=[blamed.step],
    )


def _with_row(culprit: Culprit, row: ComparedRow) -> Culprit:
    """Return the culprit with one more of its rows; a later output of its call may say more."""
    blamed: Any = row
    culprit = replace(
        culprit,
        calls=culprit.calls + 1,
        ranks=sorted({*culprit.ranks, blamed.rank}),
        steps=sorted({*culprit.steps, blamed.step}),
    )
    if row.step != culprit.step or row.rank != culprit.rank:
        return culprit
    contribution = culprit.contribution + (row.contribution or 0.0)
    culprit = replace(culprit, contribution=contribution)
    other_output = row.call == culprit.call and row.record != culprit.record
    if not other_output or row.own_error is None or row.own_error <= culprit.own_error:
        return culprit
    return replace(
        culprit,
        own_error=row.own_error,
        looks_like=row.looks_like,
        evidence=row.evidence,
        advice=row.advice,
    )


def _module_and_operator(row: ComparedRow) -> tuple[str, str]:
    module, _, operator = (row.blamed or "").rpartition("/")
    return module, operator


def _key_of_forward(
    row: ComparedRow, by_key: dict[tuple[Any, ...], Culprit]
) -> tuple[Any, ...] | None:
    """Return the key of the forward operator that a backward row belongs to."""
    if row.blamed_phase != "backward":
        return None
    module, operator = _module_and_operator(row)
    for key, culprit in by_key.items():
        if culprit.phase != "forward":
            continue
        if culprit.rank != row.rank or culprit.module != module:
            continue
        same_line = culprit.line is not None and culprit.line == row.blamed_line
        if same_line or operator.startswith(culprit.operator):
            return key
    return None
