"""What each operator does to the channels it reads: new ones, the same, tied ones, or unknown (then they are pinned)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from roundoff.ops import (
    Call,
    CallMode,
    Handler,
    Operator,
    facts,
    float_tensors,
    operators_that,
)
from roundoff.quantize.channels.elementwise import Elementwise
from roundoff.quantize.channels.labels import (
    Labels,
    Passed,
    varying_axes,
    varying_part,
)
from roundoff.quantize.channels.moves import Moves, along, fixed

_POOLS = frozenset(
    "max_pool avg_pool adaptive_avg_pool adaptive_max_pool upsample_nearest upsample_bilinear upsample_linear "
    "upsample_trilinear upsample_bicubic _upsample_nearest_exact lp_pool upsample_nearest_exact".split()
)


class Follow(Elementwise):
    """The handler: runs each call and writes down what it means for the channels."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(Labels(model))
        self.moved = Moves(self.labels).move

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
                if (
                    found is not None
                    and tensor.numel() > 1
                    and found[0] not in self.labels.touched
                ):
                    self.labels.whole[found[0]] = f"read as a whole by {call.site}"
        elif any(
            isinstance(t, Tensor)
            for t in (result if isinstance(result, tuple) else (result,))
        ):
            purpose = "" if call.operator.name.startswith("arg") else "rescale"
            for _, labels in before:
                self.labels.pin(
                    labels,
                    f"{call.operator.name} ({call.site}) compares its values",
                    purpose,
                )
        elif call.operator.name in ("tolist", "numpy"):
            for _, labels in before:
                self.labels.pin(
                    labels,
                    f"its values leave torch by {call.operator.name} ({call.site})",
                )
        return result

    def _follow(
        self, name: str, args: list[Any], kwargs: dict[str, Any], outputs: list[Tensor]
    ) -> None:
        base = name.rstrip("d").rstrip("123")
        given = dict(zip(facts(name).arguments, args, strict=False)) | kwargs
        x: Any = args[0] if args and isinstance(args[0], Tensor) else given.get("input")
        if name == "linear":
            self.contract(
                x, given["weight"], -1, 1, 0, given.get("bias"), outputs[0], -1
            )
        elif base == "conv" or base == "conv_transpose":
            self.conv(base, int(name[-2]), args, kwargs, outputs[0])
        elif name in operators_that("multiply two matrices"):
            if not self.matmul(name, args, outputs[0]):
                self._unknown(name, args, kwargs)
        elif name == "scaled_dot_product_attention":
            self.attention(given, outputs[0])
        elif name in ("embedding", "embedding_bag"):
            made = along(self.labels, given["weight"], 1, "producer")
            if made is not None:
                self.labels.put(outputs[0], made.view(-1))
        elif name == "batch_norm":
            self.same(x, outputs[0], "other", name)
            mean = given.get("running_mean")
            if (
                not varying_axes(self.labels.get(x))
                and mean is not None
                and mean.numel() > 1
            ):  # of the model's input, say
                own = along(self.labels, mean, 0, "batch_norm")
                if own is not None:
                    self.labels.put(outputs[0], own.view(-1, *[1] * (x.ndim - 2)))
            for part in ("weight", "bias", "running_mean", "running_var"):
                self.bind(
                    given.get(part),
                    1,
                    x.ndim,
                    "batch_norm",
                    self.labels.get(outputs[0]),
                )
        elif facts(name).kind == "normalization" and "weight" in facts(name).arguments:
            self._normalise(name, x, given, outputs[0])
        elif name in operators_that("pair elements") and len(args) > 1:
            self.pair(name.removeprefix("r"), args[0], args[1], outputs[0])
            if kwargs.get("alpha", 1) != 1 and not isinstance(
                kwargs["alpha"], (int, float)
            ):
                self._unknown(name, args, kwargs)
        elif name == "glu":
            self.glu(x, given.get("dim", -1), outputs[0])
        elif name in ("softmax", "log_softmax"):
            dim = given.get("dim", -1) % max(x.ndim, 1)
            if dim in varying_axes(self.labels.get(x)):
                self.labels.pin(
                    self.labels.get(x), f"{name} ({self.site}) runs over its channels"
                )
            self.same(x, outputs[0], "other", name)
        elif any(base.startswith(pool) for pool in _POOLS) and isinstance(x, Tensor):
            self._pool(x, outputs[0], name)
        elif name in operators_that("reduce axes") and isinstance(x, Tensor):
            self._reduce(name, x, args, kwargs, outputs)
        elif (
            (
                name
                in operators_that("scale with their operand")
                | operators_that("work element by element")
            )
            and isinstance(x, Tensor)
            and outputs[0].shape == x.shape
        ):
            self.elementwise(name, x, given, args, outputs[0])
        else:
            self._unknown(name, args, kwargs)

    # -- over some axes

    def _pool(self, x: Tensor, out: Tensor, name: str) -> None:
        own = self.labels.get(x)
        spatial = {i for i in range(x.ndim) if x.shape[i] != out.shape[i]} | set(
            range(2, x.ndim)
        )
        if spatial & set(varying_axes(own)):
            self.labels.pin(own, f"{name} ({self.site}) mixes its channels")
            return
        self.labels.note(own, Passed(self.site, name, "homogeneous"))
        self.labels.put(out, varying_part(own))

    def _reduce(
        self,
        name: str,
        x: Tensor,
        args: list[Any],
        kwargs: dict[str, Any],
        outputs: list[Tensor],
    ) -> None:
        own = self.labels.get(x)
        place = 2 if name == "norm" else 1
        dim: Any = kwargs.get(
            "dim", kwargs.get("axis", args[place] if len(args) > place else None)
        )
        if isinstance(dim, (Tensor, float)):
            dim = None
        axes = range(x.ndim) if dim is None else [dim] if isinstance(dim, int) else dim
        over = sorted({axis % x.ndim for axis in axes}) if x.ndim else []
        varied = set(varying_axes(own))
        if (
            varied
            and varied <= set(over)
            or varied & set(over)
            and name not in ("sum", "mean")
        ):
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
        self.labels.note(
            own,
            Passed(
                self.site,
                name,
                "homogeneous"
                if name in operators_that("scale with their operand")
                else "other",
            ),
        )

    def _normalise(
        self, name: str, x: Tensor, given: dict[str, Any], out: Tensor
    ) -> None:
        labels, own = self.labels, self.labels.get(x)
        axis = x.ndim - 1 if name in ("layer_norm", "rms_norm") else 1
        varied = varying_axes(own)
        over = (
            name == "group_norm"
            or name != "instance_norm"
            and any(a >= x.ndim - len(given["normalized_shape"]) for a in varied)
        )
        if varied and varied != [axis]:
            if over or name == "instance_norm":
                labels.pin(own, f"{name} ({self.site}) mixes its channels")
            self.same(x, out, "other", name)
            return
        if over:
            labels.pin(own, f"{name} ({self.site}) runs over its channels", "remove")
        labels.note(own, Passed(self.site, name, "other"))
        weight = given.get("weight")
        made = (
            None
            if weight is None
            else along(labels, weight, 0, "producer")
            if weight.ndim == 1
            else None
        )
        if made is None or out.shape[axis] == 1:
            labels.put(out, own)
            return
        shape = [1] * x.ndim
        shape[axis] = -1
        made = made.view(shape)
        fixed(
            labels,
            made.expand(out.shape),
            own,
            f"{name} ({self.site}) reads a tensor of fixed size",
        )
        labels.tie(own, made, value=False)
        self.bind(given.get("bias"), axis, x.ndim, "bias", made)
        labels.put(out, made)

    def _unknown(self, name: str, args: Any, kwargs: Any) -> None:
        for tensor in float_tensors((args, kwargs)):
            self.labels.pin(
                self.labels.get(tensor),
                f"what {name} ({self.site}) does to channels is not known",
            )


class SeesMoves(Handler, Protocol):
    """What ``MovesMode`` asks beside ``Handler``."""

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


class MovesMode(CallMode):
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
            site = f"{self.path[-1] if self.path else ''}/{operator.name}"
            self.seer.moved(func, operator.name, site, result, args, kwargs)
