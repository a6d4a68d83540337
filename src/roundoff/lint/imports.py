"""What names a script imports stand for: ``F`` is ``torch.nn.functional``."""

from __future__ import annotations

import ast
from collections.abc import Iterable

#: One name for what a framework offers under several.
_SAME = {
    "torch.autocast_mode": "torch.amp.autocast_mode",
    "torch.amp.autocast_mode.autocast": "torch.autocast",
    "torch.amp.autocast": "torch.autocast",
    "torch.amp.grad_scaler.GradScaler": "torch.amp.GradScaler",
    "torch.cuda.amp.autocast_mode.autocast": "torch.cuda.amp.autocast",
    "torch.cuda.amp.grad_scaler.GradScaler": "torch.cuda.amp.GradScaler",
    "torch.GradScaler": "torch.amp.GradScaler",
}
_SAME_MODULES = {
    "torch.nn.modules.loss.": "torch.nn.",
    "torch.nn.modules.": "torch.nn.",
    "torch.utils.data.dataloader.": "torch.utils.data.",
    "torch.nn.utils.clip_grad.": "torch.nn.utils.",
    "tensorflow.compat.v2.": "tensorflow.",
    "tensorflow.python.keras.": "tensorflow.keras.",
    "paddle.fluid.dygraph.amp.": "paddle.amp.",
}


def imported_names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Return what each imported name stands for; the first import of a name counts.

    >>> imported_names(ast.walk(ast.parse("import torch.nn.functional as F, os.path")))
    {'F': 'torch.nn.functional', 'os': 'os'}
    >>> imported_names(ast.walk(ast.parse("from torch.cuda.amp import autocast as low")))
    {'low': 'torch.cuda.amp.autocast'}
    """
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                target = alias.name if alias.asname else first
                names.setdefault(alias.asname or first, target)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                names.setdefault(alias.asname or alias.name, f"{base}.{alias.name}")
    return names


def canonical(name: str) -> str:
    """Return the one name that rules use for what a framework offers under several.

    >>> canonical("torch.amp.autocast"), canonical("torch.nn.modules.loss.NLLLoss")
    ('torch.autocast', 'torch.nn.NLLLoss')
    """
    for module, shorter in _SAME_MODULES.items():
        if name.startswith(module):
            name = shorter + name[len(module) :]
    return _SAME.get(name, name)
