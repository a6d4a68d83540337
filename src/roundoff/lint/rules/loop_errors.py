"""Errors that a training loop hides, and checks that were left on."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from roundoff.lint.events import Act
from roundoff.lint.rule import Edit, Hit, Rule
from roundoff.lint.script import Script
from roundoff.lint.tensors import last_part, operations, value_of
from roundoff.lint.things import Kind

_ACTS = (Act.BACKWARD, Act.STEP, Act.SCALER_STEP)
_BROAD = ("Exception", "BaseException", "RuntimeError")
_TESTS_BAD = ("isnan", "isinf")


def _hidden_errors(script: Script) -> Iterator[Hit]:
    yield from _skipped_batches(script)
    nodes = {event.node for loop in script.programs for event in loop.of(*_ACTS)}
    for attempt in script.nodes(ast.Try):
        inside = {node for part in attempt.body for node in ast.walk(part)}
        if not inside.intersection(nodes):
            continue
        for handler in attempt.handlers:
            if _is_broad(handler) and not _says_so(handler.body):
                yield Hit(
                    handler,
                    "every error of the step is swallowed here: name the one that is expected, and "
                    "let others stop the script",
                )


def _is_broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or ast.unparse(handler.type) in _BROAD


def _says_so(body: list[ast.stmt]) -> bool:
    """Return True where something is done about it: raised, returned, counted."""
    kinds = (ast.Raise, ast.Return, ast.Break, ast.AugAssign, ast.If)
    if any(isinstance(node, kinds) for part in body for node in ast.walk(part)):
        return True
    calls = [
        node for part in body for node in ast.walk(part) if isinstance(node, ast.Call)
    ]
    return any(last_part(call) not in _HARMLESS for call in calls)


_HARMLESS = (
    "print",
    "zero_grad",
    "empty_cache",
    "format",
    "warning",
    "info",
    "error",
    "warn",
    "str",
    "item",
)


def _skipped_batches(script: Script) -> Iterator[Hit]:
    """``if torch.isnan(loss): continue``."""
    for test in script.nodes(ast.If):
        if script.in_loop(test) is None or not _tests_bad(script, test.test):
            continue
        last = test.body[-1]
        if isinstance(last, ast.Continue | ast.Pass) and not _says_so(test.body):
            yield Hit(test)


def _tests_bad(script: Script, test: ast.expr) -> bool:
    """Return True for a test that a loss is NaN or Inf."""
    wants_bad = True
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        wants_bad = False
        test = test.operand
    names = _TESTS_BAD if wants_bad else ("isfinite",)
    for node in ast.walk(test):
        if not isinstance(node, ast.Call) or last_part(node) not in names:
            continue
        if "loss" in ast.unparse(node) or _is_loss(script, node):
            return True
    return False


def _is_loss(script: Script, call: ast.Call) -> bool:
    """Return True where the tested value goes into a backward pass."""
    names = {ast.unparse(each) for each in call.args}
    for backward in script.method_calls("backward"):
        function = backward.func
        if isinstance(function, ast.Attribute) and ast.unparse(function.value) in names:
            return True
    return False


def _repaired(script: Script) -> Iterator[Hit]:
    for repair in operations(script, "nan_to_num", "nan_to_num_"):
        if _is_of_training(script, repair.first, repair.call):
            yield Hit(repair.call)
    for assign in script.nodes(ast.Assign):
        target = assign.targets[0]
        if not isinstance(target, ast.Subscript) or "loss" not in ast.unparse(
            target.value
        ):
            continue
        tests = [each for each in ast.walk(target.slice) if isinstance(each, ast.Call)]
        if any(last_part(call) in _TESTS_BAD for call in tests):
            yield Hit(assign)


def _is_of_training(script: Script, node: ast.expr | None, call: ast.Call) -> bool:
    """Return True for a loss or a gradient."""
    if node is None:
        return False
    if isinstance(node, ast.Attribute) and node.attr == "grad":
        return True
    value = value_of(script, node)
    if isinstance(value, ast.Call) and _computes_loss(script, value):
        return True
    above = script.parent(call)
    targets = above.targets if isinstance(above, ast.Assign) else []
    backwards = {
        ast.unparse(each.func.value)
        for each in script.method_calls("backward")
        if isinstance(each.func, ast.Attribute)
    }
    return bool(backwards.intersection(map(ast.unparse, targets)))


def _computes_loss(script: Script, call: ast.Call) -> bool:
    if script.things.kind(call.func) is Kind.LOSS:
        return True
    return (script.called(call) or "").endswith(("_loss", "cross_entropy"))


def _anomaly_on(script: Script) -> Iterator[Hit]:
    for call in script.calls(
        "torch.autograd.set_detect_anomaly",
        "torch.autograd.anomaly_mode.set_detect_anomaly",
        "torch.autograd.detect_anomaly",
    ):
        if script.enclosing(call, ast.If) is not None:
            continue
        argument = call.args[0] if call.args else None
        if (script.called(call) or "").endswith(".detect_anomaly"):
            if isinstance(script.parent(call), ast.withitem):
                yield Hit(call)
        elif isinstance(argument, ast.Constant) and argument.value is True:
            start, end = script.span(argument)
            yield Hit(call, edits=(Edit(start, end, "False"),))


_LOOP = """\
import torch

for x, y in loader:
    optimizer.zero_grad()
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
"""

RULES = (
    Rule(
        code="RO607",
        name="hidden-errors",
        message="batches with a NaN loss are left out and nobody learns of it: stop, or count them and stop after a few",
        why="The weights may be NaN already, and then every batch is left out. With several processes only one of them "
        "skips, and the others wait for it.",
        wrong=_LOOP.replace(
            "    loss.backward()",
            "    if torch.isnan(loss):\n        continue\n    loss.backward()",
        ),
        right=_LOOP.replace(
            "    loss.backward()",
            '    if torch.isnan(loss):\n        raise FloatingPointError("the loss is NaN")\n    loss.backward()',
        ),
        check=_hidden_errors,
    ),
    Rule(
        code="RO608",
        name="nan-painted-over",
        message="NaN of a loss or a gradient is painted over, and what made it stays: find its cause "
        "(roundoff watch names it)",
        why="nan_to_num makes a wrong number of it, of which the optimizer's averages keep a part for hundreds of steps; "
        "Inf becomes 3.4e38.",
        wrong=_LOOP.replace(
            "    loss.backward()",
            "    loss = torch.nan_to_num(loss)\n    loss.backward()",
        ),
        right=_LOOP,
        check=_repaired,
    ),
    Rule(
        code="RO609",
        name="anomaly-detection-on",
        message="anomaly detection is left on: it makes every backward pass several times slower",
        why="It keeps a traceback of each forward call and tests each gradient for NaN, with a wait for the device.",
        wrong="import torch\n\ntorch.autograd.set_detect_anomaly(True)\n",
        right="import torch\n\ntorch.autograd.set_detect_anomaly(False)\n",
        check=_anomaly_on,
    ),
)
