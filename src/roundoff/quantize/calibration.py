"""What ``roundoff.quantize`` is given: a workload with finite data, weights that can become codes, formats of sites."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from roundoff.errors import FormatError, QuantizationError
from roundoff.formats import Format, parse_format
from roundoff.ops import MATRIX_KINDS
from roundoff.plan import Plan, Rule
from roundoff.quantize.graph import Graph, trace
from roundoff.quantize.model import QuantizedModel
from roundoff.site import select
from roundoff.workload import Workload, describe

#: Kinds of calls that a plan of one format quantizes.
#: Batches, at most, that the graph of a model is traced on that never asks for a tensor's value.
TRACED = 4


def given_workload(
    model: nn.Module | Workload,
    batches: Iterable[Any] | None,
    forward: Callable[[nn.Module, Any], Any] | None,
) -> Workload:
    """The workload that a model, or a workload with other batches, is calibrated with."""
    if isinstance(model, Workload):
        if batches is None:
            return model
        twin = model.with_model(model.model)
        twin.batches = list(batches)
        return twin
    given = [] if batches is None else list(batches)
    if not given:
        raise _no_data("quantize")
    return Workload(model, given, forward=forward)


def _no_data(where: str) -> QuantizationError:
    return QuantizationError(
        "no calibration data",
        where=where,
        expected="one batch or more",
        got="none",
        do="give the batches that the model is calibrated on",
    )


def check_data(workload: Workload) -> None:
    """Calibration data must be there, and finite."""
    if not workload.batches:
        raise _no_data(workload.name)
    for index, batch in enumerate(workload.batches):
        for leaf in tree_flatten(batch)[0]:
            if (
                isinstance(leaf, Tensor)
                and leaf.is_floating_point()
                and not bool(leaf.isfinite().all())
            ):
                bad = int((~leaf.isfinite()).sum())
                raise QuantizationError(
                    f"{bad} of {leaf.numel()} values of the calibration data are NaN or Inf",
                    where=f"{workload.name}, batch {index}, {describe(batch)}",
                    expected="finite values",
                    do="leave these samples out, or mend what makes them",
                )


def traced(workload: Workload) -> Graph:
    """The graph of ``TRACED`` of the batches, spread over all; of all where the model may branch on their values."""
    some = workload.batches[:: -(-len(workload.batches) // TRACED)]
    graph = trace(workload, some)
    return (
        trace(workload) if graph.asks and len(some) < len(workload.batches) else graph
    )


def site_formats(
    plan: Plan | Mapping[str, str] | str | Path, graph: Graph, skip: Iterable[str] = ()
) -> dict[str, Format]:
    """The format of each site of a graph that a plan, a mapping, a file or the name of one format asks for.

    Raises ``PlanError`` for a plan whose patterns name nothing, ``PatternError`` for a ``skip`` that names nothing.
    """
    sites = list(graph.nodes)
    if isinstance(plan, str) and (fmt := _format(plan)) is not None:
        chosen = {
            s: fmt
            for s, node in graph.nodes.items()
            if node.kind in MATRIX_KINDS and _has_weight(graph, s, fmt)
        }
    else:
        if isinstance(plan, Mapping):
            plan = Plan(tuple(Rule(fmt, (pattern,)) for pattern, fmt in plan.items()))
        elif not isinstance(plan, Plan):
            plan = Plan.load(plan)
        chosen = {
            site: parse_format(name) for site, name in plan.formats(sites).items()
        }
    for pattern in skip:
        for site in select(pattern, sites):
            chosen.pop(site, None)
    return chosen


def _has_weight(graph: Graph, site: str, fmt: Format) -> bool:
    node = graph.nodes[site]
    weighted = any(
        use.weight or use.origin == "made" for use in node.uses
    )  # what is made of weights becomes a reason
    return weighted and (
        node.kind != "embedding"
        or fmt.execution is None
        or fmt.execution.activation is None
    )


def _format(name: str) -> Format | None:
    try:
        return parse_format(name)
    except FormatError:
        if Path(name).suffix in (".toml", ".json"):
            return None
        raise


def check_weights(made: QuantizedModel) -> None:
    """Weights that become codes must be finite, in a precision in which a scale times a code is a value of the grid."""
    for name in made.weight_names():
        weight = made.model.get_parameter(name)
        if weight.dtype not in (torch.float32, torch.float64):
            raise QuantizationError(
                "the model's weights are no fp32",
                where=name,
                expected="float32 or float64",
                got=str(weight.dtype).removeprefix("torch."),
                do="give model.float(), and data in float32",
            )
        if bad := int((~weight.detach().isfinite()).sum()):
            raise QuantizationError(
                f"{bad} of {weight.numel()} weights are NaN or Inf",
                where=name,
                expected="finite weights",
                do="load or train the model again",
            )
