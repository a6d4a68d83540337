"""Scheme: which values of a graph are quantized, how, and why the others are not.

A site in a matrix format reads its activations and weights through quantizers (``layout``); for integers its result may be
codes, and what joins such results works on them (``codes``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roundoff.errors import QuantizationError
from roundoff.formats import FORMATS, Format
from roundoff.quantize.code_flow import follow
from roundoff.quantize.graph import Graph, Node
from roundoff.quantize.layout import Layout, Route
from roundoff.quantize.options import Options
from roundoff.quantize.quantizer import Quantizer


@dataclass(frozen=True)
class Row:
    """One site and what became of it: its format, or the reason why it stays as it is."""

    site: str
    format: str
    reason: str = ""


@dataclass
class Scheme:
    """Routes of the calls, quantizers by name, and one row for each site."""

    routes: dict[str, Route]
    quantizers: dict[str, Quantizer]
    rows: list[Row]


def scheme(graph: Graph, formats: Mapping[str, Format], options: Options) -> Scheme:
    """Lay out the quantizers that ``formats`` (site to format; others stay as they are) ask for.

    A weight that several calls read is stored once: all of them read it on one grid, those that the formats leave out too,
    and one that wants another grid stays as it is. All this is in the rows.

    Raises ``QuantizationError`` when nothing at all would be quantized.
    """
    made = Layout(graph, formats, options)
    for node in graph.nodes.values():
        made.lay(node)
    for node in graph.nodes.values():
        made.share(node)
    if options.elementwise and options.activation == "tensor" and not options.dynamic:
        follow(made)
    rows = [_row(made, node) for node in graph.nodes.values()]
    rows += [Row(site, "fp32", reason) for site, reason in graph.hidden]
    if not made.routes:
        raise QuantizationError(
            "nothing would be quantized",
            expected="a plan with a format that some site can run in",
            got="; ".join(sorted({r.reason for r in rows if r.reason})[:3])
            or "fp32 for every site",
            do="offer int8, or another format for matrix products",
        )
    if options.kv_cache and not made.kept:
        raise QuantizationError(
            "no keys and values to keep",
            where="kv_cache",
            got="no attention",
            expected="scaled_dot_product_attention, or products before and after a softmax",
        )
    return Scheme(made.routes, made.quantizers, rows)


def _row(made: Layout, node: Node) -> Row:
    """What became of a call."""
    name = made.names.get(node.site, "fp32")
    pinned = name == "fp32" and made.formats.get(node.site) == FORMATS["fp32"]
    return Row(
        node.site,
        name,
        made.reasons.get(node.site, "the plan leaves it in fp32" if pinned else ""),
    )
