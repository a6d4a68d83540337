"""The roofline of a machine with the operators of a workload below it, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from markupsafe import Markup

from roundoff.report.advise_answer import number, seconds_of
from roundoff.report.svg import (
    COLOURS,
    Scale,
    draw_axes,
    draw_circle,
    draw_line,
    picture,
)

if TYPE_CHECKING:
    from roundoff.advise import AdviceSummary, OperatorCount

WIDTH = 620
HEIGHT = 380
LEFT = 64
RIGHT = 16
TOP = 14
BOTTOM = 56
#: Operators that are drawn: those that take most of the time.
DRAWN = 40
LEAST_RADIUS = 3.0
MOST_RADIUS = 16.0


def roofline(summary: AdviceSummary) -> Markup:
    """Draw FLOP/s of the operators by FLOP a byte, both as powers of ten, below the
    peaks that were measured; empty where no operator has both."""
    points = _points(summary)[:DRAWN]
    if not points:
        return Markup("")
    peak = math.log10(summary.roofline.flops_per_second)
    width = math.log10(summary.roofline.bytes_per_second)
    ridge = peak - width
    xs = [x for _, x, _, _ in points] + [ridge]
    ys = [y for _, _, y, _ in points] + [peak]
    x = Scale(math.floor(min(xs)), math.ceil(max(xs) + 0.3), LEFT, WIDTH - RIGHT)
    y = Scale(math.floor(min(ys)), math.ceil(max(ys) + 0.1), HEIGHT - BOTTOM, TOP)
    body = draw_axes(
        x,
        y,
        _whole_numbers(x),
        _whole_numbers(y),
        "FLOP a byte, power of ten",
        "FLOP a second, power of ten",
    )
    foot = max(x.low, y.low - width)
    body += draw_line("roof", x(foot), y(foot + width), x(ridge), y(peak))
    body += draw_line("roof", x(ridge), y(peak), x.stop, y(peak))
    kinds = list(dict.fromkeys(row.kind for row, *_ in points))
    for row, at, height, share in points:
        colour = f"c{kinds.index(row.kind) % COLOURS}"
        radius = max(LEAST_RADIUS, MOST_RADIUS * math.sqrt(share))
        title = _title(row, 10**height, share)
        body += draw_circle(f"operator {colour}", x(at), y(height), radius, title)
    return picture("roofline", WIDTH, HEIGHT, "Operators below the roofline", body)


def _points(
    summary: AdviceSummary,
) -> list[tuple[OperatorCount, float, float, float]]:
    """Return (row, log FLOP/byte, log FLOP/s, share of the time), the slowest first."""
    seconds = _seconds(summary)
    points = []
    for row in summary.counts.rows:
        time = seconds.get((row.operator, row.module, row.phase), 0.0)
        if not (row.flops and row.bytes_moved and time):
            continue
        at = math.log10(row.flops / row.bytes_moved)
        share = time / (summary.profile.seconds or 1.0)
        points.append((row, at, math.log10(row.flops / time), share))
    return sorted(points, key=lambda point: -point[3])


def _seconds(summary: AdviceSummary) -> Mapping[tuple[str, str, str], float]:
    return {
        (row.operator, row.module, row.phase): row.seconds
        for row in summary.profile.rows
    }


def _whole_numbers(scale: Scale) -> Sequence[float]:
    return [float(n) for n in range(int(scale.low), int(scale.high) + 1)]


def _title(row: OperatorCount, speed: float, share: float) -> str:
    place = f" in {row.module}" if row.module else ""
    return (
        f"{row.operator}{place}, {row.phase}: {number(row.flops)}FLOP, "
        f"{number(row.intensity)}FLOP/byte, {number(speed)}FLOP/s, {share:.1%} of "
        f"{seconds_of(row.flops / speed / max(share, 1e-9))}"
    )
