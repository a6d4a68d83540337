"""Loss curves of training configurations with the noise between seeds, as inline SVG coloured by its page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from markupsafe import Markup

from roundoff.report.figures import finite
from roundoff.report.svg import COLOURS, Scale, nice_ticks
from roundoff.report.svg import axes as _axes
from roundoff.report.svg import line as _line
from roundoff.report.svg import svg as _svg

Row = Mapping[str, Any]
Points = list[float | None]
Band = Sequence[tuple[float | None, float | None]]
WIDTH, HEIGHT, LEFT = 560, 360, 64
#: Windows of the running mean that fit into a curve.
WINDOWS = 25
#: Points that are drawn of a curve, at most.
DRAWN = 400


def curves(data: Row) -> Markup:
    """The loss of each configuration, mean over seeds; the band is one standard deviation of the first one's seeds."""
    smooth = {
        name: [running(one) for one in seeds] for name, seeds in data["curves"].items()
    }
    means = {name: mean_of(seeds) for name, seeds in smooth.items() if seeds}
    reference = data["reference"]
    if not any(value is not None for value in means.get(reference, [])):
        return Markup("")
    middle, noise = means[reference], noise_of(smooth[reference])
    band = [
        (None, None) if m is None else (m - (s or 0), m + (s or 0))
        for m, s in zip(middle, noise, strict=True)
    ]
    return _chart(
        means,
        band,
        list(data["curves"]),
        data["steps"],
        "loss",
        "Loss of each configuration by step",
    )


def differences(data: Row) -> Markup:
    """The loss minus that of the first configuration under the same seed, mean over seeds, in the band of its noise."""
    smooth = {
        name: [running(one) for one in seeds] for name, seeds in data["curves"].items()
    }
    ours = smooth[data["reference"]]
    noise = noise_of(ours)
    if not any(noise):
        return Markup("")
    means = {}
    for name, seeds in smooth.items():
        if name != data["reference"] and seeds:
            pairs = zip(seeds, ours, strict=False)  # one that failed has fewer
            means[name] = mean_of(
                [
                    [_minus(a, b) for a, b in zip(theirs, mine, strict=False)]
                    for theirs, mine in pairs
                ]
            )
    if not means:
        return Markup("")
    band = [(None, None) if s is None else (-s, s) for s in noise]
    label = f"loss minus that of {data['reference']}"
    return _chart(
        means,
        band,
        list(data["curves"]),
        data["steps"],
        label,
        "Difference of the loss by step",
        zero=True,
    )


def running(values: Sequence[float | None]) -> Points:
    """The running mean over about a 25th of the steps; None where a value in the window is None or not finite.

    >>> running([1.0, 2.0, float("nan")])
    [1.0, 2.0, None]
    """
    half = max(0, (len(values) // WINDOWS - 1) // 2)
    found: Points = []
    for at in range(len(values)):
        window = values[max(0, at - half) : at + half + 1]
        known = [value for value in window if finite(value)]
        found.append(statistics.fmean(known) if len(known) == len(window) else None)
    return found


def mean_of(seeds: Sequence[Points]) -> Points:
    """The mean over seeds at each step, None where one of them has none."""
    return [
        None if None in at else statistics.fmean(v for v in at if v is not None)
        for at in zip(*seeds, strict=False)
    ]


def noise_of(seeds: Sequence[Points]) -> Points:
    """The standard deviation over seeds at each step; None with one seed, and where one of them has no value."""
    if len(seeds) < 2:
        return [None] * max(map(len, seeds), default=0)
    return [
        None if None in at else statistics.stdev(v for v in at if v is not None)
        for at in zip(*seeds, strict=False)
    ]


def _minus(one: float | None, two: float | None) -> float | None:
    return None if one is None or two is None else one - two


def _chart(
    means: Mapping[str, Points],
    band: Band,
    names: list[str],
    steps: int,
    ylabel: str,
    label: str,
    *,
    zero: bool = False,
) -> Markup:
    edges = [v for pair in band for v in pair if v is not None]
    values = sorted(v for points in means.values() for v in points if v is not None)
    low, high = (
        min([*edges, *values[:1]], default=0.0),
        max([*edges, *values[-1:]], default=1.0),
    )
    if edges and high - low > 8 * (
        max(edges) - min(edges)
    ):  # one that diverges must not press the others flat
        room = 3 * (max(edges) - min(edges)) or 1.0
        low, high = max(low, min(edges) - room), min(high, max(edges) + room)
    xticks, yticks = nice_ticks(0, max(steps - 1, 1)), nice_ticks(low, high)
    xticks = [tick for tick in xticks if tick <= steps - 1] or xticks
    x = Scale(0, max(steps - 1, 1), LEFT, WIDTH - 12)
    y = Scale(yticks[0], yticks[-1], HEIGHT - 56, 12)
    every = max(1, math.ceil(steps / DRAWN))
    body = [_axes(x, y, xticks, yticks, "step", ylabel), _band(band, x, y, every)]
    if zero:
        body.append(_line("diagonal", x.start, y(0.0), x.stop, y(0.0)))
    for name, points in means.items():
        kind = f"c{names.index(name) % COLOURS}"
        for piece in _pieces(points, every):
            line = " ".join(
                f"{x(at):.1f},{y(min(max(v, yticks[0]), yticks[-1])):.1f}"
                for at, v in piece
            )
            body.append(
                f'<polyline class="run {kind}" points="{line}"><title>{escape(name)}</title></polyline>'
            )
    return _svg("training", WIDTH, HEIGHT, label, "".join(body))


def _band(band: Band, x: Scale, y: Scale, every: int) -> str:
    places = enumerate(band)
    known = [
        (at, low, high)
        for at, (low, high) in places
        if low is not None and high is not None and at % every == 0
    ]
    if len(known) < 2:
        return ""
    edge = [
        *((at, high) for at, _, high in known),
        *((at, low) for at, low, _ in reversed(known)),
    ]
    points = " ".join(
        f"{x(at):.1f},{y(min(max(v, y.low), y.high)):.1f}" for at, v in edge
    )
    return f'<polygon class="band" points="{points}"/>'


def _pieces(points: Points, every: int) -> list[list[tuple[int, float]]]:
    """Stretches without a gap."""
    found: list[list[tuple[int, float]]] = [[]]
    for at, point in enumerate(points):
        if point is None:
            found.append([])
        elif at % every == 0:
            found[-1].append((at, point))
    return [piece for piece in found if len(piece) > 1]
