"""Ask about an ``onnx_ir`` graph and change it: constants, readers, nodes in the place
of others.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def nodes_of(graph: Any, *operators: str) -> list[Any]:
    """Return the nodes of some operators; the graph may be changed meanwhile."""
    return [node for node in graph if node.op_type in operators]


def producer_of(value: Any, operator: str) -> Any:
    """Return the node that makes a value, if it is of an operator."""
    node = value.producer()
    return node if node is not None and node.op_type == operator else None


def constant_array(value: Any) -> Any:
    """Return the array of a constant; None for another value, or none."""
    if value is None or value.const_value is None:
        return None
    return value.const_value.numpy()


def input_at(node: Any, place: int) -> Any:
    """Return the input at a place; None where there is none."""
    return node.inputs[place] if len(node.inputs) > place else None


def block_size(node: Any) -> int:
    """Return how many codes share a scale, 0 where an axis or all do."""
    block = node.attributes.get("block_size")
    return 0 if block is None else int(block.as_int())


def is_zero(array: Any) -> bool:
    """Return True for an array of zeros; False for none."""
    return array is not None and not array.astype(np.float32).any()


def add_constant(graph: Any, array: Any, name: str) -> Any:
    """Add a constant to the graph."""
    import onnx_ir as ir

    value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
    graph.initializers[name] = value
    return value


def replace_node(graph: Any, node: Any, value: Any) -> None:
    """Let every reader of a node's result read ``value``, and take the node out."""
    node.outputs[0].replace_all_uses_with(value, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def replace_by(graph: Any, node: Any, nodes: list[Any]) -> None:
    """Put nodes in the place of one; the last has its result, by the same name."""
    graph.insert_before(node, nodes)
    result = nodes[-1].outputs[0]
    result.name = node.outputs[0].name
    result.type = node.outputs[0].type
    result.shape = node.outputs[0].shape
    replace_node(graph, node, result)


def only_reader(value: Any) -> Any:
    """Return the one node that reads a value; None for several, or an output."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    return uses[0].node
