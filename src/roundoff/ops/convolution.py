"""Two-dimensional convolutions in fp64 on the CPU as one matrix product for the whole batch.

torch's own fp64 kernel multiplies sample by sample, which reads all weights again for
each: with few output positions that takes several times as long. The results are the
same sums, added in another order.
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
    **others: Any,
) -> list[Tensor | None] | None:
    """Compute ``aten::convolution``; None where torch's own kernel is to run."""
    if not _fits(input, weight, **others):
        return None
    height, width = (
        (size + 2 * pad - kernel) // step + 1
        for size, pad, kernel, step in zip(
            input.shape[2:], padding, weight.shape[2:], stride, strict=True
        )
    )
    if height * width > _FEW:
        return None
    out = weight.shape[0]
    rows = weight.reshape(out, -1) @ _columns(input, weight, stride, padding)
    if bias is not None:
        rows += bias[:, None]
    samples = rows.view(out, input.shape[0], height, width).transpose(0, 1)
    return [samples.contiguous()]


def convolution_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    output_mask: Sequence[bool],
    **others: Any,
) -> list[Tensor | None] | None:
    """Compute ``aten::convolution_backward``; None where torch's own kernel is to run."""
    if not _fits(input, weight, **others) or grad_output[0, 0].numel() > _FEW:
        return None
    rows = grad_output.transpose(0, 1).reshape(weight.shape[0], -1)
    gradients: list[Tensor | None] = []
    if output_mask[0]:
        gradients.append(_input_gradient(input, weight, rows, stride, padding))
    if output_mask[1]:
        columns = _columns(input, weight, stride, padding)
        gradients.append((rows @ columns.mT).view(weight.shape))
    if output_mask[2]:
        gradients.append(rows.sum(1))
    return gradients


def _input_gradient(
    input: Tensor,
    weight: Tensor,
    rows: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
) -> Tensor:
    columns = weight.reshape(weight.shape[0], -1).mT @ rows
    columns = columns.view(columns.shape[0], input.shape[0], -1).transpose(0, 1)
    return functional.fold(
        columns,
        input.shape[2:],
        weight.shape[2:],
        padding=tuple(padding),
        stride=tuple(stride),
    )


def _fits(
    input: Tensor,
    weight: Tensor,
    *,
    dilation: Sequence[int],
    transposed: bool,
    groups: int,
    **_: Any,
) -> bool:
    is_plain = not transposed and groups == 1 and all(d == 1 for d in dilation)
    is_two_dimensional = input.dim() == weight.dim() == 4
    is_here = input.device.type == "cpu" and input.numel() > 0
    return is_plain and is_two_dimensional and is_here


def _columns(
    input: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int]
) -> Tensor:
    """The inputs of each output position as a column; those of a sample stand side by side."""
    top, left = padding
    padded = functional.pad(input, (left, left, top, top))
    windows = padded.unfold(2, weight.shape[2], stride[0])
    windows = windows.unfold(3, weight.shape[3], stride[1])
    return windows.permute(1, 4, 5, 0, 2, 3).reshape(weight[0].numel(), -1)
