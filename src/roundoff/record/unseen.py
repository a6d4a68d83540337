"""Operators of ours that a program's own dispatch modes do not see."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def unseen() -> Iterator[None]:
    """Keep the operators inside from the program's own dispatch modes, which may count
    them."""
    if torch._C._len_torch_dispatch_stack() == 0:
        yield
        return
    with _disable_current_modes():
        yield
