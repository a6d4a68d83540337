"""Casts to half by hand, and which models are trained."""

from __future__ import annotations

import ast

from roundoff.lint.contexts import format_of
from roundoff.lint.script import Script
from roundoff.lint.things import Kind


def half_format(script: Script, call: ast.Call) -> str | None:
    """Return ``fp16`` or ``bf16`` for ``x.half()``, ``x.bfloat16()`` and ``x.to(half)``."""
    if not isinstance(call.func, ast.Attribute):
        return None
    formats = {"half": "fp16", "bfloat16": "bf16"}
    if call.func.attr in formats:
        return formats[call.func.attr]
    if call.func.attr != "to":
        return None
    for value in (*call.args, *(each.value for each in call.keywords)):
        number_format = format_of(script, value)
        if number_format in formats.values():
            return number_format
    return None


def is_trained(script: Script, cast: ast.Call) -> bool:
    """Return True where the cast model is one whose parameters an optimizer gets."""
    receiver = cast.func.value if isinstance(cast.func, ast.Attribute) else None
    if script.things.kind(receiver) is not Kind.MODEL:
        return False
    keys = {script.things.key(each) for each in _names_of_model(script, cast)}
    trained = {
        script.things.key(call.func.value)
        for call in script.method_calls("parameters", "named_parameters")
        if isinstance(call.func, ast.Attribute) and _is_for_optimizer(script, call)
    }
    return bool(keys & trained)


def _is_for_optimizer(script: Script, call: ast.Call) -> bool:
    """Return True for ``parameters()`` among the arguments of an optimizer."""
    for above in script.ancestors(call):
        if isinstance(above, ast.Call) and script.things.kind(above) is Kind.OPTIMIZER:
            return True
        if isinstance(above, ast.stmt):
            return False
    return False


def _names_of_model(script: Script, cast: ast.Call) -> list[ast.expr]:
    """Return the names that hold a model behind a cast."""
    names: list[ast.expr] = []
    receiver = cast.func.value if isinstance(cast.func, ast.Attribute) else None
    if isinstance(receiver, ast.Name | ast.Attribute):
        names.append(receiver)
    statement = script.statement(cast)
    if isinstance(statement, ast.Assign):
        names.extend(statement.targets)
    return names
