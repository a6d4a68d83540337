"""Learner: a fake quantizer that is trained with the model, and what all of them share.

A learner computes in fp32 (fp64 for fp64 tensors) whatever autocast region it is in,
and hands back the dtype it was given. Its forward pass is ``formats.fake_quantize``
with ``qparams()``, so that freezing changes no bit; the backward pass is the gradient
that the learner's paper defines, since the derivative of rounding itself is 0 almost
everywhere.

A learned parameter that an optimizer step has made invalid (a scale that is not finite,
or below fp32's smallest normal number) is put back to the value of the last forward
pass, there alone where it is invalid. This is counted in ``reverted`` and warned about
once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import ExitStack
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from roundoff.errors import QuantizationError, warn
from roundoff.formats import (
    BlockFormat,
    Format,
    Granularity,
    PerAxis,
    PerTensor,
    QParams,
    check_floating,
    choose_qparams,
    parse_format,
    working_dtype,
)

__all__ = ["Learner", "Role", "range_qparams"]

Role = Literal["weight", "activation"]
TINY = torch.finfo(torch.float32).tiny


class Learner(nn.Module, ABC):
    """A trainable fake quantizer.

    Args:
        fmt: the format of the codes, or its name; no block format.
        granularity: which elements share a scale; by default all. For activations all,
            or ``PerAxis`` of an axis other than the first, whose length is the same in
            every batch.
        qparams: what to start from; by default the first tensor that comes through
            decides, as the learner's paper has it.
        role: what it stands before.

    Attributes:
        name: the value or weight that passes through, for messages.
        ready: whether it has its parameters; before that, an optimizer cannot know them.
        sites, operand: who reads it and how, in a ``QuantizedModel`` (see ``Quantizer``).
        is_frozen: whether they stay as they are (``freeze``).
        reverted: how many values of a parameter were put back because they were invalid.

    Raises:
        QuantizationError: the learner cannot do this format, granularity or role, or
            the qparams have an invalid scale.
    """

    #: name in ``LEARNERS``
    kind: ClassVar[str] = ""
    #: names of the learned parameters, each of the scale's shape
    learned: tuple[str, ...] = ()
    #: names of the buffers that ``qparams`` needs
    kept: tuple[str, ...] = ()
    #: weight decay of the model applies to the learned parameters too
    #: (``parameter_groups``)
    decays: ClassVar[bool] = False

    def __init__(
        self,
        fmt: Format | str,
        granularity: Granularity | None = None,
        qparams: QParams | None = None,
        *,
        role: Role = "weight",
    ) -> None:
        super().__init__()
        self.fmt = parse_format(fmt)
        self.role = role
        self.name = ""
        self.granularity: Granularity = (
            granularity or (qparams and qparams.granularity) or PerTensor()
        )
        self.sites: tuple[str, ...] = ()
        self.operand: Any = None
        self.ready = False
        self.is_frozen = False
        self.reverted = 0
        self._warned = False
        self._check()
        self.check()
        for name in self.learned:
            self.register_parameter(name, None)
            self.register_buffer(f"{name}_before", None, persistent=False)
        for name in self.kept:
            self.register_buffer(name, None)
        if qparams is not None:
            self.start(qparams)

    # -- what a learner defines

    def check(self) -> None:
        """Refuse a format, granularity or role that this learner cannot do; settle
        ``learned`` and ``kept``.
        """

    def first(self, x: Tensor) -> QParams:
        """What to start from where nothing is given, from the first tensor; by default
        its min-max.
        """
        return choose_qparams(x, self.fmt, self.granularity)

    @abstractmethod
    def begin(self, scale: Tensor, zero_point: Tensor | None) -> dict[str, Tensor]:
        """The parameters and buffers that stand for a scale and zero point."""

    def valid(self) -> Tensor:
        """Say where the learned parameters may be used, in the scale's shape.

        By default where all are finite; one True without learned parameters.
        """
        valid = torch.tensor(True)
        for name in self.learned:
            parameter = getattr(self, name)
            valid = valid.to(parameter.device) & parameter.isfinite()
        return valid

    @abstractmethod
    def qparams(self) -> QParams:
        """What ``convert`` freezes: the scale and zero point as they are now."""

    @abstractmethod
    def estimate(self, x: Tensor) -> Tensor:
        """The forward pass of fp32 or fp64 ``x``, with its gradient."""

    # -- what all share

    @property
    def weight(self) -> bool:
        """Whether it stands before a weight."""
        return self.role == "weight"

    @property
    def dynamic(self) -> bool:
        """Never: the scale outlives a forward pass (as ``Quantizer.dynamic``)."""
        return False

    @property
    def grid(self) -> Format:
        """The format of the frozen codes."""
        return self.fmt

    def forward(self, x: Tensor) -> Tensor:
        """``x`` on the grid, in its shape and dtype.

        NaN stays NaN; what is out of range saturates; empty stays empty.

        Raises:
            QuantizationError: the first tensor, which has to give the scale, has no
                element or no finite one.
            FormatError: not a floating-point tensor, or another shape than the scale's.
        """
        check_floating(x)
        with ExitStack() as stack:
            stack.enter_context(
                torch._C.DisableTorchFunction()
            )  # no operator of the model
            if torch.is_autocast_enabled(x.device.type):
                stack.enter_context(torch.autocast(x.device.type, enabled=False))
            exact = x.to(working_dtype(x))
            if not self.ready:
                self.start_from(exact.detach())
            self.keep_valid()
            return self.estimate(exact).to(x.dtype)

    def frozen(self, weight: Tensor) -> tuple[Tensor, QParams]:
        """A weight as it stands after training: on the grid, with the qparams that give
        its codes of format ``grid``.

        The values are those of the forward pass, bit for bit.
        """
        with torch.no_grad():
            return self(weight.detach()).clone(), self.qparams()

    def freeze(self, frozen: bool = True) -> None:
        """Keep the learned parameters, or the observed scale, as they are; or let them go on."""
        self.is_frozen = frozen
        for name in self.learned:
            parameter = getattr(self, name)
            if parameter is not None:
                parameter.requires_grad_(not frozen)

    def start(self, qparams: QParams) -> None:
        """Take a scale and zero point to start from.

        Raises:
            QuantizationError: a scale that is not finite or below fp32's smallest
                normal number, or a range that the learner cannot have.
        """
        scale = qparams.scale.detach()
        if not bool((scale.isfinite() & (scale >= TINY)).all()):
            raise self.fault(
                "training cannot start from this scale",
                expected=f"finite scales of at least {TINY:.3g}",
                got=f"{int((~(scale.isfinite() & (scale >= TINY))).sum())} of {scale.numel()} others",
                do="leave the quantizer out, or calibrate on data that reaches it",
            )
        zero_point = (
            None
            if qparams.zero_point is None
            else qparams.zero_point.detach().to(scale)
        )
        if zero_point is None and not self.fmt.symmetric:
            zero_point = torch.zeros_like(scale)
        for name, value in self.begin(scale, zero_point).items():
            if name in self.learned:
                setattr(
                    self,
                    name,
                    nn.Parameter(value.clone(), requires_grad=not self.is_frozen),
                )
                setattr(self, f"{name}_before", value.clone())
            else:
                setattr(self, name, value.clone())
        self.ready = True

    def keep_valid(self) -> None:
        """Put invalid values of the learned parameters back to those of the last
        forward pass, and remember the rest.
        """
        if not self.learned:
            return
        with torch.no_grad():
            valid = self.valid()
            now = [
                (getattr(self, n), getattr(self, f"{n}_before")) for n in self.learned
            ]
            if not bool(valid.all()):
                for value, before in now:
                    value.copy_(torch.where(valid, value, before))
                count = int((~valid).sum())
                self.reverted += count
                if not self._warned:
                    self._warned = True
                    warn(
                        f"{self.where}: {' and '.join(self.learned)} became invalid (not finite, or a scale <= 0) in "
                        f"{count} of {valid.numel()} places; they are put back to the last valid value. This is counted in "
                        "`reverted` and not said again; a smaller learning rate of the scales prevents it."
                    )
            for value, before in now:
                before.copy_(value)

    @property
    def where(self) -> str:
        """Name for messages."""
        return f"{self.name or self.role} ({self.kind}, {self.fmt.name})"

    def fault(self, what: str, **parts: str) -> QuantizationError:
        """An error that says where."""
        return QuantizationError(what, where=self.where, **parts)

    def not_ready(self) -> QuantizationError:
        """The error for qparams before any tensor came."""
        return self.fault(
            "this learner has no scale yet",
            expected="qparams, or one tensor through it",
            got="neither",
            do="run one batch through the model first",
        )

    def split(self, x: Tensor) -> tuple[Tensor, tuple[int, ...]]:
        """The granularity's view of ``x`` and the axes whose elements share a scale."""
        shape, dims = self.granularity.split(x.shape)
        return x.reshape(shape), dims

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"{self.name or '–'}, {self.kind}, {self.fmt.name}, {self.granularity}, {self.role}"

    def _check(self) -> None:
        if isinstance(self.fmt, BlockFormat):
            raise self.fault(
                "a block format chooses its scales itself",
                got=self.fmt.name,
                expected="a format without blocks",
                do="leave its quantizer as it is: its gradient is straight-through already",
            )
        if self.role not in ("weight", "activation"):
            raise self.fault(
                "unknown role", expected="weight or activation", got=str(self.role)
            )
        fixed = isinstance(self.granularity, PerTensor) or (
            isinstance(self.granularity, PerAxis) and self.granularity.axis
        )
        if self.role == "activation" and not fixed:
            raise self.fault(
                "the scales of an activation would depend on the batch",
                got=str(self.granularity),
                expected="PerTensor(), or PerAxis of an axis other than the first",
                do="use one scale per tensor, or a dynamic quantizer",
            )

    def start_from(self, x: Tensor) -> None:
        """Take what the learner's paper starts from, given the first tensor.

        Raises ``QuantizationError`` where it has no finite value.
        """
        if not bool(x.isfinite().any()):
            raise self.fault(
                "the first tensor gives no scale",
                expected="finite values",
                got=f"shape {tuple(x.shape)}, none finite",
            )
        self.start(self.first(x))

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, *rest: Any
    ) -> None:
        """A learner that saw no tensor yet takes the shapes of what is loaded."""
        if not self.ready and all(
            prefix + n in state for n in (*self.learned, *self.kept)
        ):
            for name in (*self.learned, *self.kept):
                value = state[prefix + name].detach().clone()
                setattr(
                    self, name, nn.Parameter(value) if name in self.learned else value
                )
            self.ready = True
            self.freeze(self.is_frozen)
        super()._load_from_state_dict(state, prefix, *rest)
        for name in self.learned:
            if self.ready:
                setattr(self, f"{name}_before", getattr(self, name).detach().clone())


def range_qparams(low: Tensor, high: Tensor, fmt: Format) -> QParams:
    """The qparams of ranges ``[low, high]``, of the shape of both, by the rule of
    ``choose_qparams``.
    """
    chosen = choose_qparams(
        torch.stack([low.flatten(), high.flatten()], 1), fmt, PerAxis(0)
    )
    zero_point = (
        None if chosen.zero_point is None else chosen.zero_point.reshape(low.shape)
    )
    return QParams(chosen.scale.reshape(low.shape), zero_point)
