"""What is tried: each change edits a copy of the model, sets the optimizer, or opens
something around every step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from roundoff.advise.normalized_layers import drop_biases, fold
from roundoff.advise.setup import Setup
from roundoff.advise.written_attention import replace_attention

ModelEdit = Callable[[nn.Module], None]
PlacedEdit = Callable[[nn.Module, Sequence[str]], None]
Opened = Callable[[], AbstractContextManager[object]]

#: Between the paths of a layer and the normalization behind it.
PAIR = " > "


@dataclass(frozen=True, slots=True)
class Change:
    """One change by its name, and what it needs to be made again.

    Attributes:
        name: of the change: a key of ``CHANGES``.
        modules: the paths it is made at, where it is made at some.
        value: a number, where it has one: of threads, say.
    """

    name: str
    modules: tuple[str, ...] = ()
    value: int | None = None

    def apply(self, setup: Setup) -> Setup:
        """Return the setup with the change, which edits the model in place."""
        kind = CHANGES[self.name]
        self.edit(setup.model)
        flags = {**setup.optimizer_flags, **kind.flags}
        around = setup.around
        if kind.around is not None:
            around = (*around, kind.around(self))
        return replace(setup, optimizer_flags=flags, around=around)

    def edit(self, model: nn.Module) -> None:
        """Make what is made to a model, in place."""
        kind = CHANGES[self.name]
        if kind.edit is not None:
            kind.edit(model)
        if kind.edit_at is not None:
            kind.edit_at(model, self.modules)


@dataclass(frozen=True, slots=True)
class ChangeKind:
    """How a change is made.

    Attributes:
        edit: edits a model in place.
        edit_at: edits a model in place at some of its modules.
        flags: set in every group of the optimizer.
        around: returns what is opened around every step.
        by_wall: judged by the wall clock.
    """

    edit: ModelEdit | None = None
    edit_at: PlacedEdit | None = None
    flags: Mapping[str, bool | None] = field(default_factory=dict)
    around: Callable[[Change], Opened] | None = None
    by_wall: bool = False


class WrappedForward:
    """A forward pass with something opened around it, and its arguments prepared.

    An object and no closure, so that a copy of the model runs the copy's own.
    """

    def __init__(
        self,
        inner: Callable[..., Any],
        opened: Opened | None,
        prepare: Callable[[Any], Any] | None,
    ) -> None:
        self._inner = inner
        self._opened = opened
        self._prepare = prepare

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._prepare is not None:
            args = tree_map(self._prepare, args)
            kwargs = tree_map(self._prepare, kwargs)
        if self._opened is None:
            return self._inner(*args, **kwargs)
        with self._opened():
            return self._inner(*args, **kwargs)


def wrap_forward(
    model: nn.Module,
    opened: Opened | None,
    prepare: Callable[[Any], Any] | None = None,
) -> None:
    """Open something around the forward pass of a model, and prepare its arguments."""
    wrapped = WrappedForward(model.forward, opened, prepare)
    model.forward = wrapped


def _channels_last(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def prepare(value: Any) -> Any:
        is_image = isinstance(value, Tensor) and value.dim() == 4
        if not is_image:
            return value
        return value.contiguous(memory_format=torch.channels_last)

    wrap_forward(model, None, prepare)


def _autocast(model: nn.Module) -> None:
    device = next((p.device.type for p in model.parameters()), "cpu")
    wrap_forward(model, functools.partial(torch.autocast, device, torch.bfloat16))


def _inference_mode(model: nn.Module) -> None:
    wrap_forward(model, torch.inference_mode)


def _fold(model: nn.Module, modules: Sequence[str]) -> None:
    fold(model, _pairs(modules))


def _drop_biases(model: nn.Module, modules: Sequence[str]) -> None:
    drop_biases(model, _pairs(modules))


def _pairs(modules: Sequence[str]) -> list[tuple[str, str]]:
    pairs = []
    for text in modules:
        layer, _, norm = text.partition(PAIR)
        pairs.append((layer, norm))
    return pairs


def _compile(model: nn.Module) -> None:
    # what was compiled for other copies counts against torch's limit of variants
    torch.compiler.reset()
    model.compile()


class _Fp32Instead(TorchFunctionMode):
    """Where a call asks for fp64, it gets fp32."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is Tensor.double:
            return args[0].float()
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") is torch.float64:
            kwargs["dtype"] = torch.float32
        args = tuple(_as_fp32(value) for value in args)
        return func(*args, **kwargs)


def _as_fp32(value: Any) -> Any:
    return torch.float32 if value is torch.float64 else value


def _no_fp64(model: nn.Module) -> None:
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.dtype is torch.float64:
            tensor.data = tensor.data.float()
    wrap_forward(model, _Fp32Instead)


@contextmanager
def _gradients_set_to_none() -> Iterator[None]:
    """Let ``zero_grad`` drop the gradients, whatever its argument says."""
    optimizer_zero_grad = torch.optim.Optimizer.zero_grad
    module_zero_grad = nn.Module.zero_grad

    def of_optimizer(self: torch.optim.Optimizer, *_: Any, **__: Any) -> None:
        optimizer_zero_grad(self, set_to_none=True)

    def of_module(self: nn.Module, *_: Any, **__: Any) -> None:
        module_zero_grad(self, set_to_none=True)

    torch.optim.Optimizer.zero_grad = of_optimizer  # type: ignore[method-assign]
    nn.Module.zero_grad = of_module  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.optim.Optimizer.zero_grad = optimizer_zero_grad  # type: ignore[method-assign]
        nn.Module.zero_grad = module_zero_grad  # type: ignore[method-assign]


@contextmanager
def _flushed_subnormals() -> Iterator[None]:
    was_flushed = not bool(torch.tensor(1e-30) * torch.tensor(1e-10))
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_flushed)


@contextmanager
def _threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _without_anomaly_mode() -> Iterator[None]:
    """Keep anomaly mode off, also where the step turns it on."""
    set_mode: Any = torch.set_anomaly_enabled
    was_on = torch.is_anomaly_enabled()
    check_nan = torch.is_anomaly_check_nan_enabled()
    set_mode(False)
    torch.set_anomaly_enabled = _stay_off
    try:
        yield
    finally:
        torch.set_anomaly_enabled = set_mode
        set_mode(was_on, check_nan)


def _stay_off(*_: Any, **__: Any) -> None:
    return None


def _always(opened: Opened) -> Callable[[Change], Opened]:
    return lambda _: opened


def _with_threads(change: Change) -> Opened:
    return functools.partial(_threads, change.value or torch.get_num_threads())


CHANGES: Mapping[str, ChangeKind] = {
    "channels_last": ChangeKind(edit=_channels_last),
    "bf16_autocast": ChangeKind(edit=_autocast),
    "inference_mode": ChangeKind(edit=_inference_mode),
    "fold_batch_norm": ChangeKind(edit_at=_fold),
    "drop_bias_before_norm": ChangeKind(edit_at=_drop_biases),
    "fused_attention": ChangeKind(edit_at=replace_attention),
    "no_fp64": ChangeKind(edit=_no_fp64),
    "compile": ChangeKind(edit=_compile),
    "fused_optimizer": ChangeKind(flags={"fused": True, "foreach": None}),
    "foreach_optimizer": ChangeKind(flags={"foreach": True, "fused": None}),
    "gradients_to_none": ChangeKind(around=_always(_gradients_set_to_none)),
    "no_anomaly_mode": ChangeKind(around=_always(_without_anomaly_mode)),
    "flush_subnormals": ChangeKind(around=_always(_flushed_subnormals)),
    "threads": ChangeKind(around=_with_threads, by_wall=True),
}
