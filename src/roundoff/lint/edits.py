"""Edits for fixes: pieces of text that are replaced, whole lines that come or move."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Sequence

from roundoff.lint.rule import Edit
from roundoff.lint.script import Script

_REST_OF_LINE = re.compile(rb"[ \t]*(?:#[^\r\n]*)?(?=\r|\n|$)")

_EMPTY_REST = re.compile(rb"[ \t]*(?:\r\n|\r|\n)")


def replaced(script: Script, node: ast.AST, text: str) -> Edit:
    """Return the edit that puts a text in place of a node."""
    start, end = script.span(node)
    return Edit(start, end, text)


def line_before(script: Script, statement: ast.stmt, text: str) -> tuple[Edit, ...]:
    """Return the edit that puts a line in front of a statement; none where that is not safe."""
    start = script.span(statement)[0]
    indent = _indent(script, start)
    if indent is None:
        return ()
    return (Edit(start, start, f"{text}{_line_end(script)}{indent}"),)


def line_after(script: Script, statement: ast.stmt, text: str) -> tuple[Edit, ...]:
    """Return the edit that puts a line behind a statement; none where that is not safe."""
    start, end = script.span(statement)
    indent = _indent(script, start)
    rest = _REST_OF_LINE.match(script.source, end)
    if indent is None or rest is None:
        return ()
    return (Edit(rest.end(), rest.end(), f"{_line_end(script)}{indent}{text}"),)


def line_removed(script: Script, statement: ast.stmt) -> tuple[Edit, ...]:
    """Return the edit that takes a statement out with its line; none where other code or a
    comment shares the line, or where it is the only statement of its block.
    """
    start, end = script.span(statement)
    indent = _indent(script, start)
    rest = _EMPTY_REST.match(script.source, end)
    holder = script.parent(statement)
    block = getattr(holder, "body", [])
    if indent is None or rest is None or len(block) < 2 or statement not in block:
        return ()
    return (Edit(start - len(indent), rest.end(), ""),)


def moved_out(script: Script, statements: Sequence[ast.stmt]) -> tuple[Edit, ...]:
    """Return the edits that take the last statements of a block out of it.

    None where a text goes over several lines, or statements share a line.
    """
    holder = script.parent(statements[0])
    if not isinstance(holder, ast.stmt):
        return ()
    outer = _indent(script, script.span(holder)[0])
    inner = _indent(script, script.span(statements[0])[0])
    last = script.span(statements[-1])[1]
    rest = _REST_OF_LINE.match(script.source, last)
    if outer is None or inner is None or rest is None or _has_long_text(statements):
        return ()
    first_line = statements[0].lineno
    last_line = statements[-1].end_lineno or first_line
    return tuple(_indented_anew(script, range(first_line, last_line + 1), inner, outer))


def _indented_anew(
    script: Script, lines: Iterable[int], before: str, after: str
) -> Iterator[Edit]:
    """Yield the edits that give other blanks to the lines that begin with some."""
    for line in lines:
        start = script.offset(line, 0)
        if script.source[start : start + len(before)].decode() == before:
            yield Edit(start, start + len(before), after)


def _has_long_text(statements: Sequence[ast.stmt]) -> bool:
    """Return True where a text goes over several lines: its blanks count."""
    return any(
        isinstance(node, ast.Constant | ast.JoinedStr)
        and node.end_lineno != node.lineno
        for statement in statements
        for node in ast.walk(statement)
    )


def _indent(script: Script, start: int) -> str | None:
    """Return the blanks in front of a statement; None where something else stands there."""
    before = re.split(rb"[\r\n]", script.source[:start])[-1]
    return before.decode() if not before.strip() else None


def _line_end(script: Script) -> str:
    if b"\r\n" in script.source:
        return "\r\n"
    return "\r" if b"\r" in script.source else "\n"
