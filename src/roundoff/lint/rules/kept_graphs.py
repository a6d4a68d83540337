"""Losses that are kept over steps together with the graph that made them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from roundoff.lint.modes import is_without_gradients
from roundoff.lint.rule import Edit, Hit
from roundoff.lint.script import Function, Scope, Script
from roundoff.lint.things import argument_for

#: A value is followed so far back.
_DEEPEST = 5


def graph_kept(script: Script) -> Iterator[Hit]:
    """A loss is kept over steps with the graph that made it."""
    for function, losses, feeding in _backward_names(script):
        for node, value, target in _kept(script, function):
            name = _graph_name(value)
            if name is None or name.id not in losses:
                continue
            if ast.unparse(target) in feeding or _is_without_graph(script, node, name):
                continue
            start, end = script.span(value)
            text = script.segment(value)
            text = text if isinstance(value, ast.Name) else f"({text})"
            yield Hit(node, edits=(Edit(start, end, f"{text}.detach()"),))


def _is_without_graph(script: Script, node: ast.AST, name: ast.Name) -> bool:
    """Return True where gradients were off when a value was computed, or are here."""
    if is_without_gradients(script, node):
        return True
    value = script.definition(name)
    for _ in range(_DEEPEST):
        if value is None:
            return False
        if is_without_gradients(script, value):
            return True
        base: ast.expr = value
        while isinstance(base, ast.Attribute | ast.Subscript):
            base = base.value
        value = script.definition(base) if isinstance(base, ast.Name) else None
    return False


def _backward_names(
    script: Script,
) -> Iterator[tuple[ast.AST, set[str], set[str]]]:
    """Yield each function with a backward pass: the losses that go into one, and all the
    names that they are computed from.
    """
    losses: dict[Scope, set[str]] = {}
    for call in script.method_calls("backward", "manual_backward"):
        function = call.func
        if isinstance(function, ast.Attribute):
            names = {*_names_in(function.value), *_names_of(call.args)}
            losses.setdefault(script.scope(call), set()).update(names)
    for statement in script.nodes(ast.Return):
        scope = script.scope(statement)
        name = getattr(scope, "name", "")
        if name == "training_step" and isinstance(statement.value, ast.Name):
            losses.setdefault(scope, set()).add(statement.value.id)
    for scope, names in losses.items():
        yield scope, names, _feeding(script, scope, names)


def _names_of(nodes: list[ast.expr]) -> set[str]:
    return {name for node in nodes for name in _names_in(node)}


def _names_in(node: ast.AST) -> set[str]:
    """Return the names and attributes that an expression reads."""
    return {
        ast.unparse(each)
        for each in ast.walk(node)
        if isinstance(each, ast.Name | ast.Attribute)
    }


def _feeding(script: Script, scope: ast.AST, losses: set[str]) -> set[str]:
    """Return the names that losses are computed from, the losses themselves included."""
    names = set(losses)
    bindings = script.bindings(scope)
    waiting = list(losses)
    while waiting:
        for binding in bindings.get(waiting.pop(), ()):
            parts = set() if binding.value is None else _names_in(binding.value)
            waiting.extend(parts - names)
            names |= parts
    return names


def _kept(
    script: Script, function: ast.AST
) -> Iterator[tuple[ast.stmt | ast.expr, ast.expr, ast.expr]]:
    """Yield what is kept over steps: the node, what is added, and to what."""
    for assign in script.nodes(ast.AugAssign):
        if (
            script.scope(assign) is function
            and isinstance(assign.op, ast.Add)
            and _outlives(script, assign)
        ):
            yield assign, assign.value, assign.target
    yield from _appended(script, function)
    yield from _averaged(script, function)
    yield from _handed_on(script, function)


def _appended(
    script: Script, function: ast.AST
) -> Iterator[tuple[ast.stmt | ast.expr, ast.expr, ast.expr]]:
    """Yield what goes into lists: ``losses.append(loss)``."""
    for call in script.method_calls("append"):
        if script.scope(call) is not function or len(call.args) != 1:
            continue
        holder = call.func.value if isinstance(call.func, ast.Attribute) else None
        is_kept = _outlives(script, call) or isinstance(holder, ast.Attribute)
        if holder is not None and is_kept:
            yield call, call.args[0], holder


def _averaged(
    script: Script, function: ast.AST
) -> Iterator[tuple[ast.stmt | ast.expr, ast.expr, ast.expr]]:
    """Yield what ``mean = 0.9 * mean + 0.1 * loss`` adds to what it holds."""
    for assign in script.nodes(ast.Assign):
        if script.scope(assign) is not function or not _outlives(script, assign):
            continue
        target = assign.targets[0]
        for value in _outcomes_of(assign.value):
            if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Add):
                continue
            sides = (value.left, value.right)
            added = [side for side in sides if not _mentions(side, target)]
            if len(added) == 1:
                yield assign, added[0], target


def _outcomes_of(value: ast.expr) -> list[ast.expr]:
    return [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]


def _mentions(node: ast.expr, target: ast.expr) -> bool:
    """Return True where an expression reads what is assigned."""
    text = ast.unparse(target)
    return any(ast.unparse(each) == text for each in ast.walk(node))


def _handed_on(
    script: Script, function: ast.AST
) -> Iterator[tuple[ast.stmt | ast.expr, ast.expr, ast.expr]]:
    """Yield what a method of the script adds to an object: ``meter.update(loss)``."""
    for call in script.nodes(ast.Call):
        if script.scope(call) is not function or not _outlives(script, call):
            continue
        method = script.function_of(call)
        if method is None or script.class_of(method) is None:
            continue
        for name, target in _added_parameters(script, method):
            argument = argument_for(method, name, call)
            if argument is not None:
                yield call, argument, target


def _added_parameters(
    script: Script, method: Function
) -> Iterator[tuple[str, ast.expr]]:
    """Yield the parameters that a method adds to what its object holds."""
    parameters = {each.arg for each in method.args.args}
    for assign in script.nodes(ast.AugAssign):
        name = _graph_name(assign.value)
        is_kept = isinstance(assign.target, ast.Attribute | ast.Subscript)
        if name is None or not is_kept or script.scope(assign) is not method:
            continue
        if name.id in parameters:
            yield name.id, assign.target


def _outlives(script: Script, node: ast.AST) -> bool:
    return script.in_loop(node) is not None


def _graph_name(value: ast.expr) -> ast.Name | None:
    """Return the name whose graph a value holds: ``loss``, ``loss * n``, ``loss / 4``."""
    if isinstance(value, ast.Name):
        return value
    if not isinstance(value, ast.BinOp):
        return None
    if isinstance(value.op, ast.Mult | ast.Div) and isinstance(value.left, ast.Name):
        return value.left
    is_product = isinstance(value.op, ast.Mult) and isinstance(value.right, ast.Name)
    is_factor = isinstance(value.left, ast.Constant | ast.BinOp)
    return value.right if is_product and is_factor else None  # type: ignore[return-value]
