"""Keys and values: which operands of a graph's calls a cache would keep, however the attention is written."""

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
class Cache:
    """How keys and values are kept: a format, and what shares a scale.

    ``token``: all that one token has in one head, chosen when it comes; ``channel``: each channel of a head, over all
    tokens; ``tensor``. The last two are static, from calibration.

    >>> Cache.parse("int4:channel").granularity(-1)
    PerAxis(axis=-1)
    """

    fmt: Format
    shared: str = "token"

    @classmethod
    def parse(cls, text: str) -> Cache:
        """From ``int8``, ``fp8_e4m3fn``, ``int4:channel``. Raises ``QuantizationError`` or ``FormatError``."""
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
        """Of a key or value whose channels lie on ``axis``; None for blocks and formats without scales."""
        if (
            self.fmt.execution is None
            or self.fmt.execution.activation == "exact"
            or isinstance(self.fmt, BlockFormat)
        ):
            return None
        if self.shared == "token":
            return PerToken()
        return PerAxis(axis) if self.shared == "channel" else PerTensor()


def keys_and_values(graph: Graph) -> dict[str, list[Use]]:
    """For each call of attention the operands that a cache keeps, their ``reduce`` axis that of the head's channels.

    Of ``scaled_dot_product_attention`` the key and the value. Where attention is written out, the second operand of the
    product whose result reaches a softmax, and what the softmax's result is multiplied with.
    """
    found: dict[str, list[Use]] = {}
    for node in graph.nodes.values():
        if node.kind == "attention":
            found[node.site] = [_along(use, -1) for use in node.uses[1:3]]
        elif node.kind == "softmax":
            scores = _scores(graph, node)
            mixed = [n for n in graph.readers(node.site) if _plain_product(n)]
            if scores is None or not mixed:
                continue
            key = scores.uses[1]
            found.setdefault(scores.site, []).append(_along(key, key.operand.reduce))
            for product in mixed:
                value = next((u for u in product.uses if u.value != node.site), None)
                if value is not None:
                    found.setdefault(product.site, []).append(
                        _along(value, value.operand.channel)
                    )
    return found


def _scores(graph: Graph, node: Node) -> Node | None:
    """The product of queries and keys before a softmax."""
    seen: set[str] = set()
    names = [node.uses[0].value] if node.uses else []
    while names:
        before = graph.nodes.get(names.pop())
        if before is None or before.site in seen:
            continue
        seen.add(before.site)
        if _plain_product(before):
            return before
        if before.operator in _BETWEEN:
            names += [
                use.value
                for use in reversed(before.uses)
                if use.operand.role == "activation"
            ]
    return None


def _plain_product(node: Node) -> bool:
    """A product of two activations."""
    products = [use for use in node.uses if use.operand.role == "activation"]
    return node.kind == "matmul" and len(products) == len(node.uses) == 2


def _along(use: Use, axis: int) -> Use:
    ndim = len(use.shape)
    return replace(
        use, operand=replace(use.operand, reduce=axis - ndim if axis >= 0 else axis)
    )
