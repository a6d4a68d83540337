"""Scheme: which values of a graph are quantized, how, and why the others are not.

A site in a matrix format reads its activations and weights through quantizers. For integers the rest follows from what
ONNX Runtime fuses (its documentation, "Quantize ONNX models", format QDQ): an integer convolution writes codes too, so its
result has a quantizer, behind the ReLU or clip that alone reads it; and what joins or pools such results (add, cat, pooling)
works on codes as well.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from roundoff.capture.calls import Operand
from roundoff.capture.execute import runs_kind
from roundoff.errors import QuantizationError
from roundoff.formats import (
    BlockFormat,
    Format,
    Granularity,
    PerAxis,
    PerGroup,
    PerTensor,
)
from roundoff.formats.named import integer
from roundoff.quantize.graph import Graph, Node, Use
from roundoff.quantize.quantizer import Quantizer

#: Calls that an integer kernel absorbs: they only clip, and their result is quantized instead of what they read.
CLIPS = frozenset({"relu", "relu6", "hardtanh", "clamp", "clip", "clamp_min"})
#: Calls with integer kernels that join or pool codes.
FOLLOWS = frozenset({"add", "mul", "mean", "adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"})
_PASSES = frozenset({"max_pool2d", "max_pool1d", "max_pool3d"})  # the codes themselves, no new scale


@dataclass(frozen=True, kw_only=True)
class Options:
    """How formats are put to work, beside the plan.

    Attributes:
        symmetric: integer activations without zero point. Asymmetric ones use the whole range of what a ReLU leaves.
        dynamic: scales of activations are chosen from each tensor when the model runs.
        activation: which activations share a scale: ``tensor``, ``token``, ``channel`` or ``group:SIZE``.
        weight: which weights share a scale: ``format`` (as the format has it: per output channel for integers), ``tensor``,
            ``channel`` or ``group:SIZE`` along the contracted axis.
        elementwise: adds and pools between integer calls work on codes, results of integer convolutions are codes.
        bias: biases of integer calls are rounded to the scale of their sums, as integer kernels add them.
        kv_cache: the format of keys and values in attention, or empty.
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


@dataclass(frozen=True)
class Row:
    """One site and what became of it: its format, and the reason why it stays as it is (fp32), or why not as asked."""

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

    Raises ``QuantizationError`` when nothing at all would be quantized.
    """
    plan = _Plan(graph, formats, options)
    for node in graph.nodes.values():
        plan.site(node)
    if options.elementwise:
        plan.follow()
    rows = [plan.row(node) for node in graph.nodes.values()]
    if not plan.routes:
        raise QuantizationError("nothing would be quantized", expected="a plan with a format that some site can run in",
                                got="; ".join(sorted({r.reason for r in rows if r.reason})[:3]) or "fp32 for every site",
                                do="offer int8, or another format for matrix products")  # fmt: skip
    return Scheme(plan.routes, plan.quantizers, rows)


class _Plan:
    def __init__(self, graph: Graph, formats: Mapping[str, Format], options: Options) -> None:
        self.graph, self.formats, self.options = graph, formats, options
        self.routes: dict[str, Route] = {}
        self.quantizers: dict[str, Quantizer] = {}
        self.refused: dict[str, str] = {}
        self.notes: dict[str, str] = {}

    def site(self, node: Node) -> None:
        fmt = self.formats.get(node.site)
        if fmt is None or fmt.name == "fp32":
            return
        reason = self._refuses(node, fmt)
        if reason is not None:
            self.refused[node.site] = reason
            return
        route, rule = self.routes.setdefault(node.site, Route(node.site)), fmt.execution
        if rule is None or rule.operators == "all":
            route.executes = fmt
            return
        for use in node.uses:
            if use.operand.role == "weight" and rule.weight is not None:
                self._read(route, use, fmt)
            elif use.operand.role == "activation" and rule.activation is not None:
                self._read(route, use, self._activation(fmt))
            elif use.operand.role == "bias" and self.options.bias and _integer(fmt) and rule.activation is not None:
                route.bias = use.operand.leaf

    def _refuses(self, node: Node, fmt: Format) -> str | None:
        if node.site in self.graph.changing:
            return "reads other values from batch to batch: the model branches on its data"
        return runs_kind(node.kind, any(u.weight for u in node.uses), fmt)

    def _activation(self, fmt: Format) -> Format:
        own = fmt.of_activations
        if _integer(own) and own.symmetric and not self.options.symmetric and own is fmt:
            return integer(own.width, symmetric=False)
        return own

    def _read(self, route: Route, use: Use, fmt: Format) -> None:
        name = use.value
        made = self.quantizers.get(name)
        if made is None or (made.fmt.name, made.weight) != (fmt.name, use.weight):
            if made is not None:  # another reader wants it in another format, or along another axis
                name = f"{route.site}:{use.operand.leaf}"
            self.quantizers[name] = Quantizer(name, fmt, use.operand, self._granularity(route.site, use, fmt), ())
        self._by(name, route.site)
        route.uses[use.operand.leaf] = name

    def _by(self, name: str, site: str) -> None:
        quantizer = self.quantizers[name]
        quantizer.sites = tuple(dict.fromkeys((*quantizer.sites, site)))

    def _granularity(self, site: str, use: Use, fmt: Format) -> Granularity | None:
        if isinstance(fmt, BlockFormat):
            return None
        ndim = len(use.shape)
        if use.weight:
            rule = self.formats[next(iter(self.routes))].execution if fmt.execution is None else fmt.execution
            asked = self.options.weight if self.options.weight != "format" else (rule.weight if rule else None) or "channel"
            if asked == "tensor" or ndim < 2:
                return PerTensor()
            if asked.startswith("group"):
                size = int(asked.partition(":")[2] or fmt.group_size)
                along = use.shape[use.operand.reduce]
                if along % size == 0:
                    return PerGroup(size, use.operand.reduce)
                self.notes[site] = f"a scale for each output channel: groups of {size} do not divide {along} inputs"
            return PerAxis(use.operand.channel % ndim)
        if self.options.dynamic or self.options.activation == "token":
            return None
        if self.options.activation == "channel":
            return PerAxis(use.operand.reduce % ndim)
        if self.options.activation.startswith("group:"):
            return PerGroup(int(self.options.activation[6:]), use.operand.reduce)
        return PerTensor()

    def follow(self) -> None:
        """Let the results of integer convolutions be codes, and what joins them work on codes."""
        changed = True
        while changed:
            changed = False
            for node in self.graph.nodes.values():
                if node.site in self.routes or node.site in self.formats and self.formats[node.site].name != "fp32":
                    continue
                changed |= node.operator in FOLLOWS and self._joins(node)
        for site in list(self.routes):
            self._writes(self.graph.nodes[site])

    def _joins(self, node: Node) -> bool:
        """Whether a call that joins or pools now works on codes: integer calls made all it reads, and read what it makes."""
        uses = [u for u in node.uses if u.operand.role == "activation"]
        if not uses or len(node.shapes) != 1 or any(u.shape == () for u in uses):
            return False
        formats = {fmt for u in uses if (fmt := self._made_as(u.value)) is not None}
        if len(formats) != 1 or any(self._made_as(u.value) is None for u in uses) or not self._read_as_codes(node):
            return False
        (fmt,) = formats
        route = self.routes.setdefault(node.site, Route(node.site))
        for use in uses:
            self._read(route, use, fmt)
        return True

    def _made_as(self, value: str) -> Format | None:
        """The activation format of the integer call that made a value, through clips and pools; None if there is none."""
        if value in self.quantizers and not self.quantizers[value].weight and _integer(self.quantizers[value].fmt):
            return self.quantizers[value].fmt
        node = self.graph.nodes.get(value)
        if node is None:
            return None
        if node.operator in CLIPS:
            return self._made_as(node.uses[0].value)
        fmt = self.formats.get(value)
        if fmt is not None and value in self.routes and _integer(fmt) and node.kind in ("conv", "linear"):
            return self._activation(fmt) if fmt.execution and fmt.execution.activation else None
        if value in self.routes and not self.routes[value].executes and node.kind not in ("conv", "linear"):
            return self.quantizers[next(iter(self.routes[value].uses.values()))].fmt
        return None

    def _read_as_codes(self, node: Node) -> bool:
        """Whether every reader of what a call makes is, or may become, an integer call."""
        readers = self.graph.readers(node.site)
        return bool(readers) and all(
            r.site in self.routes or r.operator in FOLLOWS or (r.operator in CLIPS and self._read_as_codes(r))
            for r in readers
        )

    def _writes(self, node: Node) -> None:
        """Give an integer call's result a quantizer where no reader has one: integer kernels write codes."""
        fmt = self.formats.get(node.site)
        follows = node.operator in FOLLOWS and fmt is None
        if not follows and (fmt is None or not _integer(fmt) or node.kind != "conv" or self.routes[node.site].executes):
            return
        if fmt is not None and (fmt.execution is None or fmt.execution.activation is None):
            return
        if node.site in self.quantizers or len(node.shapes) != 1:
            return
        readers = self.graph.readers(node.site)
        last = node.site
        if len(readers) == 1 and readers[0].operator in CLIPS:
            if readers[0].site in self.quantizers:
                return
            last = readers[0].site
        made = self._made_as(node.uses[0].value) if follows else self._activation(fmt) if fmt is not None else None
        if made is None:
            return
        operand = Operand(0, "activation", -1, 1, frozenset({last}))
        self.quantizers[last] = Quantizer(last, made, operand, None if self.options.dynamic else PerTensor(), ())
        self.routes.setdefault(last, Route(last)).output = last

    def row(self, node: Node) -> Row:
        if node.site in self.refused:
            return Row(node.site, "fp32", self.refused[node.site])
        route = self.routes.get(node.site)
        if route is None:
            return Row(node.site, "fp32", "" if node.site not in self.formats else "the plan leaves it in fp32")
        if route.executes is not None:
            return Row(node.site, route.executes.name)
        fmt = self.formats.get(node.site)
        return Row(node.site, fmt.name if fmt is not None else "codes", self.notes.get(node.site, ""))


def _integer(fmt: Format) -> bool:
    return fmt.one_quantum == 1.0 and fmt.has_zero and fmt.width > 1


def unquantized(rows: list[Row]) -> Iterator[Row]:
    """The rows of sites that a plan wanted quantized and that are not."""
    return (row for row in rows if row.reason and row.format == "fp32")
