"""What ONNX Runtime computes from the exported file, against fp32 and our simulation.

Both files run on the evaluation set: the candidate's metric, how often it decides as the
fp32 model does, how far its output and each quantized value inside are from fp32 and from
the simulation, which kernels it runs, how fast, how large.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from roundoff.budget import OutputRow, SqnrTarget, output_rows, reached_db
from roundoff.export.onnx.capture import Captured
from roundoff.export.onnx.deployed import Deployed
from roundoff.export.onnx.differences import Agreement, Differing, ValueDifferences
from roundoff.export.onnx.export import write
from roundoff.export.onnx.kernels import KernelRow, became
from roundoff.export.onnx.runtime import (
    Kernels,
    Latency,
    kernels,
    latency,
    run,
    session,
)
from roundoff.export.onnx.traced import Traced
from roundoff.ops import Call, watch
from roundoff.plan import replaced
from roundoff.preserve import preserve, same_draws
from roundoff.quantize import Passing, QuantizedModel
from roundoff.workload import Workload, named_tensors


@dataclass(frozen=True, slots=True)
class ValueProof:
    """One quantized value in the file, on the whole evaluation set.

    Attributes:
        name: the value, as the quantizer is called.
        format: of its codes.
        fp32_db: SQNR against the fp32 run; None where that has no value of this name and
            shape.
        simulation_db: SQNR against the simulation; infinite where all values are equal.
        by_kernel: codes that differ from the simulation run on the file's own values
            before it: the difference that this kernel alone makes. None where the scale
            is chosen while the model runs.
        carried: codes that differ between the file and the simulation, each run from the
            input on. One code more or less in a value can move the next one by several,
            where its weights are large beside its scale.
    """

    name: str
    format: str
    fp32_db: float | None
    simulation_db: float
    by_kernel: Differing | None
    carried: Differing | None

    @property
    def codes(self) -> int | None:
        """Greatest difference of a code that the kernel makes by itself."""
        return self.by_kernel.most if self.by_kernel else None

    @property
    def differing(self) -> float | None:
        """Share of codes that the kernel makes differ."""
        return self.by_kernel.share if self.by_kernel else None


@dataclass(frozen=True, slots=True)
class Proof:
    """What was measured on the file.

    Attributes:
        samples: number of rows of outputs in the set.
        metric, metric_fp32: the workload's metric of this file and of the fp32 file;
            None without one.
        agreement: share of rows of the output with the same arg-max over the last axis
            as in fp32; None with one column.
        sqnr_db: against fp32, of the output closest to its target, or furthest below it;
            without a target of the one with most noise.
        outputs: each named output against fp32.
        simulation_db: against our simulation, of the output that is furthest from it.
        sites: one row for each quantized value, in the order of the run.
        became: one row for each quantized call: the kernel that runs it, or why none
            with integers does.
        kernels: the optimised graph that ONNX Runtime runs.
        latency: seconds of both files; None where not asked for.
        bytes, bytes_fp32: sizes of the files.
        notes: quantizers that ONNX cannot express, or that are slow in ONNX Runtime, with
            the reason.
        remarks: what the files fix of what the model leaves open: sizes, and numbers
            that its code reads from values.
    """

    samples: int
    metric: float | None
    metric_fp32: float | None
    agreement: float | None
    sqnr_db: float
    outputs: tuple[OutputRow, ...]
    simulation_db: float
    sites: tuple[ValueProof, ...]
    became: tuple[KernelRow, ...]
    kernels: Kernels
    latency: Latency | None
    bytes: int
    bytes_fp32: int
    notes: dict[str, str]
    remarks: tuple[str, ...] = ()

    @property
    def codes(self) -> int:
        """Greatest difference of a code that a kernel makes by itself.

        It is 1 or 0 where file and simulation agree.
        """
        return max(
            (site.by_kernel.most for site in self.sites if site.by_kernel), default=0
        )

    @property
    def differing(self) -> float:
        """Largest share of codes of a value that a kernel makes differ."""
        return max(
            (site.by_kernel.share for site in self.sites if site.by_kernel), default=0.0
        )


def prove(
    workload: Workload,
    quantized: QuantizedModel,
    path_quantized: str | Path,
    path_fp32: str | Path,
    *,
    exact: nn.Module | None = None,
    pack: bool = True,
    seconds: float = 3.0,
    target: SqnrTarget | None = None,
) -> Proof:
    """Write both files, run them in ONNX Runtime on the evaluation set, and measure.

    The set is ``held_out``, or else the batches.

    Args:
        workload: with the fp32 model, its metric and batches.
        quantized: the simulation of the quantized model.
        path_quantized: of the file to write and prove.
        path_fp32: of the file of the fp32 model, which is written too.
        exact: the model in full precision whose values inside are those of the quantized
            one; by default the workload's own. Give ``unrounded(quantized, workload)``
            where BatchNorm was folded or channels were divided: the values inside are
            others then.
        pack: as ``export_onnx`` has it.
        seconds: how long to race both files on the first batch; 0: not at all.
        target: SQNR in dB that is asked of each output.

    Raises:
        QuantizationError: as ``export_onnx``, or onnxruntime is not installed.
    """
    original = write(workload, workload.model, path_fp32)
    with tempfile.TemporaryDirectory() as folder:
        probed_path = Path(folder) / "probed.onnx"
        deployed = Deployed(quantized, probe=True)
        probed = write(
            workload, deployed, path_quantized, pack=pack, probed=probed_path
        )
        batches = _fitting(workload, original, probed)
        values, simulated = _measure(
            workload,
            quantized,
            exact or workload.model,
            batches,
            probed,
            probed_path,
        )
    outputs = _outputs(batches, original.traced, simulated, path_quantized)
    outputs_fp32 = _outputs(batches, original.traced, simulated, path_fp32)
    agreement = Agreement()
    for output, fp32, simulation in zip(outputs, outputs_fp32, simulated, strict=True):
        agreement.add(
            named_tensors(output),
            workload.judged.tensors(fp32),
            named_tensors(simulation),
        )
    apart = workload.judged.apart
    rows = output_rows(agreement.fp32.outputs(apart), target)
    from_simulation = output_rows(agreement.simulation.outputs(apart))
    found_kernels = kernels(path_quantized)
    raced = None
    if seconds > 0:
        inputs = _feed(original.traced, batches[0])
        raced = latency(path_fp32, path_quantized, inputs, seconds)
    judged = workload.with_model(workload.model)
    judged.batches = batches
    return Proof(
        samples=agreement.samples,
        metric=judged.evaluate(outputs, outputs_fp32),
        metric_fp32=judged.evaluate(outputs_fp32, outputs_fp32),
        agreement=agreement.share,
        sqnr_db=reached_db(rows),
        outputs=rows,
        simulation_db=reached_db(from_simulation),
        sites=_value_proofs(values, quantized),
        became=became(quantized, deployed, found_kernels),
        kernels=found_kernels,
        latency=raced,
        bytes=Path(path_quantized).stat().st_size,
        bytes_fp32=Path(path_fp32).stat().st_size,
        notes={**deployed.slow, **deployed.reasons},
        remarks=tuple(dict.fromkeys([*probed.remarks, *original.remarks])),
    )


def _fitting(workload: Workload, *captured: Captured) -> list[Any]:
    """Return the batches of the evaluation set that the files can run.

    Where there are none, those of the other batches: the first always is.
    """
    for batches in (workload.held_out, workload.batches):
        fitting = [b for b in batches if not any(c.why_unfit(b) for c in captured)]
        if fitting:
            return fitting
    return workload.batches[:1]


def _value_proofs(
    values: Mapping[str, ValueDifferences], quantized: QuantizedModel
) -> tuple[ValueProof, ...]:
    return tuple(
        ValueProof(
            name,
            quantized.quantizer(name).fmt.name,
            differences.fp32.db if differences.fp32.count else None,
            differences.simulation.db,
            differences.by_kernel.total(),
            differences.carried.total(),
        )
        for name, differences in values.items()
    )


def _measure(
    workload: Workload,
    quantized: QuantizedModel,
    exact: nn.Module,
    batches: list[Any],
    probed: Captured,
    path: Path,
) -> tuple[dict[str, ValueDifferences], list[Any]]:
    """Run file, simulation and full precision side by side, a batch at a time.

    Returns the differences of each value, of which nothing is kept but sums, and the
    simulation's outputs.
    """
    values: dict[str, ValueDifferences] = {}
    simulated: list[Any] = []
    ready = session(path)
    names = [output.name for output in ready.get_outputs()]
    for batch in batches:
        arrays = dict(zip(names, run(ready, _feed(probed.traced, batch)), strict=True))
        in_file = {
            name: torch.from_numpy(arrays[f"probe_{index}"])
            for index, name in enumerate(probed.probes)
        }
        free = _Recorder({})
        led = _Recorder(in_file)
        with torch.no_grad(), preserve(quantized):
            with quantized.eval().through(free), same_draws():
                simulated.append(workload.with_model(quantized).run(batch))
            with quantized.eval().through(led), same_draws():
                workload.with_model(quantized).run(batch)
        wanted = exact_values(workload, exact, quantized, batch)
        for name, value in in_file.items():
            if name not in values:
                values[name] = ValueDifferences(quantized.quantizer(name))
            values[name].add(
                value, free.values[name], led.values[name], wanted.get(name)
            )
    return values, simulated


class _Recorder(Passing):
    """Keep what each value is behind its quantizer; of several passes, the first.

    Values in ``replacements`` are handed on in their place: what comes next is made of
    them.
    """

    def __init__(self, replacements: Mapping[str, Tensor]) -> None:
        self.values: dict[str, Tensor] = {}
        self.replacements = replacements

    def value(self, name: str, quantizer: Any, value: Tensor) -> Tensor:
        rounded: Tensor = quantizer(value)
        if quantizer.weight or name in self.values:
            return rounded
        # copies: the model may write into its values
        self.values[name] = rounded.detach().clone()
        replacement = self.replacements.get(name)
        return rounded if replacement is None else replacement.clone()


class _ExactValues:
    """Run calls as they are; keep the values that have quantizers in the quantized model."""

    def __init__(self, quantized: QuantizedModel) -> None:
        self.quantized = quantized
        self.values: dict[str, Tensor] = {}

    def before_write(self, tensor: Tensor) -> None:
        for name, value in self.values.items():
            if value is tensor:
                self.values[name] = value.clone()

    def call(self, call: Call) -> Any:
        route = self.quantized.routes.get(str(call.site))
        if route is None:
            return call.run()
        leaves = self.quantized.divided(route, call.leaves, WeakIdKeyDictionary())
        for place, name in route.uses.items():
            if place < len(leaves) and isinstance(leaves[place], Tensor):
                self.values.setdefault(name, leaves[place])
        result = call.run()
        if route.output and isinstance(result, Tensor):
            self.values.setdefault(route.output, result)
        return result


def exact_values(
    workload: Workload, exact: nn.Module, quantized: QuantizedModel, batch: Any
) -> Mapping[str, Tensor]:
    """Return a full-precision model's values where the quantized one has quantizers.

    They go by the quantizer's name.
    """
    handler = _ExactValues(quantized)
    with preserve(exact), torch.no_grad(), watch(exact.eval(), handler) as mode:
        mode.begin()
        with mode, same_draws():
            workload.with_model(exact).run(batch)
    return handler.values


def _outputs(
    batches: list[Any], traced: Traced, simulated: list[Any], path: str | Path
) -> list[Any]:
    """Return a file's outputs, in the containers that the model returns."""
    ready = session(path)
    return [
        _filled(like, run(ready, _feed(traced, batch)))
        for batch, like in zip(batches, simulated, strict=True)
    ]


def _filled(like: Any, arrays: list[Any]) -> Any:
    """Return an output with these arrays in the places of its tensors."""
    remaining = iter(arrays)

    def replacement(tensor: Tensor) -> Tensor:
        return torch.from_numpy(next(remaining)) if tensor.numel() else tensor

    return replaced(like, replacement)


def _feed(traced: Traced, batch: Any) -> dict[str, Any]:
    arrays = [tensor.detach().cpu().numpy() for tensor in traced.tensors(batch)]
    return dict(zip(traced.inputs, arrays, strict=True))
