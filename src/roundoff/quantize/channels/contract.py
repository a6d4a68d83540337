"""Operators that contract: they read the channels of one axis and make others, by a weight or by another activation."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from roundoff.ops import facts
from roundoff.quantize.channels.labels import (
    Labels,
    Passed,
    Space,
    varying_axes,
    varying_part,
)
from roundoff.quantize.channels.moves import along, fixed


class Contractions:
    """What ``Follow`` does at linear layers, convolutions, matrix products and attention; ``site`` is the call's."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        self.site = ""

    def bind(
        self, tensor: Tensor | None, axis: int, ndim: int, part: str, to: Tensor
    ) -> None:
        """A vector of values for the channels on ``axis`` of labels ``to``."""
        if tensor is None or tensor.numel() == 1:
            return
        own = along(self.labels, tensor, 0, part) if tensor.ndim == 1 else None
        if own is None:
            self.labels.pin(
                to, f"a value for each channel ({self.site}) is computed in the code"
            )
            return
        shape = [1] * ndim
        shape[axis] = -1
        self.labels.tie(to, own.view(shape))

    def contract(
        self,
        x: Tensor,
        weight: Tensor,
        axis: int,
        inputs: int,
        outs: int,
        bias: Tensor | None,
        out: Tensor,
        out_axis: int,
    ) -> None:
        """A product over ``axis`` of x with axis ``inputs`` of a weight, whose axis ``outs`` becomes ``out_axis``."""
        labels, own = self.labels, self.labels.get(x)
        axis = axis % x.ndim
        made = along(labels, weight, outs, "producer")
        varied = varying_axes(own)
        if (
            varied and axis not in varied and x.shape[axis] > 1
        ):  # mixes something else, channel by channel
            labels.note(
                own,
                Passed(self.site, "linear", "homogeneous" if bias is None else "other"),
            )
            labels.put(out, varying_part(own))
            return
        if made is None:
            labels.pin(own, f"the weight of {self.site} is computed in the code")
            return
        self._read(own, axis, weight, inputs)
        self._make(out, out_axis, made.flatten(), bias)

    def _read(
        self, own: Tensor, axis: int, weight: Tensor, inputs: int, groups: int = 1
    ) -> None:
        """The channels on ``axis`` of ``own`` are read by axis ``inputs`` of a weight."""
        labels = self.labels
        line = varying_part(own).movedim(axis, -1)
        line = line.reshape(-1, line.shape[-1])
        first = line.amax(
            0
        )  # 0 where nothing is a channel (the model's input, padding)
        labels.tie(line, first)
        if groups > 1:
            name = labels.parameter(weight)
            size = weight.shape[inputs] * groups
            if name is None or name[1] is not None:
                labels.pin(own, f"the weight of {self.site} is computed in the code")
                return
            read = labels.space(Space(name[0], "consumer", inputs, groups), size)
            labels.tie(read.view(groups, -1)[:1], read.view(groups, -1), value=False)
        else:
            found = along(labels, weight, inputs, "consumer")
            if found is None:
                labels.pin(own, f"the weight of {self.site} is computed in the code")
                return
            read = found.flatten()
        labels.tie(first, read)
        self._apart(read[first.expand(read.shape) == 0])

    def _apart(self, read: Tensor) -> None:
        """These inputs of a weight are no channels here; channels that it reads in another call have to stay."""
        self.labels.pin(
            read, f"{self.site} reads by the same weight what no weight makes"
        )

    def _make(self, out: Tensor, axis: int, made: Tensor, bias: Tensor | None) -> None:
        shape = [1] * out.ndim
        shape[axis] = -1
        self.labels.put(out, made.view(shape))
        self.bind(bias, axis, out.ndim, "bias", self.labels.get(out))

    def conv(
        self,
        kind: str,
        spatial: int,
        args: list[Any],
        kwargs: dict[str, Any],
        out: Tensor,
    ) -> None:
        """A convolution (``kind`` conv or conv_transpose): plain, in groups, or depthwise."""
        labels = self.labels
        given = (
            dict(zip(facts(f"{kind}{spatial}d").arguments, args, strict=False)) | kwargs
        )
        x, weight, bias, groups = (
            given["input"],
            given["weight"],
            given.get("bias"),
            given.get("groups", 1),
        )
        axis, own = x.ndim - spatial - 1, labels.get(x)
        inputs, outs = (1, 0) if kind == "conv" else (0, 1)
        found = labels.parameter(weight)
        if groups == 1:
            self.contract(x, weight, axis, inputs, outs, bias, out, axis)
            return
        if found is None or found[1] is not None:
            labels.pin(own, f"the weight of {self.site} is computed in the code")
            return
        rows = weight.shape[0]
        if weight.shape[1] == 1 and (
            kind == "conv" or rows == groups
        ):  # depthwise: a product for each channel alone
            read, made = (
                labels.space(Space(found[0], part, 0), rows)
                for part in ("consumer", "producer")
            )
            line = varying_part(own).movedim(axis, -1)
            line = line.reshape(-1, line.shape[-1])
            labels.tie(line, line.amax(0))
            if line.shape[-1] > 1:
                labels.tie(line.amax(0).repeat_interleave(rows // groups), read)
                labels.tie(read, made, value=False)
            else:
                labels.pin(made, f"{self.site} reads a tensor of fixed size", "remove")
                self._apart(read)
            self._make(out, axis, made, bias)
            return
        if kind == "conv":
            self._read(own, axis, weight, 1, groups)
            made = labels.space(Space(found[0], "producer", 0), rows)
        else:
            self._read(own, axis, weight, 0)
            read = labels.space(Space(found[0], "consumer", 0), rows).view(groups, -1)
            labels.tie(read[:1], read, value=False)
            made = labels.space(
                Space(found[0], "producer", 1, groups), groups * weight.shape[1]
            )
        labels.tie(made.view(groups, -1)[:1], made.view(groups, -1), value=False)
        self._make(out, axis, made, bias)

    def matmul(self, name: str, args: list[Any], out: Tensor) -> bool:
        """A product of an activation with a parameter or another activation; False where it is neither."""
        labels = self.labels
        bias, (a, b) = (args[0], args[1:3]) if name == "addmm" else (None, args[:2])
        if labels.parameter(b) is not None and b.ndim == 2:
            self.contract(a, b, -1, 0, 1, bias, out, -1)
            return True
        if (
            bias is not None
            or min(a.ndim, b.ndim) < 2
            or labels.parameter(a) is not None
        ):
            return False
        one, two = labels.get(a), labels.get(b)
        self._dot(one, two, -1, -2)
        kept = [_one_of(one, -1), _one_of(two, -2)]
        known = [k for k in kept if varying_axes(k)]
        if len(known) == 2:
            labels.pin(one, f"{name} ({self.site}) of two tensors with channels")
            labels.pin(two, f"{name} ({self.site}) of two tensors with channels")
        elif known:
            labels.note(known[0], Passed(self.site, name, "homogeneous"))
            labels.put(out, varying_part(known[0]))
        return True

    def attention(self, given: dict[str, Any], out: Tensor) -> None:
        """``softmax(q·k)·v``: the channels of v pass, those of q and k go together."""
        query, key, value = (
            self.labels.get(given[n]) for n in ("query", "key", "value")
        )
        self._dot(query, key.transpose(-1, -2), -1, -2)
        if (
            -2 % value.ndim in varying_axes(value)
            or query.shape[:-2] != value.shape[:-2]
        ):
            self.labels.pin(value, f"{self.site} mixes its channels")
            return
        self.labels.note(
            value, Passed(self.site, "scaled_dot_product_attention", "homogeneous")
        )
        self.labels.put(out, varying_part(value))

    def _dot(self, one: Tensor, two: Tensor, left: int, right: int) -> None:
        """Two activations are multiplied and summed over an axis: its channels go together, and none may be rescaled."""
        labels = self.labels
        if left % one.ndim not in varying_axes(
            one
        ) and right % two.ndim not in varying_axes(two):
            return
        reason = f"multiplied with other channels in {self.site}"
        labels.pin(one, reason, "rescale")
        labels.pin(two, reason, "rescale")
        first, second = _one_of(one, -2), _one_of(two, -1).transpose(-1, -2)
        if first.shape != second.shape:
            labels.pin(one, reason)
            labels.pin(two, reason)
            return
        labels.tie(first, second, value=False)
        fixed(labels, first, second, f"{self.site} reads a tensor of fixed size")


def _one_of(labels: Tensor, axis: int) -> Tensor:
    """Labels with an axis cut to its first element."""
    return labels.narrow(axis, 0, 1)
