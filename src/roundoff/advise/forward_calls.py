"""What the code of a forward pass does in a roundabout way: products with one-hot rows,
attention in single operators, Python loops, constants that are made anew."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roundoff.ops import base, operators_that
from roundoff.record import user_line

#: Columns from which on a one-hot row is worth a look-up, and rows that are looked at.
LEAST_COLUMNS = 32
LEAST_ROWS = 2
#: Calls of one operator at one line that are a loop.
LOOP = 8
#: Elements that a loop's operator has at most, where its call costs more than its work.
SMALL = 16_384


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product by the shapes of its two factors."""

    line: str | None
    rows: int
    columns: int
    width: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Loop:
    """An operator that one line calls again and again."""

    operator: str
    line: str
    calls: int
    numel: int


@dataclass(frozen=True, slots=True)
class Attention:
    """Scores, softmax and product by single operators, of one batch of heads."""

    line: str | None
    batch: int
    queries: int
    keys: int
    width: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class ForwardCalls:
    """What one forward pass does in a roundabout way.

    Attributes:
        one_hot: products whose first factor has a single one in each row.
        loops: the largest first.
        attention: attention that was written out, each line once.
        constants: how many tensors each line makes from no other tensor.
    """

    one_hot: tuple[Product, ...]
    loops: tuple[Loop, ...]
    attention: tuple[Attention, ...]
    constants: Mapping[str, int]


def forward_calls(run: Callable[[], object]) -> ForwardCalls:
    """Watch the operators of ``run()``; nothing is changed.

    >>> table = torch.ones(40, 3)
    >>> ids = torch.tensor([1, 5])
    >>> seen = forward_calls(lambda: torch.eye(40)[ids] @ table)
    >>> [(each.rows, each.columns, each.width) for each in seen.one_hot]
    [(2, 40, 3)]
    """
    watcher = _Watcher()
    with watcher:
        run()
    return watcher.seen()


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at the operands of products, and counts calls by line."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._one_hot: list[Product] = []
        self._calls: Counter[tuple[str, str]] = Counter()
        self._sizes: dict[tuple[str, str], int] = {}
        self._constants: Counter[str] = Counter()
        self._attention: dict[str | None, Attention] = {}
        # what a tensor is; kept with it, so that no other takes its id
        self._marks: dict[int, tuple[Tensor, str, Tensor]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch._C._current_autograd_node() is None:
            operator = base(func.overloadpacket.__name__)
            self._look(operator, args, kwargs or {}, result)
        return result

    def seen(self) -> ForwardCalls:
        """Return what was seen."""
        loops = [
            Loop(operator, line, calls, self._sizes[operator, line])
            for (operator, line), calls in self._calls.most_common()
            if calls >= LOOP and 0 < self._sizes[operator, line] <= SMALL
        ]
        return ForwardCalls(
            tuple(self._one_hot),
            tuple(loops),
            tuple(self._attention.values()),
            dict(self._constants),
        )

    def _look(
        self, operator: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> None:
        line = user_line(3)
        operands = [
            leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
        ]
        if line is not None and operator not in _FREE:
            self._calls[operator, line] += 1
            size = result.numel() if isinstance(result, Tensor) else 0
            largest = max(self._sizes.get((operator, line), 0), size)
            self._sizes[operator, line] = largest
        if line is not None and not operands and operator in _CREATING:
            self._constants[line] += 1
        if isinstance(result, Tensor):
            self._mark(operator, operands, result, line)

    def _mark(
        self,
        operator: str,
        operands: Sequence[Tensor],
        result: Tensor,
        line: str | None,
    ) -> None:
        """Follow scores to their softmax, and that to the product with values."""
        if operator in _PRODUCTS and len(operands) >= 2:
            first, second = operands[-2:]
            if operator != "bmm" and _is_one_hot(first):
                rows, columns = first.shape
                width = second.shape[-1]
                product = Product(line, rows, columns, width, second.dtype)
                self._one_hot.append(product)
            before = self._marks.get(id(first))
            if before is not None and before[1] == _WEIGHTS and operator == "bmm":
                self._note_attention(before[2], second, line)
            if operator == "bmm":
                self._marks[id(result)] = (result, _SCORES, first)
            return
        marks = [self._marks[id(each)] for each in operands if id(each) in self._marks]
        if marks:
            kind = _WEIGHTS if operator in _SOFTMAX else marks[0][1]
            self._marks[id(result)] = (result, kind, marks[0][2])

    def _note_attention(
        self, queries: Tensor, values: Tensor, line: str | None
    ) -> None:
        if queries.dim() != 3 or values.dim() != 3:
            return
        attention = Attention(
            line,
            queries.shape[0],
            queries.shape[1],
            values.shape[1],
            queries.shape[2],
            queries.dtype,
        )
        self._attention.setdefault(line, attention)


_SCORES = "scores"
_WEIGHTS = "weights"
_PRODUCTS = ("mm", "addmm", "bmm")
_SOFTMAX = ("_softmax", "_safe_softmax")
_CREATING = frozenset(operators_that("create"))
#: Operators whose calls compute nothing.
_FREE = frozenset({*operators_that("move values"), *operators_that("create")})


def _is_one_hot(values: Tensor) -> bool:
    """Return True for a matrix with a single one in each row, and zeros beside it."""
    if values.dim() != 2 or not values.dtype.is_floating_point:
        return False
    if values.shape[0] < LEAST_ROWS or values.shape[1] < LEAST_COLUMNS:
        return False
    rows = values.detach()
    is_single = bool(((rows != 0).sum(1) == 1).all())
    return is_single and bool((rows.amax(1) == 1).all())
