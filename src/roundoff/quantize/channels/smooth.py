"""Smooth outlier channels of a whole model, by SmoothQuant, DMQ, AWQ or ``spread``.

The first three divide the channels of a value by factors and multiply the weights that
read them. Where the channels are made by weights that nothing else reads (a LayerNorm's
weight and bias, the rows of another layer), the division is folded into those and costs
nothing. Where it cannot be folded, since a residual branch reads the value too, say, an
explicit division stays in front of the readers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from roundoff.budget import sqnr_db
from roundoff.errors import QuantizationError
from roundoff.formats import Granularity, PerAxis, PerGroup, PerTensor, PerToken
from roundoff.plan import worst_noise
from roundoff.quantize.calibration import MEASURED_BATCHES, Calibration
from roundoff.quantize.channels.awq import awq
from roundoff.quantize.channels.divide import divide_inputs_
from roundoff.quantize.channels.follow import follow_channels
from roundoff.quantize.channels.groups import ChannelGroup, groups_of
from roundoff.quantize.channels.input_statistics import (
    InputStatistics,
    input_statistics,
)
from roundoff.quantize.channels.rescale import rescale_, why_not_rescalable
from roundoff.quantize.channels.smoothing_factors import dmq, input_amax, smoothquant
from roundoff.quantize.channels.spread import spread_
from roundoff.quantize.graph import Graph
from roundoff.quantize.importance import Importance
from roundoff.quantize.model import QuantizedModel, Rescaling, Unquantized
from roundoff.quantize.options import Rounding
from roundoff.quantize.quantizer import Quantizer
from roundoff.quantize.round_in_order import round_model_
from roundoff.quantize.weights.matrix import matrix_view
from roundoff.quantize.weights.output_error import Gain
from roundoff.workload import Workload

METHODS = ("smoothquant", "dmq", "awq", "spread")


@dataclass(frozen=True)
class Balanced:
    """One value and what became of its channels.

    Attributes:
        value: its name in the graph.
        readers: the sites whose weights took the factors.
        how: ``folded into NAME, …``, ``divided before it is read``, or ``left: `` with
            the reason.
        strongest: the largest factor over the smallest; 1 where it was left.
    """

    value: str
    readers: tuple[str, ...]
    how: str
    strongest: float = 1.0


@dataclass(frozen=True)
class Smoothed:
    """One row for each value, and the simulated SQNR of the output before and after."""

    rows: list[Balanced]
    gain: Gain


@dataclass(frozen=True)
class _SmoothedModel:
    """A copy of the model that was smoothed, and the SQNR of its output."""

    db: float
    model: QuantizedModel
    rows: list[Balanced]
    note: str


def smooth_(
    model: QuantizedModel,
    graph: Graph,
    workload: Workload,
    importance: Importance | None = None,
    *,
    method: str = "smoothquant",
    alpha: float | Sequence[float] | Mapping[str, float] = 0.5,
    explicit: bool = True,
    batches: Iterable[Any] | None = None,
    measured: int = MEASURED_BATCHES,
) -> Smoothed:
    """Balance the channels of a quantized model, in place, if its output gains.

    Args:
        model: not calibrated yet; the function that it computes stays the same.
        graph: of the model.
        workload: whose model it is.
        importance: for ``spread`` alone.
        method: ``smoothquant`` (arXiv:2211.10438), ``dmq`` (AMCT's), ``awq``
            (arXiv:2306.00978), or ``spread`` (ours).
        alpha: the strength of the first two; of several, the one whose output is best
            is kept. Or the strength of each site that is balanced, and of no other.
        explicit: divide values where the factors cannot be folded; else these are left.
            For weights alone (``awq``) a division is never worth it.
        batches: that ranges are taken from; by default the workload's.
        measured: on so many batches the output is compared, quantized in the plainest
            way (min-max, to nearest): the gain of better calibration comes on top.

    Raises:
        QuantizationError: an unknown method, no batches, or a strength that the method
            does not have.
    """
    if method not in METHODS:
        raise QuantizationError(
            "no such method",
            where="smooth_",
            expected=", ".join(METHODS),
            got=repr(method),
        )
    return smooth_channels_(
        Calibration.of(model, workload, batches, graph),
        importance,
        method=method,
        alpha=alpha,
        explicit=explicit,
        measured=measured,
    )


def smooth_channels_(
    calibration: Calibration,
    importance: Importance | None = None,
    *,
    method: str,
    alpha: float | Sequence[float] | Mapping[str, float],
    explicit: bool = True,
    measured: int = MEASURED_BATCHES,
) -> Smoothed:
    """Balance channels as ``smooth_`` does, in a model that is packed with its data."""
    if not calibration.batches:
        raise QuantizationError(
            "no calibration data",
            where="smooth_",
            expected="one batch or more",
            got="none",
        )
    before = simulated_db(calibration, measured)
    best: _SmoothedModel | None = None
    for strength, note in _strengths(alpha):
        trial = calibration.trial()
        rows: list[Balanced] = []
        if method == "spread":
            note = _spread_(trial, importance)
        else:
            rows = _balance_(trial, method, strength, explicit)
        db = simulated_db(trial, measured)
        if best is None or db > best.db:
            best = _SmoothedModel(db, trial.model, rows, note)
    if best is None:
        raise QuantizationError(
            "no strength to try",
            where="smooth_",
            expected="alpha: one number or more",
            got="none",
        )
    if not best.db > before:
        note = f"undone: {best.db - before:+.1f} dB"
        left = [_left(row) for row in best.rows]
        return Smoothed(left, Gain(method, before, before, note))
    _take_(calibration.model, best.model)
    return Smoothed(best.rows, Gain(method, before, best.db, best.note))


def _strengths(
    alpha: float | Sequence[float] | Mapping[str, float],
) -> list[tuple[float | Mapping[str, float], str]]:
    """Each strength to try, with a note that tells it from others."""
    if isinstance(alpha, float | int | Mapping):
        return [(alpha, "")]
    return [(strength, f"alpha {strength:g}") for strength in alpha]


def _left(row: Balanced) -> Balanced:
    how = f"left: the output did not gain ({row.how})"
    return replace(row, how=how, strongest=1.0)


def _spread_(calibration: Calibration, importance: Importance | None) -> str:
    """Spread the channels of a model; the gain's note."""
    if importance is None:
        raise QuantizationError(
            "spread weighs channels by what the output loses",
            where="smooth_",
            expected="importance(model, workload, batches)",
            got="None",
        )
    return spread_(calibration, importance).note


def simulated_db(calibration: Calibration, measured: int = MEASURED_BATCHES) -> float:
    """SQNR of the output in dB when a copy is calibrated in the plainest way.

    That is on ``measured`` batches, with min-max ranges and weights to nearest.
    """
    calibration = calibration.on(calibration.batches[:measured])
    with calibration.model.through(Unquantized()):
        outputs = calibration.outputs(calibration.batches)
    judged = calibration.workload.judged
    exact = [judged.tensors(tensors) for tensors in outputs]
    trial = calibration.trial()
    plainly = Rounding(
        observer="minmax", weights="nearest", scales="minmax", bias=False
    )
    round_model_(trial, plainly)
    return sqnr_db(worst_noise(trial.outputs(trial.batches), exact))


def _take_(model: QuantizedModel, trial: QuantizedModel) -> None:
    """Take over what was balanced in a copy."""
    with torch.no_grad():
        pairs = zip(model.model.parameters(), trial.model.parameters(), strict=True)
        for parameter, balanced in pairs:
            parameter.copy_(balanced)
    model.routes = trial.routes
    model.factors = trial.factors
    model.quantizers = trial.quantizers
    model.rescalings = trial.rescalings


def _balance_(
    calibration: Calibration,
    method: str,
    alpha: float | Mapping[str, float],
    explicit: bool,
) -> list[Balanced]:
    """Choose and apply the factors of all values, in the order of the graph."""
    model = calibration.model
    labels = follow_channels(calibration.workload, calibration.batches[:1])
    groups = groups_of(labels, "rescale")
    values = input_statistics(calibration, moments=method == "awq")
    divides = explicit and method != "awq"
    rows = []
    for inputs, strength in _by_strength(values, alpha):
        factors = _factors(model, inputs, method, strength)
        foldable, reason = _foldable(groups, inputs)
        strongest = 1.0
        if foldable:
            strongest = _fold_(model, foldable, inputs, factors)
            names = sorted({b.name for g in foldable for b in g.producers})
            how = f"folded into {', '.join(names)}"
        elif divides:
            divide_inputs_(model, inputs, factors)
            strongest = float(factors.max() / factors.min())
            how = f"divided before it is read: {reason}"
        else:
            how = f"left: {reason}"
        sites = tuple(reader.site for reader in inputs.readers)
        rows.append(Balanced(inputs.value, sites, how, strongest))
    return rows


def _by_strength(
    values: Sequence[InputStatistics], alpha: float | Mapping[str, float]
) -> Iterator[tuple[InputStatistics, float]]:
    """Each value with the readers that are balanced together, and how strongly."""
    for inputs in values:
        if not isinstance(alpha, Mapping):
            yield inputs, float(alpha)
            continue
        strengths = [alpha[r.site] for r in inputs.readers if r.site in alpha]
        for strength in dict.fromkeys(strengths):
            readers = [r for r in inputs.readers if alpha.get(r.site) == strength]
            yield replace(inputs, readers=readers), strength


def _factors(
    model: QuantizedModel, inputs: InputStatistics, method: str, alpha: float
) -> Tensor:
    """One factor for each channel of a value."""
    weights = [
        model.model.get_parameter(reader.weight).detach() for reader in inputs.readers
    ]
    pairs = list(zip(inputs.readers, weights, strict=True))
    if method == "awq":
        matrices = [
            (matrix_view(weight, r.operator, r.groups), inputs.moments[r.site])
            for r, weight in pairs
        ]
        quantizer = model.quantizer(inputs.readers[0].weight)
        granularity = _matrix_granularity(quantizer)
        return awq(matrices, inputs.mean, quantizer.fmt, granularity).factors
    ranges = [input_amax(weight, r.operator, r.groups) for r, weight in pairs]
    formula = smoothquant if method == "smoothquant" else dmq
    return formula(inputs.largest, ranges, alpha)


def _matrix_granularity(quantizer: Quantizer) -> Granularity:
    """The granularity of a weight as that of its matrix ``[out, in]``."""
    granularity = quantizer.granularity
    if isinstance(granularity, PerGroup):
        return PerGroup(granularity.group_size)
    return PerToken() if isinstance(granularity, PerAxis) else PerTensor()


def _foldable(
    groups: Sequence[ChannelGroup], inputs: InputStatistics
) -> tuple[list[ChannelGroup], str]:
    """The groups that these readers read wholly and alone; or none, and why."""
    names = {reader.weight for reader in inputs.readers}
    read = [group for group in groups if _reads(inputs, group)]
    for group in read:
        reason = _why_not_foldable(group, names)
        if reason is not None:
            return [], reason
    first = inputs.readers[0].weight
    covered = sum(
        binding.index.numel()
        for group in read
        for binding in group.consumers
        if binding.name == first
    )
    if covered != len(inputs.largest):
        return [], "what makes it is not known for every channel"
    return read, ""


def _reads(inputs: InputStatistics, group: ChannelGroup) -> bool:
    """True if one of the readers reads the group's channels."""
    readers = reversed(inputs.readers)  # of calls with one weight the first counts
    axes = {reader.weight: _axis(reader.operator) for reader in readers}
    return any(axes.get(b.name) == b.axis for b in group.consumers)


def _why_not_foldable(group: ChannelGroup, names: set[str]) -> str | None:
    reason = why_not_rescalable(group)
    if reason is not None:
        return reason
    others = sorted({binding.name for binding in group.consumers} - names)
    if others:
        return f"{others[0]} reads it too"
    return None if group.producers else "no weight makes it"


def _axis(operator: str) -> int:
    """The axis of a weight that its inputs lie along."""
    return 0 if operator == "matmul" or operator.startswith("conv_transpose") else 1


def _fold_(
    model: QuantizedModel,
    groups: Sequence[ChannelGroup],
    inputs: InputStatistics,
    factors: Tensor,
) -> float:
    """Rescale the groups; return the largest factor of a group over its smallest."""
    names = {reader.weight for reader in inputs.readers}
    strongest = 1.0
    for group in groups:
        scale = _of_group(group, names, factors)
        rescale_(model.model, group, scale.double())
        model.rescalings.append(Rescaling(group, scale.double(), clips=False))
        strongest = max(strongest, float(scale.max() / scale.min()))
    return strongest


def _of_group(group: ChannelGroup, names: set[str], factors: Tensor) -> Tensor:
    """The factors of a group's channels.

    The geometric mean over the places that one channel stands at.
    """
    logs = [factors.log()[b.index].mean(1) for b in group.consumers if b.name in names]
    return torch.stack(logs).mean(0).exp()
