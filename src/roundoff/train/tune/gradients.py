"""The error budget of a training step: what rounding each operator, forward and
backward, costs gradients and loss.

The target is all parameter gradients of each batch and, unless left out, its loss. Each
counts relative to its own power: noise = sum |dG|^2 / sum |G|^2 + sum dL^2 / sum L^2
over the batches, so the SQNR of the budget is below that of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError

from roundoff.budget import (
    Budget,
    Edges,
    ExcludedCalls,
    Kinks,
    MeasuredTarget,
    MeasuredTerm,
    Measurement,
    Progress,
    SiteInfo,
    Term,
    TermKey,
    Terms,
    draw_signs,
    excluded_calls,
    measure_gradients,
    parse_formats,
    term_frame,
)
from roundoff.errors import GradientPathError, NonFiniteError, WorkloadError
from roundoff.formats import Format, parse_format
from roundoff.ops import Call, CallMode, numbers_of, runs, watch
from roundoff.packages import installed_version
from roundoff.plan import Plain
from roundoff.preserve import preserve
from roundoff.record import environment
from roundoff.train.tune.simulated_step import SimulatedFormats, loss_of, trainable
from roundoff.workload import Workload

#: Probes times batches asked for when ``probes`` is not given. One batch has one
#: target, so a power is estimated from this many squares of near-Gaussian projections:
#: sqrt(2/n) is its relative standard error, 0.8 dB for 48.
PROJECTIONS = 48
#: Sign vectors of gradients are long: more batches than this are not needed to know a
#: power.
BATCHES = 4
#: What the errors of autograd for a missing second derivative have in their text.
NO_DERIVATIVE = ("not implemented", "once_differentiable", "twice", "Double backwards")


def gradient_budget(
    workload: Workload,
    formats: Iterable[str] = ("bf16",),
    *,
    loss: bool = True,
    probes: int | None = None,
    around: Mapping[str, str] | None = None,
    batches: int = BATCHES,
    seed: int = 0,
    scale: float = 1.0,
    progress: Progress | None = None,
) -> Budget:
    """Measure what rounding each site to each format, forward and backward, costs the
    gradients (and the ``loss``).

    The model runs in training mode, on the first ``batches`` batches, with attention
    computed by its plain formula (fused kernels have no second derivative). Each of the
    ``probes`` (K, by default 8 to 48 so that K times the number of batches reaches 48)
    takes one backward pass through the backward pass. The returned budget has one part
    more than that of ``roundoff.budget``: ``gradient``. Its plans are for
    ``roundoff.autocast``.

    Derivatives that jump (ReLU) are smeared over the errors that ``around`` makes (site to
    format; by default every site in the first of ``formats``), see ``budget/kinks.py``.

    ``scale`` multiplies the loss in the backward pass, as loss scaling does for fp16: the
    noise is that of the gradients divided by it.

    Where an operator's backward has no derivative, vendor kernels are switched off; what
    still has none passes its gradient on as a constant, and is listed in
    ``about["excluded"]`` with the reason.

    The model is left exactly as it was. Raises ``WorkloadError`` without a loss or
    trainable parameters, ``NonFiniteError`` when loss or gradients are not finite,
    ``GradientPathError`` when nothing can be followed.
    """
    chosen = workload.batches[: max(1, batches)]
    measurement = _Measurement(
        workload=workload,
        formats=parse_formats(formats),
        with_loss=loss,
        batches=chosen,
        probes=_probes(probes, len(chosen)),
        seed=seed,
        around=around,
        scale=scale,
    )
    trainable(workload)
    with preserve(workload.model):
        workload.model.train()
        with watch(workload.model, Plain()) as mode:
            for index in range(len(chosen)):
                if progress is not None:
                    progress("budget", index, len(chosen))
                measurement.measure_batch(mode, index)
        if progress is not None:
            progress("budget", len(chosen), len(chosen))
        return measurement.budget(mode)


def _probes(asked: int | None, batches: int) -> int:
    if asked is None:
        return min(PROJECTIONS, max(8, math.ceil(PROJECTIONS / batches)))
    if asked < 1:
        raise WorkloadError(
            "no probes to draw",
            where="probes",
            expected="a whole number above 0",
            got=str(asked),
        )
    return asked


@dataclass(frozen=True)
class _MeasuredBatch:
    """The errors and the powers of one batch.

    Attributes:
        gradients: term -> its projections on the gradients, shape (probes, 1).
        loss: term -> its error of the loss, shape (1, 1); empty without the loss.
        terms: the terms, for their overflows.
        gradient_power: sum of squares of all gradients.
        loss_power: square of the loss, with its scale.
    """

    gradients: dict[TermKey, np.ndarray]
    loss: dict[TermKey, np.ndarray]
    terms: Terms
    gradient_power: float
    loss_power: float


@dataclass(kw_only=True)
class _Measurement:
    """What the measurement of a budget accumulates over the batches.

    Attributes:
        workload, formats, with_loss, batches, probes, seed, around, scale: see
            ``gradient_budget``.
        generator: of the probes.
        sites: site -> what the budget says of it.
        constants: sites whose backward has no derivative -> the reason.
        vendor: vendor kernels are on.
        mutation: tensors kept for the backward pass may be written over.
        measured: what each batch gave.
    """

    workload: Workload
    formats: list[Format]
    with_loss: bool
    batches: Sequence[Any]
    probes: int
    seed: int
    around: Mapping[str, str] | None
    scale: float
    generator: torch.Generator = field(init=False)
    sites: dict[str, SiteInfo] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    vendor: bool = True
    mutation: bool = False
    measured: list[_MeasuredBatch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def measure_batch(self, mode: CallMode, index: int) -> None:
        """Measure one batch; where a second derivative is missing, without vendor
        kernels, then without that operator.
        """
        state = self.generator.get_state()
        while True:
            self.generator.set_state(state)
            restore = self._counts(mode)
            kinks = self._kinks(mode, index)
            edges = Edges(self.formats, self.sites, kinks, frozenset(self.constants))
            try:
                self.measured.append(self._measure(mode, edges, index))
                return
            except RuntimeError as error:
                if not self._can_try_again(error, edges):
                    raise _failed(self.workload, index, error) from error
                restore()

    def _counts(self, mode: CallMode) -> Callable[[], None]:
        """Keep the counts of sites and exclusions; the returned function restores them."""
        sites = {
            name: (info.batches, dict(info.sizes)) for name, info in self.sites.items()
        }
        excluded = _excluded_counts(mode)

        def restore() -> None:
            for name, info in self.sites.items():
                info.batches, info.sizes = sites.get(name, (0, {}))
            _restore_excluded(mode, excluded)

        return restore

    def _can_try_again(self, error: RuntimeError, edges: Edges) -> bool:
        """Change how the next attempt runs; return False where no other way is left."""
        if isinstance(error, CheckpointError):
            return False
        if "inplace operation" in str(error) and not self.mutation:
            self.mutation = True  # a tensor kept for the backward pass was written over
            return True
        if not _has_no_derivative(error):
            return False
        if self.vendor:
            self.vendor = False
            return True
        closed = edges.closed_sites()
        self.constants |= closed
        return bool(closed)

    def _kinks(self, mode: CallMode, index: int) -> Kinks:
        """Run the formats of ``around`` and observe the inputs of operators with kinks."""
        kinks = Kinks(self.generator)
        excluded = _excluded_counts(mode)
        torch.manual_seed(self.seed + index)
        mode.handler = _KinkObserver(self.around, self.formats, kinks)
        mode.begin()
        with torch.no_grad(), mode:
            loss_of(self.workload, self.batches[index])
        _restore_excluded(mode, excluded)  # the pass that measures counts them
        return kinks

    def _measure(self, mode: CallMode, edges: Edges, index: int) -> _MeasuredBatch:
        torch.manual_seed(self.seed + index)
        weights = trainable(self.workload)
        writable = allow_mutation_on_saved_tensors() if self.mutation else nullcontext()
        with sdpa_kernel(SDPBackend.MATH), vendor_kernels(self.vendor), writable:
            loss, values = measure_gradients(
                mode,
                edges,
                lambda: loss_of(self.workload, self.batches[index]),
                list(weights.values()),
                check=lambda loss: _check(self.workload, index, loss),
                probes=self.probes,
                generator=self.generator,
                scale=self.scale,
            )
        gradients = {
            name: gradient
            for name, gradient in zip(weights, values, strict=True)
            if gradient is not None
        }
        place = f"{self.workload.name}, batch {index}"
        gradient_power = _gradient_power(gradients, edges, place)
        for name in edges.reached:
            self.sites[name].no_path = None
        return _MeasuredBatch(
            gradients=edges.terms.projections(),
            loss=edges.loss.projections() if self.with_loss else {},
            terms=edges.terms,
            gradient_power=gradient_power,
            loss_power=(self.scale * float(loss)) ** 2,
        )

    def budget(self, mode: CallMode) -> Budget:
        """Return the budget: a column for the gradients of each batch, then one for the
        loss of each.
        """
        batches = len(self.measured)
        sites = tuple(info.measured(batches) for info in self.sites.values())
        return Budget(term_frame(self._rows()), sites, self._facts(mode))

    def _facts(self, mode: CallMode) -> Measurement:
        batches = len(self.measured)
        signal = sum(batch.gradient_power for batch in self.measured)
        shares = tuple(batch.gradient_power / signal for batch in self.measured)
        target = "gradients and loss" if self.with_loss else "gradients"
        excluded = mode.excluded.values()
        return Measurement(
            version=installed_version(),
            workload=self.workload.name,
            formats=tuple(f.name for f in self.formats),
            probes=self.probes,
            seed=self.seed,
            samples=batches,
            signal=signal,
            forwards=max(1, mode.position.forwards),
            batch_samples=(1,) * batches,
            batch_signal=shares,
            sample_signal=shares,
            target=MeasuredTarget(target, {}),
            around=dict(self.around or {}),
            batched=False,
            vendor_kernels=self.vendor,
            calls=mode.calls + sum(row.count for row in excluded) // batches,
            excluded=(*excluded_calls(excluded, batches), *self._closed_sites()),
            environment=environment(self.workload.model),
        )

    def _closed_sites(self) -> list[ExcludedCalls]:
        """Return the sites whose backward has no derivative."""
        end = "its backward has no derivative, so errors of gradients end here"
        return [
            ExcludedCalls(self.sites[site].operator, f"{end} ({why})", 1, (site,))
            for site, why in self.constants.items()
        ]

    def _rows(self) -> list[MeasuredTerm]:
        gradient_power = sum(batch.gradient_power for batch in self.measured)
        loss_power = sum(batch.loss_power for batch in self.measured)
        gradient_norm = math.sqrt(gradient_power)
        loss_norm = math.sqrt(loss_power) if loss_power > 0 else 1.0
        shape = (self.probes, len(self.measured))
        signs = draw_signs(shape, self.generator).numpy()
        keys: dict[TermKey, None] = {}
        for batch in self.measured:
            keys |= dict.fromkeys(batch.gradients)
            keys |= dict.fromkeys(batch.loss)
        return [self._row(key, gradient_norm, loss_norm, signs) for key in keys]

    def _row(
        self,
        key: TermKey,
        gradient_norm: float,
        loss_norm: float,
        signs: np.ndarray,
    ) -> MeasuredTerm:
        """Return one row of the table.

        The error of the loss is one exact number: a random sign for each probe keeps it
        apart from the projections of the gradients.
        """
        zeros = np.zeros((self.probes, 1))
        columns = [b.gradients.get(key, zeros) / gradient_norm for b in self.measured]
        if self.with_loss:
            for index, batch in enumerate(self.measured):
                error = batch.loss.get(key, zeros[:1]) / loss_norm
                columns.append(error * signs[:, index : index + 1])
        values = np.concatenate(columns, axis=1)
        overflow = sum(batch.terms.overflow(key) for batch in self.measured)
        term = Term(key.part, key.operand, key.sources, True, overflow, values)
        return MeasuredTerm(key.site, key.format, term)


def _gradient_power(gradients: Mapping[str, Tensor], edges: Edges, place: str) -> float:
    """Sum the squares of all gradients.

    Raises ``NonFiniteError`` where one is not finite, and ``GradientPathError`` where
    there is no power or no way to it.
    """
    finite = numbers_of([g.isfinite().all() for g in gradients.values()])
    bad = [
        name for name, is_finite in zip(gradients, finite, strict=True) if not is_finite
    ]
    if bad:
        raise NonFiniteError(
            "a gradient before any rounding holds NaN or Inf",
            where=place,
            expected="finite gradients in the reference",
            got=f"{bad[0]} and {len(bad) - 1} more" if bad[1:] else bad[0],
            do="roundoff capture the training script, then roundoff overflow, says where it is born",
        )
    total = sum(numbers_of([g.double().square().sum() for g in gradients.values()]))
    if edges.reached and total:
        return total
    what = "every gradient is zero, so no ratio to it exists"
    if not edges.reached:
        what = "no gradient reaches the parameters, so no rounding error can be followed to it"
    raise GradientPathError(
        what,
        where=place,
        expected="a loss that depends on the parameters",
        do="remove detach, no_grad, item() and numpy from forward and loss",
    )


def _excluded_counts(mode: CallMode) -> dict[Any, int]:
    return {key: row.count for key, row in mode.excluded.items()}


def _restore_excluded(mode: CallMode, counts: Mapping[Any, int]) -> None:
    for key, row in mode.excluded.items():
        row.count = counts.get(key, 0)


class _KinkObserver(SimulatedFormats):
    """The handler that runs ``around`` (None: every site in the first format) and shows
    its inputs to ``kinks``.
    """

    def __init__(
        self, around: Mapping[str, str] | None, formats: list[Format], kinks: Kinks
    ) -> None:
        super().__init__({s: parse_format(f) for s, f in (around or {}).items()})
        self.everywhere = formats[0] if around is None and formats else None
        self.kinks = kinks

    def format_of(self, call: Call) -> Format | None:
        """Return the format of this call; show its input to the kinks on the way."""
        self.kinks.record(call)
        fmt = self.everywhere
        if fmt is None:
            return super().format_of(call)
        return fmt if runs(call, fmt) is None else None


@contextmanager
def vendor_kernels(enabled: bool) -> Iterator[None]:
    """Switch oneDNN and cuDNN off inside, unless ``enabled``.

    Their fused recurrent layers have no second derivative.
    """
    backends: Any = torch.backends
    with ExitStack() as stack:
        # not their flags(), which would also set TF32
        for backend in () if enabled else (backends.mkldnn, backends.cudnn):
            stack.callback(setattr, backend, "enabled", backend.enabled)
            backend.enabled = False
        yield


def _has_no_derivative(error: RuntimeError) -> bool:
    """Return True if autograd says that a backward cannot be differentiated."""
    text = str(error)
    return any(phrase in text for phrase in NO_DERIVATIVE)


def _check(workload: Workload, index: int, loss: Tensor) -> None:
    where = f"{workload.name}, batch {index}"
    if not bool(loss.isfinite().all()):
        raise NonFiniteError(
            "the loss before any rounding is not finite",
            where=where,
            expected="a finite loss",
            got=str(float(loss.detach())),
            do="check data and learning rate: rounding is not the cause",
        )


def _failed(workload: Workload, index: int, error: RuntimeError) -> WorkloadError:
    do = "run loss(forward(model, batch), batch).backward() by itself to debug it"
    if isinstance(error, CheckpointError):
        do = "turn gradient checkpointing off: operators must not be called again in the backward pass"
    elif isinstance(error, torch.OutOfMemoryError):
        do = "give smaller batches: the backward pass through the backward pass keeps both"
    return WorkloadError(
        "the backward pass through the gradients failed",
        where=f"{workload.name}, batch {index}",
        expected="a training step that can be differentiated twice",
        got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
        do=do,
    )
