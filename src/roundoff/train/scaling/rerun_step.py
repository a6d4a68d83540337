"""``Steps``: what is needed to run the last step's forward and backward pass once more, kept as references.

Nothing is computed in a step that goes well. Kept until the next step are the inputs of each call of the model, the state
of the random generators, autocast's settings, copies of the small buffers that the forward pass itself writes and reads,
and the gradients that came back to the outputs.
"""

from __future__ import annotations

import itertools
import random
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from roundoff.train.scaling.autograd_graph import OUTPUT

_PARALLEL = ("DistributedDataParallel", "DataParallel")
#: Every module of a model with its path.
Modules = list[tuple[nn.Module, str]]
_made = itertools.count()
_SHARDED = ("FullyShardedDataParallel", "FSDPModule")


class Call:
    """One call of the model, and the gradients of its outputs (``gradients``: by place among all outputs)."""

    def __init__(
        self, modules: Modules, args: Any, kwargs: Any, buffers: dict[str, Tensor]
    ) -> None:
        self.args, self.kwargs, self.buffers, self.made = (
            args,
            kwargs,
            buffers,
            next(_made),
        )
        self.modules = modules
        self.training = [module.training for module, _ in modules]
        self.random = _random_states()
        self.autocast = _autocast_states()
        self.region = _active_region()
        self.written = _versions(modules, args, kwargs)
        self.gradients: dict[int, list[Tensor]] = {}
        self.number = 0  # among the step's calls that got a gradient, in the order of the forward passes

    def since(self) -> list[str]:
        """What was written in place after the call, so that it cannot be run as it was."""
        now = _versions(self.modules, self.args, self.kwargs)
        return [what for what in now if now[what] != self.written[what]]

    @contextmanager
    def as_it_was(self) -> Iterator[None]:
        """The surroundings of the call. The caller puts back what is changed here (``preserve``), but for autocast."""
        for (module, _), training in zip(self.modules, self.training, strict=True):
            module.training = training
        buffers = dict(_buffers(self.modules))
        with torch.no_grad():
            for name, value in self.buffers.items():
                buffers[name].copy_(value)
        _set_random_states(self.random)
        with ExitStack() as stack:
            for device, (enabled, dtype, cached) in self.autocast.items():
                stack.enter_context(
                    torch.autocast(
                        device, dtype=dtype, enabled=enabled, cache_enabled=cached
                    )
                )
            if self.region is not None:
                stack.enter_context(self.region.again())
            stack.callback(torch.clear_autocast_cache)
            yield

    def inputs(self) -> tuple[Any, Any, list[Tensor]]:
        """args and kwargs apart from the graph that made them, and those of their tensors that have a gradient."""
        cut: dict[int, Tensor] = {}

        def detached(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            return cut.setdefault(id(value), value.detach().requires_grad_())

        args, kwargs = tree_map(detached, (self.args, self.kwargs))
        return args, kwargs, list(cut.values())


class Steps:
    """Keeps the calls of ``model`` whose outputs got a gradient since ``clear``; ``calls`` are in backward order.

    A module in ``DistributedDataParallel`` is watched inside of it, so that a repeat does not communicate. Of a compiled
    model give what ``torch.compile`` returned: in compiled code hooks don't run.
    """

    def __init__(self, model: nn.Module) -> None:
        outer, model = model, _unwrapped(model)
        self.model = model
        self.sharded = any(
            type(module).__name__ in _SHARDED for module in (outer, *model.modules())
        )
        self.calls: list[Call] = []
        self.paused = False
        self._open: list[Call] = []
        self._own: set[str] = set()  # buffers that the forward pass writes
        self._statistics: set[str] = set()
        self._modules: Modules = []
        handles = (
            model.register_forward_pre_hook(
                _Hook(self, "_before"), with_kwargs=True, prepend=True
            ),
            model.register_forward_hook(
                _Hook(self, "_after"), with_kwargs=True, always_call=True
            ),
        )
        self.remove = weakref.finalize(self, _remove, handles)

    def clear(self) -> None:
        """Nothing of the step is kept any longer."""
        self.calls = []
        self._open.clear()

    def names(self) -> dict[int, str]:
        """Parameter names by identity."""
        return {
            id(parameter): _clean(name)
            for name, parameter in self.model.named_parameters()
        }

    def spoilt(self) -> list[str]:
        """Buffers, such as running statistics, that hold NaN or Inf now."""
        buffers = {
            _clean(name): b
            for name, b in self.model.named_buffers()
            if b.is_floating_point() and not b.is_sparse
        }
        return [
            name
            for name, buffer in buffers.items()
            if not bool(torch.isfinite(buffer).all())
        ]

    def autocast_to(self, dtype: torch.dtype) -> bool:
        """Whether a call of this step ran under torch's autocast to ``dtype``."""
        return any(
            on and to is dtype
            for call in self.calls
            for on, to, _ in call.autocast.values()
        )

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if model is not self.model or self.paused or not torch.is_grad_enabled():
            return
        if not self.calls:  # once a step: walking through a large model takes its time
            self._modules = [(module, path) for path, module in model.named_modules()]
        buffers = (
            {
                n: b.detach().clone()
                for n, b in _buffers(self._modules)
                if n in self._own
            }
            if self._own
            else {}
        )
        self._open.append(Call(self._modules, args, kwargs, buffers))

    def _after(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:  # noqa: ARG002
        if model is not self.model or self.paused or not self._open:
            return
        call = self._open.pop()
        before, buffers = call.written["buffers"], _buffers(call.modules)
        now = tuple(_version(buffer) for _, buffer in buffers)
        if before != now:
            written = {
                name
                for (name, _), old, new in zip(buffers, before, now, strict=False)
                if old != new
            }
            if not written <= self._own | self._statistics:
                self._statistics = _statistics(model)
                self._own |= written - self._statistics
        call.written["buffers"] = now
        if output is None:
            return  # the call has failed
        seen: set[int] = set()  # one tensor may be given twice
        for place, tensor in enumerate(tree_leaves(output)):
            if (
                isinstance(tensor, Tensor)
                and tensor.grad_fn is not None
                and id(tensor) not in seen
            ):
                seen.add(id(tensor))
                node: Any = tensor.grad_fn
                node.metadata[OUTPUT] = place
                hooked: Any = tensor
                hooked.register_hook(_Arrived(self, call, place))

    def _arrived(self, call: Call, place: int, gradient: Tensor) -> None:
        if not any(call is known for known in self.calls):
            self.calls.append(call)
            for number, known in enumerate(sorted(self.calls, key=lambda c: c.made), 1):
                known.number = number
        call.gradients.setdefault(place, []).append(gradient.detach())


class _Hook:
    """A hook that doesn't keep ``Steps`` alive, and that copies and pickles of the model don't take along."""

    def __init__(self, steps: Steps, name: str) -> None:
        self.steps, self.name = weakref.ref(steps), name

    def __call__(self, *args: Any) -> None:
        steps = self.steps()
        if steps is not None and not torch.compiler.is_compiling():
            getattr(steps, self.name)(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Nothing, ()


class _Nothing:
    def __call__(self, *args: Any) -> None:
        """What is left of a hook in a copy."""


class _Arrived:
    """The hook of one output. The graph holds it, and through it the call, until it is freed."""

    def __init__(self, steps: Steps, call: Call, place: int) -> None:
        self.steps, self.call, self.place = weakref.ref(steps), call, place

    def __call__(self, gradient: Tensor) -> None:
        steps = self.steps()
        if steps is not None and not steps.paused:
            steps._arrived(self.call, self.place, gradient)


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _unwrapped(model: nn.Module) -> nn.Module:
    while type(model).__name__ in _PARALLEL:
        inner = model.module
        assert isinstance(inner, nn.Module)  # noqa: S101 (for the type)
        model = inner
    return model


def _clean(name: str) -> str:
    return name.removeprefix("_orig_mod.")


def _statistics(model: nn.Module) -> set[str]:
    """Buffers of normalizations that training writes but does not read."""
    found = set()
    for path, module in model.named_modules():
        if (
            isinstance(module, (nn.modules.batchnorm._NormBase, nn.SyncBatchNorm))
            and module.training
        ):
            found |= {
                f"{path}.{name}".lstrip(".")
                for name, _ in module.named_buffers(recurse=False)
            }
    return found


def _buffers(modules: Modules) -> list[tuple[str, Tensor]]:
    return [
        (f"{path}.{name}" if path else name, buffer)
        for module, path in modules
        if module._buffers
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def _versions(modules: Modules, args: Any, kwargs: Any) -> dict[str, tuple[int, ...]]:
    every = (
        p for module, _ in modules for p in module._parameters.values() if p is not None
    )
    return {
        "inputs": tuple(
            _version(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        ),
        "parameters": tuple(map(_version, every)),
        "buffers": tuple(_version(buffer) for _, buffer in _buffers(modules)),
    }


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _random_states() -> dict[str, Any]:
    states = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "cpu": torch.get_rng_state(),
    }
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        states["cuda"] = cuda.get_rng_state_all()
    return states


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state_all(states["cuda"])


def _autocast_states() -> dict[str, tuple[bool, torch.dtype, bool]]:
    cached = torch.is_autocast_cache_enabled()
    return {
        d: (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d), cached)
        for d in _devices()
    }


def _devices() -> tuple[str, ...]:
    accelerator = (
        torch.accelerator.current_accelerator()
        if hasattr(torch, "accelerator")
        else None
    )
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def _active_region() -> Any:
    """The ``roundoff.autocast`` that is entered, where there is one; its ``again()`` enters it once more."""
    module = sys.modules.get("roundoff.train.autocast.context")
    active = getattr(module, "active", None)
    return None if active is None else active()
