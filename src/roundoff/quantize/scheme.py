"""Scheme: which values of a graph are quantized, how, and why the others are not.

A site in a matrix format reads its activations and weights through quantizers. For integers the rest follows from what
ONNX Runtime fuses (its documentation, "Quantize ONNX models", format QDQ): an integer convolution writes codes too, so its
result has a quantizer, behind the ReLU or clip that alone reads it; and what joins or pools such results (add, cat, pooling)
works on codes as well.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from roundoff.capture.calls import Operand
from roundoff.capture.execute import runs_kind
from roundoff.errors import FormatError, QuantizationError
from roundoff.formats import (
    FORMATS,
    BlockFormat,
    Format,
    Granularity,
    PerAxis,
    PerGroup,
    PerTensor,
    PerToken,
)
from roundoff.formats.named import integer
from roundoff.quantize.attention import Cache, keys_and_values
from roundoff.quantize.graph import Graph, Node, Use
from roundoff.quantize.quantizer import Quantizer

#: Calls that an integer kernel absorbs: they only clip, and their result is quantized instead of what they read.
CLIPS = frozenset({"relu", "relu6", "hardtanh", "clamp", "clip", "clamp_min"})
#: Calls that only choose among the codes they read: their result has the same scale.
PASSES = frozenset({"max_pool1d", "max_pool2d", "max_pool3d"})
#: Calls with integer kernels that join or pool codes.
FOLLOWS = frozenset({"add", "mul", "mean", "adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"})
_FP32 = FORMATS["fp32"]


def upper_bound(node: Node) -> float | None:
    """The upper end of a clip from 0 to a bound, None for other calls and clips.

    >>> upper_bound(Node("/relu6", "relu6", "elementwise", (), ()))
    6.0
    """
    if node.operator == "relu6":
        return 6.0
    bounds = [float(v) for v in node.settings if isinstance(v, int | float) and not isinstance(v, bool)]
    if node.operator in ("hardtanh", "clamp", "clip") and len(bounds) == 2 and bounds[0] == 0.0 < bounds[1]:
        return bounds[1]
    return None


@dataclass(frozen=True, kw_only=True)
class Options:
    """How formats are put to work, beside the plan.

    Attributes:
        symmetric: integer activations without zero point. Asymmetric ones use the whole range of what a ReLU leaves.
        dynamic: scales of activations are chosen from each tensor when the model runs.
        activation: which activations share a scale: ``tensor``, ``channel`` (along the contracted axis), or ``token`` and
            ``group:SIZE`` (all of a token, or so many of its channels), which are dynamic.
        weight: which weights share a scale: ``format`` (as the format has it: per output channel for integers), ``tensor``,
            ``channel`` or ``group:SIZE`` along the contracted axis.
        elementwise: adds and pools between integer calls work on codes, results of integer convolutions are codes.
        bias: biases of integer calls are rounded to the scale of their sums, as integer kernels add them.
        kv_cache: the format of keys and values in attention, or empty: ``int8`` (a scale for each token and head, chosen
            when it comes), ``int4:channel`` (one for each channel of a head, calibrated), ``fp8_e4m3fn:tensor``.
    """

    symmetric: bool = False
    dynamic: bool = False
    activation: str = "tensor"
    weight: str = "format"
    elementwise: bool = True
    bias: bool = True
    kv_cache: str = ""

    def __post_init__(self) -> None:
        for name, words in (("activation", ("tensor", "token", "channel")), ("weight", ("format", "tensor", "channel"))):
            given = getattr(self, name)
            if given not in words and not re.fullmatch(r"group:[1-9]\d*", given):
                raise QuantizationError("unknown granularity", where=name, expected=f"{', '.join(words)} or group:SIZE",
                                        got=repr(given))  # fmt: skip


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
    made = _Layout(graph, formats, options)
    for node in graph.nodes.values():
        made.lay(node)
    for node in graph.nodes.values():
        made.share(node)
    if options.elementwise and options.activation == "tensor" and not options.dynamic:
        made.follow()
    rows = [made.row(node) for node in graph.nodes.values()]
    rows += [Row(site, "fp32", reason) for site, reason in graph.hidden]
    if not made.routes:
        raise QuantizationError("nothing would be quantized", expected="a plan with a format that some site can run in",
                                got="; ".join(sorted({r.reason for r in rows if r.reason})[:3]) or "fp32 for every site",
                                do="offer int8, or another format for matrix products")  # fmt: skip
    if options.kv_cache and not made.kept:
        raise QuantizationError("no keys and values to keep", where="kv_cache", got="no attention",
                                expected="scaled_dot_product_attention, or products before and after a softmax")  # fmt: skip
    return Scheme(made.routes, made.quantizers, rows)


class _Layout:
    """Routes and quantizers as they come about, and the reasons of what stays as it is."""

    def __init__(self, graph: Graph, formats: Mapping[str, Format], options: Options) -> None:
        self.graph, self.formats, self.options = graph, formats, options
        self.routes: dict[str, Route] = {}
        self.quantizers: dict[str, Quantizer] = {}
        self.names: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.cache = Cache.parse(options.kv_cache) if options.kv_cache else None
        self.kept = keys_and_values(graph) if self.cache else {}

    def lay(self, node: Node) -> None:
        """The route of a call that has a format, or the reason why it has none."""
        if self.cache is not None and node.site in self.kept:
            route = self._routed(node, f"keys and values in {self.cache.fmt.name}")
            for use in self.kept[node.site]:
                self._read(route, use, self.cache.fmt, self.cache.granularity(use.operand.reduce))
        fmt = self.formats.get(node.site)
        if fmt is None or fmt.name == "fp32":
            return
        reason = self._refuses(node, fmt)
        if reason is None:
            self._route(node, fmt)
        else:
            self.reasons[node.site] = reason

    def _routed(self, node: Node, name: str) -> Route:
        self.names[node.site] = name
        if name == "codes":
            self.reasons.pop(node.site, None)
        return self.routes.setdefault(node.site, Route(node.site))

    def _route(self, node: Node, fmt: Format) -> None:
        route, rule = self._routed(node, fmt.name), fmt.execution
        if rule is None or "exact" in (rule.activation, rule.weight):
            route.executes = fmt
            return
        weighted = any(use.weight for use in node.uses)
        for use in node.uses:
            if use.operand.role == "weight" and rule.weight is not None:
                self._read(route, use, fmt, self._of_weight(use, fmt))
            elif use.operand.role == "activation" and rule.activation is not None:
                own = self._activation(fmt)
                self._read(route, use, own, self._of_value(use, own, weighted))
            elif use.operand.role == "bias" and self.options.bias and _integer(fmt) and rule.activation is not None:
                route.bias = use.operand.leaf

    def _refuses(self, node: Node, fmt: Format) -> str | None:
        """Why a call cannot run in a format, or None."""
        if node.site in self.graph.changing:
            return "reads other values from batch to batch: the model branches on its data"
        weighted = any(use.weight for use in node.uses)
        reason, rule = runs_kind(node.kind, weighted, fmt), fmt.execution
        if reason is not None or rule is None or "exact" in (rule.activation, rule.weight):
            return reason
        for use in node.uses:
            if use.operand.role == "bias":
                continue
            if use.origin == "made":
                return f"{use.value} is no parameter: a buffer, a view, or made of parameters in the forward pass"
            try:
                reason = self._misfit(use, fmt, weighted)
            except FormatError as error:
                reason = f"{use.value} of shape {use.shape}: {error.what}"
            if reason is not None:
                return reason
        return None

    def _misfit(self, use: Use, fmt: Format, weighted: bool) -> str | None:
        """Why an operand has no such granularity: a reason, or ``FormatError``; None where it has."""
        rule = fmt.execution
        if not use.weight:
            granularity = self._of_value(use, self._activation(fmt), weighted)
            if granularity is not None and rule is not None and rule.activation is not None:
                granularity.split(use.shape)
            return None
        granularity, axis = self._of_weight(use, fmt), use.operand.reduce % len(use.shape)
        if granularity is not None:
            granularity.split(use.shape)
        other = next((n.site for n in self.graph.readers(use.value) if self._transforms(n, use.value)), "")
        if other:
            return f"{use.value} is stored once, and {other} reads a view of it or makes another weight of it"
        known = self.quantizers.get(use.value)
        if known is None or (known.fmt, known.granularity) == (fmt, granularity) and (
            granularity is not None or known.operand.reduce % len(use.shape) == axis
        ):
            return None
        return f"{use.value} is stored once, as {known.sites[0]} reads it: {known.fmt.name}, {known.granularity}"

    def _transforms(self, node: Node, weight: str) -> bool:
        """Whether a call reads a weight otherwise than as the parameter that is stored."""
        used = any(u.value == weight and u.origin == "made" for u in node.uses)
        return used or node.site in self.graph.made

    def _activation(self, fmt: Format) -> Format:
        """The format of values beside weights of a format: integers are asymmetric unless asked otherwise."""
        own = fmt.of_activations
        if _integer(own) and (own is not fmt or own.symmetric) and own.symmetric != self.options.symmetric:
            return integer(own.width, symmetric=self.options.symmetric)
        return own

    def _of_weight(self, use: Use, fmt: Format) -> Granularity | None:
        """What shares a scale in a weight; None for blocks."""
        if isinstance(fmt, BlockFormat):
            return None
        ndim, asked = len(use.shape), self.options.weight
        if asked == "format":
            asked = (fmt.execution and fmt.execution.weight) or "channel"
        if asked == "tensor" or ndim < 2:
            return PerTensor()
        if asked.startswith("group"):
            return _groups(int(asked.partition(":")[2] or fmt.group_size), use, use.operand.reduce % ndim)
        return PerAxis(use.operand.channel % ndim)

    def _of_value(self, use: Use, fmt: Format, weighted: bool) -> Granularity | None:
        """What shares a scale in a value; None for blocks.

        Groups are for what meets a weight. Where two values meet, the contracted axis may be that of the tokens, whose
        number changes: there, and where an axis is no longer than a group, a token has one scale.
        """
        asked = self.options.activation
        if isinstance(fmt, BlockFormat):
            return None
        if asked == "token":
            return PerToken()
        if asked == "channel":
            return PerAxis(use.operand.reduce % len(use.shape))
        if asked.startswith("group:") and weighted and use.shape[use.operand.reduce] > int(asked[6:]):
            return PerGroup(int(asked[6:]), use.operand.reduce)
        return PerToken() if asked.startswith("group:") else PerTensor()

    def _read(self, route: Route, use: Use, fmt: Format, granularity: Granularity | None) -> None:
        """Let a call read an operand through the quantizer of its value, or through one of its own.

        One of its own: another reader has the value in another format or granularity, or this is only a part of the value.
        """
        name, own = use.value, f"{route.site}:{use.operand.leaf}"
        known = self.quantizers.get(name)
        other = known is not None and (known.fmt, known.granularity, known.weight) != (fmt, granularity, use.weight)
        if other or not (use.weight or self._whole(use)):
            name = own
        if use.operand.leaf in route.uses:
            return
        if name not in self.quantizers:
            dynamic = not use.weight and (self.options.dynamic or isinstance(granularity, PerToken | PerGroup))
            self.quantizers[name] = Quantizer(name, fmt, use.operand, granularity, dynamic=dynamic)
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
            if known is None or not known.weight or (route is not None and use.operand.leaf in route.uses):
                continue
            note = f"reads {use.value} as it is stored for {known.sites[0]}, in {known.fmt.name}"
            self.reasons[node.site] = "; ".join(filter(None, (self.reasons.get(node.site), note)))
            if use.origin == "parameter":
                route = self.routes.setdefault(node.site, Route(node.site))
                route.uses[use.operand.leaf] = use.value
                known.sites = (*known.sites, node.site)

    def follow(self) -> None:
        """Let the results of integer convolutions be codes, and what joins them work on codes."""
        changed = True
        while changed:
            changed = False
            for node in self.graph.nodes.values():
                if node.operator in FOLLOWS and node.site not in self.routes:
                    changed |= self._joins(node)
        for site in list(self.routes):
            self._writes(self.graph.nodes[site])

    def _joins(self, node: Node) -> bool:
        """Whether a call that joins or pools now works on codes: integer calls made all it reads, and read what it makes."""
        uses = [u for u in node.uses if u.operand.role == "activation"]
        if len(uses) < (2 if node.operator in ("add", "mul") else 1) or len(node.shapes) != 1:
            return False
        if any(u.shape == () for u in uses) or node.site in self.graph.changing:
            return False
        formats = [self._made_as(u.value) for u in uses]
        if formats[0] is None or any(f != formats[0] for f in formats) or not self._read_as_codes(node):
            return False
        route = self._routed(node, "codes")
        for use in uses:
            along = replace(use.operand, reduce=_channel(node))
            self._read(route, replace(use, operand=along), formats[0], PerTensor())
        return True

    def _made_as(self, value: str) -> Format | None:
        """The format of the codes that an integer call wrote for a value, through clips and pools; None without."""
        known, node = self.quantizers.get(value), self.graph.nodes.get(value)
        if known is not None and not known.weight and _integer(known.fmt):
            return known.fmt
        if node is None:
            return None
        if node.operator in CLIPS:
            return self._made_as(node.uses[0].value)
        route, fmt = self.routes.get(value), self.formats.get(value)
        if route is None or route.executes is not None:
            return None
        if self.names.get(value) == "codes":
            return self.quantizers[next(iter(route.uses.values()))].fmt
        return self._codes(node, fmt) if fmt is not None and node.kind in ("conv", "linear") else None

    def _codes(self, node: Node, fmt: Format) -> Format | None:
        """The format of values where an integer kernel computes a call that has a format; None if none does."""
        rule = fmt.execution
        routed = self.names.get(node.site) == fmt.name and rule is not None and rule.activation is not None
        return self._activation(fmt) if routed and _integer(fmt) and _integer(self._activation(fmt)) else None

    def _read_as_codes(self, node: Node) -> bool:
        """Whether every reader of what a call makes is, or may become, an integer call."""
        readers = self.graph.readers(node.site)
        return bool(readers) and all(
            r.site in self.routes or r.operator in FOLLOWS or (r.operator in CLIPS and self._read_as_codes(r))
            for r in readers
        )

    def _writes(self, node: Node) -> None:
        """Give an integer call's result a quantizer where no reader has one: integer kernels write codes."""
        if node.site in self.quantizers or len(node.shapes) != 1:
            return
        fmt = self.formats.get(node.site)
        made = None
        if self.names.get(node.site) == "codes":
            made = self._made_as(node.site)
        elif fmt is not None and node.kind == "conv":
            made = self._codes(node, fmt)
        readers = self.graph.readers(node.site)
        last = readers[0] if len(readers) == 1 and readers[0].operator in CLIPS else node
        if made is None or last.site in self.quantizers or last.site in self.graph.changing:
            return
        operand = Operand(0, "activation", _channel(node), _channel(node), frozenset({last.site}))
        self.quantizers[last.site] = Quantizer(last.site, made, operand, PerTensor(), (node.site,))
        self._routed(last, self.names.get(last.site, "codes")).output = last.site

    def row(self, node: Node) -> Row:
        """What became of a call."""
        name = self.names.get(node.site, "fp32")
        pinned = name == "fp32" and self.formats.get(node.site) == _FP32
        return Row(node.site, name, self.reasons.get(node.site, "the plan leaves it in fp32" if pinned else ""))


def _channel(node: Node) -> int:
    """The axis of the channels of a call's result: of convolutions and what follows them, the one behind the batch."""
    return 1 - len(node.uses[1].shape) if node.kind == "conv" else 1 if len(node.shapes[0]) > 2 else -1


def _groups(size: int, use: Use, axis: int) -> PerGroup:
    """Groups along an axis; one that is shorter than a group is one group."""
    return PerGroup(min(size, max(use.shape[axis], 1)), axis)


def _integer(fmt: Format) -> bool:
    return fmt.one_quantum == 1.0 and fmt.has_zero and fmt.width > 1


def unquantized(rows: list[Row]) -> Iterator[Row]:
    """The rows of sites that a plan wanted quantized and that are not."""
    return (row for row in rows if row.reason)
