"""Charts as inline SVG: markup only, coloured by the style sheet of the page that they stand in."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from markupsafe import Markup

from roundoff.report.answer import FormatTotal, comparable
from roundoff.report.figures import amount, db, finite, is_lost, percent
from roundoff.report.names import elide

Row = Mapping[str, Any]

#: Colours in the style sheet; formats beyond them start again.
COLOURS = 10
PARTS = ("activation", "weight", "output")


@dataclass(frozen=True)
class Scale:
    """The straight line that takes ``low`` to ``start`` and ``high`` to ``stop``.

    >>> Scale(0, 10, 100, 200)(2.5)
    125.0
    """

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """About ``count`` multiples of 1, 2 or 5 times a power of ten that enclose ``[low, high]``, both finite.

    The first tick is at most ``low`` and the last at least ``high``; an empty range is widened by one on either
    side. After Heckbert, *Nice numbers for graph labels*, Graphics Gems, 1990.

    >>> nice_ticks(13.2, 48.9)
    [10.0, 20.0, 30.0, 40.0, 50.0]
    """
    if high <= low:
        low, high = low - 1, low + 1
    rough = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((s * power for s in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / rough)))
    first, last = math.floor(low / step), math.ceil(high / step)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


def colour(formats: Sequence[str], name: str) -> str:
    """The style class of a format's colour: ``c0`` for the first that was asked for."""
    return f"c{list(formats).index(name) % COLOURS}" if name in formats else "other"


def share_bars(
    total: FormatTotal, formats: Sequence[str], sites: Collection[str], *, top: int = 10, full: float = 1.0
) -> Markup:
    """One bar for each of the ``top`` sites by share of the noise in one format, split into its own parts.

    ``full`` is the share that fills the width. A site whose result is not finite has a hatched bar of full width. The
    parts are drawn in the ratio of their noise powers, since together they need not add up to the site's.
    """
    rows = total.rows[:top]
    step, left, width = 24, 250, 560
    length = Scale(0.0, full or 1.0, 0.0, width - left - 54)
    body = []
    for index, row in enumerate(rows):
        y = index * step + 4
        title = f"{row['site']}: {percent(row['share'])} of the noise of {total.format}"
        detail = ", ".join(f"{part} {db(row[f'{part}_db'])} dB" for part in PARTS if row[f"{part}_db"] is not None)
        value, end = ("lost", length.stop) if is_lost(row) else (percent(row["share"]), length(row["share"]))
        name = escape(elide(row["site"], 38, sites))
        pieces = _pieces(row, left, y, end)
        body.append(
            f'<g class="bar"><title>{escape(f"{title}; {detail}" if detail else title)}</title>'
            f'<text class="name" x="{left - 8}" y="{y + 12}" text-anchor="end">{name}</text>{pieces}'
            f'<text class="value" x="{left + end + 6:.2f}" y="{y + 12}">{escape(value)}</text></g>'
        )
    label = f"Share of the noise of {total.format} by site, largest first"
    return _svg("bars " + colour(formats, total.format), width, len(rows) * step + 6, label, "".join(body))


def _pieces(row: Row, x: float, y: float, length: float) -> str:
    if is_lost(row):
        return f'<rect class="lost" x="{x:.2f}" y="{y}" width="{length:.2f}" height="16"/>'
    powers = {part: 10 ** (-row[f"{part}_db"] / 10) for part in PARTS if row[f"{part}_db"] is not None}
    whole = sum(powers.values())
    drawn = []
    for part, power in powers.items() if whole > 0 else [("whole", 1.0)]:
        piece = length * power / (whole or 1.0)
        drawn.append(f'<rect class="{part}" x="{x:.2f}" y="{y}" width="{piece:.2f}" height="16"/>')
        x += piece
    return "".join(drawn)


def scatter(points: Sequence[Row], formats: Sequence[str], *, band: float = 1.0) -> Markup:
    """Predicted (x) against measured (y) SQNR in dB, a circle for each point with two finite numbers.

    Both axes have one range, so that a right prediction lies on the diagonal; the band is ``band`` dB to either
    side. Empty markup without points.
    """
    known = comparable(points)
    if not known:
        return Markup("")
    values = [p[key] for p in known for key in ("predicted_db", "measured_db")]
    ticks = nice_ticks(min(values) - band, max(values) + band)
    low, high = ticks[0], ticks[-1]
    x, y = Scale(low, high, 56, 544), Scale(low, high, 432, 16)
    corners = [(low, low), (low, low + band), (high - band, high), (high, high), (high, high - band), (low + band, low)]
    outline = " ".join(f"{x(a):.2f},{y(b):.2f}" for a, b in corners)
    dots = "".join(
        f'<circle class="dot {colour(formats, p["format"])}" cx="{x(p["predicted_db"]):.2f}" '
        f'cy="{y(p["measured_db"]):.2f}" r="4.5"><title>'
        f"{escape(p['site'])} in {escape(p['format'])}: {db(p['predicted_db'])} dB predicted, "
        f"{db(p['measured_db'])} dB measured</title></circle>"
        for p in known
    )
    body = (
        f'<polygon class="band" points="{outline}"/>'
        + _axes(x, y, ticks, ticks, "predicted SQNR, dB", "measured SQNR, dB", lambda v: f"{v:g}")
        + f'<line class="diagonal" x1="{x(low):.2f}" y1="{y(low):.2f}" x2="{x(high):.2f}" y2="{y(high):.2f}"/>'
        + dots
    )
    return _svg("scatter", 560, 480, "Predicted against measured SQNR of single sites", body)


def pareto(summary: Row) -> Markup:
    """Cost relative to all-fp32 (y) of the cheapest plan for each SQNR (x, dB); the plan that stands is marked.

    Also drawn are the target and the cost with every site in its cheapest format. Points without finite numbers are
    left out; empty markup when none is left.
    """
    points = [p for p in summary["pareto"] if finite(p["predicted_db"]) and finite(p["relative_cost"])]
    if not points:
        return Markup("")
    cost, chosen = summary["plan"]["cost"], summary["result"]["predicted_db"]
    target = summary["target"]["sqnr_db"]
    chosen_cost = cost["plan"] / cost["fp32"] if cost["fp32"] else None
    marked = finite(chosen) and chosen_cost is not None
    across = [p["predicted_db"] for p in points] + [v for v in (target, chosen if marked else None) if v is not None]
    up = [p["relative_cost"] for p in points] + ([chosen_cost] if marked else []) + [1.0]
    xticks, yticks = nice_ticks(min(across), max(across)), nice_ticks(0.0, max(up))
    x, y = Scale(xticks[0], xticks[-1], 56, 624), Scale(yticks[0], yticks[-1], 332, 24)
    body = [_axes(x, y, xticks, yticks, "predicted SQNR, dB", "cost, share of all-fp32", lambda v: f"{v:.0%}")]
    if cost["fp32"]:
        least = y(cost["lowest"] / cost["fp32"])
        body.append(f'<line class="least" x1="56" y1="{least:.2f}" x2="624" y2="{least:.2f}"/>'
                    f'<text class="note" x="620" y="{least + 14:.2f}" text-anchor="end">every site in its cheapest format</text>')  # fmt: skip
    if target is not None:
        place, anchor = (-6, "end") if x(target) > 340 else (6, "start")
        body.append(f'<line class="target" x1="{x(target):.2f}" y1="24" x2="{x(target):.2f}" y2="332"/>'
                    f'<text class="note" x="{x(target) + place:.2f}" y="36" text-anchor="{anchor}">target {db(target)} dB</text>')  # fmt: skip
    ordered = sorted(points, key=lambda p: (p["predicted_db"], p["relative_cost"]))
    line = " ".join(f"{x(p['predicted_db']):.2f},{y(p['relative_cost']):.2f}" for p in ordered)
    body.append(f'<polyline class="curve" points="{line}"/>')
    for p in ordered:
        title = (
            f"target {db(p['target_db'])} dB: {db(p['predicted_db'])} dB predicted, {amount(p['cost'], cost['unit'])}, "
            f"{percent(p['relative_cost'])} of all-fp32"
        )
        body.append(f'<circle class="knot" cx="{x(p["predicted_db"]):.2f}" cy="{y(p["relative_cost"]):.2f}" r="4">'
                    f"<title>{escape(title)}</title></circle>")  # fmt: skip
    if marked and chosen_cost is not None:
        title = f"the plan: {db(chosen)} dB predicted, {amount(cost['plan'], cost['unit'])}, {percent(chosen_cost)} of all-fp32"
        body.append(f'<circle class="chosen" cx="{x(chosen):.2f}" cy="{y(chosen_cost):.2f}" r="8">'
                    f"<title>{escape(title)}</title></circle>"
                    f'<text class="note strong" x="{x(chosen):.2f}" y="{y(chosen_cost) - 14:.2f}" text-anchor="middle">the plan</text>')  # fmt: skip
    return _svg("pareto", 640, 380, "Cost of the cheapest plan for each SQNR", "".join(body))


def _axes(
    x: Scale, y: Scale, xticks: Sequence[float], yticks: Sequence[float], xlabel: str, ylabel: str, yformat: Any
) -> str:
    parts = []
    for tick in xticks:
        at = x(tick)
        parts.append(f'<line class="grid" x1="{at:.2f}" y1="{y.start}" x2="{at:.2f}" y2="{y.stop}"/>'
                     f'<text class="tick x" x="{at:.2f}" y="{y.start + 18}" text-anchor="middle">{tick:g}</text>')  # fmt: skip
    for tick in yticks:
        at = y(tick)
        parts.append(f'<line class="grid" x1="{x.start}" y1="{at:.2f}" x2="{x.stop}" y2="{at:.2f}"/>'
                     f'<text class="tick y" x="{x.start - 8}" y="{at + 4:.2f}" text-anchor="end">{yformat(tick)}</text>')  # fmt: skip
    middle, height = (x.start + x.stop) / 2, (y.start + y.stop) / 2
    parts.append(f'<text class="label" x="{middle:.2f}" y="{y.start + 40}" text-anchor="middle">{escape(xlabel)}</text>')
    parts.append(f'<text class="label" transform="translate(14 {height:.2f}) rotate(-90)" text-anchor="middle">{escape(ylabel)}</text>')
    return "".join(parts)


def _svg(kind: str, width: int, height: int, label: str, body: str) -> Markup:
    # aria-label and no title element: browsers show a title as the tooltip of the whole picture
    return Markup(  # every text in the body has been escaped where it was put in
        f'<svg class="{kind}" role="img" aria-label="{escape(label)}" viewBox="0 0 {width} {height}">{body}</svg>'
    )
