"""Expressions over tensors as rules read them: one form for functions and methods."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from roundoff.lint.bindings import is_self
from roundoff.lint.script import Binding, Script
from roundoff.lint.things import argument_for
from roundoff.ops import operators_that

_TENSOR_MODULES = (
    "torch.",
    "torch.nn.functional.",
    "torch.special.",
    "torch.linalg.",
    "torch.Tensor.",
)
#: Methods of tensors that other objects have too, and with how many arguments tensors do.
_MOST_ARGUMENTS = dict.fromkeys(("log", "exp", "sqrt"), 0) | dict.fromkeys(
    ("cos", "acos", "asin"), 0
)
#: Operators that hand on values as they are, or some of them.
SAME_VALUES = frozenset[str]().union(
    operators_that("keep values"),
    operators_that("cast"),
    operators_that("reshape"),
    operators_that("permute axes"),
    operators_that("reorder"),
    operators_that("cut out"),
    operators_that("expand"),
    operators_that("repeat"),
)
_DEEPEST = 12


@dataclass(frozen=True, eq=False)
class Operation:
    """A call of an operator: ``torch.log(x)`` and ``x.log()`` are both ``log`` of ``x``."""

    name: str
    call: ast.Call
    operands: tuple[ast.expr, ...]

    @property
    def first(self) -> ast.expr | None:
        """The first operand."""
        return self.operands[0] if self.operands else None

    def keyword(self, name: str) -> ast.expr | None:
        """Return the value of a named argument."""
        return keyword_of(self.call, name)


def keyword_of(call: ast.Call, name: str) -> ast.expr | None:
    """Return the value of a named argument of a call."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    return None


def operation(script: Script, node: ast.AST | None) -> Operation | None:
    """Return the operator that a call applies; None for anything else.

    >>> script = Script("import torch; a = torch.log(x); b = x.log()")
    >>> [operation(script, call).name for call in script.nodes(ast.Call)]
    ['log', 'log']
    """
    if not isinstance(node, ast.Call):
        return None
    name = script.called(node)
    if name is not None:
        return _of_function(node, name)
    function = node.func
    if not isinstance(function, ast.Attribute) or script.qualified(function):
        return None
    if len(node.args) > _MOST_ARGUMENTS.get(function.attr, len(node.args)):
        return None
    if script.function_of(node) is not None:
        return None
    return Operation(function.attr, node, (function.value, *node.args))


def _of_function(call: ast.Call, name: str) -> Operation | None:
    module, _, last = name.rpartition(".")
    if module + "." not in _TENSOR_MODULES:
        return None
    operands = list(call.args)
    if not operands:
        operands = [each.value for each in call.keywords if each.arg in _INPUTS]
    return Operation(last, call, tuple(operands))


_INPUTS = ("input", "self", "x")


def operations(script: Script, *names: str) -> Iterator[Operation]:
    """Yield the calls of operators by these names, in the order of the text."""
    for call in script.nodes(ast.Call):
        if last_part(call) in names:
            each = operation(script, call)
            if each is not None and each.name in names:
                yield each


def last_part(call: ast.Call) -> str | None:
    """Return the last part of the name that a call calls, as it is written."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else None


def value_of(script: Script, node: ast.expr | None) -> ast.expr | None:
    """Return what an expression is, with names replaced by the one value they hold."""
    for _ in range(_DEEPEST):
        if not isinstance(node, ast.Name | ast.Attribute):
            break
        definition = script.definition(node)
        if definition is None:
            break
        node = definition
    return node


def without_views(script: Script, node: ast.expr | None) -> ast.expr | None:
    """Return the expression that made the values: names, indices and views taken off."""
    for _ in range(_DEEPEST):
        node = value_of(script, node)
        if isinstance(node, ast.Subscript):
            node = node.value
            continue
        each = operation(script, node)
        if each is None or each.name not in SAME_VALUES:
            break
        node = each.first
    return node


def sources(script: Script, node: ast.expr | None) -> list[tuple[ast.expr, int | None]]:
    """Return what a name or ``self.name`` may hold: each value, and its place where it is
    one of several. Empty where something else than this script decides it.

    The parameters of a function stand for what its callers in the script pass.
    """
    if node is None:
        return []
    if not isinstance(node, ast.Name | ast.Attribute):
        return [(node, None)]
    definition = script.definition(node)
    if definition is not None:
        return [(definition, None)]
    bindings = _bindings(script, node)
    values: list[tuple[ast.expr, int | None]] = []
    for binding in bindings:
        several = _of_binding(script, binding)
        if not several:
            return []
        values += several
    return values


def _bindings(script: Script, node: ast.Name | ast.Attribute) -> list[Binding]:
    if isinstance(node, ast.Name):
        home = script.home(node)
        if home is None:
            return []
        bindings = script.bindings(home)[node.id]
        if script.scope(node) is not home:
            return bindings
        above = [each for each in bindings if each.statement.lineno <= node.lineno]  # type: ignore[attr-defined]
        return [each for each in above if each.statement is not script.statement(node)]
    holder = script.class_of(node)
    if holder is None or not is_self(node.value):
        return []
    return script.bindings(holder).get(node.attr, [])


def _of_binding(script: Script, binding: Binding) -> list[tuple[ast.expr, int | None]]:
    if binding.is_loop:
        return []
    if binding.value is not None:
        return [(binding.value, binding.element)]
    parameter = binding.statement
    if not isinstance(parameter, ast.arg):
        return []
    function = script.scope(parameter)
    calls = script.things.callers().get(function, [])
    passed = [argument_for(function, parameter.arg, call) for call in calls]
    return [(each, None) for each in passed if each is not None]


def number(node: ast.AST | None) -> float | None:
    """Return the number that is written here; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "float" and node.args:
        return _infinity(node.args[0])
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return float(node.value)  # type: ignore[arg-type]
    return None


def _infinity(node: ast.expr) -> float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value.strip().lower()
        if text in ("inf", "+inf", "infinity", "-inf", "-infinity"):
            return float(text)
    return None


def is_number(node: ast.AST, value: float) -> bool:
    """Return True where this number is written here."""
    return number(node) == value


def same_text(first: ast.AST, second: ast.AST) -> bool:
    """Return True where two expressions are written alike."""
    return ast.dump(first) == ast.dump(second)


def is_added(node: ast.AST | None) -> bool:
    """Return True for a sum of which one part is a small number or is called eps."""
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add):
        return False
    return any(_is_eps(part) for part in (node.left, node.right))


def _is_eps(node: ast.expr) -> bool:
    value = number(node)
    if value is not None:
        return 0 < value <= 1
    name = ast.unparse(node).lower()
    return "eps" in name or "smooth" in name or "delta" in name or "tiny" in name
