"""Factors that divide the channels of an activation and multiply its readers' weights.

The product is the same, ``(x / s) · (s W)``, but outlier channels of the activation
move into weights that have room. SmoothQuant (Xiao et al., arXiv:2211.10438) and the
DMQ balancer of Ascend's AMCT choose s from ranges alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.quantize.weights.matrix import from_matrix, matrix_view
from roundoff.quantize.weights.output_error import (
    check_finite,
)


def input_amax(weight: Tensor, operator: str, groups: int = 1) -> Tensor:
    """Largest magnitude among the weights of each input channel, ``[channels]``.

    >>> input_amax(torch.tensor([[1.0, -4.0], [3.0, 2.0]]), "linear")
    tensor([3., 4.])
    """
    largest = matrix_view(weight, operator, groups).abs().amax(-2)
    return largest.reshape(_channels(weight, operator, groups), -1).amax(-1)


def scale_inputs(
    weight: Tensor, factors: Tensor, operator: str, groups: int = 1
) -> Tensor:
    """The weight with each input channel multiplied by its factor, ``[channels]``.

    The activation is to be divided by the factors.

    >>> scale_inputs(torch.ones(2, 2), torch.tensor([2.0, 0.5]), "linear")
    tensor([[2.0000, 0.5000],
            [2.0000, 0.5000]])
    """
    matrices = matrix_view(weight, operator, groups)
    channels = _channels(weight, operator, groups)
    if factors.shape != (channels,):
        raise QuantizationError(
            "the factors do not fit the weight",
            where=operator,
            expected=f"shape ({channels},), one for each input channel",
            got=f"shape {tuple(factors.shape)}",
        )
    taps = matrices.shape[0] * matrices.shape[2] // channels
    wide = factors.to(weight)[:, None].expand(channels, taps)
    scaled = matrices * wide.reshape(matrices.shape[0], 1, -1)
    return from_matrix(scaled, weight.shape, operator, groups)


def _channels(weight: Tensor, operator: str, groups: int) -> int:
    """How many channels the input has."""
    if operator == "matmul" or operator.startswith("conv_transpose"):
        return weight.shape[0]
    return weight.shape[1] * groups


def smoothquant(
    activation: Tensor, weights: Sequence[Tensor], strength: float = 0.5
) -> Tensor:
    """Factors ``s_j = max|X_j|^α / max|W_j|^(1-α)`` (SmoothQuant, equation 4), ``[channels]``.

    A channel in which activation or weights are all zero has no range to move: its
    factor is 1.

    Args:
        activation: largest magnitude of each channel, ``[channels]``.
        weights: of every operator that reads this activation, the largest magnitude of
            each input channel (``input_amax``).
        strength: α in [0, 1]; 0.5 shares the range evenly.

    Raises:
        QuantizationError: NaN, Inf or negative magnitudes, other shapes, no weights, or
            α out of range.

    Example:
        >>> smoothquant(torch.tensor([16.0, 1.0, 0.0]), [torch.tensor([1.0, 0.25, 2.0])])
        tensor([4., 2., 1.])
    """
    x, w = _ranges("smoothquant", activation, weights, strength, (0.0, 1.0))
    return torch.where((x > 0) & (w > 0), _power(x, w, strength), 1.0)


def dmq(activation: Tensor, weights: Sequence[Tensor], strength: float = 0.5) -> Tensor:
    """Factors of AMCT's DMQ balancer, ``[channels]``.

    They are SmoothQuant's, with rules of their own where a range is zero:

    ==========  =======  ====================================================
    activation  weights  factor
    ==========  =======  ====================================================
    > 0         > 0      ``max|x_c|^α / max|w_c|^(1-α)``
    0           0        1
    0           > 0      ``max(w f) / max|w_c|``: its weights fill their range
    > 0         0        ``max|x_c| / max(x / f)``: its values fill theirs
    ==========  =======  ====================================================

    The maxima of ``w f`` and ``x / f`` go over the channels of the first row; where
    there is none, the factor is 1. Arguments and errors as for ``smoothquant``, with α
    in [0.2, 0.8].

    Example:
        >>> dmq(torch.tensor([16.0, 0.0, 2.0, 0.0]), [torch.tensor([1.0, 8.0, 0.0, 0.0])])
        tensor([4.0000, 0.5000, 0.5000, 1.0000])
    """
    x, w = _ranges("dmq", activation, weights, strength, (0.2, 0.8))
    both = (x > 0) & (w > 0)
    factors = torch.where(both, _power(x, w, strength), 1.0)
    if not bool(both.any()):
        return factors
    weight_top = (w * factors)[both].amax()
    activation_top = (x / factors)[both].amax()
    factors = torch.where((x == 0) & (w > 0), weight_top / w, factors)
    return torch.where((x > 0) & (w == 0), x / activation_top, factors)


def _power(x: Tensor, w: Tensor, strength: float) -> Tensor:
    """``x^α / w^(1-α)`` within 2^±60.

    So neither the factor nor its inverse leaves fp32 (channels of magnitude 1e-30,
    say).
    """
    factors = x.double() ** strength / w.double() ** (1 - strength)
    return factors.clamp_(2.0**-60, 2.0**60).to(x.dtype)


def _ranges(
    where: str,
    activation: Tensor,
    weights: Sequence[Tensor],
    strength: float,
    limits: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """The ranges of the activation and of all weights together, ``[channels]``."""
    check_finite(where, activation=activation)
    for weight in weights:
        check_finite(where, weight=weight)
    fault = _range_fault(activation, weights)
    if not limits[0] <= strength <= limits[1]:
        fault = f"strength {strength}"
    if fault:
        raise QuantizationError(
            "these channels cannot be balanced",
            where=where,
            expected=f"magnitudes ≥ 0 of shape [channels], of the activation and each weight, strength in {list(limits)}",
            got=fault,
            do="input_amax gives those of a weight",
        )
    return activation, torch.stack([w.to(activation) for w in weights]).amax(0)


def _range_fault(activation: Tensor, weights: Sequence[Tensor]) -> str:
    if not weights:
        return "no weights"
    if activation.dim() != 1 or any(w.shape != activation.shape for w in weights):
        shapes = ", ".join(str(tuple(w.shape)) for w in weights)
        return f"shapes {tuple(activation.shape)} and {shapes}"
    if any(bool((t < 0).any()) for t in (activation, *weights)):
        return "magnitudes below 0"
    return ""
