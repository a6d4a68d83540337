"""Capture a forward pass for ONNX: with free sizes where it can, else with fixed ones.

torch.export follows Python code, in which a size may stand in a reshape or a loop, and a
branch may depend on values. What cannot stay open is fixed to what the data at hand
have, and said: the file is then right for such inputs alone.
"""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._functorch import config as _functional
from torch.fx.experimental import _config as _symbolic
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from roundoff.errors import QuantizationError, RoundoffError
from roundoff.export.onnx.decompose import decomposed
from roundoff.export.onnx.general import (
    differing_batches,
    general_case,
    remarks,
)
from roundoff.export.onnx.inlined import Inlined
from roundoff.export.onnx.known_operators import known_operators
from roundoff.export.onnx.operators import translations
from roundoff.export.onnx.passes import Passes, runnable_batches
from roundoff.export.onnx.readings import Reading, Repeating
from roundoff.export.onnx.sizes import Sizes, varying_axes
from roundoff.export.onnx.traced import Traced
from roundoff.workload import Workload

functional_config: Any = _functional
symbolic_config: Any = _symbolic

#: The version of ONNX's operators that is written: the first with int4 and blocks (both
#: in DequantizeLinear-21).
OPSET = 21


@dataclass
class Captured:
    """A forward pass as an ONNX program.

    Attributes:
        program: a ``torch.onnx.ONNXProgram``.
        exported: the ``torch.export.ExportedProgram`` that it was made of.
        traced: what was traced.
        sizes: which sizes it takes.
        outputs: names of its outputs, without those of values that are probed.
        probes: names of the values that are probed.
        remarks: what it fixes, in sentences.
        apart: batches that take another path through the model's code.
        general: lines that branch on computed sizes, of which it has the general case.
    """

    program: Any
    exported: Any
    traced: Traced
    sizes: Sizes
    outputs: tuple[str, ...]
    probes: tuple[str, ...]
    remarks: list[str] = field(default_factory=list)
    apart: list[Any] = field(default_factory=list)
    general: list[str] = field(default_factory=list)

    def why_unfit(self, batch: Any) -> str:
        """Return why the file cannot run a batch, or runs another path; empty if it can."""
        if any(batch is other for other in self.apart):
            return "its values take another path through the model's code"
        try:
            tensors = self.traced.tensors(batch)
        except QuantizationError as error:
            return error.what
        return self.sizes.why_unfit([tuple(t.shape) for t in tensors])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attempt:
    """One way to trace.

    Attributes:
        tensors: what it is traced on.
        free: for each of them the axes that may have any length.
        readings: what is given back where the model's code reads numbers from tensors;
            None for those that are read anew.
        draft: branches on computed sizes follow those of ``tensors``.
    """

    tensors: list[Tensor]
    free: list[list[int]]
    readings: Sequence[Reading | None] = ()
    draft: bool = False

    def run(self, traced: Traced) -> Captured:
        """Trace, and translate to ONNX. Raises whatever torch does."""
        traced.reading = Repeating(self.readings) if self.readings else None
        inlined = Inlined()
        traced.inlined = inlined
        axes = [dict.fromkeys(a, torch.export.Dim.AUTO) or None for a in self.free]
        try:
            if self.readings:  # the last batch that ran may have taken another path
                traced(*self.tensors)
            # lengths 0 and 1 are lengths as others are
            with (
                general_case(lambda: inlined.depth > 0) as lines,
                symbolic_config.patch(backed_size_oblivious=True),
                functional_config.patch(fake_tensor_propagate_real_tensors=self.draft),
            ):
                exported = torch.export.export(
                    traced,
                    tuple(self.tensors),
                    dynamic_shapes={"tensors": tuple(axes)},
                    strict=False,
                )
        finally:
            traced.reading = None
            traced.inlined = None
        return Captured(
            program=_translated(exported, traced),
            exported=exported,
            traced=traced,
            sizes=Sizes(exported, list(traced.inputs)),
            outputs=tuple(traced.outputs),
            probes=tuple(traced.probes),
            general=lines,
        )


def capture(workload: Workload, traced: Traced) -> Captured:
    """Capture a forward pass, with as many sizes free as it allows.

    Raises ``QuantizationError`` with the exporter's own words where it cannot be.
    """
    errors: list[Exception] = []
    with _quiet(), torch.no_grad():
        tries = _Tries(workload, traced)
        for attempt in tries.attempts():
            try:
                captured = attempt.run(traced)
            except Exception as error:  # noqa: BLE001 (torch.export runs the model's code, and raises anything)
                errors.append(error)
                continue
            if tries.keeps_lengths(captured, attempt):
                return tries.completed(captured, attempt)
    raise _refusal(workload, errors[0]) from errors[0]


class _Tries:
    """The ways to trace, in the order of what they leave open."""

    def __init__(self, workload: Workload, traced: Traced) -> None:
        self.workload = workload
        self.traced = traced
        self.given = list(traced.inputs.values())
        self.tensors = _doubled(traced, self.given)
        traced(*self.tensors)  # makes codes of weights, and the names of the outputs
        shapes = _shapes_of_batches(workload, traced)
        self.wanted = {
            name: varying_axes(tensor, [shape, *others])
            for name, tensor, shape, *others in zip(
                traced.inputs,
                self.tensors,
                [tuple(t.shape) for t in self.tensors],
                *shapes,
                strict=True,
            )
        }
        self.passes = Passes(workload, traced)

    def attempts(self) -> Iterator[_Attempt]:
        """Yield the attempts; each is asked for when the one before it failed."""
        free = list(self.wanted.values())
        yield _Attempt(tensors=self.tensors, free=free)
        if self.tensors is not self.given:
            longer = [
                [axis for axis in axes if tensor.shape[axis] > 1]
                for axes, tensor in zip(free, self.given, strict=True)
            ]
            yield _Attempt(tensors=self.given, free=longer)
        fixed: list[list[int]] = [[] for _ in free]
        first = self.passes.first
        shared = self.passes.shared
        if any(shared) and not self.passes.depend_on_sizes(self.given):
            yield _Attempt(tensors=self.tensors, free=free, readings=shared)
        yield _Attempt(tensors=self.given, free=fixed, readings=shared)
        if None in shared:
            yield _Attempt(tensors=self.given, free=fixed, readings=first)
        yield _Attempt(tensors=self.given, free=fixed, readings=first, draft=True)

    def keeps_lengths(self, captured: Captured, attempt: _Attempt) -> bool:
        """Return False where a batch of one sample would have to be given twice."""
        return attempt.tensors is self.given or all(
            captured.sizes.is_free(name, 0) for name in self.traced.inputs
        )

    def completed(self, captured: Captured, attempt: _Attempt) -> Captured:
        """Return it with what is to be said of it."""
        captured.remarks = [str(row) for row in captured.sizes.remarks(self.wanted)]
        if attempt.readings:
            captured.apart = self.passes.on_other_paths(attempt.readings)
            captured.remarks += self.passes.remarks(attempt.readings)
        if attempt.draft:
            captured.remarks.append(
                "the model branches on sizes that it computes from values: the file takes "
                "the branches of the first batch, and is right for inputs that do so too"
            )
            captured.apart += _refused_batches(self.workload, captured)
        if captured.general:
            captured.remarks += remarks(captured.general)
            captured.apart += differing_batches(
                self.workload, self.traced, captured.exported
            )
        captured.remarks += _unfit_batches(self.workload, captured)
        return captured


def _refused_batches(workload: Workload, captured: Captured) -> list[Any]:
    """Return the batches whose computed sizes take other branches than the program.

    It asserts at run time what its branches rest on.
    """
    module = captured.exported.module()
    refused = []
    for batch, tensors in runnable_batches(workload, captured.traced):
        try:
            module(*tensors)
        except (RuntimeError, AssertionError):
            refused.append(batch)
    return refused


def _translated(exported: Any, traced: Traced) -> Any:
    """Return an exported program as an ONNX program."""
    probes = [f"probe_{index}" for index in range(len(traced.probes))]
    with known_operators():
        return torch.onnx.export(
            decomposed(exported),
            (),
            dynamo=True,
            opset_version=OPSET,
            verbose=False,
            input_names=list(traced.inputs),
            output_names=[*traced.outputs, *probes],
            custom_translation_table=translations(),
        )


def _shapes_of_batches(
    workload: Workload, traced: Traced
) -> list[list[tuple[int, ...]]]:
    return [
        [tuple(tensor.shape) for tensor in tensors]
        for _, tensors in runnable_batches(workload, traced)
    ]


def _unfit_batches(workload: Workload, captured: Captured) -> list[str]:
    """Return a sentence for each reason why the file cannot run some batches."""
    numbers: dict[str, list[str]] = {}
    for kind, batches in (
        ("batch", workload.batches),
        ("held-out batch", workload.held_out),
    ):
        for number, batch in enumerate(batches):
            reason = captured.why_unfit(batch)
            if reason:
                numbers.setdefault(reason, []).append(f"{kind} {number}")
    return [
        f"the file cannot run {_shortened(names)}: {reason}"
        for reason, names in numbers.items()
    ]


def _shortened(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return shown if len(names) <= 4 else f"{shown} and {len(names) - 4} others"


def _doubled(traced: Traced, tensors: list[Tensor]) -> list[Tensor]:
    """Return a batch of one sample twice, or the tensors where the model refuses that.

    An axis of length 1 is taken for one that always has this length.
    """
    if not tensors or any(t.shape[:1] != (1,) for t in tensors):
        return tensors
    twice = [torch.cat([t, t]) for t in tensors]
    try:
        single = traced(*tensors)
        double = traced(*twice)
    except (RoundoffError, RuntimeError, ValueError):
        return tensors
    pairs = [pair for pair in zip(single, double, strict=True) if pair[0].ndim]
    return twice if all(_is_doubled(*pair) for pair in pairs) else tensors


def _is_doubled(single: Tensor, double: Tensor) -> bool:
    return double.shape[:1] == (2,) and double.shape[1:] == single.shape[1:]


def _refusal(workload: Workload, error: Exception) -> QuantizationError:
    return QuantizationError(
        f"this model cannot be written as ONNX: {_reason(error)}",
        where=workload.name,
        expected="a forward pass that torch.export can follow, of operators that ONNX has",
        got=type(error.__cause__ or error).__name__,
        do="look at torch.export.export(model, batch); the PyTorch model with fake quantization needs no export",
    )


def _reason(error: BaseException) -> str:
    """Return the exporter's first line about its first cause."""
    branches = ""
    while error.__cause__ is not None:
        error = error.__cause__
        if isinstance(error, GuardOnDataDependentSymNode):
            branches = "it branches on its data. "
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return branches + lines[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter: it prints, logs and warns of its own internals."""
    level = logging.root.manager.disable
    nowhere = io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        warnings.simplefilter("ignore")
        logging.disable(max(level, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(level)
