"""What a summary says, in sentences: the same words in the terminal and in HTML."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundoff.report.figures import (
    amount,
    count,
    db,
    finite,
    is_lost,
    listing,
    metric,
    percent,
    ratio,
)

Row = Mapping[str, Any]

NO_SITES = (
    "No operator call of this workload became a site, so there is nothing to round and nothing to rank; "
    "the coverage says which calls were seen and why each was left out."
)
REFERENCE = "fp32"
WORST = 3


def verdict(summary: Row) -> str:
    """Whether the plan meets the target, with the measured, predicted and asked SQNR, in one sentence."""
    if not summary["coverage"]["sites"]:
        return "There was nothing to measure."
    result, target = summary["result"], summary["target"]
    measured = result["measured_db"]
    reached = [f"{db(measured)} dB measured"]
    if result["predicted_db"] is not None:
        reached.append(f"{db(result['predicted_db'])} dB predicted")
    if target["sqnr_db"] is not None:
        reached.append(
            f"{db(target['sqnr_db'])} dB asked{_drop(target, result['metric_name'])}"
        )
    if result["met"]:
        return f"The plan meets the target: {', '.join(reached)}."
    enough = (
        finite(target["sqnr_db"])
        and measured is not None
        and measured >= target["sqnr_db"]
    )
    if enough and result["metric_measured"] is not None:
        reached.append(
            f"but {result['metric_name']} falls to {metric(result['metric_measured'])}"
        )
    return f"The plan misses the target: {', '.join(reached)}."


def _drop(target: Row, name: str | None) -> str:
    """Where the decibels came from, when a drop of the metric was asked for: only then the target has a note."""
    if not target["note"] or str(target["asked"]).strip().lower().endswith("db"):
        return ""
    return f" for a drop of {name or 'the metric'} by at most {target['asked']}"


def answer(summary: Row) -> list[str]:
    """The answer as sentences: the verdict, what the plan does and costs, the metric, the sites that cost most."""
    if not summary["coverage"]["sites"]:
        return [NO_SITES]
    parts = [
        verdict(summary),
        plan_sentence(summary["plan"]),
        metric_sentence(summary["result"]),
    ]
    return [p for p in [*parts, *worst_sentences(totals(summary))] if p]


def plan_sentence(plan: Row) -> str:
    """How many sites leave the reference format and what the plan costs."""
    sites = sum(plan["sites"].values())
    lowered = {f: n for f, n in plan["sites"].items() if f != REFERENCE and n}
    cost = plan["cost"]
    if not lowered:
        return f"It leaves all {count(sites, 'site')} in {REFERENCE}, at {amount(cost['plan'], cost['unit'])}."
    formats = listing([f"{n} in {f}" for f, n in lowered.items()])
    share = percent(ratio(cost["plan"], cost["fp32"]))
    least = percent(ratio(cost["lowest"], cost["fp32"]))
    return (
        f"It takes {sum(lowered.values())} of {count(sites, 'site')} out of {REFERENCE} ({formats}) and costs "
        f"{amount(cost['plan'], cost['unit'])}, {share} of all-{REFERENCE}; every site in its cheapest format, "
        f"mostly {cost['lowest_format']}, would cost {least}."
    )


def metric_sentence(result: Row) -> str:
    """Metric of the plan, measured and predicted, beside the reference; empty without a metric."""
    if result["metric_name"] is None or result["metric_measured"] is None:
        return ""
    text = f"{result['metric_name']}: {metric(result['metric_measured'])} measured"
    if result["metric_predicted"] is not None:
        std = result["metric_predicted_std"]
        text += f", {metric(result['metric_predicted'])}{'' if std is None else f' ± {std:.1g}'} predicted"
    return f"{text}, {metric(result['metric_reference'])} before rounding."


@dataclass(frozen=True)
class FormatTotal:
    """Every site in one format.

    ``rows`` are the format's, largest share of the noise first; ``sqnr_db`` is what they make together if errors
    add up, in dB: infinite without any error, the lost rows left out; ``lost`` are the rows whose result is not finite.
    """

    format: str
    rows: list[Row]
    sqnr_db: float
    lost: list[Row]

    @property
    def text(self) -> str:
        if self.lost:
            return "not finite"
        return "exact" if self.sqnr_db == math.inf else f"{db(self.sqnr_db)} dB"


def totals(summary: Row) -> list[FormatTotal]:
    """All sites in each format, from the shares: the noise of all is the noise of one divided by its share.

    Formats in the order that they were asked for; one that no site takes has no rows and no error.
    """
    found = []
    for name in summary["formats"]:
        rows = sorted(
            (r for r in summary["ranking"] if r["format"] == name),
            key=lambda r: -r["share"],
        )
        largest = next(
            (r for r in rows if r["sqnr_db"] is not None and r["share"] > 0), None
        )
        total = (
            math.inf
            if largest is None
            else largest["sqnr_db"] + 10 * math.log10(largest["share"])
        )
        found.append(FormatTotal(name, rows, total, [r for r in rows if is_lost(r)]))
    return found


def totals_sentence(formats: Sequence[FormatTotal]) -> str:
    """What each format costs when every site is in it."""
    return (
        "With every site in one format: "
        + ", ".join(f"{t.format} {t.text}" for t in formats if t.rows)
        + "."
    )


def worst_sentences(formats: Sequence[FormatTotal]) -> list[str]:
    """The sites whose rounding costs most: those that are lost in a format, and the largest shares in the coarsest."""
    said = []
    lost = [row for total in formats for row in total.lost]
    if lost:
        examples = listing([f"{r['site']} in {r['format']}" for r in lost[:WORST]])
        more = f", and {len(lost) - WORST} more" if len(lost) > WORST else ""
        said.append(f"The result is not finite with {examples}{more}.")
    coarsest = min(formats, key=lambda total: total.sqnr_db, default=None)
    if coarsest is not None and coarsest.sqnr_db < math.inf:
        rows = [row for row in coarsest.rows if not is_lost(row)][:WORST]
        sites = listing([f"{r['site']} ({percent(r['share'])})" for r in rows])
        most = (
            "the largest shares of the noise come"
            if len(rows) > 1
            else "the noise comes"
        )
        said.append(f"In {coarsest.format}, the coarsest here, {most} from {sites}.")
    elif any(total.rows for total in formats) and not lost:
        said.append("Rounding changes no site in any of these formats.")
    return said


def agreement(points: Sequence[Row], within: float = 1.0) -> str:
    """How well the predictions for single sites hold: how many within so many dB, the median, and the worst."""
    known = comparable(points)
    if not known:
        return "No site was measured alone."
    differences = [p["predicted_db"] - p["measured_db"] for p in known]
    close = sum(abs(d) <= within for d in differences)
    far = max(range(len(known)), key=lambda i: abs(differences[i]))
    text = (
        f"{count(len(known), 'site')} rounded alone: {close} of {len(known)} predictions within {within:g} dB, "
        f"median difference {db(statistics.median(map(abs, differences)))} dB, largest {db(abs(differences[far]))} dB "
        f"at {known[far]['site']} in {known[far]['format']}."
    )
    left = len(points) - len(known)
    return (
        f"{text} {count(left, 'point')} without a finite SQNR left out."
        if left
        else text
    )


def comparable(points: Sequence[Row]) -> list[Row]:
    """The points whose two SQNRs are finite."""
    return [p for p in points if finite(p["predicted_db"]) and finite(p["measured_db"])]
