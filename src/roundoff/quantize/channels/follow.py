"""Follow the channels of a model through its calls: one rule for each kind of operator.

A rule says what a call does to the channels it reads: it makes new ones, keeps them,
ties them; channels of calls without a rule are pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from roundoff.ops import (
    Call,
    CallMode,
    Handler,
    Operator,
    facts,
    float_tensors,
    operators_that,
    watch,
)
from roundoff.preserve import preserve
from roundoff.quantize.channels import contractions, elementwise, over_axes
from roundoff.quantize.channels.followed_call import FollowedCall
from roundoff.quantize.channels.labels import CANNOT_FOLLOW, Labels
from roundoff.quantize.channels.moves import Move, follow_move
from roundoff.workload import Workload

Rule = Callable[[FollowedCall], bool]

_RULES: dict[str, Rule] = {
    "linear": contractions.linear,
    "batch_norm": over_axes.batch_norm,
    "glu": elementwise.glu,
}
_RULES_BY_KIND: dict[str, Rule] = {
    "conv": contractions.convolution,
    "attention": contractions.attention,
    "embedding": over_axes.embedding,
}
#: The first trait that an operator has decides.
_RULES_BY_TRAIT: tuple[tuple[str, Rule], ...] = (
    ("multiply two matrices", contractions.matrix_product),
    ("pair elements", elementwise.two_operands),
    ("reduce axes", over_axes.reduction),
    ("scale with their operand", elementwise.one_operand),
    ("work element by element", elementwise.one_operand),
)
#: Operators that are a pool start with one of these.
_POOLS = (
    "max_pool",
    "avg_pool",
    "adaptive_avg_pool",
    "adaptive_max_pool",
    "lp_pool",
    "upsample_",
    "_upsample_nearest_exact",
)


def rule_of(name: str) -> Rule | None:
    """The rule of an operator; None where there is none."""
    if name in _RULES:
        return _RULES[name]
    if name in ("softmax", "log_softmax"):
        return over_axes.softmax
    operator = facts(name)
    if operator.kind in _RULES_BY_KIND:
        return _RULES_BY_KIND[operator.kind]
    if operator.kind == "normalization" and "weight" in operator.arguments:
        return over_axes.normalization
    if name.startswith(_POOLS):
        return over_axes.pool
    for trait, rule in _RULES_BY_TRAIT:
        if name in operators_that(trait):
            return rule
    return None


def follow_channels(workload: Workload, batches: Sequence[Any] | None = None) -> Labels:
    """Run a workload's model on its batches, or on others, and follow its channels."""
    model = workload.model
    following = _Following(model)
    labels = following.labels
    with preserve(model):
        model.eval()
        with torch.no_grad(), watch(model, following, _MovesMode) as mode:
            for batch in workload.batches if batches is None else batches:
                mode.begin()
                with mode:
                    output = workload.run(batch)
                for tensor in float_tensors(output):
                    _pin_output(labels, tensor)
    return labels


def _pin_output(labels: Labels, tensor: Tensor) -> None:
    reason = "it is the model's output"
    labels.pin(labels.get(tensor), reason)
    parameter = labels.parameter(tensor)
    if parameter is not None:
        labels.whole[parameter.name] = reason


class _Following:
    """The handler: runs each call and writes down what it means for the channels."""

    def __init__(self, model: nn.Module) -> None:
        self.labels = Labels(model)

    def before_write(self, tensor: Tensor) -> None:
        """Nothing to keep."""

    def call(self, call: Call) -> Any:
        """The call's result, unchanged."""
        args, kwargs = call.arguments()
        # labels from before the call: it may write in place
        before = [(t, self.labels.get(t)) for t in float_tensors((args, kwargs))]
        result = call.run()
        outputs = float_tensors(result)
        if outputs:
            self.labels.touched.clear()
            followed = FollowedCall(
                self.labels, str(call.site), call.operator.name, args, kwargs, outputs
            )
            self._follow(followed)
            self._note_whole([tensor for tensor, _ in before], followed.site)
            self.labels.end_call()
            return result
        reason, purpose = _leaving(call, result)
        if reason:
            for _, labels in before:
                self.labels.pin(labels, reason, purpose)
        return result

    def _follow(self, followed: FollowedCall) -> None:
        """Apply the call's rule; where it fails, the channels that it reads stay."""
        rule = rule_of(followed.name)
        try:
            follows = rule is not None and rule(followed)
        except CANNOT_FOLLOW:
            self.labels.forget(followed.outputs)
            follows = False
        if not follows:
            followed.pin_operands()

    def _note_whole(self, operands: list[Tensor], site: str) -> None:
        """Note parameters that the call reads otherwise than along one axis."""
        for tensor in operands:
            parameter = self.labels.parameter(tensor)
            if parameter is None or tensor.numel() <= 1:
                continue
            if parameter.name not in self.labels.touched:
                self.labels.whole[parameter.name] = f"read as a whole by {site}"

    def moved(
        self,
        func: Callable[..., Any],
        name: str,
        site: str,
        result: Any,
        args: Any,
        kwargs: Any,
    ) -> None:
        """See ``SeesMoves``."""
        move = Move(func, name, site, result, args, kwargs)
        try:
            follow_move(self.labels, move)
        except CANNOT_FOLLOW:
            for tensor in move.inputs:
                reason = f"{name} ({site}) cannot be followed"
                self.labels.pin(self.labels.get(tensor), reason)
            self.labels.forget(move.outputs)


def _leaving(call: Call, result: Any) -> tuple[str, str]:
    """Why a call without floating-point results pins channels, and for which purpose.

    The reason is ``""`` where they are not.
    """
    name = call.operator.name
    results = result if isinstance(result, tuple) else (result,)
    if any(isinstance(t, Tensor) for t in results):
        purpose = "" if name.startswith("arg") else "rescale"
        return f"{name} ({call.site}) compares its values", purpose
    if name in ("tolist", "numpy"):
        return f"its values leave torch by {name} ({call.site})", ""
    return "", ""


class SeesMoves(Handler, Protocol):
    """What ``_MovesMode`` asks beside ``Handler``."""

    def moved(
        self,
        func: Callable[..., Any],
        name: str,
        site: str,
        result: Any,
        args: Any,
        kwargs: Any,
    ) -> None:
        """``func`` has moved values of its arguments into ``result``."""


class _MovesMode(CallMode):
    """``CallMode`` that also tells its handler of operators that only move values."""

    def __init__(self, model: nn.Module, handler: Any) -> None:
        super().__init__(model, handler)
        self.seer: SeesMoves = handler

    def passed_on(
        self,
        func: Callable[..., Any],
        operator: Operator,
        reason: str,
        result: Any,
        args: Any,
        kwargs: Any,
    ) -> None:
        """See ``CallMode``."""
        super().passed_on(func, operator, reason, result, args, kwargs)
        if reason.startswith("moves"):
            site = f"{self.position.module}/{operator.name}"
            self.seer.moved(func, operator.name, site, result, args, kwargs)
