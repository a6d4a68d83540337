"""Which calls made the object that a name holds: a layer, a loss, a data set."""

from __future__ import annotations

import ast

from roundoff.lint.containers import part_of
from roundoff.lint.script import Script
from roundoff.lint.tensors import sources, value_of

_DEEPEST = 12
#: Methods of accelerate and Fabric that return what they are given, made ready.
_HAND_ON = ("prepare", "setup", "initialize")
_SAME_OBJECT = frozenset(
    {
        "to",
        "cuda",
        "cpu",
        "train",
        "eval",
        "half",
        "float",
        "bfloat16",
        "double",
        "npu",
        "xpu",
        "apply",
        "share_memory",
        "requires_grad_",
    }
)


def makers(script: Script, node: ast.expr | None, depth: int = 0) -> list[ast.Call]:
    """Return the calls that may have made an object: ``nn.Softmax(dim=1)`` of
    ``self.softmax``. Empty where that is not known.
    """
    if node is None or depth > _DEEPEST:
        return []
    match node:
        case ast.Call():
            return _of_call(script, node, depth)
        case ast.IfExp():
            return _made_by(script, [node.body, node.orelse], None, depth)
        case ast.BoolOp():
            return makers(script, node.values[-1], depth + 1)
        case ast.Subscript():
            return makers(script, _element(script, node), depth + 1)
        case ast.Name() | ast.Attribute():
            return _of_name(script, node, depth)
        case _:
            return []


def _of_call(script: Script, call: ast.Call, depth: int) -> list[ast.Call]:
    """Return the call itself, what made the object that it moves, or what a function of
    the script returns.
    """
    function = call.func
    is_imported = script.called(call) is not None
    if (
        isinstance(function, ast.Attribute)
        and function.attr in _SAME_OBJECT
        and not is_imported
    ):
        return makers(script, function.value, depth + 1)
    helper = script.function_of(call)
    if helper is not None:
        return _made_by(script, script.things.returned(helper), None, depth)
    return [call]


def _of_name(
    script: Script, node: ast.Name | ast.Attribute, depth: int
) -> list[ast.Call]:
    calls = []
    for value, element in sources(script, node):
        several = [] if value is node else _made_by(script, [value], element, depth)
        if not several:
            return []
        calls += several
    return calls


def _made_by(
    script: Script, values: list[ast.expr], element: int | None, depth: int
) -> list[ast.Call]:
    """Return the calls that may have made one of several values, or a part of each."""
    calls = []
    for value in values:
        part = value if element is None else _part(script, value, element)
        if isinstance(part, list):
            several = _made_by(script, part, element, depth + 1)
        else:
            several = makers(script, part, depth + 1)
        if not several or depth > _DEEPEST:
            return []
        calls += several
    return calls


def _part(
    script: Script, value: ast.expr, element: int
) -> ast.expr | list[ast.expr] | None:
    """Return what stands at a place of several values; a list where a function returns
    them.
    """
    if isinstance(value, ast.Tuple | ast.List):
        return value.elts[element] if element < len(value.elts) else None
    if not isinstance(value, ast.Call):
        return None
    helper = script.function_of(value)
    if helper is not None:
        return script.things.returned(helper)
    function = value.func
    hands_on = isinstance(function, ast.Attribute) and function.attr in _HAND_ON
    inside = hands_on and element < len(value.args)
    return value.args[element] if inside else None


def _element(script: Script, node: ast.Subscript) -> ast.expr | None:
    """Return what stands at ``losses["ce"]`` of a dictionary that the script writes."""
    key = node.slice
    if not isinstance(key, ast.Constant) or not isinstance(key.value, int | str):
        return None
    holder = value_of(script, node.value)
    return None if holder is None else part_of(script, holder, key.value)
