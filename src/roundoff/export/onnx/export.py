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

__all__ = ["OPSET", "Traced", "export_fake_quant", "export_onnx", "needs", "write"]

#: The version of ONNX's operators that is written: the first with int4 and blocks (both in DequantizeLinear-21).
OPSET = 21


class Traced(nn.Module):
    """A workload's forward pass as a function of the tensors in a batch, which returns the tensors of its output.

    Attributes:
        inputs: name of each tensor in the batch that is traced on, by its path in the batch.
        outputs: names of what the last call returned: of the output's tensors, then of the values that are probed.
    """

    def __init__(self, workload: Workload, model: nn.Module, batch: Any) -> None:
        super().__init__()
        self.model = model
        self._workload = workload.with_model(model)
        leaves, self._layout = tree_flatten_with_path(batch)
        self._fixed = [None if isinstance(leaf, Tensor) else leaf for _, leaf in leaves]
        names = [
            "_".join(_words(path)) for path, leaf in leaves if isinstance(leaf, Tensor)
        ]
        if any(not name or name.isdigit() for name in names):
            names = ["input" if len(names) == 1 else f"input_{name}" for name in names]
        self.inputs = dict(zip(names, self.tensors(batch), strict=True))
        self.outputs: list[str] = []
        self.probes: list[str] = []

    def tensors(self, batch: Any) -> list[Tensor]:
        """The tensors of a batch, in the order of the inputs.

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
        """The output's tensors, of the batch with these ones."""
        given = iter(tensors)
        leaves = [next(given) if fixed is None else fixed for fixed in self._fixed]
        found = named_tensors(self._workload.run(tree_unflatten(leaves, self._layout)))
        probed = self.model.values if isinstance(self.model, Deployed) else {}
        self.outputs, self.probes = list(found), list(probed)
        return (*found.values(), *probed.values())


def export_onnx(
    workload: Workload,
    model: nn.Module,
    path: str | Path,
    batch: Any = None,
    *,
    pack: bool = True,
) -> Path:
    """Write what ``model`` does in the place of the workload's own as an ONNX file of opset 21.

    The first axis of each input may have any length, and so may each axis that differs between the workload's batches.

    Args:
        workload: how the model is called, and the batch that it is traced on (its first).
        model: in evaluation mode: the workload's own, or ``Deployed`` for a quantized one.
        path: of the file, written whole or not at all.
        batch: another batch to trace on.
        pack: weights of 4 bits and fewer take half a byte. Where no groups share a scale they become int8 when the file is
            loaded, so that integer kernels run as fast as from bytes (measured in ONNX Runtime 1.31). False: a byte each,
            for runtimes without INT4.

    Raises:
        QuantizationError: torch.export cannot follow the model (control flow that depends on data), or ONNX has not one of
            its operators; the message has the exporter's own words. Or onnx or onnxscript is not installed.
    """
    write(workload, model, path, batch, pack=pack)
    return Path(path)


def export_fake_quant(
    workload: Workload, quantized: QuantizedModel, path: str | Path, batch: Any = None
) -> Path:
    """Write the simulation of a quantized model as an ONNX file of plain arithmetic in fp32 (divide, round, clip, multiply),
    for any runtime and any format; weights are their rounded values. It is as large as the fp32 model, and slower.

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
    """``export_onnx``; returns what was traced, which knows the names of inputs and outputs. ``probed``: another file, with
    the values of a ``Deployed`` that probes as further outputs, ``probe_0`` and on."""
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
                dynamic_shapes={"tensors": _free(workload, traced, tensors)},
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
    """A batch of one sample twice, since an axis of length 1 is taken for one that always has this length; the tensors as
    they are where the model does not take that."""
    if not tensors or any(t.ndim == 0 or t.shape[0] != 1 for t in tensors):
        return tensors
    twice = [torch.cat([t, t]) for t in tensors]
    try:
        once, both = traced(*tensors), traced(*twice)
    except (RoundoffError, RuntimeError, ValueError):
        return tensors
    doubled = all(
        b.shape[:1] == (2,) and b.shape[1:] == o.shape[1:]
        for o, b in zip(once, both, strict=True)
        if o.ndim
    )
    return twice if doubled else tensors


def _free(workload: Workload, traced: Traced, tensors: list[Tensor]) -> tuple[Any, ...]:
    """For each input the axes that may have any length: the first, and those that differ between batches."""
    seen = [[tuple(t.shape) for t in tensors]]
    for batch in [*workload.batches, *workload.held_out]:
        with contextlib.suppress(QuantizationError):
            seen.append([tuple(t.shape) for t in traced.tensors(batch)])
    found: list[Any] = []
    for index, tensor in enumerate(tensors):
        shapes = [shapes[index] for shapes in seen]
        free = {
            axis
            for axis in range(tensor.ndim)
            if len({s[axis] for s in shapes if len(s) == tensor.ndim}) > 1
        }
        free |= {0} if tensor.ndim else set()
        found.append(
            {
                axis: torch.export.Dim.DYNAMIC
                for axis in sorted(free)
                if tensor.shape[axis] > 1
            }
            or None
        )
    return tuple(found)


def _words(path: Any) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]


def _reason(error: BaseException) -> str:
    branches = ""
    while error.__cause__ is not None:
        error = error.__cause__
        if isinstance(error, GuardOnDataDependentSymNode):
            branches = "it branches on its data. "
    return branches + (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter, and what it is made of, print, log and warn of their own internals."""
    below, nowhere = logging.root.manager.disable, io.StringIO()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        warnings.simplefilter("ignore")
        logging.disable(max(below, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(below)
