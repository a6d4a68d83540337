"""How far a call's actual result is from the same call in fp64, on the same inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from roundoff.ops import Reason, outside_of_modes, run_again
from roundoff.record.statistics import in_memory_order
from roundoff.record.statistics_kernel import COMPILED, ROW, compiled

#: What stands in a row: l2 and max of the own error, or the reason why there is none.
OwnColumns = tuple[float | None, float | None, str | None]
Compare = Callable[[Sequence[Tensor], Sequence[int], dict[int, OwnColumns]], None]

NOT_COMPARED = "has no counterpart in the other format"


class OwnError(NamedTuple):
    """``l2`` and ``max`` of |actual - reference|, and the l2 norm of the reference's
    finite elements.

    Where both are NaN, or the same infinity, the difference is zero; where only one is
    finite, or they differ otherwise, it is infinite. Complex values by their modulus;
    integers and booleans as numbers.
    """

    l2: float
    max: float
    reference: float


def shadow(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Compare:
    """Run a call in fp64 before it runs itself; give what compares the two.

    That function takes the tensors in the order of ``made``, their records (negative
    ones are left out), and the dictionary that it writes own errors to. An entry that
    is there already stays: a view of the same elements has the record of the tensor it
    is a view of.
    """
    again = run_again(func, args, kwargs)

    def compare(
        tensors: Sequence[Tensor],
        records: Sequence[int],
        own_errors: dict[int, OwnColumns],
    ) -> None:
        if isinstance(again, Reason):
            columns: list[OwnColumns] = [(None, None, again.text)] * len(records)
        else:
            columns = [_columns(error) for error in own_error(tensors, again)]
        for record, entry in zip(records, columns, strict=False):
            if record >= 0:
                own_errors.setdefault(record, entry)

    return compare


def _columns(error: OwnError | None) -> OwnColumns:
    if error is None:
        return None, None, NOT_COMPARED
    return error.l2, error.max, None


def own_error(actual: Any, again: Any) -> list[OwnError | None]:
    """Return the own error of each tensor of ``actual`` (tensors, lists of them), in fp64.

    ``again`` has the same tensors in the same order, as from ``run_again``; None in
    ``actual`` is left out. A result is None where the shapes differ or there is nothing
    to compare with, and all are when ``again`` has more tensors.

    >>> import torch
    >>> inf, nan = torch.inf, torch.nan
    >>> own_error(torch.tensor([1.5, inf, nan]), torch.tensor([1.0, inf, nan]))
    [OwnError(l2=0.5, max=0.5, reference=1.0)]
    >>> own_error(torch.tensor([3.0, inf]), torch.tensor([3.0, 1e39], dtype=torch.float64))
    [OwnError(l2=inf, max=inf, reference=1e+39)]
    """
    tensors = [tensor for tensor in _flat(actual) if tensor is not None]
    references = _flat(again)
    if any(tensor is not None for tensor in references[len(tensors) :]):
        return [None] * len(tensors)
    references += [None] * (len(tensors) - len(references))
    with outside_of_modes():
        pairs = zip(tensors, references, strict=False)
        return [_error(tensor, reference) for tensor, reference in pairs]


def _error(actual: Tensor, reference: Tensor | None) -> OwnError | None:
    if reference is None or actual.shape != reference.shape:
        return None
    if not actual.numel():
        return OwnError(0.0, 0.0, 0.0)
    if actual.device != reference.device:
        actual = actual.cpu()
        reference = reference.cpu()
    error = _error_in_one_pass(actual, reference)
    if error is not None:
        return error
    try:
        x = _wide(actual)
        y = _wide(reference)
    except (RuntimeError, NotImplementedError):
        return None  # packed formats, and layouts without a dense form
    return _wide_error(x, y)


def _wide_error(x: Tensor, y: Tensor) -> OwnError:
    difference = x - y  # complex where one of them is
    difference = difference.abs() if difference.is_complex() else difference.abs_()
    size = y.abs()
    largest, most = torch.stack([difference.max(), size.max()]).tolist()
    if not math.isfinite(largest + most):
        is_same = (x == y) | (x.isnan() & y.isnan())
        difference = difference.masked_fill_(is_same, 0.0).nan_to_num_(
            nan=torch.inf, posinf=torch.inf
        )
        size = size.masked_fill_(~y.isfinite(), 0.0)
        largest, most = torch.stack([difference.max(), size.max()]).tolist()
    return OwnError(_norm(difference, largest), largest, _norm(size, most))


def _error_in_one_pass(actual: Tensor, reference: Tensor) -> OwnError | None:
    """Return the error by the compiled pass over both.

    None where they are small, lie apart, or hold what it cannot add up.
    """
    if not _fits_the_pass(actual, reference):
        return None
    run = compiled("errors", actual.dtype)
    x = in_memory_order(actual)
    y = in_memory_order(reference)
    if run is None or x is None or y is None:
        return None
    whole = len(x) - len(x) % ROW
    parts = [run([x[:whole].view(-1, ROW), y[:whole].view(-1, ROW)]).tolist()]
    if whole < len(x):
        parts.append(_remaining_sums(x[whole:].double(), y[whole:]))
    largest = max(part[0] for part in parts)
    most = max(part[2] for part in parts)
    if not (_can_be_squared(largest) and _can_be_squared(most)):
        return None
    squared_error = sum(part[1] for part in parts)
    squared_reference = sum(part[3] for part in parts)
    return OwnError(math.sqrt(squared_error), largest, math.sqrt(squared_reference))


def _fits_the_pass(actual: Tensor, reference: Tensor) -> bool:
    if actual.dtype not in COMPILED or reference.dtype is not torch.float64:
        return False
    if actual.device.type != "cpu" or actual.numel() < 16 * ROW:
        return False
    is_dense = actual.layout is torch.strided and actual.stride() == reference.stride()
    return is_dense and not actual.is_neg()


def _remaining_sums(x: Tensor, y: Tensor) -> list[float]:
    """Return what the compiled pass gives, of the elements after its last whole row."""
    difference = x - y
    sums: list[float] = torch.stack(
        [
            difference.abs().amax(),
            difference @ difference,
            y.abs().amax(),
            y @ y,
        ]
    ).tolist()
    return sums


def _can_be_squared(value: float) -> bool:
    """Return True if squares of the size of ``value`` neither overflow nor vanish in
    fp64; False for NaN."""
    return value == 0 or 1e-140 < value < 1e140


def _norm(values: Tensor, largest: float) -> float:
    """Return the l2 norm; scaled where squares would overflow or vanish in fp64."""
    if largest in (0.0, math.inf):
        return largest
    if _can_be_squared(largest):
        return float(torch.linalg.vector_norm(values))
    return float(torch.linalg.vector_norm(values / largest)) * largest


def _wide(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    if dense.is_conj() or dense.is_neg():
        # below autograd, arithmetic does not look at these bits; copying does
        dense = dense.clone()
    if dense._is_zerotensor():
        dense = torch.zeros(dense.shape, dtype=dense.dtype, device=dense.device)
    wide: Tensor = dense.to(torch.complex128 if dense.is_complex() else torch.float64)
    return wide


def _flat(value: Any) -> list[Tensor | None]:
    """Return the tensors in a value, lists in it opened; None stays None inside of lists."""
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Tensor | None] = []
    if isinstance(value, (list, tuple)):
        for part in value:
            tensors += [None] if part is None else _flat(part)
    return tensors
