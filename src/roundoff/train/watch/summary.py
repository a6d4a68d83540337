"""What the monitor reads of one tensor: in one pass on the CPU, in three reductions that stay there on other devices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from roundoff.ops import plain
from roundoff.record import (
    COMPILED,
    LARGEST,
    ROW,
    compiled,
    in_memory_order,
    measure,
    pieces_of,
)

#: Fewer elements than this are read by torch's own reductions: a compiled pass costs more to call than it saves.
_SMALL = 4 * ROW
_REDUCED = (*COMPILED, torch.float64)

_wrapped = torch._C._functorch.is_functorch_wrapped_tensor

#: least, most, mean and norm of the finite elements (None without any), and how many are NaN or Inf (None: some)
Summary = tuple[float | None, float | None, float | None, float | None, int | None]


def summary(tensor: Tensor) -> Summary | Tensor | None:
    """What a row says of a tensor: on the CPU numbers, elsewhere ``[least, most, sum, norm]`` that nobody has waited for,
    None where there are no values to read (meta tensors)."""
    with torch._C.DisableTorchFunction():  # modes of the program don't see us
        if _ordinary(
            tensor
        ):  # nearly all are: a short way, since none of it is in the processor's caches
            count = tensor.numel()
            run = compiled("sums", tensor.dtype)
            if run is not None and count % ROW == 0 and 2 * ROW <= count <= LARGEST:
                low, high, total, squares, _ = run([tensor.detach().view(-1, ROW)])[
                    0
                ].tolist()
                if 2.0**-100 <= squares < math.inf:
                    return low, high, total / count, math.sqrt(squares), 0
        value, _ = plain(tensor.detach())
        if value is None:
            return None
        if not value.numel():
            return None, None, None, None, 0
        if value.device.type == "cpu":
            return _read(value)
        return torch.stack(
            reduced(value if value.dtype in _REDUCED else value.to(torch.float32))
        )


def _ordinary(tensor: Tensor) -> bool:
    """A dense CPU tensor with memory of its own, of a type that has a compiled pass."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.dtype in COMPILED
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not _wrapped(tensor)
        and bool(tensor.data_ptr())
    )


def _read(value: Tensor) -> Summary:
    """Of a CPU tensor with elements."""
    count, dtype = value.numel(), value.dtype
    run = compiled("sums", dtype) if dtype in COMPILED else None
    whole = (
        in_memory_order(value)
        if run and count % ROW == 0 and 2 * ROW <= count <= LARGEST
        else None
    )
    low = high = total = squares = math.nan
    if run is not None and whole is not None:
        low, high, total, squares, _ = run([whole.view(-1, ROW)])[0].tolist()
    elif dtype in _REDUCED and (count < _SMALL or run is None):
        low, high, total, norm = (number.item() for number in reduced(value))
        squares = norm * norm
    # squares of NaN and Inf are not finite, nor are those of large numbers; those of small ones lose their digits
    if 2.0**-100 <= squares < math.inf or low == high == squares == 0:
        return low, high, total / count, math.sqrt(squares), 0
    least, most, mean, l2, _, nan, above, below, *_ = measure(pieces_of(value))
    return least, most, mean, l2, nan + above + below


def reduced(value: Tensor) -> list[Tensor]:
    """``[least, most, sum, norm]`` of floating-point elements, one at least; NaN shows in all of them, Inf in the first two.
    In fp32, of fp64 in fp64. ``vector_norm`` of order 2 is as fast as a sum; that of order infinity takes ten times as long.
    """
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    low, high = torch.aminmax(value)
    return [
        low.to(wide),
        high.to(wide),
        value.sum(dtype=wide),
        torch.linalg.vector_norm(value, dtype=wide),
    ]


def fetched(values: Sequence[float], numel: int) -> Summary:
    """From ``[least, most, sum, norm]``, or those of several tensors added up and how many (see ``Sink``)."""
    low, high, total, norm, *calls = values
    if math.isfinite(low) and math.isfinite(high) and calls and calls[0] > 1:
        return None, None, None, None, 0
    if not (math.isfinite(low) and math.isfinite(high)):
        return None, None, None, None, None
    return low, high, total / numel, norm, 0
