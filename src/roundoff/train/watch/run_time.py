"""Rules that only a run can judge: what is said once, in the first few steps or at the end."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundoff.record import module_path
from roundoff.train.our_hooks import OurHook
from roundoff.train.watch.graph_faults import graph_faults, has_casts
from roundoff.train.watch.updates import LAST_LOOK, UpdateWatch, unowned

#: The graphs of so many losses are looked at.
LOSSES = 4
#: So many names are written out.
_NAMES = 4
#: The steps in which it is noted which parameters have a gradient.
_NOTED = (1, 3)
_LOW = (torch.float16, torch.bfloat16)


class RunTimeRules:
    """Judges losses, steps and parameters, and says a rule to ``advise``, with what its
    text names.
    """

    def __init__(self, advise: Callable[..., None]) -> None:
        self.advise = advise
        self.updates = UpdateWatch()
        self._losses = 0
        self._steps = 0
        self._models: list[tuple[str, weakref.ref[nn.Module]]] = []
        #: identity -> name of parameters that have had a gradient
        self._with_gradient: dict[int, str] = {}
        #: autocast -> what it was asked for, where it was asked to be on
        self._asked: weakref.WeakKeyDictionary[Any, tuple[str, Any]] = (
            weakref.WeakKeyDictionary()
        )
        self._inside: list[tuple[str, Any]] = []
        #: what the latest call of a model was asked to run in
        self._ran_in: tuple[str, Any] | None = None

    # -- models

    def new_model(self, model: nn.Module, prefix: str) -> Callable[[], None]:
        """Look at a model before its first call; returns what takes its hook away."""
        self._models.append((prefix, weakref.ref(model)))
        for path, module in model.named_modules():
            statistics = getattr(module, "running_var", None)
            if isinstance(statistics, Tensor) and statistics.dtype in _LOW:
                name = module_path(path, prefix, model) or type(module).__name__
                dtype = _name(statistics.dtype)
                self.advise("half-statistics", name=name, dtype=dtype)
                break
        hook = OurHook(self._before_forward)
        return model.register_forward_pre_hook(hook).remove

    def _before_forward(self, _: nn.Module, __: Any) -> None:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._ran_in = self._inside[-1] if self._inside else None

    # -- autocast

    def autocast_made(self, autocast: Any, device: str, enabled: bool) -> None:
        """Note what an autocast was asked for: torch turns it off where the device is not
        there.
        """
        if enabled:
            self._asked[autocast] = (device, getattr(autocast, "fast_dtype", None))

    def autocast_entered(self, autocast: Any) -> None:
        """Note that a region begins."""
        asked = self._asked.get(autocast)
        if asked is not None:
            self._inside.append(asked)

    def autocast_left(self, autocast: Any) -> None:
        """Note that a region ends."""
        if self._inside and autocast in self._asked:
            self._inside.pop()

    # -- losses and steps

    def loss(self, loss: Tensor) -> None:
        """Look at the graph of a loss that is about to run backward."""
        if self._losses >= LOSSES:
            return
        self._losses += 1
        for rule in graph_faults(loss):
            self.advise(rule)
        ran_in = self._ran_in
        self._ran_in = None
        if ran_in is None or self._has_low_weights() or has_casts(loss):
            return
        device, dtype = ran_in
        place = self._place()
        if place is not None and place != device:
            self.advise(
                "autocast-without-effect",
                device=device,
                dtype=_name(dtype) if dtype is not None else "16 bits",
                place=place,
            )

    def before_step(self, optimizer: Optimizer) -> None:
        """Note the parameters before an optimizer steps."""
        self.updates.begin(optimizer)
        self._steps += 1
        if self._steps in _NOTED:
            for name, parameter in self._parameters():
                if parameter.grad is not None:
                    self._with_gradient[id(parameter)] = name

    def after_step(self, optimizer: Optimizer) -> None:
        """Compare the parameters after an optimizer has stepped."""
        name = type(optimizer).__name__
        lost = self.updates.end(optimizer)
        if lost is not None:
            self.advise(
                "lost-updates",
                share=lost.share,
                dtype=_name(lost.dtype),
                lr=lost.lr,
                optimizer=name,
            )
        unchanged = set(self.updates.unchanged(optimizer))
        if unchanged:
            names = [path for path, p in self._parameters() if id(p) in unchanged]
            self.advise(
                "unchanged-parameters",
                names=_listed(names or ["parameters"]),
                optimizer=name,
                steps=LAST_LOOK,
            )

    def end(self) -> None:
        """Say which parameters had gradients and no optimizer; called at the end."""
        names = unowned(self._with_gradient, self.updates.owned)
        if names:
            self.advise("unowned-parameters", names=_listed(names))

    # -- parameters

    def _parameters(self) -> Iterable[tuple[str, Tensor]]:
        for prefix, reference in self._models:
            model = reference()
            if model is None:
                continue
            for path, parameter in model.named_parameters():
                yield module_path(path, prefix, model), parameter

    def _has_low_weights(self) -> bool:
        return any(parameter.dtype in _LOW for _, parameter in self._parameters())

    def _place(self) -> str | None:
        """Return the kind of device that the weights are on; None without weights."""
        for _, parameter in self._parameters():
            return parameter.device.type
        return None


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(names: list[str]) -> str:
    """Write the first few names.

    >>> _listed(["a", "b", "c", "d", "e", "f"])
    'a, b, c, d and 2 more parameters'
    """
    text = ", ".join(names[:_NAMES])
    more = len(names) - _NAMES
    return f"{text} and {more:,} more parameters" if more > 0 else text
