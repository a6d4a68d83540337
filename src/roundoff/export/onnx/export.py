"""Export: a model of a workload, quantized or not, as an ONNX file."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from roundoff.errors import QuantizationError, RoundoffError
from roundoff.export.onnx.deployed import Deployed
from roundoff.export.onnx.operators import translations
from roundoff.export.onnx.tidy import tidy
from roundoff.files import atomic_path
from roundoff.quantize import QuantizedModel
from roundoff.workload import Workload, describe, named_tensors

#: The version of ONNX's operators that is written: the first with int4 and blocks (both in DequantizeLinear-21).
OPSET = 21


class Traced(nn.Module):
    """A workload's forward pass as a function of the tensors in a batch.

    It returns the tensors of the output.

    Attributes:
        inputs: name of each tensor in the batch that is traced on, by its path in it.
        outputs: names of the output's tensors in the last call.
        probes: names of the values that are probed, which are returned behind them.
    """

    def __init__(self, workload: Workload, model: nn.Module, batch: Any) -> None:
        super().__init__()
        self.model = model
        self._workload = workload.with_model(model)
        leaves, self._layout = tree_flatten_with_path(batch)
        self._fixed = [None if isinstance(leaf, Tensor) else leaf for _, leaf in leaves]
        names = _input_names([p for p, leaf in leaves if isinstance(leaf, Tensor)])
        self.inputs = dict(zip(names, self.tensors(batch), strict=True))
        self.outputs: list[str] = []
        self.probes: list[str] = []

    def tensors(self, batch: Any) -> list[Tensor]:
        """Return the tensors of a batch, in the order of the inputs.

        Raises ``QuantizationError`` for a batch of another structure, or with other numbers that are no tensors.
        """
        leaves, layout = tree_flatten(batch)
        fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if layout != self._layout or fixed != self._fixed:
            raise QuantizationError(
                "the file takes only the tensors of a batch, and the rest differs in this one",
                where=self._workload.name,
                expected="batches that differ in their tensors alone",
                got=describe(batch),
                do="make the rest part of the model, or give tensors",
            )
        return [leaf for leaf in leaves if isinstance(leaf, Tensor)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the output's tensors, of the batch with these tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if fixed is None else fixed for fixed in self._fixed]
        batch = tree_unflatten(leaves, self._layout)
        outputs = named_tensors(self._workload.run(batch))
        probed = self.model.values if isinstance(self.model, Deployed) else {}
        self.outputs = list(outputs)
        self.probes = list(probed)
        return (*outputs.values(), *probed.values())


def export_onnx(
    workload: Workload,
    model: nn.Module,
    path: str | Path,
    batch: Any = None,
    *,
    pack: bool = True,
) -> Path:
    """Write a model in the place of the workload's own as an ONNX file of opset 21.

    The first axis of each input may have any length, and so may each axis that differs
    between the workload's batches.

    Args:
        workload: how the model is called, and the batch that it is traced on (its first).
        model: in evaluation mode: the workload's own, or ``Deployed`` for a quantized one.
        path: of the file, written whole or not at all.
        batch: another batch to trace on.
        pack: weights of 4 bits and fewer take half a byte. Where no groups share a scale
            they become int8 when the file is loaded, so that integer kernels run as fast
            as from bytes (measured in ONNX Runtime 1.31). False: a byte each, for
            runtimes without INT4.

    Raises:
        QuantizationError: torch.export cannot follow the model (control flow that depends
            on data), or ONNX lacks one of its operators; the message has the exporter's
            own words. Or onnx or onnxscript is not installed.
    """
    write(workload, model, path, batch, pack=pack)
    return Path(path)


def export_fake_quant(
    workload: Workload, quantized: QuantizedModel, path: str | Path, batch: Any = None
) -> Path:
    """Write the simulation of a quantized model as an ONNX file of plain arithmetic in fp32.

    It divides, rounds, clips and multiplies, in any format and for any runtime; weights
    are their rounded values. It is as large as the fp32 model, and slower.

    Raises ``QuantizationError`` as ``export_onnx``.
    """
    write(workload, Deployed(quantized, plain=True), path, batch)
    return Path(path)


def write(
    workload: Workload,
    model: nn.Module,
    path: str | Path,
    batch: Any = None,
    *,
    pack: bool = True,
    probed: str | Path | None = None,
) -> Traced:
    """Write as ``export_onnx``; return what was traced, with names of inputs and outputs.

    ``probed`` is another file, with the values of a ``Deployed`` that probes as further
    outputs, ``probe_0`` and on.
    """
    needs("onnx", "onnxscript")
    traced = Traced(
        workload, model, workload.batches[0] if batch is None else batch
    ).eval()
    try:
        with _quiet(), torch.no_grad():
            tensors = _doubled(traced, list(traced.inputs.values()))
            traced(*tensors)  # codes of weights are made, and the names of the outputs
            program: Any = torch.onnx.export(
                traced,
                tuple(tensors),
                dynamo=True,
                opset_version=OPSET,
                verbose=False,
                input_names=list(traced.inputs),
                output_names=[
                    *traced.outputs,
                    *(f"probe_{i}" for i in range(len(traced.probes))),
                ],
                custom_translation_table=translations(),
                dynamic_shapes={"tensors": _free_axes(workload, traced, tensors)},
            )
    except torch.onnx.OnnxExporterError as error:
        raise QuantizationError(
            f"this model cannot be written as ONNX: {_reason(error)}",
            where=workload.name,
            expected="a forward pass that torch.export can follow, of operators that ONNX has",
            got=type(error.__cause__ or error).__name__,
            do="look at torch.export.export(model, batch); the PyTorch model with fake quantization needs no export",
        ) from error
    tidy(program.model, pack)
    if probed is not None:
        _save(program, probed)
        del program.model.graph.outputs[len(traced.outputs) :]
    _save(program, path)
    return traced


def _save(program: Any, path: str | Path) -> None:
    with atomic_path(path) as temporary:
        program.save(str(temporary), external_data=False)


def needs(*libraries: str) -> None:
    """Raise ``QuantizationError`` that names the extra where an optional library is missing."""
    for name in libraries:
        try:
            __import__(name)
        except ImportError as error:
            raise QuantizationError(
                f"ONNX files need {name}, which is not installed",
                got=str(error),
                do="pip install 'roundoff[onnx]'",
            ) from error


def _doubled(traced: Traced, tensors: list[Tensor]) -> list[Tensor]:
    """Return a batch of one sample twice, or the tensors where the model refuses that.

    An axis of length 1 is taken for one that always has this length.
    """
    if not tensors or any(t.ndim == 0 or t.shape[0] != 1 for t in tensors):
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


def _free_axes(
    workload: Workload, traced: Traced, tensors: list[Tensor]
) -> tuple[Any, ...]:
    """Return for each input the axes that may have any length, for torch's exporter.

    These are the first, and those that differ between batches.
    """
    shapes = [[tuple(t.shape) for t in tensors]]
    for batch in [*workload.batches, *workload.held_out]:
        with contextlib.suppress(QuantizationError):
            shapes.append([tuple(t.shape) for t in traced.tensors(batch)])
    free: list[Any] = []
    for tensor, lengths in zip(tensors, zip(*shapes, strict=True), strict=True):
        comparable = [shape for shape in lengths if len(shape) == tensor.ndim]
        axes = [
            axis
            for axis in range(tensor.ndim)
            if tensor.shape[axis] > 1 and (axis == 0 or _differs(comparable, axis))
        ]
        free.append(dict.fromkeys(axes, torch.export.Dim.DYNAMIC) or None)
    return tuple(free)


def _differs(shapes: list[tuple[int, ...]], axis: int) -> bool:
    return len({shape[axis] for shape in shapes}) > 1


def _path_words(path: Any) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]


def _input_names(paths: list[Any]) -> list[str]:
    """Name the tensors of a batch by their paths in it."""
    names = ["_".join(_path_words(path)) for path in paths]
    if not any(not name or name.isdigit() for name in names):
        return names
    return ["input"] if len(names) == 1 else [f"input_{name}" for name in names]


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
