"""The error of two runs along the order of execution, as inline SVG.

The style sheet of its page colours it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from markupsafe import Markup

from roundoff.report.comparison_answer import size, times
from roundoff.report.comparison_text import label
from roundoff.report.figures import finite
from roundoff.report.svg import Scale, draw_circle, draw_line, draw_text, picture

if TYPE_CHECKING:
    from roundoff.compare import ChartPoint, Culprit

WIDTH = 1000
HEIGHT = 360
LEFT = 64
TOP = 30
BOTTOM = HEIGHT - 42
#: Decades below which an error is drawn at the bottom, with what is equal.
LEAST = -18
#: Decades of a chart without a number, as exponents of ten.
EMPTY_DECADES = (-8.0, 0.0)
#: Decades with a line, at most.
GRID_LINES = 8
#: Classes of the style sheet; those drawn later stand above.
KINDS = ("plain", "inherited", "own")


def error_chart(points: Sequence[ChartPoint], first: Culprit | None = None) -> Markup:
    """A dot for each point: its error (log scale) by its place in the execution.

    The line is the tolerance, what rounding explains; a larger dot marks where an error
    was made, and ``first``, the culprit that the answer names, has its name beside it.
    Equal values stand on the bottom line, NaN or Inf where the reference has none on
    the top one. Empty markup without points.
    """
    if not points:
        return Markup("")
    axes = _Axes.of(points)
    body = [
        *_grid(axes, points),
        *_passes(points, axes),
        *_tolerance_line(points, axes),
        *_dots(points, axes),
        *_name_of_first(points, first, axes),
        draw_text(
            "label", (LEFT + WIDTH) / 2, HEIGHT - 2, "order of execution", "middle"
        ),
    ]
    title = "Relative error of each value in the order of execution"
    return picture("errors", WIDTH, HEIGHT, title, "".join(body))


@dataclass(frozen=True)
class _Axes:
    """Where a point is drawn; ``low`` and ``high`` are exponents of ten."""

    x: Scale
    y: Scale
    low: int
    high: int

    @classmethod
    def of(cls, points: Sequence[ChartPoint]) -> _Axes:
        drawn = [point.error for point in points]
        drawn += [point.tolerance for point in points]
        exponents = [
            max(LEAST, math.log10(value))
            for value in drawn
            if finite(value) and value > 0
        ]
        low = math.floor(min(exponents, default=EMPTY_DECADES[0]))
        high = math.ceil(max(exponents, default=EMPTY_DECADES[1]))
        high = max(high, low + 1)
        return cls(
            x=Scale(0, max(points[-1].at, 1), LEFT + 6, WIDTH - 12),
            y=Scale(low, high, BOTTOM - 18, TOP + 22),
            low=low,
            high=high,
        )

    def height(self, error: float | None) -> float:
        """The vertical place of an error."""
        if error is None or error <= 0:
            return BOTTOM
        if math.isinf(error):
            return TOP + 4
        return self.y(max(self.low, math.log10(error)))


def _grid(axes: _Axes, points: Sequence[ChartPoint]) -> list[str]:
    """A line for each decade, and what the top and the bottom line mean."""
    marks = [draw_text("tick y", LEFT - 8, BOTTOM + 4, "equal", "end")]
    if any(point.error is not None and math.isinf(point.error) for point in points):
        marks.append(draw_text("tick y", LEFT - 8, TOP + 8, "NaN, Inf", "end"))
    step = max(1, math.ceil((axes.high - axes.low) / GRID_LINES))
    for power in range(axes.low, axes.high + 1, step):
        y = axes.y(power)
        marks.append(draw_line("grid", LEFT, y, WIDTH - 6, y))
        marks.append(draw_text("tick y", LEFT - 8, y + 4, f"1e{power:d}", "end"))
    return marks


def _passes(points: Sequence[ChartPoint], axes: _Axes) -> list[str]:
    """Where steps and passes begin, as far as there is room to say it."""
    marks = []
    free = 0.0
    several_steps = len({point.step for point in points}) > 1
    for (step, phase), run in groupby(points, key=lambda p: (p.step, p.phase)):
        x = axes.x(next(run).at)
        if x < free:
            continue
        text = f"step {step}, {phase}" if several_steps else str(phase)
        marks.append(draw_line("pass", x - 3, TOP - 8, x - 3, BOTTOM + 6))
        marks.append(draw_text("note", x + 2, TOP - 14, text, "start"))
        free = x + 7 * len(text) + 10
    return marks


def _tolerance_line(points: Sequence[ChartPoint], axes: _Axes) -> list[str]:
    corners = [
        f"{axes.x(point.at):.1f},{axes.height(point.tolerance):.1f}"
        for point in points
        if finite(point.tolerance) and point.tolerance > 0
    ]
    if not corners:
        return []
    return [f'<polyline class="allowed" points="{" ".join(corners)}"/>']


def _dots(points: Sequence[ChartPoint], axes: _Axes) -> list[str]:
    dots = []
    for point in sorted(points, key=lambda p: KINDS.index(_kind(p))):
        kind = _kind(point)
        radius = 5.5 if kind == "own" else 2.6
        x = axes.x(point.at)
        dots.append(
            draw_circle(kind, x, axes.height(point.error), radius, _title(point))
        )
    return dots


def _name_of_first(
    points: Sequence[ChartPoint], first: Culprit | None, axes: _Axes
) -> list[str]:
    """The name of the culprit, on the side of its dot that has room."""
    if first is None:
        return []
    for point in points:
        if point.cause == "own" and _is_of(point, first):
            x = axes.x(point.at)
            y = axes.height(point.error) + 4
            if x < WIDTH * 0.6:
                return [draw_text("note strong", x + 11, y, label(point), "start")]
            return [draw_text("note strong", x - 11, y, label(point), "end")]
    return []


def _is_of(point: ChartPoint, culprit: Culprit) -> bool:
    return (
        point.site == culprit.site
        and point.step == culprit.step
        and point.phase == culprit.phase
    )


def _kind(point: ChartPoint) -> str:
    if point.cause == "own":
        return "own"
    return "inherited" if point.verdict == "fail" else "plain"


def _title(point: ChartPoint) -> str:
    factor = times(point.error, point.tolerance)
    beyond = f", {factor} times what rounding explains" if factor else ""
    where = f"{label(point)}, {point.phase}, step {point.step}"
    return f"{where}: {size(point.error)}{beyond}"
