"""Codes from call to call: which results an integer kernel writes as codes, and what works on them.

What ONNX Runtime fuses decides (its documentation, "Quantize ONNX models", format QDQ): an integer convolution writes codes,
so its result has a quantizer, behind the ReLU or clip that alone reads it; and what joins or pools such results (add, cat,
pooling) works on codes as well.
"""

from __future__ import annotations

from dataclasses import replace

from roundoff.formats import Format, PerTensor
from roundoff.ops import Operand, operators_that
from roundoff.quantize.graph import Node
from roundoff.quantize.layout import QuantizerLayout
from roundoff.quantize.options import is_integer
from roundoff.quantize.quantizer import Quantizer

#: Calls that an integer kernel absorbs: they only clip, and their result is quantized instead of what they read.
CLIPS = operators_that("clip codes")
#: Calls that only choose among the codes they read: their result has the same scale.
PASSES = frozenset({"max_pool1d", "max_pool2d", "max_pool3d"})
#: Calls with integer kernels that join or pool codes.
FOLLOWS = operators_that("join or pool codes")


def upper_bound(node: Node) -> float | None:
    """The upper end of a clip from 0 to a bound, None for other calls and clips.

    >>> upper_bound(Node("/relu6", "relu6", "elementwise", (), ()))
    6.0
    """
    if node.operator == "relu6":
        return 6.0
    bounds = [
        float(v)
        for v in node.settings
        if isinstance(v, int | float) and not isinstance(v, bool)
    ]
    if (
        node.operator in ("hardtanh", "clamp", "clip")
        and len(bounds) == 2
        and bounds[0] == 0.0 < bounds[1]
    ):
        return bounds[1]
    return None


def _channel(node: Node) -> int:
    """The axis of the channels of a call's result: of convolutions and what follows them, the one behind the batch."""
    return (
        1 - len(node.uses[1].shape)
        if node.kind == "conv"
        else 1
        if len(node.shapes[0]) > 2
        else -1
    )


def follow(layout: QuantizerLayout) -> None:
    """Let the results of integer convolutions be codes, and what joins them work on codes."""
    changed = True
    while changed:
        changed = False
        for node in layout.graph.nodes.values():
            if node.operator in FOLLOWS and node.site not in layout.routes:
                changed |= _joins(layout, node)
    for site in list(layout.routes):
        _writes(layout, layout.graph.nodes[site])


def _joins(layout: QuantizerLayout, node: Node) -> bool:
    """Whether a call that joins or pools now works on codes: integer calls made all it reads, and read what it makes."""
    uses = [u for u in node.uses if u.operand.role == "activation"]
    if (
        len(uses) < (2 if node.operator in ("add", "mul") else 1)
        or len(node.shapes) != 1
    ):
        return False
    if any(u.shape == () for u in uses) or node.site in layout.graph.changing:
        return False
    formats = [_made_as(layout, u.value) for u in uses]
    if (
        formats[0] is None
        or any(f != formats[0] for f in formats)
        or not _read_as_codes(layout, node)
    ):
        return False
    route = layout.routed(node, "codes")
    for use in uses:
        along = replace(use.operand, reduce=_channel(node))
        layout.read(route, replace(use, operand=along), formats[0], PerTensor())
    return True


def _made_as(layout: QuantizerLayout, value: str) -> Format | None:
    """The format of the codes that an integer call wrote for a value, through clips and pools; None without."""
    known, node = layout.quantizers.get(value), layout.graph.nodes.get(value)
    if known is not None and not known.weight and is_integer(known.fmt):
        return known.fmt
    if node is None:
        return None
    if node.operator in CLIPS:
        return _made_as(layout, node.uses[0].value)
    route, fmt = layout.routes.get(value), layout.formats.get(value)
    if route is None or route.executes is not None:
        return None
    if layout.names.get(value) == "codes":
        return layout.quantizers[next(iter(route.uses.values()))].fmt
    return (
        _codes(layout, node, fmt)
        if fmt is not None and node.kind in ("conv", "linear")
        else None
    )


def _codes(layout: QuantizerLayout, node: Node, fmt: Format) -> Format | None:
    """The format of values where an integer kernel computes a call that has a format; None if none does."""
    rule = fmt.execution
    routed = (
        layout.names.get(node.site) == fmt.name
        and rule is not None
        and rule.activation is not None
    )
    values = layout.options.of(node.site).value_format(fmt)
    return values if routed and is_integer(fmt) and is_integer(values) else None


def _read_as_codes(layout: QuantizerLayout, node: Node) -> bool:
    """Whether every reader of what a call makes is, or may become, an integer call."""
    readers = layout.graph.readers(node.site)
    return bool(readers) and all(
        r.site in layout.routes
        or r.operator in FOLLOWS
        or (r.operator in CLIPS and _read_as_codes(layout, r))
        for r in readers
    )


def _writes(layout: QuantizerLayout, node: Node) -> None:
    """Give an integer call's result a quantizer where no reader has one: integer kernels write codes."""
    if node.site in layout.quantizers or len(node.shapes) != 1:
        return
    fmt = layout.formats.get(node.site)
    made = None
    if layout.names.get(node.site) == "codes":
        made = _made_as(layout, node.site)
    elif fmt is not None and node.kind == "conv":
        made = _codes(layout, node, fmt)
    readers = layout.graph.readers(node.site)
    last = readers[0] if len(readers) == 1 and readers[0].operator in CLIPS else node
    if (
        made is None
        or last.site in layout.quantizers
        or last.site in layout.graph.changing
    ):
        return
    operand = Operand(
        0, "activation", _channel(node), _channel(node), frozenset({last.site})
    )
    layout.quantizers[last.site] = Quantizer(
        last.site, made, operand, PerTensor(), (node.site,)
    )
    layout.routed(last, layout.names.get(last.site, "codes")).output = last.site
