"""The error that a rounded weight makes in its layer's output, and what a repair gains.

All repairs of this folder see the weight of a contracting operator as matrices ``W`` of
shape ``[..., out, in]`` (see ``matrix.py``), and the inputs ``X`` (``in`` × samples) by
their second moments ``H = E[x xᵀ]`` of shape ``[..., in, in]``. The error of the output
is then ``E|(Ŵ - W) x|² = tr((Ŵ - W) H (Ŵ - W)ᵀ)``, without another pass over the data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.budget import sqnr_db
from roundoff.errors import QuantizationError
from roundoff.formats import QParams


@dataclass(frozen=True)
class Gain:
    """SQNR in dB before and after a repair.

    Attributes:
        name: of the repair.
        before_db, after_db: SQNR of what the repair's docstring names.
        note: what else the user has to know, ``""`` for nothing.

    >>> Gain("gptq", 14.0, 17.5).db, Gain("flips", math.inf, math.inf).db
    (3.5, 0.0)
    """

    name: str
    before_db: float
    after_db: float
    note: str = ""

    @property
    def db(self) -> float:
        """How many dB were gained; 0 where both are infinite."""
        if self.before_db == self.after_db:
            return 0.0
        return self.after_db - self.before_db


@dataclass(frozen=True)
class Repaired:
    """A weight on the grid of ``qparams``, in the shape it came in, and the gain."""

    weight: Tensor
    qparams: QParams
    gain: Gain


def quadratic(delta: Tensor, hessian: Tensor) -> Tensor:
    """``δ H δᵀ`` of each row of ``[..., out, in]``: ``[..., out]``, never below 0.

    >>> import torch
    >>> delta = torch.tensor([[1.0, -1.0], [2.0, 0.0]])
    >>> quadratic(delta, torch.tensor([[2.0, 1.0], [1.0, 3.0]]))
    tensor([3., 8.])
    """
    return ((delta @ hessian) * delta).sum(-1).clamp_(min=0.0)


def relative_db(error: Tensor | float, signal: Tensor | float) -> float:
    """SQNR in dB of error power against signal power, both summed.

    No error gives infinity; an error without a signal minus infinity.

    >>> relative_db(1.0, 100.0), relative_db(0.0, 0.0), relative_db(1.0, 0.0)
    (20.0, inf, -inf)
    """
    error_power, signal_power = _totals(error, signal)
    if error_power == 0:
        return sqnr_db(0.0)
    return sqnr_db(error_power / signal_power if signal_power > 0 else math.inf)


def _totals(error: Tensor | float, signal: Tensor | float) -> tuple[float, float]:
    """The sums of both, read at once: each reading waits for a GPU."""
    if (
        isinstance(error, Tensor)
        and isinstance(signal, Tensor)
        and error.device == signal.device
    ):
        sums = error.double().sum(), signal.double().sum()
        error_power, signal_power = torch.stack(sums).tolist()
        return error_power, signal_power
    return _total(error), _total(signal)


def _total(power: Tensor | float) -> float:
    return float(power.double().sum()) if isinstance(power, Tensor) else power


def output_db(quantized: Tensor, weight: Tensor, hessian: Tensor) -> float:
    """SQNR of the layer's output in dB: ``tr(W H Wᵀ) / tr(Δ H Δᵀ)``, over all matrices."""
    return relative_db(
        quadratic(quantized - weight, hessian), quadratic(weight, hessian)
    )


def check_finite(where: str, **tensors: Tensor | None) -> None:
    """Raise QuantizationError unless every tensor is floating point and finite."""
    present = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in present.items():
        if not tensor.is_floating_point():
            raise QuantizationError(
                f"the {name} has no floating-point values",
                where=where,
                expected="a floating-point tensor",
                got=f"{tensor.dtype} of shape {tuple(tensor.shape)}",
            )
    if _are_finite(list(present.values())):
        return
    for name, tensor in present.items():
        bad = tensor.numel() - int(tensor.isfinite().sum())
        if bad:
            raise QuantizationError(
                f"the {name} holds NaN or Inf",
                where=where,
                expected="finite values",
                got=f"{bad} of {tensor.numel()} not finite, shape {tuple(tensor.shape)}",
                do="find where it comes from (roundoff overflow), or leave this operator in high precision",
            )


def _are_finite(tensors: Sequence[Tensor]) -> bool:
    """Return True where all are; those of one device are read at once."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        # not a count, which takes three times as long
        flag = tensor.isfinite().all()
        by_device.setdefault(tensor.device, []).append(flag)
    return all(bool(torch.stack(flags).all()) for flags in by_device.values())


def check_matrices(where: str, weight: Tensor, hessian: Tensor | None) -> None:
    """Raise QuantizationError unless weight and Hessian are matrices of one layer.

    The weight is ``[..., out, in]`` and not empty, the Hessian ``[..., in, in]``, with
    the weight's leading axes or none.
    """
    check_finite(where, weight=weight, hessian=hessian)
    if weight.dim() < 2 or weight.numel() == 0:
        raise QuantizationError(
            "the weight is no matrix",
            where=where,
            expected="shape [..., out, in] without a length of 0",
            got=f"shape {tuple(weight.shape)}",
            do="see matrix_view for convolutions",
        )
    if hessian is None:
        return
    wanted = (*weight.shape[:-2], weight.shape[-1], weight.shape[-1])
    if hessian.dim() < 2 or tuple(hessian.shape) not in (wanted, wanted[-2:]):
        raise QuantizationError(
            "the Hessian does not fit the weight",
            where=where,
            expected=f"shape {wanted}",
            got=f"shape {tuple(hessian.shape)}",
            do="one matrix per group: see matrix_view and Hessian",
        )


def check_kept(where: str, weight: Tensor, kept: Tensor | None) -> None:
    """Raise QuantizationError unless ``kept`` masks the weight's nonzero elements.

    It is bool, of the weight's shape, and the weight is 0 where it is False.
    """
    if kept is None:
        return
    if kept.dtype != torch.bool or kept.shape != weight.shape:
        raise QuantizationError(
            "the mask does not fit the weight",
            where=where,
            expected=f"bool of shape {tuple(weight.shape)}",
            got=f"{kept.dtype} of shape {tuple(kept.shape)}",
        )
    nonzero = int(((weight != 0) & ~kept).sum())
    if nonzero:
        raise QuantizationError(
            "a weight that is not kept is not 0",
            where=where,
            expected="pruned weights that are 0",
            got=f"{nonzero} of {int((~kept).sum())} others",
            do="multiply the weight by its mask first",
        )
