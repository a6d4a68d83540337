"""sites: one row for each call of a quantized model, with how far it is from the full-precision one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.budget import sqnr_db
from roundoff.export.delivery.make import Made
from roundoff.export.delivery.request import Ask
from roundoff.export.onnx.proof import exact_values
from roundoff.formats import BlockFormat
from roundoff.ops import Call, float_tensors, watch
from roundoff.preserve import preserve
from roundoff.quantize import (
    CLIPS,
    FOLLOWS,
    Graph,
    Passing,
    QuantizedModel,
    Quantizer,
    granularity_name,
    unrounded,
)
from roundoff.site import matches
from roundoff.workload import Workload


def site_rows(made: Made, ask: Ask) -> list[dict[str, Any]]:
    """Of each call, in order: format, granularity, observer, SQNR against fp32 on one batch, and the reason if it is fp32.

    ``state`` is ``quantized``, ``codes`` (reads or writes codes because its neighbours do) or ``fp32``. ``sqnr_db`` is that
    of what the call returns, with everything before it quantized too, against full precision with BatchNorm folded and
    channels divided alike (``unrounded``; of a pruned model, what pruning left); ``own_db`` that of rounding alone what it
    returned. None where a call was not compared. ``share`` is the site's share of the noise that the budget predicts for the
    output; None without a target.
    """
    graph = made.model.graph
    seen = compare(made)
    shares = dict.fromkeys(graph.nodes, 0.0) | made.shares if made.shares else {}
    return [
        _row(site, made.model, graph, seen, ask) | {"share": shares.get(site)}
        for site in graph.nodes
    ]


def _row(
    site: str,
    model: QuantizedModel,
    graph: Graph,
    seen: dict[str, tuple[float, float | None]],
    ask: Ask,
) -> dict[str, Any]:
    said = {row.site: row for row in model.rows}.get(site)
    route, node = model.routes.get(site), graph.nodes[site]
    given = [model.quantizer(name) for name in (route.uses.values() if route else ())]
    weights = [q for q in given if q.weight]
    values = [q for q in given if not q.weight]
    made = dict(model.named()).get(site)
    executes = route is not None and route.executes is not None
    fmt = said.format if said is not None else "fp32"
    reason = said.reason if said is not None else "not called while the plan was made"
    clips = (
        node.operator in CLIPS
        and fmt == "fp32"
        and made is not None
        and node.uses[0].value in model.routes
    )
    state = (
        "codes" if fmt == "codes" or clips else "fp32" if fmt == "fp32" else "quantized"
    )
    if clips:
        reason, fmt = reason or "clips what the call before it writes as codes", "codes"
    if state == "fp32" and not reason:
        skipped = next((p for p in ask.skip if matches(p, site)), None)
        reason = f"--skip {skipped}" if skipped else "the plan leaves it in fp32"
        if not skipped and node.operator in FOLLOWS | CLIPS:
            reason = (
                "its neighbours are in fp32, or in several formats: no codes to work on"
            )
        elif (
            not skipped
            and not ask.target
            and ask.plan is None
            and node.kind in ("matmul", "attention")
        ):
            reason = "a product of two values: one format for all takes products with weights, a plan or target these too"
    db, own = seen.get(site, (None, None))
    return {
        "site": site,
        "operator": node.operator,
        "kind": node.kind,
        "format": fmt,
        "state": state,
        "weights": _how(weights[0]) if weights else "",
        "values": "whole call" if executes else _how(values[0]) if values else "",
        "observer": values[0].observer if values else "",
        "sqnr_db": db,
        "own_db": own,
        "reason": reason,
    }


def _how(quantizer: Quantizer) -> str:
    if isinstance(quantizer.fmt, BlockFormat):
        return f"{quantizer.fmt.name}, its own blocks"
    if quantizer.granularity is None:
        return f"{quantizer.fmt.name}, dynamic"
    return f"{quantizer.fmt.name}, {granularity_name(quantizer.granularity).replace('per_', 'per ')}"


def compare(made: Made) -> dict[str, tuple[float, float | None]]:
    """By site: SQNR in dB of what it returned against full precision, and of rounding that alone (None: not rounded)."""
    batch = made.judge.workload.batches[0]
    exact, twin = _Outputs(), unrounded(made.model, made.start)
    with preserve(made.model), torch.no_grad():
        made.model.eval()
        with watch(twin, exact) as mode:
            mode.begin()
            with mode:
                made.workload.with_model(twin).run(batch)
        taps = _Taps(exact.found, exact_values(made.workload, twin, made.model, batch))
        with made.model.through(taps):
            _run(made.workload, made.model, batch)
    return taps.rows


def _run(workload: Workload, model: nn.Module, batch: Any) -> None:
    workload.with_model(model).run(batch)


class _Outputs:
    """Handler that keeps the first tensor that each call returned."""

    def __init__(self) -> None:
        self.found: dict[str, Tensor] = {}

    def before_write(self, _: Tensor) -> None:
        """Nothing is kept of a tensor's identity."""

    def call(self, call: Call) -> Any:
        """The call's result, unchanged."""
        result = call.run()
        tensors = float_tensors(result)
        if tensors:
            self.found[str(call.site)] = tensors[0].detach().clone()
        return result


class _Taps(Passing):
    def __init__(
        self, results: dict[str, Tensor], values: Mapping[str, Tensor]
    ) -> None:
        self.results, self.values = results, values
        self.rows: dict[str, tuple[float, float | None]] = {}

    def value(self, name: str, quantizer: Any, value: Tensor) -> Tensor:
        found = super().value(name, quantizer, value)
        if not quantizer.weight and name in self.values:
            self.rows[name] = (_db(found, self.values[name]), _db(found, value))
        return found

    def result(self, site: str, result: Any) -> Any:
        tensors = float_tensors(result)
        if tensors and site in self.results:
            self.rows[site] = (_db(tensors[0], self.results[site]), None)
        return result


def _db(found: Tensor, exact: Tensor) -> float:
    return sqnr_db(_noise(found, exact)) if exact.shape == found.shape else float("nan")


def _noise(found: Tensor, exact: Tensor) -> float:
    signal = float(exact.double().square().sum())
    return (
        float((found.double() - exact.double()).square().sum()) / signal
        if signal
        else float("inf")
    )
