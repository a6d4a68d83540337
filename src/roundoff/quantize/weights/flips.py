"""Code flips: codes move up or down by one while that lowers the output error.

The objective is GPTQ's ``tr((Ŵ - W) H (Ŵ - W)ᵀ)``; a step of one code is exact
coordinate descent on the grid (Behdin et al., QuantEase, arXiv:2309.01885, section 3,
go through the coordinates in turn; here each row takes its best one, all rows at once).
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from roundoff.formats import Format, QParams, all_values, working_dtype
from roundoff.quantize.weights.matrix import elementwise
from roundoff.quantize.weights.output_error import (
    Gain,
    Repaired,
    check_finite,
    check_matrices,
    output_db,
    quadratic,
)

#: A flip must lower the loss by this share of what the step alone costs: else fp32 noise
#: could flip back and forth.
_LEAST = 1e-5


def flip(
    weight: Tensor,
    quantized: Tensor,
    hessian: Tensor,
    fmt: Format,
    qparams: QParams,
    *,
    sweeps: int = 200,
    kept: Tensor | None = None,
) -> Repaired:
    """Move codes of ``quantized`` by one until no such step lowers ``δ H δᵀ``.

    In a sweep each row takes its best step. With ``g = δ H`` a step d of element i
    changes the loss by ``2 d g_i + d² H_ii``. No row gets worse. An input that is
    always zero is left alone, as is a code at the end of its range.

    Args:
        weight: ``[..., out, in]``, the weight to approximate (for a cross term: the
            least-squares weights).
        quantized: the same shape, on the grid of ``qparams``: from gptq, or rounded to
            nearest.
        hessian: ``[..., in, in]``.
        fmt: integers, or a format of at most 16 bits.
        qparams: of the weight's shape; not changed.
        sweeps: at most so many flips of a row.
        kept: bool, of the weight's shape: codes that may move; by default all.

    Raises:
        QuantizationError: NaN or Inf, shapes that do not fit.

    Example:
        >>> from roundoff.formats import parse_format
        >>> hessian = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
        >>> weight, grid = torch.tensor([[0.45, 0.45]]), QParams(torch.tensor(1.0))
        >>> flip(weight, torch.zeros(1, 2), hessian, parse_format("int4"), grid).weight
        tensor([[1., 0.]])
    """
    check_matrices("flip", weight, hessian)
    check_finite("flip", quantized=quantized)
    dtype = working_dtype(weight)
    shape = weight.shape
    inputs = shape[-1]
    scale, zero_point = elementwise(qparams, shape)

    def rows(x: Tensor) -> Tensor:
        return x.reshape(-1, inputs)

    w = rows(weight.detach().to(dtype))
    start = rows(quantized.expand(shape).detach().to(dtype))
    matrices = hessian.detach().to(dtype).expand(*shape[:-2], inputs, inputs)
    matrices = matrices.reshape(-1, inputs, inputs)
    codes = Codes(
        start,
        rows(scale.to(dtype)),
        None if zero_point is None else rows(zero_point.to(dtype)),
        fmt,
        None if kept is None else rows(kept.expand(shape)),
    )
    flipped = _descend(w, codes, matrices, sweeps).reshape(shape)
    before = start.reshape(shape)
    exact = w.reshape(shape)
    h = matrices.reshape(*shape[:-2], inputs, inputs)
    better = quadratic(flipped - exact, h) < quadratic(before - exact, h)
    flipped = torch.where(better[..., None], flipped, before)
    gain = Gain("flips", output_db(before, exact, h), output_db(flipped, exact, h))
    return Repaired(flipped.to(weight.dtype), qparams, gain)


def _descend(w: Tensor, codes: Codes, h: Tensor, sweeps: int) -> Tensor:
    """Flip codes of all rows ``[rows, in]`` together.

    ``h`` is ``[groups, in, in]``, with as many rows in each group. Rows that are done
    are dropped when they are half of those that remain.
    """
    count, inputs = w.shape
    rows = torch.arange(count, device=w.device)
    groups = torch.arange(len(h), device=w.device)
    group = groups.repeat_interleave(count // len(h))
    result = codes.values()
    slope = ((result - w).reshape(len(h), -1, inputs) @ h).reshape(w.shape)
    power = h.diagonal(dim1=-2, dim2=-1)[group]
    columns = h.reshape(-1, inputs)
    for _ in range(sweeps):
        step = codes.step(slope)
        least = step.square().mul_(power)
        change, place = (2 * step * slope).add_(least).min(-1)
        active = change < -_LEAST * least.gather(-1, place[:, None]).squeeze(-1)
        count = int(active.sum())
        if not count:
            break
        if count <= 0.5 * len(rows):
            result[rows] = codes.values()
            codes = codes.of(active)
            rows, group, slope, power, place, step = (
                x[active] for x in (rows, group, slope, power, place, step)
            )
            active = active[active]
        moved = step.gather(-1, place[:, None]).squeeze(-1) * active
        slope.addcmul_(columns[group * inputs + place], moved[:, None])
        codes.move(place, moved)
    result[rows] = codes.values()
    return result


class Codes:
    """Rows of codes, as places along the format's values.

    The places of an integer format are its integers; of another one, the places in the
    ascending list of its finite values.
    """

    def __init__(
        self,
        values: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        fmt: Format,
        kept: Tensor | None = None,
    ) -> None:
        self.scale = scale
        self.zero_point = zero_point
        self.kept = kept
        self.table: Tensor | None = None
        significant = values / scale
        if fmt.one_quantum == 1.0 and fmt.has_zero:
            self.place = significant.round_()
            if zero_point is not None:
                self.place.add_(zero_point)
            self.low = fmt.min_finite
            self.high = fmt.max_finite
        else:
            finite = sorted({v for v in all_values(fmt) if math.isfinite(v)})
            self.table = torch.tensor(finite, dtype=values.dtype, device=values.device)
            middle = (self.table[1:] + self.table[:-1]) / 2
            self.place = torch.bucketize(significant, middle).to(values.dtype)
            self.low = 0.0
            self.high = len(self.table) - 1.0

    def of(self, rows: Tensor) -> Codes:
        """The codes of some rows alone."""
        part = copy.copy(self)
        part.scale = self.scale[rows]
        part.place = self.place[rows]
        part.zero_point = None if self.zero_point is None else self.zero_point[rows]
        part.kept = None if self.kept is None else self.kept[rows]
        return part

    def values(self) -> Tensor:
        """The numbers that the codes stand for."""
        return self._value(self.place) * self.scale

    def step(self, slope: Tensor) -> Tensor:
        """The change of value by one place against ``slope``.

        0 at the end of the range and for weights that are not kept.
        """
        direction = slope.sign().neg_()
        if self.kept is not None:
            direction.mul_(self.kept)
        if self.table is None:
            reached = self.place + direction
            inside = (reached >= self.low) & (reached <= self.high)
            return direction.mul_(self.scale).mul_(inside)
        reached = (self.place + direction).clamp_(self.low, self.high)
        return (self._value(reached) - self._value(self.place)).mul_(self.scale)

    def move(self, place: Tensor, moved: Tensor) -> None:
        """Move each row's code at ``place`` by one towards ``moved`` (0: stay)."""
        self.place.scatter_add_(-1, place[:, None], moved.sign()[:, None])

    def _value(self, place: Tensor) -> Tensor:
        if self.table is not None:
            return self.table[place.long()]
        return place.clone() if self.zero_point is None else place - self.zero_point
