"""The answer of a diagnosis, in sentences: the same words in terminal and HTML."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from roundoff.budget import deciding
from roundoff.report.diagnosis import (
    AskedTarget,
    Coverage,
    DiagnosisSummary,
    PlanSummary,
    RankingRow,
    ScatterPoint,
    VerifiedResult,
)
from roundoff.report.figures import (
    amount,
    count,
    db,
    finite,
    listing,
    metric,
    percent,
    ratio,
)

NO_SITES = (
    "No operator call of this workload became a site, so there is nothing to round and nothing to rank; "
    "the coverage says which calls were seen and why each was left out."
)
REFERENCE = "fp32"
#: Sites named in a sentence.
WORST = 3
#: SQNR in dB from which on fp32's own rounding is as large: an operator rounds to 2^-24,
#: -144.5 dB, and the roundings of the 300 operators that may follow add up as powers.
FP32_FLOOR_DB = 120.0


def verdict(summary: DiagnosisSummary) -> str:
    """Say in one sentence whether the plan meets the target.

    With the measured, predicted and asked SQNR.
    """
    if not summary.has_sites:
        return "There was nothing to measure."
    result = summary.result
    target = summary.target
    output, asked = _deciding(result, target)
    reached = [f"{output}{db(result.measured_db)} dB measured"]
    if result.predicted_db is not None:
        reached.append(f"{db(result.predicted_db)} dB predicted")
    if asked is not None:
        drop = _drop(target, result.metric_name)
        reached.append(f"{db(asked)} dB asked{drop}")
    if result.met:
        return f"The plan meets the target: {', '.join(reached)}."
    if _is_accurate(result, asked) and result.metric_measured is not None:
        value = metric(result.metric_measured)
        reached.append(f"but {result.metric_name} falls to {value}")
    return f"The plan misses the target: {', '.join(reached)}."


def _deciding(result: VerifiedResult, target: AskedTarget) -> tuple[str, float | None]:
    """Return the output that the verdict is about, and the SQNR asked of it in dB."""
    if len(result.outputs) < 2:
        return "", target.sqnr_db
    row = deciding(result.outputs)
    return f"output {row.output} " if row.output else "", row.target_db


def _is_accurate(result: VerifiedResult, asked: float | None) -> bool:
    """Return True if the measured SQNR meets the target in dB."""
    if asked is None or not finite(asked) or result.measured_db is None:
        return False
    return result.measured_db >= asked


def _drop(target: AskedTarget, metric_name: str | None) -> str:
    """Say where the decibels come from, if a drop of the metric was asked for.

    Only then the target has a note.
    """
    if not target.note or target.asked.strip().lower().endswith("db"):
        return ""
    return f" for a drop of {metric_name or 'the metric'} by at most {target.asked}"


def answer_diagnosis(summary: DiagnosisSummary) -> list[str]:
    """Return the answer as sentences.

    The verdict, what the plan does and costs, the metric, the sites that cost most.
    """
    if not summary.has_sites:
        return [NO_SITES]
    sentences = [
        verdict(summary),
        plan_sentence(summary.plan),
        metric_sentence(summary.result),
        *worst_sentences(totals(summary.formats, summary.ranking)),
    ]
    return [sentence for sentence in sentences if sentence]


def plan_sentence(plan: PlanSummary) -> str:
    """Say how many sites leave the reference format and what the plan costs."""
    cost = plan.cost
    price = amount(cost.plan, cost.unit)
    sites = count(sum(plan.sites.values()), "site")
    lowered = {
        name: number
        for name, number in plan.sites.items()
        if name != REFERENCE and number
    }
    if not lowered:
        return f"It leaves all {sites} in {REFERENCE}, at {price}."
    formats = listing([f"{number} in {name}" for name, number in lowered.items()])
    share = percent(ratio(cost.plan, cost.fp32))
    least = percent(ratio(cost.lowest, cost.fp32))
    return (
        f"It takes {sum(lowered.values())} of {sites} out of {REFERENCE} ({formats}) "
        f"and costs {price}, {share} of all-{REFERENCE}; every site in its cheapest "
        f"format, mostly {cost.lowest_format}, would cost {least}."
    )


def metric_sentence(result: VerifiedResult) -> str:
    """Say what the metric is, measured and predicted, beside the reference.

    Empty without a metric.
    """
    if result.metric_name is None or result.metric_measured is None:
        return ""
    measured = metric(result.metric_measured)
    before = metric(result.metric_reference)
    figures = [f"{result.metric_name}: {measured} measured"]
    if result.metric_predicted is not None:
        figures.append(f"{predicted_metric(result)} predicted")
    return f"{', '.join(figures)}, {before} before rounding."


def predicted_metric(result: VerifiedResult) -> str:
    """Return the predicted metric with its standard deviation, where that is known."""
    value = metric(result.metric_predicted)
    std = result.metric_predicted_std
    return value if std is None else f"{value} ± {std:.1g}"


@dataclass(frozen=True)
class FormatTotal:
    """Every site in one format.

    Attributes:
        format: its name.
        rows: the format's, largest share of the noise first.
        sqnr_db: SQNR of all together if errors add up, in dB; infinite without any
            error. The lost rows are left out.
    """

    format: str
    rows: list[RankingRow]
    sqnr_db: float

    @property
    def lost(self) -> list[RankingRow]:
        """The rows whose result is not finite."""
        return [row for row in self.rows if row.is_lost]

    @property
    def text(self) -> str:
        """SQNR as text."""
        if self.lost:
            return "not finite"
        return "exact" if self.sqnr_db == math.inf else f"{db(self.sqnr_db)} dB"


def totals(formats: Sequence[str], ranking: Sequence[RankingRow]) -> list[FormatTotal]:
    """Return the noise of all sites in each format, in the order of ``formats``.

    ``ranking``: worst first, as a budget ranks. A format that no site takes has no rows and no error.
    """
    return [
        _total(name, [row for row in ranking if row.format == name]) for name in formats
    ]


def _total(name: str, rows: list[RankingRow]) -> FormatTotal:
    """The noise of all sites is the noise of one divided by its share."""
    for row in rows:
        if row.sqnr_db is not None and row.share > 0:
            sqnr_db = row.sqnr_db + 10 * math.log10(row.share)
            return FormatTotal(name, rows, sqnr_db)
    return FormatTotal(name, rows, math.inf)


def totals_sentence(formats: Sequence[FormatTotal]) -> str:
    """Say what each format costs when every site is in it."""
    costs = [f"{total.format} {total.text}" for total in formats if total.rows]
    return f"With every site in one format: {', '.join(costs)}."


def every_call(coverage: Coverage) -> str:
    """Say that no call was left out; of sites without a path that is not all."""
    if coverage.no_path:
        return (
            f"Every call became a site; {count(len(coverage.no_path), 'site')} of them "
            "without a path to the output."
        )
    return "Every call became a site that runs in some format."


def totals_sentences(summary: DiagnosisSummary) -> list[str]:
    """Say what each format costs when every site is in it; of several outputs each."""
    if not summary.totals:
        return [totals_sentence(totals(summary.formats, summary.ranking))]
    sentences = []
    for row in summary.totals:
        costs = [f"{name} {db(value)} dB" for name, value in row.formats.items()]
        sentences.append(
            f"With every site in one format, {row.output}: {', '.join(costs)}."
        )
    return sentences


def worst_sentences(formats: Sequence[FormatTotal]) -> list[str]:
    """Name the sites whose rounding costs most.

    Those that are lost in a format, and the largest shares in the coarsest.
    """
    sentences = []
    lost = [row for total in formats for row in total.lost]
    if lost:
        examples = listing([f"{row.site} in {row.format}" for row in lost[:WORST]])
        more = f", and {len(lost) - WORST} more" if len(lost) > WORST else ""
        sentences.append(f"The result is not finite with {examples}{more}.")
    coarsest = min(formats, key=lambda total: total.sqnr_db, default=None)
    if coarsest is not None and coarsest.sqnr_db < math.inf:
        sentences.append(_coarsest_sentence(coarsest))
    elif any(total.rows for total in formats) and not lost:
        sentences.append("Rounding changes no site in any of these formats.")
    return sentences


def _coarsest_sentence(total: FormatTotal) -> str:
    rows = [row for row in total.rows if not row.is_lost][:WORST]
    sites = listing([f"{row.site} ({percent(row.share)})" for row in rows])
    comes = "the noise comes"
    if len(rows) > 1:
        comes = "the largest shares of the noise come"
    return f"In {total.format}, the coarsest here, {comes} from {sites}."


def agreement(points: Sequence[ScatterPoint], within: float = 1.0) -> str:
    """Say how well the predictions for single sites hold.

    How many are within so many dB, the median difference, and the worst.
    """
    finite_points = comparable(points)
    if not finite_points:
        return "No site was measured alone."
    differences = [_difference(point) for point in finite_points]
    close = sum(difference <= within for difference in differences)
    largest = max(differences)
    worst = finite_points[differences.index(largest)]
    number = len(finite_points)
    text = (
        f"{count(number, 'site')} rounded alone: {close} of {number} predictions "
        f"within {within:g} dB, "
        f"median difference {db(statistics.median(differences))} dB, "
        f"largest {db(largest)} dB at {worst.site} in {worst.format}."
    )
    unresolved = sum(map(_is_unresolved, points))
    if unresolved:
        text += (
            f" {count(unresolved, 'point')} left out: more than {FP32_FLOOR_DB:g} dB, "
            "below fp32's own rounding."
        )
    infinite = len(points) - number - unresolved
    if infinite:
        text += f" {count(infinite, 'point')} without a finite SQNR left out."
    return text


def _difference(point: ScatterPoint) -> float:
    """Return how far the prediction of a comparable point is off, in dB."""
    if point.predicted_db is None or point.measured_db is None:
        return math.inf
    return abs(point.predicted_db - point.measured_db)


def comparable(points: Sequence[ScatterPoint]) -> list[ScatterPoint]:
    """Return the points whose two SQNRs are finite and not both below fp32's rounding."""
    return [p for p in points if _is_finite(p) and not _is_unresolved(p)]


def _is_finite(point: ScatterPoint) -> bool:
    return finite(point.predicted_db) and finite(point.measured_db)


def _is_unresolved(point: ScatterPoint) -> bool:
    """Return True where two passes in fp32 differ by as much as is to be compared."""
    figures = (point.predicted_db, point.measured_db)
    return _is_finite(point) and all(sqnr and sqnr > FP32_FLOOR_DB for sqnr in figures)
