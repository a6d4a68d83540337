"""Outlier channels balanced in a whole model: SmoothQuant, DMQ and AWQ, each folded into what makes the channels.

All three divide the channels of a value by factors and multiply the weights that read them. Where the channels are made by
weights that nothing else reads (a LayerNorm's weight and bias, the rows of another layer), the division is folded into
those and costs nothing. Where it cannot be folded, since a residual branch reads the value too, say, an explicit division
stays in front of the readers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from roundoff.budget import sqnr_db
from roundoff.errors import QuantizationError
from roundoff.formats import Granularity, PerAxis, PerGroup, PerTensor, PerToken
from roundoff.plan import noise
from roundoff.quantize.channels.awq import awq
from roundoff.quantize.channels.divide import divide_inputs_
from roundoff.quantize.channels.equalise import rescale_, why_not
from roundoff.quantize.channels.groups import ChannelGroup, followed, groups_of
from roundoff.quantize.channels.input_statistics import Inputs, inputs_of
from roundoff.quantize.channels.smoothing_factors import dmq, input_amax, smoothquant
from roundoff.quantize.channels.spread import spread_
from roundoff.quantize.graph import Graph
from roundoff.quantize.importance import Importance
from roundoff.quantize.model import QuantizedModel, Unquantized
from roundoff.quantize.options import Rounding
from roundoff.quantize.quantizer import Quantizer
from roundoff.quantize.round_in_order import round_in_order_
from roundoff.quantize.weights.matrix import matrix_view
from roundoff.quantize.weights.output_error import Gain
from roundoff.workload import Workload, named_tensors

METHODS = ("smoothquant", "dmq", "awq", "spread")


@dataclass(frozen=True)
class Balanced:
    """One value and what became of its channels.

    Attributes:
        value: its name in the graph.
        readers: the sites whose weights took the factors.
        how: ``folded into NAME, …``, ``divided before it is read``, or ``left: `` with the reason.
        strongest: the largest factor over the smallest; 1 where it was left.
    """

    value: str
    readers: tuple[str, ...]
    how: str
    strongest: float = 1.0


@dataclass(frozen=True)
class Smoothed:
    """What was balanced, and the SQNR of the model's output in dB before and after, as simulated."""

    rows: list[Balanced]
    gain: Gain


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
    measured: int = 2,
) -> Smoothed:
    """Balance the channels of a quantized model before it is calibrated, in place, if that makes its output better.

    Args:
        model: not calibrated yet; the function that it computes stays the same.
        graph: of the model.
        workload: whose model it is.
        importance: for ``spread`` alone.
        method: ``smoothquant`` (arXiv:2211.10438), ``dmq`` (AMCT's), ``awq`` (arXiv:2306.00978), or ``spread`` (ours).
        alpha: the strength of the first two; of several, the one whose output is best is kept. Or the strength of each site
            that is balanced, and of no other.
        explicit: divide values where the factors cannot be folded; else these are left. For weights alone (``awq``) a
            division is never worth it.
        batches: that ranges are taken from; by default the workload's.
        measured: on so many batches the output is compared, quantized in the plainest way (min-max, to nearest): the gain
            of better calibration comes on top.

    Raises:
        QuantizationError: an unknown method, no batches, or a strength that the method does not have.
    """
    if method not in METHODS:
        raise QuantizationError(
            "no such method",
            where="smooth_",
            expected=", ".join(METHODS),
            got=repr(method),
        )
    data = workload.batches if batches is None else list(batches)
    if not data:
        raise QuantizationError(
            "no calibration data",
            where="smooth_",
            expected="one batch or more",
            got="none",
        )
    before = simulated_db(model, workload, data[:measured])
    best: tuple[float, QuantizedModel, list[Balanced], str] | None = None
    single = isinstance(alpha, float | int | Mapping)
    strengths: list[Any] = [alpha] if single else list(alpha)  # type: ignore[arg-type]
    for strength in strengths:
        trial, note = copy.deepcopy(model), "" if single else f"alpha {strength:g}"
        own = workload.with_model(trial.model)
        if method == "spread":
            if importance is None:
                raise QuantizationError(
                    "spread weighs channels by what the output loses",
                    where="smooth_",
                    expected="importance(model, workload, batches)",
                    got="None",
                )
            rows, note = (
                [],
                spread_(trial, graph, own, importance, batches=data[:1]).note,
            )
        else:
            rows = _balance_(trial, graph, own, data, method, strength, explicit)
        db = simulated_db(trial, workload, data[:measured])
        if best is None or db > best[0]:
            best = db, trial, rows, note
    if best is None:
        raise QuantizationError(
            "no strength to try",
            where="smooth_",
            expected="alpha: one number or more",
            got="none",
        )
    after, trial, rows, note = best
    if not after > before:
        kept = [
            replace(
                row, how=f"left: the output did not gain ({row.how})", strongest=1.0
            )
            for row in rows
        ]
        return Smoothed(
            kept, Gain(method, before, before, f"undone: {after - before:+.1f} dB")
        )
    _take_(model, trial)
    return Smoothed(rows, Gain(method, before, after, note))


@dataclass(frozen=True)
class Split:
    """Channels of one value that stay in full precision beside its codes, ``columns`` of ``channels``."""

    value: str
    readers: tuple[str, ...]
    columns: tuple[int, ...]
    channels: int


def split_outliers_(
    model: QuantizedModel,
    graph: Graph,
    workload: Workload,
    *,
    threshold: float = 6.0,
    share: float = 0.05,
    batches: Iterable[Any] | None = None,
    measured: int = 2,
) -> tuple[list[Split], Gain]:
    """Keep outlier channels of values, and the columns of weights that read them, in full precision, in place.

    LLM.int8() (Dettmers et al., arXiv:2208.07339, equation 8): ``y = x_O W_O + x̂ Ŵ``, O the channels whose magnitude
    reaches the threshold; scales are chosen without them (``outliers.mixed_precision`` is the same for one weight).

    Args:
        model: not calibrated yet.
        graph: of the model.
        workload: whose model it is.
        threshold: α; 6.0 in the paper, for values behind a LayerNorm.
        share: at most so many of a value's channels, those with the largest magnitude.
        batches: that magnitudes are taken from; by default the workload's.
        measured: batches of which the output's SQNR is measured, as in ``smooth_``.

    Returns:
        What was split, and the gain of the output, as simulated.

    Raises QuantizationError for a threshold that is not positive, or a share outside [0, 1].
    """
    if not threshold > 0 or not 0 <= share <= 1:
        raise QuantizationError(
            "no outliers can be found so",
            where="split_outliers_",
            got=f"{threshold}, {share}",
            expected="threshold > 0 and share in [0, 1]",
        )
    data = workload.batches if batches is None else list(batches)
    before = simulated_db(model, workload, data[:measured])
    found = []
    for inputs in inputs_of(model, graph, workload, data):
        readers = [reader for reader in inputs.readers if reader.groups == 1]
        order = inputs.largest.argsort(descending=True)[
            : int(share * len(inputs.largest))
        ]
        columns = order[inputs.largest[order] >= threshold].sort().values
        if not len(columns) or not readers:
            continue
        for reader in readers:
            uses = model.routes[reader.site].uses
            for name in (reader.weight, uses.get(reader.place)):
                if name is not None:
                    model.quantizer(name).exact = columns.clone()
        sites = tuple(reader.site for reader in readers)
        found.append(
            Split(inputs.value, sites, tuple(columns.tolist()), len(inputs.largest))
        )
    after = simulated_db(model, workload, data[:measured]) if found else before
    return found, Gain(
        "outliers",
        before,
        after,
        f"{sum(len(s.columns) for s in found)} channels of {len(found)} values",
    )


def simulated_db(
    model: QuantizedModel, workload: Workload, batches: Sequence[Any]
) -> float:
    """SQNR of the output in dB when a copy is calibrated in the plainest way: min-max ranges, weights to nearest."""
    trial = copy.deepcopy(model)
    plainly = Rounding(
        observer="minmax", weights="nearest", scales="minmax", bias=False
    )
    with torch.no_grad(), model.through(Unquantized()):
        exact = [
            named_tensors(workload.with_model(model).run(batch)) for batch in batches
        ]
    round_in_order_(trial, workload, batches, plainly)
    with torch.no_grad():
        found = [
            named_tensors(workload.with_model(trial).run(batch)) for batch in batches
        ]
    return sqnr_db(noise(found, exact))


def _take_(model: QuantizedModel, trial: QuantizedModel) -> None:
    """Take over what was balanced in a copy."""
    with torch.no_grad():
        for own, other in zip(
            model.model.parameters(), trial.model.parameters(), strict=True
        ):
            own.copy_(other)
    model.routes, model.factors, model.quantizers, model.moves = (
        trial.routes,
        trial.factors,
        trial.quantizers,
        trial.moves,
    )


def _balance_(
    model: QuantizedModel,
    graph: Graph,
    workload: Workload,
    batches: Sequence[Any],
    method: str,
    alpha: float | Mapping[str, float],
    explicit: bool,
) -> list[Balanced]:
    """Choose and apply the factors of all values, in the order of the graph."""
    found = followed(model.model, batches[:1], workload.forward)
    groups = groups_of(found.labels, "rescale")
    seen = inputs_of(model, graph, workload, batches, moments=method == "awq")
    rows = []
    for inputs, strength in _by_strength(seen, alpha):
        sites = tuple(reader.site for reader in inputs.readers)
        factors = _factors(model, inputs, method, strength)
        fold, reason = _foldable(groups, inputs)
        if fold:
            spread = 1.0
            for group in fold:
                own = _of_group(group, inputs, factors)
                rescale_(model.model, group, own.double())
                model.moves.append((group, own.double(), False))
                spread = max(spread, float(own.max() / own.min()))
            names = sorted({b.name for g in fold for b in g.producers})
            rows.append(
                Balanced(inputs.value, sites, f"folded into {', '.join(names)}", spread)
            )
        elif explicit and method != "awq":
            divide_inputs_(model, inputs, factors)
            strongest = float(factors.max() / factors.min())
            rows.append(
                Balanced(
                    inputs.value,
                    sites,
                    f"divided before it is read: {reason}",
                    strongest,
                )
            )
        else:
            rows.append(Balanced(inputs.value, sites, f"left: {reason}"))
    return rows


def _by_strength(
    seen: Sequence[Inputs], alpha: float | Mapping[str, float]
) -> Iterator[tuple[Inputs, float]]:
    """Each value with the readers that are balanced together, and how strongly."""
    for inputs in seen:
        if not isinstance(alpha, Mapping):
            yield inputs, float(alpha)
            continue
        for strength in dict.fromkeys(
            alpha[r.site] for r in inputs.readers if r.site in alpha
        ):
            yield (
                replace(
                    inputs,
                    readers=[
                        r for r in inputs.readers if alpha.get(r.site) == strength
                    ],
                ),
                strength,
            )


def _factors(
    model: QuantizedModel, inputs: Inputs, method: str, alpha: float
) -> Tensor:
    """One factor for each channel of a value."""
    parameters = [
        (reader, model.model.get_parameter(reader.weight).detach())
        for reader in inputs.readers
    ]
    if method != "awq":
        ranges = [
            input_amax(weight, reader.operator, reader.groups)
            for reader, weight in parameters
        ]
        chosen: Callable[..., Tensor] = smoothquant if method == "smoothquant" else dmq
        return chosen(inputs.largest, ranges, alpha)
    matrices = [
        (
            matrix_view(weight, reader.operator, reader.groups),
            inputs.moments[reader.site],
        )
        for reader, weight in parameters
    ]
    quantizer = model.quantizer(inputs.readers[0].weight)
    return awq(matrices, inputs.mean, quantizer.fmt, _of_matrix(quantizer)).factors


def _of_matrix(quantizer: Quantizer) -> Granularity:
    """The granularity of a weight as that of its matrix ``[out, in]``."""
    own = quantizer.granularity
    return (
        PerGroup(own.group_size)
        if isinstance(own, PerGroup)
        else PerToken()
        if isinstance(own, PerAxis)
        else PerTensor()
    )


def _foldable(
    groups: Sequence[ChannelGroup], inputs: Inputs
) -> tuple[list[ChannelGroup], str]:
    """The groups whose channels these readers read, all of them and nobody else; or none, and why."""
    names = {reader.weight for reader in inputs.readers}
    own = [
        group
        for group in groups
        if any(
            b.name in names and b.axis == _axis(inputs, b.name) for b in group.consumers
        )
    ]
    for group in own:
        others = sorted({b.name for b in group.consumers} - names)
        reason = why_not(group)
        if reason is None and others:
            reason = f"{others[0]} reads it too"
        if reason is None and not group.producers:
            reason = "no weight makes it"
        if reason is not None:
            return [], reason
    covered = sum(
        b.index.numel()
        for group in own
        for b in group.consumers
        if b.name == inputs.readers[0].weight
    )
    if covered != len(inputs.largest):
        return [], "what makes it is not known for every channel"
    return own, ""


def _axis(inputs: Inputs, name: str) -> int:
    """The axis of a reader's weight that its inputs lie along."""
    operator = next(
        reader.operator for reader in inputs.readers if reader.weight == name
    )
    return 0 if operator == "matmul" or operator.startswith("conv_transpose") else 1


def _of_group(group: ChannelGroup, inputs: Inputs, factors: Tensor) -> Tensor:
    """The factors of a group's channels: the geometric mean over the places that one channel stands at."""
    names = {reader.weight for reader in inputs.readers}
    logs = [factors.log()[b.index].mean(1) for b in group.consumers if b.name in names]
    return torch.stack(logs).mean(0).exp()
