"""The error budget of a training step: what rounding each operator, forward and backward, costs gradients and loss.

The target is all parameter gradients of each batch and, unless left out, its loss. Each counts relative to its own power:
noise = sum |dG|^2 / sum |G|^2 + sum dL^2 / sum L^2 over the batches, so the SQNR of the budget is below that of both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError

from roundoff.budget import (
    TERM_SCHEMA,
    Budget,
    Edges,
    Kinks,
    Progress,
    SiteInfo,
    Term,
    TermKey,
    Terms,
    measure_gradients,
    parse_formats,
    power,
)
from roundoff.errors import GradientPathError, NonFiniteError, WorkloadError
from roundoff.formats import Format, parse_format
from roundoff.ops import Call, CallMode, runs, watch
from roundoff.packages import installed_version
from roundoff.plan import Plain
from roundoff.preserve import preserve
from roundoff.record import environment
from roundoff.train.tune.rounded_step import Straight, loss_of, trainable
from roundoff.workload import Workload

#: Probes times batches asked for when ``probes`` is not given. One batch has one target, so a power is estimated from
#: this many squares of near-Gaussian projections: sqrt(2/n) is its relative standard error, 0.8 dB for 48.
PROJECTIONS = 48
#: Sign vectors of gradients are long: more batches than this are not needed to know a power.
BATCHES = 4


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
    """Measure what rounding each site to each format, forward and backward, costs the gradients (and the ``loss``).

    The model runs in training mode, on the first ``batches`` batches, with attention computed by its plain formula (fused
    kernels have no second derivative). Each of the ``probes`` (K, by default 8 to 48 so that K times the number of
    batches reaches 48) takes one backward pass through the backward pass. The returned budget has a part more than that
    of ``roundoff.budget``: ``gradient``. Its plans are for ``roundoff.autocast``.

    Derivatives that jump (ReLU) are smeared over the errors that ``around`` makes (site to format; by default every site
    in the first of ``formats``), see ``attribute/kinks.py``.

    ``scale`` multiplies the loss in the backward pass, as loss scaling does for fp16: the noise is that of the gradients
    divided by it.

    Where an operator's backward has no derivative, vendor kernels are switched off; what still has none passes its
    gradient on as a constant, and is listed in ``about["excluded"]`` with the reason.

    The model is left exactly as it was. Raises ``WorkloadError`` without a loss or trainable parameters,
    ``NonFiniteError`` when loss or gradients are not finite, ``GradientPathError`` when nothing can be followed.
    """
    run = _Run(
        workload,
        parse_formats(formats),
        loss,
        workload.batches[: max(1, batches)],
        probes,
        seed,
        around,
        scale,
    )
    trainable(workload)
    with preserve(workload.model):
        workload.model.train()
        with watch(workload.model, Plain()) as mode:
            for index in range(len(run.batches)):
                if progress is not None:
                    progress("budget", index, len(run.batches))
                run.batch(mode, index)
        if progress is not None:
            progress("budget", len(run.batches), len(run.batches))
        return run.budget(mode)


class _Run:
    """What one measurement accumulates over the batches."""

    def __init__(
        self,
        workload: Workload,
        formats: list[Format],
        loss: bool,
        batches: list[Any],
        probes: int | None,
        seed: int,
        around: Mapping[str, str] | None,
        scale: float,
    ) -> None:
        self.workload, self.formats, self.with_loss, self.batches, self.seed = (
            workload,
            formats,
            loss,
            batches,
            seed,
        )
        self.probes = (
            probes
            if probes is not None
            else min(PROJECTIONS, max(8, math.ceil(PROJECTIONS / len(batches))))
        )
        if self.probes < 1:
            raise WorkloadError(
                "no probes to draw",
                where="probes",
                expected="a whole number above 0",
                got=str(probes),
            )
        self.generator = torch.Generator().manual_seed(seed)
        self.around, self.scale = around, scale
        self.sites: dict[str, SiteInfo] = {}
        self.cut: dict[str, str] = {}
        self.vendor, self.mutation = True, False
        self.found: list[
            tuple[dict[TermKey, np.ndarray], dict[TermKey, np.ndarray]]
        ] = []
        self.overflow: list[Terms] = []
        self.signal: list[tuple[float, float]] = []

    def batch(self, mode: CallMode, index: int) -> None:
        """Measure one batch; where a second derivative is missing, without vendor kernels, then without that operator."""
        state = self.generator.get_state()
        while True:
            self.generator.set_state(state)
            known = {
                name: (info.batches, dict(info.sizes))
                for name, info in self.sites.items()
            }
            counts = {key: row.count for key, row in mode.excluded.items()}
            edges = Edges(
                self.formats, self.sites, self._kinks(mode, index), frozenset(self.cut)
            )
            try:
                self._measure(mode, edges, index)
                return
            except RuntimeError as error:
                if not self._relent(error, edges):
                    raise _failed(self.workload, index, error) from error
                for (
                    name,
                    info,
                ) in self.sites.items():  # what this attempt counted is counted again
                    info.batches, info.sizes = known.get(name, (0, {}))
                for key, row in mode.excluded.items():
                    row.count = counts.get(key, 0)

    def _relent(self, error: RuntimeError, edges: Edges) -> bool:
        """Whether there is another way to try after this error."""
        if isinstance(error, CheckpointError):
            return False
        if "inplace operation" in str(error) and not self.mutation:
            self.mutation = (
                True  # something that was kept for the backward pass was written over
            )
        elif not _underivable(error):
            return False
        elif self.vendor:
            self.vendor = False
        else:
            closed = edges.closed_sites()
            self.cut |= closed
            return bool(closed)
        return True

    def _kinks(self, mode: CallMode, index: int) -> Kinks:
        """What the formats of ``around`` make of the inputs of operators with kinks."""
        kinks = Kinks(self.generator)
        handler = _Shifted(self.around, self.formats, kinks)
        counts = {key: row.count for key, row in mode.excluded.items()}
        torch.manual_seed(self.seed + index)
        mode.handler = handler
        mode.begin()
        with torch.no_grad(), mode:
            loss_of(self.workload, self.batches[index])
        for key, row in mode.excluded.items():  # the pass that measures counts them
            row.count = counts.get(key, 0)
        return kinks

    def _measure(self, mode: CallMode, edges: Edges, index: int) -> None:
        torch.manual_seed(self.seed + index)
        weights = trainable(self.workload)
        kept = allow_mutation_on_saved_tensors() if self.mutation else nullcontext()
        with sdpa_kernel(SDPBackend.MATH), vendor_kernels(self.vendor), kept:
            loss, gradients = measure_gradients(
                mode,
                edges,
                lambda: loss_of(self.workload, self.batches[index]),
                list(weights.values()),
                check=lambda loss: _check(self.workload, index, loss),
                probes=self.probes,
                generator=self.generator,
                scale=self.scale,
            )
        bad = [
            n
            for n, g in zip(weights, gradients, strict=True)
            if g is not None and not bool(g.isfinite().all())
        ]
        if bad:
            raise NonFiniteError(
                "a gradient before any rounding holds NaN or Inf",
                where=f"{self.workload.name}, batch {index}",
                expected="finite gradients in the reference",
                got=f"{bad[0]} and {len(bad) - 1} more" if bad[1:] else bad[0],
                do="roundoff capture the training script, then roundoff overflow, says where it is born",
            )
        square = sum(
            float(g.double().square().sum()) for g in gradients if g is not None
        )
        if not edges.reached or square == 0:
            raise GradientPathError(
                "no gradient reaches the parameters, so no rounding error can be followed to it"
                if not edges.reached
                else "every gradient is zero, so no ratio to it exists",
                where=f"{self.workload.name}, batch {index}",
                expected="a loss that depends on the parameters",
                do="remove detach, no_grad, item() and numpy from forward and loss",
            )
        for name in edges.reached:
            self.sites[name].no_path = None
        self.found.append(
            (
                edges.terms.projections(),
                edges.loss.projections() if self.with_loss else {},
            )
        )
        self.overflow.append(edges.terms)
        self.signal.append((square, (self.scale * float(loss)) ** 2))

    def budget(self, mode: CallMode) -> Budget:
        """Everything measured: a column for the gradients of each batch, then one for the loss of each."""
        gradient, loss = (sum(s[i] for s in self.signal) for i in (0, 1))
        scales = (math.sqrt(gradient), math.sqrt(loss) if loss > 0 else 1.0)
        signs = np.random.default_rng(self.seed).choice(
            (-1.0, 1.0), (self.probes, len(self.found))
        )
        keys = dict.fromkeys(
            key for found in self.found for terms in found for key in terms
        )
        rows = [self._row(key, scales, signs) for key in keys]
        batches = len(self.found)
        sites = [
            asdict(info)
            | {
                "sizes": {k: v / batches for k, v in info.sizes.items()},
                "params": list(info.params),
                "tied": list(info.tied),
            }
            for info in self.sites.values()
        ]
        shares = [s[0] / gradient for s in self.signal]
        excluded = [
            asdict(e) | {"count": math.ceil(e.count / batches)}
            for e in mode.excluded.values()
        ]
        for site, why in self.cut.items():
            reason = f"its backward has no derivative, so errors of gradients end here ({why})"
            excluded.append(
                {
                    "operator": self.sites[site].operator,
                    "reason": reason,
                    "count": 1,
                    "examples": [site],
                }
            )
        about = {
            "version": installed_version(),
            "workload": self.workload.name,
            "formats": [f.name for f in self.formats],
            "probes": self.probes,
            "seed": self.seed,
            "samples": batches,
            "signal": gradient,
            "forwards": max(1, mode.forwards),
            "batch_samples": [1] * batches,
            "batch_signal": shares,
            "sample_signal": shares,
            "target": {
                "name": "gradients and loss" if self.with_loss else "gradients",
                "tensors": {},
            },
            "around": dict(self.around or {}),
            "batched": False,
            "vendor_kernels": self.vendor,
            "calls": mode.calls
            + sum(e.count for e in mode.excluded.values()) // batches,
            "excluded": excluded,
            "environment": environment(self.workload.model),
        }
        return Budget(
            pl.DataFrame(rows, schema=TERM_SCHEMA, orient="row"), sites, about
        )

    def _row(
        self, key: TermKey, scales: tuple[float, float], signs: np.ndarray
    ) -> tuple[Any, ...]:
        nothing = np.zeros((self.probes, 1))
        columns = [g.get(key, nothing) / scales[0] for g, _ in self.found]
        if self.with_loss:  # one number, exact: a random sign keeps it apart from the probes of the gradients
            for column, (_, found) in enumerate(self.found):
                columns.append(
                    found.get(key, nothing[:1])
                    / scales[1]
                    * signs[:, column : column + 1]
                )
        values = np.concatenate(columns, axis=1)
        overflow = sum(terms.overflow(key) for terms in self.overflow)
        noise, stderr = power(
            [Term(key.part, key.operand, key.sources, True, overflow, values)]
        )
        return (
            key.site,
            key.format,
            key.part,
            key.operand,
            list(key.sources),
            True,
            overflow,
            noise,
            stderr,
            np.asarray(values, dtype=np.float32).ravel().tolist(),
        )


class _Shifted(Straight):
    """The handler that runs ``around`` (None: every site in the first format) and shows its inputs to ``kinks``."""

    def __init__(
        self, around: Mapping[str, str] | None, formats: list[Format], kinks: Kinks
    ) -> None:
        super().__init__({s: parse_format(f) for s, f in (around or {}).items()})
        self.everywhere = formats[0] if around is None and formats else None
        self.kinks = kinks

    def format_of(self, call: Call) -> Format | None:
        """The format of this call; its input is shown on the way."""
        self.kinks.seen(call)
        fmt = self.everywhere
        return (
            super().format_of(call)
            if fmt is None
            else fmt
            if runs(call, fmt) is None
            else None
        )


@contextmanager
def vendor_kernels(enabled: bool) -> Iterator[None]:
    """With ``enabled`` False: without oneDNN and cuDNN, whose fused recurrent layers have no second derivative."""
    with ExitStack() as stack:
        if not enabled:
            backends: Any = torch.backends
            for backend in (
                backends.mkldnn,
                backends.cudnn,
            ):  # their flags() would also set TF32
                stack.callback(setattr, backend, "enabled", backend.enabled)
                backend.enabled = False
        yield


def _underivable(error: RuntimeError) -> bool:
    """Whether autograd says that a backward cannot be differentiated."""
    text = str(error)
    return any(
        part in text
        for part in (
            "not implemented",
            "once_differentiable",
            "twice",
            "Double backwards",
        )
    )


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
