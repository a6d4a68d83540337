"""The canonical name of a torch-level function, and the axes of an einsum."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roundoff.ops.table import CONTRACTING, Kind, OperatorSpec, facts

_DUNDER = re.compile(r"^__i?(?P<name>\w+?)__$")
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


@dataclass(frozen=True)
class Operator:
    """The canonical name of a torch-level function and whether it writes into its first argument.

    >>> import torch
    >>> Operator.of(torch.Tensor.__iadd__), Operator.of(torch.relu_).name, Operator.of(torch.Tensor.__matmul__).name
    (Operator(name='add', inplace=True), 'relu', 'matmul')
    """

    name: str
    inplace: bool

    @classmethod
    def of(cls, func: Callable[..., Any]) -> Operator:
        """The operator of a function that a ``TorchFunctionMode`` was given."""
        raw = getattr(func, "__name__", type(func).__name__)
        if raw == "__get__":  # a property: x.T, x.data, x.shape
            return cls(getattr(getattr(func, "__self__", None), "__name__", raw), False)
        if raw == "__invert__":
            return cls("invert", False)
        dunder = _DUNDER.match(raw)
        if dunder:
            inplace = (
                raw.startswith("__i")
                and raw[2:-2] not in ("index", "int")
                or raw == "__setitem__"
            )
            name = dunder["name"] if inplace or not raw.startswith("__i") else raw[2:-2]
            return cls(_RENAMED.get(name, name), inplace)
        inplace = raw.endswith("_") and raw != "requires_grad_"
        name = raw.rstrip("_") if inplace else raw
        return cls(_RENAMED.get(name, name), inplace)

    @property
    def spec(self) -> OperatorSpec | None:
        """The operands of a contracting operator, None for any other."""
        return CONTRACTING.get(self.name)

    @property
    def kind(self) -> Kind:
        """See ``OperatorFacts.kind``."""
        return facts(self.name).kind


def einsum_axes(equation: str, operand: int) -> tuple[int, int]:
    """Two axes of one einsum operand, from the back unless an ellipsis follows: the one that is contracted (the last
    when none is), and the one that keeps a scale of its own, an axis of the result that the other operands lack.

    >>> einsum_axes("bij,bkj->bik", 1), einsum_axes("...ij,jk", 1)
    ((-1, -2), (-2, -1))
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if not arrow:
        right = "".join(sorted({c for c in left if c.isalpha() and left.count(c) == 1}))
    labels = terms[operand]
    others = "".join(terms[:operand] + terms[operand + 1 :])
    front = labels.find(".")
    axes = {
        c: i if i < front else i - len(labels)
        for i, c in enumerate(labels)
        if c.isalpha()
    }
    summed = [axis for c, axis in axes.items() if c not in right]
    kept = [axis for c, axis in axes.items() if c in right]
    own = [axis for c, axis in axes.items() if c in right and c not in others]
    return (summed or [-1])[-1], (own or kept or [0])[-1]
