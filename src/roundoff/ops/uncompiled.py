"""Run compiled regions uncompiled, without importing the compiler where nothing is compiled."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

#: torch's compiler; importing it takes as long as importing torch.
COMPILER = "torch._dynamo"


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run what ``torch.compile`` compiled as it was written, to the end of the block.

    Where the compiler is not loaded yet nothing is compiled; if the program compiles
    something in the block, the same holds for that. The stance of before comes back,
    also after an exception.
    """
    with ExitStack() as stack:
        if COMPILER in sys.modules:
            _enter(stack)
        else:
            _enter_at_first_use(stack)
        yield


def _enter(stack: ExitStack) -> None:
    stance: Any = torch.compiler.set_stance("force_eager")
    stack.enter_context(stance)


def _enter_at_first_use(stack: ExitStack) -> None:
    """Take the stance when the program calls ``torch.compile`` for the first time."""
    original = torch.compile
    is_entered = False

    @functools.wraps(original)
    def compile_uncompiled(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_entered
        if not is_entered:
            is_entered = True
            _enter(stack)
        return original(*args, **kwargs)

    stack.callback(setattr, torch, "compile", original)
    torch.compile = compile_uncompiled
