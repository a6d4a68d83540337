"""``roundoff.watch``: an unmodified training script with its loss, loss scale, gradient
norm, and why steps go wrong.
"""

from __future__ import annotations

import functools
import gc
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.errors import RoundoffError, RunError, StuckError
from roundoff.ops import slow_in_fp16
from roundoff.record import (
    Paths,
    ScriptError,
    StepBoundaries,
    StopScript,
    patched,
    quiet,
    run_program,
    unseen,
    watch_steps,
    words_of,
)
from roundoff.train import (
    CODES,
    FLOOR_STEPS,
    OFTEN,
    RECENT_STEPS,
    RULES,
    BackwardGraph,
    BadGradients,
    LoopAdvice,
    LossScaler,
    LostLoss,
    Monitor,
    RunTimeRules,
    ScriptCalls,
    ScriptCause,
    Skip,
    StepCalls,
    StepEnd,
    StepGradients,
    StepState,
    WatchEvent,
    WatchSummary,
    explain_skip,
    has_bf16,
    script_cause,
    vanishing_eps,
    without_our_hooks,
)
from roundoff.unforeseen import OurPart

Say = Callable[[WatchEvent], None]


def watch(
    command: Sequence[str],
    say: Say | None = None,
    *,
    every: int = 1,
    explain: int = 3,
    stop_on_nan: bool = False,
) -> WatchSummary:
    """Run a training script, unchanged, and say what its loss, loss scale and gradients
    do, and why steps are skipped.

    Every model that is called is watched by a ``Monitor``. The training's numbers do not
    change.

    Args:
        command: a script and its arguments, or ``-m``, a module and its arguments.
        say: called with each event while the script runs; by default events are printed
            to standard error, as ``roundoff watch`` does.
        every: look at modules in each N-th step.
        explain: run so many of the steps with NaN or Inf in the gradients once more, to
            find the operator.
        stop_on_nan: end the script before a NaN reaches the weights: where the loss, or
            without a scaler a gradient, is not finite.

    Returns:
        The last event; its ``trouble`` says why the training did not end well.

    Raises:
        ScriptError: the script failed or was interrupted (not where a loss scaler gave
            up: that is trouble).
        RunError: no step ended.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> script = '''
        ... import torch
        ... model = torch.nn.Linear(2, 1)
        ... optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ... for _ in range(3):
        ...     optimizer.zero_grad()
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        ... '''
        >>> events = []
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = Path(folder) / "script.py"
        ...     _ = path.write_text(script)
        ...     summary = watch([str(path)], events.append)
        >>> [event.name for event in events], summary.steps, summary.trouble
        (['step', 'step', 'step', 'end'], 3, None)
    """
    if say is None:
        with _printed() as printing:
            return watch(
                command, printing, every=every, explain=explain, stop_on_nan=stop_on_nan
            )
    words = words_of(command, "watch")
    watcher = _Watcher(say, every=every, explain=explain, stop_on_nan=stop_on_nan)
    stuck: str | None = None
    try:
        with watcher.listening():
            run_program(words, watcher.progress)
            watcher.ends.end_if_over()  # a last step whose scaler was not updated
            watcher.ours(watcher.rules.end)
    except ScriptError as error:
        if not isinstance(error.__cause__, StuckError):
            raise
        stuck = f"the loss scaler gave up: {error.__cause__.what}"
    gc.collect()  # see capture_script
    if not watcher.number and stuck is None and watcher.ours.stopped is None:
        raise RunError(
            "no step ended in this script",
            where=" ".join(words),
            expected="a torch.optim optimizer that steps",
        )
    trouble = stuck or watcher.trouble()
    summary = WatchSummary(
        watcher.number,
        watcher.skips,
        watcher.scale,
        trouble,
        warnings=watcher.warnings,
    )
    say(summary)
    return summary


@contextmanager
def _printed() -> Iterator[Say]:
    from roundoff.report import HarmlessConsole, print_events

    console = HarmlessConsole(stderr=True, highlight=False)
    with print_events(console) as say:
        yield say


def _script(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Script a model as the program has it: hooks would be compiled with it."""
    with without_our_hooks(model):
        return original(model, *args, **kwargs)


class _Watcher:
    """The state of a training while it runs; ``listening`` hears of every model,
    optimizer and scaler of the process.

    Attributes:
        number: of the step that runs.
        skips: number of skipped steps.
        scale: the loss scale; None as long as no scaler was seen.
        now: the step that runs.
        monitor: of every model.
        steps: calls of each model, to run a step again.
        graph: what ran backward in this step.
        ends: finds the ends of steps.
    """

    def __init__(
        self, say: Say, *, every: int, explain: int, stop_on_nan: bool
    ) -> None:
        self.say = say
        self.explain = explain
        self.stop_on_nan = stop_on_nan
        self.number = 0
        self.skips = 0
        self.scale: float | None = None
        self.now = StepState()
        self.monitor = Monitor(every=every)
        self.steps: list[StepCalls] = []
        self.graph = BackwardGraph()
        self.ours = OurPart("watching")
        #: the script's own calls of torch
        self.calls = ScriptCalls(self._is_in_a_model, self.ours)
        self.ends = StepBoundaries(self._end, self.ours)
        self._stopped: str | None = None
        self._bad_in_a_row = 0
        #: steps whose loss was not finite though their gradients were
        self._lost_in_a_row = 0
        self._low_in_a_row = 0
        self._skipped_in_a_row = 0
        self._recent_skips: deque[bool] = deque(maxlen=RECENT_STEPS)
        self._rule_hooks: list[Callable[[], None]] = []
        self._advised: set[str] = set()
        self.rules = RunTimeRules(self._advise)
        self._scalers = 0
        self._explained = 0
        self._floor = 1.0
        self._highest = 0.0
        self._inside_scaler = False
        self._last_was_skipped = False
        #: what a scaler gave back -> the loss
        self._unscaled: Any = WeakIdKeyDictionary()
        #: what stands before the paths of modules without parameters, such as losses
        self._functions: set[str] = set()
        #: schedule -> the step that it moved in last
        self._scheduled: weakref.WeakKeyDictionary[Any, int] = (
            weakref.WeakKeyDictionary()
        )

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Listen to the process; everything is undone on exit."""
        self._paths = paths = Paths(ours=self.ours)
        paths.root_listeners.append(self.ours.around(self._new_model))
        with ExitStack() as stack:
            stack.enter_context(quiet())
            stack.enter_context(paths.follow())
            stack.enter_context(self.monitor)
            stack.enter_context(watch_steps(self.ends, whole=False))
            before = register_optimizer_step_pre_hook(self._before_step)
            stack.callback(before.remove)
            after = register_optimizer_step_post_hook(self._after_step)
            stack.callback(after.remove)
            stack.callback(self._remove_rules)
            stack.callback(self._remove_steps)
            stack.enter_context(patched(*self._patches()))
            stack.enter_context(self.calls.listening())
            yield

    def _patches(self) -> list[tuple[Any, str, Callable[..., Any]]]:
        scaler = torch.amp.GradScaler
        patches: list[tuple[Any, str, Callable[..., Any]]] = [
            (scaler, "__init__", self._new_scaler),
            (scaler, "scale", self._scale_loss),
            (scaler, "step", self._torch_scaler_step),
            (torch.autograd, "backward", self._backward),
            (torch.jit, "script", _script),
            (torch, "compile", self._compile),
            (torch.autocast, "__init__", self._new_autocast),
            (torch.autocast, "__enter__", self._enter_autocast),
            (torch.autocast, "__exit__", self._exit_autocast),
            (LossScaler, "step", self._roundoff_scaler_step),
            (torch.optim.lr_scheduler.LRScheduler, "step", self._schedule_step),
        ]
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            patches.append((owner, "clip_grad_norm_", self._clip))
            patches.append((owner, "clip_grad_value_", self._clip))
        return patches

    def _remove_steps(self) -> None:
        for steps in self.steps:
            steps.remove()

    def _remove_rules(self) -> None:
        for remove in self._rule_hooks:
            remove()

    @property
    def warnings(self) -> int:
        """How many faults of the loop were said."""
        return len(self._advised)

    def progress(self) -> str:
        """Say how far the training came, for the error of a script that failed."""
        return f"{self.number} steps were seen by then, {self.skips} of them skipped"

    def trouble(self) -> str | None:
        """Say why the training did not end well; None where it did."""
        if self._stopped is not None:
            return self._stopped
        if self.scale is not None and self.scale < 1 <= self._highest:
            return f"the loss scale collapsed to {self.scale:g}"
        bad = self._bad_in_a_row
        if self._last_was_skipped and bad >= min(FLOOR_STEPS, self.number):
            return f"the last {bad} steps were skipped"
        if bad and not self._last_was_skipped:
            return f"the gradients of the last {bad} steps were not finite, and the weights took them"
        if self._lost_in_a_row:
            return (
                f"the loss of the last {self._lost_in_a_row:,} steps was NaN or Inf, "
                "though the gradients were finite"
            )
        return None

    # -- the model
    # -------------------------------------------------------------------------------------------------------

    @unseen()
    def _new_model(self, model: nn.Module, prefix: str) -> None:
        """Listen to a model that no other one contains, before its first call."""
        if not any(True for _ in model.parameters()):
            self._functions.add(prefix)
            return
        self.monitor.add(model, prefix)
        self._rule_hooks.append(self.rules.new_model(model, prefix))
        self._rule_hooks += self.calls.rest_in(model)
        steps = StepCalls(model)
        self.steps.append(steps)
        # hooks that are added now run from the next call on; torch's own frame knows
        # what this one was called with
        frame = _frame_of_call()
        if frame is not None and not torch.compiler.is_compiling():
            steps.before(steps.model, frame.f_locals["args"], frame.f_locals["kwargs"])

    def _is_in_a_model(self) -> bool:
        path = self._paths.position.path
        return bool(path) and path[0] not in self._functions

    def _compile(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.leave()
        return original(*args, **kwargs)

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        losses = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
        self.ours(self._note_losses, losses)
        original(losses, *args, **kwargs)
        self.calls.begin_backward()

    def _note_losses(self, losses: Sequence[Tensor]) -> None:
        for loss in losses:
            if loss.numel() == 1:
                self._note_loss(loss)
                self.rules.loss(loss)
            self.graph.add(loss, closely=True)
        self._note_cause(losses)

    def _note_cause(self, losses: Sequence[Tensor]) -> None:
        """Find what made a loss NaN while its graph still keeps what it was made of.

        On another device than the CPU that would wait for it.
        """
        on_cpu = [loss for loss in losses if loss.device.type == "cpu"]
        if self.now.cause is None and not all(map(_is_finite, on_cpu)):
            self.now.cause = self._script_cause(losses)

    def _script_cause(self, losses: Sequence[Tensor]) -> ScriptCause | None:
        return script_cause(
            self.calls,
            self.steps,
            self.graph,
            losses,
            after_bad=self._bad_in_a_row > 0,
        )

    def _note_loss(self, loss: Tensor) -> None:
        unscaled = self._unscaled.get(loss)
        is_scaled = unscaled is None
        self.now.losses.append((loss.detach() if is_scaled else unscaled, is_scaled))

    # -- the step
    # --------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Measure an optimizer that steps without a scaler; with a closure, after each
        call of it.
        """
        self.ours(self.rules.before_step, optimizer)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self.calls.rest()
        if self._inside_scaler:
            return None
        if not callable(closure):
            self.ours(self._step_without_scaler, optimizer)
            return None

        @functools.wraps(closure)
        def measured(*words: Any, **more: Any) -> Any:
            result = closure(*words, **more)
            self.now.forget_gradients()
            self.ours(self._step_without_scaler, optimizer)
            return result

        if len(args) > 1:
            return (args[0], measured, *args[2:]), kwargs
        return args, kwargs | {"closure": measured}

    def _after_step(self, optimizer: Optimizer, _: Any, __: Any) -> None:
        self.calls.resume()
        self.ours(self.rules.after_step, optimizer)

    def _step_without_scaler(self, optimizer: Optimizer) -> None:
        scaler = self.now.scaler
        is_scaled = scaler is not None and self.now.factor != 1
        if is_scaled and _stage(scaler, optimizer) == "READY":
            name = type(optimizer).__name__
            self._advise("scaler-not-stepped", scale=self.now.factor, optimizer=name)
        self._measure([optimizer], 1.0)
        if not self.now.bad:
            self._explain_loss()
            return
        self._explain([optimizer], None)
        if self.stop_on_nan:
            self._stopped = (
                "stopped before the weights took gradients that are not finite"
            )
            self._end()
            raise StopScript

    def _torch_scaler_step(
        self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        self.ours(self._before_torch_scaler, scaler, optimizer)
        self._inside_scaler = True
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            self._inside_scaler = False
        self.ours(self._after_torch_scaler, scaler, optimizer)
        return result

    def _before_torch_scaler(self, scaler: Any, optimizer: Any) -> None:
        is_scaled = _stage(scaler, optimizer) == "READY"
        scale = float(scaler.get_scale()) if is_scaled else 1.0
        self._measure([optimizer], scale)
        if has_bf16(optimizer) or self._runs_autocast(torch.bfloat16):
            self._advise("scaler-with-bf16")
        self.now.needs_update = True

    def _after_torch_scaler(self, scaler: Any, optimizer: Any) -> None:
        state = scaler._per_optimizer_states[id(optimizer)]
        if any(float(value) for value in state["found_inf_per_device"].values()):
            self.now.skipped = True
            # the scale that it had: it changes with update
            self._explain([optimizer], float(scaler.get_scale()))

    def _roundoff_scaler_step(
        self, original: Any, scaler: LossScaler, *optimizers: Any, **kwargs: Any
    ) -> None:
        if not scaler.enabled:
            original(scaler, *optimizers, **kwargs)
            return
        self.ours(self._before_roundoff_scaler, scaler, optimizers)
        self._inside_scaler = True
        self.ends.waiting = True
        steps = scaler.steps
        try:
            original(scaler, *optimizers, **kwargs)
        finally:
            self._inside_scaler = False
            if scaler.steps > steps:
                self.ours(self._after_roundoff_scaler, scaler, optimizers)
            self.ends.waiting = False

    def _before_roundoff_scaler(
        self, scaler: LossScaler, optimizers: Sequence[Optimizer]
    ) -> None:
        self.scale = scaler.get_scale()
        self._floor = max(1.0, scaler.floor)
        self._measure(optimizers, 1.0 if scaler.is_unscaled else self.scale)

    def _after_roundoff_scaler(
        self, scaler: LossScaler, optimizers: Sequence[Optimizer]
    ) -> None:
        if bool(scaler.skipped):
            self.now.skipped = True
            skip = scaler.last_skip if scaler.explains else None
            self._explain(optimizers, self.scale, skip)
            waiting = [o for o in optimizers if o not in self.ends.stepped]
            for optimizer in waiting:
                self.ends.step(optimizer)
        self.ends.end_if_over(loss_scale=scaler.get_scale())

    def _end(self, lr: float | None = None, loss_scale: float | None = None) -> None:
        """End a step: say it, and begin the next."""
        if self.now.needs_update and loss_scale is None:
            self._advise("scaler-not-updated")
        if loss_scale is not None:
            self.scale = loss_scale
        loss = self.now.loss()
        is_lost = loss is not None and not math.isfinite(loss)
        # a script may drop a backward pass whose loss it has seen to be NaN
        self._count(is_lost=is_lost and self.now.is_last_loss_lost)
        self.say(
            StepEnd(
                step=self.number,
                loss=loss,
                loss_scale=self.scale,
                gradient_norm=self.now.norm,
                non_finite=self.now.bad_share,
                skipped=self.now.skipped,
                skips=self.skips,
                lr=lr,
            )
        )
        self._check_scale()
        if self._runs_slow_fp16():
            self._advise("fp16-on-cpu")
        self._begin()
        if self.stop_on_nan and is_lost and self._stopped is None:
            self._stopped = "stopped at a loss that is not finite"
            raise StopScript

    def _count(self, *, is_lost: bool) -> None:
        is_bad = bool(self.now.bad) or self.now.skipped
        self.skips += self.now.skipped
        self._bad_in_a_row = self._bad_in_a_row + 1 if is_bad else 0
        self._last_was_skipped = self.now.skipped
        self._lost_in_a_row = self._lost_in_a_row + 1 if is_lost and not is_bad else 0
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if self.now.skipped else 0
        if self._skipped_in_a_row >= FLOOR_STEPS:
            self._advise("steps-skipped", steps=self._skipped_in_a_row)
        self._count_recent_skips()

    def _count_recent_skips(self) -> None:
        """Count skips from the first step that was taken on: before it the scale falls."""
        if self.now.skipped and not self._recent_skips:
            return
        self._recent_skips.append(self.now.skipped)
        skips = sum(self._recent_skips)
        is_full = len(self._recent_skips) == RECENT_STEPS
        if is_full and skips >= RECENT_STEPS * OFTEN:
            self._advise("often-skipped", skips=skips, steps=RECENT_STEPS)

    def _begin(self) -> None:
        self.number += 1
        self.monitor.step()
        self.graph.clear()
        self.calls.clear()
        for steps in self.steps:
            steps.clear()
        self.now = StepState()

    def _check_scale(self) -> None:
        if self.scale is None:
            return
        self._highest = max(self._highest, self.scale)
        is_low = self.scale <= self._floor < self._highest
        self._low_in_a_row = self._low_in_a_row + 1 if is_low else 0
        if self._low_in_a_row >= FLOOR_STEPS:
            steps = self._low_in_a_row
            self._advise("scale-at-floor", scale=self._floor, steps=steps)

    def _runs_autocast(self, dtype: torch.dtype) -> bool:
        return any(steps.autocast_to(dtype) for steps in self.steps)

    def _runs_slow_fp16(self) -> bool:
        for steps in self.steps:
            device = next(steps.model.parameters()).device
            if steps.autocast_to(torch.float16) and slow_in_fp16(device):
                return True
        return False

    def _measure(self, optimizers: Sequence[Optimizer], scale: float) -> None:
        for optimizer in optimizers:
            name = type(optimizer).__name__
            if not self.now.measure(optimizer, scale):
                self._advise("no-gradients", optimizer=name)
            eps = vanishing_eps(optimizer)
            if eps is not None:
                self._advise("adam-eps", optimizer=name, eps=eps)

    def _explain(
        self,
        optimizers: Sequence[Optimizer],
        scale: float | None,
        skip: Skip | None = None,
    ) -> None:
        """Say why gradients are not finite; without ``skip``, run the step once more to
        find out.
        """
        notes: tuple[str, ...] = ()
        is_new = self._explained < self.explain
        if skip is None and is_new:
            self._explained += 1
            try:
                skip = self._run_again(optimizers, scale)
            except RoundoffError as error:
                notes = (error.what,)
        fields: dict[str, Any] = {"notes": notes}
        if skip is not None:
            fields = {name: getattr(skip, name) for name in SKIP_FIELDS}
        if is_new:
            fields |= self.ours(self._script_fields, fields, scale) or {}
        self.say(
            BadGradients(
                step=self.number,
                scale=scale,
                skipped=scale is not None,
                first=_or_none(self.monitor.first_bad),
                **fields,
            )
        )

    def _script_fields(
        self, fields: Mapping[str, Any], scale: float | None
    ) -> dict[str, Any]:
        """Return what the script itself did, in place of what the model's run shows."""
        cause = self._cause()
        if cause is None:
            return {}
        if scale is not None and fields.get("phase") == cause.phase == "loss":
            return {"line": cause.line}  # the scale may be at fault: told by the run
        return {"born": False, "notes": (), **_fields(cause)}

    def _explain_loss(self) -> None:
        """Say why a loss is not finite whose gradients are."""
        if self._explained >= self.explain or not self.now.is_last_loss_lost:
            return
        self._explained += 1
        self.say(
            LostLoss(
                self.number, _or_none(self.monitor.first_bad), **_fields(self._cause())
            )
        )

    def _cause(self) -> ScriptCause | None:
        if self.now.cause is None:
            losses = [loss for loss, _ in self.now.losses]
            self.now.cause = self._script_cause(losses)
        return self.now.cause

    def _run_again(self, optimizers: Sequence[Optimizer], scale: float | None) -> Skip:
        self.monitor.paused = True
        try:
            gradients = StepGradients(optimizers, self._names)
            return explain_skip(
                gradients,
                self.graph,
                self._steps_of(gradients),
                step=self.number,
                scale=scale or 1.0,
                loss_finite=all(math.isfinite(float(x)) for x, _ in self.now.losses),
            )
        finally:
            self.monitor.paused = False

    def _names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        for steps in self.steps:
            names |= steps.names()
        return names

    def _steps_of(self, gradients: StepGradients) -> StepCalls | None:
        """Return the model that ran in this step and owns most of the gradients."""
        parameters = {id(p) for p in gradients.parameters}
        ran = [steps for steps in self.steps if steps.calls]
        return max(
            ran, key=lambda steps: len(parameters & set(steps.names())), default=None
        )

    # -- the loop
    # --------------------------------------------------------------------------------------------------------

    def _new_scaler(
        self, original: Any, scaler: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(scaler, *args, **kwargs)
        if not scaler.is_enabled():
            return
        self.ours(self._count_scaler)

    def _count_scaler(self) -> None:
        self._scalers += 1
        if self._scalers > 1 and self.number:
            self._advise("scaler-in-loop", steps=self.number)

    def _scale_loss(
        self, original: Any, scaler: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(scaler, outputs, *args, **kwargs)
        if scaler.is_enabled():
            self.ours(self._note_scale, scaler, outputs, result)
        return result

    def _note_scale(self, scaler: Any, outputs: Any, result: Any) -> None:
        self.scale = float(scaler.get_scale())
        self.now.scaler = scaler
        self.now.factor = self.scale
        if isinstance(outputs, Tensor) and isinstance(result, Tensor):
            self._unscaled[result] = outputs.detach()

    def _new_autocast(
        self, original: Any, autocast: Any, *args: Any, **kwargs: Any
    ) -> None:
        original(autocast, *args, **kwargs)
        self.ours(self._note_autocast, autocast, args, kwargs)

    def _note_autocast(self, autocast: Any, args: Any, kwargs: Any) -> None:
        device = kwargs.get("device_type", args[0] if args else "")
        enabled = kwargs.get("enabled", args[2] if len(args) > 2 else True)
        self.rules.autocast_made(autocast, str(device), bool(enabled))

    def _enter_autocast(self, original: Any, autocast: Any) -> Any:
        self.ours(self.rules.autocast_entered, autocast)
        return original(autocast)

    def _exit_autocast(self, original: Any, autocast: Any, *error: Any) -> Any:
        self.ours(self.rules.autocast_left, autocast)
        return original(autocast, *error)

    def _clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.ours(self._check_clip)
        return original(*args, **kwargs)

    def _check_clip(self) -> None:
        scaler = self.now.scaler
        if scaler is not None and self.now.factor != 1:
            states = scaler._per_optimizer_states.values()
            stages = {state["stage"].name for state in states}
            if not stages & {"UNSCALED", "STEPPED"}:
                self._advise("clip-before-unscale", scale=self.now.factor)

    def _schedule_step(
        self, original: Any, schedule: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self.ours(self._check_schedule, schedule)
        return original(schedule, *args, **kwargs)

    def _check_schedule(self, schedule: Any) -> None:
        moves_each_step = self._scheduled.get(schedule) == self.number - 1
        if moves_each_step and (self.now.skipped or self._last_was_skipped):
            self._advise("schedule-on-skip")
        self._scheduled[schedule] = self.number

    def _advise(self, rule: str, **values: Any) -> None:
        """Say a rule, once."""
        if rule not in self._advised:
            self._advised.add(rule)
            text = RULES[rule].format(**values)
            self.say(LoopAdvice(self.number, rule, text, CODES[rule]))


#: What an event takes over from the explanation of a skip.
SKIP_FIELDS = (
    "gradient",
    "made_by",
    "born",
    "origin",
    "phase",
    "line",
    "cause",
    "advice",
    "notes",
)


def _fields(cause: ScriptCause | None) -> dict[str, Any]:
    return {} if cause is None else asdict(cause)


def _or_none(value: object) -> str | None:
    return None if value is None else str(value)


def _is_finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value.detach()).all())


def _frame_of_call() -> Any:
    """Return torch's frame of the call of the model that is listened to; None where none is near."""
    frame: Any = sys._getframe(1)
    for _ in range(16):
        if frame is None:
            return None
        if {"args", "kwargs"} <= frame.f_locals.keys() and _is_of_modules(frame):
            return frame
        frame = frame.f_back
    return None


def _is_of_modules(frame: Any) -> bool:
    return bool(frame.f_globals.get("__name__") == "torch.nn.modules.module")


def _stage(scaler: Any, optimizer: Optimizer) -> str:
    """Return READY, UNSCALED or STEPPED: what torch's scaler has done for this
    optimizer in this step.
    """
    state = scaler._per_optimizer_states.get(id(optimizer))
    return "READY" if state is None else str(state["stage"].name)
