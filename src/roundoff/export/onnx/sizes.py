"""The sizes that a traced program takes: which axes are free, and which batches fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

#: The shape of each input.
Shapes = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of an input.

    Attributes:
        name: of the input.
        axis: its number.
        length: what it was traced with.
        refused: lengths that the program was not traced for.
        fixed: True where it takes ``length`` alone.
    """

    name: str
    axis: int
    length: int
    refused: tuple[int, ...] = ()
    fixed: bool = False

    def __str__(self) -> str:
        """Return what to know, as a sentence."""
        place = f"{self.name}, axis {self.axis}"
        if self.fixed:
            return f"{place}: {self.length} elements in the file and no other number, which the model's code fixes"
        lengths = ", ".join(map(str, self.refused))
        return f"{place}: traced with {self.length} elements; with {lengths} the model takes another path than the file"


class Sizes:
    """The sizes of a program's inputs, by their symbols, and what holds for these.

    Args:
        program: a ``torch.export.ExportedProgram``.
        names: of its inputs, in order.
    """

    def __init__(self, program: Any, names: Sequence[str]) -> None:
        shapes = _input_shapes(program)
        self.shapes: dict[str, list[Any]] = {
            name: [_expression(size) for size in shape]
            for name, shape in zip(names, shapes, strict=True)
        }
        sizes = [size for shape in shapes for size in shape]
        self._lengths = {_expression(size): _hint(size) for size in sizes}
        symbols = {s for s in self._lengths if not isinstance(s, int)}
        self._conditions = _conditions(sizes, symbols)

    def is_free(self, name: str, axis: int) -> bool:
        """Return True for an axis that may have other lengths."""
        return not isinstance(self.shapes[name][axis], int)

    def remarks(self, wanted: Mapping[str, Sequence[int]]) -> list[Axis]:
        """Return the axes that may not have any length, of those that are wanted free."""
        rows = [
            self._axis(name, axis) for name, axes in wanted.items() for axis in axes
        ]
        return [row for row in rows if row.fixed or row.refused]

    def _axis(self, name: str, axis: int) -> Axis:
        size = self.shapes[name][axis]
        length = self._lengths[size]
        if isinstance(size, int):
            return Axis(name, axis, length, fixed=True)
        others = _other_lengths(length)
        alike = [s for s, hint in self._lengths.items() if hint == length]
        refused = tuple(
            n
            for n in others
            # inputs of one length stay so together: as many indices as rows
            if not self._holds({size: n}) and not self._holds(dict.fromkeys(alike, n))
        )
        return Axis(name, axis, length, refused, fixed=len(refused) == len(others))

    def why_unfit(self, shapes: Shapes) -> str:
        """Return why inputs of these shapes cannot be given to the file; empty if they can."""
        bound: dict[Any, int] = {}
        for (name, sizes), shape in zip(self.shapes.items(), shapes, strict=True):
            if len(sizes) != len(shape):
                return f"{name} has {len(shape)} axes, and {len(sizes)} in the file"
            for axis, (size, length) in enumerate(zip(sizes, shape, strict=True)):
                taken = bound.setdefault(
                    size, size if isinstance(size, int) else length
                )
                if taken != length:
                    return f"{name} has {length} elements along axis {axis}, and {taken} in the file"
        if 1 not in bound.values() and not self._holds(bound):
            return "the model takes another path for its sizes"
        return ""

    def _holds(self, lengths: dict[Any, int]) -> bool:
        """Return True if all conditions hold at some lengths, the others as traced."""
        values = {s: n for s, n in self._lengths.items() if not isinstance(s, int)}
        values |= {s: n for s, n in lengths.items() if not isinstance(s, int)}
        changed = {s for s in lengths if not isinstance(s, int)}
        return all(
            bool(condition.subs(values))
            for condition in self._conditions
            if changed & condition.free_symbols
        )


def _input_shapes(program: Any) -> list[Any]:
    """Return the shapes of a program's inputs, some of whose sizes are symbols."""
    inputs = set(program.graph_signature.user_inputs)
    nodes = [node for node in program.graph.nodes if node.op == "placeholder"]
    return [node.meta["val"].shape for node in nodes if node.name in inputs]


def _other_lengths(length: int) -> list[int]:
    """Return some other lengths to try, from 2 on."""
    candidates = {2, 3, length - 1, length + 1, 2 * length, 3 * length}
    return sorted(n for n in candidates if n > 1 and n != length)


def _expression(size: Any) -> Any:
    """Return a size as its symbol, or as a number where it is fixed."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    return int(expression) if expression.is_number else expression


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _conditions(sizes: Sequence[Any], symbols: set[Any]) -> list[Any]:
    """Return what has to hold for the symbols of inputs, as sympy's booleans."""
    symbolic = next((size for size in sizes if isinstance(size, torch.SymInt)), None)
    if symbolic is None:
        return []
    expressions = [guard.expr for guard in symbolic.node.shape_env.guards]
    distinct = dict.fromkeys(expressions)
    return [e for e in distinct if e.free_symbols and e.free_symbols <= symbols]


def varying_axes(tensor: Tensor, shapes: Shapes) -> list[int]:
    """Return the axes that should be free: the first, and those that differ.

    An axis of length 1 is taken for one that always has this length.
    """
    comparable = [shape for shape in shapes if len(shape) == tensor.ndim]
    return [
        axis
        for axis in range(tensor.ndim)
        if tensor.shape[axis] > 1
        and (axis == 0 or len({shape[axis] for shape in comparable}) > 1)
    ]
