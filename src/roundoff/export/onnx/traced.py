"""A workload's forward pass as a module of tensors alone, which torch.export can follow."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_unflatten

from roundoff.errors import QuantizationError
from roundoff.export.onnx.deployed import Deployed
from roundoff.export.onnx.inlined import Inlined
from roundoff.export.onnx.readings import ReadingMode
from roundoff.export.onnx.recurrent import KeepRecurrent
from roundoff.workload import Workload, all_named_tensors, describe, named_tensors


class Traced(nn.Module):
    """A workload's forward pass as a function of the tensors in a batch.

    It returns the tensors of the output.

    Attributes:
        inputs: name of each tensor in the batch that is traced on, by its path in it.
        outputs: names of the output's tensors in the last call: first those of floating
            point, then integers and truth values.
        probes: names of the values that are probed, which are returned behind them.
        reading: what happens where the model's code reads numbers from tensors; None:
            nothing.
        inlined: traces the bodies of custom operators; None where these run as they are.
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
        self.reading: ReadingMode | None = None
        self.inlined: Inlined | None = None

    def tensors(self, batch: Any) -> list[Tensor]:
        """Return the tensors of a batch, in the order of the inputs.

        Raises ``QuantizationError`` for a batch of another structure, or with other
        numbers that are no tensors.
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
        with ExitStack() as modes:
            modes.enter_context(KeepRecurrent().kept())
            if self.inlined is not None:
                modes.enter_context(self.inlined)
            if self.reading is not None:
                modes.enter_context(self.reading.begun())
            outputs = _outputs(self._workload.run(batch))
        probed = self.model.values if isinstance(self.model, Deployed) else {}
        self.outputs = list(outputs)
        self.probes = list(probed)
        return (*outputs.values(), *probed.values())


def _outputs(output: Any) -> dict[str, Tensor]:
    """Return the tensors of an output, those of floating point first."""
    tensors = named_tensors(output)
    for name, tensor in all_named_tensors(output).items():
        if not tensor.is_complex():
            tensors.setdefault(name, tensor)
    return tensors


def _path_words(path: Any) -> list[str]:
    return [str(getattr(key, "key", getattr(key, "idx", key))) for key in path]


def _input_names(paths: list[Any]) -> list[str]:
    """Name the tensors of a batch by their paths in it."""
    names = ["_".join(_path_words(path)) for path in paths]
    if not any(not name or name.isdigit() for name in names):
        return names
    return ["input"] if len(names) == 1 else [f"input_{name}" for name in names]
