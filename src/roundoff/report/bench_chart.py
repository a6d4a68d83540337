"""Loss curves of training configurations with the noise between seeds, as inline SVG
coloured by its page.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from markupsafe import Markup

from roundoff.report.figures import finite
from roundoff.report.svg import (
    COLOURS,
    Scale,
    draw_axes,
    draw_line,
    nice_ticks,
    picture,
)

if TYPE_CHECKING:
    from roundoff.train import BenchSummary

#: A value for each step; None where there is none.
Points = list[float | None]
#: The lower and upper edge at each step.
Band = list[tuple[float | None, float | None]]
WIDTH = 560
HEIGHT = 360
LEFT = 64
RIGHT = 12
TOP = 12
BOTTOM = 56
#: Windows of the running mean that fit into a curve.
WINDOWS = 25
#: Points that are drawn of a curve, at most.
DRAWN = 400
#: A curve that reaches further than this many heights of the band is cut off, ...
FAR = 8
#: ... this many heights beyond it: one that diverges must not press the others flat.
ROOM = 3


def curves(summary: BenchSummary) -> Markup:
    """Draw the loss of each configuration, mean over seeds.

    The band is one standard deviation of the first one's seeds.
    """
    smooth = _smoothed(summary)
    means = {name: mean_of(seeds) for name, seeds in smooth.items() if seeds}
    reference = means.get(summary.reference, [])
    if not any(value is not None for value in reference):
        return Markup("")
    noise = noise_of(smooth[summary.reference])
    band = [
        _around(middle, spread or 0.0)
        for middle, spread in zip(reference, noise, strict=True)
    ]
    return _chart(summary, means, band, "loss", "Loss of each configuration by step")


def differences(summary: BenchSummary) -> Markup:
    """Draw the loss minus that of the first configuration under the same seed, in the
    band of its noise.
    """
    smooth = _smoothed(summary)
    reference = smooth[summary.reference]
    noise = noise_of(reference)
    if not any(noise):
        return Markup("")
    means = {
        name: mean_of(_differences(seeds, reference))
        for name, seeds in smooth.items()
        if name != summary.reference and seeds
    }
    if not means:
        return Markup("")
    band = [_around(0.0, spread) for spread in noise]
    ylabel = f"loss minus that of {summary.reference}"
    label = "Difference of the loss by step"
    return _chart(summary, means, band, ylabel, label, zero=True)


def _smoothed(summary: BenchSummary) -> dict[str, list[Points]]:
    return {
        name: [running(losses) for losses in seeds]
        for name, seeds in summary.curves.items()
    }


def _differences(seeds: list[Points], reference: list[Points]) -> list[Points]:
    """Subtract the reference, seed by seed; a run that failed has fewer seeds and steps."""
    pairs = zip(seeds, reference, strict=False)
    return [list(map(_minus, points, subtracted)) for points, subtracted in pairs]


def running(values: Sequence[float | None]) -> Points:
    """Compute the running mean over about a 25th of the steps.

    None where a value in the window is None or not finite.

    >>> running([1.0, 2.0, float("nan")])
    [1.0, 2.0, None]
    """
    half = max(0, (len(values) // WINDOWS - 1) // 2)
    windows = [
        values[max(0, center - half) : center + half + 1]
        for center in range(len(values))
    ]
    return [_over(statistics.fmean, window) for window in windows]


def mean_of(seeds: Sequence[Points]) -> Points:
    """Compute the mean over seeds at each step, None where one of them has none."""
    return [_over(statistics.fmean, values) for values in zip(*seeds, strict=False)]


def noise_of(seeds: Sequence[Points]) -> Points:
    """Compute the standard deviation over seeds at each step.

    None with one seed, and where one of them has no value.
    """
    if len(seeds) < 2:
        return [None] * max(map(len, seeds), default=0)
    return [_over(statistics.stdev, values) for values in zip(*seeds, strict=False)]


def _over(
    statistic: Callable[[list[float]], float], values: Sequence[float | None]
) -> float | None:
    numbers = [value for value in values if finite(value)]
    return statistic(numbers) if len(numbers) == len(values) else None


def _minus(value: float | None, subtracted: float | None) -> float | None:
    if value is None or subtracted is None:
        return None
    return value - subtracted


def _around(
    middle: float | None, spread: float | None
) -> tuple[float | None, float | None]:
    if middle is None or spread is None:
        return None, None
    return middle - spread, middle + spread


def _chart(
    summary: BenchSummary,
    means: Mapping[str, Points],
    band: Band,
    ylabel: str,
    label: str,
    *,
    zero: bool = False,
) -> Markup:
    """Draw one curve for each configuration over the band; ``zero`` draws the line y = 0 too."""
    last = max(summary.steps - 1, 1)
    ticks = nice_ticks(0, last)
    xticks = [tick for tick in ticks if tick <= summary.steps - 1] or ticks
    yticks = nice_ticks(*_limits(means, band))
    x = Scale(0, last, LEFT, WIDTH - RIGHT)
    y = Scale(yticks[0], yticks[-1], HEIGHT - BOTTOM, TOP)
    every = max(1, math.ceil(summary.steps / DRAWN))
    body = [draw_axes(x, y, xticks, yticks, "step", ylabel), _band(band, x, y, every)]
    if zero:
        body.append(draw_line("diagonal", x.start, y(0.0), x.stop, y(0.0)))
    names = list(summary.curves)
    for name, points in means.items():
        colour = f"c{names.index(name) % COLOURS}"
        title = f"<title>{escape(name)}</title>"
        for piece in _pieces(points, every):
            line = _coordinates(piece, x, y)
            body.append(
                f'<polyline class="run {colour}" points="{line}">{title}</polyline>'
            )
    return picture("training", WIDTH, HEIGHT, label, "".join(body))


def _limits(means: Mapping[str, Points], band: Band) -> tuple[float, float]:
    """Return the least and the largest value to draw."""
    edges = [edge for pair in band for edge in pair if edge is not None]
    values = list(edges)
    for points in means.values():
        values += [value for value in points if value is not None]
    low = min(values, default=0.0)
    high = max(values, default=1.0)
    if not edges:
        return low, high
    height = max(edges) - min(edges)
    if high - low <= FAR * height:
        return low, high
    room = ROOM * height or 1.0
    return max(low, min(edges) - room), min(high, max(edges) + room)


def _coordinates(points: Sequence[tuple[int, float]], x: Scale, y: Scale) -> str:
    """Write points as SVG does; values beyond the axis are drawn at its end."""
    pairs = []
    for step, value in points:
        inside = min(max(value, y.low), y.high)
        pairs.append(f"{x(step):.1f},{y(inside):.1f}")
    return " ".join(pairs)


def _band(band: Band, x: Scale, y: Scale, every: int) -> str:
    upper = []
    lower = []
    for step in range(0, len(band), every):
        low, high = band[step]
        if low is not None and high is not None:
            lower.append((step, low))
            upper.append((step, high))
    if len(upper) < 2:
        return ""
    points = _coordinates([*upper, *reversed(lower)], x, y)
    return f'<polygon class="band" points="{points}"/>'


def _pieces(points: Points, every: int) -> list[list[tuple[int, float]]]:
    """Cut a curve at its gaps into pieces of two points or more; keep every ``every``-th point."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for step, value in enumerate(points):
        if value is None:
            pieces.append([])
        elif step % every == 0:
            pieces[-1].append((step, value))
    return [piece for piece in pieces if len(piece) > 1]
