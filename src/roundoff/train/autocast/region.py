"""What a region of ``roundoff.autocast`` puts around a model: hooks that tell where the forward pass is, and wrappers that
bring activation checkpointing's second forward pass back into the region."""

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


#: The regions that this thread is in, innermost last, and its modes by the key of their rules.
REGIONS = _Regions()
_LOCK = threading.RLock()


def mode_of(rules: Rules, model: nn.Module | None) -> SiteMode:
    """One mode for each thread and set of rules."""
    if rules.key not in REGIONS.modes:
        REGIONS.modes[rules.key] = SiteMode(rules, model)
    return REGIONS.modes[rules.key]


@dataclass
class _Hooks:
    """The hooks of one model: how many regions use them, and for each module its path and the keys it is registered with,
    which stay the same, since compiled code guards on them."""

    users: int = 0
    keys: dict[str, tuple[int, Callable[..., None]]] = field(default_factory=dict)


_HOOKS: weakref.WeakKeyDictionary[nn.Module, _Hooks] = weakref.WeakKeyDictionary()
_KEYS = itertools.count(-1, -1)  # those of torch's own handles count up from 0


@contextmanager
def hooked(model: nn.Module) -> Iterator[None]:
    """Every module tells the mode of the thread that it begins and ends."""
    _show_to_modes()
    with _LOCK:
        hooks = _HOOKS.setdefault(model, _Hooks())
        modules = list(model.named_modules())
        if not hooks.users:
            for path, module in modules:
                key, enter = hooks.keys.setdefault(
                    path, (next(_KEYS), functools.partial(_enter, id(model), path))
                )
                module._forward_pre_hooks[key] = enter
                module._forward_pre_hooks.move_to_end(key, last=False)
                module._forward_hooks[key] = functools.partial(_leave, id(model))
                module._forward_hooks_always_called[key] = True
        hooks.users += 1
    try:
        yield
    finally:
        with _LOCK:
            hooks.users -= 1
            if not hooks.users:
                for path, module in modules:
                    key = hooks.keys[path][0]
                    module._forward_pre_hooks.pop(key, None)
                    module._forward_hooks.pop(key, None)
                    module._forward_hooks_always_called.pop(key, None)


def _show_to_modes() -> None:
    """Functions that torch.compile keeps from modes, though eager code shows what they call."""
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


_PATCHED = 0


@contextmanager
def checkpoints() -> Iterator[None]:
    """Parts under ``torch.utils.checkpoint`` are run again in their region, from where they were."""
    global _PATCHED
    module: Any = torch.utils.checkpoint
    with _LOCK:
        if not _PATCHED:
            _ORIGINAL["generator"] = module._checkpoint_without_reentrant_generator
            _ORIGINAL["apply"] = module.CheckpointFunction.apply
            module._checkpoint_without_reentrant_generator = _generator
            module.CheckpointFunction.apply = _apply
        _PATCHED += 1
    try:
        yield
    finally:
        with _LOCK:
            _PATCHED -= 1
            if not _PATCHED:
                module._checkpoint_without_reentrant_generator = _ORIGINAL["generator"]
                del (
                    module.CheckpointFunction.apply
                )  # that of torch.autograd.Function shows again


_ORIGINAL: dict[str, Callable[..., Any]] = {}


def _generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _ORIGINAL["generator"](_kept(function, first=False), *args, **kwargs)


def _apply(function: Callable[..., Any], *args: Any) -> Any:
    return _ORIGINAL["apply"](_kept(function, first=True), *args)


def _kept(function: Callable[..., Any], first: bool) -> Callable[..., Any]:
    """``function``, run again in the region, and from the place, where it is now; ``first`` says that it is called the first
    time through here too, not only when it is run again."""
    region, mode = REGIONS.inside[-1] if REGIONS.inside else (None, None)
    if region is None or mode is None:
        return function
    place = mode.position.place()
    calls = [] if first else [None]

    @functools.wraps(function)
    def again(*args: Any, **kwargs: Any) -> Any:
        if not calls:
            calls.append(None)
            return function(*args, **kwargs)
        with region.again(place):
            return function(*args, **kwargs)

    return again
