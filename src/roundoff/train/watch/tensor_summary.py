"""What the monitor reads of one tensor: in one pass on the CPU, in three reductions
that stay there on other devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from roundoff.ops import plain
from roundoff.record import (
    COMPILED,
    LARGEST,
    ROW,
    compiled,
    in_graph_capture,
    in_memory_order,
    measure,
    pieces_of,
)

#: Fewer elements than this are read by torch's own reductions: a compiled pass costs more
#: to call than it saves.
_SMALL = 4 * ROW
_REDUCED = (*COMPILED, torch.float64)
#: Sums of squares from here on have kept their digits.
_LEAST_SQUARES = 2.0**-100

_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


class TensorSummary(NamedTuple):
    """Least, most, mean and norm of the finite elements (None without any), and how
    many are NaN or Inf (None: some).
    """

    least: float | None
    most: float | None
    mean: float | None
    norm: float | None
    non_finite: int | None


EMPTY = TensorSummary(None, None, None, None, 0)
UNKNOWN = TensorSummary(None, None, None, None, None)


def summarize_tensor(tensor: Tensor) -> TensorSummary | Tensor | None:
    """Read what a row says of a tensor.

    On the CPU these are numbers, elsewhere ``[least, most, sum, norm]`` that nobody has
    waited for, None where there are no values to read (meta tensors, and what a CUDA
    graph being captured will compute later).
    """
    with torch._C.DisableTorchFunction():  # modes of the program don't see us
        # nearly all take this short way, since none of the rest is in the processor's
        # caches
        if _is_ordinary(tensor):
            count = tensor.numel()
            run = compiled("sums", tensor.dtype)
            if run is not None and _fits_rows(count):
                rows = tensor.detach().view(-1, ROW)
                low, high, total, squares, _ = run([rows]).tolist()
                if _LEAST_SQUARES <= squares < math.inf:
                    return TensorSummary(
                        low, high, total / count, math.sqrt(squares), 0
                    )
        value, _ = plain(tensor.detach())
        if value is None:
            return None
        if not value.numel():
            return EMPTY
        if value.device.type == "cpu":
            return _read(value)
        if in_graph_capture():
            return None
        if value.dtype not in _REDUCED:
            value = value.to(torch.float32)
        return torch.stack(reduced(value))


def _is_ordinary(tensor: Tensor) -> bool:
    """Return True for a dense CPU tensor with memory of its own, of a type that has a
    compiled pass.
    """
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.dtype in COMPILED
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not _is_wrapped(tensor)
        and bool(tensor.data_ptr())
    )


def _fits_rows(count: int) -> bool:
    return count % ROW == 0 and 2 * ROW <= count <= LARGEST


def _read(value: Tensor) -> TensorSummary:
    """Read a CPU tensor that has elements.

    The squares of NaN and Inf are not finite, nor are those of large numbers; those of
    small ones lose their digits: then every element is looked at.
    """
    count = value.numel()
    low, high, total, squares = _sums(value)
    if _LEAST_SQUARES <= squares < math.inf or low == high == squares == 0:
        return TensorSummary(low, high, total / count, math.sqrt(squares), 0)
    least, most, mean, norm, _, nan, above, below, *_ = measure(pieces_of(value))
    return TensorSummary(least, most, mean, norm, nan + above + below)


def _sums(value: Tensor) -> tuple[float, float, float, float]:
    """Return least, most, sum and sum of squares; NaN where there is no fast way to them."""
    count = value.numel()
    dtype = value.dtype
    run = compiled("sums", dtype) if dtype in COMPILED else None
    if run is not None and _fits_rows(count):
        whole = in_memory_order(value)
        if whole is not None:
            low, high, total, squares, _ = run([whole.view(-1, ROW)]).tolist()
            return low, high, total, squares
    if dtype in _REDUCED and (count < _SMALL or run is None):
        low, high, total, norm = (number.item() for number in reduced(value))
        return low, high, total, norm * norm
    return math.nan, math.nan, math.nan, math.nan


def reduced(value: Tensor) -> list[Tensor]:
    """Return ``[least, most, sum, norm]`` of floating-point elements, one at least.

    NaN shows in all of them, Inf in the first two. In fp32, of fp64 in fp64.
    ``vector_norm`` of order 2 is as fast as a sum; that of order infinity takes ten times
    as long.
    """
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    low, high = torch.aminmax(value)
    return [
        low.to(wide),
        high.to(wide),
        value.sum(dtype=wide),
        torch.linalg.vector_norm(value, dtype=wide),
    ]


def from_reduced(values: Sequence[float], numel: int) -> TensorSummary:
    """Read ``[least, most, sum, norm]``, or those of several tensors added up and how
    many (see ``SummarySink``).
    """
    low, high, total, norm, *calls = values
    if not (math.isfinite(low) and math.isfinite(high)):
        return UNKNOWN
    if calls and calls[0] > 1:
        return EMPTY
    return TensorSummary(low, high, total / numel, norm, 0)
