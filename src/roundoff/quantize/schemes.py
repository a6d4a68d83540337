"""Scheme: which values of a graph are quantized, how, and why the others are not.

A site in a matrix format reads its activations and weights through quantizers
(``layout``); for integers its result may be codes, and what joins such results works on
them (``code_flow``).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from roundoff.errors import FormatError, QuantizationError, wrong_type
from roundoff.formats import FORMATS, Format, parse_format
from roundoff.ops import MATRIX_KINDS
from roundoff.plan import Plan, Rule
from roundoff.quantize.code_flow import follow
from roundoff.quantize.graph import Graph, Node
from roundoff.quantize.layout import QuantizerLayout, Route
from roundoff.quantize.options import Options, Rounding
from roundoff.quantize.quantizer import Quantizer
from roundoff.site import select


@dataclass(frozen=True)
class SiteFormat:
    """The format that a site runs in, and the reason where it stays as it is."""

    site: str
    format: str
    reason: str = ""


@dataclass
class Scheme:
    """Routes of the calls, quantizers by name, and one row for each site."""

    routes: dict[str, Route]
    quantizers: dict[str, Quantizer]
    rows: list[SiteFormat]


def scheme(graph: Graph, formats: Mapping[str, Format], options: Options) -> Scheme:
    """Lay out the quantizers that ``formats`` ask for (site to format).

    Sites without a format stay as they are. A weight that several calls read is stored
    once: all of them read it on one grid, also those that the formats leave out, and one
    that wants another grid stays as it is. All this is in the rows.

    Raises ``QuantizationError`` when nothing at all would be quantized.
    """
    layout = QuantizerLayout(graph, formats, options)
    for node in graph.nodes.values():
        layout.lay(node)
    for node in graph.nodes.values():
        layout.share(node)
    if options.elementwise and options.activation == "tensor" and not options.dynamic:
        follow(layout)
    rows = [_site_format(layout, node) for node in graph.nodes.values()]
    rows += [SiteFormat(site, "fp32", reason) for site, reason in graph.hidden]
    if not layout.routes:
        raise _nothing_to_quantize(rows)
    if options.kv_cache and not layout.cached_operands:
        raise QuantizationError(
            "no keys and values to keep",
            where="kv_cache",
            got="no attention",
            expected="scaled_dot_product_attention, or products before and after a softmax",
        )
    return Scheme(layout.routes, layout.quantizers, rows)


def _site_format(layout: QuantizerLayout, node: Node) -> SiteFormat:
    """Say what becomes of a call."""
    name = layout.names.get(node.site, "fp32")
    planned_fp32 = layout.formats.get(node.site) == FORMATS["fp32"]
    default = "the plan leaves it in fp32" if planned_fp32 and name == "fp32" else ""
    return SiteFormat(node.site, name, layout.reasons.get(node.site, default))


def _nothing_to_quantize(rows: Iterable[SiteFormat]) -> QuantizationError:
    reasons = sorted({row.reason for row in rows if row.reason})
    return QuantizationError(
        "nothing would be quantized",
        expected="a plan with a format that some site can run in",
        got="; ".join(reasons[:3]) or "fp32 for every site",
        do="offer int8, or another format for matrix products",
    )


def split_observers_(laid_out: Scheme, rounding: Rounding) -> list[str]:
    """Give readers of one value with another observer a quantizer of their own, in place.

    Readers that no pattern of ``rounding.layers`` names go with the first that one does.
    Returns a remark for each: a value that has two scales is rounded twice, and an
    integer kernel cannot write both.
    """
    remarks = []
    for name, quantizer in list(laid_out.quantizers.items()):
        if quantizer.weight or quantizer.dynamic:
            continue
        by_observer = _sites_by_observer(laid_out, name, quantizer, rounding)
        for sites in by_observer[1:]:
            remarks.append(
                f"{name} has a second scale: {', '.join(sites)} asks for another observer than {quantizer.sites[0]}"
            )
            _split_off_(laid_out, name, sites)
    return remarks


def _sites_by_observer(
    laid_out: Scheme, name: str, quantizer: Quantizer, rounding: Rounding
) -> list[list[str]]:
    """Group the readers of a value that have a rounding of their own by its observer."""
    groups: dict[str, list[str]] = {}
    for site in quantizer.sites:
        of_site = rounding.of(site)
        if of_site is not rounding and name in laid_out.routes[site].uses.values():
            key = f"{of_site.observer} {sorted(of_site.parameters.items())}"
            groups.setdefault(key, []).append(site)
    return list(groups.values())


def _split_off_(laid_out: Scheme, name: str, sites: list[str]) -> None:
    """Let these sites read a value through a copy of its quantizer."""
    quantizer = laid_out.quantizers[name]
    places = [
        (site, place)
        for site in sites
        for place, used in laid_out.routes[site].uses.items()
        if used == name
    ]
    twin_name = "{}:{}".format(*places[0])
    for site, place in places:
        laid_out.routes[site].uses[place] = twin_name
    twin = copy.deepcopy(quantizer)
    twin.name = twin_name
    twin.sites = tuple(sites)
    quantizer.sites = tuple(s for s in quantizer.sites if s not in sites)
    laid_out.quantizers[twin_name] = twin


def site_formats(
    plan: Plan | Mapping[str, str] | str | Path, graph: Graph, skip: Iterable[str] = ()
) -> dict[str, Format]:
    """Return the format that a plan gives each site of a graph.

    The plan may be a mapping, a file, or the name of one format for all products with
    weights. Raises ``PlanError`` for a plan whose patterns name nothing, ``PatternError``
    for a ``skip`` that names nothing.
    """
    sites = list(graph.nodes)
    single = _single_format(plan)
    if single is not None:
        formats = {
            node.site: single
            for node in graph.nodes.values()
            if node.kind in MATRIX_KINDS and _takes_single_format(node, single)
        }
    else:
        names = _read_plan(plan).formats(sites)
        formats = {site: parse_format(name) for site, name in names.items()}
    for pattern in skip:
        for site in select(pattern, sites):
            formats.pop(site, None)
    return formats


def _single_format(plan: Plan | Mapping[str, str] | str | Path) -> Format | None:
    """Return the format that a plan names; None for anything else than a format's name."""
    if isinstance(plan, torch.dtype):
        return parse_format(str(plan))
    if not isinstance(plan, str):
        return None
    try:
        return parse_format(plan)
    except FormatError:
        if Path(plan).suffix in (".toml", ".json"):
            return None
        raise


def _read_plan(plan: Plan | Mapping[str, str] | str | Path) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, Mapping):
        return Plan(tuple(Rule(fmt, (pattern,)) for pattern, fmt in plan.items()))
    if not isinstance(plan, str | Path):
        raise wrong_type("plan", plan, "a Plan, its file, or the name of a format")
    return Plan.load(plan)


def _takes_single_format(node: Node, fmt: Format) -> bool:
    """Return True for calls with weights; the weights of a lookup may be quantized alone."""
    # what is computed from weights is taken too: it gets a reason
    weighted = any(use.weight or use.origin == "computed" for use in node.uses)
    quantizes_values = (
        fmt.execution is not None and fmt.execution.activation is not None
    )
    return weighted and not (node.kind == "embedding" and quantizes_values)
