"""Codes from call to call: which results are codes, and what works on them.

What ONNX Runtime fuses decides (its documentation, "Quantize ONNX models", format QDQ): an
integer convolution writes codes, so its result has a quantizer, behind the ReLU or clip
that alone reads it; and what joins or pools such results (add, cat, pooling) works on
codes as well.
"""

from __future__ import annotations

import math
from dataclasses import replace

from roundoff.formats import Format, PerTensor
from roundoff.ops import Operand, operators_that
from roundoff.quantize.graph import Node
from roundoff.quantize.layout import QuantizerLayout
from roundoff.quantize.options import is_integer
from roundoff.quantize.quantizer import Quantizer

#: Calls that an integer kernel absorbs: they only clip, and their result is quantized
#: instead of what they read.
CLIPS = operators_that("clip codes")
#: Calls that only choose among the codes they read: their result has the same scale.
PASSES = operators_that("hand codes on")
#: Calls with integer kernels that join or pool codes.
FOLLOWS = operators_that("join or pool codes")
#: Products of each value that a convolution reads, up to which fp32 was as fast as integers
#: (ONNX Runtime 1.31, AVX2, no VNNI; 16 and 64 channels, kernels 1x1 and 3x3).
FEW_PRODUCTS = 9
#: Calls of ``x * sigmoid(x)``.
GATES = operators_that("multiply by their sigmoid")


def upper_bound(node: Node) -> float | None:
    """Return the upper end of a clip from 0; None for other calls and clips.

    >>> upper_bound(Node("/relu6", "relu6", "elementwise", (), ()))
    6.0
    """
    if node.operator == "relu6":
        return 6.0
    if node.operator not in ("hardtanh", "clamp", "clip"):
        return None
    bounds = [
        float(v)
        for v in node.settings
        if isinstance(v, int | float) and not isinstance(v, bool)
    ]
    if len(bounds) == 2 and bounds[0] == 0.0 < bounds[1]:
        return bounds[1]
    return None


def follow(layout: QuantizerLayout) -> None:
    """Let results of integer convolutions be codes, and what joins them work on codes."""
    changed = True
    while changed:
        changed = False
        for node in layout.graph.nodes.values():
            if node.operator in FOLLOWS and node.site not in layout.routes:
                changed |= _join(layout, node)
    for site in list(layout.routes):
        _write_codes(layout, layout.graph.nodes[site])
    for site in list(layout.routes):
        _tie_parts(layout, layout.graph.nodes[site])
    for node in layout.graph.nodes.values():
        if node.operator in GATES and node.site not in layout.routes:
            _gate(layout, node)


def _join(layout: QuantizerLayout, node: Node) -> bool:
    """Let a call that joins or pools work on codes; return True where it can.

    Integer calls have to make all it reads, and to read what it makes.
    """
    fmt = _joined_format(layout, node)
    if fmt is None or not _read_as_codes(layout, node):
        return False
    route = layout.route_of(node, "codes")
    for use in node.activations:
        along = replace(use.operand, reduce=_channel_axis(node))
        layout.read(route, replace(use, operand=along), fmt, PerTensor())
    return True


def _joined_format(layout: QuantizerLayout, node: Node) -> Format | None:
    """Return the format of codes that all operands of a call have, or None."""
    uses = node.activations
    least = 2 if node.operator in ("add", "mul") else 1
    if len(uses) < least or len(node.shapes) != 1:
        return None
    if any(use.shape == () for use in uses) or node.site in layout.graph.changing:
        return None
    formats = [_format_of_codes(layout, use.value) for use in uses]
    return formats[0] if all(fmt == formats[0] for fmt in formats) else None


def _format_of_codes(layout: QuantizerLayout, value: str) -> Format | None:
    """Return the format of the codes that an integer call wrote for a value.

    Through clips and pools; None where it is no codes.
    """
    quantizer = layout.quantizers.get(value)
    if quantizer is not None and not quantizer.weight and is_integer(quantizer.fmt):
        return quantizer.fmt
    node = layout.graph.nodes.get(value)
    if node is None:
        return None
    if node.operator in CLIPS:
        return _format_of_codes(layout, node.uses[0].value)
    route = layout.routes.get(value)
    if route is None or route.executes is not None:
        return None
    if layout.names.get(value) == "codes":
        return layout.quantizers[next(iter(route.uses.values()))].fmt
    return _kernel_format(layout, node) if node.kind in ("conv", "linear") else None


def _kernel_format(layout: QuantizerLayout, node: Node) -> Format | None:
    """Return the format of values where an integer kernel computes a call, or None."""
    fmt = layout.formats.get(node.site)
    if fmt is None or layout.names.get(node.site) != fmt.name or not is_integer(fmt):
        return None
    if fmt.execution is None or fmt.execution.activation is None:
        return None
    values = layout.options.of(node.site).value_format(fmt)
    return values if is_integer(values) else None


def _read_as_codes(layout: QuantizerLayout, node: Node) -> bool:
    """Return True where every reader of a call's result is, or may be, an integer call."""
    readers = layout.graph.readers(node.site)
    return bool(readers) and all(_takes_codes(layout, reader) for reader in readers)


def _takes_codes(layout: QuantizerLayout, reader: Node) -> bool:
    if reader.site in layout.routes or reader.operator in FOLLOWS:
        return True
    return reader.operator in CLIPS and _read_as_codes(layout, reader)


def _write_codes(layout: QuantizerLayout, node: Node) -> None:
    """Let an integer kernel's result, behind its clip, be codes for all that read it."""
    fmt = _written_format(layout, node)
    if fmt is None:
        return
    last = _clip_behind(layout, node) or node
    if last.site in layout.graph.changing:
        return
    shared = layout.quantizers.get(last.site)
    if shared is None:
        if _is_written_joined(layout, node, last):
            return
        if is_as_quick_in_floats(node) and not _is_read_as_codes(layout, last):
            return
        shared = _output_quantizer(node, last, fmt)
        layout.quantizers[last.site] = shared
    elif not _may_write(shared, fmt) or not _is_read_as_it_is(layout, last):
        return
    shared.sites = tuple(dict.fromkeys((*shared.sites, node.site)))
    route = layout.route_of(last, layout.names.get(last.site, "codes"))
    route.output = last.site


def _may_write(shared: Quantizer, fmt: Format) -> bool:
    """Return True where the codes that readers ask for are those that a kernel writes."""
    return (shared.fmt, shared.granularity) == (fmt, PerTensor())


def _written_format(layout: QuantizerLayout, node: Node) -> Format | None:
    """Return the format of the codes that a call's kernel writes; None for floats."""
    if len(node.shapes) != 1:
        return None
    if layout.names.get(node.site) == "codes":
        return _format_of_codes(layout, node.site)
    return _kernel_format(layout, node) if node.kind == "conv" else None


def _clip_behind(layout: QuantizerLayout, node: Node) -> Node | None:
    """Return the clip that alone reads a call's result."""
    readers = layout.graph.readers(node.site)
    clipped = len(readers) == 1 and readers[0].operator in CLIPS
    return readers[0] if clipped and node.site not in layout.graph.outputs else None


def _output_quantizer(node: Node, last: Node, fmt: Format) -> Quantizer:
    axis = _channel_axis(node)
    operand = Operand(0, "activation", axis, axis, frozenset({last.site}))
    return Quantizer(last.site, fmt, operand, PerTensor(), (node.site,))


def _is_written_joined(layout: QuantizerLayout, node: Node, last: Node) -> bool:
    """Return True for a result that is only read as a part of one joined value.

    The scale of the joined codes is that of each part then: nothing is rounded twice.
    """
    readers = layout.graph.readers(last.site)
    if not readers or last.site in layout.graph.outputs or node.operator in PASSES:
        return False
    names = {name for reader in readers for name in _read_names(layout, reader, last)}
    if len(names) != 1:
        return False
    (name,) = names
    return " " in name and name in layout.quantizers


def is_as_quick_in_floats(node: Node) -> bool:
    """Return True for a convolution that gains no time by integers.

    It makes few products of each value that it reads: the head of a network, say, that
    gives each pixel some scores. Its result need not be rounded then.
    """
    weight = node.use(1)
    if node.kind != "conv" or weight is None or "transpose" in node.operator:
        return False
    channels, _, *kernel = weight.shape
    return channels * math.prod(kernel) <= FEW_PRODUCTS


def _is_read_as_codes(layout: QuantizerLayout, last: Node) -> bool:
    """Return True where any reader takes a result through a quantizer."""
    readers = layout.graph.readers(last.site)
    return any(any(_read_names(layout, reader, last)) for reader in readers)


def _read_names(layout: QuantizerLayout, reader: Node, last: Node) -> list[str]:
    """Return the quantizers that a call reads a value through; empty names for none."""
    uses = layout.routes[reader.site].uses if reader.site in layout.routes else {}
    return [
        uses.get(use.operand.leaf, "")
        for use in reader.uses
        if last.site in use.value.split(" ")
    ]


def _is_read_as_it_is(layout: QuantizerLayout, last: Node) -> bool:
    """Return True where something reads a value past the quantizer of its name."""
    if last.site in layout.graph.outputs:
        return True
    readers = layout.graph.readers(last.site)
    return any(
        name != last.site
        for reader in readers
        for name in _read_names(layout, reader, last)
    )


def _channel_axis(node: Node) -> int:
    """The axis of the channels of a call's result.

    Of convolutions and what follows them, the one behind the batch.
    """
    if node.kind == "conv":
        return 1 - len(node.uses[1].shape)
    return 1 if len(node.shapes[0]) > 2 else -1


def _tie_parts(layout: QuantizerLayout, node: Node) -> None:
    """Let a call read a part of written codes on the grid that they were written on.

    A grid of its own would round them once more, and keep the cut from moving codes.
    """
    route = layout.routes[node.site]
    for use in node.activations:
        name = f"{node.site}:{use.operand.leaf}"
        written = layout.routes.get(use.value)
        if route.uses.get(use.operand.leaf) != name or written is None:
            continue
        whole = layout.quantizers.get(use.value)
        part = layout.quantizers[name]
        if written.output != use.value or whole is None or part.dynamic:
            continue
        if (whole.fmt, whole.granularity) == (part.fmt, part.granularity):
            part.source = use.value


def _gate(layout: QuantizerLayout, node: Node) -> None:
    """Let ``x * sigmoid(x)`` of codes that become codes again multiply codes.

    ONNX Runtime looks the sigmoid up, code by code, and multiplies codes: 0.4 of the time
    of the floats between (two reads, sigmoid, product and rounding; measured on AVX2).
    Its step of 1/255 is at most that of the result, whose noise it raises by 1/20 in the
    mean. What is no code otherwise stays a float.
    """
    if len(node.uses) != 1 or node.site in layout.graph.changing:
        return
    (use,) = node.uses
    written = layout.routes.get(use.value)
    if written is None or written.output != use.value:
        return
    names = {
        name
        for reader in layout.graph.readers(node.site)
        for name in _read_names(layout, reader, node)
    }
    is_read_once = len(names) == 1 and node.site not in layout.graph.outputs
    if is_read_once and all(_has_bytes(layout, name) for name in (use.value, *names)):
        route = layout.route_of(node, "codes")
        layout.read(route, use, layout.quantizers[use.value].fmt, PerTensor())
        route.gated = True


def _has_bytes(layout: QuantizerLayout, name: str) -> bool:
    """Return True for a quantizer whose codes are integers of a byte with one scale."""
    quantizer = layout.quantizers.get(name)
    if quantizer is None or not is_integer(quantizer.fmt):
        return False
    return quantizer.fmt.width == 8 and quantizer.granularity == PerTensor()
