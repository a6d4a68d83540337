"""Accuracy against size and work as inline SVG: a point for each format, and the front."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from markupsafe import Markup

from roundoff.export import Summary
from roundoff.report.figures import db, finite, metric, percent, ratio
from roundoff.report.svg import (
    Scale,
    draw_axes,
    draw_circle,
    draw_text,
    nice_ticks,
    picture,
)

#: Left, upper, right and lower edge.
Box = tuple[float, float, float, float]
#: Points that lose more than this share of the metric stand at the lower edge, with
#: their value.
FLOOR = 0.03
WIDTH = 560
HEIGHT = 380
#: Width of a letter and height of a line of a label, in the units of the picture.
LETTER = 6.6
LINE = 14.0
_LABELS = {
    "bytes": "weights as stored, share of fp32 (%)",
    "work": "bit operations, share of fp32 (%)",
}
_TITLES = {"bytes": "Accuracy against size", "work": "Accuracy against work"}


class Point(NamedTuple):
    """One format: ``at`` its cost relative to fp32, ``up`` the metric (or dB)."""

    name: str
    at: float
    up: float
    title: str


@dataclass(frozen=True)
class Halvings:
    """Percent on a scale on which each halving takes the same room, from ``number``
    halvings of 100 at ``start``.

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


def tradeoff(summary: Summary, cost: Literal["bytes", "work"]) -> Markup:
    """Draw the metric (SQNR in dB without one) against a cost relative to fp32.

    Empty where nothing was tried.
    """
    points = _points(summary, cost)
    if len(points) < 2:
        return Markup("")
    floor = _floor(points, has_metric=summary.result.metric_name is not None)
    axes = _axes(points, floor)
    name = summary.result.metric_name or "SQNR of the output, dB"
    body = [axes.drawn(_LABELS[cost], name)]
    front = pareto(points, floor)
    if len(front) > 1:
        line = " ".join(_coordinates(axes.place(p)) for p in front)
        body.append(f'<polyline class="curve" points="{line}"/>')
    chosen_first = sorted(points, key=lambda p: p.name != "chosen")
    body += [_mark(p, *axes.place(p)) for p in chosen_first]
    body += _labels(chosen_first, axes, floor)
    return picture("pareto", WIDTH, HEIGHT, _TITLES[cost], "".join(body))


@dataclass(frozen=True)
class _Axes:
    """Both scales with their ticks."""

    x: Halvings
    y: Scale
    xticks: list[float]
    yticks: list[float]

    def place(self, point: Point) -> tuple[float, float]:
        """Return where a point stands: at the lower edge, if it is below that."""
        return self.x(100 * point.at), self.y(max(point.up, self.yticks[0]))

    def drawn(self, xlabel: str, ylabel: str) -> str:
        return draw_axes(self.x, self.y, self.xticks, self.yticks, xlabel, ylabel)


def _axes(points: Sequence[Point], floor: float) -> _Axes:
    shown = [p.up for p in points if p.up >= floor]
    yticks = nice_ticks(min(shown), max(shown), 5)
    halvings = max(math.ceil(-math.log2(p.at)) for p in points)
    xticks = [100 / 2**n for n in range(halvings, -1, -1)]
    x = Halvings(halvings, 62, WIDTH - 20)
    y = Scale(yticks[0], yticks[-1], HEIGHT - 60, 22)
    return _Axes(x, y, xticks, yticks)


def _coordinates(place: tuple[float, float]) -> str:
    px, py = place
    return f"{px:.2f},{py:.2f}"


def _labels(points: Sequence[Point], axes: _Axes, floor: float) -> list[str]:
    """Write the name beside each point, with its value where it stands too high."""
    places = [axes.place(p) for p in points]
    boxes = [(px - 6, py - 6, px + 6, py + 6) for px, py in places]
    labels = []
    for p, (px, py) in zip(points, places, strict=True):
        text = p.name if p.up >= floor else f"{p.name} ↓ {metric(p.up)}"
        kind = "note strong" if p.name == "chosen" else "note"
        left, base = _place(px, py, text, boxes)
        labels.append(draw_text(kind, left, base, text, "start"))
    return labels


def _points(summary: Summary, cost: Literal["bytes", "work"]) -> list[Point]:
    """Return the formats that have both a cost and a result."""
    name = summary.result.metric_name
    costs = {row.name: getattr(row, cost) for row in summary.tradeoff}
    points = []
    for row in summary.tradeoff:
        up = row.db if name is None else row.metric
        share = ratio(costs[row.name], costs.get("fp32"))
        if not finite(up) or not finite(share) or share <= 0:
            continue
        title = f"{row.name}: {percent(share)} of fp32, {db(row.db)} dB"
        if name is not None:
            title += f", {name} {metric(row.metric)}"
        points.append(Point(row.name, share, up, title))
    return points


def _floor(points: Sequence[Point], *, has_metric: bool) -> float:
    """Return the value below which points stand at the lower edge."""
    if not has_metric:
        return min(p.up for p in points)
    best = max(p.up for p in points)
    return best - FLOOR * abs(best)


def _mark(point: Point, px: float, py: float) -> str:
    if point.name == "chosen":
        return draw_circle("chosen", px, py, 9.0, point.title)
    return draw_circle("dot format", px, py, 4.5, point.title)


def pareto(points: Sequence[Point], floor: float) -> list[Point]:
    """Return the points that no other beats in both, by rising cost.

    Points below ``floor`` are left out.

    >>> [p.name for p in pareto([Point("a", 1, 5, ""), Point("b", 2, 4, ""), Point("c", 3, 6, "")], 0)]
    ['a', 'c']
    """
    front: list[Point] = []
    for p in sorted(points, key=lambda p: (p.at, -p.up)):
        if p.up >= floor and (not front or p.up > front[-1].up):
            front.append(p)
    return front


def _place(px: float, py: float, text: str, boxes: list[Box]) -> tuple[float, float]:
    """Return where a label starts so that it covers no other, near its point.

    Takes the place: it is added to ``boxes``.
    """
    width = LETTER * len(text)
    places = _places(px, py, width)
    for left, base in places:
        box = (left, base - 11, left + width, base + 3)
        if _is_inside(box) and not any(_overlap(box, other) for other in boxes):
            boxes.append(box)
            return left, base
    return places[0]


def _places(px: float, py: float, width: float) -> list[tuple[float, float]]:
    """Return places of a label around its point, the best first."""
    right = px + 10
    left = px - width - 10
    places = [
        (right, py + 4),
        (left, py + 4),
        (px - width / 2, py - 12),
        (px - width / 2, py + 20),
    ]
    for step in range(1, 7):
        above = py + 4 - LINE * step
        below = py + 4 + LINE * step
        places += [(right, above), (right, below), (left, above), (left, below)]
    return places


def _is_inside(box: Box) -> bool:
    return box[0] > 64 and box[2] < WIDTH and box[1] > 2 and box[3] < HEIGHT - 62


def _overlap(box: Box, other: Box) -> bool:
    beside = box[2] <= other[0] or other[2] <= box[0]
    apart = box[3] <= other[1] or other[3] <= box[1]
    return not (beside or apart)
