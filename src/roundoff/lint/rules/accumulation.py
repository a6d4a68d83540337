"""Loops that add the gradients of several micro-steps before the optimizer steps."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from roundoff.lint.events import Act, Condition, Event, Loop
from roundoff.lint.rule import Hit
from roundoff.lint.script import Binding, Script
from roundoff.lint.things import argument_for

#: A loss is followed so far back.
_DEEPEST = 6


def accumulation(loop: Loop) -> Condition | None:
    """Return the test ``i % n == 0`` under which alone the optimizers of a loop step."""
    steps = loop.of(Act.STEP, Act.SCALER_STEP)
    backward = loop.of(Act.BACKWARD)
    for condition in steps[0].conditions if steps else ():
        if "%" not in condition.test:
            continue
        everywhere = all(condition in step.conditions for step in steps)
        if everywhere and any(condition not in each.conditions for each in backward):
            return condition
    return None


def outside(loop: Loop, condition: Condition, *acts: Act) -> list[Event]:
    """Return the events of some acts that happen in the other micro-steps too."""
    return [
        each
        for each in loop.of(*acts)
        if condition not in each.conditions and not _has_remainder(each)
    ]


def _has_remainder(event: Event) -> bool:
    """Return True where a remainder of its own says when an event happens."""
    return any("%" in each.test for each in event.conditions)


def not_divided(script: Script) -> Iterator[Hit]:
    """A loss of one of several micro-steps that nothing divides."""
    for loop in script.loops:
        condition = accumulation(loop)
        if condition is None:
            continue
        for event in outside(loop, condition, Act.BACKWARD):
            if event.is_managed or not isinstance(event.node, ast.Call):
                continue
            if not _is_divided(script, _loss(event.node), 0):
                yield Hit(event.node)
                break


def _loss(backward: ast.Call) -> ast.expr | None:
    """Return the loss of ``loss.backward()`` and of ``scaler.scale(loss).backward()``."""
    if not isinstance(backward.func, ast.Attribute):
        return None
    loss = backward.func.value
    function = loss.func if isinstance(loss, ast.Call) else None
    if isinstance(function, ast.Attribute) and function.attr == "scale":
        return loss.args[0] if isinstance(loss, ast.Call) and loss.args else None
    return loss


def _is_divided(script: Script, loss: ast.expr | None, depth: int) -> bool:
    """Return True where a loss is divided, multiplied, or comes from where nobody sees."""
    if loss is None or depth > _DEEPEST:
        return True
    if isinstance(loss, ast.BinOp):
        if isinstance(loss.op, ast.Div | ast.Mult):
            return True
        sides = (loss.left, loss.right)
        return any(_is_divided(script, side, depth + 1) for side in sides)
    if isinstance(loss, ast.Name):
        return _is_divided_name(script, loss, depth)
    if isinstance(loss, ast.Call):
        return _is_divided_call(script, loss, depth)
    return False


def _is_divided_call(script: Script, call: ast.Call, depth: int) -> bool:
    helper = script.function_of(call)
    if helper is not None:
        return _returns_divided(script, helper, depth)
    function = call.func
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr in ("div", "div_", "mul"):
        return True
    if function.attr in ("scale", "mean"):
        inner = call.args[0] if function.attr == "scale" and call.args else None
        return _is_divided(script, inner or function.value, depth + 1)
    return False


def _returns_divided(script: Script, function: ast.AST, depth: int) -> bool:
    """Return True where a function of the script returns a loss that is divided."""
    return any(
        _is_divided(script, each.value, depth + 1)
        for each in script.nodes(ast.Return)
        if script.scope(each) is function
    )


def _is_divided_name(script: Script, name: ast.Name, depth: int) -> bool:
    home = script.home(name)
    bindings = [] if home is None else script.bindings(home)[name.id]
    return any(_divides(script, name.id, home, each, depth) for each in bindings)


def _divides(
    script: Script, name: str, home: ast.AST | None, binding: Binding, depth: int
) -> bool:
    """Return True where what a name is bound to is divided."""
    statement = binding.statement
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.op, ast.Div | ast.Mult)
    if isinstance(statement, ast.arg) and home is not None:
        calls = script.things.callers().get(home, ())
        passed = [argument_for(home, name, call) for call in calls]
        return any(_is_divided(script, each, depth + 1) for each in passed)
    if binding.value is None or binding.element is not None:
        return False
    return _is_divided(script, binding.value, depth + 1)
