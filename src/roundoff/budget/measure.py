"""``roundoff.budget``: run the adjoint measurement over all batches of a workload and collect a ``Budget``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl
import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointError

from roundoff.budget.adjoint import Probe, SiteInfo, measure_batch
from roundoff.budget.signs import draw_signs
from roundoff.budget.table import TERM_SCHEMA, Budget, Term, power
from roundoff.budget.targets import metric_curve
from roundoff.budget.terms import TermKey, Terms
from roundoff.errors import GradientPathError, WorkloadError
from roundoff.formats import Format, parse_format
from roundoff.ops import CallMode, watch
from roundoff.packages import installed_version
from roundoff.plan import Plain, check_finite, detached, named_targets
from roundoff.preserve import preserve
from roundoff.record import environment
from roundoff.workload import Workload

#: Projections asked for when ``probes`` is not given: the relative standard error of a power estimated from n
#: products of near-Gaussian projections is sqrt(2/n), 0.4 dB for 256.
PROJECTIONS = 256

Progress = Callable[[str, int, int], None]


def budget(
    workload: Workload,
    formats: Iterable[str] = ("bf16", "fp16", "fp8_e4m3fn", "int8"),
    *,
    probes: int | None = None,
    target: str | None = None,
    around: Mapping[str, str] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Budget:
    """Measure what rounding each site to each format costs the target tensor.

    ``probes`` (K) sign vectors a sample; by default 2 to 16, so that K times the number of samples reaches
    256 (0.4 dB standard error on a site). ``target`` is a part of the output by name (all of it when None), the
    name of a site, or ``"loss"``. ``around`` (site to format) linearises around that rounded model instead of
    the unrounded one. One forward and one batched backward pass a batch, whatever the number of formats and
    sites; where an operator has no batched backward, K passes one after the other.

    The model runs in evaluation mode, and is left exactly as it was, also after an exception. Raises
    ``WorkloadError``, ``GradientPathError`` when nothing of the target has a gradient, ``NonFiniteError`` when the
    unrounded run holds NaN or Inf, ``FormatError``.
    """
    chosen = parse_formats(formats)
    if probes is not None and probes < 1:
        raise WorkloadError(
            "no probes to draw",
            where="probes",
            expected="a whole number above 0",
            got=str(probes),
        )
    run = _Run(
        workload,
        chosen,
        target,
        {s: parse_format(f) for s, f in (around or {}).items()},
        probes,
        seed,
    )
    with preserve(workload.model):
        workload.model.eval()
        for parameter in (
            workload.model.parameters()
        ):  # a scripted module has no requires_grad_ of its own
            parameter.requires_grad_(False)
        with watch(workload.model, Plain()) as mode:
            for index in range(len(workload.batches)):
                if progress is not None:
                    progress("budget", index, len(workload.batches))
                run.batch(mode, index)
        if progress is not None:
            progress("budget", len(workload.batches), len(workload.batches))
        result = run.budget(mode)
    if around is None and target is None and workload.metric is not None:
        result.about["metric"] = metric_curve(workload, run.outputs, result)
    return result


def parse_formats(names: Iterable[str]) -> list[Format]:
    """Formats by name, without repeats, in order; fp32, the reference, is left out."""
    found = {(fmt := parse_format(name)).name: fmt for name in names}
    found.pop("fp32", None)
    return list(found.values())


@dataclass(frozen=True)
class _Batch:
    samples: int
    signal: list[float]
    terms: Terms


class _Run:
    """What one measurement accumulates over the batches."""

    def __init__(
        self,
        workload: Workload,
        formats: list[Format],
        target: str | None,
        around: dict[str, Format],
        probes: int | None,
        seed: int,
    ) -> None:
        self.workload, self.formats, self.target, self.around = (
            workload,
            formats,
            target,
            around,
        )
        self.probes = probes
        self.generator = torch.Generator().manual_seed(seed)
        self.seed = seed
        self.batched, self.mutation = True, False
        # what to try, in turn, where an operator's backward cannot be batched, or needs a tensor that the model has
        # written over since (fine in inference, an error in training)
        self.ways = [(True, True), (False, True)]
        self.sites: dict[str, SiteInfo] = {}
        self.axes: dict[tuple[str, int], tuple[int, int] | None] = {}
        self.done: list[_Batch] = []
        self.outputs: list[Any] = []
        self.shapes: dict[str, list[int]] = {}
        self.found: dict[str, Tensor] = {}
        self.output: Any = None
        self.signs: list[np.ndarray] = []

    def batch(self, mode: CallMode, index: int) -> None:
        """Measure one batch; where a backward formula cannot be batched, this and later ones probe by probe."""
        state = self.generator.get_state()
        undo = _undo(self.workload.model)
        sizes = {
            name: (info.batches, dict(info.sizes)) for name, info in self.sites.items()
        }
        counts = {key: row.count for key, row in mode.excluded.items()}
        while True:
            try:
                probe, values = self._attempt(mode, index)
                break
            except RuntimeError as error:
                if isinstance(error, CheckpointError) or not self.ways:
                    raise _no_backward(self.workload, index, error) from error
                self.batched, self.mutation = self.ways.pop(0)
                self.generator.set_state(state)
                undo()
                for (
                    name,
                    info,
                ) in self.sites.items():  # what the attempt counted is counted again
                    info.batches, info.sizes = sizes.get(name, (0, {}))
                for key, row in mode.excluded.items():
                    row.count = counts.get(key, 0)
        _forget_graph(self.workload.model)
        signal = torch.zeros(probe.samples, dtype=torch.float64)
        for value in values:
            signal += value.double().square().reshape(probe.samples, -1).sum(1).cpu()
        self.done.append(_Batch(probe.samples, signal.tolist(), probe.terms))
        for name in probe.reached:
            self.sites[name].no_path = None

    def _attempt(self, mode: CallMode, index: int) -> tuple[Probe, list[Tensor]]:
        wanted = self.target if self.target is not None and "/" in self.target else None
        anchor = torch.tensor(-0.0, requires_grad=True)
        probe = Probe(
            self.formats,
            self.sites,
            self.around.get,
            anchor,
            wanted=wanted,
            axes=self.axes,
        )
        with allow_mutation_on_saved_tensors() if self.mutation else nullcontext():
            values = measure_batch(
                mode,
                probe,
                functools.partial(self._forward, probe, index),
                check=functools.partial(self._check, index),
                probes=self._count,
                generator=self.generator,
                learn_axes=not self.axes,
                batched=self.batched,
                parameters=sum(p.nbytes for p in self.workload.model.parameters()),
            )
        return probe, values

    def _count(self, samples: int) -> int:
        """K, chosen at the first batch."""
        if self.probes is None:
            self.probes = min(
                16,
                max(2, math.ceil(PROJECTIONS / (samples * len(self.workload.batches)))),
            )
        return self.probes

    def _forward(self, probe: Probe, index: int) -> list[Tensor]:
        batch = self.workload.batches[index]
        output = self.workload.run(batch)
        found = named_targets(self.workload, batch, output, self.target, probe.found)
        self.shapes = {name: list(t.shape) for name, t in found.items()}
        self.found, self.output = found, output
        return list(found.values())

    def _check(self, index: int) -> None:
        found = self.found
        if self.target is None and self.workload.metric is not None:
            self.outputs[index:] = [detached(self.output)]
        self.output = None
        check_finite(self.workload, index, found)
        if not any(t.requires_grad for t in found.values()):
            raise GradientPathError(
                "no gradient reaches the output, so no rounding error can be followed to it",
                where=f"{self.workload.name}, batch {index}",
                expected="an output computed from the model's values by differentiable operators",
                got=", ".join(
                    f"{n}: {t.dtype}, shape {tuple(t.shape)}, no gradient"
                    for n, t in found.items()
                ),
                do="remove torch.no_grad, inference_mode, detach, numpy, TorchScript or argmax; return the scores",
            )

    def budget(self, mode: CallMode) -> Budget:
        """Everything measured, relative to the power of the target."""
        signal = sum(sum(b.signal) for b in self.done)
        if signal <= 0:
            raise WorkloadError(
                "the target tensor is zero everywhere, so no ratio to it exists",
                where=self.workload.name,
                expected="an output with non-zero values",
            )
        found = [b.terms.projections() for b in self.done]
        keys = dict.fromkeys(key for terms in found for key in terms)
        self.probes = max(
            (t.shape[0] for terms in found for t in terms.values()), default=1
        )
        # a target of one element is exact with one probe; beside batches that have K it takes the signs of K
        self.signs = [
            draw_signs((self.probes, 1), self.generator).numpy() for _ in self.done
        ]
        pooled = {k.site: False for k in keys}
        for b, measured in zip(self.done, found, strict=True):
            for key, values in measured.items():
                pooled[key.site] |= values.shape[1] != b.samples
        rows = [
            self._row(
                key, [m.get(key) for m in found], pooled[key.site], math.sqrt(signal)
            )
            for key in keys
        ]
        terms = pl.DataFrame(rows, schema=TERM_SCHEMA, orient="row")
        batches = len(self.done)
        sites = [
            asdict(info) | {"sizes": {k: v / batches for k, v in info.sizes.items()}}
            for info in self.sites.values()
        ]
        for site in sites:
            site["params"], site["tied"] = list(site["params"]), list(site["tied"])
        per_sample = [s / signal for b in self.done for s in b.signal]
        about = {
            "version": installed_version(),
            "workload": self.workload.name,
            "formats": [f.name for f in self.formats],
            "probes": self.probes,
            "seed": self.seed,
            "samples": len(per_sample),
            "signal": signal,
            "batch_samples": [b.samples for b in self.done],
            "forwards": max(1, mode.forwards),
            "batch_signal": [sum(b.signal) / signal for b in self.done],
            "sample_signal": per_sample,
            "target": {"name": self.target or "output", "tensors": self.shapes},
            "around": {s: f.name for s, f in self.around.items()},
            "batched": self.batched,
            "calls": mode.calls
            + sum(e.count for e in mode.excluded.values()) // batches,
            "excluded": [
                asdict(e) | {"count": math.ceil(e.count / batches)}
                for e in mode.excluded.values()
            ],
            "parameters": {
                name: p.numel() for name, p in self.workload.model.named_parameters()
            },
            "environment": environment(self.workload.model),
        }
        return Budget(terms, sites, about)

    def _row(
        self, key: TermKey, found: list[np.ndarray | None], pooled: bool, scale: float
    ) -> tuple[Any, ...]:
        columns: list[np.ndarray] = []
        for b, signs, part in zip(self.done, self.signs, found, strict=True):
            if part is None:  # this site was not called in this batch
                part = np.zeros((len(signs), 1 if pooled else b.samples))
            part = part.sum(1, keepdims=True) if pooled else part
            columns.append(part * signs if len(part) < len(signs) else part)
        values = np.concatenate(columns, axis=1) / scale
        overflow = sum(b.terms.overflow(key) for b in self.done)
        sources = tuple(key.sources)
        noise, stderr = power(
            [Term(key.part, key.operand, sources, pooled, overflow, values)]
        )
        return (
            key.site,
            key.format,
            key.part,
            key.operand,
            list(sources),
            pooled,
            overflow,
            noise,
            stderr,
            np.asarray(values, dtype=np.float32).ravel().tolist(),
        )


def _undo(model: nn.Module) -> Callable[[], None]:
    """What brings random state and buffers back to what they are now, for another attempt at the same batch."""
    random = torch.get_rng_state()
    saved = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def undo() -> None:
        torch.set_rng_state(random)
        _forget_graph(model)
        with torch.no_grad():
            for buffer, values in saved:
                buffer.copy_(values)

    return undo


def _forget_graph(model: nn.Module) -> None:
    """Detach what the model keeps from one batch to the next: buffers written in place, states in attributes."""
    for module in model.modules():
        for kept in (vars(module), module._buffers):
            for value in kept.values():
                for leaf in tree_leaves(value):
                    if (
                        isinstance(leaf, Tensor)
                        and leaf.grad_fn is not None
                        and not leaf._is_view()
                    ):
                        leaf.detach_()


def _no_backward(workload: Workload, index: int, error: RuntimeError) -> WorkloadError:
    advice = "run backward() on the sum of the plain model's output to debug it"
    if isinstance(error, CheckpointError):
        advice = "turn gradient checkpointing off: operators must not be called again in the backward pass"
    elif isinstance(error, torch.OutOfMemoryError):
        advice = "give smaller batches"
    return WorkloadError(
        "the backward pass through the model failed",
        where=f"{workload.name}, batch {index}",
        expected="an output that can be differentiated",
        got=f"{type(error).__name__}: {str(error).splitlines()[0]}",
        do=advice,
    )
