"""A script as rules read it: its tree, and what its names stand for.

A script is read with Python's own parser: its positions are exact, and it takes a tenth
of the time of one that keeps blanks and comments. Fixes replace pieces of the text, so
that everything else stays as it was written.
"""

from __future__ import annotations

import ast
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, overload

from roundoff.lint.imports import canonical, imported_names

if TYPE_CHECKING:
    from roundoff.lint.events import Loop
    from roundoff.lint.flow import Trace
    from roundoff.lint.things import Things

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
Node = TypeVar("Node", bound=ast.AST)
Other = TypeVar("Other", bound=ast.AST)
Third = TypeVar("Third", bound=ast.AST)
_SCOPES = (
    ast.Module,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
    ast.ClassDef,
)
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_LINE_ENDS = re.compile(rb"\r\n|\r|\n")


@dataclass(frozen=True)
class Binding:
    """A place where a name gets a value.

    ``value`` is the expression it gets, ``element`` its place where the expression is
    unpacked; ``value`` is None for parameters, imports, functions and classes.
    """

    statement: ast.AST
    value: ast.expr | None
    element: int | None = None
    is_loop: bool = False


class Script:
    """The tree of a script, indexed.

    Args:
        text: the script. Raises ``SyntaxError`` and ``ValueError`` where it is no Python.
        path: what to call it.
    """

    def __init__(self, text: str, path: str = "<script>") -> None:
        self.text = text
        self.path = path
        self.tree = ast.parse(text)
        self.parents: dict[ast.AST, ast.AST] = {}
        self._by_type: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
        self._children: dict[ast.AST, list[ast.AST]] = {}
        self._scopes: dict[ast.AST, Scope] = {}
        self._homes: dict[tuple[Scope, str], ast.AST | None] = {}
        self._definitions: dict[ast.AST, ast.expr | None] = {}
        self._index()
        imports = [*self.nodes(ast.Import), *self.nodes(ast.ImportFrom)]
        self.imports = imported_names(imports)

    def _index(self) -> None:
        """Note parents, children, scopes and types of all nodes, in the order of the text."""
        waiting: list[tuple[ast.AST, Scope]] = [(self.tree, self.tree)]
        while waiting:
            node, scope = waiting.pop()
            self._by_type[type(node)].append(node)
            self._scopes[node] = scope
            inner = node if isinstance(node, _SCOPES) else scope
            children = _children(node)
            self._children[node] = children
            for child in reversed(children):
                self.parents[child] = node
                waiting.append((child, inner))

    # -- the tree ----------------------------------------------------------------------

    @overload
    def nodes(self, kind: type[Node], /) -> list[Node]: ...
    @overload
    def nodes(self, kind: type[Node], other: type[Other], /) -> list[Node | Other]: ...
    @overload
    def nodes(
        self, kind: type[Node], other: type[Other], third: type[Third], /
    ) -> list[Node | Other | Third]: ...
    def nodes(self, *types: type[ast.AST]) -> list[Any]:
        """Return the nodes of these types, in the order of the text for each type."""
        return [node for kind in types for node in self._by_type.get(kind, ())]

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node that holds this one; None for the module."""
        return self.parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around this one, the nearest first."""
        above = self.parents.get(node)
        while above is not None:
            yield above
            above = self.parents.get(above)

    def enclosing(self, node: ast.AST, *types: type[Node]) -> Node | None:
        """Return the nearest node of these types around this one, in the same function."""
        for above in self.ancestors(node):
            if isinstance(above, types):
                return above
            if isinstance(above, _SCOPES):
                return None
        return None

    def scope(self, node: ast.AST) -> Scope:
        """Return the function, class or module that a node stands in."""
        return self._scopes[node]

    def children(self, node: ast.AST) -> list[ast.AST]:
        """Return the parts of a node in the order of the text, but for operators."""
        return self._children.get(node, [])

    def class_of(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class that a method's code stands in."""
        for above in self.ancestors(node):
            if isinstance(above, ast.ClassDef):
                return above
        return None

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node is part of."""
        while not isinstance(node, ast.stmt):
            node = self.parents[node]
        return node

    def in_loop(self, node: ast.AST) -> ast.AST | None:
        """Return the loop of the same function that runs a node more than once."""
        inner = node
        for above in self.ancestors(node):
            is_loop = isinstance(above, ast.For | ast.AsyncFor | ast.While)
            if is_loop and inner is not getattr(above, "iter", None):
                return above
            if isinstance(above, _SCOPES):
                return None
            inner = above
        return None

    # -- names -------------------------------------------------------------------------

    def uses(self, framework: str) -> bool:
        """Return True where the script imports a framework or a part of one."""
        return any(
            target == framework or target.startswith(framework + ".")
            for target in self.imports.values()
        )

    def qualified(self, node: ast.AST | None) -> str | None:
        """Return the dotted name that an expression stands for by the script's imports.

        >>> script = Script("from torch.nn import functional as F; y = F.softmax(x, -1)")
        >>> script.qualified(script.nodes(ast.Call)[0].func)
        'torch.nn.functional.softmax'
        """
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        target = self.imports.get(node.id)
        if target is None or self._is_shadowed(node):
            return None
        return canonical(".".join([target, *reversed(parts)]))

    def _is_shadowed(self, name: ast.Name) -> bool:
        """Return True where a function gives an imported name a value of its own."""
        for above in self.ancestors(name):
            if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                bindings = self.bindings(above).get(name.id, ())
                if any(not _is_import(each.statement) for each in bindings):
                    return True
        return False

    def called(self, call: ast.AST) -> str | None:
        """Return the dotted name of what a call calls; None for other nodes."""
        return self._called.get(call)

    @cached_property
    def _called(self) -> dict[ast.AST, str]:
        named = {}
        for call in self.nodes(ast.Call):
            name = self.qualified(call.func)
            if name is not None:
                named[call] = name
        return named  # type: ignore[return-value]

    @cached_property
    def _calls_by_name(self) -> dict[str, list[ast.Call]]:
        calls: dict[str, list[ast.Call]] = defaultdict(list)
        for call, name in self._called.items():
            calls[name].append(call)  # type: ignore[arg-type]
        return calls

    def calls(self, *names: str) -> list[ast.Call]:
        """Return the calls of functions and classes by their dotted names."""
        return [call for name in names for call in self._calls_by_name.get(name, ())]

    @cached_property
    def _methods_by_name(self) -> dict[str, list[ast.Call]]:
        calls: dict[str, list[ast.Call]] = defaultdict(list)
        for call in self.nodes(ast.Call):
            if isinstance(call.func, ast.Attribute) and call not in self._called:
                calls[call.func.attr].append(call)
        return calls

    def method_calls(self, *names: str) -> list[ast.Call]:
        """Return the calls ``x.name(...)`` where ``x`` is no imported module."""
        return [call for name in names for call in self._methods_by_name.get(name, ())]

    # -- definitions -------------------------------------------------------------------

    @cached_property
    def _bindings(self) -> dict[ast.AST, dict[str, list[Binding]]]:
        from roundoff.lint.bindings import all_bindings

        return all_bindings(self)

    def bindings(self, scope: ast.AST) -> dict[str, list[Binding]]:
        """Return where the names of a scope get their values, in the order of the text.

        Those of a class are its body's names, and ``self.name`` of all its methods.
        """
        return self._bindings.get(scope, {})

    def home(self, name: ast.Name) -> ast.AST | None:
        """Return the scope that a name belongs to; None for what the script never binds."""
        key = (self._scopes[name], name.id)
        if key not in self._homes:
            self._homes[key] = self._home(*key)
        return self._homes[key]

    def _home(self, scope: Scope, name: str) -> ast.AST | None:
        inner: Scope | None = scope
        while inner is not None:
            skipped = isinstance(inner, ast.ClassDef) and inner is not scope
            if not skipped and name in self.bindings(inner):
                return inner
            inner = None if inner is self.tree else self._scopes[inner]
        return None

    def definition(self, node: ast.AST) -> ast.expr | None:
        """Return the one expression that a name or ``self.name`` holds at this place.

        None where that depends on a branch, on what a loop did before, or on a caller.

        >>> script = Script("p = softmax(x); y = log(p)")
        >>> ast.unparse(script.definition(script.nodes(ast.Call)[1].args[0]))
        'softmax(x)'
        """
        from roundoff.lint.bindings import definition_at

        if node not in self._definitions:
            self._definitions[node] = definition_at(self, node)
        return self._definitions[node]

    def function_of(self, call: ast.Call) -> Function | None:
        """Return the function of this script that a call calls: by name or as a method."""
        return self.things.function_of(call)

    @cached_property
    def things(self) -> Things:
        """What the names of the script are: optimizer, scaler, model, loss …"""
        from roundoff.lint.things import Things

        return Things(self)

    @cached_property
    def traces(self) -> list[Trace]:
        """The walks through the script on which ``loops`` and ``programs`` rest."""
        from roundoff.lint.flow import traces

        return traces(self)

    @cached_property
    def programs(self) -> tuple[Loop, ...]:
        """The module, and each function that nothing in it calls: all of their events.

        ``Event.loops`` names every loop around an event there.
        """
        from roundoff.lint.flow import programs

        return programs(self)

    @cached_property
    def loops(self) -> tuple[Loop, ...]:
        """The training loops: what each does, in order; see ``events.py``."""
        from roundoff.lint.flow import training_loops

        return training_loops(self)

    # -- text --------------------------------------------------------------------------

    @cached_property
    def source(self) -> bytes:
        """The text as UTF-8, in which spans count."""
        return self.text.encode()

    @cached_property
    def _line_starts(self) -> list[int]:
        return [0, *(match.end() for match in _LINE_ENDS.finditer(self.source))]

    def offset(self, line: int, column: int) -> int:
        """Return the offset of a position of the tree in ``source``."""
        return self._line_starts[line - 1] + column

    def position(self, offset: int) -> tuple[int, int]:
        """Return the line and the column of an offset, in characters, both from 1."""
        line = bisect_right(self._line_starts, offset)
        start = self._line_starts[line - 1]
        return line, len(self.source[start:offset].decode()) + 1

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return where a node begins and ends in ``source``."""
        start = self.offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]
        end = self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]
        return start, end

    def segment(self, node: ast.AST) -> str:
        """Return the text of a node as it was written."""
        start, end = self.span(node)
        return self.source[start:end].decode()


#: Contexts and operators are one object for the whole tree.
_SHARED = (ast.expr_context, ast.operator, ast.unaryop, ast.cmpop, ast.boolop)


def _children(node: ast.AST) -> list[ast.AST]:
    children: list[ast.AST] = []
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            children += [each for each in value if isinstance(each, ast.AST)]
        elif isinstance(value, ast.AST):
            children.append(value)
    return [each for each in children if not isinstance(each, _SHARED)]


def _is_import(statement: ast.AST) -> bool:
    return isinstance(statement, ast.Import | ast.ImportFrom)


def block_of(script: Script, statement: ast.stmt) -> list[ast.stmt]:
    """Return the list of statements that a statement stands in."""
    above = script.parent(statement)
    for name in _BLOCKS:
        block = getattr(above, name, None)
        if isinstance(block, list) and statement in block:
            return block
    return [statement]
