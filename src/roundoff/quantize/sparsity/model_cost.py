"""What a model costs: multiply-accumulates by call, bytes of its parameters, and time,
as a ratio of two models.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from roundoff.errors import QuantizationError
from roundoff.ops import Call, float_tensors, sizes, watch
from roundoff.preserve import preserve
from roundoff.workload import Workload


@dataclass(frozen=True)
class Cost:
    """Of one forward pass on one batch.

    Attributes:
        macs: multiply-accumulates of contracting calls (convolutions, linear, matmul,
            attention, recurrent).
        bytes: of parameters and buffers, each tensor once.
        by_site: multiply-accumulates of each call, in the order of calls.
    """

    macs: int
    bytes: int
    by_site: dict[str, int] = field(repr=False, default_factory=dict)


def model_cost(
    model: nn.Module,
    batch: Any,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Cost:
    """Count one forward pass in evaluation mode; the model is left as it was.

    Zeros count: a mask saves nothing here, removed channels do.

    Example:
        >>> counted = model_cost(nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(16, 2)), torch.zeros(1, 1, 4, 4))
        >>> counted.macs, counted.bytes  # 4·9 for each of 4 pixels, and 16·2; 4 bytes for each parameter
        (176, 296)
    """
    workload = Workload(model, [batch], forward=forward)
    counter = _Counter()
    with preserve(model), torch.no_grad(), watch(model.eval(), counter) as mode:
        mode.begin()
        with mode:
            workload.run(workload.batches[0])
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    total = sum(t.numel() * t.element_size() for t in tensors.values())
    return Cost(sum(counter.macs.values()), total, counter.macs)


def latency_ratio(
    reference: nn.Module,
    candidate: nn.Module,
    batch: Any,
    *,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    repeats: int = 20,
) -> float:
    """Time of the candidate over time of the reference on this machine: the fastest of
    ``repeats`` passes of each, taken in turn so that what else the machine does meets
    both.

    Raises:
        QuantizationError: fewer than one repeat.
    """
    if repeats < 1:
        raise QuantizationError(
            "not a number of repeats", expected="at least 1", got=str(repeats)
        )
    fastest = [float("inf"), float("inf")]
    workloads = [
        Workload(model, [batch], forward=forward) for model in (reference, candidate)
    ]
    with preserve(reference), preserve(candidate), torch.no_grad():
        for workload in workloads:
            workload.model.eval()
            workload.run(workload.batches[0])
        for _ in range(repeats):
            for i, workload in enumerate(workloads):
                start = time.perf_counter()
                workload.run(workload.batches[0])
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                fastest[i] = min(fastest[i], time.perf_counter() - start)
    return fastest[1] / fastest[0]


class _Counter:
    """Handler that counts the multiply-accumulates of each call."""

    def __init__(self) -> None:
        self.macs: dict[str, int] = {}

    def before_write(self, _: Any) -> None:
        """Nothing to keep."""

    def call(self, call: Call) -> Any:
        """The call's result, unchanged."""
        result = call.run()
        outputs = float_tensors(result)
        if outputs:
            macs = int(sizes(call, outputs)["macs"])
            if macs:
                self.macs[str(call.site)] = macs
        return result
