"""Is a step of an optimizer part of another step of its own?

A class that extends an optimizer calls its ``step``, and PyTorch hooks the methods of both
classes once each has made an optimizer. There is one update all the same.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.optim import Optimizer

#: What a hooked ``step`` runs: it calls the hooks, and the step between them.
_HOOKED = Optimizer.profile_hook_step(lambda: None).__code__


def is_part_of_a_step(optimizer: Any) -> bool:
    """Return True where a hook is called of a step that one of the same optimizer makes."""
    steps = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_step = frame.f_code is _HOOKED
        if is_step and frame.f_locals.get("self") is optimizer:
            steps += 1
        frame = frame.f_back
    return steps > 1
