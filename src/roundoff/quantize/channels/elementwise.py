"""Operators that work element by element: the channels stay, and what two tensors have at one place is tied."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from roundoff.ops import float_tensors, operators_that
from roundoff.quantize.channels.contract import Contractions
from roundoff.quantize.channels.labels import (
    Labels,
    Passed,
    constant_expanded,
    varying_axes,
    varying_part,
)
from roundoff.quantize.channels.moves import along, fixed


class Elementwise(Contractions):
    """What ``Follow`` does where each element of the result has its own element of each operand."""

    def __init__(self, labels: Labels) -> None:
        super().__init__(labels)
        self.clips: dict[
            str, tuple[int, int, int]
        ] = {}  # site → the channel axis, its length, the number of axes

    def same(
        self,
        x: Tensor,
        out: Tensor,
        law: str,
        name: str,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        """The output has the labels of ``x``; ``law`` says what becomes of a factor of a channel."""
        own = self.labels.get(x)
        self.labels.note(own, Passed(self.site, name, law, bounds))
        self.labels.put(out, own)

    def elementwise(
        self, name: str, x: Tensor, given: dict[str, Any], args: list[Any], out: Tensor
    ) -> None:
        """An operator of one tensor, element by element: activation functions, clamps, signs and roots."""
        scales = name in operators_that("scale with their operand")
        law = "homogeneous" if scales else "other"
        bounds = None
        if name in operators_that("clamp"):
            low = given.get(
                "min",
                given.get(
                    "min_val",
                    0.0 if name == "relu6" else -1.0 if name == "hardtanh" else None,
                ),
            )
            high = given.get(
                "max",
                given.get(
                    "max_val",
                    6.0 if name == "relu6" else 1.0 if name == "hardtanh" else None,
                ),
            )
            if not isinstance(low, Tensor) and not isinstance(high, Tensor):
                bounds = (
                    -math.inf if low is None else float(low),
                    math.inf if high is None else float(high),
                )
                varied = varying_axes(self.labels.get(x))
                if len(varied) == 1:
                    self.clips[self.site] = varied[0], x.shape[varied[0]], x.ndim
                law = (
                    "homogeneous"
                    if bounds in ((0.0, math.inf), (-math.inf, 0.0))
                    else "clipped"
                )
        if name == "threshold" and tuple(args[1:3]) != (0, 0):
            law = "other"
        if name in ("leaky_relu", "nan_to_num", "abs") or bounds is None:
            others = [
                t
                for t in float_tensors((args[1:], given))
                if t is not x and t.numel() > 1
            ]
            for other in others:
                if name == "prelu":
                    self.bind(other, 1, x.ndim, "slope", self.labels.get(x))
                elif self.labels.parameter(other) is None:
                    self.labels.tie(
                        self.labels.get(x), self.labels.get(other), value=True
                    )
        self.same(x, out, law, name, bounds)

    def pair(self, name: str, a: Any, b: Any, out: Tensor) -> None:
        """A sum, difference, product, quotient or extreme of two: a residual, a gate, or a number for all."""
        labels = self.labels
        if (
            not isinstance(a, Tensor)
            or not isinstance(b, Tensor)
            or a.ndim == 0
            or b.ndim == 0
        ):
            x, other = (a, b) if isinstance(a, Tensor) and a.ndim else (b, a)
            zero = isinstance(other, (int, float)) and other == 0
            linear = (
                name == "mul"
                or name == "div"
                and x is a
                or zero
                or name == "sub"
                and zero
            )
            self.same(x, out, "homogeneous" if linear else "other", name)
            return
        for first, second, reverse in ((a, b, False), (b, a, True)):
            mixed_in = (
                labels.parameter(second) is not None and labels.parameter(first) is None
            )
            if mixed_in and self._with_parameter(name, first, second, out, reverse):
                return
        first, second = (labels.get(t).expand(out.shape) for t in (a, b))
        one, two = labels.get(a), labels.get(b)
        fixed(
            labels, _as_wide(one, out.ndim), _as_wide(two, out.ndim), self._fixed(name)
        )
        additive = name in operators_that("keep a common factor")
        labels.tie(first, second, value=additive)
        mixed = torch.where(
            varying_part(first) != 0, varying_part(first), varying_part(second)
        )
        if additive:
            # a sum with values that are no channels' is not smaller by s when the channels are
            law = (
                "other"
                if ((varying_part(first) == 0) != (varying_part(second) == 0)).any()
                else "homogeneous"
            )
            labels.note(first, Passed(self.site, name, law))
            labels.note(second, Passed(self.site, name, law))
        else:
            keep, other = first, second
            if name == "mul" and (
                labels.bent(first) and not labels.bent(second) or a.numel() < b.numel()
            ):
                keep, other = second, first
            labels.note(keep, Passed(self.site, name, "homogeneous"))
            labels.note(other, Passed(self.site, name, "other"))
            mixed = torch.where(
                varying_part(keep) != 0, varying_part(keep), varying_part(other)
            )
        labels.put(out, constant_expanded(mixed.expand(out.shape)))

    def _with_parameter(
        self, name: str, x: Tensor, parameter: Tensor, out: Tensor, reverse: bool
    ) -> bool:
        """x + parameter or x * parameter with a value for each channel."""
        labels, own = self.labels, self.labels.get(x)
        axes = varying_axes(own) or [i - out.ndim + x.ndim for i in (out.ndim - 1,)]
        if len(axes) != 1 or x.shape != out.shape:
            return False
        axis = axes[0] - out.ndim  # from the back: the parameter may have fewer axes
        if -axis > parameter.ndim or parameter.shape[axis] == 1:
            self.same(
                x,
                out,
                "homogeneous"
                if name == "mul" or name == "div" and not reverse
                else "other",
                name,
            )
            return True
        if name in operators_that("keep a common factor"):
            bound = along(labels, parameter, axis, "bias")
            if bound is None:
                return False
            if not varying_axes(own):
                fixed(labels, bound.expand(parameter.shape), own, self._fixed(name))
                labels.note(bound, Passed(self.site, name, "other"))
                labels.put(out, bound)
                return True
            labels.tie(own, bound)
            self.same(x, out, "homogeneous", name)
            return True
        if name != "mul":
            return False
        read, made = (
            along(labels, parameter, axis, "consumer"),
            along(labels, parameter, axis, "producer"),
        )
        if read is None or made is None:
            return False
        labels.tie(own, read)
        labels.tie(read, made, value=False)
        if not varying_axes(own):
            labels.pin(made, self._fixed(name), "remove")
        labels.put(out, made)
        return True

    def _fixed(self, name: str) -> str:
        return f"meets a tensor of fixed size in {name} ({self.site})"

    def glu(self, x: Tensor, dim: int, out: Tensor) -> None:
        """One half of the channels times the sigmoid of the other half."""
        value, gate = self.labels.get(x).chunk(2, dim)
        self.labels.tie(value, gate, value=False)
        self.labels.note(gate, Passed(self.site, "glu", "other"))
        self.labels.note(value, Passed(self.site, "glu", "homogeneous"))
        self.labels.put(out, constant_expanded(value))


def _as_wide(labels: Tensor, ndim: int) -> Tensor:
    return (
        labels.view((1,) * (ndim - labels.ndim) + tuple(labels.shape))
        if labels.ndim < ndim
        else labels
    )
