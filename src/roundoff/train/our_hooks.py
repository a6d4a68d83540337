"""Hooks of ours on a program's modules, which copies, pickles and scripted modules do without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class OurHook:
    """A hook that copies and pickles of a module don't take along."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self.work = work

    def __call__(self, *args: Any) -> Any:
        return self.work(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return NoHook, ()


class NoHook:
    """What is left of a hook in a copy."""

    def __call__(self, *args: Any) -> None:
        """Do nothing."""


@contextmanager
def without_our_hooks(model: Any) -> Iterator[None]:
    """Take our hooks off a module and its parts, where it is one; they are back afterwards."""
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    tables: list[Any] = []
    for module in modules:
        tables += [module._forward_hooks, module._forward_pre_hooks]
    kept = [(table, dict(table)) for table in tables if table]
    for table, hooks in kept:
        for key, hook in hooks.items():
            if isinstance(hook, OurHook):
                del table[key]
    try:
        yield
    finally:
        for table, hooks in kept:
            table.clear()
            table.update(hooks)
