"""Rules about whole operators, as kernels of torch's dispatcher: the autocast key of an
operator gets a kernel of ours.

The dispatcher is one for the process, the rules are a thread's: on a thread without rules
for the operator our kernel hands the call to torch's own. Kernels are registered while some
region needs them and removed with the last.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from roundoff.ops import AUTOCAST_KEYS
from roundoff.train.autocast.mode import cast, target_dtype
from roundoff.train.autocast.rules import Action


class _ActiveRules(threading.local):
    def __init__(self) -> None:
        self.rules: list[Mapping[str, Action]] = []


_LOCAL = _ActiveRules()
_LOCK = threading.Lock()
#: (operator, dispatch key) -> our kernels, and how many regions need them.
_REGISTERED: dict[tuple[str, str], tuple[torch.library.Library, int]] = {}


@contextmanager
def overridden(operators: Mapping[str, Action], device: str) -> Iterator[None]:
    """Cast this thread's calls of ``operators`` under autocast on ``device`` as the
    actions say, inside.

    An empty mapping hides the rules of a region around it.
    """
    places = [(name, AUTOCAST_KEYS[device]) for name in operators]
    added: list[tuple[str, str]] = []
    try:
        with _LOCK, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch's own kernel is replaced
            for place in places:
                _add(*place)
                added.append(place)
        _LOCAL.rules.append(operators)
        try:
            yield
        finally:
            _LOCAL.rules.pop()
    finally:
        with _LOCK:
            for place in added:
                _remove(place)


def _add(name: str, key: str) -> None:
    library, users = _REGISTERED.get((name, key), (None, 0))
    if library is None:
        library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        for overload in _overloads(name):
            library.impl(
                name + _suffix(overload),
                _kernel(name, overload, key),
                key,
                allow_override=True,
            )  # type: ignore[no-untyped-call]
    _REGISTERED[name, key] = (library, users + 1)


def _remove(place: tuple[str, str]) -> None:
    library, users = _REGISTERED.pop(place)
    if users > 1:
        _REGISTERED[place] = (library, users - 1)
    else:
        library._destroy()  # type: ignore[no-untyped-call]


@functools.cache
def _overloads(name: str) -> list[torch._ops.OpOverload]:
    """Return the overloads that autocast may cast."""
    packet = getattr(torch.ops.aten, name)
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    # some exist for TorchScript only
    dispatched = frozenset(torch._C._dispatch_get_all_op_names())
    return [o for o in overloads if _qualified(o) in dispatched and _may_be_cast(o)]


def _may_be_cast(overload: torch._ops.OpOverload) -> bool:
    """Return False for "out" and in-place forms, and those of named tensors."""
    schema = str(overload._schema)
    if overload._schema.is_mutable or "Dimname" in schema:
        return False
    _, _, returned = schema.rpartition("->")
    return "Tensor" in returned


def _qualified(overload: torch._ops.OpOverload) -> str:
    return f"{overload._schema.name}{_suffix(overload)}"


def _suffix(overload: torch._ops.OpOverload) -> str:
    name = overload._schema.overload_name
    return f".{name}" if name else ""


@functools.cache
def _kernel(name: str, overload: torch._ops.OpOverload, key: str) -> Callable[..., Any]:
    qualified = _qualified(overload)
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    builtin = None
    if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key):
        builtin = torch.library.get_kernel(qualified, key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        action = _LOCAL.rules[-1].get(name) if _LOCAL.rules else None
        if action is None and builtin is not None:
            return builtin.call_boxed(keys, *args, **kwargs)
        if action is not None and not _gives_dtype(args, kwargs):
            dtype = target_dtype(action, args, kwargs)
            args = tuple(cast(value, dtype) for value in args)
            kwargs = {k: cast(value, dtype) for k, value in kwargs.items()}
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return overload(*args, **kwargs)

    return kernel


def _gives_dtype(args: Any, kwargs: Any) -> bool:
    """Return True if the caller asks for a dtype of its own."""
    return any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values()))
