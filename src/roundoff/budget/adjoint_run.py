"""A budget measured by the adjoint: one forward and some backward passes a batch."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from roundoff.budget.adjoint import (
    FEW_MIXED,
    Probe,
    Way,
    measure_batch,
)
from roundoff.budget.noise_power import ADJOINT
from roundoff.budget.outputs import MOST_ROWS
from roundoff.budget.run import Asked, BudgetRun, MeasuredBatch, forget_graph
from roundoff.budget.samples import Division
from roundoff.budget.scan import range_limit
from roundoff.budget.trial_cost import adjoint_cost
from roundoff.budget.trial_signs import DrawnSigns
from roundoff.budget.written_over import Writes, saving
from roundoff.errors import GradientPathError, WorkloadError
from roundoff.formats import Format
from roundoff.ops import CallMode, RoundedOperands
from roundoff.plan import check_finite
from roundoff.workload import Workload

#: Batches that are measured at least, so that they can be compared: those of a model
#: whose sites keep samples apart, and of others, which show one number a batch.
FEWEST_BATCHES = 2
FEWEST_MIXED_BATCHES = 4


class ManyProbesError(Exception):
    """The probes of the first batch may cost more than trials of every row.

    Attributes:
        cost: of the adjoint, see ``roundoff.budget.trial_cost``.
    """

    def __init__(self, cost: float) -> None:
        super().__init__(cost)
        self.cost = cost


class AdjointRun(BudgetRun):
    """What the adjoint measures over the batches.

    Args:
        asked: what is to be measured.
        limit: where it costs more than this, see ``roundoff.budget.trial_cost``, the
            first batch ends in a ``ManyProbesError``.
    """

    measured = ADJOINT

    def __init__(self, asked: Asked, limit: float = math.inf) -> None:
        super().__init__(asked)
        self.limit = limit
        # how probes go back, and what is done about tensors that the model writes over;
        # what fails is done in the next way
        self.way = Way.TOGETHER
        self.writes = Writes.REFUSED
        self.other_ways = [
            (Way.TOGETHER, Writes.COPIED),
            (Way.TOGETHER, Writes.FOLLOWED),
            (Way.ALONE, Writes.FOLLOWED),
        ]
        self.mixed_share = 1.0
        self.axes: dict[tuple[str, int], tuple[int, int] | None] = {}
        self.drawn: tuple[str, ...] = ()
        self.state = self.generator.get_state()
        self.rounded = RoundedOperands()
        self.parameters = {p.data_ptr() for p in asked.workload.model.parameters()}

    @property
    def is_batched(self) -> bool:
        """True unless probes went back one by one."""
        return self.way is Way.TOGETHER

    @property
    def is_enough(self) -> bool:
        """True once there are batches enough to compare them.

        A model that decides by its values may decide otherwise in a few batches only,
        so none of them stands for the others.
        """
        return len(self.batches) >= self.fewest_batches and not self.asked.decides

    def batch(self, mode: CallMode, index: int) -> None:
        """Measure one batch.

        Where a backward formula cannot be batched, this and later batches go probe by
        probe.
        """
        forget = self.checkpoint(mode)
        while True:
            try:
                probe, values, division = self._attempt(mode, index)
                break
            except RuntimeError as error:
                if isinstance(error, CheckpointError) or not self.other_ways:
                    raise _no_backward(self.workload, index, error) from error
                self.way, self.writes = self.other_ways.pop(0)
                forget()
        forget_graph(self.workload.model)
        self.named_passes += 1
        self.add_signal(values, division)
        terms = probe.terms
        self.batches.append(
            MeasuredBatch(probe.samples, terms.projections(), terms.overflow)
        )
        is_number = sum(value.numel() for value in values) == 1
        count = 1 if is_number or self.probes is None else self.probes
        signs = DrawnSigns(index, self.state, count, self.names, self.drawn, division)
        self.signs.append(signs)
        for name in probe.reached:
            self.sites[name].no_path = None
        self.judge()

    @property
    def fewest_batches(self) -> int:
        """Batches that are measured at least."""
        few = FEWEST_BATCHES if self.mixed_share <= FEW_MIXED else FEWEST_MIXED_BATCHES
        return min(few, self.all_batches)

    def _attempt(
        self, mode: CallMode, index: int
    ) -> tuple[Probe, list[Tensor], Division]:
        is_site = self.target is not None and "/" in self.target
        anchor = torch.tensor(-0.0, requires_grad=True)
        self.rounded.keep_only(self.parameters)
        probe = Probe(
            self.formats,
            self.sites,
            self._format_around,
            anchor,
            wanted=self.target if is_site else None,
            axes=self.axes,
            rounded=self.rounded,
            limit=range_limit(self.formats),
        )
        with saving(self.writes, probe.keep):
            values, division = measure_batch(
                mode,
                probe,
                lambda: self.forward(index, lambda: probe.wanted_output),
                check=functools.partial(self._check, index),
                divided=functools.partial(self.divisions, index),
                probes=self._count,
                spread=self._spread,
                generator=self.generator,
                way=self.way,
                memory=self.sampling.memory,
                parameters=sum(p.nbytes for p in self.workload.model.parameters()),
            )
        self.axes = probe.axes
        return probe, values, division

    def _format_around(self, site: str) -> Format | None:
        return self.asked.around.get(site)

    def _count(self, samples: int, mixed_share: float, fitting: int) -> int:
        """Return K, which is chosen at the first batch.

        Where batches are left to be measured, no more than ``fitting``. Where all
        batches will be measured, because the model decides, each needs fewer.
        """
        self.mixed_share = mixed_share
        self.state = self.generator.get_state()  # the sign vectors are drawn next
        if self.probes is None:
            outputs = len(self.rows.names)
            most = MOST_ROWS // outputs if outputs > 1 else math.inf
            batches = self.all_batches if self.asked.decides else self.fewest_batches
            if batches < len(self.workload.batches) and mixed_share <= FEW_MIXED:
                most = min(most, fitting // outputs)
            self.probes = self.sampling.probes_for(samples, batches, mixed_share, most)
            cost = adjoint_cost(self.probes, decides=self.asked.decides)
            if cost > self.limit:
                raise ManyProbesError(cost)
        return self.probes

    def _spread(self, number: int, vectors: Tensor) -> Tensor:
        return self.rows.spread(list(self.targets)[number], vectors)

    def _check(self, index: int) -> None:
        """Keep the output for the metric, and refuse targets that no error reaches."""
        self.keep_output(index)
        check_finite(self.workload, index, self.targets)
        self.names = tuple(self.targets)
        self.drawn = tuple(n for n, t in self.targets.items() if t.requires_grad)
        if self.drawn:
            return
        raise GradientPathError(
            "no gradient reaches the output, so no rounding error can be followed to it",
            where=f"{self.workload.name}, batch {index}",
            expected="an output computed from the model's values by differentiable operators",
            got=", ".join(
                f"{name}: {tensor.dtype}, shape {tuple(tensor.shape)}, no gradient"
                for name, tensor in self.targets.items()
            ),
            do="remove torch.no_grad, inference_mode, detach, numpy, TorchScript or argmax; return the scores",
        )


def _no_backward(workload: Workload, index: int, error: RuntimeError) -> WorkloadError:
    return WorkloadError(
        "the backward pass through the model failed",
        where=f"{workload.name}, batch {index}",
        expected="an output that can be differentiated",
        got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
        do=_advice(error),
    )


def _advice(error: RuntimeError) -> str:
    if isinstance(error, CheckpointError):
        return "turn gradient checkpointing off: operators must not be called again in the backward pass"
    if isinstance(error, torch.OutOfMemoryError):
        return "give smaller batches"
    return "run backward() on the sum of the plain model's output to debug it"
