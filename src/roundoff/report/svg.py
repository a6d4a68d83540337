"""Inline SVG: shapes, scales and axes, coloured by the style sheet of the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Protocol

from markupsafe import Markup

#: Colours in the style sheet; what goes beyond them starts again.
COLOURS = 10


class Axis(Protocol):
    """A scale of any kind: where a value stands, between ``start`` and ``stop``."""

    @property
    def start(self) -> float: ...

    @property
    def stop(self) -> float: ...

    def __call__(self, value: float, /) -> float: ...


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
        part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.stop - self.start)


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Return about ``count`` round numbers that enclose ``[low, high]``, both finite.

    They are multiples of 1, 2 or 5 times a power of ten. The first is at most ``low``
    and the last at least ``high``; an empty range is widened by one on either side.
    After Heckbert, *Nice numbers for graph labels*, Graphics Gems, 1990.

    >>> nice_ticks(13.2, 48.9)
    [10.0, 20.0, 30.0, 40.0, 50.0]
    """
    if high <= low:
        return nice_ticks(low - 1, low + 1, count)
    rough = (high - low) / max(count - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    steps = [factor * power for factor in (1, 2, 5, 10)]
    step = min(steps, key=lambda size: abs(math.log(size / rough)))
    first = math.floor(low / step)
    last = math.ceil(high / step)
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(number * step, digits) for number in range(first, last + 1)]


def draw_axes(
    x: Axis,
    y: Axis,
    xticks: Sequence[float],
    yticks: Sequence[float],
    xlabel: str,
    ylabel: str,
    *,
    percents: bool = False,
) -> str:
    """Return a grid with ticks and labels; with ``percents`` y is a share."""
    parts = []
    for tick in xticks:
        parts.append(draw_line("grid", x(tick), y.start, x(tick), y.stop))
        parts.append(draw_text("tick x", x(tick), y.start + 18, f"{tick:g}", "middle"))
    for tick in yticks:
        label = f"{100 * tick:g}%" if percents else f"{tick:g}"
        parts.append(draw_line("grid", x.start, y(tick), x.stop, y(tick)))
        parts.append(draw_text("tick y", x.start - 8, y(tick) + 4, label, "end"))
    parts.append(
        draw_text("label", (x.start + x.stop) / 2, y.start + 40, xlabel, "middle")
    )
    turned = f'transform="translate(14 {(y.start + y.stop) / 2:.2f}) rotate(-90)"'
    parts.append(
        f'<text class="label" {turned} text-anchor="middle">{escape(ylabel)}</text>'
    )
    return "".join(parts)


def draw_line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    """Return a line of a style class."""
    return f'<line class="{kind}" x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}"/>'


def draw_text(kind: str, x: float, y: float, words: str, anchor: str) -> str:
    """Return words; ``anchor`` is which part of them stands at x."""
    return f'<text class="{kind}" x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(words)}</text>'


def draw_circle(kind: str, x: float, y: float, radius: float, title: str) -> str:
    """Return a circle with a tooltip."""
    return f'<circle class="{kind}" cx="{x:.2f}" cy="{y:.2f}" r="{radius:g}"><title>{escape(title)}</title></circle>'


def draw_bar(kind: str, x: float, y: float, width: float) -> str:
    """Return a bar."""
    return f'<rect class="{kind}" x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="16"/>'


def picture(kind: str, width: int, height: int, label: str, body: str) -> Markup:
    """Return a picture; every text in ``body`` has been escaped.

    ``label`` is for those who do not see it. It is no title element: browsers show a
    title as the tooltip of the whole picture.
    """
    return Markup(
        f'<svg class="{kind}" role="img" aria-label="{escape(label)}" viewBox="0 0 {width} {height}">{body}</svg>'
    )
