"""Branches that a script keeps for older versions of PyTorch."""

from __future__ import annotations

import ast

from roundoff.lint.script import Script

_PRESENT = {
    "GradScaler": ("torch.amp.GradScaler",),
    "autocast": ("torch.autocast", "torch.amp.autocast"),
}


def is_for_old_torch(script: Script, call: ast.Call, name: str) -> bool:
    """Return True where another branch of the same statement calls the present name."""
    for above in script.ancestors(call):
        if isinstance(above, ast.If | ast.IfExp | ast.Try) and _has_present(
            script, above, name
        ):
            return True
    return False


def _has_present(script: Script, statement: ast.AST, name: str) -> bool:
    calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    return any(script.called(call) in _PRESENT[name] for call in calls)
