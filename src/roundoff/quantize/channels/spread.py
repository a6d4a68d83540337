"""Channel scales that cost the output least: equalisation by what the budget knows, not by ranges alone.

Cross-layer equalisation (``equalise.py``) makes weight ranges equal, and SmoothQuant's rule splits a range between
activation and weight by an exponent that is guessed. Here both sides of each channel are weighed by the squared adjoint
``a`` of the output (``importance.py``). With rounding errors of variance Δ²/12 (Widrow and Kollár, Quantization Noise,
2008, section 3), channels divided by s cost the output::

    values     Σ_v Δ_v²/12 Σ_c a_vc s_c²,            Δ_v = (max_c high_vc/s_c - min_c low_vc/s_c) / levels
    weights    γ Σ_o a_o Δ_o²/12 Σ_c n E[x_c²]/s_c²,  Δ_o = max_c |W_oc| s_c / top

over all values that are quantized and all weights that read the channels; a scale on the side that makes a channel cancels
where weights have one scale per output channel. γ is the share of the weights' noise that GPTQ leaves. The sum is
minimised over all groups of channels at once, by gradient descent on log s.

A ReLU6 stays as it is: a channel that reaches its bound keeps its scale, others grow until they reach it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from roundoff.formats import PerTensor
from roundoff.quantize.calibration import Calibration
from roundoff.quantize.channels.descent import descend
from roundoff.quantize.channels.equalise import rescale_, why_not
from roundoff.quantize.channels.groups import ChannelGroup, followed, groups_of
from roundoff.quantize.graph import Graph, Node
from roundoff.quantize.importance import Importance
from roundoff.quantize.model import QuantizedModel, Rescaling
from roundoff.quantize.weights.matrix import matrix_view
from roundoff.quantize.weights.output_error import Gain

#: What GPTQ leaves of a weight's noise, for the balance with the values' noise (measured: 0.1 to 0.4).
GAMMA = 0.3
#: Room between the largest calibration value of a channel and the bound of a ReLU6.
ROOM = 1.2
#: The range of a value in the sums above is this norm of its channels' extremes instead of their largest: the observer will
#: clip a few outliers anyway (measured: 0.1 to 0.2 dB more than the maximum).
NORM = 12


@dataclass
class _Side:
    """One value or weight: where the scales of which groups stand among its channels."""

    length: int
    parts: list[tuple[int, Tensor]] = field(default_factory=list)

    def scales(self, logs: Sequence[Tensor]) -> Tensor:
        """log s for each channel, 0 where no group is."""
        found = torch.zeros(self.length)
        for group, index in self.parts:
            found = found.index_put(
                (index.flatten(),), logs[group].repeat_interleave(index.shape[1])
            )
        return found


def spread_(
    calibration: Calibration,
    weights: Importance,
    *,
    gamma: float = GAMMA,
    steps: int = 100,
) -> Gain:
    """Rescale the channels of a quantized model, in place, so that its formats cost the output least; before calibration.

    Returns the SQNR of the output in dB that the sums above predict, before and after; NaN with a reason where nothing is to
    be rescaled. Groups that cannot be are left (``equalise.why_not`` has their reasons).
    """
    model = calibration.model
    follow = followed(calibration.workload, calibration.batches[:1])
    every = groups_of(follow.labels, "rescale")
    groups = [
        g
        for g in every
        if g.producers and g.consumers and why_not(g, clips=True) is None
    ]
    if not groups:
        return Gain(
            "spread", math.nan, math.nan, "no group of channels can be rescaled"
        )
    problem = _Problem(model, calibration.graph, weights, groups, gamma)
    logs, before, after = problem.solve(steps)
    if math.isnan(before):
        return Gain(
            "spread",
            math.nan,
            math.nan,
            "no channel that can be rescaled costs the output anything",
        )
    for group, log in zip(groups, logs, strict=True):
        rescale_(model.model, group, log.double().exp(), clips=True)
        model.rescalings.append(Rescaling(group, log.double().exp(), clips=True))
    rescaled = f"{len(groups)} of {len(every)} groups of channels"
    db = [
        10 * math.log10(weights.output / noise) if weights.output > 0 else -math.inf
        for noise in (before, after)
    ]
    return Gain("spread", db[0], db[1], f"predicted, {rescaled}")


class _Problem:
    def __init__(
        self,
        model: QuantizedModel,
        graph: Graph,
        weights: Importance,
        groups: list[ChannelGroup],
        gamma: float,
    ) -> None:
        self.groups = groups
        made: dict[str, list[tuple[int, Tensor]]] = {}
        read: dict[str, list[tuple[int, Tensor]]] = {}
        for i, group in enumerate(groups):
            for found, bindings in ((made, group.producers), (read, group.consumers)):
                for binding in bindings:
                    found.setdefault(binding.name, []).append((i, binding.index))
        self.values = []
        self.lowest = [torch.full((g.size,), -math.inf) for g in groups]
        self.highest = [torch.full((g.size,), math.inf) for g in groups]
        for name, quantizer in model.named():
            known = weights.values.get(name)
            if (
                quantizer.weight
                or known is None
                or not isinstance(quantizer.granularity, PerTensor)
            ):
                continue
            parts = _origin(graph, name, made)
            if parts and all(
                int(index.max()) < len(known.channel) for _, index in parts
            ):
                levels = quantizer.fmt.max_finite - quantizer.fmt.min_finite
                self.values.append((_Side(len(known.channel), parts), known, levels))
        self._bounds(graph, weights, made)
        self.weights = []
        for node in graph.nodes.values():
            weight = self._weight(model, node, read, weights)
            if weight is not None:
                self.weights.append(weight)
        self.gamma = gamma

    def _bounds(
        self,
        graph: Graph,
        weights: Importance,
        made: dict[str, list[tuple[int, Tensor]]],
    ) -> None:
        """Limits of log s where a clip follows: no channel may come to pass a bound that it did not pass."""
        for i, group in enumerate(self.groups):
            for operator in group.operators:
                if operator.law != "clipped" or operator.bounds is None:
                    continue
                low, bound = operator.bounds
                known = weights.values.get(operator.site)
                parts = [
                    index for g, index in _origin(graph, operator.site, made) if g == i
                ]
                if low != 0.0 or known is None or not parts:
                    self.lowest[i] = self.highest[i] = torch.zeros(group.size)
                    continue
                reached = known.high[parts[0][:, 0]]
                least = (
                    (reached.clamp(min=bound * 1e-3) * ROOM / bound)
                    .log()
                    .clamp(max=0.0)
                )
                least = torch.where(reached < bound, least, 0.0)
                self.lowest[i] = torch.maximum(self.lowest[i], least)
                self.highest[i] = torch.minimum(
                    self.highest[i], torch.zeros(group.size)
                )

    def _weight(
        self,
        model: QuantizedModel,
        node: Node,
        read: dict[str, list[tuple[int, Tensor]]],
        weights: Importance,
    ) -> tuple[_Side, Tensor, Tensor, Tensor, float] | None:
        """(side, largest |W| as [groups, out, in], adjoint power [groups, out], input power [groups, in], top)."""
        route, result = model.routes.get(node.site), weights.results.get(node.site)
        if route is None or result is None or node.kind not in ("conv", "linear"):
            return None
        name = next((n for n in route.uses.values() if model.quantizer(n).weight), None)
        value = next(
            (n for n in route.uses.values() if not model.quantizer(n).weight), None
        )
        if (
            name is None
            or value is None
            or name not in read
            or value not in weights.values
        ):
            return None
        parameter = model.model.get_parameter(name).detach()
        groups = node.groups
        matrices = matrix_view(parameter, node.operator, groups)
        known = weights.values[value]
        channels = len(known.square) // groups
        taps = matrices.shape[-1] // channels if channels else 0
        if not taps or channels * taps != matrices.shape[-1]:
            return None
        largest = matrices.abs().reshape(*matrices.shape[:-1], channels, taps).amax(-1)
        power = known.square.view(groups, channels) / known.samples * taps
        side = _Side(groups * channels, read[name])
        return (
            side,
            largest,
            result.channel.view(groups, -1),
            power,
            model.quantizer(name).fmt.max_finite,
        )

    def noise(self, logs: Sequence[Tensor]) -> Tensor:
        """What the output loses with these log scales."""
        total = torch.zeros(())
        for side, known, levels in self.values:
            s = side.scales(logs).exp()
            step = (_extent(known.high / s) + _extent(-known.low / s)) / levels
            total = total + (known.channel * s * s).sum() * step * step / 12
        for side, largest, adjoint, power, top in self.weights:
            s = side.scales(logs).exp().view(power.shape)
            step = (largest * s[:, None, :]).amax(-1) / top
            total = (
                total
                + self.gamma
                * (
                    (adjoint * step * step / 12).sum(-1) * (power / (s * s)).sum(-1)
                ).sum()
            )
        return total

    def solve(self, steps: int) -> tuple[list[Tensor], float, float]:
        """log s of each group, and the noise before and after; NaN where no channel that can be rescaled has a part."""
        bounds = list(zip(self.lowest, self.highest, strict=True))
        return descend(
            self.noise,
            [g.size for g in self.groups],
            steps=steps,
            rate=0.06,
            bounds=bounds,
        )


def _extent(ends: Tensor) -> Tensor:
    return ends.clamp(min=1e-9).pow(NORM).mean().pow(1 / NORM)


def _origin(
    graph: Graph, value: str, made: dict[str, list[tuple[int, Tensor]]]
) -> list[tuple[int, Tensor]]:
    """The groups whose channels a value holds, and where: by the weight that made it, through what only passes it on."""
    node = graph.nodes.get(value)
    while node is not None:
        weight = next((use.value for use in node.uses if use.weight), None)
        if weight is not None:
            return made.get(weight, [])
        node = next(
            (
                found
                for use in node.uses
                if (found := graph.nodes.get(use.value)) is not None
            ),
            None,
        )
    return []
