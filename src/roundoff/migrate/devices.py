"""The type of device that a script runs on, as an expression that is valid at a place."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from roundoff.lint import Script, argument_for
from roundoff.migrate.names import is_visible

_DEEPEST = 5
_NOT_DEVICES = (
    "torch.float",
    "torch.half",
    "torch.bfloat",
    "torch.double",
    "torch.int",
)


def device_type(
    script: Script, place: ast.AST, torch: str, models: list[ast.expr]
) -> str:
    """Return source text of the device's type ("cuda", "cpu") as seen from a place.

    Args:
        script: the script.
        place: where the text is to stand.
        torch: what torch is called there.
        models: models that are called there; asked where no device is visible.
    """
    named = list(_device_expressions(script))
    visible = [node for node in named if is_visible(script, node, place)]
    if visible:
        return _type_of(script, _nearest(script, visible, place), torch)
    if script.method_calls("cuda"):
        return '"cuda"'
    if not named:
        return '"cpu"'
    for model in models:
        if is_visible(script, model, place):
            return f"next({script.segment(model)}.parameters()).device.type"
    return '"cuda"'


def _nearest(script: Script, nodes: list[ast.expr], place: ast.AST) -> ast.expr:
    """Return the first of some nodes in the function of a place, or the first at all."""
    function = script.scope(place)
    return next((node for node in nodes if script.scope(node) is function), nodes[0])


def names_cpu_alone(script: Script) -> bool:
    """Return True where every device that the script names is the CPU, or it names none."""
    if script.method_calls("cuda"):
        return False
    values: list[ast.expr] = []
    for node in _device_expressions(script):
        values += _values(script, node) or _branches(node)
    return all("cpu" in ast.unparse(value) for value in values)


def _device_expressions(script: Script) -> Iterator[ast.expr]:
    """Yield what ``.to(...)`` and ``device=`` are given, and uses of such parameters."""
    for call in script.method_calls("to"):
        argument = call.args[0] if call.args else None
        if argument is not None and _may_be_device(script, argument):
            yield argument
    for call in script.nodes(ast.Call):
        argument = _keyword(call, "device")
        if argument is not None:
            yield argument
    for parameter in script.nodes(ast.arg):
        if parameter.arg == "device":
            yield from _uses(script, parameter)


def _uses(script: Script, parameter: ast.arg) -> Iterator[ast.expr]:
    for name in script.nodes(ast.Name):
        if name.id == parameter.arg:
            yield name


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((each.value for each in call.keywords if each.arg == name), None)


def _may_be_device(script: Script, node: ast.expr) -> bool:
    name = script.qualified(node)
    if name is not None and name.startswith(_NOT_DEVICES):
        return False
    if isinstance(node, ast.Attribute) and node.attr == "dtype":
        return False
    return isinstance(node, ast.Name | ast.Attribute | ast.Constant | ast.Subscript)


def _type_of(script: Script, node: ast.expr, torch: str) -> str:
    """Return the text of the type of a device, which may be a string or torch's own."""
    text = script.segment(node)
    if isinstance(node, ast.Constant):
        return f'"{str(node.value).partition(":")[0]}"'
    values = _values(script, node)
    if values and all(_is_device(script, value) for value in values):
        return f"{text}.type"
    if values and all(_is_plain_text(value) for value in values):
        return text
    return f"{torch}.device({text}).type"


def _values(script: Script, node: ast.expr, depth: int = 0) -> list[ast.expr]:
    """Return what an expression may be: where it is assigned, or what callers pass."""
    if depth > _DEEPEST:
        return []
    definition = script.definition(node)
    if definition is not None:
        return _branches(definition)
    if not isinstance(node, ast.Name):
        return []
    home = script.home(node)
    if home is None:
        return []
    values: list[ast.expr] = []
    for binding in script.bindings(home)[node.id]:
        if isinstance(binding.statement, ast.arg):
            values += _passed(script, home, node.id, depth)
        elif binding.value is not None and binding.element is None:
            values += _branches(binding.value)
        else:
            return []
    return values


def _passed(
    script: Script, function: ast.AST, parameter: str, depth: int
) -> list[ast.expr]:
    values: list[ast.expr] = []
    for call in script.things.callers().get(function, ()):
        argument = argument_for(function, parameter, call)
        if argument is None:
            return []
        values += _values(script, argument, depth + 1) or _branches(argument)
    return values


def _branches(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.IfExp):
        return [*_branches(node.body), *_branches(node.orelse)]
    return [node]


def _is_device(script: Script, node: ast.expr) -> bool:
    if script.called(node) == "torch.device":
        return True
    return isinstance(node, ast.Attribute) and node.attr == "device"


def _is_plain_text(node: ast.expr) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and ":" not in node.value  # type: ignore[attr-defined]
