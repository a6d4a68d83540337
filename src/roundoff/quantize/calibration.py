"""Calibration: the laid-out model and the data that every step of ``quantize`` takes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.budget import sqnr_db
from roundoff.errors import QuantizationError, wrong_type
from roundoff.plan import worst_noise
from roundoff.preserve import same_draws
from roundoff.quantize.computed_weights import (
    computed_tensors,
    store_computed_weights_,
)
from roundoff.quantize.graph import Graph, no_data
from roundoff.quantize.model import QuantizedModel
from roundoff.workload import Workload, named_tensors

#: Batches that the output of the whole model is measured on.
MEASURED_BATCHES = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """A quantized model that is being calibrated, and the data that its steps take.

    Attributes:
        model: laid out; the steps change it in place.
        graph: the calls that it is laid out for.
        workload: how the network inside it is run: ``workload.model`` is ``model.model``.
        batches: calibration data.
        reference: what the unquantized network returns for the first
            ``MEASURED_BATCHES``; empty where no step measures the output.
    """

    model: QuantizedModel
    graph: Graph
    workload: Workload
    batches: Sequence[Any]
    reference: list[dict[str, Tensor]] = field(default_factory=list, repr=False)

    @classmethod
    def of(
        cls,
        model: QuantizedModel,
        workload: Workload,
        batches: Iterable[Any] | None = None,
        graph: Graph | None = None,
    ) -> Calibration:
        """Pack a model with the data of a workload, or with other batches."""
        return cls(
            model=model,
            graph=model.graph if graph is None else graph,
            workload=workload.with_model(model.model),
            batches=workload.batches if batches is None else list(batches),
        )

    def on(self, batches: Sequence[Any]) -> Calibration:
        """Return the same model with other data."""
        return replace(self, batches=batches)

    def trial(self) -> Calibration:
        """Return the same data with a copy of the model, for a step that may be undone."""
        model = copy.deepcopy(self.model)
        workload = self.workload.with_model(model.model)
        return replace(self, model=model, workload=workload)

    def outputs(self, batches: Sequence[Any]) -> list[dict[str, Tensor]]:
        """Run the quantized model; without gradients, in the mode that it is in."""
        workload = self.workload.with_model(self.model)
        with same_draws(), torch.no_grad():
            return [named_tensors(workload.run(batch)) for batch in batches]

    def measure_db(self) -> float:
        """Return the SQNR of the quantized model against ``reference``, in dB.

        It is that of the output that has most noise.
        """
        batches = self.batches[: len(self.reference)]
        training = self.model.training
        try:
            self.model.eval()
            outputs = self.outputs(batches)
        finally:
            self.model.train(training)
        return sqnr_db(worst_noise(outputs, self.reference))


def reference_outputs(workload: Workload) -> list[dict[str, Tensor]]:
    """Run an unquantized model on the first batches, in evaluation mode."""
    model = workload.model
    training = model.training
    try:
        model.eval()
        with same_draws(), torch.no_grad():
            batches = workload.batches[:MEASURED_BATCHES]
            outputs = [workload.run(batch) for batch in batches]
            return [workload.judged.tensors(output) for output in outputs]
    finally:
        model.train(training)


def calibration_workload(
    model: nn.Module | Workload,
    batches: Iterable[Any] | None,
    forward: Callable[[nn.Module, Any], Any] | None,
) -> Workload:
    """Return a workload with data: that of a model, or one with other batches.

    Raises ``QuantizationError`` without data. NaN and Inf in them (labels where there is
    nothing to label, say) are judged where they reach an operator.
    """
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable | None):
        raise wrong_type("batches", batches, "a list of the model's inputs")
    collected = None if batches is None else list(batches)
    if isinstance(model, Workload):
        workload = model if collected is None else with_batches(model, collected)
    elif collected:
        workload = Workload(model, collected, forward=forward)
    else:
        raise no_data("quantize")
    if not workload.batches:
        raise no_data(workload.name)
    return workload


def with_batches(workload: Workload, batches: Sequence[Any]) -> Workload:
    """Return the same workload with other batches."""
    twin = workload.with_model(workload.model)
    twin.batches = list(batches)
    return twin


def copy_model(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode that shares nothing with the model.

    Weights that modules compute of others are parameters of the copy.
    """
    memo = {id(tensor): tensor.detach().clone() for tensor in computed_tensors(model)}
    try:
        copied = copy.deepcopy(model, memo).eval()
    # tensors with a history, locks, open files
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise QuantizationError(
            "the model cannot be copied",
            where=type(model).__name__,
            got=str(error).partition(". ")[0],
            expected="a module that copy.deepcopy takes",
            do="make the module forget what cannot be copied: locks, open files, "
            "tensors that it computed and keeps in lists",
        ) from error
    store_computed_weights_(copied)
    return copied


def check_weights(model: QuantizedModel) -> None:
    """Raise ``QuantizationError`` for weights that cannot become codes.

    They have to be finite, in a precision in which a scale times a code is a value of
    the grid.
    """
    for name in model.weight_names():
        weight = model.model.get_parameter(name)
        if weight.dtype not in (torch.float32, torch.float64):
            raise QuantizationError(
                "the model's weights are no fp32",
                where=name,
                expected="float32 or float64",
                got=str(weight.dtype).removeprefix("torch."),
                do="give model.float(), and data in float32",
            )
        bad = int((~weight.detach().isfinite()).sum())
        if bad:
            raise QuantizationError(
                f"{bad} of {weight.numel()} weights are NaN or Inf",
                where=name,
                expected="finite weights",
                do="load or train the model again",
            )
