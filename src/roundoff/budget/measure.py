"""``roundoff.budget``: measure all batches of a workload and collect a ``Budget``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from roundoff.budget.adjoint import (
    FEW_MIXED,
    Probe,
    SiteInfo,
    Way,
    measure_batch,
)
from roundoff.budget.facts import MeasuredTarget, Measurement, excluded_calls
from roundoff.budget.noise_power import Term
from roundoff.budget.outputs import MOST_ROWS, OutputRows
from roundoff.budget.precision import Sampled, mean_error_db
from roundoff.budget.prepared import prepared
from roundoff.budget.refine import refine
from roundoff.budget.samples import Division, divide, divisions
from roundoff.budget.scan import Scan, range_limit
from roundoff.budget.signs import draw_signs
from roundoff.budget.table import Budget, MeasuredTerm, term_frame
from roundoff.budget.targets import metric_curve
from roundoff.budget.terms import TermKey, Terms
from roundoff.budget.trial_signs import DrawnSigns
from roundoff.budget.trials import Recording, record
from roundoff.budget.written_over import Writes, saving
from roundoff.errors import GradientPathError, WorkloadError
from roundoff.formats import Format, parse_format
from roundoff.ops import (
    CallMode,
    watch,
)
from roundoff.packages import installed_version
from roundoff.plan import Plain, check_finite, detached, named_targets
from roundoff.preserve import preserve
from roundoff.record import environment
from roundoff.workload import Workload

#: Batches that are measured at least, so that they can be compared: those of a model
#: whose sites keep samples apart, and of others, which show one number a batch.
FEWEST_BATCHES = 2
FEWEST_MIXED_BATCHES = 4

#: Called with the name of the stage, how much is done, and of how much.
Progress = Callable[[str, int, int], None]


def budget(
    workload: Workload,
    formats: Iterable[str] = ("bf16", "fp16", "fp8_e4m3fn", "int8"),
    *,
    probes: int | None = None,
    precision: float | str | None = None,
    memory: int | None = None,
    of: str | None = None,
    around: Mapping[str, str] | None = None,
    seed: int = 0,
    trials: int | None = None,
    progress: Progress | None = None,
) -> Budget:
    """Measure what rounding each site to each format costs the target tensor.

    One forward and one backward pass of K probes a batch, whatever the number of formats
    and sites. Measuring ends with the batch that reaches the precision; the others run
    forward alone, and are measured too where they call a site that no other called. The
    model runs in evaluation mode, and is left exactly as it was, also after an
    exception.

    Args:
        workload: model, batches and metric.
        formats: names of the number formats.
        probes: sign vectors a sample (K) for each output, drawn for every batch; by
            default as many as the precision needs, from 2 to 96, and from two outputs
            on at most 32 together.
        precision: standard error of a site's SQNR in dB (root mean square over sites)
            at which measuring may end: ``0.6``, ``"0.6dB"``, the default.
        memory: bytes that probe gradients may take; by default 128 MiB, or as much as
            a training step takes for the gradients of parameters.
        of: a part of the output by name, the name of a site, or ``"loss"``; when
            None what the workload is judged by, which is the whole output but for
            numbers beside larger tensors. Each named output has probes of its own.
        around: site to format; linearise around that rounded model instead of the
            unrounded one.
        seed: of the sign vectors.
        trials: most rows (a site in a format) to measure by running the model with that
            site rounded, where first order does not hold, strongest evidence first. By
            default those with strong evidence, a tenth of the rows or four a format at
            most, 24 a format where the model decides by its values; never where
            ``around`` is given.
        progress: called after each batch.

    Raises:
        WorkloadError: the workload cannot be measured.
        GradientPathError: nothing of the target has a gradient.
        NonFiniteError: the unrounded run holds NaN or Inf.
        FormatError: a format is unknown.
    """
    chosen = parse_formats(formats)
    sampling = Sampled.of(probes, precision, memory)
    report = progress or _silent
    rounded = {site: parse_format(name) for site, name in (around or {}).items()}
    with prepared(workload.model):
        with preserve(workload.model):
            first = record(workload, of, 1)
        run = _BudgetRun(workload, chosen, of, rounded, sampling, seed, first.decides)
        with _kept(workload.model, first):
            measured = _measured(run, report)
        if not around and trials != 0:
            with _kept(workload.model, first):
                measured = refine(
                    workload,
                    measured,
                    first,
                    run.signs,
                    run.rows.weight,
                    trials,
                    report,
                )
    if around is None and of is None and workload.metric is not None:
        curve = metric_curve(workload, run.outputs, measured)
        return replace(measured, about=replace(measured.about, metric=curve))
    return measured


def _measured(run: _BudgetRun, report: Progress) -> Budget:
    """Measure as many batches as the precision needs."""
    batches = len(run.workload.batches)
    with watch(run.workload.model, Plain()) as mode:
        for index in range(batches):
            report("budget", index, batches)
            if not run.is_precise or run.surprises(mode, index):
                run.batch(mode, index)
    report("budget", batches, batches)
    return run.budget(mode)


def _kept(model: nn.Module, first: Recording) -> AbstractContextManager[None]:
    """Return what brings the model back to before a block, where that is needed."""
    return nullcontext() if first.is_pure else preserve(model)


def _silent(stage: str, done: int, total: int) -> None:
    """Report no progress."""


def parse_formats(names: Iterable[str]) -> list[Format]:
    """Return formats by name, without repeats, in order.

    fp32, the reference, is left out.
    """
    formats = [parse_format(name) for name in names]
    return list({fmt.name: fmt for fmt in formats if fmt.name != "fp32"}.values())


@dataclass(frozen=True, slots=True)
class _Batch:
    """What one batch gave."""

    samples: int
    terms: Terms
    projections: Mapping[TermKey, np.ndarray]


class _BudgetRun:
    """What one measurement accumulates over the batches."""

    def __init__(
        self,
        workload: Workload,
        formats: list[Format],
        target: str | None,
        around: Mapping[str, Format],
        sampling: Sampled,
        seed: int,
        decides: bool,
    ) -> None:
        self.workload = workload
        self.formats = formats
        self.target = target
        self.around = around
        self.sampling = sampling
        self.probes = sampling.probes
        self.seed = seed
        self.decides = decides
        self.generator = torch.Generator().manual_seed(seed)
        # how probes go back, and what is done about tensors that the model writes over;
        # what fails is done in the next way
        self.way = Way.TOGETHER
        self.writes = Writes.REFUSED
        self.other_ways = [
            (Way.TOGETHER, Writes.COPIED),
            (Way.TOGETHER, Writes.FOLLOWED),
            (Way.ALONE, Writes.FOLLOWED),
        ]
        self.division: Division | None = None
        self.mixed_share = 1.0
        self.is_precise = False
        self.sites: dict[str, SiteInfo] = {}
        self.axes: dict[tuple[str, int], tuple[int, int] | None] = {}
        self.batches: list[_Batch] = []
        self.signs: list[DrawnSigns] = []
        self.outputs: list[Any] = []
        self.shapes: dict[str, list[int]] = {}
        self.targets: dict[str, Tensor] = {}
        self.names: tuple[str, ...] = ()
        self.drawn: tuple[str, ...] = ()
        self.state = self.generator.get_state()
        self.rows = OutputRows([], {}, {})
        self.output: Any = None

    def batch(self, mode: CallMode, index: int) -> None:
        """Measure one batch.

        Where a backward formula cannot be batched, this and later batches go probe by
        probe.
        """
        forget = self._checkpoint(mode)
        while True:
            try:
                probe, values, division = self._attempt(mode, index)
                break
            except RuntimeError as error:
                if isinstance(error, CheckpointError) or not self.other_ways:
                    raise _no_backward(self.workload, index, error) from error
                self.way, self.writes = self.other_ways.pop(0)
                forget()
        _forget_graph(self.workload.model)
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
        projections = probe.terms.projections()
        self.batches.append(_Batch(probe.samples, probe.terms, projections))
        is_number = sum(value.numel() for value in values) == 1
        count = 1 if is_number or self.probes is None else self.probes
        signs = DrawnSigns(index, self.state, count, self.names, self.drawn, division)
        self.signs.append(signs)
        for name in probe.reached:
            self.sites[name].no_path = None
        self._judge()

    def surprises(self, mode: CallMode, index: int) -> bool:
        """Run a batch forward alone; return True if it is to be measured after all."""
        scan = Scan(self.sites, self.formats)
        mode.handler = scan
        mode.begin()
        forget = self._checkpoint(mode)
        with torch.no_grad(), mode:
            self._forward(None, index)
        if scan.surprise:
            forget()
            return True
        self._keep_output(index)
        check_finite(self.workload, index, self.targets)
        return False

    @property
    def fewest_batches(self) -> int:
        """Batches that are measured at least."""
        few = FEWEST_BATCHES if self.mixed_share <= FEW_MIXED else FEWEST_MIXED_BATCHES
        return min(few, self._all_batches)

    @property
    def _all_batches(self) -> int:
        return len(self.workload.batches)

    def _judge(self) -> None:
        """Stop measuring where the precision is reached by some of the batches.

        A model that decides by its values may decide otherwise in a few batches only,
        so none of them stands for the others.
        """
        enough = len(self.batches) >= self.fewest_batches and not self.decides
        if self.sampling.may_stop and enough:
            unmeasured = 1 - len(self.batches) / len(self.workload.batches)
            error = mean_error_db(
                [batch.projections for batch in self.batches],
                unmeasured,
                len(self.rows.names),
            )
            self.is_precise = error <= self.sampling.precision

    def _checkpoint(self, mode: CallMode) -> Callable[[], None]:
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

    def _attempt(
        self, mode: CallMode, index: int
    ) -> tuple[Probe, list[Tensor], Division]:
        is_site = self.target is not None and "/" in self.target
        anchor = torch.tensor(-0.0, requires_grad=True)
        probe = Probe(
            self.formats,
            self.sites,
            self._format_around,
            anchor,
            wanted=self.target if is_site else None,
            axes=self.axes,
            limit=range_limit(self.formats),
        )
        with saving(self.writes, probe.keep):
            values, division = measure_batch(
                mode,
                probe,
                functools.partial(self._forward, probe, index),
                check=functools.partial(self._check, index),
                divided=functools.partial(self._divisions, index),
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
        return self.around.get(site)

    def _divisions(self, index: int, targets: Sequence[Tensor]) -> Iterable[Division]:
        """Return the ways to divide a batch; the first that told samples apart stays."""
        batch = self.workload.batches[index]
        if self.division is None:
            return divisions(batch, targets)
        chosen = self.division
        return [divide(chosen.way, batch, targets, chosen.preferred)]

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
            batches = self._all_batches if self.decides else self.fewest_batches
            if batches < len(self.workload.batches) and mixed_share <= FEW_MIXED:
                most = min(most, fitting // outputs)
            self.probes = self.sampling.probes_for(samples, batches, mixed_share, most)
        return self.probes

    def _spread(self, number: int, vectors: Tensor) -> Tensor:
        return self.rows.spread(list(self.targets)[number], vectors)

    def _forward(self, probe: Probe | None, index: int) -> list[Tensor]:
        """Run the model on a batch, and return the target tensors."""
        batch = self.workload.batches[index]
        self.output = self.workload.run(batch)
        wanted = None if probe is None else probe.wanted_output
        targets = named_targets(self.workload, batch, self.output, self.target, wanted)
        if not self.rows.names:
            self.rows = OutputRows.of(targets, self.workload.judged.apart)
        if self.target is None:
            self.rows.not_measured |= self.workload.judged.left_out(self.output)
        self.targets = self.rows.chosen(targets)
        self.shapes = {name: list(t.shape) for name, t in self.targets.items()}
        return list(self.targets.values())

    def _keep_output(self, index: int) -> None:
        if self.target is None and self.workload.metric is not None:
            self.outputs[index:] = [detached(self.output)]
        self.output = None

    def _check(self, index: int) -> None:
        """Keep the output for the metric, and refuse targets that no error reaches."""
        self._keep_output(index)
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
            overflow = sum(batch.terms.overflow(key) for batch in self.batches)
            values = np.concatenate(columns, axis=1)
            values = self.rows.relative(values, probes // len(self.rows.names))
            sources = tuple(key.sources)
            term = Term(key.part, key.operand, sources, is_pooled, overflow, values)
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
        batches = len(self.batches)
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
            seed=self.seed,
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
            around={site: fmt.name for site, fmt in self.around.items()},
            batched=self.way is Way.TOGETHER,
            calls=mode.calls + excluded // batches,
            excluded=excluded_calls(mode.excluded.values(), batches),
            environment=environment(model),
            parameters={name: p.numel() for name, p in model.named_parameters()},
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
    random_state = torch.get_rng_state()
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def restore() -> None:
        torch.set_rng_state(random_state)
        _forget_graph(model)
        with torch.no_grad():
            for buffer, values in saved:
                buffer.copy_(values)

    return restore


def _forget_graph(model: nn.Module) -> None:
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
