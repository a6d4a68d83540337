"""Turn recurrent layers, as the exporter has written them, into LSTM, GRU and RNN of ONNX."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from roundoff.export.onnx.operators import LAYER
from roundoff.export.onnx.recurrent import KINDS, RecurrentKind

#: Operators whose result is zero where their first operand is.
_KEEP_ZERO = frozenset(
    """
    Expand Slice Reshape Squeeze Unsqueeze Transpose Identity QuantizeLinear
    DequantizeLinear
    """.split()
)


def lower_recurrent(graph: Any) -> None:
    """Put ONNX's own nodes in the place of every recurrent layer of a graph."""
    for node in [node for node in graph if node.op_type == LAYER]:
        _Lowering(graph, node).run()


class _Lowering:
    """One layer: its operands, and the nodes that are put in its place."""

    def __init__(self, graph: Any, node: Any) -> None:
        self.graph = graph
        self.node = node
        self.kind: RecurrentKind = KINDS[node.attributes["kind"].as_string()]
        numbers = {
            name: int(node.attributes[name].as_int())
            for name in ("weights", "cell", "lengths")
        }
        operands = iter(node.inputs)
        self.x = next(operands)
        self.hidden = next(operands)
        self.cell = next(operands) if numbers["cell"] else None
        self.lengths = next(operands) if numbers["lengths"] else None
        self.weights = list(islice(operands, numbers["weights"]))
        self.biases = list(operands)
        self.directions = len(self.weights) // 2
        self.size = int(self.weights[1].shape[1])
        gates = np.array(self.kind.gates)[:, None] * self.size
        #: row of torch's weight for each row of ONNX's
        self.rows = (gates + np.arange(self.size)).reshape(-1)
        self.nodes: list[Any] = []

    def run(self) -> None:
        """Insert the nodes, and let all readers read their results."""
        operands = [
            self.x,
            self._stacked(self.weights[0::2]),
            self._stacked(self.weights[1::2]),
            self._stacked_biases(),
            self._lengths(),
            self._state(self.hidden),
        ]
        if self.kind.has_cell:
            operands.append(self._state(self.cell))
        while operands[-1] is None:
            operands.pop()
        layer = self._add(
            self.kind.operator,
            operands,
            self._attributes(),
            outputs=3 if self.kind.has_cell else 2,
        )
        results = [self._by_sample(layer.outputs[0]), *layer.outputs[1:]]
        self.graph.insert_before(self.node, self.nodes)
        for old, new in zip(self.node.outputs, results, strict=False):
            new.name = old.name
            old.replace_all_uses_with(new, replace_graph_outputs=True)
        self.graph.remove(self.node, safe=True)

    def _add(
        self,
        operator: str,
        operands: Sequence[Any],
        attributes: dict[str, Any] | None = None,
        outputs: int = 1,
    ) -> Any:
        import onnx_ir as ir

        node = ir.node(operator, operands, attributes=attributes, num_outputs=outputs)
        self.nodes.append(node)
        return node

    def _constant(self, array: Any, name: str) -> Any:
        import onnx_ir as ir

        name = f"{self.node.outputs[0].name}_{name}"
        while name in self.graph.initializers:
            name += "_"
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name))
        self.graph.initializers[name] = value
        return value

    def _attributes(self) -> dict[str, Any]:
        attributes: dict[str, Any] = dict(self.kind.attributes)
        attributes["hidden_size"] = self.size
        if self.directions == 2:
            attributes["direction"] = "bidirectional"
        if self.kind.activation:
            attributes["activations"] = [self.kind.activation] * self.directions
        return attributes

    def _stacked(self, values: Sequence[Any]) -> Any:
        """Return the weights of all directions, [directions, gates * size, features]."""
        stored = _all(_Stored.of(value) for value in values)
        if stored and len({codes.layout for codes in stored}) == 1:
            return self._dequantized([codes.reordered(self.rows) for codes in stored])
        arrays = _all(_array(value) for value in values)
        if arrays:
            return self._constant(np.stack([a[self.rows] for a in arrays]), "weight")
        return self._joined(values)

    def _dequantized(self, stored: Sequence[_Stored]) -> Any:
        """Return weights made of their codes by Cast, Sub and Mul."""
        import onnx_ir as ir

        codes = self._constant(np.stack([s.codes for s in stored]), "codes")
        scale = self._constant(np.stack([s.scale for s in stored]), "scale")
        to_float = {"to": ir.DataType.FLOAT.value}
        value = self._add("Cast", [codes], to_float).outputs[0]
        if any(s.zero.any() for s in stored):
            zeros = np.stack([s.zero for s in stored]).astype(np.float32)
            zero = self._constant(zeros, "zero_point")
            value = self._add("Sub", [value, zero]).outputs[0]
        value = self._add("Mul", [value, scale]).outputs[0]
        if stored[0].codes.ndim == 2:
            return value
        shape = np.array([len(stored), len(self.rows), -1], dtype=np.int64)
        operands = [value, self._constant(shape, "shape")]
        return self._add("Reshape", operands).outputs[0]

    def _joined(self, values: Sequence[Any]) -> Any:
        """Return weights that the graph computes, in ONNX's order."""
        rows = self._constant(self.rows.astype(np.int64), "rows")
        first = self._constant(np.array([0], dtype=np.int64), "first")
        parts = []
        for value in values:
            ordered = self._add("Gather", [value, rows]).outputs[0]
            parts.append(self._add("Unsqueeze", [ordered, first]).outputs[0])
        return self._add("Concat", parts, {"axis": 0}).outputs[0]

    def _stacked_biases(self) -> Any:
        """Return [directions, 2 * gates * size], or None without biases."""
        if not self.biases:
            return None
        arrays = _all(_constant_of(value) for value in self.biases)
        if arrays:
            ordered = [array[self.rows] for array in arrays]
            pairs = range(0, len(ordered), 2)
            rows = [np.concatenate(ordered[i : i + 2]) for i in pairs]
            return self._constant(np.stack(rows), "bias")
        halves = [self._joined(self.biases[0::2]), self._joined(self.biases[1::2])]
        return self._add("Concat", halves, {"axis": 1}).outputs[0]

    def _lengths(self) -> Any:
        import onnx_ir as ir

        if self.lengths is None:
            return None
        to_int32 = {"to": ir.DataType.INT32.value}
        return self._add("Cast", [self.lengths], to_int32).outputs[0]

    def _state(self, value: Any) -> Any:
        """Return a state before the first step; None for zeros, which ONNX starts from."""
        return None if _is_zero(value) else value

    def _by_sample(self, value: Any) -> Any:
        """Return [time, batch, directions * size] of ONNX's [time, directions, batch, size]."""
        if self.directions == 1:
            axis = self._constant(np.array([1], dtype=np.int64), "direction")
            return self._add("Squeeze", [value, axis]).outputs[0]
        turned = self._add("Transpose", [value], {"perm": [0, 2, 1, 3]}).outputs[0]
        shape = self._constant(np.array([0, 0, -1], dtype=np.int64), "joined")
        return self._add("Reshape", [turned, shape]).outputs[0]


class _Stored:
    """Integer codes of a weight [rows, features], with scales that broadcast against them."""

    def __init__(self, codes: Any, scale: Any, zero: Any) -> None:
        self.codes = codes
        self.scale = scale
        self.zero = zero

    @property
    def layout(self) -> tuple[Any, ...]:
        """What has to agree so that two can be stacked."""
        return self.codes.dtype, self.codes.shape[1:], self.scale.shape, self.zero.shape

    @classmethod
    def of(cls, value: Any) -> _Stored | None:
        """Return the codes behind a DequantizeLinear; None where there are none."""
        node = value.producer()
        if node is None or node.op_type != "DequantizeLinear":
            return None
        operands = [_array(value) for value in node.inputs]
        if (
            any(array is None for array in operands)
            or operands[0].dtype.kind not in "iu"
        ):
            return None
        codes, scale = operands[:2]
        zero = operands[2] if len(operands) > 2 else np.zeros_like(scale, codes.dtype)
        axis = _number_of(node, "axis") % 2
        size = _number_of(node, "block_size")
        if size:
            return cls._in_blocks(codes, scale, zero, axis, size)
        shape = [1, 1]
        if scale.ndim:
            shape[axis] = -1
        return cls(codes, scale.reshape(shape), zero.reshape(shape))

    @classmethod
    def _in_blocks(
        cls, codes: Any, scale: Any, zero: Any, axis: int, size: int
    ) -> _Stored | None:
        """Return codes as [rows, blocks, size]; None where blocks lie otherwise."""
        if axis != 1 or codes.shape[1] % size:
            return None
        blocks = codes.reshape(len(codes), -1, size)
        return cls(blocks, scale[..., None], zero[..., None])

    def reordered(self, rows: Any) -> _Stored:
        """Return the same with rows in another order."""
        return _Stored(
            self.codes[rows], *(self._rows(a, rows) for a in (self.scale, self.zero))
        )

    def _rows(self, array: Any, rows: Any) -> Any:
        return array[rows] if len(array) == len(self.codes) else array


def _all(items: Iterable[Any]) -> list[Any]:
    """Return the items, or nothing where one is None."""
    collected = list(items)
    return [] if any(item is None for item in collected) else collected


def _number_of(node: Any, name: str) -> int:
    """Return an integer attribute; 0 where there is none."""
    attribute = node.attributes.get(name)
    return 0 if attribute is None else int(attribute.as_int())


def _array(value: Any) -> Any:
    """Return the array of a constant; None for another value."""
    if value is None or value.const_value is None:
        return None
    return value.const_value.numpy()


def _constant_of(value: Any) -> Any:
    """Return the numbers of a constant, or of codes behind a DequantizeLinear of one axis."""
    array = _array(value)
    node = value.producer()
    if array is not None or node is None or node.op_type != "DequantizeLinear":
        return array
    codes, scale = (_array(operand) for operand in node.inputs[:2])
    if codes is None or scale is None or codes.ndim != 1:
        return None
    return codes.astype(np.float32) * scale.astype(np.float32)


def _is_zero(value: Any) -> bool:
    """Return True for a value that is all zeros, whatever its shape."""
    array = _array(value)
    if array is not None:
        return not array.astype(np.float32).any()
    node = value.producer()
    if node is None:
        return False
    if node.op_type == "ConstantOfShape":
        fill = node.attributes.get("value")
        return fill is None or not fill.as_tensor().numpy().any()
    return node.op_type in _KEEP_ZERO and _is_zero(node.inputs[0])
