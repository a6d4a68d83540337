"""Changes of a script's text by statements of its tree: everything else stays as it was
written, comments and blanks too.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from roundoff.foreign import script_lines
from roundoff.lint import Script
from roundoff.migrate.result import NotUnderstoodError, Remark

_INDENTED = re.compile(r"^([ \t]+)\S", re.MULTILINE)
#: Order of edits at one place: behind a statement, before one, around one, within.
_AFTER, _BEFORE, _HEADER, _INDENT, _WITHIN = range(5)


@dataclass(frozen=True)
class _Edit:
    """``text`` in place of what stands from ``start`` to ``end``, in bytes."""

    start: int
    end: int
    rank: int
    text: str


class TextEdits:
    """Edits of one script, gathered and then made at once.

    Attributes:
        newline: how lines of the script end.
        unit: what one level of its blocks is indented by.
        remarks: the reason of each edit.
    """

    def __init__(self, script: Script) -> None:
        self.script = script
        self.newline = "\r\n" if "\r\n" in script.text else "\n"
        match = _INDENTED.search(_without_strings(script))
        self.unit = match[1] if match else "    "
        self.remarks: set[Remark] = set()
        self._edits: dict[_Edit, None] = {}
        self._kept_lines = _lines_in_strings(script.text)

    # -- what is changed ---------------------------------------------------------------

    def replace(self, node: ast.AST, text: str, reason: str) -> None:
        """Write ``text`` where a node stands."""
        start, end = self.script.span(node)
        self.replace_span(start, end, text, reason)

    def replace_span(self, start: int, end: int, text: str, reason: str) -> None:
        """Write ``text`` in place of a span of bytes; insert it where the span is empty."""
        self._add(_Edit(start, end, _WITHIN, text))
        self._remark(start, reason)

    def before(self, statement: ast.stmt, lines: Iterable[str], reason: str) -> None:
        """Insert lines before a statement, indented as it is."""
        self._check_alone(statement)
        start = self._line_start(_first_line(statement))
        self._add(_Edit(start, start, _BEFORE, self._lines(statement, lines)))
        self._remark(start, reason)

    def after(self, statement: ast.stmt, lines: Iterable[str], reason: str) -> None:
        """Insert lines behind a statement, indented as it is."""
        self._check_alone(statement)
        end = self._behind(statement)
        text = self._lines(statement, lines)
        if end == len(self.script.source) and not self.script.source.endswith(b"\n"):
            text = self.newline + text.removesuffix(self.newline)
        self._add(_Edit(end, end, _AFTER, text))
        self._remark(self.script.span(statement)[0], reason)

    def wrap(self, first: ast.stmt, last: ast.stmt, header: str, reason: str) -> None:
        """Put a line that opens a block before some statements, which are indented."""
        for statement in (first, last):
            self._check_alone(statement)
        begin = _first_line(first)
        start = self._line_start(begin)
        self._add(_Edit(start, start, _HEADER, self._lines(first, [header])))
        for line in range(begin, _last_line(last) + 1):
            offset = self._line_start(line)
            if line not in self._kept_lines and self._has_text(line):
                self._add(_Edit(offset, offset, _INDENT, self.unit))
        self._remark(start, reason)

    def unwrap(self, block: ast.With, reason: str) -> None:
        """Take away the line that opens a block, and one level from its statements."""
        first = block.body[0]
        if first.lineno == block.lineno:
            raise NotUnderstoodError(block.lineno, "a block on the line that opens it")
        start = self._line_start(block.lineno)
        self._add(_Edit(start, self._line_start(_first_line(first)), _WITHIN, ""))
        outer = len(self.indentation(block))
        for line in range(_first_line(first), _last_line(block) + 1):
            offset = self._line_start(line)
            inner = len(self.indentation(first))
            if line not in self._kept_lines and self._has_text(line):
                self._add(_Edit(offset, offset + inner - outer, _INDENT, ""))
        self._remark(start, reason)

    def delete(self, statement: ast.stmt, reason: str) -> None:
        """Take a statement away with its line."""
        self._check_alone(statement)
        start = self._line_start(_first_line(statement))
        self._add(_Edit(start, self._behind(statement), _WITHIN, ""))
        self._remark(start, reason)

    def apply(self) -> str:
        """Return the text with all edits made.

        Raises ``NotUnderstoodError`` where two of them change one place, or where the
        result is no Python.
        """
        source = self.script.source
        parts: list[bytes] = []
        done = 0
        for edit in sorted(self._edits, key=lambda each: (each.start, each.rank)):
            if edit.start < done:
                line, _ = self.script.position(edit.start)
                raise NotUnderstoodError(line, "two changes meet at one place")
            parts += [source[done : edit.start], edit.text.encode()]
            done = edit.end
        parts.append(source[done:])
        text = b"".join(parts).decode()
        try:
            ast.parse(text)
        except SyntaxError as error:
            raise NotUnderstoodError(0, f"the result is no Python: {error}") from error
        return text

    # -- the text ----------------------------------------------------------------------

    def indentation(self, statement: ast.stmt) -> str:
        """Return what stands before a statement on its line."""
        start = self._line_start(_first_line(statement))
        line = self.script.source[start:].split(b"\n", 1)[0].decode()
        return line[: len(line) - len(line.lstrip(" \t"))]

    def is_alone(self, statement: ast.stmt) -> bool:
        """Return True where nothing else stands on the lines of a statement."""
        start = self._line_start(_first_line(statement))
        _, end = self.script.span(statement)
        source = self.script.source
        in_front = source[start : self._start(statement)]
        behind = source[end : self._behind(statement)].strip()
        return not in_front.strip() and (not behind or behind.startswith(b"#"))

    def _check_alone(self, statement: ast.stmt) -> None:
        if not self.is_alone(statement):
            reason = "several statements stand on one line: give each its own"
            raise NotUnderstoodError(statement.lineno, reason)

    def _start(self, statement: ast.stmt) -> int:
        decorators = getattr(statement, "decorator_list", [])
        if decorators:
            return self.script.span(decorators[0])[0] - 1
        return self.script.span(statement)[0]

    def _lines(self, statement: ast.stmt, lines: Iterable[str]) -> str:
        indentation = self.indentation(statement)
        return "".join(f"{indentation}{line}{self.newline}" for line in lines)

    def _line_start(self, line: int) -> int:
        return self.script.offset(line, 0)

    def _behind(self, statement: ast.stmt) -> int:
        """Return where the line behind a statement begins."""
        _, end = self.script.span(statement)
        line_end = self.script.source.find(b"\n", end)
        return len(self.script.source) if line_end < 0 else line_end + 1

    def _has_text(self, line: int) -> bool:
        start = self._line_start(line)
        return bool(self.script.source[start:].split(b"\n", 1)[0].strip())

    def _add(self, edit: _Edit) -> None:
        self._edits[edit] = None

    def _remark(self, offset: int, reason: str) -> None:
        if reason:
            line, _ = self.script.position(offset)
            self.remarks.add(Remark(line, reason))


def _first_line(statement: ast.stmt) -> int:
    decorators: Sequence[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)])


def _last_line(statement: ast.stmt) -> int:
    return statement.end_lineno or statement.lineno


def _lines_in_strings(text: str) -> set[int]:
    """Return the lines that begin inside a string: blanks in front are part of it."""
    lines: set[int] = set()
    opened: list[int] = []
    for token in _tokens(text):
        if token.type == tokenize.STRING:
            lines.update(range(token.start[0] + 1, token.end[0] + 1))
        elif tokenize.tok_name[token.type] == "FSTRING_START":
            opened.append(token.start[0])
        elif tokenize.tok_name[token.type] == "FSTRING_END" and opened:
            lines.update(range(opened.pop() + 1, token.end[0] + 1))
    return lines


def _tokens(text: str) -> list[tokenize.TokenInfo]:
    try:
        return list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (tokenize.TokenError, SyntaxError):  # Python's own parser took it
        return []


def _without_strings(script: Script) -> str:
    """Return the lines that begin outside of strings."""
    inside = _lines_in_strings(script.text)
    lines = script_lines(script.text)
    return "".join(line for number, line in enumerate(lines, 1) if number not in inside)
