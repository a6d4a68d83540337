"""Random sign vectors, the probes of every estimate.

With independent signs v, E[v v^T] = I, so E[(v . e)^2] = |e|^2 for any e
(M. F. Hutchinson, Commun. Stat. Simul. 18, 1989, eq. 2-4).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def draw_signs(
    shape: Sequence[int], generator: torch.Generator, like: Tensor | None = None
) -> Tensor:
    """Draw -1 or 1 for each element of ``shape``, both equally likely.

    Signs are drawn on the CPU, so that every device gets the same. They come back in
    the dtype and on the device of ``like``; in float64 on the CPU without it.

    >>> draw_signs([4], torch.Generator().manual_seed(0)).abs()
    tensor([1., 1., 1., 1.], dtype=torch.float64)
    """
    bits = torch.randint(0, 2, tuple(shape), generator=generator, dtype=torch.int8)
    signs = bits.double() if like is None else bits.to(like.device, like.dtype)
    return signs.mul_(2).sub_(1)
