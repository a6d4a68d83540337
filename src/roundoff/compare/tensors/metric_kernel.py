"""The compiled pass of ``measure``: all sums and maxima of a row in one loop.

Values are fp32 vectors and codes int32 ones, views of the same registers. A code counts
the representable numbers from zero on: for an fp32 number it is its bits without the
sign, with the sign of the number. The distance of two codes is the distance in ulp.
Nothing here asks if values are finite: it shows in the sums, and such a row is measured
exactly.

The functions of torch say what ``kernels.cpp`` computes, and check it when it is loaded.
They avoid comparisons for arithmetic on bits: ``x >> 31`` is -1 where x is negative,
``min(bits, 1)`` is 0 where a magnitude is zero, and the largest of non-negative floats
has the largest bits; those of NaN are above them all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from roundoff.record import KERNELS, ROW, Kernel, probe

#: The sums of a row, in this order: ``e`` of (r - c)(r + c), ``over`` of distances above
#: 1 ulp, ``same`` of equal bits, ``differ`` of unequal values, ``lone`` of r = 0 where c
#: is not, ``solid`` of r other than 0.
SUMS = tuple("r2 c2 d2 e abs rel ulp over same differ lone solid".split())
#: The maxima of a row, which follow the sums.
TOPS = ("max_abs", "max_rel", "max_ulp")
#: Pieces of ``ROW`` elements in one row of the wide forms. Elements at the same place of
#: each are added first, so that a row costs less at its end and its sums round no more.
WIDE = 4
_F = torch.float32
_I = torch.int32
_SIZE = 0x7FFFFFFF
_SIGN = -0x80000000


def pairs(r: Tensor, c: Tensor, scale: Tensor, one: Tensor) -> Tensor:
    """Return rows of ``SUMS`` and ``TOPS``, shape ``(15, rows)``.

    Args:
        r: fp32, shape ``(rows, pieces, n)``.
        c: fp32, of the same shape.
        scale: factor of the values; distances are in fp32 codes of the products.
        one: as int32, the bits of the fp32 number that is 1 ulp among them.

    With scale 2**-112, which sends the subnormals of fp16 to those of fp32, and 2**13
    as one, distances are in fp16's codes.
    """
    pieces = []
    for x, y in zip(r.unbind(1), c.unbind(1), strict=True):
        i = (x * scale).view(_I)
        j = (y * scale).view(_I)
        crossed = (i ^ j) >> 31
        p = i & _SIZE
        q = j & _SIZE
        apart = torch.maximum(p, q) - ((torch.minimum(p, q) ^ crossed) - crossed)
        # across zero up to 2**32, which has wrapped around: it shows in the sign, and is
        # put right once for the row
        pieces.append(_piece(x, y, crossed, apart, one, apart >> 31))
    return _rows(pieces, r.shape[2])


def packed(r: Tensor, c: Tensor) -> Tensor:
    """Return the same for bf16 tensors seen as int32, two elements in one.

    The upper half with zeros below is an fp32 number, and so is the lower half moved
    up. Distances are in bf16 codes.
    """
    pieces = []
    for x, y in zip(r.unbind(1), c.unbind(1), strict=True):
        for i, j in ((x & -65536, y & -65536), (x << 16, y << 16)):
            crossed = (i ^ j) >> 31
            p = (i >> 16) & 0x7FFF
            q = (j >> 16) & 0x7FFF
            apart = (p - ((q ^ crossed) - crossed)).abs()
            pieces.append(_piece(i.view(_F), j.view(_F), crossed, apart, 0x3F800000))
    return _rows(pieces, r.shape[2])


class _Piece(NamedTuple):
    """One vector for each sum, each count (by 1 or -1) and each maximum (of bits)."""

    sums: list[Tensor]
    counts: list[Tensor]
    tops: list[Tensor]


def _piece(
    r: Tensor,
    c: Tensor,
    crossed: Tensor,
    apart: Tensor,
    one: Tensor | int,
    wrapped: Tensor | None = None,
) -> _Piece:
    d = r - c
    error = d.abs()
    size = r.abs()
    bits = error.view(_I)
    solid = torch.clamp_max(size.view(_I), 1)
    differ = torch.clamp_max(bits, 1)
    rel = (error / size).view(_I) & -solid  # zero where r is
    ulp = apart.to(_F)
    counts = [
        (one - ulp.view(_I)) >> 31,  # above 1 ulp, by -1
        crossed & (differ ^ 1),  # zeros of unlike signs: equal, with other bits
        differ,
        differ & (solid ^ 1),
        solid,
    ]
    distance = apart
    if wrapped is not None:
        distance = apart ^ _SIGN  # in the order of unsigned numbers
        counts.append(wrapped)
    sums = [r * r, c * c, d * d, d * (r + c), error, rel.view(_F), ulp]
    return _Piece(sums, counts, [bits, rel, distance])


def _rows(pieces: list[_Piece], n: int) -> Tensor:
    """Return pieces of ``n`` elements in one row: added pair by pair, then along the row."""
    count = n * len(pieces)
    while len(pieces) > 1:
        halves = zip(pieces[::2], pieces[1::2], strict=True)
        pieces = [_added(left, right) for left, right in halves]
    (piece,) = pieces
    *sums, ulp = (s.sum(1) for s in piece.sums)
    # as fp32 along the row: at its end torch adds the lanes of an int32 vector one by one
    over, opposite, differ, lone, solid, *wrapped = (
        s.to(_F).sum(1) for s in piece.counts
    )
    bits, rel, distance = (t.amax(1) for t in piece.tops)
    if wrapped:  # -1 each
        distance = distance ^ _SIGN
        ulp = ulp - wrapped[0] * 4294967296.0
        over = over + wrapped[0]
    unsigned = distance.to(_F) + 4294967296.0
    top = torch.where(distance < 0, unsigned, distance.to(_F))
    same = count - differ - opposite
    return torch.stack(
        [*sums, ulp, -over, same, differ, lone, solid, bits.view(_F), rel.view(_F), top]
    )


def _added(one: _Piece, other: _Piece) -> _Piece:
    return _Piece(
        [a + b for a, b in zip(one.sums, other.sums, strict=True)],
        [a + b for a, b in zip(one.counts, other.counts, strict=True)],
        [torch.maximum(a, b) for a, b in zip(one.tops, other.tops, strict=True)],
    )


def _pairs(pieces: int) -> Callable[[torch.dtype, int], list[Tensor]]:
    def inputs(dtype: torch.dtype, rows: int) -> list[Tensor]:
        r = probe(dtype, rows * pieces).view(rows, pieces, ROW)
        return [r, r * 1.125, torch.tensor(1.0), torch.tensor(0x3F800000, dtype=_I)]

    return inputs


def _packed(dtype: torch.dtype, rows: int) -> list[Tensor]:
    r = probe(torch.float32, rows * WIDE)
    return [x.to(dtype).view(_I).view(rows, WIDE // 2, ROW) for x in (r, r * 1.125)]


#: On the caller's thread, for small tensors: waking others takes longer than they need.
KERNELS["pairs"] = Kernel(pairs, _pairs(1), len(SUMS + TOPS), for_each_type=False)
KERNELS["pairs_wide"] = Kernel(
    pairs, _pairs(WIDE), len(SUMS + TOPS), for_each_type=False, threads=True
)
KERNELS["packed_wide"] = Kernel(
    packed, _packed, len(SUMS + TOPS), for_each_type=False, threads=True
)
