"""Divide channels in front of their readers by factors that cost the output least.

What ``spread.py`` does where a division can be folded into what makes the channels,
this does for all other values: behind a LayerNorm that a residual branch reads too, or
a GELU. The division stays as a factor for each channel, which whatever writes the codes
multiplies with; all operands of the product are integers. With the squared adjoint
``a`` of the output (``importance.py``) and rounding errors of variance Δ²/12 (Widrow
and Kollár, Quantization Noise, 2008, section 3), factors s cost::

    values   E_t[Δ_t²]/12 Σ_c a_c s_c²
    weights  γ Σ_o a_o Δ_o²/12 Σ_c E[x_c²]/s_c²

    Δ_t = (max_c x_tc/s_c - min_c x_tc/s_c) / levels
    Δ_o = max_c |W_oc| s_c / top

with a Δ for each set that shares a scale: a token, a group of its channels, or all of a
tensor. One small problem for each value, minimised by gradient descent on log s over
some of its tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.formats import Granularity, PerAxis, PerGroup, PerTensor
from roundoff.quantize.calibration import Calibration
from roundoff.quantize.channels.input_statistics import (
    InputStatistics,
    input_statistics,
)
from roundoff.quantize.channels.smoothing_factors import scale_inputs
from roundoff.quantize.channels.spread import GAMMA, descend
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
    """Divide what linear layers read by factors for each channel, in place.

    Their weights are multiplied by the factors.

    Args:
        calibration: the model, not calibrated yet, which computes the same function
            afterwards, and the batches that ranges are taken from.
        weights: what errors cost the output, from ``importance`` of the same model.

    Returns:
        The gain in dB that the sums above predict for the values that were divided.
        Convolutions, values in formats other than integers, and values that no gradient
        reached are left.
    """
    model = calibration.model
    before = 0.0
    after = 0.0
    count = 0
    values = input_statistics(calibration, tokens=TOKENS)
    for inputs in values:
        noise = _division_noise(model, inputs, weights)
        if noise is None:
            continue
        sizes = [inputs.rows.shape[-1]]
        logs, first, last = descend(
            noise, sizes, steps=STEPS, rate=0.05, device=inputs.rows.device
        )
        if math.isnan(first):
            continue
        if last < first:
            divide_inputs_(model, inputs, logs[0].exp())
            count += 1
        before += first
        after += min(first, last)
    if not count:
        return Gain("divide", math.nan, math.nan, "no value is divided")
    note = f"predicted, {count} of {len(values)} values"
    return Gain("divide", -10 * math.log10(before), -10 * math.log10(after), note)


@dataclass(frozen=True)
class Reading:
    """A weight ``[out, in]`` that reads the value, its quantizer, and a_o of its results."""

    matrix: Tensor
    quantizer: Quantizer
    adjoint: Tensor


class DivisionNoise:
    """The sums of the module docstring, for one value."""

    def __init__(
        self,
        rows: Tensor,
        quantizer: Quantizer,
        adjoint: Tensor,
        readings: Sequence[Reading],
    ) -> None:
        self.rows = rows
        self.quantizer = quantizer
        self.adjoint = adjoint
        self.readings = readings
        self.power = rows.square().mean(0)

    def __call__(self, logs: Sequence[Tensor]) -> Tensor:
        """The noise of the output with these log s."""
        s = logs[0].exp()
        total = self._values(s)
        for reading in self.readings:
            total = total + GAMMA * self._weights(reading, s)
        return total / 12

    def _values(self, s: Tensor) -> Tensor:
        granularity = self.quantizer.granularity
        rows = _grouped(self.rows / s, granularity)
        high = rows.amax(-1).clamp(min=0.0)
        low = rows.amin(-1).clamp(max=0.0)
        if isinstance(granularity, PerTensor):
            high = high.amax(0, keepdim=True)
            low = low.amin(0, keepdim=True)
        fmt = self.quantizer.fmt
        if fmt.symmetric:
            steps = torch.maximum(high, -low) / fmt.max_finite
        else:
            steps = (high - low) / (fmt.max_finite - fmt.min_finite)
        adjoint = _grouped(self.adjoint * s.square(), granularity).sum(-1)
        return (steps.square().mean(0) * adjoint).sum()

    def _weights(self, reading: Reading, s: Tensor) -> Tensor:
        granularity = reading.quantizer.granularity
        adjoint = reading.adjoint
        largest = _grouped((reading.matrix * s).abs(), granularity).amax(-1)
        if isinstance(granularity, PerTensor):
            largest = largest.amax(0, keepdim=True).expand(len(adjoint), 1)
        steps = largest / reading.quantizer.fmt.max_finite
        power = _grouped(self.power / s.square(), granularity).sum(-1)
        return (adjoint[:, None] * steps.square() * power).sum()


def _division_noise(
    model: QuantizedModel, inputs: InputStatistics, weights: Importance
) -> DivisionNoise | None:
    """The noise to minimise for a value, None where it is left."""
    first = inputs.readers[0]
    name = model.routes[first.site].uses.get(first.place)
    statistics = None if name is None else weights.values.get(name)
    if name is None or statistics is None or not inputs.rows.numel():
        return None
    if len(statistics.channel) != len(inputs.largest):
        return None
    quantizer = model.quantizer(name)
    if not _divisible(quantizer, model.quantizer(first.weight)):
        return None
    readings = []
    for reader in inputs.readers:
        result = weights.results.get(reader.site)
        if result is None or reader.operator not in ("linear", "matmul"):
            return None
        parameter = model.model.get_parameter(reader.weight).detach()
        matrix = matrix_view(parameter, reader.operator)[0]
        adjoint = result.channel / result.samples
        readings.append(Reading(matrix, model.quantizer(reader.weight), adjoint))
    adjoint = statistics.channel / statistics.samples
    return DivisionNoise(inputs.rows, quantizer, adjoint, readings)


def _divisible(value: Quantizer, weight: Quantizer) -> bool:
    """True if the sums hold for these granularities and for the value's format."""
    if not isinstance(weight.granularity, PerAxis | PerGroup | PerTensor):
        return False
    return value.granularity is not None and value.fmt.one_quantum == 1.0


def _grouped(x: Tensor, granularity: Granularity | None) -> Tensor:
    """The last axis as ``[groups, size]``; one group unless scales are by group."""
    size = x.shape[-1]
    if isinstance(granularity, PerGroup):
        size = granularity.group_size
    return x.reshape(*x.shape[:-1], -1, size)


def divide_inputs_(
    model: QuantizedModel, inputs: InputStatistics, factors: Tensor
) -> None:
    """Divide a value in front of its readers, in place.

    Their weights take the factors ``[channels]``.
    """
    first = inputs.readers[0]
    name = f"{first.site}:{first.place}"
    shape = [-1, *[1] * (-1 - first.axis)]
    places = [(reader.site, reader.place) for reader in inputs.readers]
    model.divide_(name, factors.view(shape), places)
    shared = model.routes[first.site].uses.get(first.place)
    if shared is not None and shared != name:
        _separate_(model, inputs, shared, name)
    with torch.no_grad():
        for reader in inputs.readers:
            weight = model.model.get_parameter(reader.weight)
            weight.copy_(scale_inputs(weight, factors, reader.operator, reader.groups))


def _separate_(
    model: QuantizedModel, inputs: InputStatistics, shared: str, name: str
) -> None:
    """Give the divided value its own quantizer: others may read it undivided."""
    before = model.quantizer(shared)
    divided = copy.deepcopy(before)
    divided.name = name
    divided.sites = tuple(reader.site for reader in inputs.readers)
    before.sites = tuple(site for site in before.sites if site not in divided.sites)
    for reader in inputs.readers:
        model.routes[reader.site].uses[reader.place] = name
    model.put_(name, divided)
    if not before.sites:
        model.drop_(shared)
