"""Custom operators of other libraries, traced as what their Python code computes.

ONNX has no such operator, but it has those that its body is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._library import custom_ops as _custom_ops
from torch.overrides import TorchFunctionMode

#: The namespace of operators that have a translation of their own.
_TRANSLATED = "roundoff"

_definitions: Any = _custom_ops


class Inlined(TorchFunctionMode):
    """Run the body of ``torch.library.custom_op`` in the place of the operator.

    Attributes:
        depth: how many bodies are running, one in the other.
    """

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        body = _body(func)
        if body is None:
            return _allocating(func, args, kwargs or {})
        self.depth += 1
        try:
            with self:  # an operator in the body may have a body too
                return body(*args, **(kwargs or {}))
        finally:
            self.depth -= 1


def _allocating(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function; what goes ``out`` is copied there, as sizes need not be compared."""
    target = kwargs.get("out")
    if not isinstance(target, torch.Tensor):
        return func(*args, **kwargs)
    others = {name: value for name, value in kwargs.items() if name != "out"}
    return target.copy_(func(*args, **others))


def _body(func: Any) -> Callable[..., Any] | None:
    """Return the Python code of a custom operator; None where there is none."""
    if not isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return None
    packet: Any = getattr(func, "overloadpacket", func)
    name = str(packet._qualified_op_name)
    definition = _definitions.OPDEFS.get(name)
    if definition is None or name.startswith(f"{_TRANSLATED}::"):
        return None
    body: Callable[..., Any] = definition._init_fn
    return body
