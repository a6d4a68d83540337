"""Round a tensor to a number format: the one verb of this room."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from roundoff.errors import FormatError
from roundoff.formats.affine import QParams, choose_qparams, fake_quantize
from roundoff.formats.amax import round_by_amax
from roundoff.formats.block import round_blocks
from roundoff.formats.granularity import Granularity, PerGroup
from roundoff.formats.named import parse_format
from roundoff.formats.rounding import cast, check_floating
from roundoff.formats.types import BlockFormat, Format, RoundingMode, ScaleRule

__all__ = ["round_tensor"]


def round_tensor(
    x: Tensor,
    fmt: Format | str,
    *,
    granularity: Granularity | None = None,
    rounding: RoundingMode | None = None,
    scale: Tensor | float | None = None,
    zero_point: Tensor | float | None = None,
    generator: torch.Generator | None = None,
    saturate: bool | None = None,
    axis: int = -1,
    scale_rule: ScaleRule | None = None,
) -> Tensor:
    """Round ``x`` to the values of ``fmt``: a tensor of x's shape, dtype and device,
    without gradient.

    * Without granularity and scale: a plain cast to the format's own values. Out of
      range as in ``Format.saturates``: the largest finite value if ``saturate``, else
      Inf, else NaN. Integer formats, ternary and binary need a scale.
    * With a granularity: scales (and zero points) are chosen from ``x``
      (``choose_qparams``), and values are divided by them, rounded, and multiplied back
      (``fake_quantize``).
    * With a scale: the same with that scale and zero point, which broadcast against the
      granularity's view of ``x``.
    * A block format chooses its scales itself, with blocks along ``axis`` (or that of
      ``PerGroup``).

    NaN stays NaN in every format. With scales, Inf and all that is out of range
    saturate; scales are chosen from the finite values, and are 1 where all are zero.
    Without a scale, -0 becomes +0 in formats that have no -0. An empty tensor stays
    empty. bf16 and fp16 tensors are computed in fp32 and the result cast back, so
    values that their own type cannot hold (fp16's 65504 in bf16) are rounded once more.
    Where nothing changes, ``x`` itself may come back.

    Args:
        x: floating point, any shape.
        fmt: a format, or its name.
        granularity: which elements share a scale.
        rounding: by default the format's own.
        scale: positive; a tensor or a number.
        zero_point: the code of 0, for integer formats; needs a scale.
        generator: the source of random bits for stochastic rounding (draws of 24 bits;
                fp64: 53; fp32 to bf16: the 16 that are cut off, which is exact).
        saturate: without a scale, by default the format's own; with one, True.
        axis: the axis of a block format's blocks; its length must be a multiple of the
            block size.
        scale_rule: how MX scales are chosen, by default as the format says (floor, as
            in the specification).

    Raises:
        FormatError: ``x`` is not floating point; the granularity does not fit the
            shape; an integer format without a scale; a scale that does not fit;
            ``saturate=False`` for a format without Inf and NaN; a scale for a block
            format.

    Example:
        >>> x = torch.tensor([[0.1, -3.3], [500.0, 0.0]])
        >>> round_tensor(x, "bf16").tolist()
        [[0.10009765625, -3.296875], [500.0, 0.0]]
        >>> round_tensor(x, "fp8_e4m3fn", saturate=False).tolist()
        [[0.1015625, -3.25], [nan, 0.0]]
        >>> round_tensor(x, "int8", scale=0.5).tolist()
        [[0.0, -3.5], [63.5, 0.0]]
    """
    fmt = parse_format(fmt) if isinstance(fmt, str) else fmt
    check_floating(x)
    rounding = rounding or fmt.rounding
    if isinstance(fmt, BlockFormat):
        if scale is not None or zero_point is not None or saturate is False:
            raise FormatError(
                f"{fmt.name} chooses its own scales, and its elements saturate",
                expected="no scale, no zero point, no saturate=False",
                do="use the element format to give a scale",
            )
        if scale_rule is not None:
            fmt = replace(fmt, scale_rule=scale_rule)
        axis = _block_axis(fmt, granularity, axis)
        return round_blocks(x, fmt, axis, rounding, generator)
    has_default_scales = scale is None and zero_point is None and saturate is None
    if granularity is not None and has_default_scales and rounding is fmt.rounding:
        rounded = round_by_amax(x, fmt, granularity)
        if rounded is not None:
            return rounded
    qparams = _qparams(x, fmt, granularity, scale, zero_point)
    if qparams is None:
        return cast(x, fmt, rounding, fmt.saturates(saturate), generator)
    return fake_quantize(
        x, qparams, fmt, rounding=rounding, saturate=saturate, generator=generator
    )


def _block_axis(fmt: BlockFormat, granularity: Granularity | None, axis: int) -> int:
    if granularity is None:
        return axis
    if isinstance(granularity, PerGroup) and granularity.group_size == fmt.block_size:
        return granularity.axis
    raise FormatError(
        f"{fmt.name} has blocks of {fmt.block_size} elements along one axis",
        expected=f"PerGroup({fmt.block_size}, axis)",
        got=str(granularity),
        do="or give the axis alone: round_tensor(x, fmt, axis=axis)",
    )


def _qparams(
    x: Tensor,
    fmt: Format,
    granularity: Granularity | None,
    scale: Tensor | float | None,
    zero_point: Tensor | float | None,
) -> QParams | None:
    """Return the scale and zero point that are asked for; None for a plain cast."""
    if scale is not None:
        scale = torch.as_tensor(scale, device=x.device)
        if zero_point is not None:
            zero_point = torch.as_tensor(zero_point, device=x.device)
        return QParams(scale, zero_point, granularity)
    if zero_point is not None:
        raise FormatError(
            "a zero point needs a scale",
            expected="scale and zero_point",
            got="zero_point alone",
        )
    if granularity is not None:
        return choose_qparams(x, fmt, granularity)
    scaled = fmt.execution is not None and fmt.execution.weight == "channel"
    if scaled and fmt.one_quantum == 1.0:
        raise FormatError(
            f"{fmt.name} needs a scale",
            expected="granularity= or scale=",
            got="neither",
            do="round_tensor(x, fmt, granularity=PerTensor()), or scale=1.0 to round to whole numbers",
        )
    return None
