"""Where the steps of an unmodified training end, from its optimizers and ``GradScaler``s."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.record.skipped_frames import skipped_by_compiler
from roundoff.unforeseen import OurPart


class Optimizers:
    """A set of optimizers as objects, which it does not keep alive; some have no hash."""

    def __init__(self) -> None:
        self._references: Any = WeakIdKeyDictionary()

    def __contains__(self, optimizer: object) -> bool:
        return optimizer in self._references

    def __iter__(self) -> Iterator[Any]:
        return iter(list(self._references))

    def __len__(self) -> int:
        return len(self._references)

    def add(self, optimizer: Any) -> None:
        """Add one; once more changes nothing."""
        self._references[optimizer] = None

    def discard(self, optimizer: Any) -> None:
        """Remove one, if it is there."""
        self._references.pop(optimizer, None)

    def clear(self) -> None:
        """Remove all."""
        self._references.clear()


class StepBoundaries:
    """Finds the ends of steps from the optimizers that are made and that step.

    A step ends when every optimizer that was made has stepped, or one of them twice;
    after a scaler's step when it is updated, or, for a script that never does, when it
    scales the next loss.

    Attributes:
        end: called at the end of each step, with its scalars.
        optimizers: those that were made.
        stepped: those of them that have stepped in this step.
        waiting: a scaler has stepped: the step is over when that has been updated.
        ours: keeps faults of this from the program.
    """

    def __init__(self, end: Callable[..., None], ours: OurPart | None = None) -> None:
        self.end = end
        self.ours = ours or OurPart("noticing steps")
        self.optimizers = Optimizers()
        self.stepped = Optimizers()
        self.waiting = False
        self._has_repeated = False
        self._rate = math.nan

    @skipped_by_compiler
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """``optimizer`` has stepped, or its scaler has skipped it."""
        self._has_repeated = self._has_repeated or optimizer in self.stepped
        self.optimizers.add(optimizer)
        self.stepped.add(optimizer)
        self._rate = _rate_of(optimizer)
        if not self.waiting:
            self.end_if_over()

    @skipped_by_compiler
    def end_if_over(self, **scalars: float) -> None:
        """End the step if it is over."""
        idle = [o for o in self.optimizers if o not in self.stepped]
        if self._has_repeated:  # the others may never step
            for optimizer in idle:
                self.optimizers.discard(optimizer)
            idle = []
        if self.stepped and not idle:
            self.stepped.clear()
            self._has_repeated = False
            self.waiting = False
            rate = {} if math.isnan(self._rate) else {"lr": self._rate}
            self.end(**rate, **scalars)

    @skipped_by_compiler
    def end_whole_step(
        self, optimizers: Iterable[torch.optim.Optimizer], scale: Callable[[], float]
    ) -> None:
        """One scaler has stepped all ``optimizers``."""
        for optimizer in [o for o in optimizers if o not in self.stepped]:
            self.step(optimizer)
        self.end_if_over(loss_scale=scale())


def _rate_of(optimizer: torch.optim.Optimizer) -> float:
    """Return the learning rate; NaN for an optimizer that has none, or makes its own."""
    try:
        return float(optimizer.param_groups[0]["lr"])
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError):
        return math.nan


@contextmanager
def patched(*changes: tuple[Any, str, Callable[..., Any]]) -> Iterator[None]:
    """Functions replaced while this is open: ``(owner, name, around)``, where
    ``around(original, *args, **kwargs)`` runs in place of the original."""
    with ExitStack() as stack:
        for owner, name, around in changes:
            original = getattr(owner, name)
            stack.callback(setattr, owner, name, original)
            setattr(owner, name, _around(original, around))
        yield


def _around(original: Any, around: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return replacement


#: Who wants to know of the steps of ``roundoff.LossScaler``.
_LISTENING: list[StepBoundaries] = []


@contextmanager
def whole_step(
    optimizers: Iterable[torch.optim.Optimizer], scale: Callable[[], float]
) -> Iterator[None]:
    """Around a step of all ``optimizers`` by one scaler, taken or skipped: it ends when
    this is left."""
    for boundaries in _LISTENING:
        boundaries.waiting = True
    try:
        yield
        for boundaries in _LISTENING:
            boundaries.ours(boundaries.end_whole_step, optimizers, scale)
    finally:
        # other optimizers may step without a scaler, and end the step
        for boundaries in _LISTENING:
            boundaries.waiting = False


class _Calls:
    """What ``boundaries`` are told of calls of optimizers and of torch's scaler; each
    method runs in place of the ``original``."""

    def __init__(self, boundaries: StepBoundaries) -> None:
        self._boundaries = boundaries
        self._ours = boundaries.ours

    def init(self, original: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._ours(self._boundaries.optimizers.add, optimizer)

    @skipped_by_compiler
    def stepped(self, optimizer: Any, *_: Any) -> None:
        self._ours(self._boundaries.step, optimizer)

    def scale(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
        if self._boundaries.waiting:  # the last step's scaler was not updated
            self._ours(self._boundaries.end_if_over)
        return original(scaler, *args, **kwargs)

    def step(
        self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        self._boundaries.waiting = True
        result = original(scaler, optimizer, *args, **kwargs)
        self._ours(self._step_once, optimizer)
        return result

    def _step_once(self, optimizer: Any) -> None:
        if optimizer not in self._boundaries.stepped:
            self._boundaries.step(optimizer)

    def update(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        if scaler.is_enabled():
            self._ours(self._end_updated, scaler)

    def _end_updated(self, scaler: Any) -> None:
        self._boundaries.end_if_over(loss_scale=float(scaler.get_scale()))


@contextmanager
def watch_steps(boundaries: StepBoundaries, *, whole: bool = True) -> Iterator[None]:
    """Tell ``boundaries`` of every optimizer and ``GradScaler`` of the process while
    this is open, and with ``whole`` of the steps of ``roundoff.LossScaler``."""
    calls = _Calls(boundaries)
    scaler = torch.amp.GradScaler
    with ExitStack() as stack:
        hook = register_optimizer_step_post_hook(calls.stepped)
        stack.callback(hook.remove)
        if whole:
            _LISTENING.append(boundaries)
            stack.callback(_LISTENING.remove, boundaries)
        changes = patched(
            (torch.optim.Optimizer, "__init__", calls.init),
            (scaler, "scale", calls.scale),
            (scaler, "step", calls.step),
            (scaler, "update", calls.update),
        )
        stack.enter_context(changes)
        yield
