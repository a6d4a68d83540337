"""The rules as a plugin of flake8: ``flake8 --select RO train.py``.

flake8 selects codes, reads ``noqa`` and excludes files by its own configuration.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from roundoff.lint.engine import check, parse
from roundoff.lint.rules.table import RULES
from roundoff.packages import installed_version


class Plugin:
    """What flake8 makes for each file. ``tree`` is flake8's own, ``lines`` the text."""

    name = "roundoff"
    version = installed_version()

    def __init__(
        self, tree: ast.AST, lines: Sequence[str], filename: str = "<script>"
    ) -> None:
        self.tree = tree
        self.text = "".join(lines)
        self.filename = filename

    def run(self) -> Iterator[tuple[int, int, str, type[Plugin]]]:
        """Yield line (from 1), column (from 0), text and this class."""
        try:
            places = check(parse(self.text, self.filename), RULES)
        except (ValueError, RecursionError):
            return  # flake8 says so itself
        for each in places:
            finding = each.finding
            text = f"{finding.code} {finding.message}"
            yield finding.line, finding.column - 1, text, type(self)
