"""Quantizer: what one value or weight passes through in a quantized model."""

from __future__ import annotations

from torch import Tensor, nn

from roundoff.capture.calls import Operand
from roundoff.capture.execute import round_operand
from roundoff.errors import QuantizationError
from roundoff.formats import (
    BlockFormat,
    Format,
    Granularity,
    QParams,
    choose_qparams,
    fake_quantize,
    quantize,
)
from roundoff.train.casts.simulate import straight


class Quantizer(nn.Module):
    """Fake quantization of one value: quantize to ``fmt`` and dequantize, with the gradient straight through.

    With a ``scale`` it is static. Without one it is dynamic: the scale is chosen from each tensor as the format's execution
    rule has it (``capture.execute.round_operand``), which block formats always do.

    Attributes:
        name: a parameter ("fc.weight"), the site whose output it is ("body.0/add"), or an operand ("stem.0/conv2d:0").
        fmt: the format of the codes.
        operand: role and axes of the operand it stands before.
        granularity: which elements share a scale; ``None``: as the format's execution rule has it, chosen from each tensor.
        each: scales with that granularity are chosen from each tensor (``PerToken``: along the contracted axis).
        in_place: of a weight: all that reads the parameter reads it through this quantizer, so rounding may change it.
        scale, zero_point: buffers, of the granularity's shape (see ``formats.granularity``); ``None`` where there is none.
        sites: who reads the value through it.
    """

    scale: Tensor | None
    zero_point: Tensor | None

    def __init__(
        self, name: str, fmt: Format, operand: Operand, granularity: Granularity | None, sites: tuple[str, ...] = (), *,
        each: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.name, self.fmt, self.operand, self.granularity, self.sites = name, fmt, operand, granularity, sites
        self.each = each
        self.in_place = True
        self.observer = ""
        self.register_buffer("scale", None)
        self.register_buffer("zero_point", None)

    @property
    def weight(self) -> bool:
        """Whether it stands before a weight."""
        return self.operand.role == "weight"

    @property
    def dynamic(self) -> bool:
        """Whether the scale is chosen from each tensor."""
        return self.each or self.granularity is None or isinstance(self.fmt, BlockFormat)

    def qparams(self) -> QParams:
        """Scale and zero point. Raises ``QuantizationError`` where there are none, since nothing was observed."""
        if self.scale is None:
            raise QuantizationError("this value has no scale", where=self.name, expected="a calibrated quantizer",
                                    got="one that is dynamic" if self.dynamic else "one that saw no data",
                                    do="calibrate the model on batches that reach it")  # fmt: skip
        return QParams(self.scale, self.zero_point, self.granularity)

    def set_(self, qparams: QParams, observer: str = "") -> None:
        """Take a scale and zero point; says who chose them."""
        self.scale, self.zero_point = qparams.scale.detach().clone(), None
        if qparams.zero_point is not None:
            self.zero_point = qparams.zero_point.detach().clone()
        self.granularity, self.observer = qparams.granularity or self.granularity, observer

    def forward(self, x: Tensor) -> Tensor:
        """``x`` on the grid, in its shape and dtype; NaN stays NaN, what is out of range saturates."""
        if self.each and x.ndim and x.numel():
            turned = x.detach().movedim(self.operand.reduce, -1)
            found = fake_quantize(turned, choose_qparams(turned, self.fmt, self.granularity), self.fmt)
            return straight(x, found.movedim(-1, self.operand.reduce))
        if self.dynamic:
            return straight(x, round_operand(x, self.operand, self.fmt))
        return straight(x, fake_quantize(x, self.qparams(), self.fmt))

    def codes(self, x: Tensor) -> Tensor:
        """The codes of ``x`` as integers (int32), in its shape: of an integer format with a scale."""
        return quantize(x, self.qparams(), self.fmt)

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"{self.name}, {self.fmt.name}, {'dynamic' if self.dynamic else self.granularity}"
