"""Arguments of a call: taken away, added, read by name or place."""

from __future__ import annotations

import ast

from roundoff.lint import Script
from roundoff.migrate.text_edits import TextEdits


def argument(call: ast.Call, name: str, place: int | None = None) -> ast.expr | None:
    """Return an argument by its name, or by its place; None where it is not passed."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if place is not None and place < len(call.args):
        return call.args[place]
    return None


def keyword_node(call: ast.Call, name: str) -> ast.keyword | None:
    """Return ``name=value`` of a call."""
    return next((each for each in call.keywords if each.arg == name), None)


def add_argument(
    script: Script, edits: TextEdits, call: ast.Call, text: str, reason: str
) -> None:
    """Add an argument behind the last one."""
    _, end = script.span(call)
    inside = [*call.args, *call.keywords]
    if not inside:
        edits.replace_span(end - 1, end - 1, text, reason)
        return
    _, last = script.span(inside[-1])
    last = max(last, *(script.span(each)[1] for each in inside))
    # brackets around the last argument belong to it
    rest = script.source[last : end - 1]
    last += rest.rfind(b")") + 1
    edits.replace_span(last, last, f", {text}", reason)


def remove_keyword(
    script: Script, edits: TextEdits, call: ast.Call, keyword: ast.keyword, reason: str
) -> None:
    """Take ``name=value`` away, with the comma in front of it or behind."""
    inside: list[ast.AST] = sorted([*call.args, *call.keywords], key=script.span)
    place = inside.index(keyword)
    start, end = script.span(keyword)
    if place > 0:
        start = script.span(inside[place - 1])[1]
    elif len(inside) > 1:
        end = script.span(inside[1])[0]
    edits.replace_span(start, end, "", reason)
