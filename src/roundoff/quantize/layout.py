"""Layout: which quantizers each call of a graph reads through, and why a call has none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from roundoff.errors import FormatError
from roundoff.formats import Format, Granularity, PerGroup, PerToken
from roundoff.ops import operators_that, runs_kind
from roundoff.quantize.attention import CacheFormat, keys_and_values
from roundoff.quantize.graph import Graph, Node, Use
from roundoff.quantize.options import Options, is_integer
from roundoff.quantize.quantizer import Quantizer

_ALONG_SEQUENCE = operators_that("run along a sequence")


@dataclass
class Route:
    """What one call reads and writes through which quantizer.

    Attributes:
        site: of the call.
        uses: place of the argument -> name of the quantizer.
        output: name of the quantizer of its result, or empty.
        bias: place of a bias that is rounded to the scale of the sums, or -1.
        executes: a format that the call runs in as a whole (bf16), instead of quantized
            operands.
        divided: place of an argument -> name of the factors that it is divided by first
            (``channels.divide``).
        gated: the call multiplies codes by the codes of their own sigmoid
            (``code_flow``).
    """

    site: str
    uses: dict[int, str] = field(default_factory=dict)
    output: str = ""
    bias: int = -1
    executes: Format | None = None
    divided: dict[int, str] = field(default_factory=dict)
    gated: bool = False


class QuantizerLayout:
    """Routes and quantizers as they come about, and the reasons of what stays as it is.

    Attributes:
        routes: by site.
        quantizers: by name.
        names: by site, the name of its format, or ``codes``.
        reasons: by site, why it stays as it is.
        cached_operands: by site, what a cache of keys and values keeps.
    """

    def __init__(
        self, graph: Graph, formats: Mapping[str, Format], options: Options
    ) -> None:
        self.graph = graph
        self.formats = formats
        self.options = options
        self.routes: dict[str, Route] = {}
        self.quantizers: dict[str, Quantizer] = {}
        self.names: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.cache = CacheFormat.parse(options.kv_cache) if options.kv_cache else None
        self.cached_operands = keys_and_values(graph) if self.cache else {}

    def lay(self, node: Node) -> None:
        """Route a call that has a format, or note the reason why it cannot be."""
        if self.cache is not None and node.site in self.cached_operands:
            self._route_cached(node, self.cache)
        fmt = self.formats.get(node.site)
        if fmt is None or fmt.name == "fp32":
            return
        reason = self._refuses(node, fmt)
        if reason is None:
            self._route(node, fmt)
        else:
            self.reasons[node.site] = reason

    def route_of(self, node: Node, name: str) -> Route:
        """Return the route of a call that runs in the format of this name."""
        self.names[node.site] = name
        if name == "codes":
            self.reasons.pop(node.site, None)
        return self.routes.setdefault(node.site, Route(node.site))

    def _route_cached(self, node: Node, cache: CacheFormat) -> None:
        """Let a call read keys and values as the cache keeps them."""
        route = self.route_of(node, f"keys and values in {cache.fmt.name}")
        for use in self.cached_operands[node.site]:
            self.read(route, use, cache.fmt, cache.granularity(use.operand.reduce))

    def _route(self, node: Node, fmt: Format) -> None:
        """Let a call read its operands in a format, or run in it as a whole."""
        route = self.route_of(node, fmt.name)
        rule = fmt.execution
        if rule is None or _runs_whole(fmt):
            route.executes = fmt
            return
        along_sequence = node.operator in _ALONG_SEQUENCE
        values = rule.activation is not None and not along_sequence
        quantizes = {
            "weight": rule.weight is not None,
            "activation": values,
            "bias": self.options.bias and values,
        }
        if along_sequence and rule.activation is not None:
            self.reasons[node.site] = (
                "weights alone: kernels of whole recurrent layers multiply floating-point "
                "numbers, so that rounded inputs would gain nothing"
            )
        for use in node.uses:
            if quantizes.get(use.operand.role):
                self._route_operand(route, node, use, fmt)

    def _route_operand(self, route: Route, node: Node, use: Use, fmt: Format) -> None:
        """Let a call read one operand in a format."""
        if use.operand.role == "weight":
            self.read(route, use, fmt, self._weight_granularity(node, use, fmt))
        elif use.operand.role == "activation":
            values = self._value_format(node, fmt)
            self.read(route, use, values, self._value_granularity(node, use, values))
        elif is_integer(fmt):
            route.bias = use.operand.leaf

    def _weight_granularity(
        self, node: Node, use: Use, fmt: Format
    ) -> Granularity | None:
        return self.options.of(node.site).weight_granularity(use, fmt)

    def _value_format(self, node: Node, fmt: Format) -> Format:
        return self.options.of(node.site).value_format(fmt)

    def _value_granularity(
        self, node: Node, use: Use, fmt: Format
    ) -> Granularity | None:
        weighted = any(other.weight for other in node.uses)
        return self.options.value_granularity(use, fmt, weighted)

    def _refuses(self, node: Node, fmt: Format) -> str | None:
        """Return why a call cannot run in a format, or None."""
        if node.site in self.graph.changing:
            return (
                "reads other values from batch to batch: the model branches on its data"
            )
        weighted = any(use.weight for use in node.uses)
        reason = runs_kind(node.kind, weighted, fmt)
        if reason is not None or _runs_whole(fmt):
            return reason
        for use in node.uses:
            reason = self._operand_refuses(node, use, fmt)
            if reason is not None:
                return reason
        return None

    def _operand_refuses(self, node: Node, use: Use, fmt: Format) -> str | None:
        """Return why an operand cannot be quantized for a call, or None."""
        if use.operand.role == "bias":
            return None
        if use.origin == "computed":
            return f"{use.value} is no parameter: a buffer, a view, or made of parameters in the forward pass"
        try:
            if use.weight:
                return self._weight_refuses(node, use, fmt)
            if fmt.execution is not None and fmt.execution.activation is not None:
                values = self._value_format(node, fmt)
                granularity = self._value_granularity(node, use, values)
                if granularity is not None:
                    granularity.split(use.shape)
        except FormatError as error:
            return f"{use.value} of shape {use.shape}: {error.what}"
        return None

    def _weight_refuses(self, node: Node, use: Use, fmt: Format) -> str | None:
        """Return why a weight cannot be stored on a grid, or None.

        Raises ``FormatError`` for a granularity that does not fit its shape.
        """
        granularity = self._weight_granularity(node, use, fmt)
        if granularity is not None:
            granularity.split(use.shape)
        for reader in self.graph.readers(use.value):
            if self._transforms(reader, use.value):
                return f"{use.value} is stored once, and {reader.site} reads a view of it or makes another weight of it"
        stored = self.quantizers.get(use.value)
        if stored is None:
            return None
        same_grid = (stored.fmt, stored.granularity) == (fmt, granularity)
        ndim = len(use.shape)
        same_axis = stored.operand.reduce % ndim == use.operand.reduce % ndim
        # blocks lie along the contracted axis
        if same_grid and (granularity is not None or same_axis):
            return None
        return f"{use.value} is stored once, as {stored.sites[0]} reads it: {stored.fmt.name}, {stored.granularity}"

    def _transforms(self, node: Node, weight: str) -> bool:
        """Return True for a call that reads a weight otherwise than as it is stored."""
        if node.site in self.graph.of_parameters:
            return True
        return any(u.value == weight and u.origin == "computed" for u in node.uses)

    def read(
        self, route: Route, use: Use, fmt: Format, granularity: Granularity | None
    ) -> None:
        """Let a call read an operand through the quantizer of its value.

        It gets a quantizer of its own where another reader has the value in another
        format or granularity, or where this is only a part of the value.
        """
        leaf = use.operand.leaf
        if leaf in route.uses:
            return
        name = use.value
        shared = self.quantizers.get(name)
        wanted = (fmt, granularity, use.weight)
        other_grid = (
            shared is not None
            and (shared.fmt, shared.granularity, shared.weight) != wanted
        )
        if other_grid or not (use.weight or self._is_whole(use)):
            name = f"{route.site}:{leaf}"
        if name not in self.quantizers:
            chosen_per_tensor = isinstance(granularity, PerToken | PerGroup)
            dynamic = not use.weight and (self.options.dynamic or chosen_per_tensor)
            self.quantizers[name] = Quantizer(
                name, fmt, use.operand, granularity, dynamic=dynamic
            )
        quantizer = self.quantizers[name]
        quantizer.sites = tuple(dict.fromkeys((*quantizer.sites, route.site)))
        route.uses[leaf] = name

    def _is_whole(self, use: Use) -> bool:
        """Return True for an operand that holds all elements of its value, in any order."""
        elements = 0
        for name in use.value.split(" "):
            part = self.graph.nodes.get(name)
            if part is None:
                return False
            elements += math.prod(part.shapes[0])
        return math.prod(use.shape) == elements

    def share(self, node: Node) -> None:
        """Let a call without a format for it read a quantized weight as it is stored."""
        for use in node.uses:
            stored = self.quantizers.get(use.value)
            if stored is None or not stored.weight:
                continue
            route = self.routes.get(node.site)
            if route is not None and use.operand.leaf in route.uses:
                continue
            note = f"reads {use.value} as it is stored for {stored.sites[0]}, in {stored.fmt.name}"
            reasons = (self.reasons.get(node.site), note)
            self.reasons[node.site] = "; ".join(filter(None, reasons))
            if use.origin == "parameter":
                route = self.routes.setdefault(node.site, Route(node.site))
                route.uses[use.operand.leaf] = use.value
                stored.sites = (*stored.sites, node.site)


def _runs_whole(fmt: Format) -> bool:
    """Return True for formats that a call runs in as a whole, such as bf16."""
    rule = fmt.execution
    return rule is None or "exact" in (rule.activation, rule.weight)
