"""Phases side by side: what a convolution wrote as channels becomes a larger picture.

A stride of ``s`` has ``s`` phases along its axis. The channels of a convolution that
computes all phases lie in the order of the phases of the first axis, those of the next,
..., and the channels of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from roundoff.export.onnx.editing import add_constant


@dataclass(frozen=True, slots=True)
class PhaseAxis:
    """How one spatial axis of a transposed convolution becomes one of a convolution.

    Attributes:
        stride: phases side by side.
        taps: of each phase.
        length: of the convolution's result.
        pads: zeros before and behind the input.
        cut: elements to leave out before and behind, when phases are in their places.
    """

    stride: int
    taps: int
    length: int
    pads: tuple[int, int]
    cut: tuple[int, int]


def spatial_lengths(value: Any, rank: int) -> list[int] | None:
    """Return the lengths behind batch and channels, or None where they are not fixed."""
    if value.shape is None or len(value.shape) != rank + 2:
        return None
    lengths = list(value.shape)[2:]
    return lengths if all(isinstance(length, int) for length in lengths) else None


def phases_in_place(
    graph: Any, name: str, value: Any, axes: list[PhaseAxis]
) -> list[Any]:
    """Return the nodes that put phases, which are channels, side by side.

    The channels are last meanwhile, as ONNX Runtime's integer convolutions have them;
    those of the last axis's phases move together.
    """
    rank = len(axes)
    lengths = [axis.length for axis in axes]
    whole = [axis.length * axis.stride for axis in axes]
    chain = _Chain(graph, name, value)
    chain.add("Transpose", perm=[0, *range(2, rank + 2), 1])
    if rank > 1:
        apart = [0, *lengths, *(axis.stride for axis in axes[:-1]), -1]
        chain.add("Reshape", chain.integers("apart", apart))
        pairs = [place for i in range(1, rank) for place in (i, rank + i)]
        chain.add("Transpose", perm=[0, *pairs, rank, 2 * rank])
    chain.add("Reshape", chain.integers("whole", [0, *whole, -1]))
    _cut(chain, axes, whole)
    chain.add("Transpose", perm=[0, rank + 1, *range(1, rank + 1)])
    return chain.nodes


def _cut(chain: _Chain, axes: list[PhaseAxis], whole: list[int]) -> None:
    """Add the node that leaves out what lies beyond the result, if anything does."""
    if not any(any(axis.cut) for axis in axes):
        return
    ends = [size - axis.cut[1] for size, axis in zip(whole, axes, strict=True)]
    chain.add(
        "Slice",
        chain.integers("first", [axis.cut[0] for axis in axes]),
        chain.integers("end", ends),
        chain.integers("axes", list(range(1, len(axes) + 1))),
    )


class _Chain:
    """Nodes that each read the one before, named after a site."""

    def __init__(self, graph: Any, name: str, value: Any) -> None:
        self.graph = graph
        self.name = name
        self.value = value
        self.nodes: list[Any] = []

    def add(self, operator: str, *operands: Any, **attributes: Any) -> None:
        """Append a node that reads the last one's result."""
        import onnx_ir as ir

        number = sum(node.op_type == operator for node in self.nodes)
        suffix = f"_{number + 1}" if number else ""
        node = ir.node(
            operator,
            [self.value, *operands],
            attributes=attributes,
            name=f"{self.name}:{operator}{suffix}",
        )
        self.nodes.append(node)
        self.value = node.outputs[0]

    def integers(self, kind: str, numbers: list[int]) -> Any:
        """Add a constant for a node."""
        array = np.array(numbers, dtype=np.int64)
        return add_constant(self.graph, array, f"{self.name}_{kind}")
