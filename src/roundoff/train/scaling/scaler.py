"""``LossScaler``: a loss scale that cannot be used in the wrong order, and that says
why it skipped a step.

The loss is multiplied by a scale so that small half-precision gradients don't become
zero, and gradients are divided by it before the step (Micikevicius et al., Mixed
Precision Training, ICLR 2018, section 3.2).
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundoff.errors import ScalerError, StuckError, warn
from roundoff.formats import LARGEST
from roundoff.record import whole_step
from roundoff.train.scaling.backward_graph import BackwardGraph
from roundoff.train.scaling.checkpoint import loaded, saved
from roundoff.train.scaling.delayed_read import DelayedRead
from roundoff.train.scaling.rerun_step import StepCalls
from roundoff.train.scaling.scale_rules import Rule, ScaleState, parse_rule
from roundoff.train.scaling.skip import Skip, diagnosis, explain_skip
from roundoff.train.scaling.step_gradients import (
    GradientVersions,
    StepGradients,
    check_loss,
    divides_by_scale,
    first_few,
    largest_of,
    takes_found_inf,
)
from roundoff.train.scaling.underflow import Underflow, underflow

log = logging.getLogger("roundoff")


class LossScaler:
    """Scales the loss, unscales and checks the gradients, and steps all optimizers or none.

    ``scaler.backward(loss)`` runs backward on the scaled loss, several times where
    gradients accumulate. ``scaler.step(*optimizers, clip=...)`` then unscales once, looks
    for NaN and Inf in the gradients of all of them together, clips by their common norm,
    steps all or none, and moves the scale. There is no ``update``.

    Args:
        model: the module that is called in each step (what ``torch.compile`` or
            ``DistributedDataParallel`` returned, if so). Each skip then names the operator
            that made the first non-finite gradient, by running the step once more; until
            then references to the step's inputs and to the gradients of the outputs are
            kept.
        rule: "dynamic" (that of ``torch.amp.GradScaler``), "static", "exponential", or one
            of ``scale_rules``; its constants are given by name.
        floor: the scale does not fall below it; 1, or the initial scale where that is
            less. 0: no floor, as torch.
        ceiling: the scale does not grow beyond it; none.
        saturation: a format, such as "fp16", for devices that give its largest value
            instead of Inf: a scaled gradient that reaches it counts as overflow.
        bad_loss: "keep" leaves the scale alone where the loss was NaN or Inf before it was
            scaled, since a lower scale would not help; "lower" moves it like torch does.
            In distributed training it is lowered, as only one rank may have seen such a
            loss.
        patience: this many skipped steps in a row, where the scale cannot go lower, raise
            ``StuckError``; None: never.
        enabled: False passes everything through: plain ``backward``, clipping and
            ``step``.

    ``skipped`` (a bool tensor) says if the last step was skipped: ``if not
    scaler.skipped: scheduler.step()``. ``last_skip`` and ``skips`` (the last 100) say why.
    The host waits for a GPU only where an optimizer needs an answer (one that isn't fused;
    SGD with momentum), where ``model`` is given, and where one asks: by ``skipped``,
    ``get_scale``, ``underflow``.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> scaler = LossScaler(model, init_scale=1024.0)
        >>> scaler.backward(model(torch.ones(1, 2)).square().sum())
        >>> scaler.step(optimizer, clip=1.0)
        >>> bool(scaler.skipped), scaler.get_scale()
        (False, 1024.0)
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        rule: str | Rule = "dynamic",
        *,
        floor: float | None = None,
        ceiling: float = math.inf,
        saturation: str | None = None,
        bad_loss: str = "keep",
        patience: int | None = 20,
        enabled: bool = True,
        **constants: Any,
    ) -> None:
        self.rule = parse_rule(rule, constants)
        start = self.rule.init_scale
        self.floor = min(1.0, start) if floor is None else floor
        self.ceiling = ceiling
        if not 0 <= self.floor <= start <= ceiling:
            raise ScalerError(
                "the initial scale lies outside its bounds",
                where="LossScaler",
                expected=f"floor ({self.floor:g}) <= scale <= ceiling ({ceiling:g})",
                got=f"{start:g}",
            )
        if bad_loss not in ("keep", "lower"):
            raise ScalerError(
                "unknown bad_loss",
                where=f"LossScaler(bad_loss={bad_loss!r})",
                expected="keep or lower",
            )
        self.saturation = None if saturation is None else largest_of(saturation)
        self.bad_loss = bad_loss
        self.patience = patience
        self.enabled = enabled
        self.skips: deque[Skip] = deque(maxlen=100)
        self.steps = 0
        self._start: dict[str, Any] = {"scale": start}
        self._state: ScaleState | None = None
        self._overflow: Tensor | None = None  # of the last step
        self._unscaled: tuple[StepGradients, Tensor] | None = None
        self._stepping = False
        self._last_optimizers: tuple[weakref.ref[Optimizer], ...] = ()
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._loss_bad: Tensor | None = None
        self._versions = GradientVersions()
        self._graph = BackwardGraph()
        self._stuck = DelayedRead()
        self._freed: list[weakref.ref[Tensor]] = []  # losses whose graph is gone
        self._backwards = 0
        self._warned: set[str] = set()
        self._calls = StepCalls(model) if model is not None and enabled else None

    # -- one step
    # ------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Run backward on ``loss`` times the scale; gradients are added up until ``step``.

        ``loss`` is one number, floating point, with a graph. NaN and Inf pass. Raises
        ``ScalerError`` before anything runs.
        """
        if not self.enabled:
            torch.autograd.backward(loss, retain_graph=retain_graph)
            return
        self._check_loss(loss)
        if self._stepping:
            self._forget()  # an optimizer failed, and that step was given up
        if self._unscaled is not None:
            raise ScalerError(
                "backward between unscale and step would mix scaled gradients with unscaled ones",
                where="LossScaler.backward",
                do="unscale after the last backward of the step",
            )
        scale = self._on(loss.device).scale
        is_bad = ~torch.isfinite(loss.detach()).all().to(scale.device)
        self._loss_bad = is_bad if self._loss_bad is None else self._loss_bad | is_bad
        self._versions.before_backward(first=not self._backwards)
        self._graph.add(loss, closely=self.explains)
        # The gradient of (loss * scale) at the loss; without the product, which may
        # overflow where no gradient does.
        seed = scale.to(loss.device, loss.dtype).expand(loss.shape)
        torch.autograd.backward(loss, seed, retain_graph=retain_graph)
        if not retain_graph:
            self._freed.append(weakref.ref(loss))
        self._backwards += 1
        self._versions.after_backward(_parameters(self._optimizers))

    def unscale(self, *optimizers: Optimizer) -> None:
        """Divide the gradients by the scale now, to read them or change them; ``step``
        won't do it again.
        """
        if self.enabled:
            self._unscaled = self._unscale(optimizers, "LossScaler.unscale")

    def step(self, *optimizers: Optimizer, clip: float | None = None) -> None:
        """Step every optimizer, or none where a gradient of any of them is NaN or Inf,
        and move the scale.

        Args:
            optimizers: all of this step; a parameter in two of them is unscaled once.
            clip: the largest global L2 norm of the unscaled gradients, of all optimizers
                together.

        Raises:
            ScalerError: no backward since the last step, no gradients, float16 weights.
                Nothing was changed.
            StuckError: ``patience`` steps in a row were skipped at the lowest scale. The
                weights are those of before.
        """
        if not self.enabled:
            _step_plainly(optimizers, clip)
            return
        self._raise_if_stuck(self._stuck.value())
        gradients, overflow = self._gradients_of_step(optimizers, clip)
        # where an optimizer fails, a second try does not unscale
        self._unscaled = (gradients, overflow)
        self._stepping = True
        state = self._on(overflow.device)
        asks = self._asks_device(overflow.device, optimizers)
        skipped = asks and bool(overflow)
        with whole_step(optimizers, self.get_scale):
            if skipped:
                self._explain(gradients, state)
            else:
                if clip is not None:
                    nn.utils.clip_grad_norm_(gradients.parameters, clip)
                for optimizer in optimizers:
                    _step(optimizer, None if asks else overflow)
            self._finish(optimizers, gradients, overflow, state)
        if skipped:
            self._raise_if_stuck(int(state.stuck))
        elif not asks:
            self._stuck.send(state.stuck)

    def _gradients_of_step(
        self, optimizers: tuple[Optimizer, ...], clip: float | None
    ) -> tuple[StepGradients, Tensor]:
        """Return the unscaled gradients, and 1 where they hold NaN or Inf."""
        where = "LossScaler.step"
        if self._unscaled is None:
            return self._unscale(optimizers, where, clip)
        unscaled, overflow = self._unscaled
        gradients = StepGradients(optimizers, self._names)
        _check_clip(gradients, clip, where)
        if set(map(id, gradients.parameters)) != set(map(id, unscaled.parameters)):
            raise ScalerError(
                "other gradients than those that were unscaled",
                where=where,
                do="give unscale and step the same optimizers",
            )
        return unscaled, overflow

    def _asks_device(
        self, device: torch.device, optimizers: tuple[Optimizer, ...]
    ) -> bool:
        """Return True if the host waits for the device to know of an overflow."""
        if self.explains or device.type != "cuda":
            return True
        return not all(map(takes_found_inf, optimizers))

    def _finish(
        self,
        optimizers: tuple[Optimizer, ...],
        gradients: StepGradients,
        overflow: Tensor,
        state: ScaleState,
    ) -> None:
        """Move the scale, and forget the step."""
        blameless = None
        keeps_scale = self.bad_loss == "keep" and not _is_distributed()
        if keeps_scale and self._loss_bad is not None:
            blameless = self._loss_bad & (overflow > 0)
        state.update(overflow, blameless)
        self._overflow = overflow
        self._last_optimizers = tuple(map(weakref.ref, optimizers))
        self._optimizers.update(optimizers)
        self._versions.after_step(gradients.parameters)
        self.steps += 1
        self._forget()

    def _unscale(
        self, optimizers: tuple[Optimizer, ...], where: str, clip: float | None = None
    ) -> tuple[StepGradients, Tensor]:
        if not self._backwards:
            raise self._no_backward(where)
        if self._unscaled is not None:
            raise ScalerError(
                "the gradients of this step are unscaled already", where=where
            )
        gradients = StepGradients(optimizers, self._names)
        _check_clip(gradients, clip, where)
        self._check_order(gradients, where)
        if torch.bfloat16 in gradients.dtypes() or self._runs_bf16():
            self._warn(
                "bf16",
                "bfloat16 has the range of float32: its gradients need no loss scale, and a scaler can only "
                "skip steps that would have been good (LossScaler(enabled=False) passes through)",
            )
        state = self._on(gradients.values()[0].device)
        # with torch's scaler, who reads or clips gradients has unscaled them before
        is_step = where == "LossScaler.step" and clip is None
        fused = filter(divides_by_scale, optimizers) if is_step else ()
        divided = set(map(id, _parameters(fused)))
        return gradients, gradients.unscale_(state.scale, self.saturation, divided)

    def _no_backward(self, where: str) -> ScalerError:
        what = "nothing was run backward by this scaler"
        do = "scaler.backward(loss) instead of loss.backward()"
        if self.steps:
            what += " since its last step"
            do += "; give all optimizers of a step to one call: scaler.step(first, second)"
        return ScalerError(what, where=where, do=do)

    def _runs_bf16(self) -> bool:
        return self._calls is not None and self._calls.autocast_to(torch.bfloat16)

    # -- what it says
    # ----------------------------------------------------------------------------------------------------

    @property
    def skipped(self) -> Tensor:
        """True if the last step was skipped: a 0-d bool tensor on the scale's device;
        False before the first.
        """
        return torch.tensor(False) if self._overflow is None else self._overflow > 0

    @property
    def is_unscaled(self) -> bool:
        """True between ``unscale`` and ``step``: the gradients are without the scale."""
        return self._unscaled is not None

    @property
    def explains(self) -> bool:
        """True if a skipped step is run again to find the operator behind it."""
        return self._calls is not None

    @property
    def last_skip(self) -> Skip | None:
        """The latest skipped step; None as long as none was skipped."""
        return self.skips[-1] if self.skips else None

    def get_scale(self) -> float:
        """Return the scale that the next backward uses; 1 where this is not enabled."""
        if not self.enabled:
            return 1.0
        return float(self._start["scale"] if self._state is None else self._state.scale)

    def underflow(self, *optimizers: Optimizer, format: str = "fp16") -> Underflow:
        """Measure what a format loses of the gradients at the present scale, and recommend a scale.

        Call it between ``backward`` and ``step``, or after ``step`` while the gradients are
        there. Without arguments, the optimizers of the last step.
        """
        if not optimizers:
            alive = [reference() for reference in self._last_optimizers]
            optimizers = tuple(o for o in alive if o is not None)
        if not optimizers:
            raise ScalerError(
                "which gradients?",
                where="LossScaler.underflow",
                do="scaler.underflow(optimizer)",
            )
        scale = self.get_scale()
        is_scaled = self.enabled and bool(self._backwards) and not self.is_unscaled
        values = StepGradients(optimizers, self._names).values()
        return underflow(values, scale, 1.0 if is_scaled else scale, format)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint, between steps.

        ``torch.amp.GradScaler`` reads it, and its own can be loaded here.
        """
        return saved(self.rule, self._start, self._state) if self.enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint of this class or, with the dynamic rule, of
        ``torch.amp.GradScaler``.
        """
        if self.enabled:
            self.rule, self._start = loaded(self.rule, state)
            self._state = None

    # -- inside
    # ----------------------------------------------------------------------------------------------------------

    def _on(self, device: torch.device) -> ScaleState:
        """Return the state, made on the device of the first step."""
        if self._state is None:
            self._state = ScaleState(
                self.rule, device, floor=self.floor, ceiling=self.ceiling, **self._start
            )
        return self._state

    def _names(self) -> dict[int, str]:
        return {} if self._calls is None else self._calls.names()

    def _forget(self) -> None:
        """Forget the step."""
        self._backwards = 0
        self._unscaled = None
        self._loss_bad = None
        self._stepping = False
        self._freed.clear()
        self._graph.clear()
        if self._calls is not None:
            self._calls.clear()

    def _explain(self, gradients: StepGradients, state: ScaleState) -> None:
        loss_bad = self._loss_bad is not None and bool(self._loss_bad)
        skip = explain_skip(
            gradients,
            self._graph,
            self._calls,
            step=self.steps,
            scale=float(state.scale),
            loss_finite=not loss_bad,
            saturation=self.saturation,
        )
        self.skips.append(skip)
        log.info("%s", skip)
        if loss_bad:
            outcome = (
                "the scale stays as it is"
                if self.bad_loss == "keep"
                else "a lower scale will not help"
            )
            self._warn(
                "nan-loss",
                "the loss itself was NaN or Inf before it was scaled, so the scale is not to blame: the "
                f"step is skipped and {outcome}; look at the data and the weights. {skip}",
            )

    def _raise_if_stuck(self, stuck: int) -> None:
        if self.patience is not None and stuck >= self.patience:
            if self._state is not None:
                self._state.stuck.zero_()
            self._stuck.forget()
            raise StuckError(
                **diagnosis(stuck, self.get_scale(), self.rule.name, self.last_skip)
            )

    def _check_loss(self, loss: Tensor) -> None:
        check_loss(loss)
        if any(freed() is loss for freed in self._freed):
            raise ScalerError(
                "this loss was run backward already, and its graph was freed",
                where="LossScaler.backward",
                do="backward once, or retain_graph=True the first time",
            )
        may_warn = "fp16-loss" not in self._warned  # get_scale waits for the device
        is_half = loss.dtype is torch.float16
        if is_half and may_warn and self.get_scale() > LARGEST["float16"]:
            self._warn(
                "fp16-loss",
                "the loss is float16, in which a scale above 65504 is Inf: steps will be skipped until "
                "it is lower; compute the loss in float32 (loss.float(), or what autocast does)",
            )
        if torch.is_autocast_enabled(loss.device.type):
            self._warn(
                "autocast-backward",
                "backward ran inside autocast, where only forward pass and loss belong",
            )

    def _check_order(self, gradients: StepGradients, where: str) -> None:
        stale = self._versions.stale(gradients)
        if stale:
            raise ScalerError(
                "scaled gradients were added to the unscaled ones of the step before",
                where=f"{where}: {first_few(stale)}",
                do="optimizer.zero_grad() after each step",
            )
        on_cuda = gradients.parameters[0].device.type == "cuda"
        changed = self._versions.changed(gradients, ask=self.explains or not on_cuda)
        if changed:
            self._warn(
                "changed-gradients",
                f"{first_few(changed)}: the gradient was changed between backward and step, where it is "
                "still multiplied by the scale. A clip there cuts far too low, another scaler unscales twice, and a plain "
                "loss.backward() adds what is not scaled: use step(clip=...), or call unscale() first",
            )

    def _warn(self, rule: str, text: str) -> None:
        if rule not in self._warned:
            self._warned.add(rule)
            warn(f"roundoff loss scaler [{rule}]: {text}")


def _parameters(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            yield from group["params"]


def _step_plainly(optimizers: tuple[Optimizer, ...], clip: float | None) -> None:
    if clip is not None:
        nn.utils.clip_grad_norm_(list(_parameters(optimizers)), clip)
    for optimizer in optimizers:
        optimizer.step()


def _step(optimizer: Any, overflow: Tensor | None) -> None:
    """Step; a fused optimizer is given ``overflow`` and skips by itself where it is 1."""
    if overflow is None:
        optimizer.step()
        return
    # torch's contract with fused optimizers
    optimizer.grad_scale = None
    optimizer.found_inf = overflow
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _check_clip(gradients: StepGradients, clip: float | None, where: str) -> None:
    if clip is None:
        return
    if gradients.sparse:
        raise ScalerError(
            "sparse gradients cannot be clipped",
            where=where,
            expected="dense gradients",
            got=f"clip={clip}",
        )
    if not clip > 0:
        raise ScalerError(
            "clip is the largest norm of the gradients",
            where=where,
            expected="a positive number",
            got=f"clip={clip}",
        )


def _is_distributed() -> bool:
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1
