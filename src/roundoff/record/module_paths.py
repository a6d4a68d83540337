"""Which module runs: global module hooks, so that a script's models need not be known beforehand."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from roundoff.ops import Position

#: Wrappers that are transparent: a site has one name with and without them.
_WRAPPERS = re.compile(
    r"(^|\.)(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|_flat_param)(?=\.|$)"
)
_PARALLEL = ("DistributedDataParallel", "DataParallel")


class Paths:
    """The stack of modules whose forward runs, by their path in the first module that was called."""

    def __init__(self, model: nn.Module | None = None) -> None:
        self._names: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self.roots: list[weakref.ref[nn.Module]] = []
        self.position = Position()
        self.listeners: list[Callable[[nn.Module, str, Any, Any], None]] = []
        #: told of each module that is called outside of all others for the first time, with what stands before its paths
        self.found: list[Callable[[nn.Module, str], None]] = []
        self._paths: weakref.WeakKeyDictionary[nn.Module, str] = (
            weakref.WeakKeyDictionary()
        )
        if model is not None:
            self._add(model)

    def current(self) -> str:
        """The path of the innermost module that runs, "" outside of all and for the model itself."""
        return self.position.module

    def name_of(self, tensor: Tensor) -> str | None:
        """The name of a parameter or buffer, None of any other tensor."""
        found = self._names.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def modules(self) -> list[nn.Module]:
        """The models that were seen and still exist."""
        return [m for reference in self.roots if (m := reference()) is not None]

    def _add(self, root: nn.Module) -> str:
        main = not self.roots and any(True for _ in root.parameters())
        prefix = "" if main else type(root).__name__
        if any(True for _ in root.parameters()):
            self.roots.append(weakref.ref(root))
        parallel = type(root).__name__ in _PARALLEL
        for path, module in root.named_modules():
            self._paths.setdefault(module, _joined(prefix, _clean(path, parallel)))
        tensors: Iterator[tuple[str, Tensor]] = iter(
            [*root.named_parameters(), *root.named_buffers()]
        )
        for name, tensor in tensors:
            if self.name_of(tensor) is None:
                self._names[id(tensor)] = (
                    weakref.ref(tensor),
                    _joined(prefix, _clean(name, parallel)),
                )
        return prefix

    def _enter(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            return  # the compiler traces this call: nothing of it stays in the compiled code
        path = self._paths.get(module)
        if path is None:
            inner = getattr(module, "_orig_mod", module)  # what torch.compile wraps
            if inner in self._paths:
                path = self._paths[inner]
            elif not self.position.path:
                prefix = self._add(inner)
                path = self._paths[inner]
                for found in self.found:
                    found(module, prefix)
            elif isinstance(module, GraphModule):  # the compiler's
                path = self.position.module
            else:  # made while the model runs
                path = _joined(self.position.module, type(module).__name__)
            self._paths[module] = path
        self.position.enter(path)

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
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


def module_path(path: str, prefix: str, root: nn.Module) -> str:
    """A path as ``root.named_modules()`` gives it, without what wraps modules and below ``prefix``."""
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
    """Without torch's warning that global hooks run once more around a compiled module: that is its boundary."""
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
