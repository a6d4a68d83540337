"""Several small codes in one int32 word."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from roundoff.errors import QuantizationError


def pack(codes: Tensor, bits: int, axis: int = 1) -> Tensor:
    """Pack codes of shape (rows, columns) into words along ``axis``.

    A word has ``32 / bits`` codes, the first in the lowest bits. ``2**(bits - 1)`` is
    added to each, so that they are not negative; a last word that is not full has zeros
    above.

    >>> hex(pack(torch.tensor([[-8, -7, 7]]), 4).item())
    '0xf10'
    """
    if 32 % bits:
        raise QuantizationError(
            "codes of this width do not fill a word",
            expected="2, 4, 8 or 16 bits",
            got=f"{bits} bits",
        )
    each = 32 // bits
    rows = codes.movedim(axis, -1)
    unsigned = rows.to(torch.int32) + (1 << (bits - 1))
    unsigned = pad(unsigned, (0, -rows.shape[-1] % each))
    parts = unsigned.reshape(*unsigned.shape[:-1], unsigned.shape[-1] // each, each)
    words = torch.zeros(parts.shape[:-1], dtype=torch.int32, device=codes.device)
    for place in range(each):
        words |= parts[..., place] << (bits * place)
    return words.movedim(-1, axis).contiguous()


def unpack(
    words: Tensor,
    bits: int,
    shape: Sequence[int],
    axis: int = 1,
    where: str | None = None,
) -> Tensor:
    """Return the int8 codes of shape ``shape`` that :func:`pack` put into words.

    Raises:
        QuantizationError: the words have another shape or type.
    """
    each = 32 // bits
    expected = list(shape)
    if len(expected) == 2:
        expected[axis] = -(-expected[axis] // each)
    if words.dtype != torch.int32 or list(words.shape) != expected:
        raise QuantizationError(
            "packed codes do not fit",
            where=where,
            expected=f"int32 of shape {tuple(expected)}",
            got=f"{words.dtype} of shape {tuple(words.shape)}",
        )
    rows = words.movedim(axis, -1)
    places = torch.arange(each, dtype=torch.int32, device=words.device) * bits
    codes = (rows.unsqueeze(-1) >> places) & ((1 << bits) - 1)
    codes = codes.reshape(*rows.shape[:-1], rows.shape[-1] * each)
    codes = codes[..., : shape[axis]] - (1 << (bits - 1))
    return codes.to(torch.int8).movedim(-1, axis).contiguous()
