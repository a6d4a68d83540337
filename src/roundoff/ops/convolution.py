"""Two-dimensional convolutions in fp64 on the CPU as one matrix product for the whole batch.

torch's own fp64 kernel multiplies sample by sample, which reads all weights again for each: with few output positions that
takes several times as long. The results are the same sums, added in another order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional

#: Positions of a sample's output up to which one product for all samples is faster.
_FEW = 32


def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    **rest: Any,
) -> list[Tensor | None] | None:
    """``aten::convolution``; None where torch's own kernel is to run."""
    if not _fits(input, weight, **rest):
        return None
    height, width = (
        (size + 2 * pad - kernel) // step + 1
        for size, pad, kernel, step in zip(
            input.shape[2:], padding, weight.shape[2:], stride, strict=True
        )
    )
    if height * width > _FEW:
        return None
    rows = weight.reshape(weight.shape[0], -1) @ _columns(
        input, weight, stride, padding
    )
    if bias is not None:
        rows += bias[:, None]
    return [
        rows.view(weight.shape[0], input.shape[0], height, width)
        .transpose(0, 1)
        .contiguous()
    ]


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    output_mask: Sequence[bool],
    **rest: Any,
) -> list[Tensor | None] | None:
    """``aten::convolution_backward``; None where torch's own kernel is to run."""
    if not _fits(input, weight, **rest) or grad_output[0, 0].numel() > _FEW:
        return None
    out = weight.shape[0]
    rows = grad_output.transpose(0, 1).reshape(out, -1)
    found: list[Tensor | None] = []
    if output_mask[0]:
        columns = weight.reshape(out, -1).mT @ rows
        columns = columns.view(columns.shape[0], input.shape[0], -1).transpose(0, 1)
        found.append(
            functional.fold(
                columns,
                input.shape[2:],
                weight.shape[2:],
                padding=tuple(padding),
                stride=tuple(stride),
            )
        )
    if output_mask[1]:
        found.append(
            (rows @ _columns(input, weight, stride, padding).mT).view(weight.shape)
        )
    if output_mask[2]:
        found.append(rows.sum(1))
    return found


def _fits(
    input: Tensor,
    weight: Tensor,
    *,
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
    **_: Any,
) -> bool:
    plain = not transposed and groups == 1 and all(d == 1 for d in dilation)
    return (
        plain
        and input.dim() == weight.dim() == 4
        and input.device.type == "cpu"
        and input.numel() > 0
    )


def _columns(
    input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """What each output position sees, one column for each, those of a sample beside each other."""
    top, left = padding
    windows = functional.pad(input, (left, left, top, top)).unfold(
        2, weight.shape[2], stride[0]
    )
    windows = windows.unfold(3, weight.shape[3], stride[1])
    return windows.permute(1, 4, 5, 0, 2, 3).reshape(weight[0].numel(), -1)
