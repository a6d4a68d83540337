"""Channels divided in front of the layers that read them, by factors that cost the output least.

What ``spread.py`` does where a division can be folded into what makes the channels, for all other values: behind a LayerNorm
that a residual branch reads too, or a GELU. The division stays as a factor for each channel, which whatever writes the codes
multiplies with; all operands of the product are integers. With the squared adjoint ``a`` of the output (``importance.py``)
and rounding errors of variance Δ²/12 (Widrow and Kollár, Quantization Noise, 2008, section 3), factors s cost::

    values     E_t[Δ_t²]/12 Σ_c a_c s_c²,           Δ_t = (max_c x_tc/s_c - min_c x_tc/s_c) / levels
    weights    γ Σ_o a_o Δ_o²/12 Σ_c E[x_c²]/s_c²,   Δ_o = max_c |W_oc| s_c / top

with a Δ for each set that shares a scale: a token, a group of its channels, or all of a tensor. One small problem for each
value, minimised by gradient descent on log s over some of its tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from roundoff.formats import Granularity, PerAxis, PerGroup, PerTensor
from roundoff.quantize.calibration import Calibration
from roundoff.quantize.channels.descent import descend
from roundoff.quantize.channels.input_statistics import Inputs, inputs_of
from roundoff.quantize.channels.smoothing_factors import scale_inputs
from roundoff.quantize.channels.spread import GAMMA
from roundoff.quantize.importance import Importance
from roundoff.quantize.model import QuantizedModel
from roundoff.quantize.quantizer import Quantizer
from roundoff.quantize.weights.matrix import matrix_view
from roundoff.quantize.weights.output_error import Gain

#: Tokens of a value that its ranges are taken from.
TOKENS = 512
#: Steps of the descent.
STEPS = 150


def divide_(calibration: Calibration, weights: Importance) -> Gain:
    """Divide what linear layers read by factors for each channel, in place, and multiply their weights by them.

    Args:
        calibration: the model, not calibrated yet, which computes the same function
            afterwards; ranges are taken from the batches.
        weights: what errors cost the output, from ``importance`` of the same model.

    Returns:
        The gain in dB that the sums above predict for the values that were divided. Convolutions, values in formats other
        than integers, and values that no gradient reached are left.
    """
    model = calibration.model
    before = after = 0.0
    count = 0
    every = inputs_of(calibration, tokens=TOKENS)
    for inputs in every:
        problem = _problem(model, inputs, weights)
        if problem is None:
            continue
        factors, first, last = problem.solve()
        if math.isnan(first):
            continue
        if last < first:
            divide_inputs_(model, inputs, factors)
            count += 1
        before, after = before + first, after + min(first, last)
    if not count:
        return Gain("divide", math.nan, math.nan, "no value is divided")
    return Gain(
        "divide",
        -10 * math.log10(before),
        -10 * math.log10(after),
        f"predicted, {count} of {len(every)} values",
    )


def _problem(
    model: QuantizedModel, inputs: Inputs, weights: Importance
) -> _Problem | None:
    """What is to be minimised for a value, None where it is left."""
    first = inputs.readers[0]
    name = model.routes[first.site].uses.get(first.place)
    known = None if name is None else weights.values.get(name)
    results = [weights.results.get(reader.site) for reader in inputs.readers]
    if (
        name is None
        or known is None
        or not inputs.rows.numel()
        or len(known.channel) != len(inputs.largest)
    ):
        return None
    quantizer = model.quantizer(name)
    granularities = [
        model.quantizer(reader.weight).granularity for reader in inputs.readers
    ]
    if (
        not isinstance(granularities[0], PerAxis | PerGroup | PerTensor)
        or quantizer.granularity is None
    ):
        return None
    if quantizer.fmt.one_quantum != 1.0 or any(
        reader.operator not in ("linear", "matmul") for reader in inputs.readers
    ):
        return None
    sides = []
    for reader, result in zip(inputs.readers, results, strict=True):
        if result is None:
            return None
        own = model.quantizer(reader.weight)
        matrix = matrix_view(
            model.model.get_parameter(reader.weight).detach(), reader.operator
        )[0]
        sides.append((matrix, own, result.channel / result.samples))
    return _Problem(inputs.rows, quantizer, known.channel / known.samples, sides)


class _Problem:
    def __init__(
        self,
        rows: Tensor,
        quantizer: Quantizer,
        adjoint: Tensor,
        sides: Sequence[tuple[Tensor, Quantizer, Tensor]],
    ) -> None:
        self.rows, self.quantizer, self.adjoint, self.sides = (
            rows,
            quantizer,
            adjoint,
            sides,
        )
        self.power = rows.square().mean(0)

    def noise(self, logs: Sequence[Tensor]) -> Tensor:
        """What the output loses with these log s."""
        s = logs[0].exp()
        total = self._values(s)
        for matrix, quantizer, adjoint in self.sides:
            total = total + GAMMA * self._weights(
                matrix * s, quantizer, adjoint, self.power / s.square()
            )
        return total / 12

    def _values(self, s: Tensor) -> Tensor:
        own = self.quantizer.granularity
        rows = _grouped(self.rows / s, own)
        high, low = rows.amax(-1).clamp(min=0.0), rows.amin(-1).clamp(max=0.0)
        if isinstance(own, PerTensor):
            high, low = high.amax(0, keepdim=True), low.amin(0, keepdim=True)
        fmt = self.quantizer.fmt
        steps = (high - low) / (fmt.max_finite - fmt.min_finite)
        if fmt.symmetric:
            steps = torch.maximum(high, -low) / fmt.max_finite
        return (
            steps.square().mean(0) * _grouped(self.adjoint * s.square(), own).sum(-1)
        ).sum()

    @staticmethod
    def _weights(
        matrix: Tensor, quantizer: Quantizer, adjoint: Tensor, power: Tensor
    ) -> Tensor:
        own = quantizer.granularity
        largest = _grouped(matrix.abs(), own).amax(-1)
        if isinstance(own, PerTensor):
            largest = largest.amax(0, keepdim=True).expand(len(adjoint), 1)
        steps = largest / quantizer.fmt.max_finite
        return (adjoint[:, None] * steps.square() * _grouped(power, own).sum(-1)).sum()

    def solve(self) -> tuple[Tensor, float, float]:
        """s, and the noise before and after; NaN where there is none."""
        logs, before, after = descend(
            self.noise, [self.rows.shape[-1]], steps=STEPS, rate=0.05
        )
        return logs[0].exp(), before, after


def _grouped(x: Tensor, own: Granularity | None) -> Tensor:
    """The last axis as ``[groups, size]``: one group but for a granularity of groups."""
    size = own.group_size if isinstance(own, PerGroup) else x.shape[-1]
    return x.reshape(*x.shape[:-1], -1, size)


def divide_inputs_(model: QuantizedModel, inputs: Inputs, factors: Tensor) -> None:
    """An explicit division of a value in front of its readers, in place; their weights take the factors ``[channels]``."""
    first = inputs.readers[0]
    name = f"{first.site}:{first.place}"
    shape = [-1, *[1] * (-1 - first.axis)]
    model.divide_(
        name,
        factors.view(shape),
        [(reader.site, reader.place) for reader in inputs.readers],
    )
    known = model.routes[first.site].uses.get(first.place)
    if known is not None and known != name:
        # others may read the value as it was: the divided one has a scale of its own
        own = copy.deepcopy(model.quantizer(known))
        sites = tuple(reader.site for reader in inputs.readers)
        own.name, own.sites = name, sites
        kept = tuple(s for s in model.quantizer(known).sites if s not in sites)
        model.quantizer(known).sites = kept
        for reader in inputs.readers:
            model.routes[reader.site].uses[reader.place] = name
        model.put_(name, own)
        if not kept:
            model.drop_(known)
    with torch.no_grad():
        for reader in inputs.readers:
            weight = model.model.get_parameter(reader.weight)
            weight.copy_(scale_inputs(weight, factors, reader.operator, reader.groups))
