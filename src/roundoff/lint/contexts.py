"""What ``with`` items say: is autocast on, for which device, in which format."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from roundoff.lint.script import Script
from roundoff.lint.things import Kind

_FORMATS = {
    "torch.float16": "fp16",
    "torch.half": "fp16",
    "torch.bfloat16": "bf16",
    "torch.float32": "fp32",
    "torch.float": "fp32",
    "torch.float64": "fp64",
    "torch.double": "fp64",
}
_FORMAT_TEXTS = {"float16": "fp16", "bfloat16": "bf16", "float32": "fp32"}
_DEVICE_OF_CLASS = {
    "torch.cuda.amp.autocast": "cuda",
    "torch.cpu.amp.autocast": "cpu",
    "torch.npu.amp.autocast": "npu",
}
#: The place of ``dtype`` and ``enabled`` where they have no names.
_PLACES = {
    "torch.autocast": ("device_type", "dtype", "enabled", "cache_enabled"),
    "torch.cuda.amp.autocast": ("enabled", "dtype", "cache_enabled"),
    "torch.cpu.amp.autocast": ("enabled", "dtype", "cache_enabled"),
    "paddle.amp.auto_cast": (
        "enable",
        "custom_white_list",
        "custom_black_list",
        "level",
        "dtype",
    ),
}


@dataclass(frozen=True)
class Autocast:
    """An autocast region.

    ``device`` and ``format`` are None where the script decides them at run time;
    ``format`` is the device's default where the script names none. ``enabled`` is None
    likewise.
    """

    call: ast.Call
    device: str | None
    format: str | None
    enabled: bool | None
    is_explicit: bool = False


def autocast_of(script: Script, node: ast.expr) -> Autocast | None:
    """Return the autocast that a ``with`` item or a decorator enters; None for others."""
    call = autocast_call(script, node)
    if call is None:
        return None
    name = script.called(call) or ""
    device = _DEVICE_OF_CLASS.get(name) or text_of(
        script, argument(script, call, "device_type")
    )
    dtype = argument(script, call, "dtype")
    enabled = argument(script, call, "enabled") or argument(script, call, "enable")
    return Autocast(
        call=call,
        device=device,
        format=_default(device) if dtype is None else format_of(script, dtype),
        enabled=True if enabled is None else truth_of(script, enabled),
        is_explicit=dtype is not None,
    )


def autocast_call(script: Script, node: ast.expr | None) -> ast.Call | None:
    """Return the call that makes an autocast, also where a name holds it."""
    if script.things.kind(node) is not Kind.AUTOCAST:
        return None
    for _ in range(5):
        if isinstance(node, ast.Call):
            if script.called(node) is not None:
                return node
            node = _returned(script, node)
        elif node is not None:
            node = script.definition(node)
        if node is None:
            return None
    return None


def _returned(script: Script, call: ast.Call) -> ast.expr | None:
    """Return what a function of the script returns, where it returns one thing."""
    helper = script.function_of(call)
    values = [] if helper is None else script.things.returned(helper)
    return values[0] if len(values) == 1 else None


def _default(device: str | None) -> str | None:
    if device is None:
        return None
    return "bf16" if device.startswith("cpu") else "fp16"


def argument(script: Script, call: ast.Call, name: str) -> ast.expr | None:
    """Return an argument of an autocast by its name."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    places = _PLACES.get(script.called(call) or "", ())
    if name in places and places.index(name) < len(call.args):
        return call.args[places.index(name)]
    return None


def format_of(script: Script, node: ast.expr | None) -> str | None:
    """Return the number format that an expression names, such as ``torch.float16``.

    >>> script = Script("import torch; d = torch.half; f(d)")
    >>> format_of(script, script.nodes(ast.Call)[0].args[0])
    'fp16'
    """
    for _ in range(5):
        if node is None:
            return None
        name = script.qualified(node)
        if name is not None:
            return _FORMATS.get(name)
        if isinstance(node, ast.Constant):
            return _FORMAT_TEXTS.get(str(node.value))
        node = script.definition(node)
    return None


def text_of(script: Script, node: ast.expr | None) -> str | None:
    """Return the text that an expression is: a constant, or a name that holds one."""
    for _ in range(5):
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if isinstance(node, ast.Call) and script.called(node) == "torch.device":
            node = node.args[0] if node.args else None
        elif node is None:
            return None
        else:
            node = script.definition(node)
    return None


def truth_of(script: Script, node: ast.expr | None) -> bool | None:
    """Return a constant truth value; None for what is decided at run time."""
    for _ in range(5):
        if isinstance(node, ast.Constant):
            return bool(node.value)
        if node is None:
            return None
        node = script.definition(node)
    return None


def autocasts(script: Script, contexts: Sequence[ast.expr]) -> Autocast | None:
    """Return the innermost autocast of some contexts, unless it is switched off."""
    for context in reversed(contexts):
        region = autocast_of(script, context)
        if region is not None:
            return None if region.enabled is False else region
        if script.things.kind(context) is Kind.AUTOCAST:
            return Autocast(ast.Call(ast.Name("autocast"), [], []), None, None, None)
    return None


def without_gradients(script: Script, contexts: Sequence[ast.expr]) -> bool:
    """Return True inside ``no_grad``, ``inference_mode`` or ``set_grad_enabled(False)``."""
    return any(_turns_off(script, each) for each in contexts)


def _turns_off(script: Script, context: ast.expr) -> bool:
    if script.things.kind(context) is not Kind.NO_GRAD:
        return False
    if script.called(context) != "torch.set_grad_enabled":
        return True
    mode = context.args[0] if isinstance(context, ast.Call) and context.args else None
    return truth_of(script, mode) is False
