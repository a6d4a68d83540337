"""Accuracy against size and work as inline SVG: a point for each format, the chosen one marked, the front drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from markupsafe import Markup

from roundoff.report.figures import db, finite, metric, percent, ratio
from roundoff.report.svg import Scale, nice_ticks
from roundoff.report.svg import axes as _axes
from roundoff.report.svg import circle as _circle
from roundoff.report.svg import svg as _svg
from roundoff.report.svg import text as _text

Row = Mapping[str, Any]
#: Points that lose more than this share of the metric stand at the lower edge, with their value.
FLOOR = 0.03
WIDTH, HEIGHT = 560, 380
#: Width of a letter and height of a line of a label, in the units of the picture.
LETTER, LINE = 6.6, 14.0


class Point(NamedTuple):
    """One format: ``at`` its cost relative to fp32, ``up`` the metric (or dB)."""

    name: str
    at: float
    up: float
    title: str


@dataclass(frozen=True)
class Halvings:
    """Percent on a scale on which each halving takes the same room, from ``number`` halvings of 100 at ``start``.

    >>> Halvings(2, 0.0, 100.0)(50.0)
    50.0
    """

    number: int
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.stop + math.log2(value / 100) / max(self.number, 1) * (
            self.stop - self.start
        )


def tradeoff(data: Row, cost: str) -> Markup:
    """Metric (SQNR in dB without one) against ``bytes`` or ``work`` relative to fp32; empty where nothing was tried."""
    rows = data["tradeoff"]
    key = "metric" if data["result"]["metric_name"] is not None else "db"
    whole = next((row[cost] for row in rows if row["name"] == "fp32"), None)
    points = [
        Point(
            row["name"],
            share,
            row[key],
            f"{row['name']}: {percent(share)} of fp32, {db(row['db'])} dB"
            + (
                ""
                if key == "db"
                else f", {data['result']['metric_name']} {metric(row['metric'])}"
            ),
        )
        for row in rows
        if finite(row[key]) and finite(share := ratio(row[cost], whole)) and share > 0
    ]
    if len(points) < 2:
        return Markup("")
    best = max(p.up for p in points)
    floor = best - FLOOR * abs(best) if key == "metric" else min(p.up for p in points)
    shown = [p.up for p in points if p.up >= floor]
    yticks = nice_ticks(min(shown), max(shown), 5)
    x = Halvings(max(math.ceil(-math.log2(p.at)) for p in points), 62, WIDTH - 20)
    y = Scale(yticks[0], yticks[-1], HEIGHT - 60, 22)
    label = {
        "bytes": "weights as stored, share of fp32 (%)",
        "work": "bit operations, share of fp32 (%)",
    }[cost]
    name = (
        data["result"]["metric_name"] if key == "metric" else "SQNR of the output, dB"
    )
    body = [
        _axes(x, y, [100 / 2**n for n in range(x.number, -1, -1)], yticks, label, name)
    ]
    front = pareto(points, floor)
    if len(front) > 1:
        line = " ".join(f"{x(100 * p.at):.2f},{y(p.up):.2f}" for p in front)
        body.append(f'<polyline class="curve" points="{line}"/>')
    boxes: list[tuple[float, float, float, float]] = []
    order = sorted(points, key=lambda p: p.name != "chosen")
    for p in order:
        px, py = x(100 * p.at), y(max(p.up, yticks[0] if p.up < floor else p.up))
        boxes.append((px - 6, py - 6, px + 6, py + 6))
        kind, radius = ("chosen", 9.0) if p.name == "chosen" else ("dot format", 4.5)
        body.append(_circle(kind, px, py, radius, p.title))
    for p in order:
        px, py = x(100 * p.at), y(max(p.up, yticks[0] if p.up < floor else p.up))
        text = p.name if p.up >= floor else f"{p.name} ↓ {metric(p.up)}"
        kind = "note strong" if p.name == "chosen" else "note"
        body.append(_text(kind, *_place(px, py, text, boxes), text, "start"))
    title = {"bytes": "Accuracy against size", "work": "Accuracy against work"}[cost]
    return _svg("pareto", WIDTH, HEIGHT, title, "".join(body))


def pareto(points: Sequence[Point], floor: float) -> list[Point]:
    """Those that no other beats in both, by rising cost; those below ``floor`` are left out.

    >>> [p.name for p in pareto([Point("a", 1, 5, ""), Point("b", 2, 4, ""), Point("c", 3, 6, "")], 0)]
    ['a', 'c']
    """
    found: list[Point] = []
    for p in sorted(points, key=lambda p: (p.at, -p.up)):
        if p.up >= floor and (not found or p.up > found[-1].up):
            found.append(p)
    return found


def _place(
    px: float, py: float, text: str, boxes: list[tuple[float, float, float, float]]
) -> tuple[float, float]:
    """Where a label starts so that it covers no other, near its point; takes the place."""
    wide = LETTER * len(text)
    tries = [
        (px + 10, py + 4),
        (px - wide - 10, py + 4),
        (px - wide / 2, py - 12),
        (px - wide / 2, py + 20),
    ]
    for step in range(1, 7):
        tries += [
            (px + 10, py + 4 - LINE * step),
            (px + 10, py + 4 + LINE * step),
            (px - wide - 10, py + 4 - LINE * step),
            (px - wide - 10, py + 4 + LINE * step),
        ]
    for left, base in tries:
        box = (left, base - 11, left + wide, base + 3)
        inside = box[0] > 64 and box[2] < WIDTH and box[1] > 2 and box[3] < HEIGHT - 62
        if inside and not any(
            box[0] < b[2] and b[0] < box[2] and box[1] < b[3] and b[1] < box[3]
            for b in boxes
        ):
            boxes.append(box)
            return left, base
    return tries[0]
