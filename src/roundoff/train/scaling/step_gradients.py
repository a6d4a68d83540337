"""The gradients of one step: which can be unscaled, unscaling them once, and if
somebody changed them in between.
"""

from __future__ import annotations

import heapq
import inspect
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import SGD, Optimizer

from roundoff.errors import ScalerError
from roundoff.formats import BlockFormat, parse_format
from roundoff.train.scaling.delayed_read import moved

#: Gradients, the smallest, whose sum is kept.
_SUMMED = 4


@dataclass(frozen=True)
class _ParameterPlace:
    """Where a parameter stands: in which optimizer, and where among its parameters."""

    optimizer: int
    parameter: int
    kind: str

    def __str__(self) -> str:
        return f"parameter {self.parameter} of optimizer {self.optimizer}, {self.kind}"


class StepGradients:
    """The gradients that some optimizers would step with: each once, with the name of
    its parameter.

    ``model_names`` gives the names of a model's parameters by their identity.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        model_names: Callable[[], dict[int, str]],
    ) -> None:
        """Raise ``ScalerError`` where scaled gradients cannot be had, before anything
        is changed.
        """
        if not optimizers:
            raise ScalerError(
                "no optimizer to step",
                where="LossScaler.step",
                do="scaler.step(optimizer)",
            )
        self.parameters: list[Tensor] = []
        self._model_names = model_names
        self._places: dict[int, _ParameterPlace] = {}
        for number, optimizer in enumerate(optimizers):
            _check_optimizer(optimizers, number)
            self._add(optimizer, number)

    def _add(self, optimizer: Optimizer, number: int) -> None:
        kind = type(optimizer).__name__
        with_gradient = [
            (index, parameter)
            for index, parameter in enumerate(_parameters(optimizer))
            if parameter.grad is not None
        ]
        if not with_gradient:
            raise ScalerError(
                "no parameter of this optimizer has a gradient",
                where=f"optimizer {number}, {kind}",
                do="leave it out of this step, or see why the loss does not reach its parameters (frozen, detached, "
                "or made before the model was moved or replaced)",
            )
        for index, parameter in with_gradient:
            if id(parameter) in self._places:
                continue
            self._places[id(parameter)] = _ParameterPlace(number, index, kind)
            self.parameters.append(parameter)
            fault = _fault(parameter)
            if fault is not None:
                raise ScalerError(**fault, where=self.names()[-1])

    def names(self) -> list[str]:
        """Name each parameter: as in the model where one is given, else by its place in
        its optimizer.
        """
        names = self._model_names()
        return [
            names.get(id(parameter), str(self._places[id(parameter)]))
            for parameter in self.parameters
        ]

    def values(self) -> list[Tensor]:
        """Return the tensors to work on; of a sparse gradient its stored values."""
        return [value for _, value in self._with_values()]

    def _with_values(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Give each parameter with the tensor to work on."""
        for parameter in self.parameters:
            gradient = parameter.grad
            if gradient is not None:
                is_sparse = gradient.is_sparse
                yield parameter, gradient._values() if is_sparse else gradient

    @property
    def sparse(self) -> bool:
        """True if one of them is sparse."""
        return any(p.grad is not None and p.grad.is_sparse for p in self.parameters)

    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of parameters and gradients."""
        return {p.dtype for p in self.parameters} | {g.dtype for g in self.values()}

    def unscale_(
        self, scale: Tensor, saturation: float | None, divided: Container[int] = ()
    ) -> Tensor:
        """Divide all gradients in place by the scale.

        As torch's scaler does it, so that all bits agree: gradients are multiplied with
        the reciprocal, but those of the parameters with an id in ``divided`` divided,
        as the kernels of fused optimizers do. A scale that is a power of two makes no
        difference.

        Return 1 where one was NaN, Inf or at least ``saturation`` before, else 0: 0-d
        float32 on the device of the scale.
        """
        # the reciprocal in float64, as torch's scaler: division in float32 may be
        # imprecise on some devices
        wide = scale if scale.device.type == "mps" else scale.double()
        inverse = wide.reciprocal().float()
        alike: dict[tuple[torch.device, torch.dtype, bool], list[Tensor]] = {}
        for parameter, value in self._with_values():
            key = value.device, value.dtype, id(parameter) in divided
            alike.setdefault(key, []).append(value)
        overflow = torch.zeros((), dtype=torch.float32, device=scale.device)
        with torch.no_grad():
            for (device, _, divides), values in alike.items():
                on_device = _any_saturated(values, saturation, device)
                factor = torch.ones_like(inverse) if divides else inverse
                torch._amp_foreach_non_finite_check_and_unscale_(
                    values, on_device, moved(factor, device)
                )
                if divides:
                    torch._foreach_div_(values, moved(scale, device))
                # not the sum: a fused optimizer skips where this equals 1
                on_scale = moved(on_device, scale.device)
                overflow = torch.maximum(overflow, on_scale)
        return overflow


#: A gradient and its version.
_Version = tuple[weakref.ref[Tensor], int]


class GradientVersions:
    """Finds gradients that are not what the last backward left.

    By identity and version; a few by their sum too, since what torch's own scaler does in
    place leaves the version as it was.
    """

    def __init__(self) -> None:
        self._versions: dict[int, _Version] = {}
        self._stale: dict[int, _Version] = {}
        self._sums: dict[int, Tensor] = {}

    def before_backward(self, first: bool) -> None:
        """Note that the first backward of a step adds to gradients which the last step has left."""
        if first:
            self._stale = {
                key: version
                for key, version in self._versions.items()
                if _is_unchanged(version)
            }
            self._versions = {}

    def after_backward(self, parameters: Iterable[Tensor]) -> None:
        """Note the gradients that ``parameters`` have now."""
        with_gradient = self._note(parameters)
        smallest = heapq.nsmallest(_SUMMED, with_gradient, key=_gradient_size)
        self._sums = {
            id(p): p.grad.sum()
            for p in smallest
            if p.grad is not None and not p.grad.is_sparse
        }

    def after_step(self, parameters: Iterable[Tensor]) -> None:
        """Note that ``parameters`` were stepped with the gradients that they have now."""
        self._note(parameters)
        self._sums = {}

    def stale(self, gradients: StepGradients) -> list[str]:
        """Name parameters whose scaled gradient was added to the unscaled one of the
        step before.
        """
        return _names_where(self._is_stale, gradients)

    def changed(self, gradients: StepGradients, *, ask: bool) -> list[str]:
        """Name parameters whose gradient was changed since the last backward.

        ``ask`` compares sums too, which waits for the device.
        """
        return _names_where(lambda p: self._is_changed(p, ask), gradients)

    def _is_stale(self, parameter: Tensor) -> bool:
        before = self._stale.get(id(parameter))
        if before is None or before[0]() is not parameter.grad:
            return False
        return not _is_unchanged(before)

    def _is_changed(self, parameter: Tensor, ask: bool) -> bool:
        before = self._versions.get(id(parameter))
        gradient = parameter.grad
        if before is None or gradient is None:
            return False
        if before[0]() is not gradient or not _is_unchanged(before):
            return True
        total = self._sums.get(id(parameter))
        return ask and total is not None and not _is_equal(gradient.sum(), total)

    def _note(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        with_gradient = [p for p in parameters if p.grad is not None]
        self._versions = {
            id(p): (weakref.ref(p.grad), write_count(p.grad))
            for p in with_gradient
            if p.grad is not None
        }
        return with_gradient


def divides_by_scale(optimizer: Optimizer) -> bool:
    """Return True if the optimizer's kernel divides by torch's scale itself."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Return True if the optimizer itself leaves weights and state alone where its
    ``found_inf`` is 1.

    Then nobody has to ask the device. Not SGD with momentum: torch's fused kernel then
    leaves a momentum buffer that was never written.
    """
    if not divides_by_scale(optimizer):
        return False
    if "grad_scaler" in inspect.signature(optimizer.step).parameters:
        return False
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return not (isinstance(optimizer, SGD) and has_momentum)


def check_loss(loss: Tensor) -> None:
    """Raise ``ScalerError`` for what cannot be run backward as a loss."""
    where = "LossScaler.backward"
    if loss.numel() != 1 or not loss.dtype.is_floating_point:
        dtype = str(loss.dtype).removeprefix("torch.")
        raise ScalerError(
            "the loss is not one floating-point number",
            where=where,
            got=f"shape {list(loss.shape)}, {dtype}",
            do="take its mean or sum",
        )
    if not loss.requires_grad:
        raise ScalerError(
            "the loss has no graph to run backward",
            where=where,
            do="don't detach it or compute it under no_grad",
        )


def largest_of(name: str) -> float:
    """Return the largest finite value of a format, where a device that saturates stops."""
    fmt = parse_format(name)
    if isinstance(fmt, BlockFormat):
        raise ScalerError(
            "a block format has scales of its own",
            where=f"LossScaler(saturation={name!r})",
            expected="fp16",
        )
    return fmt.max_finite


def first_few(names: Sequence[str], most: int = 3) -> str:
    """Write the first few names, and how many more there are.

    >>> first_few(["a", "b", "c", "d"]), first_few(["a"])
    ('a, b, c and 1 more', 'a')
    """
    more = len(names) - most
    text = ", ".join(names[:most])
    return f"{text} and {more} more" if more > 0 else text


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _gradient_size(parameter: Tensor) -> int:
    return 0 if parameter.grad is None else parameter.grad.numel()


def write_count(tensor: Tensor) -> int:
    """Return how often a tensor was written in place; -1 for one of inference mode, and for a lazy
    parameter, which has no memory yet.
    """
    if is_lazy(tensor) or tensor.is_inference():
        return -1
    return tensor._version


def _is_unchanged(version: _Version) -> bool:
    gradient = version[0]()
    return gradient is not None and write_count(gradient) == version[1]


def _names_where(
    condition: Callable[[Tensor], bool], gradients: StepGradients
) -> list[str]:
    places = [i for i, p in enumerate(gradients.parameters) if condition(p)]
    if not places:
        return []  # names walk through the model
    names = gradients.names()
    return [names[place] for place in places]


def _is_equal(left: Tensor, right: Tensor) -> bool:
    return torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


def _any_saturated(
    values: Sequence[Tensor], saturation: float | None, device: torch.device
) -> Tensor:
    """Return 1 if an element reaches ``saturation``, else 0: 0-d float32."""
    if saturation is None:
        return torch.zeros((), dtype=torch.float32, device=device)
    reached = [_reaches(value, saturation) for value in values]
    return torch.stack(reached).any().float()


def _reaches(value: Tensor, limit: float) -> Tensor:
    if not value.numel():
        return torch.zeros((), dtype=torch.bool, device=value.device)
    least, most = torch.aminmax(value)
    return (most >= limit) | (least <= -limit)


def _check_optimizer(optimizers: Sequence[Any], number: int) -> None:
    optimizer = optimizers[number]
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ScalerError(
            "not an optimizer",
            where=f"argument {number} of LossScaler.step",
            got=kind,
        )
    if any(optimizer is other for other in optimizers[:number]):
        raise ScalerError(f"{kind} is given twice", where="LossScaler.step")
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ScalerError(
            f"{kind} evaluates the loss by itself, several times a step, so that it cannot be scaled",
            where="LossScaler.step",
            do="train with it in float32 or bfloat16, without a scaler",
        )


def _fault(parameter: Tensor) -> dict[str, str] | None:
    """Return the parts of an error where the gradient of a parameter cannot be scaled."""
    gradient: Any = parameter.grad
    if torch.float16 in (parameter.dtype, gradient.dtype):
        return {
            "what": "weights in float16 cannot be trained with a loss scale: their updates underflow, and so do unscaled "
            "gradients",
            "expected": "float32 weights",
            "do": "keep the model in float32 and run it under autocast; where memory is short, bfloat16 weights with "
            "stochastic rounding or Kahan summation, without a scaler",
        }
    is_sharded = hasattr(gradient, "_local_tensor")
    if is_sharded or getattr(parameter, "_is_flat_param", False):
        return {
            "what": "a gradient of which each rank holds a part: ranks could disagree about skipping",
            "do": "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
        }
    return None
