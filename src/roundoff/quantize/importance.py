"""What the output loses by an error in each value: squared adjoints, from a few backward passes.

For a sign vector v of the output's shape, ``g = vᵀ ∂z/∂x`` at a value x has ``E[g²] = |∂z/∂x|²`` per element (as in
``attribute.adjoint``), so errors of variance σ² there cost the output ``Σ σ² E[g²]``. The power is summed over samples, and
kept for each element of a sample while all batches have one shape, else for each channel.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from roundoff.budget import draw_signs
from roundoff.errors import QuantizationError
from roundoff.preserve import preserve
from roundoff.quantize.model import Passing, QuantizedModel
from roundoff.quantize.quantizer import Quantizer
from roundoff.workload import Workload, named_tensors

#: Batches that gradients are sent back through.
GRADIENTS = 2


@dataclass
class Statistics:
    """Of one value, over all samples (and probes): squared adjoint, extremes and power for each channel, samples seen.

    ``power`` has the shape of one sample; ``channel``, ``low``, ``high`` and ``square`` (x², summed over samples) have one
    number for each index of the axis that the reader contracts, or that the call writes its channels along.
    """

    power: Tensor
    channel: Tensor
    low: Tensor
    high: Tensor
    square: Tensor
    samples: int = 0

    def add(self, value: Tensor, gradient: Tensor, axis: int) -> None:
        """One batch."""
        squared, sample = gradient.square(), gradient.square().sum(0)
        fits = self.power.shape == sample.shape or not self.samples
        self.power = (
            self.power + sample if fits else self.power.new_full((), float("nan"))
        )
        self.channel = self.channel + _channels(squared, axis).sum(0)
        self.extend(value, axis)
        self.square = self.square + _channels(value, axis).square().mean(0) * len(value)
        self.samples += len(value)

    def extend(self, value: Tensor, axis: int) -> None:
        """The extremes of a batch without gradients."""
        rows = _channels(value, axis)
        self.low, self.high = (
            torch.minimum(self.low, rows.amin(0)),
            torch.maximum(self.high, rows.amax(0)),
        )


def _channels(value: Tensor, axis: int) -> Tensor:
    """A value as ``[rest, channels]``."""
    moved = value.movedim(axis, -1)
    return moved.reshape(-1, moved.shape[-1])


class _Taps(Passing):
    def __init__(self, model: QuantizedModel) -> None:
        self.values: dict[str, Statistics] = {}
        self.results: dict[str, Statistics] = {}
        self.varying: set[str] = set()
        weights = {
            site: name for name, q in model.named() if q.weight for site in q.sites
        }
        shapes = {name: p.shape for name, p in model.model.named_parameters()}
        #: sites that read a weight, and the axis of their results' channels
        self.axes = {
            s: 1 - len(shapes[n]) if len(shapes[n]) > 2 else -1
            for s, n in weights.items()
            if n in shapes
        }

    def value(self, name: str, quantizer: Quantizer, value: Tensor) -> Tensor:
        return (
            value
            if quantizer.weight
            else self._tap(self.values, name, value, channel_axis(quantizer, value))
        )

    def result(self, site: str, result: Any) -> Any:
        known = isinstance(result, Tensor) and site in self.axes
        return (
            self._tap(self.results, site, result, self.axes[site]) if known else result
        )

    def bias(self, _site: str, bias: Tensor, _quantizers: list[Quantizer]) -> Tensor:
        return bias

    def unknown(self, model: QuantizedModel, site: str) -> None:
        """The pass that rounds will see it too, and says so."""

    def _tap(
        self, found: dict[str, Statistics], name: str, value: Tensor, axis: int
    ) -> Tensor:
        if value.ndim == 0 or value.numel() == 0 or name in self.varying:
            return value
        if name in found and len(found[name].channel) != value.shape[axis]:
            self.varying.add(name)  # a channel is not the same thing in every batch
            del found[name]
            return value
        if not torch.is_grad_enabled():
            if name in found:
                found[name].extend(value, axis)
            return value
        # a copy: neither a leaf nor what a backward pass needs may be written in place
        edge = (
            value if value.requires_grad else value.detach().requires_grad_()
        ).clone()

        def arrived(gradient: Tensor) -> None:
            if name not in found:
                zero = value.detach().new_zeros(value.shape[axis])
                found[name] = Statistics(
                    zero.sum(), zero, zero + torch.inf, zero - torch.inf, zero
                )
            found[name].add(value.detach(), gradient, axis)

        edge.register_hook(arrived)  # type: ignore[no-untyped-call]
        return edge


def channel_axis(quantizer: Quantizer, value: Tensor) -> int:
    """The axis of a value's channels: what its reader contracts, or what the call that made it writes its channels along."""
    axis = quantizer.operand.reduce
    return axis if -value.ndim <= axis < value.ndim else -1


@dataclass
class Importance:
    """Statistics of the values that have quantizers, and of the results of the calls that read weights.

    ``output``: the sum of the squared outputs that the squared adjoints belong to, so that noise over it is that of SQNR.
    """

    values: dict[str, Statistics]
    results: dict[str, Statistics]
    output: float = 1.0

    def power(self, name: str, value: Tensor, axis: int) -> Tensor | None:
        """The squared adjoint of each element of a batch of this value, whose channels lie on ``axis``, up to a factor.

        None where it has none, or where its channels are others than they were.
        """
        known = self.values.get(name)
        if known is None or len(known.channel) != value.shape[axis]:
            return None
        if known.power.shape == value.shape[1:]:
            return known.power.expand(value.shape)
        shape = [1] * value.ndim
        shape[axis] = -1
        return known.channel.view(shape).expand(value.shape)


def importance(
    model: QuantizedModel,
    workload: Workload,
    batches: Iterable[Any],
    *,
    gradients: int = GRADIENTS,
    probes: int = 1,
    seed: int = 0,
) -> Importance:
    """Run the unquantized model on batches, and on the first of them send ``probes`` sign vectors back through it.

    Extremes come from all batches, squared adjoints from ``gradients`` of them.

    Raises ``QuantizationError`` where no gradient reaches the output of any of them.
    """
    generator, reached, power = torch.Generator().manual_seed(seed), False, 0.0
    taps, own = _Taps(model), workload.with_model(model)
    with preserve(model), torch.enable_grad(), model.through(taps):
        model.requires_grad_(False)
        for index, batch in enumerate(batches):
            if index >= gradients:
                with torch.no_grad():
                    own.run(batch)
                continue
            tensors = [
                t for t in named_tensors(own.run(batch)).values() if t.requires_grad
            ]
            if not tensors:
                continue
            reached = True
            for number in range(probes):
                signs = [draw_signs(t.shape, generator, t) for t in tensors]
                torch.autograd.backward(
                    tensors, signs, retain_graph=number + 1 < probes
                )
                power += sum(float(t.detach().double().square().sum()) for t in tensors)
    if not reached:
        raise QuantizationError(
            "no gradient reaches the output, so nothing can be weighed",
            where=workload.name,
            expected="a model that is differentiable",
            got="an output without a gradient",
            do="choose an observer that needs none: mse",
        )
    return Importance(taps.values, taps.results, power)
