"""Single codes moved up or down by one while that lowers the layer's output error: coordinate descent on the grid.

The objective is GPTQ's ``tr((Ŵ - W) H (Ŵ - W)ᵀ)``; a step of one code is exact coordinate descent (Behdin et al., QuantEase,
arXiv:2309.01885, section 3, go through the coordinates in turn; here each row takes its best one, all rows at once).
"""

from __future__ import annotations

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

#: A flip must lower the loss by this share of what the step alone costs: else fp32 noise could flip back and forth.
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
    """``quantized`` with codes moved by one, each row its best one in a sweep, until none lowers ``δ H δᵀ``.

    With ``g = δ H`` a step d of element i changes the loss by ``2 d g_i + d² H_ii``. No row gets worse. An input that is
    always zero is left alone, as is a code at the end of its range.

    Args:
        weight: ``[..., out, in]``, what is to be approximated (for a cross term: the least-squares weights).
        quantized: the same shape, on the grid of ``qparams``: from gptq, or rounded to nearest.
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
    scale, zero_point = elementwise(qparams, shape)
    w, start = (
        x.detach().to(dtype).reshape(-1, shape[-1])
        for x in (weight, quantized.expand(shape))
    )
    h = (
        hessian.detach()
        .to(dtype)
        .expand(*shape[:-2], shape[-1], shape[-1])
        .reshape(-1, shape[-1], shape[-1])
    )
    codes = Codes(
        start,
        scale.to(dtype).reshape(start.shape),
        None if zero_point is None else zero_point.to(dtype).reshape(start.shape),
        fmt,
        None if kept is None else kept.expand(shape).reshape(start.shape),
    )
    group = torch.arange(h.shape[0], device=w.device).repeat_interleave(shape[-2])
    found = _descend(w, codes, h, group, sweeps).reshape(shape)
    given = start.reshape(shape)
    exact, wide = w.reshape(shape), h.reshape(*shape[:-2], shape[-1], shape[-1])
    better = quadratic(found - exact, wide) < quadratic(given - exact, wide)
    found = torch.where(better[..., None], found, given)
    gain = Gain("flips", output_db(given, exact, wide), output_db(found, exact, wide))
    return Repaired(found.to(weight.dtype), qparams, gain)


def _descend(w: Tensor, codes: Codes, h: Tensor, group: Tensor, sweeps: int) -> Tensor:
    """All rows together; rows that are done are dropped when they are half of them."""
    result = codes.values()
    slope = ((result - w).reshape(h.shape[0], -1, w.shape[1]) @ h).reshape(w.shape)
    power = h.diagonal(dim1=-2, dim2=-1)[group]
    flat, rows = h.reshape(-1, w.shape[1]), torch.arange(w.shape[0], device=w.device)
    for _ in range(sweeps):
        step = codes.step(slope)
        least = step.square().mul_(power)
        change, at = (2 * step * slope).add_(least).min(-1)
        active = change < -_LEAST * least.gather(-1, at[:, None]).squeeze(-1)
        count = int(active.sum())
        if not count:
            break
        if count <= 0.5 * len(rows):
            result[rows] = codes.values()
            rows, group, slope, power, at, step = (
                x[active] for x in (rows, group, slope, power, at, step)
            )
            codes = codes.of(active)
            active = active[active]
        moved = step.gather(-1, at[:, None]).squeeze(-1) * active
        slope.addcmul_(flat[group * w.shape[1] + at], moved[:, None])
        codes.move(at, moved)
    result[rows] = codes.values()
    return result


class Codes:
    """Rows of codes, in places along the format's values: where they lie and what one place up or down changes.

    The places of an integer format are its integers; of another one, the places in the list of its finite values.
    """

    def __init__(
        self,
        values: Tensor,
        scale: Tensor,
        zero_point: Tensor | None,
        fmt: Format,
        kept: Tensor | None = None,
    ) -> None:
        self.scale, self.zero_point, self.kept = scale, zero_point, kept
        significant = values / scale
        self.table: Tensor | None = None
        if fmt.one_quantum == 1.0 and fmt.has_zero:
            self.place = (
                significant.round_()
                if zero_point is None
                else significant.round_().add_(zero_point)
            )
            self.low, self.high = fmt.min_finite, fmt.max_finite
        else:
            known = sorted({v for v in all_values(fmt) if math.isfinite(v)})
            self.table = torch.tensor(known, dtype=values.dtype, device=values.device)
            middle = (self.table[1:] + self.table[:-1]) / 2
            self.place = torch.bucketize(significant, middle).to(values.dtype)
            self.low, self.high = 0.0, len(self.table) - 1.0

    def of(self, rows: Tensor) -> Codes:
        """Only these rows."""
        part: Codes = object.__new__(Codes)
        part.table, part.low, part.high = self.table, self.low, self.high
        part.scale, part.place = self.scale[rows], self.place[rows]
        part.zero_point, part.kept = (
            None if x is None else x[rows] for x in (self.zero_point, self.kept)
        )
        return part

    def values(self) -> Tensor:
        """The numbers that the codes stand for."""
        return self._value(self.place) * self.scale

    def step(self, slope: Tensor) -> Tensor:
        """The change of value by one place against ``slope``; 0 at the end of the range and for what is not kept."""
        direction = slope.sign().neg_()
        if self.kept is not None:
            direction.mul_(self.kept)
        if self.table is None:
            reached = self.place + direction
            inside = (reached >= self.low) & (reached <= self.high)
            return direction.mul_(self.scale).mul_(inside)
        reached = (self.place + direction).clamp_(self.low, self.high)
        return (self._value(reached) - self._value(self.place)).mul_(self.scale)

    def move(self, at: Tensor, moved: Tensor) -> None:
        """In each row the code at ``at`` by one place, in the direction of ``moved`` (0: not at all)."""
        self.place.scatter_add_(-1, at[:, None], moved.sign()[:, None])

    def _value(self, place: Tensor) -> Tensor:
        if self.table is not None:
            return self.table[place.long()]
        return place.clone() if self.zero_point is None else place - self.zero_point
