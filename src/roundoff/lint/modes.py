"""Whether code runs with gradients, and whether a script uses a GPU."""

from __future__ import annotations

import ast
import re

from roundoff.lint.script import Function, Script

_GRADS_OFF = {
    "torch.no_grad",
    "torch.inference_mode",
    "torch.autograd.no_grad",
    "torch.autograd.inference_mode",
    "torch.set_grad_enabled",
}
_JUDGES = re.compile(
    r"(?i)(?:^|_)(?:eval|valid|val(?=_|$)|dev(?=_|$)|test|predict|infer)"
)


def is_without_gradients(script: Script, node: ast.AST) -> bool:
    """Return True where a node runs under ``no_grad``, by a block, a decorator, or since
    every caller in the script does.
    """
    return _is_off(script, node, frozenset())


def _is_off(script: Script, node: ast.AST, functions: frozenset[ast.AST]) -> bool:
    for above in script.ancestors(node):
        if isinstance(above, ast.With) and any(
            turns_off_gradients(script, item.context_expr) for item in above.items
        ):
            return True
        if isinstance(above, ast.FunctionDef | ast.AsyncFunctionDef):
            return _is_function_off(script, above, functions)
    return False


def _is_function_off(
    script: Script, function: Function, functions: frozenset[ast.AST]
) -> bool:
    if any(turns_off_gradients(script, each) for each in function.decorator_list):
        return True
    if function in functions:
        return False
    calls = script.things.callers().get(function, [])
    inside = functions | {function}
    return bool(calls) and all(_is_off(script, call, inside) for call in calls)


def turns_off_gradients(script: Script, node: ast.expr) -> bool:
    """Return True for ``torch.no_grad()`` and its like."""
    function = node.func if isinstance(node, ast.Call) else node
    return script.qualified(function) in _GRADS_OFF


def judges_by_name(name: str) -> bool:
    """Return True for a name that says evaluation: ``validate``, ``test_epoch``."""
    return _JUDGES.search(name) is not None


def uses_gpu(script: Script) -> bool:
    """Return True where tensors of a script go to a GPU."""
    if script.method_calls("cuda"):
        return True
    return any(
        isinstance(constant.value, str) and _GPU.match(constant.value)
        for constant in script.nodes(ast.Constant)
    )


_GPU = re.compile(r"^(?:cuda|npu|xpu)(?::\d+)?$")
