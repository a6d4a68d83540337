"""What the training loop does between its operators: clear gradients, go backward, clip,
unscale, step. The order of these and their numbers leave no row of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from roundoff.errors import RunError
from roundoff.record.nested_steps import is_part_of_a_step
from roundoff.record.skipped_frames import skipped_by_compiler
from roundoff.record.source_lines import user_line
from roundoff.record.step_boundaries import patched
from roundoff.unforeseen import OurPart

#: What an event is called that tells which parameters want no gradient.
FROZEN = "frozen"
#: What the event of an optimizer's step is called.
OPTIMIZER_STEP = "optimizer.step"
#: The number of an optimizer's step that tells how many values a group holds.
HELD = "values held"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopEvent:
    """Something that the loop did.

    Attributes:
        what: ``zero_grad``, ``backward``, ``clip_grad_norm_``, ``optimizer.step`` ...
        of: which optimizer, in the order of their first use: ``Adam``, ``Adam#1``.
        line: the user's, ``train.py:31``.
        call: how many operator calls of the step ran before it.
        numbers: its settings by name, such as ``lr`` or ``max_norm``; of the second
            group of parameters ``lr (group 1)``; ``HELD`` is how many values it holds,
            or a clip is given.
        names: of the parameters that it tells of.
        inside: of an optimizer's step, the optimizer whose step makes it: one that holds
            several, or wraps another.
        changed: of an optimizer's step, the settings that it has changed itself, as one
            with a schedule of its own does.
    """

    what: str
    of: str = ""
    line: str | None = None
    call: int = 0
    numbers: Mapping[str, float]
    names: Sequence[str] = ()
    inside: str = ""
    changed: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of_json(cls, entry: Any, where: str) -> LoopEvent:
        """Read one object of ``loop.json``. Raises ``RunError`` for anything else."""
        try:
            return cls(
                what=str(entry["what"]),
                of=str(entry["of"]),
                line=entry["line"],
                call=int(entry["call"]),
                numbers=_read_numbers(entry["numbers"]),
                names=tuple(map(str, entry["names"])),
                inside=str(entry.get("inside", "")),
                changed=_read_numbers(entry.get("changed", {})),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunError(
                "an event of the loop cannot be read", where=where, got=str(error)
            ) from error


class LoopLog:
    """Gathers the events of the step that runs now.

    ``calls`` says how many operator calls have run in it; ``told`` is given each call,
    its arguments and its result, in steps that are not recorded too; ``ours`` keeps
    faults of the log from the program.
    """

    def __init__(
        self,
        calls: Callable[[], int],
        told: Callable[[str, Any, Any, Any], None],
        ours: OurPart | None = None,
    ) -> None:
        self._calls = calls
        self._told = told
        self._ours = ours or OurPart("the log of the training loop")
        self._events: list[LoopEvent] = []
        self._names: dict[int, str] = {}
        #: An optimizer's step that runs, and calls a closure.
        self._open_step: LoopEvent | None = None
        #: The optimizers whose steps run, each inside the one before.
        self._stepping: list[str] = []
        self._depth = 0

    def take(self) -> list[LoopEvent]:
        """Return the events so far; the next ones are of another step."""
        events = self._events
        self._events = []
        self._open_step = None
        return events

    def add(
        self,
        what: str,
        *,
        of: Any = None,
        numbers: Mapping[str, float] | None = None,
        names: Sequence[str] = (),
        inside: str = "",
    ) -> None:
        """Add an event that happens now."""
        event = LoopEvent(
            what=what,
            of="" if of is None else self._name(of),
            line=user_line(2),
            call=self._calls(),
            numbers=numbers or {},
            names=names,
            inside=inside,
        )
        self._events.append(event)
        if self._open_step is not None:  # what its closure does comes before it
            self._events[-2:] = [event, self._open_step]

    def _name(self, thing: Any) -> str:
        """Return the class of an object, and its number among those of the class."""
        name = self._names.get(id(thing))
        if name is None:
            kind = type(thing).__name__
            before = sum(n.partition("#")[0] == kind for n in self._names.values())
            name = f"{kind}#{before}" if before else kind
            self._names[id(thing)] = name
        return name

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Notice what the loop does while this is open."""
        with ExitStack() as stack:
            for hook in (
                register_optimizer_step_pre_hook(self._optimizer_steps),
                register_optimizer_step_post_hook(self._optimizer_stepped),
            ):
                stack.callback(hook.remove)
            stack.enter_context(patched(*self._changes()))
            yield

    def _changes(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        optimizer = torch.optim.Optimizer
        yield optimizer, "zero_grad", self._noticing("zero_grad")
        yield nn.Module, "zero_grad", self._noticing("zero_grad", named=False)
        yield torch.autograd, "backward", self._going_backward("backward", 3)
        yield torch.autograd, "grad", self._going_backward("autograd.grad", 4)
        for schedule in (LRScheduler, ReduceLROnPlateau):
            yield schedule, "step", self._noticing("scheduler.step")
        for place in (nn.utils, nn.utils.clip_grad):
            yield place, "clip_grad_norm_", self._clipping("max_norm")
            yield place, "clip_grad_value_", self._clipping("clip_value")
        scaler = torch.amp.GradScaler
        for method in ("scale", "unscale_", "step", "update"):
            noticing = self._noticing(f"scaler.{method}", named=False)
            yield scaler, method, noticing

    def _noticing(self, what: str, *, named: bool = True) -> Callable[..., Any]:
        """Return what runs in place of a method, and notes that it was called."""

        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            thing = args[0] if named and args else None
            return self._noted(what, thing, {}, original, args, kwargs)

        return around

    def _going_backward(self, what: str, place: int) -> Callable[..., Any]:
        """Return what runs in place of a call that takes gradients.

        ``create_graph`` is its argument number ``place``; it is noted where it is asked
        for.
        """

        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            value = args[place] if len(args) > place else kwargs.get("create_graph")
            settings = {"create_graph": True} if value else {}
            return self._noted(what, None, settings, original, args, kwargs)

        return around

    def _clipping(self, limit: str) -> Callable[..., Any]:
        def around(original: Any, *args: Any, **kwargs: Any) -> Any:
            if args and isinstance(args[0], Iterator):
                args = [*args[0]], *args[1:]  # which can be gone through once
            parameters = args[0] if args else kwargs.get("parameters")
            value = args[1] if len(args) > 1 else kwargs.get(limit)
            settings = {limit: value, HELD: self._ours(_values_in, parameters)}
            what = original.__name__
            return self._noted(what, None, settings, original, args, kwargs)

        return around

    def _noted(
        self,
        what: str,
        thing: Any,
        settings: Mapping[str, Any],
        original: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        # what one of these calls inside is its own affair
        is_noted = self._depth == 0 and not torch.compiler.is_compiling()
        if is_noted:
            self._ours(self._add_with, what, thing, settings)
        self._depth += 1
        try:
            result = original(*args, **kwargs)
        finally:
            self._depth -= 1
        if is_noted:
            self._told(what, args, kwargs, result)
        return result

    @skipped_by_compiler
    def _add_with(self, what: str, thing: Any, settings: Mapping[str, Any]) -> None:
        self.add(what, of=thing, numbers=_numbers(settings))

    @skipped_by_compiler
    def _optimizer_steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_part_of_a_step(optimizer):
            self._ours(self._add_step, optimizer, args, kwargs)

    @skipped_by_compiler
    def _optimizer_stepped(self, optimizer: Any, *_: Any) -> None:
        if not is_part_of_a_step(optimizer):
            self._ours(self._close_step, optimizer)

    def _close_step(self, optimizer: Any) -> None:
        self._open_step = None
        name = self._name(optimizer)
        self._end_step(name)
        self._note_changes(name, _settings_of(optimizer))

    def _note_changes(self, name: str, settings: Mapping[str, float]) -> None:
        """Note what an optimizer's last step has made of its settings."""
        for place, event in reversed([*enumerate(self._events)]):
            if (event.what, event.of) == (OPTIMIZER_STEP, name):
                changed = {
                    k: v for k, v in settings.items() if event.numbers.get(k) != v
                }
                self._events[place] = replace(event, changed=changed)
                return

    def _end_step(self, name: str) -> None:
        """Note that an optimizer steps no more, nor does what it made step."""
        if name in self._stepping:
            del self._stepping[self._stepping.index(name) :]

    def _add_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        name = self._name(optimizer)
        self._end_step(name)  # which an exception may have ended
        inside = self._stepping[-1] if self._stepping else ""
        self._stepping.append(name)
        numbers = _settings_of(optimizer)
        self.add(OPTIMIZER_STEP, of=optimizer, numbers=numbers, inside=inside)
        calls_back = any(map(callable, (*args[1:], *kwargs.values())))
        self._open_step = self._events[-1] if calls_back else None
        self._told(OPTIMIZER_STEP, (optimizer,), {}, None)


def _settings_of(optimizer: Any) -> dict[str, float]:
    """Return the settings of each group of parameters that are numbers."""
    numbers: dict[str, float] = {}
    for place, group in enumerate(optimizer.param_groups):
        suffix = f" (group {place})" if place else ""
        settings = _numbers(group | {HELD: _values_in(group["params"])})
        numbers |= {f"{name}{suffix}": n for name, n in settings.items()}
    return numbers


def _values_in(parameters: Any) -> int | None:
    """Return how many values one parameter, or a list of them, holds; None for anything else."""
    listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    if not isinstance(listed, Sequence):
        return None
    return sum(each.numel() for each in listed if isinstance(each, torch.Tensor))


def _numbers(settings: Mapping[str, Any]) -> dict[str, float]:
    """Return the settings that are numbers; several under one name get a place each."""
    numbers: dict[str, float] = {}
    for name, value in settings.items():
        entries = value if isinstance(value, tuple) else (value,)
        for place, entry in enumerate(entries):
            number = _number(entry)
            if number is not None:
                numbers[f"{name}[{place}]" if len(entries) > 1 else name] = number
    return numbers


def _read_numbers(entry: Any) -> dict[str, float]:
    return {str(name): float(value) for name, value in entry.items()}


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value.detach()) if value.numel() == 1 else None
    return float(value) if isinstance(value, bool | int | float) else None
