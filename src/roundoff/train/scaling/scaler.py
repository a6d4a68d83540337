"""``LossScaler``: a loss scale that cannot be used in the wrong order, and that says why it skipped a step.

The loss is multiplied by a scale so that small half-precision gradients don't become zero, and gradients are divided by
it before the step (Micikevicius et al., Mixed Precision Training, ICLR 2018, section 3.2).
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import deque
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from roundoff.errors import ScalerError, StuckError, warn
from roundoff.formats import LARGEST
from roundoff.record import whole_step
from roundoff.train.scaling.autograd_graph import Graph
from roundoff.train.scaling.checkpoint import loaded, saved
from roundoff.train.scaling.delayed_read import Later
from roundoff.train.scaling.rerun_step import Steps
from roundoff.train.scaling.scale_rules import Rule, Scale, parse_rule
from roundoff.train.scaling.skip import Skip, diagnosis
from roundoff.train.scaling.underflow import Underflow, underflow
from roundoff.train.scaling.unscale import (
    Gradients,
    Order,
    check_loss,
    largest_of,
    listed,
    takes_found_inf,
)

log = logging.getLogger("roundoff")


class LossScaler:
    """Scales the loss, unscales and checks the gradients, and steps all optimizers or none.

    ``scaler.backward(loss)`` runs backward on the scaled loss, several times where gradients accumulate.
    ``scaler.step(*optimizers, clip=...)`` then unscales once, looks for NaN and Inf in the gradients of all of them
    together, clips by their common norm, steps all or none, and moves the scale. There is no ``update``.

    Args:
        model: the module that is called in each step (what ``torch.compile`` or ``DistributedDataParallel`` returned, if
            so). Each skip then names the operator that made the first non-finite gradient, by running the step once more;
            until then references to the step's inputs and to the gradients of the outputs are kept.
        rule: "dynamic" (that of ``torch.amp.GradScaler``), "static", "exponential", or one of ``scale_rules``; its
            constants are given by name.
        floor: the scale does not fall below it; 1, or the initial scale where that is less. 0: no floor, as torch.
        ceiling: the scale does not grow beyond it; none.
        saturation: a format, such as "fp16", for devices that give its largest value instead of Inf: a scaled gradient
            that reaches it counts as overflow.
        bad_loss: "keep" leaves the scale alone where the loss was NaN or Inf before it was scaled, since a lower scale
            would not help; "lower" moves it like torch does. In distributed training it is lowered, as only one rank
            may have seen such a loss.
        patience: this many skipped steps in a row, where the scale cannot go lower, raise ``StuckError``; None: never.
        enabled: False passes everything through: plain ``backward``, clipping and ``step``.

    ``skipped`` (a bool tensor) says whether the last step was skipped: ``if not scaler.skipped: scheduler.step()``.
    ``last_skip`` and ``skips`` (the last 100) say why. The host waits for a GPU only where an optimizer needs an answer
    (one that isn't fused; SGD with momentum), where ``model`` is given, and where one asks: by ``skipped``,
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
        self.floor, self.ceiling = min(1.0, start) if floor is None else floor, ceiling
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
        self.bad_loss, self.patience, self.enabled = bad_loss, patience, enabled
        self.skips: deque[Skip] = deque(maxlen=100)
        self.steps = 0
        self._start: dict[str, Any] = {"scale": start}
        self._state: Scale | None = None
        self._found: Tensor | None = None  # of the last step
        self._unscaled: tuple[Gradients, Tensor] | None = None
        self._stepping = False
        self._used: tuple[weakref.ref[Optimizer], ...] = ()
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._loss_bad: Tensor | None = None
        self._order, self._graph, self._stuck = Order(), Graph(), Later()
        self._done: list[weakref.ref[Tensor]] = []
        self._backwards = 0
        self._told: set[str] = set()
        self._watch = Steps(model) if model is not None and enabled else None

    # -- one step ------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Backward on ``loss`` times the scale; gradients are added up until ``step``.

        ``loss`` is one number, floating point, with a graph. NaN and Inf pass. Raises ``ScalerError`` before anything runs.
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
        finite = torch.isfinite(loss.detach()).all().to(scale.device)
        self._loss_bad = ~finite if self._loss_bad is None else self._loss_bad | ~finite
        self._order.before_backward(first=not self._backwards)
        self._graph.add(loss, closely=self._watch is not None)
        # The gradient of (loss * scale) at the loss; without the product, which may overflow where no gradient does.
        seed = scale.to(loss.device, loss.dtype).expand(loss.shape)
        torch.autograd.backward(loss, seed, retain_graph=retain_graph)
        if not retain_graph:
            self._done.append(weakref.ref(loss))
        self._backwards += 1
        self._order.after_backward(
            p for o in self._known for group in o.param_groups for p in group["params"]
        )

    def unscale(self, *optimizers: Optimizer) -> None:
        """Divide the gradients by the scale now, to look at them or change them; ``step`` won't do it again."""
        if self.enabled:
            self._unscaled = self._unscale(optimizers, "unscale")

    def step(self, *optimizers: Optimizer, clip: float | None = None) -> None:
        """Step every optimizer, or none where a gradient of any of them is NaN or Inf, and move the scale.

        Args:
            optimizers: all of this step; a parameter in two of them is unscaled once.
            clip: the largest global L2 norm of the unscaled gradients, of all optimizers together.

        Raises:
            ScalerError: no backward since the last step, no gradients, float16 weights. Nothing was changed.
            StuckError: ``patience`` steps in a row were skipped at the lowest scale. The weights are those of before.
        """
        if not self.enabled:
            if clip is not None:
                every = [
                    p
                    for o in optimizers
                    for group in o.param_groups
                    for p in group["params"]
                ]
                nn.utils.clip_grad_norm_(every, clip)
            for optimizer in optimizers:
                optimizer.step()
            return
        self._raise_if_stuck(self._stuck.value())
        if self._unscaled is None:
            gradients, found = self._unscale(optimizers, "step", clip)
        else:
            gradients, found = self._unscaled
            now = Gradients(optimizers, self._names)
            _check_clip(now, clip, "LossScaler.step")
            if {id(p) for p in now.parameters} != {id(p) for p in gradients.parameters}:
                raise ScalerError(
                    "other gradients than those that were unscaled",
                    where="LossScaler.step",
                    do="give unscale and step the same optimizers",
                )
        self._unscaled, self._stepping = (
            (gradients, found),
            True,
        )  # where an optimizer fails, a second try does not unscale
        state = self._on(found.device)
        asks = (
            self._watch is not None
            or found.device.type != "cuda"
            or not all(map(takes_found_inf, optimizers))
        )
        skipped = asks and bool(found)
        with whole_step(optimizers, self.get_scale):
            self._take(
                optimizers,
                gradients,
                found,
                state,
                None if asks else found,
                skipped,
                clip,
            )
        if skipped:
            self._raise_if_stuck(int(state.stuck))
        elif not asks:
            self._stuck.send(state.stuck)

    def _take(
        self,
        optimizers: tuple[Optimizer, ...],
        gradients: Gradients,
        found: Tensor,
        state: Scale,
        told: Tensor | None,
        skipped: bool,
        clip: float | None,
    ) -> None:
        """The step itself; ``told`` is what a fused optimizer is told, in place of a look at ``found``."""
        if skipped:
            self._explain(gradients, state)
        else:
            if clip is not None:
                nn.utils.clip_grad_norm_(gradients.parameters, clip)
            for optimizer in optimizers:
                _step(optimizer, told)
        keep = (
            self._loss_bad is not None
            and self.bad_loss == "keep"
            and not _distributed()
        )
        state.update(
            found,
            self._loss_bad & (found > 0)
            if keep and self._loss_bad is not None
            else None,
        )
        self._found, self._used = found, tuple(map(weakref.ref, optimizers))
        self._known.update(optimizers)
        self._order.after_step(gradients.parameters)
        self.steps += 1
        self._forget()

    def _unscale(
        self, optimizers: tuple[Optimizer, ...], where: str, clip: float | None = None
    ) -> tuple[Gradients, Tensor]:
        where = f"LossScaler.{where}"
        if not self._backwards:
            what, do = (
                "nothing was run backward by this scaler",
                "scaler.backward(loss) instead of loss.backward()",
            )
            if self.steps:
                what += " since its last step"
                do += "; give all optimizers of a step to one call: scaler.step(first, second)"
            raise ScalerError(what, where=where, do=do)
        if self._unscaled is not None:
            raise ScalerError(
                "the gradients of this step are unscaled already", where=where
            )
        gradients = Gradients(optimizers, self._names)
        _check_clip(gradients, clip, where)
        self._check_order(gradients, where)
        if torch.bfloat16 in gradients.dtypes() or (
            self._watch is not None and self._watch.autocast_to(torch.bfloat16)
        ):
            self._warn(
                "bf16",
                "bfloat16 has the range of float32: its gradients need no loss scale, and a scaler can only "
                "skip steps that would have been good (LossScaler(enabled=False) passes through)",
            )
        state = self._on(gradients.values()[0].device)
        return gradients, gradients.unscale_(state.scale, self.saturation)

    # -- what it says ----------------------------------------------------------------------------------------------------

    @property
    def skipped(self) -> Tensor:
        """Whether the last step was skipped: a 0-d bool tensor on the scale's device; False before the first."""
        return torch.tensor(False) if self._found is None else self._found > 0

    @property
    def is_unscaled(self) -> bool:
        """True between ``unscale`` and ``step``: the gradients are without the scale."""
        return self._unscaled is not None

    @property
    def explains(self) -> bool:
        """True if a skipped step is run again to find the operator behind it."""
        return self._watch is not None

    @property
    def last_skip(self) -> Skip | None:
        return self.skips[-1] if self.skips else None

    def get_scale(self) -> float:
        """The scale that the next backward uses; 1 where this is not enabled."""
        if not self.enabled:
            return 1.0
        return float(self._start["scale"] if self._state is None else self._state.scale)

    def underflow(self, *optimizers: Optimizer, format: str = "fp16") -> Underflow:
        """What a format loses of the gradients at the present scale, and the scale it recommends (see ``underflow``).

        Call it between ``backward`` and ``step``, or after ``step`` while the gradients are there. Without arguments,
        the optimizers of the last step.
        """
        given = optimizers or tuple(
            o for used in self._used if (o := used()) is not None
        )
        if not given:
            raise ScalerError(
                "which gradients?",
                where="LossScaler.underflow",
                do="scaler.underflow(optimizer)",
            )
        scale = self.get_scale()
        scaled = bool(self._backwards) and self._unscaled is None and self.enabled
        return underflow(
            Gradients(given, self._names).values(),
            scale,
            1.0 if scaled else scale,
            format,
        )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint, between steps. ``torch.amp.GradScaler`` reads it, and its own can be loaded here."""
        return saved(self.rule, self._start, self._state) if self.enabled else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint of this class or, with the dynamic rule, of ``torch.amp.GradScaler``."""
        if self.enabled:
            self.rule, self._start = loaded(self.rule, state)
            self._state = None

    # -- inside ----------------------------------------------------------------------------------------------------------

    def _on(self, device: torch.device) -> Scale:
        if self._state is None:
            self._state = Scale(
                self.rule, device, floor=self.floor, ceiling=self.ceiling, **self._start
            )
        return self._state

    def _names(self) -> dict[int, str]:
        return {} if self._watch is None else self._watch.names()

    def _forget(self) -> None:
        self._backwards, self._unscaled, self._loss_bad, self._stepping = (
            0,
            None,
            None,
            False,
        )
        self._done.clear()
        self._graph.clear()
        if self._watch is not None:
            self._watch.clear()

    def _explain(self, gradients: Gradients, state: Scale) -> None:
        bad = self._loss_bad is not None and bool(self._loss_bad)
        about = {
            "step": self.steps,
            "scale": float(state.scale),
            "loss_finite": not bad,
        }
        skip = Skip.explained(
            gradients, self._graph, self._watch, self.saturation, about
        )
        self.skips.append(skip)
        log.info("%s", skip)
        if bad:
            more = (
                "the scale stays as it is"
                if self.bad_loss == "keep"
                else "a lower scale will not help"
            )
            self._warn(
                "nan-loss",
                "the loss itself was NaN or Inf before it was scaled, so the scale is not to blame: the "
                f"step is skipped and {more}; look at the data and the weights. {skip}",
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
        if any(done() is loss for done in self._done):
            raise ScalerError(
                "this loss was run backward already, and its graph was freed",
                where="LossScaler.backward",
                do="backward once, or retain_graph=True the first time",
            )
        if (
            loss.dtype is torch.float16
            and "fp16-loss" not in self._told
            and self.get_scale() > LARGEST["float16"]
        ):
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

    def _check_order(self, gradients: Gradients, where: str) -> None:
        if stale := self._order.stale(gradients):
            raise ScalerError(
                "scaled gradients were added to the unscaled ones of the step before",
                where=f"{where}: {listed(stale)}",
                do="optimizer.zero_grad() after each step",
            )
        ask = self._watch is not None or gradients.parameters[0].device.type != "cuda"
        if changed := self._order.changed(gradients, ask=ask):
            self._warn(
                "changed-gradients",
                f"{listed(changed)}: the gradient was changed between backward and step, where it is "
                "still multiplied by the scale. A clip there cuts far too low, another scaler unscales twice, and a plain "
                "loss.backward() adds what is not scaled: use step(clip=...), or call unscale() first",
            )

    def _warn(self, rule: str, text: str) -> None:
        if rule not in self._told:
            self._told.add(rule)
            warn(f"roundoff loss scaler [{rule}]: {text}")


def _step(optimizer: Any, found: Tensor | None) -> None:
    if found is None:
        optimizer.step()
        return
    optimizer.grad_scale, optimizer.found_inf = (
        None,
        found,
    )  # torch's contract with fused optimizers
    try:
        optimizer.step()
    finally:
        del optimizer.grad_scale, optimizer.found_inf


def _check_clip(gradients: Gradients, clip: float | None, where: str) -> None:
    if clip is not None and (gradients.sparse or not clip > 0):
        raise ScalerError(
            "sparse gradients cannot be clipped"
            if gradients.sparse
            else "clip is the largest norm of the gradients",
            where=where,
            expected="dense gradients" if gradients.sparse else "a positive number",
            got=f"clip={clip}",
        )


def _distributed() -> bool:
    distributed = torch.distributed
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
