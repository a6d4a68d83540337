"""What the output loses by an error in each value: squared adjoints, by backward passes.

For a sign vector v of the output's shape, ``g = vᵀ ∂z/∂x`` at a value x has
``E[g²] = |∂z/∂x|²`` per element (as in ``budget.adjoint``), so errors of variance σ²
there cost the output ``Σ σ² E[g²]``. The power is summed over samples, and kept for each
element of a sample while all batches have one shape, else for each channel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundoff.errors import QuantizationError
from roundoff.preserve import preserve
from roundoff.quantize.calibration import Calibration
from roundoff.quantize.model import Passing, QuantizedModel
from roundoff.quantize.quantizer import Quantizer

#: Batches that gradients are sent back through.
GRADIENT_BATCHES = 2


@dataclass
class ValueStatistics:
    """Of one value, over all samples and probes: squared adjoint, extremes and power.

    ``power`` (squared adjoint) has the shape of one sample, or is NaN where batches
    differ in shape. ``channel`` (squared adjoint), ``low``, ``high`` and ``square`` (x²,
    summed over samples) have one number for each index of the axis that the reader
    contracts, or that the call writes its channels along.
    """

    power: Tensor
    channel: Tensor
    low: Tensor
    high: Tensor
    square: Tensor
    samples: int = 0

    @classmethod
    def zero(cls, channels: Tensor) -> ValueStatistics:
        """Nothing seen yet; ``channels`` is zeros, one for each channel."""
        inf = torch.inf
        return cls(channels.sum(), channels, channels + inf, channels - inf, channels)

    def add(self, value: Tensor, gradient: Tensor, axis: int) -> None:
        """Add one batch and its gradient."""
        squared = gradient.square()
        sample = squared.sum(0)
        if self.power.shape == sample.shape or not self.samples:
            self.power = self.power + sample
        else:
            self.power = self.power.new_full((), float("nan"))
        self.channel = self.channel + _by_channel(squared, axis).sum(0)
        self.extend(value, axis)
        square = _by_channel(value, axis).square().mean(0) * len(value)
        self.square = self.square + square
        self.samples += len(value)

    def extend(self, value: Tensor, axis: int) -> None:
        """Widen the extremes by a batch without gradients."""
        rows = _by_channel(value, axis)
        self.low = torch.minimum(self.low, rows.amin(0))
        self.high = torch.maximum(self.high, rows.amax(0))


def _by_channel(value: Tensor, axis: int) -> Tensor:
    """View a value as ``[rows, channels]``."""
    moved = value.movedim(axis, -1)
    return moved.reshape(-1, moved.shape[-1])


class _StatisticsTaps(Passing):
    """Lets values through unquantized and collects their statistics."""

    def __init__(self, model: QuantizedModel) -> None:
        self.values: dict[str, ValueStatistics] = {}
        self.results: dict[str, ValueStatistics] = {}
        #: values whose channels are others from batch to batch
        self.varying: set[str] = set()
        self.result_axes = _result_axes(model)

    def value(self, name: str, quantizer: Quantizer, value: Tensor) -> Tensor:
        if quantizer.weight:
            return value
        return self._tap(self.values, name, value, channel_axis(quantizer, value))

    def result(self, site: str, result: Any) -> Any:
        if site in self.result_axes and isinstance(result, Tensor):
            return self._tap(self.results, site, result, self.result_axes[site])
        return result

    def bias(
        self, _site: str, bias: Tensor, _quantizers: Sequence[Quantizer]
    ) -> Tensor:
        return bias

    def unknown(self, model: QuantizedModel, site: str) -> None:
        """Say nothing: the pass that rounds meets the call too."""

    def _tap(
        self,
        statistics: dict[str, ValueStatistics],
        name: str,
        value: Tensor,
        axis: int,
    ) -> Tensor:
        """Collect a value, and its gradient where a backward pass comes."""
        if value.ndim == 0 or value.numel() == 0 or name in self.varying:
            return value
        if name in statistics and len(statistics[name].channel) != value.shape[axis]:
            self.varying.add(name)
            del statistics[name]
            return value
        if not torch.is_grad_enabled():
            if name in statistics:
                statistics[name].extend(value, axis)
            return value

        def add_gradient(gradient: Tensor) -> None:
            if name not in statistics:
                channels = value.detach().new_zeros(value.shape[axis])
                statistics[name] = ValueStatistics.zero(channels)
            statistics[name].add(value.detach(), gradient, axis)

        source = value if value.requires_grad else value.detach().requires_grad_()
        # a copy: neither a leaf nor what a backward pass needs may be written in place
        edge = source.clone()
        edge.register_hook(add_gradient)  # type: ignore[no-untyped-call]
        return edge


def _result_axes(model: QuantizedModel) -> dict[str, int]:
    """The axis of the channels in the results of the sites that read a weight."""
    shapes = {name: p.shape for name, p in model.model.named_parameters()}
    axes: dict[str, int] = {}
    for name, quantizer in model.named():
        if quantizer.weight and name in shapes:
            ndim = len(shapes[name])
            axis = 1 - ndim if ndim > 2 else -1
            axes |= dict.fromkeys(quantizer.sites, axis)
    return axes


def channel_axis(quantizer: Quantizer, value: Tensor) -> int:
    """The axis of a value's channels.

    That is what its reader contracts, or what the call that made it writes its channels
    along; the last one where a value has no such axis.
    """
    axis = quantizer.operand.reduce
    return axis if -value.ndim <= axis < value.ndim else -1


@dataclass
class Importance:
    """Statistics of values that have quantizers, and of results of calls with weights.

    ``output`` is the sum of the squared outputs that the squared adjoints belong to, so
    that noise over it is that of SQNR. Several outputs count alike.
    """

    values: dict[str, ValueStatistics]
    results: dict[str, ValueStatistics]
    output: float = 1.0

    def power(self, name: str, value: Tensor, axis: int) -> Tensor | None:
        """Return the squared adjoint of each element of a batch, up to a factor.

        ``axis`` is that of the value's channels. None where the value has no statistics,
        or where its channels are others than they were.
        """
        statistics = self.values.get(name)
        if statistics is None or len(statistics.channel) != value.shape[axis]:
            return None
        if statistics.power.shape == value.shape[1:]:
            return statistics.power.expand(value.shape)
        shape = [1] * value.ndim
        shape[axis] = -1
        return statistics.channel.view(shape).expand(value.shape)


def importance(
    calibration: Calibration,
    *,
    gradients: int = GRADIENT_BATCHES,
    probes: int = 1,
    seed: int = 0,
) -> Importance:
    """Run the unquantized model, and send ``probes`` sign vectors back through it.

    Extremes come from all batches, squared adjoints from the first ``gradients``.

    Raises ``QuantizationError`` where no gradient reaches the output of any of them.
    """
    model = calibration.model
    workload = calibration.workload.with_model(model)
    generator = torch.Generator().manual_seed(seed)
    taps = _StatisticsTaps(model)
    powers: list[float] = []
    weights: dict[str, float] = {}
    with preserve(model), torch.enable_grad(), model.through(taps):
        model.requires_grad_(False)
        for batch in calibration.batches[:gradients]:
            outputs = workload.judged.tensors(workload.run(batch))
            tensors = {name: t for name, t in outputs.items() if t.requires_grad}
            if tensors:
                weights = weights or _weights(tensors)
                powers += _send_back(tensors, weights, probes, generator)
        with torch.no_grad():
            for batch in calibration.batches[gradients:]:
                workload.run(batch)
    if not powers:
        raise QuantizationError(
            "no gradient reaches the output, so nothing can be weighed",
            where=workload.name,
            expected="a model that is differentiable",
            got="an output without a gradient",
            do="choose an observer that needs none: mse",
        )
    return Importance(taps.values, taps.results, sum(powers))


def _weights(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return what makes several outputs count alike, whatever their size and scale."""
    if len(tensors) == 1:
        return dict.fromkeys(tensors, 1.0)
    norms = {name: float(t.detach().double().norm()) for name, t in tensors.items()}
    return {name: 1.0 / norm if norm > 0 else 0.0 for name, norm in norms.items()}


def _send_back(
    tensors: Mapping[str, Tensor],
    weights: Mapping[str, float],
    probes: int,
    generator: torch.Generator,
) -> list[float]:
    """Send sign vectors back from a batch's outputs; return their power for each."""
    # an output that the first batch had not counts for nothing
    scales = {name: weights.get(name, 0.0) for name in tensors}
    power = sum(
        float(t.detach().double().square().sum()) * scales[name] ** 2
        for name, t in tensors.items()
    )
    for number in range(probes):
        signs = [_signs(t, generator).mul_(scales[name]) for name, t in tensors.items()]
        more = number + 1 < probes
        torch.autograd.backward(list(tensors.values()), signs, retain_graph=more)
    return [power] * probes


def _signs(tensor: Tensor, generator: torch.Generator) -> Tensor:
    return (
        torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.dtype) * 2 - 1
    )
