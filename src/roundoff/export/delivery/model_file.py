"""The PyTorch simulation as a file: ``model.pt``, and reading it back."""

from __future__ import annotations

import pickle
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from roundoff.errors import QuantizationError
from roundoff.files import atomic_path
from roundoff.quantize import QuantizedModel
from roundoff.workload import execute_module

#: Prefix of the modules that ``Workload.load`` makes of files.
_FILES = "roundoff_workload_"


def save_model(model: QuantizedModel, path: str | Path) -> None:
    """Write the simulation, whole or not at all: Python's pickle of the module, by ``torch.save``.

    Raises ``QuantizationError`` where the model holds something that cannot be pickled
    (a lambda, a local class).
    """
    try:
        with atomic_path(path) as temporary:
            torch.save(model, temporary)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise QuantizationError(
            f"this model cannot be pickled: {error}",
            where=str(path),
            do="define its classes and functions at the top of a module",
        ) from error


def load_model(path: str | Path, source: str | Path | None = None) -> QuantizedModel:
    """Read a simulation that ``roundoff quantize`` wrote.

    The file is a pickle, which can run any code: load only files that you trust.

    Args:
        path: of ``model.pt``.
        source: the workload file that defines the model's classes; its ``model()`` is not
            called. Not needed where they come from an installed module.

    Raises:
        QuantizationError: no such file, not a quantized model, or its classes are not
            found.
        WorkloadError: the workload file cannot be executed.
    """
    if source is None:
        return _load(path, {})
    with execute_module(source) as module:
        return _load(path, module.namespace)


def _load(path: str | Path, namespace: Mapping[str, Any]) -> QuantizedModel:
    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.startswith(_FILES) and namespace:
                defined: Any = types.SimpleNamespace(**namespace)
                for part in name.split("."):
                    defined = getattr(defined, part)
                return defined
            return super().find_class(module, name)

    try:
        pickle_module = types.SimpleNamespace(
            __name__="pickle", Unpickler=Unpickler, load=pickle.load
        )
        model = torch.load(path, weights_only=False, pickle_module=pickle_module)
    except FileNotFoundError as error:
        raise QuantizationError(
            "no such file", where=str(path), expected="model.pt of roundoff quantize"
        ) from error
    except (
        pickle.UnpicklingError,
        ModuleNotFoundError,
        AttributeError,
        RuntimeError,
        EOFError,
    ) as error:
        raise QuantizationError(
            f"not a model that can be read: {error}",
            where=str(path),
            expected="model.pt of roundoff quantize",
            do="give the workload file that defines its classes: load_model(path, 'workload.py')",
        ) from error
    if not isinstance(model, QuantizedModel):
        raise QuantizationError(
            "not a quantized model", where=str(path), got=type(model).__name__
        )
    return model
