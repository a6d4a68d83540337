"""Rescale channel groups, and leave each one out that changes what the model computes.

The law that a factor obeys on its way is known from the operators of one run
(``follow``); code that reads values otherwise (a constant written between channels, a
table that a channel's value looks up) shows in the output alone. So the output is
compared, once for all groups, and group by group where it changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from roundoff.plan import noise
from roundoff.preserve import preserve
from roundoff.quantize.calibration import Calibration
from roundoff.quantize.channels.rescale import rescale_
from roundoff.quantize.model import Rescaling, Unquantized

#: The relative noise power of the output that rescaling may make: -60 dB. Rounding in
#: fp32 leaves less than -100 dB, and what a format of eight bits costs is above -60 dB.
SAME_OUTPUT = 1e-6


@torch.no_grad()
def rescale_alike_(
    calibration: Calibration, rescalings: Sequence[Rescaling]
) -> list[Rescaling]:
    """Rescale groups of channels in place, and note them in ``model.rescalings``.

    Returns those that were left out, since the output on the first batch changed.
    """
    exact = _outputs(calibration)
    kept, tensors = _kept(calibration, rescalings)
    for rescaling in rescalings:
        _rescale_(calibration, rescaling)
    if _alike(calibration, exact):
        calibration.model.rescalings += rescalings
        return []
    _restore_(tensors, kept)
    left = []
    for rescaling in rescalings:
        kept, tensors = _kept(calibration, [rescaling])
        _rescale_(calibration, rescaling)
        if _alike(calibration, exact):
            calibration.model.rescalings.append(rescaling)
        else:
            _restore_(tensors, kept)
            left.append(rescaling)
    return left


def _rescale_(calibration: Calibration, rescaling: Rescaling) -> None:
    model = calibration.model.model
    rescale_(model, rescaling.group, rescaling.factors, clips=rescaling.clips)


def _kept(
    calibration: Calibration, rescalings: Sequence[Rescaling]
) -> tuple[list[Tensor], list[Tensor]]:
    """Copies of the tensors that rescaling writes, and these tensors."""
    model = calibration.model.model
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    bindings = [b for rescaling in rescalings for b in rescaling.group.bindings]
    written = [tensors[name] for name in dict.fromkeys(b.name for b in bindings)]
    return [tensor.detach().clone() for tensor in written], written


def _restore_(tensors: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    for tensor, copy in zip(tensors, kept, strict=True):
        tensor.copy_(copy)


def _outputs(calibration: Calibration) -> list[dict[str, Tensor]]:
    """The unquantized outputs on the first batch, from the same random state each time."""
    model = calibration.model
    with preserve(model), model.through(Unquantized()):
        return calibration.outputs(calibration.batches[:1])


def _alike(calibration: Calibration, exact: list[dict[str, Tensor]]) -> bool:
    """Return True where the output is as before, up to rounding, also without signal."""
    outputs = _outputs(calibration)
    error = noise(outputs, exact)
    if error <= SAME_OUTPUT:
        return True
    pairs = zip(outputs, exact, strict=True)
    return all(_equal(after, before) for after, before in pairs)


def _equal(after: dict[str, Tensor], before: dict[str, Tensor]) -> bool:
    return after.keys() == before.keys() and all(
        torch.equal(after[name], before[name]) for name in before
    )
