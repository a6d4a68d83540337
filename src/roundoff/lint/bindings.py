"""Where names get their values, and which value a name holds at a place."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from roundoff.lint.script import Binding, Script

_Table = dict[ast.AST, dict[str, list[Binding]]]


def all_bindings(script: Script) -> _Table:
    """Return the bindings of every scope, in the order of the text."""
    table: _Table = defaultdict(lambda: defaultdict(list))
    for scope, name, statement in _declared(script):
        table[scope][name].append(Binding(statement, None))
    for target, binding in _assigned(script):
        _bind(script, table, target, binding)
    _follow_declarations(script, table)
    for names in table.values():
        for bindings in names.values():
            bindings.sort(key=lambda each: _position(each.statement))
    return {scope: dict(names) for scope, names in table.items()}


def _declared(script: Script) -> Iterator[tuple[ast.AST, str, ast.AST]]:
    """Yield the scope, name and node of each parameter, function, class and import."""
    for function in script.nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda):
        for parameter in _parameters(function.args):
            yield function, parameter.arg, parameter
    for definition in script.nodes(ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef):
        yield script.scope(definition), definition.name, definition
    for statement in script.nodes(ast.Import, ast.ImportFrom):
        for alias in statement.names:
            name = alias.asname or alias.name.partition(".")[0]
            yield script.scope(statement), name, statement


def _parameters(arguments: ast.arguments) -> list[ast.arg]:
    several = [arguments.vararg, arguments.kwarg]
    return [
        *arguments.posonlyargs,
        *arguments.args,
        *arguments.kwonlyargs,
        *(each for each in several if each is not None),
    ]


def _assigned(script: Script) -> Iterator[tuple[ast.expr, Binding]]:
    for assign in script.nodes(ast.Assign):
        for target in assign.targets:
            yield target, Binding(assign, assign.value)
    for annotated in script.nodes(ast.AnnAssign):
        yield annotated.target, Binding(annotated, annotated.value)
    for augmented in script.nodes(ast.AugAssign):
        yield augmented.target, Binding(augmented, None)
    for named in script.nodes(ast.NamedExpr):
        yield named.target, Binding(named, named.value)
    for loop in script.nodes(ast.For, ast.AsyncFor):
        yield loop.target, Binding(loop, loop.iter, is_loop=True)
    for each in script.nodes(ast.comprehension):
        yield each.target, Binding(each.target, each.iter, is_loop=True)
    for item in script.nodes(ast.withitem):
        if item.optional_vars is not None:
            yield item.optional_vars, Binding(item.optional_vars, item.context_expr)


def _bind(script: Script, table: _Table, target: ast.expr, binding: Binding) -> None:
    if isinstance(target, ast.Tuple | ast.List):
        _bind_each(script, table, target.elts, binding)
    elif isinstance(target, ast.Starred):
        _bind(script, table, target.value, Binding(binding.statement, None))
    elif isinstance(target, ast.Name):
        table[script.scope(target)][target.id].append(binding)
    elif isinstance(target, ast.Attribute) and is_self(target.value):
        holder = script.class_of(target)
        if holder is not None:
            table[holder][target.attr].append(binding)


def _bind_each(
    script: Script, table: _Table, targets: list[ast.expr], binding: Binding
) -> None:
    """Bind what an unpacking assignment names."""
    value = binding.value
    values = value.elts if isinstance(value, ast.Tuple | ast.List) else None
    pairs = values is not None and len(values) == len(targets) and not binding.is_loop
    for place, target in enumerate(targets):
        if pairs and values is not None:
            part = Binding(binding.statement, values[place])
        else:
            part = Binding(binding.statement, value, place, binding.is_loop)
        _bind(script, table, target, part)


def is_self(node: ast.AST) -> bool:
    """Return True for the first parameter of a method, mostly ``self``."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _follow_declarations(script: Script, table: _Table) -> None:
    """Move what ``global`` names bind to the module."""
    for statement in script.nodes(ast.Global):
        scope = script.scope(statement)
        for name in statement.names:
            moved = table[scope].pop(name, [])
            table[script.tree][name].extend(moved)


def _position(node: ast.AST) -> tuple[int, int]:
    return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)


def definition_at(script: Script, node: ast.AST) -> ast.expr | None:
    """Return the one expression that a name or ``self.name`` holds; None where unsure."""
    if isinstance(node, ast.Name):
        home = script.home(node)
        if home is None:
            return None
        bindings = script.bindings(home)[node.id]
        same_function = script.scope(node) is home
        return _reaching(script, node, bindings) if same_function else _only(bindings)
    if isinstance(node, ast.Attribute) and is_self(node.value):
        holder = script.class_of(node)
        if holder is not None:
            return _only(script.bindings(holder).get(node.attr, []))
    return None


def _only(bindings: list[Binding]) -> ast.expr | None:
    if len(bindings) != 1:
        return None
    (binding,) = bindings
    return None if binding.element is not None or binding.is_loop else binding.value


def _reaching(script: Script, use: ast.AST, bindings: list[Binding]) -> ast.expr | None:
    """Return the value of the nearest binding above that is on every path to a use."""
    nearest = _nearest_above(script, use, bindings)
    if nearest is None or nearest.element is not None or nearest.is_loop:
        return None
    is_certain = _runs_before(script, nearest.statement, use)
    if not is_certain or _comes_round(script, use, nearest, bindings):
        return None
    return nearest.value


def _nearest_above(
    script: Script, use: ast.AST, bindings: list[Binding]
) -> Binding | None:
    """Return the last of some bindings that stands above the statement of a use."""
    place = _position(use)
    statement = script.statement(use)
    above = [
        each
        for each in bindings
        if _position(each.statement) < place and each.statement is not statement
    ]
    return above[-1] if above else None


def _runs_before(script: Script, statement: ast.AST, use: ast.AST) -> bool:
    """Return True for a statement above a use that is on every path to it."""
    blocks = {id(parent) for parent in script.ancestors(use)}
    outermost = _outside_contexts(script, statement, blocks)
    is_around = id(script.parent(outermost)) in blocks
    return is_around and not _in_other_branch(script, outermost, use)


def _outside_contexts(script: Script, node: ast.AST, blocks: set[int]) -> ast.AST:
    """Return the ``with`` statements around a node that a use is behind: they run always."""
    above = script.parent(node)
    while isinstance(above, ast.With | ast.AsyncWith) and id(above) not in blocks:
        node = above
        above = script.parent(node)
    return node


def _comes_round(
    script: Script, use: ast.AST, nearest: Binding, bindings: list[Binding]
) -> bool:
    """Return True where a loop gives the name another value before it is used again."""
    loop = script.in_loop(use)
    while loop is not None:
        around = set(map(id, script.ancestors(nearest.statement)))
        if id(loop) in around:
            return False
        if any(
            loop in script.ancestors(each.statement)
            for each in bindings
            if each is not nearest
        ):
            return True
        loop = script.in_loop(loop)
    return False


def _in_other_branch(script: Script, first: ast.AST, second: ast.AST) -> bool:
    """Return True where two nodes stand in different blocks of one statement."""
    holder = script.parent(first)
    if holder is None:
        return False
    inner = second
    for above in script.ancestors(second):
        if above is holder:
            break
        inner = above
    for name in ("body", "orelse", "finalbody"):
        block = getattr(holder, name, None)
        if isinstance(block, list) and first in block:
            return inner not in block
    return False
