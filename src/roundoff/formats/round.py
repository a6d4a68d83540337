"""The one verb of this package: round a tensor to a number format."""

from __future__ import annotations

import torch
from torch import Tensor

from roundoff.errors import FormatError
from roundoff.formats.affine import QParams, choose_qparams, fake_quantize
from roundoff.formats.block import round_blocks
from roundoff.formats.types import BlockFormat, Format, Rounding
from roundoff.formats.granularity import Granularity, PerGroup
from roundoff.formats.named import parse_format
from roundoff.formats.tensor import cast, check_floating, check_saturate

__all__ = ["round_tensor"]


def round_tensor(
    x: Tensor,
    fmt: Format | str,
    *,
    granularity: Granularity | None = None,
    rounding: Rounding | None = None,
    scale: Tensor | float | None = None,
    zero_point: Tensor | float | None = None,
    generator: torch.Generator | None = None,
    saturate: bool | None = None,
    axis: int = -1,
) -> Tensor:
    fmt = parse_format(fmt) if isinstance(fmt, str) else fmt
    check_floating(x)
    rounding = rounding or fmt.rounding
    if isinstance(fmt, BlockFormat):
        if granularity is not None:
            if not isinstance(granularity, PerGroup) or granularity.group_size != fmt.block_size:
                raise FormatError(
                    f"{fmt.name} has blocks of {fmt.block_size} elements along one axis",
                    expected=f"PerGroup({fmt.block_size}, axis)",
                    got=str(granularity),
                    do="or give the axis alone: round_tensor(x, fmt, axis=axis)",
                )
            axis = granularity.axis
        if scale is not None or zero_point is not None or saturate is False:
            raise FormatError(
                f"{fmt.name} chooses its own scales, and its elements saturate",
                expected="no scale, no zero point, no saturate=False",
                do="use the element format to give a scale",
            )
        return round_blocks(x, fmt, axis, rounding, generator)
    if scale is not None:
        scale, zero_point = (
            v if v is None or isinstance(v, Tensor) else torch.as_tensor(v, dtype=torch.float64, device=x.device)
            for v in (scale, zero_point)
        )
        qparams = QParams(scale, zero_point, granularity)
    elif zero_point is not None:
        raise FormatError("a zero point needs a scale", expected="scale and zero_point", got="zero_point alone")
    elif granularity is not None:
        qparams = choose_qparams(x, fmt, granularity)
    elif fmt.execution is not None and fmt.execution.weight == "channel" and fmt.one_quantum == 1.0:
        raise FormatError(
            f"{fmt.name} needs a scale",
            expected="granularity= or scale=",
            got="neither",
            do="round_tensor(x, fmt, granularity=PerTensor()), or scale=1.0 to round to whole numbers",
        )
    else:
        return cast(x, fmt, rounding, check_saturate(fmt, saturate), generator)
    return fake_quantize(x, qparams, fmt, rounding=rounding, saturate=saturate, generator=generator)
