"""Watch an unmodified training script: loss, loss scale, gradient norm, and the reason of each step that goes wrong."""

from __future__ import annotations

import functools
import gc
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.errors import RoundoffError, RunError, StuckError
from roundoff.ops import slow_in_fp16
from roundoff.record import (
    Ends,
    Enough,
    Paths,
    ScriptError,
    ends_of_steps,
    patched,
    quiet,
    run_program,
    words_of,
)
from roundoff.train import (
    FLOOR_STEPS,
    RULES,
    Advice,
    End,
    Event,
    Gradients,
    Graph,
    LossScaler,
    Monitor,
    Present,
    Skip,
    StepEnd,
    Steps,
    Trouble,
    eps_vanishes,
    has_bf16,
)

Say = Callable[[Event], None]


def watch_script(
    command: Sequence[str],
    say: Say,
    *,
    every: int = 1,
    explain: int = 3,
    stop_on_nan: bool = False,
) -> End:
    """Run ``command`` (a script and its arguments, or ``-m`` and a module), unchanged, and ``say`` what happens in it.

    Every model that is called is watched by a ``Monitor``, each ``every``-th step. The first ``explain`` steps with NaN or
    Inf in the gradients are run once more to find the operator. ``stop_on_nan`` ends the script before a NaN reaches the
    weights: where the loss, or without a scaler a gradient, is not finite. The training's numbers do not change.

    Raises ``ScriptError`` after a script that failed or was interrupted (not where a loss scaler gave up: that is trouble),
    and ``RunError`` where no step ended.
    """
    words = words_of(command, "watch")
    watch = Watch(say, every=every, explain=explain, stop_on_nan=stop_on_nan)
    stuck: str | None = None
    try:
        with watch.on():
            run_program(words, watch.counted)
            watch.ends.look()  # a last step whose scaler was not updated
    except ScriptError as error:
        if not isinstance(error.__cause__, StuckError):
            raise
        stuck = f"the loss scaler gave up: {error.__cause__.what}"
    gc.collect()  # see capture_script
    if not watch.number and stuck is None:
        raise RunError(
            "no step ended in this script",
            where=" ".join(words),
            expected="a torch.optim optimizer that steps",
        )
    end = End(watch.number, watch.skips, watch.scale, stuck or watch.trouble())
    say(end)
    return end


class Watch:
    """What is known of the training while it runs; ``on`` listens to every model, optimizer and scaler of the process."""

    def __init__(
        self, say: Say, *, every: int, explain: int, stop_on_nan: bool
    ) -> None:
        self.say, self.explain, self.stop_on_nan = say, explain, stop_on_nan
        self.number = self.skips = self.bad_in_a_row = self.low = 0
        self.scale: float | None = None
        self.stopped: str | None = None
        self.monitor = Monitor(every=every)
        self.steps: list[Steps] = []
        self.graph = Graph()
        self.ends = Ends(self._end)
        self._told: set[str] = set()
        self.now = Present()
        self._scalers = self._explained = 0
        self._floor, self._highest = 1.0, 0.0
        self._inside = False  # of a scaler's step
        self._unscaled: Any = (
            WeakIdKeyDictionary()
        )  # what a scaler gave back -> the loss
        self._scheduled: weakref.WeakKeyDictionary[Any, int] = (
            weakref.WeakKeyDictionary()
        )
        self._after_skip = False  # the step that ended last was skipped

    @contextmanager
    def on(self) -> Iterator[None]:
        paths = Paths()
        paths.found.append(self._found)
        scaler, clip = torch.amp.GradScaler, torch.nn.utils.clip_grad
        clips = [
            (owner, name, self._clip)
            for owner in (torch.nn.utils, clip)
            for name in ("clip_grad_norm_", "clip_grad_value_")
        ]
        with ExitStack() as stack:
            stack.enter_context(quiet())
            stack.enter_context(paths.follow())
            stack.enter_context(self.monitor)
            stack.enter_context(ends_of_steps(self.ends, whole=False))
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(lambda: [steps.remove() for steps in self.steps])
            stack.enter_context(
                patched(
                    (scaler, "__init__", self._made),
                    (scaler, "scale", self._scale),
                    (scaler, "step", self._scaled_step),
                    (torch.autograd, "backward", self._backward),
                    (LossScaler, "step", self._our_step),
                    (torch.optim.lr_scheduler.LRScheduler, "step", self._schedule),
                    *clips,
                )
            )
            yield

    def counted(self) -> str:
        return f"{self.number} steps were seen by then, {self.skips} of them skipped"

    def trouble(self) -> str | None:
        """Why the training did not end well."""
        if self.stopped is not None:
            return self.stopped
        if self.scale is not None and self.scale < 1 <= self._highest:
            return f"the loss scale collapsed to {self.scale:g}"
        if self._after_skip and self.bad_in_a_row >= min(FLOOR_STEPS, self.number):
            return f"the last {self.bad_in_a_row} steps were skipped"
        if self.bad_in_a_row and not self._after_skip:
            return f"the gradients of the last {self.bad_in_a_row} steps were not finite, and the weights took them"
        return None

    # -- the model -------------------------------------------------------------------------------------------------------

    def _found(self, model: nn.Module, prefix: str) -> None:
        """Before the first call of a model that no other one contains."""
        if not any(True for _ in model.parameters()):
            return
        self.monitor.add(model, prefix)
        steps = Steps(model)
        self.steps.append(steps)
        # hooks that are added now run from the next call on; torch's own frame knows what this one was called with
        frame: Any = sys._getframe(2)
        if "kwargs" in frame.f_locals and not torch.compiler.is_compiling():
            steps._before(steps.model, frame.f_locals["args"], frame.f_locals["kwargs"])

    def _backward(self, original: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
        for loss in (tensors,) if isinstance(tensors, Tensor) else tuple(tensors):
            if loss.numel() == 1:
                plain = self._unscaled.get(loss)
                self.now.losses.append(
                    (loss.detach() if plain is None else plain, plain is None)
                )
            self.graph.add(loss, closely=True)
        original(tensors, *args, **kwargs)

    # -- the step --------------------------------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Of an optimizer that nobody scales for, as far as is known."""
        if self._inside:
            return None
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if not callable(closure):
            self._take(optimizer)
            return None

        @functools.wraps(closure)
        def watched(*words: Any, **more: Any) -> Any:
            result = closure(*words, **more)
            self.now.forget_gradients()
            self._take(optimizer)
            return result

        if len(args) > 1:
            return (args[0], watched, *args[2:]), kwargs
        return args, kwargs | {"closure": watched}

    def _take(self, optimizer: Optimizer) -> None:
        scaler = self.now.scaler
        if (
            scaler is not None
            and self.now.factor != 1
            and _stage(scaler, optimizer) == "READY"
        ):
            self._advise(
                "scaler-not-stepped",
                scale=self.now.factor,
                optimizer=type(optimizer).__name__,
            )
        self._measure([optimizer], 1.0)
        if self.now.bad:
            self._explain([optimizer], None)
            if self.stop_on_nan:
                self.stopped = (
                    "stopped before the weights took gradients that are not finite"
                )
                self._end()
                raise Enough

    def _scaled_step(
        self, original: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not scaler.is_enabled():
            return original(scaler, optimizer, *args, **kwargs)
        scale = float(scaler.get_scale())
        self._measure(
            [optimizer], scale if _stage(scaler, optimizer) == "READY" else 1.0
        )
        if has_bf16(optimizer) or any(
            steps.autocast_to(torch.bfloat16) for steps in self.steps
        ):
            self._advise("scaler-with-bf16")
        self._inside = self.now.updates = True
        try:
            result = original(scaler, optimizer, *args, **kwargs)
        finally:
            self._inside = False
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        if any(float(value) for value in found.values()):
            self.now.skipped = True
            self._explain([optimizer], scale)
        return result

    def _our_step(
        self, original: Any, scaler: LossScaler, *optimizers: Any, **kwargs: Any
    ) -> None:
        if not scaler.enabled:
            original(scaler, *optimizers, **kwargs)
            return
        self.scale, self._floor = scaler.get_scale(), max(1.0, scaler.floor)
        self._measure(optimizers, 1.0 if scaler._unscaled is not None else self.scale)
        self._inside = self.ends.waiting = True
        before = scaler.steps
        try:
            original(scaler, *optimizers, **kwargs)
        finally:
            self._inside = False
            if scaler.steps > before:
                if bool(scaler.skipped):
                    self.now.skipped = True
                    self._explain(
                        optimizers,
                        self.scale,
                        scaler.last_skip if scaler._watch is not None else None,
                    )
                    for optimizer in [
                        o for o in optimizers if o not in self.ends.stepped
                    ]:
                        self.ends.step(optimizer)
                self.ends.look(loss_scale=scaler.get_scale())
            self.ends.waiting = False

    def _end(self, lr: float | None = None, loss_scale: float | None = None) -> None:
        if self.now.updates and loss_scale is None:
            self._advise("scaler-not-updated")
        self.scale = self.scale if loss_scale is None else loss_scale
        now, loss = self.now, self.now.loss()
        self.skips += now.skipped
        self.bad_in_a_row = self.bad_in_a_row + 1 if now.bad or now.skipped else 0
        self._after_skip = now.skipped
        self.say(
            StepEnd(
                self.number,
                loss,
                self.scale,
                now.norm,
                now.share,
                now.skipped,
                self.skips,
                lr,
            )
        )
        self._look_at_the_scale()
        if any(
            s.autocast_to(torch.float16)
            and slow_in_fp16(next(s.model.parameters()).device)
            for s in self.steps
        ):
            self._advise("fp16-on-cpu")
        stop = (
            self.stop_on_nan
            and self.stopped is None
            and loss is not None
            and not math.isfinite(loss)
        )
        self.number += 1
        self.monitor.step()
        self.graph.clear()
        for steps in self.steps:
            steps.clear()
        self.now = Present()
        if stop:
            self.stopped = "stopped at a loss that is not finite"
            raise Enough

    def _look_at_the_scale(self) -> None:
        if self.scale is None:
            return
        self._highest = max(self._highest, self.scale)
        self.low = self.low + 1 if self.scale <= self._floor < self._highest else 0
        if self.low >= FLOOR_STEPS:
            self._advise("scale-at-floor", scale=self._floor, steps=self.low)

    def _measure(self, optimizers: Sequence[Optimizer], scale: float) -> None:
        for optimizer in optimizers:
            if not self.now.measure(optimizer, scale):
                self._advise("no-gradients", optimizer=type(optimizer).__name__)
            if (eps := eps_vanishes(optimizer)) is not None:
                self._advise("adam-eps", optimizer=type(optimizer).__name__, eps=eps)

    def _explain(
        self,
        optimizers: Sequence[Optimizer],
        scale: float | None,
        skip: Skip | None = None,
    ) -> None:
        first = self.monitor.first_bad
        notes: tuple[str, ...] = ()
        if skip is None and self._explained < self.explain:
            self._explained += 1
            finite = all(math.isfinite(float(loss)) for loss, _ in self.now.losses)
            about = {"step": self.number, "scale": scale or 1.0, "loss_finite": finite}
            self.monitor.paused = True
            try:
                gradients = Gradients(optimizers, self._names)
                skip = Skip.explained(
                    gradients, self.graph, self._steps_of(gradients), None, about
                )
            except RoundoffError as error:
                notes = (error.what,)
            finally:
                self.monitor.paused = False
        known = (
            {}
            if skip is None
            else {
                key: getattr(skip, key)
                for key in (
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
            }
        )
        seen = None if first is None else str(first)
        self.say(
            Trouble(
                self.number, scale, scale is not None, seen, **{"notes": notes, **known}
            )
        )

    def _names(self) -> dict[int, str]:
        return {
            key: name for steps in self.steps for key, name in steps.names().items()
        }

    def _steps_of(self, gradients: Gradients) -> Steps | None:
        """The model that ran in this step and owns most of the gradients."""
        mine = {id(p) for p in gradients.parameters}
        ran = [steps for steps in self.steps if steps.calls]
        return max(ran, key=lambda steps: len(mine & set(steps.names())), default=None)

    # -- the loop --------------------------------------------------------------------------------------------------------

    def _made(self, original: Any, scaler: Any, *args: Any, **kwargs: Any) -> None:
        original(scaler, *args, **kwargs)
        self._scalers += scaler.is_enabled()
        if self._scalers > 1 and self.number and scaler.is_enabled():
            self._advise("scaler-in-loop", steps=self.number)

    def _scale(
        self, original: Any, scaler: Any, outputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        result = original(scaler, outputs, *args, **kwargs)
        if scaler.is_enabled():
            self.now.scaler, self.now.factor = scaler, float(scaler.get_scale())
            self.scale = self.now.factor
            if isinstance(outputs, Tensor) and isinstance(result, Tensor):
                self._unscaled[result] = outputs.detach()
        return result

    def _clip(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        scaler = self.now.scaler
        if scaler is not None and self.now.factor != 1:
            stages = {
                state["stage"].name for state in scaler._per_optimizer_states.values()
            }
            if not stages & {"UNSCALED", "STEPPED"}:
                self._advise("clip-before-unscale", scale=self.now.factor)
        return original(*args, **kwargs)

    def _schedule(self, original: Any, schedule: Any, *args: Any, **kwargs: Any) -> Any:
        each_step = self._scheduled.get(schedule) == self.number - 1
        if each_step and (self.now.skipped or self._after_skip):
            self._advise("schedule-on-skip")
        self._scheduled[schedule] = self.number
        return original(schedule, *args, **kwargs)

    def _advise(self, rule: str, **about: Any) -> None:
        if rule not in self._told:
            self._told.add(rule)
            self.say(Advice(self.number, rule, RULES[rule].format(**about)))


def _stage(scaler: Any, optimizer: Optimizer) -> str:
    """READY, UNSCALED or STEPPED: what torch's scaler has done for this optimizer in this step."""
    state = scaler._per_optimizer_states.get(id(optimizer))
    return "READY" if state is None else str(state["stage"].name)
