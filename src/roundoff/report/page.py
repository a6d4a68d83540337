"""One self-contained HTML page: what every report of a verb is written with.

No script, style, font or picture comes from outside, and the page reads without
JavaScript. ``templates/page.html`` holds the frame of all pages; the template of each
report fills its blocks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from roundoff.files import open_output
from roundoff.report import figures
from roundoff.report.diagnosis import RankingRow

Mark = Literal["met", "doubt", "missed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page, ready to be rendered or written.

    Attributes:
        template: file in ``templates/`` that extends ``page.html``.
        title: title of the browser's window.
        headline: the answer in one sentence.
        sentences: what the answer says beyond the headline.
        values: what the template shows.
        mark: sign before the headline; None for none.
        styles: style sheets in ``templates/``, added to ``report.css``.
        script: script in ``templates/``; None for a page without one.
    """

    template: str
    title: str
    headline: str
    sentences: Sequence[str]
    values: Mapping[str, Any]
    mark: Mark | None = None
    styles: Sequence[str] = ()
    script: str | None = None

    def render(self) -> str:
        """Return the page as text. Every name is escaped."""
        style = Markup("").join(map(_source, ["report.css", *self.styles]))
        script = None if self.script is None else _source(self.script)
        return (
            _templates()
            .get_template(self.template)
            .render(
                title=self.title,
                headline=self.headline,
                sentences=self.sentences,
                mark=self.mark,
                style=style,
                script=script,
                **self.values,
            )
        )

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a path or URL, whole or not at all.

        Raises ``OutputError`` when it cannot be written.
        """
        text = self.render()
        with open_output(path) as temporary:
            # a file name that isn't UTF-8 has lone surrogates
            temporary.write_text(
                text, encoding="utf-8", errors="xmlcharrefreplace", newline="\n"
            )


@cache
def _templates() -> Environment:
    """Return the templates, with the filters and functions that they all use."""
    templates = Environment(
        loader=PackageLoader("roundoff.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "db": figures.db,
        "stderr": figures.stderr,
        "percent": figures.percent,
        "amount": figures.amount,
        "metric": figures.metric,
        "sqnr": figures.sqnr,
        "order": _sort_key,
        "units": _keep_units,
    }
    templates.globals |= {
        "count": figures.count,
        "ratio": figures.ratio,
    }
    return templates


def _source(name: str) -> Markup:
    """Return a style sheet or script of this package, which is not escaped."""
    file = resources.files("roundoff.report").joinpath("templates", name)
    return Markup(file.read_text(encoding="utf-8"))


def _sort_key(row: RankingRow) -> str:
    """Return what a ranking row is sorted by in its SQNR column.

    Lost results lie below all numbers, exact ones above.
    """
    if row.sqnr_db is not None:
        return repr(float(row.sqnr_db))
    return "-Infinity" if row.is_lost else "Infinity"


def _keep_units(text: str) -> str:
    """Replace the space between a number and dB by one where no line ends."""
    return text.replace(" dB", "\N{NO-BREAK SPACE}dB")
