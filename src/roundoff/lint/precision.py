"""Which expressions hold numbers of few bits, by what the script says of them."""

from __future__ import annotations

import ast
import enum
import functools

from roundoff.lint.bindings import is_self
from roundoff.lint.makers import makers
from roundoff.lint.script import Script
from roundoff.lint.tensors import (
    Operation,
    keyword_of,
    number,
    operation,
    sources,
    value_of,
)


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
#: Ends of the names of what returns a number.
_SIZES = (".size", ".item", ".dim", ".numel", "len", "int", "float")
#: What is a number by its name.
_SCALARS = ("decay", "self.decay", "momentum", "scale", "alpha", "beta")


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
    if isinstance(node, ast.Name):
        return _of_part(script, node, depth)
    if isinstance(node, ast.BinOp):
        return _of_arithmetic(script, node, depth)
    if isinstance(node, ast.UnaryOp):
        return _low(script, node.operand, depth + 1)
    if isinstance(node, ast.Subscript):
        return _low(script, node.value, depth + 1)
    if isinstance(node, ast.Call):
        return _of_call(script, node, depth)
    return None


def _of_part(script: Script, name: ast.Name, depth: int) -> Low | None:
    """Return the format of one of several values that are unpacked from one tensor."""
    several = sources(script, name)
    if not several or any(place is None for _, place in several):
        return None
    formats = {_low(script, value, depth + 1) for value, _ in several}
    return formats.pop() if len(formats) == 1 else None


def _of_arithmetic(script: Script, node: ast.BinOp, depth: int) -> Low | None:
    """Return the format of a result: a known one beside a number or its like."""
    left = _low(script, node.left, depth + 1)
    right = _low(script, node.right, depth + 1)
    if left is right:
        return left
    other = node.right if left is not None else node.left
    return (left or right) if _is_scalar(script, other) else None


def _is_scalar(script: Script, node: ast.expr, depth: int = 0) -> bool:
    """Return True for what does not widen a tensor: numbers, sizes, what math computes."""
    if depth > _DEEPEST:
        return False
    value = value_of(script, node)
    if isinstance(value, ast.Constant):
        return True
    if isinstance(value, ast.UnaryOp):
        return _is_scalar(script, value.operand, depth + 1)
    if isinstance(value, ast.BinOp):
        sides = (value.left, value.right)
        return all(_is_scalar(script, side, depth + 1) for side in sides)
    if isinstance(value, ast.Call):
        return _gives_scalar(script, value)
    if isinstance(value, ast.Subscript):
        return isinstance(value.value, ast.Attribute) and value.value.attr == "shape"
    return _is_scalar_name(script, node, depth)


def _gives_scalar(script: Script, call: ast.Call) -> bool:
    """Return True for a call that returns a number or a size."""
    name = script.called(call) or ast.unparse(call.func)
    return name.startswith(("math.", "numpy.")) or name.endswith(_SIZES)


def _is_scalar_name(script: Script, node: ast.expr, depth: int) -> bool:
    """Return True for a name that holds numbers by all that the script says of it."""
    if ast.unparse(node) in _SCALARS:
        return True
    if not isinstance(node, ast.Name | ast.Attribute):
        return False
    several = sources(script, node)
    if several:
        return all(
            _is_size(value) or (place is None and _is_scalar(script, value, depth + 1))
            for value, place in several
            if value is not node
        )
    home = script.home(node) if isinstance(node, ast.Name) else None
    return getattr(home, "name", "") == "__init__"


def _is_size(value: ast.expr) -> bool:
    """Return True for ``x.shape`` and ``x.size()``."""
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Attribute) and value.func.attr == "size"
    return isinstance(value, ast.Attribute) and value.attr == "shape"


def _of_call(script: Script, call: ast.Call, depth: int) -> Low | None:
    low = cast_of(script, call)
    if low is not None:
        return low
    if keyword_of(call, "dtype") is not None:
        return None
    if is_low_layer(script, call):
        return Low.HALF
    each = operation(script, call)
    if each is None or not _keeps_format(script, each):
        return None
    return _low(script, each.first, depth + 1)


def _keeps_format(script: Script, each: Operation) -> bool:
    """Return True for an operator whose result has the format of its first operand."""
    if each.name == "to":
        return _is_move(each.call)
    if each.name == "type" or each.name in _WIDENS:
        return False
    return script.called(each.call) is None or each.name in _FUNCTIONS


def is_low_layer(script: Script, call: ast.Call) -> bool:
    """Return True for a layer of a model that the script casts to float16:
    ``self.linear(x)``.
    """
    function = call.func
    if not isinstance(function, ast.Attribute) or not is_self(function.value):
        return False
    holder = script.class_of(call)
    if holder is None or holder not in half_classes(script):
        return False
    several = makers(script, function)
    return bool(several) and all(
        (script.called(maker) or "").startswith(_WEIGHTED) for maker in several
    )


_WEIGHTED = ("torch.nn.Linear", "torch.nn.Conv", "torch.nn.Embedding")


@functools.lru_cache(maxsize=1)  # asked for each layer of a script
def half_classes(script: Script) -> frozenset[ast.ClassDef]:
    """Return the model classes whose objects the script casts to float16, with the classes
    of their parts.
    """
    things = script.things
    waiting = [
        things.object_class(call.func.value)
        for call in script.method_calls("half", "to")
        if isinstance(call.func, ast.Attribute) and cast_of(script, call) is Low.HALF
    ]
    classes: set[ast.ClassDef] = set()
    while waiting:
        definition = waiting.pop()
        if definition is None or definition in classes:
            continue
        classes.add(definition)
        waiting += [
            things.script_class(each)
            for each in ast.walk(definition)
            if isinstance(each, ast.Call)
        ]
    return frozenset(classes)


_FUNCTIONS = frozenset({"softmax", "square", "pow", "abs", "sum", "relu", "matmul"})


def _is_move(call: ast.Call) -> bool:
    """Return True for ``.to(device)``, which keeps the format."""
    text = ast.unparse(call.args[0]) if call.args else ""
    return "device" in text or "cuda" in text or "cpu" in text


def constant_of(script: Script, node: ast.expr | None) -> float | None:
    """Return the number that is written here, or that a name holds: a constant, or what a
    parameter is where no caller in the script passes another.
    """
    value = number(node)
    if value is not None or not isinstance(node, ast.Name | ast.Attribute):
        return value
    held = number(value_of(script, node))
    if held is not None or not isinstance(node, ast.Name):
        return held
    function = script.home(node)
    if not isinstance(function, ast.FunctionDef):
        return None
    passed = sources(script, node)
    return None if passed else number(_default(function, node.id))


def _default(function: ast.FunctionDef, name: str) -> ast.expr | None:
    """Return the default of a parameter."""
    arguments = function.args
    named = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    if name in named:
        place = named.index(name) - (len(named) - len(arguments.defaults))
        return arguments.defaults[place] if place >= 0 else None
    only = [each.arg for each in arguments.kwonlyargs]
    return arguments.kw_defaults[only.index(name)] if name in only else None
