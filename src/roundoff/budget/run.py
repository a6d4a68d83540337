"""What a measurement of a budget accumulates over the batches, however it measures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from roundoff.budget.adjoint import SiteInfo
from roundoff.budget.batch_noise import BatchNoise, RealRuns, finest_sharing
from roundoff.budget.facts import MeasuredTarget, Measurement, excluded_calls
from roundoff.budget.noise_power import TRIAL, Term
from roundoff.budget.outputs import OutputRows
from roundoff.budget.precision import (
    Sampled,
    SiteProjections,
    mean_error_db,
    of_sites,
)
from roundoff.budget.samples import Division, divide, divisions
from roundoff.budget.scan import Scan
from roundoff.budget.signs import draw_signs
from roundoff.budget.table import Budget, MeasuredTerm, term_frame
from roundoff.budget.terms import TermKey
from roundoff.budget.trial_signs import DrawnSigns
from roundoff.budget.trials import Recording
from roundoff.errors import WorkloadError
from roundoff.formats import Format
from roundoff.ops import CallMode
from roundoff.packages import installed_version
from roundoff.plan import check_finite, detached, named_targets
from roundoff.preserve import random_states, set_random_states
from roundoff.record import environment
from roundoff.workload import Workload


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be measured.

    Attributes:
        workload: model and batches.
        formats: number formats.
        target: see ``of`` in ``roundoff.budget``.
        around: format of each site of the rounded model that is linearised around.
        sampling: how many projections, and how exact.
        seed: of the sign vectors.
        first: the first batch, which was followed.
    """

    workload: Workload
    formats: Sequence[Format]
    target: str | None
    around: Mapping[str, Format]
    sampling: Sampled
    seed: int
    first: Recording

    @property
    def decides(self) -> bool:
        """True if errors of some site reach a decision."""
        return self.first.decides


@dataclass(frozen=True, slots=True)
class MeasuredBatch:
    """What one batch gave: samples, projections, and elements that are lost, by term."""

    samples: int
    projections: Mapping[TermKey, np.ndarray]
    overflow: Callable[[TermKey], int]


class BudgetRun(ABC):
    """What one measurement accumulates over the batches.

    Attributes:
        measured: how its terms are measured.
    """

    measured: str

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.workload = asked.workload
        self.formats = asked.formats
        self.target = asked.target
        self.sampling = asked.sampling
        self.probes = asked.sampling.probes
        self.generator = torch.Generator().manual_seed(asked.seed)
        self.division: Division | None = None
        self.is_precise = False
        self.batch_noise: BatchNoise | None = None
        self.sites: dict[str, SiteInfo] = {}
        self.batches: list[MeasuredBatch] = []
        self._of_sites: list[SiteProjections] = []
        self.signs: list[DrawnSigns] = []
        self.outputs: list[Any] = []
        self.shapes: dict[str, list[int]] = {}
        self.targets: dict[str, Tensor] = {}
        self.names: tuple[str, ...] = ()
        self.rows = OutputRows([], {}, {})
        self.output: Any = None
        #: forward passes whose calls were named
        self.named_passes = 0

    @abstractmethod
    def batch(self, mode: CallMode, index: int) -> None:
        """Measure one batch."""

    @property
    @abstractmethod
    def is_enough(self) -> bool:
        """True once there are batches enough to compare them."""

    @property
    def is_batched(self) -> bool:
        """True unless probes went back one by one."""
        return True

    def surprises(self, mode: CallMode, index: int) -> bool:
        """Run a batch forward alone; return True if it is to be measured after all."""
        if self.batch_noise is not None and index in self.batch_noise.outputs:
            self.output = self.batch_noise.outputs[index]
            self.keep_output(index)
            return False
        scan = Scan(self.sites, self.formats, self.target)
        mode.handler = scan
        mode.begin()
        forget = self.checkpoint(mode)
        with torch.no_grad(), mode:
            self.forward(index, lambda: scan.wanted_output)
        if scan.surprise:
            forget()
            return True
        self.named_passes += 1
        self.keep_output(index)
        check_finite(self.workload, index, self.targets)
        return False

    @property
    def all_batches(self) -> int:
        """Batches of the workload."""
        return len(self.workload.batches)

    def judge(self) -> None:
        """Stop measuring where the precision is reached by some of the batches."""
        if not (self.sampling.may_stop and self.is_enough):
            return
        if self.error_db() > self.sampling.precision:
            return
        if self.unmeasured and self.batch_noise is None:
            self._look_at_batches()
        self.is_precise = self.error_db() <= self.sampling.precision

    def _look_at_batches(self) -> None:
        """Run all batches in the format that shows best how far they differ."""
        finest = finest_sharing(self._of_sites, self.formats)
        if finest is None:
            return
        asked = self.asked
        real = RealRuns(
            self.workload,
            asked.first,
            asked.around,
            self.rows,
            lambda: Scan(self.sites, self.formats),
            self._measured_batches,
        )
        self.batch_noise = real.noise(finest)

    @property
    def batch_error(self) -> float:
        """What other batches may change a power by, where a scale is shared."""
        if self.batch_noise is None:
            return 0.0
        return self.batch_noise.error(self._measured_batches)

    @property
    def _measured_batches(self) -> list[int]:
        return [drawn.index for drawn in self.signs]

    def error_db(self) -> float:
        """Return the standard error of the SQNR of the sites so far, in dB."""
        for batch in self.batches[len(self._of_sites) :]:
            self._of_sites.append(of_sites(batch.projections))
        return mean_error_db(
            self._of_sites,
            self.unmeasured,
            len(self.rows.names),
            is_exact=self.measured == TRIAL,
            samples=[batch.samples for batch in self.batches],
            batch_errors={
                fmt.name: self.batch_error for fmt in self.formats if fmt.shares_scale
            },
        )

    @property
    def unmeasured(self) -> float:
        """Share of the batches that are not measured so far."""
        return 1 - len(self.batches) / self.all_batches

    def checkpoint(self, mode: CallMode) -> Callable[[], None]:
        """Return what brings everything back to before this batch, and its counts."""
        state = self.generator.get_state()
        restore_model = _restorer(self.workload.model)
        sizes = {
            name: (info.batches, dict(info.sizes)) for name, info in self.sites.items()
        }
        counts = {key: row.count for key, row in mode.excluded.items()}

        def forget() -> None:
            self.generator.set_state(state)
            restore_model()
            for name, info in self.sites.items():
                info.batches, info.sizes = sizes.get(name, (0, {}))
            for key, row in mode.excluded.items():
                row.count = counts.get(key, 0)

        return forget

    def divisions(self, index: int, targets: Sequence[Tensor]) -> Iterable[Division]:
        """Return the ways to divide a batch; the first that told samples apart stays."""
        batch = self.workload.batches[index]
        if self.division is None:
            return divisions(batch, targets)
        chosen = self.division
        return [divide(chosen.way, batch, targets, chosen.preferred)]

    def forward(
        self, index: int, wanted: Callable[[], Tensor | None] = lambda: None
    ) -> list[Tensor]:
        """Run the model on a batch, and return the target tensors.

        ``wanted`` gives the output of the site that is the target.
        """
        output = self.workload.run(self.workload.batches[index])
        return self.take_output(index, output, wanted)

    def take_output(
        self,
        index: int,
        output: Any,
        wanted: Callable[[], Tensor | None] = lambda: None,
    ) -> list[Tensor]:
        """Return the target tensors of an output of the model; see ``forward``."""
        batch = self.workload.batches[index]
        self.output = output
        targets = named_targets(
            self.workload, batch, self.output, self.target, wanted()
        )
        if not self.rows.names:
            self.rows = OutputRows.of(targets, self.workload.judged.apart)
        if self.target is None:
            self.rows.not_measured |= self.workload.judged.left_out(self.output)
        self.targets = self.rows.chosen(targets)
        self.shapes = {name: list(t.shape) for name, t in self.targets.items()}
        return list(self.targets.values())

    def keep_output(self, index: int) -> None:
        """Keep the output for the metric."""
        if self.target is None and self.workload.metric is not None:
            self.outputs[index:] = [detached(self.output)]
        self.output = None

    def add_signal(self, values: Sequence[Tensor], division: Division) -> None:
        """Add the power of the target tensors of a batch."""
        powers = {
            name: division.power(value, number)
            for number, (name, value) in enumerate(
                zip(self.targets, values, strict=True)
            )
        }
        self.rows.add_signal(powers)
        self.targets = {}
        if division.samples > 1 and self.division is None:
            self.division = division

    def budget(self, mode: CallMode) -> Budget:
        """Return everything measured, relative to the power of each output."""
        if not self.rows.measured:
            raise WorkloadError(
                "the target tensor is zero everywhere, so no ratio to it exists",
                where=self.workload.name,
                expected="an output with non-zero values",
            )
        projections = [batch.projections for batch in self.batches]
        probes = max(
            (values.shape[0] for terms in projections for values in terms.values()),
            default=len(self.rows.names),
        )
        rows = self._term_rows(projections, probes)
        batches = len(self.batches)
        sites = tuple(info.measured(batches) for info in self.sites.values())
        facts = self._facts(mode, probes // len(self.rows.names))
        return Budget(term_frame(rows, len(self.rows.measured)), sites, facts)

    def _term_rows(
        self, projections: Sequence[Mapping[TermKey, np.ndarray]], probes: int
    ) -> Iterator[MeasuredTerm]:
        """Yield the row of each term: the columns of all batches.

        ``probes`` are those of all outputs together.
        """
        # a target of one element is exact with one probe; beside batches that have K it
        # takes the signs of K
        signs = [draw_signs((probes, 1), self.generator).numpy() for _ in self.batches]
        pooled = self._pooled_sites(projections)
        for key in dict.fromkeys(key for terms in projections for key in terms):
            is_pooled = key.site in pooled
            columns = [
                _columns(terms.get(key), sign, batch.samples, is_pooled)
                for batch, sign, terms in zip(
                    self.batches, signs, projections, strict=True
                )
            ]
            overflow = sum(batch.overflow(key) for batch in self.batches)
            values = np.concatenate(columns, axis=1)
            values = self.rows.relative(values, probes // len(self.rows.names))
            sources = tuple(key.sources)
            term = Term(
                key.part,
                key.operand,
                sources,
                is_pooled,
                overflow,
                values,
                self.measured,
            )
            yield MeasuredTerm(key.site, key.format, term)

    def _pooled_sites(
        self, projections: Sequence[Mapping[TermKey, np.ndarray]]
    ) -> set[str]:
        """Return the sites whose samples could not be told apart in some batch."""
        return {
            key.site
            for batch, terms in zip(self.batches, projections, strict=True)
            for key, values in terms.items()
            if values.shape[1] != batch.samples
        }

    @property
    def _target_name(self) -> str:
        return self.target or self.workload.judged.part or "output"

    def _facts(self, mode: CallMode, probes: int) -> Measurement:
        passes = max(1, self.named_passes)
        sample_signal = self.rows.sample_signal()
        outputs = self.rows.facts()
        batch_signal = np.mean([output.batch_signal for output in outputs], axis=0)
        excluded = sum(row.count for row in mode.excluded.values())
        model = self.workload.model
        return Measurement(
            version=installed_version(),
            workload=self.workload.name,
            formats=tuple(fmt.name for fmt in self.formats),
            probes=probes,
            seed=self.asked.seed,
            samples=len(sample_signal),
            signal=sum(output.signal for output in outputs),
            workload_batches=len(self.workload.batches),
            batch_samples=tuple(batch.samples for batch in self.batches),
            batch_signal=tuple(batch_signal.tolist()),
            sample_signal=tuple(sample_signal),
            forwards=max(1, mode.position.forwards),
            target=MeasuredTarget(self._target_name, self.shapes),
            outputs=outputs,
            not_measured=self.rows.reasons(),
            around={site: fmt.name for site, fmt in self.asked.around.items()},
            batched=self.is_batched,
            calls=mode.calls + excluded // passes,
            excluded=excluded_calls(mode.excluded.values(), passes),
            environment=environment(model),
            parameters={name: p.numel() for name, p in model.named_parameters()},
            batch_error=self.batch_error,
        )


def _columns(
    projections: np.ndarray | None, signs: np.ndarray, samples: int, pooled: bool
) -> np.ndarray:
    """Return the columns of one batch, shape ``(probes, samples)``, pooled one column.

    Zeros where the site was not called in the batch.
    """
    if projections is None:
        return np.zeros((len(signs), 1 if pooled else samples))
    if pooled:
        projections = projections.sum(1, keepdims=True)
    return projections * signs if len(projections) < len(signs) else projections


def _restorer(model: nn.Module) -> Callable[[], None]:
    """Return what brings random state and buffers back to what they are now."""
    random_state = random_states()
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def restore() -> None:
        set_random_states(random_state)
        forget_graph(model)
        with torch.no_grad():
            for buffer, values in saved:
                buffer.copy_(values)

    return restore


def forget_graph(model: nn.Module) -> None:
    """Detach what the model keeps from one batch to the next.

    So are buffers written in place and states in attributes.
    """
    for leaf in _kept_values(model):
        if (
            isinstance(leaf, Tensor)
            and leaf.grad_fn is not None
            and not leaf._is_view()
        ):
            leaf.detach_()


def _kept_values(model: nn.Module) -> Iterator[Any]:
    """Yield everything that the modules hold in attributes and buffers."""
    for module in model.modules():
        yield from module._buffers.values()
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield value
            elif name not in _REGISTRIES and isinstance(value, _CONTAINERS):
                yield from tree_leaves(value)


#: What a module may keep tensors in, and its own lists, which hold none.
_CONTAINERS = (list, tuple, dict)
_REGISTRIES = frozenset(vars(nn.Module()))
