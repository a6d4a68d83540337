"""Bias correction: the mean of the output's error, channel by channel, taken back into the bias.

Nagel, van Baalen, Blankevoort and Welling, arXiv:1906.04721, section 4.2: with ``Ŵ = W + ε`` the output is off by
``ε E[x]`` on average (equation 17 there), and that is subtracted; here empirically, from outputs seen (their appendix D).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.quantize.weights.hessian import Hessian
from roundoff.quantize.weights.output_error import (
    Gain,
    check_finite,
    check_matrices,
    relative_db,
)


@dataclass(frozen=True)
class BiasCorrection:
    """What to add to the bias, ``[channels]``; 0 where ``applied`` is False."""

    correction: Tensor
    applied: Tensor
    gain: Gain


class OutputErrors:
    """Sums over batches of an operator's output error, from which the bias is corrected where that really helps.

    On the outputs seen, taking their own mean away always lowers the error; on others it may raise it. So the first and
    the second half of each batch are kept apart: a channel is corrected only if the mean of each half lowers the squared
    error of the other, both together. The correction itself is the mean over all.

    Example:
        >>> errors = OutputErrors()
        >>> exact = torch.tensor([[1.0, 0.0], [2.0, 1.0], [3.0, 0.0], [4.0, -1.0]])
        >>> errors.add(exact, exact - torch.tensor([0.5, 0.0]))
        >>> found = errors.correction()
        >>> found.correction, found.gain.after_db
        (tensor([0.5000, 0.0000]), inf)
    """

    def __init__(self, axis: int = 1) -> None:
        self._axis = axis
        self._sums: Tensor | None = None  # [half, (count, error, error²), channels]
        self._signal = 0.0
        self._seen = 0

    def add(self, exact: Tensor, quantized: Tensor) -> None:
        """One batch of outputs, in full precision and quantized, batch along axis 0, channels along ``axis``.

        A batch of one sample counts as a half by itself, every other one as the second. Raises QuantizationError for NaN
        and Inf, and for shapes that differ; the sums are then as before.
        """
        check_finite("OutputErrors.add", exact=exact, quantized=quantized)
        inside = (
            -exact.dim() <= self._axis < exact.dim() and self._axis % exact.dim() != 0
        )
        channels = exact.shape[self._axis] if inside else 0
        if (
            exact.shape != quantized.shape
            or channels < 1
            or self._sums is not None
            and channels != self._sums.shape[-1]
        ):
            raise QuantizationError(
                "the outputs do not fit",
                where="OutputErrors.add",
                expected=f"equal shapes with channels along axis {self._axis}, as many in each batch",
                got=f"{tuple(exact.shape)} and {tuple(quantized.shape)}",
            )
        error = exact.double() - quantized.double()
        middle = (exact.shape[0] + 1) // 2 if exact.shape[0] > 1 else self._seen % 2
        halves = []
        for part in (error[:middle], error[middle:]):
            rows = part.movedim(self._axis, -1).reshape(-1, channels)
            count = error.new_full((channels,), len(rows))
            halves.append(torch.stack([count, rows.sum(0), rows.square().sum(0)]))
        sums = torch.stack(halves)
        self._sums = sums if self._sums is None else self._sums + sums
        self._signal += float(exact.double().square().sum())
        self._seen += 1

    def correction(self, dtype: torch.dtype = torch.float32) -> BiasCorrection:
        """The correction and the output's SQNR in dB, without it and with it, as measured on the halves it was not from.

        Raises QuantizationError before any batch was seen. With a single sample nothing is corrected.
        """
        if self._sums is None:
            raise QuantizationError(
                "no outputs were seen",
                where="OutputErrors",
                do="call add with the operator's outputs",
            )
        count, total, squares = self._sums.unbind(1)
        mean = total / count.clamp(min=1)
        other = mean.flip(0)  # each half is judged with the mean of the other one
        judged = squares - 2 * other * total + count * other.square()
        applied = (judged.sum(0) < squares.sum(0)) & (count > 0).all(0)
        before, after = (
            squares.sum(0),
            torch.where(applied, judged.sum(0), squares.sum(0)).clamp_(min=0.0),
        )
        whole = total.sum(0) / count.sum(0).clamp(min=1)
        gain = Gain(
            "bias correction",
            relative_db(before, self._signal),
            relative_db(after, self._signal),
            f"{int(applied.sum())} of {len(applied)} channels corrected",
        )
        return BiasCorrection(torch.where(applied, whole, 0.0).to(dtype), applied, gain)


def mean_error(weight: Tensor, quantized: Tensor, hessian: Hessian) -> Tensor:
    """``E[y - ŷ] = W E[x] - Ŵ E[x̂]``, to be added to the bias: shape ``[groups, out]``, from the means of the inputs.

    Without full-precision inputs in ``hessian`` this is ``-ε E[x̂]``, equation 17. It belongs to weights that were
    rounded under ``Hessian.centred``, whose loss leaves the mean to the bias.

    Args:
        weight: ``[groups, out, in]`` (``matrix_view``).
        quantized: the same shape.
        hessian: of the operator's inputs.

    Raises:
        QuantizationError: NaN or Inf, shapes that do not fit, or no inputs were seen.

    Example:
        >>> hessian = Hessian()
        >>> hessian.add(torch.tensor([[1.0, 3.0], [1.0, 1.0]]))
        >>> mean_error(torch.tensor([[[0.4, 0.6]]]), torch.tensor([[[0.5, 0.5]]]), hessian)
        tensor([[0.1000]])
    """
    check_matrices("mean_error", weight, hessian.matrix)
    check_finite("mean_error", quantized=quantized)
    mean = hessian.mean
    exact = mean if hessian.reference_mean is None else hessian.reference_mean
    return (
        (weight @ exact[..., None].to(weight))
        - (quantized @ mean[..., None].to(weight))
    ).squeeze(-1)
