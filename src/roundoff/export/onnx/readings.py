"""Numbers that a model's Python code reads from tensors, which a traced file cannot.

``if x.sum() > 0``, ``int(shape[0])`` and ``lengths.tolist()`` leave the graph of tensors:
what they read decides which operators run. They are recorded while the model runs, and
given back while it is traced.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

#: What hands numbers of a tensor to Python.
_READERS: frozenset[Callable[..., Any]] = frozenset(
    {
        Tensor.__bool__,
        Tensor.__int__,
        Tensor.__float__,
        Tensor.__index__,
        Tensor.item,
        Tensor.tolist,
        Tensor.is_nonzero,
        Tensor.equal,
        Tensor.allclose,
        torch.is_nonzero,
        torch.equal,
        torch.allclose,
    }
)
_LIBRARIES = tuple(
    str(Path(str(file)).parent) + os.sep
    for file in (torch.__file__, Path(__file__).parents[1])
)


@dataclass(frozen=True, slots=True)
class Reading:
    """A number that one line read from a tensor.

    A list is read number by number, as torch does where it traces.

    Attributes:
        line: ``file:line`` of the user's code; empty where there is none.
        value: a bool, an int or a float.
    """

    line: str
    value: Any

    def same_value(self, other: Reading) -> bool:
        """Return True if both read the same; NaN is the same as NaN."""
        return repr(self.value) == repr(other.value)


class ReadingMode(TorchFunctionMode):
    """See every reading of one forward pass, in order."""

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Start a forward pass, which runs inside the block."""
        self.begin()
        with self:
            yield

    def begin(self) -> None:
        """Start from the first reading."""

    def read(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return what a reading gives."""
        return func(*args, **kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _READERS:
            return self.read(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Recording(ReadingMode):
    """Record what is read.

    Attributes:
        readings: of the last forward pass, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.readings: list[Reading] = []

    def begin(self) -> None:
        """Forget the pass before."""
        self.readings = []

    def read(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Read, and record it: of a list each number."""
        value = func(*args, **kwargs)
        line = user_line()
        self.readings += [Reading(line, number) for number in tree_leaves(value)]
        return value


class Repeating(ReadingMode):
    """Give recorded values back, in their order.

    Args:
        readings: of one forward pass; None for one that is read anew.
    """

    def __init__(self, readings: Sequence[Reading | None]) -> None:
        super().__init__()
        self.readings = readings
        self._next = 0

    def begin(self) -> None:
        """Start from the first reading."""
        self._next = 0

    def read(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Give back what was read in this place; read where nothing was."""
        if func is Tensor.tolist and args[0].ndim:
            return [self.read(func, (part,), {}) for part in args[0].unbind()]
        reading = None
        if self._next < len(self.readings):
            reading = self.readings[self._next]
        self._next += 1
        return func(*args, **kwargs) if reading is None else reading.value


def common(passes: Sequence[Sequence[Reading]]) -> list[Reading | None]:
    """Return the readings of the first pass; None for those that another pass has not.

    Where a pass read something else before, all that comes later is another's path.
    """
    first = passes[0]
    shared: list[Reading | None] = list(first)
    for other in passes[1:]:
        for place, reading in enumerate(first):
            same = place < len(other) and reading.same_value(other[place])
            shared[place] = shared[place] if same else None
    return shared


def follows(readings: Sequence[Reading], kept: Sequence[Reading | None]) -> bool:
    """Return True if a pass reads what is kept, in the same places."""
    if len(readings) != len(kept):
        return False
    pairs = zip(readings, kept, strict=True)
    return all(
        wanted is None or reading.same_value(wanted) for reading, wanted in pairs
    )


def as_text(value: Any) -> str:
    """Return a value as short text.

    >>> as_text(3), as_text(0.1 + 0.2)
    ('3', '0.3')
    """
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    return str(value)


def user_line() -> str:
    """Return the innermost line that is neither torch's nor this package's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_LIBRARIES, "<")) and "/contextlib.py" not in name:
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
