"""One row for each call of a quantized model: its format, and how far it is from fp32."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from roundoff.budget import sqnr_db
from roundoff.export.delivery.outcome import QuantizationResult
from roundoff.export.delivery.records import ProvedSiteRow, QuantizedSiteRow
from roundoff.export.delivery.request import Ask
from roundoff.export.onnx.kernels import KernelRow
from roundoff.export.onnx.proof import Proof, ValueProof, exact_values
from roundoff.formats import BlockFormat
from roundoff.ops import Call, float_tensors, watch
from roundoff.preserve import preserve, same_draws
from roundoff.quantize import (
    CLIPS,
    FOLLOWS,
    Node,
    Passing,
    QuantizedModel,
    Quantizer,
    granularity_name,
    unrounded,
)
from roundoff.site import matches


class CallSqnr(NamedTuple):
    """SQNR in dB of what a call returned against full precision, and of rounding that alone.

    ``own_db`` is None where the result is not rounded.
    """

    sqnr_db: float | None
    own_db: float | None


def site_rows(outcome: QuantizationResult, ask: Ask) -> tuple[QuantizedSiteRow, ...]:
    """Return one row for each call, in order."""
    model = outcome.model
    distances = compare(outcome)
    shares: dict[str, float] = {}
    if outcome.shares:
        shares = dict.fromkeys(model.graph.nodes, 0.0) | dict(outcome.shares)
    shared = outcome.plan.figures.shared
    verdicts = {row.site: (row.format, row.reason) for row in model.rows}
    quantizers = dict(model.named())
    rows = []
    for site, node in model.graph.nodes.items():
        fmt, reason = verdicts.get(site, ("fp32", "not called while the plan was made"))
        state = _state(fmt)
        if _clips_codes(node, fmt, model, quantizers):
            fmt = state = "codes"
            reason = reason or "clips what the call before it writes as codes"
        if state == "fp32" and not reason:
            reason = _fp32_reason(node, ask, shared.get(site, ""))
        weight, value = _operands(site, model)
        distance = distances.get(site, CallSqnr(None, None))
        rows.append(
            QuantizedSiteRow(
                site=site,
                operator=node.operator,
                kind=node.kind,
                format=fmt,
                state=state,
                weights="" if weight is None else _format_text(weight),
                values=_values_text(site, model, value),
                observer="" if value is None else value.observer,
                sqnr_db=distance.sqnr_db,
                own_db=distance.own_db,
                reason=reason,
                share=shares.get(site),
            )
        )
    return tuple(rows)


def prove_rows(
    rows: tuple[QuantizedSiteRow, ...], proof: Proof
) -> tuple[ProvedSiteRow, ...]:
    """Add what ONNX Runtime did to the rows of calls."""
    values = {value.name: value for value in proof.sites}
    kernels = {call.site: call for call in proof.became}
    return tuple(
        _proved_row(row, values.get(row.site), kernels.get(row.site)) for row in rows
    )


def _proved_row(
    row: QuantizedSiteRow, value: ValueProof | None, call: KernelRow | None
) -> ProvedSiteRow:
    carried = value.carried if value else None
    return ProvedSiteRow(
        **{field.name: getattr(row, field.name) for field in fields(row)},
        file_db=value.fp32_db if value else None,
        artefact_db=value.simulation_db if value else None,
        codes=value.codes if value else None,
        differing=value.differing if value else None,
        carried=carried.share if carried else None,
        kernel=call.kernel if call else "",
        integer=call.integer if call else None,
        kernel_reason=call.reason if call else "",
    )


def _state(fmt: str) -> str:
    return fmt if fmt in ("codes", "fp32") else "quantized"


def _clips_codes(
    node: Node, fmt: str, model: QuantizedModel, quantizers: Mapping[str, Quantizer]
) -> bool:
    return (
        node.operator in CLIPS
        and fmt == "fp32"
        and node.site in quantizers
        and node.uses[0].value in model.routes
    )


def _fp32_reason(node: Node, ask: Ask, shared: str) -> str:
    """Return why a call is in fp32; ``shared`` is what the plan says of a shared weight."""
    for pattern in ask.skip:
        if matches(pattern, node.site):
            return f"--skip {pattern}"
    if shared:
        return shared
    if node.operator in FOLLOWS | CLIPS:
        return "its neighbours are in fp32, or in several formats: no codes to work on"
    one_for_all = not ask.target and ask.plan is None
    if one_for_all and node.kind in ("matmul", "attention"):
        return "a product of two values: one format for all takes products with weights, a plan or target these too"
    return "the plan leaves it in fp32"


def _operands(
    site: str, model: QuantizedModel
) -> tuple[Quantizer | None, Quantizer | None]:
    """Return the quantizers of the first weight and the first value that a call reads."""
    route = model.routes.get(site)
    names = route.uses.values() if route else ()
    quantizers = [model.quantizer(name) for name in names]
    weight = next((q for q in quantizers if q.weight), None)
    value = next((q for q in quantizers if not q.weight), None)
    return weight, value


def _values_text(site: str, model: QuantizedModel, value: Quantizer | None) -> str:
    route = model.routes.get(site)
    if route is not None and route.executes is not None:
        return "whole call"
    return "" if value is None else _format_text(value)


def _format_text(quantizer: Quantizer) -> str:
    name = quantizer.fmt.name
    if isinstance(quantizer.fmt, BlockFormat):
        return f"{name}, its own blocks"
    if quantizer.granularity is None:
        return f"{name}, dynamic"
    granularity = granularity_name(quantizer.granularity).replace("per_", "per ")
    return f"{name}, {granularity}"


def compare(outcome: QuantizationResult) -> dict[str, CallSqnr]:
    """Compare each call and value with full precision on one batch, by site."""
    batch = outcome.judge.workload.batches[0]
    workload = outcome.workload
    model = outcome.model
    exact = unrounded(model, outcome.start)
    results = _Results()
    with preserve(model), torch.no_grad():
        model.eval()
        with watch(exact, results) as mode:
            mode.begin()
            with mode, same_draws():
                workload.with_model(exact).run(batch)
        values = exact_values(workload, exact, model, batch)
        taps = _SiteTaps(results.by_site, values)
        with model.through(taps), same_draws():
            workload.with_model(model).run(batch)
    return taps.distances


class _Results:
    """Handler that keeps the first tensor that each call returned."""

    def __init__(self) -> None:
        self.by_site: dict[str, Tensor] = {}

    def before_write(self, _: Tensor) -> None:
        """Keep nothing of a tensor's identity."""

    def call(self, call: Call) -> Any:
        """Return the call's result, unchanged."""
        result = call.run()
        tensors = float_tensors(result)
        if tensors:
            self.by_site[str(call.site)] = tensors[0].detach().clone()
        return result


class _SiteTaps(Passing):
    """Run the quantized model and measure each value and result."""

    def __init__(
        self, results: Mapping[str, Tensor], values: Mapping[str, Tensor]
    ) -> None:
        self.results = results
        self.values = values
        self.distances: dict[str, CallSqnr] = {}

    def value(self, name: str, quantizer: Any, value: Tensor) -> Tensor:
        rounded = super().value(name, quantizer, value)
        if not quantizer.weight and name in self.values:
            exact = self.values[name]
            self.distances[name] = CallSqnr(_db(rounded, exact), _db(rounded, value))
        return rounded

    def result(self, site: str, result: Any) -> Any:
        tensors = float_tensors(result)
        if tensors and site in self.results:
            self.distances[site] = CallSqnr(_db(tensors[0], self.results[site]), None)
        return result


def _db(value: Tensor, exact: Tensor) -> float:
    """Return the SQNR in dB: NaN for other shapes, -inf without a signal."""
    if exact.shape != value.shape:
        return float("nan")
    signal = float(exact.double().square().sum())
    if not signal:
        return sqnr_db(float("inf"))
    return sqnr_db(float((value.double() - exact.double()).square().sum()) / signal)
