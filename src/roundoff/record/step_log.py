"""Numbers of every step of a program, recorded or not: losses, rates, counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

#: Steps after which the numbers are written; tensors of a device wait until then.
EVERY = 64
#: Steps that are noted.
MOST_STEPS = 200_000

Row = tuple[int, str, Any]


class StepLog:
    """Gathers the numbers of the step that runs now, and of those that wait."""

    def __init__(self) -> None:
        self._sums: dict[str, list[Any]] = {}
        self._numbers: dict[str, Any] = {}
        self._rows: list[Row] = []

    def add(self, name: str, value: torch.Tensor) -> None:
        """Note a tensor of one number; of several in a step their mean is kept."""
        value = value.detach()
        number = float(value) if value.device.type == "cpu" else value.clone()
        self._sums.setdefault(name, []).append(number)

    def set(self, name: str, value: Any) -> None:
        """Note a number, in place of an earlier one of this step."""
        if isinstance(value, torch.Tensor):
            value = value.detach().clone() if value.numel() == 1 else None
        if isinstance(value, bool | int | float | torch.Tensor):
            self._numbers[name] = value

    def count(self, name: str) -> None:
        """Add one."""
        self._numbers[name] = self._numbers.get(name, 0) + 1

    def counted(self, name: str) -> int:
        """Return how often ``count`` was called in this step."""
        return int(self._numbers.get(name, 0))

    def end(self, step: int) -> None:
        """End a step; what it noted waits to be taken."""
        if step < MOST_STEPS:
            rows = {**self._sums, **self._numbers}
            self._rows += [(step, name, value) for name, value in rows.items()]
        self._sums = {}
        self._numbers = {}

    def take(self) -> Sequence[tuple[int, str, float]]:
        """Return what waits, as numbers."""
        rows = self._rows
        self._rows = []
        return [(step, name, _number(value)) for step, name, value in rows]


def _number(value: Any) -> float:
    if isinstance(value, list):
        numbers = [float(each) for each in value]
        return sum(numbers) / len(numbers)
    return float(value)
