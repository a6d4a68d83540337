"""A training step under a plan, simulated: every site rounds what it reads and writes,
forward and backward.

Values are rounded where ``roundoff.autocast`` would cast them, in fp32 arithmetic, so any
format runs on any device and the result is the same on all: it is what the predictions of
a budget of gradients are about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from roundoff.errors import WorkloadError
from roundoff.formats import Format, parse_format
from roundoff.ops import Call, Operand, autocast_class, numbers_of, runs, watch
from roundoff.plan import Plain
from roundoff.preserve import preserve
from roundoff.train.autocast.simulate import simulated
from roundoff.workload import Workload


class SimulatedFormats(Plain):
    """The handler that runs each site in its format in training, straight-through.

    ``formats`` maps sites to formats; sites without one run as they are.
    """

    def __init__(self, formats: Mapping[str, Format]) -> None:
        super().__init__()
        self.formats = formats

    def format_of(self, call: Call) -> Format | None:
        """Return the format of this call; None leaves it as it is."""
        fmt = self.formats.get(str(call.site))
        if fmt is None or runs(call, fmt) is not None:
            return None
        return fmt

    def run(self, call: Call) -> Any:
        """Run the call in the format of its site; an in-place operator writes it."""
        fmt = self.format_of(call)
        return call.run() if fmt is None else simulated(call, fmt)


class SimulatedAutocast(SimulatedFormats):
    """The handler that runs every call as torch.autocast for ``fmt`` would on
    ``device``, by its built-in lists.

    ``chosen`` maps the sites that ran in the format to its name: those on the list for
    it, and those on no list whose inputs all came in it. In-place operators keep the
    format of the tensor they write into.
    """

    def __init__(self, fmt: Format, device: str) -> None:
        super().__init__({})
        self.fmt = fmt
        self.device = device
        self.chosen: dict[str, str] = {}

    def format_of(self, call: Call) -> Format | None:
        """Return the format of this call under autocast."""
        listing = autocast_class(call.operator.name, self.device)
        is_lower = listing == "lower"
        if call.operator.inplace or listing in ("follow", "promote"):
            is_lower = self._arrives_lower(call)
        if not is_lower:
            return None
        self.chosen[str(call.site)] = self.fmt.name
        return self.fmt

    def _arrives_lower(self, call: Call) -> bool:
        """Return True if every input comes in the format.

        Parameters are in fp32; only normalization takes them beside lower inputs.
        """
        activations = [o for o in call.operands if o.role == "activation"]
        if call.operator.inplace:
            activations = [o for o in activations if o.leaf == 0]
        elif call.kind != "normalization" and len(activations) < len(call.operands):
            return False
        return bool(activations) and all(map(self._is_lower, activations))

    def _is_lower(self, operand: Operand) -> bool:
        """Return True if an operand was made by sites that ran in the format alone."""
        return bool(operand.sources) and operand.sources <= self.chosen.keys()


@dataclass(frozen=True)
class BatchGradients:
    """The loss and the parameter gradients of one batch.

    Attributes:
        loss: the loss.
        weights: name of a parameter -> its gradient; without those that are None.
    """

    loss: float
    weights: dict[str, Tensor]

    @property
    def are_finite(self) -> bool:
        """True if no gradient holds NaN or Inf."""
        return all(numbers_of([g.isfinite().all() for g in self.weights.values()]))


def gradients_of(
    workload: Workload,
    formats: Mapping[str, str] | SimulatedFormats | None = None,
    *,
    batches: int | None = None,
    seed: int = 0,
    scale: float = 1.0,
) -> list[BatchGradients]:
    """Compute loss and gradients of the first ``batches`` batches in training mode.

    ``formats`` (site to format, or a handler) are applied. Each batch starts from the
    same random state, so that dropout falls the same way in every call. The loss is
    multiplied by ``scale`` for the backward pass, and the gradients divided by it. The
    model is left as it was.
    """
    if not isinstance(formats, SimulatedFormats):
        parsed = {site: parse_format(name) for site, name in (formats or {}).items()}
        formats = SimulatedFormats(parsed)
    gradients = []
    with preserve(workload.model):
        workload.model.train()
        with watch(workload.model, formats) as mode:
            for index, batch in enumerate(workload.batches[:batches]):
                torch.manual_seed(seed + index)
                mode.begin()
                with torch.enable_grad(), mode:
                    loss = loss_of(workload, batch)
                gradients.append(backward(workload, loss, scale))
    return gradients


def backward(workload: Workload, loss: Tensor, scale: float = 1.0) -> BatchGradients:
    """Compute the gradients from ``scale`` times the loss and divide them by it.

    ``.grad`` is not touched.
    """
    weights = trainable(workload)
    values: tuple[Tensor | None, ...] = torch.autograd.grad(
        loss * scale, list(weights.values()), allow_unused=True
    )
    gradients = {
        name: value / scale
        for name, value in zip(weights, values, strict=True)
        if value is not None
    }
    return BatchGradients(float(loss.detach()), gradients)


def loss_of(workload: Workload, batch: Any) -> Tensor:
    """Compute the loss of one batch, shape ``()``.

    Raises ``WorkloadError`` where the workload has none, or it is not one number.
    """
    if workload.loss is None:
        raise no_loss(workload)
    loss: Any = workload.loss(workload.run(batch), batch)
    if not isinstance(loss, Tensor):
        raise _not_one_number(workload, repr(type(loss)))
    if loss.numel() != 1 or not loss.is_floating_point():
        raise _not_one_number(workload, f"{loss.dtype}, shape {tuple(loss.shape)}")
    number: Tensor = loss.reshape(())
    return number


def no_loss(workload: Workload) -> WorkloadError:
    """Return the error for a workload without a loss."""
    return WorkloadError(
        "the workload has no loss",
        where=workload.name,
        expected="loss(output, batch)",
        do="define loss(output, batch) in the workload: tuning needs its gradients",
    )


def _not_one_number(workload: Workload, got: str) -> WorkloadError:
    return WorkloadError(
        "the loss is not one number",
        where=f"{workload.name}, loss",
        expected="a floating-point tensor of one element",
        got=got,
        do="take its mean",
    )


def trainable(workload: Workload) -> dict[str, nn.Parameter]:
    """Return the parameters that have gradients, by name.

    Raises ``WorkloadError`` where there are none.
    """
    named = workload.model.named_parameters()
    parameters = {name: p for name, p in named if p.requires_grad}
    if not parameters:
        raise WorkloadError(
            "the model has no trainable parameters",
            where=workload.name,
            expected="parameters with requires_grad",
            do="unfreeze what is to be trained",
        )
    return parameters
