"""What a summary says, in sentences: the same words in the terminal and in HTML."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roundoff.report.figures import amount, count, db, finite, is_lost, listing, metric, percent, ratio

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
    result = summary["result"]
    says = "The plan meets the target" if result["met"] else "The plan misses the target"
    target = summary["target"]["sqnr_db"]
    reached = [f"{db(result['measured_db'])} dB measured"]
    if result["predicted_db"] is not None:
        reached.append(f"{db(result['predicted_db'])} dB predicted")
    if target is not None:
        reached.append(f"{asked(summary)} asked")
    return f"{says}: {', '.join(reached)}."


def asked(summary: Row) -> str:
    """The target in dB, and the drop of the metric it came from."""
    target = summary["target"]
    text, plain = f"{db(target['sqnr_db'])} dB", str(target["asked"]).strip()
    if plain.lower().endswith("db") or not target["note"]:
        return text
    return f"{text} (a metric drop of at most {plain})"


def answer(summary: Row) -> list[str]:
    """The answer as sentences: the verdict, what the plan does and costs, the metric, the sites that cost most."""
    if not summary["coverage"]["sites"]:
        return [NO_SITES]
    parts = [verdict(summary), plan_sentence(summary["plan"]), metric_sentence(summary["result"])]
    return [p for p in [*parts, *worst_sentences(summary["ranking"])] if p]


def plan_sentence(plan: Row) -> str:
    """How many sites leave the reference format and what the plan costs."""
    sites = sum(plan["sites"].values())
    lowered = {f: n for f, n in plan["sites"].items() if f != REFERENCE and n}
    cost = plan["cost"]
    if not lowered:
        return f"All {count(sites, 'site')} stay in {REFERENCE}, at {amount(cost['plan'], cost['unit'])}."
    formats = listing([f"{n} in {f}" for f, n in lowered.items()])
    share = percent(ratio(cost["plan"], cost["fp32"]))
    least = percent(ratio(cost["lowest"], cost["fp32"]))
    return (
        f"{sum(lowered.values())} of {count(sites, 'site')} leave {REFERENCE} ({formats}) at "
        f"{amount(cost['plan'], cost['unit'])}, {share} of all-{REFERENCE}; every site in its cheapest format, "
        f"mostly {cost['lowest_format']}, would take {least}."
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


def worst_sentences(ranking: Sequence[Row]) -> list[str]:
    """The sites whose rounding costs most: those that are lost in a format, and the largest shares in the coarsest."""
    said = []
    lost = [row for row in ranking if is_lost(row)]
    if lost:
        examples = listing([f"{r['site']} in {r['format']}" for r in lost[:WORST]])
        of = f", and {len(lost) - WORST} more" if len(lost) > WORST else ""
        said.append(f"The result is not finite with {examples}{of}.")
    finite = [row for row in ranking if row["sqnr_db"] is not None]
    if finite:
        worst = min(finite, key=lambda row: row["sqnr_db"])["format"]
        rows = sorted((r for r in finite if r["format"] == worst), key=lambda r: -r["share"])[:WORST]
        sites = listing([f"{r['site']} ({percent(r['share'])})" for r in rows])
        many = "s" if len(rows) > 1 else ""
        said.append(f"In {worst}, the coarsest here, the largest share{many} of the noise come{'' if many else 's'} from {sites}.")
    elif ranking and not lost:
        said.append("Rounding changes no site in any of these formats.")
    return said


@dataclass(frozen=True)
class FormatTotal:
    """Every site in one format: SQNR in dB if the errors add up (inf without error, None when a site is lost)."""

    format: str
    rows: list[Row]
    sqnr_db: float | None

    @property
    def text(self) -> str:
        return "not finite" if self.sqnr_db is None else "exact" if self.sqnr_db == math.inf else f"{db(self.sqnr_db)} dB"


def totals(summary: Row) -> list[FormatTotal]:
    """The noise of all sites in each format, from the shares: ``total = noise of a row / its share``.

    Rows come largest share first. Formats in the order that they were asked for; those no site takes are there,
    without rows and with infinite SQNR.
    """
    found = []
    for name in summary["formats"]:
        rows = sorted((r for r in summary["ranking"] if r["format"] == name), key=lambda r: -r["share"])
        total: float | None = math.inf
        if any(map(is_lost, rows)):
            total = None
        elif rows and rows[0]["share"] > 0:
            total = rows[0]["sqnr_db"] + 10 * math.log10(rows[0]["share"])
        found.append(FormatTotal(name, rows, total))
    return found


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
    return f"{text} {count(left, 'point')} without a finite SQNR left out." if left else text


def comparable(points: Sequence[Row]) -> list[Row]:
    """The points whose two SQNRs are finite."""
    return [p for p in points if finite(p["predicted_db"]) and finite(p["measured_db"])]

