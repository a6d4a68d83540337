"""What a region of ``roundoff.autocast`` puts around a model.

Hooks tell where the forward pass is; wrappers bring activation checkpointing's second
forward pass back into the region.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch.utils.checkpoint
from torch import nn

from roundoff.ops import CallMode, operators_that
from roundoff.train.autocast.mode import LOCAL, SiteMode
from roundoff.train.autocast.rules import Rules


class _Regions(threading.local):
    def __init__(self) -> None:
        self.inside: list[tuple[Any, SiteMode | CallMode | None]] = []
        self.modes: dict[int, SiteMode] = {}


#: The regions that this thread is in, innermost last, and its modes by the key of their
#: rules.
REGIONS = _Regions()
_LOCK = threading.RLock()


def mode_of(rules: Rules, model: nn.Module | None) -> SiteMode:
    """Return the mode of this thread for a set of rules."""
    if rules.key not in REGIONS.modes:
        REGIONS.modes[rules.key] = SiteMode(rules, model)
    return REGIONS.modes[rules.key]


@dataclass
class _ModelHooks:
    """The hooks of one model.

    Attributes:
        users: number of regions that use them.
        by_path: for each module the key that its hooks are registered with, and the hook
            before its forward; both stay the same, since compiled code guards on them.
    """

    users: int = 0
    by_path: dict[str, tuple[int, Callable[..., None]]] = field(default_factory=dict)

    def add(self, path: str, module: Any, root: int) -> None:
        """Hook a module; ``root`` is the identity of the model."""
        if path not in self.by_path:
            self.by_path[path] = (next(_KEYS), functools.partial(_enter, root, path))
        key, enter = self.by_path[path]
        module._forward_pre_hooks[key] = enter
        module._forward_pre_hooks.move_to_end(key, last=False)
        module._forward_hooks[key] = functools.partial(_leave, root)
        module._forward_hooks_always_called[key] = True

    def remove(self, path: str, module: Any) -> None:
        """Take the hooks from a module."""
        key, _ = self.by_path[path]
        module._forward_pre_hooks.pop(key, None)
        module._forward_hooks.pop(key, None)
        module._forward_hooks_always_called.pop(key, None)


_HOOKS: weakref.WeakKeyDictionary[nn.Module, _ModelHooks] = weakref.WeakKeyDictionary()
_KEYS = itertools.count(-1, -1)  # those of torch's own handles count up from 0


@contextmanager
def hooked(model: nn.Module) -> Iterator[None]:
    """Let every module tell the mode of the thread that it begins and ends, inside."""
    _show_to_modes()
    with _LOCK:
        hooks = _HOOKS.setdefault(model, _ModelHooks())
        modules = list(model.named_modules())
        if not hooks.users:
            for path, module in modules:
                hooks.add(path, module, id(model))
        hooks.users += 1
    try:
        yield
    finally:
        with _LOCK:
            hooks.users -= 1
            if not hooks.users:
                for path, module in modules:
                    hooks.remove(path, module)


def _show_to_modes() -> None:
    """Show modes the functions that torch.compile keeps from them, though eager code
    shows what they call.
    """
    module: Any = sys.modules.get("torch._dynamo.variables.torch")
    if module is not None and hasattr(module, "get_overridable_functions"):
        module.get_overridable_functions().update(
            getattr(nn.functional, name)
            for name in operators_that("hide from compiled modes")
        )


def _enter(root: int, path: str, *_: Any) -> None:
    if LOCAL.modes and LOCAL.modes[-1].root == root:
        LOCAL.modes[-1].position.enter(path)


def _leave(root: int, *_: Any) -> None:
    if LOCAL.modes and LOCAL.modes[-1].root == root:
        LOCAL.modes[-1].position.leave()


class _Patch:
    """torch's functions that wrappers stand for, as long as a region needs them."""

    def __init__(self) -> None:
        self.users = 0
        self.generator: Any = None
        self.apply: Any = None

    def add(self) -> None:
        """Put the wrappers in place for the first user."""
        if not self.users:
            module: Any = torch.utils.checkpoint
            self.generator = module._checkpoint_without_reentrant_generator
            self.apply = module.CheckpointFunction.apply
            module._checkpoint_without_reentrant_generator = _generator
            module.CheckpointFunction.apply = _apply
        self.users += 1

    def remove(self) -> None:
        """Restore torch's functions after the last user."""
        self.users -= 1
        if not self.users:
            module: Any = torch.utils.checkpoint
            module._checkpoint_without_reentrant_generator = self.generator
            # that of torch.autograd.Function shows again
            del module.CheckpointFunction.apply


_PATCH = _Patch()


@contextmanager
def checkpoints() -> Iterator[None]:
    """Run parts under ``torch.utils.checkpoint`` again in their region, from where they were."""
    with _LOCK:
        _PATCH.add()
    try:
        yield
    finally:
        with _LOCK:
            _PATCH.remove()


def _generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _PATCH.generator(_rerun_in_place(function, first=False), *args, **kwargs)


def _apply(function: Callable[..., Any], *args: Any) -> Any:
    return _PATCH.apply(_rerun_in_place(function, first=True), *args)


def _rerun_in_place(function: Callable[..., Any], first: bool) -> Callable[..., Any]:
    """Wrap ``function`` to run again in the region, and from the place, where it is now.

    ``first``: it is called the first time through here too, not only to run again.
    """
    region, mode = REGIONS.inside[-1] if REGIONS.inside else (None, None)
    if region is None or mode is None:
        return function
    place = mode.position.place()
    runs_first = first

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal runs_first
        if runs_first:
            runs_first = False
            return function(*args, **kwargs)
        with region.again(place):
            return function(*args, **kwargs)

    return wrapper
