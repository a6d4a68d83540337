"""What one training step does: the formats it computes in, its use of a loss scale, the
bytes it keeps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundoff.errors import FormatError
from roundoff.formats import parse_format
from roundoff.ops import facts, is_floating

SCALER_METHODS = ("__init__", "scale", "unscale_", "step", "update")

FRESH_SCALER = "the GradScaler is made in every step: its scale starts at {scale} each time and learns nothing"
SCALED_STEP = (
    "optimizer.step() runs on gradients that are {scale} times too large: neither scaler.step(optimizer) nor "
    "unscale_ is called, so nothing divides by the scale and no step with an overflow is skipped. Adam, whose "
    "step does not depend on the size of the gradients, hides it until the first Inf; SGD diverges"
)
NO_UPDATE = "scaler.update() is never called: the scale stays at {scale}, whatever the gradients do"
CAST_INPUTS = (
    "the inputs are cast to {formats} by hand: autocast has nothing left to cast there, and every "
    "operator that it would run in fp32 starts from rounded inputs"
)


@dataclass(frozen=True, slots=True)
class StepFormats:
    """The formats of one step.

    Attributes:
        matrix: for ``forward`` and ``backward``: format -> calls of matrix operators
            with operands in it.
        casts: number of conversions from one floating-point format to another.
    """

    matrix: dict[str, dict[str, int]]
    casts: int


@dataclass
class ObservedStep:
    """One training step, observed.

    Attributes:
        matrix: see ``StepFormats``.
        casts: see ``StepFormats``.
        inputs: formats of the floating-point tensors that the model was called with.
        scaler: number of calls of each method of ``GradScaler``, its constructor too.
        scale: the loss scale, where there was one.
        unscaled: every step of the optimizer was taken by the scaler, or after
            ``unscale_``.
    """

    matrix: dict[str, Counter[str]] = field(
        default_factory=lambda: {"forward": Counter(), "backward": Counter()}
    )
    casts: int = 0
    inputs: Counter[str] = field(default_factory=Counter)
    scaler: Counter[str] = field(default_factory=Counter)
    scale: float | None = None
    unscaled: bool = True

    def formats(self) -> StepFormats:
        """Return what a report shows of the step."""
        matrix = {phase: dict(counts) for phase, counts in self.matrix.items()}
        return StepFormats(matrix, self.casts)

    def findings(self, batch_formats: set[str]) -> list[str]:
        """List the mistakes of a hand-written step with autocast and its loss scale."""
        scale = f"{self.scale or 0:,.0f}"
        is_scaled = bool(self.scaler["scale"])
        findings = []
        if is_scaled and self.scaler["__init__"]:
            findings.append(FRESH_SCALER.format(scale=scale))
        if is_scaled and not self.unscaled:
            findings.append(SCALED_STEP.format(scale=scale))
        if is_scaled and not self.scaler["update"]:
            findings.append(NO_UPDATE.format(scale=scale))
        cast_by_hand = sorted(set(self.inputs) - batch_formats)
        if cast_by_hand:
            findings.append(CAST_INPUTS.format(formats=", ".join(cast_by_hand)))
        return findings


def formats_of(values: Any) -> set[str]:
    """Name the formats of the floating-point tensors in a nest.

    >>> half = torch.zeros(1, dtype=torch.float16)
    >>> sorted(formats_of({"a": torch.zeros(1), "b": [half], "n": torch.tensor(1)}))
    ['fp16', 'fp32']
    """
    leaves = tree_leaves(values)
    return {_format_name(leaf.dtype) for leaf in leaves if is_floating(leaf)}


def _format_name(dtype: torch.dtype) -> str:
    text = str(dtype).removeprefix("torch.")
    try:
        return parse_format(text).name
    except FormatError:
        return text


class _KernelCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Count matrix operators by format, and casts."""

    def __init__(self, step: ObservedStep) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.step = step

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if facts(name).multiplies:
            self._count_matrix(args)
        result = func(*args, **(kwargs or {}))
        if name == "_to_copy" and _is_cast(args[0], result):
            self.step.casts += 1
        return result

    def _count_matrix(self, args: Any) -> None:
        phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
        operand = next(filter(is_floating, tree_leaves(args)), None)
        if operand is not None:
            self.step.matrix[phase][_format_name(operand.dtype)] += 1


def _is_cast(before: Any, after: Any) -> bool:
    are_floats = is_floating(before) and is_floating(after)
    return are_floats and before.dtype != after.dtype


@contextmanager
def observed(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, kernels: bool = True
) -> Iterator[ObservedStep]:
    """Observe the step that the block takes.

    ``kernels=False`` is for a compiled model, whose operators cannot be seen.
    """
    step = ObservedStep()
    with ExitStack() as stack:
        is_inside_scaler = stack.enter_context(_counted_scaler(step))

        def before_step(*_: Any) -> None:
            by_hand = not is_inside_scaler()
            if by_hand and step.scaler["scale"] and not step.scaler["unscale_"]:
                step.unscaled = False

        def before_forward(_: nn.Module, args: Any, kwargs: Any) -> None:
            step.inputs.update(formats_of((args, kwargs)))

        stack.callback(optimizer.register_step_pre_hook(before_step).remove)
        hook = model.register_forward_pre_hook(before_forward, with_kwargs=True)
        stack.callback(hook.remove)
        if kernels:
            stack.enter_context(_KernelCounter(step))
        yield step


@contextmanager
def _counted_scaler(step: ObservedStep) -> Iterator[Callable[[], bool]]:
    """Count calls of torch's ``GradScaler``; gives a function: True inside of such a call."""
    scaler_class: Any = torch.amp.GradScaler
    originals = {name: getattr(scaler_class, name) for name in SCALER_METHODS}
    running: list[str] = []

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not running:  # step() calls unscale_ itself
                step.scaler[name] += 1
            running.append(name)
            try:
                result = original(self, *args, **kwargs)
            finally:
                running.pop()
            if name == "scale":
                step.scale = self.get_scale()
            return result

        return call

    for name, original in originals.items():
        setattr(scaler_class, name, counted(name, original))
    try:
        yield lambda: bool(running)
    finally:
        for name, original in originals.items():
            setattr(scaler_class, name, original)


class SavedBytes:
    """Bytes that autograd saves for the backward pass.

    Every storage counts once; parameters and buffers do not count. ``most`` is the
    largest sum of a forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        tensors = (*model.parameters(), *model.buffers())
        self._model_storages = {t.untyped_storage().data_ptr() for t in tensors}
        self._bytes: dict[int, int] = {}
        self.most = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Count in one forward pass."""
        self._bytes.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t):
            yield
        self.most = max(self.most, sum(self._bytes.values()))

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._model_storages:
                self._bytes[storage.data_ptr()] = storage.nbytes()
        return tensor


def storage_bytes(tensors: Any) -> int:
    """Sum the bytes of the tensors in a nest, each storage once."""
    sizes = {}
    for leaf in tree_leaves(tensors):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())
