"""What the output loses by an error in each value: squared adjoints, by backward passes.

For a sign vector v of the output's shape, ``g = vᵀ ∂z/∂x`` at a value x has
``E[g²] = |∂z/∂x|²`` per element (as in ``budget.adjoint``), so errors of variance σ²
there cost the output ``Σ σ² E[g²]``. The power is summed over samples, and kept for each
element of a sample while all batches have one shape, else for each channel.

A gradient that is NaN or Inf (a root or norm at 0, a logarithm of 0, 0/0 that ``where``
masks) would make all gradients upstream NaN. At the result of the call where it arises
it becomes 0, and ``Importance.remarks`` say so: errors there count for nothing, all
others as they should.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from roundoff.errors import QuantizationError, WorkloadError
from roundoff.ops import float_tensors
from roundoff.preserve import preserve
from roundoff.quantize.calibration import Calibration
from roundoff.quantize.model import Passing, QuantizedModel
from roundoff.quantize.quantizer import Quantizer
from roundoff.workload import Workload

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

    @property
    def finite(self) -> bool:
        """True if errors can be weighed by this: all but ``power`` is finite."""
        parts = (self.channel, self.low, self.high, self.square)
        # read at once: each reading waits for a GPU
        return bool(torch.stack([part.isfinite().all() for part in parts]).all())

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


@dataclass
class _NonFinite:
    """How many gradients of a call's result were NaN or Inf, of how many."""

    count: int = 0
    of: int = 0


class _StatisticsTaps(Passing):
    """Lets values through unquantized and collects their statistics."""

    def __init__(self, model: QuantizedModel) -> None:
        #: results of calls whose gradients were made finite, by site
        self.mended: dict[str, _NonFinite] = {}
        #: site, elements, and how many of them were not finite, which nobody has read yet
        self._unread: list[tuple[str, int, Tensor]] = []
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
        self.unrouted(site, result)
        if site in self.result_axes and isinstance(result, Tensor):
            return self._tap(self.results, site, result, self.result_axes[site])
        return result

    def unrouted(self, site: str, result: Any) -> Any:
        """Let no gradient of the result be NaN or Inf; return the result itself."""
        for tensor in float_tensors(result):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._finite(site, gradient))  # type: ignore[no-untyped-call]
        return result

    def _finite(self, site: str, gradient: Tensor) -> Tensor | None:
        """Return a gradient with zeros for NaN and Inf; None where there is none."""
        if not gradient.is_cpu:
            bad = ~gradient.isfinite()
            self._unread.append((site, gradient.numel(), bad.sum()))
            return gradient.masked_fill(bad, 0.0)
        # one pass; a sum that overflows is looked at again
        if bool(gradient.sum().isfinite()):
            return None
        bad = ~gradient.isfinite()
        count = int(bad.sum())
        if not count:
            return None
        self._count(site, count, gradient.numel())
        return gradient.masked_fill(bad, 0.0)

    def read_counts(self) -> None:
        """Read what was counted on other devices: once for all gradients of a batch."""
        if not self._unread:
            return
        device = self._unread[0][2].device
        counts = torch.stack([count.to(device) for _, _, count in self._unread])
        for (site, of, _), count in zip(self._unread, counts.tolist(), strict=True):
            if count:
                self._count(site, count, of)
        self._unread.clear()

    def _count(self, site: str, count: int, of: int) -> None:
        row = self.mended.setdefault(site, _NonFinite())
        row.count += count
        row.of += of

    def bias(
        self, _site: str, bias: Tensor, _quantizers: Sequence[Quantizer]
    ) -> Tensor:
        return bias

    def gate(self, _site: str, gate: Tensor) -> Tensor:
        return gate

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

        seen = value.detach()

        def add_gradient(gradient: Tensor) -> Tensor:
            mended = self._finite(name, gradient)
            finite = gradient if mended is None else mended
            if name not in statistics:
                channels = seen.new_zeros(seen.shape[axis])
                statistics[name] = ValueStatistics.zero(channels)
            statistics[name].add(seen, finite, axis)
            return finite

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
    that noise over it is that of SQNR. Several outputs count alike. ``remarks`` say, by
    site, which gradients were not finite; values whose statistics overflow have none.
    """

    values: dict[str, ValueStatistics]
    results: dict[str, ValueStatistics]
    output: float = 1.0
    remarks: dict[str, str] = field(default_factory=dict)

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


class NoGradientError(QuantizationError):
    """Nothing can be weighed: no gradient reaches the output, or none comes back."""


def importance(
    calibration: Calibration,
    *,
    gradients: int = GRADIENT_BATCHES,
    probes: int = 1,
    seed: int = 0,
) -> Importance:
    """Run the unquantized model, and send ``probes`` sign vectors back through it.

    Extremes come from all batches, squared adjoints from the first ``gradients``.

    Raises ``NoGradientError`` where no gradient reaches the output of any of them, or
    torch cannot send one back.
    """
    try:
        return _importance(calibration, gradients, probes, seed, nullcontext())
    except _BackwardError:
        # a value that a derivative needs was written in place: keep copies of such
        keep = torch.autograd.graph.allow_mutation_on_saved_tensors()
    try:
        return _importance(calibration, gradients, probes, seed, keep)
    except _BackwardError as error:
        cause = error.__cause__
        reason = cause.got if isinstance(cause, WorkloadError) else None
        raise _no_gradient(calibration, reason or str(cause)) from error


def _importance(
    calibration: Calibration,
    gradients: int,
    probes: int,
    seed: int,
    keep: AbstractContextManager[Any],
) -> Importance:
    """Weigh errors as ``importance`` does, in one attempt."""
    model = calibration.model
    workload = calibration.workload.with_model(model)
    generator = torch.Generator().manual_seed(seed)
    taps = _StatisticsTaps(model)
    powers: list[float] = []
    weights: dict[str, float] = {}
    with preserve(model), torch.enable_grad(), model.through(taps):
        model.requires_grad_(False)
        with keep:
            for batch in calibration.batches[:gradients]:
                output = _run_with_gradients(workload, batch)
                outputs = workload.judged.tensors(output)
                tensors = {name: t for name, t in outputs.items() if t.requires_grad}
                if tensors:
                    weights = weights or _weights(tensors)
                    powers += _send_back(tensors, weights, probes, generator)
                taps.read_counts()
        with torch.no_grad():
            for batch in calibration.batches[gradients:]:
                workload.run(batch)
    if not powers:
        raise _no_gradient(calibration, "an output without a gradient")
    remarks = _remarks(taps.mended)
    return Importance(
        _finite_ones(taps.values, remarks),
        _finite_ones(taps.results, remarks),
        sum(powers),
        remarks,
    )


def _no_gradient(calibration: Calibration, reason: str) -> NoGradientError:
    return NoGradientError(
        "no gradient reaches the output, so nothing can be weighed",
        where=calibration.workload.name,
        expected="a model that is differentiable",
        got=reason.partition("\n")[0],
        do="choose an observer that needs none: mse",
    )


def _remarks(mended: Mapping[str, _NonFinite]) -> dict[str, str]:
    return {
        site: f"{row.count} of {row.of} gradients are NaN or Inf here "
        "(a root or norm at 0, a logarithm of 0, 0/0): errors of these elements are not weighed"
        for site, row in mended.items()
    }


def _finite_ones(
    statistics: Mapping[str, ValueStatistics], remarks: dict[str, str]
) -> dict[str, ValueStatistics]:
    """Return the statistics that are finite; say of the others that they are not."""
    finite = {}
    for name, row in statistics.items():
        if row.finite:
            finite[name] = row
        else:
            text = (
                "its values or squared gradients overflow: its errors are not weighed"
            )
            remarks.setdefault(name, text)
    return finite


class _BackwardError(Exception):
    """The model cannot run with gradients (``numpy()``), or torch cannot send one back."""


def _run_with_gradients(workload: Workload, batch: Any) -> Any:
    with warnings.catch_warnings():
        # the model asks for values; it has no gradient of its own to lose
        warnings.filterwarnings(
            "ignore", message="Converting a tensor with requires_grad"
        )
        try:
            return workload.run(batch)
        except WorkloadError as error:
            raise _BackwardError from error


def _weights(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return what makes several outputs count alike, whatever their size and scale."""
    if len(tensors) == 1:
        return dict.fromkeys(tensors, 1.0)
    norms = {name: float(_finite_part(t).norm()) for name, t in tensors.items()}
    return {name: 1.0 / norm if norm > 0 else 0.0 for name, norm in norms.items()}


def _send_back(
    tensors: Mapping[str, Tensor],
    weights: Mapping[str, float],
    probes: int,
    generator: torch.Generator,
) -> list[float]:
    """Send sign vectors back from a batch's outputs; return their power for each.

    Elements that are NaN or Inf (masked logits) count for nothing.
    """
    # an output that the first batch had not counts for nothing
    scales = {name: weights.get(name, 0.0) for name in tensors}
    power = sum(
        float(_finite_part(t).square().sum()) * scales[name] ** 2
        for name, t in tensors.items()
    )
    for number in range(probes):
        signs = [_signs(t, generator).mul_(scales[name]) for name, t in tensors.items()]
        more = number + 1 < probes
        try:
            torch.autograd.backward(list(tensors.values()), signs, retain_graph=more)
        except (RuntimeError, NotImplementedError) as error:
            raise _BackwardError from error
    return [power] * probes


def _finite_part(tensor: Tensor) -> Tensor:
    """The finite elements, in fp64."""
    values = tensor.detach().double()
    return values[values.isfinite()]


def _signs(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A sign for each element that is finite, 0 for the others.

    Signs are drawn on the CPU, so that every device gets the same.
    """
    draws = torch.randint(0, 2, tensor.shape, generator=generator)
    signs = draws.to(tensor.device, tensor.dtype) * 2 - 1
    return signs * tensor.detach().isfinite()
