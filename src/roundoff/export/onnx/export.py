"""Export: a model of a workload, quantized or not, as an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from roundoff.errors import QuantizationError
from roundoff.export.onnx.capture import Captured, capture
from roundoff.export.onnx.deployed import Deployed
from roundoff.export.onnx.editing import nodes_of
from roundoff.export.onnx.lower_recurrent import lower_recurrent
from roundoff.export.onnx.tidy import drop_unread, tidy
from roundoff.export.onnx.traced import Traced
from roundoff.files import atomic_path
from roundoff.preserve import process_kept
from roundoff.quantize import QuantizedModel
from roundoff.workload import Workload

#: Key of a file's metadata with what it fixes, a line each.
REMARKS = "roundoff.remarks"
#: ONNX's operators that draw random numbers.
DRAWING = (
    "Bernoulli",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
)


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
) -> Captured:
    """Write as ``export_onnx``; return what was captured, with names of inputs and outputs.

    ``probed`` is another file, with the values of a ``Deployed`` that probes as further
    outputs, ``probe_0`` and on.
    """
    needs("onnx", "onnxscript")
    traced = Traced(
        workload, model, workload.batches[0] if batch is None else batch
    ).eval()
    with process_kept():
        captured = capture(workload, traced)
    program = captured.program
    lower_recurrent(program.model.graph)
    tidy(program.model, pack)
    captured.remarks += _draws(program.model.graph)
    _remark(program.model, captured.remarks)
    if probed is not None:
        _save(program, probed)
        del program.model.graph.outputs[len(captured.outputs) :]
        drop_unread(program.model)
    _save(program, path)
    return captured


def _draws(graph: Any) -> list[str]:
    """Say that a file draws random numbers, where it does."""
    nodes = nodes_of(graph, *DRAWING)
    if not nodes:
        return []
    names = ", ".join(dict.fromkeys(node.op_type for node in nodes))
    remark = (
        f"the file draws random numbers of its own ({names}): what is made of them "
        "differs from the simulation's in every run, and no SQNR compares them"
    )
    return [remark]


def _remark(model: Any, remarks: list[str]) -> None:
    """Say in a file what it fixes, in its metadata and in the graph's description."""
    if remarks:
        model.metadata_props[REMARKS] = "\n".join(remarks)
        model.graph.doc_string = "\n".join(remarks)


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
