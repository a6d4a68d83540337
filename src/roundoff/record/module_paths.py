"""Which module runs: global module hooks, so that a script's models need not be known
beforehand."""

from __future__ import annotations

import gc
import itertools
import re
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.ops import Position
from roundoff.unforeseen import OurPart

#: Wrappers that are transparent: a site has one name with and without them.
_WRAPPERS = re.compile(
    r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_flat_param)(?=\.|$)"
)
_PARALLEL = ("DistributedDataParallel", "DataParallel")


class _OfThread(threading.local):
    """Each thread runs modules of its own."""

    def __init__(self) -> None:
        self.position = Position()


class Paths:
    """The stack of modules whose forward runs, by their path in the first module that
    was called; each thread has its own.

    ``ours`` runs what happens at a module's call, and keeps its faults from the program.
    """

    def __init__(
        self, model: nn.Module | None = None, ours: OurPart | None = None
    ) -> None:
        self._ours = ours or OurPart("following modules")
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self.roots: list[weakref.ref[nn.Module]] = []
        self._prefixes: dict[str, weakref.ref[nn.Module]] = {}
        self._of_thread = _OfThread()
        self.listeners: list[Callable[[nn.Module, str, Any, Any], None]] = []
        #: called with each module that is called outside of all others for the first
        #: time, and what stands before its paths
        self.root_listeners: list[Callable[[nn.Module, str], None]] = []
        # by object: a module may have no hash
        self._paths: MutableMapping[nn.Module, str] = WeakIdKeyDictionary()
        if model is not None:
            self._add(model)

    @property
    def position(self) -> Position:
        """Where this thread is."""
        return self._of_thread.position

    def current(self) -> str:
        """Return the path of the innermost module that runs, "" outside of all and for the
        model itself.
        """
        return self.position.module

    def name_of(self, tensor: Tensor) -> str | None:
        """Return the name of a parameter or buffer, None of any other tensor."""
        entry = self._names.get(id(tensor))
        if entry is None:
            return None
        reference, name = entry
        return name if reference() is tensor else None

    def modules(self) -> list[nn.Module]:
        """Return the models that were called and still exist."""
        modules = [reference() for reference in self.roots]
        return [module for module in modules if module is not None]

    def _add(self, root: nn.Module) -> str:
        """Name the modules and tensors of a model; give what stands before its paths."""
        has_parameters = any(True for _ in root.parameters())
        is_first = not self.roots and has_parameters
        prefix = type(root).__name__
        if has_parameters:
            prefix = "" if is_first else self._free_prefix(prefix)
            self.roots.append(weakref.ref(root))
            self._prefixes[prefix] = self.roots[-1]
        parallel = type(root).__name__ in _PARALLEL
        for path, module in root.named_modules():
            self._paths.setdefault(module, _joined(prefix, _clean(path, parallel)))
        tensors: Iterator[tuple[str, Tensor]] = iter(
            [*root.named_parameters(), *root.named_buffers()]
        )
        for name, tensor in tensors:
            if self.name_of(tensor) is None:
                full_name = _joined(prefix, _clean(name, parallel))
                self._names[id(tensor)] = (weakref.ref(tensor), full_name)
        return prefix

    def _free_prefix(self, name: str) -> str:
        """Return a name that no other model goes by: a network beside its slow copy.

        A model that is gone leaves its name to the next of its class.
        """
        for place in itertools.count(1):
            prefix = name if place == 1 else f"{name}_{place}"
            holder = self._prefixes.get(prefix)
            if holder is None or holder() is None:
                break
        return prefix

    def _enter(self, module: nn.Module, _: Any) -> None:
        # the compiler traces this call: nothing of it stays in the compiled code
        if not torch.compiler.is_compiling():
            self._ours(self._enter_module, module)

    def _enter_module(self, module: nn.Module) -> None:
        path = self._paths.get(module)
        if path is None:
            path = self._paths[module] = self._new_path(module)
        self.position.enter(path)

    def _new_path(self, module: nn.Module) -> str:
        """Return the path of a module that is called for the first time."""
        inner: nn.Module = getattr(module, "_orig_mod", module)  # of torch.compile
        if inner in self._paths:
            return self._paths[inner]
        if not self.position.path:
            root = _holder_of(inner)
            prefix = self._add(root)
            for listener in self.root_listeners:
                listener(module if root is inner else root, prefix)
            return self._paths[inner]
        if isinstance(module, GraphModule):  # the compiler's
            return self.position.module
        # made while the model runs
        return _joined(self.position.module, type(module).__name__)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._ours(self._leave_module, module, inputs, output)

    def _leave_module(self, module: nn.Module, inputs: Any, output: Any) -> None:
        path = self.position.leave()
        for listener in self.listeners:
            listener(module, path, inputs, output)

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Hooks on every module of the process while this is open."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self.position.begin()


def _holder_of(module: nn.Module) -> nn.Module:
    """Return the outermost module that holds this one; without any itself.

    Parts may be called before the model that they are parts of, as by a function that
    evaluates it; and a ``ModuleDict``, or a model whose methods call its parts, is never
    called itself: the parts go by their names in it. Of several holders the largest one
    counts: another may hold a few parts of it for a loss.
    """
    if not any(True for _ in module.parameters()):
        return module
    alive = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    holders: dict[int, nn.Module] = {}
    for holder in sorted(alive, key=_size):
        for child in _parts(holder).values():
            holders[id(child)] = holder
    outermost = module
    while id(outermost) in holders:
        outermost = holders.pop(id(outermost))
    while outermost is not module and _is_wrapper(outermost):
        [outermost] = _parts(outermost).values()
    return outermost


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """Return what a module holds by name, looked up without asking it.

    That of a scripted model is made on the way.
    """
    parts = vars(module).get("_modules", {}).items()
    return {name: part for name, part in parts if part is not None}


def _size(module: nn.Module) -> int:
    """Return how many modules are part of one, itself with them."""
    waiting = [module]
    seen: dict[int, nn.Module] = {}
    while waiting:
        part = waiting.pop()
        if id(part) not in seen:
            seen[id(part)] = part
            waiting += _parts(part).values()
    return len(seen)


def _is_wrapper(module: nn.Module) -> bool:
    """Return True for what the compiler or parallel training puts around a model."""
    parts = _parts(module)
    is_known = type(module).__name__ in _PARALLEL or any(map(_WRAPPERS.search, parts))
    return is_known and len(parts) == 1


def module_path(path: str, prefix: str, root: nn.Module) -> str:
    """Return a path of ``root.named_modules()`` without what wraps modules, below ``prefix``."""
    return _joined(prefix, _clean(path, type(root).__name__ in _PARALLEL))


def _joined(prefix: str, path: str) -> str:
    return f"{prefix}.{path}" if prefix and path else prefix or path


def _clean(path: str, parallel: bool) -> str:
    path = _WRAPPERS.sub("", path).lstrip(".")
    if parallel:
        path = path.removeprefix("module").removeprefix(".")
    return path


@contextmanager
def quiet() -> Iterator[None]:
    """Without torch's warning that global hooks run once more around a compiled module:
    that is its boundary."""
    warnings.filterwarnings(
        "ignore",
        message="Using `torch.compile\\(module\\)` when there are global hooks",
    )
    entry = warnings.filters[0]
    try:
        yield
    finally:
        if entry in warnings.filters:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]
