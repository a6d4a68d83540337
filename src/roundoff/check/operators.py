"""What the first steps computed: settings of operators, and operators of one run alone.

Names what no module and no optimizer tells of: a function called with another setting,
a loss that is not divided, an operator too many. Only forward operators that lead to
the loss are compared, so that an accuracy beside it is none; of those that write in
place beside it, as an average of weights does, the settings where all else is alike.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import polars as pl

from roundoff.check.findings import Difference
from roundoff.check.pair import Pair, same_number
from roundoff.check.rules import (
    DATA,
    FLOW,
    PRECISION,
    PROCESSES,
    SCALING,
    SEEDS,
    Rule,
)
from roundoff.check.side import Side
from roundoff.errors import RunError
from roundoff.ops import operators_that, overload_of, restore

#: Steps that are compared, and operators of each.
STEPS = 2
MOST_OPERATORS = 20_000
#: Operators that are aligned where the beginnings and ends differ.
MOST_ALIGNED = 2_000
_FOLLOWS = (
    PROCESSES,
    SEEDS,
    FLOW,
    DATA,
    PRECISION,
    SCALING,
    "batch size",
    "backward passes of an optimizer step",
    "torch.compile",
    "default dtype",
    "optimizer",
    "average of weights",
)
_SETTINGS = Rule(
    group=FLOW,
    name="setting of an operator",
    why="the programs compute something else in each step",
    fix="compare the two lines",
    follows=_FOLLOWS,
)
_OPERATORS = replace(
    _SETTINGS,
    name="operators of a step",
    fix="compare the two lines; roundoff compare shows all operators",
    follows=(*_FOLLOWS, "modules"),
)


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of an operator that leads to the loss, or writes in place beside it."""

    operator: str
    overload: str | None
    line: str | None
    arguments: str | None
    is_beside: bool

    @property
    def place(self) -> str:
        """Operator and line, for sentences."""
        return f"{self.operator} at {self.line}" if self.line else self.operator


def differing_operators(pair: Pair) -> Iterator[Difference]:
    """Yield the first difference of what the first steps computed."""
    steps = [step for step in pair.reference.run.steps if step in _steps(pair)]
    for step in steps[:STEPS]:
        ours, theirs = (_calls(side, step) for side in pair.sides)
        if not ours or not theirs:
            return
        difference = _difference(pair, step, ours, theirs)
        if difference is not None:
            yield difference
            return


def _difference(
    pair: Pair, step: int, ours: Sequence[_Call], theirs: Sequence[_Call]
) -> Difference | None:
    """Return the first difference of what leads to the loss, else of what stands beside."""
    difference = _first(pair, step, _leading_ones(ours), _leading_ones(theirs))
    if difference is not None:
        return difference
    our_others = _ones_beside(ours)
    their_others = _ones_beside(theirs)
    if [call.operator for call in our_others] == [c.operator for c in their_others]:
        return _first(pair, step, our_others, their_others)
    return None


def _leading_ones(calls: Sequence[_Call]) -> list[_Call]:
    return [call for call in calls if not call.is_beside]


def _ones_beside(calls: Sequence[_Call]) -> list[_Call]:
    return [call for call in calls if call.is_beside]


def _steps(pair: Pair) -> Sequence[int]:
    return pair.candidate.run.steps


def _calls(side: Side, step: int) -> Sequence[_Call]:
    """Return the calls of one step, in their order; empty where they are not known."""
    rows = side.run.part(side.rank, step).select(
        "record",
        "call",
        "phase",
        "place",
        "operator",
        "overload",
        "line",
        "arguments",
        "inplace",
        "inputs",
    )
    table = side.run.collected(rows.sort("record").head(4 * MOST_OPERATORS))
    leading = _leading(table)
    moving = {*operators_that("move values"), *operators_that("create")}
    chosen = table.filter(
        (pl.col("phase") == "forward") & (pl.col("call") >= 0) & (pl.col("place") == 0)
    )
    calls = []
    for row in chosen.head(MOST_OPERATORS).iter_rows(named=True):
        operator = row["operator"]
        is_leading = row["record"] in leading
        if operator.rstrip("_") in moving or not (is_leading or row["inplace"]):
            continue
        calls.append(
            _Call(
                operator,
                row["overload"],
                row["line"],
                row["arguments"],
                not is_leading,
            )
        )
    return calls


def _leading(table: pl.DataFrame) -> set[int]:
    """Return the records that a backward pass reads, or that lead to one that it does."""
    inputs: dict[int, Sequence[int]] = {}
    waiting: list[int] = []
    for record, phase, read in table.select("record", "phase", "inputs").iter_rows():
        inputs[record] = read or ()
        if phase == "backward":
            waiting += read or ()
    leading: set[int] = set()
    while waiting:
        record = waiting.pop()
        if record not in leading:
            leading.add(record)
            waiting += inputs.get(record, ())
    return leading


def _first(
    pair: Pair, step: int, ours: Sequence[_Call], theirs: Sequence[_Call]
) -> Difference | None:
    for mine, other in _aligned(ours, theirs):
        if len(mine) == len(other) == 1:
            difference = _other_setting(pair, step, mine[0], other[0])
            if difference is not None:
                return difference
        else:
            return _other_operators(pair, step, mine, other)
    return None


def _aligned(
    ours: Sequence[_Call], theirs: Sequence[_Call]
) -> Iterator[tuple[Sequence[_Call], Sequence[_Call]]]:
    """Yield pairs of calls of the same operator, and what stands between them."""
    names = [[call.operator.rstrip("_") for call in calls] for calls in (ours, theirs)]
    start = 0
    while start < min(map(len, names)) and names[0][start] == names[1][start]:
        yield ours[start : start + 1], theirs[start : start + 1]
        start += 1
    rest = [each[start : start + MOST_ALIGNED] for each in names]
    matcher = difflib.SequenceMatcher(None, rest[0], rest[1], autojunk=False)
    for kind, a, a_end, b, b_end in matcher.get_opcodes():
        mine = ours[start + a : start + a_end]
        other = theirs[start + b : start + b_end]
        if kind == "equal":
            yield from ((x, y) for x, y in zip(_ones(mine), _ones(other), strict=True))
        else:
            yield mine, other


def _ones(calls: Sequence[_Call]) -> Sequence[Sequence[_Call]]:
    return [[call] for call in calls]


def _other_setting(
    pair: Pair, step: int, mine: _Call, other: _Call
) -> Difference | None:
    if mine.operator.rstrip("_") != other.operator.rstrip("_"):
        return _other_operators(pair, step, [mine], [other])
    settings = [_plain_settings(call) for call in (mine, other)]
    for name in settings[0] if settings[0].keys() == settings[1].keys() else ():
        values = settings[0][name], settings[1][name]
        if not _is_same(*values):
            return pair.difference(
                _SETTINGS,
                [_text(value) for value in values],
                subject=f"the setting {name} of {other.place}",
                step=step,
                reference_line=mine.line,
                line=other.line,
            )
    return None


def _other_operators(
    pair: Pair, step: int, mine: Sequence[_Call], other: Sequence[_Call]
) -> Difference:
    values = [_listed(calls) for calls in (mine, other)]
    first = [calls[0].line if calls else None for calls in (mine, other)]
    at = f"from {(first[1] or first[0])} on " if any(first) else ""
    return pair.difference(
        _OPERATORS,
        values,
        text=f"the operators that lead to the loss differ {at}in step {step}: "
        f"{values[1]} in {pair.candidate.name}, {values[0]} in {pair.reference.name}",
        step=step,
        reference_line=first[0],
        line=first[1],
    )


def _listed(calls: Sequence[_Call]) -> str:
    names = [call.operator for call in calls[:4]]
    more = f" and {len(calls) - 4} more" if len(calls) > 4 else ""
    return f"{', '.join(names)}{more}" if names else "none there"


Value = bool | int | float | str | None


def _plain_settings(call: _Call) -> dict[str, Value]:
    """Return the settings of a call by name: numbers and words, no shapes."""
    if call.arguments is None:
        return {}
    try:
        args, kwargs = restore(call.arguments, lambda _: ())
        schema = overload_of(call.overload or "")._schema.arguments
    except (RunError, IndexError):
        return {}
    defaults = {
        argument.name: argument.default_value
        for argument in schema
        if argument.has_default_value()
    }
    names = [argument.name for argument in schema]
    named = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    return {
        name: value
        for name, value in named.items()
        if name not in _OF_SHAPES and isinstance(value, bool | int | float | str)
    }


#: Settings that a shape decides.
_OF_SHAPES = (
    "dim",
    "size",
    "start",
    "end",
    "step",
    "index",
    "pin_memory",
    "dim0",
    "dim1",
)


def _is_same(ours: Value, theirs: Value) -> bool:
    numbers = (bool, int, float)
    if isinstance(ours, numbers) and isinstance(theirs, numbers):
        return same_number(float(ours), float(theirs))
    return ours == theirs


def _text(value: Value) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)
