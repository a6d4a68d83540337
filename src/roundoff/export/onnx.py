"""Export: a model of a workload, quantized or not, as an ONNX file."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path, tree_unflatten

from roundoff.attribute.target import named_tensors
from roundoff.errors import QuantizationError
from roundoff.export.operators import translations
from roundoff.files import atomic_path
from roundoff.workload import Workload

#: The version of ONNX's operators that is written: the first with int4 and blocks (both in DequantizeLinear-21).
OPSET = 21


class Traced(nn.Module):
    """A workload's forward pass as a function of the tensors in a batch, which returns the tensors of its output."""

    def __init__(self, workload: Workload, model: nn.Module, batch: Any) -> None:
        super().__init__()
        self.model = model
        self._workload = copy.copy(workload)
        self._workload.model = model
        leaves, self._layout = tree_flatten_with_path(batch)
        self._fixed = [None if isinstance(leaf, Tensor) else leaf for _, leaf in leaves]
        self.inputs = {"_".join(_words(path)) or "input": leaf for path, leaf in leaves if isinstance(leaf, Tensor)}
        self.outputs: list[str] = []

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The output's tensors, of the batch with these ones."""
        given = iter(tensors)
        leaves = [next(given) if fixed is None else fixed for fixed in self._fixed]
        found = named_tensors(self._workload.run(tree_unflatten(leaves, self._layout)))
        self.outputs = list(found)
        return tuple(found.values())


def export_onnx(workload: Workload, model: nn.Module, path: str | Path, batch: Any = None) -> Path:
    """Write what ``model`` does in the place of the workload's own as an ONNX file; its first axis may have any length.

    Args:
        workload: how the model is called, and the batch that it is traced on (its first).
        model: in evaluation mode: the workload's own, or ``Deployed`` for a quantized one.
        path: of the file, written whole or not at all.
        batch: another batch to trace on.

    Raises:
        QuantizationError: torch.export cannot follow the model (control flow that depends on data), or ONNX has not one of
            its operators; the message has the exporter's own words.
    """
    batch = workload.batches[0] if batch is None else batch
    traced = Traced(workload, model, batch).eval()
    tensors = tuple(traced.inputs.values())
    shapes = tuple({0: torch.export.Dim.DYNAMIC} if t.ndim and t.shape[0] > 1 else None for t in tensors)
    try:
        with _quiet(), torch.no_grad():
            traced(*tensors)  # for the names of the outputs
            program: Any = torch.onnx.export(
                traced, tensors, dynamo=True, opset_version=OPSET, verbose=False, input_names=list(traced.inputs),
                output_names=list(traced.outputs),
                custom_translation_table=translations(), dynamic_shapes={"tensors": shapes},
            )  # fmt: skip
    except torch.onnx.OnnxExporterError as error:
        raise QuantizationError(
            f"this model cannot be written as ONNX: {_reason(error)}", where=workload.name,
            expected="a forward pass that torch.export can follow, of operators that ONNX has",
            got=type(error.__cause__ or error).__name__,
            do="look at torch.export.export(model, batch); the PyTorch model with fake quantization needs no export",
        ) from error  # fmt: skip
    import onnx

    proto = program.model_proto
    _strip(proto)
    path = Path(path)
    with atomic_path(path) as temporary:
        onnx.save_model(proto, str(temporary))
    return path


def _strip(proto: Any) -> None:
    """Leave out what the exporter notes of its own work: stack traces (with paths of this machine) and inferred shapes."""
    for graph in [proto.graph, *proto.functions]:
        for node in graph.node:
            del node.metadata_props[:]
            node.ClearField("doc_string")
        del graph.value_info[:]
    for entry in [proto, proto.graph, *proto.graph.input, *proto.graph.output, *proto.graph.initializer]:
        del entry.metadata_props[:]
    proto.producer_name = "roundoff"


def _words(path: Any) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]


def _reason(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints, logs and warns of its own internals."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
