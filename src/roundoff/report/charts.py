"""Charts of a diagnosis: bars of noise shares, predicted against measured, costs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape

from markupsafe import Markup

from roundoff.report.answer import FormatTotal, comparable
from roundoff.report.diagnosis import (
    DiagnosisSummary,
    PlanCost,
    RankingRow,
    ScatterPoint,
    TradeoffPoint,
)
from roundoff.report.figures import amount, db, finite, percent, ratio
from roundoff.report.names import elide
from roundoff.report.svg import (
    COLOURS,
    Scale,
    draw_axes,
    draw_bar,
    draw_circle,
    draw_line,
    draw_text,
    nice_ticks,
    picture,
)

#: Bars: width of the picture, room for names and for numbers, height of a bar.
BAR_WIDTH = 560
NAME_ROOM = 250
NUMBER_ROOM = 54
BAR_STEP = 24


def colour(formats: Sequence[str], name: str) -> str:
    """Return the style class of a format; ``c0`` is the first that was asked for."""
    return f"c{list(formats).index(name) % COLOURS}" if name in formats else "other"


def share_bars(
    total: FormatTotal,
    formats: Sequence[str],
    sites: Collection[str],
    *,
    top: int = 10,
    full: float = 1.0,
) -> Markup:
    """Draw a bar for each of the ``top`` sites by share of the noise in one format.

    Each is split into its own parts, in the ratio of their noise powers, since together
    they need not add up to the site's. ``full`` is the share that fills the width. A
    site whose result is not finite has a hatched bar of full width.
    """
    rows = total.rows[:top]
    length = Scale(0.0, full or 1.0, 0.0, BAR_WIDTH - NAME_ROOM - NUMBER_ROOM)
    bars = [
        _bar(row, elide(row.site, 36, sites), index * BAR_STEP + 4, length)
        for index, row in enumerate(rows)
    ]
    kind = f"bars {colour(formats, total.format)}"
    label = f"Share of the noise of {total.format} by site, largest first"
    return picture(kind, BAR_WIDTH, len(rows) * BAR_STEP + 6, label, "".join(bars))


def _bar(row: RankingRow, name: str, y: float, length: Scale) -> str:
    value = "lost" if row.is_lost else percent(row.share)
    end = length.stop if row.is_lost else length(row.share)
    title = f"{row.site}: {percent(row.share)} of the noise of {row.format}"
    parts = [f"{part} {db(value_db)} dB" for part, value_db in row.parts.items()]
    if parts:
        title = f"{title}; {', '.join(parts)}"
    left = NAME_ROOM
    return (
        f'<g class="bar"><title>{escape(title)}</title>'
        f"{draw_text('name', left - 8, y + 12, name, 'end')}"
        f"{_pieces(row, left, y, end)}"
        f"{draw_text('value', left + end + 6, y + 12, value, 'start')}</g>"
    )


def _pieces(row: RankingRow, x: float, y: float, length: float) -> str:
    """Return the parts of a bar."""
    if row.is_lost:
        return draw_bar("lost", x, y, length)
    powers = {part: 10 ** (-value_db / 10) for part, value_db in row.parts.items()}
    whole = sum(powers.values())
    if whole <= 0:
        return draw_bar("whole", x, y, length)
    pieces = []
    for part, power in powers.items():
        width = length * power / whole
        pieces.append(draw_bar(part, x, y, width))
        x += width
    return "".join(pieces)


def scatter(
    points: Sequence[ScatterPoint], formats: Sequence[str], *, band: float = 1.0
) -> Markup:
    """Draw predicted (x) against measured (y) SQNR in dB.

    A circle for each point with two finite numbers. Both axes have one range, so that a
    right prediction lies on the diagonal; the band is ``band`` dB to either side. Empty
    markup without points.
    """
    dots = [
        (point, point.predicted_db, point.measured_db)
        for point in comparable(points)
        if point.predicted_db is not None and point.measured_db is not None
    ]
    if not dots:
        return Markup("")
    values = [value for _, *pair in dots for value in pair]
    ticks = nice_ticks(min(values) - band, max(values) + band)
    low = ticks[0]
    high = ticks[-1]
    x = Scale(low, high, 56, 544)
    y = Scale(low, high, 432, 16)
    corners = [
        (low, low),
        (low, low + band),
        (high - band, high),
        (high, high),
        (high, high - band),
        (low + band, low),
    ]
    outline = " ".join(f"{x(a):.2f},{y(b):.2f}" for a, b in corners)
    circles = [
        draw_circle(
            f"dot {colour(formats, point.format)}",
            x(predicted),
            y(measured),
            4.5,
            f"{point.site} in {point.format}: {db(predicted)} dB predicted, {db(measured)} dB measured",
        )
        for point, predicted, measured in dots
    ]
    body = [
        f'<polygon class="band" points="{outline}"/>',
        draw_axes(x, y, ticks, ticks, "predicted SQNR, dB", "measured SQNR, dB"),
        draw_line("diagonal", x(low), y(low), x(high), y(high)),
        *circles,
    ]
    label = "Predicted against measured SQNR of single sites"
    return picture("scatter", 560, 480, label, "".join(body))


def pareto(summary: DiagnosisSummary) -> Markup:
    """Draw the cost of the cheapest plan (y) for each SQNR (x, dB).

    Cost is relative to all-fp32. The plan that stands is marked; the target and the
    cost with every site in its cheapest format are drawn too. Points without finite
    numbers are left out; empty markup when none is left.
    """
    points = [
        point
        for point in summary.pareto
        if finite(point.predicted_db) and finite(point.relative_cost)
    ]
    if not points:
        return Markup("")
    cost = summary.plan.cost
    target = summary.target.sqnr_db
    reached = summary.result.predicted_db
    paid = ratio(cost.plan, cost.fp32)
    places = [point.predicted_db for point in points]
    heights = [point.relative_cost for point in points]
    if finite(reached) and finite(paid):
        places.append(reached)
        heights.append(paid)
    if finite(target):
        places.append(target)
    xticks = nice_ticks(min(places), max(places))
    yticks = nice_ticks(0.0, max([1.0, *heights]))
    x = Scale(xticks[0], xticks[-1], 56, 544)
    y = Scale(yticks[0], yticks[-1], 312, 16)
    labels = ("predicted SQNR, dB", "cost, share of all-fp32")
    least = ratio(cost.lowest, cost.fp32)
    body = [
        draw_axes(x, y, xticks, yticks, *labels, percents=True),
        _least_cost(x, y, least) if finite(least) else "",
        _target_line(x, y, target) if finite(target) else "",
        _curve(x, y, points, cost.unit),
        _plan_mark(x, y, reached, cost),
    ]
    label = "Cost of the cheapest plan for each SQNR"
    return picture("pareto", 560, 360, label, "".join(body))


def _least_cost(x: Scale, y: Scale, least: float) -> str:
    """Return the line of the cheapest formats everywhere."""
    label = "every site in its cheapest format"
    return "".join(
        [
            draw_line("least", x.start, y(least), x.stop, y(least)),
            draw_text("note", x.stop - 4, y(least) + 14, label, "end"),
        ]
    )


def _target_line(x: Scale, y: Scale, target: float) -> str:
    """Return the line of the target, its label on the side with more room."""
    place = x(target)
    label = f"target {db(target)} dB"
    is_right = place > (x.start + x.stop) / 2
    if is_right:
        words = draw_text("note", place - 6, y.stop + 12, label, "end")
    else:
        words = draw_text("note", place + 6, y.stop + 12, label, "start")
    return draw_line("target", place, y.start, place, y.stop) + words


def _curve(x: Scale, y: Scale, points: Sequence[TradeoffPoint], unit: str) -> str:
    """Return the line through the cheapest plans, and a knot for each."""
    spots = sorted((point.predicted_db, point.relative_cost) for point in points)
    outline = " ".join(f"{x(at):.2f},{y(up):.2f}" for at, up in spots)
    knots = [
        draw_circle(
            "knot",
            x(point.predicted_db),
            y(point.relative_cost),
            4,
            f"target {db(point.target_db)} dB: {db(point.predicted_db)} dB predicted, "
            f"{amount(point.cost, unit)}, {percent(point.relative_cost)} of all-fp32",
        )
        for point in points
    ]
    return "".join([f'<polyline class="curve" points="{outline}"/>', *knots])


def _plan_mark(x: Scale, y: Scale, reached: float | None, cost: PlanCost) -> str:
    """Return the mark of the plan that stands; empty without finite numbers."""
    paid = ratio(cost.plan, cost.fp32)
    if not (finite(reached) and finite(paid)):
        return ""
    title = (
        f"the plan: {db(reached)} dB predicted, {amount(cost.plan, cost.unit)}, "
        f"{percent(paid)} of all-fp32"
    )
    return "".join(
        [
            draw_circle("chosen", x(reached), y(paid), 8, title),
            draw_text("note strong", x(reached), y(paid) - 14, "the plan", "middle"),
        ]
    )
