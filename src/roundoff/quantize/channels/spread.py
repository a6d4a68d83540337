"""Channel scales that cost the output least: equalisation by error, not by ranges.

Cross-layer equalisation (``equalise.py``) makes weight ranges equal, and SmoothQuant's
rule splits a range between activation and weight by an exponent that is guessed. Here
both sides of each channel are weighed by the squared adjoint ``a`` of the output
(``importance.py``). With rounding errors of variance Δ²/12 (Widrow and Kollár,
Quantization Noise, 2008, section 3), channels divided by s cost the output::

    values   Σ_v Δ_v²/12 Σ_c a_vc s_c²
    weights  γ Σ_o a_o Δ_o²/12 Σ_c n E[x_c²]/s_c²

    Δ_v = (max_c high_vc/s_c - min_c low_vc/s_c) / levels
    Δ_o = max_c |W_oc| s_c / top

over all values that are quantized and all weights that read the channels; a scale on
the side that makes a channel cancels where weights have one scale per output channel. γ
is the share of the weights' noise that GPTQ leaves. The sum is minimised over all
groups of channels at once, by gradient descent on log s.

A ReLU6 stays as it is: a channel that reaches its bound keeps its scale, others grow
until they reach it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roundoff.formats import PerTensor
from roundoff.plan import device_of
from roundoff.quantize.calibration import Calibration
from roundoff.quantize.channels.follow import follow_channels
from roundoff.quantize.channels.groups import Binding, ChannelGroup, groups_of
from roundoff.quantize.channels.labels import Passed
from roundoff.quantize.channels.rescale import why_not_rescalable
from roundoff.quantize.channels.rescale_alike import rescale_alike_
from roundoff.quantize.graph import Graph, Node
from roundoff.quantize.importance import Importance
from roundoff.quantize.model import QuantizedModel, Rescaling
from roundoff.quantize.weights.matrix import matrix_view
from roundoff.quantize.weights.output_error import Gain

#: Share of a weight's noise that GPTQ leaves, for the balance with the values' noise
#: (measured: 0.1 to 0.4).
GAMMA = 0.3
#: Room between the largest calibration value of a channel and the bound of a ReLU6.
ROOM = 1.2
#: The range of a value in the sums above is this norm of its channels' extremes instead
#: of their largest: the observer will clip a few outliers anyway (measured: 0.1 to 0.2 dB
#: more than the maximum).
NORM = 12


def descend(
    noise: Callable[[Sequence[Tensor]], Tensor],
    sizes: Sequence[int],
    *,
    steps: int,
    rate: float,
    bounds: Sequence[tuple[Tensor, Tensor]] = (),
    device: torch.device | None = None,
) -> tuple[list[Tensor], float, float]:
    """Minimise ``log noise`` over the logarithms of channel factors.

    Adam (Kingma and Ba, arXiv:1412.6980) with a rate that falls to 0. The best step is
    kept, so the noise never rises.

    Args:
        noise: of logs with these sizes.
        sizes: of the logs, which start at 0.
        steps: of Adam.
        rate: of the first step.
        bounds: the lowest and highest logs, on the same device.
        device: where the noise is computed, and the logs lie.

    Returns:
        The best logs, and the noise before and after. NaN for both where there is no
        noise, or none that depends on the logs.

    >>> noise = lambda logs: torch.cosh(logs[0] - 0.5).sum()
    >>> logs, before, after = descend(noise, [1], steps=200, rate=0.1)
    >>> round(float(logs[0]), 2), before > after
    (0.5, True)
    """
    logs = [torch.zeros(size, device=device, requires_grad=True) for size in sizes]
    best = [log.detach().clone() for log in logs]
    with torch.enable_grad():
        first = noise(logs)
        before = float(first.detach())
        if not (first.requires_grad and before > 0):
            return best, math.nan, math.nan
        least = before
        optimizer = torch.optim.Adam(logs, lr=rate)
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - step / steps)
            optimizer.zero_grad()
            current = noise(logs)
            current.log().backward()  # type: ignore[no-untyped-call]
            if float(current.detach()) < least:
                least = float(current.detach())
                best = [log.detach().clone() for log in logs]
            optimizer.step()
            with torch.no_grad():
                for log, (low, high) in zip(logs, bounds, strict=False):
                    log.clamp_(low, high)
    return best, before, least


def spread_(
    calibration: Calibration,
    weights: Importance,
    *,
    gamma: float = GAMMA,
    steps: int = 100,
) -> Gain:
    """Rescale the channels of a quantized model, in place, where formats cost less.

    Call it before calibration. Groups that cannot be rescaled are left
    (``rescale.why_not_rescalable`` has their reasons).

    Returns:
        The SQNR of the output in dB that the sums above predict, before and after; NaN
        with a reason where nothing is to be rescaled.
    """
    model = calibration.model
    labels = follow_channels(calibration.workload, calibration.batches[:1])
    every = groups_of(labels, "rescale")
    groups = [group for group in every if _spreadable(group)]
    if not groups:
        return _no_gain("no group of channels can be rescaled")
    noise = OutputNoise(model, calibration.graph, weights, groups, gamma)
    logs, before, after = descend(
        noise,
        [group.size for group in groups],
        steps=steps,
        rate=0.06,
        bounds=_bounds(calibration.graph, weights, groups, device_of(model)),
        device=device_of(model),
    )
    if math.isnan(before):
        return _no_gain("no channel that can be rescaled costs the output anything")
    rescalings = [
        Rescaling(group, log.double().exp(), clips=True)
        for group, log in zip(groups, logs, strict=True)
    ]
    left = rescale_alike_(calibration, rescalings)
    after = _noise_without(noise, rescalings, left, after)
    note = f"predicted, {len(groups) - len(left)} of {len(every)} groups of channels"
    return Gain(
        "spread", _db(weights, before), _db(weights, after), note + _undone(left)
    )


def _noise_without(
    noise: OutputNoise,
    rescalings: Sequence[Rescaling],
    left: Sequence[Rescaling],
    after: float,
) -> float:
    """The noise after rescaling, where some groups were left as they were."""
    if not left:
        return after
    places = {id(rescaling) for rescaling in left}
    logs = [
        torch.zeros_like(log) if id(r) in places else log
        for r, log in ((r, r.factors.log().float()) for r in rescalings)
    ]
    return float(noise(logs))


def _undone(left: Sequence[Rescaling]) -> str:
    names = ", ".join(rescaling.group.name for rescaling in left[:3])
    if not left:
        return ""
    return f"; undone for {len(left)} that changed what the model computes: {names}"


def _spreadable(group: ChannelGroup) -> bool:
    if not group.producers or not group.consumers:
        return False
    return why_not_rescalable(group, clips=True) is None


def _no_gain(reason: str) -> Gain:
    return Gain("spread", math.nan, math.nan, reason)


def _db(weights: Importance, noise: float) -> float:
    if weights.output > 0:
        return 10 * math.log10(weights.output / noise)
    return -math.inf


@dataclass(frozen=True)
class _Part:
    """Where the channels of a group stand on an axis: ``index`` is ``[size, k]``."""

    group: int
    index: Tensor


@dataclass(frozen=True)
class _Side:
    """One value or weight: where the scales of groups stand among its channels."""

    length: int
    parts: list[_Part]

    def log_scales(self, logs: Sequence[Tensor]) -> Tensor:
        """log s for each channel, 0 where no group is."""
        scales = logs[0].new_zeros(self.length)
        for part in self.parts:
            repeated = logs[part.group].repeat_interleave(part.index.shape[1])
            scales = scales.index_put((part.index.flatten(),), repeated)
        return scales


@dataclass(frozen=True)
class _ValueNoise:
    """``Δ_v²/12 Σ_c a_vc s_c²`` of one value."""

    side: _Side
    adjoint: Tensor
    low: Tensor
    high: Tensor
    levels: float

    def __call__(self, logs: Sequence[Tensor]) -> Tensor:
        s = self.side.log_scales(logs).exp()
        step = (_extent(self.high / s) + _extent(-self.low / s)) / self.levels
        return (self.adjoint * s * s).sum() * step * step / 12


@dataclass(frozen=True)
class _WeightNoise:
    """``Σ_o a_o Δ_o²/12 Σ_c n E[x_c²]/s_c²`` of one weight.

    Attributes:
        side: its input channels.
        largest: ``|W|`` over the taps, ``[groups, out, in]``.
        adjoint: a_o, ``[groups, out]``.
        power: ``n E[x_c²]``, ``[groups, in]``.
        top: the format's largest code.
    """

    side: _Side
    largest: Tensor
    adjoint: Tensor
    power: Tensor
    top: float

    def __call__(self, logs: Sequence[Tensor]) -> Tensor:
        s = self.side.log_scales(logs).exp().view(self.power.shape)
        step = (self.largest * s[:, None, :]).amax(-1) / self.top
        rounding = (self.adjoint * step * step / 12).sum(-1)
        return (rounding * (self.power / (s * s)).sum(-1)).sum()


class OutputNoise:
    """The sums of the module docstring, for some groups of channels."""

    def __init__(
        self,
        model: QuantizedModel,
        graph: Graph,
        weights: Importance,
        groups: Sequence[ChannelGroup],
        gamma: float,
    ) -> None:
        makers = _parts_by_name([group.producers for group in groups])
        readers = _parts_by_name([group.consumers for group in groups])
        self.gamma = gamma
        self.values = _value_noises(model, graph, weights, makers)
        terms = (
            _weight_noise(model, node, readers, weights)
            for node in graph.nodes.values()
        )
        self.weights = [term for term in terms if term is not None]

    def __call__(self, logs: Sequence[Tensor]) -> Tensor:
        """The noise of the output with these log scales."""
        total = torch.zeros(())
        for value in self.values:
            total = total + value(logs)
        for weight in self.weights:
            total = total + self.gamma * weight(logs)
        return total


def _parts_by_name(
    bindings_of_groups: Sequence[Sequence[Binding]],
) -> dict[str, list[_Part]]:
    """The parts of all groups on each weight."""
    parts: dict[str, list[_Part]] = {}
    for i, bindings in enumerate(bindings_of_groups):
        for binding in bindings:
            parts.setdefault(binding.name, []).append(_Part(i, binding.index))
    return parts


def _value_noises(
    model: QuantizedModel,
    graph: Graph,
    weights: Importance,
    makers: dict[str, list[_Part]],
) -> list[_ValueNoise]:
    terms = []
    for name, quantizer in model.named():
        statistics = weights.values.get(name)
        one_scale = isinstance(quantizer.granularity, PerTensor)
        if quantizer.weight or statistics is None or not one_scale:
            continue
        channels = len(statistics.channel)
        parts = _origin(graph, name, makers)
        if not parts or any(int(part.index.max()) >= channels for part in parts):
            continue
        levels = quantizer.fmt.max_finite - quantizer.fmt.min_finite
        terms.append(
            _ValueNoise(
                _Side(channels, parts),
                statistics.channel,
                statistics.low,
                statistics.high,
                levels,
            )
        )
    return terms


def _weight_noise(
    model: QuantizedModel,
    node: Node,
    readers: dict[str, list[_Part]],
    weights: Importance,
) -> _WeightNoise | None:
    """The noise of the weight that a call reads; None without group or statistics."""
    route = model.routes.get(node.site)
    result = weights.results.get(node.site)
    if route is None or result is None or node.kind not in ("conv", "linear"):
        return None
    names = list(route.uses.values())
    weights_read = [name for name in names if model.quantizer(name).weight]
    values_read = [name for name in names if name not in weights_read]
    weight = _first_in(readers, weights_read)
    value = _first_in(weights.values, values_read)
    if weight is None or value is None:
        return None
    inputs = weights.values[value]
    largest = _largest_by_channel(model, node, weight, len(inputs.square))
    if largest is None:
        return None
    matrices, taps = largest
    groups, _, channels = matrices.shape
    return _WeightNoise(
        _Side(groups * channels, readers[weight]),
        matrices,
        result.channel.view(groups, -1),
        inputs.square.view(groups, channels) / inputs.samples * taps,
        model.quantizer(weight).fmt.max_finite,
    )


def _first_in(known_names: Container[str], names: Sequence[str]) -> str | None:
    """The first of some names, if it is known."""
    return names[0] if names and names[0] in known_names else None


def _largest_by_channel(
    model: QuantizedModel, node: Node, weight: str, inputs: int
) -> tuple[Tensor, int] | None:
    """``|W|`` over the taps, ``[groups, out, in]``, and how many taps there are.

    None where they do not fit that many input channels.
    """
    parameter = model.model.get_parameter(weight).detach()
    matrices = matrix_view(parameter, node.operator, node.groups)
    channels = inputs // node.groups
    taps = matrices.shape[-1] // channels if channels else 0
    if not taps or channels * taps != matrices.shape[-1]:
        return None
    by_tap = matrices.abs().reshape(*matrices.shape[:-1], channels, taps)
    return by_tap.amax(-1), taps


def _bounds(
    graph: Graph,
    weights: Importance,
    groups: Sequence[ChannelGroup],
    device: torch.device,
) -> list[tuple[Tensor, Tensor]]:
    """The lowest and highest log s of each group, on a device.

    Only clips bound them: no channel may come to pass a bound that it did not pass.
    """
    makers = _parts_by_name([group.producers for group in groups])
    bounds = []
    for i, group in enumerate(groups):
        low = torch.full((group.size,), -math.inf, device=device)
        high = torch.full((group.size,), math.inf, device=device)
        for operator in group.operators:
            if operator.law != "clipped" or operator.bounds is None:
                continue
            parts = _origin(graph, operator.site, makers)
            index = next((part.index for part in parts if part.group == i), None)
            lowest = _lowest_under_clip(weights, operator, index)
            high = high.clamp(max=0.0)
            if lowest is None:
                low = torch.zeros_like(low)
                high = torch.zeros_like(high)
            else:
                low = torch.maximum(low, lowest)
        bounds.append((low, high))
    return bounds


def _lowest_under_clip(
    weights: Importance, operator: Passed, index: Tensor | None
) -> Tensor | None:
    """The lowest log s of channels at ``index`` of a clip's input; None where unknown."""
    statistics = weights.values.get(operator.site)
    if operator.bounds is None or statistics is None or index is None:
        return None
    low, bound = operator.bounds
    return _lowest_log(statistics.high[index[:, 0]], bound) if low == 0.0 else None


def _lowest_log(reached: Tensor, bound: float) -> Tensor:
    """The log s at which channels nearly reach the bound of a clip; 0 if they do."""
    growth = reached.clamp(min=bound * 1e-3) * ROOM / bound
    return torch.where(reached < bound, growth.log().clamp(max=0.0), 0.0)


def _extent(ends: Tensor) -> Tensor:
    return ends.clamp(min=1e-9).pow(NORM).mean().pow(1 / NORM)


def _origin(graph: Graph, value: str, makers: dict[str, list[_Part]]) -> list[_Part]:
    """The groups whose channels a value holds, and where.

    By the weight that made it, through operators that only pass it on.
    """
    node = graph.nodes.get(value)
    while node is not None:
        weight = next((use.value for use in node.uses if use.weight), None)
        if weight is not None:
            return makers.get(weight, [])
        sources = (graph.nodes.get(use.value) for use in node.uses)
        node = next((source for source in sources if source is not None), None)
    return []
