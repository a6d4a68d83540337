"""Names of a script: which are free, what torch is called, what is visible where."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from roundoff.lint import Script
from roundoff.migrate.text_edits import TextEdits


def free_name(script: Script, candidates: Iterable[str]) -> str:
    """Return the first of these names that the script uses for nothing; with a number
    behind it where it uses all of them.
    """
    used = _used_names(script)
    names = list(candidates)
    for name in names:
        if name not in used:
            return name
    number = 2
    while f"{names[0]}_{number}" in used:
        number += 1
    return f"{names[0]}_{number}"


def _used_names(script: Script) -> set[str]:
    used = {node.id for node in script.nodes(ast.Name)}
    used |= {node.attr for node in script.nodes(ast.Attribute)}
    used |= {node.arg for node in script.nodes(ast.arg)}
    return used | set(script.imports)


def imported_as(script: Script, module: str) -> str | None:
    """Return the name that a module has in the script; None where it is not imported."""
    for name, target in script.imports.items():
        if target == module:
            return name
    return None


def add_import(script: Script, edits: TextEdits, line: str, reason: str) -> None:
    """Insert an import behind the last one at the head of the script."""
    last: ast.stmt | None = None
    for statement in script.tree.body:
        is_import = isinstance(statement, ast.Import | ast.ImportFrom)
        is_text = isinstance(statement, ast.Expr) and isinstance(
            statement.value, ast.Constant
        )
        if is_import or (is_text and last is None):
            last = statement
        elif not is_text:
            break
    if last is None:
        edits.before(script.tree.body[0], [line], reason)
    else:
        edits.after(last, [line], reason)


def root_name(node: ast.AST | None) -> ast.Name | None:
    """Return the name at the bottom of ``a.b[0].c()``; None for anything else."""
    while node is not None and not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return None
    return node


def scopes_around(script: Script, node: ast.AST) -> Iterator[ast.AST]:
    """Yield the functions around a node, the innermost first, and the module."""
    for above in script.ancestors(node):
        if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
            yield above


def is_visible(script: Script, expression: ast.AST, place: ast.AST) -> bool:
    """Return True where an expression means at a place what it means where it stands."""
    name = root_name(expression)
    if name is None:
        return isinstance(expression, ast.Constant)
    if name.id == "self":
        return script.class_of(place) is script.class_of(expression)
    if name.id in script.imports:
        return True
    home = script.home(name)
    if home is None or home not in scopes_around(script, place):
        return False
    if script.scope(place) is not home:
        return True
    first = script.bindings(home)[name.id][0].statement
    return isinstance(first, ast.arg) or _line(first) < _line(place)


def _line(node: ast.AST) -> int:
    return getattr(node, "lineno", 0)


def calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls of a statement, those of functions that it defines left out."""
    waiting = [node]
    while waiting:
        inner = waiting.pop()
        if isinstance(inner, ast.Call):
            yield inner
        for child in ast.iter_child_nodes(inner):
            is_scope = isinstance(
                child,
                ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda,
            )
            if not is_scope:
                waiting.append(child)
