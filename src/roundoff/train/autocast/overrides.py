"""Rules about whole operators, as kernels of torch's dispatcher: the autocast key of an operator gets a kernel of ours.

The dispatcher is one for the process, the rules are a thread's: on a thread without rules for the operator our kernel hands
the call to torch's own. Kernels are registered while some region needs them and removed with the last.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from roundoff.ops import KEYS
from roundoff.train.autocast.mode import cast, widest
from roundoff.train.autocast.rules import Action


class _Local(threading.local):
    def __init__(self) -> None:
        self.rules: list[Mapping[str, Action]] = []


_LOCAL = _Local()
_LOCK = threading.Lock()
_REGISTERED: dict[tuple[str, str], tuple[torch.library.Library, int]] = {}


@contextmanager
def overridden(operators: Mapping[str, Action], device: str) -> Iterator[None]:
    """Within it, this thread's calls of ``operators`` under autocast on ``device`` are cast as the actions say.

    An empty mapping hides the rules of a region around it.
    """
    names = [(name, KEYS[device]) for name in operators]
    added: list[tuple[str, str]] = []
    try:
        with _LOCK, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch's own kernel is replaced
            for place in names:
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
    packet = getattr(torch.ops.aten, name)
    found = [getattr(packet, overload) for overload in packet.overloads()]
    known = frozenset(
        torch._C._dispatch_get_all_op_names()
    )  # some exist for TorchScript only
    # "out" and in-place forms are never cast; names are the dimension names of named tensors
    return [
        o
        for o in found
        if f"{o._schema.name}{_suffix(o)}" in known
        and not o._schema.is_mutable
        and "Dimname" not in str(o._schema)
        and "Tensor" in str(o._schema).rpartition("->")[2]
    ]


def _suffix(overload: torch._ops.OpOverload) -> str:
    return (
        f".{overload._schema.overload_name}" if overload._schema.overload_name else ""
    )


@functools.cache
def _kernel(name: str, overload: torch._ops.OpOverload, key: str) -> Callable[..., Any]:
    qualified = f"{overload._schema.name}{_suffix(overload)}"
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    builtin = None
    if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key):
        builtin = torch.library.get_kernel(qualified, key)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        action = _LOCAL.rules[-1].get(name) if _LOCAL.rules else None
        if action is None and builtin is not None:
            return builtin.call_boxed(keys, *args, **kwargs)
        given = any(
            isinstance(value, torch.dtype) for value in (*args, *kwargs.values())
        )
        if action is not None and not given:
            dtype = (
                action
                if isinstance(action, torch.dtype)
                else widest(args, kwargs, activations=action == "follow")
            )
            args = tuple(cast(value, dtype) for value in args)
            kwargs = {k: cast(value, dtype) for k, value in kwargs.items()}
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return overload(*args, **kwargs)

    return kernel
