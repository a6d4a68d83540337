"""Tables and sentences on a terminal of any width: numbers are never cut.

What is printed may be of somebody else's file: see ``HarmlessConsole``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

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

    Only the columns named in ``prose`` wrap; cells that are broken into lines stay so (see
    ``names.wrap``). ``styles`` has a style for each row.
    """
    fixed = {
        name: ["x" * PROSE_LEAST] if name in prose else cells
        for name, cells in columns.items()
    }
    # rich's divider, and a space on either side
    gap = 3 if table_width(fixed, 3) <= console.width else 1
    needed = table_width(fixed, gap)
    has_bold_header = bool(prose) or styles is None
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, gap // 2),
        pad_edge=False,
        show_edge=False,
        header_style="bold" if has_bold_header else "",
        width=None if needed <= console.width else needed,
    )
    for name in columns:
        table.add_column(
            Text(name),
            justify="left" if name in LEFT_ALIGNED else "right",
            no_wrap=name not in prose,
            overflow="fold",
            min_width=_cell_width(name, fixed[name]),
        )
    for index, values in enumerate(zip(*columns.values(), strict=True)):
        cells = [Text(visible(value)) for value in values]
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
