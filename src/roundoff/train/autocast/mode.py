"""The light mode: names the call that runs, and casts its inputs where a plan asks for it.

A ``TorchFunctionMode`` like ``capture.calls.CallMode``, with the same names, but it keeps nothing beside the module path and
the number of calls, so that it costs a training step a few percent, and ``torch.compile`` can trace it: the decisions are
constants of the compiled code, which guards on the plan's ``key``.
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

from roundoff.ops import Operator, Position, entered, facts, listed, operators_that
from roundoff.train.autocast.rules import Action, Rules

_SKIPPED = (
    operators_that("move values")
    | operators_that("create")
    | operators_that("draw")
    | operators_that("describe tensors")
)
_RULES: dict[int, Rules] = {}  # by key: what compiled code refers to
#: Only the first input: the statistics and weights of batch normalisation stay in fp32, beside inputs of at most fp32.
_FIRST = frozenset({"batch_norm", "instance_norm"})
#: The rows that are looked up, not the whole table.
_RESULT = frozenset({"embedding", "embedding_bag"})


#: Their kernels bring operands of several formats to the widest, element by element: no cast is needed for that.
_PROMOTE = operators_that("mix formats")


#: Python functions of torch's that call one operator (of another name where that is given): not entered, since torch.compile
#: traces the function itself, but not always what is inside it.
_SINGLE = {name: facts(name).calls for name in operators_that("wrap one operator")}


class _Local(threading.local):
    def __init__(self) -> None:
        self.modes: list[Any] = []
        self.keys: list[int] = []


#: The modes of the regions that this thread is in, innermost last, and the keys of their rules.
LOCAL = _Local()


class SiteMode(TorchFunctionMode):
    """Casts the inputs of calls as ``rules`` say."""

    def __init__(self, rules: Rules, model: nn.Module | None) -> None:
        super().__init__()
        self.key, self.device, self.tells = rules.key, rules.device, rules.sites
        self.root = id(model)
        self.position = Position(rules.forwards)
        _RULES[rules.key] = rules

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if (
            not self.tells or LOCAL.keys[-1] != self.key
        ):  # a region inside this one decides
            return func(*args, **kwargs)
        name = operator_of(func)
        if (
            name == "unflatten"
        ):  # torch's method calls super(), which torch.compile cannot trace from here
            return torch.unflatten(*args, **kwargs)
        if name[:1] == ":":
            single = (
                _interpolation(args, **kwargs)
                if name == ":interpolate"
                else _SINGLE.get(name[1:], "")
            )
            if not single or _writes(args, kwargs):
                with self:
                    return _TWINS[name](*args, **kwargs)
            name = single
        if not name or not _is_site(args, kwargs):
            return func(*args, **kwargs)
        inplace = name[:1] == "!"
        operator = name[1:] if inplace else name
        path, number = self.position.next_call(operator)
        action = action_at(self.key, path, operator, number)
        if action is None or inplace:
            return func(*args, **kwargs)
        if torch.compiler.is_compiling():
            return run_in(func, operator, args, kwargs, action, self.device)
        try:
            return run_in(func, operator, args, kwargs, action, self.device)
        except RuntimeError as error:  # no kernel for that format, most likely
            site = f"{path}/{operator}" + (f"#{number}" if number else "")
            error.add_note(
                f"roundoff: {site} was to run in {action}, as the plan of this region says"
            )
            raise


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def operator_of(func: Callable[..., Any]) -> str:
    """The operator's name; ``!name`` if it writes in place, ``:name`` for a function of torch's that is written in Python
    and entered, empty for what is no site."""
    found: str | None = _NAMES.get(func)
    if found is None:
        found = _NAMES[func] = _name(func)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def action_at(key: int, path: str, operator: str, number: int) -> Action:
    """``Rules.action`` of a call, kept."""
    return _action_at(key, path, operator, number)


@functools.lru_cache(maxsize=1 << 16)
def _action_at(key: int, path: str, operator: str, number: int) -> Action:
    return _RULES[key].action(
        f"{path}/{operator}" + (f"#{number}" if number else ""), operator
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def autocast_casts(operator: str, device: str) -> bool:
    """Whether autocast would cast inside this operator: it is on a list, or made of others that may be."""
    return _autocast_casts(operator, device)


@functools.cache
def _autocast_casts(operator: str, device: str) -> bool:
    known = [
        name
        for name in (f"aten::{operator}", f"aten::{operator}.Tensor")
        if name in _operators()
    ]
    single = bool(known) and not any(
        torch._C._dispatch_has_kernel_for_dispatch_key(
            name, "CompositeImplicitAutograd"
        )
        for name in known
    )
    return listed(operator, device) != "follow" or not single


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
    """A call with its inputs cast. A caller's own ``dtype=`` or ``out=`` stands; fp64 is cast back, so that it does not
    spread."""
    if kwargs.get("out") is not None or isinstance(kwargs.get("dtype"), torch.dtype):
        return func(*args, **kwargs)
    if action == "tf32":
        return _in_tf32(func, args, kwargs)
    if operator in _RESULT:
        result = func(*args, **kwargs)
        return (
            cast(result, action)
            if isinstance(action, torch.dtype) and action != torch.float64
            else result
        )
    dtype = (
        action
        if isinstance(action, torch.dtype)
        else widest(args, kwargs, activations=action == "follow")
    )
    if operator in _PROMOTE and widest(args, kwargs, activations=False) == dtype:
        return func(*args, **kwargs)
    wide = False
    if operator in _FIRST:
        dtype = torch.float32 if dtype == torch.float64 else dtype
        args = (cast(args[0], dtype), *args[1:]) if args else args
        kwargs = {k: cast(v, dtype) if k == "input" else v for k, v in kwargs.items()}
    else:
        wide = dtype == torch.float64 and torch.float64 not in _dtypes(
            [*args, *kwargs.values()], False
        )
        args = [
            a if isinstance(a, Tensor) and a.dtype == dtype else cast(a, dtype)
            for a in args
        ]
        kwargs = {k: cast(v, dtype) for k, v in kwargs.items()} if kwargs else kwargs
    if not autocast_casts(operator, device):
        result = func(*args, **kwargs)
    elif torch.compiler.is_compiling():
        with torch.autocast(device, enabled=False):
            result = func(*args, **kwargs)
    else:  # the same, ten times faster
        was = torch.is_autocast_enabled(device)
        torch.set_autocast_enabled(device, False)
        try:
            result = func(*args, **kwargs)
        finally:
            torch.set_autocast_enabled(device, was)
    return cast(result, torch.float32, torch.float64) if wide else result


def _in_tf32(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """A call on CUDA with TF32 allowed, in its backward pass too."""
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
    saved.append(
        (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def _restore_tf32(saved: list[Any], *_: Any) -> None:
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = saved.pop()


def cast(value: Any, dtype: torch.dtype, wide: torch.dtype | None = None) -> Any:
    """The floating-point tensors of ``value`` (in tuples and lists) as ``dtype``. fp64 tensors stay, as under autocast,
    unless ``dtype`` is fp64 or they are the ``wide`` that is asked for."""
    if isinstance(value, Tensor):
        if (
            value.dtype in (torch.float16, torch.bfloat16, torch.float32)
            or value.dtype == wide
        ):
            return value.to(dtype)
        return value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[cast(v, dtype, wide) for v in value])
    if isinstance(value, list | tuple):
        return type(value)([cast(v, dtype, wide) for v in value])
    return value


def widest(args: Any, kwargs: Any, *, activations: bool) -> torch.dtype:
    """The widest floating-point dtype of the inputs; of those that are no parameters, if there are any."""
    found = _dtypes([*args, *kwargs.values()], activations) or _dtypes(
        [*args, *kwargs.values()], False
    )
    if torch.float32 in found or torch.float64 in found or len(set(found)) > 1:
        return torch.float32
    return found[0] if found else torch.float32


def _dtypes(values: Any, activations: bool) -> list[torch.dtype]:
    found: list[torch.dtype] = []
    for value in values:
        if isinstance(value, Tensor):
            if (
                value.is_floating_point()
                and not (activations and isinstance(value, nn.Parameter))
                and value.ndim
            ):
                found.append(value.dtype)
        elif isinstance(value, list | tuple):
            found += _dtypes(value, activations)
    return found


def _is_site(args: Any, kwargs: Any) -> bool:
    """As ``CallMode``: a call on floating-point tensors, none of them complex, sparse or inside ``vmap``."""
    if (
        not torch.compiler.is_compiling()
        and torch._C._functorch.peek_interpreter_stack() is not None
    ):
        return False
    found = False
    for value in args:
        if isinstance(value, Tensor):
            if value.is_complex() or value.layout != torch.strided:
                return False
            found = found or value.is_floating_point()
        elif isinstance(value, list | tuple) and value and isinstance(value[0], Tensor):
            found = found or value[0].is_floating_point()
    if not found:
        for value in kwargs.values():
            found = found or (isinstance(value, Tensor) and value.is_floating_point())
    return found


def _interpolation(
    args: Any, mode: str = "nearest", antialias: bool = False, **_: Any
) -> str:
    """The operator that ``F.interpolate`` calls, as far as it is one of the plain ones."""
    mode = args[3] if len(args) > 3 else mode
    if mode in ("area", "nearest-exact") or antialias or not args:
        return ""
    return f"upsample_{mode}{args[0].ndim - 2}d"


def _writes(args: Any, kwargs: Any) -> bool:
    """Whether a function was asked to work in place, as far as its arguments tell."""
    return bool(kwargs.get("inplace", False)) or any(value is True for value in args)


def _name(func: Callable[..., Any]) -> str:
    if isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return ""  # what compiled code is made of, cast already
    twin = entered(func)
    if twin is not None and func.__name__ in _SKIPPED | {
        "dropout1d",
        "dropout2d",
        "dropout3d",
    }:
        return ""
    if twin is not None:
        name = f":{func.__name__}"
        _TWINS[name] = twin
        return name
    operator = Operator.of(func)
    if operator.name == "unflatten":
        return operator.name
    if operator.name in _SKIPPED or getattr(func, "__name__", "") == "__get__":
        return ""
    return f"!{operator.name}" if operator.inplace else operator.name


_TWINS: dict[str, Callable[..., Any]] = {}
_NAMES: dict[Callable[..., Any], str] = {}
