"""``roundoff.quantize``: a plan, a model and calibration data in, a quantized model out."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.budget import sqnr_db
from roundoff.errors import QuantizationError
from roundoff.plan import Plan, noise
from roundoff.quantize.calibration import (
    check_data,
    check_weights,
    given_workload,
    site_formats,
    traced,
)
from roundoff.quantize.channels.divide import divide_
from roundoff.quantize.channels.fold_batch_norm import fold_batch_norm_
from roundoff.quantize.channels.rescale import rescale_
from roundoff.quantize.channels.smooth import smooth_
from roundoff.quantize.channels.spread import spread_
from roundoff.quantize.graph import Graph
from roundoff.quantize.importance import GRADIENTS, importance
from roundoff.quantize.model import QuantizedModel
from roundoff.quantize.options import Options, Rounding
from roundoff.quantize.record import Step
from roundoff.quantize.round_in_order import round_in_order_
from roundoff.quantize.schemes import Row, scheme
from roundoff.quantize.shared_values import apart_
from roundoff.site import select
from roundoff.workload import Workload, named_tensors

#: By what share the power of the output may change when channels are rescaled: rounding, far below any real change.
SAME = 1e-3
#: Batches that each step's gain is measured on.
MEASURED = 2


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
    """A copy of a model in the formats of a plan, calibrated, with weights rounded so that the output keeps its value.

    In order: BatchNorm is folded into the layers before it; channels are balanced as ``rounding.balance`` says, or else
    rescaled where that costs the output less (``repair.spread``); then one pass from front to back chooses the scale of
    each value and rounds each weight and bias with what really arrives there (``sequential``). ``steps`` of the result has
    the SQNR of the output after each of them, ``rows`` says of every call what became of it.

    Args:
        model: in any mode; it is left as it was. Or a workload, whose batches are the calibration data unless given.
        plan: which site runs in which format: a ``Plan``, a file with one, a mapping from patterns of sites to formats, or
            one format for all products with weights (``"int8"``, ``"w4a8"``, ``"w4g64"``, ``"fp8_e4m3fn"``).
        batches: calibration data, as the model takes them; a few hundred samples.
        forward: ``forward(model, batch)``, where the model is not simply called.
        options: granularity, symmetry, static or dynamic scales (see ``Options``).
        rounding: observer of values and rounding of weights (see ``Rounding``).
        fold: fold BatchNorm.
        spread: rescale channels.
        skip: patterns of sites that stay in fp32, whatever the plan says.

    Returns:
        The simulation: called like the model, it returns what the artefact will return. ``.record()`` is what was chosen.

    Raises:
        QuantizationError: no data, data or weights with NaN or Inf, weights in half precision, or nothing to quantize.
        PlanError: a plan for another model, or an unknown format.
        PatternError: a pattern of ``skip``, or of layers in ``options`` or ``rounding``, that names no site.
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
    workload = given_workload(model, batches, forward)
    check_data(workload)
    skip = list(skip)
    options, rounding = options or Options(), rounding or Rounding()
    first = traced(workload)
    for pattern in (*options.layers, *rounding.layers):
        select(pattern, list(first.nodes))
    formats = site_formats(plan, first, skip)
    own = workload.with_model(_copied(workload.model))
    notes: list[Row] = []
    if fold:
        folded = fold_batch_norm_(own.model, own.batches[:1], forward=own.forward)
        notes = [
            Row(f.norm, "fp32", f"not folded: {f.reason}") for f in folded if f.reason
        ]
    graph = traced(own)
    made = QuantizedModel(own.model, scheme(graph, formats, options), graph)
    made.rows += notes
    made.folded = fold
    made.remarks += apart_(made, rounding)
    check_weights(made)
    meter = _Meter(workload, own, made)
    steps = _calibrate(made, graph, own, rounding, spread, meter, options.divide)
    if steps is None:  # the copy is spoilt: another one
        made = quantize(
            workload,
            plan,
            options=options,
            rounding=rounding,
            fold=fold,
            spread=False,
            skip=skip,
        )
        steps = [
            Step(
                "spread",
                math.nan,
                math.nan,
                "undone: it changed what the model computes",
            ),
            *made.steps,
        ]
    made.steps = steps
    return made


def unrounded(made: QuantizedModel, workload: Workload) -> nn.Module:
    """A copy of a workload's model in full precision whose values inside are those of the quantized model made of it.

    BatchNorm is folded and channels are divided by the factors that they were divided by there, as ``made`` remembers them:
    nothing is fitted. Values that are divided in front of a reader (``Route.divided``) are as they were before.

    >>> torch.manual_seed(0)
    <torch...>
    >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    >>> workload = Workload(net, [torch.randn(32, 8)])
    >>> twin = unrounded(quantize(workload, "int8"), workload)
    >>> x = workload.batches[0]
    >>> torch.allclose(twin(x), net(x), atol=1e-6), torch.equal(twin[0].bias, net[0].bias)
    (True, False)
    """
    twin = _copied(workload.model)
    if made.folded:
        fold_batch_norm_(twin, workload.batches[:1], forward=workload.forward)
    with torch.no_grad():
        for group, factors, clips in made.moves:
            rescale_(twin, group, factors, clips=clips)
    return twin


def _copied(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with the model, in evaluation mode."""
    try:
        return copy.deepcopy(model).eval()
    except (
        RuntimeError,
        TypeError,
        NotImplementedError,
    ) as error:  # tensors with a history, locks, open files
        raise QuantizationError(
            "the model cannot be copied",
            where=type(model).__name__,
            got=str(error).partition(". ")[0],
            expected="a module that copy.deepcopy takes",
            do="fold torch.nn.utils.weight_norm in with remove_weight_norm, or make the module "
            "forget tensors that it computed",
        ) from error


def _calibrate(
    made: QuantizedModel,
    graph: Graph,
    own: Workload,
    rounding: Rounding,
    spread: bool,
    meter: _Meter,
    divide: bool,
) -> list[Step] | None:
    """What was done; None where rescaled channels gave another function."""
    found = [
        _balanced(made, graph, own, rounding, method)
        for method in dict.fromkeys(r.balance for r in rounding.every)
        if method
    ]
    values = [q for _, q in made.named() if not q.weight]
    static = [q for q in values if not q.dynamic]
    spread, divide = (asked and not rounding.balance for asked in (spread, divide))
    weights = None
    weighs = any(r.observer == "adjoint" for r in rounding.every)
    if static and (spread or weighs) or values and divide:
        weights = importance(made, own, own.batches)
        gains = [spread_(made, graph, own, weights)] if static and spread else []
        if divide:
            gains.append(divide_(made, graph, own, weights))
        found += [
            Step(gain.name, gain.before_db, gain.after_db, gain.note) for gain in gains
        ]
        if any(not math.isnan(gain.after_db) for gain in gains):
            before = weights.output
            weights = importance(
                made, own, own.batches[:GRADIENTS]
            )  # extremes were for the rescaling alone
            if abs(weights.output - before) > SAME * before:
                return None
    if weights is None or not static:
        rounding = replace(
            _unweighed(rounding),
            layers={p: _unweighed(r) for p, r in rounding.layers.items()},
        )
    gains = round_in_order_(made, own, own.batches, rounding, weights)
    means = [
        g.after_db - g.before_db
        for g in gains
        if math.isfinite(g.after_db - g.before_db)
    ]
    note = (
        f"weights: {sum(means) / len(means):.1f} dB over nearest, a layer, mean of {len(means)}"
        if means
        else ""
    )
    found.append(
        Step(f"{rounding.observer}, {rounding.weights}", math.nan, meter.db(), note)
    )
    return found


def _unweighed(how: Rounding) -> Rounding:
    return replace(how, observer="mse") if how.observer == "adjoint" else how


def _balanced(
    made: QuantizedModel, graph: Graph, own: Workload, rounding: Rounding, method: str
) -> Step:
    """Balance the channels that the calls read for which ``rounding`` has this method."""
    hows = {site: rounding.of(site) for site in made.routes}
    strengths = {
        site: how.strength for site, how in hows.items() if how.balance == method
    }
    done = smooth_(made, graph, own, method=method, alpha=strengths)
    left = Counter(
        row.how.removeprefix("left: ")
        for row in done.rows
        if row.how.startswith("left")
    )
    parts = [
        f"{len(done.rows) - left.total()} of {len(done.rows)} values",
        done.gain.note,
    ]
    parts += [
        f"{number} left: {why}"
        for why, number in left.most_common(2)
        if not done.gain.note
    ]
    convolutions = (
        sum(made.graph.nodes[site].kind == "conv" for site in strengths)
        if method == "awq"
        else 0
    )
    parts += [f"awq is for linear layers: {convolutions} convolutions left"] * bool(
        convolutions
    )
    parts.append("both sides with min-max ranges, weights to nearest")
    if not done.rows:
        parts = [
            f"no value that quantized {'linear layers' if method == 'awq' else 'weights'} read"
        ]
    return Step(
        method, done.gain.before_db, done.gain.after_db, "; ".join(filter(None, parts))
    )


class _Meter:
    """SQNR of a quantized model's output against the unquantized one's, on the first batches."""

    def __init__(
        self, reference: Workload, own: Workload, made: QuantizedModel
    ) -> None:
        self.batches = own.batches[:MEASURED]
        self.own = own.with_model(made)
        self.exact = [self._run(reference, batch) for batch in self.batches]

    def db(self) -> float:
        """In dB."""
        return sqnr_db(
            noise([self._run(self.own, batch) for batch in self.batches], self.exact)
        )

    @staticmethod
    def _run(workload: Workload, batch: Any) -> dict[str, Tensor]:
        training = workload.model.training
        try:
            with torch.no_grad():
                return named_tensors(
                    workload.with_model(workload.model.eval()).run(batch)
                )
        finally:
            workload.model.train(training)
