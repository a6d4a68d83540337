"""Keys and values: which operands of a graph's calls a cache would keep.

However the attention is written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from roundoff.errors import QuantizationError
from roundoff.formats import (
    BlockFormat,
    Format,
    Granularity,
    PerAxis,
    PerTensor,
    PerToken,
    parse_format,
)
from roundoff.ops import operators_that
from roundoff.quantize.graph import Graph, Node, Use

#: What may stand between the scores and their softmax: scaling, masks, position biases.
_BETWEEN = operators_that("stand before attention's softmax")


@dataclass(frozen=True)
class CacheFormat:
    """How keys and values are kept: a format, and what shares a scale.

    ``token``: all that one token has in one head, chosen when it comes; ``channel``: each
    channel of a head, over all tokens; ``tensor``. The last two are static, from
    calibration.

    >>> CacheFormat.parse("int4:channel").granularity(-1)
    PerAxis(axis=-1)
    """

    fmt: Format
    shared: str = "token"

    @classmethod
    def parse(cls, text: str) -> CacheFormat:
        """Read ``int8``, ``fp8_e4m3fn``, ``int4:channel``.

        Raises ``QuantizationError`` or ``FormatError``.
        """
        match = re.fullmatch(r"([^:]+)(?::(token|channel|tensor))?", text)
        if match is None:
            raise QuantizationError(
                "unknown granularity",
                where="kv_cache",
                got=repr(text),
                expected="FORMAT, FORMAT:token, FORMAT:channel or FORMAT:tensor",
            )
        return cls(parse_format(match[1]), match[2] or "token")

    def granularity(self, axis: int) -> Granularity | None:
        """Return that of a key or value whose channels lie on ``axis``.

        None for blocks and formats without scales.
        """
        rule = self.fmt.execution
        if rule is None or rule.activation == "exact":
            return None
        if isinstance(self.fmt, BlockFormat):
            return None
        if self.shared == "token":
            return PerToken()
        return PerAxis(axis) if self.shared == "channel" else PerTensor()


def keys_and_values(graph: Graph) -> dict[str, list[Use]]:
    """Return, by call, the operands that a cache keeps.

    Their ``reduce`` axis is that of the head's channels. Of
    ``scaled_dot_product_attention`` they are the key and the value. Where attention is
    written out, the second operand of the product whose result reaches a softmax, and what
    the softmax's result is multiplied with.
    """
    kept: dict[str, list[Use]] = {}
    for node in graph.nodes.values():
        if node.kind == "attention":
            kept[node.site] = [_along(use, -1) for use in node.uses[1:3]]
        elif node.kind == "softmax":
            for site, use in _around_softmax(graph, node):
                kept.setdefault(site, []).append(use)
    return kept


def _around_softmax(graph: Graph, softmax: Node) -> list[tuple[str, Use]]:
    """Return the key before a softmax and the values behind it, with their products."""
    scores = _scores(graph, softmax)
    products = [n for n in graph.readers(softmax.site) if _is_plain_product(n)]
    if scores is None or not products:
        return []
    key = scores.uses[1]
    operands = [(scores.site, _along(key, key.operand.reduce))]
    for product in products:
        values = [use for use in product.uses if use.value != softmax.site]
        if values:
            along = _along(values[0], values[0].operand.channel)
            operands.append((product.site, along))
    return operands


def _scores(graph: Graph, softmax: Node) -> Node | None:
    """Return the product of queries and keys before a softmax."""
    visited: set[str] = set()
    names = [softmax.uses[0].value] if softmax.uses else []
    while names:
        before = graph.nodes.get(names.pop())
        if before is None or before.site in visited:
            continue
        visited.add(before.site)
        if _is_plain_product(before):
            return before
        if before.operator in _BETWEEN:
            names += [use.value for use in reversed(before.activations)]
    return None


def _is_plain_product(node: Node) -> bool:
    """Return True for a product of two activations."""
    products = node.activations
    return node.kind == "matmul" and len(products) == len(node.uses) == 2


def _along(use: Use, axis: int) -> Use:
    """Let a use contract this axis, counted from the back."""
    from_back = axis - len(use.shape) if axis >= 0 else axis
    return replace(use, operand=replace(use.operand, reduce=from_back))
