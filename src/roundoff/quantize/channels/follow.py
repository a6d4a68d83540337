"""What each operator does to the channels it reads: new ones, the same, tied ones, or unknown (then they are pinned)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from roundoff.capture.calls import Call, CallMode, Handler, float_tensors
from roundoff.capture.operators import Operator
from roundoff.quantize.channels.contract import Contractions
from roundoff.quantize.channels.labels import (
    Labels,
    Passed,
    constant_expanded,
    varying_axes,
    varying_part,
)
from roundoff.quantize.channels.moves import Moves, along, fixed

_HOMOGENEOUS = frozenset(
    "relu leaky_relu prelu rrelu abs neg negative positive nan_to_num where threshold identity".split()
)
_ELEMENTWISE = frozenset(
    """sigmoid tanh gelu silu mish elu selu celu hardswish hardsigmoid softplus softsign hardshrink softshrink tanhshrink
    logsigmoid log_sigmoid exp exp2 expm1 log log2 log10 log1p sqrt rsqrt square pow rpow reciprocal erf sin cos floor ceil
    round trunc sign log_sigmoid_forward clamp clamp_min clamp_max clip hardtanh relu6 floor_divide""".split()
)
_POOLS = frozenset(
    "max_pool avg_pool adaptive_avg_pool adaptive_max_pool upsample_nearest upsample_bilinear upsample_linear "
    "upsample_trilinear upsample_bicubic _upsample_nearest_exact lp_pool upsample_nearest_exact".split()
)
_REDUCTIONS = frozenset("sum mean amax amin max min prod var std norm linalg_vector_norm logsumexp".split())
_LINEAR_REDUCTIONS = frozenset("sum mean amax amin max min std norm linalg_vector_norm".split())
_PAIRS = frozenset("add radd sub rsub mul rmul div rdiv maximum minimum".split())
_NAMES: dict[str, tuple[str, ...]] = {
    "linear": ("input", "weight", "bias"),
    "batch_norm": ("input", "weight", "bias", "running_mean", "running_var"),
    "instance_norm": ("input", "weight", "bias"),
    "layer_norm": ("input", "normalized_shape", "weight", "bias"),
    "rms_norm": ("input", "normalized_shape", "weight"),
    "group_norm": ("input", "num_groups", "weight", "bias"),
    "prelu": ("input", "weight"),
    "embedding": ("weight", "input"),
    "embedding_bag": ("weight", "input"),
    "softmax": ("input", "dim"),
    "log_softmax": ("input", "dim"),
    "glu": ("input", "dim"),
    "clamp": ("input", "min", "max"),
    "clip": ("input", "min", "max"),
    "clamp_min": ("input", "min"),
    "clamp_max": ("input", "max"),
    "hardtanh": ("input", "min_val", "max_val"),
    "scaled_dot_product_attention": ("query", "key", "value"),
}


class Follow(Contractions):
    """The handler: runs each call and writes down what it means for the channels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(Labels(model))
        self.moved = Moves(self.labels).move
        self.clips: dict[str, tuple[int, int, int]] = {}  # site → the channel axis, its length, the number of axes

    def before_write(self, tensor: Tensor) -> None:
        """Nothing to keep."""

    def call(self, call: Call) -> Any:
        """The call's result, unchanged."""
        args, kwargs = call.arguments()
        before = [(t, self.labels.get(t)) for t in float_tensors((args, kwargs))]
        result = call.run()
        outputs = float_tensors(result)
        if outputs:
            self.site = str(call.site)
            self.labels.touched.clear()
            self._follow(call.operator.name, args, kwargs, outputs)
            for tensor, _ in before:
                found = self.labels.parameter(tensor)
                if found is not None and tensor.numel() > 1 and found[0] not in self.labels.touched:
                    self.labels.whole[found[0]] = f"read as a whole by {call.site}"
        elif any(isinstance(t, Tensor) for t in (result if isinstance(result, tuple) else (result,))):
            purpose = "" if call.operator.name.startswith("arg") else "rescale"
            for _, labels in before:
                self.labels.pin(labels, f"{call.operator.name} ({call.site}) compares its values", purpose)
        elif call.operator.name in ("tolist", "numpy"):
            for _, labels in before:
                self.labels.pin(labels, f"its values leave torch by {call.operator.name} ({call.site})")
        return result

    def _follow(self, name: str, args: list[Any], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        base = name.rstrip("d").rstrip("123")
        given = dict(zip(_NAMES.get(name, ()), args, strict=False)) | kwargs
        x: Any = args[0] if args and isinstance(args[0], Tensor) else given.get("input")
        if name == "linear":
            self.contract(x, given["weight"], -1, 1, 0, given.get("bias"), outputs[0], -1)
        elif base == "conv" or base == "conv_transpose":
            self.conv(base, int(name[-2]), args, kwargs, outputs[0])
        elif name in ("matmul", "mm", "bmm", "addmm"):
            if not self.matmul(name, args, outputs[0]):
                self._unknown(name, args, kwargs)
        elif name == "scaled_dot_product_attention":
            self.attention(given, outputs[0])
        elif name in ("embedding", "embedding_bag"):
            made = along(self.labels, given["weight"], 1, "producer")
            if made is not None:
                self.labels.put(outputs[0], made.view(-1))
        elif name == "batch_norm":
            self._same(x, outputs[0], "other", name)
            mean = given.get("running_mean")
            if not varying_axes(self.labels.get(x)) and mean is not None and mean.numel() > 1:  # of the model's input, say
                own = along(self.labels, mean, 0, "batch_norm")
                if own is not None:
                    self.labels.put(outputs[0], own.view(-1, *[1] * (x.ndim - 2)))
            for part in ("weight", "bias", "running_mean", "running_var"):
                self.bind(given.get(part), 1, x.ndim, "batch_norm", self.labels.get(outputs[0]))
        elif name in ("layer_norm", "rms_norm", "group_norm", "instance_norm"):
            self._normalise(name, x, given, outputs[0])
        elif name in _PAIRS and len(args) > 1:
            self._pair(name.removeprefix("r"), args[0], args[1], outputs[0])
            if kwargs.get("alpha", 1) != 1 and not isinstance(kwargs["alpha"], (int, float)):
                self._unknown(name, args, kwargs)
        elif name == "glu":
            self._glu(x, given.get("dim", -1), outputs[0])
        elif name in ("softmax", "log_softmax"):
            dim = given.get("dim", -1) % max(x.ndim, 1)
            if dim in varying_axes(self.labels.get(x)):
                self.labels.pin(self.labels.get(x), f"{name} ({self.site}) runs over its channels")
            self._same(x, outputs[0], "other", name)
        elif any(base.startswith(pool) for pool in _POOLS) and isinstance(x, Tensor):
            self._pool(x, outputs[0], name)
        elif name in _REDUCTIONS and isinstance(x, Tensor):
            self._reduce(name, x, args, kwargs, outputs)
        elif (name in _HOMOGENEOUS or name in _ELEMENTWISE) and isinstance(x, Tensor) and outputs[0].shape == x.shape:
            self._elementwise(name, x, given, args, outputs[0])
        else:
            self._unknown(name, args, kwargs)

    # -- one element in, one out

    def _same(self, x: Tensor, out: Tensor, law: str, name: str, bounds: tuple[float, float] | None = None) -> None:
        own = self.labels.get(x)
        self.labels.note(own, Passed(self.site, name, law, bounds))
        self.labels.put(out, own)

    def _elementwise(self, name: str, x: Tensor, given: dict[str, Any], args: list[Any], out: Tensor) -> None:
        law, bounds = ("homogeneous" if name in _HOMOGENEOUS else "other"), None
        if name in ("clamp", "clip", "clamp_min", "clamp_max", "hardtanh", "relu6"):
            low = given.get("min", given.get("min_val", 0.0 if name == "relu6" else -1.0 if name == "hardtanh" else None))
            high = given.get("max", given.get("max_val", 6.0 if name == "relu6" else 1.0 if name == "hardtanh" else None))
            if not isinstance(low, Tensor) and not isinstance(high, Tensor):
                bounds = (-math.inf if low is None else float(low), math.inf if high is None else float(high))
                varied = varying_axes(self.labels.get(x))
                if len(varied) == 1:
                    self.clips[self.site] = varied[0], x.shape[varied[0]], x.ndim
                law = "homogeneous" if bounds in ((0.0, math.inf), (-math.inf, 0.0)) else "clipped"
        if name == "threshold" and tuple(args[1:3]) != (0, 0):
            law = "other"
        if name in ("leaky_relu", "nan_to_num", "abs") or bounds is None:
            others = [t for t in float_tensors((args[1:], given)) if t is not x and t.numel() > 1]
            for other in others:
                if name == "prelu":
                    self.bind(other, 1, x.ndim, "slope", self.labels.get(x))
                elif self.labels.parameter(other) is None:
                    self.labels.tie(self.labels.get(x), self.labels.get(other), value=True)
        self._same(x, out, law, name, bounds)

    def _pair(self, name: str, a: Any, b: Any, out: Tensor) -> None:
        labels = self.labels
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.ndim == 0 or b.ndim == 0:
            x, other = (a, b) if isinstance(a, Tensor) and a.ndim else (b, a)
            zero = isinstance(other, (int, float)) and other == 0
            linear = name == "mul" or name == "div" and x is a or zero or name == "sub" and zero
            self._same(x, out, "homogeneous" if linear else "other", name)
            return
        for first, second, reverse in ((a, b, False), (b, a, True)):
            mixed_in = labels.parameter(second) is not None and labels.parameter(first) is None
            if mixed_in and self._with_parameter(name, first, second, out, reverse):
                return
        first, second = (labels.get(t).expand(out.shape) for t in (a, b))
        one, two = labels.get(a), labels.get(b)
        fixed(labels, _as_wide(one, out.ndim), _as_wide(two, out.ndim), self._fixed(name))
        additive = name in ("add", "sub", "maximum", "minimum")
        labels.tie(first, second, value=additive)
        mixed = torch.where(varying_part(first) != 0, varying_part(first), varying_part(second))
        if additive:
            # a sum with values that are no channels' is not smaller by s when the channels are
            law = "other" if ((varying_part(first) == 0) != (varying_part(second) == 0)).any() else "homogeneous"
            labels.note(first, Passed(self.site, name, law))
            labels.note(second, Passed(self.site, name, law))
        else:
            keep, other = first, second
            if name == "mul" and (labels.bent(first) and not labels.bent(second) or a.numel() < b.numel()):
                keep, other = second, first
            labels.note(keep, Passed(self.site, name, "homogeneous"))
            labels.note(other, Passed(self.site, name, "other"))
            mixed = torch.where(varying_part(keep) != 0, varying_part(keep), varying_part(other))
        labels.put(out, constant_expanded(mixed.expand(out.shape)))

    def _with_parameter(self, name: str, x: Tensor, parameter: Tensor, out: Tensor, reverse: bool) -> bool:
        """x + parameter or x * parameter with a value for each channel."""
        labels, own = self.labels, self.labels.get(x)
        axes = varying_axes(own) or [i - out.ndim + x.ndim for i in (out.ndim - 1,)]
        if len(axes) != 1 or x.shape != out.shape:
            return False
        axis = axes[0] - out.ndim  # from the back: the parameter may have fewer axes
        if -axis > parameter.ndim or parameter.shape[axis] == 1:
            self._same(x, out, "homogeneous" if name == "mul" or name == "div" and not reverse else "other", name)
            return True
        if name in ("add", "sub", "minimum", "maximum"):
            bound = along(labels, parameter, axis, "bias")
            if bound is None:
                return False
            if not varying_axes(own):
                fixed(labels, bound.expand(parameter.shape), own, self._fixed(name))
                labels.note(bound, Passed(self.site, name, "other"))
                labels.put(out, bound)
                return True
            labels.tie(own, bound)
            self._same(x, out, "homogeneous", name)
            return True
        if name != "mul":
            return False
        read, made = along(labels, parameter, axis, "consumer"), along(labels, parameter, axis, "producer")
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

    def _glu(self, x: Tensor, dim: int, out: Tensor) -> None:
        value, gate = self.labels.get(x).chunk(2, dim)
        self.labels.tie(value, gate, value=False)
        self.labels.note(gate, Passed(self.site, "glu", "other"))
        self.labels.note(value, Passed(self.site, "glu", "homogeneous"))
        self.labels.put(out, constant_expanded(value))

    # -- over some axes

    def _pool(self, x: Tensor, out: Tensor, name: str) -> None:
        own = self.labels.get(x)
        spatial = {i for i in range(x.ndim) if x.shape[i] != out.shape[i]} | set(range(2, x.ndim))
        if spatial & set(varying_axes(own)):
            self.labels.pin(own, f"{name} ({self.site}) mixes its channels")
            return
        self.labels.note(own, Passed(self.site, name, "homogeneous"))
        self.labels.put(out, varying_part(own))

    def _reduce(self, name: str, x: Tensor, args: list[Any], kwargs: dict[str, Any], outputs: list[Tensor]) -> None:
        own = self.labels.get(x)
        place = 2 if name == "norm" else 1
        dim: Any = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
        if isinstance(dim, (Tensor, float)):
            dim = None
        axes = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
        over = sorted({axis % x.ndim for axis in axes}) if x.ndim else []
        varied = set(varying_axes(own))
        if varied and varied <= set(over) or varied & set(over) and name not in ("sum", "mean"):
            self.labels.pin(own, f"{name} ({self.site}) runs over its channels")
            return
        kept = own
        for axis in over:
            if axis in varied:  # an addition of tensors that were stacked
                self.labels.tie(kept, kept.narrow(axis, 0, 1))
            kept = kept.narrow(axis, 0, min(1, kept.shape[axis]))
        for out in outputs:
            same_rank = out.ndim == x.ndim
            found = kept if same_rank else kept.squeeze(tuple(over)) if over else kept
            if found.ndim == out.ndim:
                self.labels.put(out, found)
        self.labels.note(own, Passed(self.site, name, "homogeneous" if name in _LINEAR_REDUCTIONS else "other"))

    def _normalise(self, name: str, x: Tensor, given: dict[str, Any], out: Tensor) -> None:
        labels, own = self.labels, self.labels.get(x)
        axis = x.ndim - 1 if name in ("layer_norm", "rms_norm") else 1
        varied = varying_axes(own)
        over = name == "group_norm" or name != "instance_norm" and any(
            a >= x.ndim - len(given["normalized_shape"]) for a in varied
        )
        if varied and varied != [axis]:
            if over or name == "instance_norm":
                labels.pin(own, f"{name} ({self.site}) mixes its channels")
            self._same(x, out, "other", name)
            return
        if over:
            labels.pin(own, f"{name} ({self.site}) runs over its channels", "remove")
        labels.note(own, Passed(self.site, name, "other"))
        weight = given.get("weight")
        made = None if weight is None else along(labels, weight, 0, "producer") if weight.ndim == 1 else None
        if made is None or out.shape[axis] == 1:
            labels.put(out, own)
            return
        shape = [1] * x.ndim
        shape[axis] = -1
        made = made.view(shape)
        fixed(labels, made.expand(out.shape), own, f"{name} ({self.site}) reads a tensor of fixed size")
        labels.tie(own, made, value=False)
        self.bind(given.get("bias"), axis, x.ndim, "bias", made)
        labels.put(out, made)

    def _unknown(self, name: str, args: Any, kwargs: Any) -> None:
        for tensor in float_tensors((args, kwargs)):
            self.labels.pin(self.labels.get(tensor), f"what {name} ({self.site}) does to channels is not known")


class SeesMoves(Handler, Protocol):
    """What ``MovesMode`` asks beside ``Handler``."""

    def moved(self, func: Callable[..., Any], name: str, site: str, result: Any, args: Any, kwargs: Any) -> None:
        """``func`` has moved values of its arguments into ``result``."""


class MovesMode(CallMode):
    """``CallMode`` that also tells its handler of operators that only move values."""

    def __init__(self, model: nn.Module, handler: Any) -> None:
        super().__init__(model, handler)
        self.seer: SeesMoves = handler

    def passed_on(
        self, func: Callable[..., Any], operator: Operator, reason: str, result: Any, args: Any, kwargs: Any
    ) -> None:
        """See ``CallMode``."""
        super().passed_on(func, operator, reason, result, args, kwargs)
        if reason.startswith("moves"):
            site = f"{self.path[-1] if self.path else ''}/{operator.name}"
            self.seer.moved(func, operator.name, site, result, args, kwargs)


def _as_wide(labels: Tensor, ndim: int) -> Tensor:
    return labels.view((1,) * (ndim - labels.ndim) + tuple(labels.shape)) if labels.ndim < ndim else labels

