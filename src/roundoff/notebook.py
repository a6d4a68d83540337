"""Small tables for notebooks: what ``_repr_html_`` of a result returns."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

#: Rows that a notebook shows of a longer table.
ROWS = 12


def table(
    title: str,
    sentences: Sequence[str],
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
) -> str:
    """Return a title, sentences and the first ``ROWS`` rows of a table as HTML.

    Everything is escaped. Colours are the notebook's own; a wide table scrolls.

    >>> table("Plan", ["Two sites."], ["site", "format"], [["a/<b>", "int8"]]).count("<tr>")
    2
    """
    parts = [f"<b>{escape(title)}</b>"]
    parts += [f"<div>{escape(sentence)}</div>" for sentence in sentences]
    if rows:
        head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
        body = "".join(_row(row) for row in rows[:ROWS])
        parts.append(
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )
    more = len(rows) - ROWS
    if more > 0:
        parts.append(f"<div>{more:,} more rows</div>")
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


def _row(cells: Sequence[str]) -> str:
    return "<tr>" + "".join(map(_cell, cells)) + "</tr>"


def _cell(text: str) -> str:
    is_number = text[:1].isdigit() or text[:1] in ("-", "–", "<")
    side = "right" if is_number else "left"
    return f'<td style="text-align:{side};padding:1px 10px">{escape(text)}</td>'


def decibels(value: float | None) -> str:
    """Return a number of dB to one digit; a dash where there is none.

    >>> decibels(31.26), decibels(None)
    ('31.3 dB', '–')
    """
    return "–" if value is None else f"{value:.1f} dB"


def share(part: float) -> str:
    """Return a share in percent; what is left of it is never called nothing.

    >>> share(0.285), share(1e-7), share(0)
    ('28.5%', '<0.1%', '0.0%')
    """
    return "<0.1%" if 0 < part < 0.0005 else f"{part:.1%}"
