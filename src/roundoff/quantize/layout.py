"""Layout: which quantizers each call of a graph reads through, and why a call has none."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from roundoff.errors import FormatError
from roundoff.formats import Format, Granularity, PerGroup, PerToken
from roundoff.ops import runs_kind
from roundoff.quantize.attention import Cache, keys_and_values
from roundoff.quantize.graph import Graph, Node, Use
from roundoff.quantize.options import Options, is_integer
from roundoff.quantize.quantizer import Quantizer


@dataclass
class Route:
    """What one call reads and writes through which quantizer."""

    site: str
    #: place of the argument -> name of the quantizer
    uses: dict[int, str] = field(default_factory=dict)
    output: str = ""
    #: place of a bias that is rounded to the scale of the sums
    bias: int = -1
    #: a format that the call runs in as a whole (bf16), instead of quantized operands
    executes: Format | None = None
    #: place of an argument -> name of the factors that it is divided by first (``repair.smoothing``)
    divided: dict[int, str] = field(default_factory=dict)


class QuantizerLayout:
    """Routes and quantizers as they come about, and the reasons of what stays as it is."""

    def __init__(
        self, graph: Graph, formats: Mapping[str, Format], options: Options
    ) -> None:
        self.graph, self.formats, self.options = graph, formats, options
        self.routes: dict[str, Route] = {}
        self.quantizers: dict[str, Quantizer] = {}
        self.names: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.cache = Cache.parse(options.kv_cache) if options.kv_cache else None
        self.cached_operands = keys_and_values(graph) if self.cache else {}

    def lay(self, node: Node) -> None:
        """The route of a call that has a format, or the reason why it has none."""
        if self.cache is not None and node.site in self.cached_operands:
            route = self.routed(node, f"keys and values in {self.cache.fmt.name}")
            for use in self.cached_operands[node.site]:
                self.read(
                    route,
                    use,
                    self.cache.fmt,
                    self.cache.granularity(use.operand.reduce),
                )
        fmt = self.formats.get(node.site)
        if fmt is None or fmt.name == "fp32":
            return
        reason = self._refuses(node, fmt)
        if reason is None:
            self._route(node, fmt)
        else:
            self.reasons[node.site] = reason

    def routed(self, node: Node, name: str) -> Route:
        self.names[node.site] = name
        if name == "codes":
            self.reasons.pop(node.site, None)
        return self.routes.setdefault(node.site, Route(node.site))

    def _route(self, node: Node, fmt: Format) -> None:
        route, rule = self.routed(node, fmt.name), fmt.execution
        if rule is None or "exact" in (rule.activation, rule.weight):
            route.executes = fmt
            return
        weighted = any(use.weight for use in node.uses)
        for use in node.uses:
            if use.operand.role == "weight" and rule.weight is not None:
                self.read(
                    route,
                    use,
                    fmt,
                    self.options.of(node.site).weight_granularity(use, fmt),
                )
            elif use.operand.role == "activation" and rule.activation is not None:
                own = self.options.of(node.site).value_format(fmt)
                self.read(
                    route, use, own, self.options.value_granularity(use, own, weighted)
                )
            elif (
                use.operand.role == "bias"
                and self.options.bias
                and is_integer(fmt)
                and rule.activation is not None
            ):
                route.bias = use.operand.leaf

    def _refuses(self, node: Node, fmt: Format) -> str | None:
        """Why a call cannot run in a format, or None."""
        if node.site in self.graph.changing:
            return (
                "reads other values from batch to batch: the model branches on its data"
            )
        weighted = any(use.weight for use in node.uses)
        reason, rule = runs_kind(node.kind, weighted, fmt), fmt.execution
        if (
            reason is not None
            or rule is None
            or "exact" in (rule.activation, rule.weight)
        ):
            return reason
        for use in node.uses:
            if use.operand.role == "bias":
                continue
            if use.origin == "computed":
                return f"{use.value} is no parameter: a buffer, a view, or made of parameters in the forward pass"
            try:
                reason = self._misfit(node, use, fmt, weighted)
            except FormatError as error:
                reason = f"{use.value} of shape {use.shape}: {error.what}"
            if reason is not None:
                return reason
        return None

    def _misfit(self, node: Node, use: Use, fmt: Format, weighted: bool) -> str | None:
        """Why an operand has no such granularity: a reason, or ``FormatError``; None where it has."""
        rule = fmt.execution
        if not use.weight:
            granularity = self.options.value_granularity(
                use, self.options.of(node.site).value_format(fmt), weighted
            )
            if (
                granularity is not None
                and rule is not None
                and rule.activation is not None
            ):
                granularity.split(use.shape)
            return None
        granularity, axis = (
            self.options.of(node.site).weight_granularity(use, fmt),
            use.operand.reduce % len(use.shape),
        )
        if granularity is not None:
            granularity.split(use.shape)
        other = next(
            (
                n.site
                for n in self.graph.readers(use.value)
                if self._transforms(n, use.value)
            ),
            "",
        )
        if other:
            return f"{use.value} is stored once, and {other} reads a view of it or makes another weight of it"
        known = self.quantizers.get(use.value)
        if (
            known is None
            or (known.fmt, known.granularity) == (fmt, granularity)
            and (
                granularity is not None or known.operand.reduce % len(use.shape) == axis
            )
        ):
            return None
        return f"{use.value} is stored once, as {known.sites[0]} reads it: {known.fmt.name}, {known.granularity}"

    def _transforms(self, node: Node, weight: str) -> bool:
        """Whether a call reads a weight otherwise than as the parameter that is stored."""
        used = any(u.value == weight and u.origin == "computed" for u in node.uses)
        return used or node.site in self.graph.of_parameters

    def read(
        self, route: Route, use: Use, fmt: Format, granularity: Granularity | None
    ) -> None:
        """Let a call read an operand through the quantizer of its value, or through one of its own.

        One of its own: another reader has the value in another format or granularity, or this is only a part of the value.
        """
        name, own = use.value, f"{route.site}:{use.operand.leaf}"
        known = self.quantizers.get(name)
        other = known is not None and (known.fmt, known.granularity, known.weight) != (
            fmt,
            granularity,
            use.weight,
        )
        if other or not (use.weight or self._whole(use)):
            name = own
        if use.operand.leaf in route.uses:
            return
        if name not in self.quantizers:
            dynamic = not use.weight and (
                self.options.dynamic or isinstance(granularity, PerToken | PerGroup)
            )
            self.quantizers[name] = Quantizer(
                name, fmt, use.operand, granularity, dynamic=dynamic
            )
        quantizer = self.quantizers[name]
        quantizer.sites = tuple(dict.fromkeys((*quantizer.sites, route.site)))
        route.uses[use.operand.leaf] = name

    def _whole(self, use: Use) -> bool:
        """Whether an operand holds all elements of its value, whatever their order."""
        parts = [self.graph.nodes.get(name) for name in use.value.split(" ")]
        return all(p is not None for p in parts) and math.prod(use.shape) == sum(
            math.prod(p.shapes[0]) for p in parts if p is not None
        )

    def share(self, node: Node) -> None:
        """Let a call that has no format for it read a quantized weight as it is stored."""
        for use in node.uses:
            known, route = self.quantizers.get(use.value), self.routes.get(node.site)
            if (
                known is None
                or not known.weight
                or (route is not None and use.operand.leaf in route.uses)
            ):
                continue
            note = f"reads {use.value} as it is stored for {known.sites[0]}, in {known.fmt.name}"
            self.reasons[node.site] = "; ".join(
                filter(None, (self.reasons.get(node.site), note))
            )
            if use.origin == "parameter":
                route = self.routes.setdefault(node.site, Route(node.site))
                route.uses[use.operand.leaf] = use.value
                known.sites = (*known.sites, node.site)
