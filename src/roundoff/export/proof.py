"""Proof: what ONNX Runtime computes from the exported file, against the fp32 model and against our simulation.

Both files run on the evaluation set: the candidate's metric, how often it decides as the fp32 model does, how far its output
and each quantized value inside are from fp32 and from the simulation, which kernels it runs, how fast, how large.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.attribute.target import named_tensors
from roundoff.capture.calls import Call, watch
from roundoff.export.deployed import Deployed
from roundoff.export.kernels import Site, became
from roundoff.export.onnx import Traced, export_onnx, write
from roundoff.export.runtime import Kernels, Latency, kernels, latency, run, session
from roundoff.export.tally import Agreement, Tally
from roundoff.plan.rounded import replaced
from roundoff.quantize.model import Passing, QuantizedModel
from roundoff.workload import Workload, preserve

__all__ = ["Proof", "SiteProof", "prove"]


@dataclass(frozen=True)
class SiteProof:
    """One quantized value in the file, on the whole evaluation set.

    Attributes:
        name: the value, as the quantizer is called.
        format: of its codes.
        fp32_db: SQNR against the fp32 run; None where that has no value of this name and shape.
        simulation_db: SQNR against the simulation; infinite where all values are equal.
        codes: greatest difference of a code from the simulation's; None where its scale is chosen while the model runs.
        differing: share of codes that differ.
    """

    name: str
    format: str
    fp32_db: float | None
    simulation_db: float
    codes: int | None
    differing: float | None


@dataclass(frozen=True)
class Proof:
    """What was measured on the file.

    Attributes:
        samples: how many rows of outputs the set has.
        metric, metric_fp32: the workload's metric of this file and of the fp32 file; None without one.
        agreement: share of rows of the output with the same arg-max over the last axis as in fp32; None with one column.
        sqnr_db: of the output against fp32.
        simulation_db: of the output against our simulation.
        sites: one row for each quantized value, in the order of the run.
        became: one row for each quantized call: the kernel that runs it, or why none with integers does.
        kernels: the optimised graph that ONNX Runtime runs.
        latency: seconds of both files; None where not asked for.
        bytes, bytes_fp32: sizes of the files.
        notes: quantizers that ONNX cannot express, or that are slow in ONNX Runtime, with the reason.
    """

    samples: int
    metric: float | None
    metric_fp32: float | None
    agreement: float | None
    sqnr_db: float
    simulation_db: float
    sites: tuple[SiteProof, ...]
    became: tuple[Site, ...]
    kernels: Kernels
    latency: Latency | None
    bytes: int
    bytes_fp32: int
    notes: dict[str, str]

    @property
    def codes(self) -> int:
        """The greatest difference of any code from the simulation's: 1 or 0 where both agree."""
        return max((site.codes for site in self.sites if site.codes is not None), default=0)

    @property
    def differing(self) -> float:
        """The largest share of differing codes of a value."""
        return max((site.differing for site in self.sites if site.differing is not None), default=0.0)


def prove(
    workload: Workload,
    quantized: QuantizedModel,
    path_quantized: str | Path,
    path_fp32: str | Path,
    *,
    exact: nn.Module | None = None,
    pack: bool = False,
    seconds: float = 3.0,
) -> Proof:
    """Write both files, run them in ONNX Runtime on the evaluation set (``held_out``, or else the batches), and measure.

    Args:
        workload: with the fp32 model, its metric and batches.
        quantized: the simulation of the quantized model.
        path_quantized: of the file to write and prove.
        path_fp32: of the file of the fp32 model, which is written too.
        exact: the model in full precision whose values inside are those of the quantized one; by default the workload's own.
            Give the folded and equalised model where scales of channels were moved: the values inside are others then.
        pack: as ``export_onnx`` has it.
        seconds: how long to race both files on the first batch; 0: not at all.

    Raises:
        QuantizationError: as ``export_onnx``, or onnxruntime is not installed.
    """
    deployed = Deployed(quantized)
    export_onnx(workload, deployed, path_quantized, pack=pack)
    plain = write(workload, workload.model, path_fp32)
    batches = workload.held_out or workload.batches
    with tempfile.TemporaryDirectory() as folder:
        probed = write(workload, Deployed(quantized, probe=True), Path(folder) / "probed.onnx", pack=pack)
        measured = _measure(workload, quantized, exact or workload.model, batches, probed, Path(folder) / "probed.onnx")
    judged = workload.with_model(workload.model)
    judged.batches = batches
    outputs, outputs_fp32 = _outputs(workload, batches, plain, measured, path_quantized, path_fp32)
    found = kernels(path_quantized)
    agreement = Agreement()
    for ours, theirs, simulated in zip(outputs, outputs_fp32, measured.simulated, strict=True):
        agreement.add(named_tensors(ours), named_tensors(theirs), named_tensors(simulated))
    raced = None
    if seconds > 0:
        raced = latency(path_fp32, path_quantized, _feed(plain, batches[0]), seconds)
    return Proof(
        samples=agreement.samples,
        metric=judged.evaluate(outputs, outputs_fp32),
        metric_fp32=judged.evaluate(outputs_fp32, outputs_fp32),
        agreement=agreement.share,
        sqnr_db=agreement.fp32.db,
        simulation_db=agreement.simulation.db,
        sites=tuple(measured.rows(quantized)),
        became=became(quantized, deployed, found),
        kernels=found,
        latency=raced,
        bytes=Path(path_quantized).stat().st_size,
        bytes_fp32=Path(path_fp32).stat().st_size,
        notes={**deployed.slow, **deployed.reasons},
    )


class _Measured:
    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = {}
        self.simulated: list[Any] = []

    def rows(self, quantized: QuantizedModel) -> list[SiteProof]:
        found = []
        for name, tally in self.tallies.items():
            fp32 = tally.fp32.db if tally.fp32.count else None
            codes, share = (tally.most, tally.differing / tally.count) if tally.count else (None, None)
            found.append(SiteProof(name, quantized.quantizer(name).fmt.name, fp32, tally.simulation.db, codes, share))
        return found


def _measure(
    workload: Workload, quantized: QuantizedModel, exact: nn.Module, batches: list[Any], probed: Traced, path: Path
) -> _Measured:
    """Run file, simulation and full precision side by side, a batch at a time: nothing is kept but sums."""
    measured, ready = _Measured(), session(path)
    names = [output.name for output in ready.get_outputs()]
    for batch in batches:
        found = dict(zip(names, run(ready, _feed(probed, batch)), strict=True))
        seen = _Seen()
        with torch.no_grad(), preserve(quantized), quantized.eval().through(seen):
            measured.simulated.append(workload.with_model(quantized).run(batch))
        wanted = _exact_values(workload, exact, quantized, batch)
        for index, name in enumerate(probed.probes):
            value = torch.from_numpy(found[f"probe_{index}"])
            tally = measured.tallies.setdefault(name, Tally(quantized.quantizer(name)))
            tally.add(value, seen.values[name], wanted.get(name))
    return measured


class _Seen(Passing):
    """What each value is behind its quantizer; of values that pass more than once, the first."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}

    def value(self, name: str, quantizer: Any, value: Tensor) -> Tensor:
        found: Tensor = quantizer(value)
        if not quantizer.weight:
            self.values.setdefault(name, found.detach())
        return found


class _Exact:
    """Calls as they are; keeps the values that have quantizers in the quantized model."""

    def __init__(self, quantized: QuantizedModel) -> None:
        self.quantized = quantized
        self.values: dict[str, Tensor] = {}

    def before_write(self, tensor: Tensor) -> None:
        for name, value in self.values.items():
            if value is tensor:
                self.values[name] = value.clone()

    def call(self, call: Call) -> Any:
        route = self.quantized.routes.get(str(call.site))
        if route is not None:
            for place, name in route.uses.items():
                if place < len(call.leaves) and isinstance(call.leaves[place], Tensor):
                    self.values.setdefault(name, call.leaves[place])
        result = call.run()
        if route is not None and route.output and isinstance(result, Tensor):
            self.values.setdefault(route.output, result)
        return result


def _exact_values(workload: Workload, exact: nn.Module, quantized: QuantizedModel, batch: Any) -> Mapping[str, Tensor]:
    handler = _Exact(quantized)
    with preserve(exact), torch.no_grad(), watch(exact.eval(), handler) as mode:
        mode.begin()
        with mode:
            workload.with_model(exact).run(batch)
    return handler.values


def _outputs(
    workload: Workload, batches: list[Any], plain: Traced, measured: _Measured, *paths: str | Path
) -> tuple[list[Any], list[Any]]:
    """Outputs of both files, in the containers that the model returns."""
    found: list[list[Any]] = []
    for path in paths:
        ready, outputs = session(path), []
        for batch, like in zip(batches, measured.simulated, strict=True):
            arrays = iter(run(ready, _feed(plain, batch)))
            outputs.append(replaced(like, lambda t, given=arrays: torch.from_numpy(next(given)) if t.numel() else t))
        found.append(outputs)
    return found[0], found[1]


def _feed(traced: Traced, batch: Any) -> dict[str, Any]:
    return dict(zip(traced.inputs, (t.detach().cpu().numpy() for t in traced.tensors(batch)), strict=True))
