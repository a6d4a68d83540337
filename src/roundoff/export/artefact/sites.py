"""sites: one row for each call of a quantized model, with how far it is from the full-precision one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.capture.calls import Call, float_tensors, watch
from roundoff.export.artefact.ask import Ask
from roundoff.export.artefact.make import Made
from roundoff.formats import BlockFormat
from roundoff.plan.budget import sqnr_db
from roundoff.quantize.codes import CLIPS, FOLLOWS
from roundoff.quantize.graph import Graph
from roundoff.quantize.model import Passing, QuantizedModel
from roundoff.quantize.quantizer import Quantizer
from roundoff.quantize.record import granularity_name
from roundoff.quantize.repair.fold import fold_batch_norm_
from roundoff.site import matches
from roundoff.workload import Workload, preserve


def site_rows(made: Made, ask: Ask) -> list[dict[str, Any]]:
    """Of each call, in order: format, granularity, observer, SQNR against fp32 on one batch, and the reason if it is fp32.

    ``state`` is ``quantized``, ``codes`` (reads or writes codes because its neighbours do) or ``fp32``. ``sqnr_db`` is that
    of what the call returns, with everything before it quantized too, up to a factor for each channel (repairs rescale
    channels); ``own_db`` that of rounding what it returned alone. None where a call was not compared.
    """
    graph = made.model.graph
    seen = compare(made)
    return [_row(site, made.model, graph, seen, ask) for site in graph.nodes]


def _row(
    site: str, model: QuantizedModel, graph: Graph, seen: dict[str, tuple[float, float | None]], ask: Ask
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
    clips = node.operator in CLIPS and fmt == "fp32" and made is not None and node.uses[0].value in model.routes
    state = "codes" if fmt == "codes" or clips else "fp32" if fmt == "fp32" else "quantized"
    if clips:
        reason, fmt = reason or "clips what the call before it writes as codes", "codes"
    if state == "fp32" and not reason:
        skipped = next((p for p in ask.skip if matches(p, site)), None)
        reason = f"--skip {skipped}" if skipped else "the plan leaves it in fp32"
        if not skipped and node.operator in FOLLOWS | CLIPS:
            reason = "its neighbours are in fp32, or in several formats: no codes to work on"
        elif not skipped and not ask.target and ask.plan is None and node.kind in ("matmul", "attention"):
            reason = "a product of two values: one format for all takes products with weights, a plan or target these too"
    db, own = seen.get(site, (None, None))
    return {
        "site": site, "operator": node.operator, "kind": node.kind, "format": fmt, "state": state,
        "weights": _how(weights[0]) if weights else "",
        "values": "whole call" if executes else _how(values[0]) if values else "",
        "observer": values[0].observer if values else "", "sqnr_db": db, "own_db": own, "reason": reason,
    }  # fmt: skip


def _how(quantizer: Quantizer) -> str:
    if isinstance(quantizer.fmt, BlockFormat):
        return f"{quantizer.fmt.name}, its own blocks"
    if quantizer.granularity is None:
        return f"{quantizer.fmt.name}, dynamic"
    return f"{quantizer.fmt.name}, {granularity_name(quantizer.granularity).replace('per_', 'per ')}"


def compare(made: Made) -> dict[str, tuple[float, float | None]]:
    """By site: SQNR in dB of what it returned against full precision, and of rounding that alone (None: not rounded)."""
    batch = made.judge.workload.batches[0]
    exact = _Outputs()
    twin = copy.deepcopy(made.judge.workload.model)
    with preserve(made.model), torch.no_grad():
        made.model.eval()
        fold_batch_norm_(twin.eval(), made.workload.batches[:1], forward=made.workload.forward)
        with watch(twin, exact) as mode:
            mode.begin()
            with mode:
                made.workload.with_model(twin).run(batch)
        taps = _Taps(exact.found)
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
    def __init__(self, exact: dict[str, Tensor]) -> None:
        self.exact = exact
        self.rows: dict[str, tuple[float, float | None]] = {}

    def value(self, name: str, quantizer: Any, value: Tensor) -> Tensor:
        found = super().value(name, quantizer, value)
        if not quantizer.weight and name in self.exact:
            self.rows[name] = (self._db(name, found), sqnr_db(_noise(found, value)))
        return found

    def result(self, site: str, result: Any) -> Any:
        tensors = float_tensors(result)
        if tensors and site in self.exact:
            self.rows[site] = (self._db(site, tensors[0]), None)
        return result

    def _db(self, name: str, found: Tensor) -> float:
        exact = self.exact[name]
        if exact.shape != found.shape:  # pruned
            return float("nan")
        return sqnr_db(_noise(found, exact * _factors(found, exact)))


def _factors(found: Tensor, exact: Tensor) -> Tensor:
    """For each channel the factor of ``exact`` with the least squared difference: repairs rescale channels."""
    axis = 1 if exact.ndim > 3 else exact.ndim - 1
    rest = [i for i in range(exact.ndim) if i != axis]
    if not rest:
        return torch.ones_like(exact)
    power = exact.double().square().sum(rest, keepdim=True)
    product = (found.double() * exact.double()).sum(rest, keepdim=True)
    return torch.where(power > 0, product / power, 1.0).to(exact.dtype)


def _noise(found: Tensor, exact: Tensor) -> float:
    signal = float(exact.double().square().sum())
    return float((found.double() - exact.double()).square().sum()) / signal if signal else float("inf")
