"""See every torch-level call a model makes, with its site name, operands and where their values came from.

``CallMode`` is a ``TorchFunctionMode``: it stands above autograd, so it sees ``F.linear``, ``x + y`` and
``x.softmax(-1)`` as the user's code calls them, in functional code as well as inside modules, and gradients
reach what its handler returns. Functions of ``torch.nn.functional`` that are written in Python are entered, so
that ``F.multi_head_attention_forward`` shows the operators it is made of and ``F.softmax``, ``torch.softmax``
and ``Tensor.softmax`` are one operator.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.ops.operators import Operator, einsum_axes
from roundoff.ops.position import Place, Position
from roundoff.ops.table import operators_that
from roundoff.site import Site

_MOVES = operators_that("move values")
_CREATES = operators_that("create")
_EXACT = operators_that("create exactly")
_DRAWS = operators_that("draw")
_DROPS_OUT = operators_that("drop out")


@dataclass(frozen=True)
class Operand:
    """One floating-point tensor argument of a call.

    ``role`` is ``activation``, ``weight`` or ``bias``; ``sources`` are the sites or parameters its values come
    from (through views and copies), empty for model inputs and constants; ``""`` among them says that such values
    are mixed in.
    """

    leaf: int
    role: str
    reduce: int
    channel: int
    sources: frozenset[str]


@dataclass
class Call:
    """One operator call: what was called with what, able to run again on other values of its arguments."""

    site: Site
    operator: Operator
    func: Callable[..., Any]
    leaves: list[Any]
    layout: list[tuple[str | int, TreeSpec, int]]
    operands: list[Operand]
    #: (device type, dtype) of the autocast region that the call was made in
    autocast: tuple[str, torch.dtype] | None = None

    @property
    def kind(self) -> str:
        """See ``Operator.kind``."""
        return self.operator.kind

    def arguments(
        self, leaves: list[Any] | None = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword arguments with ``leaves`` in their places (the call's own when None)."""
        leaves = self.leaves if leaves is None else leaves
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        start = 0
        for key, spec, count in self.layout:
            value = tree_unflatten(leaves[start : start + count], spec)
            start += count
            if isinstance(key, int):
                args.append(value)
            else:
                kwargs[key] = value
        return args, kwargs

    def run(self, leaves: list[Any] | None = None) -> Any:
        """The operator's result on ``leaves`` (the call's own when None; then an in-place operator writes)."""
        args, kwargs = self.arguments(leaves)
        if self.autocast is None or torch.is_autocast_enabled(self.autocast[0]):
            return self.func(*args, **kwargs)
        with torch.autocast(*self.autocast):  # run again, from outside that region
            return self.func(*args, **kwargs)

    def again(self, leaves: list[Any]) -> Any:
        """The operator's result on ``leaves``, writing into none of them."""
        if self.operator.inplace and isinstance(leaves[0], Tensor):
            leaves = [leaves[0].clone(), *leaves[1:]]
        return self.run(leaves)


class Handler(Protocol):
    """What ``CallMode`` asks at each call."""

    def call(self, call: Call) -> Any:
        """Run the call, or a changed version of it, and return the result."""

    def before_write(self, tensor: Tensor) -> None:
        """``tensor`` is about to be written in place."""


@dataclass
class Excluded:
    """Calls that did not become sites, for one operator and one reason."""

    operator: str
    reason: str
    count: int = 0
    examples: list[str] = field(default_factory=list)


class CallMode(TorchFunctionMode):
    """Names every call and hands it to ``handler``; made by ``watch``."""

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
        """A new forward pass: call indices start again."""
        self._sources = WeakIdKeyDictionary()
        self.calls = 0
        self.position.begin()
        for path in self.scripted:
            self.position.go_to(Place((path,)))
            self._exclude("forward", "TorchScript hides its operators")
        self.position.begin()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inner = entered(func)
        if inner is not None:
            with self:
                return inner(*args, **kwargs)
        operator = Operator.of(func)
        if operator.name == "shape" or not _has_float(args, kwargs):
            result = func(*args, **kwargs)
            if operator.name in _EXACT and _is_float(result):
                self._sources[result] = frozenset()
            if (
                any(map(_is_complex, args))
                and isinstance(result, Tensor)
                and operator.name not in _MOVES
            ):
                self._exclude(operator.name, "complex numbers")
            return result
        reason = _no_site(operator, args, kwargs)
        if reason is not None:
            if operator.inplace and isinstance(args[0], Tensor):
                self.handler.before_write(args[0])
            result = func(*args, **kwargs)
            self.passed_on(func, operator, reason, result, args, kwargs)
            return result
        call = self._call(func, operator, args, kwargs)
        if operator.inplace:
            self.handler.before_write(args[0])
        elif isinstance(kwargs.get("out"), Tensor):
            self.handler.before_write(kwargs["out"])
        result = self.handler.call(call)
        outputs = float_tensors(result)
        if outputs:
            self.calls += 1
            for tensor in outputs:
                self._made(tensor, frozenset((str(call.site),)), operator.inplace)
        elif tensors := [
            leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)
        ]:
            reason = (
                "complex numbers"
                if any(map(_is_complex, tensors))
                else "integer or boolean result"
            )
            self._exclude(operator.name, reason)
        return result

    def _call(
        self, func: Callable[..., Any], operator: Operator, args: Any, kwargs: Any
    ) -> Call:
        module, index = self.position.next_call(operator.name)
        leaves: list[Any] = []
        layout: list[tuple[str | int, TreeSpec, int]] = []
        operands: list[Operand] = []
        named = (
            {spec.name: spec for spec in operator.spec.operands}
            if operator.spec
            else {}
        )
        # a packed sequence brings its batch sizes as a second argument
        shift = int(operator.kind == "rnn" and len(args) > 1 and _is_integer(args[1]))
        placed = {
            spec.index + shift * (spec.index > 0): spec for spec in named.values()
        }
        for key, value in [
            *enumerate(args),
            *((k, v) for k, v in kwargs.items() if k != "out"),
        ]:
            flat, spec = tree_flatten(value)
            layout.append((key, spec, len(flat)))
            entry = placed.get(key) if isinstance(key, int) else named.get(key)
            for position, leaf in enumerate(flat):
                place = len(leaves)
                leaves.append(leaf)
                if not _is_float(leaf):
                    continue
                sources = self._sources_of(leaf)
                sources = frozenset() if sources == {""} else sources
                weight = bool(sources) and sources <= self._param_names
                if operator.name == "einsum":
                    which = position if key == 1 else int(key) - 1
                    reduce, channel = einsum_axes(args[0], which)
                    role = "weight" if weight else "activation"
                    operands.append(Operand(place, role, reduce, channel, sources))
                elif entry is not None:
                    bias = entry.bias or (
                        weight and leaf.ndim < 2 and entry.name == "params"
                    )
                    role = "bias" if bias else "weight" if weight else "activation"
                    operands.append(
                        Operand(place, role, entry.reduce, entry.channel, sources)
                    )
                elif operator.spec is None:
                    # running statistics stay in the format they are kept in; a 0-dim tensor is a scalar factor
                    kept = operator.kind == "normalization" and key in (
                        3,
                        4,
                        "running_mean",
                        "running_var",
                    )
                    scalar = leaf.ndim == 0 and not weight
                    if not scalar and not (
                        kept and operator.name in ("batch_norm", "instance_norm")
                    ):
                        role = "weight" if weight else "activation"
                        operands.append(Operand(place, role, -1, 0, sources))
        site = Site(module, operator.name, index)
        return Call(site, operator, func, leaves, layout, operands, _autocast(leaves))

    def _sources_of(self, value: Any) -> frozenset[str]:
        found: frozenset[str] = frozenset()
        for leaf in tree_flatten(value)[0]:
            if isinstance(leaf, Tensor):
                name = self._params.get(id(leaf))
                if name:
                    found |= {name}
                elif leaf in self._sources:
                    found |= self._sources[leaf]
                elif _is_float(leaf) and leaf.ndim:
                    found |= {""}
        return found

    def _made(self, tensor: Tensor, sources: frozenset[str], inplace: bool) -> None:
        if id(tensor) not in self._params:
            self._sources[tensor] = sources
        base = tensor._base
        if inplace and base is not None and id(base) not in self._params:
            self._sources[base] = (
                self._sources_of(base) | sources
            )  # written through a view

    def passed_on(
        self,
        func: Callable[..., Any],  # noqa: ARG002 (for subclasses)
        operator: Operator,
        reason: str,
        result: Any,
        args: Any,
        kwargs: Any,
    ) -> None:
        """``func`` has run and is not a site, for ``reason``: where its result's values come from."""
        sources = (
            frozenset() if operator.name in _EXACT else self._sources_of((args, kwargs))
        )
        outputs = float_tensors(result)
        for tensor in outputs:
            drawn = reason == "random" or operator.name in _CREATES - _EXACT
            self._made(tensor, frozenset(("",)) if drawn else sources, operator.inplace)
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


@contextmanager
def watch(
    model: nn.Module,
    handler: Handler,
    kind: Callable[[nn.Module, Handler], CallMode] | None = None,
) -> Iterator[CallMode]:
    """Follow the module path of ``model`` and give each call to ``handler`` while the mode that this yields is
    entered. Hooks are removed on exit, also after an exception. Compiled regions run uncompiled meanwhile.
    ``kind`` is a subclass of ``CallMode`` that sees more."""
    mode = (kind or CallMode)(model, handler)
    handles = []
    stance: Any = torch.compiler.set_stance("force_eager")

    def enter(path: str, *_: Any) -> None:
        mode.position.enter(path)

    def leave(*_: Any) -> None:
        mode.position.leave()

    try:
        with stance:
            for path, module in model.named_modules():
                if isinstance(module, torch.jit.ScriptModule):
                    if not any(
                        path.startswith(outer + "." if outer else "")
                        for outer in mode.scripted
                    ):
                        mode.scripted.append(path)
                    continue
                handles.append(
                    module.register_forward_pre_hook(
                        functools.partial(enter, path), prepend=True
                    )
                )
                handles.append(module.register_forward_hook(leave, always_call=True))
            yield mode
    finally:
        for handle in handles:
            handle.remove()


def float_tensors(value: Any) -> list[Tensor]:
    """The floating-point tensors in a nest of tuples, lists and dicts, in order (complex ones are not)."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    return [leaf for leaf in tree_flatten(value)[0] if _is_float(leaf)]


def _autocast(leaves: list[Any]) -> tuple[str, torch.dtype] | None:
    device = next(
        (leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)), "cpu"
    )
    if not torch.is_autocast_enabled(device):
        return None
    return device, torch.get_autocast_dtype(device)


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _is_complex(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_complex()


def _is_integer(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point()


def _has_float(args: Any, kwargs: Any) -> bool:
    return any(map(_is_float, args)) or any(
        _is_float(leaf) for leaf in tree_flatten((args, kwargs))[0]
    )


def _no_site(operator: Operator, args: Any, kwargs: Any) -> str | None:
    """Why this call is not a site, or None. Dropout is a copy when it is off and random when it is on."""
    if operator.name in _DROPS_OUT:
        probability = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
        training = kwargs.get(
            "training", kwargs.get("train", args[2] if len(args) > 2 else True)
        )
        return "random" if training and probability else "moves values, rounds nothing"
    if operator.name in _MOVES:
        return "moves values, rounds nothing"
    if operator.name in _CREATES:
        return "does not depend on values"
    if operator.name in _DRAWS:
        return "random"
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if any(_is_float(leaf) and wrapped(leaf) for leaf in tree_flatten(args)[0]):
        return "inside torch.vmap or torch.func"
    if any(
        isinstance(leaf, Tensor) and (leaf.is_sparse or leaf.is_nested)
        for leaf in tree_flatten(args)[0]
    ):
        return "sparse or nested tensor"
    if any(
        isinstance(leaf, Tensor) and leaf.is_complex() for leaf in tree_flatten(args)[0]
    ):
        return "complex numbers"
    return None


@functools.lru_cache(maxsize=1024)
def entered(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """The body of a Python function of ``torch.nn.functional``, without its own override check.

    Each such function first asks whether an override wants the whole call, which here would be asked for ever.
    The twin has the same code over globals in which the answer is no; the calls it makes are seen by the mode.
    """
    if not isinstance(func, types.FunctionType) or func.__module__ not in (
        "torch.nn.functional",
        "torch.functional",
    ):
        return None
    no = {
        name: _never
        for name in func.__code__.co_names
        if name.startswith("has_torch_function")
    }
    if not no:  # a dispatcher between two such functions (max_pool2d with and without indices): one operator
        return None
    twin = types.FunctionType(
        func.__code__,
        {**func.__globals__, **no},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin


def _never(*_: Any) -> bool:
    return False
