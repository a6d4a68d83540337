"""The error of two runs along the order of execution, as inline SVG coloured by the style sheet of its page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup

from roundoff.report.comparison_answer import size, times
from roundoff.report.comparison_text import label
from roundoff.report.figures import finite
from roundoff.report.svg import Scale
from roundoff.report.svg import circle as _circle
from roundoff.report.svg import line as _line
from roundoff.report.svg import svg as _svg
from roundoff.report.svg import text as _text

Row = Mapping[str, Any]

WIDTH, HEIGHT, LEFT, TOP = 1000, 360, 64, 30
#: Decades below which an error is drawn at the bottom, with what is equal.
LEAST = -18


def error_chart(points: Sequence[Row], first: Row | None = None) -> Markup:
    """A dot for each point: its error (log scale) by its place ``at`` in the order of execution.

    The line is the tolerance, what rounding explains; a larger dot marks where an error was made, and ``first``, the
    culprit that the answer names, has its name beside it. Equal values stand on the bottom line, NaN or Inf where the
    reference has none on the top one. Empty markup without points.
    """
    if not points:
        return Markup("")
    sizes = [p["error"] for p in points if finite(p["error"]) and p["error"] > 0]
    allowed = [
        p["tolerance"] for p in points if finite(p["tolerance"]) and p["tolerance"] > 0
    ]
    exponents = [max(LEAST, math.log10(v)) for v in [*sizes, *allowed]] or [-8.0, 0.0]
    low, high = math.floor(min(exponents)), math.ceil(max(exponents))
    high = max(high, low + 1)
    bottom, top = HEIGHT - 42, TOP + 22
    x = Scale(0, max(points[-1]["at"], 1), LEFT + 6, WIDTH - 12)
    y = Scale(low, high, bottom - 18, top)

    def place(error: float | None) -> float:
        if error is None or error <= 0:
            return bottom
        return TOP + 4 if math.isinf(error) else y(max(low, math.log10(error)))

    every = max(1, math.ceil((high - low) / 8))
    body = [_text("tick y", LEFT - 8, bottom + 4, "equal", "end")]
    if any(p["error"] is not None and math.isinf(p["error"]) for p in points):
        body.append(_text("tick y", LEFT - 8, TOP + 8, "NaN, Inf", "end"))
    for power in range(low, high + 1, every):
        body += [
            _line("grid", LEFT, y(power), WIDTH - 6, y(power)),
            _text("tick y", LEFT - 8, y(power) + 4, f"1e{power:d}", "end"),
        ]
    body += _passes(points, x, bottom)
    line = " ".join(
        f"{x(p['at']):.1f},{place(p['tolerance']):.1f}"
        for p in points
        if finite(p["tolerance"]) and p["tolerance"] > 0
    )
    if line:
        body.append(f'<polyline class="allowed" points="{line}"/>')
    order = {"plain": 0, "inherited": 1, "own": 2}
    for kind, point in sorted(
        ((_kind(p), p) for p in points), key=lambda item: order[item[0]]
    ):
        body.append(
            _circle(
                kind,
                x(point["at"]),
                place(point["error"]),
                5.5 if kind == "own" else 2.6,
                _title(point),
            )
        )
    marked = next(
        (p for p in points if first and p["cause"] == "own" and _same(p, first)), None
    )
    if marked is not None:
        at, up = x(marked["at"]), place(marked["error"])
        right = at < WIDTH * 0.6
        body.append(
            _text(
                "note strong",
                at + (11 if right else -11),
                up + 4,
                label(marked),
                "start" if right else "end",
            )
        )
    body.append(
        _text("label", (LEFT + WIDTH) / 2, HEIGHT - 2, "order of execution", "middle")
    )
    return _svg(
        "errors",
        WIDTH,
        HEIGHT,
        "Relative error of each value in the order of execution",
        "".join(body),
    )


def _same(point: Row, culprit: Row) -> bool:
    return all(point[key] == culprit[key] for key in ("site", "step", "phase"))


def _passes(points: Sequence[Row], x: Scale, bottom: float) -> list[str]:
    """Where steps and passes begin, as far as there is room to say it."""
    drawn, free = [], 0.0
    several = len({p["step"] for p in points}) > 1
    for (step, phase), run in groupby(points, key=lambda p: (p["step"], p["phase"])):
        at = x(next(run)["at"])
        if at < free:
            continue
        text = f"step {step}, {phase}" if several else str(phase)
        drawn += [
            _line("pass", at - 3, TOP - 8, at - 3, bottom + 6),
            _text("note", at + 2, TOP - 14, text, "start"),
        ]
        free = at + 7 * len(text) + 10
    return drawn


def _kind(point: Row) -> str:
    if point["verdict"] == "fail" or point["cause"] == "own":
        return "own" if point["cause"] == "own" else "inherited"
    return "plain"


def _title(point: Row) -> str:
    factor = times(point["error"], point["tolerance"])
    text = f"{label(point)}, {point['phase']}, step {point['step']}: {size(point['error'])}"
    return text + (f", {factor} times what rounding explains" if factor else "")
