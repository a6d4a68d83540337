"""Weights of contracting operators as matrices, and their inputs as rows.

==================  =====================================
============================================= operator            shape of the weight
matrices ==================  =====================================
============================================= linear              (out, in)
(1, out, in) matmul (``other``)  (in, out)                              (1, out, in)
conv1d/2d/3d        (out, in/groups, *kernel)              (groups, out/groups,
in/groups · taps) conv_transpose…     (in, out/groups, *kernel)              (groups,
out/groups, in/groups · taps) ==================  =====================================
=============================================

A depthwise convolution has as many groups as channels, so one tensor ``[C, 1, taps]``.
A transposed convolution is the convolution of its input with zeros put between the
samples, with flipped taps (Dumoulin and Visin, arXiv:1603.07285, section 4);
``patches`` flips the inputs, so the matrix is not flipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from operator import mul

import torch
from torch import Tensor
from torch.nn.functional import pad

from roundoff.errors import QuantizationError
from roundoff.formats import Granularity, QParams


def matrix_view(weight: Tensor, operator: str, groups: int = 1) -> Tensor:
    """The weight as matrices ``[groups, out, in]``: a view where possible, else a copy.

    ``operator`` is a name of the table of operators (``roundoff.ops``).

    Raises:
        QuantizationError: an operator without such a view, or a shape that does not fit
            it or ``groups``.

    Example:
        >>> matrix_view(torch.zeros(8, 3, 5, 5), "conv2d").shape
        torch.Size([1, 8, 75])
        >>> matrix_view(torch.zeros(16, 1, 3, 3), "conv2d", groups=16).shape
        torch.Size([16, 1, 9])
        >>> matrix_view(torch.zeros(6, 4, 3), "conv_transpose1d", groups=2).shape
        torch.Size([2, 4, 9])
    """
    _check(weight.shape, operator, groups)
    if operator == "linear":
        return weight[None]
    if operator == "matmul":
        return weight.mT[None]
    if operator.startswith("conv_transpose"):
        split = weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)
        return split.transpose(1, 2).reshape(groups, weight.shape[1], -1)
    return weight.reshape(groups, weight.shape[0] // groups, -1)


def from_matrix(
    matrices: Tensor, shape: Sequence[int], operator: str, groups: int = 1
) -> Tensor:
    """The inverse of ``matrix_view``: a weight of ``shape``.

    >>> weight = torch.randn(6, 4, 3)
    >>> matrices = matrix_view(weight, "conv_transpose1d", 2)
    >>> back = from_matrix(matrices, weight.shape, "conv_transpose1d", 2)
    >>> torch.equal(back, weight)
    True
    """
    _check(shape, operator, groups)
    if operator == "matmul":
        return matrices[0].mT.contiguous()
    if operator.startswith("conv_transpose"):
        split = matrices.reshape(groups, shape[1], shape[0] // groups, -1)
        return split.transpose(1, 2).reshape(tuple(shape))
    return matrices.reshape(tuple(shape))


def matrix_qparams(
    qparams: QParams, shape: Sequence[int], operator: str, groups: int = 1
) -> QParams:
    """The qparams of a weight of ``shape`` as those of its matrices.

    One scale and zero point for each element: that works for every granularity, also
    for groups along an axis that the matrix has no axis for.

    >>> from roundoff.formats import PerAxis, choose_qparams, parse_format
    >>> weight = torch.randn(4, 1, 3, 3)
    >>> qparams = choose_qparams(weight, parse_format("int8"), PerAxis(0))
    >>> matrix_qparams(qparams, weight.shape, "conv2d", groups=4).scale.shape
    torch.Size([4, 1, 9])
    """
    scale, zero_point = elementwise(qparams, shape)
    return QParams(
        matrix_view(scale, operator, groups),
        None if zero_point is None else matrix_view(zero_point, operator, groups),
    )


def weight_qparams(
    qparams: QParams,
    shape: Sequence[int],
    operator: str,
    groups: int,
    granularity: Granularity,
) -> QParams:
    """The inverse of ``matrix_qparams``, for a weight of ``shape`` with ``granularity``.

    Raises QuantizationError where elements that shall share a scale have different
    ones.

    >>> from roundoff.formats import PerAxis
    >>> per_channel = QParams(torch.tensor([[[0.5], [0.25]]]))
    >>> weight_qparams(per_channel, (2, 3, 3, 3), "conv2d", 1, PerAxis(0)).scale.flatten()
    tensor([0.5000, 0.2500])
    """
    view, dims = granularity.split(shape)
    meta = torch.empty(tuple(shape), device="meta")
    matrices = matrix_view(meta, operator, groups).shape

    def shared(x: Tensor) -> Tensor:
        """The one value of each set of elements."""
        whole = from_matrix(x.expand(matrices), shape, operator, groups).reshape(view)
        low = whole.amin(dims, keepdim=True)
        high = whole.amax(dims, keepdim=True)
        if not torch.equal(low, high):
            raise QuantizationError(
                "elements that share a scale have different ones",
                where=operator,
                expected=f"one scale for each set of {granularity}",
                got=f"{int((low != high).sum())} of {low.numel()} with several",
                do="search scales with the granularity that they are stored in",
            )
        return high

    zero_point = qparams.zero_point
    return QParams(
        shared(qparams.scale),
        None if zero_point is None else shared(zero_point),
        granularity,
    )


def has_one_scale_per_row(scale: Tensor) -> bool:
    """Return True if each row of an elementwise scale has one value.

    An expanded scale says so by its strides, without a wait for its device.
    """
    if scale.shape[-1] <= 1 or scale.stride(-1) == 0:
        return True
    return bool((scale == scale[..., :1]).all())


def elementwise(qparams: QParams, shape: Sequence[int]) -> tuple[Tensor, Tensor | None]:
    """Scale and zero point of every element of a tensor of ``shape``.

    Raises QuantizationError for a scale that is not positive and finite, or that does
    not fit ``shape``.
    """
    view = tuple(shape)
    if qparams.granularity is not None:
        view = qparams.granularity.split(shape)[0]
    zero_point = qparams.zero_point
    try:
        scale = qparams.scale.expand(view).reshape(tuple(shape))
        if zero_point is not None:
            zero_point = zero_point.expand(view).reshape(tuple(shape))
    except RuntimeError:
        raise QuantizationError(
            "the scale does not fit the weight",
            expected=f"a shape that broadcasts to {view}",
            got=f"a scale of shape {tuple(qparams.scale.shape)}",
            do="search_scales gives scales of the right shape",
        ) from None
    usable = (qparams.scale > 0) & qparams.scale.isfinite()
    unusable = int((~usable).sum())
    if unusable:
        raise QuantizationError(
            "a scale is not positive and finite",
            expected="scale > 0",
            got=f"{unusable} of {qparams.scale.numel()} scales are zero, negative, NaN or Inf",
            do="choose_qparams and search_scales give 1 for a channel of zeros",
        )
    return scale, zero_point


def patches(
    x: Tensor,
    operator: str,
    kernel: Sequence[int] = (),
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    output_padding: int | Sequence[int] = 0,
    share: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The inputs of one batch as rows ``[groups, n, in]``: ``out = rows @ Wᵀ``.

    The rows of a convolution are its patches (im2col); n is batch · output positions,
    ordered so. ``share`` below 1 keeps that share of the output positions (at least
    one), drawn anew in each call and the same for the whole batch: neighbouring patches
    hold nearly the same values, so that second moments lose little by it.

    Args:
        x: (batch, channels, *space) or, unbatched, (channels, *space); for linear and
            matmul (..., in).
        operator: "linear", "matmul", "conv1d" … "conv_transpose3d".
        kernel: lengths of the kernel, as in the weight's shape.
        stride: of the call, as are the next four.
        padding: numbers, "same" or "valid".
        dilation: of the taps.
        groups: of the channels.
        output_padding: of transposed convolutions.
        share: in (0, 1].
        generator: of the positions, on any device; torch's own on x's device without.

    Example:
        >>> x, weight = torch.randn(2, 4, 6, 6), torch.randn(8, 2, 3, 3)
        >>> rows = patches(x, "conv2d", (3, 3), stride=2, padding=1, groups=2)
        >>> out = rows @ matrix_view(weight, "conv2d", 2).mT
        >>> out.shape  # [groups, batch * 3 * 3, out / groups]
        torch.Size([2, 18, 4])
        >>> out = out.reshape(2, 2, 9, 4).permute(1, 0, 3, 2).reshape(2, 8, 3, 3)
        >>> want = torch.nn.functional.conv2d(x, weight, stride=2, padding=1, groups=2)
        >>> torch.allclose(out, want, atol=1e-5)
        True
    """
    if not 0 < share <= 1:
        raise QuantizationError(
            "no such share of the positions",
            where="patches",
            expected="in (0, 1]",
            got=str(share),
        )
    if operator in ("linear", "matmul"):
        rows = x.reshape(1, -1, x.shape[-1])
        if share == 1:
            return rows
        return rows[:, _draw(rows.shape[1], share, generator, x.device)]
    _check((groups, 1, *kernel), operator, groups)
    dimensions = len(kernel)
    if x.dim() == dimensions + 1:
        x = x[None]
    if x.dim() != dimensions + 2 or x.shape[1] % groups:
        raise QuantizationError(
            "the input does not fit the operator",
            where=operator,
            expected=f"shape (batch, channels, {dimensions} lengths) with channels a multiple of {groups}",
            got=f"shape {tuple(x.shape)}",
        )
    strides = _per_axis(stride, dimensions)
    dilations = _per_axis(dilation, dimensions)
    if operator.startswith("conv_transpose"):
        windows = _transposed_windows(
            kernel, dilations, padding, _per_axis(output_padding, dimensions)
        )
        x = _with_zeros_between(x, strides)
    else:
        windows = _windows(kernel, strides, dilations, padding)
    x = pad(x, [width for pair in reversed(windows.pads) for width in pair])
    if share < 1:
        count = math.prod(windows.outputs(x.shape[2:]))
        drawn = _draw(count, share, generator, x.device)
        return _patches_at(x, windows, drawn, groups)
    return _all_patches(x, windows, groups)


@dataclass(frozen=True)
class _Windows:
    """Where a convolution's windows lie on each spatial axis of its padded input.

    Attributes:
        strides: from one window to the next.
        reach: from a window's first element to its last.
        pads: zeros before and behind the input.
        taps: offsets of the kernel's elements in a window, in the order of the weight.
    """

    strides: list[int]
    reach: list[int]
    pads: list[tuple[int, int]]
    taps: list[list[int]]

    def outputs(self, lengths: Sequence[int]) -> list[int]:
        """How many windows fit on each axis."""
        axes = zip(lengths, self.reach, self.strides, strict=True)
        return [(length - reach - 1) // stride + 1 for length, reach, stride in axes]


def _windows(
    kernel: Sequence[int],
    strides: list[int],
    dilations: list[int],
    padding: int | Sequence[int] | str,
) -> _Windows:
    axes = list(zip(kernel, dilations, strict=True))
    reach = [d * (k - 1) for k, d in axes]
    if padding == "same":
        pads = [(r // 2, r - r // 2) for r in reach]
    elif isinstance(padding, str):
        pads = [(0, 0) for _ in kernel]
    else:
        pads = [(p, p) for p in _per_axis(padding, len(kernel))]
    taps = [[d * t for t in range(k)] for k, d in axes]
    return _Windows(strides, reach, pads, taps)


def _transposed_windows(
    kernel: Sequence[int],
    dilations: list[int],
    padding: int | Sequence[int] | str,
    output_padding: list[int],
) -> _Windows:
    """Windows of a transposed convolution on its input with zeros put between."""
    reach = [d * (k - 1) for k, d in zip(kernel, dilations, strict=True)]
    cut = [0] * len(kernel)
    if not isinstance(padding, str):
        cut = _per_axis(padding, len(kernel))
    ends = zip(reach, cut, output_padding, strict=True)
    pads = [(r - c, r - c + extra) for r, c, extra in ends]
    axes = zip(reach, dilations, kernel, strict=True)
    taps = [[r - d * t for t in range(k)] for r, d, k in axes]
    return _Windows([1] * len(kernel), reach, pads, taps)


def _all_patches(x: Tensor, windows: _Windows, groups: int) -> Tensor:
    """The patches of all windows as strided slices, one for each tap."""
    lengths = windows.outputs(x.shape[2:])
    x = x.transpose(0, 1)  # channels first: rows lie together
    columns = []
    for tap in product(*windows.taps):
        axes = zip(tap, windows.strides, lengths, strict=True)
        slices = [slice(t, t + s * (n - 1) + 1, s) for t, s, n in axes]
        columns.append(x[(slice(None), slice(None), *slices)])
    stacked = torch.stack(columns, dim=1)  # [channels, taps, batch, ...]
    return stacked.reshape(groups, x.shape[0] // groups * len(columns), -1).mT


def _patches_at(x: Tensor, windows: _Windows, drawn: Tensor, groups: int) -> Tensor:
    """The patches of some windows, by the flat indices of their elements."""
    places = torch.unravel_index(drawn, windows.outputs(x.shape[2:]))
    dimensions = len(windows.strides)
    steps = [math.prod(x.shape[3 + axis :]) for axis in range(dimensions)]
    axes = zip(places, windows.strides, steps, strict=True)
    first = sum(place * stride * step for place, stride, step in axes)
    offsets = [sum(map(mul, tap, steps)) for tap in product(*windows.taps)]
    moves = torch.tensor(offsets, device=x.device)
    elements = x.flatten(2).index_select(2, (moves[:, None] + first).flatten())
    split = elements.reshape(*elements.shape[:2], len(moves), -1)
    stacked = split.permute(1, 2, 0, 3)  # [channels, taps, batch, positions]
    return stacked.reshape(groups, x.shape[1] // groups * len(moves), -1).mT


def _with_zeros_between(x: Tensor, strides: Sequence[int]) -> Tensor:
    """``x`` with ``stride - 1`` zeros between neighbours along each spatial axis."""
    if all(s == 1 for s in strides):
        return x
    lengths = [(n - 1) * s + 1 for n, s in zip(x.shape[2:], strides, strict=True)]
    wide = x.new_zeros((*x.shape[:2], *lengths))
    wide[(slice(None), slice(None), *(slice(None, None, s) for s in strides))] = x
    return wide


def _draw(
    count: int, share: float, generator: torch.Generator | None, device: torch.device
) -> Tensor:
    """A draw of ``share`` of ``count`` positions, in order.

    It is drawn where the generator is, so that a seed gives the same on every device.
    """
    kept = max(1, round(share * count))
    place = device if generator is None else generator.device
    drawn = torch.randperm(count, generator=generator, device=place)[:kept]
    return drawn.sort().values.to(device)


def _per_axis(value: int | Sequence[int], dimensions: int) -> list[int]:
    """One value for each spatial axis."""
    if isinstance(value, int):
        return [value] * dimensions
    return list(value) * (dimensions if len(value) == 1 else 1)


def _check(shape: Sequence[int], operator: str, groups: int) -> None:
    """Raise QuantizationError unless ``shape`` is that of a weight of the operator."""
    axes = _weight_axes(operator)
    if axes is None:
        raise QuantizationError(
            "this operator's weight is no matrix",
            where=operator,
            expected="linear, matmul, conv1d, conv2d, conv3d, conv_transpose1d, conv_transpose2d or conv_transpose3d",
            do="call it by the operator that it consists of (the weights of an LSTM are those of linear)",
        )
    plain = axes == 2
    if len(shape) != axes or groups < 1 or shape[0] % groups or (plain and groups != 1):
        wanted = f"{axes} axes, the first a multiple of {groups} groups"
        raise QuantizationError(
            "the weight does not fit the operator",
            where=operator,
            expected="2 axes and 1 group" if plain else wanted,
            got=f"shape {tuple(shape)}, {groups} groups",
        )


def _weight_axes(operator: str) -> int | None:
    """How many axes the operator's weight has; None for an operator without matrices."""
    if operator in ("linear", "matmul"):
        return 2
    convolution = re.fullmatch(r"conv(_transpose)?([123])d", operator)
    return 2 + int(convolution[2]) if convolution else None
