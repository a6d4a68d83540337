"""How a loss scale moves: rules as data, each with one update that runs where the scale
is, without asking the host.

A rule holds the constants, ``ScaleState`` the state. Scales are float32 and the counts
int32, as in torch's own scaler.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from roundoff.errors import ScalerError, did_you_mean, nearest


@dataclass(frozen=True)
class Static:
    """A scale that never moves (Micikevicius et al., Mixed Precision Training, ICLR
    2018, section 3.2).
    """

    init_scale: float = 2.0**16
    name: ClassVar[str] = "static"

    def __post_init__(self) -> None:
        _check_scale(self, "init_scale")

    def update(self, state: ScaleState, overflow: Tensor) -> None:
        """Leave the scale where it is."""

    def constants(self) -> dict[str, float]:
        """Return the constants as torch's ``GradScaler`` names them: with factors of 1
        it keeps the scale too.
        """
        return {
            "growth_factor": 1.0,
            "backoff_factor": 1.0,
            "growth_interval": 2**31 - 1,
        }


@dataclass(frozen=True)
class Dynamic:
    """The rule of ``torch.amp.GradScaler``, by torch's own kernel.

    After a step with NaN or Inf the scale is multiplied by ``backoff_factor``; after
    ``growth_interval`` steps in a row without, by ``growth_factor``, unless the product
    is not finite.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    name: ClassVar[str] = "dynamic"

    def __post_init__(self) -> None:
        _check_scale(self, "init_scale")
        _check(self, "growth_factor", self.growth_factor > 1, "more than 1")
        _check(self, "backoff_factor", 0 < self.backoff_factor < 1, "between 0 and 1")
        _check(self, "growth_interval", self.growth_interval >= 1, "at least 1")

    def update(self, state: ScaleState, overflow: Tensor) -> None:
        """Move the scale after a step; ``overflow`` is 1 where a gradient was not
        finite, else 0.
        """
        torch._amp_update_scale_(
            state.scale,
            state.good,
            overflow,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )

    def constants(self) -> dict[str, float]:
        """Return the constants as torch's ``GradScaler`` names them."""
        return {
            "growth_factor": self.growth_factor,
            "backoff_factor": self.backoff_factor,
            "growth_interval": self.growth_interval,
        }


@dataclass(frozen=True)
class Exponential:
    """The exponential update of TensorFlow and of Ascend's adapter for it; with
    ``consecutive``, PaddlePaddle's.

    The scale grows by ``incr_ratio`` after ``incr_every_n_steps`` good steps since the
    last bad one, unless the product is not finite, and shrinks by ``decr_ratio`` at the
    ``decr_every_n_nan_or_inf``-th bad step. Bad steps accumulate: good ones in between
    do not clear their count, only a move of the scale does (and a growth that was not
    finite). With ``consecutive`` a good step clears it (``paddle.amp.GradScaler``; its
    defaults are 65536, 2000, 1, 2, 0.5).

    Source: ``ExponentialUpdateLossScaleManager`` of tf.contrib.mixed_precision
    (TensorFlow 1.15), the same in Ascend's npu_bridge. Its text says that an update
    below 1 is not applied, its code gives 1: here too, by ``floor``.
    """

    init_loss_scale: float = 2.0**32
    incr_every_n_steps: int = 1000
    decr_every_n_nan_or_inf: int = 2
    incr_ratio: float = 2.0
    decr_ratio: float = 0.8
    consecutive: bool = False
    name: ClassVar[str] = "exponential"

    def __post_init__(self) -> None:
        _check_scale(self, "init_loss_scale")
        _check(self, "incr_every_n_steps", self.incr_every_n_steps >= 1, "at least 1")
        _check(
            self,
            "decr_every_n_nan_or_inf",
            self.decr_every_n_nan_or_inf >= 1,
            "at least 1",
        )
        _check(self, "incr_ratio", self.incr_ratio > 1, "more than 1")
        _check(self, "decr_ratio", 0 < self.decr_ratio < 1, "between 0 and 1")

    @property
    def init_scale(self) -> float:
        """The scale to begin with."""
        return self.init_loss_scale

    def update(self, state: ScaleState, overflow: Tensor) -> None:
        """Move the scale after a step; ``overflow`` is 1 where a gradient was not
        finite, else 0.
        """
        scale = state.scale
        is_bad = overflow > 0
        kept_bad = 0 if self.consecutive else state.bad
        good = torch.where(is_bad, 0, state.good + 1)
        bad = torch.where(is_bad, state.bad + 1, kept_bad)
        grows = ~is_bad & (good >= self.incr_every_n_steps)
        shrinks = is_bad & (bad >= self.decr_every_n_nan_or_inf)
        larger = scale * self.incr_ratio
        larger = torch.where(torch.isfinite(larger), larger, scale)
        smaller_or_same = torch.where(shrinks, scale * self.decr_ratio, scale)
        scale.copy_(torch.where(grows, larger, smaller_or_same))
        moved = grows | shrinks
        state.good.copy_(torch.where(moved, 0, good))
        state.bad.copy_(torch.where(moved, 0, bad))

    def constants(self) -> dict[str, float]:
        """Return the nearest that torch's ``GradScaler`` can follow: it would shrink at
        every bad step.
        """
        return {
            "growth_factor": self.incr_ratio,
            "backoff_factor": self.decr_ratio,
            "growth_interval": self.incr_every_n_steps,
        }


Rule = Static | Dynamic | Exponential
RULES: dict[str, type[Static] | type[Dynamic] | type[Exponential]] = {
    rule.name: rule for rule in (Static, Dynamic, Exponential)
}


def parse_rule(rule: str | Rule, options: dict[str, Any]) -> Rule:
    """Make a rule by name with its constants, or return one that is made.

    Raises ``ScalerError`` for a name or a constant that there is not.

    >>> parse_rule("exponential", {"init_loss_scale": 1024.0, "incr_every_n_steps": 10}).decr_ratio
    0.8
    """
    if not isinstance(rule, str):
        if options:
            raise ScalerError(
                "a rule that is made already takes no constants",
                where="LossScaler",
                got=", ".join(options),
            )
        return rule
    if rule not in RULES:
        raise ScalerError(
            "unknown rule",
            where=f"LossScaler(rule={rule!r})",
            expected=", ".join(RULES),
        )
    names = [field.name for field in dataclasses.fields(RULES[rule])]
    for key in options:
        if key not in names:
            near = nearest(key, names, at_most=1)
            raise ScalerError(
                f"the {rule} rule has no {key!r}",
                where="LossScaler",
                expected=", ".join(names),
                do=did_you_mean(map(repr, near)) or _owner(key),
            )
    return RULES[rule](**options)


def _owner(key: str) -> str | None:
    for name, rule in RULES.items():
        if key in [field.name for field in dataclasses.fields(rule)]:
            return f"it belongs to LossScaler(rule={name!r})"
    return None


class ScaleState:
    """The state of a rule: 0-d tensors on a device.

    ``floor`` and ``ceiling`` bound what the rule makes, but never move a scale that was
    given beyond them.

    Attributes:
        scale: the scale, float32.
        good, bad: counts of steps, as the rule defines them, int32.
        stuck: skipped steps in a row at which the scale could not go lower, int32.
    """

    def __init__(
        self,
        rule: Rule,
        device: torch.device,
        scale: float,
        floor: float,
        ceiling: float,
        good: int = 0,
        bad: int = 0,
        stuck: int = 0,
    ) -> None:
        self.rule = rule
        self.floor = floor
        self.ceiling = ceiling
        self.scale = torch.full((), scale, dtype=torch.float32, device=device)
        self.good = torch.full((), good, dtype=torch.int32, device=device)
        self.bad = torch.full((), bad, dtype=torch.int32, device=device)
        self.stuck = torch.full((), stuck, dtype=torch.int32, device=device)

    def update(self, overflow: Tensor, blameless: Tensor | None = None) -> None:
        """End a step.

        Where ``blameless`` (the loss was not finite before it was scaled) nothing moves.
        """
        before = self.scale.clone()
        moving = (self.scale, self.good, self.bad)
        kept = [tensor.clone() for tensor in moving]
        self.rule.update(self, overflow)
        self._bound(before)
        if blameless is not None:
            for now, then in zip(moving, kept, strict=True):
                now.copy_(torch.where(blameless, then, now))
        cannot_fall = self._cannot_fall(before)
        if blameless is not None:
            cannot_fall = cannot_fall | blameless
        stuck = torch.where(cannot_fall, self.stuck + 1, 0)
        self.stuck.copy_(torch.where(overflow > 0, stuck, 0))

    def _bound(self, before: Tensor) -> None:
        if self.floor > 0:
            self.scale.copy_(torch.maximum(self.scale, before.clamp(max=self.floor)))
        if math.isfinite(self.ceiling):
            self.scale.copy_(torch.minimum(self.scale, before.clamp(min=self.ceiling)))

    def _cannot_fall(self, scale: Tensor) -> Tensor:
        if self.rule.name == "static":
            return torch.ones_like(scale, dtype=torch.bool)
        return scale <= self.floor


def _check(rule: Any, name: str, is_valid: bool, expected: str) -> None:
    if not is_valid:
        raise ScalerError(
            f"{name} of the {rule.name} rule",
            where="LossScaler",
            expected=expected,
            got=f"{getattr(rule, name)}",
        )


def _check_scale(rule: Any, name: str) -> None:
    value = getattr(rule, name)
    _check(
        rule,
        name,
        0 < value <= torch.finfo(torch.float32).max,
        "a positive number that float32 holds",
    )
