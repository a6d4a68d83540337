"""Charts as inline SVG: markup only, coloured by the style sheet of the page that they stand in."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

from markupsafe import Markup

from roundoff.report.answer import FormatTotal, comparable
from roundoff.report.figures import amount, db, finite, is_lost, percent, ratio
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
        return self.start + (value - self.low) / (self.high - self.low) * (
            self.stop - self.start
        )


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
    step = min(
        (s * power for s in (1, 2, 5, 10)), key=lambda s: abs(math.log(s / rough))
    )
    first, last = math.floor(low / step), math.ceil(high / step)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(i * step, digits) for i in range(first, last + 1)]


def colour(formats: Sequence[str], name: str) -> str:
    """The style class of a format's colour: ``c0`` for the first that was asked for."""
    return f"c{list(formats).index(name) % COLOURS}" if name in formats else "other"


def share_bars(
    total: FormatTotal,
    formats: Sequence[str],
    sites: Collection[str],
    *,
    top: int = 10,
    full: float = 1.0,
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
        detail = ", ".join(
            f"{part} {db(row[f'{part}_db'])} dB"
            for part in PARTS
            if row[f"{part}_db"] is not None
        )
        value, end = (
            ("lost", length.stop)
            if is_lost(row)
            else (percent(row["share"]), length(row["share"]))
        )
        name = _text("name", left - 8, y + 12, elide(row["site"], 36, sites), "end")
        body.append(
            f'<g class="bar"><title>{escape(f"{title}; {detail}" if detail else title)}</title>{name}'
            f"{_pieces(row, left, y, end)}{_text('value', left + end + 6, y + 12, value, 'start')}</g>"
        )
    label = f"Share of the noise of {total.format} by site, largest first"
    return _svg(
        "bars " + colour(formats, total.format),
        width,
        len(rows) * step + 6,
        label,
        "".join(body),
    )


def _pieces(row: Row, x: float, y: float, length: float) -> str:
    if is_lost(row):
        return _rectangle("lost", x, y, length)
    powers = {
        part: 10 ** (-row[f"{part}_db"] / 10)
        for part in PARTS
        if row[f"{part}_db"] is not None
    }
    whole = sum(powers.values())
    if whole <= 0:
        return _rectangle("whole", x, y, length)
    drawn = []
    for part, power in powers.items():
        drawn.append(_rectangle(part, x, y, length * power / whole))
        x += length * power / whole
    return "".join(drawn)


def scatter(
    points: Sequence[Row], formats: Sequence[str], *, band: float = 1.0
) -> Markup:
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
    corners = [
        (low, low),
        (low, low + band),
        (high - band, high),
        (high, high),
        (high, high - band),
        (low + band, low),
    ]
    outline = " ".join(f"{x(a):.2f},{y(b):.2f}" for a, b in corners)
    dots = [
        _circle(
            "dot " + colour(formats, p["format"]),
            x(p["predicted_db"]),
            y(p["measured_db"]),
            4.5,
            f"{p['site']} in {p['format']}: {db(p['predicted_db'])} dB predicted, {db(p['measured_db'])} dB measured",
        )
        for p in known
    ]
    body = [
        f'<polygon class="band" points="{outline}"/>',
        _axes(x, y, ticks, ticks, "predicted SQNR, dB", "measured SQNR, dB"),
        _line("diagonal", x(low), y(low), x(high), y(high)),
        *dots,
    ]
    return _svg(
        "scatter",
        560,
        480,
        "Predicted against measured SQNR of single sites",
        "".join(body),
    )


def pareto(summary: Row) -> Markup:
    """Cost relative to all-fp32 (y) of the cheapest plan for each SQNR (x, dB); the plan that stands is marked.

    Also drawn are the target and the cost with every site in its cheapest format. Points without finite numbers are
    left out; empty markup when none is left.
    """
    points = [
        p
        for p in summary["pareto"]
        if finite(p["predicted_db"]) and finite(p["relative_cost"])
    ]
    if not points:
        return Markup("")
    cost, target = summary["plan"]["cost"], summary["target"]["sqnr_db"]
    reached, paid = summary["result"]["predicted_db"], ratio(cost["plan"], cost["fp32"])
    spots = [(p["predicted_db"], p["relative_cost"]) for p in points]
    marked = [(reached, paid)] if finite(reached) and finite(paid) else []
    across = [at for at, _ in spots + marked] + ([target] if finite(target) else [])
    xticks = nice_ticks(min(across), max(across))
    yticks = nice_ticks(0.0, max([1.0, *(up for _, up in spots + marked)]))
    x, y = Scale(xticks[0], xticks[-1], 56, 544), Scale(yticks[0], yticks[-1], 312, 16)
    body = [
        _axes(
            x,
            y,
            xticks,
            yticks,
            "predicted SQNR, dB",
            "cost, share of all-fp32",
            percents=True,
        )
    ]
    least = ratio(cost["lowest"], cost["fp32"])
    if finite(least):
        body.append(_line("least", x.start, y(least), x.stop, y(least)))
        body.append(
            _text(
                "note",
                x.stop - 4,
                y(least) + 14,
                "every site in its cheapest format",
                "end",
            )
        )
    if finite(target):
        body.append(_line("target", x(target), y.start, x(target), y.stop))
        left = x(target) > (x.start + x.stop) / 2
        place = x(target) + (-6 if left else 6)
        body.append(
            _text(
                "note",
                place,
                y.stop + 12,
                f"target {db(target)} dB",
                "end" if left else "start",
            )
        )
    line = " ".join(f"{x(at):.2f},{y(up):.2f}" for at, up in sorted(spots))
    body.append(f'<polyline class="curve" points="{line}"/>')
    for point, (at, up) in zip(points, spots, strict=True):
        title = f"target {db(point['target_db'])} dB: {db(at)} dB predicted, {amount(point['cost'], cost['unit'])}"
        body.append(
            _circle("knot", x(at), y(up), 4, f"{title}, {percent(up)} of all-fp32")
        )
    for at, up in marked:
        title = f"the plan: {db(at)} dB predicted, {amount(cost['plan'], cost['unit'])}, {percent(up)} of all-fp32"
        body.append(_circle("chosen", x(at), y(up), 8, title))
        body.append(_text("note strong", x(at), y(up) - 14, "the plan", "middle"))
    return _svg(
        "pareto", 560, 360, "Cost of the cheapest plan for each SQNR", "".join(body)
    )


class Along(Protocol):
    """A scale of any kind: where a value stands, between ``start`` and ``stop``."""

    @property
    def start(self) -> float: ...

    @property
    def stop(self) -> float: ...

    def __call__(self, value: float, /) -> float: ...


def _axes(
    x: Along,
    y: Along,
    xticks: Sequence[float],
    yticks: Sequence[float],
    xlabel: str,
    ylabel: str,
    *,
    percents: bool = False,
) -> str:
    parts = []
    for tick in xticks:
        parts.append(_line("grid", x(tick), y.start, x(tick), y.stop))
        parts.append(_text("tick x", x(tick), y.start + 18, f"{tick:g}", "middle"))
    for tick in yticks:
        parts.append(_line("grid", x.start, y(tick), x.stop, y(tick)))
        parts.append(
            _text(
                "tick y",
                x.start - 8,
                y(tick) + 4,
                f"{100 * tick:g}%" if percents else f"{tick:g}",
                "end",
            )
        )
    parts.append(_text("label", (x.start + x.stop) / 2, y.start + 40, xlabel, "middle"))
    turned = f'transform="translate(14 {(y.start + y.stop) / 2:.2f}) rotate(-90)"'
    parts.append(
        f'<text class="label" {turned} text-anchor="middle">{escape(ylabel)}</text>'
    )
    return "".join(parts)


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>'


def _text(kind: str, x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}</text>'


def _circle(kind: str, x: float, y: float, radius: float, title: str) -> str:
    return f'<circle class="{kind}" cx="{x:.2f}" cy="{y:.2f}" r="{radius:g}"><title>{escape(title)}</title></circle>'


def _rectangle(kind: str, x: float, y: float, width: float) -> str:
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="16"/>'


def _svg(kind: str, width: int, height: int, label: str, body: str) -> Markup:
    # aria-label and no title element: browsers show a title as the tooltip of the whole picture
    return Markup(  # every text in the body has been escaped where it was put in
        f'<svg class="{kind}" role="img" aria-label="{escape(label)}" viewBox="0 0 {width} {height}">{body}</svg>'
    )
