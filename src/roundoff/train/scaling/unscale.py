"""The gradients of optimizers: what can be unscaled, unscaling them once, and whether somebody changed them in between."""

from __future__ import annotations

import heapq
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from roundoff.errors import ScalerError
from roundoff.formats import BlockFormat, parse_format

#: Gradients, the smallest, whose sum is kept.
_SUMMED = 4


class Gradients:
    """The gradients that some optimizers would step with: each once, with the name of its parameter."""

    def __init__(
        self, optimizers: Sequence[Optimizer], known: Callable[[], dict[int, str]]
    ) -> None:
        """Raises ``ScalerError`` where scaled gradients cannot be had, before anything is changed."""
        if not optimizers:
            raise ScalerError(
                "no optimizer to step",
                where="LossScaler.step",
                do="scaler.step(optimizer)",
            )
        self.parameters: list[Tensor] = []
        self._known, self._places = known, dict[int, tuple[int, int, str]]()
        for number, optimizer in enumerate(optimizers):
            if not isinstance(optimizer, Optimizer):
                raise ScalerError(
                    "not an optimizer",
                    where=f"argument {number} of LossScaler.step",
                    got=type(optimizer).__name__,
                )
            if any(optimizer is other for other in optimizers[:number]):
                raise ScalerError(
                    f"{type(optimizer).__name__} is given twice",
                    where="LossScaler.step",
                )
            _check_closure(optimizer)
            some = False
            for place, parameter in enumerate(_parameters(optimizer)):
                if parameter.grad is None:
                    continue
                some = True
                if id(parameter) not in self._places:
                    self._places[id(parameter)] = (
                        number,
                        place,
                        type(optimizer).__name__,
                    )
                    self.parameters.append(parameter)
                    if fault := _fault(parameter):
                        raise ScalerError(**fault, where=self.names()[-1])
            if not some:
                raise ScalerError(
                    "no parameter of this optimizer has a gradient",
                    where=f"optimizer {number}, {type(optimizer).__name__}",
                    do="leave it out of this step, or see why the loss does not reach its parameters (frozen, detached, "
                    "or made before the model was moved or replaced)",
                )

    def names(self) -> list[str]:
        """Of each parameter: in the model where one is known, else among its optimizer's."""
        known, found = self._known(), []
        for parameter in self.parameters:
            number, place, optimizer = self._places[id(parameter)]
            found.append(
                known.get(
                    id(parameter),
                    f"parameter {place} of optimizer {number}, {optimizer}",
                )
            )
        return found

    def values(self) -> list[Tensor]:
        """The tensors to work on; of a sparse gradient its stored values."""
        return [
            _values(parameter.grad)
            for parameter in self.parameters
            if parameter.grad is not None
        ]

    @property
    def sparse(self) -> bool:
        return any(p.grad is not None and p.grad.is_sparse for p in self.parameters)

    def dtypes(self) -> set[torch.dtype]:
        return {p.dtype for p in self.parameters} | {g.dtype for g in self.values()}

    def unscale_(self, scale: Tensor, saturation: float | None) -> Tensor:
        """Divide all in place by the scale. Returns 1 where one was NaN, Inf or at least ``saturation`` before, else 0;
        0-d float32 on the device of the scale."""
        # the reciprocal in float64, as torch's scaler: division in float32 may be imprecise on some devices
        inverse = (
            scale.double().reciprocal().float()
            if scale.device.type != "mps"
            else scale.reciprocal()
        )
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for value in self.values():
            groups.setdefault((value.device, value.dtype), []).append(value)
        found = torch.zeros((), dtype=torch.float32, device=scale.device)
        with torch.no_grad():
            for (device, _), values in groups.items():
                here = torch.zeros((), dtype=torch.float32, device=device)
                if saturation is not None:
                    here = (
                        torch.stack([_at_least(value, saturation) for value in values])
                        .any()
                        .float()
                    )
                torch._amp_foreach_non_finite_check_and_unscale_(
                    values, here, inverse.to(device, non_blocking=True)
                )
                # not the sum: a fused optimizer skips where this equals 1
                found = torch.maximum(found, here.to(scale.device, non_blocking=True))
        return found


class Order:
    """Whether gradients still are what the last backward left: by identity and version, and a few by their sum, since what
    torch's own scaler does in place leaves the version as it was."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._stale: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._sums: dict[int, Tensor] = {}

    def before_backward(self, first: bool) -> None:
        """The first backward of a step adds to gradients that the last step has left, where there still are some."""
        if first:
            self._stale = {
                key: seen for key, seen in self._seen.items() if _unchanged(seen)
            }
            self._seen = {}

    def after_backward(self, parameters: Iterable[Tensor]) -> None:
        """``parameters`` have these gradients now."""
        there = self._saw(parameters)
        few = heapq.nsmallest(
            _SUMMED, there, key=lambda p: p.grad.numel() if p.grad is not None else 0
        )
        self._sums = {
            id(p): p.grad.sum()
            for p in few
            if p.grad is not None and not p.grad.is_sparse
        }

    def after_step(self, parameters: Iterable[Tensor]) -> None:
        """``parameters`` were stepped with the gradients that they have now."""
        self._saw(parameters)
        self._sums = {}

    def stale(self, gradients: Gradients) -> list[str]:
        """Parameters whose scaled gradient was added to the unscaled one of the step before."""
        found = []
        for place, parameter in enumerate(gradients.parameters):
            before = self._stale.get(id(parameter))
            if (
                before is not None
                and before[0]() is parameter.grad
                and not _unchanged(before)
            ):
                found.append(place)
        return _at(gradients, found)

    def changed(self, gradients: Gradients, *, ask: bool) -> list[str]:
        """Parameters whose gradient was changed since the last backward; by their sums only with ``ask``, on the host."""
        found = []
        for place, parameter in enumerate(gradients.parameters):
            before, total, gradient = (
                self._seen.get(id(parameter)),
                self._sums.get(id(parameter)),
                parameter.grad,
            )
            if before is None or gradient is None:
                continue
            same = before[0]() is gradient and _unchanged(before)
            if not same or (
                ask and total is not None and not _equal(gradient.sum(), total)
            ):
                found.append(place)
        return _at(gradients, found)

    def _saw(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        there = [p for p in parameters if p.grad is not None]
        self._seen = {
            id(p): (weakref.ref(p.grad), _version(p.grad))
            for p in there
            if p.grad is not None
        }
        return there


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether the optimizer itself leaves weights and state alone where its ``found_inf`` is 1, so that nobody has to ask
    the device. Not SGD with momentum: torch's fused kernel then leaves a momentum buffer that was never written."""
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        return False
    if "grad_scaler" in inspect.signature(optimizer.step).parameters:
        return False
    return not (
        isinstance(optimizer, SGD)
        and any(group["momentum"] for group in optimizer.param_groups)
    )


def check_loss(loss: Tensor) -> None:
    """Raise ``ScalerError`` for what cannot be run backward as a loss."""
    where, shape = (
        "LossScaler.backward",
        f"shape {list(loss.shape)}, {str(loss.dtype).removeprefix('torch.')}",
    )
    if loss.numel() != 1 or not loss.dtype.is_floating_point:
        raise ScalerError(
            "the loss is not one floating-point number",
            where=where,
            got=shape,
            do="take its mean or sum",
        )
    if not loss.requires_grad:
        raise ScalerError(
            "the loss has no graph to run backward",
            where=where,
            do="don't detach it or compute it under no_grad",
        )


def largest_of(name: str) -> float:
    """The largest finite value of a format, where a device that saturates stops."""
    fmt = parse_format(name)
    if isinstance(fmt, BlockFormat):
        raise ScalerError(
            "a block format has scales of its own",
            where=f"LossScaler(saturation={name!r})",
            expected="fp16",
        )
    return fmt.max_finite


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first few names, and how many more there are.

    >>> listed(["a", "b", "c", "d"]), listed(["a"])
    ('a, b, c and 1 more', 'a')
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _values(gradient: Tensor) -> Tensor:
    return gradient._values() if gradient.is_sparse else gradient


def _version(gradient: Tensor) -> int:
    return -1 if gradient.is_inference() else gradient._version


def _unchanged(seen: tuple[weakref.ref[Tensor], int]) -> bool:
    gradient = seen[0]()
    return gradient is not None and _version(gradient) == seen[1]


def _at(gradients: Gradients, places: list[int]) -> list[str]:
    if not places:
        return []
    names = gradients.names()
    return [names[place] for place in places]


def _equal(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


def _at_least(value: Tensor, limit: float) -> Tensor:
    if not value.numel():
        return torch.zeros((), dtype=torch.bool, device=value.device)
    least, most = torch.aminmax(value)
    return (most >= limit) | (least <= -limit)


def _check_closure(optimizer: Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ScalerError(
            f"{type(optimizer).__name__} evaluates the loss by itself, several times a step, so that it cannot be scaled",
            where="LossScaler.step",
            do="train with it in float32 or bfloat16, without a scaler",
        )


def _fault(parameter: Tensor) -> dict[str, str] | None:
    """Why the gradient of a parameter cannot be scaled: the parts of an error."""
    gradient: Any = parameter.grad
    if parameter.dtype is torch.float16 or gradient.dtype is torch.float16:
        return {
            "what": "weights in float16 cannot be trained with a loss scale: their updates underflow, and so do unscaled "
            "gradients",
            "expected": "float32 weights",
            "do": "keep the model in float32 and run it under autocast; where memory is short, bfloat16 weights with "
            "stochastic rounding or Kahan summation, without a scaler",
        }
    if hasattr(gradient, "_local_tensor") or getattr(
        parameter, "_is_flat_param", False
    ):
        return {
            "what": "a gradient of which each rank holds a part: ranks could disagree about skipping",
            "do": "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
        }
    return None
