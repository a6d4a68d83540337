"""``StepCalls``: what is needed to run the last step's forward and backward pass once
more, kept as references.

Nothing is computed in a step that goes well. Kept until the next step are the inputs of
each call of the model, the state of the random generators, autocast's settings, copies
of the small buffers that the forward pass itself writes and reads, and the gradients
that came back to the outputs.
"""

from __future__ import annotations

import itertools
import random
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from roundoff.preserve import random_states, set_random_states
from roundoff.record import unseen
from roundoff.train.our_hooks import OurHook
from roundoff.train.scaling.backward_graph import OUTPUT
from roundoff.train.scaling.step_gradients import write_count
from roundoff.unforeseen import OurPart

_PARALLEL = ("DistributedDataParallel", "DataParallel")
#: Every module of a model with its path.
Modules = list[tuple[nn.Module, str]]
_indices = itertools.count()
_SHARDED = ("FullyShardedDataParallel", "FSDPModule")


@dataclass(frozen=True)
class _Versions:
    """How often each tensor of a call was written in place."""

    inputs: tuple[int, ...]
    parameters: tuple[int, ...]
    buffers: tuple[int, ...]


class ModelCall:
    """One call of the model, as it has to be run again.

    Attributes:
        modules: every module with its path.
        args, kwargs: what the model was called with.
        buffers: copies of the buffers that the forward pass itself writes and reads.
        index: number among all calls of the process.
        gradients: place among the outputs -> the gradients that came back to it.
        number: among the step's calls that got a gradient, in the order of the forward
            passes, from 1.
    """

    def __init__(
        self, modules: Modules, args: Any, kwargs: Any, buffers: dict[str, Tensor]
    ) -> None:
        self.modules = modules
        self.args = args
        self.kwargs = kwargs
        self.buffers = buffers
        self.index = next(_indices)
        self.training = [module.training for module, _ in modules]
        self.random = _random_states()
        self.autocast = _autocast_states()
        self.region = _active_region()
        self.versions = _versions(modules, args, kwargs)
        self.gradients: dict[int, list[Tensor]] = {}
        self.number = 0

    def changed_since(self) -> list[str]:
        """Name what was written in place after the call, so that it cannot be run as it was."""
        now = asdict(_versions(self.modules, self.args, self.kwargs))
        before = asdict(self.versions)
        return [name for name in now if now[name] != before[name]]

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """Restore the surroundings of the call inside.

        The caller puts back what is changed here (``preserve``), but for autocast.
        """
        for (module, _), training in zip(self.modules, self.training, strict=True):
            module.training = training
        buffers = dict(_buffers(self.modules))
        with torch.no_grad():
            for name, value in self.buffers.items():
                buffers[name].copy_(value)
        _set_random_states(self.random)
        with ExitStack() as stack:
            for device, (enabled, dtype, cached) in self.autocast.items():
                region = torch.autocast(
                    device, dtype=dtype, enabled=enabled, cache_enabled=cached
                )
                stack.enter_context(region)
            if self.region is not None:
                stack.enter_context(self.region.again())
            stack.callback(torch.clear_autocast_cache)
            yield

    def inputs(self) -> tuple[Any, Any, list[Tensor]]:
        """Return args and kwargs apart from the graph that made them, and those of
        their tensors that have a gradient.
        """
        detached: dict[int, Tensor] = {}

        def detach(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            return detached.setdefault(id(value), value.detach().requires_grad_())

        args, kwargs = tree_map(detach, (self.args, self.kwargs))
        return args, kwargs, list(detached.values())


class StepCalls:
    """Keeps the calls of ``model`` whose outputs got a gradient since ``clear``.

    ``calls`` are in backward order. A module in ``DistributedDataParallel`` is watched
    inside of it, so that a repeat does not communicate. Of a compiled model give what
    ``torch.compile`` returned: in compiled code hooks don't run.
    """

    def __init__(self, model: nn.Module) -> None:
        inner = _unwrapped(model)
        self.model = inner
        self.sharded = any(
            type(module).__name__ in _SHARDED for module in (model, *inner.modules())
        )
        self.calls: list[ModelCall] = []
        self.paused = False
        self.ours = OurPart("keeping the calls of a model")
        self._open: list[ModelCall] = []
        self._written: set[str] = set()  # buffers that the forward pass writes
        self._statistics: set[str] = set()  # those of them that it does not read
        self._modules: Modules = []
        handles = (
            inner.register_forward_pre_hook(
                _Hook(self, "before"), with_kwargs=True, prepend=True
            ),
            inner.register_forward_hook(
                _Hook(self, "after"), with_kwargs=True, always_call=True
            ),
        )
        self.remove = weakref.finalize(self, _remove, handles)

    def clear(self) -> None:
        """Forget the step."""
        self.calls = []
        self._open.clear()

    def names(self) -> dict[int, str]:
        """Return parameter names by identity."""
        named = self.model.named_parameters()
        return {id(parameter): _clean(name) for name, parameter in named}

    def spoilt_buffers(self) -> list[str]:
        """Name buffers, such as running statistics, that hold NaN or Inf now."""
        return [
            _clean(name)
            for name, buffer in self.model.named_buffers()
            if _holds_nonfinite(buffer)
        ]

    def autocast_to(self, dtype: torch.dtype) -> bool:
        """Return True if a call of this step ran under torch's autocast to ``dtype``."""
        for call in self.calls:
            for enabled, to, _ in call.autocast.values():
                if enabled and to is dtype:
                    return True
        return False

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Keep a call that begins: the forward pre-hook of the model."""
        if model is not self.model or self.paused or not torch.is_grad_enabled():
            return
        if not self.calls:  # once a step: walking through a large model takes its time
            self._modules = [(module, path) for path, module in model.named_modules()]
        buffers = {}
        if self._written:
            buffers = {
                name: buffer.detach().clone()
                for name, buffer in _buffers(self._modules)
                if name in self._written
            }
        self._open.append(ModelCall(self._modules, args, kwargs, buffers))

    def after(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        """Mark the outputs of a call: the forward hook of the model."""
        if model is not self.model or self.paused or not self._open:
            return
        call = self._open.pop()
        self._note_written_buffers(call)
        if output is None:
            return  # the call has failed
        marked: set[int] = set()  # one tensor may be returned twice
        for place, tensor in enumerate(tree_leaves(output)):
            if not isinstance(tensor, Tensor) or tensor.grad_fn is None:
                continue
            if id(tensor) not in marked:
                marked.add(id(tensor))
                self._mark(call, place, tensor)

    def _note_written_buffers(self, call: ModelCall) -> None:
        before = call.versions.buffers
        buffers = _buffers(call.modules)
        now = tuple(write_count(buffer) for _, buffer in buffers)
        if before == now:
            return
        call.versions = replace(call.versions, buffers=now)
        rows = zip(buffers, before, now, strict=False)
        written = {name for (name, _), old, new in rows if old != new}
        if not written <= self._written | self._statistics:
            self._statistics = _statistics(self.model)
            self._written |= written - self._statistics

    def _mark(self, call: ModelCall, place: int, output: Any) -> None:
        output.grad_fn.metadata[OUTPUT] = place
        output.register_hook(_GradientHook(self, call, place))

    def _arrived(self, call: ModelCall, place: int, gradient: Tensor) -> None:
        if not any(call is other for other in self.calls):
            self.calls.append(call)
            forward_order = sorted(self.calls, key=lambda other: other.index)
            for number, other in enumerate(forward_order, 1):
                other.number = number
        call.gradients.setdefault(place, []).append(gradient.detach())


class _Hook(OurHook):
    """A hook that doesn't keep ``StepCalls`` alive."""

    def __init__(self, calls: StepCalls, name: str) -> None:
        self.calls = weakref.ref(calls)
        self.name = name

    def __call__(self, *args: Any) -> None:
        calls = self.calls()
        if calls is not None and not torch.compiler.is_compiling():
            with unseen():
                calls.ours(getattr(calls, self.name), *args)


class _GradientHook:
    """The hook of one output. The graph holds it, and through it the call, until it is freed."""

    def __init__(self, calls: StepCalls, call: ModelCall, place: int) -> None:
        self.calls = weakref.ref(calls)
        self.call = call
        self.place = place

    def __call__(self, gradient: Tensor) -> None:
        calls = self.calls()
        if calls is not None and not calls.paused:
            calls.ours(calls._arrived, self.call, self.place, gradient)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _unwrapped(model: nn.Module) -> nn.Module:
    while type(model).__name__ in _PARALLEL:
        inner = model.module
        if not isinstance(inner, nn.Module):  # of the user's, that is only called so
            return model
        model = inner
    return model


def _clean(name: str) -> str:
    return name.removeprefix("_orig_mod.")


def _holds_nonfinite(buffer: Tensor) -> bool:
    if not buffer.is_floating_point() or buffer.is_sparse:
        return False
    return not bool(torch.isfinite(buffer).all())


def _statistics(model: nn.Module) -> set[str]:
    """Name the buffers of normalizations that training writes but does not read."""
    kinds = (nn.modules.batchnorm._NormBase, nn.SyncBatchNorm)
    names = set()
    for path, module in model.named_modules():
        if isinstance(module, kinds) and module.training:
            for name, _ in module.named_buffers(recurse=False):
                names.add(f"{path}.{name}".lstrip("."))
    return names


def _buffers(modules: Modules) -> list[tuple[str, Tensor]]:
    """Return every buffer with its name, one module after the other."""
    buffers = []
    for module, path in modules:
        prefix = f"{path}." if path else ""
        for name, buffer in module._buffers.items():
            if buffer is not None:
                buffers.append((prefix + name, buffer))
    return buffers


def _versions(modules: Modules, args: Any, kwargs: Any) -> _Versions:
    inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    parameters: list[Tensor] = []
    for module, _ in modules:
        parameters += [p for p in module._parameters.values() if p is not None]
    return _Versions(
        inputs=tuple(map(write_count, inputs)),
        parameters=tuple(map(write_count, parameters)),
        buffers=tuple(write_count(buffer) for _, buffer in _buffers(modules)),
    )


def _random_states() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": random_states(),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    set_random_states(states["torch"])


def _autocast_states() -> dict[str, tuple[bool, torch.dtype, bool]]:
    """Return for each device: autocast is on, its dtype, and its cache is on."""
    cached = torch.is_autocast_cache_enabled()
    return {
        device: (
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            cached,
        )
        for device in _devices()
    }


def _devices() -> tuple[str, ...]:
    if not hasattr(torch, "accelerator"):
        return ("cpu",)
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def _active_region() -> Any:
    """Return the ``roundoff.autocast`` that is entered, where there is one; its
    ``again()`` enters it once more.
    """
    module = sys.modules.get("roundoff.train.autocast.context")
    active = getattr(module, "active", None)
    return None if active is None else active()
