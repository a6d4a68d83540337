"""``roundoff.quantize``: a plan, a model and calibration data in, a quantized model out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from roundoff.errors import QuantizationError
from roundoff.formats import Format
from roundoff.plan import Plan
from roundoff.quantize.calibration import (
    Calibration,
    calibration_workload,
    check_weights,
    copy_model,
    reference_outputs,
    with_batches,
)
from roundoff.quantize.channels.divide import divide_
from roundoff.quantize.channels.fold_batch_norm import fold_batch_norm_, fold_norms_
from roundoff.quantize.channels.rescale import rescale_
from roundoff.quantize.channels.smooth import Smoothed, smooth_channels_
from roundoff.quantize.channels.spread import spread_
from roundoff.quantize.graph import Graph, trace_sampled
from roundoff.quantize.importance import (
    GRADIENT_BATCHES,
    Importance,
    NoGradientError,
    importance,
)
from roundoff.quantize.model import QuantizedModel
from roundoff.quantize.options import Options, Rounding
from roundoff.quantize.record import PipelineStep
from roundoff.quantize.round_in_order import round_model_
from roundoff.quantize.schemes import (
    SiteFormat,
    scheme,
    site_formats,
    split_observers_,
)
from roundoff.quantize.weights.output_error import Gain
from roundoff.site import select
from roundoff.workload import Workload

#: The power of the output may change by this share when channels are rescaled: far below
#: any real change, far above rounding.
SAME_POWER = 1e-3


def quantize(
    model: nn.Module | Workload,
    plan: Plan | Mapping[str, str] | str | Path,
    batches: Iterable[Any] | None = None,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    options: Options | None = None,
    rounding: Rounding | None = None,
    fold: bool = True,
    spread: bool = True,
    skip: Iterable[str] = (),
) -> QuantizedModel:
    """Copy a model into the formats of a plan: calibrated, with weights rounded.

    In order: BatchNorm is folded into the layers before it; channels are balanced as
    ``rounding.balance`` says, or else rescaled where that costs the output less
    (``channels.spread``); then one pass from front to back chooses the scale of each
    value and rounds each weight and bias with what really arrives there
    (``round_in_order``). ``steps`` of the result has the SQNR of the output after each
    of them, ``rows`` says of every call what became of it.

    Args:
        model: in any mode; it is left as it was. Or a workload, whose batches are the
            calibration data unless given.
        plan: which site runs in which format: a ``Plan``, a file with one, a mapping from
            patterns of sites to formats, or one format for all products with weights
            (``"int8"``, ``"w4a8"``, ``"w4g64"``, ``"fp8_e4m3fn"``).
        batches: calibration data, as the model takes them; a few hundred samples.
        forward: ``forward(model, batch)``, where the model is not simply called.
        options: granularity, symmetry, static or dynamic scales (see ``Options``).
        rounding: observer of values and rounding of weights (see ``Rounding``).
        fold: fold BatchNorm.
        spread: rescale channels.
        skip: patterns of sites that stay in fp32, whatever the plan says.

    Returns:
        The simulation: called like the model, it returns what the artefact will return.
        ``.record()`` is what was chosen.

    Raises:
        QuantizationError: no data, data or weights with NaN or Inf, weights in half
            precision, or nothing to quantize.
        PlanError: a plan for another model, or an unknown format.
        PatternError: a pattern of ``skip``, or of layers in ``options`` or ``rounding``,
            that names no site.
        WorkloadError: the model raised on a batch.

    Example:
        >>> torch.manual_seed(0)
        <torch...>
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        >>> small = quantize(net, "int8", [torch.randn(32, 8) for _ in range(4)])
        >>> [(row.site, row.format) for row in small.rows if row.format != "fp32"]
        [('0/linear', 'int8'), ('2/linear', 'int8')]
        >>> small.steps[-1].after > 35
        True
    """
    workload = calibration_workload(model, batches, forward)
    request = _Request(options or Options(), rounding or Rounding(), fold)
    graph = trace_sampled(workload)
    for pattern in (*request.options.layers, *request.rounding.layers):
        select(pattern, list(graph.nodes))
    formats = site_formats(plan, graph, list(skip))

    calibration = _lay_out(workload, graph, formats, request)
    rescales = spread and not request.rounding.balance
    try:
        steps = _calibrate_(calibration, request, spread=rescales)
    except _FunctionChangedError:
        calibration = _lay_out(workload, graph, formats, request)  # that copy is spoilt
        request = replace(request, options=replace(request.options, divide=False))
        steps = [_UNDONE, *_calibrate_(calibration, request, spread=False)]
    calibration.model.steps = steps
    return calibration.model


_UNDONE = PipelineStep(
    "rescaling", math.nan, math.nan, "undone: it changed what the model computes"
)


def unrounded(quantized: QuantizedModel, workload: Workload) -> nn.Module:
    """Copy a workload's model in full precision, with the values of its quantized model.

    BatchNorm is folded and channels are divided by the factors that they were divided by
    there, as ``quantized`` remembers them: nothing is fitted. Values that are divided in
    front of a reader (``Route.divided``) are as they were before.

    >>> torch.manual_seed(0)
    <torch...>
    >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> workload = Workload(net, [torch.randn(32, 8)])
    >>> twin = unrounded(quantize(workload, "int8"), workload)
    >>> x = workload.batches[0]
    >>> torch.allclose(twin(x), net(x), atol=1e-6), torch.equal(twin[0].bias, net[0].bias)
    (True, False)
    """
    twin = copy_model(workload.model)
    if quantized.folded:
        fold_batch_norm_(twin, workload.batches[:1], forward=workload.forward)
    with torch.no_grad():
        for rescaling in quantized.rescalings:
            rescale_(twin, rescaling.group, rescaling.factors, clips=rescaling.clips)
    return twin


@dataclass(frozen=True, slots=True)
class _Request:
    """How the user wants a model to be quantized, beside the formats."""

    options: Options
    rounding: Rounding
    fold: bool


class _FunctionChangedError(QuantizationError):
    """Rescaled channels gave another function."""


def _lay_out(
    workload: Workload, graph: Graph, formats: Mapping[str, Format], request: _Request
) -> Calibration:
    """Copy a model, fold BatchNorm and put quantizers where the formats ask for them.

    ``graph`` is that of the workload's model; the copy has another one where BatchNorm
    was folded.
    """
    copied = workload.with_model(copy_model(workload.model))
    plain = workload
    if _has_other_parameters(copied.model, workload.model):
        graph = trace_sampled(copied)
        plain = workload.with_model(copy_model(workload.model))
    notes: list[SiteFormat] = []
    if request.fold and any(n.operator == "batch_norm" for n in graph.nodes.values()):
        like = with_batches(plain, workload.batches[:1])
        folded = fold_norms_(copied, graph, like=like)
        notes = [
            SiteFormat(row.norm, "fp32", f"not folded: {row.reason}")
            for row in folded
            if row.reason
        ]
        graph = trace_sampled(copied)
    laid_out = scheme(graph, formats, request.options)
    remarks = split_observers_(laid_out, request.rounding)
    model = QuantizedModel(copied.model, laid_out, graph)
    model.rows += notes
    model.folded = request.fold
    model.remarks += remarks
    check_weights(model)
    return Calibration(
        model=model,
        graph=graph,
        workload=copied,
        batches=copied.batches,
        reference=reference_outputs(workload),
    )


def _has_other_parameters(copied: nn.Module, model: nn.Module) -> bool:
    """Return True where weights that modules computed became parameters of a copy."""
    names = [[name for name, _ in each.named_parameters()] for each in (copied, model)]
    return names[0] != names[1]


def _calibrate_(
    calibration: Calibration, request: _Request, *, spread: bool
) -> list[PipelineStep]:
    """Balance or rescale channels, then round in order; return what each step gained.

    Raises ``_FunctionChangedError`` where rescaled channels gave another function.
    """
    rounding = request.rounding
    methods = dict.fromkeys(r.balance for r in rounding.every if r.balance)
    balanced = [_balance_(calibration, rounding, method) for method in methods]
    divide = request.options.divide and not rounding.balance
    rescaled = _rescale_(calibration, rounding, spread=spread, divide=divide)
    rounded = _round_(calibration, rounding, rescaled.importance)
    return [*balanced, *rescaled.steps, rounded]


def _balance_(
    calibration: Calibration, rounding: Rounding, method: str
) -> PipelineStep:
    """Balance the channels that calls read whose ``rounding`` has this method."""
    strengths = {}
    for site in calibration.model.routes:
        of_site = rounding.of(site)
        if of_site.balance == method:
            strengths[site] = of_site.strength
    smoothed = smooth_channels_(calibration, method=method, alpha=strengths)
    if smoothed.rows:
        note = _balance_note(smoothed)
        convolutions = sum(
            calibration.graph.nodes[site].kind == "conv" for site in strengths
        )
        if method == "awq" and convolutions:
            note.append(f"awq is for linear layers: {convolutions} convolutions left")
        note.append("both sides with min-max ranges, weights to nearest")
    else:
        readers = "linear layers" if method == "awq" else "weights"
        note = [f"no value that quantized {readers} read"]
    gain = smoothed.gain
    return PipelineStep(method, gain.before_db, gain.after_db, "; ".join(note))


def _balance_note(smoothed: Smoothed) -> list[str]:
    """Say how many values were balanced, and why others were left."""
    left = Counter(
        row.how.removeprefix("left: ")
        for row in smoothed.rows
        if row.how.startswith("left")
    )
    balanced = len(smoothed.rows) - left.total()
    count = f"{balanced} of {len(smoothed.rows)} values"
    if smoothed.gain.note:
        return [count, smoothed.gain.note]
    reasons = [f"{number} left: {reason}" for reason, number in left.most_common(2)]
    return [count, *reasons]


@dataclass(frozen=True, slots=True)
class _Rescaled:
    """What rescaling gained, and what an error of each value costs the output after it."""

    steps: list[PipelineStep] = field(default_factory=list)
    importance: Importance | None = None


def _rescale_(
    calibration: Calibration, rounding: Rounding, *, spread: bool, divide: bool
) -> _Rescaled:
    """Rescale channels by what the output loses, as far as that is asked for."""
    static = _has_static_values(calibration)
    methods: list[Callable[[Calibration, Importance], Gain]] = []
    if spread and static:
        methods.append(spread_)
    if divide and any(not q.weight for _, q in calibration.model.named()):
        methods.append(divide_)
    weighs = static and any(r.observer == "adjoint" for r in rounding.every)
    if not methods and not weighs:
        return _Rescaled()
    try:
        before = importance(calibration)
    except NoGradientError as error:
        return _Rescaled([_unweighed(error)])
    _note_unweighed_(calibration.model, before)
    return _rescale_by_(calibration, before, methods)


def _rescale_by_(
    calibration: Calibration,
    before: Importance,
    methods: Sequence[Callable[[Calibration, Importance], Gain]],
) -> _Rescaled:
    """Rescale channels by these methods, and weigh errors anew where one did."""
    gains = [method(calibration, before) for method in methods]
    steps = [
        PipelineStep(gain.name, gain.before_db, gain.after_db, gain.note)
        for gain in gains
    ]
    if all(math.isnan(gain.after_db) for gain in gains):
        return _Rescaled(steps, before)
    return _Rescaled(steps, _importance_after(calibration, before))


def _unweighed(error: NoGradientError) -> PipelineStep:
    note = f"left out: {error.what} ({error.got}); ranges by their own error (mse)"
    return PipelineStep("weighing", math.nan, math.nan, note)


def _note_unweighed_(model: QuantizedModel, weights: Importance) -> None:
    """Say in rows and remarks which errors could not be weighed, and why."""
    reasons: dict[str, str] = {}
    quantizers = dict(model.named())
    for name, reason in weights.remarks.items():
        model.remarks.append(f"{name}: {reason}")
        quantizer = quantizers.get(name)
        sites = (name,) if quantizer is None else quantizer.sites
        reasons |= dict.fromkeys(sites, reason)
    for place, row in enumerate(model.rows):
        texts = (row.reason, reasons.get(row.site, ""))
        model.rows[place] = replace(row, reason="; ".join(filter(None, texts)))


def _has_static_values(calibration: Calibration) -> bool:
    quantizers = calibration.model.named()
    return any(not q.weight and not q.dynamic for _, q in quantizers)


def _importance_after(calibration: Calibration, before: Importance) -> Importance:
    """Return what errors cost the output of a rescaled model.

    Raises ``_FunctionChangedError`` where it is another function.
    """
    # extremes over all batches were for the rescaling alone
    after = importance(calibration.on(calibration.batches[:GRADIENT_BATCHES]))
    if abs(after.output - before.output) > SAME_POWER * before.output:
        raise _FunctionChangedError(
            "rescaled channels changed what the model computes",
            where=calibration.workload.name,
            do="leave Options(divide=True) out for this model",
        )
    return after


def _round_(
    calibration: Calibration, rounding: Rounding, weights: Importance | None
) -> PipelineStep:
    """Choose scales and codes from front to back."""
    if weights is None or not _has_static_values(calibration):
        layers = {p: _without_importance(r) for p, r in rounding.layers.items()}
        rounding = replace(_without_importance(rounding), layers=layers)
    gains = round_model_(calibration, rounding, weights)
    finite = [g.db for g in gains if math.isfinite(g.after_db - g.before_db)]
    note = ""
    if finite:
        mean = sum(finite) / len(finite)
        note = f"weights: {mean:.1f} dB over nearest, a layer, mean of {len(finite)}"
    name = f"{rounding.observer}, {rounding.weights}"
    return PipelineStep(name, math.nan, calibration.measure_db(), note)


def _without_importance(rounding: Rounding) -> Rounding:
    if rounding.observer != "adjoint":
        return rounding
    return replace(rounding, observer="mse")
