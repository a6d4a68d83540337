"""The summary of a comparison: what its report, its JSON and its answer are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import polars as pl

from roundoff.compare.judging.culprits import Culprit, culprits
from roundoff.compare.judging.table import (
    FAIL,
    LARGER_IS_BETTER,
    UNDECIDED,
    JudgedRow,
    is_left_open,
    left_open,
    rows_in,
)
from roundoff.compare.loop.found_causes import with_causes
from roundoff.compare.rounding.findings import INHERITED, OWN
from roundoff.compare.rounding.reproducibility import UnstableRow
from roundoff.errors import RunError
from roundoff.foreign import fault_of
from roundoff.record import Setting, settings_of

#: Most dots of a chart.
_POINTS = 900


@dataclass(frozen=True, kw_only=True)
class About:
    """What was compared, and by which limits; the file ``comparison.json``."""

    #: Where the two runs are.
    reference: str
    candidate: str
    #: What could not be read, a line each.
    damage: Sequence[str] = ()
    #: What only one of the runs has, a sentence each.
    notes: Sequence[str] = ()
    #: The values that do not repeat themselves.
    unstable: Sequence[UnstableRow] = ()
    #: What the repeats beside the runs say, a sentence each.
    repeats: Sequence[str] = ()
    #: How the two programs were started or edited otherwise, a sentence each.
    programs: Sequence[str] = field(default=(), metadata={"omit": "empty"})
    #: By side, what the run kept of its tensors.
    kept: Mapping[str, str] = field(default_factory=dict)
    #: By side, the settings that can change numbers.
    environment: Mapping[str, Sequence[Setting]] = field(default_factory=dict)
    #: The user's limits by metric, in place of what rounding explains.
    limits: Mapping[str, float] = field(default_factory=dict)
    #: The factor of what rounding explains.
    margin: float = 1.0
    #: What stands behind the operators: data, parameters, updates, the loop.
    causes: Sequence[Culprit] = field(default=(), metadata={"omit": "empty"})
    #: What else was tried, a sentence each.
    verified: Sequence[str] = field(default=(), metadata={"omit": "empty"})

    @property
    def blames(self) -> bool:
        """True where a cause is listed, and the user has set no limits of their own."""
        return bool(self.causes) and not self.limits

    def is_lower_limit(self, metric: str) -> bool:
        """Return True for a metric of which a larger value is better."""
        return LARGER_IS_BETTER[metric]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, where: str) -> About:
        """Read what ``json.load`` gives of the file at ``where``; other keys are left out.

        Raises ``RunError`` naming a key that is missing or not of its type.
        """
        values = {
            each.name: data[each.name] for each in fields(cls) if each.name in data
        }
        _check_values(values, where)
        sides = values.get("environment", {})
        environment = {side: settings_of(rows) for side, rows in sides.items()}
        unstable = [_unstable_row(row, where) for row in values.get("unstable", ())]
        causes = [_listed_cause(row, where) for row in values.get("causes", ())]
        programs = tuple(values.get("programs", ()))
        lists = {"unstable": unstable, "causes": causes, "programs": programs}
        about = cls(**values | {"environment": environment, **lists})
        fault = fault_of(about)
        if fault is not None:
            raise RunError(
                "the saved comparison cannot be read",
                where=where,
                got=fault,
                do="compare the two runs again",
            )
        return about


#: Keys that ``comparison.json`` cannot do without.
_REQUIRED = ("reference", "candidate")


def _check_values(values: Mapping[str, Any], where: str) -> None:
    """Raise ``RunError`` for a key of ``About`` that is missing or not of its type."""
    missing = [name for name in _REQUIRED if name not in values]
    if missing:
        raise RunError(
            f"the saved comparison does not say its {' and '.join(missing)}",
            where=where,
            expected=f"the keys {' and '.join(_REQUIRED)}",
            got=", ".join(values) or "none of the keys",
            do="compare the two runs again",
        )
    for name, value in values.items():
        name_of_type, is_right = _is_of_its_type(name, value)
        if not is_right:
            raise _not_of_its_type(name, name_of_type, value, where)


def _is_of_its_type(name: str, value: Any) -> tuple[str, bool]:
    """Return what JSON calls the type of a field of ``About``, and if a value has it."""
    if name in _REQUIRED:
        return "a text", isinstance(value, str)
    if name == "margin":
        return "a number", _is_number(value)
    if name == "limits":
        numbers = isinstance(value, Mapping) and all(map(_is_number, value.values()))
        return "an object of numbers", numbers
    if name in ("kept", "environment"):
        return "an object", isinstance(value, Mapping)
    return "a list", isinstance(value, list)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _unstable_row(row: Any, where: str) -> UnstableRow:
    names = {each.name for each in fields(UnstableRow)}
    if not isinstance(row, Mapping) or {*row} != names:
        raise _not_of_its_type("unstable", "a list of rows with all fields", row, where)
    return UnstableRow(**row)


def _listed_cause(row: Any, where: str) -> Culprit:
    names = {
        each.metadata.get("json", each.name): each.name for each in fields(Culprit)
    }
    if not isinstance(row, Mapping) or not {*row} <= {*names}:
        raise _not_of_its_type("causes", "a list of culprits", row, where)
    try:
        return Culprit(**{names[key]: value for key, value in row.items()})
    except TypeError:
        raise _not_of_its_type("causes", "a list of culprits", row, where) from None


def _not_of_its_type(name: str, expected: str, value: Any, where: str) -> RunError:
    return RunError(
        f'"{name}" of the saved comparison cannot be read',
        where=where,
        expected=expected,
        got=repr(value)[:60],
        do="compare the two runs again",
    )


@dataclass(frozen=True, slots=True)
class UnmeasuredCount:
    """How many values could not be measured for one reason."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonCoverage:
    """How many values have a counterpart, and how many were measured."""

    rows: int = 0
    #: By ``status`` of the row.
    status: Mapping[str, int] = field(default_factory=dict)
    measured: int = 0
    equal: int = 0
    #: Why the others were not measured, the commonest first.
    reasons: Sequence[UnmeasuredCount] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundingContribution:
    """An operator whose rounding is a part of the error at the end of a step."""

    phase: str | None
    site: str | None
    reference_site: str | None
    #: The part, from 0 to 1.
    contribution: float
    line: str | None
    step: int
    rank: int
    dtype: str | None
    record: int
    #: Relative errors, the largest of its calls.
    own_error: float | None = field(metadata={"json": "own"})
    error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledValue:
    """One value by its names, and its relative error."""

    site: str | None
    reference_site: str | None
    name: str | None
    #: Below 0 for a value from before the step.
    call: int
    phase: str | None
    line: str | None
    rank: int
    step: int
    error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartPoint(LabelledValue):
    """A value at its place in the order of execution."""

    at: int
    tolerance: float | None
    cause: str | None
    verdict: str


@dataclass(frozen=True, kw_only=True)
class ComparisonSummary:
    """A comparison without its table: what is printed, drawn and said."""

    about: About = field(metadata={"inline": True})
    #: True where no row fails and every measured one could be judged.
    agrees: bool
    #: How many rows pass, fail and are undecided.
    verdicts: Mapping[str, int]
    #: The first culprit in the order of execution.
    divergence: Culprit | None = None
    #: The likeliest first.
    culprits: Sequence[Culprit] = ()
    #: The operators whose rounding contributes most.
    rounding: Sequence[RoundingContribution] = ()
    coverage: ComparisonCoverage = field(default_factory=ComparisonCoverage)
    #: How many failing rows only inherit their error.
    inherited: int = 0
    #: How many measured rows can be called neither right nor wrong.
    open: int = 0
    #: The first of them.
    first_open: LabelledValue | None = None
    #: The first value that fails.
    first: LabelledValue | None = None
    #: True where tensors were compared.
    tensors: bool = True
    rows_total: int = 0
    steps: Sequence[int] = ()
    ranks: Sequence[int] = ()
    #: Those that fail, then the largest contributions.
    rows: Sequence[JudgedRow] = ()
    #: For a chart, in the order of execution.
    points: Sequence[ChartPoint] = field(default=(), metadata={"omit": "always"})


_LABEL = tuple(each.name for each in fields(LabelledValue))


def culprits_in(table: pl.DataFrame, causes: Sequence[Culprit] = ()) -> list[Culprit]:
    """Return the operators that made an error which rounding does not explain.

    ``causes`` are what stands behind some of them: see ``About``.
    """
    operators = culprits(rows_in(table.filter(pl.col("cause") == OWN)))
    return with_causes(operators, causes)


def first_of(named: Sequence[Culprit]) -> Culprit | None:
    """Return the first culprit in the order of execution; None without any.

    Of those before the first that is no operator; that itself, where there are none.
    """
    leading: list[Culprit] = []
    for culprit in named:
        if not culprit.is_operator:
            leading = leading or [culprit]
            break
        leading.append(culprit)
    return min(leading, key=lambda c: (c.step, c.record), default=None)


def rounding_in(table: pl.DataFrame, n: int) -> list[RoundingContribution]:
    """Return the ``n`` operators whose rounding makes most of the error at the step's end.

    Of the first step that differs; those that make errors beyond rounding are left out.
    """
    rounds = (
        pl.col("cause").is_null()
        & (pl.col("contribution") > 0)
        & ~pl.col("view")
        & (pl.col("call") >= 0)
    )
    rows = table.lazy().filter(rounds)
    first_step = rows.filter(pl.col("step") == pl.col("step").min())
    sites = first_step.group_by("phase", "site", "reference_site", maintain_order=True)
    shares = (
        sites.agg(
            pl.col("contribution").sum() / pl.col("rank").n_unique(),
            pl.col("line", "step", "rank", "dtype", "record").first(),
            pl.col("own").max().alias("own_error"),
            pl.col("error").max(),
        )
        .top_k(n, by="contribution")
        .sort("contribution", descending=True)
        .collect()
    )
    return [RoundingContribution(**row) for row in shares.iter_rows(named=True)]


def coverage_of(table: pl.DataFrame) -> ComparisonCoverage:
    """Return how many rows have a counterpart, were measured, and why others were not."""
    unmeasured = table.select("reason", "error").filter(pl.col("error").is_null())
    reason = pl.col("reason").fill_null("unknown")
    reasons = unmeasured.group_by(reason).len("count")
    reasons = reasons.sort("count", "reason", descending=[True, False])
    return ComparisonCoverage(
        rows=table.height,
        status=dict(table.group_by("status").len().iter_rows()),
        measured=table.height - unmeasured.height,
        equal=int(table["equal"].sum() or 0),
        reasons=[UnmeasuredCount(why, count) for why, count in reasons.iter_rows()],
    )


def verdicts_of(table: pl.DataFrame) -> dict[str, int]:
    """Return how many rows pass, fail and are undecided."""
    return dict(table.group_by("verdict").len().sort("verdict").iter_rows())


def summarise(
    table: pl.DataFrame,
    about: About,
    named: Sequence[Culprit],
    coverage: ComparisonCoverage,
    limit: int | None,
) -> ComparisonSummary:
    """Return the summary of a judged table, without rows and points.

    Args:
        table: with the column ``verdict``.
        about: what was compared.
        named: as of ``culprits_in``.
        coverage: as of ``coverage_of``.
        limit: how many culprits and roundings; None for all culprits and 5 roundings.
    """
    verdicts = verdicts_of(table)
    open_rows = left_open(table)
    labels = table.lazy().select(*_LABEL, "record", "verdict", "cause", "undecided")
    failing = labels.filter(pl.col("verdict") == FAIL)
    inherited = failing.filter(pl.col("cause") == INHERITED).select(pl.len())
    undecided = labels.filter(is_left_open())
    return ComparisonSummary(
        about=about,
        agrees=FAIL not in verdicts and not open_rows and not about.blames,
        verdicts=verdicts,
        divergence=first_of(named),
        culprits=named[:limit],
        rounding=rounding_in(table, limit or 5),
        coverage=coverage,
        inherited=inherited.collect().item(),
        open=open_rows,
        first_open=_labelled(undecided.bottom_k(1, by=["step", "record"])),
        first=_labelled(failing.bottom_k(1, by=["step", "record"])),
        tensors=bool(table["max_abs"].is_not_null().any()),
        rows_total=table.height,
        steps=table["step"].drop_nulls().unique().sort().to_list(),
        ranks=table["rank"].drop_nulls().unique().sort().to_list(),
    )


def _labelled(rows: pl.LazyFrame) -> LabelledValue | None:
    values = rows.select(_LABEL).collect().to_dicts()
    return LabelledValue(**values[0]) if values else None


def rows_to_show(table: pl.DataFrame, limit: int) -> list[JudgedRow]:
    """Return the first ``limit`` rows: those that fail, then the largest contributions."""
    verdict_order = pl.col("verdict").replace_strict(
        {FAIL: 0, UNDECIDED: 2}, default=1, return_dtype=pl.Int8
    )
    keys = (  # of millions of rows with many columns only these are sorted
        table.lazy()
        .select(
            verdict_order.alias("order"),
            "step",
            pl.col("contribution").fill_null(0),
            "rank",
            "record",
            "error",
        )
        .with_row_index("at")
        .filter(pl.col("error").is_not_null())
    )
    by = ("order", "step", "contribution", "rank", "record")
    falling = [name == "contribution" for name in by]
    first = keys.sort(by, descending=falling).head(limit).collect()
    return rows_in(table[first["at"]])


def chart_points(table: pl.DataFrame, first: Culprit | None) -> list[ChartPoint]:
    """Return the rows in the order of execution, of the rank where the runs part.

    Where there are more than a chart can show, the row of each stretch that failed
    worst.
    """
    rank = table["rank"].drop_nulls().min() if first is None else first.rank
    rows = table.select("record", "view", "tolerance", "cause", "verdict", *_LABEL)
    drawn = pl.col("error").is_not_null() & ~pl.col("view")
    rows = rows.filter((pl.col("rank") == rank) & drawn)
    rows = rows.sort("step", "record").with_row_index("at")
    stretch = pl.col("at") * _POINTS // max(rows.height, _POINTS)
    worst_first = rows.with_columns(stretch=stretch).sort(
        (pl.col("cause") == OWN).fill_null(False),
        pl.col("verdict") == FAIL,
        pl.col("error"),
        descending=True,
    )
    kept = worst_first.unique("stretch", keep="first", maintain_order=True)
    points = kept.sort("at").select("at", "tolerance", "cause", "verdict", *_LABEL)
    return [ChartPoint(**row) for row in points.iter_rows(named=True)]
