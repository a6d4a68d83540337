"""Tables and sentences on a terminal of any width: numbers are never cut.

What is printed may be of somebody else's file: see ``HarmlessConsole``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from roundoff.foreign import visible
from roundoff.report.names import BREAKS, wrap

#: Cells of each column, by heading.
Columns = Mapping[str, Sequence[str]]

#: Fewest columns of the terminal for names; fewer only where nothing else is left.
NAME_LEAST = 16
NAME_FEWEST = 3
#: Columns of names and sentences, by heading: they wrap.
LEFT_ALIGNED = frozenset(
    "site|format|plan|operator|plan runs|reason|for example|then|phase|dtype|line|event|verdict|looks like|status|from|"
    "counterpart|configuration|note|file|what|step|observer|formats|name|at|decided by".split(
        "|"
    )
)


class HarmlessConsole(Console):
    """A console that makes control characters of the text visible; the terminal obeys its own alone."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render as of ``Console``, with ``foreign.visible`` text."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield segment._replace(text=visible(segment.text))


@dataclass(frozen=True)
class _Column:
    """A column of a table.

    Attributes:
        whole: its width where nothing is broken.
        least: that of its numbers, and of the longest word of its heading.
    """

    heading: str
    cells: tuple[str, ...]
    whole: int
    least: int

    @property
    def has_names(self) -> bool:
        return self.heading in LEFT_ALIGNED

    def width(self, names: int, *, has_whole_heading: bool) -> int:
        """Return its width where names have at most ``names`` columns of the terminal."""
        if self.has_names:
            return min(self.whole, names)
        return self.whole if has_whole_heading else self.least


def _column(heading: str, cells: Sequence[str]) -> _Column:
    shown = tuple(visible(cell, lines=False) for cell in cells)
    widest = max(map(cell_len, shown), default=0)
    word = max(map(cell_len, BREAKS.split(heading)))
    return _Column(heading, shown, max(cell_len(heading), widest), max(word, widest))


def print_table(
    console: Console, columns: Columns, *, styles: Sequence[str] | None = None
) -> None:
    """Print a table that fits the console: all of its columns, and every cell whole.

    Names wrap (the columns of ``LEFT_ALIGNED``), then headings do; numbers never. Columns
    for which there is no room all the same stand in a second table below, beside the
    first ones again. ``styles`` has a style for each row.

    >>> columns = {"site": ["encoder.layer.0/linear", "head/linear"], "SQNR": ["31.3", "40.0"]}
    >>> print_table(Console(width=24), columns)
    site                SQNR
    ────────────────────────
    encoder.layer.0/    31.3
    linear
    head/linear         40.0
    """
    if not columns:
        return
    every = [_column(name, cells) for name, cells in columns.items()]
    for place, part in enumerate(_parts(every, console.width)):
        if place:
            console.print()
        _print_part(part, console, styles)


def _parts(columns: Sequence[_Column], width: int) -> list[list[_Column]]:
    """Divide columns into tables that fit; the first columns stand in each."""
    first = columns[: _telling(columns, width)]
    part = list(first)
    parts = [part]
    for column in columns[len(first) :]:
        if len(part) > len(first) and _needed([*part, column]) > width:
            part = list(first)
            parts.append(part)
        part.append(column)
    return parts


def _telling(columns: Sequence[_Column], width: int) -> int:
    """Return how many of the first columns tell rows apart; one if they leave no room."""
    for number in range(1, len(columns)):
        rows = list(zip(*(column.cells for column in columns[:number]), strict=True))
        if len(set(rows)) == len(rows):
            first = columns[:number]
            rest = columns[number:]
            fits = all(_needed([*first, column]) <= width for column in rest)
            return number if fits else 1
    return 1


def _needed(columns: Sequence[_Column]) -> int:
    widths = [c.width(NAME_LEAST, has_whole_heading=False) for c in columns]
    return sum(widths) + len(columns) - 1


def _widths(columns: Sequence[_Column], room: int) -> list[int]:
    """Return the widths of columns in ``room``: that of names is as large as it can be.

    Headings are broken before names get fewer than ``NAME_LEAST``.
    """
    most = max(NAME_LEAST, *(column.whole for column in columns), 0)
    widths: list[int] = []
    for whole, least in ((True, NAME_LEAST), (False, NAME_FEWEST)):
        for names in range(most, least - 1, -1):
            widths = [c.width(names, has_whole_heading=whole) for c in columns]
            if sum(widths) <= room:
                return widths
    return widths


def _print_part(
    columns: Sequence[_Column], console: Console, styles: Sequence[str] | None
) -> None:
    between = len(columns) - 1
    # rich's divider, with a space on either side where nothing has to wrap for it
    gap = 3 if sum(c.whole for c in columns) + 3 * between <= console.width else 1
    gaps = gap * between
    widths = _widths(columns, console.width - gaps)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, gap // 2),
        pad_edge=False,
        show_edge=False,
        header_style="bold",
        width=sum(widths) + gaps,
    )
    for column, width in zip(columns, widths, strict=True):
        table.add_column(
            Text(wrap(column.heading, width)),
            justify="left" if column.has_names else "right",
            no_wrap=True,
            overflow="fold",
            width=width,
        )
    wrapped = [
        [Text(wrap(cell, width)) for cell in column.cells]
        for column, width in zip(columns, widths, strict=True)
    ]
    for index, cells in enumerate(zip(*wrapped, strict=True)):
        table.add_row(*cells, style=styles[index] if styles else None)
    console.print(table, crop=False, highlight=False)


def heading(console: Console, text: str) -> None:
    """Print a heading after an empty line."""
    console.print()
    say(console, text, style="bold")


def say(console: Console, text: str, style: str = "") -> None:
    """Print a sentence as it is: names may contain brackets."""
    print_text(console, Text(text, style=style))


def print_text(console: Console, text: Text) -> None:
    """Print text that folds at the console's width."""
    console.print(text, highlight=False, overflow="fold")
