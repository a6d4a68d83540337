"""An operator call once more, in another format or on another device: fp64 shadow and replay.

``run_again`` takes a call as ``__torch_dispatch__`` sees it, below autograd, and runs
it on copies: nothing the caller holds is written, and random states, grad mode,
autocast and dispatch modes are as before. ``tensors_made`` lists what a call makes;
``roundoff.record.own_error`` measures the distance between the two.

The own error of an operator is that of its result on the inputs it received. Numbers in
the program (``x * 0.1``) are taken as written, so that rounding them to the tensor's
format counts. A cast to a narrower format has the cast's rounding as its own error: the
same operator in fp64 hands its input on.

>>> import torch
>>> from roundoff.record.own_error import own_error
>>> x, multiply = torch.full((4,), 3.0), torch.ops.aten.mul.Scalar
>>> again = run_again(multiply, (x, 0.1), {})
>>> again
[tensor([0.3000, 0.3000, 0.3000, 0.3000], dtype=torch.float64)]
>>> [error] = own_error(multiply(x, 0.1), again)
>>> f"{error.l2:.2g} {error.max:.2g} {error.reference:.2g}"
'2.4e-08 1.2e-08 0.6'
>>> run_again(torch.ops.aten.t.default, (x,), {})
Reason(text='a view rounds nothing', is_exact=True)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from roundoff.ops.arguments import Keywords
from roundoff.ops.high_precision import STAND_INS
from roundoff.ops.refusals import Reason, Refusal, holds, refuse
from roundoff.ops.table import operators_that
from roundoff.preserve import random_states, set_random_states

#: Read by kernels as fp32 whatever the format of the other tensors; step counts and
#: loss scales are exact in it.
EXACT_ARGUMENTS = frozenset(
    ("state_steps", "found_inf", "grad_scale", "inv_scale", "lr")
)
#: Flags of the half-precision kernels alone; the result is the same.
_OFF = frozenset(("half_to_float", "pin_memory"))
_PARTLY_UNWRITTEN = operators_that("leave a further result unwritten in part")
_LAYOUTS = (
    torch.strided,
    torch.sparse_coo,
    torch.sparse_csr,
    torch.sparse_csc,
    torch.sparse_bsr,
    torch.sparse_bsc,
)
_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)

Result = Tensor | None
#: The declaration and the value of each argument, by name.
Bound = Mapping[str, tuple[Any, Any]]


def run_again(
    func: Any,
    args: Sequence[Any],
    kwargs: Keywords,
    *,
    dtype: torch.dtype | None = torch.float64,
    device: torch.device | str | None = None,
) -> list[Result] | Reason:
    """Return what the call makes when run in ``dtype`` and on ``device``, or why it cannot be.

    Floating-point tensors and ``dtype`` arguments become ``dtype``, complex ones the
    complex format of that width; integers and booleans stay, except where the operator
    makes floating-point values of them alone. ``None`` leaves all formats, or the
    device, as they are. Call it *before* the operator itself when that writes its
    arguments. NaN and Inf are computed like other values. Never raises, whatever the
    operator does.

    Returns:
        The results in the order of ``tensors_made``; None for a tensor that has no
        counterpart (a kernel's workspace).
    """
    if not isinstance(func, OpOverload):
        return Reason("not an operator with a schema")
    target = _Destination(dtype, None if device is None else torch.device(device))
    with outside_of_modes(func):
        before = None if _native(func) else random_states()
        try:
            call = _BoundCall(func, args, kwargs)
            refuse(func, {name: value for name, (_, value) in call.bound.items()})
            results = _run(call, target)
        except Refusal as refusal:
            return refusal.reason
        except Exception as error:  # noqa: BLE001 - a custom operator may raise anything, and training must go on
            return _failure(error, target)
        if before is not None and not _are_equal(before, random_states()):
            return Reason("draws random numbers")
        return results


def tensors_made(
    func: OpOverload, args: Sequence[Any], kwargs: Keywords, result: Any
) -> list[Tensor]:
    """Return the tensors a call makes: the arguments it writes, then the new ones it returns.

    They are in the order of its schema. Running statistics that batch normalisation
    writes without saying so in its schema are not among them.

    >>> import torch
    >>> x = torch.ones(2)
    >>> tensors_made(torch.ops.aten.add_.Tensor, (x, x), {}, x)[0] is x
    True
    >>> len(tensors_made(torch.ops.aten._foreach_mul_.Scalar, ([x, x], 2.0), {}, None))
    2
    """
    results = _results(func, _bind(func, args, kwargs), result)
    return [tensor for tensor in results if tensor is not None]


@dataclass(frozen=True)
class _Destination:
    """Where a call is run again; ``widen``: integers take the format too."""

    dtype: torch.dtype | None
    device: torch.device | None
    widen: bool = False

    def of(self, dtype: torch.dtype) -> torch.dtype:
        if self.dtype is None:
            return dtype
        if dtype.is_complex:
            return self.dtype.to_complex()
        return self.dtype if dtype.is_floating_point or self.widen else dtype

    def is_narrower(self, tensor: Tensor) -> bool:
        """Return True for a floating-point tensor that does not hold the values of the format."""
        if self.dtype is None or not tensor.dtype.is_floating_point:
            return False
        return not holds(tensor.dtype, self.dtype)

    def __str__(self) -> str:
        return " ".join(_name(v) for v in (self.dtype, self.device) if v is not None)


class _BoundCall:
    """A call with its arguments by name."""

    def __init__(self, func: OpOverload, args: Sequence[Any], kwargs: Keywords) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.bound = _bind(func, args, kwargs)

    def with_dtype(self, dtype: torch.dtype) -> _BoundCall:
        return _BoundCall(self.func, self.args, {**self.kwargs, "dtype": dtype})

    @property
    def takes_dtype(self) -> bool:
        return any(a.name == "dtype" for a in self.func._schema.arguments)


@dataclass(frozen=True)
class _Once:
    """One run: its results, whether any format was changed for it, and the tensors given."""

    results: list[Result]
    changed: bool
    tensors: list[Tensor]

    def narrower(self, target: _Destination) -> list[Tensor]:
        """The results in a format that does not hold the target's values."""
        return [t for t in self.results if t is not None and target.is_narrower(t)]

    @property
    def is_unchanged(self) -> bool:
        """It read floating-point tensors, not numbers alone, in the format that was asked for."""
        floating = [t for t in self.tensors if t.is_floating_point() or t.is_complex()]
        return not self.changed and any(tensor.dim() for tensor in floating)


def _run(call: _BoundCall, target: _Destination) -> list[Result]:
    first = _once(call, target)
    if target.dtype is None:
        return first.results
    narrow = first.narrower(target)
    results = first.results
    if narrow and not first.tensors and call.takes_dtype:
        # a factory that would take the default format
        results = _once(call.with_dtype(target.dtype), target).results
    elif narrow:  # integers alone give the default format: 1 / 3, mean, sqrt
        results = _once(call, replace(target, widen=True)).results
    elif target.device is None and first.is_unchanged:
        raise Refusal(f"already runs in {_name(target.dtype)}", is_exact=True)
    fixed = {t.dtype for t in narrow} & {t.dtype for t in results if t is not None}
    for dtype in fixed:
        raise Refusal(f"makes {_name(dtype)} of any input", is_exact=True)
    return results


def _once(call: _BoundCall, target: _Destination) -> _Once:
    """Run a call once on copies."""
    copy = _Copies(target)
    func = call.func
    schema = func._schema.arguments
    positional = [copy.value(a, v) for a, v in zip(schema, call.args, strict=False)]
    named = [a for a in schema if a.name in call.kwargs]
    keywords = {a.name: copy.value(a, call.kwargs[a.name]) for a in named}
    copies = _bind(func, positional, keywords)
    if target.dtype is torch.float64 or copy.moved:
        computed = _stand_in(func, copies)
        if computed is not None:
            return _Once(computed, copy.changed, copy.tensors)
    result = func(*positional, **keywords)
    if not call.bound and not func._schema.returns:
        raise Refusal("returns no tensor")
    results = _results(func, copies, result)
    if func._schema.name.partition("::")[2] in _PARTLY_UNWRITTEN:
        results[1:] = [None] * (len(results) - 1)
    return _Once(results, copy.changed, copy.tensors)


def _stand_in(func: OpOverload, bound: Bound) -> list[Result] | None:
    """What a function written out for fp64 computes; None where torch's own kernel is to run."""
    stand_in = STAND_INS.get(func._schema.name)
    if stand_in is None:
        return None
    schema = func._schema.arguments
    defaults = {a.name: a.default_value for a in schema if a.has_default_value()}
    values = {name: value for name, (_, value) in bound.items()}
    return stand_in(**defaults | values)


def written_out_in_fp64(
    func: OpOverload, args: Sequence[Any], kwargs: Keywords
) -> list[Result] | None:
    """Run a kernel that knows no fp64 in operators that do, and have derivatives.

    None for an operator that is not written out so. Raises ``Refusal`` for a case that is
    not.
    """
    return _stand_in(func, _bind(func, args, kwargs))


class _Copies:
    """Copies of a call's arguments in the target format; a tensor that is given twice
    is copied once.

    Attributes:
        changed: some format was.
        moved: some tensor went to another kind of device.
        tensors: the tensors given.
    """

    def __init__(self, target: _Destination) -> None:
        self.target = target
        self.changed = False
        self.moved = False
        self.tensors: list[Tensor] = []
        self._copies: dict[int, Tensor] = {}

    def value(self, argument: Any, value: Any) -> Any:
        target = self.target
        if isinstance(value, Tensor):
            return self._tensor(argument, value)
        if isinstance(value, (list, tuple)):
            return [self.value(argument, v) for v in value]
        if isinstance(value, torch.dtype):
            self.changed |= target.of(value) is not value
            return target.of(value)
        if isinstance(value, torch.device) and target.device is not None:
            return target.device
        if argument.name in _OFF and value and target.dtype is not None:
            return False
        return value

    def _tensor(self, argument: Any, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._copies:
            self.tensors.append(tensor)
            self._copies[id(tensor)] = self._copied(argument, _readable(tensor))
        return self._copies[id(tensor)]

    def _copied(self, argument: Any, tensor: Tensor) -> Tensor:
        device = self.target.device or tensor.device
        is_floating = tensor.is_floating_point() or tensor.is_complex()
        is_written = _is_written(argument)
        changes = is_floating or (self.target.widen and not is_written)
        dtype = tensor.dtype
        if changes and argument.name not in EXACT_ARGUMENTS:
            dtype = self.target.of(dtype)
        self.changed |= dtype is not tensor.dtype
        self.moved |= device.type != tensor.device.type
        # floating-point tensors are always copied: kernels such as batch normalisation
        # write arguments without declaring it
        return tensor.to(device, dtype, copy=is_floating or is_written)


def _readable(tensor: Tensor) -> Tensor:
    """The tensor as a plain one. Raises ``Refusal`` where its values cannot be read."""
    kind: Any = type(tensor)
    if kind not in _PLAIN:
        if kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
            raise Refusal(f"values inside {kind.__name__} cannot be read")
        tensor = tensor.as_subclass(Tensor)
    if tensor.device.type == "meta":
        raise Refusal("a meta tensor has no values")
    if tensor.is_quantized:
        raise Refusal("runs on quantized tensors")
    if tensor.layout not in _LAYOUTS:
        raise Refusal(f"values in layout {_name(tensor.layout)} cannot be read")
    if tensor._is_zerotensor():
        # autograd's zeros without memory, which kernels must not see
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor


def _bind(func: OpOverload, args: Sequence[Any], kwargs: Keywords) -> Bound:
    schema = func._schema.arguments
    positional = {a.name: (a, v) for a, v in zip(schema, args, strict=False)}
    named = {a.name: (a, kwargs[a.name]) for a in schema if a.name in kwargs}
    return positional | named


def _results(func: OpOverload, bound: Bound, result: Any) -> list[Result]:
    results: list[Result] = []
    for argument, value in bound.values():
        if _is_written(argument):
            results += _tensors(value)
    returns = func._schema.returns
    values = [result] if len(returns) == 1 else result or ()
    for declared, value in zip(returns, values, strict=True):
        if not _is_written(declared):
            results += _tensors(value)
    return results


def _is_written(declared: Any) -> bool:
    return declared.alias_info is not None and declared.alias_info.is_write


def _tensors(value: Any) -> list[Result]:
    if isinstance(value, Tensor):
        return [value]
    tensors: list[Result] = []
    if isinstance(value, (list, tuple)):
        for item in value:
            tensors += _tensors(item)
    return tensors


def _failure(error: Exception, target: _Destination) -> Reason:
    first_line = next(iter(str(error).strip().splitlines()), "")
    text = f"cannot run in {target}: {type(error).__name__}: {first_line}"
    return Reason(text[:300])


@contextmanager
def outside_of_modes(func: OpOverload | None = None) -> Iterator[None]:
    """Suspend autograd, autocast, torch functions and dispatch modes; all are as before afterwards.

    The random states too are kept where the operator ``func`` may draw unannounced.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        stack.enter_context(torch._C._DisableAutocast())
        if func is not None and not _native(func):
            stack.callback(set_random_states, random_states())
        yield


def _native(func: OpOverload) -> bool:
    return func.namespace in ("aten", "prims")


def _are_equal(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Compare random states; a device that was first used in between has drawn."""
    pairs = zip(before, after, strict=False)
    return len(before) == len(after) and all(torch.equal(a, b) for a, b in pairs)


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")
