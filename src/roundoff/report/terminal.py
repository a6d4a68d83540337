"""Tables and sentences on a terminal of any width: numbers are never cut.

What is printed may be of somebody else's file: see ``HarmlessConsole``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from roundoff.foreign import visible

#: Cells of each column, by heading.
Columns = Mapping[str, Sequence[str]]

#: Fewest characters of a column of names, and of a column that wraps.
SITE_LEAST = 16
PROSE_LEAST = 12
LEFT_ALIGNED = frozenset(
    "site|format|plan|operator|plan runs|reason|for example|then|phase|dtype|line|event|verdict|looks like|status|from|"
    "counterpart|configuration|note|file|what|step|observer|formats|name|at".split("|")
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


def table_width(columns: Columns, gap: int) -> int:
    """Return the columns of the terminal that a table takes.

    A heading without cells takes nothing itself.
    """
    widths = [_cell_width(name, cells) for name, cells in columns.items() if cells]
    return sum(widths) + gap * (len(columns) - 1)


def _cell_width(heading: str, cells: Sequence[str]) -> int:
    lines = [line for cell in cells for line in cell.split("\n")]
    return max(map(cell_len, [heading, *lines]))


def print_table(
    console: Console,
    columns: Columns,
    *,
    prose: Collection[str] = (),
    styles: Sequence[str] | None = None,
) -> None:
    """Print a table whose numbers keep their width, whatever the console's.

    The columns named in ``prose`` wrap; where the table is wider than the console, all
    columns of text do. What is wider still goes on below, the first column repeated.
    Cells that are broken into lines stay so (see ``names.wrap``). ``styles`` has a style
    for each row.
    """
    folding = set(prose)
    if table_width(_narrowed(columns, folding), 1) > console.width:
        folding |= LEFT_ALIGNED & columns.keys()
    has_bold_header = bool(prose) or styles is None
    for part in _parts(columns, folding, console.width):
        table = _table(part, folding, console.width, is_bold=has_bold_header)
        for index, values in enumerate(zip(*part.values(), strict=True)):
            cells = [Text(visible(value)) for value in values]
            table.add_row(*cells, style=styles[index] if styles else None)
        console.print(table, crop=False, highlight=False)


def _narrowed(columns: Columns, folding: Collection[str]) -> Columns:
    """Return columns of which those that wrap are as narrow as they may become."""
    return {
        name: _narrow_cells(name, cells) if name in folding else cells
        for name, cells in columns.items()
    }


def _narrow_cells(name: str, cells: Sequence[str]) -> Sequence[str]:
    return ["x" * PROSE_LEAST] if _cell_width(name, cells) > PROSE_LEAST else cells


def _parts(
    columns: Columns, folding: Collection[str], width: int
) -> Iterator[dict[str, Sequence[str]]]:
    """Yield the columns, as many at a time as fit, each time with the first one."""
    [(first, cells), *rest] = columns.items()
    part = {first: cells}
    for name, others in rest:
        wider = {**part, name: others}
        if len(part) > 1 and table_width(_narrowed(wider, folding), 1) > width:
            yield part
            wider = {first: cells, name: others}
        part = wider
    yield part


def _table(
    columns: Columns, folding: Collection[str], width: int, *, is_bold: bool
) -> Table:
    """Return a table without rows that takes its place in a console of this width."""
    narrow = _narrowed(columns, folding)
    # rich's divider, and a space on either side
    gap = 3 if table_width(narrow, 3) <= width else 1
    needed = table_width(narrow, gap)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, gap // 2),
        pad_edge=False,
        show_edge=False,
        header_style="bold" if is_bold else "",
        width=None if needed <= width else needed,
    )
    for name in columns:
        table.add_column(
            Text(name),
            justify="left" if name in LEFT_ALIGNED else "right",
            no_wrap=name not in folding,
            overflow="fold",
            min_width=_cell_width(name, narrow[name]),
        )
    return table


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
