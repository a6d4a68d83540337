"""What one training step does: in which formats it computes, how it treats its loss scale, how much it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundoff.errors import FormatError
from roundoff.formats import parse_format
from roundoff.ops import facts

SCALER = ("__init__", "scale", "unscale_", "step", "update")


@dataclass
class Seen:
    """One step, watched.

    Attributes:
        matrix: for ``forward`` and ``backward``, how many calls of matrix operators had operands in which format.
        casts: conversions from one floating-point format to another.
        inputs: formats of the floating-point tensors that the model was called with.
        scaler: how often a ``GradScaler`` was made and its methods called.
        scale: the loss scale, where there was one.
        unscaled: whether every step of the optimizer was taken by the scaler, or after ``unscale_``.
    """

    matrix: dict[str, Counter[str]] = field(
        default_factory=lambda: {"forward": Counter(), "backward": Counter()}
    )
    casts: int = 0
    inputs: Counter[str] = field(default_factory=Counter)
    scaler: Counter[str] = field(default_factory=Counter)
    scale: float | None = None
    unscaled: bool = True

    def plain(self) -> dict[str, Any]:
        """What a report shows of it."""
        return {
            "matrix": {phase: dict(counts) for phase, counts in self.matrix.items()},
            "casts": self.casts,
        }

    def findings(self, batch: set[str]) -> list[str]:
        """What a hand-written step does wrong with autocast and its loss scale; ``batch``: formats of its batch."""
        found = []
        calls, scale = self.scaler, f"{self.scale or 0:,.0f}"
        if calls["__init__"] and calls["scale"]:
            found.append(
                f"the GradScaler is made in every step: its scale starts at {scale} each time and learns nothing"
            )
        if calls["scale"] and not self.unscaled:
            found.append(
                f"optimizer.step() runs on gradients that are {scale} times too large: neither scaler.step(optimizer) nor "
                "unscale_ is called, so nothing divides by the scale and no step with an overflow is skipped. Adam, whose "
                "step does not depend on the size of the gradients, hides it until the first Inf; SGD diverges"
            )
        if calls["scale"] and not calls["update"]:
            found.append(
                f"scaler.update() is never called: the scale stays at {scale}, whatever the gradients do"
            )
        by_hand = sorted(set(self.inputs) - batch)
        if by_hand:
            found.append(
                f"the inputs are cast to {', '.join(by_hand)} by hand: autocast has nothing left to cast there, and every "
                "operator that it would run in fp32 starts from rounded inputs"
            )
        return found


def formats_of(values: Any) -> set[str]:
    """The formats of the floating-point tensors in a nest.

    >>> sorted(formats_of({"a": torch.zeros(1), "b": [torch.zeros(1, dtype=torch.float16)], "n": torch.tensor(1)}))
    ['fp16', 'fp32']
    """
    return {
        _name(leaf.dtype)
        for leaf in tree_leaves(values)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    }


def _name(dtype: torch.dtype) -> str:
    text = str(dtype).removeprefix("torch.")
    try:
        return parse_format(text).name
    except FormatError:
        return text


class _Kernels(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, seen: Seen) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if facts(name).multiplies:
            operand = next(
                (
                    a
                    for a in tree_leaves(args)
                    if isinstance(a, Tensor) and a.is_floating_point()
                ),
                None,
            )
            phase = "forward" if torch._C._current_graph_task_id() == -1 else "backward"
            if operand is not None:
                self.seen.matrix[phase][_name(operand.dtype)] += 1
        result = func(*args, **(kwargs or {}))
        if name == "_to_copy" and _cast(args[0], result):
            self.seen.casts += 1
        return result


def _cast(before: Any, after: Any) -> bool:
    both = isinstance(before, Tensor) and isinstance(after, Tensor)
    return (
        both
        and before.is_floating_point()
        and after.is_floating_point()
        and before.dtype != after.dtype
    )


@contextmanager
def watched(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, kernels: bool = True
) -> Iterator[Seen]:
    """Watch the step that the block takes. ``kernels=False`` for a compiled model, whose operators are not seen."""
    seen = Seen()
    inside: list[str] = []

    def stepping(*_: Any) -> None:
        if seen.scaler["scale"] and not inside and not seen.scaler["unscale_"]:
            seen.unscaled = False

    def called(_: nn.Module, args: Any, kwargs: Any) -> None:
        seen.inputs.update(formats_of((args, kwargs)))

    scaler: Any = torch.amp.GradScaler
    originals = {name: getattr(scaler, name) for name in SCALER}

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not inside:  # step() calls unscale_ itself
                seen.scaler[name] += 1
            inside.append(name)
            try:
                result = original(self, *args, **kwargs)
            finally:
                inside.pop()
            if name == "scale":
                seen.scale = self.get_scale()
            return result

        return call

    handles = [
        optimizer.register_step_pre_hook(stepping),
        model.register_forward_pre_hook(called, with_kwargs=True),
    ]
    for name, original in originals.items():
        setattr(scaler, name, counting(name, original))
    try:
        if kernels:
            with _Kernels(seen):
                yield seen
        else:
            yield seen
    finally:
        for name, original in originals.items():
            setattr(scaler, name, original)
        for handle in handles:
            handle.remove()


class Kept:
    """Bytes that autograd keeps for the backward pass: every storage once, parameters and buffers left out."""

    def __init__(self, model: nn.Module) -> None:
        self._own = {
            t.untyped_storage().data_ptr()
            for t in (*model.parameters(), *model.buffers())
        }
        self._found: dict[int, int] = {}
        self.most = 0

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around one forward pass; ``most`` is the largest of them."""
        self._found.clear()
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda t: t):
            yield
        self.most = max(self.most, sum(self._found.values()))

    def _pack(self, tensor: Tensor) -> Tensor:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self._own:
                self._found[storage.data_ptr()] = storage.nbytes()
        return tensor


def held(tensors: Any) -> int:
    """Bytes of the tensors in a nest, each storage once."""
    found = {}
    for leaf in tree_leaves(tensors):
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            found[leaf.untyped_storage().data_ptr()] = leaf.untyped_storage().nbytes()
    return sum(found.values())
