"""The light mode: names the call that runs, and casts its inputs where a plan asks for it.

A ``TorchFunctionMode`` like ``ops.CallMode``, with the same names, but it keeps nothing
beside the position in the forward pass, so that it costs a training step a few percent, and
``torch.compile`` can trace it: the decisions are constants of the compiled code, which
guards on the plan's ``key``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.overrides
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from roundoff.ops import (
    Operator,
    Position,
    autocast_class,
    facts,
    function_body,
    is_floating,
    operators_that,
)
from roundoff.plan import FOLLOW
from roundoff.train.autocast.rules import Action, Rules

_NO_SITES = (
    operators_that("move values")
    | operators_that("create")
    | operators_that("draw")
    | operators_that("describe tensors")
)
#: Functions written in Python that are no sites.
_NOT_ENTERED = _NO_SITES | {"dropout1d", "dropout2d", "dropout3d"}
_RULES: dict[int, Rules] = {}  # by key: what compiled code refers to
#: Only the first input: the statistics and weights of batch normalisation stay in fp32,
#: beside inputs of at most fp32.
_CAST_FIRST = frozenset({"batch_norm", "instance_norm"})
#: The rows that are looked up, not the whole table.
_CAST_RESULT = frozenset({"embedding", "embedding_bag"})
#: Their kernels bring operands of several formats to the widest, element by element: no
#: cast is needed for that.
_MIXING = operators_that("mix formats")
#: Python functions of torch's that call one operator (of another name where that is
#: given): not entered, since torch.compile traces the function itself, but not always
#: what is inside it.
_SINGLE = {name: facts(name).calls for name in operators_that("wrap one operator")}
#: The formats that autocast casts from.
_CASTABLE = (torch.float16, torch.bfloat16, torch.float32)


class _ActiveModes(threading.local):
    def __init__(self) -> None:
        self.modes: list[Any] = []
        self.keys: list[int] = []


#: The modes of the regions that this thread is in, innermost last, and the keys of
#: their rules.
LOCAL = _ActiveModes()


class SiteMode(TorchFunctionMode):
    """Casts the inputs of calls as ``rules`` say."""

    def __init__(self, rules: Rules, model: nn.Module | None) -> None:
        super().__init__()
        self.key = rules.key
        self.device = rules.device
        self.has_sites = rules.sites
        self.root = id(model)
        self.position = Position(rules.forwards)
        _RULES[rules.key] = rules

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        # a region inside this one decides
        if not self.has_sites or LOCAL.keys[-1] != self.key:
            return func(*args, **kwargs)
        name = operator_of(func)
        # torch's method calls super(), which torch.compile cannot trace from here
        if name == "unflatten":
            return torch.unflatten(*args, **kwargs)
        if name[:1] == ":":
            single = _single_operator(name[1:], args, kwargs)
            if not single:
                with self:
                    return _TWINS[name](*args, **kwargs)
            name = single
        if not name or not _is_site(args, kwargs):
            return func(*args, **kwargs)
        is_inplace = name[:1] == "!"
        if is_inplace:
            name = name[1:]
        path, number = self.position.next_call(name)
        action = action_at(self.key, path, name, number)
        if action is None or is_inplace:
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():
            return run_in(func, name, args, kwargs, action, self.device)
        try:
            return run_in(func, name, args, kwargs, action, self.device)
        except RuntimeError as error:  # no kernel for that format, most likely
            error.add_note(
                f"roundoff: {_site(path, name, number)} was to run in {action}, as the plan of this region says"
            )
            raise


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def operator_of(func: Callable[..., Any]) -> str:
    """Return the operator's name.

    ``!name`` if it writes in place, ``:name`` for a function of torch's that is written in
    Python and entered, empty for what is no site.
    """
    name: str | None = _NAMES.get(func)
    if name is None:
        name = _NAMES[func] = _name(func)
    return name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def action_at(key: int, path: str, operator: str, number: int) -> Action:
    """Return ``Rules.action`` of a call."""
    return _action_at(key, path, operator, number)


@functools.lru_cache(maxsize=1 << 16)
def _action_at(key: int, path: str, operator: str, number: int) -> Action:
    return _RULES[key].action(_site(path, operator, number), operator)


def _site(path: str, operator: str, number: int) -> str:
    name = f"{path}/{operator}"
    return f"{name}#{number}" if number else name


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def autocast_casts(operator: str, device: str) -> bool:
    """Return True if autocast would cast inside this operator: it is on a list, or made
    of others that may be.
    """
    return _autocast_casts(operator, device)


@functools.cache
def _autocast_casts(operator: str, device: str) -> bool:
    if autocast_class(operator, device) != "follow":
        return True
    names = [
        name
        for name in (f"aten::{operator}", f"aten::{operator}.Tensor")
        if name in _operators()
    ]
    if not names:
        return True
    composite = "CompositeImplicitAutograd"
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(name, composite) for name in names)


@functools.cache
def _operators() -> frozenset[str]:
    return frozenset(torch._C._dispatch_get_all_op_names())


def run_in(
    func: Callable[..., Any],
    operator: str,
    args: Any,
    kwargs: Any,
    action: Action,
    device: str,
) -> Any:
    """Run a call with its inputs cast.

    A caller's own ``dtype=`` or ``out=`` stands; fp64 is cast back, so that it does not
    spread.
    """
    if kwargs.get("out") is not None or isinstance(kwargs.get("dtype"), torch.dtype):
        return func(*args, **kwargs)
    if action == "tf32":
        return _in_tf32(func, args, kwargs)
    if operator in _CAST_RESULT:
        return _cast_rows(func(*args, **kwargs), action)
    dtype = target_dtype(action, args, kwargs)
    if operator in _MIXING and widest(args, kwargs, activations=False) == dtype:
        return func(*args, **kwargs)
    if operator in _CAST_FIRST:
        args, kwargs = _cast_first(args, kwargs, dtype)
        return _without_autocast(func, operator, args, kwargs, device)
    inputs = [*args, *kwargs.values()]
    is_widened = dtype == torch.float64 and torch.float64 not in _dtypes(inputs, False)
    args = [
        a if isinstance(a, Tensor) and a.dtype == dtype else cast(a, dtype)
        for a in args
    ]
    if kwargs:
        kwargs = {k: cast(v, dtype) for k, v in kwargs.items()}
    result = _without_autocast(func, operator, args, kwargs, device)
    return cast(result, torch.float32, torch.float64) if is_widened else result


def target_dtype(action: Action, args: Any, kwargs: Any) -> torch.dtype:
    """Return the dtype that an action casts inputs to; that of "follow" and "promote"
    depends on them.
    """
    if isinstance(action, torch.dtype):
        return action
    return widest(args, kwargs, activations=action == FOLLOW)


def _cast_rows(rows: Any, action: Action) -> Any:
    if isinstance(action, torch.dtype) and action != torch.float64:
        return cast(rows, action)
    return rows


def _cast_first(args: Any, kwargs: Any, dtype: torch.dtype) -> tuple[Any, Any]:
    if dtype == torch.float64:
        dtype = torch.float32
    if args:
        args = (cast(args[0], dtype), *args[1:])
    kwargs = {k: cast(v, dtype) if k == "input" else v for k, v in kwargs.items()}
    return args, kwargs


def _without_autocast(
    func: Callable[..., Any], operator: str, args: Any, kwargs: Any, device: str
) -> Any:
    """Run a call so that autocast casts nothing in it."""
    if not autocast_casts(operator, device):
        return func(*args, **kwargs)
    if torch.compiler.is_compiling():
        with torch.autocast(device, enabled=False):
            return func(*args, **kwargs)
    # the same, ten times faster
    was_enabled = torch.is_autocast_enabled(device)
    torch.set_autocast_enabled(device, False)
    try:
        return func(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(device, was_enabled)


def _in_tf32(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run a call on CUDA with TF32 allowed, in its backward pass too."""
    saved: list[Any] = []
    allow = functools.partial(_allow_tf32, saved)
    allow()
    try:
        with torch.autocast("cuda", enabled=False):
            result = func(
                *[cast(a, torch.float32) for a in args],
                **{k: cast(v, torch.float32) for k, v in kwargs.items()},
            )
    finally:
        _restore_tf32(saved)
    if isinstance(result, Tensor) and result.grad_fn is not None:
        result.grad_fn.register_prehook(allow)
        result.grad_fn.register_hook(functools.partial(_restore_tf32, saved))
    return result


def _allow_tf32(saved: list[Any], *_: Any) -> None:
    matmul = torch.backends.cuda.matmul
    cudnn = torch.backends.cudnn
    saved.append((matmul.allow_tf32, cudnn.allow_tf32))
    matmul.allow_tf32 = cudnn.allow_tf32 = True


def _restore_tf32(saved: list[Any], *_: Any) -> None:
    in_matmul, in_cudnn = saved.pop()
    torch.backends.cuda.matmul.allow_tf32 = in_matmul
    torch.backends.cudnn.allow_tf32 = in_cudnn


def cast(value: Any, dtype: torch.dtype, wide: torch.dtype | None = None) -> Any:
    """Cast the floating-point tensors of ``value`` (in tuples and lists) to ``dtype``.

    fp64 tensors stay, as under autocast, unless they are the ``wide`` that is asked for.
    """
    if isinstance(value, Tensor):
        is_cast = value.dtype in _CASTABLE or value.dtype == wide
        return value.to(dtype) if is_cast else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[cast(v, dtype, wide) for v in value])
    if isinstance(value, list | tuple):
        return type(value)([cast(v, dtype, wide) for v in value])
    return value


def widest(args: Any, kwargs: Any, *, activations: bool) -> torch.dtype:
    """Return the widest floating-point dtype of the inputs, at most fp32.

    With ``activations`` of those that are no parameters, if there are any.
    """
    inputs = [*args, *kwargs.values()]
    dtypes = _dtypes(inputs, activations) or _dtypes(inputs, False)
    if torch.float32 in dtypes or torch.float64 in dtypes or len(set(dtypes)) > 1:
        return torch.float32
    return dtypes[0] if dtypes else torch.float32


def _dtypes(values: Any, activations: bool) -> list[torch.dtype]:
    """Return the dtypes of the floating-point tensors in nested lists; numbers (0-d
    tensors) do not count.
    """
    dtypes: list[torch.dtype] = []
    for value in values:
        if isinstance(value, Tensor):
            is_left_out = activations and isinstance(value, nn.Parameter)
            if value.is_floating_point() and value.ndim and not is_left_out:
                dtypes.append(value.dtype)
        elif isinstance(value, list | tuple):
            dtypes += _dtypes(value, activations)
    return dtypes


def _is_site(args: Any, kwargs: Any) -> bool:
    """Return True for a call on floating-point tensors, none of them complex, sparse or
    inside ``vmap``, as ``CallMode``.
    """
    if not torch.compiler.is_compiling() and _is_in_functorch():
        return False
    has_float = False
    for value in args:
        if isinstance(value, Tensor):
            if value.is_complex() or value.layout != torch.strided:
                return False
            has_float = has_float or value.is_floating_point()
        elif isinstance(value, list | tuple) and value:
            has_float = has_float or is_floating(value[0])
    return has_float or any(is_floating(value) for value in kwargs.values())


def _is_in_functorch() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def _single_operator(name: str, args: Any, kwargs: Any) -> str:
    """Return the one operator that a function written in Python calls; empty where it
    has to be entered.
    """
    if _writes(args, kwargs):
        return ""
    if name == "interpolate":
        return _interpolation(args, **kwargs)
    return _SINGLE.get(name, "")


def _interpolation(
    args: Any, mode: str = "nearest", antialias: bool = False, **_: Any
) -> str:
    """Return the operator that ``F.interpolate`` calls, as far as it is one of the plain ones."""
    mode = args[3] if len(args) > 3 else mode
    if mode in ("area", "nearest-exact") or antialias or not args:
        return ""
    return f"upsample_{mode}{args[0].ndim - 2}d"


def _writes(args: Any, kwargs: Any) -> bool:
    """Return True if a function was asked to work in place, as far as its arguments tell."""
    return bool(kwargs.get("inplace", False)) or any(value is True for value in args)


def _name(func: Callable[..., Any]) -> str:
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return ""  # what compiled code is made of, cast already
    twin = function_body(func)
    if twin is not None:
        if func.__name__ in _NOT_ENTERED:
            return ""
        name = f":{func.__name__}"
        _TWINS[name] = twin
        return name
    operator = Operator.of(func)
    if operator.name == "unflatten":
        return operator.name
    if operator.name in _NO_SITES or getattr(func, "__name__", "") == "__get__":
        return ""
    return f"!{operator.name}" if operator.inplace else operator.name


_TWINS: dict[str, Callable[..., Any]] = {}
_NAMES: dict[Callable[..., Any], str] = {}
