"""See every torch-level call of a model: its site, its operands and where their values come from.

``CallMode`` is a ``TorchFunctionMode``: it stands above autograd, so it sees
``F.linear``, ``x + y`` and ``x.softmax(-1)`` as the user's code calls them, in
functional code as well as inside modules, and gradients reach what its handler returns.
Functions of ``torch.nn.functional`` that are written in Python are entered, so that
``F.multi_head_attention_forward`` shows the operators it is made of, and ``F.softmax``,
``torch.softmax`` and ``Tensor.softmax`` are one operator.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.ops.operators import Operator, einsum_axes
from roundoff.ops.position import Place, Position
from roundoff.ops.table import OperandSpec, operators_that
from roundoff.ops.uncompiled import uncompiled
from roundoff.site import Site
from roundoff.unforeseen import note

#: Why a call that reads floating-point numbers and writes none is no site.
INTEGER_RESULT = "integer or boolean result"

_MOVES = operators_that("move values")
_CREATES = operators_that("create")
_EXACT = operators_that("create exactly")
_INVENTS = _CREATES - _EXACT
_DRAWS = operators_that("draw")
_DROPS_OUT = operators_that("drop out")


@dataclass(frozen=True)
class Operand:
    """One floating-point tensor argument of a call.

    Attributes:
        leaf: its place among the call's ``leaves``.
        role: ``activation``, ``weight`` or ``bias``.
        reduce: the axis that it is contracted over.
        channel: the axis that keeps a scale of its own.
        sources: the sites or parameters that its values come from (through views and
            copies); empty for model inputs and constants; ``""`` says that such values
            are mixed in.
    """

    leaf: int
    role: str
    reduce: int
    channel: int
    sources: frozenset[str]


#: Positional and keyword arguments.
Arguments = tuple[list[Any], dict[str, Any]]


@dataclass
class Call:
    """One operator call, which can run again on other values of its arguments.

    Attributes:
        site: its name.
        operator: what was called.
        func: the function of torch.
        leaves: the tensors and values in its arguments, in order.
        layout: for each argument its position or name, its nesting, and how many leaves
            it has.
        operands: the tensors that a format may round.
        autocast: (device type, dtype) of the autocast region that the call was made in.
    """

    site: Site
    operator: Operator
    func: Callable[..., Any]
    leaves: list[Any]
    layout: list[tuple[str | int, TreeSpec, int]]
    operands: list[Operand]
    autocast: tuple[str, torch.dtype] | None = None

    @property
    def kind(self) -> str:
        """See ``Operator.kind``."""
        return self.operator.kind

    def arguments(self, leaves: list[Any] | None = None) -> Arguments:
        """Return the arguments with ``leaves`` in their places (None: the call's own)."""
        leaves = self.leaves if leaves is None else leaves
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        start = 0
        for key, spec, count in self.layout:
            is_leaf = spec is _LEAF
            value = (
                leaves[start]
                if is_leaf
                else tree_unflatten(leaves[start : start + count], spec)
            )
            start += count
            if isinstance(key, int):
                args.append(value)
            else:
                kwargs[key] = value
        return args, kwargs

    def run(self, leaves: list[Any] | None = None) -> Any:
        """Run the operator on ``leaves`` (None: the call's own, which an in-place
        operator writes).
        """
        args, kwargs = self.arguments(leaves)
        if self.autocast is None or torch.is_autocast_enabled(self.autocast[0]):
            return self.func(*args, **kwargs)
        with torch.autocast(*self.autocast):  # run again, from outside that region
            return self.func(*args, **kwargs)

    def again(self, leaves: list[Any]) -> Any:
        """Run the operator on ``leaves``, writing into none of them."""
        if self.operator.inplace and isinstance(leaves[0], Tensor):
            leaves = [leaves[0].clone(), *leaves[1:]]
        return self.run(leaves)


class Handler(Protocol):
    """What ``CallMode`` asks at each call."""

    def call(self, call: Call) -> Any:
        """Run the call, or a changed version of it, and return the result."""

    def before_write(self, tensor: Tensor) -> None:
        """Take note that ``tensor`` is about to be written in place."""


@dataclass
class Excluded:
    """Calls of one operator that did not become sites, for one reason."""

    operator: str
    reason: str
    count: int = 0
    examples: list[str] = field(default_factory=list)


class CallMode(TorchFunctionMode):
    """Name every call and hand it to ``handler``; made by ``watch``.

    Attributes:
        position: where the forward pass is.
        scripted: the paths of TorchScript modules, whose operators are hidden.
        calls: how many calls were sites since ``begin``.
        excluded: the calls that were not, by operator and reason.
    """

    def __init__(self, model: nn.Module, handler: Handler) -> None:
        super().__init__()
        self.handler = handler
        self.position = Position()
        self.scripted: list[str] = []
        self.calls = 0
        self.excluded: dict[tuple[str, str], Excluded] = {}
        # remove_duplicate=True: a tied parameter has one name, a shared module one path
        self._params = {id(p): name for name, p in model.named_parameters()}
        self._param_names = frozenset(self._params.values())
        self._sources: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def begin(self) -> None:
        """Start a new forward pass: call indices start again."""
        self._sources = WeakIdKeyDictionary()
        self.calls = 0
        for path in self.scripted:
            self.position.go_to(Place((path,)))
            self._exclude("forward", "TorchScript hides its operators")
        self.position.begin()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        body = function_body(func)
        if body is not None:
            with self:
                return body(*args, **kwargs)
        operator = Operator.of(func)
        if operator.name == "shape" or not _has_float(args, kwargs):
            return self._run_without_floats(func, operator, args, kwargs)
        reason = _no_site(operator, args, kwargs)
        if reason is not None:
            if operator.inplace and isinstance(args[0], Tensor):
                self.handler.before_write(args[0])
            result = func(*args, **kwargs)
            self.passed_on(func, operator, reason, result, args, kwargs)
            return result
        return self._run_site(func, operator, args, kwargs)

    def _run_without_floats(
        self, func: Callable[..., Any], operator: Operator, args: Any, kwargs: Any
    ) -> Any:
        result = func(*args, **kwargs)
        if operator.name in _EXACT and is_floating(result):
            self._sources[result] = frozenset()
        reads_complex = any(map(_is_complex, args))
        if reads_complex and isinstance(result, Tensor) and operator.name not in _MOVES:
            self._exclude(operator.name, "complex numbers")
        return result

    def _run_site(
        self, func: Callable[..., Any], operator: Operator, args: Any, kwargs: Any
    ) -> Any:
        call = self._call(func, operator, args, kwargs)
        if operator.inplace:
            self.handler.before_write(args[0])
        elif isinstance(kwargs.get("out"), Tensor):
            self.handler.before_write(kwargs["out"])
        try:
            result = _written(kwargs.get("out"), self.handler.call(call))
        except Exception as error:
            note(error, str(call.site))
            raise
        outputs = float_tensors(result)
        if outputs:
            self.calls += 1
            for tensor in outputs:
                self._made(tensor, frozenset((str(call.site),)), operator.inplace)
            return result
        tensors = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)]
        if any(map(_is_complex, tensors)):
            self._exclude(operator.name, "complex numbers")
        elif tensors:
            self._exclude(operator.name, INTEGER_RESULT)
        return result

    def _call(
        self, func: Callable[..., Any], operator: Operator, args: Any, kwargs: Any
    ) -> Call:
        module, number = self.position.next_call(operator.name)
        specs = _operand_specs(operator, args)
        leaves: list[Any] = []
        layout: list[tuple[str | int, TreeSpec, int]] = []
        operands: list[Operand] = []
        for key, value in _inputs(args, kwargs):
            flat, tree = _flattened(value)
            layout.append((key, tree, len(flat)))
            for position, tensor in enumerate(flat):
                if is_floating(tensor):
                    argument = _Argument(key, position, tensor, len(leaves))
                    spec = specs.get(key)
                    operand = self._operand(operator, argument, spec, args)
                    if operand is not None:
                        operands.append(operand)
                leaves.append(tensor)
        site = Site(module, operator.name, number)
        return Call(site, operator, func, leaves, layout, operands, _autocast(leaves))

    def _operand(
        self,
        operator: Operator,
        argument: _Argument,
        spec: OperandSpec | None,
        args: Any,
    ) -> Operand | None:
        """The operand that a tensor is; None for one that is not rounded."""
        sources = self._sources_of(argument.tensor)
        if sources == {""}:
            sources = frozenset()
        is_weight = bool(sources) and sources <= self._param_names
        role = "weight" if is_weight else "activation"
        if operator.name == "einsum":
            reduce, channel = einsum_axes(args[0], argument.factor)
            return Operand(argument.leaf, role, reduce, channel, sources)
        if spec is not None:
            if spec.bias or (is_weight and _is_listed_bias(spec, argument.tensor)):
                role = "bias"
            return Operand(argument.leaf, role, spec.reduce, spec.channel, sources)
        if operator.spec is not None or _is_statistic(operator, argument):
            return None
        if argument.tensor.ndim == 0 and not is_weight:
            return None  # a scalar factor
        return Operand(argument.leaf, role, -1, 0, sources)

    def _sources_of(self, value: Any) -> frozenset[str]:
        if isinstance(value, Tensor):
            return self._sources_of_tensor(value)
        sources: frozenset[str] = frozenset()
        for tensor in _tensors_in(value):
            sources |= self._sources_of_tensor(tensor)
        return sources

    def _sources_of_tensor(self, tensor: Tensor) -> frozenset[str]:
        name = self._params.get(id(tensor))
        if name:
            return frozenset((name,))
        sources: frozenset[str] | None = self._sources.get(tensor)  # type: ignore[no-untyped-call]
        if sources is not None:
            return sources
        return _UNKNOWN if is_floating(tensor) and tensor.ndim else _NOWHERE

    def _made(self, tensor: Tensor, sources: frozenset[str], inplace: bool) -> None:
        if id(tensor) not in self._params:
            self._sources[tensor] = sources
        base = tensor._base
        if inplace and base is not None and id(base) not in self._params:
            # written through a view
            self._sources[base] = self._sources_of(base) | sources

    def passed_on(
        self,
        func: Callable[..., Any],  # noqa: ARG002 (for subclasses)
        operator: Operator,
        reason: str,
        result: Any,
        args: Any,
        kwargs: Any,
    ) -> None:
        """Note where a result's values come from; ``func`` has run and is no site, for
        ``reason``.
        """
        sources: frozenset[str] = frozenset()
        if reason == "random" or operator.name in _INVENTS:
            sources = frozenset(("",))
        elif operator.name not in _EXACT:
            sources = self._sources_of((args, kwargs))
        outputs = float_tensors(result)
        for tensor in outputs:
            self._made(tensor, sources, operator.inplace)
        if operator.name == "setitem":
            self._made(args[0], sources, True)
        if outputs or operator.name == "setitem":
            self._exclude(operator.name, reason)

    def _exclude(self, operator: str, reason: str) -> None:
        row = self.excluded.setdefault((operator, reason), Excluded(operator, reason))
        row.count += 1
        where = f"{self.position.module}/{operator}"
        if where not in row.examples and len(row.examples) < 3:
            row.examples.append(where)


#: The sources of a tensor that no call made, and of one that comes from no values.
_UNKNOWN = frozenset(("",))
_NOWHERE: frozenset[str] = frozenset()

#: Arguments without a tensor in them.
_NUMBERS = (type(None), bool, int, float, str, slice, torch.dtype, torch.Size)


def _tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in a nest of arguments, in order; most are not nested."""
    if not isinstance(values, (list, tuple)):
        return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif type(value) not in _NUMBERS:
            tensors += _tensors_in(value)
    return tensors


#: The layout of an argument that is a tensor or a number.
_LEAF = tree_flatten(0)[1]
_PLAIN = (Tensor, nn.Parameter, int, float, bool, str)
_FLAT = (*_PLAIN, *_NUMBERS)


def _flattened(value: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of an argument and its nesting; most are a leaf themselves."""
    if type(value) in _PLAIN:
        return [value], _LEAF
    return tree_flatten(value)


@dataclass(frozen=True, slots=True)
class _Argument:
    """One floating-point tensor among the arguments of a call.

    Attributes:
        key: the position or name of the argument that holds it.
        position: its place in that argument, which may be a list.
        tensor: its values.
        leaf: its place among all tensors and values of the call.
    """

    key: str | int
    position: int
    tensor: Tensor
    leaf: int

    @property
    def factor(self) -> int:
        """Which factor of an einsum it is; they come in a list, or one by one."""
        return self.position if self.key == 1 else int(self.key) - 1


def _inputs(args: Any, kwargs: Any) -> Iterator[tuple[str | int, Any]]:
    """Positional and keyword arguments, without ``out``."""
    yield from enumerate(args)
    for key, value in kwargs.items():
        if key != "out":
            yield key, value


def _written(out: Any, result: Any) -> Any:
    """Write a result into ``out=``, as the call would have; without one, return it as it is."""
    if isinstance(out, tuple | list):
        pairs = zip(out, result, strict=False)
        return type(result)(_written(place, part) for place, part in pairs)
    if not isinstance(out, Tensor) or not isinstance(result, Tensor):
        return result
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)


def _operand_specs(operator: Operator, args: Any) -> dict[str | int, OperandSpec]:
    """The operands of a contracting operator, by position and by name."""
    if operator.spec is None:
        return {}
    # a packed sequence brings its batch sizes as a second argument
    is_packed = operator.kind == "rnn" and len(args) > 1 and _is_integer(args[1])
    specs: dict[str | int, OperandSpec] = {}
    for spec in operator.spec.operands:
        specs[spec.name] = spec
        specs[spec.index + int(is_packed and spec.index > 0)] = spec
    return specs


def _is_listed_bias(spec: OperandSpec, tensor: Tensor) -> bool:
    """Recurrent layers have weights and biases in one list."""
    return spec.name == "params" and tensor.ndim < 2


#: The places of running statistics, which stay in the format that they are kept in.
_STATISTICS = frozenset((3, 4, "running_mean", "running_var"))


def _is_statistic(operator: Operator, argument: _Argument) -> bool:
    has_statistics = operator.name in ("batch_norm", "instance_norm")
    return has_statistics and argument.key in _STATISTICS


@contextmanager
def watch(
    model: nn.Module,
    handler: Handler,
    kind: Callable[[nn.Module, Handler], CallMode] | None = None,
) -> Iterator[CallMode]:
    """Follow the modules of ``model`` and give each call to ``handler`` while the mode is entered.

    Hooks are removed on exit, also after an exception. Compiled regions run uncompiled
    meanwhile.

    Args:
        model: its modules give the sites their paths.
        handler: asked at each call.
        kind: a subclass of ``CallMode`` that sees more.

    Yields:
        The mode, to be entered around each forward pass.
    """
    mode = (kind or CallMode)(model, handler)

    def enter(path: str, *_: Any) -> None:
        mode.position.enter(path)

    def leave(*_: Any) -> None:
        mode.position.leave()

    handles = []
    try:
        with uncompiled():
            for path, module in model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    if not any(map(partial(_is_inside, path), mode.scripted)):
                        mode.scripted.append(path)
                    continue
                before = module.register_forward_pre_hook(
                    partial(enter, path), prepend=True
                )
                handles.append(before)
                handles.append(module.register_forward_hook(leave, always_call=True))
            yield mode
    finally:
        for handle in handles:
            handle.remove()


def _is_inside(path: str, outer: str) -> bool:
    return path.startswith(outer + "." if outer else "")


def float_tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors in a nest of tuples, lists and dicts, in order.

    Complex tensors are not among them.
    """
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [leaf for leaf in tree_flatten(value)[0] if is_floating(leaf)]


def _autocast(leaves: list[Any]) -> tuple[str, torch.dtype] | None:
    devices = (leaf.device.type for leaf in leaves if isinstance(leaf, Tensor))
    device = next(devices, "cpu")
    if not torch.is_autocast_enabled(device):
        return None
    return device, torch.get_autocast_dtype(device)


def is_floating(value: Any) -> bool:
    """Return True for a tensor of real floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()


def _has_float(args: Any, kwargs: Any) -> bool:
    if any(map(is_floating, args)):
        return True
    nested = any(type(value) not in _FLAT for value in args)
    if not nested and not kwargs:
        return False
    return any(map(is_floating, _tensors_in((args, kwargs))))


#: The trait of an operator that makes no site, and the reason that is told.
_NO_SITE = (
    (_MOVES, "moves values, rounds nothing"),
    (_CREATES, "does not depend on values"),
    (_DRAWS, "random"),
)


def _no_site(operator: Operator, args: Any, kwargs: Any) -> str | None:
    """Why this call is no site, or None."""
    if operator.name in _DROPS_OUT:
        return _dropout(args, kwargs)
    for names, reason in _NO_SITE:
        if operator.name in names:
            return reason
    return _unreadable(_tensors_in(args))


def _unreadable(tensors: list[Tensor]) -> str | None:
    """Why these operands hide their values from a site, or None."""
    reasons = [_hidden(tensor) for tensor in tensors]
    return min(filter(None, reasons), key=_REASONS.index, default=None)


#: Why a tensor's values cannot be seen, the first first.
_REASONS = (
    "inside torch.vmap or torch.func",
    "sparse or nested tensor",
    "complex numbers",
)


def _hidden(tensor: Tensor) -> str | None:
    """Why the values of a tensor cannot be seen, or None."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    if is_wrapped and tensor.is_floating_point():
        return _REASONS[0]
    if tensor.is_sparse or tensor.is_nested:
        return _REASONS[1]
    return _REASONS[2] if tensor.is_complex() else None


def _dropout(args: Any, kwargs: Any) -> str:
    """Dropout is a copy where it is off, and random where it is on."""
    values = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    is_on = values.get("training", values.get("train", True)) and values.get("p", 0.5)
    return "random" if is_on else "moves values, rounds nothing"


@functools.lru_cache(maxsize=1024)
def function_body(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """The body of a Python function of ``torch.nn.functional``, without its own override check.

    Each such function first asks whether an override wants the whole call, which here
    would be asked for ever. The twin has the same code over globals in which the answer
    is no; the calls that it makes are seen by the mode. None for other functions.
    """
    if not isinstance(func, types.FunctionType):
        return None
    if func.__module__ not in ("torch.nn.functional", "torch.functional"):
        return None
    asked = [n for n in func.__code__.co_names if n.startswith("has_torch_function")]
    if not asked:
        # a dispatcher between two such functions (max_pool2d with and without indices)
        return None
    twin = types.FunctionType(
        func.__code__,
        {**func.__globals__, **dict.fromkeys(asked, _never)},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


def _never(*_: Any) -> bool:
    return False
