"""A training step under a plan, simulated: every site rounds what it reads and writes, forward and backward.

Values are rounded where ``roundoff.autocast`` would cast them, in fp32 arithmetic, so any format runs on any device and the
result is the same on all: it is what the predictions of a budget of gradients are about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from roundoff.errors import WorkloadError
from roundoff.formats import Format, parse_format
from roundoff.ops import Call, listed, round_operand, round_output, runs, watch
from roundoff.plan import Plain
from roundoff.preserve import preserve
from roundoff.train.autocast.simulate import straight
from roundoff.workload import Workload


class Straight(Plain):
    """The handler that runs each site in its format in training: straight through for what rounding has no gradient."""

    def __init__(self, formats: Mapping[str, Format]) -> None:
        super().__init__()
        self.formats = formats

    def format_of(self, call: Call) -> Format | None:
        """The format of this call; None leaves it as it is."""
        fmt = self.formats.get(str(call.site))
        return None if fmt is None or runs(call, fmt) is not None else fmt

    def run(self, call: Call) -> Any:
        """The call's result in the format of its site; an in-place operator writes it."""
        fmt = self.format_of(call)
        rule = None if fmt is None else fmt.execution
        if fmt is None or rule is None:
            return call.run()
        leaves = list(call.leaves)
        for operand in call.operands:
            how = rule.activation if operand.role == "activation" else rule.weight
            if how is not None and (operand.role != "bias" or rule.bias):
                x = leaves[operand.leaf]
                leaves[operand.leaf] = straight(
                    x, round_operand(x, operand, fmt), fmt, written=True
                )
        result = call.again(leaves)
        result = tree_map(lambda y: _output(y, fmt) if _floating(y) else y, result)
        return call.leaves[0].copy_(result) if call.operator.inplace else result


def _output(y: Tensor, fmt: Format) -> Tensor:
    rule = fmt.execution
    rounded = round_output(y, fmt) if rule is not None and rule.output else y
    return straight(y, rounded, fmt)


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


class Autocast(Straight):
    """The handler that runs every call as torch.autocast for ``fmt`` would on ``device``, by its built-in lists.

    ``chosen`` holds the sites that ran in the format: those on the list for it, and those on no list whose inputs all came
    in it. In-place operators keep the format of the tensor they write into.
    """

    def __init__(self, fmt: Format, device: str) -> None:
        super().__init__({})
        self.fmt, self.device = fmt, device
        self.chosen: dict[str, str] = {}

    def format_of(self, call: Call) -> Format | None:
        """The format of this call under autocast."""
        kind = listed(call.operator.name, self.device)
        lower = (
            self._arrives(call)
            if call.operator.inplace or kind in ("follow", "promote")
            else kind == "lower"
        )
        if lower:
            self.chosen[str(call.site)] = self.fmt.name
        return self.fmt if lower else None

    def _arrives(self, call: Call) -> bool:
        """Whether every input comes in the format. Parameters are in fp32, and of those only batch_norm takes both."""
        operands = [o for o in call.operands if o.role == "activation"]
        if call.operator.inplace:
            operands = [o for o in operands if o.leaf == 0]
        elif call.kind != "normalization" and len(operands) < len(call.operands):
            return False
        return bool(operands) and all(
            o.sources and all(s in self.chosen for s in o.sources) for o in operands
        )


@dataclass(frozen=True)
class Gradients:
    """The loss and the parameter gradients (by name; those that are None left out) of one batch."""

    loss: float
    weights: dict[str, Tensor]


def gradients_of(
    workload: Workload,
    formats: Mapping[str, str] | Straight | None = None,
    *,
    batches: int | None = None,
    seed: int = 0,
    scale: float = 1.0,
) -> list[Gradients]:
    """Loss and gradients of the first ``batches`` batches in training mode, with ``formats`` (site to format, or a
    handler) applied. Each batch starts from the same random state, so that dropout falls the same way in every call.
    The loss is multiplied by ``scale`` for the backward pass, and the gradients divided by it. The model is left as it was.
    """
    if not isinstance(formats, Straight):
        formats = Straight(
            {site: parse_format(name) for site, name in (formats or {}).items()}
        )
    found = []
    with preserve(workload.model):
        workload.model.train()
        with watch(workload.model, formats) as mode:
            for index, batch in enumerate(workload.batches[:batches]):
                torch.manual_seed(seed + index)
                mode.begin()
                with torch.enable_grad(), mode:
                    loss = loss_of(workload, batch)
                found.append(backward(workload, loss, scale))
    return found


def backward(workload: Workload, loss: Tensor, scale: float = 1.0) -> Gradients:
    """The gradients of a loss, computed from ``scale`` times the loss and divided by it; ``.grad`` is not touched."""
    weights = trainable(workload)
    values: tuple[Tensor | None, ...] = torch.autograd.grad(
        loss * scale, list(weights.values()), allow_unused=True
    )
    return Gradients(
        float(loss.detach()),
        {n: g / scale for n, g in zip(weights, values, strict=True) if g is not None},
    )


def loss_of(workload: Workload, batch: Any) -> Tensor:
    """The loss of one batch. Raises ``WorkloadError`` where the workload has none, or it is not one number."""
    if workload.loss is None:
        raise WorkloadError(
            "the workload has no loss",
            where=workload.name,
            expected="loss(output, batch)",
            do="define loss(output, batch) in the workload: tuning needs its gradients",
        )
    loss: Any = workload.loss(workload.run(batch), batch)
    if (
        not isinstance(loss, Tensor)
        or loss.numel() != 1
        or not loss.is_floating_point()
    ):
        raise WorkloadError(
            "the loss is not one number",
            where=f"{workload.name}, loss",
            expected="a floating-point tensor of one element",
            got=f"{loss.dtype}, shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else repr(type(loss)),
            do="take its mean",
        )
    found: Tensor = loss.reshape(())
    return found


def trainable(workload: Workload) -> dict[str, nn.Parameter]:
    """The parameters that have gradients, by name. Raises ``WorkloadError`` where there are none."""
    found = {
        name: p for name, p in workload.model.named_parameters() if p.requires_grad
    }
    if not found:
        raise WorkloadError(
            "the model has no trainable parameters",
            where=workload.name,
            expected="parameters with requires_grad",
            do="unfreeze what is to be trained",
        )
    return found
