"""A call that a recording names, run again: what may be run at all, and in which process.

A recording may be anybody's. Of the operators that it names only those run that
compute tensors from tensors and do nothing else (the trait "are safe from a recording"
of the table); arguments are held against the schema and the sizes of the tensors, since
not every kernel does so. Any other call gives the reason why it is not run.

Inside ``calls_of_others`` every call runs in a process of its own, with limits of
memory and time; outside, in this one, where operators that the user's own program has
registered run too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from roundoff.errors import RunError
from roundoff.ops.argument_checks import check_arguments
from roundoff.ops.arguments import overload_of, restore
from roundoff.ops.other_process import OtherProcess, RecordedCall
from roundoff.ops.refusals import Reason, Refusal, refuse
from roundoff.ops.rerun import (
    Result,
    outside_of_modes,
    run_again,
    tensors_made,
    written_out_in_fp64,
)
from roundoff.ops.table import base, operators_that

_OTHER: ContextVar[OtherProcess | None] = ContextVar("process for calls", default=None)
_SAFE = operators_that("are safe from a recording")
_WRITE_UNSAID = operators_that("write running statistics")
#: What kernels raise of arguments that do not suit them.
FAILURES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)


@contextmanager
def calls_of_others() -> Iterator[None]:
    """Run the calls of recordings in another process: for recordings of other users.

    It starts with the first call and ends with the block.
    """
    process = OtherProcess()
    token = _OTHER.set(process)
    try:
        yield
    finally:
        _OTHER.reset(token)
        process.close()


def run_recorded(
    overload: str,
    arguments: str,
    tensor_of: Callable[[int], Tensor],
    *,
    dtype: torch.dtype | None,
    device: torch.device | str | None = None,
    exact_as_is: bool = False,
) -> list[Result] | Reason:
    """Return what ``run_again`` does of a recorded call, or why it is not run.

    Args:
        overload: ``aten.add.Tensor``.
        arguments: as of ``describe``.
        tensor_of: the tensor of a record; what it raises passes.
        dtype: the format to run in; None for those of the tensors.
        device: where; None for that of the tensors.
        exact_as_is: run a call that rounds nothing as it is, in place of the reason.
    """
    tensors: dict[int, Tensor] = {}

    def kept(record: int) -> Tensor:
        if record not in tensors:
            tensors[record] = tensor_of(record)
        return tensors[record]

    try:
        func, args, kwargs = _checked(overload, arguments, kept, device)
    except Refusal as refusal:
        return refusal.reason
    other = _OTHER.get()
    if other is None:
        return run_checked(func, args, kwargs, dtype, device, exact_as_is)
    call = RecordedCall(overload, arguments, tensors, dtype, device, exact_as_is)
    return other.run(call)


def writes_arguments(func: OpOverload) -> bool:
    """Return True for an operator that writes arguments, whether its schema says so or not."""
    return func._schema.is_mutable or base(_name(func)) in _WRITE_UNSAID


def run_in_this_process() -> bool:
    """Return False inside ``calls_of_others``, where a call costs much more."""
    return _OTHER.get() is None


def may_be_opened(func: OpOverload) -> bool:
    """Return True where a recorded call's operator may be run step by step in this process."""
    return _OTHER.get() is None and (_is_custom(func) or _is_safe(func))


def run_in_other_process(
    overload: str,
    arguments: str,
    tensors: dict[int, Tensor],
    dtype: torch.dtype | None,
    device: str | None,
    exact_as_is: bool,
) -> list[Result] | Reason:
    """Run a call in this process, which is the other one: checked once more."""
    try:
        func, args, kwargs = _checked(overload, arguments, tensors.__getitem__, device)
    except Refusal as refusal:
        return refusal.reason
    if _is_custom(func):
        return _not_listed(func)
    return run_checked(func, args, kwargs, dtype, device, exact_as_is)


def run_checked(
    func: OpOverload,
    args: tuple[Any, ...],
    kwargs: Any,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    exact_as_is: bool,
) -> list[Result] | Reason:
    """Run a call whose operator and arguments have been checked."""
    results = run_again(func, args, kwargs, dtype=dtype, device=device)
    if not isinstance(results, Reason) or not (results.is_exact and exact_as_is):
        return results
    with outside_of_modes(func):
        try:
            result = func(*args, **kwargs)
        except FAILURES as error:
            written_out = _written_out(func, args, kwargs, dtype)
            return call_failure(error) if written_out is None else written_out
    return list(tensors_made(func, args, kwargs, result))


def _written_out(
    func: OpOverload, args: tuple[Any, ...], kwargs: Any, dtype: torch.dtype | None
) -> list[Result] | None:
    """Run a kernel that knows no fp64 as it is written out; None where it is not."""
    if dtype is not torch.float64:
        return None
    try:
        return written_out_in_fp64(func, args, kwargs)
    except (Refusal, *FAILURES):
        return None


def call_failure(error: Exception) -> Reason:
    """Return why a kernel refused its arguments, in one line."""
    first_line = next(iter(str(error).splitlines()), "")
    return Reason(f"{type(error).__name__}: {first_line}"[:200])


def _checked(
    overload: str,
    arguments: str,
    tensor_of: Callable[[int], Tensor],
    device: torch.device | str | None,
) -> tuple[OpOverload, tuple[Any, ...], Any]:
    """Return the operator and its arguments. Raises ``Refusal``."""
    func = recorded_operator(overload)
    args, kwargs = checked_arguments(func, arguments, tensor_of, device)
    if _is_custom(func) and _OTHER.get() is not None:
        raise Refusal(_not_listed(func).text)
    return func, args, kwargs


def recorded_operator(overload: str) -> OpOverload:
    """Return an operator that may be run. Raises ``Refusal``."""
    try:
        func = overload_of(overload)
    except RunError as error:
        raise Refusal(f"{error.what}: {error.do}") from error
    if not _is_safe(func) and not _is_custom(func):
        _refuse_by_name(func)
    return func


def checked_arguments(
    func: OpOverload,
    arguments: str,
    tensor_of: Callable[[int], Tensor],
    device: torch.device | str | None = None,
) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments that a recording gives to an operator.

    Raises ``Refusal`` where they do not fit it, or each other.
    """
    args, kwargs = restored(arguments, tensor_of, device)
    check_arguments(func, args, kwargs)
    return args, kwargs


def restored(
    arguments: str,
    tensor_of: Callable[[int], Any],
    device: torch.device | str | None = None,
) -> tuple[tuple[Any, ...], Any]:
    """Return the arguments that a recording gives. Raises ``Refusal`` for other text."""
    try:
        # recorded tensors are read into the host's memory
        return restore(arguments, tensor_of, torch.device(device or "cpu"))
    except RunError as error:
        raise Refusal(error.what) from error


def _refuse_by_name(func: OpOverload) -> None:
    """Raise ``Refusal`` with what the operator does, where that is known."""
    refuse(func, {})
    raise Refusal(_not_listed(func).text)


def _not_listed(func: OpOverload) -> Reason:
    name = str(func._schema.name).replace("::", ".")
    return Reason(
        f"not run again: {name} is none of the operators that a recording may name"
    )


def _is_safe(func: OpOverload) -> bool:
    is_aten = func.namespace == "aten"
    return is_aten and base(_name(func)) in _SAFE and not writes_out(func)


def _name(func: OpOverload) -> str:
    return str(func._schema.name).partition("::")[2]


def writes_out(func: OpOverload) -> bool:
    """Return True for a form that resizes and writes tensors of the caller.

    It has no gradient.
    """
    return any(argument.is_out for argument in func._schema.arguments)


def _is_custom(func: OpOverload) -> bool:
    """Return True for an operator that a program, and not torch, has registered."""
    return func.namespace not in _OF_TORCH


#: Where torch's own operators are; recordings name those of aten alone.
_OF_TORCH = frozenset(
    """
    _c10d_functional _c10d_functional_autograd _dtensor _native _quantized _test aten
    c10d c10d_functional debug_mode_ops debugprims export fsdp higher_order inductor
    inductor_prims metal_prepack mkl mkldnn mkldnn_prepacked onednn prepacked prim prims
    profiler quantization quantized quantized_decomposed rngprims sparse static_runtime
    streams symm_mem triton vulkan_prepack xnnpack
    """.split()
)
