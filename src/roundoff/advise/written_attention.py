"""Attention that is written out (scores, softmax, product): found in the graph of a
module, and replaced by ``scaled_dot_product_attention``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

_PRODUCTS = (torch.matmul, torch.bmm, operator.matmul)
_PRODUCT_METHODS = ("matmul", "bmm", "__matmul__")
_SOFTMAX = (torch.softmax, functional.softmax)
_DROPOUT = (functional.dropout, torch.dropout)


@dataclass(frozen=True)
class _Scale:
    """What scores are multiplied with, or divided by: a number, or a node that has
    one."""

    value: Any
    divides: bool


@dataclass(frozen=True)
class _Attention:
    """The nodes of one written attention, from its operands to its result."""

    query: fx.Node
    key: fx.Node
    value: fx.Node
    scale: _Scale
    mask: Any
    dropout: float
    result: fx.Node


def has_written_attention(module: nn.Module) -> bool:
    """Return True if a module writes attention out, as far as its graph can be traced."""
    return _rewritten(module) is not None


def replace_attention(model: nn.Module, paths: Sequence[str]) -> None:
    """Replace the attention of the modules at these paths by torch's fused operator.

    A module whose graph cannot be traced stays as it is.
    """
    for path in paths:
        module = model.get_submodule(path)
        graph = _rewritten(module)
        if graph is None:
            continue
        graph.train(module.training)
        # the methods of the class stay reachable: only forward is another
        module.forward = graph.forward
        module.__dict__["_rewritten_attention"] = graph


def _rewritten(module: nn.Module) -> fx.GraphModule | None:
    """Return the module as a graph with fused attention; None where there is none to
    fuse, or it cannot be traced."""
    try:
        graph = fx.symbolic_trace(module)
    except TRACING_ERRORS:
        return None
    attentions: list[_Attention] = [
        a for node in graph.graph.nodes for a in _attention(node, graph)
    ]
    if not attentions:
        return None
    for attention in attentions:
        _replace(graph.graph, attention)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    return graph


#: What tracing raises where control flow hangs on values, or code is not traceable.
TRACING_ERRORS = (
    fx.proxy.TraceError,
    TypeError,
    ValueError,
    RuntimeError,
    AttributeError,
    NotImplementedError,
    IndexError,
    KeyError,
    AssertionError,
)


def _attention(node: fx.Node, graph: fx.GraphModule) -> Iterator[_Attention]:
    """Yield the attention that ends in this node, if one does."""
    if not _is_product(node):
        return
    probabilities: Any = node.args[0]
    value = node.args[1]
    dropout, probabilities = _skip_dropout(probabilities, graph)
    if not _is_softmax(probabilities, graph):
        return
    mask, scores = _skip_mask(probabilities.args[0])
    scale, scores = _skip_scale(scores)
    if not isinstance(scores, fx.Node) or not _is_product(scores):
        return
    query = scores.args[0]
    key = _transposed(scores.args[1])
    if key is not None and isinstance(query, fx.Node) and isinstance(value, fx.Node):
        yield _Attention(query, key, value, scale, mask, dropout, node)


def _is_product(node: Any) -> bool:
    return _calls(node, _PRODUCTS, _PRODUCT_METHODS)


def _calls(node: Any, functions: Sequence[Any], methods: Sequence[str] = ()) -> bool:
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_function":
        return node.target in functions
    return node.op == "call_method" and node.target in methods


def _module_of(node: Any, graph: fx.GraphModule) -> nn.Module | None:
    if isinstance(node, fx.Node) and node.op == "call_module":
        return graph.get_submodule(str(node.target))
    return None


def _skip_dropout(node: Any, graph: fx.GraphModule) -> tuple[float, Any]:
    """Return the rate of a dropout on probabilities, and what it is applied to."""
    module = _module_of(node, graph)
    if isinstance(module, nn.Dropout):
        return (module.p if module.training else 0.0), node.args[0]
    if _calls(node, _DROPOUT):
        is_on = node.kwargs.get("training", True)
        rate = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        return (float(rate) if is_on else 0.0), node.args[0]
    return 0.0, node


def _is_softmax(node: Any, graph: fx.GraphModule) -> bool:
    """Return True for a softmax along the last axis."""
    module = _module_of(node, graph)
    if isinstance(module, nn.Softmax):
        return module.dim in (-1, 3)
    if not _calls(node, _SOFTMAX, ("softmax",)):
        return False
    axis = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    return axis in (-1, 3)


def _skip_mask(node: Any) -> tuple[Any, Any]:
    """Return (what is masked, how) and the scores: ``masked_fill`` or an added mask."""
    if _calls(node, (torch.masked_fill,), ("masked_fill",)):
        scores, condition, fill = node.args[:3]
        is_removed = isinstance(fill, int | float) and fill <= -1e4
        return (("fill", condition), scores) if is_removed else (None, None)
    if _calls(node, (operator.add, torch.add), ("add",)):
        scores, added = node.args[:2]
        is_mask = isinstance(added, fx.Node)
        return (("add", added), scores) if is_mask else (None, None)
    return None, node


def _skip_scale(node: Any) -> tuple[_Scale, Any]:
    """Return how the scores are scaled, and the product below."""
    if _calls(node, (operator.mul, torch.mul), ("mul",)):
        first = node.args[0]
        second = node.args[1]
        if not isinstance(first, fx.Node):
            return _Scale(first, divides=False), second
        return _Scale(second, divides=False), first
    if _calls(node, (operator.truediv, torch.div), ("div",)):
        return _Scale(node.args[1], divides=True), node.args[0]
    return _Scale(1.0, divides=False), node


def _transposed(node: Any) -> fx.Node | None:
    """Return what a node exchanges the last two axes of; None for any other node."""
    if _calls(node, (torch.transpose,), ("transpose",)):
        axes = set(node.args[1:3])
        exchanges = axes in ({-1, -2}, {2, 3})
        source = node.args[0]
        return source if exchanges and isinstance(source, fx.Node) else None
    if _calls(node, (getattr,)) and node.args[1] == "mT":
        source = node.args[0]
        return source if isinstance(source, fx.Node) else None
    return None


def _replace(graph: fx.Graph, attention: _Attention) -> None:
    with graph.inserting_before(attention.result):
        mask: Any = None
        if attention.mask is not None:
            how, masked = attention.mask
            mask = graph.call_function(_MASKS[how], (masked, attention.query))
        scale = (attention.scale.value, attention.scale.divides)
        fused = graph.call_function(
            functional.scaled_dot_product_attention,
            (attention.query, attention.key, attention.value),
            {
                "attn_mask": mask,
                "dropout_p": attention.dropout,
                "scale": graph.call_function(_factor, scale),
            },
        )
    attention.result.replace_all_uses_with(fused)
    graph.erase_node(attention.result)


def _takes_part(removed: Tensor, query: Tensor) -> Tensor:
    """Return the mask of what takes part in attention, from what a fill removes."""
    return _with_two_axes(removed.logical_not()).to(query.device)


def _added(bias: Tensor, query: Tensor) -> Tensor:
    """Return what is added to the scores, with the axes and the dtype that it needs."""
    return _with_two_axes(bias).to(query.dtype)


def _with_two_axes(mask: Tensor) -> Tensor:
    return mask if mask.dim() >= 2 else mask.expand(1, *mask.shape or (1,))


_MASKS: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fill": _takes_part,
    "add": _added,
}


def _factor(value: Any, divides: bool) -> float:
    """Return what scores are multiplied with; of a tensor, its one element."""
    return 1.0 / float(value) if divides else float(value)
