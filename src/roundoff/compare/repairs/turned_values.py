"""Values that stand the other way round along some axes: where did that begin?

What picks or repeats places hands on the order that it is given: windows that are cut from a
table from its last place to its first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch
from torch import Tensor

from roundoff.compare.repairs.trials import Trials
from roundoff.compare.values.value_flow import Value
from roundoff.compare.values.value_regions import Sides
from roundoff.ops import operators_that

#: Axes that are turned round together, at most: those of a picture.
MOST_TURNED = 2
_MOVES = operators_that("move values") | operators_that("read at places")


def first_turned(sides: Sides, trials: Trials, value: Value) -> Value | None:
    """Follow a value back through what moves it, as long as it is right the other way round.

    None where it is not.
    """
    flow = sides.candidate
    turned: Value | None = None
    source: Value | None = value
    while source is not None and source.is_call and _is_right_turned(trials, source):
        turned = source
        inputs = [flow.values[key] for key in source.inputs if key in flow.values]
        numbers = [each for each in inputs if each.is_number]
        is_move = source.operator in _MOVES and len(numbers) == 1
        source = numbers[0] if is_move else None
    return turned


def _is_right_turned(trials: Trials, value: Value) -> bool:
    held = trials.program.tensor(value.key)
    if held is None:
        return False
    return any(
        trials.outcome({}, {value.key: other})[0] for other in _turned_round(held)
    )


def _turned_round(held: Tensor) -> Iterator[Tensor]:
    """Yield a tensor with some of its axes the other way round, where that changes it."""
    axes = [axis for axis, length in enumerate(held.shape) if length > 1]
    for count in range(1, MOST_TURNED + 1):
        for some in combinations(axes, count):
            turned = held.flip(some)
            if not torch.equal(turned, held):
                yield turned
