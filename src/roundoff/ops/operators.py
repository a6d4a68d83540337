"""The canonical name of a torch-level function, and the axes of an einsum."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roundoff.ops.table import CONTRACTING, Kind, OperatorSpec, facts

_DUNDER = re.compile(r"^__\w+__$")
#: Special methods whose name begins with an i that does not say "in place".
_BEGIN_WITH_I = frozenset(("index", "int", "invert"))
_RENAMED = {
    "truediv": "div",
    "rtruediv": "rdiv",
    "rdiv": "rdiv",
    "radd": "add",
    "rmul": "mul",
    "rpow": "rpow",
    "rsub": "rsub",
    "isub": "sub",
    "subtract": "sub",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "floordiv": "floor_divide",
}


#: What functions of torch were found to be.
_OPERATORS: dict[Callable[..., Any], Operator] = {}


@dataclass(frozen=True)
class Operator:
    """The canonical name of a torch-level function, and if it writes into its first argument.

    >>> import torch
    >>> Operator.of(torch.Tensor.__iadd__), Operator.of(torch.relu_).name, Operator.of(torch.Tensor.__matmul__).name
    (Operator(name='add', inplace=True), 'relu', 'matmul')
    """

    name: str
    inplace: bool

    @classmethod
    def of(cls, func: Callable[..., Any]) -> Operator:
        """Return the operator of a function that a ``TorchFunctionMode`` was given."""
        operator = _OPERATORS.get(func)
        if operator is None:
            operator = _OPERATORS[func] = cls._named(func)
        return operator

    @classmethod
    def _named(cls, func: Callable[..., Any]) -> Operator:
        raw = getattr(func, "__name__", type(func).__name__)
        if raw == "__get__":  # a property: x.T, x.data, x.shape
            attribute = getattr(func, "__self__", None)
            return cls(getattr(attribute, "__name__", raw), False)
        if _DUNDER.match(raw):
            return cls._of_dunder(raw)
        inplace = raw.endswith("_") and raw != "requires_grad_"
        name = raw.rstrip("_") if inplace else raw
        return cls(_RENAMED.get(name, name), inplace)

    @classmethod
    def _of_dunder(cls, raw: str) -> Operator:
        """The operator of ``__add__``, ``__iadd__`` or ``__setitem__``."""
        name = raw[2:-2]
        inplace = name.startswith("i") and name not in _BEGIN_WITH_I
        if inplace:
            name = name[1:]
        return cls(_RENAMED.get(name, name), inplace or name == "setitem")

    @property
    def spec(self) -> OperatorSpec | None:
        """The operands of a contracting operator, None for any other."""
        return CONTRACTING.get(self.name)

    @property
    def kind(self) -> Kind:
        """See ``OperatorFacts.kind``."""
        return facts(self.name).kind


def einsum_axes(equation: str, operand: int) -> tuple[int, int]:
    """Return the contracted axis of one einsum operand, and the axis that keeps a scale of its own.

    The first is the last of those that are contracted, or the last axis where none is.
    The second is an axis of the result that the other operands lack. Axes count from
    the back unless an ellipsis follows.

    >>> einsum_axes("bij,bkj->bik", 1), einsum_axes("...ij,jk", 1)
    ((-1, -2), (-2, -1))
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    labels = terms[operand]
    others = "".join(terms[:operand] + terms[operand + 1 :])
    if not arrow:
        right = "".join(c for c in left if c.isalpha() and left.count(c) == 1)
    axes = _axes(labels)
    summed = [axis for label, axis in axes.items() if label not in right]
    kept = [axis for label, axis in axes.items() if label in right]
    alone = [axis for label, axis in axes.items() if label in set(right) - set(others)]
    return (summed or [-1])[-1], (alone or kept or [0])[-1]


def _axes(labels: str) -> dict[str, int]:
    """The axis of each label, from the front before an ellipsis, else from the back."""
    ellipsis = labels.find(".")
    return {
        label: place if place < ellipsis else place - len(labels)
        for place, label in enumerate(labels)
        if label.isalpha()
    }
