"""Functions that torch's compiler does not trace, without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

_F = TypeVar("_F", bound=Callable[..., Any])

try:
    _frames: Any = torch._C._dynamo.eval_frame
    _SKIP = _frames._FrameExecStrategy(
        _frames._FrameAction.SKIP, _frames._FrameAction.SKIP
    )
except AttributeError:  # torch before 2.7
    _SKIP = None

#: Whether this torch can be asked to.
CAN_SKIP = _SKIP is not None


def skipped_by_compiler(function: _F) -> _F:
    """Return a function of ours, marked: a compiler that meets it leaves it and all that
    it calls as they are. Else each step of a compiled loop compiles the recorder.
    """
    if _SKIP is not None:
        _frames.set_code_exec_strategy(function.__code__, _SKIP)
    return function
