"""An operator call once more, in another format or on another device: the fp64 shadow of a capture, and replay.

``run_again`` takes a call as ``__torch_dispatch__`` sees it, below autograd, and runs it on copies: nothing the caller
holds is written, and random states, grad mode, autocast and dispatch modes are as before. ``made`` lists what a call
makes; ``own.own_error`` measures the distance between the two.

The own error of an operator is that of its result on the inputs it received. Numbers in the program (``x * 0.1``) are
taken as written, so that rounding them to the tensor's format counts. A cast to a narrower format has the cast's
rounding as its own error: the same operator in fp64 hands its input on.

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
Reason(text='a view rounds nothing')
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

from roundoff.ops.high_precision import STAND_INS
from roundoff.ops.refusals import Reason, Refusal, holds, refuse

#: Read by kernels as fp32 whatever the format of the other tensors; step counts and loss scales are exact in it.
EXACT_ARGUMENTS = frozenset("state_steps found_inf grad_scale inv_scale lr".split())
#: A flag of the half-precision kernels alone; the result is the same.
_OFF = frozenset("half_to_float pin_memory".split())
#: Results that a kernel leaves uninitialised in part.
_PARTIAL = {("aten::_ctc_loss", 1)}
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


def run_again(
    func: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = torch.float64,
    device: torch.device | str | None = None,
) -> list[Result] | Reason:
    """What the call makes (in the order of ``made``) when run in ``dtype`` and on ``device``, or why it cannot be.

    Floating-point tensors and ``dtype`` arguments become ``dtype``, complex ones the complex format of that width;
    integers and booleans stay, except where the operator makes floating-point values of them alone. ``None`` leaves
    all formats, or the device, as they are. Call it *before* the operator itself when that writes its arguments. An
    entry None is a tensor that has no counterpart (a kernel's workspace). NaN and Inf are computed like other values.
    Never raises, whatever the operator does.
    """
    if not isinstance(func, OpOverload):
        return Reason("not an operator with a schema")
    with apart(func):
        before = None if _native(func) else _random_state()
        try:
            bound = _bind(func, args, kwargs)
            refuse(func, {name: value for name, (_, value) in bound.items()})
            results = _run(
                func,
                bound,
                args,
                kwargs,
                _Target(dtype, None if device is None else torch.device(device)),
            )
        except Refusal as refusal:
            return Reason(str(refusal))
        except Exception as error:  # noqa: BLE001 - a custom operator may raise anything, and training must go on
            where = " ".join(_name(v) for v in (dtype, device) if v is not None)
            first = next(iter(str(error).strip().splitlines()), "")
            return Reason(
                f"cannot run in {where}: {type(error).__name__}: {first}"[:300]
            )
        if before is not None and not torch.equal(before, _random_state()):
            return Reason("draws random numbers")
        return results


def made(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
) -> list[Tensor]:
    """The tensors a call makes: the arguments it writes, in the order of its schema, then the new ones it returns.

    Running statistics that batch normalisation writes without saying so in its schema are not among them.

    >>> import torch
    >>> x = torch.ones(2)
    >>> made(torch.ops.aten.add_.Tensor, (x, x), {}, x)[0] is x
    True
    >>> len(made(torch.ops.aten._foreach_mul_.Scalar, ([x, x], 2.0), {}, None))
    2
    """
    return [t for t in _made(func, _bind(func, args, kwargs), result) if t is not None]


@dataclass(frozen=True)
class _Target:
    dtype: torch.dtype | None
    device: torch.device | None
    widen: bool = False  # integers too

    def of(self, dtype: torch.dtype) -> torch.dtype:
        if self.dtype is None:
            return dtype
        if dtype.is_complex:
            return self.dtype.to_complex()
        return self.dtype if dtype.is_floating_point or self.widen else dtype


def _run(
    func: OpOverload,
    bound: Mapping[str, tuple[Any, Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: _Target,
) -> list[Result]:
    results, changed, tensors = _once(func, bound, args, kwargs, target)
    short = [
        t
        for t in results
        if t is not None
        and target.dtype is not None
        and t.dtype.is_floating_point
        and not holds(t.dtype, target.dtype)
    ]
    if short and not tensors and "dtype" in (a.name for a in func._schema.arguments):
        # a factory that would take the default format
        results, *_ = _once(
            func, bound, args, {**kwargs, "dtype": target.dtype}, target
        )
    elif short:  # integers alone give the default format: 1 / 3, mean, sqrt
        results, *_ = _once(func, bound, args, kwargs, replace(target, widen=True))
    elif target.device is None and target.dtype is not None and not changed:
        floating = [t for t in tensors if t.is_floating_point() or t.is_complex()]
        if floating and any(t.dim() for t in floating):
            raise Refusal(f"already runs in {_name(target.dtype)}")
    if target.dtype is not None:
        for name in {t.dtype for t in short} & {
            t.dtype for t in results if t is not None
        }:
            raise Refusal(f"makes {_name(name)} of any input")
    return results


def _once(
    func: OpOverload,
    bound: Mapping[str, tuple[Any, Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    target: _Target,
) -> tuple[list[Result], bool, list[Tensor]]:
    """Results of one run on copies, whether any format was changed for it, and the tensors given."""
    copy = _Copies(target)
    schema = func._schema.arguments
    positional = [copy.value(a, v) for a, v in zip(schema, args, strict=False)]
    by_name = {
        a.name: copy.value(a, kwargs[a.name]) for a in schema if a.name in kwargs
    }
    copies = {a.name: (a, v) for a, v in zip(schema, positional, strict=False)}
    copies |= {a.name: (a, by_name[a.name]) for a in schema if a.name in by_name}
    stand_in = STAND_INS.get(func._schema.name)
    if stand_in is not None and (target.dtype is torch.float64 or copy.moved):
        given = {a.name: a.default_value for a in schema if a.has_default_value()}
        results = stand_in(
            **given | {name: value for name, (_, value) in copies.items()}
        )
        if results is not None:
            return results, copy.changed, copy.tensors
    result = func(*positional, **by_name)
    if not bound and not func._schema.returns:
        raise Refusal("returns no tensor")
    results = _made(func, copies, result)
    results = [
        None if (func._schema.name, place) in _PARTIAL else t
        for place, t in enumerate(results)
    ]
    return results, copy.changed, copy.tensors


class _Copies:
    """Copies of a call's arguments in the target format; a tensor that is given twice is copied once."""

    def __init__(self, target: _Target) -> None:
        self.target = target
        self.changed = False  # some format
        self.moved = False  # to another kind of device
        self.tensors: list[Tensor] = []
        self._done: dict[int, Tensor] = {}

    def value(self, argument: Any, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(argument, value)
        if isinstance(value, (list, tuple)):
            return [self.value(argument, v) for v in value]
        if isinstance(value, torch.dtype):
            self.changed |= self.target.of(value) is not value
            return self.target.of(value)
        if isinstance(value, torch.device) and self.target.device is not None:
            return self.target.device
        if argument.name in _OFF and value and self.target.dtype is not None:
            return False
        return value

    def _tensor(self, argument: Any, tensor: Tensor) -> Tensor:
        found = self._done.get(id(tensor))
        if found is None:
            self.tensors.append(tensor)
            plain = _readable(tensor)
            floating = plain.is_floating_point() or plain.is_complex()
            keep = argument.name in EXACT_ARGUMENTS or not (
                floating or (self.target.widen and not _written(argument))
            )
            dtype = plain.dtype if keep else self.target.of(plain.dtype)
            self.changed |= dtype is not plain.dtype
            self.moved |= (
                self.target.device is not None
                and self.target.device.type != plain.device.type
            )
            # floating-point tensors are always copied: kernels such as batch normalisation write undeclared arguments
            copy = floating or _written(argument)
            found = self._done[id(tensor)] = plain.to(
                self.target.device or plain.device, dtype, copy=copy
            )
        return found


def _readable(tensor: Tensor) -> Tensor:
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
    if (
        tensor._is_zerotensor()
    ):  # autograd's zeros without memory, which kernels must not see
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor


def _bind(
    func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    schema = func._schema.arguments
    bound = {a.name: (a, v) for a, v in zip(schema, args, strict=False)}
    return bound | {a.name: (a, kwargs[a.name]) for a in schema if a.name in kwargs}


def _made(
    func: OpOverload, bound: Mapping[str, tuple[Any, Any]], result: Any
) -> list[Result]:
    found: list[Result] = []
    for argument, value in bound.values():
        if _written(argument):
            found += _tensors(value)
    returns = func._schema.returns
    for declared, value in zip(
        returns, [result] if len(returns) == 1 else result or (), strict=True
    ):
        if not _written(declared):
            found += _tensors(value)
    return found


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _tensors(value: Any) -> list[Result]:
    if isinstance(value, Tensor):
        return [value]
    return (
        [t for v in value for t in _tensors(v)]
        if isinstance(value, (list, tuple))
        else []
    )


@contextmanager
def apart(func: OpOverload | None = None) -> Iterator[None]:
    """No autograd, autocast, torch function or dispatch mode inside, all of them as before afterwards; the random
    states too, where the operator may draw unannounced."""
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch._C._AutoDispatchBelowAutograd())
        stack.enter_context(torch._C._DisableAutocast())
        if func is not None and not _native(func):
            in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            devices = range(torch.cuda.device_count()) if in_use else []
            stack.enter_context(torch.random.fork_rng(devices))
        yield


def _native(func: OpOverload) -> bool:
    return func.namespace in ("aten", "prims")


def _random_state() -> Tensor:
    return torch.get_rng_state()


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")
