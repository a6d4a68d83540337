"""Which expressions hold numbers of few bits, by what the script says of them."""

from __future__ import annotations

import ast
import enum

from roundoff.lint.script import Script
from roundoff.lint.tensors import keyword_of, operation, value_of


class Low(enum.Enum):
    """A format of 16 bits."""

    HALF = "float16"
    BFLOAT16 = "bfloat16"


_DTYPES = {
    "torch.float16": Low.HALF,
    "torch.half": Low.HALF,
    "torch.bfloat16": Low.BFLOAT16,
}
_CASTS = {"half": Low.HALF, "bfloat16": Low.BFLOAT16}
_WIDENS = frozenset({"float", "double", "long", "int"}) | {"bool", "argmax", "tolist"}
_KEYWORDS = ("dtype", "torch_dtype")
_DEEPEST = 10


def dtype_of(script: Script, node: ast.expr | None) -> Low | None:
    """Return the format that an expression names: ``torch.float16``, or a name that holds it."""
    if node is None:
        return None
    name = script.qualified(value_of(script, node))
    return None if name is None else _DTYPES.get(name)


def cast_of(script: Script, call: ast.Call) -> Low | None:
    """Return the format that a call casts to, or makes a tensor in; None for others.

    ``.half()``, ``.to(torch.float16)``, ``torch.zeros(3, dtype=torch.float16)``.
    """
    function = call.func
    if isinstance(function, ast.Attribute) and script.called(call) is None:
        if function.attr in _CASTS and not call.args:
            return _CASTS[function.attr]
        if function.attr in ("to", "type"):
            for argument in call.args:
                low = dtype_of(script, argument)
                if low is not None:
                    return low
    for name in _KEYWORDS:
        low = dtype_of(script, keyword_of(call, name))
        if low is not None:
            return low
    return None


def low_of(script: Script, node: ast.expr | None) -> Low | None:
    """Return the format of few bits that a tensor is certainly in; None for others.

    >>> script = Script("import torch; a = torch.zeros(3).half(); b = f(a.pow(2) + 1)")
    >>> low_of(script, script.nodes(ast.Call)[-1].args[0]) or low_of(script, script.nodes(ast.BinOp)[0])
    <Low.HALF: 'float16'>
    """
    return _low(script, node, 0)


def _low(script: Script, node: ast.expr | None, depth: int) -> Low | None:
    if depth > _DEEPEST:
        return None
    node = value_of(script, node)
    if isinstance(node, ast.BinOp):
        return _of_arithmetic(script, node, depth)
    if isinstance(node, ast.UnaryOp):
        return _low(script, node.operand, depth + 1)
    if isinstance(node, ast.Subscript):
        return _low(script, node.value, depth + 1)
    if isinstance(node, ast.Call):
        return _of_call(script, node, depth)
    return None


def _of_arithmetic(script: Script, node: ast.BinOp, depth: int) -> Low | None:
    """Return the format of a result: a known one beside a number or its like."""
    left = _low(script, node.left, depth + 1)
    right = _low(script, node.right, depth + 1)
    if left is right:
        return left
    other = node.right if left is not None else node.left
    return (left or right) if _is_scalar(script, other) else None


def _is_scalar(script: Script, node: ast.expr) -> bool:
    """Return True for what does not widen a tensor: numbers, and what math computes."""
    value = value_of(script, node)
    if isinstance(value, ast.Constant):
        return True
    if isinstance(value, ast.BinOp):
        return _is_scalar(script, value.left) and _is_scalar(script, value.right)
    if isinstance(value, ast.Call):
        name = script.called(value) or ""
        return name.startswith(("math.", "numpy."))
    name = ast.unparse(node)
    return name in ("decay", "self.decay", "momentum", "scale", "alpha", "beta")


def _of_call(script: Script, call: ast.Call, depth: int) -> Low | None:
    low = cast_of(script, call)
    if low is not None:
        return low
    if keyword_of(call, "dtype") is not None:
        return None
    each = operation(script, call)
    if each is None or each.name in _WIDENS or each.name in ("to", "type"):
        is_move = each is not None and each.name == "to" and _is_move(call)
        return _low(script, each.first, depth + 1) if is_move and each else None
    if script.called(call) is None or each.name in _FUNCTIONS:
        return _low(script, each.first, depth + 1)
    return None


_FUNCTIONS = frozenset({"softmax", "square", "pow", "abs", "sum", "relu", "matmul"})


def _is_move(call: ast.Call) -> bool:
    """Return True for ``.to(device)``, which keeps the format."""
    text = ast.unparse(call.args[0]) if call.args else ""
    return "device" in text or "cuda" in text or "cpu" in text
