"""The pass over two tensors that ``measure`` makes: all sums and maxima of a row in one loop, as compiled functions.

Values are fp32 vectors and codes int32 ones, views of the same registers. A code counts the representable numbers from
zero on: of an fp32 number that is its bits without the sign, with the sign of the number. The distance of two codes is the
distance in ulp. Nothing here asks whether values are finite: it shows in the sums, and such a row is measured exactly.

The functions avoid comparisons, whose masks cost Inductor's C++ three instructions each, for arithmetic on bits:
``x >> 31`` is -1 where x is negative, ``min(bits, 1)`` is 0 where a magnitude is zero, and the largest of non-negative
floats has the largest bits, among which those of NaN are the largest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from roundoff.capture.kernel import KERNELS, Kernel, probe

#: What a row gives, in this order: sums (``e`` of (r - c)(r + c), ``over`` of distances above 1 ulp, ``same`` of equal bits,
#: ``differ`` of unequal values, ``lone`` of r = 0 where c is not, ``solid`` of r other than 0), then maxima.
SUMS = ("r2", "c2", "d2", "e", "abs", "rel", "ulp", "over", "same", "differ", "lone", "solid")
TOPS = ("max_abs", "max_rel", "max_ulp")
_F, _I = torch.float32, torch.int32
_SIZE = 0x7FFFFFFF


def pairs(r: Tensor, c: Tensor, scale: Tensor, one: Tensor) -> Tensor:
    """Rows of ``SUMS`` and ``TOPS``, shape ``(15, rows)``, of fp32 tensors of shape ``(rows, n)``.

    Distances are in fp32 codes of the values times ``scale``; ``one`` has, as an int32, the bits of the fp32 number that
    is 1 ulp among them. With scale 2**-112, which sends the subnormals of fp16 to those of fp32, and 2**13 as one, they
    are fp16's.
    """
    i, j = _code((r * scale).view(_I)), _code((c * scale).view(_I))
    apart = torch.maximum(i, j) - torch.minimum(i, j)
    # across zero up to 2**32, which has wrapped around
    ulp = apart.to(_F) - (apart >> 31).to(_F) * 4294967296.0
    sums, tops = _row(r, c, r.view(_I), c.view(_I), ulp, one)
    return torch.stack([s.sum(1) for s in sums] + [t.amax(1).view(_F) for t in tops])


def packed(r: Tensor, c: Tensor) -> Tensor:
    """The same of bf16 tensors that are seen as int32, two elements in one, shape ``(rows, n / 2)``: the upper half with
    zeros below is an fp32 number, and so is the lower half moved up. Distances in bf16 codes."""
    halves = []
    for i, j in ((r & -65536, c & -65536), (r << 16, c << 16)):
        ulp = ((_code(i) >> 16) - (_code(j) >> 16)).abs().to(_F)
        halves.append(_row(i.view(_F), j.view(_F), i, j, ulp, 0x3F800000))
    (upper, high), (lower, low) = halves
    sums = [(u + v).sum(1) for u, v in zip(upper, lower, strict=True)]
    tops = [torch.maximum(u, v).amax(1).view(_F) for u, v in zip(high, low, strict=True)]
    return torch.stack(sums + tops)


def _code(bits: Tensor) -> Tensor:
    sign = bits >> 31
    return ((bits & _SIZE) ^ sign) - sign


def _row(
    r: Tensor, c: Tensor, i: Tensor, j: Tensor, ulp: Tensor, one: Tensor | int
) -> tuple[list[Tensor], list[Tensor]]:
    d = r - c
    error, size = d.abs(), r.abs()
    bits = error.view(_I)
    solid, differ = torch.clamp_max(size.view(_I), 1), torch.clamp_max(bits, 1)
    rel = (error / size).view(_I) & -solid  # zero where r is
    steps = ulp.view(_I)
    sums = [
        r * r, c * c, d * d, d * (r + c), error, rel.view(_F), ulp, -((one - steps) >> 31).to(_F),
        torch.where(i == j, 1.0, 0.0), differ.to(_F), (differ & (solid ^ 1)).to(_F), solid.to(_F),
    ]  # fmt: skip
    return sums, [bits, rel, steps]


def _pairs(dtype: torch.dtype, rows: int) -> list[Tensor]:
    r = probe(dtype, rows)
    return [r, r * 1.125, torch.tensor(1.0), torch.tensor(0x3F800000, dtype=_I)]


def _packed(dtype: torch.dtype, rows: int) -> list[Tensor]:
    r = probe(torch.float32, rows)
    return [r.to(dtype).view(_I), (r * 1.125).to(dtype).view(_I)]


#: On the caller's thread, for small tensors: waking others takes longer than they need.
KERNELS["pairs"] = Kernel(pairs, _pairs, (_code, _row))
KERNELS["pairs_wide"] = Kernel(pairs, _pairs, (_code, _row), threads=True)
KERNELS["packed_wide"] = Kernel(packed, _packed, (_code, _row), threads=True)
